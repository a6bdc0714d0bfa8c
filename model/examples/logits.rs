//! The logits after a list of tokens, as JSON: `cargo run --example logits -- FOLDER 1,2,3`.

use std::path::Path;

use terrace_cache::{Cache, CacheConfig};
use terrace_engine::{CpuMemory, Forward, Logits, PageTable, Span, Step};
use terrace_scheduler::Slot;

const PAGE_SIZE: u32 = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(folder), Some(tokens)) = (arguments.next(), arguments.next()) else {
        return Err("usage: logits FOLDER TOKEN,TOKEN,...".into());
    };
    let tokens: Vec<u32> = tokens.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let mut model = terrace_model::load(Path::new(&folder), 2)?.model;

    let device_pages = (tokens.len() as u32).div_ceil(PAGE_SIZE);
    let config = CacheConfig { page_size: PAGE_SIZE, device_pages, ..CacheConfig::default() };
    let pages = Cache::new(&config).take_device_pages(device_pages as usize).ok_or("no pages")?;
    let mut table = PageTable::new(1, PAGE_SIZE);
    table.set(Slot(0), 0, pages.as_slice());
    let memory = CpuMemory::new(device_pages, model.kv_shape().page_bytes(PAGE_SIZE))?;
    let span = Span { slot: Slot(0), start: 0, tokens: 0..tokens.len(), logits: 1 };
    let step = Step { spans: &[span], tokens: &tokens, table: &table, arriving: &[] };
    let (mut logits, mut rows) = (Vec::new(), Vec::new());
    let mut take = |rows: &[f32]| logits.extend_from_slice(rows);
    model.forward(&memory, &step, &mut Logits::new(model.vocabulary(), &mut rows, &mut take))?;
    println!("{}", serde_json::to_string(&logits)?);
    Ok(())
}
