//! The `terrace` program.

mod bench;
mod config;
mod decisions;
mod features;
mod heap;
mod keys;
mod node;
mod nodes;
mod replay;
mod route;
mod serve;
mod settings;
mod signals;
mod trace;

use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// LLM inference scheduler with a three-tier KV cache: device, host and L3
#[derive(Parser)]
#[command(name = "terrace", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the TTFT by cache tier
    Bench(bench::Arguments),
    /// Check the settings of a server and print them as a TOML file
    Config(config::Arguments),
    /// Re-run a recorded decision log of a server's scheduler and compare the plans
    Decisions(decisions::Arguments),
    /// Pass tensor samples from producers to consumers through a store
    Features(features::Arguments),
    /// Print the page keys (block hashes) of a prompt, as used in L3 and KV events
    Keys(keys::Arguments),
    /// Run an L3 node that shares this machine's memory and disk with servers
    Node(Box<node::Arguments>),
    /// Show which store L3 nodes belong to, and change their list
    Nodes(Box<nodes::Arguments>),
    /// Simulate a request trace on a configuration: hit rates, TTFT, ITL, throughput, cost
    Replay(Box<replay::Arguments>),
    /// Run a prefix-aware router in front of several servers
    Route(Box<route::Arguments>),
    /// Serve a model with an OpenAI-compatible HTTP API
    Serve(Box<serve::Arguments>),
    /// Describe a request trace, or generate a synthetic one
    Trace(trace::Arguments),
}

fn main() -> ExitCode {
    let command = Arguments::parse().command;
    if let Command::Config(_) | Command::Node(_) | Command::Route(_) | Command::Serve(_) = command {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        for warning in settings::unknown_variables(&Arguments::command(), names) {
            eprintln!("terrace: {warning}");
        }
    }
    let result = match command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Decisions(arguments) => decisions::run(&arguments),
        Command::Features(arguments) => features::run(&arguments),
        Command::Keys(arguments) => keys::run(&arguments),
        Command::Node(arguments) => node::run(&arguments),
        Command::Nodes(arguments) => nodes::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Route(arguments) => route::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
    };
    match result {
        Ok(output) => {
            // The reader of a pipe may have closed it.
            let _ = std::io::stdout().write_all(output.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("terrace: {error}");
            ExitCode::FAILURE
        }
    }
}
