//! `terrace bench`: measures the cache, the scheduler, the store and the server on this machine.

mod clients;
mod plot;
mod scaling;
mod ttft;

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Subcommand, ValueEnum};
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};
use terrace_bench::{
    CacheFigures, CacheWorkload, FeaturesFigures, FeaturesWorkload, L3Backend, L3Figures,
    L3Workload, LifetimesFigures, LifetimesWorkload, MooncakeFigures, MooncakeOverhead,
    MooncakeWorkload, NodesFigures, NodesWorkload, ScalingWorkload, StepFigures, StepWorkload,
    Trace,
};
use terrace_cache::EvictionKind;
use terrace_l3::disk::IoEngine;

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
        object: ByteSize,
        /// How much to store and read in each round
        #[arg(long, default_value = "1GiB")]
        total: ByteSize,
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
        object: Vec<ByteSize>,
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
        object: Vec<ByteSize>,
        /// Objects in a batch
        #[arg(long, default_value_t = 32)]
        batch: u32,
        /// How much to move, each way, in each round
        #[arg(long, default_value = "512MiB")]
        total: ByteSize,
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
        object: ByteSize,
        /// The store's size
        #[arg(long, default_value = "1GiB")]
        capacity: ByteSize,
    },
    /// The feature store: large tensors against copying memory, and residency whatever the leases
    Features {
        /// The size of a tensor
        #[arg(long, default_value = "64MiB")]
        tensor: ByteSize,
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
    /// The first token of a long prompt, by where its KV comes from, with the built-in model
    Ttft {
        /// The prompt's length
        #[arg(long, default_value_t = 4000)]
        tokens: usize,
        /// How often; the median counts
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
    },
    /// Many streaming clients on a server that runs (`terrace serve`)
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
        Workload::Scaling { quick, svg } => {
            let workload = ScalingWorkload {
                quick: *quick,
                progress: |doing| eprintln!("{doing}"),
                allocated_bytes: crate::allocations::bytes,
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
         a request: submitted in {:.2} us, prefilled in {:.2} us, ended in {:.2} us\n\
         \x20          with all pages cached: admitted in {:.2} us, prefilled and ended in {:.2} us\n\
         stats: {:.3} us\n",
        figures.plan_us,
        figures.advance_us,
        figures.allocations_per_step,
        figures.submit_us_per_request,
        figures.admit_us_per_request,
        figures.finish_us_per_request,
        figures.full_hit_admission_us_per_request,
        figures.rehit_us_per_request,
        figures.stats_us
    )
}

fn l3_text(figures: &L3Figures) -> String {
    let L3Figures { put_gb_s, get_gb_s, raw_write_gb_s, raw_read_gb_s, .. } = figures;
    let opening = match figures.open_s {
        Some(seconds) => format!("opening {} objects: {seconds:.2} s\n", figures.open_objects),
        None => String::new(),
    };
    format!(
        "put {put_gb_s:.2} GB/s, {:.0} % of plain {raw_write_gb_s:.2}\n\
         get {get_gb_s:.2} GB/s, {:.0} % of plain {raw_read_gb_s:.2}\n\
         exists of 1,024 objects: {:.1} us\n\
         index: {:.1} bytes an object\n{opening}",
        100.0 * figures.put_share,
        100.0 * figures.get_share,
        figures.exists_us,
        figures.bytes_per_object,
    )
}

fn mooncake_text(run: &MooncakeFigures) -> String {
    let size = ByteSize(run.object_bytes as u64).display().iec();
    let line = |call: &str, us: f64, plain_us: f64, overhead: &MooncakeOverhead| {
        format!(
            "{} x {size}: {call} {us:.0} us, {:+.1} % on the library's {plain_us:.0}; checksums alone \
             are {:+.1} %, the adapter without them {:+.1} %\n",
            run.batch,
            overhead.percent,
            overhead.checksums_percent,
            overhead.besides_checksums_percent
        )
    };
    line("put", run.put_us, run.plain_put_us, &run.put_overhead)
        + &line("get", run.get_us, run.plain_get_us, &run.get_overhead)
}

fn nodes_text(figures: &NodesFigures) -> String {
    let mut text = String::new();
    for run in &figures.transfers {
        let size = ByteSize(run.object_bytes as u64).display().iec();
        for (way, of) in [("put", &run.put), ("get", &run.get)] {
            text += &format!(
                "{} x {size}: {way} {:.2} GB/s, {:.0} % of the {:.2} GB/s of plain bytes\n",
                run.batch,
                of.bytes_per_s / 1e9,
                100.0 * of.ratio,
                of.plain_bytes_per_s / 1e9
            );
        }
    }
    text + &format!(
        "exists of {} objects over {} nodes: {}\n",
        figures.exists, figures.nodes, figures.exists_us
    )
}

fn features_text(figures: &FeaturesFigures) -> String {
    let size = |bytes: u64| ByteSize(bytes).display().iec();
    let mut text = format!(
        "put {:.2} GB/s, {:.0} % of copying; get {:.2} GB/s, {:.0} % of copying; copying {:.2} GB/s\n",
        figures.put_gb_s,
        100.0 * figures.put_share,
        figures.get_gb_s,
        100.0 * figures.get_share,
        figures.copy_gb_s
    );
    for run in &figures.residency {
        text += &format!(
            "leases of {} s: {} samples; held {} on average, {} at most, {} at the end; {} evicted\n",
            run.lease_ttl_s,
            run.samples,
            size(run.mean_bytes),
            size(run.max_bytes),
            size(run.end_bytes),
            run.evicted
        );
    }
    text + &format!("residency differs by {:.1} %\n", 100.0 * figures.residency_spread)
}

fn lifetimes_text(run: &LifetimesFigures) -> String {
    let size = |bytes: u64| ByteSize(bytes).display().iec();
    format!(
        "leases of {} s: {} passed on in {} objects; held {} on average, {} at most, {} at the end; \
         {} evicted\n",
        run.lease_ttl_s,
        size(run.bytes),
        run.objects,
        size(run.resident_mean_bytes),
        size(run.resident_max_bytes),
        size(run.resident_end_bytes),
        run.evicted
    )
}
