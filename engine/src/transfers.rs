//! L3 operations of a plan, run on a [`Store`] in the background.

use std::collections::VecDeque;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, Mismatch, ObjectId, Put, PutOptions, Registration,
    Results, Store, StoreError,
};
use terrace_scheduler::{HostPage, L3Kind, L3Op, OpId, Outcome, PageKey, Plan, PrefixDigest};

use crate::call_off::CallOff;
use crate::message::{DriverMessage, DriverSender};

/// Number of pages that a prefetch reads at a time.
const PIECE_PAGES: usize = 16;
/// Number of pieces of a prefetch in flight, so that the store is never idle. When a prefetch is
/// cancelled, pieces in flight complete and no others start.
const PIECES_MAX: usize = 2;

/// The L3 client of the engine. Pages move directly between the host arena and the store.
#[derive(Debug)]
pub(crate) struct Transfers {
    lane: Lane,
    _registration: Registration,
}

#[derive(Clone, Debug)]
struct Lane {
    store: Arc<dyn Store>,
    host: Arena,
}

impl Transfers {
    /// # Errors
    /// Fails if the store cannot register the arena.
    pub(crate) fn new(store: Arc<dyn Store>, host: Arena) -> Result<Self, StoreError> {
        let registration = store.register(&host)?;
        Ok(Self { lane: Lane { store, host }, _registration: registration })
    }

    pub(crate) fn store(&self) -> &Arc<dyn Store> {
        &self.lane.store
    }

    /// Starts an operation, reports its outcome, and returns the flag that cancels it. The
    /// namespace is the model's; adapter and salt are part of the keys. Each page moved has a
    /// digest of its prefix.
    pub(crate) fn start(
        &self,
        plan: &Plan,
        op: &L3Op,
        namespace: PageKey,
        prefixes: Vec<PrefixDigest>,
        sender: &DriverSender,
    ) -> CallOff {
        let keys = plan.l3_keys(op).iter();
        let ids: Vec<ObjectId> = keys.map(|&key| ObjectId::page(namespace, key)).collect();
        let pages = plan.l3_host_pages(op).to_vec();
        assert_eq!(pages.len(), prefixes.len(), "every page that is moved has a prefix");
        let pages = pages.into_iter().zip(prefixes).collect();
        let owed = Owed { op: op.op, outcome: Outcome::Failed, sender: sender.clone() };
        let call_off = CallOff::default();
        let lane = self.lane.clone();
        tokio::spawn(lane.perform(op.kind, ids, pages, call_off.clone(), owed));
        call_off
    }
}

/// A guard that reports an outcome when it is dropped, even if the store panics. Pages that such a
/// store still uses stay lent, so no other transfer gets them.
struct Owed {
    op: OpId,
    outcome: Outcome,
    sender: DriverSender,
}

impl Owed {
    fn report(&self, outcome: Outcome) {
        self.sender.send(DriverMessage::Operation { op: self.op, outcome });
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        self.report(self.outcome);
    }
}

impl Lane {
    async fn perform(
        self,
        kind: L3Kind,
        ids: Vec<ObjectId>,
        pages: Vec<(HostPage, PrefixDigest)>,
        call_off: CallOff,
        mut owed: Owed,
    ) {
        if call_off.is_called_off() {
            owed.outcome = Outcome::CalledOff(0);
            return;
        }
        let report = |outcome| owed.report(outcome);
        owed.outcome = match kind {
            L3Kind::Probe => self.probe(&ids).await,
            L3Kind::Prefetch => self.prefetch(&ids, &pages, &call_off, report).await,
            L3Kind::Backup => self.back_up(&ids, &pages, report).await,
        };
    }

    /// Counts the leading pages that the store has, and makes the store start moving them to
    /// memory.
    async fn probe(&self, ids: &[ObjectId]) -> Outcome {
        let options = ExistsOptions { prefetch_to_memory: true, ..ExistsOptions::default() };
        let found = self.store.exists(ids, options).await;
        let found = found.into_iter().map(|presence| match presence {
            Ok(presence) if presence.is_present() => Ok(()),
            Ok(_) => Err(StoreError::Missing),
            Err(error) => Err(error),
        });
        probe_outcome(&found.collect::<Results<()>>())
    }

    /// Reads the pages in pieces, until a page is invalid or the prefetch is cancelled.
    async fn prefetch(
        &self,
        ids: &[ObjectId],
        pages: &[(HostPage, PrefixDigest)],
        call_off: &CallOff,
        report: impl Fn(Outcome),
    ) -> Outcome {
        let gets = ids.iter().zip(pages).map(|(&id, (page, prefix))| {
            self.host.target(page.slot()).map(|target| Get::new(id, target).with_prefix(*prefix))
        });
        let mut gets = match gets.collect::<Result<VecDeque<_>, _>>() {
            Ok(gets) => gets,
            Err(lent) => return self.in_use(&lent),
        };
        let mut read = Vec::with_capacity(ids.len());
        let mut pieces = FuturesOrdered::new();
        let mut is_sound = true;
        loop {
            while pieces.len() < PIECES_MAX
                && !gets.is_empty()
                && is_sound
                && !call_off.is_called_off()
            {
                let piece = gets.drain(..PIECE_PAGES.min(gets.len())).collect();
                pieces.push_back(self.store.get_into(piece, GetOptions::default()));
            }
            let Some(piece) = pieces.next().await else { break };
            is_sound &= piece.iter().all(Result::is_ok);
            read.extend(piece);
        }
        // Pages that are not read are released first.
        drop(gets);
        match self.settle(&read, pages, report).await {
            Outcome::Done if read.len() < ids.len() => Outcome::CalledOff(read.len() as u32),
            outcome => outcome,
        }
    }

    async fn back_up(
        &self,
        ids: &[ObjectId],
        pages: &[(HostPage, PrefixDigest)],
        report: impl Fn(Outcome),
    ) -> Outcome {
        let puts = ids.iter().zip(pages).map(|(&id, (page, prefix))| {
            self.host.source(page.slot()).map(|source| Put::new(id, source).with_prefix(*prefix))
        });
        let puts = match puts.collect::<Result<Vec<_>, _>>() {
            Ok(puts) => puts,
            Err(lent) => return self.in_use(&lent),
        };
        let stored = self.store.put_from(puts, PutOptions::default()).await;
        self.settle(&stored, pages, report).await
    }

    /// Returns the outcome of a transfer once the store has released its pages: a failed or
    /// abandoned transfer may still touch them.
    async fn settle<T>(
        &self,
        results: &[Result<T, StoreError>],
        pages: &[(HostPage, PrefixDigest)],
        report: impl Fn(Outcome),
    ) -> Outcome {
        let is_touched = |(result, (page, _)): (&Result<T, _>, &(HostPage, PrefixDigest))| {
            result.is_err() && self.host.is_lent(page.slot())
        };
        if results.iter().zip(pages).any(is_touched) {
            report(Outcome::TimedOut);
            for (page, _) in pages {
                self.host.returned(page.slot()).await;
            }
        }
        outcome(results)
    }

    /// Reports a page that is already in use. The scheduler does not hand out such a page, so this
    /// is a bug; no page is touched.
    fn in_use(&self, lent: &dyn std::fmt::Display) -> Outcome {
        tracing::error!("an L3 transfer was planned for a page in use: {lent}");
        Outcome::Failed
    }
}

/// Returns the outcome of a probe. A page whose holder does not answer may exist: it ends the run
/// of hits and is computed, but does not count as missing.
fn probe_outcome(found: &[Result<(), StoreError>]) -> Outcome {
    let present = found.iter().take_while(|result| result.is_ok()).count() as u32;
    match found.get(present as usize) {
        Some(Err(StoreError::HolderAway)) => Outcome::CalledOff(present),
        Some(Err(error)) if present > 0 && *error != StoreError::Missing => {
            Outcome::CalledOff(present)
        }
        Some(_) | None => outcome(found),
    }
}

/// Returns the outcome of a batch, which counts up to its first failure. A page of other tokens
/// under the same key is not a failure: clients could create such pages and must not make the store
/// look faulty.
fn outcome<T>(results: &[Result<T, StoreError>]) -> Outcome {
    let sound = results.iter().take_while(|result| result.is_ok()).count();
    match results.get(sound) {
        None => Outcome::Done,
        Some(Err(StoreError::Corrupt(Mismatch::Prefix))) if sound == 0 => Outcome::Missing,
        Some(Err(StoreError::Corrupt(Mismatch::Prefix))) => Outcome::Partial(sound as u32),
        Some(Err(StoreError::Corrupt(_))) if sound > 0 => Outcome::CorruptAfter(sound as u32),
        Some(_) if sound > 0 => Outcome::Partial(sound as u32),
        Some(Ok(_)) => unreachable!("the first result that is not sound is an error"),
        Some(Err(StoreError::Missing)) => Outcome::Missing,
        Some(Err(StoreError::Corrupt(_))) => Outcome::Corrupt,
        Some(Err(error)) => {
            tracing::debug!("an L3 operation failed: {error}");
            Outcome::Failed
        }
    }
}

#[cfg(test)]
mod tests {
    use terrace_l3::{MemoryConfig, MemoryStore};

    use super::*;

    /// The store has the pages and would report them.
    #[tokio::test]
    async fn cancelled_operation_does_not_reach_the_store() {
        let host = Arena::new(1, 4096).unwrap();
        let store = Arc::new(MemoryStore::new(MemoryConfig::new(1 << 20, 4096)).unwrap());
        let transfers = Transfers::new(store, host.clone()).unwrap();
        let ids = vec![ObjectId::page(PageKey(1), PageKey(2))];
        let put = Put::new(ids[0], host.source(0).unwrap());
        transfers.store().put_from(vec![put], PutOptions::default()).await[0].clone().unwrap();
        for (is_called_off, expected) in [(false, Outcome::Done), (true, Outcome::CalledOff(0))] {
            let (sender, mut happened) = DriverSender::channel();
            let owed = Owed { op: OpId(1), outcome: Outcome::Failed, sender };
            let call_off = CallOff::default();
            if is_called_off {
                call_off.call_off();
            }
            let lane = transfers.lane.clone();
            lane.perform(L3Kind::Probe, ids.clone(), Vec::new(), call_off, owed).await;
            let Some(DriverMessage::Operation { outcome, .. }) = happened.recv().await else {
                panic!("an outcome is owed")
            };
            assert_eq!(outcome, expected);
        }
    }

    #[test]
    fn probe_does_not_count_unknown_pages_as_missing() {
        let (present, absent) = (|| Ok(()), || Err(StoreError::Missing));
        let away = || Err(StoreError::HolderAway);
        assert_eq!(probe_outcome(&[present(), absent()]), Outcome::Partial(1));
        assert_eq!(probe_outcome(&[absent(), away()]), Outcome::Missing);
        assert_eq!(probe_outcome(&[away(), present()]), Outcome::CalledOff(0));
        assert_eq!(probe_outcome(&[present(), away(), absent()]), Outcome::CalledOff(1));
        assert_eq!(probe_outcome(&[present(), Err(StoreError::Closed)]), Outcome::CalledOff(1));
        assert_eq!(probe_outcome(&[Err(StoreError::Closed)]), Outcome::Failed);
    }

    #[test]
    fn batch_counts_up_to_its_first_failure() {
        let (sound, gone) = (|| Ok(()), || Err::<(), _>(StoreError::Missing));
        assert_eq!(outcome(&[sound(), sound()]), Outcome::Done);
        assert_eq!(outcome(&[sound(), gone(), sound()]), Outcome::Partial(1));
        let bad = || Err(StoreError::Corrupt(Mismatch::Payload));
        let foreign = || Err(StoreError::Corrupt(Mismatch::Prefix));
        assert_eq!(outcome(&[sound(), bad(), sound()]), Outcome::CorruptAfter(1));
        assert_eq!(outcome(&[bad(), sound()]), Outcome::Corrupt);
        assert_eq!(outcome(&[gone(), sound()]), Outcome::Missing);
        assert_eq!(outcome(&[foreign(), sound()]), Outcome::Missing);
        assert_eq!(outcome(&[sound(), foreign()]), Outcome::Partial(1));
        assert_eq!(outcome(&[Err::<(), _>(StoreError::Closed)]), Outcome::Failed);
    }
}
