//! `terrace bench`: measures a server and what it embeds. What only developers measure is a program of its
//! own, `terrace-bench`.

mod clients;
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
    /// The first token of a long prompt, by where its KV comes from, with a model of random weights
    Ttft {
        /// The prompt's length
        #[arg(long, default_value_t = 4000)]
        tokens: usize,
        /// How often; the median counts
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
    },
    /// Many streaming clients on a server that runs (`terrace serve --random-model`, whose answers are as long as asked)
    Clients {
        /// The server's address
        #[arg(long, default_value = "127.0.0.1:8000")]
        address: String,
        /// A key, if the server wants one: the operator's where there are tenants
        #[arg(long)]
        key: Option<String>,
        /// Clients at a time
        #[arg(long, default_value_t = 200)]
        clients: u64,
        /// How long they ask, like 120s
        #[arg(long, default_value = "120s", value_parser = humantime::parse_duration)]
        run: Duration,
        /// Characters that all prompts begin with
        #[arg(long, default_value_t = 800)]
        shared: usize,
        /// Characters of each prompt's own
        #[arg(long, default_value_t = 100)]
        own: usize,
        /// Tokens of an answer
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
