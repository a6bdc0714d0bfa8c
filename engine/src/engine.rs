//! The engine as its users see it.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use terrace_l3::{Store, StoreError};
use terrace_scheduler::{Config, ConfigError, Freed, PageKey, Witness};
use tokio::sync::oneshot;

use crate::device::Device;
use crate::driver::Driver;
use crate::generation::{Generate, Generation, Sibling};
use crate::happening::{Happening, Happenings, WeightsChange};
use crate::kv_feed::KvFeed;
use crate::layout::LayoutError;
use crate::model::{Model, ModelError, NewWeights, WeightsError};
use crate::view::{Figures, View};

/// A running engine. Clones are the same engine; it ends when it is shut down or its runtime is.
#[derive(Clone, Debug)]
pub struct Engine {
    happenings: Happenings,
    failure: Arc<OnceLock<String>>,
}

impl Engine {
    /// Starts an engine on the tokio runtime that this is called from.
    ///
    /// What KV depends on ([`Config::model`]) is filled in from the model, and the sizes of the tiers
    /// from the device. Without a store there is no
    /// L3, and without host pages neither.
    ///
    /// # Errors
    /// What about the configuration, the store or the system cannot work.
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

    /// Starts an engine, as [`start`](Self::start) does, whose scheduler's calls are told to witnesses.
    ///
    /// # Errors
    /// What about the configuration, the store or the system cannot work.
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
        let (happenings, happened) = Happenings::channel();
        let driver = Driver::new(config, model, device, store, witnesses, happenings.clone())?;
        let failure = driver.failure();
        tokio::spawn(driver.run(happened));
        Ok(Self { happenings, failure })
    }

    /// Takes a request.
    ///
    /// # Errors
    /// Why it cannot be taken.
    ///
    /// # Panics
    /// Never: whatever is taken has an answer.
    pub async fn submit(&self, generate: Generate) -> Result<Generation, SubmitError> {
        let mut answers = self.submit_answers(generate, Vec::new()).await?;
        Ok(answers.pop().expect("whatever is taken has an answer"))
    }

    /// Takes a request for several answers to one prompt, all or none: that of the request itself comes
    /// first, then those of its siblings. The prompt is held once, and what the cache can share of it is
    /// computed or fetched once.
    ///
    /// # Errors
    /// Why they cannot be taken.
    pub async fn submit_answers(
        &self,
        generate: Generate,
        siblings: Vec<Sibling>,
    ) -> Result<Vec<Generation>, SubmitError> {
        let generate = Box::new(generate);
        self.ask(|reply| Happening::Submit { generate, siblings, reply })
            .await
            .unwrap_or(Err(SubmitError::ShuttingDown))
    }

    /// Figures; nothing once the engine has ended.
    pub async fn figures(&self) -> Option<Figures> {
        self.ask(Happening::Figures).await
    }

    /// The whole picture, with so many nodes of what the cache holds for some salts at the most;
    /// nothing once the engine has ended.
    pub async fn view(&self, salts: Vec<String>, nodes_max: usize) -> Option<View> {
        self.ask(|reply| Happening::View { salts, nodes_max, reply }).await
    }

    /// Forgets everything that device and host hold and nobody uses, and says how much that was; nothing
    /// once the engine has ended. L3 keeps what it has.
    pub async fn clear_cache(&self) -> Option<Freed> {
        self.ask(Happening::ClearCache).await
    }

    /// Forgets every unused page on the device and returns how many pages that freed; `None` once the engine has ended.
    /// Host and L3 keep their copies.
    pub async fn clear_device(&self) -> Option<Freed> {
        self.ask(Happening::ClearDevice).await
    }

    /// Computes with other weights from the next step on: what they are depends on the model
    /// ([`Model::replace_weights`]). Requests that run go on with the tokens that they have, whose KV is computed anew;
    /// nothing that was computed with the old weights is found again, on any tier.
    ///
    /// # Errors
    /// Why the engine goes on with the weights that it has.
    pub async fn replace_weights(&self, weights: NewWeights) -> Result<(), WeightsError> {
        self.ask(|reply| Happening::ReplaceWeights(WeightsChange { weights: Some(weights), reply }))
            .await
            .unwrap_or(Err(WeightsError::Ended))
    }

    /// What the cache holds in each tier, as it changes, for routers. So many batches of events may wait to
    /// be read; who falls behind further starts over with a snapshot. Nothing once the engine has ended.
    ///
    /// Events are recorded while somebody reads them. `cache.kv_event_keys_max` bounds what one batch may
    /// have, beyond which it is a snapshot too.
    pub async fn kv_events(&self, batches_max: usize) -> Option<KvFeed> {
        self.ask(|reply| Happening::FollowKv { batches_max, reply }).await
    }

    /// The namespaces of requests with these salts, by which KV events name them; nothing once the engine has ended.
    pub async fn namespaces(&self, salts: Vec<String>) -> Option<Vec<PageKey>> {
        self.ask(|reply| Happening::Namespaces { salts, reply }).await
    }

    /// Takes no more requests, lets those that run finish as far as `patience` goes, stores in L3 what
    /// is on its way there, and shuts the store down.
    pub async fn shutdown(&self, patience: Duration) -> Drained {
        self.ask(|reply| Happening::Shutdown { patience, reply }).await.unwrap_or_default()
    }

    /// Waits until the engine has ended: because it was shut down, because its device has failed
    /// ([`failure`](Self::failure)), or because it died of a defect.
    pub async fn ended(&self) {
        self.happenings.closed().await;
    }

    /// The reason why the device can do nothing more, if it has failed for good. The engine ends all requests then
    /// ([`EndReason::DeviceLost`](crate::EndReason::DeviceLost)), and itself.
    #[must_use]
    pub fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    /// Has the engine check its device, and returns when [`failure`](Self::failure) is up to date. A device that
    /// computes is not disturbed: its steps tell.
    pub async fn check_device(&self) {
        let _ = self.ask(Happening::CheckDevice).await;
    }

    async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Happening) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.happenings.send(question(reply));
        answer.await.ok()
    }
}

/// What a shutdown left undone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Requests that were called off because they took longer than the patience.
    pub aborted: u32,
    /// Transfers that had not ended when the patience did.
    pub abandoned_transfers: u32,
}

/// A request that cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The engine takes no more requests.
    #[error("the engine is shutting down: try again later")]
    ShuttingDown,
    /// The sequence would be longer than the model was made for.
    #[error(
        "a prompt of {prompt_tokens} tokens plus {max_new_tokens} new tokens exceed this model's \
         context length of {positions_max}: shorten the prompt or ask for fewer tokens"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// New tokens asked for.
        max_new_tokens: u32,
        /// What the model has.
        positions_max: u32,
    },
    /// The prompt has a token that the model does not know.
    #[error("token {token} does not exist: the model has {vocabulary} tokens")]
    UnknownToken {
        /// The token.
        token: u32,
        /// How many there are.
        vocabulary: usize,
    },
    /// The model has no such adapter.
    #[error("the model has no adapter '{adapter}': {}", those_there_are(known))]
    UnknownAdapter {
        /// The adapter.
        adapter: String,
        /// Those that it has.
        known: Vec<String>,
    },
    /// The model does not know what passages say.
    #[error("this model accepts only tokens: it does not support prompts with passages")]
    Passages,
    /// The scheduler does not take it.
    #[error(transparent)]
    Scheduler(#[from] terrace_scheduler::SubmitError),
}

fn those_there_are(adapters: &[String]) -> String {
    match adapters {
        [] => "it has none".to_owned(),
        some => format!("it has {}", some.join(", ")),
    }
}

/// An engine that cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The configuration cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The store does not take the host memory.
    #[error("the store cannot use the host memory: {0}")]
    Store(#[from] StoreError),
    /// The model's KV cannot lie so.
    #[error(transparent)]
    KvLayout(#[from] LayoutError),
    /// Device and model do not belong together.
    #[error(
        "a page of the model has {model}, and a page of the device has {device}: create the device \
         with `KvLayout::pages` of the model and the page size"
    )]
    Layout {
        /// What the model needs.
        model: String,
        /// What the device has.
        device: String,
    },
    /// Steps are to begin before what they read has been loaded.
    #[error(
        "copies.load_back_overlaps: the model cannot wait for layers that are still being loaded \
         (`Model::waits_for_layers`): leave it out"
    )]
    Overlap,
    /// The model does not start.
    #[error("the model cannot start: {0}")]
    Model(#[from] ModelError),
    /// The system does not give what is needed.
    #[error("cannot start the model's thread: {0}")]
    Io(#[from] std::io::Error),
}
