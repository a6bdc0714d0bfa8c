//! The model from outside: folders, forward passes, text.

mod answers;
mod arriving;
mod folder;
mod identity;
mod loading;
mod reference;
mod text;
mod transformers;
mod world;
