//! `terrace-bench`: measures the cache, the scheduler and the stores on this machine. Benchmarks of a server are
//! part of the `terrace` program (`terrace bench`).

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
    LifetimesWorkload, MooncakeWorkload, NodesWorkload, PlansWorkload, RecoveryWorkload,
    ScalingWorkload, StepWorkload, trace,
};
use terrace_cache::EvictionKind;
use terrace_l3_disk::IoEngine;
use terrace_replay::Size;
use terrace_replay::trace::{ReadOptions, Trace};

use crate::text::{
    cache_text, features_text, gap_text, keys_text, l3_text, lifetimes_text, mooncake_text,
    nodes_text, plans_text, recovery_text, steps_text,
};

/// Measure the cache, the scheduler and the stores of Terrace on this machine
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
    /// Prefix cache: look up, evict and insert the prompts of a trace, one request at a time
    Cache {
        /// A trace file, in a format of `terrace replay`
        #[arg(long, conflicts_with = "synthetic", required_unless_present = "synthetic")]
        trace: Option<PathBuf>,
        /// Use generated conversations instead of a trace
        #[arg(long)]
        synthetic: bool,
        /// Tokens per page
        #[arg(long, default_value_t = 16, value_parser = terrace_replay::page_size)]
        page_size: u32,
        /// Pages on the device (default: enough for the whole trace, so that nothing is evicted)
        #[arg(long)]
        device_pages: Option<u32>,
        /// Eviction policy: lru, lfu, slru, fifo, priority or s3-fifo
        #[arg(long, default_value = "lru", value_parser = policy)]
        policy: EvictionKind,
    },
    /// Page keys: hash a prompt with several page sizes
    Keys {
        /// Tokens in the prompt
        #[arg(long, default_value_t = 12_288, value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
        tokens: u32,
        /// Measurements per page size; the fastest is reported
        #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
    },
    /// Scheduler: time to plan decode steps, process their results, and admit requests
    Steps {
        /// Running requests
        #[arg(long, default_value_t = 256)]
        running: u32,
        /// Tokens in each prompt
        #[arg(long, default_value_t = 1024)]
        context: u32,
        /// Tokens per page
        #[arg(long, default_value_t = 16, value_parser = terrace_replay::page_size)]
        page_size: u32,
        /// Pages on the device
        #[arg(long, default_value_t = 16384)]
        device_pages: u32,
        /// Length of the common prefix, in percent of each prompt
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100))]
        shared: u32,
        /// Measured decode steps
        #[arg(long, default_value_t = 64)]
        decode_steps: u32,
        /// Steps in flight (async scheduling). With 2, decoding is measured with one and with two, alternately
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
        in_flight: u32,
    },
    /// Engine: idle time of the device between two steps, with a simulated model
    Gap {
        /// Running requests
        #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
        running: u32,
        /// Steps in flight (async scheduling). With 2, the next step is planned while one runs
        #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=2))]
        in_flight: u32,
        /// Output tokens per request, which is the number of decode steps
        #[arg(long, default_value_t = 300)]
        steps: u32,
        /// Simulated duration of a step
        #[arg(long, default_value = "10ms", value_parser = humantime::parse_duration)]
        step: Duration,
        /// Simulated time to launch a step
        #[arg(long, default_value = "50us", value_parser = humantime::parse_duration)]
        launch: Duration,
    },
    /// Scheduler: CPU time of each plan while a trace is served with full pools and a very long prompt
    Plans {
        /// A trace file, in a format of `terrace replay` (default: generated conversations)
        #[arg(long)]
        trace: Option<PathBuf>,
        /// Tokens in the long prompt, which comes after one half and three quarters of the trace; 0 for none
        #[arg(long, default_value_t = 1_000_000)]
        long_prompt: u32,
        /// Tokens per page
        #[arg(long, default_value_t = 16, value_parser = terrace_replay::page_size)]
        page_size: u32,
        /// Pages on the device
        #[arg(long, default_value_t = 65_536)]
        device_pages: u32,
        /// Pages on the host
        #[arg(long, default_value_t = 262_144)]
        host_pages: u32,
        /// Runs of the whole trace; the smallest time of each plan is reported
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
    },
    /// How the cost of operations grows with cached pages, running requests and context length
    Scaling {
        /// Use smaller sizes and few repetitions; counts stay exact, times become inaccurate
        #[arg(long)]
        quick: bool,
        /// Also write a plot to this SVG file
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
    /// L3 store on disk or in memory, compared with plain direct IO or memory copies
    L3 {
        /// The store to measure
        #[arg(long, value_enum, default_value_t = Backend::Disk)]
        backend: Backend,
        /// A folder on the disk to measure; the benchmark deletes its files at the end
        #[arg(long, default_value = ".")]
        path: PathBuf,
        /// Size of an object
        #[arg(long, default_value = "64KiB")]
        object: Size,
        /// Bytes to write and read per round
        #[arg(long, default_value = "1GiB")]
        total: Size,
        /// Objects in flight (queue depth), on disk
        #[arg(long, default_value_t = 64)]
        depth: usize,
        /// IO engine for the disk
        #[arg(long, value_enum, default_value_t = Io::Auto)]
        io: Io,
    },
    /// Memory and start time of a disk store with very many objects
    Recovery {
        /// A folder on the disk to measure; the benchmark deletes its files at the end
        #[arg(long, default_value = ".")]
        path: PathBuf,
        /// Numbers of objects, separated by commas; one run for each. 100 million need 7 GB of disk and 12 GB of memory
        #[arg(long, value_delimiter = ',', default_value = "1000000,10000000", value_parser = clap::value_parser!(u32).range(1..))]
        objects: Vec<u32>,
        /// Capacity of the store. Objects take no disk space here, only their index does
        #[arg(long, default_value = "10TiB")]
        capacity: Size,
        /// Size of the largest object
        #[arg(long, default_value = "64KiB")]
        object: Size,
    },
    /// L3 store in a Mooncake cluster, compared with direct calls of Mooncake's library
    Mooncake {
        /// Path of libmooncake_store.so
        #[arg(long, value_name = "PATH", env = "TERRACE_MOONCAKE_LIBRARY")]
        library: PathBuf,
        /// Address of the Mooncake master, as HOST:PORT
        #[arg(long, default_value = "127.0.0.1:50051")]
        master: String,
        /// Object sizes, separated by commas; one run for each
        #[arg(long, value_delimiter = ',', default_value = "64KiB,1MiB")]
        object: Vec<Size>,
        /// Objects per batch
        #[arg(long, default_value_t = 32)]
        batch: u32,
        /// Batches of each operation
        #[arg(long, default_value_t = 100)]
        rounds: u32,
    },
    /// L3 store on nodes over the loopback interface, compared with a plain TCP stream
    Nodes {
        /// Object sizes, separated by commas; one run for each
        #[arg(long, value_delimiter = ',', default_value = "64KiB,1MiB")]
        object: Vec<Size>,
        /// Objects per batch
        #[arg(long, default_value_t = 32)]
        batch: u32,
        /// Bytes to transfer in each direction per round
        #[arg(long, default_value = "512MiB")]
        total: Size,
        /// Number of rounds
        #[arg(long, default_value_t = 9)]
        rounds: u32,
        /// Objects per `exists` call
        #[arg(long, default_value_t = 1024)]
        exists: u32,
        /// Number of nodes for the `exists` calls
        #[arg(long, default_value_t = 3)]
        nodes: u32,
    },
    /// Memory use of a store while objects are stored, leased, read and released
    Lifetimes {
        /// Lease durations in seconds, separated by commas; one run for each
        #[arg(long, value_delimiter = ',', default_value = "5,300")]
        lease_ttl_s: Vec<u64>,
        /// Duration of each run in seconds
        #[arg(long, default_value_t = 10)]
        run_s: u64,
        /// Concurrent objects
        #[arg(long, default_value_t = 16)]
        concurrency: u32,
        /// Size of an object
        #[arg(long, default_value = "1MiB")]
        object: Size,
        /// Capacity of the store
        #[arg(long, default_value = "1GiB")]
        capacity: Size,
    },
    /// Feature store: speed compared with memory copies, and memory use with different lease durations
    Features {
        /// Size of a tensor
        #[arg(long, default_value = "64MiB")]
        tensor: Size,
        /// Tensors per sample
        #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=128))]
        tensors: u32,
        /// Rounds of the speed measurement; the best is reported
        #[arg(long, default_value_t = 8)]
        rounds: u32,
        /// Lease durations in seconds, separated by commas; one run for each
        #[arg(long, value_delimiter = ',', default_value = "5,300")]
        lease_ttl_s: Vec<u64>,
        /// Duration of each lease run in seconds
        #[arg(long, default_value_t = 10)]
        run_s: u64,
        /// Concurrent samples in the lease runs
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

/// Parses an eviction policy by its name in configuration files.
fn policy(name: &str) -> Result<EvictionKind, serde::de::value::Error> {
    EvictionKind::deserialize(name.into_deserializer())
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(output) => {
            // The reader may have closed the pipe.
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
                return Err("the prompts do not fit on the device: increase --device-pages or \
                            --shared, or decrease --running, --context or --decode-steps"
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
        Workload::Plans { trace, long_prompt, page_size, device_pages, host_pages, rounds } => {
            let workload = PlansWorkload {
                trace: match trace {
                    Some(path) => Trace::read(path, &ReadOptions::default())?.trace,
                    None => trace::conversations(),
                },
                long_prompt_tokens: *long_prompt,
                page_size: *page_size,
                device_pages: *device_pages,
                host_pages: *host_pages,
                rounds: *rounds,
            };
            print(arguments.json, &workload.run()?, plans_text)
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
        Workload::L3 { backend, path, object, total, depth, io } => {
            if object.as_u64() == 0 || !object.as_u64().is_multiple_of(4096) {
                return Err("--object: direct IO needs a multiple of 4 KiB".into());
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
                progress: |doing| eprintln!("{doing}"),
            };
            let figures = workload.run().map_err(|error| error.to_string())?;
            print(arguments.json, &figures, l3_text)
        }
        Workload::Recovery { path, objects, capacity, object } => {
            let workload = RecoveryWorkload {
                path: path.clone(),
                objects: objects.clone(),
                capacity_bytes: capacity.as_u64(),
                object_bytes: object.as_u64() as usize,
                progress: |doing| eprintln!("{doing}"),
            };
            let figures = workload.run().map_err(|error| error.to_string())?;
            print(arguments.json, &figures, |runs| runs.iter().map(recovery_text).collect())
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
