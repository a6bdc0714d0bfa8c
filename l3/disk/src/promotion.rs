//! Promotions from disk to memory: which are under way, and who waits for them.
//!
//! The [`Throttle`] decides which promotions begin; the [`Board`] shares it between those who ask for
//! promotions, those who carry them out and those who wait for their end. Whoever carries one out
//! holds its [`Ticket`], and a ticket reports its end even when it is merely dropped: there is no way
//! to lose a promotion and keep others waiting for it.

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

mod crew;
mod stats;
mod throttle;

pub(crate) use crew::Crew;
pub(crate) use throttle::Ending;
use throttle::Throttle;

/// How objects are moved from disk to memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PromotionConfig {
    /// Promotions that are carried out at a time; at least one.
    pub workers: u32,
    /// Promotions that may wait or be under way; further ones are turned down.
    pub queue_max: u32,
    /// How many objects are looked for at a time when promotion is asked for: the promotions of one
    /// chunk begin before the next chunk is looked for.
    pub chunk_keys: u32,
    /// How long an ended promotion is remembered; meanwhile the same one does not begin again.
    pub remember_ms: u64,
    /// How many ended promotions are remembered.
    pub remembered_max: u32,
    /// How long no promotion begins after one that found no memory.
    pub cooldown_ms: u64,
    /// How long a get waits for promotions under way, once for its whole batch.
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

/// The promotions under way, for everybody to see. Clones are the same board.
#[derive(Clone, Debug)]
pub(crate) struct Board {
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug)]
struct Shared {
    throttle: Throttle,
    waiters: BTreeMap<u64, Waiter>,
    next_waiter: u64,
}

/// Somebody who waits for several promotions.
#[derive(Debug)]
struct Waiter {
    /// Those that have not ended yet.
    left: BTreeSet<ObjectId>,
    /// None as long as nobody has polled.
    waker: Option<Waker>,
}

impl Board {
    pub(crate) fn new(config: &PromotionConfig) -> Self {
        let throttle = Throttle::new(config);
        let shared = Shared { throttle, waiters: BTreeMap::new(), next_waiter: 0 };
        Self { shared: Arc::new(Mutex::new(shared)) }
    }

    /// The right and the duty to promote the object, unless that is to be left alone right now.
    pub(crate) fn trigger(&self, id: ObjectId, now: Instant) -> Option<Ticket> {
        self.shared.lock().throttle.trigger(id, now).then(|| Ticket {
            board: self.clone(),
            id,
            ending: None,
        })
    }

    /// Sees to it that a promotion of the object that is under way does not put it into memory. To be
    /// called between taking the object from disk and taking it from memory.
    pub(crate) fn revoke(&self, id: &ObjectId) {
        self.shared.lock().throttle.revoke(id);
    }

    /// Likewise for all lower generations of the object.
    pub(crate) fn revoke_lower(&self, id: &ObjectId) {
        self.shared.lock().throttle.revoke_lower(id);
    }

    /// Which of the objects have a promotion waiting or under way.
    pub(crate) fn active(&self, ids: impl Iterator<Item = ObjectId>) -> Vec<bool> {
        let shared = self.shared.lock();
        ids.map(|id| shared.throttle.is_active(&id)).collect()
    }

    /// Waits until the promotions of these objects that are active now have ended, one way or
    /// another.
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

    /// Everything but the gets, which the board does not see.
    pub(crate) fn stats(&self, now: Instant) -> PromotionStats {
        self.shared.lock().throttle.stats(now)
    }

    fn end(&self, id: &ObjectId, ending: Ending, now: Instant) {
        let woken = {
            let mut shared = self.shared.lock();
            shared.throttle.end(id, ending, now);
            shared.take_settled(id)
        };
        // Waking, and even dropping a waker, may run anything, so it happens outside of the lock.
        for waiter in woken {
            if let Some(waker) = waiter.waker {
                waker.wake();
            }
        }
    }
}

impl Shared {
    /// Those for whom this was the last promotion that they waited for. A waiter that is not there any
    /// more is how its [`Settled`] knows.
    fn take_settled(&mut self, id: &ObjectId) -> Vec<Waiter> {
        self.waiters
            .extract_if(.., |_, waiter| waiter.left.remove(id) && waiter.left.is_empty())
            .map(|(_, waiter)| waiter)
            .collect()
    }
}

/// The right and the duty to carry out one promotion.
#[must_use = "a ticket that is dropped is a failed promotion"]
#[derive(Debug)]
pub(crate) struct Ticket {
    board: Board,
    id: ObjectId,
    ending: Option<(Ending, Instant)>,
}

impl Ticket {
    /// A worker has taken it up.
    pub(crate) fn start(&mut self) {
        self.board.shared.lock().throttle.start(&self.id);
    }

    /// The promotion is over.
    pub(crate) fn end(mut self, ending: Ending, now: Instant) {
        self.ending = Some((ending, now));
    }

    /// Which object it is about.
    pub(crate) fn id(&self) -> ObjectId {
        self.id
    }

    /// Lets `publish` make the object visible in memory, unless the promotion was revoked; whether it
    /// did.
    ///
    /// It happens under the board's lock. Thus a removal that revokes before it looks into memory
    /// either finds the object there or keeps it from ever getting there.
    pub(crate) fn unless_revoked(&self, publish: impl FnOnce()) -> bool {
        let shared = self.board.shared.lock();
        let allowed = !shared.throttle.is_revoked(&self.id);
        if allowed {
            publish();
        }
        allowed
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let (ending, now) = self.ending.unwrap_or_else(|| (Ending::Failed, Instant::now()));
        self.board.end(&self.id, ending, now);
    }
}

/// Waits for a batch of promotions. It is woken once, by the last of them.
#[must_use = "a future does nothing unless it is awaited"]
#[derive(Debug)]
pub(crate) struct Settled {
    board: Board,
    /// None when there was nothing to wait for.
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
            ticket.end(Ending::Done, now);
        }
        waiter.await.unwrap();
        assert_eq!(Instant::now(), now, "nobody slept");
        board.settled(&[id(0), id(99)]).await;
    }

    #[tokio::test(start_paused = true)]
    async fn who_gives_up_leaves_nothing_behind() {
        let (board, now) = (board(), Instant::now());
        let ticket = board.trigger(id(0), now).unwrap();
        let settled = board.settled(&[id(0)]);
        assert!(timeout(Duration::from_millis(10), settled).await.is_err());
        assert!(board.shared.lock().waiters.is_empty());
        ticket.end(Ending::Done, Instant::now());
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
        // One dies with its worker, the other never gets as far as a worker.
        worker.abort();
        drop(queued);
        waiter.await.unwrap();
        let stats = board.stats(now);
        assert_eq!((stats.failed, stats.active), (2, 0));
        assert!(board.trigger(id(0), now).is_none(), "what fails is not hammered");
        assert!(board.trigger(id(0), now + Duration::from_secs(1)).is_some(), "but tried again");
    }

    #[test]
    fn what_is_revoked_is_not_published() {
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
            ticket.end(Ending::Vanished, now);
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

    /// Two promotions end, one properly and one by being dropped, while somebody begins to wait for
    /// both; a wakeup that is missed would be a deadlock.
    #[test]
    fn loom_a_waiter_racing_with_the_ends_wakes_up() {
        loom::model(|| {
            let now = Instant::now();
            let board = Board::new(&PromotionConfig::default());
            let first = board.trigger(id(0), now).unwrap();
            let second = board.trigger(id(1), now).unwrap();
            let workers = [
                thread::spawn(move || first.end(Ending::Done, now)),
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

    /// Somebody gives up waiting at the moment of the end, and another goes on.
    #[test]
    fn loom_giving_up_does_not_cost_another_their_wakeup() {
        loom::model(|| {
            let now = Instant::now();
            let board = Board::new(&PromotionConfig::default());
            let ticket = board.trigger(id(0), now).unwrap();
            let patient = board.settled(&[id(0)]);
            let hasty = board.settled(&[id(0)]);
            let worker = thread::spawn(move || ticket.end(Ending::Done, now));
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

    /// A removal takes the object from disk, revokes and looks into memory, as the tiered store does;
    /// whatever the promotion does meanwhile, the object is in memory no more.
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
                ticket.end(if published { Ending::Done } else { Ending::Vanished }, now);
            });
            board.revoke(&id(0));
            *in_memory.lock() = false;
            worker.join().unwrap();
            assert!(!*in_memory.lock());
        });
    }
}
