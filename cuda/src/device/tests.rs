//! Tests of the device on a driver that delays, fails and checks accesses.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use terrace_cache::{Cache, CacheConfig, DevicePages, HostPages};
use terrace_engine::{CopyError, CopyProgress, KvForm, KvLayout, KvType, Slab};
use terrace_scheduler::{DevicePage, HostPage, OpId};

use super::*;
use crate::driver::{DeviceAddress, Stream};
use crate::fake::FakeDriver;

const SOON: Duration = Duration::from_secs(20);
const A_WHILE: Duration = Duration::from_millis(30);
const LOAD: CopyDirection = CopyDirection::LoadBack;
const WRITE: CopyDirection = CopyDirection::WriteBack;

type Outcome = Receiver<Result<(), CopyError>>;

/// A device, its driver, and pages to copy.
struct Scene {
    // Dropped first.
    _end: EndOnPanic,
    fake: FakeDriver,
    device: CudaDevice,
    device_pages: DevicePages,
    host_pages: HostPages,
    steps: Stream,
}

/// Releases all gates after a failed test.
struct EndOnPanic(FakeDriver);

impl Drop for EndOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lose();
        }
    }
}

/// Returns a layout of 4 layers of 256 bytes.
fn small_layout() -> PageLayout {
    KvLayout::keys_and_values(KvType::F32, 4, 1, 8).pages(4).unwrap()
}

fn config(layout: PageLayout) -> CudaConfig {
    let ways = CopyWays { to_device_batch_from: None, to_host_batch_from: None };
    CudaConfig { device_pages: 8, host_pages: 8, layout, canary: None, ways: Some(ways) }
}

impl Scene {
    fn new() -> Self {
        Self::with(config(small_layout()), 1)
    }

    fn with(config: CudaConfig, seed: u64) -> Self {
        let fake = FakeDriver::new(1 << 30, seed);
        let device = CudaDevice::with_driver(Arc::new(fake.clone()), config, None).unwrap();
        let pages = CacheConfig { device_pages: 8, host_pages: 8, ..CacheConfig::default() };
        let mut cache = Cache::new(&pages);
        let (device_pages, host_pages) =
            (cache.take_device_pages(8).unwrap(), cache.take_host_pages(8).unwrap());
        let steps = fake.create_stream(Priority::High).unwrap();
        let _end = EndOnPanic(fake.clone());
        Self { _end, fake, device, device_pages, host_pages, steps }
    }

    fn device_page(&self, n: usize) -> DevicePage {
        self.device_pages.as_slice()[n]
    }

    fn host_page(&self, n: usize) -> HostPage {
        self.host_pages.as_slice()[n]
    }

    fn address(&self, n: usize) -> DeviceAddress {
        self.device.memory().address(self.device_page(n))
    }

    fn page_bytes(&self) -> usize {
        self.device.layout().bytes()
    }

    fn write_host(&self, n: usize, bytes: &[u8]) {
        let host = self.device.host().unwrap();
        host.target(self.host_page(n).slot()).unwrap().copy_from_slice(bytes);
    }

    fn read_host(&self, n: usize) -> Vec<u8> {
        self.device.host().unwrap().source(self.host_page(n).slot()).unwrap().to_vec()
    }

    fn read_device(&self, n: usize) -> Vec<u8> {
        self.fake.read(self.address(n), self.page_bytes())
    }

    /// Starts a copy between the n-th device pages and the n-th host pages.
    fn start(
        &self,
        direction: CopyDirection,
        pages: &[usize],
        after: Option<&CudaFence>,
    ) -> (CopyProgress, Outcome) {
        let (sender, receiver) = mpsc::channel();
        let progress = CopyProgress::new(OpId(1));
        let ended = progress.clone();
        self.device.start_copy(CopyJob {
            direction,
            device_pages: pages.iter().map(|n| self.device_page(*n)).collect(),
            host_pages: pages.iter().map(|n| self.host_page(*n)).collect(),
            after: after.cloned(),
            progress: progress.clone(),
            done: Box::new(move |copied| {
                ended.end(copied.clone());
                let _ = sender.send(copied);
            }),
        });
        (progress, receiver)
    }

    fn copy(&self, direction: CopyDirection, pages: &[usize]) -> Result<(), CopyError> {
        self.start(direction, pages, None).1.recv_timeout(SOON).unwrap()
    }

    /// Blocks the thread of a lane in a completion callback until the returned value is dropped.
    fn hold_lane(&self, direction: CopyDirection) -> mpsc::Sender<()> {
        let (go_on, wait) = mpsc::channel();
        self.device.start_copy(CopyJob {
            direction,
            device_pages: Vec::new(),
            host_pages: Vec::new(),
            after: None,
            progress: CopyProgress::new(OpId(1)),
            done: Box::new(move |_| {
                let _ = wait.recv();
            }),
        });
        go_on
    }

    /// Submits a step that fills a page with a byte.
    fn step(&self, n: usize, byte: u8) -> CudaFence {
        self.fake.fill(self.steps, self.address(n), self.page_bytes(), byte);
        let fence = self.device.memory().fence().unwrap();
        fence.record(self.steps).unwrap();
        fence
    }

    /// Submits the same step behind a ban on the page; any access before the ban is lifted is a
    /// violation.
    fn slow_step(&self, n: usize, byte: u8) -> (u64, CudaFence) {
        let at = self.address(n).0;
        let ban = self.fake.ban(at..at + self.page_bytes() as u64);
        self.fake.gate(self.steps, ban);
        (ban, self.step(n, byte))
    }
}

/// Returns bytes that differ from page to page and from place to place.
fn pattern(page: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 31 + at / 256 * 7 + page * 101 + 1) as u8).collect()
}

fn failure(outcome: &Outcome) -> String {
    match outcome.recv_timeout(SOON).expect("an outcome") {
        Err(CopyError::Failed(why)) => why,
        other => panic!("it should have failed: {other:?}"),
    }
}

fn wait_until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < SOON, "it is never so");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn round_trip_keeps_bytes_for_both_ways_and_all_sizes() {
    let odd = KvLayout {
        slabs: vec![
            Slab { layers: 0..3, dtype: KvType::U8, form: KvForm::Vector { elements: 777 } },
            Slab { layers: 1..2, dtype: KvType::U8, form: KvForm::Vector { elements: 5 } },
        ],
    };
    for layout in [small_layout(), odd.pages(1).unwrap()] {
        for batch_from in [None, Some(1)] {
            let ways =
                CopyWays { to_device_batch_from: batch_from, to_host_batch_from: batch_from };
            let scene = Scene::with(CudaConfig { ways: Some(ways), ..config(layout.clone()) }, 1);
            let pages = [3, 0, 7];
            for n in pages {
                scene.fake.write(scene.address(n), &pattern(n, layout.bytes()));
            }
            scene.copy(WRITE, &pages).unwrap();
            for n in pages {
                assert_eq!(scene.read_host(n), pattern(n, layout.bytes()));
                scene.fake.write(scene.address(n), &vec![0; layout.bytes()]);
            }
            scene.copy(LOAD, &pages).unwrap();
            for n in 0..8 {
                let expected = if pages.contains(&n) {
                    pattern(n, layout.bytes())
                } else {
                    vec![0; layout.bytes()]
                };
                assert_eq!(scene.read_device(n), expected, "page {n}");
            }
            let stats = scene.device.stats();
            assert_eq!(stats.to_host.bytes, 3 * layout.bytes() as u64);
            assert_eq!(stats.to_device.bytes, stats.to_host.bytes);
            assert_eq!(stats.to_host.by_batch > 0, batch_from.is_some());
            assert_eq!(stats.to_host.by_kernel > 0, batch_from.is_none());
            assert!(stats.to_host.busy > Duration::ZERO && stats.to_device.busy > Duration::ZERO);
            assert!(stats.memory.free < stats.memory.total);
            assert_eq!(scene.fake.violations(), [""; 0]);
        }
    }
}

#[test]
fn copy_waits_on_the_device_for_its_fence() {
    let scene = Scene::new();
    let (ban, fence) = scene.slow_step(0, 7);
    let (_, done) = scene.start(WRITE, &[0], Some(&fence));
    assert!(done.recv_timeout(A_WHILE).is_err(), "the step has not ended");
    scene.fake.lift(ban);
    done.recv_timeout(SOON).unwrap().unwrap();
    assert!(scene.read_host(0).iter().all(|byte| *byte == 7), "it has what the step wrote");
    assert_eq!(scene.fake.violations(), [""; 0]);
}

#[test]
fn detects_a_copy_that_ignores_its_fence() {
    let scene = Scene::new();
    let (ban, fence) = scene.slow_step(0, 7);
    scene.fake.change_faults(|faults| faults.not_waited_for = Some(scene.steps));
    scene.start(WRITE, &[0], Some(&fence)).1.recv_timeout(SOON).unwrap().unwrap();
    assert_eq!(scene.fake.violations().len(), 1);
    scene.fake.lift(ban);
}

#[test]
fn detects_a_copy_that_releases_pages_too_early() {
    let scene = Scene::new();
    let (ban, fence) = scene.slow_step(0, 7);
    scene.fake.change_faults(|faults| faults.sleeps_are_short = true);
    let (_, done) = scene.start(WRITE, &[0], Some(&fence));
    done.recv_timeout(SOON).unwrap().unwrap();
    let at = scene.address(0).0;
    let let_go = scene.fake.ban(at..at + 1);
    scene.fake.lift(ban);
    wait_until(|| scene.fake.violations().len() >= 2);
    let violations = scene.fake.violations();
    assert!(violations.iter().any(|who| who.starts_with("the copy kernel")), "{violations:?}");
    scene.fake.lift(let_go);
}

#[test]
fn lanes_do_not_wait_for_each_other() {
    for (held_up, free) in [(WRITE, LOAD), (LOAD, WRITE)] {
        let scene = Scene::new();
        let (ban, fence) = scene.slow_step(0, 7);
        let (_, held) = scene.start(held_up, &[0], Some(&fence));
        scene.copy(free, &[1]).unwrap();
        assert!(held.try_recv().is_err(), "its fence is not passed");
        scene.fake.lift(ban);
        held.recv_timeout(SOON).unwrap().unwrap();
        assert_eq!(scene.fake.violations(), [""; 0]);
    }
}

#[test]
fn cancelled_copy_that_has_not_started_touches_no_page() {
    let scene = Scene::new();
    let (ban, fence) = scene.slow_step(0, 7);
    let go_on = scene.hold_lane(WRITE);
    // As many as a lane submits to its stream at once.
    let begun: Vec<_> = (0..2).map(|n| scene.start(WRITE, &[n], Some(&fence))).collect();
    let (waiting, called_off) = scene.start(WRITE, &[5], None);
    drop(go_on);
    wait_until(|| scene.device.host().unwrap().is_lent(scene.host_page(1).slot()));
    begun[1].0.call_off();
    waiting.call_off();
    scene.write_host(5, &pattern(5, scene.page_bytes()));
    scene.fake.lift(ban);
    for (_, done) in begun {
        assert_eq!(done.recv_timeout(SOON).unwrap(), Ok(()), "what has begun goes on");
    }
    assert_eq!(called_off.recv_timeout(SOON).unwrap(), Err(CopyError::CalledOff));
    assert_eq!(scene.read_host(5), pattern(5, scene.page_bytes()));
}

#[test]
fn step_waits_for_layers_on_the_device() {
    // 8 layers of 512 KiB: with all pages, each is a separate group.
    let layout = KvLayout::keys_and_values(KvType::U8, 8, 1, 1 << 18).pages(1).unwrap();
    let layer_bytes = layout.bytes() / 8;
    let scene = Scene::with(config(layout), 1);
    for n in 0..8 {
        let bytes: Vec<u8> =
            (0..8).flat_map(|layer| vec![10 * n as u8 + layer; layer_bytes]).collect();
        scene.write_host(n, &bytes);
    }
    let (ban, fence) = scene.slow_step(7, 99);
    let (progress, done) = scene.start(LOAD, &[0, 1, 2, 3, 4, 5, 6, 7], Some(&fence));
    let reads = scene.fake.create_stream(Priority::High).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    for layer in [0, 0, 3, 7, 50] {
        // None of these calls blocks, though no layer can have arrived.
        scene.device.memory().wait_for_layer(reads, &progress, layer).unwrap();
        if layer < 8 {
            scene.fake.peek(reads, scene.address(6).offset(layer * layer_bytes), &seen);
        }
    }
    assert_eq!((seen.lock().len(), progress.layers_arrived()), (0, 0));
    let waits_on_host = std::thread::spawn({
        let progress = progress.clone();
        move || (0..8).try_for_each(|layer| progress.wait_for(layer))
    });
    scene.fake.lift(ban);
    waits_on_host.join().unwrap().unwrap();
    done.recv_timeout(SOON).unwrap().unwrap();
    scene.fake.drain(reads).unwrap();
    assert_eq!(*seen.lock(), [60, 60, 63, 67]);
    scene.device.memory().wait_for_layer(reads, &progress, 3).unwrap();
    assert_eq!(scene.device.stats().to_device.by_kernel, 8, "a launch for each layer");
    assert_eq!(scene.fake.violations(), [""; 0]);
}

#[test]
fn step_that_waits_for_a_failed_copy_fails() {
    let scene = Scene::new();
    let (progress, done) = scene.start(LOAD, &[0], Some(&scene.device.memory().fence().unwrap()));
    assert!(failure(&done).contains("never launched on the GPU"));
    let waited = scene.device.memory().wait_for_layer(scene.steps, &progress, 0);
    assert!(matches!(waited, Err(CudaError::Copy(CopyError::Failed(_)))), "{waited:?}");
    // No work was submitted, so the device is not broken.
    scene.copy(LOAD, &[0]).unwrap();
}

#[test]
fn copy_behind_an_unrecorded_fence_fails_alone() {
    let scene = Scene::new();
    let (ban, fence) = scene.slow_step(0, 7);
    let go_on = scene.hold_lane(WRITE);
    let (_, held_up) = scene.start(WRITE, &[0], Some(&fence));
    let others = [1, 2, 3, 4, 5, 6, 7];
    let never = scene.device.memory().fence().unwrap();
    let failing: Vec<_> = (0..5).map(|_| scene.start(WRITE, &others, Some(&never)).1).collect();
    let (_, behind) = scene.start(WRITE, &others, None);
    drop(go_on);
    failing.iter().for_each(|done| assert!(failure(done).contains("never launched on the GPU")));
    assert!(held_up.try_recv().is_err(), "its step has not ended");
    scene.fake.lift(ban);
    held_up.recv_timeout(SOON).unwrap().unwrap();
    behind.recv_timeout(SOON).unwrap().unwrap();
    assert!(scene.read_host(0).iter().all(|byte| *byte == 7));
    assert!((1..8).all(|n| scene.read_host(n).iter().all(|byte| *byte == 0)));
}

#[test]
fn failed_call_fails_and_releases_its_copy_and_later_ones() {
    let calls = [
        "record",
        "wait",
        "fetch",
        "copy_by_kernel",
        "checksums",
        "sleep_until",
        "elapsed",
        "create_event",
    ];
    for direction in [LOAD, WRITE] {
        for call in calls {
            for after in 0..2 {
                let canary = Some(CanaryConfig { one_page_in: 1 });
                let scene = Scene::with(CudaConfig { canary, ..config(small_layout()) }, 1);
                let (ban, fence) = scene.slow_step(0, 7);
                scene.fake.lift(ban);
                scene.fake.fail(call, after);
                let outcomes: Vec<_> =
                    (0..4).map(|n| scene.start(direction, &[n], Some(&fence)).1).collect();
                let outcomes: Vec<_> =
                    outcomes.iter().map(|done| done.recv_timeout(SOON).expect(call)).collect();
                let failed = outcomes.iter().position(Result::is_err).expect(call);
                let Err(CopyError::Failed(why)) = &outcomes[failed] else { panic!("{outcomes:?}") };
                assert!(why.contains(&format!("{call} was made to fail")), "{why}");
                let later = failure(&scene.start(direction, &[5], None).1);
                assert!(later.contains("has failed before"), "{later}");
                let host = scene.device.host().unwrap();
                assert!((0..8).all(|page| !host.is_lent(page)), "{call}");
                let Scene { fake, device, steps, .. } = scene;
                fake.drain(steps).unwrap();
                fake.destroy_stream(steps);
                drop((device, fence));
                assert_eq!(fake.left_behind(), [0; 5], "{call}");
                assert_eq!(fake.violations(), [""; 0], "{call}");
            }
        }
    }
}

#[test]
fn lost_device_ends_every_copy() {
    let scene = Scene::new();
    let (_, fence) = scene.slow_step(0, 7);
    let copies: Vec<_> = (0..5).map(|n| scene.start(WRITE, &[n], Some(&fence)).1).collect();
    let (progress, load) = scene.start(LOAD, &[6], Some(&fence));
    assert!(progress.marks().is_some(), "it has begun");
    scene.fake.lose();
    for done in copies.iter().chain([&load]) {
        failure(done);
    }
    assert!(failure(&scene.start(LOAD, &[1], None).1).contains("failed"));
    let stats = scene.device.stats();
    assert_eq!((stats.to_host.failed, stats.to_device.failed, stats.memory.total), (5, 2, 0));
}

#[test]
fn out_of_memory_error_states_available_memory() {
    let fake = FakeDriver::new(5000, 1);
    let opened = CudaDevice::with_driver(Arc::new(fake.clone()), config(small_layout()), None);
    let error = opened.unwrap_err().to_string();
    assert!(error.starts_with("the GPU has no room for 8 pages of 1024 bytes"), "{error}");
    // The pages fit, but the other allocations do not.
    let opened =
        CudaDevice::with_driver(Arc::new(FakeDriver::new(8192, 1)), config(small_layout()), None);
    assert!(matches!(opened, Err(CudaError::OutOfDeviceMemory { total: 8192, .. })), "{opened:?}");
    let fake_of_host = FakeDriver::new(1 << 20, 1);
    fake_of_host.limit_pinned(9000);
    let opened =
        CudaDevice::with_driver(Arc::new(fake_of_host.clone()), config(small_layout()), None);
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("could not be pinned") && error.contains("ulimit -l"), "{error}");
    for fake in [fake, fake_of_host] {
        assert_eq!(fake.left_behind(), [0; 5]);
    }
}

#[test]
fn drop_waits_for_copies_and_releases_all_resources() {
    let scene = Scene::new();
    let (ban, fence) = scene.slow_step(0, 7);
    let copies: Vec<_> = (0..4).map(|n| scene.start(WRITE, &[n], Some(&fence)).1).collect();
    let host = scene.device.host().unwrap().clone();
    let Scene { fake, device, steps, .. } = scene;
    let memory = device.memory().clone();
    let drops = std::thread::spawn(move || drop(device));
    std::thread::sleep(A_WHILE);
    assert!(!drops.is_finished(), "a step and copies are under way");
    fake.lift(ban);
    drops.join().unwrap();
    for done in copies {
        assert_eq!(done.try_recv().unwrap(), Ok(()), "before the drop has returned");
    }
    fake.destroy_stream(steps);
    let [allocated, pinned, ..] = fake.left_behind();
    assert_eq!((allocated, pinned), (1, 1), "others still have the pages");
    drop((memory, host, fence));
    assert_eq!((fake.left_behind(), fake.violations()), ([0; 5], Vec::new()));
}

#[test]
fn corrupted_page_fails_its_copy() {
    for direction in [LOAD, WRITE] {
        let canary = Some(CanaryConfig { one_page_in: 2 });
        let scene = Scene::with(CudaConfig { canary, ..config(small_layout()) }, 1);
        for n in 0..8 {
            scene.write_host(n, &pattern(n, scene.page_bytes()));
            scene.fake.write(scene.address(n), &pattern(n + 1, scene.page_bytes()));
        }
        scene.copy(direction, &[0, 1, 2, 3]).unwrap();
        scene.fake.change_faults(|faults| faults.corrupt_next = true);
        let wrong = failure(&scene.start(direction, &[4, 5], None).1);
        assert!(wrong.contains("1 of 1 verified pages"), "{wrong}");
        scene.device.corrupt_next_copy(direction);
        let wrong = failure(&scene.start(direction, &[6, 7], None).1);
        assert!(wrong.contains("not the same on both sides"), "{wrong}");
        // A single corruption does not affect later copies.
        scene.copy(direction, &[4, 5]).unwrap();
        let stats = scene.device.stats();
        let link = if direction == LOAD { stats.to_device } else { stats.to_host };
        assert_eq!((link.pages_compared, link.pages_corrupt, link.failed), (5, 2, 2));
    }
}

#[test]
fn copy_of_unavailable_pages_fails_alone() {
    let scene = Scene::new();
    let in_use = scene.device.host().unwrap().target(scene.host_page(0).slot()).unwrap();
    assert!(failure(&scene.start(WRITE, &[0], None).1).contains("in use"));
    let (ban, fence) = scene.slow_step(2, 7);
    let (_, held_up) = scene.start(WRITE, &[2], Some(&fence));
    assert!(
        failure(&scene.start(WRITE, &[0], None).1).contains("in use"),
        "the failure is immediate"
    );
    scene.fake.lift(ban);
    held_up.recv_timeout(SOON).unwrap().unwrap();
    drop(in_use);
    assert!(failure(&scene.start(WRITE, &[1, 1], None).1).contains("in use"), "a page twice");
    scene.copy(WRITE, &[]).unwrap();
    scene.copy(WRITE, &[0]).unwrap();
    let without = CudaConfig { host_pages: 0, ..config(small_layout()) };
    let without = Scene::with(without, 1);
    assert!(without.device.host().is_none());
    assert!(failure(&without.start(LOAD, &[0], None).1).contains("no host tier"));
}

#[test]
fn panic_in_a_callback_is_contained() {
    let scene = Scene::new();
    scene.device.start_copy(CopyJob {
        direction: WRITE,
        device_pages: vec![scene.device_page(0)],
        host_pages: vec![scene.host_page(0)],
        after: None,
        progress: CopyProgress::new(OpId(1)),
        done: Box::new(|_| panic!("on purpose")),
    });
    scene.copy(WRITE, &[1]).unwrap();
}

#[test]
fn selects_the_faster_copy_way() {
    let layout = KvLayout::keys_and_values(KvType::U8, 1, 1, 1 << 20).pages(1).unwrap();
    assert_eq!(layout.bytes(), 2 << 20);
    let ways = |batch_piece_ns, kernel_kib_ns| {
        let fake = FakeDriver::new(1 << 30, 1);
        fake.set_costs(batch_piece_ns, kernel_kib_ns);
        let config = CudaConfig { ways: None, ..config(layout.clone()) };
        let device = CudaDevice::with_driver(Arc::new(fake.clone()), config, None).unwrap();
        assert_eq!(fake.violations(), [""; 0]);
        device.ways()
    };
    let both = |bytes| CopyWays { to_device_batch_from: bytes, to_host_batch_from: bytes };
    // 20 ns per KiB make 5 µs for 256 KiB and 20 µs for 1 MiB.
    assert_eq!(ways(6_000, 20), both(Some(1 << 20)));
    assert_eq!(ways(5_000, 20), both(Some(256 << 10)));
    assert_eq!(ways(1, 20), both(Some(64 << 10)));
    assert_eq!(ways(1_000_000, 20), both(None));
}

#[test]
fn foreign_memory_is_pinned_until_dropped() {
    let scene = Scene::new();
    let mut memory = vec![1_u8; 4096];
    let before = scene.fake.left_behind()[1];
    // SAFETY: the vector outlives the pinned range.
    let pinned = unsafe { scene.device.pin(NonNull::new(memory.as_mut_ptr()).unwrap(), 4096) };
    let pinned = pinned.unwrap();
    assert_eq!(
        (scene.fake.left_behind()[1], scene.fake.read(pinned.seen_at(), 1)),
        (before + 1, vec![1])
    );
    drop(pinned);
    assert_eq!(scene.fake.left_behind()[1], before);
}

#[test]
fn copies_keep_their_order_under_delays() {
    for seed in 0..12 {
        let canary = Some(CanaryConfig { one_page_in: 3 });
        let ways = CopyWays { to_device_batch_from: Some(1024), to_host_batch_from: None };
        let config = CudaConfig { canary, ways: Some(ways), ..config(small_layout()) };
        let scene = Scene::with(config, seed);
        scene.fake.change_faults(|faults| faults.delay_us_max = 300);
        // A step writes pages, which are copied to host, overwritten and loaded back, repeatedly.
        // In between any access is a violation.
        let mut bans: Vec<u64> = Vec::new();
        for round in 0..6_usize {
            bans.drain(..).for_each(|ban| scene.fake.lift(ban));
            let written = (0..8).map(|n| {
                let byte = (seed as usize * 7 + round * 8 + n + 1) as u8;
                let fence = scene.step(n, byte);
                (n, byte, scene.start(WRITE, &[n], Some(&fence)).1)
            });
            for (n, byte, done) in written.collect::<Vec<_>>() {
                done.recv_timeout(SOON).unwrap().unwrap();
                assert_eq!(scene.read_host(n), vec![byte; scene.page_bytes()], "seed {seed}");
                let (progress, loaded) = scene.start(LOAD, &[n], Some(&scene.step(n, 0)));
                let seen = Arc::new(Mutex::new(Vec::new()));
                for layer in 0..4 {
                    scene.device.memory().wait_for_layer(scene.steps, &progress, layer).unwrap();
                    scene.fake.peek(scene.steps, scene.address(n).offset(256 * layer), &seen);
                }
                loaded.recv_timeout(SOON).unwrap().unwrap();
                scene.fake.drain(scene.steps).unwrap();
                assert_eq!(*seen.lock(), [byte; 4], "seed {seed}");
                let at = scene.address(n).0;
                bans.push(scene.fake.ban(at..at + scene.page_bytes() as u64));
            }
        }
        assert_eq!(scene.fake.violations(), [""; 0], "seed {seed}");
    }
}

/// Returns the processor time of this process's threads, which is independent of the load of the
/// machine.
fn processor_ns() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let ran = threads.filter_map(|thread| {
        let ran = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        ran.split(' ').next()?.parse::<u64>().ok()
    });
    ran.sum()
}

/// Measures the time that the copy thread spends on a page: `cargo test --release -p terrace-cuda
/// --lib cost_of_a_page -- --ignored --nocapture`.
#[test]
#[ignore = "it measures"]
fn cost_of_a_page() {
    const PAGES: u32 = 1 << 19;
    let layout = KvLayout::keys_and_values(KvType::U8, 1, 1, 8).pages(1).unwrap();
    let config = CudaConfig { device_pages: PAGES, host_pages: PAGES, ..config(layout) };
    let fake = FakeDriver::new(1 << 30, 1);
    let device = CudaDevice::with_driver(Arc::new(fake.clone()), config, None).unwrap();
    fake.change_faults(|faults| faults.copies_are_skipped = true);
    let pages = CacheConfig { device_pages: PAGES, host_pages: PAGES, ..CacheConfig::default() };
    let mut cache = Cache::new(&pages);
    let device_pages = cache.take_device_pages(PAGES as usize).unwrap();
    let host_pages = cache.take_host_pages(PAGES as usize).unwrap();
    let mut best = [f64::MAX; 2];
    for run in 0..20 {
        let direction = [LOAD, WRITE][run % 2];
        let (sender, receiver) = mpsc::channel();
        // A permutation of the pages, since the factor is odd.
        let scattered = (0..PAGES).map(|n| n.wrapping_mul(7919) % PAGES);
        let job = CopyJob {
            direction,
            device_pages: device_pages.as_slice().to_vec(),
            host_pages: scattered.map(|n| host_pages.as_slice()[n as usize]).collect(),
            after: None,
            progress: CopyProgress::new(OpId(1)),
            done: Box::new(move |copied| sender.send(copied).unwrap()),
        };
        let before = processor_ns();
        device.start_copy(job);
        receiver.recv_timeout(SOON).unwrap().unwrap();
        let ns = (processor_ns() - before) as f64 / f64::from(PAGES);
        best[run % 2] = best[run % 2].min(ns);
    }
    println!("{:.0} ns a page to the device, {:.0} ns to host", best[0], best[1]);
}
