//! A node of the tree: a run of pages, and what each tier holds of it.

use std::ops::Range;

use crate::events::Pages;
use crate::evict::Usage;
use crate::excerpt::Excerpt;
use crate::in_parts::Keys;
use crate::key::{PageKey, Token};
use crate::planted::{Bug, planted};
use crate::run::PageRun;
use crate::tier::{Device, Host, Page, Tier};

/// No node.
pub(crate) const NONE: u32 = u32::MAX;

/// Number of pages that are compared at a time.
const PAGES_COMPARED: usize = 128;

/// Pages of a node in one tier: all of them or none.
pub(crate) struct Holding<T> {
    /// One page for each page of the run, or empty.
    pub(crate) pages: Vec<Page<T>>,
    /// Pins of this tier on this node or below it.
    pub(crate) pins: u32,
    /// Children that this tier holds.
    pub(crate) children: u32,
    /// Children in this tier that are evictable.
    pub(crate) evictable_children: u32,
    /// True while an operation brings these pages into this tier.
    pub(crate) arriving: bool,
    /// True if the node's pages count as evictable: it and all below it in this tier may be evicted. Without children
    /// in this tier, the policy then has it in its order.
    pub(crate) evictable: bool,
    pub(crate) offered: bool,
}

impl<T> Default for Holding<T> {
    fn default() -> Self {
        Self {
            pages: Vec::new(),
            pins: 0,
            children: 0,
            evictable_children: 0,
            arriving: false,
            evictable: false,
            offered: false,
        }
    }
}

/// A run of pages. The root of a namespace is a run of none.
pub(crate) struct Node {
    pub(crate) generation: u32,
    pub(crate) parent: u32,
    pub(crate) first_child: u32,
    pub(crate) previous_sibling: u32,
    pub(crate) next_sibling: u32,
    /// The place of the first page in its sequences.
    pub(crate) start_page: u32,
    /// The digest of the namespace.
    pub(crate) namespace: PageKey,
    /// Key by which the tree finds it: that of its first page; for a root, that of the namespace. It is among the
    /// keys of the excerpt too, but those are far away in memory.
    pub(crate) first_key: PageKey,
    /// The keys and tokens of the pages.
    pub(crate) excerpt: Excerpt,
    pub(crate) device: Holding<Device>,
    pub(crate) host: Holding<Host>,
    pub(crate) usage: Usage,
    /// True if L3 is known to have these pages.
    pub(crate) in_l3: bool,
    /// In which round that was last learnt.
    pub(crate) l3_round: u32,
    /// True while an operation stores these pages in L3.
    pub(crate) backing_up: bool,
    /// True if the host copy is corrupt: it is never read again.
    pub(crate) host_unsound: bool,
    /// True if it may have more memory than it needs: for pages that it has lost, or that never arrived.
    pub(crate) is_untrimmed: bool,
}

impl Node {
    pub(crate) fn new(
        namespace: PageKey,
        first_key: PageKey,
        start_page: u32,
        usage: Usage,
    ) -> Self {
        Self {
            generation: 0,
            parent: NONE,
            first_child: NONE,
            previous_sibling: NONE,
            next_sibling: NONE,
            start_page,
            namespace,
            first_key,
            excerpt: Excerpt::default(),
            device: Holding::default(),
            host: Holding::default(),
            usage,
            in_l3: false,
            l3_round: 0,
            backing_up: false,
            host_unsound: false,
            is_untrimmed: false,
        }
    }

    /// Gives memory back that it does not need.
    pub(crate) fn trim(&mut self) {
        self.excerpt.trim();
        trim(&mut self.device.pages);
        trim(&mut self.host.pages);
        self.is_untrimmed = false;
    }

    pub(crate) fn len(&self) -> usize {
        self.excerpt.len()
    }

    /// Its pages from the page `from` of it on, which follows the page of key `parent`.
    pub(crate) fn pages_from(&self, from: usize, parent: PageKey, page_size: usize) -> Pages<'_> {
        let first = self.start_page + from as u32;
        let marks =
            self.excerpt.marks().map_or(&[][..], |marks| marks.within(first..self.end_page()));
        Pages {
            namespace: self.namespace,
            parent,
            keys: &self.keys()[from..],
            tokens: &self.excerpt.tokens()[from * page_size..],
            marks,
            first,
        }
    }

    pub(crate) fn keys(&self) -> &[PageKey] {
        self.excerpt.keys()
    }

    pub(crate) fn is_root(&self) -> bool {
        self.parent == NONE
    }

    /// The place after the last page.
    pub(crate) fn end_page(&self) -> u32 {
        self.start_page + self.len() as u32
    }

    /// Returns true if the tier holds this node. Every tier holds a root.
    pub(crate) fn held_by<T: Tier>(&self) -> bool {
        self.is_root() || !T::of(self).pages.is_empty()
    }

    /// The tokens of its pages from the place `first` on, and the digests of what else stands on them.
    pub(crate) fn contents_from(
        &self,
        first: u32,
        page_size: usize,
    ) -> impl Iterator<Item = (&[Token], Option<u128>)> {
        let tokens = &self.excerpt.tokens()[(first - self.start_page) as usize * page_size..];
        let marks = self.excerpt.marks();
        (first..)
            .zip(tokens.chunks_exact(page_size))
            .map(move |(place, tokens)| (tokens, marks.and_then(|marks| marks.content(place))))
    }

    /// In which round L3 was last seen to have these pages, if it was.
    pub(crate) fn seen_in_l3(&self) -> Option<u32> {
        self.in_l3.then_some(self.l3_round)
    }

    pub(crate) fn has_sound_host_copy(&self) -> bool {
        self.held_by::<Host>() && !self.host_unsound
    }

    /// Returns true if the host copy is unsound and may be replaced, because nothing reads it.
    pub(crate) fn is_unsound_and_unread(&self) -> bool {
        self.host_unsound && self.host.pins == 0
    }

    /// Returns true if a write-back would copy the node.
    pub(crate) fn wants_host_copy(&self) -> bool {
        self.usage.may_be_on_host()
            && !self.host.arriving
            && (!self.held_by::<Host>() || self.is_unsound_and_unread())
    }

    /// Returns true if the node's bytes are in the memory of this process.
    pub(crate) fn readable(&self) -> bool {
        self.held_by::<Device>() || self.has_sound_host_copy()
    }

    /// Returns true if an operation knows the node's extent: then the node may be split, but not grow.
    pub(crate) fn is_in_motion(&self) -> bool {
        self.device.arriving || self.host.arriving || self.backing_up
    }

    /// Number of pages of this run, from its first, that hold the same tokens and content.
    pub(crate) fn common_pages(&self, wanted: PageRun<'_>, page_size: usize) -> usize {
        let (ours, tokens) = (self.excerpt.tokens(), wanted.tokens());
        let mut common = common_pages(ours, tokens.prompt, page_size);
        if common * page_size == tokens.prompt.len() {
            common += common_pages(&ours[tokens.prompt.len()..], tokens.appended, page_size);
        }
        // A key has all keys before it in it: if the last is the same, so are the others.
        match common.checked_sub(1) {
            Some(last) if wanted.keys().get(last) != Some(self.keys()[last]) => {
                self.pages_of_the_same_content(wanted, common)
            }
            Some(_) | None => common,
        }
    }

    /// Number of pages of the sequence with these keys, from the first of `pages` on, that have the keys of this
    /// node.
    pub(crate) fn common_keys(&self, keys: Keys<'_>, pages: Range<u32>) -> usize {
        let is_common =
            |page: usize| keys.get(pages.start as usize + page) == Some(self.keys()[page]);
        // A key has all keys before it in it, so those in common come first; mostly all are.
        let (mut common, mut end) = (0, self.len().min(pages.len()));
        let mut middle = end;
        while common < end {
            match is_common(middle - 1) {
                true => common = middle,
                false => end = middle - 1,
            }
            middle = (common + end).div_ceil(2);
        }
        common
    }

    /// Number of these pages, whose tokens are the same, that have the same content too.
    #[cold]
    fn pages_of_the_same_content(&self, wanted: PageRun<'_>, pages: usize) -> usize {
        if planted(Bug::SkipTokenCompare) || planted(Bug::SkipContentCompare) {
            return pages;
        }
        let pairs = self.keys().iter().zip(wanted.keys().iter());
        pairs.take_while(|(ours, theirs)| *ours == theirs).count()
    }
}

/// Number of whole pages that both have in common, from the first on.
fn common_pages(ours: &[Token], theirs: &[Token], page_size: usize) -> usize {
    let pages = ours.len().min(theirs.len()) / page_size;
    if planted(Bug::SkipTokenCompare) {
        return pages;
    }
    let (ours, theirs) = (&ours[..pages * page_size], &theirs[..pages * page_size]);
    let mut common = 0;
    for (ours, theirs) in pieces(ours, theirs, PAGES_COMPARED * page_size) {
        // Mostly all are the same, and one long comparison is faster than many short ones.
        if ours != theirs {
            let pages = pieces(ours, theirs, page_size);
            return common + pages.take_while(|(ours, theirs)| ours == theirs).count();
        }
        common += ours.len() / page_size;
    }
    common
}

fn pieces<'a>(
    ours: &'a [Token],
    theirs: &'a [Token],
    length: usize,
) -> impl Iterator<Item = (&'a [Token], &'a [Token])> {
    ours.chunks(length).zip(theirs.chunks(length))
}

/// Gives memory back once less than half of it is in use.
fn trim<E>(part: &mut Vec<E>) {
    if part.capacity() > 2 * part.len() {
        part.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_common_are_counted_across_the_pieces_that_are_compared() {
        let page_size = 2;
        let ours: Vec<Token> = (0..2 * 300 + 1).collect();
        let end = (ours.len() - 1) as Token;
        for differs_at in [0, 1, 2, 255, 256, 257, 258, 511, 512, 599, end] {
            let mut theirs = ours.clone();
            theirs[differs_at as usize] ^= 1;
            let pages = differs_at as usize / page_size;
            assert_eq!(common_pages(&ours, &theirs, page_size), pages, "{differs_at}");
        }
        assert_eq!(common_pages(&ours, &ours[..520], page_size), 260);
    }
}
