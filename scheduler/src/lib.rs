//! The scheduler: decides, step by step, what an LLM inference engine computes next and which KV
//! pages move between device, host and L3. It decides; the engine and the L3 driver perform.
//!
//! # The loop
//!
//! An engine owns the memory and the clock, and does the same thing over and over: take in requests
//! ([`Scheduler::submit`], [`Scheduler::abort`]), ask for a plan ([`Scheduler::plan_into`]), perform
//! it, and report what came of it ([`Scheduler::advance`]).
//!
//! ```
//! use terrace_scheduler::{Config, Event, Plan, Request, Scheduler, StepResult, Time};
//!
//! let mut scheduler = Scheduler::new(Config::builder().page_size(16).device_pages(64).build()?)?;
//! scheduler.submit(Time(0), Request::new(1, (0..100).collect(), 3))?;
//!
//! let mut plan = Plan::default();
//! let mut now = Time(0);
//! loop {
//!     scheduler.plan_into(now, &mut plan);
//!     if plan.is_idle() {
//!         break; // Nothing to do until something happens, or `scheduler.deadline()` has come.
//!     }
//!     // Update the page table, start copies and L3 operations (none without those tiers) …
//!     for change in &plan.rows {
//!         println!("row {:?} from {}: {:?}", change.slot, change.first_entry, plan.row_pages(change));
//!     }
//!     // … run the model on `plan.prefills` and `plan.decodes`, and report the new tokens.
//!     now = Time(now.0 + 10_000);
//!     if let Some(step) = plan.step {
//!         let prefills = plan.prefills.iter().filter(|p| p.produces_token).map(|p| p.request);
//!         let decodes = plan.decodes.iter().map(|d| d.request);
//!         let results: Vec<_> = prefills
//!             .chain(decodes)
//!             .map(|request| StepResult { request, tokens: &[42], finished: false })
//!             .collect();
//!         scheduler.advance(now, Event::StepDone { step, results: &results, failed: &[] })?;
//!     }
//! }
//! assert_eq!(scheduler.stats().finished, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `cargo run --release --example embed` is the same with all three tiers, and prints what happens.
//!
//! # What the engine must keep to
//!
//! - Apply a plan's [`rows`](Plan::rows) before its step; everything else in a plan may start at
//!   once and in any order. A write-back only reads pages whose step has been reported as done.
//! - With two steps in flight ([`BatchConfig::steps_in_flight_max`]), begin the second when the first has
//!   ended, with the rows that it was planned with, and take the input of a decode from where
//!   [`Decode::input`] says. Report steps in their order.
//! - With [`CopyConfig::load_back_overlaps`], launch the step of a plan while its load-backs run. Of the pages that
//!   a prefill [waits for](Prefill::waits_for), read a layer only after it has arrived. Report the load-back and the
//!   step in any order; if the load-back failed, the step may fail or go on with whatever was there. A step whose
//!   load-back was reported later takes effect only then: look into [`Scheduler::tokens`] for what was taken, not
//!   into what was reported. A load-back that hangs holds up the step, and with it everybody.
//! - Ask for a plan after every event, and when [`Scheduler::deadline`] has come.
//! - Report each step once, with one result for each request that was to produce tokens. An engine that
//!   would rather not plan between steps of decodes sets [`BatchConfig::repeats_max`] and repeats them as
//!   often as [`Plan::repeats_max`] says; whoever is submitted meanwhile waits for the last of them.
//! - Give each operation a final [`Outcome`] on each rank, however late. Until then its pages are
//!   set aside: the scheduler stops waiting when it takes too long, but it never reuses memory that
//!   a transfer may still touch.
//! - Call an outcome sound only if it is: `Done`, `Partial(n)` and `CalledOff(n)` are believed.
//! - What [`Plan::cancelled`] names may be stopped, and should be where it costs anything: a probe that has
//!   not begun need not be asked, a prefetch can end before its next pages. The outcome is then
//!   [`Outcome::CalledOff`], and like any other comes when nothing touches the pages any more. What arrived
//!   is kept, and L3 is asked for the rest again when somebody wants it. What has gone on to its end is
//!   reported as ever.
//!
//! # What the scheduler promises
//!
//! A step never reads a page that does not hold the KV of exactly the tokens before it. Any doubt
//! ends in computing again. Nothing waits without a bound, nothing grows without a limit, and the
//! same inputs give the same outputs, to the byte: this crate has no clock, no threads, no
//! randomness and does no IO.

#![forbid(unsafe_code)]

mod adapters;
mod admission;
mod admission_order;
mod audit;
mod backup;
mod batch;
mod config;
mod error;
mod event;
mod forward;
mod l3_path;
mod life;
mod line;
mod load_back;
mod namespaces;
mod operations;
mod pace;
mod plan;
mod prefetch;
mod prefill;
mod probe;
mod rates;
mod reading;
mod request;
mod requests;
mod room;
mod scheduler;
mod sharing;
mod stats;
mod step;
mod store_health;
mod waiting;
mod weights;
mod witness;
mod write_back;

pub use adapters::AdapterId;
pub use admission_order::AdmissionOrder;
pub use config::{
    BatchConfig, Config, ConfigBuilder, CopyConfig, L3Config, ModelConfig, PrefetchPolicy,
    QueueConfig, RateConfig,
};
pub use error::{ConfigError, EventError, StepsInFlight, SubmitError, UnknownRequest};
pub use event::{Event, Outcome, StepResult};
pub use l3_path::{L3Path, L3Piece};
pub use plan::{
    Copy, CopyDirection, Decode, Ended, L3Kind, L3Op, Plan, Prefill, RowChange, StepId,
};
pub use request::{Prompt, Request};
pub use scheduler::{Cached, Scheduler};
pub use stats::{Hits, OperationStats, Stats};
pub use terrace_cache::{
    CacheConfig, CacheUse, ContentKey, DevicePage, EvictionKind, Fault, Freed, HostPage, KvEvent,
    KvEvents, KvTier, Namespace, NodeView, PageContent, PageKey, Passage, PassageError,
    PassageFault, Reach, Sequence, TierName, TierUse, Token, Tokens, WritePolicy,
};
pub use terrace_fsm::{
    EventName, FailReason, IllegalTransition, OpId, RequestId, Slot, StateName, Time, Transition,
    replay,
};
pub use witness::{Seen, WatchedScheduler, Witness};
