//! Stand-ins for templates from folders, in builds without them.

use std::convert::Infallible;

use super::ChatError;
use crate::conversation::Conversation;

/// There is none.
#[derive(Clone, Debug)]
pub(super) struct Jinja(Infallible);

impl Jinja {
    /// # Errors
    /// Always.
    pub(super) fn new(
        _source: String,
        _for_tools: Option<String>,
        _begin: String,
        _end: String,
    ) -> Result<Self, String> {
        Err("this program was built without templates from folders".to_owned())
    }

    pub(super) fn mentions(&self, _text: &str) -> bool {
        match self.0 {}
    }

    pub(super) fn render(&self, _conversation: &Conversation) -> Result<String, ChatError> {
        match self.0 {}
    }
}
