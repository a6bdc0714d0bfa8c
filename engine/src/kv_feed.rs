//! Feeds: the KV events of a running engine, for those who route requests by them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use terrace_scheduler::{KvEvents, WatchedScheduler};
use tokio::sync::mpsc::{self, error::TrySendError};

use crate::happening::{Happening, Happenings};

/// The memory of so many events is kept to be used again.
const SPARES_MAX: usize = 8;

/// What an engine's cache holds, as it changes: first a snapshot, then [`KvEvents`] in their order.
///
/// Whoever reads too slowly misses nothing: when there is no room for more, the events that wait are
/// followed by a new snapshot, which [says so](KvEvents::is_snapshot). The engine never waits for a reader.
#[derive(Debug)]
pub struct KvFeed {
    events: mpsc::Receiver<Arc<KvEvents>>,
    needs_snapshot: Arc<AtomicBool>,
    happenings: Happenings,
}

impl KvFeed {
    /// What has happened next; nothing once the engine has ended.
    pub async fn next(&mut self) -> Option<Arc<KvEvents>> {
        let events = self.events.recv().await;
        self.has_room();
        events
    }

    /// What has happened next, if that is known already.
    pub fn try_next(&mut self) -> Option<Arc<KvEvents>> {
        let events = self.events.try_recv().ok();
        self.has_room();
        events
    }

    /// An engine that has nothing else to do would not notice.
    fn has_room(&self) {
        // Either this sees that a snapshot is due, or the engine sees the room for it.
        fence(Ordering::SeqCst);
        if self.needs_snapshot.load(Ordering::Relaxed) {
            self.happenings.send(Happening::KvFeedHasRoom);
        }
    }
}

/// One who reads.
#[derive(Debug)]
struct Reader {
    events: mpsc::Sender<Arc<KvEvents>>,
    /// Whether it has to start over.
    needs_snapshot: Arc<AtomicBool>,
}

/// Everybody who reads.
#[derive(Debug, Default)]
pub(crate) struct KvFeeds {
    readers: Vec<Reader>,
    /// Events that were told. Those that nobody reads any more are written over.
    spares: Vec<Arc<KvEvents>>,
}

impl KvFeeds {
    /// One more who reads; so many batches of events may wait for it.
    pub(crate) fn open(&mut self, batches_max: usize, happenings: Happenings) -> KvFeed {
        let (sender, events) = mpsc::channel(batches_max.max(1));
        let needs_snapshot = Arc::new(AtomicBool::new(true));
        self.readers.push(Reader { events: sender, needs_snapshot: needs_snapshot.clone() });
        KvFeed { events, needs_snapshot, happenings }
    }

    /// Tells everybody what has happened. Costs nothing if nobody reads.
    pub(crate) fn tell(&mut self, scheduler: &mut WatchedScheduler) {
        if self.readers.is_empty() {
            return;
        }
        let mut told = self.spare();
        let events = Arc::get_mut(&mut told).expect("a spare is nobody's");
        scheduler.drain_kv_events(events);
        if !events.is_empty() {
            self.readers.iter().for_each(|reader| reader.tell(&told));
        }
        self.keep(told);
        let waits = |reader: &Reader| reader.needs_snapshot() && reader.events.capacity() > 0;
        if self.readers.iter().any(waits) {
            let mut all = self.spare();
            let snapshot = Arc::get_mut(&mut all).expect("a spare is nobody's");
            scheduler.kv_snapshot(snapshot);
            let readers = self.readers.iter().filter(|reader| waits(reader));
            readers.for_each(|reader| reader.tell(&all));
        }
        self.readers.retain(|reader| !reader.events.is_closed());
        if self.readers.is_empty() {
            scheduler.stop_kv_events();
            self.spares.clear();
        }
    }

    /// Memory that nobody reads any more.
    fn spare(&mut self) -> Arc<KvEvents> {
        let free = self.spares.iter().position(|spare| Arc::strong_count(spare) == 1);
        free.map(|place| self.spares.swap_remove(place)).unwrap_or_default()
    }

    /// Snapshots are large, and rare: their memory is not kept.
    fn keep(&mut self, told: Arc<KvEvents>) {
        if self.spares.len() < SPARES_MAX && !told.is_snapshot {
            self.spares.push(told);
        }
    }
}

impl Reader {
    fn needs_snapshot(&self) -> bool {
        self.needs_snapshot.load(Ordering::Relaxed)
    }

    fn tell(&self, events: &Arc<KvEvents>) {
        if self.needs_snapshot() && !events.is_snapshot {
            return;
        }
        let is_full = matches!(self.events.try_send(events.clone()), Err(TrySendError::Full(_)));
        self.needs_snapshot.store(is_full, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}
