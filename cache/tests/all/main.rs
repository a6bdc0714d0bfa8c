//! The cache from outside, as one program.

mod behaviour;
mod keys;
mod tree_against_model;
