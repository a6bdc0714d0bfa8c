//! Memory-bound work shared by several threads: one core cannot saturate the memory bandwidth.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread;

use parking_lot::Mutex;

/// Minimum share of a thread. Below it, starting the thread takes longer than it saves.
const SHARE_BYTES_MIN: usize = 4 << 20;

/// Maximum number of threads. More of them do not read faster, and other work needs cores too.
const THREADS_MAX: usize = 4;

/// Number of threads that should share work on `bytes` bytes.
pub(crate) fn threads_for(bytes: usize) -> usize {
    (bytes / SHARE_BYTES_MIN).clamp(1, cores().min(THREADS_MAX))
}

/// Runs jobs on `threads` threads and returns their results in the order of the jobs.
pub(crate) fn share_out<J: Send, R: Send>(
    threads: usize,
    jobs: impl Iterator<Item = J> + Send,
    work: impl Fn(J) -> R + Sync,
) -> Vec<R> {
    if threads == 1 {
        return jobs.map(work).collect();
    }
    let left = Mutex::new(jobs.enumerate());
    let done = Mutex::new(Vec::new());
    let next = || left.lock().next();
    let take_turns = || {
        while let Some((place, job)) = next() {
            let result = work(job);
            done.lock().push((place, result));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            // If no thread can be started, the calling thread does the work.
            let _ = thread::Builder::new().spawn_scoped(scope, take_turns);
        }
        take_turns();
    });
    let mut done = done.into_inner();
    done.sort_unstable_by_key(|(place, _)| *place);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Number of threads that can run at once. Cached, since the system takes a while to answer.
pub fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_is_done_once_and_results_have_its_order() {
        for threads in 1..5 {
            let squares = share_out(threads, 0..1_000u64, |number| number * number);
            assert_eq!(squares, (0..1_000).map(|number| number * number).collect::<Vec<u64>>());
        }
        assert_eq!(share_out(3, 0..0, |number: u64| number), []);
    }
}
