//! Sets of pages by digest, frugal enough for millions.

use terrace_cache::HashedMap;
use terrace_scheduler::{L3Path, PageKey};

/// The bits of a key by which a page is known.
pub(crate) fn digest(key: PageKey) -> u64 {
    (key.0 >> 64) as u64
}

/// Pages that never go: those of a store without limit.
///
/// Pages are written in the order of their sequences, so a log keeps them as they came: behind a page
/// mostly comes the one that follows it in its sequence. Only pages that do not come behind the one
/// that they follow can be looked up. All others are found by going along their sequence from its
/// first page on, which is why paths are asked for, not pages. So a page takes four bytes, and putting
/// one in touches little but the end of the log, where an index of all pages would be too large for
/// the processor's cache.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageSet {
    /// The low half of each digest, in the order of insertion.
    log: Vec<u32>,
    /// Where in the log those are that do not come behind the page that they follow.
    starts: HashedMap<u64, u32>,
    /// Whether a page was ever put in before the one that it follows: unless it was, all that follow a
    /// page that is missing are missing too.
    has_gaps: bool,
}

impl PageSet {
    /// Puts in the pages that are asked for.
    pub(crate) fn insert(&mut self, path: &L3Path<'_>) {
        let mut before = None;
        let mut is_first = true;
        for piece in path.pieces() {
            let mut digests = piece.keys.iter().copied().map(digest);
            while let Some(digest) = digests.next() {
                let place = self.place(before, digest);
                if place.is_none() && piece.is_asked {
                    self.has_gaps |= before.is_none() && !is_first;
                    before = Some(self.append(before, digest));
                    if !self.has_gaps {
                        self.log.extend(digests.by_ref().map(|digest| digest as u32));
                        before = Some(self.log.len() as u32 - 1);
                    }
                } else {
                    before = place;
                }
                is_first = false;
            }
        }
    }

    /// How many of the pages that are asked for, from the first, are in the set.
    pub(crate) fn held(&self, path: &L3Path<'_>) -> usize {
        let (mut before, mut held) = (None, 0);
        for piece in path.pieces() {
            for &key in piece.keys {
                before = self.place(before, digest(key));
                if before.is_none() && (piece.is_asked || !self.has_gaps) {
                    return held;
                }
                held += usize::from(piece.is_asked);
            }
        }
        held
    }

    pub(crate) fn len(&self) -> u64 {
        self.log.len() as u64
    }

    /// Where a page is, given where the one is that it follows.
    #[inline]
    fn place(&self, before: Option<u32>, digest: u64) -> Option<u32> {
        let behind = before.map(|place| place + 1);
        let is_behind = |place: &u32| self.log.get(*place as usize) == Some(&(digest as u32));
        behind.filter(is_behind).or_else(|| self.starts.get(&digest).copied())
    }

    /// Puts in a page that is not there.
    fn append(&mut self, before: Option<u32>, digest: u64) -> u32 {
        let place = self.log.len() as u32;
        self.log.push(digest as u32);
        if before.is_none_or(|before| before + 1 != place) {
            self.starts.insert(digest, place);
        }
        place
    }
}

const NONE: u32 = u32::MAX;

/// So many pages at the most, the least recently used going first.
#[derive(Clone, Debug)]
pub(crate) struct LruPages {
    pages_max: u32,
    entries: Vec<Entry>,
    /// Which entry belongs here, and the low half of its digest: that tells nearly all others apart
    /// without a look at them, and where their places begin.
    places: Vec<Place>,
    newest: u32,
    oldest: u32,
    evicted: u64,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    entry: u32,
    low: u32,
}

const VACANT: Place = Place { entry: NONE, low: 0 };

#[derive(Clone, Copy, Debug)]
struct Entry {
    digest: u64,
    newer: u32,
    older: u32,
}

impl LruPages {
    pub(crate) fn new(pages_max: u32) -> Self {
        Self {
            pages_max,
            entries: Vec::new(),
            places: vec![VACANT; 64],
            newest: NONE,
            oldest: NONE,
            evicted: 0,
        }
    }

    pub(crate) fn insert_or_touch(&mut self, digest: u64) {
        let place = self.find(digest);
        let known = self.places[place].entry;
        if known != NONE {
            self.make_newest(known);
            return;
        }
        if self.entries.len() < self.pages_max as usize {
            let entry = self.entries.len() as u32;
            self.entries.push(Entry { digest, newer: NONE, older: NONE });
            self.places[place] = Place { entry, low: digest as u32 };
            self.link_newest(entry);
            if self.entries.len() * 4 >= self.places.len() * 3 {
                self.grow();
            }
            return;
        }
        let entry = self.oldest;
        self.evicted += 1;
        self.unlink(entry);
        self.take_out(self.find(self.entries[entry as usize].digest));
        self.entries[entry as usize].digest = digest;
        // Taking out may have moved others: the place is looked for again.
        let place = self.find(digest);
        self.places[place] = Place { entry, low: digest as u32 };
        self.link_newest(entry);
    }

    pub(crate) fn touch(&mut self, digest: u64) {
        let known = self.places[self.find(digest)].entry;
        if known != NONE {
            self.make_newest(known);
        }
    }

    pub(crate) fn contains(&self, digest: u64) -> bool {
        self.places[self.find(digest)].entry != NONE
    }

    pub(crate) fn len(&self) -> u64 {
        self.entries.len() as u64
    }

    pub(crate) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Where the digest is, or would be.
    fn find(&self, digest: u64) -> usize {
        let mask = self.places.len() - 1;
        let mut at = digest as u32 as usize & mask;
        loop {
            let Place { entry, low } = self.places[at];
            let is_it = low == digest as u32
                && entry != NONE
                && self.entries[entry as usize].digest == digest;
            if is_it || entry == NONE {
                return at;
            }
            at = (at + 1) & mask;
        }
    }

    /// Empties a place and closes the gap, so that whatever was pushed past it is still found.
    fn take_out(&mut self, mut gap: usize) {
        let mask = self.places.len() - 1;
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let place = self.places[at];
            if place.entry == NONE {
                break;
            }
            let home = place.low as usize & mask;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.places[gap] = place;
                gap = at;
            }
        }
        self.places[gap] = VACANT;
    }

    fn grow(&mut self) {
        self.places = vec![VACANT; self.places.len() * 2];
        for entry in 0..self.entries.len() {
            let digest = self.entries[entry].digest;
            let place = self.find(digest);
            self.places[place] = Place { entry: entry as u32, low: digest as u32 };
        }
    }

    fn make_newest(&mut self, entry: u32) {
        if self.newest != entry {
            self.unlink(entry);
            self.link_newest(entry);
        }
    }

    fn unlink(&mut self, entry: u32) {
        let Entry { newer, older, .. } = self.entries[entry as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, entry: u32) {
        let older = self.newest;
        self.entries[entry as usize].newer = NONE;
        self.entries[entry as usize].older = older;
        match older {
            NONE => self.oldest = entry,
            older => self.entries[older as usize].newer = entry,
        }
        self.newest = entry;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};

    use super::*;

    fn spread(index: u64) -> u64 {
        index.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ index << 7
    }

    /// The keys along a path of turns, left or right: each tells all turns up to its page.
    fn keys_of(turns: &[bool]) -> Vec<PageKey> {
        let prefixes = turns.iter().scan(1, |prefix, &turn| {
            *prefix = *prefix * 2 + u64::from(turn);
            Some(*prefix)
        });
        prefixes.map(|prefix| PageKey(u128::from(spread(prefix)) << 64)).collect()
    }

    proptest::proptest! {
        #[test]
        fn it_holds_what_was_put_into_it_and_nothing_else(
            operations in proptest::collection::vec(
                (proptest::collection::vec(proptest::bool::ANY, 12),
                 proptest::array::uniform4(0usize..13), proptest::bool::ANY), 1..40),
        ) {
            let mut set = PageSet::default();
            let mut model = HashSet::new();
            for (turns, mut borders, is_insertion) in operations {
                let keys = keys_of(&turns);
                borders.sort_unstable();
                let [first, gap, second, end] = borders;
                let mut path = L3Path::default();
                path.extend([&keys[..first]], false);
                path.extend([&keys[first..gap]], true);
                if is_insertion {
                    path.extend([&keys[gap..second]], false);
                    path.extend([&keys[second..end]], true);
                    set.insert(&path);
                    model.extend(path.asked());
                } else {
                    let held = path.asked().take_while(|key| model.contains(key)).count();
                    proptest::prop_assert_eq!(set.held(&path), held);
                }
                proptest::prop_assert_eq!(set.len(), model.len() as u64);
            }
        }
    }

    #[test]
    fn the_least_recently_used_page_goes_first() {
        let mut lru = LruPages::new(300);
        let mut model: VecDeque<u64> = VecDeque::new();
        for index in 0..50_000u64 {
            // Few different homes, so that places are contested.
            let digest = spread(index * index % 977) & 0xFFFF_0000_0000_01FF;
            if index % 3 == 0 {
                lru.touch(digest);
                if let Some(place) = model.iter().position(|&known| known == digest) {
                    model.remove(place);
                    model.push_back(digest);
                }
                continue;
            }
            lru.insert_or_touch(digest);
            match model.iter().position(|&known| known == digest) {
                Some(place) => drop(model.remove(place)),
                None if model.len() == 300 => drop(model.pop_front()),
                None => {}
            }
            model.push_back(digest);
        }
        assert_eq!(lru.len(), model.len() as u64);
        assert!(model.iter().all(|&digest| lru.contains(digest)));
        let held = (0..977u64)
            .map(|index| spread(index) & 0xFFFF_0000_0000_01FF)
            .collect::<HashSet<_>>()
            .into_iter()
            .filter(|&digest| lru.contains(digest))
            .count();
        assert_eq!(held, model.len());
    }
}
