//! Checks copies between a GPU and the host, and measures them.
//!
//! ```text
//! cargo run --release -p terrace-cuda --example link
//! ```
//!
//! Pages of every size from 4 KiB to 2 MiB go to the device and back, scattered, 2 GiB in one copy
//! where memory allows and 128 MiB in one, by the copy kernel and by the copy engines; every byte
//! is checked. Then layers of a load-back are read while it is under way, and a page corrupted on
//! purpose must be detected. The exit code is 1 if a check fails or there is no GPU. Figures below
//! their goals are reported and are not failures.

#![allow(unsafe_code)]

use std::error::Error;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cudarc::driver::result;
use terrace_cache::{Cache, CacheConfig, DevicePages, HostPages};
use terrace_cuda::canary::CanaryConfig;
use terrace_cuda::driver::Priority;
use terrace_cuda::{Context, CopyWays, CudaConfig, CudaDevice, CudaFence, Room};
use terrace_engine::{CopyError, CopyJob, CopyProgress, Device, KvForm, KvLayout, KvType, Slab};
use terrace_l3::Arena;
use terrace_scheduler::{CopyDirection, OpId};

/// Bytes of the largest copy, where memory allows, and bytes that suffice to measure latencies.
const BYTES: usize = 2 << 30;
const FEW_BYTES: usize = 128 << 20;
const RUNS: usize = 3;
/// Goals for the faster way at each size, in GB/s: one direction, and both at once.
const GOAL_EACH: f64 = 51.0;
const GOAL_BOTH: f64 = 90.0;
/// Smallest page for which the copy engines are measured: below, they take seconds.
const ENGINES_FROM: usize = 64 << 10;
const NEVER: CopyWays = CopyWays { to_device_batch_from: None, to_host_batch_from: None };
const ALWAYS: CopyWays = CopyWays { to_device_batch_from: Some(1), to_host_batch_from: Some(1) };

type Failure = Box<dyn Error>;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("link: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    let began = Instant::now();
    let context = Context::open(0)?;
    let memory = context.memory()?;
    println!("{}, {} of {} MiB free\n", context.name(), memory.free >> 20, memory.total >> 20);
    let (room, bytes) = take_room(&context)?;
    println!("{} MiB in one copy; a copy of {} MiB behind that\n", bytes >> 20, FEW_BYTES >> 20);
    println!(
        "{:>10}  {:7}{:>11}{:>9}{:>11}{:>13}{:>9}  GB/s",
        "page", "way", "to device", "to host", "both ways", "to device", "to host"
    );
    println!("{:>10}  {:7}{GOAL_EACH:>11.1}{GOAL_EACH:>9.1}{GOAL_BOTH:>11.1}", "goal", "");
    // Kept across rounds, because allocating that much memory takes long.
    let mut read = Vec::new();
    let mut below = Vec::new();
    for page_bytes in [4, 16, 64, 256, 1024, 2048].map(|kib| kib << 10) {
        let mut best = [0.0_f64; 3];
        for (name, ways) in [("kernel", NEVER), ("engines", ALWAYS)] {
            if name == "kernel" || page_bytes >= ENGINES_FROM {
                let layout = layout(page_bytes, 1);
                let bench = Bench::new(&context, &room, bytes / page_bytes, layout, ways, None)?;
                let rates = bench.measure(name, &mut read)?;
                best = std::array::from_fn(|n| best[n].max(rates[n]));
            }
        }
        let goals = [GOAL_EACH, GOAL_EACH, GOAL_BOTH];
        let is_reached = best.iter().zip(goals).all(|(rate, goal)| *rate >= goal);
        below.extend((!is_reached).then(|| format!("{} KiB", page_bytes >> 10)));
    }
    // Unaligned sizes and addresses.
    Bench::new(&context, &room, 1000, layout(10_001, 1), NEVER, None)?
        .measure("kernel", &mut read)?;
    match below.is_empty() {
        true => println!("\nall goals are reached"),
        false => println!("\nbelow the goals: {}", below.join(", ")),
    }
    read_layers_while_they_come(&context, &room)?;
    find_damage(&context, &room)?;
    drop(room);
    let config = config(256, layout(2 << 20, 32), None, None);
    let (measured_at, device) = (Instant::now(), CudaDevice::new(&context, config)?);
    println!("\nchosen for pages of 2 MiB: {:?}", device.ways());
    println!(
        "opening a device with 512 MiB pinned takes {:.2} s",
        measured_at.elapsed().as_secs_f64()
    );
    println!("all bytes are right; {:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}

/// Allocates room for the largest copy that memory allows, and returns its bytes.
fn take_room(context: &Arc<Context>) -> Result<(Arc<Room>, usize), Failure> {
    let mut bytes = BYTES;
    loop {
        // The smallest pages need the most host memory, because of the stores' headroom before
        // each.
        let host_bytes = Room::host_bytes(u32::try_from(bytes >> 12)?, 4 << 10);
        match Room::new(context, host_bytes, bytes) {
            Ok(room) => return Ok((room, bytes)),
            Err(error) if bytes <= FEW_BYTES => return Err(error.into()),
            Err(error) => println!("{error}: half as much is tried"),
        }
        bytes /= 2;
    }
}

/// Returns a layout of pages of a size and number of layers.
fn layout(bytes: usize, layers: usize) -> KvLayout {
    let form = KvForm::Vector { elements: bytes / layers };
    KvLayout { slabs: vec![Slab { layers: 0..layers, dtype: KvType::U8, form }] }
}

fn config(
    pages: u32,
    layout: KvLayout,
    ways: Option<CopyWays>,
    canary: Option<CanaryConfig>,
) -> CudaConfig {
    let layout = layout.pages(1).expect("a layout that can work");
    CudaConfig { device_pages: pages, host_pages: pages, layout, canary, ways }
}

/// A device and all of its pages.
struct Bench {
    device: CudaDevice,
    device_pages: DevicePages,
    host_pages: HostPages,
    pages: usize,
}

/// A copy to start, and its progress and result.
struct Started {
    job: CopyJob<CudaFence>,
    progress: CopyProgress,
    done: mpsc::Receiver<Result<(), CopyError>>,
}

impl Bench {
    fn new(
        context: &Arc<Context>,
        room: &Arc<Room>,
        pages: usize,
        layout: KvLayout,
        ways: CopyWays,
        canary: Option<CanaryConfig>,
    ) -> Result<Self, Failure> {
        let count = u32::try_from(pages)?;
        let device = CudaDevice::new_in(context, config(count, layout, Some(ways), canary), room)?;
        let config =
            CacheConfig { device_pages: count, host_pages: count, ..CacheConfig::default() };
        let mut cache = Cache::new(&config);
        let taken = (cache.take_device_pages(pages), cache.take_host_pages(pages));
        let (Some(device_pages), Some(host_pages)) = taken else { return Err("no pages".into()) };
        Ok(Self { device, device_pages, host_pages, pages })
    }

    fn page_bytes(&self) -> usize {
        self.device.layout().bytes()
    }

    /// Returns the host page of the n-th device page: scattered, and different in each turn.
    fn host_page(&self, n: usize, turn: usize) -> usize {
        // A prime that divides no page count used here, so the mapping is one to one.
        (n * 7919 + turn * 31) % self.pages
    }

    /// Creates a copy of some device pages and their host pages of a turn.
    fn job(&self, direction: CopyDirection, pages: Range<usize>, turn: usize) -> Started {
        let (sender, done) = mpsc::channel();
        let progress = CopyProgress::new(OpId(0));
        let ended = progress.clone();
        let host_page = |n| self.host_pages.as_slice()[self.host_page(n, turn)];
        let job = CopyJob {
            direction,
            device_pages: self.device_pages.as_slice()[pages.clone()].to_vec(),
            host_pages: pages.map(host_page).collect(),
            after: None,
            progress: progress.clone(),
            done: Box::new(move |copied| {
                ended.end(copied.clone());
                let _ = sender.send(copied);
            }),
        };
        Started { job, progress, done }
    }

    /// Starts copies together, and waits for all of them.
    fn copy_all(&self, copies: Vec<Started>) -> Result<Duration, Failure> {
        let (jobs, waits): (Vec<_>, Vec<_>) =
            copies.into_iter().map(|copy| (copy.job, copy.done)).unzip();
        let began = Instant::now();
        jobs.into_iter().for_each(|job| self.device.start_copy(job));
        for done in waits {
            done.recv()??;
        }
        Ok(began.elapsed())
    }

    fn copy(
        &self,
        direction: CopyDirection,
        pages: Range<usize>,
        turn: usize,
    ) -> Result<Duration, Failure> {
        self.copy_all(vec![self.job(direction, pages, turn)])
    }

    fn host(&self) -> &Arena {
        self.device.host().expect("a device with host pages")
    }

    /// Returns the slot of the host page of the n-th device page in a turn.
    fn host_slot(&self, n: usize, turn: usize) -> u32 {
        self.host_pages.as_slice()[self.host_page(n, turn)].slot()
    }

    /// Fills the host pages with the content of their device pages in a turn.
    fn fill_host(&self, turn: usize) -> Result<(), Failure> {
        in_parallel(self.pages, |n| {
            let page = self.host().target(self.host_slot(n, turn));
            page.map(|mut page| fill(&mut page, n)).map_err(|lent| lent.to_string())
        })
    }

    fn check_host(&self, turn: usize) -> Result<(), Failure> {
        in_parallel(self.pages, |n| {
            let page = self.host().source(self.host_slot(n, turn));
            page.map_err(|lent| lent.to_string()).and_then(|page| check(&page, n, "host"))
        })
    }

    /// Checks device memory by a plain driver copy.
    fn check_device(&self, read: &mut Vec<u8>) -> Result<(), Failure> {
        let page_bytes = self.page_bytes();
        read.resize(read.len().max(self.pages * page_bytes), 0);
        let read = &mut read[..self.pages * page_bytes];
        // SAFETY: the device's pages lie in one piece, and no copy is under way.
        unsafe { result::memcpy_dtoh_sync(read, self.device.memory().base().0)? };
        in_parallel(self.pages, |n| {
            let at = self.device_pages.as_slice()[n].slot() as usize * page_bytes;
            check(&read[at..at + page_bytes], n, "the device")
        })
    }

    /// Checks and measures both ways, prints a line, and returns the rates: to device, to host, and
    /// both at once.
    fn measure(&self, way: &str, read: &mut Vec<u8>) -> Result<[f64; 3], Failure> {
        let all = 0..self.pages;
        let few = 0..self.pages.min(FEW_BYTES / self.page_bytes());
        let (load, write) = (CopyDirection::LoadBack, CopyDirection::WriteBack);
        self.fill_host(0)?;
        let mut to_device = self.copy(load, all.clone(), 0)?;
        self.check_device(read)?;
        let mut to_host = self.copy(write, all.clone(), 1)?;
        self.check_host(1)?;
        let (mut both, mut few_to_device, mut few_to_host) =
            (Duration::MAX, Duration::MAX, Duration::MAX);
        for _ in 0..RUNS {
            to_device = to_device.min(self.copy(load, all.clone(), 1)?);
            to_host = to_host.min(self.copy(write, all.clone(), 1)?);
            both = both.min(self.copy_all(vec![
                self.job(load, 0..self.pages / 2, 1),
                self.job(write, self.pages / 2..self.pages, 1),
            ])?);
            few_to_device = few_to_device.min(self.copy(load, few.clone(), 1)?);
            few_to_host = few_to_host.min(self.copy(write, few.clone(), 1)?);
        }
        self.check_device(read)?;
        self.check_host(1)?;
        let rate = |pages: usize, time: Duration| {
            (pages * self.page_bytes()) as f64 / time.as_secs_f64() / 1e9
        };
        let rates = [to_device, to_host, both].map(|time| rate(self.pages, time));
        let few_rates = [few_to_device, few_to_host].map(|time| rate(few.len(), time));
        let bytes = match self.page_bytes() {
            bytes if bytes.is_multiple_of(1024) => format!("{} KiB", bytes >> 10),
            bytes => format!("{bytes} B"),
        };
        let ([to_device, to_host, both], [few_to_device, few_to_host]) = (rates, few_rates);
        println!(
            "{bytes:>10}  {way:7}{to_device:>11.1}{to_host:>9.1}{both:>11.1}{few_to_device:>13.1}{few_to_host:>9.1}"
        );
        Ok(rates)
    }
}

/// Reads the last page of a load-back layer by layer in a stream while it arrives, without a
/// waiting thread.
fn read_layers_while_they_come(context: &Arc<Context>, room: &Arc<Room>) -> Result<(), Failure> {
    const LAYERS: usize = 32;
    let bench = Bench::new(context, room, 64, layout(2 << 20, LAYERS), NEVER, None)?;
    let layer_bytes = bench.page_bytes() / LAYERS;
    bench.fill_host(0)?;
    let steps = context.create_stream(Priority::High)?;
    let memory = bench.device.memory();
    let last = bench.pages - 1;
    let at = memory.address(bench.device_pages.as_slice()[last]);
    let mut seen = vec![0_u8; bench.page_bytes()];
    // SAFETY: the memory lives until it is unpinned at the end of this function, after the stream
    // has been drained.
    let pinned = unsafe { bench.device.pin(std::ptr::NonNull::from(&mut seen[0]), seen.len())? };
    let Started { job, progress, done } = bench.job(CopyDirection::LoadBack, 0..bench.pages, 0);
    bench.device.start_copy(job);
    let began = Instant::now();
    for (layer, part) in seen.chunks_mut(layer_bytes).enumerate() {
        memory.wait_for_layer(steps, &progress, layer)?;
        let from = at.offset(layer * layer_bytes);
        // SAFETY: the part is pinned and not touched before the stream is drained. A layer of the
        // page is not written to after it has arrived.
        unsafe { result::memcpy_dtoh_async(part, from.0, steps.raw())? };
    }
    let handed_over = began.elapsed();
    // SAFETY: the stream exists.
    unsafe { result::stream::synchronize(steps.raw())? };
    let read = began.elapsed();
    done.recv()??;
    drop(pinned);
    // SAFETY: the stream is no longer used.
    unsafe { result::stream::destroy(steps.raw())? };
    check(&seen, last, "the device, read while it came")?;
    let [handed_over, read] = [handed_over, read].map(|time| time.as_secs_f64() * 1e3);
    println!(
        "\n{LAYERS} layers of 128 MiB, read as they come: asked for in {handed_over:.2} ms, read in {read:.2} ms"
    );
    Ok(())
}

/// Checks that pages corrupted on purpose are detected in both directions, without false alarms.
fn find_damage(context: &Arc<Context>, room: &Arc<Room>) -> Result<(), Failure> {
    let canary = Some(CanaryConfig { one_page_in: 4 });
    let bench = Bench::new(context, room, 64, layout(100_001, 1), NEVER, canary)?;
    bench.fill_host(0)?;
    for direction in [CopyDirection::LoadBack, CopyDirection::WriteBack] {
        bench.copy(direction, 0..64, 0)?;
        bench.device.corrupt_next_copy(direction);
        let Started { job, done, .. } = bench.job(direction, 0..64, 0);
        bench.device.start_copy(job);
        match done.recv()? {
            Err(CopyError::Failed(why)) if why.contains("not the same on both sides") => {}
            other => return Err(format!("damage was not found: {other:?}").into()),
        }
        bench.copy(direction, 0..64, 0)?;
    }
    let stats = bench.device.stats();
    let found = (stats.to_device.pages_corrupt, stats.to_host.pages_corrupt);
    if found != (1, 1) {
        return Err(format!("of one damaged page each way, {found:?} were found").into());
    }
    println!("damaged pages are found, both ways");
    Ok(())
}

/// Calls a function for every page on all processors.
fn in_parallel(
    pages: usize,
    each: impl Fn(usize) -> Result<(), String> + Sync,
) -> Result<(), Failure> {
    let threads = std::thread::available_parallelism()?.get();
    let each = &each;
    std::thread::scope(|scope| {
        let all = (0..threads)
            .map(|first| scope.spawn(move || (first..pages).step_by(threads).try_for_each(each)));
        let all: Vec<_> = all.collect();
        all.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_| "a check has panicked")?.map_err(Failure::from)
        })
    })
}

/// Returns the 8 bytes at a place in a page: a function of page and place.
fn word(page: usize, place: usize) -> [u8; 8] {
    ((page as u64) << 32 | place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

fn fill(bytes: &mut [u8], page: usize) {
    for (place, bytes) in bytes.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&word(page, place)[..bytes.len()]);
    }
}

fn check(bytes: &[u8], page: usize, side: &str) -> Result<(), String> {
    let mut words = bytes.chunks(8).enumerate();
    match words.find(|(place, bytes)| **bytes != word(page, *place)[..bytes.len()]) {
        None => Ok(()),
        Some((place, found)) => {
            let (at, expected) = (place * 8, word(page, place));
            Err(format!("page {page} on {side} has {found:x?} at {at}, not {expected:x?}"))
        }
    }
}
