//! `terrace bench`: measures a server and what it embeds. What only developers measure is a program of its
//! own, `terrace-bench`.

mod clients;
mod http;
mod ttft;

use std::error::Error;
use std::time::Duration;

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
    /// Load from many streaming clients on a running server (`terrace serve --random-model`)
    Clients {
        /// The server's address
        #[arg(long, default_value = "127.0.0.1:8000")]
        address: String,
        /// API key, if the server needs one; the operator key if it has tenants
        #[arg(long)]
        key: Option<String>,
        /// Concurrent clients
        #[arg(long, default_value_t = 200)]
        clients: u64,
        /// Duration, like 120s
        #[arg(long, default_value = "120s", value_parser = humantime::parse_duration)]
        run: Duration,
        /// Length of the prefix that all prompts share, in characters
        #[arg(long, default_value_t = 800)]
        shared: usize,
        /// Length of the rest of each prompt, in characters
        #[arg(long, default_value_t = 100)]
        own: usize,
        /// Output tokens per request
        #[arg(long, default_value_t = 32)]
        answer: u32,
    },
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    match &arguments.workload {
        Workload::Ttft { tokens, rounds } => {
            let figures = ttft::Workload { tokens: *tokens, rounds: *rounds as usize }.run()?;
            print(arguments.json, &figures, ToString::to_string)
        }
        Workload::Clients { address, key, clients, run, shared, own, answer } => {
            let workload = clients::Workload {
                address: address.clone(),
                key: key.clone(),
                clients: *clients,
                run: *run,
                shared: *shared,
                own: *own,
                answer: *answer,
            };
            print(arguments.json, &workload.run()?, ToString::to_string)
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
