//! The fields of a request that say how tokens are chosen, and what of them is text.

use serde_json::Value;
use terrace_engine::{Sampling, Shaping};
use terrace_scheduler::Token;

use crate::error::ApiError;
use crate::fields::Fields;

/// As many tokens as a request may name in one field.
const TOKENS_MAX: usize = 1024;

/// How tokens are chosen, and what of them is text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Choosing {
    /// The seed is for each answer to have its own.
    sampling: Sampling,
    pub(crate) shaping: Shaping,
    /// Further tokens that end the answer.
    pub(crate) stop_tokens: Vec<Token>,
    /// Whether what ends the answer is part of it.
    pub(crate) keeps_stop: bool,
    /// Whether special tokens are part of the text.
    pub(crate) shows_special: bool,
}

impl Choosing {
    /// # Errors
    /// The first field that is wrong.
    pub(crate) fn parse(fields: &mut Fields) -> Result<Self, ApiError> {
        let number = |value: Option<f64>, default: f32| value.map_or(default, |value| value as f32);
        let plain = Shaping::default();
        let whole = i64::from(u32::MAX);
        let temperature = fields.number("temperature", 0.0..=2.0)?;
        let top_k = fields.integer("top_k", -1..=whole)?.unwrap_or(0);
        let top_p = fields.number("top_p", 0.0..=1.0)?;
        let min_p = fields.number("min_p", 0.0..=1.0)?;
        let presence_penalty = fields.number("presence_penalty", -2.0..=2.0)?;
        let frequency_penalty = fields.number("frequency_penalty", -2.0..=2.0)?;
        let repetition_penalty = fields.number("repetition_penalty", 0.01..=100.0)?;
        Ok(Self {
            sampling: Sampling {
                temperature: number(temperature, 1.0),
                // Both -1 and 0 stand for all.
                top_k: top_k.max(0) as u32,
                top_p: number(top_p, 1.0),
                min_p: number(min_p, 0.0),
                seed: 0,
            },
            shaping: Shaping {
                presence_penalty: number(presence_penalty, plain.presence_penalty),
                frequency_penalty: number(frequency_penalty, plain.frequency_penalty),
                repetition_penalty: number(repetition_penalty, plain.repetition_penalty),
                bias: logit_bias(fields.take("logit_bias"))?,
                min_tokens: fields.integer("min_tokens", 0..=whole)?.unwrap_or(0) as u32,
            },
            stop_tokens: stop_token_ids(fields.take("stop_token_ids"))?,
            keeps_stop: fields.flag("include_stop_str_in_output")?,
            shows_special: !fields.flag_or("skip_special_tokens", true)?,
        })
    }

    /// Lowers `min_tokens` for an answer of one token: proxies that ask only for a prefill set `max_tokens` to 1 and leave
    /// `min_tokens` as it was.
    pub(crate) fn for_max_tokens(mut self, max_tokens: Option<u32>) -> Self {
        if max_tokens == Some(1) {
            self.shaping.min_tokens = self.shaping.min_tokens.min(1);
        }
        self
    }

    /// Checks the fields against the length of the answer and the model's tokens.
    ///
    /// # Errors
    /// The first field that does not fit.
    pub(crate) fn check(&self, max_tokens: u32, vocabulary: usize) -> Result<(), ApiError> {
        let min_tokens = self.shaping.min_tokens;
        if min_tokens > max_tokens {
            let message = format!(
                "`min_tokens` is {min_tokens}, but the output may have only {max_tokens} tokens"
            );
            return Err(ApiError::field("min_tokens", message));
        }
        let is_unknown = |token: &&Token| **token as usize >= vocabulary;
        let biased: Vec<Token> = self.shaping.bias.iter().map(|(token, _)| *token).collect();
        for (name, tokens) in [("logit_bias", &biased), ("stop_token_ids", &self.stop_tokens)] {
            if let Some(token) = tokens.iter().find(is_unknown) {
                let message = format!(
                    "`{name}` has token {token}, but the model has only {vocabulary} tokens"
                );
                return Err(ApiError::field(name, message));
            }
        }
        Ok(())
    }

    pub(crate) fn sampling(&self, seed: u64) -> Sampling {
        Sampling { seed, ..self.sampling }
    }
}

fn logit_bias(value: Option<Value>) -> Result<Vec<(Token, f32)>, ApiError> {
    let wrong = || {
        let message = format!(
            "`logit_bias` must be an object of up to {TOKENS_MAX} tokens, each with a number from -100 \
             to 100, like {{\"50256\": -100}}"
        );
        ApiError::field("logit_bias", message)
    };
    let bias = |(token, bias): (String, Value)| {
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias))?;
        Some((token.parse().ok()?, bias as f32))
    };
    match value {
        None => Ok(Vec::new()),
        Some(Value::Object(items)) if items.len() <= TOKENS_MAX => {
            items.into_iter().map(bias).collect::<Option<_>>().ok_or_else(wrong)
        }
        Some(_) => Err(wrong()),
    }
}

fn stop_token_ids(value: Option<Value>) -> Result<Vec<Token>, ApiError> {
    let wrong = || {
        let message = format!("`stop_token_ids` must be a list of up to {TOKENS_MAX} tokens");
        ApiError::field("stop_token_ids", message)
    };
    let token = |item: &Value| item.as_u64().and_then(|token| Token::try_from(token).ok());
    match value {
        None => Ok(Vec::new()),
        Some(Value::Array(items)) if items.len() <= TOKENS_MAX => {
            items.iter().map(token).collect::<Option<_>>().ok_or_else(wrong)
        }
        Some(_) => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(fields: &Value) -> Result<Choosing, ApiError> {
        Choosing::parse(&mut Fields::parse(fields.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn every_field_is_taken() {
        let choosing = parse(&json!({
            "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.25, "presence_penalty": -2,
            "frequency_penalty": 1.5, "repetition_penalty": 1.25, "logit_bias": { "3": -100, "5": 0.5 },
            "min_tokens": 4, "stop_token_ids": [9, 1], "include_stop_str_in_output": true,
            "skip_special_tokens": false,
        }))
        .unwrap();
        let sampling = Sampling { temperature: 0.5, top_k: 7, top_p: 0.9, min_p: 0.25, seed: 11 };
        let shaping = Shaping {
            presence_penalty: -2.0,
            frequency_penalty: 1.5,
            repetition_penalty: 1.25,
            bias: vec![(3, -100.0), (5, 0.5)],
            min_tokens: 4,
        };
        assert_eq!((choosing.sampling(11), choosing.shaping), (sampling, shaping));
        assert_eq!(choosing.stop_tokens, [9, 1]);
        assert!(choosing.keeps_stop && choosing.shows_special);
    }

    #[test]
    fn defaults_change_nothing() {
        let choosing = parse(&json!({ "top_k": -1, "repetition_penalty": 1 })).unwrap();
        assert_eq!(choosing.shaping, Shaping::default());
        let sampling = choosing.sampling(0);
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (1.0, 0, 1.0));
        assert!(!choosing.keeps_stop && !choosing.shows_special);
    }

    #[test]
    fn an_error_names_the_field_that_is_wrong() {
        let wrong = [
            ("top_k", json!(-2)),
            ("min_p", json!(1.1)),
            ("presence_penalty", json!(2.1)),
            ("frequency_penalty", json!("x")),
            ("repetition_penalty", json!(0)),
            ("logit_bias", json!([1])),
            ("logit_bias", json!({ "x": 1 })),
            ("logit_bias", json!({ "1": 101 })),
            ("min_tokens", json!(-1)),
            ("stop_token_ids", json!("7")),
            ("stop_token_ids", json!([-7])),
            ("stop_token_ids", json!(vec![7; 1025])),
            ("include_stop_str_in_output", json!(1)),
            ("skip_special_tokens", json!("no")),
        ];
        for (name, value) in wrong {
            let error = parse(&json!({ name: value })).unwrap_err();
            assert_eq!(error.param(), Some(name), "{value}");
        }
    }

    #[test]
    fn tokens_must_exist_and_limits_agree() {
        let check = |fields| parse(&fields).unwrap().check(3, 10).map_err(|e| e.json());
        assert!(check(json!({ "min_tokens": 3, "stop_token_ids": [9] })).is_ok());
        let two = parse(&json!({ "min_tokens": 2 })).unwrap();
        assert_eq!(two.clone().for_max_tokens(Some(1)).shaping.min_tokens, 1);
        assert_eq!(two.for_max_tokens(None).shaping.min_tokens, 2);
        let wrong = [
            json!({ "min_tokens": 4 }),
            json!({ "stop_token_ids": [10] }),
            json!({ "logit_bias": { "10": 1 } }),
        ];
        for fields in wrong {
            let name = fields.as_object().unwrap().keys().next().unwrap().clone();
            assert_eq!(check(fields).unwrap_err()["error"]["param"], json!(name));
        }
    }
}
