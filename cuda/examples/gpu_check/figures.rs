//! Performance figures.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_cuda::{Context, CudaLlama};
use terrace_engine::{ModelError, StepLimits, StepTicket};
use terrace_kit::Dice;
use terrace_model::Shape;

use crate::Done;
use crate::table::Table;
use crate::world::{Part, World, eight_billion, greedy};

pub(crate) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Measures a prompt of 32,768 tokens, in chunks.
pub(crate) fn prefill(context: &Arc<Context>, table: &mut Table) -> Done {
    const CHUNK: u32 = 8192;
    const TOKENS: u32 = 4 * CHUNK;
    let shape = eight_billion();
    let limits = StepLimits { page_size: 16, rows: 2, tokens_max: CHUNK };
    let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, TOKENS)?;
    world.come(0, greedy(), &[]);
    let prompt = Dice::new(1).tokens(TOKENS as usize, shape.vocabulary);
    let mut times = Vec::new();
    for _ in 0..3 {
        let began = Instant::now();
        let mut tickets = VecDeque::new();
        let mut ends = Vec::new();
        for start in (0..TOKENS).step_by(CHUNK as usize) {
            let tokens = &prompt[start as usize..(start + CHUNK) as usize];
            let index = (start + CHUNK == TOKENS).then_some(0);
            tickets.push_back(world.launch(&[Part { index, ..Part::new(0, start, tokens) }])?);
            if tickets.len() == 2 {
                tickets.pop_front().expect("there are two").finish().result?;
                ends.push(milliseconds(began.elapsed()));
            }
        }
        for ticket in tickets {
            ticket.finish().result?;
            ends.push(milliseconds(began.elapsed()));
        }
        println!("      chunks ended after {ends:.0?} ms");
        times.push(began.elapsed());
    }
    times.sort();
    let time = milliseconds(times[0]);
    table.figure(
        "prefill of 32,768 tokens, chunks of 8,192",
        &format!("{time:.0} ms"),
        "1,500 ms",
        time <= 1500.0,
    );
    Ok(())
}

/// Measures decode steps of 64 rows at 1k context, with one launched ahead.
pub(crate) fn decode(context: &Arc<Context>, table: &mut Table) -> Done {
    const STEPS: u32 = 100;
    let shape = eight_billion();
    for (rows, context_tokens) in [(64_u32, 1024_u32), (1, 1024), (1, 32_000), (256, 1024)] {
        let limits = StepLimits { page_size: 16, rows, tokens_max: 512 };
        let tokens = context_tokens + STEPS + 16;
        let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, tokens)?;
        world.fill()?;
        for row in 0..rows {
            world.come(row, greedy(), &[]);
        }
        let (time, launch) = decode_ahead(&mut world, rows, context_tokens, STEPS)?;
        let what = format!("decode step, {rows} rows at {context_tokens} tokens");
        let found = format!("{time:.2} ms (launch {launch:.2})");
        let goal = if rows == 64 { "5.5 ms" } else { "" };
        table.figure(&what, &found, goal, rows != 64 || time <= 5.5);
    }
    Ok(())
}

/// Measures decode steps with attention segments of several sizes. Smaller segments give more
/// blocks for few long sequences, and more partial results to join.
pub(crate) fn segments(context: &Arc<Context>, table: &mut Table) -> Done {
    const STEPS: u32 = 100;
    let shape = eight_billion();
    for (rows, context_tokens) in
        [(1_u32, 1024_u32), (1, 8192), (1, 32_000), (64, 1024), (64, 8192)]
    {
        for segment in [256, 512, 1024] {
            let limits = StepLimits { page_size: 16, rows, tokens_max: 512 };
            let model = CudaLlama::random(context, &shape)?.with_segment(segment);
            let mut world = World::new(context, model, limits, context_tokens + STEPS + 16)?;
            world.fill()?;
            (0..rows).for_each(|row| world.come(row, greedy(), &[]));
            let (time, _) = decode_ahead(&mut world, rows, context_tokens, STEPS)?;
            let what =
                format!("decode step, {rows} rows at {context_tokens}, segments of {segment}");
            table.figure(&what, &format!("{time:.3} ms"), "", true);
        }
    }
    Ok(())
}

/// Returns the time of a decode step and of its launch in milliseconds, with one launched ahead.
/// The first 20 steps are a warm-up.
pub(crate) fn decode_ahead(
    world: &mut World,
    rows: u32,
    context_tokens: u32,
    steps: u32,
) -> Result<(f64, f64), ModelError> {
    let (mut tickets, mut ends, mut launches) = (VecDeque::new(), Vec::new(), Duration::ZERO);
    for step in 0..steps {
        let part = |row: u32| {
            let awaited = (step > 0).then_some(row as usize);
            Part { index: Some(step), awaited, ..Part::new(row, context_tokens + step, &[1]) }
        };
        let parts: Vec<Part> = (0..rows).map(part).collect();
        let launched = Instant::now();
        tickets.push_back(world.launch(&parts)?);
        launches += launched.elapsed();
        if tickets.len() == 2 {
            tickets.pop_front().expect("there are two").finish().result?;
            ends.push(Instant::now());
        }
    }
    for ticket in tickets {
        ticket.finish().result?;
    }
    let time = milliseconds(ends[ends.len() - 1] - ends[20]) / (ends.len() - 21) as f64;
    Ok((time, milliseconds(launches) / f64::from(steps)))
}

/// Measures few tokens behind a long prefix on the device.
pub(crate) fn behind(context: &Arc<Context>, table: &mut Table) -> Done {
    const PREFIX: u32 = 32_000;
    let shape = eight_billion();
    let limits = StepLimits { page_size: 16, rows: 2, tokens_max: 1024 };
    let row_tokens = PREFIX + 1024;
    let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, row_tokens)?;
    world.fill()?;
    world.come(0, greedy(), &[]);
    let prompt = Dice::new(1).tokens(1024, shape.vocabulary);
    for (tokens, goal) in [(128_usize, 12.0), (1024, 70.0)] {
        let after_nothing = time_of(&mut world, &[Part::new(0, 0, &prompt[..tokens])])?;
        let time = time_of(&mut world, &[Part::new(0, PREFIX, &prompt[..tokens])])?;
        let what = format!("{tokens} tokens behind 32,000 on the device");
        let [time, alone] = [time, after_nothing].map(milliseconds);
        let found = format!("{time:.1} ms (behind none {alone:.1})");
        table.figure(&what, &found, &format!("{goal:.0} ms"), time <= goal);
    }
    Ok(())
}

/// Prints step times as `terrace replay --calibrate` reads them: prompts, decodes, and both.
pub(crate) fn steps(context: &Arc<Context>) -> Done {
    let qwen = Shape {
        vocabulary: 152_064,
        dim: 3584,
        layers: 28,
        heads: 28,
        kv_heads: 4,
        hidden: 18_944,
        qkv_bias: true,
        ..eight_billion()
    };
    for (name, shape) in [("llama-3.1-8b", eight_billion()), ("qwen2.5-7b", qwen)] {
        println!("{name}");
        println!("prefill_tokens,prefill_pairs,decode_rows,decode_context,step_us");
        prompts_of(context, &shape)?;
        decodes_of(context, &shape)?;
    }
    Ok(())
}

fn prompts_of(context: &Arc<Context>, shape: &Shape) -> Done {
    let limits = StepLimits { page_size: 16, rows: 2, tokens_max: 8192 };
    let mut world = World::new(context, CudaLlama::random(context, shape)?, limits, 40_960)?;
    world.fill()?;
    world.come(0, greedy(), &[]);
    let prompt = Dice::new(1).tokens(8192, shape.vocabulary);
    for tokens in [128, 256, 512, 1024, 2048, 4096, 8192] {
        for behind in [0, 4096, 16_384, 32_000] {
            let part = Part::new(0, behind, &prompt[..tokens as usize]);
            line(&mut world, &[part], tokens, behind, 0, 0)?;
        }
    }
    Ok(())
}

fn decodes_of(context: &Arc<Context>, shape: &Shape) -> Done {
    const PROMPT_ROW: u32 = 256;
    let limits = StepLimits { page_size: 16, rows: PROMPT_ROW + 1, tokens_max: 4096 };
    let mut world = World::new(context, CudaLlama::random(context, shape)?, limits, 2304)?;
    world.fill()?;
    for row in 0..=PROMPT_ROW {
        world.come(row, greedy(), &[]);
    }
    let prompt = Dice::new(1).tokens(4096, shape.vocabulary);
    for rows in [1, 2, 4, 8, 16, 32, 64, 128, 256] {
        for behind in [128, 512, 1024, 2048] {
            let decodes = (0..rows).map(|row| Part::new(row, behind - 1, &[1]));
            let mut parts: Vec<Part> = decodes.collect();
            line(&mut world, &parts, 0, 0, rows, behind)?;
            if [4, 16, 64, 256].contains(&rows) && behind != 1024 {
                let tokens = [256, 512, 1024, 2048][(rows as usize + behind as usize / 512) % 4];
                parts.push(Part::new(PROMPT_ROW, 0, &prompt[..tokens as usize]));
                line(&mut world, &parts, tokens, 0, rows, behind)?;
            }
        }
    }
    Ok(())
}

/// Measures a step and prints its line.
fn line(
    world: &mut World,
    parts: &[Part],
    tokens: u32,
    behind: u32,
    rows: u32,
    context: u32,
) -> Done {
    let time = time_of(world, parts)?.as_secs_f64() * 1e6;
    let pairs =
        u64::from(tokens) * u64::from(behind) + u64::from(tokens) * u64::from(tokens + 1) / 2;
    println!("{tokens},{pairs},{rows},{},{time:.0}", rows * context);
    Ok(())
}

/// Returns the time of a repeated step with one launched ahead.
fn time_of(world: &mut World, parts: &[Part]) -> Result<Duration, ModelError> {
    const REPEATS: u32 = 6;
    world.step(parts)?;
    repeat(world, parts, REPEATS)
}

/// Same as [`time_of`], without a warm-up.
pub(crate) fn repeat(
    world: &mut World,
    parts: &[Part],
    repeats: u32,
) -> Result<Duration, ModelError> {
    let (began, mut waiting) = (Instant::now(), VecDeque::new());
    for _ in 0..repeats {
        waiting.push_back(world.launch(parts)?);
        if waiting.len() == 2 {
            waiting.pop_front().expect("there are two").finish().result?;
        }
    }
    waiting.into_iter().try_for_each(|ticket| ticket.finish().result.map(drop))?;
    Ok(began.elapsed() / repeats)
}
