//! Room on device and host: eviction, copies of pages that would be lost, and retraction.

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{Cursor, Victim};
use terrace_fsm::Event as LifeEvent;

use super::Scheduler;
use crate::config::ms;
use crate::ids::Handle;
use crate::plan::Plan;
use crate::requests::Entry;
use crate::wait::Wait;

impl Scheduler {
    /// Frees device pages for a request. Under the write-back policy, pages that exist on device alone are copied to
    /// host first: then this returns false, and true once they are copied. A request waits for such copies once; then
    /// its pages are evicted without a copy.
    pub(super) fn make_room(&mut self, handle: Handle, pages: usize, plan: &mut Plan) -> bool {
        let copies_first = self.copies_before_eviction()
            && (!self.requests[handle].patience.for_room() || self.pages_making_room() > 0);
        if !copies_first {
            return self.cache.free_device_pages(pages);
        }
        loop {
            let free = self.cache.usage().device.free_pages;
            if free >= pages {
                return true;
            }
            let coming = self.pages_making_room();
            let victim = self.cache.device_victim().filter(|_| free + coming < pages);
            let Some(victim) = victim else {
                self.requests[handle].patience.set_for_room(coming > 0);
                return false;
            };
            if !victim.is_last_copy || !self.copy_victim(victim, plan) {
                self.cache.free_device_pages(free + victim.pages.min(pages - free));
            }
        }
    }

    /// Returns true if pages that eviction would lose are copied to host first.
    fn copies_before_eviction(&self) -> bool {
        self.cache.write_policy().writes_at_eviction() && self.config.cache.host_pages > 0
    }

    /// Starts to copy the next victim of eviction to host, as far as there is room. Returns false if nothing is
    /// copied.
    fn copy_victim(&mut self, victim: Victim, plan: &mut Plan) -> bool {
        let source = self.cache.pin_victim(victim);
        let pages = self.room_for_write_back(&source, false, usize::MAX);
        match self.start_write_back(source, None, false, pages, plan) {
            Ok(_) => true,
            Err(source) => {
                self.cache.unpin_device(source);
                false
            }
        }
    }

    /// Under the write-back policy, copies the next victims to host before decodes need their room: they cannot wait
    /// for it.
    pub(super) fn copy_ahead(&mut self, plan: &mut Plan) {
        if !self.copies_before_eviction() {
            return;
        }
        let reserve = self.batch.running().len() * self.config.batch.decode_reserve_pages as usize;
        while self.cache.usage().device.free_pages + self.pages_making_room() < reserve {
            match self.cache.device_victim() {
                Some(victim) if victim.is_last_copy && self.copy_victim(victim, plan) => {}
                Some(_) | None => return,
            }
        }
    }

    /// Frees at most `pages` host pages and returns how many are free. Queued backups are dropped for that.
    pub(super) fn make_host_room(&mut self, pages: usize) -> usize {
        let possible = self.drop_backups_for(pages);
        if possible == pages || !planted(Bug::HostRoomAllOrNothing) {
            self.cache.free_host_pages(possible);
        }
        self.cache.usage().host.free_pages.min(pages)
    }

    /// Releases the pages that other requests keep while they wait.
    pub(super) fn release_waiting_pins(&mut self, except: Handle) {
        self.skip_drains();
        while self.skip_oldest_backup() {}
        let waiting: Vec<Handle> = self
            .requests
            .iter()
            .filter(|entry| entry.handle != except && entry.holds_while_waiting())
            .map(|entry| entry.handle)
            .collect();
        for handle in waiting {
            self.transition(handle, LifeEvent::PinsYielded);
        }
    }

    // ---- retraction ----

    /// Retracts the lowest ranked requests until `handle` has its pages. It may be the lowest itself, or may sit out
    /// a step until copies have made room.
    pub(super) fn make_room_by_retraction(
        &mut self,
        handle: Handle,
        pages: usize,
        plan: &mut Plan,
    ) {
        self.skip_drains();
        let mut others_have_yielded = false;
        while !self.grow(handle, pages) {
            if self.pages_making_room() > 0 {
                self.requests[handle].stalled = true;
                self.stats.stalls += 1;
                self.wake_when_room_is_late(handle);
                return;
            }
            let computes = |h: &&Handle| self.requests[**h].life.state().computing().is_some();
            let running = self.batch.running();
            let worst = running.iter().filter(computes).max_by_key(|h| self.requests[**h].rank());
            let worst = *worst.expect("at least the one who asks computes");
            if worst == handle && !std::mem::replace(&mut others_have_yielded, true) {
                // No lower ranked request computes: waiting requests release their pages first.
                self.release_waiting_pins(handle);
                continue;
            }
            self.retract(worst, plan);
            if worst == handle {
                return;
            }
        }
    }

    /// Retracts the least urgent running requests for the most urgent queued one, if it is more urgent and there is
    /// no other place for it. Returns false if that has to wait for the end of steps in flight.
    pub(super) fn preempt(&mut self, plan: &mut Plan) -> bool {
        if !self.config.queue.preempts {
            return true;
        }
        let overdue = self.now.before(ms(self.config.queue.wait_max_ms));
        while let Some(urgent) = self.requests.queue().most_urgent() {
            let priority = self.requests[urgent].priority;
            let gives_way = |&&handle: &&Handle| {
                let Entry { priority: own, submitted_at, .. } = self.requests[handle];
                priority >= self.config.queue.priority_by_age(own, submitted_at < overdue)
            };
            let running = self.batch.running().iter().filter(gives_way);
            let worst = running.max_by_key(|&&handle| self.requests[handle].rank()).copied();
            let Some(worst) = worst.filter(|_| self.lacks_place(urgent)) else { break };
            if !self.steps.is_empty() {
                return false;
            }
            self.retract(worst, plan);
            self.batch.remove_departed(&self.requests);
        }
        true
    }

    /// Returns true if a queued request lacks only a slot or memory.
    fn lacks_place(&self, handle: Handle) -> bool {
        let entry = &self.requests[handle];
        // The retracted request may have another adapter than those that occupy the places.
        if self.adapter_wait(handle).is_some() {
            return false;
        }
        if entry.wait().until().is_some() && planted(Bug::LateRoomBlocksPreemption) {
            return false;
        }
        let seen = self.match_depths(handle);
        if seen.arriving || self.has_producer(handle, seen.host) {
            return false;
        }
        let wanted = self.new_pages(handle, seen) + self.reserved_pages();
        let available = self.cache.usage().device.available_pages() + self.pages_making_room();
        self.batch.free_slots().is_empty() || wanted > available
    }

    /// Device pages that copies in flight make evictable, and those that cool. Late copies are not counted.
    pub(super) fn pages_making_room(&self) -> usize {
        self.operations.pages_making_room() + self.cache.cooling_pages()
    }

    /// Sets a timer for the time at which the copies that make room are late.
    pub(super) fn wake_when_room_is_late(&mut self, handle: Handle) {
        if self.pages_making_room() > 0 {
            let timeout = ms(self.config.copies.write_back_timeout_ms);
            self.recheck_by(handle, self.now.after(timeout));
        }
    }

    /// Takes a request's device memory. Pages that exist on device alone are copied first, as far as the host has
    /// room; the others stay cached until their pages are needed.
    pub(super) fn retract(&mut self, handle: Handle, plan: &mut Plan) {
        self.stats.retractions += 1;
        self.abandon_operation(handle);
        if !planted(Bug::LoseSlotOnRetraction) {
            self.leave_batch(handle);
        }
        let next = self.operations.next_id();
        let entry = &self.requests[handle];
        let computing = entry.life.state().computing().expect("only who computes is retracted");
        // The kept pages must not be evicted for the other ones. A request that takes no hits has no use for them,
        // and they would be in its way.
        let takes_hits = entry.takes_hits();
        let kept = match takes_hits {
            true => self.cache.pin_host_along(&computing.path),
            false => self.cache.pin_host(entry.sequence.root(), Cursor::START),
        };
        let source = takes_hits.then(|| self.cache.pin_again(&computing.path));
        let pages =
            source.as_ref().map_or(0, |source| self.room_for_write_back(source, false, usize::MAX));
        if let Some(source) = source {
            self.cache.unpin_device(source);
        }
        let write_back = (pages > 0).then_some(next);
        let output = self.transition(handle, LifeEvent::Retracted { kept, write_back });
        if pages > 0
            && let Err(path) =
                self.start_write_back(output.into_path(), Some(handle), false, pages, plan)
        {
            unreachable!("the host had room for the pages of {path:?}");
        }
        // Pages that it loses before it runs again may be in L3.
        self.release_fetched(handle);
        self.requests[handle].reset_lookups();
        self.requests.wait(handle, Wait::ADMISSION);
    }
}
