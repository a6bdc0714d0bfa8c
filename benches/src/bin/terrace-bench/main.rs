//! `terrace-bench`: measures the cache, the scheduler and the stores on this machine. What is measured on a
//! server is part of the `terrace` program.

mod allocations;
mod plot;
mod scaling;
mod text;

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};
use terrace_bench::{
    CacheWorkload, FeaturesWorkload, GapWorkload, KeysWorkload, L3Backend, L3Workload,
    LifetimesWorkload, MooncakeWorkload, NodesWorkload, ScalingWorkload, StepWorkload, trace,
};
use terrace_cache::EvictionKind;
use terrace_l3_disk::IoEngine;
use terrace_replay::Size;
use terrace_replay::trace::{ReadOptions, Trace};

use crate::text::{
    cache_text, features_text, gap_text, keys_text, l3_text, lifetimes_text, mooncake_text,
    nodes_text, steps_text,
};

/// Measures Terrace on this machine.
#[derive(Parser)]
#[command(name = "terrace-bench", version)]
struct Arguments {
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
        /// A trace, as `terrace replay` takes it
        #[arg(long, conflicts_with = "synthetic", required_unless_present = "synthetic")]
        trace: Option<PathBuf>,
        /// Conversations made up here instead of a trace
        #[arg(long)]
        synthetic: bool,
        /// Tokens in a page
        #[arg(long, default_value_t = 16, value_parser = terrace_replay::page_size)]
        page_size: u32,
        /// Pages of the device; as many as the trace can need if not given
        #[arg(long)]
        device_pages: Option<u32>,
        /// Which pages go first
        #[arg(long, default_value = "lru", value_parser = policy)]
        policy: EvictionKind,
    },
    /// Page keys alone, with pages of several sizes
    Keys {
        /// Tokens of the prompt
        #[arg(long, default_value_t = 12_288, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
        tokens: u32,
        /// How often each size is measured: the quickest counts
        #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
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
        #[arg(long, default_value_t = 16, value_parser = terrace_replay::page_size)]
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
        /// Steps that may be in flight: with 2, decoding is measured with one and with two, in turns
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
        in_flight: u32,
    },
    /// How long a device waits between steps of an engine, with a model that only takes time
    Gap {
        /// Requests that run at once
        #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
        running: u32,
        /// Steps that may be in flight: with 2 they are planned ahead
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=2))]
        in_flight: u32,
        /// Tokens of each answer
        #[arg(long, default_value_t = 300)]
        steps: u32,
        /// How long a step takes
        #[arg(long, default_value = "10ms", value_parser = humantime::parse_duration)]
        step: Duration,
        /// How long launching a step takes
        #[arg(long, default_value = "50us", value_parser = humantime::parse_duration)]
        launch: Duration,
    },
    /// How costs grow with the tree, the batch and the context
    Scaling {
        /// Smaller sizes: counts are as good, times are not
        #[arg(long)]
        quick: bool,
        /// Draw what was measured into this file
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
    /// A store, against plain direct IO or copying memory in the same run
    L3 {
        /// Which store
        #[arg(long, value_enum, default_value_t = Backend::Disk)]
        backend: Backend,
        /// A directory on the disk to measure; what is written there is deleted again
        #[arg(long, default_value = ".")]
        path: PathBuf,
        /// The size of an object
        #[arg(long, default_value = "64KiB")]
        object: Size,
        /// How much to store and read in each round
        #[arg(long, default_value = "1GiB")]
        total: Size,
        /// Objects in flight at a time, on disk
        #[arg(long, default_value_t = 64)]
        depth: usize,
        /// How transfers with the disk are done
        #[arg(long, value_enum, default_value_t = Io::Auto)]
        io: Io,
        /// Time the opening of a store with so many objects, 8 KiB of disk each, rather than of the
        /// one that was measured
        #[arg(long, default_value_t = 0)]
        open_objects: u32,
    },
    /// A store in a Mooncake cluster, against the bare calls of its library in the same run
    Mooncake {
        /// The libmooncake_store.so of the installation
        #[arg(long, value_name = "PATH", env = "TERRACE_MOONCAKE_LIBRARY")]
        library: PathBuf,
        /// HOST:PORT of the master
        #[arg(long, default_value = "127.0.0.1:50051")]
        master: String,
        /// The size of an object; one run for each
        #[arg(long, value_delimiter = ',', default_value = "64KiB,1MiB")]
        object: Vec<Size>,
        /// Objects in a batch
        #[arg(long, default_value_t = 32)]
        batch: u32,
        /// Batches of each kind
        #[arg(long, default_value_t = 100)]
        rounds: u32,
    },
    /// Nodes over the loopback interface, against a plain stream of bytes in the same run
    Nodes {
        /// The size of an object; one run for each
        #[arg(long, value_delimiter = ',', default_value = "64KiB,1MiB")]
        object: Vec<Size>,
        /// Objects in a batch
        #[arg(long, default_value_t = 32)]
        batch: u32,
        /// How much to move, each way, in each round
        #[arg(long, default_value = "512MiB")]
        total: Size,
        /// Rounds
        #[arg(long, default_value_t = 9)]
        rounds: u32,
        /// How many objects to ask about at a time
        #[arg(long, default_value_t = 1024)]
        exists: u32,
        /// Over how many nodes these are spread
        #[arg(long, default_value_t = 3)]
        nodes: u32,
    },
    /// How much memory a store holds while objects are produced and consumed
    Lifetimes {
        /// How long leases last, in seconds; one run for each
        #[arg(long, value_delimiter = ',', default_value = "5,300")]
        lease_ttl_s: Vec<u64>,
        /// How long each run lasts
        #[arg(long, default_value_t = 10)]
        run_s: u64,
        /// Objects under way at a time
        #[arg(long, default_value_t = 16)]
        concurrency: u32,
        /// The size of an object
        #[arg(long, default_value = "1MiB")]
        object: Size,
        /// The store's size
        #[arg(long, default_value = "1GiB")]
        capacity: Size,
    },
    /// The feature store: large tensors against copying memory, and residency whatever the leases
    Features {
        /// The size of a tensor
        #[arg(long, default_value = "64MiB")]
        tensor: Size,
        /// Tensors of a sample
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=128))]
        tensors: u32,
        /// How often speeds are measured; the best counts
        #[arg(long, default_value_t = 8)]
        rounds: u32,
        /// How long leases last, in seconds; one run for each
        #[arg(long, value_delimiter = ',', default_value = "5,300")]
        lease_ttl_s: Vec<u64>,
        /// How long each of these runs lasts
        #[arg(long, default_value_t = 10)]
        run_s: u64,
        /// Samples under way at a time in these runs
        #[arg(long, default_value_t = 16)]
        concurrency: u32,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Backend {
    Memory,
    Disk,
}

#[derive(Clone, Copy, ValueEnum)]
enum Io {
    Auto,
    Uring,
    Threads,
}

/// An eviction policy by its name in configuration files.
fn policy(name: &str) -> Result<EvictionKind, serde::de::value::Error> {
    EvictionKind::deserialize(name.into_deserializer())
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(output) => {
            // Whoever reads may have read enough.
            let _ = std::io::stdout().write_all(output.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("terrace-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    match &arguments.workload {
        Workload::Cache { trace, page_size, device_pages, policy, .. } => {
            let requests = match trace {
                Some(path) => Trace::read(path, &ReadOptions::default())?.trace,
                None => trace::conversations(),
            };
            let workload = CacheWorkload {
                page_size: *page_size,
                device_pages: *device_pages,
                eviction: *policy,
            };
            let pages = trace::pages(&requests, *page_size);
            let figures = workload.run(trace::prompts(&requests), pages);
            print(arguments.json, &figures, cache_text)
        }
        Workload::Keys { tokens, rounds } => {
            let workload = KeysWorkload { tokens: *tokens, rounds: *rounds };
            print(arguments.json, &workload.run(), keys_text)
        }
        Workload::Steps {
            running,
            context,
            page_size,
            device_pages,
            shared,
            decode_steps,
            in_flight,
        } => {
            let workload = StepWorkload {
                running: *running,
                context: *context,
                page_size: *page_size,
                device_pages: *device_pages,
                shared_percent: *shared,
                decode_steps: *decode_steps,
                in_flight: *in_flight,
                allocations: allocations::count,
            };
            let tokens = u64::from(workload.tokens_max());
            let own_pages = tokens * u64::from(100 - shared) / 100 / u64::from(*page_size) + 2;
            if own_pages * u64::from(*running) > u64::from(*device_pages) {
                return Err("the prompts do not fit the device: raise --device-pages or \
                            --shared, or lower --running, --context or --decode-steps"
                    .into());
            }
            print(arguments.json, &workload.run()?, steps_text)
        }
        Workload::Gap { running, in_flight, steps, step, launch } => {
            let workload = GapWorkload {
                running: *running,
                in_flight: *in_flight,
                steps: *steps,
                step: *step,
                launch: *launch,
            };
            print(arguments.json, &workload.run()?, gap_text)
        }
        Workload::Scaling { quick, svg } => {
            let workload = ScalingWorkload {
                quick: *quick,
                progress: |doing| eprintln!("{doing}"),
                allocated_bytes: allocations::bytes,
            };
            let figures = workload.run()?;
            if let Some(file) = svg {
                std::fs::write(file, plot::svg(&figures))?;
            }
            print(arguments.json, &figures, scaling::text)
        }
        Workload::L3 { backend, path, object, total, depth, io, open_objects } => {
            if object.as_u64() == 0 || !object.as_u64().is_multiple_of(4096) {
                return Err("--object: plain direct IO wants a multiple of 4 KiB".into());
            }
            let io = match io {
                Io::Auto => IoEngine::Auto,
                Io::Uring => IoEngine::Uring,
                Io::Threads => IoEngine::Threads,
            };
            let workload = L3Workload {
                backend: match backend {
                    Backend::Memory => L3Backend::Memory,
                    Backend::Disk => L3Backend::Disk { path: path.clone(), io },
                },
                object_bytes: object.as_u64() as usize,
                total_bytes: total.as_u64(),
                depth: (*depth).max(1),
                open_objects: *open_objects,
                progress: |doing| eprintln!("{doing}"),
            };
            let figures = workload.run().map_err(|error| error.to_string())?;
            print(arguments.json, &figures, l3_text)
        }
        Workload::Mooncake { library, master, object, batch, rounds } => {
            let workload = MooncakeWorkload {
                library: library.clone(),
                master: master.clone(),
                object_bytes: object.iter().map(|size| size.as_u64() as usize).collect(),
                batch: (*batch).max(1),
                rounds: (*rounds).max(1),
            };
            let figures = workload.run().map_err(|error| error.to_string())?;
            print(arguments.json, &figures, |runs| runs.iter().map(mooncake_text).collect())
        }
        Workload::Nodes { object, batch, total, rounds, exists, nodes } => {
            let workload = NodesWorkload {
                object_bytes: object.iter().map(|size| size.as_u64().max(1) as usize).collect(),
                batch: (*batch).max(1),
                total_bytes: total.as_u64(),
                rounds: (*rounds).max(1),
                exists: (*exists).max(1),
                nodes: (*nodes).max(1),
            };
            let figures = workload.run().map_err(|error| error.to_string())?;
            print(arguments.json, &figures, nodes_text)
        }
        Workload::Lifetimes { lease_ttl_s, run_s, concurrency, object, capacity } => {
            let workload = LifetimesWorkload {
                lease_ttls: lease_ttl_s.iter().map(|ttl| Duration::from_secs(*ttl)).collect(),
                run: Duration::from_secs(*run_s),
                concurrency: *concurrency,
                object_bytes: object.as_u64() as usize,
                capacity_bytes: capacity.as_u64(),
                progress: |doing| eprintln!("{doing}"),
            };
            let figures = workload.run().map_err(|error| error.to_string())?;
            print(arguments.json, &figures, |runs| runs.iter().map(lifetimes_text).collect())
        }
        Workload::Features { tensor, tensors, rounds, lease_ttl_s, run_s, concurrency } => {
            let workload = FeaturesWorkload {
                tensor_bytes: (tensor.as_u64() as usize).max(4096),
                tensors: *tensors,
                rounds: (*rounds).max(1),
                lease_ttls: lease_ttl_s.iter().map(|ttl| Duration::from_secs(*ttl)).collect(),
                run: Duration::from_secs(*run_s),
                concurrency: *concurrency,
                progress: |doing| eprintln!("{doing}"),
            };
            let figures = workload.run().map_err(|error| error.to_string())?;
            print(arguments.json, &figures, features_text)
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
