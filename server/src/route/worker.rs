//! A worker as the router sees it: where it is, whether it is well, and what its cache holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;
use terrace_routing::{FollowStats, Heard, PromptBlocks, Source, WorkerIndex, decode, follow};

use crate::config::WorkerPlace;

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) place: WorkerPlace,
    pub(crate) index: Mutex<WorkerIndex>,
    pub(crate) following: FollowStats,
    is_up: AtomicBool,
    pub(crate) counts: Counts,
}

/// What was sent to a worker.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) requests: AtomicU64,
    /// Times that it gave no answer.
    pub(crate) failures: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    /// Those of them that it held already, as far as was known.
    pub(crate) cached_tokens: AtomicU64,
    /// Batches of its events that nobody can read.
    pub(crate) unreadable: AtomicU64,
}

impl Worker {
    pub(crate) fn new(place: WorkerPlace, blocks_max: usize) -> Self {
        Self {
            place,
            index: Mutex::new(WorkerIndex::new(blocks_max)),
            following: FollowStats::default(),
            is_up: AtomicBool::new(false),
            counts: Counts::default(),
        }
    }

    /// Listens to what its cache holds, for as long as this is polled.
    pub(super) async fn follow(self: Arc<Self>, topic: String) {
        let Some(events) = self.place.events.clone() else { return };
        let source = Source { events, replay: self.place.replay.clone(), topic };
        follow(&source, &self.following, |heard| self.hear(&heard)).await;
    }

    fn hear(&self, heard: &Heard) {
        match heard {
            Heard::Batch { payload, .. } => match decode(payload) {
                Ok(batch) => self.index.lock().apply(&batch, |_| {}),
                Err(error) => {
                    // What it told is lost, so what is known may be wrong.
                    self.index.lock().forget();
                    if self.counts.unreadable.fetch_add(1, Relaxed) == 0 {
                        tracing::warn!(
                            "worker {} sends unreadable KV events: {error}",
                            self.place.url
                        );
                    }
                }
            },
            Heard::Forget => self.index.lock().forget(),
        }
    }

    pub(super) fn cached_tokens(&self, prompt: &mut PromptBlocks<'_>) -> u32 {
        self.index.lock().cached_tokens(prompt)
    }

    pub(crate) fn is_up(&self) -> bool {
        self.is_up.load(Relaxed)
    }

    /// It has answered, or not.
    pub(super) fn found(&self, is_up: bool) {
        if self.is_up.swap(is_up, Relaxed) != is_up {
            match is_up {
                true => tracing::info!("{} answers", self.place.url),
                false => {
                    tracing::warn!("worker {} does not answer and gets no requests", self.place.url)
                }
            }
        }
    }
}
