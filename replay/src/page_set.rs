//! Sets of pages by digest, frugal enough for millions.

/// Buckets of the index. With so many their ends stay in the processor's cache.
const BUCKETS: usize = 1 << BUCKET_BITS;
const BUCKET_BITS: u32 = 12;
/// Entries that a bucket takes before it moves them to a chunk, all at once.
const FRESH: usize = 16;
/// Buckets that are fetched into the processor's cache together.
const FETCHED: usize = 32;
/// Entries of a chunk.
const CHUNK: usize = 15 * FRESH;
/// Chunks that are allocated together.
const SLAB: usize = 64;

/// Pages that never go: those of a store without limit.
///
/// Pages are written in the order of their sequences and looked for in that order. So a log keeps
/// them as they came, and once one is found those behind it are mostly the next of the log. An index
/// finds where to begin: buckets that are only ever appended to, and searched from end to end. Putting
/// a page in then touches no memory that is far away, as it would in a hash table of this size, and
/// searches are few: one for each stretch of pages that were written together. A page takes 10 bytes.
#[derive(Clone, Debug)]
pub(crate) struct PageSet {
    /// The low half of each digest, in the order of insertion.
    log: Vec<u32>,
    buckets: Vec<Bucket>,
    slabs: Vec<Vec<Chunk>>,
    chunks: u32,
}

/// The end of a bucket, in two lines of the processor's cache.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(128))]
struct Bucket {
    /// The latest chunk, counted from 1, and how many of its entries are in use.
    chunk: u32,
    filled: u16,
    fresh: u16,
    tags: [u16; FRESH],
    places: [u32; FRESH],
}

/// What each entry knows of its digest, and where in the log its page is.
/// So aligned that what comes at once takes two lines of the processor's cache, not four.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
struct Chunk {
    places: [u32; CHUNK],
    tags: [u16; CHUNK],
    /// The chunk of the same bucket that came before; 0 for none.
    previous: u32,
}

impl Default for PageSet {
    fn default() -> Self {
        let buckets = vec![Bucket::default(); BUCKETS];
        Self { log: Vec::new(), buckets, slabs: Vec::new(), chunks: 0 }
    }
}

impl PageSet {
    /// Puts in pages that follow each other. Those at the beginning may be there already; behind the
    /// first that is not, all are new, since a page is written after the one that it follows: unless
    /// writes fail, so that there may be gaps, and each page is looked for.
    pub(crate) fn insert_all(&mut self, digests: &[u64], may_have_gaps: bool) {
        let known = self.held(digests, |digest| digest);
        for some in digests[known..].chunks(FETCHED) {
            // Whether a bucket is full decides what is done next, so that one would be fetched after
            // the other; nothing depends on these looks, so that all are fetched at once.
            let fresh: u16 = some.iter().map(|&digest| self.buckets[bucket_of(digest)].fresh).sum();
            std::hint::black_box(fresh);
            if may_have_gaps {
                for digest in some {
                    if self.find(*digest).is_none() {
                        self.insert(std::slice::from_ref(digest));
                    }
                }
            } else {
                self.insert(some);
            }
        }
    }

    /// Puts in pages that are not there.
    fn insert(&mut self, digests: &[u64]) {
        let first = self.log.len() as u32;
        self.log.extend(digests.iter().map(|&digest| digest as u32));
        for (place, &digest) in (first..).zip(digests) {
            self.add_to_index(digest, place);
        }
    }

    fn add_to_index(&mut self, digest: u64, place: u32) {
        let bucket = &mut self.buckets[bucket_of(digest)];
        let fresh = bucket.fresh as usize;
        bucket.tags[fresh] = tag(digest);
        bucket.places[fresh] = place;
        bucket.fresh += 1;
        if bucket.fresh as usize == FRESH {
            self.move_fresh(bucket_of(digest));
        }
    }

    /// How many of the pages, from the first, are in the set.
    pub(crate) fn held<T: Copy>(&self, pages: &[T], digest: impl Fn(T) -> u64) -> usize {
        let mut held = 0;
        while let Some(&page) = pages.get(held) {
            let Some(place) = self.find(digest(page)) else { break };
            let next = self.log[place + 1..].iter().zip(&pages[held + 1..]);
            held += 1 + next.take_while(|(low, page)| **low == digest(**page) as u32).count();
        }
        held
    }

    pub(crate) fn len(&self) -> u64 {
        self.log.len() as u64
    }

    /// The place in the log where the page is.
    fn find(&self, digest: u64) -> Option<usize> {
        let bucket = &self.buckets[bucket_of(digest)];
        let fresh = bucket.fresh as usize;
        let found = self.find_among(&bucket.tags[..fresh], &bucket.places, digest);
        let (mut number, mut filled) = (bucket.chunk as usize, bucket.filled as usize);
        let mut found = found;
        while found.is_none() && number > 0 {
            let chunk = &self.slabs[(number - 1) / SLAB][(number - 1) % SLAB];
            found = self.find_among(&chunk.tags[..filled], &chunk.places, digest);
            (number, filled) = (chunk.previous as usize, CHUNK);
        }
        found
    }

    fn find_among(&self, tags: &[u16], places: &[u32], digest: u64) -> Option<usize> {
        let wanted = tag(digest);
        // Without a way out in the middle many tags are compared at once; it is rarely among them.
        if !tags.iter().fold(false, |any, tag| any | (*tag == wanted)) {
            return None;
        }
        let tagged = tags.iter().zip(places).filter(|(tag, _)| **tag == wanted);
        let mut tagged = tagged.map(|(_, place)| *place as usize);
        tagged.find(|&place| self.log[place] == digest as u32)
    }

    /// Moves what a bucket has taken to its latest chunk, or to a new one.
    fn move_fresh(&mut self, bucket: usize) {
        let bucket = &mut self.buckets[bucket];
        if bucket.chunk == 0 || bucket.filled as usize == CHUNK {
            if (self.chunks as usize).is_multiple_of(SLAB) {
                self.slabs.push(Vec::with_capacity(SLAB));
            }
            let slab = self.slabs.last_mut().expect("one was just pushed if need be");
            slab.push(Chunk { previous: bucket.chunk, tags: [0; CHUNK], places: [0; CHUNK] });
            self.chunks += 1;
            (bucket.chunk, bucket.filled) = (self.chunks, 0);
        }
        let number = bucket.chunk as usize - 1;
        let chunk = &mut self.slabs[number / SLAB][number % SLAB];
        let filled = bucket.filled as usize;
        chunk.tags[filled..filled + FRESH].copy_from_slice(&bucket.tags);
        chunk.places[filled..filled + FRESH].copy_from_slice(&bucket.places);
        bucket.filled += FRESH as u16;
        bucket.fresh = 0;
    }
}

fn bucket_of(digest: u64) -> usize {
    (digest >> (64 - BUCKET_BITS)) as usize
}

/// What an entry knows of its digest: 16 bits besides those of the bucket and those in the log.
fn tag(digest: u64) -> u16 {
    (digest >> 36) as u16
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

    #[test]
    fn a_set_holds_what_was_put_into_it_and_nothing_else() {
        let run = |first: u64, pages: u64| (first..first + pages).map(spread).collect::<Vec<_>>();
        let mut set = PageSet::default();
        for first in (0..2_000_000).step_by(1_000) {
            set.insert_all(&run(first, 700), false);
            // The same once more, and what follows it.
            set.insert_all(&run(first, 800), false);
        }
        assert_eq!(set.len(), 2_000 * 800);
        for first in (0..2_000_000).step_by(77) {
            let held = set.held(&run(first, 900), |digest| digest);
            assert_eq!(held as u64, 800u64.saturating_sub(first % 1_000), "{first}");
        }
    }

    #[test]
    fn a_sequence_is_found_in_the_pieces_in_which_it_came() {
        let mut set = PageSet::default();
        for piece in [40..60, 0..10, 10..40] {
            set.insert_all(&piece.map(spread).collect::<Vec<_>>(), false);
        }
        let whole: Vec<u64> = (0..80).map(spread).collect();
        assert_eq!(set.held(&whole, |digest| digest), 60);
        assert_eq!(set.held(&whole[35..], |digest| digest), 25);
        assert_eq!(set.held(&whole[60..], |digest| digest), 0);
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
