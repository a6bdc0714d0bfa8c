//! The speed of a model, the built-in one unless a folder is given:
//! `cargo run --release --example speed -p terrace-model -- [THREADS] [FOLDER]`.

use std::time::{Duration, Instant};

use terrace_cache::{Cache, CacheConfig, DevicePage};
use terrace_engine::{CpuMemory, Forward, Logits, PageTable, Span, Step};
use terrace_kit::middle_by;
use terrace_model::Llama;
use terrace_scheduler::Slot;

const PAGE_SIZE: u32 = 16;

fn main() {
    let threads = std::env::args().nth(1).map_or(2, |threads| threads.parse().expect("threads"));
    let start = Instant::now();
    let mut model = match std::env::args().nth(2) {
        Some(folder) => terrace_model::load(folder.as_ref(), threads).expect("a model").model,
        None => terrace_model::built_in(threads).model,
    };
    println!("construction        {:>8.0} ms", milliseconds(start.elapsed()));

    let prompt_tokens = 4_000;
    let elapsed = prefill(&mut model, prompt_tokens, 512);
    let speed = f64::from(prompt_tokens) / elapsed.as_secs_f64();
    println!(
        "prefill of {prompt_tokens}     {:>8.0} ms, {speed:.0} tokens/s",
        milliseconds(elapsed)
    );

    for sequences in [1, 8, 32] {
        let elapsed = decode(&mut model, sequences, 500);
        println!("decode step of {sequences:>2}   {:>9.1} ms", milliseconds(elapsed));
    }
}

/// The time of a prompt in spans of this number of tokens.
fn prefill(model: &mut Llama, prompt_tokens: u32, span_tokens: u32) -> Duration {
    let mut bench = Bench::new(model, 1, prompt_tokens);
    bench.compute(model, 0..16);
    let start = Instant::now();
    let mut position = 0;
    while position < prompt_tokens {
        let end = prompt_tokens.min(position + span_tokens);
        bench.compute(model, position..end);
        position = end;
    }
    start.elapsed()
}

/// The median time of a step with one token of each sequence, after a context of this length.
fn decode(model: &mut Llama, sequences: u32, context: u32) -> Duration {
    const STEPS: u32 = 21;
    let mut bench = Bench::new(model, sequences, context + STEPS);
    bench.compute(model, 0..context);
    let times = (context..context + STEPS).map(|position| {
        let start = Instant::now();
        bench.compute(model, position..position + 1);
        start.elapsed()
    });
    middle_by(times, Ord::cmp).unwrap_or_default()
}

struct Bench {
    memory: CpuMemory,
    table: PageTable,
    sequences: u32,
    rows: Vec<f32>,
}

impl Bench {
    fn new(model: &Llama, sequences: u32, positions: u32) -> Self {
        let row_pages = positions.div_ceil(PAGE_SIZE);
        let device_pages = row_pages * sequences;
        let config = CacheConfig { page_size: PAGE_SIZE, device_pages, ..CacheConfig::default() };
        let pages =
            Cache::new(&config).take_device_pages(device_pages as usize).expect("free pages");
        let pages: Vec<DevicePage> = pages.as_slice().to_vec();
        let mut table = PageTable::new(sequences, PAGE_SIZE);
        for (slot, row) in (0..).zip(pages.chunks(row_pages as usize)) {
            table.set(Slot(slot), 0, row);
        }
        let memory = CpuMemory::new(device_pages, model.kv_shape().page_bytes(PAGE_SIZE));
        Self { memory: memory.expect("memory"), table, sequences, rows: Vec::new() }
    }

    /// Computes the same positions of all sequences.
    fn compute(&mut self, model: &mut Llama, positions: std::ops::Range<u32>) {
        let span_tokens = positions.len();
        let spans: Vec<Span> = (0..self.sequences)
            .map(|slot| Span {
                slot: Slot(slot),
                start: positions.start,
                tokens: slot as usize * span_tokens..(slot as usize + 1) * span_tokens,
                logits: 1,
            })
            .collect();
        let tokens: Vec<u32> = (0..self.sequences)
            .flat_map(|slot| positions.clone().map(move |position| (position * 7 + slot) % 256))
            .collect();
        let step = Step { spans: &spans, tokens: &tokens, table: &self.table, arriving: &[] };
        let mut ignore = |_: &[f32]| {};
        let mut logits = Logits::new(model.vocabulary(), &mut self.rows, &mut ignore);
        model.forward(&self.memory, &step, &mut logits).expect("a step");
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
