//! Prompts that are cut to what there is room for, if whoever asks wants that.

use terrace_scheduler::Token;

use crate::error::ApiError;
use crate::fields::Fields;

/// How much of a prompt is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Truncation {
    /// All of it.
    #[default]
    Never,
    /// Its last tokens, so many.
    Last(usize),
    /// Its last tokens, as many as leave room for the answer.
    ToFit,
}

impl Truncation {
    /// # Errors
    /// When it is no number that can be kept.
    pub(crate) fn parse(fields: &mut Fields) -> Result<Self, ApiError> {
        let name = "truncate_prompt_tokens";
        match fields.integer(name, -1..=i64::from(u32::MAX))? {
            None => Ok(Self::Never),
            Some(-1) => Ok(Self::ToFit),
            Some(0) => {
                let message = format!("`{name}` must be -1 (as many as fit) or at least 1");
                Err(ApiError::field(name, message))
            }
            Some(kept) => Ok(Self::Last(kept as usize)),
        }
    }

    /// Cuts a prompt where at most `room` tokens of it leave room for the answer.
    pub(crate) fn apply(self, prompt: &mut Vec<Token>, room: usize) {
        let kept = match self {
            Self::Never => return,
            Self::Last(kept) => kept,
            // A prompt that has no room at all is refused, not emptied.
            Self::ToFit => room.max(1),
        };
        prompt.drain(..prompt.len().saturating_sub(kept));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn parse(value: Value) -> Result<Truncation, ApiError> {
        let request = json!({ "truncate_prompt_tokens": value });
        Truncation::parse(&mut Fields::parse(request.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn the_last_tokens_are_kept() {
        let cut = |value: Value| {
            let mut prompt = vec![1, 2, 3, 4, 5];
            parse(value).unwrap().apply(&mut prompt, 3);
            prompt
        };
        assert_eq!(cut(json!(null)), [1, 2, 3, 4, 5]);
        assert_eq!(cut(json!(2)), [4, 5]);
        assert_eq!(cut(json!(9)), [1, 2, 3, 4, 5]);
        assert_eq!(cut(json!(-1)), [3, 4, 5]);
        for wrong in [json!(0), json!(-2), json!(1.5), json!("all")] {
            assert_eq!(parse(wrong).unwrap_err().param(), Some("truncate_prompt_tokens"));
        }
    }
}
