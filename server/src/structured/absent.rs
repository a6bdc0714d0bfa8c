//! What stands for structured outputs where the program was built without them.

use std::sync::Arc;

use terrace_engine::Grammar;
use terrace_model::Tokenizer;
use terrace_scheduler::Token;

use super::Structure;
use crate::error::ApiError;

#[derive(Debug, Default)]
pub(crate) struct Grammars {}

/// There is none.
#[derive(Debug)]
pub(crate) enum Compiled {}

impl Grammars {
    /// # Errors
    /// Always.
    pub(crate) fn compile(
        &self,
        _tokenizer: &Tokenizer,
        structure: &Structure,
    ) -> Result<Compiled, ApiError> {
        Err(structure.wrong(
            "this server was built without structured outputs; leave the field out, or build the \
             server with the feature `structured-outputs`",
        ))
    }
}

impl Compiled {
    pub(crate) fn grammar(&self, _ends: Arc<[Token]>) -> Box<dyn Grammar> {
        match *self {}
    }
}
