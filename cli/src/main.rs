//! The `terrace` program.

mod allocations;
mod bench;
mod config;
mod features;
mod keys;
mod serve;

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
    /// Measure the cache or the scheduler on this machine
    Bench(bench::Arguments),
    /// Check a configuration, or print the default one
    Config(config::Arguments),
    /// Pass samples of tensors from one process to another
    Features(features::Arguments),
    /// Print the page keys of a prompt, as L3 stores and KV events name them
    Keys(keys::Arguments),
    /// Serve a model over HTTP, as OpenAI's clients expect it
    Serve(Box<serve::Arguments>),
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Config(arguments) => config::run(&arguments),
        Command::Features(arguments) => features::run(&arguments),
        Command::Keys(arguments) => keys::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
    };
    match result {
        Ok(output) => {
            print!("{output}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("terrace: {error}");
            ExitCode::FAILURE
        }
    }
}
