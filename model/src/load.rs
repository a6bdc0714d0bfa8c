//! Models from folders, as Hugging Face lays them out.

mod config;
mod fingerprint;
mod tensors;
mod text;

use std::io;
use std::path::{Path, PathBuf};

use crate::{ChatTemplate, Loaded, Tokenizer, Unloaded};

/// Reasons why a model cannot be loaded from its folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file that must be there is not.
    #[error("{path} does not exist; {advice}")]
    Missing {
        /// The file.
        path: PathBuf,
        /// Advice.
        advice: &'static str,
    },
    /// A file cannot be read.
    #[error("cannot read {path}: {error}; it must be a readable file")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        error: io::Error,
    },
    /// A file cannot be parsed.
    #[error("{path} cannot be parsed: {problem}; download it again")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A file that git-lfs has not fetched.
    #[error(
        "{path} is only a git-lfs pointer: run `git lfs pull` in its folder, or download the file \
         itself"
    )]
    LfsPointer {
        /// The file.
        path: PathBuf,
    },
    /// A model of another architecture.
    #[error(
        "{path}: {problem}; models of the architectures LlamaForCausalLM, MistralForCausalLM, \
         Qwen2ForCausalLM and Qwen3ForCausalLM (model_type llama, mistral, qwen2 and qwen3) can be loaded"
    )]
    Architecture {
        /// The file.
        path: PathBuf,
        /// Description of the unsupported feature.
        problem: String,
    },
    /// A model that needs what is not supported.
    #[error(
        "{path}: {problem}; models of the kinds Llama, Mistral, Qwen2 and Qwen3 can be loaded, with \
         weights in f32, f16 or bf16"
    )]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// Description of the unsupported feature.
        problem: String,
    },
    /// Sizes that no model has.
    #[error("{path}: {problem}; the file is damaged or not part of a model")]
    Size {
        /// The file.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// Files that do not belong together.
    #[error(
        "{path}: {problem}; the files in the folder belong to different models, download them again"
    )]
    Mismatch {
        /// The file that does not fit.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
    /// A chat template that cannot be used.
    #[error("the chat template in {path} is wrong: {problem}; a chat_template.jinja replaces it")]
    ChatTemplate {
        /// The file with the template.
        path: PathBuf,
        /// Description of the problem.
        problem: String,
    },
}

/// Loads the model of a folder, to be computed by this number of CPU threads.
///
/// # Errors
/// See [`open`].
pub fn load(folder: &Path, threads: usize) -> Result<Loaded, LoadError> {
    Ok(open(folder)?.on_cpu(threads))
}

/// Opens the model of a folder without reading all of its weights.
///
/// The folder has `config.json`, `tokenizer.json`, and the weights in `model.safetensors` or in the
/// shards that `model.safetensors.index.json` names; `generation_config.json`, `tokenizer_config.json`
/// and `chat_template.jinja` are looked at where they exist.
///
/// # Errors
/// Fails if a file is missing, damaged or not supported; the error names the file and gives advice.
pub fn open(folder: &Path) -> Result<Unloaded, LoadError> {
    let config = config::read_config(folder)?;
    let tensors = tensors::open(folder, &config.shape)?;
    let text = text::read_text(folder, &config)?;
    let named = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let name = named.file_name().map_or("model".into(), |name| name.to_string_lossy());
    Ok(Unloaded {
        shape: config.shape,
        weights: Box::new(tensors),
        tokenizer: text.tokenizer,
        chat: text.chat,
        stop_tokens: text.stop_tokens,
        name: name.into_owned(),
    })
}

/// The tokenizer of a folder, which needs to have nothing but `tokenizer.json`.
///
/// # Errors
/// Fails if it is missing or damaged; the error names the file and gives advice.
pub fn load_tokenizer(folder: &Path) -> Result<Tokenizer, LoadError> {
    text::read_any_tokenizer(&folder.join("tokenizer.json"))
}

/// Loads the tokenizer and the chat template of a folder, whose model may be of any architecture. The folder needs to
/// have nothing but `tokenizer.json`.
///
/// # Errors
/// Fails if a file is missing or damaged; the error names it and gives advice.
pub fn load_prompting(folder: &Path) -> Result<(Tokenizer, ChatTemplate), LoadError> {
    Ok((load_tokenizer(folder)?, text::read_chat(folder)?.0))
}

/// The largest file besides the weights: far more than any tokenizer has.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// The bytes of a file that need not exist.
fn read_if_any(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    let too_large = |size: u64| LoadError::Malformed {
        path: path.to_owned(),
        problem: format!("it has {size} bytes, more than the maximum of {TEXT_BYTES_MAX}"),
    };
    match std::fs::metadata(path).map(|file| file.len()) {
        Ok(size) if size > TEXT_BYTES_MAX => return Err(too_large(size)),
        Ok(_) | Err(_) => {}
    }
    match std::fs::read(path) {
        Ok(bytes) if is_lfs_pointer(&bytes) => Err(LoadError::LfsPointer { path: path.to_owned() }),
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(LoadError::Read { path: path.to_owned(), error }),
    }
}

/// Returns whether a file is a pointer of git-lfs instead of the content, because git-lfs was missing or told not
/// to fetch it.
fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs.github.com/spec/")
}

/// The bytes of a file that must exist.
fn read(path: &Path, advice: &'static str) -> Result<Vec<u8>, LoadError> {
    read_if_any(path)?.ok_or_else(|| LoadError::Missing { path: path.to_owned(), advice })
}

/// Parses the JSON of a file.
fn parse<T: serde::de::DeserializeOwned>(path: &Path, json: &[u8]) -> Result<T, LoadError> {
    let mut parts = serde_json::Deserializer::from_slice(json);
    let told = serde_path_to_error::deserialize(&mut parts).map_err(|error| error.to_string());
    let told = told.and_then(|told| parts.end().map(|()| told).map_err(|error| error.to_string()));
    told.map_err(|problem| LoadError::Malformed { path: path.to_owned(), problem })
}
