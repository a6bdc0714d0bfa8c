//! Everything that happens to an engine comes through one channel, so that one task decides.

use std::time::Duration;

use terrace_scheduler::{Freed, OpId, Outcome, PageKey, RequestId};
use tokio::sync::{mpsc, oneshot};

use crate::engine::{Drained, SubmitError};
use crate::generation::{Generate, Generation, Sibling};
use crate::kv_feed::KvFeed;
use crate::model::{NewWeights, WeightsError};
use crate::stepper::StepJob;
use crate::view::{Figures, View};

/// Something that has happened.
#[derive(Debug)]
pub(crate) enum Happening {
    Submit {
        generate: Box<Generate>,
        siblings: Vec<Sibling>,
        reply: oneshot::Sender<Result<Vec<Generation>, SubmitError>>,
    },
    Abort(RequestId),
    Finish(RequestId),
    StepEnded(Box<StepJob>),
    Operation {
        op: OpId,
        outcome: Outcome,
    },
    Figures(oneshot::Sender<Figures>),
    View {
        salts: Vec<String>,
        nodes_max: usize,
        reply: oneshot::Sender<View>,
    },
    Namespaces {
        salts: Vec<String>,
        reply: oneshot::Sender<Vec<PageKey>>,
    },
    ClearCache(oneshot::Sender<Freed>),
    ClearDevice(oneshot::Sender<Freed>),
    /// Replied to after the device was checked.
    CheckDevice(oneshot::Sender<()>),
    ReplaceWeights(WeightsChange),
    /// The model has other weights, of this fingerprint, or has kept its own.
    WeightsReplaced(Result<String, WeightsError>),
    FollowKv {
        batches_max: usize,
        reply: oneshot::Sender<KvFeed>,
    },
    /// Somebody who has to start over has read what waited.
    KvFeedHasRoom,
    Shutdown {
        patience: Duration,
        reply: oneshot::Sender<Drained>,
    },
}

/// Somebody waits for other weights to be in use.
#[derive(Debug)]
pub(crate) struct WeightsChange {
    /// Until the model has been given them.
    pub(crate) weights: Option<NewWeights>,
    pub(crate) reply: oneshot::Sender<Result<(), WeightsError>>,
}

/// Where happenings are reported to. What is reported to an engine that has ended is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Happenings(mpsc::UnboundedSender<Happening>);

impl Happenings {
    pub(crate) fn channel() -> (Self, mpsc::UnboundedReceiver<Happening>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), receiver)
    }

    pub(crate) fn send(&self, happening: Happening) {
        let _ = self.0.send(happening);
    }

    /// Waits until nothing is taken in any more.
    pub(crate) async fn closed(&self) {
        self.0.closed().await;
    }
}
