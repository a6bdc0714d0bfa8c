//! Long prompts that are sent twice, with a device tier too small for them and a host tier large
//! enough.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use terrace_cuda::Context;
use terrace_kit::{Dice, available_bytes};
use terrace_scheduler::Token;

use crate::Done;
use crate::engine::{Server, Sizes, runtime};
use crate::table::Table;
use crate::world::eight_billion;

const TOKENS: u32 = 32_768;
/// Number of prompts in flight.
const TOGETHER: usize = 8;
/// Bytes of a token's KV in the measured model.
const TOKEN_BYTES: u64 = 128 << 10;

/// Measures a second pass over some prompts, 20 by default, against the first.
pub(crate) fn passes(context: &Arc<Context>, table: &mut Table, prompts: Option<&str>) -> Done {
    let prompts = match prompts {
        Some(number) => number.parse().map_err(|_| format!("{number} is no number of prompts"))?,
        None => 20,
    };
    let bytes = u64::from(prompts) * u64::from(TOKENS) * TOKEN_BYTES;
    let available = available_bytes().ok_or("the system does not say what memory is available")?;
    if bytes + (8 << 30) > available {
        return Err(format!(
            "{prompts} prompts take {} GiB of host memory, and {} GiB are to be had: ask for fewer (passes=10)",
            bytes >> 30,
            available >> 30
        )
        .into());
    }
    runtime()?.block_on(twice(context, table, prompts))
}

async fn twice(context: &Arc<Context>, table: &mut Table, count: u32) -> Done {
    let shape = eight_billion();
    let sizes = Sizes {
        device_tokens: 3 * TOKENS + 8_192,
        host_tokens: count * TOKENS + 8_192,
        step_tokens: 8_192,
        canary: None,
    };
    let began = Instant::now();
    let server = Server::start(context, &shape, sizes, None)?;
    println!("      the host's pages were pinned in {:.0} s", began.elapsed().as_secs_f64());
    let mut dice = Dice::new(14);
    let prompts: Vec<Vec<Token>> =
        (0..count).map(|_| dice.tokens(TOKENS as usize - 8, shape.vocabulary)).collect();
    server.ask_only(&dice.tokens(9_000, shape.vocabulary), 1).await?;
    let mut times = Vec::new();
    let mut hits = Vec::new();
    for _ in 0..2 {
        let _ = server.rest().await?;
        let began = Instant::now();
        let asked = prompts.iter().map(|prompt| server.ask_only(prompt, 2));
        stream::iter(asked).buffer_unordered(TOGETHER).try_collect::<Vec<()>>().await?;
        times.push(began.elapsed());
        let stats = server.rest().await?;
        hits.push((stats.device_hit_tokens, stats.host_hit_tokens));
    }
    println!("      passes took {times:.2?}; hits on device and host after each: {hits:?}");
    let times_faster = times[0].as_secs_f64() / times[1].as_secs_f64();
    let what = format!("second pass over {count} prompts of 32k, from host");
    table.figure(
        &what,
        &format!("{times_faster:.1} times the first"),
        "8 times",
        times_faster >= 8.0,
    );
    server.engine.shutdown(Duration::from_secs(20)).await;
    Ok(())
}
