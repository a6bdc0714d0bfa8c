//! Checks that pages are written to and read from only the tiers that their requests use.

use std::collections::BTreeSet;

use terrace_scheduler::{OpId, PageKey, Plan, PrefixDigest, Reach, RequestId, Token};

use super::memory::{Kv, RUBBISH};
use super::{Member, World, mix};

impl World {
    /// Allows pages that end with these words, from a position on, to be written down to a tier.
    pub(super) fn note_writable(&mut self, words: &[u64], start: usize, writes: Reach) {
        let page_size = self.page_size;
        let last_of_page =
            |&(position, _): &(usize, &u64)| (position + 1).is_multiple_of(page_size);
        for (_, &word) in words.iter().enumerate().skip(start).filter(last_of_page) {
            for (tier, writable) in
                [Reach::Device, Reach::Host, Reach::L3].iter().zip(&mut self.writable)
            {
                if writes >= *tier {
                    writable.insert(word);
                }
            }
        }
    }

    /// Checks that a request allows this page to be written to a tier; a driver that verifies its
    /// source writes no invalid page.
    pub(super) fn check_written(&mut self, kv: &Kv, tier: Reach) {
        let last = kv.first_layer()[self.page_size - 1];
        let is_sound = kv.0.iter().all(|&word| word != RUBBISH);
        if is_sound && !self.writable[tier as usize - 1].contains(&last) {
            self.overreach =
                Some(format!("a page that no request writes to {tier:?} was written there"));
        }
    }

    /// Checks that a prefetch requests the pages of its own prefix. A driver refuses other pages,
    /// so the mistake would look like a miss.
    pub(super) fn check_keys(&mut self, op: OpId, keys: &[PageKey]) {
        let prefixes = self.prefixes.get(&op).map_or(&[][..], Vec::as_slice);
        let is_other = |(key, prefix): (&PageKey, &PrefixDigest)| {
            self.l3.get(key).is_some_and(|object| object.prefix != Some(*prefix))
        };
        if keys.len() != prefixes.len() || keys.iter().zip(prefixes).any(is_other) {
            self.overreach = Some("a prefetch asks for pages of another prefix".to_owned());
        }
    }

    /// Checks that requests with limited tiers have read and written only those tiers.
    pub(super) fn check_reach(&mut self, plan: &Plan) {
        for (id, (request, sequence)) in &self.limited {
            if let Some(hits) = self.scheduler.hits(*id) {
                let forbidden = [
                    (Reach::Device, hits.device_tokens),
                    (Reach::Host, hits.host_tokens),
                    (Reach::L3, hits.l3_tokens),
                ];
                if forbidden.iter().any(|&(tier, tokens)| tier > request.reads && tokens > 0) {
                    let reads = request.reads;
                    self.overreach = Some(format!("{id} reads {reads:?} and has {hits:?}"));
                }
            }
            let has_ended = plan.ended.iter().any(|ended| ended.request == *id);
            if has_ended && request.writes == Reach::Nothing {
                let cached = self.scheduler.cached_of(sequence);
                let pages = (cached.device_pages + cached.host_pages) as usize;
                let words = self.expected[id].chunks_exact(self.page_size).take(pages);
                let is_written =
                    |page: &[u64]| self.writable[0].contains(&page[self.page_size - 1]);
                if !words.into_iter().all(is_written) {
                    self.overreach = Some(format!("{id} writes nothing, and others can have it"));
                }
            }
        }
    }

    /// Checks that each row has its request's adapter, and that the number of adapters is within
    /// its limit.
    pub(super) fn check_adapters(&mut self, plan: &Plan) {
        let prefills = plan.prefills.iter().map(|prefill| (prefill.request, prefill.adapter));
        let decodes = plan.decodes.iter().map(|decode| (decode.request, decode.adapter));
        let mut different = BTreeSet::new();
        for (request, adapter) in prefills.chain(decodes) {
            let name = self.scheduler.adapter(adapter).unwrap_or_default();
            if self.requests[&request].adapter != name {
                self.overreach = Some(format!("{request} was to compute with {name:?}"));
            }
            different.extend(Some(adapter).filter(|adapter| !adapter.is_none()));
        }
        let adapters_max = self.scheduler.config().batch.adapters_max as usize;
        if adapters_max > 0 && different.len() > adapters_max {
            self.overreach = Some(format!("{} adapters in a step", different.len()));
        }
    }

    /// Returns a violation of tier limits, if any.
    #[must_use]
    pub fn overreach(&self) -> Option<&str> {
        self.overreach.as_deref()
    }

    /// Records the pages completed by tokens whose report is delayed: when it takes effect the
    /// request may end, and its tokens are no longer available.
    pub(super) fn note_late_pages(&mut self, member: &Member, tokens: &[Token]) {
        let mut words = member.expected.clone();
        for &token in tokens {
            words.push(mix(*words.last().expect("a prompt is not empty"), token));
        }
        self.note_writable(&words, member.expected.len(), self.writes_of(member.request));
    }

    pub(super) fn writes_of(&self, request: RequestId) -> Reach {
        self.limited.get(&request).map_or(Reach::L3, |(request, _)| request.writes)
    }
}
