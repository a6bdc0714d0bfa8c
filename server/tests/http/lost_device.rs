//! A device that fails for good: clients and supervisors are told, and the server ends by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use terrace_engine::{
    CopyJob, CpuDevice, CpuFence, CpuMemory, Device, Engine, Forward, KvLayout, Logits, ModelError,
    PageLayout, Step,
};
use terrace_server::Config;

use crate::client::{begin, get, read_to_end};
use crate::toy::Toy;
use crate::world::World;

const REASON: &str = "an illegal address was accessed";

/// Whether the device has failed.
type IsLost = Arc<AtomicBool>;

/// How a lost device shows.
#[derive(Clone, Copy, PartialEq)]
enum Loss {
    /// Calls fail.
    Fails,
    /// Steps do not end, and no call fails.
    Hangs,
}

struct FragileDevice {
    inner: CpuDevice,
    loss: Loss,
    is_lost: IsLost,
}

impl Device for FragileDevice {
    type Memory = CpuMemory;
    type Fence = CpuFence;

    fn pages(&self) -> u32 {
        self.inner.pages()
    }

    fn layout(&self) -> &PageLayout {
        self.inner.layout()
    }

    fn memory(&self) -> &CpuMemory {
        self.inner.memory()
    }

    fn host(&self) -> Option<&terrace_l3::Arena> {
        self.inner.host()
    }

    fn start_copy(&self, job: CopyJob<CpuFence>) {
        self.inner.start_copy(job);
    }

    fn failure(&self) -> Option<String> {
        let is_known = self.loss == Loss::Fails && self.is_lost.load(Ordering::Relaxed);
        is_known.then(|| REASON.to_owned())
    }

    fn step_timeout(&self) -> Option<Duration> {
        Some(Duration::from_secs(1))
    }
}

/// Its steps fail or hang once the device is lost.
struct FragileModel {
    toy: Toy,
    loss: Loss,
    is_lost: IsLost,
}

impl Forward for FragileModel {
    type Memory = CpuMemory;

    fn kv_layout(&self) -> KvLayout {
        self.toy.kv_layout()
    }

    fn vocabulary(&self) -> usize {
        self.toy.vocabulary()
    }

    fn positions_max(&self) -> u32 {
        self.toy.positions_max()
    }

    fn fingerprint(&self) -> String {
        self.toy.fingerprint()
    }

    fn forward(
        &mut self,
        memory: &CpuMemory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError> {
        self.toy.forward(memory, step, logits)?;
        match (self.is_lost.load(Ordering::Relaxed), self.loss) {
            (true, Loss::Fails) => return Err(ModelError(REASON.to_owned())),
            (true, Loss::Hangs) => {
                while self.is_lost.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            (false, Loss::Fails | Loss::Hangs) => {}
        }
        Ok(())
    }
}

async fn fragile(loss: Loss) -> (World, IsLost) {
    let is_lost = IsLost::default();
    let toy = Toy { step: Duration::from_millis(20), speech: None };
    let model = FragileModel { toy, loss, is_lost: is_lost.clone() };
    let device = |inner| FragileDevice { inner, loss, is_lost: is_lost.clone() };
    (World::on(Config::default(), model, device).await, is_lost)
}

/// Loses the device while a stream is answered, and returns the engine after the server has stopped.
async fn lose_during_a_stream(world: World, is_lost: &AtomicBool) -> Engine {
    let long = json!({ "prompt": "x".repeat(64), "max_tokens": 10_000, "stream": true });
    let mut stream = begin(world.address, &long).await;
    is_lost.store(true, Ordering::Relaxed);
    let rest = String::from_utf8(read_to_end(&mut stream).await).unwrap();
    assert!(rest.contains("the device has failed"), "{rest}");
    let engine = world.engine.clone();
    world.stopped().await;
    engine
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_lost_in_a_step_ends_streams_with_an_error_and_then_the_server() {
    let (world, is_lost) = fragile(Loss::Fails).await;
    assert_eq!(get(world.address, "/health").await.status, 200);
    let engine = lose_during_a_stream(world, &is_lost).await;
    assert_eq!(engine.failure(), Some(REASON));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_lost_while_nothing_is_computed_fails_the_health_check() {
    let (world, is_lost) = fragile(Loss::Fails).await;
    is_lost.store(true, Ordering::Relaxed);
    let health = get(world.address, "/health").await;
    assert_eq!(health.status, 503, "{health:?}");
    assert!(health.body.contains(REASON), "{health:?}");
    world.stopped().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_device_that_hangs_in_a_step_ends_streams_with_an_error_and_then_the_server() {
    let (world, is_lost) = fragile(Loss::Hangs).await;
    let engine = lose_during_a_stream(world, &is_lost).await;
    assert!(engine.failure().unwrap().contains("a step has not ended after"));
    is_lost.store(false, Ordering::Relaxed);
}
