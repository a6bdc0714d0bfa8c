//! Recent batches, for subscribers that have missed some.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;

use crate::zmtp;

/// A published batch.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) seq: u64,
    /// Topic, number and payload as sent.
    pub(crate) wire: Bytes,
    /// True if it starts with a reset and then lists the complete state.
    pub(crate) is_whole: bool,
}

impl Told {
    fn new(topic: &str, seq: u64, payload: &[u8], is_whole: bool) -> Arc<Self> {
        let wire = zmtp::message(&[topic.as_bytes(), &seq.to_be_bytes(), payload]);
        Arc::new(Self { seq, wire: wire.into(), is_whole })
    }
}

/// The latest batches, bounded in number and bytes.
#[derive(Debug)]
pub(crate) struct History {
    topic: String,
    told: VecDeque<Arc<Told>>,
    bytes: usize,
    next: u64,
    batches_max: usize,
    bytes_max: usize,
    /// Snapshot of the complete state after the batch with the same number, made for a late
    /// subscriber.
    base: Option<Arc<Told>>,
}

/// Answer to a subscriber that has all batches before some number.
#[derive(Debug)]
pub(crate) enum Since {
    /// The missing batches, or a snapshot that replaces them.
    Told(Vec<Arc<Told>>),
    /// Some batches are no longer kept, and there is no snapshot.
    Lost,
}

impl History {
    pub(crate) fn new(topic: String, batches_max: usize, bytes_max: usize) -> Self {
        let told = VecDeque::new();
        Self { topic, told, bytes: 0, next: 0, batches_max, bytes_max, base: None }
    }

    /// Numbers a batch and keeps it. The latest batch is kept whatever its size.
    pub(crate) fn tell(&mut self, payload: &[u8], is_whole: bool) -> Arc<Told> {
        let told = Told::new(&self.topic, self.next, payload, is_whole);
        self.next += 1;
        self.bytes += told.wire.len();
        self.told.push_back(told.clone());
        while self.told.len() > 1
            && (self.told.len() > self.batches_max || self.bytes > self.bytes_max)
        {
            let oldest = self.told.pop_front().expect("there are several");
            self.bytes -= oldest.wire.len();
        }
        let oldest = self.oldest();
        self.base.take_if(|base| is_whole || base.seq + 1 < oldest);
        told
    }

    /// Sets a snapshot of the state after the latest batch, which replaces all earlier batches.
    pub(crate) fn set_base(&mut self, payload: &[u8]) {
        if let Some(latest) = self.next.checked_sub(1) {
            self.base = Some(Told::new(&self.topic, latest, payload, true));
        }
    }

    /// Returns the batches for a subscriber that expects this number.
    pub(crate) fn since(&self, start: u64) -> Since {
        if start >= self.oldest() {
            return Since::Told(self.from(start).collect());
        }
        let whole = self.told.iter().rev().find(|told| told.is_whole).or(self.base.as_ref());
        match whole {
            Some(whole) => {
                let rest = self.from(whole.seq + 1);
                Since::Told(std::iter::once(whole.clone()).chain(rest).collect())
            }
            None => Since::Lost,
        }
    }

    fn from(&self, start: u64) -> impl Iterator<Item = Arc<Told>> {
        self.told.iter().filter(move |told| told.seq >= start).cloned()
    }

    fn oldest(&self) -> u64 {
        self.told.front().map_or(self.next, |told| told.seq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(history: &History, start: u64) -> Option<Vec<(u64, bool)>> {
        match history.since(start) {
            Since::Told(told) => Some(told.iter().map(|told| (told.seq, told.is_whole)).collect()),
            Since::Lost => None,
        }
    }

    #[test]
    fn what_is_gone_is_made_good_by_what_is_whole() {
        let mut history = History::new("t".to_owned(), 3, 1 << 20);
        assert_eq!(numbers(&history, 0), Some(vec![]));
        history.tell(b"all", true);
        history.tell(b"one", false);
        assert_eq!(numbers(&history, 0), Some(vec![(0, true), (1, false)]));
        assert_eq!(numbers(&history, 1), Some(vec![(1, false)]));
        assert_eq!(numbers(&history, 2), Some(vec![]), "there is nothing new");
        (2..5).for_each(|_| drop(history.tell(b"more", false)));
        assert_eq!(numbers(&history, 2), Some(vec![(2, false), (3, false), (4, false)]));
        assert_eq!(numbers(&history, 1), None, "1 is not kept any more");
        history.set_base(b"all");
        history.tell(b"more", false);
        assert_eq!(numbers(&history, 1), Some(vec![(4, true), (5, false)]));
        (6..9).for_each(|_| drop(history.tell(b"more", false)));
        assert_eq!(numbers(&history, 1), None, "between 4 and 6 something is missing");
        history.tell(b"all", true);
        history.tell(b"more", false);
        assert_eq!(numbers(&history, 1), Some(vec![(9, true), (10, false)]));
    }

    #[test]
    fn bytes_are_bounded() {
        let mut history = History::new(String::new(), 100, 100);
        (0..50).for_each(|_| drop(history.tell(&[0; 20], false)));
        assert!(history.bytes <= 100 && history.told.len() == 2, "{history:?}");
        history.tell(&[0; 500], false);
        assert_eq!(history.told.len(), 1, "the latest is kept");
    }
}
