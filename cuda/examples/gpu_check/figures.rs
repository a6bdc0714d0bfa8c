//! How fast it is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_cuda::{Context, CudaLlama};
use terrace_engine::{StepLimits, StepTicket};

use crate::Done;
use crate::table::Table;
use crate::world::{Dice, Part, World, eight_billion, greedy};

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A prompt of 32,768 tokens, in chunks.
pub(crate) fn prefill(context: &Arc<Context>, table: &mut Table) -> Done {
    const CHUNK: u32 = 8192;
    const TOKENS: u32 = 4 * CHUNK;
    let shape = eight_billion();
    let limits = StepLimits { page_size: 16, rows: 2, tokens_max: CHUNK };
    let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, TOKENS)?;
    world.come(0, greedy(), &[]);
    let prompt = Dice(1).tokens(TOKENS as usize, shape.vocabulary);
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

/// Decode steps of 64 rows at 1k context, one launched ahead.
pub(crate) fn decode(context: &Arc<Context>, table: &mut Table) -> Done {
    const STEPS: u32 = 100;
    let shape = eight_billion();
    for (rows, context_tokens) in [(64_u32, 1024_u32), (1, 1024), (1, 32_000), (256, 1024)] {
        let limits = StepLimits { page_size: 16, rows, tokens_max: 512 };
        let tokens = context_tokens + STEPS + 16;
        let mut world = World::new(context, CudaLlama::random(context, &shape)?, limits, tokens)?;
        for row in 0..rows {
            world.come(row, greedy(), &[]);
        }
        let (mut tickets, mut ends, mut launches) = (VecDeque::new(), Vec::new(), Duration::ZERO);
        for step in 0..STEPS {
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
        // The first ones are for what is made on first use.
        let time = milliseconds(ends[ends.len() - 1] - ends[20]) / (ends.len() - 21) as f64;
        let what = format!("decode step, {rows} rows at {context_tokens} tokens");
        let launch = milliseconds(launches) / f64::from(STEPS);
        let found = format!("{time:.2} ms (launch {launch:.2})");
        let goal = if rows == 64 { "5.5 ms" } else { "" };
        table.figure(&what, &found, goal, rows != 64 || time <= 5.5);
    }
    Ok(())
}
