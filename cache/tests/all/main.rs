//! The cache from outside, as one program.

mod behaviour;
mod tree_against_model;
