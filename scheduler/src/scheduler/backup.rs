//! Backups: queueing, starting and ending them.

use terrace_cache::HostPin;
use terrace_cache::planted::{Bug, planted};
use terrace_fsm::OpId;

use super::Scheduler;
use crate::backups::{BACKUP_FAILURES_MAX, PendingBackup};
use crate::operations::{Operation, Work};
use crate::plan::{L3Kind, L3Op, Plan};

/// Maximum number of queued backups that are passed over in the search for room.
const BACKUPS_SPARED_MAX: usize = 16;

impl Scheduler {
    pub(super) fn backs_up(&self) -> bool {
        self.config.l3.as_ref().is_some_and(|l3| l3.backup)
    }

    /// Queues a path whose host pages are to be stored. The oldest backups are dropped if there are too many.
    pub(super) fn queue_backup(&mut self, path: HostPin) {
        if planted(Bug::ForgetBackup) {
            self.cache.unpin_host(path);
            return;
        }
        for _ in 0..self.backups.advance_rounds(self.now) {
            self.cache.begin_l3_round();
        }
        let round = self.cache.l3_round();
        self.queue_backup_again(PendingBackup { path, round, failures: 0 });
    }

    fn queue_backup_again(&mut self, backup: PendingBackup) {
        self.backups.push(backup);
        while self.backups.is_over_limit() {
            self.skip_oldest_backup();
        }
    }

    /// Drops the oldest queued backup. Returns false if there is none.
    pub(super) fn skip_oldest_backup(&mut self) -> bool {
        self.skip_backup(0)
    }

    fn skip_backup(&mut self, place: usize) -> bool {
        let Some(backup) = self.backups.remove(place) else { return false };
        self.cache.unpin_host(backup.path);
        self.stats.backups_skipped += 1;
        true
    }

    /// Drops queued backups, oldest first, until this number of host pages is available, and returns how many are. A
    /// backup that pins no page of its own would make no room and stays.
    pub(super) fn drop_backups_for(&mut self, pages: usize) -> usize {
        let mut spared = 0;
        loop {
            let available = self.cache.usage().host.available_pages();
            let goes_on = available < pages && spared < BACKUPS_SPARED_MAX;
            let next = self.backups.path(spared).filter(|_| goes_on);
            let Some(path) = next else { return available.min(pages) };
            match self.cache.pages_kept_by(path) {
                0 => spared += 1,
                _ => _ = self.skip_backup(spared),
            }
        }
    }

    /// Starts backups of host pages that L3 is not known to have. Their path stays pinned until the outcome.
    pub(super) fn plan_backups(&mut self, plan: &mut Plan) {
        let share = self.config.l3.as_ref().map_or(0, |l3| l3.backup_pages_max);
        let share = share.min(self.config.most_of_host());
        while self.backups.may_start(self.now) {
            let in_share = share.saturating_sub(self.operations.counts().backups.in_flight_pages);
            if in_share == 0 {
                return;
            }
            let Some(backup) = self.backups.pop() else { return };
            let PendingBackup { path: source, round, failures } = backup;
            let first_key = plan.l3_keys.len() as u32;
            let first_page = plan.l3_host_pages.len() as u32;
            let arrival = self.cache.begin_backup(
                &source,
                round,
                in_share as usize,
                &mut plan.l3_keys,
                &mut plan.l3_host_pages,
            );
            let pages = arrival.pages() as u32;
            if pages == 0 {
                self.cache.unpin_host(source);
                continue;
            }
            let source = match planted(Bug::UnpinDuringBackup) {
                true => self.cache.let_go(source),
                false => source,
            };
            let may_have_more = pages == in_share;
            let work = Work::Backup { source, arrival, round, may_have_more, failures };
            let op = self.operations.start(work, None, pages, self.now);
            plan.l3.push(L3Op {
                op,
                kind: L3Kind::Backup,
                keys: first_key..first_key + pages,
                pages: first_page..first_page + pages,
            });
        }
    }

    /// Distrusts the host page that a backup in flight has found corrupt.
    pub(super) fn distrust_source(&mut self, op: OpId) {
        let Some(operation) = self.operations.get(op) else { return };
        if let Work::Backup { source, arrival, .. } = &operation.work
            && operation.corrupt
            && let Some(page) = arrival.page_at(operation.sound_pages)
        {
            self.cache.distrust_host(source, page);
        }
    }

    pub(super) fn backup_ended(&mut self, operation: Operation) {
        let Operation { work, pages, sound_pages, is_stale, .. } = operation;
        let Operation { failed, corrupt, called_off, .. } = operation;
        let Work::Backup { source, arrival, round, may_have_more, failures } = work else {
            unreachable!("a backup")
        };
        let stored = sound_pages as usize;
        if let Some(reads) = &mut self.l3_reads {
            let pieces = self.cache.keys_along(&source, &arrival).filter(|(_, is_ours)| *is_ours);
            let keys = pieces.flat_map(|(keys, _)| keys).take(stored);
            keys.for_each(|&key| reads.note_present(key));
        }
        self.cache.end_backup(&source, &arrival, stored);
        self.cache.tidy(&source);
        if corrupt && let Some(page) = arrival.page_at(sound_pages) {
            self.cache.distrust_host(&source, page);
        }
        self.backups.note(failed || corrupt, !called_off, self.now);
        let failures = if sound_pages < pages { failures + 1 } else { 0 };
        if is_stale {
            self.cache.retire(source);
        } else if !corrupt && (may_have_more || failures > 0) && failures < BACKUP_FAILURES_MAX {
            self.queue_backup_again(PendingBackup { path: source, round, failures });
        } else {
            self.cache.unpin_host(source);
        }
    }
}
