//! KV events between servers and routers: what each server's cache holds, as it changes.
//!
//! A [`Publisher`] publishes events over ZeroMQ in the format of vLLM and SGLang, so that other
//! routers understand them. [`follow`] subscribes to such a stream of any of these engines. A
//! [`WorkerIndex`] is what a router knows about one worker: how much of a prompt is cached there.
//! [`Balance`] weighs that against the load of the workers.
//!
//! Received events are hints. They come from outside and may be late, wrong or lost. So no received
//! length or number is trusted, memory is bounded, and a reader that has missed events drops its
//! state instead of guessing.

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
