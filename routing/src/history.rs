//! Recent batches, for subscribers that have missed some.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use crate::zmtp;

/// A published batch.
#[derive(Debug)]
pub(crate) struct PublishedBatch {
    pub(crate) seq: u64,
    /// Topic, number and payload as sent.
    pub(crate) wire: Bytes,
    /// True if it starts with a reset and then lists the complete state.
    pub(crate) is_whole: bool,
}

impl PublishedBatch {
    fn new(topic: &str, seq: u64, payload: &[u8], is_whole: bool) -> Arc<Self> {
        let wire = zmtp::message(&[topic.as_bytes(), &seq.to_be_bytes(), payload]);
        Arc::new(Self { seq, wire: wire.into(), is_whole })
    }
}

/// The latest batches, bounded in number and bytes.
#[derive(Debug)]
pub(crate) struct History {
    topic: String,
    recent: VecDeque<Arc<PublishedBatch>>,
    bytes: usize,
    next: u64,
    batches_max: usize,
    bytes_max: usize,
    /// Snapshot of the complete state after the batch with the same number, made for a late
    /// subscriber.
    base: Option<Arc<PublishedBatch>>,
}

/// Answer to a subscriber that has all batches before some number.
#[derive(Debug)]
pub(crate) enum Since {
    /// The missing batches, or a snapshot that replaces them.
    Available(Vec<Arc<PublishedBatch>>),
    /// Some batches are no longer kept, and there is no snapshot.
    Lost,
}

impl History {
    pub(crate) fn new(topic: String, batches_max: usize, bytes_max: usize) -> Self {
        let recent = VecDeque::new();
        Self { topic, recent, bytes: 0, next: 0, batches_max, bytes_max, base: None }
    }

    /// Numbers a batch and keeps it. The latest batch is kept whatever its size.
    pub(crate) fn publish(&mut self, payload: &[u8], is_whole: bool) -> Arc<PublishedBatch> {
        let batch = PublishedBatch::new(&self.topic, self.next, payload, is_whole);
        self.next += 1;
        self.bytes += batch.wire.len();
        self.recent.push_back(batch.clone());
        while self.recent.len() > 1
            && (self.recent.len() > self.batches_max || self.bytes > self.bytes_max)
        {
            let oldest = self.recent.pop_front().expect("there are several");
            self.bytes -= oldest.wire.len();
        }
        let oldest = self.oldest();
        self.base.take_if(|base| is_whole || base.seq + 1 < oldest);
        batch
    }

    /// Sets a snapshot of the state after the latest batch, which replaces all earlier batches.
    pub(crate) fn set_base(&mut self, payload: &[u8]) {
        if let Some(latest) = self.next.checked_sub(1) {
            self.base = Some(PublishedBatch::new(&self.topic, latest, payload, true));
        }
    }

    /// Returns the batches for a subscriber that expects this number.
    pub(crate) fn since(&self, start: u64) -> Since {
        if start >= self.oldest() {
            return Since::Available(self.from(start).collect());
        }
        let whole = self.recent.iter().rev().find(|batch| batch.is_whole).or(self.base.as_ref());
        match whole {
            Some(whole) => {
                let rest = self.from(whole.seq + 1);
                Since::Available(std::iter::once(whole.clone()).chain(rest).collect())
            }
            None => Since::Lost,
        }
    }

    fn from(&self, start: u64) -> impl Iterator<Item = Arc<PublishedBatch>> {
        self.recent.iter().filter(move |batch| batch.seq >= start).cloned()
    }

    fn oldest(&self) -> u64 {
        self.recent.front().map_or(self.next, |batch| batch.seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(history: &History, start: u64) -> Option<Vec<(u64, bool)>> {
        match history.since(start) {
            Since::Available(batches) => {
                Some(batches.iter().map(|batch| (batch.seq, batch.is_whole)).collect())
            }
            Since::Lost => None,
        }
    }

    #[test]
    fn snapshot_replaces_lost_batches() {
        let mut history = History::new("t".to_owned(), 3, 1 << 20);
        assert_eq!(numbers(&history, 0), Some(vec![]));
        history.publish(b"all", true);
        history.publish(b"one", false);
        assert_eq!(numbers(&history, 0), Some(vec![(0, true), (1, false)]));
        assert_eq!(numbers(&history, 1), Some(vec![(1, false)]));
        assert_eq!(numbers(&history, 2), Some(vec![]), "there is nothing new");
        (2..5).for_each(|_| drop(history.publish(b"more", false)));
        assert_eq!(numbers(&history, 2), Some(vec![(2, false), (3, false), (4, false)]));
        assert_eq!(numbers(&history, 1), None, "1 is not kept any more");
        history.set_base(b"all");
        history.publish(b"more", false);
        assert_eq!(numbers(&history, 1), Some(vec![(4, true), (5, false)]));
        (6..9).for_each(|_| drop(history.publish(b"more", false)));
        assert_eq!(numbers(&history, 1), None, "between 4 and 6 something is missing");
        history.publish(b"all", true);
        history.publish(b"more", false);
        assert_eq!(numbers(&history, 1), Some(vec![(9, true), (10, false)]));
    }

    #[test]
    fn history_is_bounded_in_bytes() {
        let mut history = History::new(String::new(), 100, 100);
        (0..50).for_each(|_| drop(history.publish(&[0; 20], false)));
        assert!(history.bytes <= 100 && history.recent.len() == 2, "{history:?}");
        history.publish(&[0; 500], false);
        assert_eq!(history.recent.len(), 1, "the latest is kept");
    }
}
