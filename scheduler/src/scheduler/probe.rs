//! Probes: L3 is asked which pages of a request it has.

use terrace_cache::Reach;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, OpId, State};

use super::Scheduler;
use crate::config::ms;
use crate::ids::Handle;
use crate::l3_reads::L3Reads;
use crate::operations::{Operation, Work};
use crate::plan::{L3Kind, L3Op, Plan};
use crate::requests::Entry;
use crate::wait::{Found, Wait};

/// Decision about a probe.
enum Decision {
    /// The probe is not worth it: the request continues without.
    Skip,
    /// Too many probes are in flight.
    Wait,
    /// Probe for these pages, behind the cached ones.
    Go { start_page: u32, pages: u32 },
}

impl Scheduler {
    /// Starts queued probes for requests with enough pages that are not cached.
    pub(super) fn plan_probes(&mut self, plan: &mut Plan) {
        if let Some(reads) = &mut self.l3_reads {
            reads.prune(&self.requests);
        }
        while let Some(handle) = self.l3_reads.as_ref().and_then(L3Reads::next_probe) {
            let waiting = self.requests.get(handle).map(Entry::wait);
            let decision = match waiting {
                Some(Wait::ProbeQueued) => Some(self.decide_probe(handle)),
                Some(_) | None => None,
            };
            if matches!(decision, Some(Decision::Wait)) {
                return;
            }
            if let Some(reads) = &mut self.l3_reads {
                reads.pop_probe();
            }
            match decision {
                Some(Decision::Go { start_page, pages }) => {
                    self.start_probe(handle, start_page, pages, plan);
                }
                Some(Decision::Skip | Decision::Wait) => {
                    self.requests.wait(handle, Wait::ADMISSION);
                }
                None => {}
            }
        }
    }

    fn decide_probe(&mut self, handle: Handle) -> Decision {
        let (Some(config), Some(reads)) = (&self.config.l3, &self.l3_reads) else {
            return Decision::Skip;
        };
        if !reads.may_probe(self.now) || !self.prefetches_may_begin() {
            return Decision::Skip;
        }
        let end = self.cacheable_pages(handle);
        if end == 0 || !self.requests[handle].may_read(Reach::L3) || planted(Bug::NeverProbe) {
            return Decision::Skip;
        }
        let sequence = &self.requests[handle].sequence;
        let start_page = self.cache.depths(sequence, end).host;
        if self.has_producer(handle, start_page) {
            // Another request produces the page. L3 is probed for later pages before the admission.
            return Decision::Skip;
        }
        let keys = sequence.run(start_page, end).keys();
        let askable = reads.askable(keys, self.now);
        let worth_it = askable >= config.prefetch_threshold_pages;
        if worth_it && self.operations.counts().probes.in_flight >= config.probes_max {
            return Decision::Wait;
        }
        self.stats.negative_hits += u64::from(end - start_page - askable);
        let lacks = (askable < end - start_page).then_some(start_page + askable);
        self.requests[handle].l3.note_probed(start_page, lacks);
        if !worth_it {
            return Decision::Skip;
        }
        Decision::Go { start_page, pages: askable }
    }

    /// Returns true if L3 may have pages that the last probe did not cover or did not find.
    fn may_have_news(&self, reads: &L3Reads, entry: &Entry, cached_pages: u32) -> bool {
        let Some(probed) = entry.l3.probed() else { return true };
        let is_stored_since = probed.lacks.is_some_and(|page| {
            let key = entry.sequence.run(page, page + 1).keys();
            reads.askable(key, self.now) > 0
        });
        cached_pages < probed.from || is_stored_since
    }

    /// Probes for a request that is about to be admitted, if there was no probe yet, if the cache has lost pages
    /// since, or if pages that L3 lacked may have been stored since. Returns true if the request waits for the probe.
    pub(super) fn probe_before_admission(
        &mut self,
        handle: Handle,
        cached_pages: u32,
        plan: &mut Plan,
    ) -> bool {
        let Some(reads) = &self.l3_reads else { return false };
        let entry = &self.requests[handle];
        let has_news = self.may_have_news(reads, entry, cached_pages);
        if !has_news || !entry.l3.may_probe() || planted(Bug::ProbeOnce) {
            return false;
        }
        let may_probe_now = match entry.life.state() {
            State::Submitted { .. } => true,
            State::Retracted { write_back, .. } => write_back.is_none(),
            State::Prefetching { .. }
            | State::PrefetchDone { .. }
            | State::Prefilling(_)
            | State::Decoding(_)
            | State::Draining { .. }
            | State::WritingBack { .. }
            | State::Finished
            | State::Aborted
            | State::Failed(_) => false,
        };
        if !may_probe_now {
            return false;
        }
        match self.decide_probe(handle) {
            Decision::Go { start_page, pages } => {
                self.start_probe(handle, start_page, pages, plan);
                true
            }
            Decision::Wait => {
                self.queue_probe(handle);
                true
            }
            Decision::Skip => false,
        }
    }

    fn queue_probe(&mut self, handle: Handle) {
        if let Some(reads) = &mut self.l3_reads {
            reads.queue_probe(handle);
            self.requests.wait(handle, Wait::ProbeQueued);
        }
    }

    fn start_probe(&mut self, handle: Handle, start_page: u32, pages: u32, plan: &mut Plan) {
        let first = plan.l3_keys.len() as u32;
        let run = self.requests[handle].sequence.run(start_page, start_page + pages);
        run.keys().append_to(&mut plan.l3_keys);
        let work = Work::Probe { start_page, first_key: run.first_key() };
        self.requests[handle].l3.start_probe();
        let op = self.operations.start(work, Some(handle), pages, self.now);
        plan.l3.push(L3Op { op, kind: L3Kind::Probe, keys: first..first + pages, pages: 0..0 });
        self.transition(handle, LifeEvent::ProbeStarted(op));
        let timeout = self.config.l3.as_ref().map_or(0, |l3| l3.probe_timeout_ms);
        let until = self.now.after(ms(timeout));
        self.requests.wait(handle, Wait::Probe { until });
    }

    pub(super) fn probe_ended(&mut self, op: OpId, operation: Operation) {
        let is_telling = operation.is_telling();
        let Work::Probe { start_page, first_key } = operation.work else { unreachable!("a probe") };
        let pages = operation.sound_pages;
        let failed = operation.failed || operation.corrupt;
        // A probe that failed or was called off says nothing about the pages behind those that it found.
        let is_short = pages < operation.pages && !operation.called_off && !failed;
        let lacked = is_short.then_some(start_page + pages);
        let owner = operation.owner.filter(|&handle| self.waits_for(handle, op));
        // Without the request only the first key is known.
        let missing = match (owner, lacked) {
            (Some(handle), Some(page)) => self.requests[handle].sequence.keys().get(page as usize),
            (Some(_), None) => None,
            (None, _) => (is_short && pages == 0).then_some(first_key),
        };
        if let Some(reads) = &mut self.l3_reads {
            reads.note_probe(failed, is_telling, self.now);
            if let Some(key) = missing {
                reads.note_missing(key, self.now);
            }
        }
        let Some(handle) = owner else { return };
        if let Some(page) = lacked {
            self.requests[handle].l3.note_missing(page);
        }
        if failed {
            // The request may be probed for again after the back-off.
            self.requests[handle].l3.forget_probe();
        }
        self.transition(handle, LifeEvent::ProbeEnded);
        let threshold = self.config.l3.as_ref().map_or(u32::MAX, |l3| l3.prefetch_threshold_pages);
        if pages >= threshold {
            self.queue_prefetch(handle, Found { start_page, pages });
        } else {
            self.requests.wait(handle, Wait::ADMISSION);
        }
    }

    /// Queues another probe, up to the limit.
    pub(super) fn probe_again(&mut self, handle: Handle) {
        if self.requests[handle].l3.may_probe() {
            self.queue_probe(handle);
        } else {
            self.requests.wait(handle, Wait::ADMISSION);
        }
    }
}
