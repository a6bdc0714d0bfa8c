//! Compares embedded stores as the disk tier for KV pages with plain direct IO.
//!
//! Every measurement is a separate process: its memory and CPU are then the store's alone, a store
//! is opened as after a restart, and it can be killed. The parent drops the page cache in between.

mod stores;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use rustix::{
    fs::{Advice, fadvise},
    process::{Signal, getpid, kill_process},
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    os::unix::{fs::MetadataExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    time::Instant,
};
use stores::{Kind, Pages};

const OBJECT_BYTES: [usize; 2] = [64 << 10, 1 << 20];

/// Compares embedded stores as the disk tier for KV pages with plain direct IO.
#[derive(Parser)]
struct Options {
    /// An existing directory on the disk to measure; the benchmark deletes its files.
    #[arg(long)]
    path: PathBuf,
    /// Payload of each measurement.
    #[arg(long, default_value_t = 2.0)]
    gib: f64,
    /// Stores to measure; all by default.
    #[arg(long, value_enum, value_delimiter = ',')]
    stores: Vec<Kind>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Part that this child process runs.
    #[arg(long, value_enum, hide = true)]
    part: Option<Part>,
    #[arg(long, hide = true, default_value_t = 0)]
    object_bytes: usize,
}

/// A part of a measurement, run by one process.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Puts all objects and closes the store.
    Write,
    /// Puts all objects and is killed when the last one is acknowledged.
    Die,
    /// Opens the store and gets all objects.
    Read,
}

/// Result of one process.
#[derive(Serialize, Deserialize)]
struct Measured {
    open_seconds: f64,
    /// Time of puts and a clean close, or of gets.
    seconds: f64,
    cpu_seconds: f64,
    read_bytes: u64,
    written_bytes: u64,
    resident_growth_bytes: u64,
    objects_found: usize,
}

/// Results of one store and one object size.
#[derive(Serialize)]
struct Row {
    store: String,
    acknowledged: &'static str,
    object_bytes: usize,
    objects: usize,
    /// Space that the files occupy on disk.
    occupied_bytes: u64,
    write: Measured,
    read: Measured,
    killed_objects: usize,
    after_kill: Measured,
}

fn main() -> Result<()> {
    let options = Options::parse();
    if let Some(part) = options.part {
        println!("{}", serde_json::to_string(&measure(&options, part)?)?);
        if part == Part::Die {
            kill_process(getpid(), Signal::KILL)?;
        }
        return Ok(());
    }
    let kinds = match options.stores.as_slice() {
        [] => Kind::value_variants(),
        some => some,
    };
    let dir = options.path.join(format!("disk-stores-{}", std::process::id()));
    let mut rows = Vec::new();
    for object_bytes in OBJECT_BYTES {
        for &kind in kinds {
            eprintln!("{} KiB: {} ...", object_bytes >> 10, name(kind));
            let row = weigh(&dir, options.gib, kind, object_bytes);
            rows.push(row.inspect_err(|_| drop(fs::remove_dir_all(&dir)))?);
        }
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
        return Ok(());
    }
    for rows in rows.chunks(kinds.len()) {
        print_table(rows);
    }
    println!(
        "CPU: seconds per GB. x: bytes per byte of payload. MiB: growth of the resident memory."
    );
    println!("An object is acknowledged when:");
    for &kind in kinds {
        println!("  {:<14}{}", name(kind), kind.acknowledged());
    }
    Ok(())
}

/// Runs all measurements of one store with one object size.
fn weigh(dir: &Path, gib: f64, kind: Kind, object_bytes: usize) -> Result<Row> {
    let killed_gib = gib / 4.0;
    fs::create_dir(dir)?;
    let write = run_part(dir, kind, object_bytes, Part::Write, gib)?;
    let mut occupied_bytes = 0;
    for entry in fs::read_dir(dir)? {
        occupied_bytes += entry?.metadata()?.blocks() * 512;
    }
    let read = run_part(dir, kind, object_bytes, Part::Read, gib)?;
    fs::remove_dir_all(dir)?;

    fs::create_dir(dir)?;
    run_part(dir, kind, object_bytes, Part::Die, killed_gib)?;
    let after_kill = run_part(dir, kind, object_bytes, Part::Read, killed_gib)?;
    fs::remove_dir_all(dir)?;
    Ok(Row {
        store: name(kind),
        acknowledged: kind.acknowledged(),
        object_bytes,
        objects: objects(gib, object_bytes),
        occupied_bytes,
        write,
        read,
        killed_objects: objects(killed_gib, object_bytes),
        after_kill,
    })
}

/// Runs one part in a separate process, without the store's files in the page cache.
fn run_part(dir: &Path, kind: Kind, size: usize, part: Part, gib: f64) -> Result<Measured> {
    for entry in fs::read_dir(dir)? {
        let file = File::open(entry?.path())?;
        file.sync_all()?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    let part_name = part.to_possible_value().context("a part has a name")?;
    let output = Command::new(std::env::current_exe()?)
        // Freed large buffers stay with the process: otherwise returning them to the kernel costs
        // some stores more than their own work.
        .env("MALLOC_MMAP_THRESHOLD_", "1073741824")
        .env("MALLOC_TRIM_THRESHOLD_", "4294967296")
        .arg("--path")
        .arg(dir)
        .args(["--part", part_name.get_name(), "--stores", &name(kind)])
        .args(["--gib", &gib.to_string(), "--object-bytes", &size.to_string()])
        .stderr(Stdio::inherit())
        .output()?;
    let killed = output.status.signal() == Some(Signal::KILL.as_raw());
    ensure!(
        output.status.success() || (killed && part == Part::Die),
        "{} ended with {}",
        name(kind),
        output.status
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Runs one part, in the process that was started for it.
fn measure(options: &Options, part: Part) -> Result<Measured> {
    let kind = *options.stores.first().context("a part works on one store")?;
    let pages = Pages::new(options.object_bytes, objects(options.gib, options.object_bytes));
    let pages = Arc::new(pages);
    let order = pages.shuffled();
    let resident_kib = meter("/proc/self/status", "VmRSS:")?;

    let start = Instant::now();
    let store = kind.open(&options.path, &pages)?;
    let open_seconds = start.elapsed().as_secs_f64();

    let (start, cpu) = (Instant::now(), cpu_seconds());
    let read_bytes = meter("/proc/self/io", "read_bytes:")?;
    let written_bytes = meter("/proc/self/io", "write_bytes:")?;
    let mut objects_found = 0;
    match part {
        Part::Write => {
            store.put(&pages)?;
            store.close()?;
        }
        Part::Die => {
            store.put(&pages)?;
            // The signal must reach the store in its present state.
            std::mem::forget(store);
        }
        Part::Read => objects_found = store.count(&pages, order)?,
    }
    Ok(Measured {
        open_seconds,
        seconds: start.elapsed().as_secs_f64(),
        cpu_seconds: cpu_seconds() - cpu,
        read_bytes: meter("/proc/self/io", "read_bytes:")? - read_bytes,
        written_bytes: meter("/proc/self/io", "write_bytes:")? - written_bytes,
        resident_growth_bytes: (meter("/proc/self/status", "VmHWM:")? - resident_kib) * 1024,
        objects_found,
    })
}

/// Prints rates that count only objects found again, so that losing objects gains nothing.
fn print_table(rows: &[Row]) {
    let object_bytes = rows.first().map_or(0, |row| row.object_bytes);
    println!("Objects of {} KiB", object_bytes >> 10);
    println!(
        "{:<14}{:>11}{:>8}{:>13}{:>8}{:>9}{:>8}{:>26}{:>12}",
        "", "put", "written", "get", "read", "on disk", "reopen", "found after", "MiB"
    );
    println!(
        "{:<14}{:>6}{:>5}{:>8}{:>8}{:>5}{:>8}{:>9}{:>8}{:>12}{:>14}{:>6}{:>6}",
        "store",
        "GB/s",
        "CPU",
        "x",
        "GB/s",
        "CPU",
        "x",
        "x",
        "ms",
        "close",
        "kill (ms)",
        "put",
        "get"
    );
    for row in rows {
        let found = (row.read.objects_found * object_bytes) as f64;
        let killed = row.after_kill.objects_found as f64 / row.killed_objects as f64;
        println!(
            "{:<14}{:>6.2}{:>5.2}{:>8.2}{:>8.2}{:>5.2}{:>8.2}{:>9.2}{:>8.1}{:>12}{:>14}{:>6}{:>6}",
            row.store,
            found / row.write.seconds / 1e9,
            row.write.cpu_seconds / found * 1e9,
            row.write.written_bytes as f64 / found,
            found / row.read.seconds / 1e9,
            row.read.cpu_seconds / found * 1e9,
            row.read.read_bytes as f64 / found,
            row.occupied_bytes as f64 / found,
            row.read.open_seconds * 1e3,
            format!("{:.1}%", row.read.objects_found as f64 / row.objects as f64 * 100.0),
            format!("{:.1}% ({:.0})", killed * 100.0, row.after_kill.open_seconds * 1e3),
            row.write.resident_growth_bytes >> 20,
            row.read.resident_growth_bytes >> 20,
        );
    }
    println!();
}

/// Reads a kernel statistic of this process.
fn meter(file: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(file)?;
    let line = text.lines().find(|line| line.starts_with(name)).context("no such meter")?;
    Ok(line.split_whitespace().nth(1).context("no figure")?.parse()?)
}

/// Returns user and system time of all threads of this process.
fn cpu_seconds() -> f64 {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9
}

fn name(kind: Kind) -> String {
    kind.to_possible_value().expect("no kind is skipped").get_name().to_owned()
}

fn objects(gib: f64, object_bytes: usize) -> usize {
    (gib * (1_u64 << 30) as f64) as usize / object_bytes
}
