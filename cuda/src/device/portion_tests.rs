//! Copies of enough pages to be submitted in portions.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use terrace_cache::{Cache, CacheConfig, DevicePages, HostPages};
use terrace_engine::{CopyError, CopyProgress, KvLayout, KvType};
use terrace_scheduler::OpId;

use super::*;
use crate::fake::FakeDriver;
use crate::portions::portions;
use crate::stats::LinkStats;

const SOON: Duration = Duration::from_secs(20);
const LOAD: CopyDirection = CopyDirection::LoadBack;
const WRITE: CopyDirection = CopyDirection::WriteBack;
const PAGES: usize = 3000;
/// Layers, each a separate group if all pages are copied.
const LAYERS: usize = 4;
const LAYER_BYTES: usize = 2048;

/// A device and all of its pages.
struct Scene {
    fake: FakeDriver,
    device: CudaDevice,
    device_pages: DevicePages,
    host_pages: HostPages,
}

fn layout() -> PageLayout {
    let layout = KvLayout::keys_and_values(KvType::U8, LAYERS, 1, LAYER_BYTES / 2);
    layout.pages(1).unwrap()
}

fn config() -> CudaConfig {
    let ways = CopyWays { to_device_batch_from: None, to_host_batch_from: None };
    let pages = PAGES as u32;
    CudaConfig {
        device_pages: pages,
        host_pages: pages,
        layout: layout(),
        canary: None,
        ways: Some(ways),
    }
}

impl Scene {
    fn new(config: CudaConfig) -> Self {
        let fake = FakeDriver::new(1 << 30, 1);
        let device = CudaDevice::with_driver(Arc::new(fake.clone()), config, None).unwrap();
        let pages = PAGES as u32;
        let pages =
            CacheConfig { device_pages: pages, host_pages: pages, ..CacheConfig::default() };
        let mut cache = Cache::new(&pages);
        let device_pages = cache.take_device_pages(PAGES).unwrap();
        let host_pages = cache.take_host_pages(PAGES).unwrap();
        Self { fake, device, device_pages, host_pages }
    }

    fn host(&self) -> &Arena {
        self.device.host().unwrap()
    }

    /// Returns the slot of the host page that belongs to the n-th device page.
    fn host_slot(&self, n: usize) -> u32 {
        self.host_pages.as_slice()[n * 7 % PAGES].slot()
    }

    /// Starts a copy of all pages.
    fn start(&self, direction: CopyDirection) -> (CopyProgress, Receiver<Result<(), CopyError>>) {
        let (sender, receiver) = mpsc::channel();
        let progress = CopyProgress::new(OpId(1));
        let ended = progress.clone();
        self.device.start_copy(CopyJob {
            direction,
            device_pages: self.device_pages.as_slice().to_vec(),
            host_pages: (0..PAGES).map(|n| self.host_pages.as_slice()[n * 7 % PAGES]).collect(),
            after: None,
            progress: progress.clone(),
            done: Box::new(move |copied| {
                ended.end(copied.clone());
                let _ = sender.send(copied);
            }),
        });
        (progress, receiver)
    }

    fn copy(&self, direction: CopyDirection) -> Result<(), CopyError> {
        self.start(direction).1.recv_timeout(SOON).unwrap()
    }

    fn fill_device(&self, salt: usize) {
        for (n, page) in self.device_pages.as_slice().iter().enumerate() {
            self.fake.write(self.device.memory().address(*page), &bytes(n, salt));
        }
    }
}

/// Returns the content of the n-th device page.
fn bytes(n: usize, salt: usize) -> Vec<u8> {
    (0..LAYERS * LAYER_BYTES).map(|at| (at * 31 + n * 101 + n / 256 * 7 + salt) as u8).collect()
}

#[test]
fn large_copy_moves_every_byte() {
    for batch_from in [None, Some(1)] {
        let ways = CopyWays { to_device_batch_from: batch_from, to_host_batch_from: batch_from };
        let scene = Scene::new(CudaConfig { ways: Some(ways), ..config() });
        scene.fill_device(1);
        scene.copy(WRITE).unwrap();
        scene.fill_device(2);
        for n in 0..PAGES {
            assert_eq!(*scene.host().source(scene.host_slot(n)).unwrap(), *bytes(n, 1), "{n}");
        }
        let (progress, done) = scene.start(LOAD);
        for layer in 0..LAYERS {
            progress.wait_for(layer).unwrap();
        }
        done.recv_timeout(SOON).unwrap().unwrap();
        for (n, page) in scene.device_pages.as_slice().iter().enumerate() {
            let found = scene.fake.read(scene.device.memory().address(*page), LAYERS * LAYER_BYTES);
            assert_eq!(found, bytes(n, 1), "{n}");
        }
        let stats = scene.device.stats();
        let launches = |link: LinkStats| (link.by_kernel + link.by_batch) as usize;
        let count = portions(PAGES, LAYER_BYTES).len();
        assert!(count > 2);
        assert_eq!(launches(stats.to_host), portions(PAGES, LAYERS * LAYER_BYTES).len());
        assert_eq!(launches(stats.to_device), 2 * count + LAYERS - 2, "the first and last layer");
        assert_eq!(scene.fake.violations(), [""; 0]);
    }
}

#[test]
fn pages_are_released_while_others_are_copied() {
    for direction in [LOAD, WRITE] {
        let scene = Scene::new(config());
        scene.fake.change_faults(|faults| faults.delay_us_max = 20_000);
        let (_, done) = scene.start(direction);
        let began = Instant::now();
        let (first, last) = (scene.host_slot(0), scene.host_slot(PAGES - 1));
        while scene.host().is_lent(first) || !scene.host().is_lent(last) {
            assert!(done.try_recv().is_err(), "the first page is given back with the last");
            assert!(began.elapsed() < SOON);
            std::thread::yield_now();
        }
        done.recv_timeout(SOON).unwrap().unwrap();
        assert!((0..PAGES).all(|n| !scene.host().is_lent(scene.host_slot(n))));
    }
}

#[test]
fn unavailable_page_fails_only_its_copy() {
    for direction in [LOAD, WRITE] {
        let scene = Scene::new(config());
        let in_use = scene.host().target(scene.host_slot(PAGES - 1)).unwrap();
        let Err(CopyError::Failed(why)) = scene.copy(direction) else { panic!("it has the page") };
        assert!(why.contains("in use"), "{why}");
        assert!((0..PAGES - 1).all(|n| !scene.host().is_lent(scene.host_slot(n))));
        drop(in_use);
        scene.copy(direction).unwrap();
        assert_eq!(scene.fake.violations(), [""; 0]);
    }
}

#[test]
fn pages_of_every_portion_are_compared() {
    for direction in [LOAD, WRITE] {
        let canary = Some(CanaryConfig { one_page_in: 100 });
        let scene = Scene::new(CudaConfig { canary, ..config() });
        scene.fill_device(3);
        scene.copy(direction).unwrap();
        scene.device.corrupt_next_copy(direction);
        let Err(CopyError::Failed(why)) = scene.copy(direction) else { panic!("not noticed") };
        assert!(why.contains("1 of 30 verified pages"), "{why}");
        scene.copy(direction).unwrap();
        let stats = scene.device.stats();
        let link = if direction == LOAD { stats.to_device } else { stats.to_host };
        assert_eq!((link.pages_compared, link.pages_corrupt, link.failed), (90, 1, 1));
    }
}

#[test]
fn failed_calls_return_all_pages() {
    for direction in [LOAD, WRITE] {
        for call in ["record", "wait", "fetch", "copy_by_kernel", "sleep_until", "create_event"] {
            for after in 1..3 {
                let scene = Scene::new(config());
                scene.fake.fail(call, after);
                let Err(CopyError::Failed(why)) = scene.copy(direction) else {
                    panic!("{call} has not failed")
                };
                assert!(why.contains(call), "{why}");
                assert!((0..PAGES).all(|n| !scene.host().is_lent(scene.host_slot(n))), "{call}");
                let Scene { fake, device, .. } = scene;
                drop(device);
                assert_eq!((fake.left_behind(), fake.violations()), ([0; 5], Vec::new()), "{call}");
            }
        }
    }
}

#[test]
fn room_serves_devices_in_succession() {
    let fake = FakeDriver::new(1 << 30, 1);
    let driver: Arc<dyn Driver> = Arc::new(fake.clone());
    let host_bytes = Room::host_bytes(PAGES as u32, LAYERS * LAYER_BYTES);
    let room = Room::with_driver(&driver, host_bytes, PAGES * LAYERS * LAYER_BYTES).unwrap();
    let make = |pages: u32| {
        let config = CudaConfig { device_pages: pages, host_pages: pages, ..config() };
        CudaDevice::with_driver(driver.clone(), config, Some(&room))
    };
    assert!(matches!(make(PAGES as u32 + 1), Err(CudaError::Config(_))), "they do not fit");
    let first = make(PAGES as u32).unwrap();
    let host = first.host().unwrap().clone();
    assert!(matches!(make(10), Err(CudaError::Config(_))), "another has it");
    drop(first);
    assert!(matches!(make(10), Err(CudaError::Config(_))), "its pages are in use");
    host.target(9).unwrap().fill(5);
    drop(host);
    let second = make(10).unwrap();
    assert!(second.host().unwrap().source(9).unwrap().iter().all(|byte| *byte == 5));
    drop((second, room));
    assert_eq!(fake.left_behind(), [0; 5]);
}
