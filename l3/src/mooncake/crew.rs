//! Threads that make the library's calls, all of which block.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, oneshot};

/// Threads with a queue. Dropping it lets the threads go when they have done what they are at.
pub(crate) struct Crew<W> {
    queue: Arc<Queue<W>>,
}

type Job<W> = Box<dyn FnOnce(&mut W) + Send>;

struct Queue<W> {
    waiting: Mutex<Waiting<W>>,
    changed: Condvar,
    idle: Notify,
}

struct Waiting<W> {
    jobs: VecDeque<Job<W>>,
    jobs_max: usize,
    busy: usize,
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
        let waiting = Waiting { jobs: VecDeque::new(), jobs_max, busy: 0, closed: false };
        let queue = Arc::new(Queue {
            waiting: Mutex::new(waiting),
            changed: Condvar::new(),
            idle: Notify::new(),
        });
        let crew = Self { queue };
        for mut worker in workers {
            let queue = crew.queue.clone();
            let name = "terrace-mooncake".to_owned();
            std::thread::Builder::new().name(name).spawn(move || queue.work(&mut worker))?;
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
        drop(waiting);
        self.queue.changed.notify_one();
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
        self.queue.changed.notify_all();
        loop {
            let mut idle = std::pin::pin!(self.queue.idle.notified());
            idle.as_mut().enable();
            if self.queue.waiting.lock().busy == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl<W> Crew<W> {
    /// How many jobs wait for a thread.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.waiting.lock().jobs.len()
    }
}

impl<W> Drop for Crew<W> {
    fn drop(&mut self) {
        self.queue.waiting.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl<W> fmt::Debug for Crew<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Crew with {} jobs waiting", self.waiting())
    }
}

impl<W> Queue<W> {
    fn work(&self, worker: &mut W) {
        loop {
            let mut waiting = self.waiting.lock();
            let job = loop {
                if let Some(job) = waiting.jobs.pop_front() {
                    break job;
                }
                if waiting.closed {
                    return;
                }
                self.changed.wait(&mut waiting);
            };
            waiting.busy += 1;
            drop(waiting);
            // Counted as done even if the job panics and takes this thread with it.
            let _done = Done(self);
            job(worker);
        }
    }
}

struct Done<'a, W>(&'a Queue<W>);

impl<W> Drop for Done<'_, W> {
    fn drop(&mut self) {
        self.0.waiting.lock().busy -= 1;
        self.0.idle.notify_waiters();
    }
}

#[cfg(all(test, not(feature = "loom")))]
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
