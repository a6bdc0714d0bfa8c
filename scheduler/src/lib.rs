//! The scheduler decides, step by step, what an LLM inference engine computes next and which KV
//! pages move between device, host and L3. The engine and the L3 driver execute its decisions.
//!
//! # The scheduling loop
//!
//! An engine owns the memory and the clock, and repeats one loop: it takes in requests
//! ([`Scheduler::submit`], [`Scheduler::abort`]), asks for a plan ([`Scheduler::plan_into`]),
//! executes it, and reports the results ([`Scheduler::advance`]).
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
//! # Requirements for the engine
//!
//! - Apply a plan's [`rows`](Plan::rows) before its step. Everything else in a plan may start at
//!   once and in any order. A write-back only reads pages whose step has been reported as done.
//! - With two steps in flight ([`BatchConfig::steps_in_flight_max`]), start the second step when
//!   the first has ended, with the rows that it was planned with, and take the input of a decode
//!   from where [`Decode::input`] says. Report steps in order.
//! - With [`CopyConfig::load_back_overlaps`], launch the step of a plan while its load-backs run.
//!   Of the pages that a prefill [waits for](Prefill::waits_for), read a layer only after it has
//!   arrived. Report the load-back and the step in any order. If the load-back failed, the step may
//!   fail or continue with whatever was there. A step whose load-back is reported later takes
//!   effect only then: read [`Scheduler::tokens`] for what was accepted, not your own report. A
//!   load-back that hangs blocks the step, and with it all requests.
//! - Ask for a plan after every event, and when [`Scheduler::deadline`] has passed.
//! - Report each step once, with one result for each request that should produce tokens. To avoid
//!   planning between decode steps, set [`BatchConfig::repeats_max`] and repeat a step as often as
//!   [`Plan::repeats_max`] says. A request that is submitted meanwhile waits for the last
//!   repetition.
//! - Report a final [`Outcome`] for each operation on each rank, however late. Until then its pages
//!   are set aside: the scheduler stops waiting when it takes too long, but it never reuses memory
//!   that a transfer may still touch.
//! - Report success only if it is certain: `Done`, `Partial(n)` and `CalledOff(n)` are trusted.
//! - Operations in [`Plan::cancelled`] may be stopped, and should be if they cost anything: a probe
//!   that has not started need not be sent, and a prefetch can end before its next pages. The
//!   outcome is then [`Outcome::CalledOff`]. Like any other, it is reported when nothing touches
//!   the pages any more. Pages that arrived are kept, and L3 is probed for the rest when a request
//!   needs it. An operation that has run to its end is reported as usual.
//!
//! # Guarantees of the scheduler
//!
//! A step never reads a page that does not hold the KV of exactly the tokens before it. If there is
//! any doubt, the page is recomputed. Nothing waits without a bound, and nothing grows without a
//! limit. The same inputs give byte-identical outputs: this crate has no clock, no threads, no
//! randomness and no IO.

#![forbid(unsafe_code)]

mod adapters;
mod admission_order;
mod admission_queue;
mod arrivals;
mod backfill;
mod backups;
mod batch;
mod candidates;
mod config;
mod deferred;
mod error;
mod event;
mod hit_count;
mod ids;
mod in_flight;
mod l3_lookup;
mod l3_path;
mod l3_reads;
mod namespaces;
mod notices;
mod operations;
mod patience;
mod plan;
mod prefill_budget;
mod producers;
mod prompt_cost;
mod rates;
mod request;
mod requests;
mod results;
mod scheduler;
mod stats;
mod step;
mod steps;
mod store_health;
mod wait;
mod witness;
mod write_backs;

pub use admission_order::AdmissionOrder;
pub use config::{
    BatchConfig, Config, ConfigBuilder, CopyConfig, L3Config, ModelConfig, PrefetchPolicy,
    QueueConfig, RateConfig,
};
pub use error::{ConfigError, EventError, StepsInFlight, SubmitError, UnknownRequest};
pub use event::{Event, Outcome, StepResult};
pub use ids::{AdapterId, StepId};
pub use l3_path::{L3Path, L3Piece};
pub use plan::{Copy, CopyDirection, Decode, Ended, L3Kind, L3Op, Plan, Prefill, RowChange};
pub use request::{Prompt, Request};
pub use scheduler::{Cached, Scheduler};
pub use stats::{Hits, OperationStats, Stats};
pub use terrace_cache::{
    CacheConfig, CacheUse, ContentKey, DevicePage, EvictionKind, Fault, Freed, HostPage, KvEvent,
    KvEvents, KvTier, Namespace, NodeView, PageContent, PageKey, Passage, PassageError,
    PassageFault, PrefixDigest, Reach, Sequence, TierName, TierUse, Token, Tokens, WritePolicy,
};
pub use terrace_fsm::{
    EventName, FailReason, IllegalTransition, OpId, RequestId, Slot, StateName, Time, Transition,
    replay,
};
pub use witness::{Seen, WatchedScheduler, Witness};
