//! KV events: what routers need to know about which prefixes this cache holds.
//!
//! Events are numbered. A consumer starts with a snapshot, applies the events that are drained after it, and so knows
//! the pages of each tier at any time. Without a consumer nothing is recorded: until the first drain, and after more
//! events than the log has room for, events cost nothing and the next drain is a snapshot.

use std::borrow::Cow;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::key::{PageKey, Token};
use crate::passage::ContentKey;
use crate::planted::{Bug, planted};
use crate::tier::TierName;

/// Where pages are, as events tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvTier {
    /// Device memory of this engine.
    Device,
    /// Host memory of this engine.
    Host,
    /// The store, as this engine last saw it: others may share it, and it may have lost pages since
    /// without a word.
    L3,
}

impl From<TierName> for KvTier {
    fn from(tier: TierName) -> Self {
        match tier {
            TierName::Device => Self::Device,
            TierName::Host => Self::Host,
        }
    }
}

/// Contribution of images and sounds to the key of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageContent {
    /// The place of the page among those of an event.
    pub page: u32,
    /// A digest of the contents and their places: the page's key follows
    /// [`PageKey::with_content`] of the key before it.
    pub digest: ContentKey,
}

/// Pages of a node, for an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pages<'a> {
    pub(crate) namespace: PageKey,
    pub(crate) parent: PageKey,
    pub(crate) keys: &'a [PageKey],
    pub(crate) tokens: &'a [Token],
    /// Content other than tokens, by its place in the prompt.
    pub(crate) marks: &'a [(u32, u128)],
    /// The place of the first of them in the prompt.
    pub(crate) first: u32,
}

/// One change of what the cache holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum KvEvent<'a> {
    /// Pages became available in a tier. On device, those before them are there too; on host and in L3
    /// they need not be.
    Stored {
        /// Where.
        tier: KvTier,
        /// The namespace (model, adapter, tenant) they belong to.
        namespace: PageKey,
        /// The key of the page before the first of them; the namespace's digest if there is none.
        parent: PageKey,
        /// The pages' keys, in sequence order.
        keys: Cow<'a, [PageKey]>,
        /// Their tokens, as many for each page as a page has.
        tokens: Cow<'a, [Token]>,
        /// Content other than tokens on some of the pages, by the page's place among these.
        #[serde(default, skip_serializing_if = "<[_]>::is_empty")]
        contents: Cow<'a, [PageContent]>,
    },
    /// Pages are gone from a tier. Those that leave device and host may still be in L3.
    Removed {
        /// Where.
        tier: KvTier,
        /// The namespace they belonged to.
        namespace: PageKey,
        /// The pages' keys, in sequence order.
        keys: Cow<'a, [PageKey]>,
    },
    /// Device and host hold nothing any more but what is told to be stored from here on. L3 keeps what it
    /// has.
    Cleared,
}

/// Events in the order in which they happened, or everything that is held. Memory is used again when it
/// is drained into once more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KvEvents {
    /// True if this is everything that is held instead of the changes. The consumer forgets all earlier events, in
    /// all tiers.
    pub is_snapshot: bool,
    /// The number of the event that follows these. Events have consecutive numbers, those of a snapshot
    /// none: it has in it whatever came before this number.
    pub next: u64,
    entries: Vec<Entry>,
    keys: Vec<PageKey>,
    tokens: Vec<Token>,
    contents: Vec<PageContent>,
}

/// An event whose keys and tokens lie among those of all.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Entry {
    Stored {
        tier: KvTier,
        namespace: PageKey,
        parent: PageKey,
        keys: Range<usize>,
        tokens: Range<usize>,
        contents: Range<usize>,
    },
    Removed {
        tier: KvTier,
        namespace: PageKey,
        keys: Range<usize>,
    },
    Cleared,
}

impl KvEvents {
    /// The number of the first event; of a snapshot the number of what follows it.
    #[must_use]
    pub fn first(&self) -> u64 {
        if self.is_snapshot { self.next } else { self.next - self.entries.len() as u64 }
    }

    /// Number of events.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there is no event and this is no snapshot.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && !self.is_snapshot
    }

    /// The events, oldest first; of a snapshot, what is held, each page after the one before it.
    pub fn iter(&self) -> impl Iterator<Item = KvEvent<'_>> {
        self.entries.iter().map(|entry| match entry {
            Entry::Stored { tier, namespace, parent, keys, tokens, contents } => KvEvent::Stored {
                tier: *tier,
                namespace: *namespace,
                parent: *parent,
                keys: Cow::Borrowed(&self.keys[keys.clone()]),
                tokens: Cow::Borrowed(&self.tokens[tokens.clone()]),
                contents: Cow::Borrowed(&self.contents[contents.clone()]),
            },
            Entry::Removed { tier, namespace, keys } => KvEvent::Removed {
                tier: *tier,
                namespace: *namespace,
                keys: Cow::Borrowed(&self.keys[keys.clone()]),
            },
            Entry::Cleared => KvEvent::Cleared,
        })
    }

    /// Events for a consumer that expects the one with this number; `None` if some before them are missing, so that
    /// it needs a snapshot. Of a snapshot, all events.
    #[must_use]
    pub fn from_number(&self, expected: u64) -> Option<impl Iterator<Item = KvEvent<'_>>> {
        let heard = match self.is_snapshot {
            true => 0,
            false => expected.checked_sub(self.first())?,
        };
        Some(self.iter().skip(heard as usize))
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.keys.clear();
        self.tokens.clear();
        self.contents.clear();
    }

    pub(crate) fn add_stored(&mut self, tier: KvTier, pages: &Pages<'_>) {
        let Pages { namespace, parent, marks, first, .. } = *pages;
        let keys = append(&mut self.keys, pages.keys);
        let tokens = append(&mut self.tokens, pages.tokens);
        let first_content = self.contents.len();
        let content = |&(page, digest): &(u32, u128)| PageContent {
            page: page - first,
            digest: ContentKey(digest),
        };
        self.contents.extend(marks.iter().map(content));
        let contents = first_content..self.contents.len();
        self.entries.push(Entry::Stored { tier, namespace, parent, keys, tokens, contents });
    }

    fn add_removed(&mut self, tier: KvTier, namespace: PageKey, keys: &[PageKey]) {
        let keys = append(&mut self.keys, keys);
        self.entries.push(Entry::Removed { tier, namespace, keys });
    }

    fn add(&mut self, event: &KvEvent<'_>) {
        match event {
            KvEvent::Stored { tier, namespace, parent, keys, tokens, contents } => {
                let (tier, namespace, parent) = (*tier, *namespace, *parent);
                let keys = append(&mut self.keys, keys);
                let tokens = append(&mut self.tokens, tokens);
                let contents = append(&mut self.contents, contents);
                self.entries.push(Entry::Stored {
                    tier,
                    namespace,
                    parent,
                    keys,
                    tokens,
                    contents,
                });
            }
            KvEvent::Removed { tier, namespace, keys } => {
                self.add_removed(*tier, *namespace, keys);
            }
            KvEvent::Cleared => self.entries.push(Entry::Cleared),
        }
    }
}

fn append<E: Copy>(all: &mut Vec<E>, more: &[E]) -> Range<usize> {
    let first = all.len();
    all.extend_from_slice(more);
    first..all.len()
}

/// The events as a list of their own; only for the wire.
struct List<'a>(&'a KvEvents);

impl Serialize for List<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter())
    }
}

impl Serialize for KvEvents {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut events = serializer.serialize_struct("KvEvents", 3)?;
        events.serialize_field("snapshot", &self.is_snapshot)?;
        events.serialize_field("next", &self.next)?;
        events.serialize_field("events", &List(self))?;
        events.end()
    }
}

impl<'de> Deserialize<'de> for KvEvents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(bound = "E: DeserializeOwned")]
        struct Told<E> {
            snapshot: bool,
            next: u64,
            events: Vec<E>,
        }
        let told = Told::<KvEvent<'static>>::deserialize(deserializer)?;
        if !told.snapshot && told.next < told.events.len() as u64 {
            return Err(serde::de::Error::custom("more events than numbers"));
        }
        let mut events = Self { is_snapshot: told.snapshot, next: told.next, ..Self::default() };
        told.events.iter().for_each(|event| events.add(event));
        Ok(events)
    }
}

/// Events that wait to be drained, bounded.
#[derive(Debug)]
pub(crate) struct KvEventLog {
    pending: KvEvents,
    keys_max: usize,
    /// Events without keys, each of which counts as one.
    cleared: usize,
    /// True if there is a consumer that has missed nothing.
    is_recording: bool,
    /// True while everything is removed, which is reported once and not page by page.
    is_clearing: bool,
}

impl KvEventLog {
    pub(crate) fn new(keys_max: usize) -> Self {
        let pending = KvEvents { next: 1, ..KvEvents::default() };
        Self { pending, keys_max, cleared: 0, is_recording: false, is_clearing: false }
    }

    /// Returns true if events are recorded.
    pub(crate) fn is_recording(&self) -> bool {
        self.is_recording && !self.is_clearing
    }

    /// The number of the event that happens next.
    pub(crate) fn next(&self) -> u64 {
        self.pending.next
    }

    pub(crate) fn stored(&mut self, tier: KvTier, pages: &Pages<'_>) {
        if self.has_room_for(pages.keys.len()) {
            self.pending.add_stored(tier, pages);
        }
    }

    pub(crate) fn removed(&mut self, tier: KvTier, namespace: PageKey, keys: &[PageKey]) {
        if self.has_room_for(keys.len()) {
            self.pending.add_removed(tier, namespace, keys);
        }
    }

    /// Everything goes from here on, until it is [told](Self::cleared).
    pub(crate) fn begin_clearing(&mut self) {
        self.is_clearing = true;
    }

    /// Everything has gone that can.
    pub(crate) fn cleared(&mut self) {
        self.is_clearing = false;
        if self.is_recording && self.has_room_for(1) {
            self.cleared += 1;
            self.pending.entries.push(Entry::Cleared);
        }
    }

    /// Hands out what was recorded, and goes on recording. Tells whether that is all that happened since
    /// the last time: if not, a snapshot is due.
    pub(crate) fn drain(&mut self, into: &mut KvEvents) -> bool {
        let is_whole = self.is_recording;
        self.is_recording = self.keys_max > 0;
        self.cleared = 0;
        let next = self.pending.next;
        std::mem::swap(&mut self.pending, into);
        self.pending.clear();
        (self.pending.next, self.pending.is_snapshot, into.is_snapshot) = (next, false, false);
        is_whole
    }

    /// Stops recording.
    pub(crate) fn stop(&mut self) {
        if self.is_recording {
            self.lose();
        }
    }

    /// Counts an event. Without room for it, all that was recorded is given up: a part of it is of no use
    /// without the rest.
    fn has_room_for(&mut self, keys: usize) -> bool {
        self.pending.next += 1;
        let has_room = self.pending.keys.len() + self.cleared + keys <= self.keys_max;
        if !has_room {
            self.lose();
        }
        has_room
    }

    /// The number that is skipped shows a consumer that an event is missing.
    fn lose(&mut self) {
        if planted(Bug::HideLostEvents) {
            self.pending.next -= self.pending.entries.len() as u64 + 1;
        } else {
            self.is_recording = false;
            self.pending.next += 1;
        }
        self.pending.clear();
        self.cleared = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [PageKey; 3] = [PageKey(1), PageKey(2), PageKey(3)];

    fn log(keys_max: usize) -> (KvEventLog, KvEvents) {
        let mut events = KvEvents::default();
        let mut log = KvEventLog::new(keys_max);
        assert!(!log.is_recording(), "nobody has asked");
        assert!(!log.drain(&mut events), "it begins with a snapshot");
        (log, events)
    }

    fn pages<'a>(keys: &'a [PageKey], tokens: &'a [Token]) -> Pages<'a> {
        let (namespace, parent) = (PageKey(9), PageKey(7));
        Pages { namespace, parent, keys, tokens, marks: &[(4, 5)], first: 4 }
    }

    #[test]
    fn event_numbers_continue_and_skip_lost_events() {
        let (mut log, mut events) = log(4);
        log.removed(KvTier::Host, PageKey(0), &KEYS);
        log.cleared();
        assert!(log.drain(&mut events));
        assert_eq!((events.first(), events.next, events.len()), (1, 3, 2));
        log.removed(KvTier::Host, PageKey(0), &KEYS);
        log.removed(KvTier::Host, PageKey(0), &KEYS);
        assert!(!log.is_recording(), "there is no room for so many");
        assert!(!log.drain(&mut events));
        assert!(events.next > 5 && events.is_empty());
        (0..5).for_each(|_| log.cleared());
        assert!(!log.drain(&mut events), "events without keys are bounded too");
    }

    #[test]
    fn a_consumer_resumes_after_the_events_it_has() {
        let (mut log, mut events) = log(100);
        for key in KEYS {
            log.removed(KvTier::L3, PageKey(0), &[key]);
        }
        assert!(log.drain(&mut events));
        let heard = |expected| events.from_number(expected).map(Iterator::count);
        assert_eq!([1, 2, 4, 9].map(heard), [Some(3), Some(2), Some(0), Some(0)]);
        assert_eq!(heard(0), None, "the event before the first is missing");
    }

    #[test]
    fn memory_is_reused() {
        let (mut log, mut events) = log(100);
        let mut addresses = Vec::new();
        for _ in 0..6 {
            log.stored(KvTier::Device, &pages(&KEYS, &[1, 2, 3]));
            assert!(log.drain(&mut events));
            addresses.push((events.keys.as_ptr(), events.tokens.as_ptr()));
        }
        assert_eq!(addresses[0..2], addresses[4..6]);
    }

    #[test]
    fn events_travel_as_text() {
        let (mut log, mut events) = log(100);
        log.stored(KvTier::L3, &pages(&KEYS[..1], &[5, 6]));
        log.cleared();
        assert!(log.drain(&mut events));
        let text = serde_json::to_string(&events).unwrap();
        assert_eq!(serde_json::from_str::<KvEvents>(&text).unwrap(), events);
        let key = |last| format!("{last:0>32}");
        let begins = r#"{"snapshot":false,"next":3,"events":[{"event":"stored","tier":"l3","#;
        let chain = format!(r#""namespace":"{}","parent":"{}","#, key(9), key(7));
        let pages = format!(r#""keys":["{}"],"tokens":[5,6],"#, key(1));
        let contents = format!(r#""contents":[{{"page":0,"digest":"{}"}}]}},"#, key(5));
        assert_eq!(text, format!(r#"{begins}{chain}{pages}{contents}{{"event":"cleared"}}]}}"#));
        let wrong = r#"{"snapshot":false,"next":0,"events":[{"event":"cleared"}]}"#;
        assert!(serde_json::from_str::<KvEvents>(wrong).is_err());
    }
}
