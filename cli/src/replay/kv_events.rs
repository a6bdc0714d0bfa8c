//! Cache contents of workers by their KV events, from a recording or live.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufReader, BufWriter, Write as _};
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use terrace_replay::human::{percent, seconds, whole};
use terrace_routing::{
    FollowStats, Heard, Recorded, Recording, Source, Study, StudyReport, follow,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::signals::Signals;

/// Blocks that are remembered of each worker.
const BLOCKS_MAX: usize = 16_000_000;
/// Batches that may wait to be looked at.
const WAITING_MAX: usize = 1024;

/// Arguments about KV events.
#[derive(clap::Args)]
#[command(next_help_heading = "KV events")]
pub(crate) struct KvEvents {
    /// Analyse KV events instead of replaying: a recording, or the endpoint of a Terrace, vLLM or SGLang server,
    /// tcp://EVENTS or tcp://EVENTS+tcp://REPLAY; may be repeated
    #[arg(long = "kv-events", value_name = "SOURCE", conflicts_with_all = ["trace", "synthetic"])]
    sources: Vec<String>,
    /// How long to listen [default: until Ctrl-C]
    #[arg(long = "kv-time", value_name = "TIME", requires = "sources", value_parser = humantime::parse_duration)]
    time: Option<Duration>,
    /// Record the events to a new file, including the tokens of prompts
    #[arg(long = "kv-record", value_name = "FILE", requires = "sources")]
    record: Option<PathBuf>,
}

impl KvEvents {
    pub(crate) fn are_asked_for(&self) -> bool {
        !self.sources.is_empty()
    }

    /// Contents of the caches.
    pub(crate) fn study(&self) -> Result<StudyReport, Box<dyn Error>> {
        let mut study = Study::new(BLOCKS_MAX);
        let (live, files): (Vec<_>, Vec<_>) =
            self.sources.iter().partition(|source| source.starts_with("tcp://"));
        for file in files {
            let named = |error: &dyn std::fmt::Display| format!("{file}: {error}");
            let opened = File::open(file).map_err(|error| named(&error))?;
            for line in Recording::new(BufReader::new(opened)) {
                let (line, heard) = line.map_err(|error| named(&error))?;
                study.hear(&line.worker, &heard);
            }
        }
        if !live.is_empty() {
            let sources: Result<Vec<_>, _> = live.into_iter().map(|text| source(text)).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(self.listen(sources?, &mut study))?;
        }
        Ok(study.report())
    }

    async fn listen(&self, sources: Vec<Source>, study: &mut Study) -> Result<(), Box<dyn Error>> {
        let mut record = match &self.record {
            Some(file) => {
                let created = File::create_new(file);
                let unusable = |error| format!("{}: {error}", file.display());
                Some(BufWriter::new(created.map_err(unusable)?))
            }
            None => None,
        };
        let (tell, mut heard) = mpsc::channel::<(String, Heard)>(WAITING_MAX);
        let mut followers = JoinSet::new();
        let mut silent: BTreeSet<String> =
            sources.iter().map(|source| source.events.to_string()).collect();
        for source in sources {
            let tell = tell.clone();
            followers.spawn(async move {
                let name = source.events.to_string();
                let stats = FollowStats::default();
                // Events that do not fit are dropped, and the receiver is told to forget the worker.
                let mut is_whole = true;
                follow(&source, &stats, |heard| {
                    if !is_whole {
                        is_whole = tell.try_send((name.clone(), Heard::Forget)).is_ok();
                    }
                    is_whole = is_whole && tell.try_send((name.clone(), heard)).is_ok();
                })
                .await;
            });
        }
        drop(tell);
        let mut signals = Signals::listen();
        let time = self.time.unwrap_or(Duration::from_secs(365 * 24 * 60 * 60));
        let mut end = std::pin::pin!(tokio::time::sleep(time));
        loop {
            tokio::select! {
                Some((worker, heard)) = heard.recv() => {
                    silent.remove(&worker);
                    study.hear(&worker, &heard);
                    if let Some(record) = &mut record {
                        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
                        Recorded::new(now, &worker, &heard).write(&mut *record)?;
                    }
                }
                () = &mut end => break,
                () = signals.told_to_stop() => break,
            }
        }
        record.as_mut().map_or(Ok(()), |record| record.flush())?;
        let names = Vec::from_iter(silent).join(", ");
        if !names.is_empty() {
            let problem = format!(
                "no KV events came from {names}: check the address, that the server publishes KV events, and that it \
                 had requests in this time"
            );
            if study.report().workers.is_empty() {
                return Err(problem.into());
            }
            eprintln!("warning: {problem}");
        }
        Ok(())
    }
}

fn source(text: &str) -> Result<Source, String> {
    let endpoint = |text: &str| text.parse().map_err(|error| format!("--kv-events: {error}"));
    let (events, replay) = match text.split_once('+') {
        Some((events, replay)) => (events, Some(endpoint(replay)?)),
        None => (text, None),
    };
    Ok(Source { events: endpoint(events)?, replay, topic: String::new() })
}

pub(crate) fn draw(report: &StudyReport) -> String {
    let workers = report.workers.len() as u64;
    let mut text = format!("{} workers in {}\n\n", whole(workers), seconds(report.seconds));
    let _ = writeln!(
        text,
        "  {:<28}{:>9}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}{:>10}",
        "blocks", "batches", "stored", "removed", "computed", "peak", "device", "host", "disk"
    );
    for worker in &report.workers {
        let columns = [
            worker.stored_blocks,
            worker.removed_blocks,
            worker.computed_blocks,
            worker.blocks_peak,
            worker.device_blocks,
            worker.host_blocks,
            worker.disk_blocks,
        ];
        let columns: String =
            columns.iter().map(|&blocks| format!("{:>10}", whole(blocks))).collect();
        let _ = writeln!(text, "  {:<28}{:>9}{columns}", worker.name, whole(worker.batches));
        let lost = worker.gaps + worker.forgotten + worker.unreadable;
        if lost + worker.orphan_blocks > 0 {
            let _ = writeln!(
                text,
                "    {} gaps in the batches, {} unreadable batches, {} resets; {} blocks with an unknown parent",
                whole(worker.gaps),
                whole(worker.unreadable),
                whole(worker.forgotten),
                whole(worker.orphan_blocks)
            );
        }
    }
    let _ = writeln!(
        text,
        "\n  held         {} distinct blocks; {} counting copies on several workers",
        whole(report.distinct_blocks),
        whole(report.held_blocks)
    );
    let share = report.held_elsewhere_tokens as f64 / report.computed_tokens.max(1) as f64;
    let _ = writeln!(
        text,
        "  computed     {} tokens; another worker held {} of them ({}): prefix-aware routing would have reused \
         them",
        whole(report.computed_tokens),
        whole(report.held_elsewhere_tokens),
        percent(share)
    );
    text
}
