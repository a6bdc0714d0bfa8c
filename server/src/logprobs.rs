//! Log-probabilities: what is asked for, where in the text they belong, and their JSON.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};
use terrace_engine::Logprobs;
use terrace_model::Tokenizer;
use terrace_scheduler::Token;

use crate::error::ApiError;
use crate::fields::Fields;
use crate::parameters::Kind;

/// As many of the likeliest tokens as are told.
const TOP_MAX: i64 = 20;
/// Stands for everything less likely, since JSON has no infinity.
const LEAST: f32 = -9999.0;

/// What is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scoring {
    /// How many of the likeliest tokens in each place.
    pub(crate) top: u32,
    /// Whether tokens are called by their numbers instead of their texts.
    numbers: bool,
}

impl Scoring {
    /// # Errors
    /// The first field that is wrong.
    pub(crate) fn parse(kind: Kind, fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let numbers = fields.flag("return_tokens_as_token_ids")?;
        let top = match kind {
            Kind::Completion => match fields.take("logprobs") {
                None | Some(Value::Bool(false)) => None,
                Some(value) => {
                    let top = value.as_i64().filter(|top| (0..=TOP_MAX).contains(top));
                    let wrong = || {
                        let message = format!("`logprobs` must be an integer from 0 to {TOP_MAX}");
                        ApiError::field("logprobs", message)
                    };
                    Some(top.ok_or_else(wrong)?)
                }
            },
            Kind::Chat => {
                let (wanted, top) =
                    (fields.flag("logprobs")?, fields.integer("top_logprobs", 0..=TOP_MAX)?);
                if top.is_some_and(|top| top > 0) && !wanted {
                    let message = "`top_logprobs` needs `logprobs` to be true";
                    return Err(ApiError::field("top_logprobs", message));
                }
                wanted.then_some(top.unwrap_or(0))
            }
        };
        Ok(top.map(|top| Self { top: top as u32, numbers }))
    }

    /// The JSON of some tokens in a row.
    pub(crate) fn json(&self, kind: Kind, tokenizer: &Tokenizer, scored: &[Scored]) -> Value {
        let name = |token: Token| match self.numbers {
            true => format!("token_id:{token}"),
            false => token_name(tokenizer, token),
        };
        match kind {
            Kind::Completion => {
                let top = |scored: &Scored| match scored.logprob {
                    None => Value::Null,
                    // The chosen token is always among them.
                    Some(logprob) => {
                        let own = (scored.token, logprob);
                        let all = scored.top.iter().chain([&own]);
                        let entry =
                            |(token, logprob): &(Token, f32)| (name(*token), number(*logprob));
                        all.map(entry).collect::<Map<_, _>>().into()
                    }
                };
                json!({
                    "tokens": scored.iter().map(|scored| name(scored.token)).collect::<Vec<_>>(),
                    "token_logprobs": scored
                        .iter()
                        .map(|scored| scored.logprob.map_or(Value::Null, number))
                        .collect::<Vec<_>>(),
                    "top_logprobs": scored.iter().map(top).collect::<Vec<_>>(),
                    "text_offset": scored.iter().map(|scored| scored.offset).collect::<Vec<_>>(),
                })
            }
            Kind::Chat => {
                let one = |(token, logprob): (Token, f32)| {
                    let bytes = tokenizer.token_bytes(token).map(|token| token.bytes);
                    json!({ "token": name(token), "logprob": number(logprob), "bytes": bytes })
                };
                let content = scored.iter().map(|scored| {
                    let mut entry = one((scored.token, scored.logprob.unwrap_or(LEAST)));
                    entry["top_logprobs"] = scored.top.iter().copied().map(one).collect();
                    entry
                });
                json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
            }
        }
    }
}

/// A log-probability as JSON.
fn number(logprob: f32) -> Value {
    f64::from(logprob.max(LEAST)).into()
}

/// What a token is called: its text, or its bytes if they are no text by themselves.
fn token_name(tokenizer: &Tokenizer, token: Token) -> String {
    let Some(token_bytes) = tokenizer.token_bytes(token) else { return tokenizer.decode(&[token]) };
    String::from_utf8(token_bytes.bytes).unwrap_or_else(|error| {
        let bytes = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
        format!("bytes:{}", bytes.collect::<String>())
    })
}

/// A token of the text, and how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scored {
    token: Token,
    /// Nothing for a text's first token, before which there is nothing.
    logprob: Option<f32>,
    top: Vec<(Token, f32)>,
    /// Characters of the text before it.
    offset: usize,
}

/// Tells log-probabilities with the text that they belong to.
#[derive(Debug, Default)]
pub(crate) struct Scribe {
    /// Those whose text has not been told, in order.
    waiting: VecDeque<Scored>,
    /// Characters of the text as far as it is known.
    known: usize,
    /// And as far as it was told.
    told: usize,
}

impl Scribe {
    /// Adds a token and the text that came with it.
    pub(crate) fn add(&mut self, token: Token, logprobs: Option<Logprobs>, text: &str) {
        let (logprob, top) = match logprobs {
            Some(logprobs) => (Some(logprobs.logprob), logprobs.top),
            None => (None, Vec::new()),
        };
        self.waiting.push_back(Scored { token, logprob, top, offset: self.known });
        self.known += text.chars().count();
    }

    /// The tokens that begin in a text that is told next.
    pub(crate) fn told(&mut self, text: &str) -> Vec<Scored> {
        self.told += text.chars().count();
        let begun = self.waiting.partition_point(|scored| scored.offset < self.told);
        self.waiting.drain(..begun).collect()
    }

    /// All others.
    pub(crate) fn rest(&mut self) -> Vec<Scored> {
        self.waiting.drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(kind: Kind, fields: Value) -> Result<Option<u32>, String> {
        let mut fields = Fields::parse(fields.to_string().as_bytes()).unwrap();
        let scoring = Scoring::parse(kind, &mut fields);
        scoring.map(|scoring| scoring.map(|it| it.top)).map_err(|e| e.param().unwrap().to_owned())
    }

    #[test]
    fn completions_have_a_number_and_chats_a_flag() {
        assert_eq!(parse(Kind::Completion, json!({ "logprobs": 0 })), Ok(Some(0)));
        assert_eq!(parse(Kind::Completion, json!({ "logprobs": 20 })), Ok(Some(20)));
        assert_eq!(parse(Kind::Completion, json!({ "logprobs": null })), Ok(None));
        for wrong in [json!(true), json!(21), json!(-1), json!("1")] {
            let found = parse(Kind::Completion, json!({ "logprobs": wrong }));
            assert_eq!(found, Err("logprobs".to_owned()));
        }
        assert_eq!(parse(Kind::Chat, json!({ "logprobs": true })), Ok(Some(0)));
        let three = json!({ "logprobs": true, "top_logprobs": 3 });
        assert_eq!(parse(Kind::Chat, three), Ok(Some(3)));
        assert_eq!(parse(Kind::Chat, json!({ "logprobs": 3 })), Err("logprobs".to_owned()));
        for wrong in [json!({ "top_logprobs": 3 }), json!({ "logprobs": true, "top_logprobs": 21 })]
        {
            assert_eq!(parse(Kind::Chat, wrong), Err("top_logprobs".to_owned()));
        }
    }

    #[test]
    fn a_token_is_told_with_the_text_it_begins_in() {
        let mut scribe = Scribe::default();
        for (token, text) in [(1, "ab"), (2, ""), (3, ""), (4, "ß"), (5, "c")] {
            scribe.add(token, None, text);
        }
        let tokens = |scored: Vec<Scored>| {
            scored.iter().map(|scored| (scored.token, scored.offset)).collect::<Vec<_>>()
        };
        assert_eq!(tokens(scribe.told("a")), [(1, 0)]);
        assert_eq!(tokens(scribe.told("b")), []);
        assert_eq!(tokens(scribe.told("ß")), [(2, 2), (3, 2), (4, 2)]);
        assert_eq!(tokens(scribe.rest()), [(5, 3)]);
    }

    #[test]
    fn both_shapes_have_what_clients_look_for() {
        let tokenizer = Tokenizer::bytes();
        let scoring = Scoring { top: 1, numbers: false };
        let scored = [
            Scored { token: 256, logprob: None, top: Vec::new(), offset: 0 },
            Scored { token: 65, logprob: Some(-0.5), top: vec![(0xc3, -0.25)], offset: 0 },
            Scored { token: 0xc3, logprob: Some(f32::NEG_INFINITY), top: Vec::new(), offset: 1 },
        ];
        assert_eq!(
            scoring.json(Kind::Completion, &tokenizer, &scored),
            json!({
                "tokens": ["<|begin|>", "A", "bytes:\\xc3"],
                "token_logprobs": [null, -0.5, -9999.0],
                "top_logprobs": [null, { "bytes:\\xc3": -0.25, "A": -0.5 }, { "bytes:\\xc3": -9999.0 }],
                "text_offset": [0, 0, 1],
            })
        );
        assert_eq!(
            scoring.json(Kind::Chat, &tokenizer, &scored[1..2])["content"],
            json!([{
                "token": "A", "logprob": -0.5, "bytes": [65],
                "top_logprobs": [{ "token": "bytes:\\xc3", "logprob": -0.25, "bytes": [195] }],
            }])
        );
        let numbers = Scoring { top: 0, numbers: true };
        let json = numbers.json(Kind::Completion, &tokenizer, &scored[1..2]);
        assert_eq!(json["tokens"], json!(["token_id:65"]));
    }
}
