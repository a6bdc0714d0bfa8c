//! Messages to the driver. All inputs of an engine arrive on one channel, so one task makes all
//! decisions.

use std::time::Duration;

use terrace_scheduler::{Freed, OpId, Outcome, PageKey, RequestId};
use tokio::sync::{mpsc, oneshot};

use crate::engine::{Drained, SubmitError};
use crate::generation::{Generate, Generation, Sibling};
use crate::kv_feed::KvFeed;
use crate::model::{NewWeights, WeightsError};
use crate::stepper::StepJob;
use crate::view::{Figures, View};

/// A message to the driver.
#[derive(Debug)]
pub(crate) enum DriverMessage {
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
    /// Answered after the device has been checked.
    CheckDevice(oneshot::Sender<()>),
    ReplaceWeights(WeightsChange),
    /// The model has replaced its weights and has this fingerprint, or has kept the old ones.
    WeightsReplaced(Result<String, WeightsError>),
    FollowKv {
        batches_max: usize,
        reply: oneshot::Sender<KvFeed>,
    },
    /// A subscriber that needs a snapshot has drained its queue.
    KvFeedHasRoom,
    Shutdown {
        patience: Duration,
        reply: oneshot::Sender<Drained>,
    },
}

/// A pending change of weights.
#[derive(Debug)]
pub(crate) struct WeightsChange {
    /// The new weights, until they are passed to the model.
    pub(crate) weights: Option<NewWeights>,
    pub(crate) reply: oneshot::Sender<Result<(), WeightsError>>,
}

/// Sender of driver messages. Messages to an engine that has ended are dropped.
#[derive(Clone, Debug)]
pub(crate) struct DriverSender(mpsc::UnboundedSender<DriverMessage>);

impl DriverSender {
    pub(crate) fn channel() -> (Self, mpsc::UnboundedReceiver<DriverMessage>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), receiver)
    }

    pub(crate) fn send(&self, message: DriverMessage) {
        let _ = self.0.send(message);
    }

    /// Waits until the driver no longer receives messages.
    pub(crate) async fn closed(&self) {
        self.0.closed().await;
    }
}
