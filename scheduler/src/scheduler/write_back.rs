//! Write-backs: copying pages that exist on device alone to host, when their prompt is computed, when their
//! request has ended, is aborted or retracted, or before they are evicted.

use terrace_cache::DevicePin;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::{Event as LifeEvent, OpId, State, StateName};

use super::Scheduler;
use crate::config::ms;
use crate::ids::Handle;
use crate::operations::{Operation, Work};
use crate::plan::{Copy, CopyDirection, Plan};
use crate::wait::Wait;
use crate::write_backs::PendingWriteBack;

/// No page was copied: the host had no room.
struct NothingWritten;

/// Maximum number of queued pages whose copy one plan starts. A plan must be ready within a step, so a large
/// write-back is split over several.
const QUEUED_PAGES_PER_PLAN: usize = 2048;

impl Scheduler {
    // ---- what is copied without being evicted ----

    /// Takes a request that has all its tokens out of the batch and queues its write-back.
    pub(super) fn complete(&mut self, handle: Handle) {
        self.leave_batch(handle);
        self.transition(handle, LifeEvent::Completed);
        self.notices.note_completed(self.requests[handle].id);
        self.pending_write_backs.push_request(handle);
        let gives_up = ms(self.config.copies.write_back_timeout_ms);
        self.requests.wait(handle, Wait::WriteBack { until: self.now.after(gives_up) });
    }

    /// Queues the write-back of a computed prompt if the write policy says so, before that of the answer.
    pub(super) fn drain_prompt(&mut self, handle: Handle) {
        if self.cache.write_policy().writes_after_prefill() {
            self.drain_path_of(handle);
        }
    }

    /// Queues the write-back of an aborted request, as at any other end.
    pub(super) fn drain_aborted(&mut self, handle: Handle) {
        if !planted(Bug::DropWriteBacks) {
            self.drain_path_of(handle);
        }
    }

    fn drain_path_of(&mut self, handle: Handle) {
        if self.config.cache.host_pages == 0 {
            return;
        }
        let state = self.requests[handle].life.state();
        let path = state.computing().map(|computing| &computing.path);
        let Some(path) = path.or_else(|| state.draining()) else { return };
        if self.cache.unwritten_pages(path, true) > 0 {
            let path = self.cache.pin_again(path);
            self.pending_write_backs.push_path(path);
        }
    }

    /// Starts queued write-backs, as the write policy says.
    pub(super) fn plan_drains(&mut self, plan: &mut Plan) {
        let mut pages_left = QUEUED_PAGES_PER_PLAN;
        while let Some(drain) = self.pending_write_backs.first() {
            let path = match drain {
                PendingWriteBack::Path(path) => path,
                PendingWriteBack::Request(handle) => match self.requests.get(*handle) {
                    Some(entry) => entry.life.state().draining().expect("it waits here to drain"),
                    None => {
                        self.pending_write_backs.pop();
                        continue;
                    }
                },
            };
            let wanted = match self.config.cache.host_pages {
                0 => 0,
                _ if planted(Bug::DropWriteBacks) => 0,
                _ => self.cache.unwritten_pages(path, true),
            };
            let share = self.config.copies.write_back_pages_max as usize;
            let in_flight = self.operations.counts().write_backs.in_flight_pages as usize;
            let lacks_share = in_flight > 0 && in_flight + wanted.min(pages_left) > share;
            if wanted > 0 && (pages_left == 0 || lacks_share) {
                return;
            }
            let mut wanted = wanted;
            if wanted > pages_left {
                let source = self.cache.pin_again(path);
                if self.write_back_at_end(source, None, pages_left, plan).is_ok() {
                    return;
                }
                // The host has no room for the rest either.
                self.stats.write_backs_skipped_pages += (wanted - pages_left) as u64;
                wanted = 0;
            }
            pages_left -= wanted;
            match self.pending_write_backs.pop() {
                Some(PendingWriteBack::Request(handle)) => self.drain(handle, wanted, plan),
                Some(PendingWriteBack::Path(path)) if wanted == 0 => self.cache.unpin_device(path),
                Some(PendingWriteBack::Path(path)) => {
                    _ = self.write_back_at_end(path, None, wanted, plan)
                }
                None => unreachable!("it is the first"),
            }
        }
    }

    fn drain(&mut self, handle: Handle, wanted: usize, plan: &mut Plan) {
        if wanted == 0 {
            self.finish(handle);
            return;
        }
        let next = self.operations.next_id();
        let path = self.transition(handle, LifeEvent::WriteBackStarted(next)).into_path();
        match self.write_back_at_end(path, Some(handle), wanted, plan) {
            Ok(op) => assert_eq!(op, next, "the request waits for what was started"),
            Err(NothingWritten) => self.end(handle, LifeEvent::Drained),
        }
    }

    /// Ends a request without a write-back. Its pages on host may still be missing in L3.
    fn finish(&mut self, handle: Handle) {
        if let State::Draining { path } = self.requests[handle].life.state() {
            self.cache.tidy(path);
            if self.backs_up() {
                let kept = self.cache.pin_host_along(path);
                self.queue_backup(kept);
            }
        }
        self.end(handle, LifeEvent::Drained);
    }

    /// Ends a draining request. A copy that has started continues for the cache.
    pub(super) fn stop_draining(&mut self, handle: Handle) {
        match self.requests[handle].state() {
            StateName::Draining => self.skip_drain(handle),
            StateName::WritingBack => self.end(handle, LifeEvent::Drained),
            other => unreachable!("{other:?} does not drain"),
        }
    }

    /// Drops queued write-backs, so that their pages may be evicted at once. Those whose pages are pinned elsewhere
    /// would make no room, and stay.
    pub(super) fn skip_drains(&mut self) {
        for _ in 0..self.pending_write_backs.len() {
            match self.pending_write_backs.pop().expect("there were as many") {
                PendingWriteBack::Request(handle) if self.requests.get(handle).is_some() => {
                    self.skip_drain(handle);
                }
                PendingWriteBack::Request(_) => {}
                PendingWriteBack::Path(path) if self.cache.pages_kept_by(&path) == 0 => {
                    self.pending_write_backs.push_path(path);
                }
                PendingWriteBack::Path(path) => self.skip_path(path),
            }
        }
    }

    /// Drops all queued write-backs.
    pub(super) fn forget_drains(&mut self) {
        self.skip_drains();
        while let Some(drain) = self.pending_write_backs.pop() {
            match drain {
                PendingWriteBack::Path(path) => self.skip_path(path),
                PendingWriteBack::Request(_) => unreachable!("all of these were skipped"),
            }
        }
    }

    fn skip_path(&mut self, path: DevicePin) {
        self.stats.write_backs_skipped_pages += self.cache.unwritten_pages(&path, true) as u64;
        self.cache.unpin_device(path);
    }

    /// Ends a request whose pages are not copied to host.
    fn skip_drain(&mut self, handle: Handle) {
        if let State::Draining { path } = self.requests[handle].life.state() {
            let skipped = self.cache.unwritten_pages(path, true);
            self.stats.write_backs_skipped_pages += skipped as u64;
        }
        self.end(handle, LifeEvent::Drained);
    }

    // ---- any write-back ----

    /// Starts to copy the pages of a path that the write policy selects, at most `pages_max`. The pin is released if
    /// nothing is copied.
    fn write_back_at_end(
        &mut self,
        source: DevicePin,
        owner: Option<Handle>,
        pages_max: usize,
        plan: &mut Plan,
    ) -> Result<OpId, NothingWritten> {
        let pages = self.room_for_write_back(&source, true, pages_max);
        self.stats.write_backs_skipped_pages += (pages_max - pages) as u64;
        self.start_write_back(source, owner, true, pages, plan).map_err(|source| {
            self.cache.unpin_device(source);
            NothingWritten
        })
    }

    /// Makes host room for pages of a pinned path that the host lacks, at most `pages_max`, and returns how many
    /// pages have room.
    pub(super) fn room_for_write_back(
        &mut self,
        source: &DevicePin,
        at_end: bool,
        pages_max: usize,
    ) -> usize {
        let share = self.config.copies.write_back_pages_max;
        let in_flight = self.operations.counts().write_backs.in_flight_pages;
        let in_share = share.saturating_sub(in_flight) as usize;
        let unwritten = self.cache.unwritten_pages(source, at_end);
        let wanted = unwritten.min(in_share).min(pages_max);
        if wanted == 0 {
            return 0;
        }
        // Room for the rest of a path must not be made by evicting its beginning.
        let kept = self.cache.pin_host_along(source);
        let room = self.make_host_room(wanted);
        self.cache.unpin_host(kept);
        room
    }

    /// Starts to copy this number of pages of a pinned path that the host lacks, from the top. If nothing is copied,
    /// the pin is returned.
    pub(super) fn start_write_back(
        &mut self,
        source: DevicePin,
        owner: Option<Handle>,
        at_end: bool,
        pages: usize,
        plan: &mut Plan,
    ) -> Result<OpId, DevicePin> {
        if pages == 0 {
            return Err(source);
        }
        let first = plan.copy_device_pages.len() as u32;
        let arrival =
            self.cache.begin_write_back(&source, at_end, pages, &mut plan.copy_device_pages);
        let count = arrival.pages();
        if count == 0 {
            // Making room has merged nodes, and the merged node is not hit often enough.
            return Err(source);
        }
        // Pages that are not copied are not pinned for the others.
        let source = match self.cache.unwritten_pages(&source, at_end) {
            0 => source,
            _ => self.cache.shorten_pin(source, arrival.end_page()),
        };
        let room = self.cache.pages_freed_by(&source, &arrival);
        let pages = self.cache.take_host_pages(count).expect("room was made");
        plan.copy_host_pages.extend_from_slice(pages.as_slice());
        let work = Work::WriteBack { source, arrival, pages };
        let count = count as u32;
        let op = self.operations.start(work, owner, count, self.now);
        let late_at = self.now.after(ms(self.config.copies.write_back_timeout_ms));
        self.operations.makes_room(op, room, late_at);
        let pages = first..first + count;
        plan.copies.push(Copy { op, direction: CopyDirection::WriteBack, pages });
        Ok(op)
    }

    /// Publishes the pages that arrived sound on host, and queues their backup.
    pub(super) fn write_back_ended(&mut self, op: OpId, operation: Operation) {
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
                StateName::WritingBack => self.end(handle, LifeEvent::Drained),
                StateName::Retracted => {
                    let kept = self.cache.pin_host_along(&source);
                    self.transition(handle, LifeEvent::Kept(kept));
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
