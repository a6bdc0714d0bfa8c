//! The files about text: tokenizer, chat template, and which tokens end an answer.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use terrace_cache::Token;

use super::config::{Config, TokenIds};
use super::{LoadError, parse, read, read_if_any};
use crate::{ChatTemplate, Tokenizer};

/// The contents of these files.
#[derive(Debug)]
pub(super) struct Text {
    pub(super) tokenizer: Tokenizer,
    pub(super) chat: ChatTemplate,
    pub(super) stop_tokens: Vec<Token>,
}

#[derive(Debug, Default, Deserialize)]
struct TokenizerConfig {
    bos_token: Option<SpecialToken>,
    eos_token: Option<SpecialToken>,
    chat_template: Option<Templates>,
}

/// A special token's string, alone or with how it is recognised.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum SpecialToken {
    Text(String),
    Described { content: String },
}

impl SpecialToken {
    fn into_text(self) -> String {
        match self {
            Self::Text(content) | Self::Described { content } => content,
        }
    }
}

/// One template, or several with names.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Debug, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<TokenIds>,
}

/// Reads the files about text.
pub(super) fn read_text(folder: &Path, config: &Config) -> Result<Text, LoadError> {
    let tokenizer = read_tokenizer(&folder.join("tokenizer.json"), config)?;
    let (chat, end) = read_chat(folder)?;
    let stop_tokens = read_stop_tokens(folder, config, tokenizer.token_of(&end))?;
    Ok(Text { tokenizer, chat, stop_tokens })
}

/// The chat template of a folder, and the text of the token that ends its answers.
pub(super) fn read_chat(folder: &Path) -> Result<(ChatTemplate, String), LoadError> {
    let path = folder.join("tokenizer_config.json");
    let settings: TokenizerConfig = match read_if_any(&path)? {
        Some(json) => parse(&path, &json)?,
        None => TokenizerConfig::default(),
    };
    let begin = settings.bos_token.map(SpecialToken::into_text).unwrap_or_default();
    let end = settings.eos_token.map(SpecialToken::into_text).unwrap_or_default();
    let chat = match template(folder, path, settings.chat_template)? {
        Some(Template { path, source, for_tools }) => {
            ChatTemplate::jinja(source, for_tools, begin, end.clone())
                .map_err(|problem| LoadError::ChatTemplate { path, problem })?
        }
        None => ChatTemplate::missing(),
    };
    Ok((chat, end))
}

/// The tokenizer of a file, for whatever model it is.
pub(super) fn read_any_tokenizer(path: &Path) -> Result<Tokenizer, LoadError> {
    let json = read(path, "models need one; other kinds of tokenizer files are not supported")?;
    Tokenizer::from_json(&json)
        .map_err(|problem| LoadError::Malformed { path: path.to_owned(), problem })
}

fn read_tokenizer(path: &Path, config: &Config) -> Result<Tokenizer, LoadError> {
    let tokenizer = read_any_tokenizer(path)?;
    let (tokens, vocabulary) = (tokenizer.vocabulary(), config.shape.vocabulary);
    if tokens > vocabulary {
        let problem = format!("it has {tokens} tokens, but the model has only {vocabulary}");
        return Err(LoadError::Mismatch { path: path.to_owned(), problem });
    }
    Ok(tokenizer)
}

/// A template, and perhaps another for conversations with tools.
struct Template {
    path: PathBuf,
    source: String,
    for_tools: Option<String>,
}

/// The template of a folder. A separate file takes precedence over a setting.
fn template(
    folder: &Path,
    settings_path: PathBuf,
    setting: Option<Templates>,
) -> Result<Option<Template>, LoadError> {
    let path = folder.join("chat_template.jinja");
    if let Some(source) = read_if_any(&path)? {
        return match String::from_utf8(source) {
            Ok(source) => Ok(Some(Template { path, source, for_tools: None })),
            Err(error) => Err(LoadError::ChatTemplate { path, problem: error.to_string() }),
        };
    }
    let path = settings_path;
    Ok(match setting {
        None => None,
        Some(Templates::One(source)) => Some(Template { path, source, for_tools: None }),
        Some(Templates::Named(mut named)) => {
            let mut take = |name: &str| {
                let place = named.iter().position(|named| named.name == name)?;
                Some(named.swap_remove(place).template)
            };
            let for_tools = take("tool_use");
            take("default").map(|source| Template { path, source, for_tools })
        }
    })
}

/// The tokens that end an answer: as `generation_config.json` says, else as `config.json` says, else
/// the one that the tokenizer ends texts with.
fn read_stop_tokens(
    folder: &Path,
    config: &Config,
    end: Option<Token>,
) -> Result<Vec<Token>, LoadError> {
    let path = folder.join("generation_config.json");
    let told = match read_if_any(&path)? {
        Some(json) => parse::<GenerationConfig>(&path, &json)?.eos_token_id,
        None => None,
    };
    let (path, tokens) = match told {
        Some(tokens) => (path, tokens.into_vec()),
        None if config.stop_tokens.is_empty() => (path, Vec::from_iter(end)),
        None => (config.path.clone(), config.stop_tokens.clone()),
    };
    let vocabulary = config.shape.vocabulary;
    match tokens.iter().find(|token| **token as usize >= vocabulary) {
        Some(token) => {
            let problem =
                format!("eos_token_id is {token}, but the model has only {vocabulary} tokens");
            Err(LoadError::Mismatch { path, problem })
        }
        None => Ok(tokens),
    }
}
