//! KV events between servers and routers: what each server's cache holds, as it changes.
//!
//! A [`Publisher`] tells it over ZeroMQ as vLLM and SGLang do, so that routers which others wrote understand it.
//! [`follow`] hears such a stream, of any of these engines, and a [`WorkerIndex`] is what a router knows of one worker
//! by it: how much of a prompt is cached there. [`Balance`] weighs that against how much the workers have to do.
//!
//! What is heard is a hint. It comes from outside, may be late, wrong or lost: nothing here trusts a length or a
//! number that it was sent, memory is bounded, and whoever has missed something forgets rather than guesses.

mod balance;
mod endpoint;
mod follow;
mod history;
mod index;
mod publisher;
mod recording;
mod study;
mod wire;
mod zmtp;

pub use balance::{Balance, Route};
pub use endpoint::{Door, Endpoint, EndpointError};
pub use follow::{FollowStats, Heard, Source, follow};
pub use index::{IndexStats, PromptBlocks, WorkerIndex};
pub use publisher::{Publisher, PublisherConfig, PublisherStats, SnapshotWanted};
pub use recording::{Recorded, Recording, RecordingError};
pub use study::{Study, StudyReport, WorkerReport};
pub use wire::{Batch, Event, L3Sharing, Manner, Medium, Stored, WireError, decode, encode};
