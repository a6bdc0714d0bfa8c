//! The lifecycle of one request.
//!
//! Each [`State`] owns what the request holds in the cache at that time. A transition hands these
//! things on to the next state; what it does not hand on is given back to the cache on the way
//! out. So an abort is legal in every live state and cannot leak: it simply hands nothing on.
//!
//! ```text
//! Submitted ──► Prefetching ──► PrefetchDone ─┐
//!     └───────────────────────────────────────┼─► Prefilling ──► Decoding ──► Draining ──► WritingBack
//!                              Retracted ◄────┼──────┴──────────────┘            │             │
//!                                  └──────────┘                                  └─► Finished ◄┘
//! ```
//!
//! Every live state may also go to Aborted or Failed. [`Transition`]s can be recorded, written
//! down with serde, and checked again with [`replay`].
//!
//! This crate does no IO and reads no clock; it never decides when to move on, it only makes sure
//! that moving on is legal and loses nothing.

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
