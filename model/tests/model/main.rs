//! The model from outside: folders, forward passes, text.

mod answers;
mod arriving;
mod folder;
mod identity;
mod loading;
mod reference;
mod text;
mod thoughts;
mod transformers;
mod world;
