//! The scheduler as engines use it, as one program.

mod answers;
mod bad_input;
mod config;
mod embedding;
mod l3_paths;
