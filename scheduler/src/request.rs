//! A request as the engine submits it.

use serde::{Deserialize, Serialize};
use terrace_cache::{PageKey, Passage, Reach, Sequence, Token};
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
    /// Where the prompt says more than its tokens do, as with images: by their start, none over another.
    /// Requests share no page that a passage of different content touches or precedes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passages: Vec<Passage>,
    /// How far down the tiers it looks for what it needs.
    #[serde(default, skip_serializing_if = "Reach::is_all")]
    pub reads: Reach,
    /// How far down what it computes is written. What others use too goes as far as theirs.
    #[serde(default, skip_serializing_if = "Reach::is_all")]
    pub writes: Reach,
    /// The names of further answers to the same prompt. Each is a request of its own, like this one. They are
    /// taken all or none, hold their prompt once, and one computes or fetches its whole pages for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub siblings: Vec<RequestId>,
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
    /// A request of plain priority, without adapter and salt, whose prompt is hashed already, with its passages.
    #[must_use]
    pub fn hashed(id: u64, prompt: Sequence, max_new_tokens: u32) -> Self {
        let passages = prompt.passages().to_vec();
        Self { passages, ..Self::plain(id, prompt, max_new_tokens) }
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
            passages: Vec::new(),
            reads: Reach::L3,
            writes: Reach::L3,
            siblings: Vec::new(),
        }
    }

    /// The names of all its answers, its own first.
    pub fn ids(&self) -> impl Iterator<Item = RequestId> + '_ {
        std::iter::once(self.id).chain(self.siblings.iter().copied())
    }
}

/// Tokens to start from, hashed or not.
pub trait Prompt: sealed::Hashed {}

impl Prompt for Vec<Token> {}
impl Prompt for Sequence {}

pub(crate) mod sealed {
    use super::{PageKey, Passage, Sequence, Token};

    pub trait Hashed {
        /// How many tokens.
        fn tokens(&self) -> usize;
        /// Its sequence in a namespace. The passages fit the tokens.
        fn hashed(self, namespace: PageKey, page_size: u32, passages: &[Passage]) -> Sequence;
    }

    impl Hashed for Vec<Token> {
        fn tokens(&self) -> usize {
            self.len()
        }

        fn hashed(self, namespace: PageKey, page_size: u32, passages: &[Passage]) -> Sequence {
            let sequence = Sequence::with_passages(namespace, page_size, self, passages);
            sequence.expect("the passages were checked")
        }
    }

    impl Hashed for Sequence {
        fn tokens(&self) -> usize {
            self.len()
        }

        fn hashed(self, namespace: PageKey, page_size: u32, passages: &[Passage]) -> Sequence {
            // Keys of another namespace must never name pages of this one, and nodes share only what
            // a sequence began with: the same tokens lead to the same plans, however they were put together.
            let tokens = Sequence::tokens(&self);
            let is_ours = (self.root(), self.page_size()) == (namespace, page_size);
            if is_ours && tokens.appended.is_empty() && self.passages() == passages {
                return self;
            }
            tokens.to_vec().hashed(namespace, page_size, passages)
        }
    }
}
