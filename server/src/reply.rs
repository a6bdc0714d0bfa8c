//! The JSON of answers.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use terrace_model::Tokenizer;
use terrace_scheduler::Hits;

use crate::answer::{Complete, Fragment};
use crate::logprobs::{Scored, Scoring};
use crate::parameters::{Kind, random};
use crate::served_model::ServedModel;
use crate::tool_calls::Call;

/// Builds the JSON of all answers to one request.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    scoring: Option<(Scoring, Tokenizer)>,
    system_fingerprint: String,
}

impl Reply {
    pub(crate) fn new(kind: Kind, model: &ServedModel) -> Self {
        let prefix = match kind {
            Kind::Completion => "cmpl",
            Kind::Chat => "chatcmpl",
        };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Self {
            kind,
            id: format!("{prefix}-{:016x}", random()),
            created,
            model: model.name.clone(),
            scoring: None,
            system_fingerprint: model.system_fingerprint(),
        }
    }

    /// The same, but with log-probabilities of the tokens.
    pub(crate) fn scored(self, scoring: Option<Scoring>, tokenizer: &Tokenizer) -> Self {
        Self { scoring: scoring.map(|scoring| (scoring, tokenizer.clone())), ..self }
    }

    /// The whole answer at once.
    pub(crate) fn whole(&self, choices: Vec<Value>, usage: &Usage) -> Value {
        let object = match self.kind {
            Kind::Completion => "text_completion",
            Kind::Chat => "chat.completion",
        };
        let mut reply = self.frame(object, choices);
        reply["usage"] = usage.json();
        reply["terrace"] = usage.extras();
        reply
    }

    /// Returns a complete answer.
    pub(crate) fn choice(&self, index: usize, whole: &Fragment, complete: &Complete) -> Value {
        let text = &whole.text;
        let mut choice = match self.kind {
            Kind::Completion => json!({ "text": text }),
            Kind::Chat => json!({
                "message": { "role": "assistant", "content": text, "refusal": null }
            }),
        };
        finish(&mut choice, index, Some(complete));
        choice["logprobs"] = self.logprobs(&whole.scored);
        choice
    }

    /// Adds the role to the first chunk of an answer to a chat.
    pub(crate) fn begin(&self, chunk: &mut Value) {
        match self.kind {
            Kind::Completion => {}
            Kind::Chat => {
                let delta = &mut chunk["choices"][0]["delta"];
                delta["role"] = "assistant".into();
                if delta["content"].is_null() {
                    delta["content"] = "".into();
                }
            }
        }
    }

    /// A chunk with a call of a function.
    pub(crate) fn call_chunk(&self, index: usize, call: &Call) -> Value {
        let mut choice = json!({ "delta": { "tool_calls": [call.delta()] } });
        finish(&mut choice, index, None);
        self.chunk(vec![choice])
    }

    /// The name of the model.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// A chunk with more reasoning, under both names that clients read.
    pub(crate) fn reasoning_chunk(&self, index: usize, fragment: &Fragment) -> Value {
        let text = &fragment.text;
        let mut choice = json!({ "delta": { "reasoning_content": text, "reasoning": text } });
        finish(&mut choice, index, None);
        choice["logprobs"] = self.logprobs(&fragment.scored);
        self.chunk(vec![choice])
    }

    /// A chunk with more text.
    pub(crate) fn text_chunk(&self, index: usize, fragment: &Fragment) -> Value {
        let text = &fragment.text;
        let mut choice = match self.kind {
            Kind::Completion => json!({ "text": text }),
            Kind::Chat => json!({ "delta": { "content": text } }),
        };
        finish(&mut choice, index, None);
        choice["logprobs"] = self.logprobs(&fragment.scored);
        self.chunk(vec![choice])
    }

    /// The last chunk of one of the answers.
    pub(crate) fn last_chunk(&self, index: usize, complete: &Complete) -> Value {
        let mut choice = match self.kind {
            Kind::Completion => json!({ "text": "" }),
            Kind::Chat => json!({ "delta": {} }),
        };
        finish(&mut choice, index, Some(complete));
        self.chunk(vec![choice])
    }

    /// The chunk after all answers that says what they took.
    pub(crate) fn usage_chunk(&self, usage: &Usage) -> Value {
        let mut chunk = self.chunk(Vec::new());
        chunk["usage"] = usage.json();
        chunk["terrace"] = usage.extras();
        chunk
    }

    /// The log-probabilities of some tokens, if they were asked for.
    fn logprobs(&self, scored: &[Scored]) -> Value {
        match &self.scoring {
            Some((scoring, tokenizer)) => scoring.json(self.kind, tokenizer, scored),
            None => Value::Null,
        }
    }

    fn chunk(&self, choices: Vec<Value>) -> Value {
        let object = match self.kind {
            Kind::Completion => "text_completion",
            Kind::Chat => "chat.completion.chunk",
        };
        self.frame(object, choices)
    }

    fn frame(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        })
    }
}

fn finish(choice: &mut Value, index: usize, complete: Option<&Complete>) {
    choice["index"] = index.into();
    choice["logprobs"] = Value::Null;
    choice["finish_reason"] = complete.map(|complete| complete.finish.name()).into();
    if let Some(checksum) = complete.and_then(|complete| complete.logits_checksum) {
        choice["logits_checksum"] = format!("{checksum:016x}").into();
    }
}

/// Puts reasoning into the message of a whole answer, under both names that clients read.
pub(crate) fn add_reasoning(choice: &mut Value, reasoning: &str) {
    if !reasoning.is_empty() {
        choice["message"]["reasoning_content"] = reasoning.into();
        choice["message"]["reasoning"] = reasoning.into();
    }
}

/// Tokens and times of the answers to a request.
#[derive(Clone, Debug)]
pub(crate) struct Usage {
    asked_at: Instant,
    first_token_at: Option<Instant>,
    prompt_tokens: usize,
    completion_tokens: u64,
    reasoning_tokens: u64,
    hits: Hits,
}

impl Usage {
    /// For prompts of so many tokens together.
    pub(crate) fn new(asked_at: Instant, prompt_tokens: usize) -> Self {
        let hits = Hits::default();
        let (completion_tokens, reasoning_tokens) = (0, 0);
        Self {
            asked_at,
            first_token_at: None,
            prompt_tokens,
            completion_tokens,
            reasoning_tokens,
            hits,
        }
    }

    /// Counts an answer. Of several to the same prompt only the first counts for what was cached,
    /// as the prompt itself is counted once.
    pub(crate) fn add(&mut self, complete: &Complete, is_first_of_prompt: bool) {
        self.completion_tokens += u64::from(complete.tokens);
        self.reasoning_tokens += u64::from(complete.reasoning_tokens);
        let firsts = self.first_token_at.into_iter().chain(complete.first_token_at);
        self.first_token_at = firsts.min();
        if is_first_of_prompt {
            self.hits.device_tokens += complete.hits.device_tokens;
            self.hits.host_tokens += complete.hits.host_tokens;
            self.hits.l3_tokens += complete.hits.l3_tokens;
        }
    }

    /// Returns the usage of answers that are not complete, with the given number of output tokens.
    pub(crate) fn so_far(&self, completion_tokens: u64) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens as u64 + completion_tokens,
        })
    }

    /// Returns the usage in the form of the Responses API.
    pub(crate) fn of_response(&self) -> Value {
        json!({
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": self.cached(),
            "output_tokens": self.completion_tokens,
            "output_tokens_details": { "reasoning_tokens": self.reasoning_tokens },
            "total_tokens": self.prompt_tokens as u64 + self.completion_tokens,
        })
    }

    fn json(&self) -> Value {
        let mut usage = json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens as u64 + self.completion_tokens,
            "prompt_tokens_details": self.cached(),
        });
        if self.reasoning_tokens > 0 {
            usage["completion_tokens_details"] =
                json!({ "reasoning_tokens": self.reasoning_tokens });
        }
        usage
    }

    fn cached(&self) -> Value {
        let Hits { device_tokens, host_tokens, l3_tokens } = self.hits;
        json!({
            "cached_tokens": self.hits.total(),
            "cached_by_tier": {
                "device": device_tokens,
                "host": host_tokens,
                "l3": l3_tokens,
            },
        })
    }

    fn extras(&self) -> Value {
        let first = self.first_token_at.map(|first| first - self.asked_at);
        let milliseconds = first.map(|first| first.as_micros() as f64 / 1000.0);
        json!({ "time_to_first_token_ms": milliseconds })
    }
}
