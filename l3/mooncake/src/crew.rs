//! Threads that make the library's calls, all of which block.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use terrace_l3::backend::InFlight;
use tokio::sync::oneshot;

/// Threads with a queue. Dropping it lets the threads go when they have done what they are at.
pub(crate) struct Crew<W> {
    queue: Arc<Queue<W>>,
}

type Job<W> = Box<dyn FnOnce(&mut W) + Send>;

struct Queue<W> {
    waiting: Mutex<Waiting<W>>,
    /// What wakes each of the threads.
    bells: Vec<Condvar>,
    jobs: InFlight,
}

struct Waiting<W> {
    jobs: VecDeque<Job<W>>,
    jobs_max: usize,
    /// The threads without a job. The last to end one is the first to get one: what it needs is still in
    /// the processor's cache, and the library's connections that it used are still warm.
    idle: Vec<usize>,
    closed: bool,
}

/// There are too many calls in the queue, or no more are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    QueueFull,
    Closed,
}

impl<W: Send + 'static> Crew<W> {
    /// A thread for each worker, and room for so many jobs that wait for one.
    pub(crate) fn new(workers: Vec<W>, jobs_max: usize) -> std::io::Result<Self> {
        let idle = Vec::with_capacity(workers.len());
        let waiting = Waiting { jobs: VecDeque::new(), jobs_max, idle, closed: false };
        let queue = Arc::new(Queue {
            waiting: Mutex::new(waiting),
            bells: workers.iter().map(|_| Condvar::new()).collect(),
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

    /// Has a thread do the job, and answers what it comes to. Whoever stops waiting changes nothing
    /// for the job.
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
            self.queue.bells[number].notify_one();
        }
        Ok(receiver)
    }

    /// Takes no more jobs, drops those that have not begun and waits for the others.
    pub(crate) async fn close(&self) {
        let given_up = {
            let mut waiting = self.queue.waiting.lock();
            waiting.closed = true;
            std::mem::take(&mut waiting.jobs)
        };
        // They own pages, whose return may wake others.
        drop(given_up);
        self.queue.ring_all();
        self.queue.jobs.none().await;
    }
}

impl<W> Crew<W> {
    /// How many threads wait for a job.
    pub(crate) fn idle(&self) -> usize {
        self.queue.waiting.lock().idle.len()
    }

    /// How many jobs wait for a thread.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.waiting.lock().jobs.len()
    }
}

impl<W> Drop for Crew<W> {
    fn drop(&mut self) {
        self.queue.waiting.lock().closed = true;
        self.queue.ring_all();
    }
}

impl<W> fmt::Debug for Crew<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Crew with {} jobs waiting", self.waiting())
    }
}

impl<W> Queue<W> {
    fn ring_all(&self) {
        for bell in &self.bells {
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
                self.bells[number].wait(&mut waiting);
                waiting.idle.retain(|idle| *idle != number);
            };
            // It ends even if the job panics and takes this thread with it.
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
    async fn so_many_jobs_wait_and_no_more() {
        let crew = Crew::new(vec![()], 1).unwrap();
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
    async fn the_last_to_end_a_job_gets_the_next() {
        let crew = Crew::new(vec![0, 1, 2, 3], 8).unwrap();
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
    async fn closing_waits_for_what_has_begun_and_drops_the_rest() {
        let crew = Arc::new(Crew::new(vec![()], 8).unwrap());
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
