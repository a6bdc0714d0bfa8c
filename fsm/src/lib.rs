//! The lifecycle of one request, as a state machine.
//!
//! Each [`State`] owns what the request holds in the cache at that time. A transition passes these
//! resources on to the next state. Whatever it does not pass on is released to the cache on the way
//! out. So an abort is legal in every live state and cannot leak: it passes nothing on.
//!
//! ```text
//! Submitted ──► Prefetching ──► PrefetchDone ─┐
//!     └───────────────────────────────────────┼─► Prefilling ──► Decoding ──► Draining ──► WritingBack
//!                              Retracted ◄────┼──────┴──────────────┘            │             │
//!                                  └──────────┘                                  └─► Finished ◄┘
//! ```
//!
//! Every live state may also go to Aborted or Failed. [`Transition`]s can be recorded, serialized
//! with serde, and checked again with [`replay`].
//!
//! This crate does no IO and reads no clock. It never decides when to change the state; it only
//! ensures that a change is legal and loses nothing.

#![forbid(unsafe_code)]

mod event;
mod ids;
mod lifecycle;
mod state;
mod trace;

pub use event::{Event, EventName, Handover};
pub use ids::{OpId, RequestId, Slot, Time};
pub use lifecycle::Lifecycle;
pub use state::{Computing, FailReason, State, StateName};
pub use trace::{IllegalTransition, Transition, replay};
