//! `terrace bench`: measures the cache and the scheduler on this machine.

use std::error::Error;
use std::path::PathBuf;

use clap::Subcommand;
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};
use terrace_bench::{CacheFigures, CacheWorkload, StepFigures, StepWorkload, Trace};
use terrace_cache::EvictionKind;

use crate::allocations;

/// Arguments of `terrace bench`.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    workload: Workload,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Workload {
    /// The cache alone, one request at a time
    Cache {
        /// A trace: one JSON object a line with input_length and hash_ids (512-token blocks)
        #[arg(long, conflicts_with = "synthetic", required_unless_present = "synthetic")]
        trace: Option<PathBuf>,
        /// Conversations made up here instead of a trace
        #[arg(long)]
        synthetic: bool,
        /// Tokens in a page
        #[arg(long, default_value_t = 16)]
        page_size: u32,
        /// Pages of the device; as many as the trace can need if not given
        #[arg(long)]
        device_pages: Option<u32>,
        /// Which pages go first
        #[arg(long, default_value = "lru", value_parser = policy)]
        policy: EvictionKind,
    },
    /// A whole scheduler under decode-heavy load
    Steps {
        /// Requests that run at once
        #[arg(long, default_value_t = 256)]
        running: u32,
        /// Tokens of each prompt
        #[arg(long, default_value_t = 1024)]
        context: u32,
        /// Tokens in a page
        #[arg(long, default_value_t = 16)]
        page_size: u32,
        /// Pages of the device
        #[arg(long, default_value_t = 16384)]
        device_pages: u32,
        /// How much of each prompt all have in common, in percent
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100))]
        shared: u32,
        /// Decode steps to measure
        #[arg(long, default_value_t = 64)]
        decode_steps: u32,
    },
}

/// An eviction policy by its name in configuration files.
fn policy(name: &str) -> Result<EvictionKind, serde::de::value::Error> {
    EvictionKind::deserialize(name.into_deserializer())
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    match &arguments.workload {
        Workload::Cache { trace, page_size, device_pages, policy, .. } => {
            crate::keys::check_page_size(*page_size)?;
            let trace = match trace {
                Some(path) => Trace::read(path)?,
                None => Trace::synthetic(),
            };
            let workload = CacheWorkload {
                page_size: *page_size,
                device_pages: *device_pages,
                eviction: *policy,
            };
            print(arguments.json, &workload.run(&trace), cache_text)
        }
        Workload::Steps { running, context, page_size, device_pages, shared, decode_steps } => {
            let tokens = u64::from(context + decode_steps + 2);
            let own_pages = tokens * u64::from(100 - shared) / 100 / u64::from(*page_size) + 2;
            if own_pages * u64::from(*running) > u64::from(*device_pages) {
                return Err("the prompts do not fit the device: raise --device-pages or \
                            --shared, or lower --running, --context or --decode-steps"
                    .into());
            }
            let figures = StepWorkload {
                running: *running,
                context: *context,
                page_size: *page_size,
                device_pages: *device_pages,
                shared_percent: *shared,
                decode_steps: *decode_steps,
                allocations: allocations::count,
            }
            .run()?;
            print(arguments.json, &figures, steps_text)
        }
    }
}

fn print<F: Serialize>(
    json: bool,
    figures: &F,
    text: impl FnOnce(&F) -> String,
) -> Result<String, Box<dyn Error>> {
    Ok(if json { serde_json::to_string_pretty(figures)? + "\n" } else { text(figures) })
}

fn cache_text(figures: &CacheFigures) -> String {
    let CacheFigures { requests, tokens, hit_tokens, hit_ratio, us_per_request, .. } = figures;
    let page = &figures.ns_per_page;
    format!(
        "{requests} requests, {tokens} tokens, {hit_tokens} found in the cache ({hit_ratio:.5})\n\
         a request: {us_per_request}\n\
         a page: hash {:.1}, match {:.1}, evict {:.1}, insert {:.1} ns\n\
         memory: {:.1} bytes of bookkeeping and {:.1} bytes of tokens a page\n",
        page.hash,
        page.r#match,
        page.evict,
        page.insert,
        figures.bytes_per_page,
        figures.token_bytes_per_page
    )
}

fn steps_text(figures: &StepFigures) -> String {
    format!(
        "a decode step: plan    {}\n               advance {}\n               {:.2} allocations\n\
         a request: admitted {:.2} us, with all pages cached {:.2} us, ended {:.2} us\n\
         stats: {:.3} us\n",
        figures.plan_us,
        figures.advance_us,
        figures.allocations_per_step,
        figures.admit_us_per_request,
        figures.rehit_us_per_request,
        figures.finish_us_per_request,
        figures.stats_us
    )
}
