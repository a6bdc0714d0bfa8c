//! A server for one test.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use terrace_engine::{
    CpuDevice, CpuFence, CpuMemory, Device, Drained, Engine, Figures, Forward, Threaded,
};
use terrace_scheduler::{BatchConfig, CacheConfig, QueueConfig};
use terrace_server::{BindError, Config, GpuWatch, ServedModel, Server, ToolFormat};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::toy::Toy;

pub(crate) const NAME: &str = "toy";

/// A running server.
pub(crate) struct World {
    pub(crate) address: SocketAddr,
    pub(crate) engine: Engine,
    stop: Option<oneshot::Sender<()>>,
    running: JoinHandle<Drained>,
}

impl World {
    /// A server whose steps take no time.
    pub(crate) async fn quick() -> Self {
        Self::new(Config::default(), Duration::ZERO).await
    }

    /// A server whose steps take so long.
    pub(crate) async fn new(config: Config, step: Duration) -> Self {
        Self::with(config, Toy { step, speech: None }, |_| {}).await
    }

    /// A quick server at an address of its own.
    pub(crate) async fn at(config: Config) -> Self {
        let toy = Toy { step: Duration::ZERO, speech: None };
        let (server, engine) = Self::bind_at(config, toy, |_| {}).await;
        Self::run(server, engine)
    }

    /// A server of a toy that clients may see as something else.
    pub(crate) async fn with(
        config: Config,
        model: Toy,
        change: impl FnOnce(&mut ServedModel),
    ) -> Self {
        let (server, engine) = Self::bind(config, model, change).await;
        Self::run(server, engine)
    }

    /// A server of a quick toy that tells of a GPU.
    pub(crate) async fn with_gpu(config: Config, gpu: GpuWatch) -> Self {
        let toy = Toy { step: Duration::ZERO, speech: None };
        let (server, engine) = Self::bind(config, toy, |_| {}).await;
        Self::run(server.with_gpu(Some(gpu)), engine)
    }

    async fn bind(
        config: Config,
        model: Toy,
        change: impl FnOnce(&mut ServedModel),
    ) -> (Server, Engine) {
        Self::bind_at(Config { listen: "127.0.0.1:0".to_owned(), ..config }, model, change).await
    }

    async fn bind_at(
        config: Config,
        model: Toy,
        change: impl FnOnce(&mut ServedModel),
    ) -> (Server, Engine) {
        Self::bind_on(config, model, |device| device, change).await
    }

    /// A server of a model on a device made of the one with its pages.
    pub(crate) async fn on<D>(
        config: Config,
        model: impl Forward<Memory = CpuMemory>,
        device: impl FnOnce(CpuDevice) -> D,
    ) -> Self
    where
        D: Device<Memory = CpuMemory, Fence = CpuFence>,
    {
        let config = Config { listen: "127.0.0.1:0".to_owned(), ..config };
        let (server, engine) = Self::bind_on(config, model, device, |_| {}).await;
        Self::run(server, engine)
    }

    async fn bind_on<D>(
        config: Config,
        model: impl Forward<Memory = CpuMemory>,
        device: impl FnOnce(CpuDevice) -> D,
        change: impl FnOnce(&mut ServedModel),
    ) -> (Server, Engine)
    where
        D: Device<Memory = CpuMemory, Fence = CpuFence>,
    {
        Self::try_bind(config, model, device, change).await.unwrap()
    }

    async fn try_bind<D>(
        config: Config,
        model: impl Forward<Memory = CpuMemory>,
        device: impl FnOnce(CpuDevice) -> D,
        change: impl FnOnce(&mut ServedModel),
    ) -> Result<(Server, Engine), BindError>
    where
        D: Device<Memory = CpuMemory, Fence = CpuFence>,
    {
        let device_pages = 4096;
        let layout = model.kv_layout().pages(config.page_size).unwrap();
        let scheduler = terrace_scheduler::Config {
            cache: CacheConfig { page_size: config.page_size, ..CacheConfig::default() },
            batch: BatchConfig { running_max: 64, step_tokens_max: 512, ..BatchConfig::default() },
            queue: QueueConfig {
                requests_max: config.limits.requests_max,
                ..QueueConfig::default()
            },
            ..terrace_scheduler::Config::default()
        };
        let device = Arc::new(device(CpuDevice::new(device_pages, 0, layout).unwrap()));
        let engine = Engine::start(scheduler, Threaded::new(model), device, None).unwrap();
        let built_in = terrace_model::built_in(1);
        let mut model = ServedModel {
            name: NAME.to_owned(),
            tokenizer: built_in.tokenizer,
            tool_format: ToolFormat::of(&built_in.chat),
            marks_reasoning: false,
            chat: built_in.chat,
            stop_tokens: built_in.stop_tokens.into(),
            tokens_max: device_pages * config.page_size,
            root: "nowhere".to_owned(),
            created: 1_700_000_000,
            fingerprint: "toy".to_owned(),
        };
        change(&mut model);
        Server::bind(&config, engine.clone(), model).await.map(|server| (server, engine))
    }

    /// Why a server cannot have its address.
    pub(crate) async fn bind_error(config: Config) -> BindError {
        let bound = Self::try_bind(config, Toy::default(), |device| device, |_| {}).await;
        bound.map(|_| ()).unwrap_err()
    }

    fn run(server: Server, engine: Engine) -> Self {
        let address = server.address();
        let (stop, told) = oneshot::channel();
        let running = tokio::spawn(server.run(async {
            let _ = told.await;
        }));
        Self { address, engine, stop: Some(stop), running }
    }

    pub(crate) async fn figures(&self) -> Figures {
        self.engine.figures().await.unwrap()
    }

    /// Waits until the figures are as they should be.
    pub(crate) async fn wait_for(&self, what: &str, is_so: impl Fn(&Figures) -> bool) {
        for _ in 0..1000 {
            if is_so(&self.figures().await) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what} did not happen: {:?}", self.figures().await.scheduler);
    }

    /// Tells the server to stop.
    pub(crate) fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits until it has.
    pub(crate) async fn stopped(self) -> Drained {
        tokio::time::timeout(Duration::from_secs(30), self.running).await.unwrap().unwrap()
    }
}
