//! A router that follows the KV events of a world and checks its copy of the cache state. It is
//! late at times and loses events, and must then detect the gap and restart from a snapshot.

use std::collections::BTreeMap;

use terrace_scheduler::{
    Config, KvEvent, KvEvents, KvTier, PageContent, PageKey, Scheduler, Token,
};

/// State of a page in a tier.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    namespace: PageKey,
    parent: PageKey,
    tokens: Vec<Token>,
}

/// A router, and the expected state.
#[derive(Debug)]
pub(super) struct Router {
    page_size: usize,
    held: BTreeMap<(KvTier, PageKey), Known>,
    /// Number of the next expected event; none before its first snapshot.
    expected: Option<u64>,
    events: KvEvents,
    turns: u64,
    truth: KvEvents,
    /// Pages on device or host at the last check, and whether L3 was known to have them.
    seen: BTreeMap<PageKey, bool>,
    /// Pages that L3 was last seen to have since the router's last snapshot, and whether they were
    /// confirmed since: this is not visible for pages that the cache has dropped.
    in_l3: BTreeMap<PageKey, bool>,
}

impl Router {
    /// Creates a router without state; none if events are disabled.
    pub(super) fn new(config: &Config) -> Option<Self> {
        (config.cache.kv_event_keys_max > 0).then(|| Self {
            page_size: config.cache.page_size as usize,
            held: BTreeMap::new(),
            expected: None,
            events: KvEvents::default(),
            turns: 0,
            truth: KvEvents::default(),
            seen: BTreeMap::new(),
            in_l3: BTreeMap::new(),
        })
    }

    /// Processes events, unless the router is late, and then compares its state with the cache.
    pub(super) fn follow(&mut self, scheduler: &mut Scheduler) -> Result<(), String> {
        self.turns += 1;
        scheduler.kv_snapshot(&mut self.truth);
        self.look_at_l3();
        // Independent of the world's random source, because the router is not part of the list of
        // actions.
        match self.turns.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 59 {
            // The router is late: events wait, or overflow.
            0..6 => return Ok(()),
            6..8 => {
                scheduler.drain_kv_events(&mut self.events);
                return Ok(());
            }
            8 => {
                scheduler.stop_kv_events();
                return Ok(());
            }
            // A snapshot request, followed by events that the snapshot already includes.
            9 => {
                scheduler.kv_snapshot(&mut self.events);
                self.hear()?;
                scheduler.drain_kv_events(&mut self.events);
            }
            _ => scheduler.drain_kv_events(&mut self.events),
        }
        if !self.hear()? {
            scheduler.kv_snapshot(&mut self.events);
            self.hear()?;
        }
        self.check()
    }

    /// Applies events, unless earlier ones are missing.
    fn hear(&mut self) -> Result<bool, String> {
        let events = std::mem::take(&mut self.events);
        if events.is_snapshot {
            self.held.clear();
            self.in_l3 = self.seen.clone();
            self.in_l3.retain(|_, in_l3| *in_l3);
            self.expected = Some(events.next);
        }
        let missed = self.expected.and_then(|expected| events.from_number(expected));
        let is_heard = missed.is_some();
        for event in missed.into_iter().flatten() {
            self.hear_one(&event)?;
        }
        if is_heard {
            self.expected = self.expected.max(Some(events.next));
        }
        self.events = events;
        Ok(is_heard)
    }

    fn hear_one(&mut self, event: &KvEvent<'_>) -> Result<(), String> {
        match event {
            KvEvent::Stored { tier, namespace, parent, keys, tokens, contents } => {
                if self.keys_of(*namespace, *parent, tokens, contents) != **keys {
                    return Err(format!("keys that are not those of parent and tokens: {event:?}"));
                }
                for (page, known) in self.pages(*namespace, *parent, keys, tokens) {
                    self.held.insert((*tier, page), known);
                }
            }
            KvEvent::Removed { tier, keys, .. } => {
                for &key in keys.iter() {
                    if self.held.remove(&(*tier, key)).is_none() {
                        return Err(format!("removed what was not stored: {event:?}"));
                    }
                }
            }
            KvEvent::Cleared => self.held.retain(|(tier, _), _| *tier == KvTier::L3),
        }
        Ok(())
    }

    /// Computes the keys of pages from their tokens and contents, as any client can.
    fn keys_of(
        &self,
        namespace: PageKey,
        parent: PageKey,
        tokens: &[Token],
        contents: &[PageContent],
    ) -> Vec<PageKey> {
        let mut key = parent;
        let next = |(page, tokens): (u32, &[Token])| {
            let content = contents.iter().find(|content| content.page == page);
            let follows = content.map_or(key, |content| key.with_content(content.digest));
            key = follows.next(namespace, tokens);
            key
        };
        (0..).zip(tokens.chunks(self.page_size)).map(next).collect()
    }

    /// Iterates over the pages of an event.
    fn pages(
        &self,
        namespace: PageKey,
        parent: PageKey,
        keys: &[PageKey],
        tokens: &[Token],
    ) -> Vec<(PageKey, Known)> {
        let parents = std::iter::once(parent).chain(keys.iter().copied());
        let pages = keys.iter().zip(parents).zip(tokens.chunks(self.page_size));
        let known = |((&key, parent), tokens): ((&PageKey, PageKey), &[Token])| {
            (key, Known { namespace, parent, tokens: tokens.to_vec() })
        };
        pages.map(known).collect()
    }

    /// Updates the expected L3 state. Knowledge that the cache has dropped was right at that time.
    fn look_at_l3(&mut self) {
        let mut seen = BTreeMap::new();
        for event in self.truth.iter() {
            let KvEvent::Stored { tier, keys, .. } = event else { continue };
            for &key in keys.iter() {
                *seen.entry(key).or_insert(false) |= tier == KvTier::L3;
            }
        }
        for (&key, _) in self.seen.iter().filter(|(key, in_l3)| **in_l3 && !seen.contains_key(key))
        {
            self.in_l3.insert(key, false);
        }
        for (&key, &in_l3) in &seen {
            if in_l3 {
                self.in_l3.insert(key, true);
            } else if self.seen.get(&key) == Some(&true) {
                self.in_l3.remove(&key);
            }
        }
        self.seen = seen;
    }

    fn check(&mut self) -> Result<(), String> {
        let held = &self.held;
        self.in_l3.retain(|&key, certain| *certain || held.contains_key(&(KvTier::L3, key)));
        let mut pages = 0;
        for event in self.truth.iter() {
            let KvEvent::Stored { tier, namespace, parent, keys, tokens, .. } = event else {
                return Err(format!("{event:?} in a snapshot"));
            };
            for (key, known) in self.pages(namespace, parent, &keys, &tokens) {
                if self.held.get(&(tier, key)) != Some(&known) {
                    let heard = self.held.get(&(tier, key));
                    return Err(format!("{key} is on {tier:?} as {known:?}, not as {heard:?}"));
                }
            }
            pages += if tier == KvTier::L3 { 0 } else { keys.len() };
        }
        let heard = self.held.keys().filter(|(tier, _)| *tier != KvTier::L3).count();
        if heard != pages {
            return Err(format!("{heard} pages are believed to be held, and {pages} are"));
        }
        let believed = self.held.keys().filter(|(tier, _)| *tier == KvTier::L3);
        if let Some((_, key)) = believed.clone().find(|(_, key)| !self.in_l3.contains_key(key)) {
            return Err(format!("{key} is believed to be in L3, and is doubted"));
        }
        if believed.count() < self.in_l3.len() {
            return Err("something was seen in L3 of which nothing was told".to_owned());
        }
        Ok(())
    }
}
