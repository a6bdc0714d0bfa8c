//! The pages of a limited store with LRU eviction.

use terrace_cache::HashedMap;
use terrace_scheduler::{L3Path, PageKey};

use crate::page_set::digest;

const NONE: u32 = u32::MAX;

/// An LRU set of pages with a capacity. Of pages used together the first counts as used last,
/// because the others are useless without it.
///
/// Pages are used along their sequences, many at a time, so the LRU order is kept by runs of pages,
/// of which there are few. Only the first page of a run is indexed; the others are found by
/// following their sequence. Operations therefore take paths, not pages.
#[derive(Clone, Debug)]
pub(crate) struct LruPages {
    pages_max: u64,
    len: u64,
    evicted: u64,
    /// Digests of all runs, and gaps of evicted ones.
    log: Vec<u64>,
    runs: Vec<Run>,
    vacant: Vec<u32>,
    /// Run by the digest of its first page.
    starts: HashedMap<u64, u32>,
    newest: u32,
    oldest: u32,
    /// Runs that the current operation uses; empty between operations.
    used: Vec<Used>,
}

/// A run of which an operation uses all pages.
#[derive(Clone, Copy, Debug)]
struct Used {
    run: u32,
    /// True if it follows the run used before it in its sequence.
    follows: bool,
}

/// Pages that are consecutive in their sequence and were last used together.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Position of its first page in the log.
    at: usize,
    len: u32,
    newer: u32,
    older: u32,
}

/// A page of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    run: u32,
    offset: u32,
}

impl LruPages {
    pub(crate) fn new(pages_max: u64) -> Self {
        Self {
            pages_max,
            len: 0,
            evicted: 0,
            log: Vec::new(),
            runs: Vec::new(),
            vacant: Vec::new(),
            starts: HashedMap::default(),
            newest: NONE,
            oldest: NONE,
            used: Vec::new(),
        }
    }

    /// Marks the pages of a path as used, and inserts missing ones.
    pub(crate) fn insert(&mut self, path: &L3Path<'_>) {
        let mut before = None;
        for piece in path.pieces() {
            let mut keys = piece.keys;
            while let Some((&key, rest)) = keys.split_first() {
                let digest = digest(key);
                before = match self.place(before, digest) {
                    Some(place) if piece.is_asked => Some(self.use_page(before, place)),
                    None if piece.is_asked => Some(self.append_all(before, digest, rest)),
                    place => place,
                };
                (before, keys) = self.go_along(before, rest);
            }
            self.leave(before);
        }
        self.make_used_newest();
        self.evict();
        if self.log.len() as u64 > self.len + self.len / 2 + 1024 {
            self.clean_log();
        }
    }

    /// Marks the first pages of a path, which are present, as used.
    pub(crate) fn touch(&mut self, path: &L3Path<'_>, mut pages: usize) {
        let mut before = None;
        for piece in path.pieces() {
            let count = if piece.is_asked { piece.keys.len().min(pages) } else { piece.keys.len() };
            let mut keys = &piece.keys[..count];
            while let Some((&key, rest)) = keys.split_first() {
                before = match self.place(before, digest(key)) {
                    Some(place) if piece.is_asked => Some(self.use_page(before, place)),
                    place => place,
                };
                (before, keys) = self.go_along(before, rest);
            }
            self.leave(before);
            pages -= if piece.is_asked { count } else { 0 };
        }
        self.make_used_newest();
    }

    /// Returns the number of leading pages of a path that are present.
    pub(crate) fn held(&self, path: &L3Path<'_>) -> usize {
        let (mut before, mut held) = (None, 0);
        for piece in path.pieces() {
            let mut keys = piece.keys;
            while let Some((&key, rest)) = keys.split_first() {
                before = self.place(before, digest(key));
                if piece.is_asked && before.is_none() {
                    return held;
                }
                let from = keys.len();
                (before, keys) = self.go_along(before, rest);
                held += if piece.is_asked { from - keys.len() } else { 0 };
            }
        }
        held
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the place of a page, given the place of its predecessor.
    #[inline]
    fn place(&self, before: Option<Place>, digest: u64) -> Option<Place> {
        if let Some(Place { run, offset }) = before {
            let Run { at, len, .. } = self.runs[run as usize];
            let offset = offset + 1;
            if offset < len && self.log[at + offset as usize] == digest {
                return Some(Place { run, offset });
            }
        }
        self.starts.get(&digest).map(|&run| Place { run, offset: 0 })
    }

    /// Follows the run of `before` as long as the given pages are the next in it. Returns the place
    /// reached and the remaining pages. An operation uses all pages of the part that it follows, or
    /// none.
    #[inline]
    fn go_along<'k>(
        &self,
        before: Option<Place>,
        keys: &'k [PageKey],
    ) -> (Option<Place>, &'k [PageKey]) {
        let Some(Place { run, offset }) = before else { return (None, keys) };
        let next = &self.log[self.runs[run as usize].at + offset as usize + 1..self.end(run)];
        let same = next.iter().zip(keys).take_while(|&(&next, &key)| next == digest(key)).count();
        (Some(Place { run, offset: offset + same as u32 }), &keys[same..])
    }

    /// Marks a page as used after `before`, and returns its new place. Unused pages before it in
    /// its run are split off.
    fn use_page(&mut self, before: Option<Place>, place: Place) -> Place {
        if self.is_used(place.run) && place.offset > 0 {
            return place;
        }
        let follows = self.leave(before);
        let run = self.split(place.run, place.offset);
        self.used.push(Used { run, follows });
        Place { run, offset: 0 }
    }

    /// Inserts a page behind `before`, and the following missing ones up to the first that is
    /// present. Marks them as used, and returns the place of the first.
    fn append_all(
        &mut self,
        before: Option<Place>,
        digest_of_first: u64,
        following: &[PageKey],
    ) -> Place {
        let Place { run, offset } = self.append(before, digest_of_first);
        let missing = following.iter().map(|&key| digest(key));
        let missing = missing.take_while(|digest| !self.starts.contains_key(digest));
        self.log.extend(missing);
        let appended = self.log.len() - self.end(run);
        self.runs[run as usize].len += appended as u32;
        self.len += appended as u64;
        Place { run, offset }
    }

    /// Inserts a page behind `before` and marks it as used.
    #[inline]
    fn append(&mut self, before: Option<Place>, digest: u64) -> Place {
        let at = self.log.len();
        self.len += 1;
        self.log.push(digest);
        let follows = self.leave(before);
        if let Some(Place { run, offset }) = before.filter(|_| follows)
            && self.end(run) == at
        {
            self.runs[run as usize].len += 1;
            return Place { run, offset: offset + 1 };
        }
        let run = self.add(Run { at, len: 1, newer: NONE, older: NONE });
        self.link_newest(run);
        self.used.push(Used { run, follows });
        Place { run, offset: 0 }
    }

    /// Splits off the pages behind `last` in the run used last, which are not used. Returns whether
    /// `last` is used.
    #[inline]
    fn leave(&mut self, last: Option<Place>) -> bool {
        let Some(Place { run, offset }) = last.filter(|last| self.is_used(last.run)) else {
            return false;
        };
        if offset + 1 < self.runs[run as usize].len {
            self.split(run, offset + 1);
        }
        true
    }

    /// Returns whether it is the run used last.
    fn is_used(&self, run: u32) -> bool {
        self.used.last().is_some_and(|used| used.run == run)
    }

    /// Moves the used runs to the newest position, the first of them last. Merges runs that are
    /// also consecutive in the log.
    fn make_used_newest(&mut self) {
        while let Some(Used { run, follows }) = self.used.pop() {
            if let Some(&Used { run: front, .. }) = self.used.last().filter(|_| follows)
                && self.end(front) == self.runs[run as usize].at
            {
                self.runs[front as usize].len += self.runs[run as usize].len;
                self.remove(run);
            } else {
                self.unlink(run);
                self.link_newest(run);
            }
        }
    }

    fn evict(&mut self) {
        while self.len > self.pages_max {
            let (oldest, excess) = (self.oldest, self.len - self.pages_max);
            let run = &mut self.runs[oldest as usize];
            let gone = u64::from(run.len).min(excess);
            run.len -= gone as u32;
            self.len -= gone;
            self.evicted += gone;
            if run.len == 0 {
                self.remove(oldest);
            }
        }
    }

    /// Returns the end of a run in the log.
    fn end(&self, run: u32) -> usize {
        let Run { at, len, .. } = self.runs[run as usize];
        at + len as usize
    }

    /// Splits off the pages from `offset` on into a separate run, which is evicted before the rest.
    fn split(&mut self, run: u32, offset: u32) -> u32 {
        if offset == 0 {
            return run;
        }
        let Run { at, len, older, .. } = self.runs[run as usize];
        self.runs[run as usize].len = offset;
        let at = at + offset as usize;
        let back = self.add(Run { at, len: len - offset, newer: run, older });
        self.runs[run as usize].older = back;
        match older {
            NONE => self.oldest = back,
            older => self.runs[older as usize].newer = back,
        }
        back
    }

    /// Adds a run to the index.
    fn add(&mut self, run: Run) -> u32 {
        let index = self.vacant.pop().unwrap_or(self.runs.len() as u32);
        self.starts.insert(self.log[run.at], index);
        match self.runs.get_mut(index as usize) {
            Some(vacant) => *vacant = run,
            None => self.runs.push(run),
        }
        index
    }

    fn remove(&mut self, run: u32) {
        self.unlink(run);
        self.starts.remove(&self.log[self.runs[run as usize].at]);
        self.vacant.push(run);
    }

    /// Compacts the log.
    fn clean_log(&mut self) {
        let mut runs = Vec::new();
        let mut run = self.oldest;
        while run != NONE {
            runs.push(run);
            run = self.runs[run as usize].newer;
        }
        runs.sort_unstable_by_key(|&run| self.runs[run as usize].at);
        let mut end = 0;
        for run in runs {
            let Run { at, len, .. } = self.runs[run as usize];
            self.log.copy_within(at..at + len as usize, end);
            self.runs[run as usize].at = end;
            end += len as usize;
        }
        self.log.truncate(end);
    }

    fn unlink(&mut self, run: u32) {
        let Run { newer, older, .. } = self.runs[run as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.runs[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.runs[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, run: u32) {
        let older = self.newest;
        self.runs[run as usize].newer = NONE;
        self.runs[run as usize].older = older;
        match older {
            NONE => self.oldest = run,
            older => self.runs[older as usize].newer = run,
        }
        self.newest = run;
    }
}

#[cfg(test)]
mod tests {
    use proptest::{array, bool, collection};

    use super::*;
    use crate::page_set::tests::keys_of;

    proptest::proptest! {
        #[test]
        fn evicts_the_least_recently_used_pages(
            pages_max in 1usize..40,
            operations in collection::vec(
                (collection::vec(bool::ANY, 12), array::uniform4(0usize..13), bool::ANY), 1..200),
        ) {
            let mut lru = LruPages::new(pages_max as u64);
            // From the next page to evict to the one used last.
            let mut model = Vec::new();
            let mut evicted = 0;
            for (turns, mut borders, is_insertion) in operations {
                let keys = keys_of(&turns);
                borders.sort_unstable();
                let [first, gap, second, end] = borders;
                let mut path = L3Path::default();
                path.extend([&keys[..first]], false);
                path.extend([&keys[first..gap]], true);
                let used: Vec<_> = if is_insertion {
                    path.extend([&keys[gap..second]], false);
                    path.extend([&keys[second..end]], true);
                    lru.insert(&path);
                    path.asked().collect()
                } else {
                    let held = path.asked().take_while(|key| model.contains(key)).count();
                    proptest::prop_assert_eq!(lru.held(&path), held);
                    let pages = held.min(second);
                    lru.touch(&path, pages);
                    path.asked().take(pages).collect()
                };
                model.retain(|key| !used.contains(key));
                model.extend(used.iter().rev());
                let gone = model.len().saturating_sub(pages_max);
                model.drain(..gone);
                evicted += gone as u64;
                proptest::prop_assert_eq!((lru.len(), lru.evicted()), (model.len() as u64, evicted));
            }
        }
    }

    #[test]
    fn log_is_compacted_after_evictions() {
        let mut lru = LruPages::new(100);
        for sequence in 0..4000u64 {
            let turns: Vec<_> = (0..20).map(|page| sequence >> page & 1 == 1).collect();
            let mut path = L3Path::default();
            let keys = keys_of(&turns);
            path.extend([&keys[..]], true);
            lru.insert(&path);
            assert_eq!(lru.held(&path), 20);
        }
        assert_eq!(lru.len(), 100);
        assert!(
            lru.log.len() <= 1174 && lru.runs.len() < 200,
            "{} {}",
            lru.log.len(),
            lru.runs.len()
        );
    }
}
