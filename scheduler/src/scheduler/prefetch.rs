//! Prefetches: pages of a request are copied from L3 to host, within a share of the host.

use terrace_cache::HostPin;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, OpId, State, StateName, Time};

use super::Scheduler;
use crate::config::{L3Config, PrefetchPolicy, ms};
use crate::ids::Handle;
use crate::l3_reads::L3Reads;
use crate::operations::{Anchor, Operation, Work};
use crate::plan::{L3Kind, L3Op, Plan};
use crate::requests::Entry;
use crate::wait::{Found, Wait};

/// Decision about a prefetch.
enum Decision {
    /// The prefetch is not worth it: the request continues without.
    Skip,
    /// The share has no room yet.
    Wait,
    /// The cache has lost pages that the last probe did not cover.
    AskAgain,
    /// Prefetch this number of pages, behind the cached ones.
    Go { pages: u32 },
}

/// A prefetch starts when the share has room for all of it, or for this fraction of the share. A large hit is
/// prefetched in pieces, and neither waits for the whole share nor blocks smaller ones.
const PIECE_OF_SHARE: u32 = 8;

impl Scheduler {
    /// Queues the prefetch of a hit.
    pub(super) fn queue_prefetch(&mut self, handle: Handle, found: Found) {
        let (Some(config), Some(reads)) = (&self.config.l3, &mut self.l3_reads) else { return };
        reads.queue_prefetch(handle);
        self.requests[handle].l3.set_found(Some(found));
        let waiting = match config.prefetch {
            // The request runs as soon as there is room, with or without the prefetch.
            PrefetchPolicy::BestEffort => Wait::ADMISSION,
            PrefetchPolicy::Wait { .. } | PrefetchPolicy::Deadline { .. } => {
                Wait::PrefetchQueued { until: self.prefetch_deadline(config, found.pages) }
            }
        };
        self.requests.wait(handle, waiting);
    }

    /// Returns true if a request is queued for admission while its late prefetch continues.
    pub(super) fn fetches_in_line(&self, handle: Handle) -> bool {
        let is_best_effort =
            self.config.l3.as_ref().is_some_and(|l3| l3.prefetch == PrefetchPolicy::BestEffort);
        is_best_effort && self.requests[handle].state() == StateName::Prefetching
    }

    /// Starts queued prefetches of pages that the cache still lacks. The cache is matched again. Requests that are
    /// queued for admission meanwhile keep their turn until they run.
    pub(super) fn plan_prefetches(&mut self, plan: &mut Plan) {
        while let Some(handle) = self.l3_reads.as_ref().and_then(L3Reads::next_prefetch) {
            let found = self.requests.get(handle).and_then(Entry::awaits_fetch);
            let decided = found.map(|found| (found, self.decide_prefetch(handle, found)));
            if matches!(decided, Some((_, Decision::Wait))) {
                return;
            }
            if let Some(reads) = &mut self.l3_reads {
                reads.pop_prefetch();
            }
            match decided {
                Some((found, Decision::Go { pages })) => {
                    let has_room = self.start_prefetch(handle, found, pages, plan);
                    if !has_room {
                        return;
                    }
                }
                Some((_, Decision::AskAgain)) => {
                    self.requests[handle].l3.set_found(None);
                    self.probe_again(handle);
                }
                Some((_, Decision::Skip | Decision::Wait)) => self.go_on_without_fetch(handle),
                None => {}
            }
        }
    }

    fn decide_prefetch(&mut self, handle: Handle, found: Found) -> Decision {
        let Some(config) = &self.config.l3 else { return Decision::Skip };
        let entry = &self.requests[handle];
        let start_page = self.cache.depths(&entry.sequence, found.end_page()).host;
        if start_page < found.start_page {
            return match entry.state() {
                StateName::Submitted | StateName::Retracted => Decision::AskAgain,
                StateName::Prefetching
                | StateName::PrefetchDone
                | StateName::Prefilling
                | StateName::Decoding
                | StateName::Draining
                | StateName::WritingBack
                | StateName::Finished
                | StateName::Aborted
                | StateName::Failed => Decision::Skip,
            };
        }
        let pages = found.end_page() - start_page;
        if pages < config.prefetch_threshold_pages || planted(Bug::NeverPrefetch) {
            return Decision::Skip;
        }
        if !self.rates.prefetch_pays(pages, pages * self.config.cache.page_size) {
            self.stats.prefetches_priced_out += 1;
            self.rates.decay_prefetch_estimate();
            return Decision::Skip;
        }
        // The request may be probed for again before it is admitted.
        if !self.prefetches_may_begin() || self.has_producer(handle, start_page) {
            self.requests[handle].l3.forget_probe();
            return Decision::Skip;
        }
        let Some(reads) = &self.l3_reads else { return Decision::Skip };
        let share = self.prefetch_share(config);
        let in_use = self.operations.counts().prefetches.in_flight_pages + reads.held_pages();
        let in_share = share.saturating_sub(in_use);
        let piece_min = match planted(Bug::WaitForWholeShare) {
            true => share,
            false => (share / PIECE_OF_SHARE).max(config.prefetch_threshold_pages),
        };
        if in_share < pages.min(piece_min) {
            return Decision::Wait;
        }
        Decision::Go { pages: pages.min(in_share) }
    }

    /// End of a request's wait for a prefetch of this size.
    fn prefetch_deadline(&self, config: &L3Config, pages: u32) -> Time {
        match config.prefetch {
            PrefetchPolicy::BestEffort => self.now.after(self.rates.prefetch_time(pages)),
            PrefetchPolicy::Wait { max_ms } => self.now.after(ms(max_ms)),
            PrefetchPolicy::Deadline { base_ms, per_page_us } => {
                let per_page = std::time::Duration::from_micros(per_page_us);
                self.now.after(ms(base_ms)).after(per_page.saturating_mul(pages))
            }
        }
    }

    /// Returns true if L3 is not in back-off and does not hold too many pages that no request waits for.
    pub(super) fn prefetches_may_begin(&self) -> bool {
        let (Some(config), Some(reads)) = (&self.config.l3, &self.l3_reads) else { return false };
        let half_of_share = (self.prefetch_share(config) / 2).max(1);
        let quarantine_max = config.quarantine_pages_max.min(half_of_share);
        reads.may_prefetch(self.now)
            && self.operations.counts().prefetches.quarantined_pages < quarantine_max
    }

    /// Maximum number of host pages that prefetches hold.
    fn prefetch_share(&self, config: &L3Config) -> u32 {
        let most_of_host = self.config.most_of_host().max(config.prefetch_threshold_pages);
        config.prefetch_pages_max.min(most_of_host)
    }

    /// Starts to prefetch at most `pages` of a hit; the rest follows in pieces. Returns false if the host has no
    /// room: the request stays the first in the queue.
    fn start_prefetch(&mut self, handle: Handle, told: Found, pages: u32, plan: &mut Plan) -> bool {
        let Some(config) = &self.config.l3 else { return true };
        let threshold = config.prefetch_threshold_pages;
        let entry = &self.requests[handle];
        let namespace = entry.sequence.root();
        let found = self.cache.lookup(&entry.sequence, self.cacheable_pages(handle));
        // Pins first: making room must not evict the path before the pages.
        let anchor = self.cache.pin_host(namespace, found.host);
        let start_page = anchor.depth();
        let wanted = match planted(Bug::FetchFewPages) {
            true => threshold,
            false => pages.min(told.end_page().saturating_sub(start_page)),
        };
        let pages = self.make_host_room(wanted as usize) as u32;
        if pages < threshold {
            self.cache.unpin_host(anchor);
            if let Some(reads) = &mut self.l3_reads {
                reads.queue_prefetch_first(handle);
            }
            return false;
        }
        let rest = Found {
            start_page: start_page + pages,
            pages: told.end_page().saturating_sub(start_page + pages),
        };
        let comes_in_pieces = rest.pages >= threshold && !planted(Bug::FetchOnePiece);
        self.requests[handle].l3.set_found(comes_in_pieces.then_some(rest));
        let path = self.cache.pin_again(&anchor);
        let destination = self.cache.take_host_pages(pages as usize).expect("room was made");
        let run = self.requests[handle].sequence.run(start_page, start_page + pages).keep();
        let first_key = plan.l3_keys.len() as u32;
        let first_page = plan.l3_host_pages.len() as u32;
        let asked_from = match start_page {
            _ if planted(Bug::FetchFromPageZero) => 0,
            _ if planted(Bug::UseKeysOfTheProbe) => told.start_page,
            start_page => start_page,
        };
        let asked = self.requests[handle].sequence.run(asked_from, asked_from + pages);
        asked.keys().append_to(&mut plan.l3_keys);
        plan.l3_host_pages.extend_from_slice(destination.as_slice());
        let anchor = Anchor::Pinned(anchor);
        let priority = self.requests[handle].priority;
        let work = Work::Prefetch { anchor, pages: destination, run, priority };
        let op = self.operations.start(work, Some(handle), pages, self.now);
        plan.l3.push(L3Op {
            op,
            kind: L3Kind::Prefetch,
            keys: first_key..first_key + pages,
            pages: first_page..first_page + pages,
        });
        self.transition(handle, LifeEvent::PrefetchStarted { op, start_page, path });
        self.announce(handle, start_page);
        let waiting = match planted(Bug::CallOffBestEffort) && self.fetches_in_line(handle) {
            true => Wait::ADMISSION,
            false => Wait::Prefetch { until: self.fetch_deadline(pages) },
        };
        self.requests.wait(handle, waiting);
        true
    }

    fn fetch_deadline(&self, pages: u32) -> Time {
        self.config.l3.as_ref().map_or(self.now, |config| self.prefetch_deadline(config, pages))
    }

    // ---- pieces behind the first ----

    /// Lets a computing request wait for the next piece of its hit, once all its pages on host are loaded.
    pub(super) fn continue_prefetch(&mut self, handle: Handle) {
        let entry = &self.requests[handle];
        let (Some(found), State::Prefilling(computing)) = (entry.l3.found(), entry.life.state())
        else {
            return;
        };
        let page_size = self.config.cache.page_size;
        let is_between_pages = entry.computed_tokens == computing.path.depth() * page_size;
        let waits = computing.transfer.is_some() || !matches!(entry.wait(), Wait::Step { .. });
        if waits || entry.loads_more || !is_between_pages || self.steps.have(entry) {
            return;
        }
        // The next piece takes the place of the one before.
        self.release_fetched(handle);
        if let Some(reads) = &mut self.l3_reads {
            reads.queue_prefetch_first(handle);
        }
        self.requests
            .wait(handle, Wait::PrefetchQueued { until: self.fetch_deadline(found.pages) });
    }

    /// Ends the wait for a share of the prefetches.
    pub(super) fn end_prefetch_wait(&mut self, handle: Handle) {
        let computes = self.requests[handle].life.state().computing().is_some();
        if computes || planted(Bug::ForgetHitsAtTimeout) {
            self.go_on_without_fetch(handle);
        } else {
            // The share may have room before the admission.
            self.requests.wait(handle, Wait::ADMISSION);
        }
    }

    /// Lets the request compute the pages that are not prefetched.
    fn go_on_without_fetch(&mut self, handle: Handle) {
        self.forget_found(handle);
        let waiting = match self.requests[handle].life.state().computing() {
            Some(_) => Wait::STEP,
            None => Wait::ADMISSION,
        };
        self.requests.wait(handle, waiting);
    }

    /// Gives up the pages that are not prefetched.
    pub(super) fn forget_found(&mut self, handle: Handle) {
        if let Some(found) = self.requests[handle].l3.take_found() {
            self.stats.prefetch_shortened_pages += u64::from(found.pages);
        }
    }

    /// Inserts the sound pages of a prefetch that has ended into the tree, even if no request waits for them.
    pub(super) fn prefetch_ended(&mut self, op: OpId, operation: Operation) {
        let is_telling = operation.is_telling();
        let Operation { work, owner, started, sound_pages, is_stale, .. } = operation;
        let Operation { failed, corrupt, called_off, .. } = operation;
        let Work::Prefetch { anchor, mut pages, run, priority } = work else {
            unreachable!("a prefetch")
        };
        let keys = run.keys();
        let believed = planted(Bug::BelieveWholePrefetch);
        let sound = if believed { keys.len() } else { sound_pages as usize };
        if let Some(reads) = &mut self.l3_reads {
            reads.note_prefetch(failed || corrupt, is_telling, self.now);
            keys.iter().take(sound).for_each(|key| reads.note_present(key));
            if let Some(undelivered) = keys.get(sound).filter(|_| !called_off) {
                reads.note_missing(undelivered, self.now);
            }
        }
        let measured = (sound > 0 && owner.is_some()).then_some(sound_pages);
        self.rates.prefetch_ended(started, self.now, measured);
        self.cache.give_host_pages(pages.split_off(sound));
        let Some(mut anchor) = self.regain(anchor) else {
            // No request waited, and the path before these pages is evicted.
            self.cache.give_host_pages(pages);
            return;
        };
        let start_page = anchor.depth();
        self.cache.publish_from_l3(&mut anchor, run.run(start_page, sound), pages, priority);
        match owner.filter(|&handle| self.waits_for(handle, op)) {
            Some(handle) => {
                let entry = &mut self.requests[handle];
                let end_page = start_page + sound_pages;
                entry.l3.note_fetched(start_page..end_page);
                entry.uncached_tokens = None;
                if sound < keys.len() {
                    entry.l3.set_found(None);
                    if !called_off {
                        entry.l3.note_missing(end_page);
                    }
                }
                if let Some(reads) = &mut self.l3_reads {
                    reads.hold_pages(sound_pages);
                    if entry.l3.found().is_some() {
                        reads.queue_prefetch_first(handle);
                    }
                }
                let path = Some(anchor);
                self.transition(handle, LifeEvent::PrefetchEnded { path });
                self.prefetch_settled(handle);
            }
            None if is_stale => self.cache.retire(anchor),
            None => self.cache.unpin_host(anchor),
        }
    }

    /// Pin of the path before a prefetch's pages, if it is still cached.
    fn regain(&mut self, anchor: Anchor) -> Option<HostPin> {
        match anchor {
            Anchor::Pinned(pin) => Some(pin),
            Anchor::Remembered(prefix) => {
                let pages = prefix.keys().len() as u32;
                let found = self.cache.lookup(&prefix, pages).host;
                (found.depth == pages).then(|| self.cache.pin_host(prefix.root(), found))
            }
        }
    }

    /// Releases the path before the pages of a prefetch that no request waits for. Its destination stays.
    pub(super) fn loosen_anchor(&mut self, handle: Handle, op: OpId) {
        let sequence = &self.requests[handle].sequence;
        let Some(anchor) = self.operations.anchor(op) else { return };
        if let Anchor::Pinned(pin) = anchor {
            let prefix = sequence.prefix(pin.depth());
            let loose = std::mem::replace(anchor, Anchor::Remembered(Box::new(prefix)));
            if let Anchor::Pinned(pin) = loose {
                self.cache.unpin_host(pin);
            }
        }
    }

    /// Ends the wait for a prefetch: the request is queued for admission, or loads the pages.
    pub(super) fn prefetch_settled(&mut self, handle: Handle) {
        if self.requests[handle].life.state().computing().is_some() {
            self.requests[handle].loads_more = true;
            self.requests.wait(handle, Wait::STEP);
            self.start_sharing(handle);
        } else {
            self.stop_sharing(handle);
            if !planted(Bug::WaitOutDeadlines) {
                self.requests.wait(handle, Wait::ADMISSION);
            }
        }
    }

    /// Releases the request's part of the share when it is admitted or loads its pages, unless there is more to
    /// prefetch: requests that wait for its slot would use that part only after it.
    pub(super) fn release_share(&mut self, handle: Handle) {
        if self.requests[handle].l3.found().is_none() {
            self.release_fetched(handle);
        }
    }

    /// Stops counting the prefetched pages of a request.
    pub(super) fn release_fetched(&mut self, handle: Handle) {
        let held_pages = self.requests[handle].l3.release_held();
        if let Some(reads) = &mut self.l3_reads {
            reads.release_pages(held_pages);
        }
    }
}

impl Entry {
    /// Hit in L3, if its prefetch may start.
    fn awaits_fetch(&self) -> Option<Found> {
        let is_free = self.life.state().operation().is_none();
        let waits = match self.wait() {
            Wait::PrefetchQueued { .. } | Wait::Admission { .. } | Wait::Deferred { .. } => true,
            Wait::ProbeQueued
            | Wait::Probe { .. }
            | Wait::Prefetch { .. }
            | Wait::LoadBack { .. }
            | Wait::Step { .. }
            | Wait::WriteBack { .. } => false,
        };
        self.l3.found().filter(|_| is_free && waits)
    }
}
