//! The `terrace` program.

mod bench;
mod config;
mod decisions;
mod features;
mod heap;
mod keys;
mod node;
mod replay;
mod route;
mod serve;
mod settings;
mod signals;
mod trace;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A scheduler for LLM inference with a KV cache on device, host and L3.
#[derive(Parser)]
#[command(name = "terrace", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure a server: many clients, and the first token by where its KV comes from
    Bench(bench::Arguments),
    /// Check the settings of a server, and print them as a file
    Config(config::Arguments),
    /// Do again what the scheduler of a server did, and compare
    Decisions(decisions::Arguments),
    /// Pass samples of tensors from one process to another
    Features(features::Arguments),
    /// Print the page keys of a prompt, as L3 stores and KV events name them
    Keys(keys::Arguments),
    /// Share memory and disk with servers, as one of their nodes
    Node(Box<node::Arguments>),
    /// Find out what a trace of requests would do on a configuration, in virtual time
    Replay(Box<replay::Arguments>),
    /// Send requests to the servers that hold their prefixes
    Route(Box<route::Arguments>),
    /// Serve a model over HTTP, as OpenAI's clients expect it
    Serve(Box<serve::Arguments>),
    /// Look at a trace of requests, or make one up
    Trace(trace::Arguments),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Decisions(arguments) => decisions::run(&arguments),
        Command::Features(arguments) => features::run(&arguments),
        Command::Keys(arguments) => keys::run(&arguments),
        Command::Node(arguments) => node::run(&arguments),
        Command::Replay(arguments) => replay::run(&arguments),
        Command::Route(arguments) => route::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
    };
    match result {
        Ok(output) => {
            // Whoever reads may have read enough.
            let _ = std::io::stdout().write_all(output.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("terrace: {error}");
            ExitCode::FAILURE
        }
    }
}
