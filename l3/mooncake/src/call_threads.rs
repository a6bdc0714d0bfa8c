//! Threads that make the library's calls, all of which block.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use terrace_l3::backend::InFlight;
use tokio::sync::oneshot;

/// Threads with a queue. Dropping it ends the threads after their current jobs.
pub(crate) struct CallThreads<W> {
    queue: Arc<JobQueue<W>>,
}

type Job<W> = Box<dyn FnOnce(&mut W) + Send>;

struct JobQueue<W> {
    waiting: Mutex<QueueState<W>>,
    /// One condition variable per thread.
    wakeups: Vec<Condvar>,
    jobs: InFlight,
}

struct QueueState<W> {
    jobs: VecDeque<Job<W>>,
    jobs_max: usize,
    /// Idle threads, most recently used last. That one gets the next job: its data is still in the
    /// processor's cache, and the library's connections that it used are warm.
    idle: Vec<usize>,
    closed: bool,
}

/// Reason why a job is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    QueueFull,
    Closed,
}

impl<W: Send + 'static> CallThreads<W> {
    /// Starts one thread per worker, with a queue of up to `jobs_max` jobs.
    pub(crate) fn new(workers: Vec<W>, jobs_max: usize) -> std::io::Result<Self> {
        let idle = Vec::with_capacity(workers.len());
        let waiting = QueueState { jobs: VecDeque::new(), jobs_max, idle, closed: false };
        let queue = Arc::new(JobQueue {
            waiting: Mutex::new(waiting),
            wakeups: workers.iter().map(|_| Condvar::new()).collect(),
            jobs: InFlight::default(),
        });
        let crew = Self { queue };
        for (number, mut worker) in workers.into_iter().enumerate() {
            let queue = crew.queue.clone();
            let name = "terrace-mooncake".to_owned();
            std::thread::Builder::new()
                .name(name)
                .spawn(move || queue.work(number, &mut worker))?;
        }
        Ok(crew)
    }

    /// Queues a job and returns the receiver of its result. Dropping the receiver does not cancel
    /// the job.
    pub(crate) fn start<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut W) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, Refused> {
        let (sender, receiver) = oneshot::channel();
        let job = Box::new(move |worker: &mut W| drop(sender.send(job(worker))));
        let mut waiting = self.queue.waiting.lock();
        if waiting.closed {
            return Err(Refused::Closed);
        }
        if waiting.jobs.len() >= waiting.jobs_max {
            return Err(Refused::QueueFull);
        }
        waiting.jobs.push_back(job);
        let idle = waiting.idle.pop();
        drop(waiting);
        if let Some(number) = idle {
            self.queue.wakeups[number].notify_one();
        }
        Ok(receiver)
    }

    /// Refuses further jobs, drops queued ones and waits for the others.
    pub(crate) async fn close(&self) {
        let given_up = {
            let mut waiting = self.queue.waiting.lock();
            waiting.closed = true;
            std::mem::take(&mut waiting.jobs)
        };
        // Outside the lock: they own pages, whose return may wake other tasks.
        drop(given_up);
        self.queue.wake_all();
        self.queue.jobs.none().await;
    }
}

impl<W> CallThreads<W> {
    /// Number of idle threads.
    pub(crate) fn idle(&self) -> usize {
        self.queue.waiting.lock().idle.len()
    }

    /// Number of queued jobs.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.waiting.lock().jobs.len()
    }
}

impl<W> Drop for CallThreads<W> {
    fn drop(&mut self) {
        self.queue.waiting.lock().closed = true;
        self.queue.wake_all();
    }
}

impl<W> fmt::Debug for CallThreads<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Crew with {} jobs waiting", self.waiting())
    }
}

impl<W> JobQueue<W> {
    fn wake_all(&self) {
        for bell in &self.wakeups {
            bell.notify_one();
        }
    }

    fn work(&self, number: usize, worker: &mut W) {
        loop {
            let mut waiting = self.waiting.lock();
            let job = loop {
                if let Some(job) = waiting.jobs.pop_front() {
                    break job;
                }
                if waiting.closed {
                    return;
                }
                waiting.idle.push(number);
                self.wakeups[number].wait(&mut waiting);
                waiting.idle.retain(|idle| *idle != number);
            };
            // Dropped even if the job panics and ends this thread.
            let _under_way = self.jobs.begin();
            drop(waiting);
            job(worker);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[tokio::test]
    async fn the_queue_is_limited() {
        let crew = CallThreads::new(vec![()], 1).unwrap();
        let (release, gate) = mpsc::channel::<()>();
        let (started, begun) = mpsc::channel::<()>();
        let first = crew.start(move |()| {
            started.send(()).unwrap();
            gate.recv().unwrap();
            1
        });
        begun.recv().unwrap();
        let second = crew.start(|()| 2).unwrap();
        assert_eq!(crew.start(|()| 3).unwrap_err(), Refused::QueueFull);
        release.send(()).unwrap();
        assert_eq!((first.unwrap().await, second.await), (Ok(1), Ok(2)));
    }

    #[tokio::test]
    async fn the_most_recently_used_thread_gets_the_next_job() {
        let crew = CallThreads::new(vec![0, 1, 2, 3], 8).unwrap();
        let all_are_idle = || crew.queue.waiting.lock().idle.len() == 4;
        let mut last = None;
        for _ in 0..100 {
            while !all_are_idle() {
                tokio::task::yield_now().await;
            }
            let worker = crew.start(|worker| *worker).unwrap().await.unwrap();
            assert_eq!(*last.get_or_insert(worker), worker);
        }
    }

    #[tokio::test]
    async fn closing_waits_for_running_jobs_and_drops_the_rest() {
        let crew = Arc::new(CallThreads::new(vec![()], 8).unwrap());
        let (release, gate) = mpsc::channel::<()>();
        let (started, begun) = mpsc::channel::<()>();
        let first = crew.start(move |()| {
            started.send(()).unwrap();
            gate.recv().unwrap();
        });
        begun.recv().unwrap();
        let second = crew.start(|()| ()).unwrap();
        let closing = tokio::spawn({
            let crew = crew.clone();
            async move { crew.close().await }
        });
        assert!(second.await.is_err(), "it never began");
        assert!(!closing.is_finished());
        release.send(()).unwrap();
        closing.await.unwrap();
        assert!(first.unwrap().await.is_ok());
        assert_eq!(crew.start(|()| ()).unwrap_err(), Refused::Closed);
    }
}
