//! Lifecycle of one request, as a state machine.
//!
//! Each [`State`] owns the resources that the request holds in the cache. A transition moves them to the next state,
//! and returns to the cache what it does not move. So an abort is legal in every live state and cannot leak: it moves
//! nothing.
//!
//! ```text
//! Submitted ──► Prefetching ──► PrefetchDone ─┐
//!     └───────────────────────────────────────┼─► Prefilling ──► Decoding ──► Draining ──► WritingBack
//!                              Retracted ◄────┼──────┴──────────────┘            │             │
//!                                  └──────────┘                                  └─► Finished ◄┘
//! ```
//!
//! Every live state also leads to Aborted and Failed. [`Transition`]s can be recorded, serialized with serde, and
//! checked with [`replay`].
//!
//! This crate does no IO and reads no clock. It does not decide when the state changes. It ensures that every change
//! is legal and loses no resource.

#![forbid(unsafe_code)]

mod event;
mod ids;
mod lifecycle;
mod state;
mod trace;

pub use event::{Event, EventName, Output};
pub use ids::{OpId, RequestId, Slot, Time};
pub use lifecycle::{Change, Lifecycle};
pub use state::{Computing, FailReason, State, StateName};
pub use trace::{IllegalTransition, Transition, replay};
