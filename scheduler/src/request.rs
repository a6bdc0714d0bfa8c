//! A request as the engine submits it.

use serde::{Deserialize, Serialize};
use terrace_cache::{PageKey, Passage, Reach, Sequence, Token};
use terrace_fsm::RequestId;

/// Request of the engine. The prompt is tokens, or a [`Sequence`] if they are hashed already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request<P = Vec<Token>> {
    /// Id, unique until a plan has reported the end.
    pub id: RequestId,
    /// Tokens to start from.
    pub prompt: P,
    /// Maximum number of tokens to produce. With 0 only the prompt is computed, as for scores and embeddings.
    pub max_new_tokens: u32,
    /// Higher priorities are first where priorities count.
    #[serde(default)]
    pub priority: i32,
    /// The adapter (LoRA) to compute with; empty for none.
    #[serde(default)]
    pub adapter: String,
    /// The tenant's salt; empty for none.
    #[serde(default)]
    pub salt: String,
    /// Computes every token of the prompt, even if it is cached, because the engine needs more of it than KV. Its
    /// pages are cached like those of any other request, and may serve it after a retraction once it has produced a
    /// token.
    #[serde(default, skip_serializing_if = "is_false")]
    pub computes_prompt: bool,
    /// Plans a step only when all tokens before it are known, because the engine decides by them what may come next.
    /// Other requests are planned ahead where [two steps are in flight](crate::BatchConfig::steps_in_flight_max).
    #[serde(default, skip_serializing_if = "is_false")]
    pub waits_for_tokens: bool,
    /// Passages of content other than text, such as images, by their start and without overlap. Requests share no
    /// page that a passage of different content touches or precedes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passages: Vec<Passage>,
    /// Deepest tier that the request reads from.
    #[serde(default, skip_serializing_if = "Reach::is_all")]
    pub reads: Reach,
    /// Deepest tier that its pages are written to. Pages that other requests use too are written as deep as theirs.
    #[serde(default, skip_serializing_if = "Reach::is_all")]
    pub writes: Reach,
    /// Ids of further requests for answers to the same prompt. They are accepted all or none, hold their prompt once,
    /// and one computes or prefetches its whole pages for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub siblings: Vec<RequestId>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_false(flag: &bool) -> bool {
    !*flag
}

impl Request {
    /// Makes a request of priority 0, without adapter and salt.
    #[must_use]
    pub fn new(id: u64, prompt: Vec<Token>, max_new_tokens: u32) -> Self {
        Self::plain(id, prompt, max_new_tokens)
    }
}

impl Request<Sequence> {
    /// Makes a request of priority 0, without adapter and salt, whose prompt is hashed already, with its passages.
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

    /// Ids of all its answers, its own first.
    pub fn ids(&self) -> impl Iterator<Item = RequestId> + '_ {
        std::iter::once(self.id).chain(self.siblings.iter().copied())
    }
}

/// Prompt, hashed or not.
pub trait Prompt: sealed::Hashed {}

impl Prompt for Vec<Token> {}
impl Prompt for Sequence {}

pub(crate) mod sealed {
    use super::{PageKey, Passage, Sequence, Token};

    pub trait Hashed {
        /// Number of tokens.
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
