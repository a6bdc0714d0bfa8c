//! `terrace bench`: measures the engine. Benchmarks for developers are a program of their own, `terrace-bench`.

mod ttft;

use std::error::Error;

use clap::Subcommand;
use serde::Serialize;

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
    /// TTFT of a long prompt with its KV computed, on device, on host and in L3 (random weights)
    Ttft {
        /// Prompt length in tokens
        #[arg(long, default_value_t = 4000)]
        tokens: usize,
        /// Number of rounds; the median is reported
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
    },
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    match &arguments.workload {
        Workload::Ttft { tokens, rounds } => {
            let figures = ttft::Workload { tokens: *tokens, rounds: *rounds as usize }.run()?;
            print(arguments.json, &figures, ToString::to_string)
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
