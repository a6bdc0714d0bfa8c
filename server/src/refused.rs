//! Fields that other servers have and this one does not. One that would change the answer is refused, unless its value
//! asks for nothing. Others are ignored.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::Fields;

/// The value with which a field asks for nothing. `null` always does.
#[derive(Clone, Copy, Debug)]
enum Nothing {
    /// None but `null`.
    Absent,
    False,
    Zero,
    One,
    /// An empty string, list or object.
    Empty,
    /// The string `auto`, or an empty one.
    Auto,
}

impl Nothing {
    fn is(self, value: &Value) -> bool {
        match self {
            Self::Absent => false,
            Self::False => *value == Value::Bool(false),
            Self::Zero => value.as_f64() == Some(0.0),
            Self::One => value.as_f64() == Some(1.0),
            Self::Empty => match value {
                Value::Array(items) => items.is_empty(),
                Value::Object(items) => items.is_empty(),
                Value::String(text) => text.is_empty(),
                Value::Null | Value::Bool(_) | Value::Number(_) => false,
            },
            Self::Auto => *value == "auto" || *value == "",
        }
    }
}

/// Fields that would change an answer. One that is honoured after all has been taken out before.
const REFUSED: &[(&str, Nothing)] = &[
    ("add_special_tokens", Nothing::Absent),
    ("allowed_token_ids", Nothing::Empty),
    ("audio", Nothing::Absent),
    ("bad_words", Nothing::Empty),
    ("bootstrap_host", Nothing::Absent),
    ("bootstrap_port", Nothing::Absent),
    ("bootstrap_room", Nothing::Absent),
    ("chat_template", Nothing::Empty),
    ("chat_template_kwargs", Nothing::Empty),
    ("continue_final_message", Nothing::False),
    ("documents", Nothing::Empty),
    ("early_stopping", Nothing::False),
    ("echo", Nothing::False),
    ("function_call", Nothing::Absent),
    ("functions", Nothing::Empty),
    ("guided_decoding_backend", Nothing::Auto),
    ("guided_whitespace_pattern", Nothing::Empty),
    ("kv_transfer_params", Nothing::Empty),
    ("length_penalty", Nothing::One),
    ("logits_processors", Nothing::Empty),
    ("media_io_kwargs", Nothing::Empty),
    ("mm_processor_kwargs", Nothing::Empty),
    ("prompt_embeds", Nothing::Empty),
    ("prompt_logprobs", Nothing::Absent),
    ("reasoning_effort", Nothing::Absent),
    ("repetition_detection", Nothing::Absent),
    ("return_token_ids", Nothing::False),
    ("structural_tag", Nothing::Absent),
    ("suffix", Nothing::Empty),
    ("thinking_token_budget", Nothing::Absent),
    ("top_logprobs", Nothing::Zero),
    ("truncate_prompt_tokens", Nothing::Absent),
    ("use_beam_search", Nothing::False),
    ("vllm_xargs", Nothing::Empty),
    ("web_search_options", Nothing::Absent),
];

/// Fields of OpenAI's API and of vLLM that change no answer here.
const IGNORED: &[&str] = &[
    "include_reasoning",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "user",
];

/// Refuses the remaining fields that would change an answer, and misspelt ones. Unknown ones are ignored, with a warning
/// in the log.
///
/// # Errors
/// The first such field.
pub(crate) fn refuse_the_rest(mut fields: Fields, n: u32) -> Result<(), ApiError> {
    // As many as are shown are the best of themselves.
    fields.refuse_unless("best_of", |value| value.as_u64() == Some(n.into()))?;
    REFUSED
        .iter()
        .try_for_each(|(name, nothing)| fields.refuse_unless(name, |value| nothing.is(value)))?;
    for name in IGNORED {
        fields.take(name);
    }
    fields.unknown()?.into_iter().for_each(warn_once);
    Ok(())
}

/// Logs that a field is ignored, once for each name.
fn warn_once(name: String) {
    /// Clients choose the names.
    const NAMES_MAX: usize = 64;
    const NAME_BYTES_MAX: usize = 64;
    static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut warned = WARNED.lock();
    if warned.len() < NAMES_MAX && name.len() <= NAME_BYTES_MAX && !warned.contains(&name) {
        tracing::warn!("requests have the unknown field {name:?}, which is ignored");
        warned.insert(name);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_field_is_refused_by_its_name_unless_it_asks_for_nothing() {
        let refuse = |fields: Value, n| {
            let fields = Fields::parse(fields.to_string().as_bytes()).unwrap();
            refuse_the_rest(fields, n).map_err(|error| error.param().unwrap().to_owned())
        };
        for (name, _) in REFUSED {
            assert_eq!(refuse(json!({ *name: 7.5 }), 1), Err((*name).to_owned()));
            assert_eq!(refuse(json!({ *name: null }), 1), Ok(()));
        }
        let nothing = json!({
            "suffix": "", "bad_words": [], "use_beam_search": false, "length_penalty": 1,
            "guided_decoding_backend": "auto", "vllm_xargs": {}, "best_of": 3, "unknown": 7, "user": "x",
        });
        assert_eq!(refuse(nothing, 3), Ok(()));
        assert_eq!(refuse(json!({ "best_of": 4 }), 3), Err("best_of".to_owned()));
    }
}
