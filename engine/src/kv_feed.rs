//! Feeds of the KV events of a running engine, for routers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use terrace_scheduler::{KvEvents, WatchedScheduler};
use tokio::sync::mpsc::{self, error::TrySendError};

use crate::message::{DriverMessage, DriverSender};

/// Largest number of event buffers kept for reuse.
const SPARES_MAX: usize = 8;

/// A subscription to the changes of an engine's cache content: first a snapshot, then [`KvEvents`]
/// in order.
///
/// A slow reader does not miss changes: when its queue is full, a new snapshot follows the queued
/// events and is [marked as one](KvEvents::is_snapshot). The engine never waits for a reader.
#[derive(Debug)]
pub struct KvFeed {
    events: mpsc::Receiver<Arc<KvEvents>>,
    needs_snapshot: Arc<AtomicBool>,
    messages: DriverSender,
}

impl KvFeed {
    /// Returns the next events; none once the engine has ended.
    pub async fn next(&mut self) -> Option<Arc<KvEvents>> {
        let events = self.events.recv().await;
        self.has_room();
        events
    }

    /// Returns the next events if they are queued.
    pub fn try_next(&mut self) -> Option<Arc<KvEvents>> {
        let events = self.events.try_recv().ok();
        self.has_room();
        events
    }

    /// Wakes the driver if this reader needs a snapshot: an idle engine would not notice the free
    /// queue.
    fn has_room(&self) {
        // Either this thread sees that a snapshot is due, or the driver sees the free queue.
        fence(Ordering::SeqCst);
        if self.needs_snapshot.load(Ordering::Relaxed) {
            self.messages.send(DriverMessage::KvFeedHasRoom);
        }
    }
}

/// A subscriber.
#[derive(Debug)]
struct Reader {
    events: mpsc::Sender<Arc<KvEvents>>,
    /// True if the next events must be a snapshot.
    needs_snapshot: Arc<AtomicBool>,
}

/// All subscribers of an engine.
#[derive(Debug, Default)]
pub(crate) struct KvFeeds {
    readers: Vec<Reader>,
    /// Event buffers that were sent, reused once no reader holds them.
    spares: Vec<Arc<KvEvents>>,
}

impl KvFeeds {
    /// Adds a subscriber with a queue of `batches_max` batches of events.
    pub(crate) fn open(&mut self, batches_max: usize, messages: DriverSender) -> KvFeed {
        let (sender, events) = mpsc::channel(batches_max.max(1));
        let needs_snapshot = Arc::new(AtomicBool::new(true));
        self.readers.push(Reader { events: sender, needs_snapshot: needs_snapshot.clone() });
        KvFeed { events, needs_snapshot, messages }
    }

    /// Sends the events since the last call to all subscribers. Does no work without subscribers.
    pub(crate) fn publish(&mut self, scheduler: &mut WatchedScheduler) {
        if self.readers.is_empty() {
            return;
        }
        let mut sent = self.spare();
        let events = Arc::get_mut(&mut sent).expect("a spare buffer has one owner");
        scheduler.drain_kv_events(events);
        if !events.is_empty() {
            self.readers.iter().for_each(|reader| reader.send(&sent));
        }
        self.keep(sent);
        let waits = |reader: &Reader| reader.needs_snapshot() && reader.events.capacity() > 0;
        if self.readers.iter().any(waits) {
            let mut all = self.spare();
            let snapshot = Arc::get_mut(&mut all).expect("a spare buffer has one owner");
            scheduler.kv_snapshot(snapshot);
            let readers = self.readers.iter().filter(|reader| waits(reader));
            readers.for_each(|reader| reader.send(&all));
        }
        self.readers.retain(|reader| !reader.events.is_closed());
        if self.readers.is_empty() {
            scheduler.stop_kv_events();
            self.spares.clear();
        }
    }

    /// Returns an event buffer that no reader holds.
    fn spare(&mut self) -> Arc<KvEvents> {
        let free = self.spares.iter().position(|spare| Arc::strong_count(spare) == 1);
        free.map(|place| self.spares.swap_remove(place)).unwrap_or_default()
    }

    /// Keeps a buffer for reuse. Snapshots are large and rare, so their memory is not kept.
    fn keep(&mut self, sent: Arc<KvEvents>) {
        if self.spares.len() < SPARES_MAX && !sent.is_snapshot {
            self.spares.push(sent);
        }
    }
}

impl Reader {
    fn needs_snapshot(&self) -> bool {
        self.needs_snapshot.load(Ordering::Relaxed)
    }

    fn send(&self, events: &Arc<KvEvents>) {
        if self.needs_snapshot() && !events.is_snapshot {
            return;
        }
        let is_full = matches!(self.events.try_send(events.clone()), Err(TrySendError::Full(_)));
        self.needs_snapshot.store(is_full, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}
