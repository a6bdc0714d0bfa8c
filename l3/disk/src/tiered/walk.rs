//! The way of a read through the tiers: memory first, then what is on its way there, then the disk.

use std::future::Future;
use std::time::Duration;

use tokio::time::timeout;

use super::Shared;
use terrace_l3::{GetOptions, ObjectId, Results, StoreError};

/// Parts of a batch, each with its place in it.
pub(super) type Numbered<T> = Vec<(usize, T)>;

/// How something is read from each tier.
pub(super) trait Reading: Sync {
    /// What is to be read.
    type Job: Send;
    /// What comes of it.
    type Answer: Send;

    fn id(job: &Self::Job) -> ObjectId;

    /// Answers what is in memory, and hands back the rest.
    fn read_memory(
        &self,
        jobs: Numbered<Self::Job>,
        waited: bool,
        answered: &mut Numbered<Result<Self::Answer, StoreError>>,
    ) -> impl Future<Output = Numbered<Self::Job>> + Send;

    fn read_disk(
        &self,
        jobs: Numbered<Self::Job>,
        how: FromDisk,
    ) -> impl Future<Output = Numbered<Result<Self::Answer, StoreError>>> + Send;
}

/// How the disk is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct FromDisk {
    /// A promotion was waited for, in vain.
    pub(super) waited: bool,
    /// Nothing else of the batch is read from disk.
    pub(super) alone: bool,
}

impl Shared {
    /// Reads a batch. Promotions under way are waited for, all at once, while the disk is asked for the rest.
    pub(super) async fn walk<R: Reading>(
        &self,
        reading: &R,
        jobs: Vec<R::Job>,
        options: GetOptions,
    ) -> Results<R::Answer> {
        let objects = jobs.len();
        let mut answered = Vec::with_capacity(objects);
        // Before memory: what is promoted while memory is read would else be found in neither.
        let active = self.board.active(jobs.iter().map(R::id));
        let jobs = jobs.into_iter().enumerate().collect();
        let left = reading.read_memory(jobs, false, &mut answered).await;
        let wait = options.promotion_wait;
        let wait = wait.unwrap_or(Duration::from_millis(self.config.promotion.get_wait_ms));
        let (mut promoted, mut rest) = (Vec::new(), Vec::new());
        for (number, job) in left {
            let on_its_way = active[number] && !wait.is_zero();
            if on_its_way { promoted.push((number, job)) } else { rest.push((number, job)) }
        }
        let alone = rest.is_empty();
        let from_disk = async {
            let how = FromDisk { waited: false, alone: true };
            if alone { Vec::new() } else { reading.read_disk(rest, how).await }
        };
        let (from_disk, promoted) =
            tokio::join!(from_disk, self.read_promoted(reading, promoted, wait, alone));
        let mut results: Vec<_> = (0..objects).map(|_| None).collect();
        for (number, result) in answered.into_iter().chain(from_disk).chain(promoted) {
            results[number] = Some(result);
        }
        results.into_iter().map(|result| result.expect("each is answered")).collect()
    }

    async fn read_promoted<R: Reading>(
        &self,
        reading: &R,
        jobs: Numbered<R::Job>,
        wait: Duration,
        alone: bool,
    ) -> Numbered<Result<R::Answer, StoreError>> {
        if jobs.is_empty() {
            return Vec::new();
        }
        let ids: Vec<ObjectId> = jobs.iter().map(|(_, job)| R::id(job)).collect();
        if timeout(wait, self.board.settled(&ids)).await.is_err() {
            self.count_expired();
        }
        let mut answered = Vec::with_capacity(jobs.len());
        let left = reading.read_memory(jobs, true, &mut answered).await;
        if !left.is_empty() {
            answered.extend(reading.read_disk(left, FromDisk { waited: true, alone }).await);
        }
        answered
    }
}
