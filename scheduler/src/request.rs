//! A request as the engine submits it.

use serde::{Deserialize, Serialize};
use terrace_cache::{PageKey, Sequence, Token};
use terrace_fsm::RequestId;

/// What the engine wants done. The prompt is tokens, or a [`Sequence`] if whoever routes requests has
/// hashed them already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request<P = Vec<Token>> {
    /// Its name, unique until a plan has told its end.
    pub id: RequestId,
    /// The tokens to start from.
    pub prompt: P,
    /// How many tokens it may produce. With 0 its prompt is computed and that is all, as for scores and
    /// embeddings.
    pub max_new_tokens: u32,
    /// Higher goes first where priorities count.
    #[serde(default)]
    pub priority: i32,
    /// The adapter (LoRA) to compute with; empty for none.
    #[serde(default)]
    pub adapter: String,
    /// The tenant's salt; empty for none.
    #[serde(default)]
    pub salt: String,
    /// Whether every token of the prompt is to be computed, whatever the cache holds, because the engine
    /// needs more of it than KV. What it computes is cached like that of any other request, and what it
    /// has computed may serve it after a retraction once it has produced a token.
    #[serde(default, skip_serializing_if = "is_false")]
    pub computes_prompt: bool,
    /// Whether each of its tokens is to be known before a step that follows it is planned, because the
    /// engine decides by it what may come next. Others go ahead where
    /// [two steps are in flight](crate::BatchConfig::steps_in_flight_max).
    #[serde(default, skip_serializing_if = "is_false")]
    pub waits_for_tokens: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_false(flag: &bool) -> bool {
    !*flag
}

impl Request {
    /// A request of plain priority, without adapter and salt.
    #[must_use]
    pub fn new(id: u64, prompt: Vec<Token>, max_new_tokens: u32) -> Self {
        Self::plain(id, prompt, max_new_tokens)
    }
}

impl Request<Sequence> {
    /// A request of plain priority, without adapter and salt, whose prompt is hashed already.
    #[must_use]
    pub fn hashed(id: u64, prompt: Sequence, max_new_tokens: u32) -> Self {
        Self::plain(id, prompt, max_new_tokens)
    }
}

impl<P> Request<P> {
    fn plain(id: u64, prompt: P, max_new_tokens: u32) -> Self {
        Self {
            id: RequestId(id),
            prompt,
            max_new_tokens,
            priority: 0,
            adapter: String::new(),
            salt: String::new(),
            computes_prompt: false,
            waits_for_tokens: false,
        }
    }
}

/// Tokens to start from, hashed or not.
pub trait Prompt: sealed::Hashed {}

impl Prompt for Vec<Token> {}
impl Prompt for Sequence {}

pub(crate) mod sealed {
    use super::{PageKey, Sequence, Token};

    pub trait Hashed {
        /// How many tokens.
        fn tokens(&self) -> usize;
        /// Its sequence in a namespace.
        fn hashed(self, namespace: PageKey, page_size: u32) -> Sequence;
    }

    impl Hashed for Vec<Token> {
        fn tokens(&self) -> usize {
            self.len()
        }

        fn hashed(self, namespace: PageKey, page_size: u32) -> Sequence {
            Sequence::new(namespace, page_size, self)
        }
    }

    impl Hashed for Sequence {
        fn tokens(&self) -> usize {
            self.len()
        }

        fn hashed(self, namespace: PageKey, page_size: u32) -> Sequence {
            // Keys of another namespace must never name pages of this one, and nodes share only what
            // a sequence began with: the same tokens lead to the same plans, however they were put together.
            let tokens = Sequence::tokens(&self);
            let is_ours = (self.root(), self.page_size()) == (namespace, page_size);
            if is_ours && tokens.appended.is_empty() {
                return self;
            }
            Sequence::new(namespace, page_size, tokens.to_vec())
        }
    }
}
