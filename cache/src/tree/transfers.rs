//! Transfers: pages of a path on their way to a tier or to L3.

use super::digests::DigestAt;
use super::{Segment, Tree};
use crate::events::KvTier;
use crate::evict::Usage;
use crate::key::PageKey;
use crate::node::Node;
use crate::pin::Pin;
use crate::planted::{Bug, planted};
use crate::pool::Pool;
use crate::prefix::PrefixDigest;
use crate::reach::Reach;
use crate::tier::{Device, Host, Pages, Tier};

/// For so many rounds it is believed that L3 still has what it had.
const ROUNDS_BELIEVED: u32 = 2;

impl Tree {
    /// Marks pages of the pinned path that tier `T` lacks and no operation brings as arriving, from page `start_page`
    /// down, at most `pages_max`, and passes each node to `each`. Nodes that `wanted` rejects are left out.
    pub(crate) fn expect_arrival<T: Tier, U>(
        &mut self,
        pin: &Pin<U>,
        start_page: u32,
        pages_max: usize,
        wanted: impl Fn(&Usage) -> bool,
        mut each: impl FnMut(&Node),
    ) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut left = pages_max;
        for index in self.path(pin.node.index, start_page) {
            let node = &self.nodes[index as usize];
            if left == 0 {
                break;
            }
            if node.held_by::<T>() || T::of(node).arriving || !wanted(&node.usage) {
                continue;
            }
            let index = if node.len() > left { self.split(index, left) } else { index };
            let node = &mut self.nodes[index as usize];
            T::of_mut(node).arriving = true;
            left -= node.len();
            each(node);
            push_segment(&mut segments, node);
        }
        segments
    }

    /// Ends what [`Tree::expect_arrival`] began: of the pages, in its order, the first
    /// `sound_pages` arrived. Those that the tier got otherwise meanwhile, and those that did not
    /// arrive, go back to the pool, and may have to cool: a step may have begun to read them.
    pub(crate) fn settle_arrival<T: Tier, U>(
        &mut self,
        pin: &Pin<U>,
        segments: &[Segment],
        mut pages: Pages<T>,
        mut sound_pages: usize,
        pool: &mut Pool<T>,
    ) {
        if planted(Bug::PublishFailedTransfer) {
            sound_pages = usize::MAX;
        }
        let start_page = segments.first().map_or(0, |segment| segment.start_page);
        for mut index in self.path(pin.node.index, start_page) {
            if !segments.iter().any(|segment| segment.covers(&self.nodes[index as usize])) {
                continue;
            }
            self.make_way(index, pool);
            let held = self.nodes[index as usize].held_by::<T>();
            let length = self.nodes[index as usize].len();
            if !held && self.nodes[index as usize].host_unsound {
                // The copy that these pages were read from has proved unsound meanwhile.
                sound_pages = 0;
            }
            if !held && 0 < sound_pages && sound_pages < length {
                let upper = self.split(index, sound_pages);
                T::of_mut(&mut self.nodes[index as usize]).arriving = false;
                pool.cool(pages.as_vec_mut().drain(sound_pages..length));
                index = upper;
            }
            let node = &mut self.nodes[index as usize];
            T::of_mut(node).arriving = false;
            let length = node.len();
            if !held && length <= sound_pages {
                self.attach(index, &mut pages);
            } else {
                pool.cool(pages.as_vec_mut().drain(..length));
            }
            sound_pages = sound_pages.saturating_sub(length);
        }
        debug_assert!(pages.is_empty(), "an operation's pages do not fit its path");
        pool.give(pages);
    }

    /// Pages at the end of the pinned path that no other pin keeps and that are on host, or will be
    /// once the segments have arrived there.
    pub(crate) fn pages_freed_by(&self, pin: &Pin<Device>, segments: &[Segment]) -> usize {
        let path = self.path(pin.node.index, 0);
        let nodes = path.iter().rev().map(|&index| &self.nodes[index as usize]);
        let comes = |node: &Node| segments.iter().any(|segment| segment.covers(node));
        nodes
            .take_while(|node| node.device.pins == 1)
            .take_while(|node| node.has_sound_host_copy() || comes(node))
            .map(Node::len)
            .sum()
    }

    /// Marks what a backup of the pinned path should store, by what was known in a round, and passes each
    /// node to `each`.
    pub(crate) fn begin_backup(
        &mut self,
        pin: &Pin<Host>,
        round: u32,
        pages_max: usize,
        mut each: impl FnMut(&Node),
    ) -> Vec<Segment> {
        let mut segments = Vec::new();
        let mut left = pages_max;
        for index in self.path(pin.node.index, 0) {
            let node = &self.nodes[index as usize];
            if left == 0 {
                break;
            }
            let is_known = node.in_l3 && round.saturating_sub(node.l3_round) < ROUNDS_BELIEVED;
            let is_ours = node.usage.reach < Reach::L3 && !planted(Bug::WriteBeyondReach);
            if is_ours
                || is_known
                || node.backing_up
                || node.host.pages.is_empty()
                || node.host_unsound
            {
                continue;
            }
            let index = if node.len() > left { self.split(index, left) } else { index };
            let node = &mut self.nodes[index as usize];
            node.backing_up = true;
            left -= node.len();
            each(node);
            push_segment(&mut segments, node);
        }
        segments
    }

    /// The keys of the pinned path from its first page on, in pieces, and whether the segments cover
    /// them.
    pub(crate) fn keys_along(
        &self,
        pin: &Pin<Host>,
        segments: &[Segment],
    ) -> impl Iterator<Item = (&[PageKey], bool)> {
        self.path(pin.node.index, 0).into_iter().map(|index| {
            let node = &self.nodes[index as usize];
            (node.keys(), segments.iter().any(|segment| segment.covers(node)))
        })
    }

    /// Writes the digest of each page of the pinned path that the segments cover to the end of `into`, and returns
    /// the digest of the path up to the last of them, or, without segments, of all of it.
    pub(crate) fn digests_along(
        &mut self,
        pin: &Pin<Host>,
        segments: &[Segment],
        into: &mut Vec<PrefixDigest>,
    ) -> PrefixDigest {
        let mut digest = PrefixDigest::of_namespace(self.node(pin.node).namespace);
        let mut path = self.path(pin.node.index, 0);
        let is_asked = |index: &u32| {
            let node = &self.nodes[*index as usize];
            segments.iter().any(|segment| segment.covers(node))
        };
        if let Some(last) = path.iter().rposition(is_asked) {
            path.truncate(last + 1);
        }
        let first_asked = path.iter().position(is_asked).unwrap_or(path.len());
        // What lies above the last known digest need not be hashed again.
        let is_known = |index: &u32| self.digests.get(*index).is_some();
        let known = path[..first_asked].iter().rposition(is_known).unwrap_or(0);
        for index in &path[known..] {
            let (node, asked) = (&self.nodes[*index as usize], is_asked(index));
            let mut first = node.start_page;
            if let Some(known) = self.digests.get(*index).filter(|_| !asked) {
                (first, digest) = (known.page, known.digest);
            }
            for (tokens, content) in node.contents_from(first, self.page_size) {
                digest = digest.next(tokens, content);
                if asked {
                    into.push(digest);
                }
            }
            self.digests.note(*index, DigestAt { page: node.end_page(), digest });
        }
        digest
    }

    /// Ends a backup of which L3 took the first `stored_pages`.
    pub(crate) fn end_backup(
        &mut self,
        pin: &Pin<Host>,
        segments: &[Segment],
        stored_pages: usize,
    ) {
        let mut stored = stored_pages;
        for index in self.path(pin.node.index, 0) {
            let node = &mut self.nodes[index as usize];
            if segments.iter().any(|segment| segment.covers(node)) {
                node.backing_up = false;
                let length = node.len();
                if length <= stored && !node.host_unsound {
                    self.note_in_l3(index);
                }
                stored = stored.saturating_sub(length);
            }
        }
    }

    /// L3 has just shown that it has a node's pages.
    pub(super) fn note_in_l3(&mut self, index: u32) {
        let node = &mut self.nodes[index as usize];
        let is_news = !node.in_l3;
        (node.in_l3, node.l3_round) = (true, self.l3_round);
        if is_news {
            self.tell_stored(KvTier::L3, index, 0);
        }
    }

    /// Never reads the host copies of the pinned path from `start_page` on again.
    pub(crate) fn distrust_host(&mut self, pin: &Pin<Host>, start_page: u32) {
        if planted(Bug::TrustCorruptHostCopy) {
            return;
        }
        for index in self.path(pin.node.index, start_page) {
            let node = &self.nodes[index as usize];
            if node.host.pages.is_empty() || node.host_unsound {
                continue;
            }
            let trusted = start_page.saturating_sub(node.start_page) as usize;
            if trusted > 0 {
                self.split(index, trusted);
            }
            self.tell_gone::<Host>(index, 0);
            // What was stored in L3 may have been as unsound: it is to be stored again.
            if self.nodes[index as usize].in_l3 {
                self.tell_removed(KvTier::L3, index, 0);
            }
            let node = &mut self.nodes[index as usize];
            (node.host_unsound, node.in_l3) = (true, false);
            self.refresh(index);
        }
    }

    /// Drops unsound host copies along the pinned path that nothing reads.
    pub(crate) fn drop_unsound(&mut self, pin: &Pin<Device>, host: &mut Pool<Host>) {
        for index in self.path(pin.node.index, 0) {
            self.make_way(index, host);
        }
    }
}

fn push_segment(segments: &mut Vec<Segment>, node: &Node) {
    let pages = node.len() as u32;
    match segments.last_mut() {
        Some(last) if last.start_page + last.pages == node.start_page => last.pages += pages,
        _ => segments.push(Segment { start_page: node.start_page, pages }),
    }
}
