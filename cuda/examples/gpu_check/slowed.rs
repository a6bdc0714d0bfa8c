//! Slowdown of steps by background copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use terrace_cache::{Cache, CacheConfig};
use terrace_cuda::model::kv_layout;
use terrace_cuda::{Context, CudaConfig, CudaDevice, CudaLlama};
use terrace_engine::{CopyError, CopyJob, CopyProgress, Device, PageLayout, StepLimits};
use terrace_kit::{Dice, median};
use terrace_scheduler::{CopyDirection, DevicePage, HostPage, OpId};

use crate::Done;
use crate::figures::{milliseconds, repeat};
use crate::table::Table;
use crate::world::{Part, World, eight_billion, greedy};

const PAGE_SIZE: u32 = 16;
/// Number of 2 MiB pages each way, copied a few at a time.
const PAGES: usize = 256;
const COPY_PAGES: usize = 64;
const LOAD: CopyDirection = CopyDirection::LoadBack;
const WRITE: CopyDirection = CopyDirection::WriteBack;
/// Copies that run beside steps; the first mode has none and is the baseline.
const MODES: [(&str, &[CopyDirection]); 4] = [
    ("nothing", &[]),
    ("load-backs", &[LOAD]),
    ("write-backs", &[WRITE]),
    ("copies both ways", &[LOAD, WRITE]),
];
const ROUNDS: usize = 9;

/// Measures decode steps and prefill chunks, with and without copies.
pub(crate) fn slowed(context: &Arc<Context>, table: &mut Table) -> Done {
    const ROWS: u32 = 64;
    const CHUNK: u32 = 8192;
    let shape = eight_billion();
    let layout = kv_layout(&shape).pages(PAGE_SIZE)?;
    let background = Background::new(context, layout)?;
    println!("      copies go as {:?}", background.device.ways());

    let limits = StepLimits { page_size: PAGE_SIZE, rows: ROWS, tokens_max: 512 };
    let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, 1040)?;
    world.fill()?;
    (0..ROWS).for_each(|row| world.come(row, greedy(), &[]));
    let parts: Vec<Part> = (0..ROWS).map(|row| Part::new(row, 1023, &[1])).collect();
    compare(table, &background, &mut world, "decode step of 64 rows", &parts, 40)?;
    drop(world);

    let limits = StepLimits { page_size: PAGE_SIZE, rows: 1, tokens_max: CHUNK };
    let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, CHUNK)?;
    world.come(0, greedy(), &[]);
    let prompt = Dice::new(1).tokens(CHUNK as usize, shape.vocabulary);
    let parts = [Part::new(0, 0, &prompt)];
    compare(table, &background, &mut world, "prefill chunk of 8,192", &parts, 2)
}

/// Measures a step in all modes in turn.
fn compare(
    table: &mut Table,
    background: &Background,
    world: &mut World,
    step: &str,
    parts: &[Part],
    repeats: u32,
) -> Done {
    let mut times = [(); MODES.len()].map(|()| Vec::new());
    let mut rates = [(); MODES.len()].map(|()| Vec::new());
    world.step(parts)?;
    for _ in 0..ROUNDS {
        for (mode, (_, directions)) in MODES.iter().enumerate() {
            let (time, rate) = background.beside(directions, || {
                // The link fills up during the first run.
                repeat(world, parts, 1)?;
                let before = background.copied();
                let began = Instant::now();
                let time = repeat(world, parts, repeats)?;
                let bytes = background.copied() - before;
                Ok((milliseconds(time), bytes as f64 / began.elapsed().as_secs_f64() / 1e9))
            })?;
            times[mode].push(time);
            rates[mode].push(rate);
        }
    }
    for (mode, (what, _)) in MODES.iter().enumerate().skip(1) {
        // Each is compared within its own round, since clocks and temperatures change.
        let slower = times[mode].iter().zip(&times[0]).map(|(with, without)| with / without - 1.0);
        let slower = 100.0 * median(slower);
        let (with, without) = (median(times[mode].clone()), median(times[0].clone()));
        let rate = median(rates[mode].clone());
        let found = format!("{slower:.1} % slower ({without:.2} to {with:.2} ms), {rate:.0} GB/s");
        table.figure(&format!("{step} beside {what}"), &found, "4 %", slower <= 4.0);
    }
    Ok(())
}

/// A separate device, whose pages are copied while a model on another computes.
struct Background {
    device: CudaDevice,
    device_pages: Vec<DevicePage>,
    host_pages: Vec<HostPage>,
}

impl Background {
    fn new(context: &Arc<Context>, layout: PageLayout) -> Result<Self, Box<dyn std::error::Error>> {
        let pages = 2 * PAGES as u32;
        let config =
            CudaConfig { device_pages: pages, host_pages: pages, layout, canary: None, ways: None };
        let device = CudaDevice::new(context, config)?;
        let config =
            CacheConfig { device_pages: pages, host_pages: pages, ..CacheConfig::default() };
        let mut cache = Cache::new(&config);
        let taken = (cache.take_device_pages(2 * PAGES), cache.take_host_pages(2 * PAGES));
        let (Some(on_device), Some(on_host)) = taken else { return Err("no pages".into()) };
        let (device_pages, host_pages) =
            (on_device.as_slice().to_vec(), on_host.as_slice().to_vec());
        Ok(Self { device, device_pages, host_pages })
    }

    /// Returns the number of bytes copied.
    fn copied(&self) -> u64 {
        let stats = self.device.stats();
        stats.to_device.bytes + stats.to_host.bytes
    }

    /// Runs a function while copies of these directions follow each other without a gap.
    fn beside<T>(
        &self,
        directions: &[CopyDirection],
        something: impl FnOnce() -> Result<T, Box<dyn std::error::Error>>,
    ) -> Result<T, Box<dyn std::error::Error>> {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let start = |direction: &CopyDirection| {
                let (direction, is_over) = (*direction, &is_over);
                scope.spawn(move || self.copy_until(direction, is_over))
            };
            let lanes: Vec<_> = directions.iter().map(start).collect();
            let done = something();
            is_over.store(true, Ordering::Relaxed);
            for lane in lanes {
                lane.join().map_err(|_| "a thread has panicked")??;
            }
            done
        })
    }

    /// Copies a direction's pages part by part, with two copies in flight.
    fn copy_until(&self, direction: CopyDirection, is_over: &AtomicBool) -> Result<(), CopyError> {
        let first = match direction {
            LOAD => 0,
            WRITE => PAGES,
        };
        let (sender, ended) = mpsc::channel();
        let (mut part, mut under_way) = (0, 0);
        loop {
            while under_way < 2 && !is_over.load(Ordering::Relaxed) {
                let pages = first + part * COPY_PAGES..first + (part + 1) * COPY_PAGES;
                part = (part + 1) % (PAGES / COPY_PAGES);
                let sender = sender.clone();
                self.device.start_copy(CopyJob {
                    direction,
                    device_pages: self.device_pages[pages.clone()].to_vec(),
                    host_pages: self.host_pages[pages].to_vec(),
                    after: None,
                    progress: CopyProgress::new(OpId(0)),
                    done: Box::new(move |copied| {
                        let _ = sender.send(copied);
                    }),
                });
                under_way += 1;
            }
            if under_way == 0 {
                return Ok(());
            }
            let copied = ended.recv_timeout(Duration::from_secs(20));
            copied.map_err(|_| CopyError::Failed("a copy does not end".to_owned()))??;
            under_way -= 1;
        }
    }
}
