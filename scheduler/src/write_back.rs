//! Write-backs: pages that exist on device alone are copied to host, when their request has ended, when
//! it is retracted, or before they are evicted.

use std::collections::VecDeque;

use terrace_cache::DevicePin;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, Handover, OpId, State, StateName};

use crate::config::ms;
use crate::operations::{Operation, Work};
use crate::plan::{Copy, CopyDirection, Plan};
use crate::requests::{Handle, Requests};
use crate::scheduler::Scheduler;
use crate::waiting::Waiting;

/// Requests that have all their tokens, and whose pages may be copied to host.
#[derive(Debug, Default)]
pub(crate) struct Drains {
    /// Those whose copy has not begun, by their end; some may be gone.
    waiting: VecDeque<Handle>,
    /// How many there are, with those whose copy is under way.
    draining: u32,
}

impl Drains {
    fn prune(&mut self, requests: &Requests) {
        requests.prune(&mut self.waiting);
    }

    /// One of them has ended.
    pub(crate) fn one_ended(&mut self) {
        self.draining -= 1;
    }

    pub(crate) fn nobody_waits(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn draining(&self) -> u32 {
        self.draining
    }
}

impl Scheduler {
    // ---- at a request's end ----

    /// The request has all its tokens.
    pub(crate) fn complete(&mut self, handle: Handle) {
        self.leave_batch(handle);
        self.happen(handle, &LifeEvent::Completed);
        self.news.completed(self.requests[handle].id);
        self.drains.draining += 1;
        self.drains.waiting.push_back(handle);
        let gives_up = ms(self.config.copies.write_back_timeout_ms);
        self.requests.wait(handle, Waiting::Draining { until: self.now.after(gives_up) });
    }

    /// Copies the pages of ended requests to host, as the write policy wants.
    pub(crate) fn plan_drains(&mut self, plan: &mut Plan) {
        self.drains.prune(&self.requests);
        while let Some(&handle) = self.drains.waiting.front() {
            let Some(entry) = self.requests.get(handle) else {
                self.drains.waiting.pop_front();
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
            let in_flight = self.operations.counts().write_backs.in_flight_pages as usize;
            if wanted > 0 && in_flight > 0 && in_flight + wanted > share {
                return;
            }
            self.drains.waiting.pop_front();
            self.drain(handle, wanted, plan);
        }
    }

    fn drain(&mut self, handle: Handle, wanted: usize, plan: &mut Plan) {
        if wanted == 0 {
            self.finish(handle);
            return;
        }
        if self.cache.usage().host.available_pages() == 0 && self.backups.len() == 0 {
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
        if let State::Draining { path } = self.requests[handle].life.state() {
            self.cache.tidy(path);
            if self.backs_up() {
                let kept = self.cache.pin_host_along(path);
                self.queue_backup(kept);
            }
        }
        self.end(handle, &LifeEvent::Drained);
    }

    /// The request ends, and its copy goes on for the cache's sake if it has begun.
    pub(crate) fn stop_draining(&mut self, handle: Handle) {
        match self.requests[handle].state() {
            StateName::Draining => self.skip_drain(handle),
            StateName::WritingBack => self.end(handle, &LifeEvent::Drained),
            other => unreachable!("{other:?} does not drain"),
        }
    }

    /// Drains that wait for their turn give way: their pages may be evicted at once.
    pub(crate) fn skip_drains(&mut self) {
        while let Some(handle) = self.drains.waiting.pop_front() {
            if self.requests.get(handle).is_some() {
                self.skip_drain(handle);
            }
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

    // ---- any write-back ----

    /// Starts to copy what the host lacks of the pinned path: at a request's end as much as there is
    /// room for, else all or nothing. If nothing is copied, the pin comes back.
    pub(crate) fn start_write_back(
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
        let op = self.operations.start(work, owner, count, self.now);
        let pages = first..first + count;
        plan.copies.push(Copy { op, direction: CopyDirection::WriteBack, pages });
        Ok(op)
    }

    /// Makes host room for so many pages and tells for how many there is: at a request's end as many
    /// as can be, else all or none, for a part of what must make room makes none.
    fn room_for_write_back(&mut self, pages: usize, at_end: bool) -> usize {
        let share = self.config.copies.write_back_pages_max;
        let in_share =
            (share - self.operations.counts().write_backs.in_flight_pages.min(share)) as usize;
        if !at_end && (in_share < pages || !self.backups_make_way(pages)) {
            return 0;
        }
        let wanted = pages.min(in_share);
        if self.make_host_room(wanted) {
            return wanted;
        }
        wanted.min(self.cache.usage().host.free_pages)
    }

    /// What arrived sound on host is published, and queued for L3.
    pub(crate) fn write_back_ended(&mut self, op: OpId, operation: Operation) {
        let Operation { work, owner, sound_pages, is_stale, .. } = operation;
        let Work::WriteBack { source, arrival, pages } = work else { unreachable!("a write-back") };
        self.cache.end_write_back(&source, &arrival, pages, sound_pages as usize);
        self.cache.tidy(&source);
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
        match is_stale {
            true => self.cache.retire(source),
            false => self.cache.unpin_device(source),
        }
    }
}
