//! Queue of backups: paths whose host pages are to be stored in L3.

use std::collections::VecDeque;
use std::time::Duration;

use terrace_cache::{Claims, HostPin};
use terrace_fsm::Time;

use crate::config::{L3Config, ms};
use crate::store_health::Backoff;

/// A backup that fails this often in a row is given up.
pub(crate) const BACKUP_FAILURES_MAX: u32 = 3;

/// Queued backups, their back-off, and the age of what is known about L3.
#[derive(Debug)]
pub(crate) struct Backups {
    queue: VecDeque<PendingBackup>,
    queue_max: usize,
    backoff: Backoff,
    /// Length of a round after which knowledge about L3 ages; `None` if it never does.
    round: Option<Duration>,
    round_began: Time,
}

/// A path whose host pages are to be stored.
#[derive(Debug)]
pub(crate) struct PendingBackup {
    pub(crate) path: HostPin,
    /// Round of the cache's knowledge about L3 in which the backup was queued.
    pub(crate) round: u32,
    /// Number of failures in a row.
    pub(crate) failures: u32,
}

impl Backups {
    pub(crate) fn new(config: Option<&L3Config>) -> Self {
        let backoff_ms = config.map_or((0, 0), |l3| (l3.backoff_base_ms, l3.backoff_max_ms));
        Self {
            queue: VecDeque::new(),
            queue_max: config.map_or(0, |l3| l3.backup_queue_max as usize),
            backoff: Backoff::new(ms(backoff_ms.0), ms(backoff_ms.1)),
            round: config.map(|l3| ms(l3.doubt_after_ms)).filter(|round| !round.is_zero()),
            round_began: Time::default(),
        }
    }

    // ---- queue ----

    pub(crate) fn push(&mut self, backup: PendingBackup) {
        self.queue.push_back(backup);
    }

    /// Removes the first backup.
    pub(crate) fn pop(&mut self) -> Option<PendingBackup> {
        self.queue.pop_front()
    }

    /// Removes the backup at a place of the queue.
    pub(crate) fn remove(&mut self, place: usize) -> Option<PendingBackup> {
        self.queue.remove(place)
    }

    /// Path of the backup at a place of the queue.
    pub(crate) fn path(&self, place: usize) -> Option<&HostPin> {
        self.queue.get(place).map(|backup| &backup.path)
    }

    /// Number of queued backups.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if there are more queued backups than allowed.
    pub(crate) fn is_over_limit(&self) -> bool {
        self.queue.len() > self.queue_max
    }

    pub(crate) fn claim(&self, claims: &mut Claims) {
        self.queue.iter().for_each(|backup| claims.host_pin(&backup.path));
    }

    // ---- health of L3 ----

    /// Returns true if no back-off holds backups back.
    pub(crate) fn may_start(&self, now: Time) -> bool {
        self.backoff.allows(now)
    }

    /// Notes how a backup went. See [`Backoff::note`].
    pub(crate) fn note(&mut self, failed: bool, is_conclusive: bool, now: Time) {
        self.backoff.note(failed, is_conclusive, now);
    }

    /// End of the back-off that holds queued backups back.
    pub(crate) fn next_try(&self, now: Time) -> Option<Time> {
        let waits = !self.queue.is_empty() && !self.backoff.allows(now);
        waits.then(|| self.backoff.until())
    }

    /// Number of rounds that have ended by now: at most 2, after which no earlier knowledge is left.
    pub(crate) fn advance_rounds(&mut self, now: Time) -> u32 {
        let Some(round) = self.round else { return 0 };
        let mut ended = 0;
        while ended < 2 && self.round_began.after(round) <= now {
            self.round_began = self.round_began.after(round);
            ended += 1;
        }
        if self.round_began.after(round) <= now {
            self.round_began = now;
        }
        ended
    }
}
