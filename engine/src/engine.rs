//! The public handle of the engine.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use terrace_l3::{Store, StoreError};
use terrace_scheduler::{Config, ConfigError, Freed, PageKey, Witness};
use tokio::sync::oneshot;

use crate::device::Device;
use crate::driver::Driver;
use crate::generation::{Generate, Generation, Sibling};
use crate::kv_feed::KvFeed;
use crate::layout::LayoutError;
use crate::message::{DriverMessage, DriverSender, WeightsChange};
use crate::model::{Model, ModelError, NewWeights, WeightsError};
use crate::view::{Figures, View};

/// Handle of a running engine. Clones share the engine. It ends when it is shut down or its runtime
/// is dropped.
#[derive(Clone, Debug)]
pub struct Engine {
    messages: DriverSender,
    failure: Arc<OnceLock<String>>,
}

impl Engine {
    /// Starts an engine on the current tokio runtime.
    ///
    /// The KV identity ([`Config::model`]) is filled in from the model, and the tier sizes from the
    /// device. Without a store or without host pages there is no L3.
    ///
    /// # Errors
    /// Fails if the configuration, the store or the system does not permit the start.
    pub fn start<M, D>(
        config: Config,
        model: M,
        device: Arc<D>,
        store: Option<Arc<dyn Store>>,
    ) -> Result<Self, StartError>
    where
        D: Device,
        M: Model<Memory = D::Memory, Fence = D::Fence>,
    {
        Self::start_watched(config, model, device, store, Vec::new())
    }

    /// Starts an engine, as [`start`](Self::start) does, with witnesses that observe the calls of
    /// its scheduler.
    ///
    /// # Errors
    /// Fails if the configuration, the store or the system does not permit the start.
    pub fn start_watched<M, D>(
        config: Config,
        model: M,
        device: Arc<D>,
        store: Option<Arc<dyn Store>>,
        witnesses: Vec<Box<dyn Witness>>,
    ) -> Result<Self, StartError>
    where
        D: Device,
        M: Model<Memory = D::Memory, Fence = D::Fence>,
    {
        let (messages, happened) = DriverSender::channel();
        let driver = Driver::new(config, model, device, store, witnesses, messages.clone())?;
        let failure = driver.failure();
        tokio::spawn(driver.run(happened));
        Ok(Self { messages, failure })
    }

    /// Submits a request.
    ///
    /// # Errors
    /// Returns the reason for which the request is refused.
    ///
    /// # Panics
    /// Never: an accepted request has an answer.
    pub async fn submit(&self, generate: Generate) -> Result<Generation, SubmitError> {
        let mut answers = self.submit_answers(generate, Vec::new()).await?;
        Ok(answers.pop().expect("whatever is taken has an answer"))
    }

    /// Submits a request for several answers to one prompt; either all are accepted or none. The
    /// request's own answer comes first, then those of its siblings. The prompt is stored once, and
    /// its shareable KV is computed or fetched once.
    ///
    /// # Errors
    /// Returns the reason for which the request is refused.
    pub async fn submit_answers(
        &self,
        generate: Generate,
        siblings: Vec<Sibling>,
    ) -> Result<Vec<Generation>, SubmitError> {
        let generate = Box::new(generate);
        self.ask(|reply| DriverMessage::Submit { generate, siblings, reply })
            .await
            .unwrap_or(Err(SubmitError::ShuttingDown))
    }

    /// Returns the figures; none once the engine has ended.
    pub async fn figures(&self) -> Option<Figures> {
        self.ask(DriverMessage::Figures).await
    }

    /// Returns the complete view, with at most `nodes_max` nodes of the cache tree of the given
    /// salts; none once the engine has ended.
    pub async fn view(&self, salts: Vec<String>, nodes_max: usize) -> Option<View> {
        self.ask(|reply| DriverMessage::View { salts, nodes_max, reply }).await
    }

    /// Evicts all unused device and host pages, and returns how many; none once the engine has
    /// ended. L3 is not changed.
    pub async fn clear_cache(&self) -> Option<Freed> {
        self.ask(DriverMessage::ClearCache).await
    }

    /// Drops every unused page on the device and returns the number of pages that this freed; `None` once the engine has
    /// ended. Host and L3 keep their copies.
    pub async fn clear_device(&self) -> Option<Freed> {
        self.ask(DriverMessage::ClearDevice).await
    }

    /// Replaces the weights from the next step on. The meaning of `weights` depends on the model
    /// ([`Model::replace_weights`]). Running requests keep their tokens, and their KV is
    /// recomputed. KV computed with the old weights is no longer a hit on any tier.
    ///
    /// # Errors
    /// Returns the reason for which the engine keeps its weights.
    pub async fn replace_weights(&self, weights: NewWeights) -> Result<(), WeightsError> {
        self.ask(|reply| {
            DriverMessage::ReplaceWeights(WeightsChange { weights: Some(weights), reply })
        })
        .await
        .unwrap_or(Err(WeightsError::Ended))
    }

    /// Subscribes to changes of the cache content by tier, for routers. At most `batches_max`
    /// batches of events are queued; a reader that falls further behind restarts from a snapshot.
    /// None once the engine has ended.
    ///
    /// Events are recorded while there is a subscriber. A batch above `cache.kv_event_keys_max`
    /// keys is replaced by a snapshot.
    pub async fn kv_events(&self, batches_max: usize) -> Option<KvFeed> {
        self.ask(|reply| DriverMessage::FollowKv { batches_max, reply }).await
    }

    /// Returns the namespaces that KV events use for requests with these salts; none once the
    /// engine has ended.
    pub async fn namespaces(&self, salts: Vec<String>) -> Option<Vec<PageKey>> {
        self.ask(|reply| DriverMessage::Namespaces { salts, reply }).await
    }

    /// Shuts the engine down: refuses new requests, lets running requests finish for at most
    /// `patience`, completes writes to L3, and shuts the store down.
    pub async fn shutdown(&self, patience: Duration) -> Drained {
        self.ask(|reply| DriverMessage::Shutdown { patience, reply }).await.unwrap_or_default()
    }

    /// Waits until the engine has ended: after a shutdown, a device failure
    /// ([`failure`](Self::failure)) or a panic.
    pub async fn ended(&self) {
        self.messages.closed().await;
    }

    /// Returns the reason for which the device is lost, if it has failed permanently. The engine
    /// then ends all requests ([`EndReason::DeviceLost`](crate::EndReason::DeviceLost)) and itself.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Checks the device, and returns when [`failure`](Self::failure) is up to date. With steps in
    /// flight it returns at once: their results show a failure.
    pub async fn check_device(&self) {
        let _ = self.ask(DriverMessage::CheckDevice).await;
    }

    async fn ask<T>(
        &self,
        question: impl FnOnce(oneshot::Sender<T>) -> DriverMessage,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(question(reply));
        answer.await.ok()
    }
}

/// The work that a shutdown abandoned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Requests cancelled because they took longer than the patience.
    pub aborted: u32,
    /// Transfers in flight when the patience ended.
    pub abandoned_transfers: u32,
}

/// The reason for which a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The engine is shutting down.
    #[error("the engine is shutting down: try again later")]
    ShuttingDown,
    /// The sequence would exceed the model's positions.
    #[error(
        "a prompt of {prompt_tokens} tokens plus {max_new_tokens} new tokens exceed this model's \
         context length of {positions_max}: shorten the prompt or ask for fewer tokens"
    )]
    TooLong {
        /// Tokens in the prompt.
        prompt_tokens: usize,
        /// New tokens asked for.
        max_new_tokens: u32,
        /// Positions of the model.
        positions_max: u32,
    },
    /// The prompt has a token outside the vocabulary.
    #[error("token {token} does not exist: the model has {vocabulary} tokens")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
    /// The model does not have the adapter.
    #[error("the model has no adapter '{adapter}': {}", those_there_are(known))]
    UnknownAdapter {
        /// The adapter.
        adapter: String,
        /// Adapters of the model.
        known: Vec<String>,
    },
    /// The model does not support passages.
    #[error("this model accepts only tokens: it does not support prompts with passages")]
    Passages,
    /// The scheduler refuses the request.
    #[error(transparent)]
    Scheduler(#[from] terrace_scheduler::SubmitError),
}

fn those_there_are(adapters: &[String]) -> String {
    match adapters {
        [] => "it has none".to_owned(),
        some => format!("it has {}", some.join(", ")),
    }
}

/// The reason for which an engine cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The store cannot register the host memory.
    #[error("the store cannot use the host memory: {0}")]
    Store(#[from] StoreError),
    /// The model's KV layout is invalid.
    #[error(transparent)]
    KvLayout(#[from] LayoutError),
    /// The page layouts of device and model differ.
    #[error(
        "a page of the model has {model}, and a page of the device has {device}: create the device \
         with `KvLayout::pages` of the model and the page size"
    )]
    Layout {
        /// Page layout of the model.
        model: String,
        /// Page layout of the device.
        device: String,
    },
    /// The configuration overlaps load-backs with steps, which the model does not support.
    #[error(
        "copies.load_back_overlaps: the model cannot wait for layers that are still being loaded \
         (`Model::waits_for_layers`): leave it out"
    )]
    Overlap,
    /// The model failed to start.
    #[error("the model cannot start: {0}")]
    Model(#[from] ModelError),
    /// The system lacks a resource.
    #[error("cannot start the model's thread: {0}")]
    Io(#[from] std::io::Error),
}
