//! Parameters of a request, read from its JSON and checked.

use serde::Deserialize;
use serde_json::Value;
use terrace_engine::Sampling;
use terrace_scheduler::Token;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::config::Limits;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::logprobs::Scoring;
use crate::messages::{self, Chat};
use crate::refused::refuse_the_rest;
use crate::sampling_fields::Choosing;
use crate::structured::Structure;
use crate::truncation::Truncation;

/// Parameters of a request.
#[derive(Clone, Debug)]
pub(crate) struct Parameters {
    pub(crate) model: Option<String>,
    pub(crate) input: Input,
    /// Maximum number of output tokens. Without it, the default depends on the kind of request.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) choosing: Choosing,
    pub(crate) seed: u64,
    pub(crate) stops: Vec<String>,
    /// Answers to each prompt.
    pub(crate) n: u32,
    pub(crate) stream: bool,
    pub(crate) tells_usage: TellsUsage,
    pub(crate) cache_salt: String,
    pub(crate) priority: i32,
    pub(crate) logits_checksum: bool,
    pub(crate) ignore_eos: bool,
    /// Log-probabilities to return.
    pub(crate) scoring: Option<Scoring>,
    /// Whether the prompt is part of the answer.
    pub(crate) echo: bool,
    /// Constraint on the answer.
    pub(crate) structure: Option<Structure>,
    /// Whether the tokenizer adds its special tokens around prompts.
    pub(crate) add_special_tokens: bool,
    pub(crate) truncation: Truncation,
}

/// When a stream says what the answers have taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TellsUsage {
    Never,
    /// In a chunk after all others.
    AtTheEnd,
    /// In every chunk, as far as it is known, and at the end.
    AllAlong,
}

/// Prompts or a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    Prompts(Vec<Prompt>),
    Chat(Box<Chat>),
}

/// One prompt of a completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<Token>),
}

/// The two kinds of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Completion,
    Chat,
}

impl Parameters {
    /// # Errors
    /// The first field that is wrong, or that asks for what this server cannot do.
    pub(crate) fn parse(kind: Kind, json: &[u8], limits: &Limits) -> Result<Self, ApiError> {
        Self::read(kind, Fields::parse(json)?, limits)
    }

    /// # Errors
    /// As for [`Parameters::parse`].
    pub(crate) fn read(kind: Kind, mut fields: Fields, limits: &Limits) -> Result<Self, ApiError> {
        refuse_unsupported(&mut fields)?;
        let mut forced_calls = None;
        let input = match kind {
            Kind::Completion => {
                messages::refuse_chat_fields(&mut fields)?;
                Input::Prompts(prompts(fields.take("prompt"), limits)?)
            }
            Kind::Chat => {
                let mut chat = Chat::parse(&mut fields)?;
                forced_calls = chat.forced_calls.take();
                Input::Chat(Box::new(chat))
            }
        };
        let stream = fields.flag("stream")?;
        let echo = match kind {
            Kind::Completion => fields.flag("echo")?,
            Kind::Chat => false,
        };
        // With nothing but the prompt to answer there may be nothing new.
        let whole = i64::from(!echo)..=i64::from(u32::MAX);
        let max_tokens = fields.integer("max_tokens", whole.clone())?;
        let max_completion_tokens = fields.integer("max_completion_tokens", whole)?;
        let max_tokens = max_completion_tokens.or(max_tokens).map(|max| max as u32);
        let parameters = Self {
            model: fields.text("model")?,
            input,
            max_tokens,
            choosing: Choosing::parse(&mut fields)?.for_max_tokens(max_tokens),
            seed: match fields.integer("seed", i64::MIN..=i64::MAX)? {
                Some(seed) => seed.cast_unsigned(),
                None => random(),
            },
            stops: stops(fields.take("stop"), limits)?,
            n: fields.integer("n", 1..=i64::from(limits.n_max))?.unwrap_or(1) as u32,
            stream,
            tells_usage: tells_usage(&mut fields, stream)?,
            cache_salt: cache_salt(&mut fields)?,
            priority: fields
                .integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?
                .unwrap_or(0) as i32,
            logits_checksum: fields.flag("logits_checksum")?,
            ignore_eos: fields.flag("ignore_eos")?,
            scoring: Scoring::parse(kind, &mut fields)?,
            echo,
            structure: Structure::only(forced_calls, Structure::parse(&mut fields)?)?,
            add_special_tokens: fields.flag_or("add_special_tokens", true)?,
            truncation: Truncation::parse(&mut fields)?,
        };
        refuse_the_rest(fields, parameters.n)?;
        Ok(parameters)
    }

    /// Returns the sampling of one of the answers to a prompt.
    pub(crate) fn sampling(&self, choice: u32) -> Sampling {
        self.choosing.sampling(xxh3_64_with_seed(&choice.to_le_bytes(), self.seed))
    }
}

/// A number that nobody can foretell.
pub(crate) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// Refuses what would change the answer and is not there.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    let is_empty = |value: &Value| match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    };
    fields.refuse_unless("functions", is_empty)?;
    fields.refuse_unless("function_call", |value| *value == "none")?;
    fields.refuse_unless("modalities", |value| *value == serde_json::json!(["text"]))?;
    fields.refuse_unless("audio", |_| false)
}

fn prompts(value: Option<Value>, limits: &Limits) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || {
        let shapes = "a string, a list of strings, a list of tokens or a list of such lists";
        ApiError::field("prompt", format!("`prompt` must be {shapes}"))
    };
    let prompts = match value {
        None => return Err(ApiError::field("prompt", "`prompt` is missing")),
        Some(Value::String(text)) => vec![Prompt::Text(text)],
        Some(Value::Array(items)) if items.first().is_some_and(Value::is_number) => {
            vec![Prompt::Tokens(tokens(&items).ok_or_else(wrong)?)]
        }
        Some(Value::Array(items)) if !items.is_empty() => {
            if items.len() > limits.prompts_max {
                let message = format!("a request may have at most {} prompts", limits.prompts_max);
                return Err(ApiError::field("prompt", message));
            }
            let prompt = |item| match item {
                Value::String(text) => Some(Prompt::Text(text)),
                Value::Array(items) => tokens(&items).map(Prompt::Tokens),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => None,
            };
            items.into_iter().map(prompt).collect::<Option<_>>().ok_or_else(wrong)?
        }
        Some(_) => return Err(wrong()),
    };
    Ok(prompts)
}

pub(crate) fn tokens(items: &[Value]) -> Option<Vec<Token>> {
    items.iter().map(|item| item.as_u64().and_then(|token| Token::try_from(token).ok())).collect()
}

fn stops(value: Option<Value>, limits: &Limits) -> Result<Vec<String>, ApiError> {
    const STOPS_MAX: usize = 4;
    let wrong = || {
        let message = format!("`stop` must be a string or up to {STOPS_MAX} of them, none empty");
        ApiError::field("stop", message)
    };
    let stops: Vec<String> = match value {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(items)) => {
            let stop = |item: Value| item.as_str().map(str::to_owned);
            items.into_iter().map(stop).collect::<Option<_>>().ok_or_else(wrong)?
        }
        Some(_) => return Err(wrong()),
    };
    if stops.len() > STOPS_MAX || stops.iter().any(String::is_empty) {
        return Err(wrong());
    }
    if stops.iter().any(|stop| stop.len() > limits.stop_bytes_max) {
        let message = format!("a stop string may have at most {} bytes", limits.stop_bytes_max);
        return Err(ApiError::field("stop", message));
    }
    Ok(stops)
}

/// Options of a stream.
#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

fn tells_usage(fields: &mut Fields, stream: bool) -> Result<TellsUsage, ApiError> {
    let Some(options) = fields.typed::<Option<StreamOptions>>("stream_options")? else {
        return Ok(TellsUsage::Never);
    };
    if !stream {
        return Err(ApiError::field("stream_options", "`stream_options` is for streams only"));
    }
    let is_set = |flag: Option<bool>| flag.unwrap_or_default();
    Ok(match (is_set(options.include_usage), is_set(options.continuous_usage_stats)) {
        (false, _) => TellsUsage::Never,
        (true, false) => TellsUsage::AtTheEnd,
        (true, true) => TellsUsage::AllAlong,
    })
}

fn cache_salt(fields: &mut Fields) -> Result<String, ApiError> {
    const SALT_BYTES_MAX: usize = 256;
    let salt = fields.text("cache_salt")?.unwrap_or_default();
    if salt.len() > SALT_BYTES_MAX {
        let message = format!("`cache_salt` may have at most {SALT_BYTES_MAX} bytes");
        return Err(ApiError::field("cache_salt", message));
    }
    Ok(salt)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn completion(value: Value) -> Result<Parameters, ApiError> {
        parse(Kind::Completion, &value)
    }

    fn parse(kind: Kind, value: &Value) -> Result<Parameters, ApiError> {
        Parameters::parse(kind, value.to_string().as_bytes(), &Limits::default())
    }

    fn with(name: &str, value: Value) -> Value {
        let mut request = json!({ "prompt": "x" });
        request[name] = value;
        request
    }

    #[test]
    fn defaults_are_those_of_openai() {
        let parameters = completion(json!({ "prompt": "x", "unknown": {}, "n": null })).unwrap();
        let sampling = parameters.sampling(0);
        assert_eq!((sampling.temperature, sampling.top_p, parameters.n), (1.0, 1.0, 1));
        assert_eq!((parameters.max_tokens, parameters.stream), (None, false));
        let other = completion(json!({ "prompt": "x" })).unwrap();
        assert_ne!(parameters.seed, other.seed, "no seed is a new one each time");
    }

    #[test]
    fn prompts_have_four_shapes() {
        let prompts = |prompt| completion(json!({ "prompt": prompt })).map(|p| p.input);
        let text = |text: &str| Prompt::Text(text.to_owned());
        let are = |prompts| Some(Input::Prompts(prompts));
        assert_eq!(prompts(json!("a")).ok(), are(vec![text("a")]));
        assert_eq!(prompts(json!(["a", "b"])).ok(), are(vec![text("a"), text("b")]));
        assert_eq!(prompts(json!([1, 2])).ok(), are(vec![Prompt::Tokens(vec![1, 2])]));
        let lists = vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])];
        assert_eq!(prompts(json!([[1], [2, 3]])).ok(), are(lists));
        for wrong in [json!([]), json!([1, "a"]), json!([-1]), json!([1.5]), json!({}), json!(1)] {
            assert_eq!(prompts(wrong.clone()).unwrap_err().param(), Some("prompt"), "{wrong}");
        }
        assert!(prompts(json!(vec!["a"; 65])).is_err());
    }

    #[test]
    fn an_error_names_the_field_that_is_wrong() {
        let wrong = [
            ("temperature", json!(-0.1)),
            ("temperature", json!("hot")),
            ("top_p", json!(1.1)),
            ("max_tokens", json!(0)),
            ("max_tokens", json!(1.5)),
            ("n", json!(17)),
            ("seed", json!("x")),
            ("stop", json!(["a", ""])),
            ("stop", json!(["a", "b", "c", "d", "e"])),
            ("stop", json!("x".repeat(257))),
            ("priority", json!(1_u64 << 40)),
            ("stream", json!("yes")),
            ("stream_options", json!({ "include_usage": true })),
            ("cache_salt", json!(1)),
            ("cache_salt", json!("x".repeat(257))),
            ("model", json!(7)),
        ];
        for (name, value) in wrong {
            let error = completion(with(name, value.clone())).unwrap_err();
            assert_eq!(error.param(), Some(name), "{value}");
        }
    }

    #[test]
    fn what_would_change_the_answer_is_refused_and_nothing_else() {
        let refused = [
            ("logprobs", json!(true)),
            ("tools", json!([{}])),
            ("tool_choice", json!("auto")),
            ("best_of", json!(2)),
            ("suffix", json!("x")),
        ];
        for (name, value) in refused {
            let error = completion(with(name, value)).unwrap_err();
            assert_eq!(error.param(), Some(name));
        }
        let harmless = [
            ("logprobs", json!(null)),
            ("logprobs", json!(false)),
            ("tools", json!([])),
            ("tool_choice", json!("none")),
            ("response_format", json!({ "type": "text" })),
            ("logit_bias", json!({})),
            ("best_of", json!(1)),
            ("presence_penalty", json!(0)),
            ("user", json!("somebody")),
        ];
        for (name, value) in harmless {
            assert!(completion(with(name, value)).is_ok(), "{name}");
        }
    }

    #[test]
    fn only_an_echo_may_have_nothing_new() {
        let none = json!({ "prompt": "x", "max_tokens": 0 });
        assert_eq!(completion(none.clone()).unwrap_err().param(), Some("max_tokens"));
        let mut echo = none;
        echo["echo"] = true.into();
        assert_eq!(completion(echo).unwrap().max_tokens, Some(0));
        let chat = json!({ "messages": [{ "role": "user", "content": "x" }], "echo": true });
        assert_eq!(parse(Kind::Chat, &chat).unwrap_err().param(), Some("echo"));
    }

    #[test]
    fn each_choice_has_a_seed_of_its_own_that_the_seed_decides() {
        let parameters = completion(with("seed", json!(-7))).unwrap();
        let again = completion(with("seed", json!(-7))).unwrap();
        assert_eq!(parameters.sampling(0), again.sampling(0));
        assert_ne!(parameters.sampling(0), parameters.sampling(1));
    }
}
