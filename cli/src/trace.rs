//! `terrace trace`: looks at traces of requests, and makes some up.

mod picture;
mod source;

use std::error::Error;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::PathBuf;

use clap::Subcommand;
use flate2::Compression;
use flate2::write::GzEncoder;
use terrace_replay::trace::Synthetic;
use terrace_replay::{human, page_size};

pub(crate) use source::{Kind, Source};

const EXAMPLES: &str = "\
Examples:
  terrace trace describe conversation_trace.jsonl
  terrace trace describe --synthetic agents --json
  terrace trace generate --kind chat --requests 20000 --seed 7 -o chat.jsonl.gz

A trace has one JSON object per line and request: timestamp (ms), input_length, output_length and hash_ids,
one id per block of the prompt. Blocks have 512 tokens, or block_size tokens if given. Azure and BurstGPT
tables, ShareGPT conversations, OpenAI messages and benchmark results are read too.";

/// Arguments of `terrace trace`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Show lengths, prefix sharing, working set, and the hit rate of caches of any size
    Describe {
        #[command(flatten)]
        source: Source,
        /// Seed of synthetic requests
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Tokens per page: a power of two up to 256
        #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = page_size)]
        page_size: u32,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Generate a synthetic trace; the same seed gives the same trace on every machine
    Generate {
        /// Workload
        #[arg(long, value_enum, default_value_t = Kind::Mix)]
        kind: Kind,
        /// Number of requests
        #[arg(long, default_value_t = 5000)]
        requests: u32,
        /// Average request rate, per second
        #[arg(long, value_name = "PER_SECOND", default_value_t = 4.0)]
        rate: f64,
        /// Seed; another seed gives another day of the same workload
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Tokens per block
        #[arg(long, value_name = "TOKENS", default_value_t = 512)]
        block_tokens: u32,
        /// Output file, compressed if it ends in .gz; - for standard output
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
    },
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    match &arguments.action {
        Action::Describe { source, seed, page_size, json } => {
            let (name, trace) = source.read(*seed)?;
            let described = trace.describe(*page_size);
            Ok(if *json {
                serde_json::to_string_pretty(&described)? + "\n"
            } else {
                picture::draw(&name, &described)
            })
        }
        Action::Generate { kind, requests, rate, seed, block_tokens, output } => {
            let synthetic = Synthetic {
                workload: (*kind).into(),
                requests: *requests,
                rate_per_s: *rate,
                seed: *seed,
                block_tokens: *block_tokens,
            };
            let trace = synthetic.trace()?;
            if output.as_os_str() == "-" {
                return match trace.write(BufWriter::new(io::stdout().lock())) {
                    // Whoever reads may have read enough.
                    Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
                    Ok(()) | Err(_) => Ok(String::new()),
                };
            }
            let named = |error: io::Error| format!("{}: {error}", output.display());
            let file = File::create(output).map_err(named)?;
            if output.extension().is_some_and(|ending| ending == "gz") {
                let mut packed = GzEncoder::new(file, Compression::default());
                trace.write(BufWriter::new(&mut packed)).map_err(named)?;
                packed.finish().map_err(named)?;
            } else {
                trace.write(BufWriter::new(file)).map_err(named)?;
            }
            let requests = human::whole(trace.requests().len() as u64);
            Ok(format!("{}: {requests} requests\n", output.display()))
        }
    }
}
