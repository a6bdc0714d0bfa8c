//! State that all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use terrace_engine::Engine;
use terrace_routing::Publisher;
use tokio::sync::Semaphore;

use crate::auth::Gate;
use crate::config::{Config, Limits};
use crate::error::ApiError;
use crate::gpu::GpuWatch;
use crate::history::History;
use crate::metrics::Metrics;
use crate::parameters::random;
use crate::planting::Planting;
use crate::salts::RecentSalts;
use crate::served_model::ServedModel;
use crate::share::Shares;
use crate::structured::Grammars;

/// State that all requests share.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) engine: Engine,
    pub(crate) gpu: Option<GpuWatch>,
    /// Handle that plants wrong pages, on a server that allows it.
    pub(crate) planting: Option<Planting>,
    /// Publisher of KV events.
    pub(crate) kv_events: Option<Arc<Publisher>>,
    pub(crate) model: ServedModel,
    pub(crate) grammars: Grammars,
    pub(crate) gate: Gate,
    pub(crate) shares: Shares,
    pub(crate) limits: Limits,
    pub(crate) salts: Mutex<RecentSalts>,
    /// A permit for each byte of a body that is being read.
    pub(crate) bodies: Arc<Semaphore>,
    /// A permit for each large request that is being parsed, which takes many times its size.
    pub(crate) parsers: Semaphore,
    /// A permit for each viewer of the page.
    pub(crate) viewers: Arc<Semaphore>,
    /// Whether requests must name this machine in `Host`.
    pub(crate) local_names_only: bool,
    pub(crate) metrics: Metrics,
    /// Counts of the last minutes, for the page.
    pub(crate) history: Arc<History>,
    /// Identifies this run of the server, so that the page notices a restart.
    pub(crate) instance: String,
    closing: AtomicBool,
}

/// Viewers of the web page at a time.
const VIEWERS_MAX: usize = 16;

impl State {
    pub(crate) fn new(
        config: &Config,
        engine: Engine,
        model: ServedModel,
        local_names_only: bool,
    ) -> Self {
        const PARSERS: usize = 4;
        let limits = config.limits.clone();
        Self {
            metrics: Metrics::new(&model.name, config.metrics_vllm_names),
            engine,
            gpu: None,
            planting: None,
            kv_events: None,
            model,
            grammars: Grammars::default(),
            gate: Gate::new(&config.keys, config.operator_key.as_ref()),
            shares: Shares::new(config),
            salts: Mutex::default(),
            bodies: Arc::new(Semaphore::new(limits.bodies_max.as_u64() as usize)),
            parsers: Semaphore::new(PARSERS),
            viewers: Arc::new(Semaphore::new(VIEWERS_MAX)),
            limits,
            local_names_only,
            history: Arc::default(),
            instance: format!("{:016x}", random()),
            closing: AtomicBool::new(false),
        }
    }

    /// Refuses requests from this moment on.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// When the server takes no more requests.
    pub(crate) fn check_open(&self) -> Result<(), ApiError> {
        if let Some(reason) = self.engine.failure() {
            return Err(ApiError::device_lost(reason));
        }
        match self.closing.load(Ordering::Relaxed) {
            true => Err(ApiError::shutting_down()),
            false => Ok(()),
        }
    }
}
