//! Copies between device and host: making room, retraction, load-backs and write-backs.

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{DevicePin, Victim};
use terrace_fsm::{Event as LifeEvent, Handover, OpId, State, StateName};

use crate::config::ms;
use crate::operations::{Operation, Work};
use crate::plan::{Copy, CopyDirection, Plan};
use crate::requests::{Handle, L3_ASKS_MAX};
use crate::scheduler::Scheduler;
use crate::waiting::{DelayReason, Waiting};

impl Scheduler {
    // ---- making room ----

    /// Makes so many device pages free for a request. Under the write-back policy, pages whose
    /// bytes would be lost are copied to host first: then the answer is no, and yes once they have
    /// been copied. A request waits for such copies once; then its pages are freed as they are.
    pub(crate) fn make_room(&mut self, handle: Handle, pages: usize, plan: &mut Plan) -> bool {
        let copies_first = self.copies_before_eviction()
            && (!self.requests[handle].waited_for_room || self.pages_making_room() > 0);
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
                self.requests[handle].waited_for_room = coming > 0;
                return false;
            };
            if !victim.is_last_copy || !self.copy_victim(victim, plan) {
                self.cache.free_device_pages(free + victim.pages.min(pages - free));
            }
        }
    }

    /// Whether what would be lost by eviction is copied to host first.
    fn copies_before_eviction(&self) -> bool {
        self.cache.write_policy().writes_at_eviction() && self.config.cache.host_pages > 0
    }

    /// Starts to copy to host what would be evicted next; tells whether there was room for it.
    fn copy_victim(&mut self, victim: Victim, plan: &mut Plan) -> bool {
        let source = self.cache.pin_victim(victim);
        match self.start_write_back(source, None, false, plan) {
            Ok(_) => true,
            Err(source) => {
                self.cache.unpin_device(source);
                false
            }
        }
    }

    /// Under the write-back policy, copies what would be evicted next to host before the decodes need
    /// its room: they cannot wait for it.
    pub(crate) fn copy_ahead(&mut self, plan: &mut Plan) {
        if !self.copies_before_eviction() {
            return;
        }
        let reserve = self.running.len() * self.config.batch.decode_reserve_pages as usize;
        while self.cache.usage().device.free_pages + self.pages_making_room() < reserve {
            match self.cache.device_victim() {
                Some(victim) if victim.is_last_copy && self.copy_victim(victim, plan) => {}
                Some(_) | None => return,
            }
        }
    }

    /// Makes so many host pages free; backups that wait for their turn give way.
    pub(crate) fn make_host_room(&mut self, pages: usize) -> bool {
        self.backups_make_way(pages) && self.cache.free_host_pages(pages)
    }

    /// Backups that wait for their turn give way until so many host pages can be had. Tells whether
    /// they can.
    fn backups_make_way(&mut self, pages: usize) -> bool {
        while self.cache.usage().host.available_pages() < pages {
            if !self.skip_oldest_backup() {
                return false;
            }
        }
        true
    }

    /// Those who do not compute give up what they keep on device or host, for the sake of one.
    pub(crate) fn yield_waiting_pins(&mut self, except: Handle) {
        self.skip_drains();
        while self.skip_oldest_backup() {}
        let waiting: Vec<Handle> = self
            .requests
            .iter()
            .filter(|entry| entry.handle != except)
            .filter(|entry| match entry.life.state() {
                State::Prefetching { path: pin, .. }
                | State::PrefetchDone { path: pin }
                | State::Retracted { kept: pin, .. } => pin.is_some(),
                State::Submitted { .. }
                | State::Prefilling(_)
                | State::Decoding(_)
                | State::Draining { .. }
                | State::WritingBack { .. }
                | State::Finished
                | State::Aborted
                | State::Failed(_)
                | State::Left => false,
            })
            .map(|entry| entry.handle)
            .collect();
        for handle in waiting {
            self.happen(handle, &LifeEvent::PinsYielded);
        }
    }

    // ---- retraction ----

    /// Lets the worst ranked requests give up their device memory until `handle` has its pages. It
    /// may be the worst itself, or may have to sit out a step until pages have been copied away.
    pub(crate) fn make_room_by_retraction(
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
            let worst =
                self.running.iter().filter(computes).max_by_key(|h| self.requests[**h].rank());
            let worst = *worst.expect("at least the one who asks computes");
            if worst == handle && !std::mem::replace(&mut others_have_yielded, true) {
                // Nobody worse computes: those who only wait give up what they hold first.
                self.yield_waiting_pins(handle);
                continue;
            }
            self.retract(worst, plan);
            if worst == handle {
                return;
            }
        }
    }

    /// Device pages that copies in flight will make evictable; late ones are not counted on.
    pub(crate) fn pages_making_room(&self) -> usize {
        let timeout = ms(self.config.copies.write_back_timeout_ms);
        let in_time = |operation: &Operation| self.now < operation.started.after(timeout);
        let room = |operation: &Operation| match &operation.work {
            Work::WriteBack { source, arrival, .. } => self.cache.pages_freed_by(source, arrival),
            Work::Probe { .. }
            | Work::Prefetch { .. }
            | Work::LoadBack { .. }
            | Work::Backup { .. } => 0,
        };
        let operations = self.operations.iter().map(|(_, operation)| operation);
        operations.filter(|operation| in_time(operation)).map(room).sum()
    }

    /// Makes sure that a plan is made when the copies that make room are late.
    pub(crate) fn wake_when_room_is_late(&mut self, handle: Handle) {
        if self.pages_making_room() > 0 {
            let timeout = ms(self.config.copies.write_back_timeout_ms);
            self.look_again(handle, self.now.after(timeout), DelayReason::Room);
        }
    }

    /// Takes a request's device memory. What the host has no copy of is copied first, if the host
    /// has room for all of it; else it stays cached as long as nobody needs its pages.
    pub(crate) fn retract(&mut self, handle: Handle, plan: &mut Plan) {
        self.stats.retractions += 1;
        self.abandon_operation(handle);
        if !planted(Bug::LoseSlotOnRetraction) {
            self.leave_batch(handle);
        }
        let next = self.operations.next_id();
        let entry = &self.requests[handle];
        let computing = entry.life.state().computing().expect("only who computes is retracted");
        let in_l3 = self.cache.pages_in_l3(&computing.path);
        // What is kept must not be evicted for the sake of the rest.
        let kept = Handover::of(self.cache.pin_host_along(&computing.path));
        let unwritten = self.cache.unwritten_pages(&computing.path, false);
        let in_flight = self.stats.write_backs.in_flight_pages as usize;
        let copies = unwritten > 0
            && in_flight + unwritten <= self.config.copies.write_back_pages_max as usize
            && self.backups_make_way(unwritten);
        let path = Handover::empty();
        let write_back = copies.then_some((next, &path));
        self.happen(handle, &LifeEvent::Retracted { kept, write_back });
        if copies && let Err(path) = self.start_write_back(path.take(), Some(handle), false, plan) {
            unreachable!("the host had room for what {path:?} holds");
        }
        let entry = &mut self.requests[handle];
        entry.computed_tokens = 0;
        entry.distrusts_host = false;
        // If it loses pages that L3 has before it runs again, L3 is asked for them.
        (entry.asked_from, entry.asks_left) = (Some(in_l3), L3_ASKS_MAX);
        (entry.fetched, entry.uncached_tokens) = (0..0, None);
        self.requests.wait(handle, Waiting::IN_LINE);
    }

    // ---- load-backs ----

    /// All that will be on device of a load-back is there.
    pub(crate) fn load_back_ended(&mut self, op: OpId, operation: Operation) {
        let Operation { work, owner, started, pages: count, sound_pages, corrupt, .. } = operation;
        let Work::LoadBack { source, anchor, arrival, pages } = work else {
            unreachable!("a load-back")
        };
        let start_page = arrival.start_page();
        self.cache.end_load_back(&source, &arrival, pages, sound_pages as usize);
        if corrupt {
            self.cache.distrust_host(&source, start_page + sound_pages);
        }
        if sound_pages == count && owner.is_some() {
            self.rates.observe_load_back(count, self.now.since(started));
        }
        if let Some(handle) = owner.filter(|&handle| self.waits_for(handle, op)) {
            let path = self.cache.pin_device_along(&source);
            let loaded = match planted(Bug::BelieveWholeLoadBack) {
                true => source.depth(),
                false => path.depth(),
            };
            if self.requests[handle].counts_loaded {
                self.count_loaded(handle, start_page..loaded.max(start_page));
            }
            self.happen(handle, &LifeEvent::LoadBackEnded { path: Some(Handover::of(path)) });
            self.requests.wait(handle, Waiting::COMPUTING);
            let entry = &mut self.requests[handle];
            entry.computed_tokens = loaded * self.config.cache.page_size;
            entry.distrusts_host |= sound_pages < count;
            self.start_sharing(handle);
        }
        self.cache.unpin_device(anchor);
        self.cache.unpin_host(source);
    }

    /// The request computes what its load-back has not brought in time.
    pub(crate) fn compute_instead_of_loading(&mut self, handle: Handle) {
        self.abandon_operation(handle);
        self.requests[handle].distrusts_host = true;
        self.happen(handle, &LifeEvent::LoadBackEnded { path: None });
        self.requests.wait(handle, Waiting::COMPUTING);
    }

    pub(crate) fn waits_for(&self, handle: Handle, op: OpId) -> bool {
        self.requests.get(handle).is_some_and(|entry| entry.life.state().operation() == Some(op))
    }

    // ---- write-backs ----

    /// Starts to copy what the host lacks of the pinned path: at a request's end as much as there is
    /// room for, else all or nothing. If nothing is copied, the pin comes back.
    fn start_write_back(
        &mut self,
        source: DevicePin,
        owner: Option<Handle>,
        at_end: bool,
        plan: &mut Plan,
    ) -> Result<OpId, DevicePin> {
        let unwritten = self.cache.unwritten_pages(&source, at_end);
        // Room for the rest of a path must not be made by evicting its beginning.
        let kept = self.cache.pin_host_along(&source);
        let wanted = self.room_for_write_back(unwritten, at_end);
        self.cache.unpin_host(kept);
        if wanted == 0 {
            return Err(source);
        }
        let first = plan.copy_device_pages.len() as u32;
        let arrival =
            self.cache.begin_write_back(&source, at_end, wanted, &mut plan.copy_device_pages);
        let count = arrival.pages();
        if count == 0 {
            // Making room has merged nodes, and together they are not hit often enough.
            return Err(source);
        }
        self.stats.write_backs_skipped_pages += (unwritten - wanted) as u64;
        let pages = self.cache.take_host_pages(count).expect("room was made");
        plan.copy_host_pages.extend_from_slice(pages.as_slice());
        let work = Work::WriteBack { source, arrival, pages };
        let count = count as u32;
        let op = self.operations.start(work, owner, count, self.now, &mut self.stats);
        let pages = first..first + count;
        plan.copies.push(Copy { op, direction: CopyDirection::WriteBack, pages });
        Ok(op)
    }

    /// Makes host room for so many pages and tells for how many there is: at a request's end as many
    /// as can be, else all or none, for a part of what must make room makes none.
    fn room_for_write_back(&mut self, pages: usize, at_end: bool) -> usize {
        let share = self.config.copies.write_back_pages_max;
        let in_share = (share - self.stats.write_backs.in_flight_pages.min(share)) as usize;
        if !at_end && (in_share < pages || !self.backups_make_way(pages)) {
            return 0;
        }
        let wanted = pages.min(in_share);
        if self.make_host_room(wanted) {
            return wanted;
        }
        wanted.min(self.cache.usage().host.free_pages)
    }

    /// Copies the pages of ended requests to host, as the write policy wants.
    pub(crate) fn plan_drains(&mut self, plan: &mut Plan) {
        self.requests.prune(&mut self.drains);
        while let Some(&handle) = self.drains.front() {
            let Some(entry) = self.requests.get(handle) else {
                self.drains.pop_front();
                continue;
            };
            let State::Draining { path } = entry.life.state() else {
                unreachable!("only those who drain are in this queue")
            };
            let wanted = match self.config.cache.host_pages {
                0 => 0,
                _ if planted(Bug::DropWriteBacks) => 0,
                _ => self.cache.unwritten_pages(path, true),
            };
            let share = self.config.copies.write_back_pages_max as usize;
            let in_flight = self.stats.write_backs.in_flight_pages as usize;
            if wanted > 0 && in_flight > 0 && in_flight + wanted > share {
                return;
            }
            self.drains.pop_front();
            self.drain(handle, wanted, plan);
        }
    }

    fn drain(&mut self, handle: Handle, wanted: usize, plan: &mut Plan) {
        if wanted == 0 {
            self.finish(handle);
            return;
        }
        if self.cache.usage().host.available_pages() == 0 && self.backups.is_empty() {
            self.skip_drain(handle);
            return;
        }
        let path = Handover::empty();
        let next = self.operations.next_id();
        self.happen(handle, &LifeEvent::WriteBackStarted(next, &path));
        match self.start_write_back(path.take(), Some(handle), true, plan) {
            Ok(op) => assert_eq!(op, next, "the request waits for what was started"),
            Err(path) => {
                self.stats.write_backs_skipped_pages += wanted as u64;
                self.cache.unpin_device(path);
                self.end(handle, &LifeEvent::Drained);
            }
        }
    }

    /// Lets a drained request end; what is on host of it already may still be missing in L3.
    fn finish(&mut self, handle: Handle) {
        if self.backs_up()
            && let State::Draining { path } = self.requests[handle].life.state()
        {
            let kept = self.cache.pin_host_along(path);
            self.queue_backup(kept);
        }
        self.end(handle, &LifeEvent::Drained);
    }

    /// Drains that wait for their turn give way: their pages may be evicted at once.
    fn skip_drains(&mut self) {
        while let Some(handle) = self.drains.pop_front() {
            if self.requests.get(handle).is_some() {
                self.skip_drain(handle);
            }
        }
    }

    /// The request ends, and its copy goes on for the cache's sake if it has begun.
    pub(crate) fn stop_draining(&mut self, handle: Handle) {
        match self.requests[handle].state() {
            StateName::Draining => self.skip_drain(handle),
            StateName::WritingBack => self.end(handle, &LifeEvent::Drained),
            other => unreachable!("{other:?} does not drain"),
        }
    }

    /// Lets a request end whose pages have not been copied to host.
    fn skip_drain(&mut self, handle: Handle) {
        if let State::Draining { path } = self.requests[handle].life.state() {
            let skipped = self.cache.unwritten_pages(path, true);
            self.stats.write_backs_skipped_pages += skipped as u64;
        }
        self.end(handle, &LifeEvent::Drained);
    }

    /// What arrived sound on host is published, and queued for L3.
    pub(crate) fn write_back_ended(&mut self, op: OpId, operation: Operation) {
        let Operation { work, owner, sound_pages, .. } = operation;
        let Work::WriteBack { source, arrival, pages } = work else { unreachable!("a write-back") };
        self.cache.end_write_back(&source, &arrival, pages, sound_pages as usize);
        if sound_pages > 0 && self.backs_up() {
            let stored = self.cache.pin_host_along(&source);
            self.queue_backup(stored);
        }
        if let Some(handle) = owner.filter(|&handle| self.waits_for(handle, op)) {
            match self.requests[handle].state() {
                StateName::WritingBack => self.end(handle, &LifeEvent::Drained),
                StateName::Retracted => {
                    let kept = self.cache.pin_host_along(&source);
                    self.happen(handle, &LifeEvent::Kept(Handover::of(kept)));
                }
                other => unreachable!("{other:?} waits for no write-back"),
            }
        }
        self.cache.unpin_device(source);
    }
}
