//! The engine drives a scheduler: it requests plans, starts copies and L3 transfers, runs the
//! model, and reports the results. A program that embeds it submits requests and reads tokens.
//!
//! One task makes all decisions ([`Engine`]). One thread launches the model's steps and another
//! waits for them ([`Model`]). Copies run on the device's threads ([`Device`]), and L3 transfers
//! run as tasks on the [`Store`](terrace_l3::Store). The deciding task does not wait for any of
//! them, nor for clients: they send it messages.
//!
//! The engine does not touch KV bytes. The model computes pages, the device copies them, and they
//! move between host memory and L3 without an intermediate copy.

mod batch;
mod call_off;
mod cpu;
mod device;
mod driver;
mod engine;
mod forward;
mod generation;
mod histogram;
mod kv_feed;
mod layout;
mod live;
mod logits;
mod message;
mod model;
mod sampling;
mod stepper;
mod transfers;
mod view;

pub use batch::{Arrival, Awaited, Batch, Choice, PageTable, RowChange, Span, Step, Wanted};
pub use cpu::{CpuDevice, CpuFence, CpuMemory, StepPages};
pub use device::{CopyError, CopyJob, CopyProgress, Device, LayerMarks};
pub use engine::{Drained, Engine, StartError, SubmitError};
pub use forward::{Forward, Threaded, ThreadedTicket};
pub use generation::{EndReason, Ending, Generate, Generation, Sibling, Ticket, Update};
pub use histogram::TimeHistogram;
pub use kv_feed::KvFeed;
pub use layout::{KvForm, KvLayout, KvShape, KvType, LayoutError, PageLayout, Slab};
pub use logits::Logits;
pub use model::{Finished, Model, ModelError, NewWeights, StepLimits, StepTicket, WeightsError};
pub use sampling::chooser::{Chooser, Chosen, Output};
pub use sampling::grammar::{Allowed, Constraint, Grammar, GrammarError, Mask};
pub use sampling::logprobs::{Logprobs, Scorer};
pub use sampling::shaping::{Continuation, Shaping};
pub use sampling::{Choosing, Sampler, Sampling};
pub use terrace_scheduler::{KvEvent, KvEvents, KvTier};
pub use view::{Figures, Moment, RequestView, StepFigures, View};
