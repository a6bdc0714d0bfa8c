//! Whole replays, as one program.

mod conversation;
mod replay;
