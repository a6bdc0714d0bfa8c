//! The traffic of a live scheduler as a trace: times, lengths and page keys, no text.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use serde::Serialize;
use terrace_scheduler::{
    Event, Namespace, PageKey, Request, RequestId, Seen, Sequence, Time, Witness,
};

use super::lines::Lines;

/// Writes a line for each request when it ends. The file can be replayed directly.
#[allow(missing_debug_implementations)]
pub struct TrafficRecorder {
    lines: Lines,
    namespace: Namespace,
    under_way: HashMap<RequestId, Line>,
}

/// A request, in the format of Mooncake's traces.
#[derive(Clone, Serialize)]
struct Line {
    /// In milliseconds.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    /// Truncated key of each page; the last page may be partial.
    hash_ids: Vec<u64>,
    block_size: u32,
}

impl TrafficRecorder {
    /// Records into a new file.
    ///
    /// # Errors
    /// Fails if the file exists or cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        let namespace = Namespace::new("", 1);
        Ok(Self { lines: Lines::create(path)?, namespace, under_way: HashMap::new() })
    }

    fn line(&self, now: Time, request: &Request) -> Line {
        let page_size = self.namespace.page_size;
        let root = self.namespace.digest_with(&request.adapter, &request.salt);
        let prompt = request.prompt.clone();
        let pages = Sequence::with_passages(root, page_size, prompt, &request.passages);
        let mut keys = pages.expect("the scheduler has taken it").keys().to_vec();
        let rest = request.prompt.chunks_exact(page_size as usize).remainder();
        if !rest.is_empty() {
            keys.push(keys.last().unwrap_or(&root).next(root, rest));
        }
        Line {
            timestamp: now.0 as f64 / 1000.0,
            input_length: request.prompt.len() as u32,
            output_length: 0,
            hash_ids: keys.into_iter().map(|PageKey(key)| (key >> 64) as u64).collect(),
            block_size: page_size,
        }
    }
}

impl Witness for TrafficRecorder {
    fn saw(&mut self, now: Time, seen: Seen<'_>) {
        match seen {
            Seen::Began(config) => self.namespace = config.namespace(),
            Seen::WeightsReplaced(fingerprint) => fingerprint.clone_into(&mut self.namespace.model),
            Seen::Submitted(request) => {
                let line = self.line(now, request);
                self.under_way.extend(request.ids().map(|id| (id, line.clone())));
            }
            Seen::Advanced(Event::StepDone { results, .. }) => {
                for result in results {
                    if let Some(line) = self.under_way.get_mut(&result.request) {
                        line.output_length += result.tokens.len() as u32;
                    }
                }
            }
            Seen::Planned(plan) => {
                for ended in &plan.ended {
                    // A request cancelled before its first token has no output length.
                    let line = self.under_way.remove(&ended.request);
                    if let Some(line) = line.filter(|line| line.output_length > 0) {
                        self.lines.add(&line);
                    }
                }
            }
            Seen::Aborted(_)
            | Seen::PrioritySet(..)
            | Seen::Advanced(Event::StepFailed { .. } | Event::Operation { .. })
            | Seen::CacheCleared
            | Seen::DeviceCleared => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use terrace_scheduler::{Config, Plan, StepResult, WatchedScheduler};

    use super::*;
    use crate::trace::{ReadOptions, Trace};

    #[test]
    fn recording_can_be_read_as_a_trace() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("recorded.jsonl");
        let config = Config::builder().page_size(4).device_pages(64).build().unwrap();
        let recorder = TrafficRecorder::create(&file).unwrap();
        let mut scheduler = WatchedScheduler::new(config, vec![Box::new(recorder)]).unwrap();
        let prompts = [(0..10).collect::<Vec<_>>(), (0..9).collect(), (4..13).collect()];
        for (number, prompt) in prompts.into_iter().enumerate() {
            let now = Time(1_000_500 * number as u64);
            scheduler.submit(now, Request::new(number as u64, prompt, 2)).unwrap();
            let mut plan = Plan::default();
            for _ in 0..8 {
                scheduler.plan_into(now, &mut plan);
                let produces = plan.prefills.iter().filter(|prefill| prefill.produces_token);
                let requests =
                    produces.map(|p| p.request).chain(plan.decodes.iter().map(|d| d.request));
                let results: Vec<_> = requests
                    .map(|request| StepResult { request, tokens: &[7], finished: false })
                    .collect();
                if let Some(step) = plan.step {
                    scheduler
                        .advance(now, Event::StepDone { step, results: &results, failed: &[] })
                        .unwrap();
                }
            }
        }
        drop(scheduler);
        let trace = Trace::read(&file, &ReadOptions::default()).unwrap().trace;
        let seen: Vec<_> = trace
            .requests()
            .iter()
            .map(|r| (r.arrival_us, r.input_tokens, r.output_tokens))
            .collect();
        assert_eq!(seen, [(0, 10, 2), (1_000_500, 9, 2), (2_001_000, 9, 2)]);
        let blocks: Vec<_> = trace.requests().iter().map(|request| trace.blocks(request)).collect();
        assert_eq!(blocks[0][..2], blocks[1][..2], "two pages are the same");
        assert_ne!(blocks[0][2], blocks[1][2], "the last ones are not: two tokens and one");
        assert!(blocks[2].iter().all(|block| !blocks[0].contains(block)));
        assert!(TrafficRecorder::create(&file).is_err(), "a recording is not overwritten");
    }
}
