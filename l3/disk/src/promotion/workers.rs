//! Workers that perform promotions: a bounded number of tasks that exist only while there is work.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::PromotionTicket;
use terrace_l3::backend::{InFlight, Mutex, Ticket as UnderWay};

/// Workers and their queue of tickets. Clones share them.
#[derive(Clone)]
pub(crate) struct PromotionWorkers {
    shared: Arc<WorkerPool>,
}

type PromotionJob =
    dyn Fn(PromotionTicket) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync;

struct WorkerPool {
    job: Box<PromotionJob>,
    workers_max: usize,
    roster: Mutex<Roster>,
    shifts: InFlight,
}

#[derive(Debug, Default)]
struct Roster {
    /// Bounded by the board.
    queue: VecDeque<PromotionTicket>,
    workers: usize,
    closed: bool,
}

impl PromotionWorkers {
    /// Creates workers that call `job` with each ticket, at most `workers` at a time.
    pub(crate) fn new<F>(
        workers: u32,
        job: impl Fn(PromotionTicket) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let shared = WorkerPool {
            job: Box::new(move |ticket| Box::pin(job(ticket))),
            workers_max: workers.max(1) as usize,
            roster: Mutex::new(Roster::default()),
            shifts: InFlight::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Queues tickets for the workers and returns at once. Without a runtime, or after
    /// [`PromotionWorkers::stop`], the tickets fail.
    pub(crate) fn enqueue(&self, tickets: Vec<PromotionTicket>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut shifts = Vec::new();
        {
            let mut roster = self.shared.roster.lock();
            if roster.closed {
                return;
            }
            roster.queue.extend(tickets);
            let free = self.shared.workers_max - roster.workers;
            for _ in 0..free.min(roster.queue.len()) {
                roster.workers += 1;
                let under_way = self.shared.shifts.begin();
                shifts.push(Shift { crew: self.clone(), over: false, _under_way: under_way });
            }
        }
        for shift in shifts {
            runtime.spawn(shift.work());
        }
    }

    /// Fails queued tickets, waits for running promotions, and refuses further ones.
    pub(crate) async fn stop(&self) {
        let unbegun = {
            let mut roster = self.shared.roster.lock();
            roster.closed = true;
            std::mem::take(&mut roster.queue)
        };
        drop(unbegun);
        self.shared.shifts.none().await;
    }
}

impl fmt::Debug for PromotionWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew")
            .field("workers_max", &self.shared.workers_max)
            .finish_non_exhaustive()
    }
}

/// Guard of a worker. It ends regularly when the queue is empty, or with the task by a panic or the
/// end of its runtime.
struct Shift {
    crew: PromotionWorkers,
    over: bool,
    _under_way: UnderWay,
}

impl Shift {
    async fn work(mut self) {
        while let Some(ticket) = self.next() {
            (self.crew.shared.job)(ticket).await;
        }
    }

    /// Takes the next ticket, or signs off if there is none. Both happen under one lock, so that no
    /// ticket is queued for a worker that is about to end.
    fn next(&mut self) -> Option<PromotionTicket> {
        let mut roster = self.crew.shared.roster.lock();
        let ticket = roster.queue.pop_front();
        if ticket.is_none() {
            self.over = true;
            roster.workers -= 1;
        }
        ticket
    }
}

impl Drop for Shift {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        let mut roster = self.crew.shared.roster.lock();
        roster.workers -= 1;
        // The last worker fails the rest of the queue, since no worker is left.
        let unbegun = match roster.workers {
            0 => std::mem::take(&mut roster.queue),
            _ => VecDeque::new(),
        };
        drop(roster);
        drop(unbegun);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use terrace_cache::PageKey;
    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::promotion::{Board, PromotionConfig, PromotionOutcome};
    use terrace_l3::ObjectId;

    fn ids(count: u128) -> Vec<ObjectId> {
        (0..count).map(|key| ObjectId::page(PageKey(1), PageKey(key))).collect()
    }

    fn tickets(board: &Board, ids: &[ObjectId]) -> Vec<PromotionTicket> {
        ids.iter().map(|id| board.trigger(*id, Instant::now()).unwrap()).collect()
    }

    /// Each promotion takes a second, but that of key 3 panics.
    fn crew(workers: u32, most: Arc<AtomicUsize>) -> PromotionWorkers {
        let now = Arc::new(AtomicUsize::new(0));
        PromotionWorkers::new(workers, move |mut ticket| {
            let (now, most) = (now.clone(), most.clone());
            async move {
                ticket.start();
                most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                sleep(Duration::from_secs(1)).await;
                now.fetch_sub(1, Ordering::Relaxed);
                assert_ne!(ticket.id().key, PageKey(3), "this one is meant to fail");
                ticket.end(PromotionOutcome::Done, Instant::now());
            }
        })
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_concurrent_promotions_is_limited() {
        let (board, most) = (Board::new(&PromotionConfig::default()), Arc::default());
        let crew = crew(2, Arc::clone(&most));
        let (start, ids) = (Instant::now(), ids(3));
        crew.enqueue(tickets(&board, &ids[..1]));
        crew.enqueue(tickets(&board, &ids[1..]));
        assert_eq!(Instant::now(), start, "taking up waits for nothing");
        board.settled(&ids).await;
        assert_eq!((most.load(Ordering::Relaxed), start.elapsed().as_secs()), (2, 2));
        crew.stop().await;
        assert_eq!(board.stats(Instant::now()).done, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn f36_a_worker_that_dies_fails_its_promotion_and_the_rest_of_the_queue() {
        let board = Board::new(&PromotionConfig::default());
        let crew = crew(1, Arc::default());
        let ids = ids(6);
        crew.enqueue(tickets(&board, &ids));
        board.settled(&ids).await;
        let stats = board.stats(Instant::now());
        assert_eq!((stats.done, stats.failed), (3, 3));
        let more = [ObjectId::page(PageKey(1), PageKey(9))];
        crew.enqueue(tickets(&board, &more));
        board.settled(&more).await;
        assert_eq!(board.stats(Instant::now()).done, 4, "the crew has new workers");
    }

    #[tokio::test(start_paused = true)]
    async fn stopping_waits_for_running_promotions_and_drops_the_rest() {
        let board = Board::new(&PromotionConfig::default());
        let crew = crew(2, Arc::default());
        crew.enqueue(tickets(&board, &ids(3)));
        sleep(Duration::from_millis(1)).await;
        crew.stop().await;
        let stats = board.stats(Instant::now());
        assert_eq!((stats.done, stats.failed, stats.active), (2, 1, 0));
        crew.enqueue(tickets(&board, &[ObjectId::page(PageKey(1), PageKey(9))]));
        assert_eq!(board.stats(Instant::now()).failed, 2);
    }

    #[test]
    fn f36_the_end_of_the_runtime_fails_queued_promotions() {
        let board = Board::new(&PromotionConfig::default());
        let crew = crew(2, Arc::default());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            crew.enqueue(tickets(&board, &ids(5)));
            tokio::task::yield_now().await;
        });
        drop(runtime);
        let stats = board.stats(Instant::now());
        assert_eq!((stats.failed, stats.active), (5, 0));
        crew.enqueue(tickets(&board, &[ObjectId::page(PageKey(1), PageKey(9))]));
        assert_eq!(board.stats(Instant::now()).failed, 6, "there is no runtime");
    }
}
