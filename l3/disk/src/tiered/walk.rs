//! Read path through the tiers: memory, then active promotions, then disk.

use std::future::Future;
use std::time::Duration;

use tokio::time::timeout;

use super::TieredCore;
use terrace_l3::{GetOptions, ObjectId, Results, StoreError};

/// Parts of a batch, each with its index in it.
pub(super) type Numbered<T> = Vec<(usize, T)>;

/// Read operations of each tier.
pub(super) trait TierReader: Sync {
    /// Request for one object.
    type Wanted: Send;
    /// Result for one object.
    type Output: Send;

    fn id(job: &Self::Wanted) -> ObjectId;

    /// Reads the objects in memory, and returns the others.
    fn read_memory(
        &self,
        jobs: Numbered<Self::Wanted>,
        waited: bool,
        answered: &mut Numbered<Result<Self::Output, StoreError>>,
    ) -> impl Future<Output = Numbered<Self::Wanted>> + Send;

    fn read_disk(
        &self,
        jobs: Numbered<Self::Wanted>,
        how: FromDisk,
    ) -> impl Future<Output = Numbered<Result<Self::Output, StoreError>>> + Send;
}

/// Circumstances of a read from disk.
#[derive(Clone, Copy, Debug)]
pub(super) struct FromDisk {
    /// The read waited for a promotion that failed.
    pub(super) waited: bool,
    /// Nothing else of the batch is read from disk.
    pub(super) alone: bool,
}

impl TieredCore {
    /// Reads a batch. Waits for active promotions, all at once, while the disk reads the rest.
    pub(super) async fn walk<R: TierReader>(
        &self,
        reading: &R,
        jobs: Vec<R::Wanted>,
        options: GetOptions,
    ) -> Results<R::Output> {
        let objects = jobs.len();
        let mut answered = Vec::with_capacity(objects);
        // Before memory is read: an object promoted meanwhile would otherwise be found in neither.
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

    async fn read_promoted<R: TierReader>(
        &self,
        reading: &R,
        jobs: Numbered<R::Wanted>,
        wait: Duration,
        alone: bool,
    ) -> Numbered<Result<R::Output, StoreError>> {
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
