//! Backups: storing in L3 what the host holds and L3 is not known to have.

use std::collections::VecDeque;
use std::time::Duration;

use terrace_cache::planted::{Bug, planted};
use terrace_cache::{Claims, HostPin};
use terrace_fsm::{OpId, Time};

use crate::config::{L3Config, ms};
use crate::operations::{Operation, Work};
use crate::plan::{L3Kind, L3Op, Plan};
use crate::scheduler::Scheduler;
use crate::store_health::Backoff;

/// Backups that wait for their turn.
#[derive(Debug)]
pub(crate) struct Backups {
    waiting: VecDeque<PendingBackup>,
    waiting_max: usize,
    backoff: Backoff,
    /// How long a round of what is known about L3 takes, if it ends at all, and when this one began.
    round: Option<Duration>,
    round_began: Time,
}

impl Backups {
    pub(crate) fn new(config: Option<&L3Config>) -> Self {
        let backoff_ms = config.map_or((0, 0), |l3| (l3.backoff_base_ms, l3.backoff_max_ms));
        Self {
            waiting: VecDeque::new(),
            waiting_max: config.map_or(0, |l3| l3.backup_queue_max as usize),
            backoff: Backoff::new(ms(backoff_ms.0), ms(backoff_ms.1)),
            round: config.map(|l3| ms(l3.doubt_after_ms)).filter(|round| !round.is_zero()),
            round_began: Time::default(),
        }
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// When one can begin that waits because others have failed.
    pub(crate) fn next_try(&self, now: Time) -> Option<Time> {
        let waits = !self.waiting.is_empty() && !self.backoff.allows(now);
        waits.then(|| self.backoff.until())
    }

    pub(crate) fn claim(&self, claims: &mut Claims) {
        self.waiting.iter().for_each(|backup| claims.host_pin(&backup.path));
    }
}

/// A path whose host pages are to be stored.
#[derive(Debug)]
struct PendingBackup {
    path: HostPin,
    /// The round of what is known about L3 in which it was queued.
    round: u32,
    /// How often in a row it was not stored in full.
    failures: u32,
}

/// A backup that fails so often in a row is given up.
const BACKUP_FAILURES_MAX: u32 = 3;
/// Backups without pages of their own that are passed over in the search for room.
const BACKUPS_SPARED_MAX: usize = 16;

impl Scheduler {
    pub(crate) fn backs_up(&self) -> bool {
        self.config.l3.as_ref().is_some_and(|l3| l3.backup)
    }

    /// Takes a path whose host pages are to be stored; the oldest give way if there are too many.
    pub(crate) fn queue_backup(&mut self, path: HostPin) {
        if planted(Bug::ForgetBackup) {
            self.cache.unpin_host(path);
            return;
        }
        self.doubt_l3();
        let round = self.cache.l3_round();
        self.queue_backup_again(PendingBackup { path, round, failures: 0 });
    }

    fn queue_backup_again(&mut self, backup: PendingBackup) {
        self.backups.waiting.push_back(backup);
        while self.backups.len() > self.backups.waiting_max {
            self.skip_oldest_backup();
        }
    }

    /// Lets a backup that waits for its turn give way, if there is one.
    pub(crate) fn skip_oldest_backup(&mut self) -> bool {
        self.skip_backup(0)
    }

    fn skip_backup(&mut self, place: usize) -> bool {
        let Some(backup) = self.backups.waiting.remove(place) else { return false };
        self.cache.unpin_host(backup.path);
        self.stats.backups_skipped += 1;
        true
    }

    /// Lets backups that wait for their turn give way, oldest first, until so many host pages can be had. One that
    /// keeps no page of its own would make no room and stays. Returns how many of the pages can be had.
    pub(crate) fn backups_make_way(&mut self, pages: usize) -> usize {
        let mut spared = 0;
        loop {
            let available = self.cache.usage().host.available_pages();
            let goes_on = available < pages && spared < BACKUPS_SPARED_MAX;
            let next = self.backups.waiting.get(spared).filter(|_| goes_on);
            let Some(backup) = next else { return available.min(pages) };
            match self.cache.pages_kept_by(&backup.path) {
                0 => spared += 1,
                _ => _ = self.skip_backup(spared),
            }
        }
    }

    /// What L3 was last seen to have too long ago is no longer known.
    fn doubt_l3(&mut self) {
        let Some(round) = self.backups.round else { return };
        // However long it has been, after two rounds nothing is known that was known before.
        for _ in 0..2 {
            if self.backups.round_began.after(round) <= self.now {
                self.backups.round_began = self.backups.round_began.after(round);
                self.cache.begin_l3_round();
            }
        }
        if self.backups.round_began.after(round) <= self.now {
            self.backups.round_began = self.now;
        }
    }

    /// Stores host pages that L3 is not known to have. Their path stays pinned until the outcome.
    pub(crate) fn plan_backups(&mut self, plan: &mut Plan) {
        let share = self.config.l3.as_ref().map_or(0, |l3| l3.backup_pages_max);
        let share = share.min(self.config.most_of_host());
        while self.backups.backoff.allows(self.now) {
            let in_share = share.saturating_sub(self.operations.counts().backups.in_flight_pages);
            if in_share == 0 {
                return;
            }
            let Some(backup) = self.backups.waiting.pop_front() else { return };
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

    /// If a backup in flight has found its source corrupt, it is the copy on host that is.
    pub(crate) fn distrust_source(&mut self, op: OpId) {
        let Some(operation) = self.operations.get(op) else { return };
        if let Work::Backup { source, arrival, .. } = &operation.work
            && operation.corrupt
            && let Some(page) = arrival.page_at(operation.sound_pages)
        {
            self.cache.distrust_host(source, page);
        }
    }

    pub(crate) fn backup_ended(&mut self, operation: Operation) {
        let Operation { work, pages, sound_pages, is_stale, .. } = operation;
        let Operation { failed, corrupt, called_off, .. } = operation;
        let Work::Backup { source, arrival, round, may_have_more, failures } = work else {
            unreachable!("a backup")
        };
        let stored = sound_pages as usize;
        if let Some(reading) = &mut self.reading {
            let pieces = self.cache.keys_along(&source, &arrival).filter(|(_, is_ours)| *is_ours);
            let keys = pieces.flat_map(|(keys, _)| keys).take(stored);
            keys.for_each(|&key| reading.is_there(key));
        }
        self.cache.end_backup(&source, &arrival, stored);
        self.cache.tidy(&source);
        if corrupt && let Some(page) = arrival.page_at(sound_pages) {
            self.cache.distrust_host(&source, page);
        }
        self.backups.backoff.note(failed || corrupt, !called_off, self.now);
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
