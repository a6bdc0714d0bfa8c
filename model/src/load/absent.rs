//! Stand-ins for models from folders, in builds without them.

use std::path::Path;

use crate::{ChatTemplate, Loaded, Tokenizer, Unloaded};

/// Reasons why a model is not loaded from its folder.
#[derive(Debug, thiserror::Error)]
#[error(
    "this program supports only the built-in model. To load models from folders, build it with \
     `cargo build --release --features models`, or with `--features full` for all optional parts"
)]
pub struct LoadError(());

/// Refuses to load the model of a folder.
///
/// # Errors
/// Always.
pub fn load(_folder: &Path, _threads: usize) -> Result<Loaded, LoadError> {
    Err(LoadError(()))
}

/// Refuses to look at the model of a folder.
///
/// # Errors
/// Always.
pub fn open(_folder: &Path) -> Result<Unloaded, LoadError> {
    Err(LoadError(()))
}

/// Refuses to load the tokenizer of a folder.
///
/// # Errors
/// Always.
pub fn load_tokenizer(_folder: &Path) -> Result<Tokenizer, LoadError> {
    Err(LoadError(()))
}

/// Refuses to say how prompts are made for the model of a folder.
///
/// # Errors
/// Always.
pub fn load_prompting(_folder: &Path) -> Result<(Tokenizer, ChatTemplate), LoadError> {
    Err(LoadError(()))
}
