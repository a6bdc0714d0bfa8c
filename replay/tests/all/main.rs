//! Tests of whole replays.

mod conversation;
mod replay;
