//! Promotions from disk to memory.
//!
//! The [`Throttle`] decides which promotions start. The [`Board`] shares it between callers that
//! request promotions, workers that perform them and readers that wait for them. A worker holds the
//! [`PromotionTicket`] of its promotion, and a dropped ticket reports a failure: a promotion cannot get lost
//! while readers wait for it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

pub use self::stats::PromotionStats;
use terrace_l3::ObjectId;
use terrace_l3::backend::Mutex;

mod stats;
mod throttle;
mod workers;

pub(crate) use throttle::PromotionOutcome;
use throttle::Throttle;
pub(crate) use workers::PromotionWorkers;

/// Limits of promotions from disk to memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PromotionConfig {
    /// Maximum number of concurrent promotions; at least one.
    pub workers: u32,
    /// Maximum number of queued and running promotions; further ones are refused.
    pub queue_max: u32,
    /// Number of objects that a lookup with prefetch handles at a time: the promotions of one chunk
    /// start before the next chunk is looked up.
    pub chunk_keys: u32,
    /// Time for which a finished promotion is remembered; it does not start again meanwhile.
    pub remember_ms: u64,
    /// Maximum number of finished promotions that are remembered.
    pub remembered_max: u32,
    /// Pause of all promotions after one that found no memory.
    pub cooldown_ms: u64,
    /// Maximum wait of a get for promotions in flight, once for the whole batch.
    pub get_wait_ms: u64,
}

impl Default for PromotionConfig {
    fn default() -> Self {
        Self {
            workers: 4,
            queue_max: 4096,
            chunk_keys: 128,
            remember_ms: 1000,
            remembered_max: 65_536,
            cooldown_ms: 500,
            get_wait_ms: 10,
        }
    }
}

/// Shared state of all promotions. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    shared: Arc<Mutex<BoardState>>,
}

#[derive(Debug)]
struct BoardState {
    throttle: Throttle,
    waiters: BTreeMap<u64, Waiter>,
    next_waiter: u64,
}

/// A reader that waits for several promotions.
#[derive(Debug)]
struct Waiter {
    /// Promotions that have not ended yet.
    left: BTreeSet<ObjectId>,
    /// `None` until the future is polled.
    waker: Option<Waker>,
}

impl Board {
    pub(crate) fn new(config: &PromotionConfig) -> Self {
        let throttle = Throttle::new(config);
        let shared = BoardState { throttle, waiters: BTreeMap::new(), next_waiter: 0 };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    /// Returns a ticket for the promotion of the object, unless it is active, remembered or
    /// refused.
    pub(crate) fn trigger(&self, id: ObjectId, now: Instant) -> Option<PromotionTicket> {
        self.shared.lock().throttle.trigger(id, now).then(|| PromotionTicket {
            board: self.clone(),
            id,
            ending: None,
        })
    }

    /// Prevents an active promotion of the object from publishing it in memory. Call it after
    /// removing the object from disk and before removing it from memory.
    pub(crate) fn revoke(&self, id: &ObjectId) {
        self.shared.lock().throttle.revoke(id);
    }

    /// Like [`Board::revoke`], for all lower generations of the object.
    pub(crate) fn revoke_lower(&self, id: &ObjectId) {
        self.shared.lock().throttle.revoke_lower(id);
    }

    /// Returns for each object whether its promotion is queued or running.
    pub(crate) fn active(&self, ids: impl Iterator<Item = ObjectId>) -> Vec<bool> {
        let shared = self.shared.lock();
        ids.map(|id| shared.throttle.is_active(&id)).collect()
    }

    /// Waits until the promotions of these objects that are active have ended, in any way.
    pub(crate) fn settled(&self, ids: &[ObjectId]) -> Settled {
        let mut shared = self.shared.lock();
        let left: BTreeSet<ObjectId> =
            ids.iter().filter(|id| shared.throttle.is_active(id)).copied().collect();
        let number = (!left.is_empty()).then(|| {
            let number = shared.next_waiter;
            shared.next_waiter += 1;
            shared.waiters.insert(number, Waiter { left, waker: None });
            number
        });
        Settled { board: self.clone(), number }
    }

    /// Statistics, except for the counts of gets, which the board does not see.
    pub(crate) fn stats(&self, now: Instant) -> PromotionStats {
        self.shared.lock().throttle.stats(now)
    }

    fn end(&self, id: &ObjectId, ending: PromotionOutcome, now: Instant) {
        let woken = {
            let mut shared = self.shared.lock();
            shared.throttle.end(id, ending, now);
            shared.take_settled(id)
        };
        // Waking a waker, or dropping it, may run arbitrary code, so it happens outside the lock.
        for waiter in woken {
            if let Some(waker) = waiter.waker {
                waker.wake();
            }
        }
    }
}

impl BoardState {
    /// Removes the waiters for which this was the last promotion. A [`Settled`] whose waiter is
    /// gone is complete.
    fn take_settled(&mut self, id: &ObjectId) -> Vec<Waiter> {
        self.waiters
            .extract_if(.., |_, waiter| waiter.left.remove(id) && waiter.left.is_empty())
            .map(|(_, waiter)| waiter)
            .collect()
    }
}

/// Permission and obligation to perform one promotion.
#[must_use = "a ticket that is dropped is a failed promotion"]
#[derive(Debug)]
pub(crate) struct PromotionTicket {
    board: Board,
    id: ObjectId,
    ending: Option<(PromotionOutcome, Instant)>,
}

impl PromotionTicket {
    /// Records that a worker has started.
    pub(crate) fn start(&mut self) {
        self.board.shared.lock().throttle.start(&self.id);
    }

    /// Ends the promotion.
    pub(crate) fn end(mut self, ending: PromotionOutcome, now: Instant) {
        self.ending = Some((ending, now));
    }

    /// Object to promote.
    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    /// Calls `publish`, which makes the object visible in memory, unless the promotion was revoked.
    /// Returns whether it did.
    ///
    /// It runs under the board's lock. So a removal that revokes the promotion before it looks in
    /// memory either finds the object there or prevents its publication.
    pub(crate) fn unless_revoked(&self, publish: impl FnOnce()) -> bool {
        let shared = self.board.shared.lock();
        let allowed = !shared.throttle.is_revoked(&self.id);
        if allowed {
            publish();
        }
        allowed
    }
}

impl Drop for PromotionTicket {
    fn drop(&mut self) {
        let (ending, now) =
            self.ending.unwrap_or_else(|| (PromotionOutcome::Failed, Instant::now()));
        self.board.end(&self.id, ending, now);
    }
}

/// Future that waits for a batch of promotions. It is woken once, by the last of them.
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub(crate) struct Settled {
    board: Board,
    /// `None` if there was nothing to wait for.
    number: Option<u64>,
}

impl Future for Settled {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Some(number) = self.number else { return Poll::Ready(()) };
        let mut shared = self.board.shared.lock();
        let Some(waiter) = shared.waiters.get_mut(&number) else { return Poll::Ready(()) };
        let replaced = waiter.waker.replace(context.waker().clone());
        // As in `Board::end`, no waker is dropped under the lock.
        drop(shared);
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            let given_up = self.board.shared.lock().waiters.remove(&number);
            drop(given_up);
        }
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::time::Duration;

    use terrace_cache::PageKey;
    use tokio::time::timeout;

    use super::*;

    fn id(key: u128) -> ObjectId {
        ObjectId::page(PageKey(1), PageKey(key))
    }

    fn board() -> Board {
        Board::new(&PromotionConfig::default())
    }

    #[tokio::test(start_paused = true)]
    async fn a_batch_is_woken_by_the_last_of_its_promotions() {
        let (board, now) = (board(), Instant::now());
        let tickets: Vec<_> = (0..3).map(|key| board.trigger(id(key), now).unwrap()).collect();
        let waiter = tokio::spawn(board.settled(&[id(0), id(1), id(2), id(99)]));
        for ticket in tickets {
            tokio::task::yield_now().await;
            assert!(!waiter.is_finished());
            ticket.end(PromotionOutcome::Done, now);
        }
        waiter.await.unwrap();
        assert_eq!(Instant::now(), now, "the wait takes no time");
        board.settled(&[id(0), id(99)]).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_abandoned_wait_leaves_nothing_behind() {
        let (board, now) = (board(), Instant::now());
        let ticket = board.trigger(id(0), now).unwrap();
        let settled = board.settled(&[id(0)]);
        assert!(timeout(Duration::from_millis(10), settled).await.is_err());
        assert!(board.shared.lock().waiters.is_empty());
        ticket.end(PromotionOutcome::Done, Instant::now());
    }

    #[tokio::test(start_paused = true)]
    async fn f36_a_failed_promotion_reports_back() {
        let (board, now) = (board(), Instant::now());
        let mut ticket = board.trigger(id(0), now).unwrap();
        let queued = board.trigger(id(1), now).unwrap();
        ticket.start();
        let worker = tokio::spawn(async move {
            let _ticket = ticket;
            std::future::pending::<()>().await;
        });
        let waiter = tokio::spawn(board.settled(&[id(0), id(1)]));
        tokio::task::yield_now().await;
        // One dies with its worker, the other never reaches a worker.
        worker.abort();
        drop(queued);
        waiter.await.unwrap();
        let stats = board.stats(now);
        assert_eq!((stats.failed, stats.active), (2, 0));
        assert!(board.trigger(id(0), now).is_none(), "what fails is not hammered");
        assert!(board.trigger(id(0), now + Duration::from_secs(1)).is_some(), "but tried again");
    }

    #[test]
    fn a_revoked_promotion_is_not_published() {
        let (board, now) = (board(), Instant::now());
        let generation = |generation| id(0).with_generation(generation);
        let tickets: Vec<_> =
            (0..4).map(|number| board.trigger(generation(number), now).unwrap()).collect();
        board.revoke_lower(&generation(2));
        board.revoke(&generation(3));
        board.revoke(&id(77));
        let published: Vec<_> = tickets.iter().map(|ticket| ticket.unless_revoked(|| ())).collect();
        assert_eq!(published, [false, false, true, false]);
        for ticket in tickets {
            ticket.end(PromotionOutcome::Vanished, now);
        }
        let ticket = board.trigger(generation(3), now).unwrap();
        assert!(ticket.unless_revoked(|| ()), "only what was under way is revoked");
    }
}

#[cfg(all(test, feature = "loom"))]
mod loom_tests {
    use loom::future::block_on;
    use loom::thread;
    use terrace_cache::PageKey;

    use super::*;

    fn id(key: u128) -> ObjectId {
        ObjectId::page(PageKey(1), PageKey(key))
    }

    /// Two promotions end, one regularly and one by being dropped, while a reader starts to wait
    /// for both. A missed wakeup would be a deadlock.
    #[test]
    fn loom_a_waiter_racing_with_the_ends_wakes_up() {
        loom::model(|| {
            let now = Instant::now();
            let board = Board::new(&PromotionConfig::default());
            let first = board.trigger(id(0), now).unwrap();
            let second = board.trigger(id(1), now).unwrap();
            let workers = [
                thread::spawn(move || first.end(PromotionOutcome::Done, now)),
                thread::spawn(move || drop(second)),
            ];
            block_on(board.settled(&[id(0), id(1)]));
            assert_eq!(board.active([id(0), id(1)].into_iter()), [false, false]);
            for worker in workers {
                worker.join().unwrap();
            }
            assert!(board.shared.lock().waiters.is_empty());
        });
    }

    /// One waiter gives up at the moment of the end, and another continues.
    #[test]
    fn loom_an_abandoned_wait_does_not_lose_the_wakeup_of_another() {
        loom::model(|| {
            let now = Instant::now();
            let board = Board::new(&PromotionConfig::default());
            let ticket = board.trigger(id(0), now).unwrap();
            let patient = board.settled(&[id(0)]);
            let hasty = board.settled(&[id(0)]);
            let worker = thread::spawn(move || ticket.end(PromotionOutcome::Done, now));
            let giving_up = thread::spawn(move || drop(hasty));
            block_on(patient);
            worker.join().unwrap();
            giving_up.join().unwrap();
            assert!(board.shared.lock().waiters.is_empty());
        });
    }

    #[test]
    fn loom_two_triggers_give_one_ticket() {
        loom::model(|| {
            let now = Instant::now();
            let board = Board::new(&PromotionConfig::default());
            let other = board.clone();
            let theirs = thread::spawn(move || other.trigger(id(0), now));
            let ours = board.trigger(id(0), now);
            let theirs = theirs.join().unwrap();
            assert!(ours.is_some() != theirs.is_some());
            let stats = board.stats(now);
            assert_eq!((stats.triggered, stats.deduplicated), (1, 1));
        });
    }

    /// A removal takes the object from disk, revokes and then looks in memory, as the tiered store
    /// does. Whatever the promotion does meanwhile, the object is not in memory afterwards.
    #[test]
    fn loom_a_removal_leaves_nothing_in_memory() {
        loom::model(|| {
            let now = Instant::now();
            let board = Board::new(&PromotionConfig::default());
            let ticket = board.trigger(id(0), now).unwrap();
            let in_memory = Arc::new(Mutex::new(false));
            let memory = in_memory.clone();
            let worker = thread::spawn(move || {
                let published = ticket.unless_revoked(|| *memory.lock() = true);
                ticket.end(
                    if published { PromotionOutcome::Done } else { PromotionOutcome::Vanished },
                    now,
                );
            });
            board.revoke(&id(0));
            *in_memory.lock() = false;
            worker.join().unwrap();
            assert!(!*in_memory.lock());
        });
    }
}
