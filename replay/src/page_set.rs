//! A compact set of pages by digest, for millions of pages.

use terrace_cache::HashedMap;
use terrace_scheduler::{L3Path, PageKey};

/// Returns the bits of a key that identify a page.
pub(crate) fn digest(key: PageKey) -> u64 {
    (key.0 >> 64) as u64
}

/// Pages of an unlimited store.
///
/// Pages are written in the order of their sequences, so a log keeps them in order of insertion:
/// most pages lie right behind their predecessor. Only the others are indexed. All pages are found
/// by following their sequence from its first page, so operations take paths, not pages. A page
/// takes four bytes, and an insertion mostly touches the end of the log; an index of all pages
/// would exceed the processor's cache.
#[derive(Clone, Debug, Default)]
pub(crate) struct PageSet {
    /// Low half of each digest, in order of insertion.
    log: Vec<u32>,
    /// Positions in the log of pages that do not lie behind their predecessor.
    starts: HashedMap<u64, u32>,
    /// True if a page was ever inserted before its predecessor. Otherwise all successors of a
    /// missing page are missing too.
    has_gaps: bool,
}

impl PageSet {
    /// Inserts the pages of a path.
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

    /// Returns the number of leading pages of a path that are in the set.
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

    /// Returns the position of a page, given that of its predecessor.
    #[inline]
    fn place(&self, before: Option<u32>, digest: u64) -> Option<u32> {
        let behind = before.map(|place| place + 1);
        let is_behind = |place: &u32| self.log.get(*place as usize) == Some(&(digest as u32));
        behind.filter(is_behind).or_else(|| self.starts.get(&digest).copied())
    }

    /// Appends a missing page.
    fn append(&mut self, before: Option<u32>, digest: u64) -> u32 {
        let place = self.log.len() as u32;
        self.log.push(digest as u32);
        if before.is_none_or(|before| before + 1 != place) {
            self.starts.insert(digest, place);
        }
        place
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashSet;

    use super::*;

    fn spread(index: u64) -> u64 {
        index.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ index << 7
    }

    /// Returns the keys along a path of left and right turns; each key encodes all turns up to its
    /// page.
    pub(crate) fn keys_of(turns: &[bool]) -> Vec<PageKey> {
        let prefixes = turns.iter().scan(1, |prefix, &turn| {
            *prefix = *prefix * 2 + u64::from(turn);
            Some(*prefix)
        });
        prefixes.map(|prefix| PageKey(u128::from(spread(prefix)) << 64)).collect()
    }

    proptest::proptest! {
        #[test]
        fn holds_exactly_the_inserted_pages(
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
}
