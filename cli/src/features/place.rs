//! Stores of samples, and access to them.
//!
//! A store on disk has one user at a time, so those who share one take turns: open, work for a moment,
//! close. A cluster and nodes have many, and a process keeps its connection.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_l3::{Arena, Registration, Store, StoreError};
use terrace_l3_disk::{DiskConfig, DiskStore, OpenError};
use terrace_l3_features::{FeatureConfig, FeatureError, FeatureStore, GcReport};
use terrace_l3_mooncake::MooncakeStore;
use terrace_l3_nodes::NodesStore;
use terrace_server::{Config, L3Choice};

type Failure = Box<dyn Error>;

/// A kind of store, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Disk(PathBuf),
    /// The address of the cluster's master.
    Mooncake(String),
    /// The nodes, as `L3Choice` has them.
    Nodes(String),
    /// The URL of a bucket.
    Bucket(String),
}

impl Place {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(L3Choice::Disk(folder)) => Ok(Self::Disk(folder)),
            Ok(L3Choice::Mooncake(master)) => Ok(Self::Mooncake(master)),
            Ok(L3Choice::Nodes(nodes)) => Ok(Self::Nodes(nodes)),
            Ok(L3Choice::Bucket(url)) => Ok(Self::Bucket(url)),
            Ok(L3Choice::Memory(_) | L3Choice::None) | Err(_) => {
                let places = "disk:FOLDER, mooncake://HOST:PORT, nodes://HOST:PORT,HOST:PORT or \
                              s3://BUCKET/PREFIX";
                Err(format!("write the store as {places}"))
            }
        }
    }

    /// The folder that refs go through if none is named.
    pub(super) fn refs(&self) -> Result<PathBuf, Failure> {
        match self {
            Self::Disk(folder) => Ok(folder.join("refs")),
            Self::Mooncake(_) | Self::Nodes(_) | Self::Bucket(_) => {
                Err("a cluster has no folder for refs: give one with --refs FOLDER, \
                                      the same for producers and consumers"
                    .into())
            }
        }
    }

    /// Returns whether processes take turns.
    pub(super) fn takes_turns(&self) -> bool {
        match self {
            Self::Disk(_) => true,
            Self::Mooncake(_) | Self::Nodes(_) | Self::Bucket(_) => false,
        }
    }
}

/// Sizes, and the length of a turn.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) capacity_bytes: u64,
    pub(super) tensor_bytes: usize,
    pub(super) turn: Duration,
}

/// A time in which this process has the store.
pub(super) struct Turn {
    pub(super) store: Arc<dyn Store>,
    pub(super) features: FeatureStore,
    pub(super) arena: Arena,
    _registration: Registration,
    /// `None` if nobody else waits for the store.
    ends: Option<Instant>,
    /// Returns whether samples may be in memory of this process, and are lost with it.
    pub(super) offers_segment: bool,
    tended: Instant,
}

impl Turn {
    /// Waits until nobody else has the store, and opens it.
    pub(super) async fn begin(
        place: &Place,
        clusters: &Config,
        sizes: Sizes,
        config: &FeatureConfig,
        pages: u32,
    ) -> Result<Self, Failure> {
        let (store, ends): (Arc<dyn Store>, _) = match place {
            Place::Disk(folder) => {
                (open_disk(folder, sizes).await?, Some(Instant::now() + sizes.turn))
            }
            Place::Mooncake(master) => (open_mooncake(master, clusters, sizes)?, None),
            Place::Nodes(nodes) => (open_nodes(nodes, clusters, sizes).await?, None),
            Place::Bucket(url) => (open_bucket(url, sizes)?, None),
        };
        let since = Instant::now();
        let features = loop {
            match FeatureStore::open(store.clone(), config.clone()).await {
                Err(error) if is_away(&error) && since.elapsed() < AWAY_MAX => {
                    tokio::time::sleep(PAUSE).await;
                }
                opened => break opened?,
            }
        };
        let (arena, registration) = memory(&features, pages, sizes.tensor_bytes)?;
        let offers_segment =
            matches!(place, Place::Mooncake(_)) && clusters.mooncake_segment.as_u64() > 0;
        Ok(Self {
            store,
            features,
            arena,
            _registration: registration,
            ends,
            offers_segment,
            tended: Instant::now(),
        })
    }

    /// Allocates memory for a sample with the given number of tensors.
    pub(super) fn fit(&mut self, pages: u32) -> Result<(), Failure> {
        if self.arena.pages() < pages {
            (self.arena, self._registration) =
                memory(&self.features, pages, self.arena.page_bytes())?;
        }
        Ok(())
    }

    pub(super) fn is_over(&self) -> bool {
        self.ends.is_some_and(|ends| Instant::now() >= ends)
    }

    /// Returns whether other processes can use the store during this turn.
    pub(super) fn is_shared(&self) -> bool {
        self.ends.is_none()
    }

    /// Collects garbage now and then.
    pub(super) async fn tend(&mut self) -> Result<(), Failure> {
        const INTERVAL: Duration = Duration::from_secs(1);
        if self.tended.elapsed() >= INTERVAL {
            self.tended = Instant::now();
            match self.features.gc().await {
                // Another time.
                Err(error) if is_away(&error) => {}
                collected => drop(collected?),
            }
        }
        Ok(())
    }

    pub(super) async fn gc(&mut self) -> Result<GcReport, Failure> {
        self.tended = Instant::now();
        Ok(self.features.gc().await?)
    }

    /// Gives the store to whoever waits for it.
    pub(super) async fn end(self) -> Result<(), Failure> {
        match self.features.close().await {
            // It is taken from this process the next time.
            Err(error) if is_away(&error) => {}
            closed => closed?,
        }
        self.store.shutdown().await?;
        let others_wait = !self.is_shared();
        drop(self);
        if others_wait {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
}

/// Wait for a node that does not answer: it may be busy or starting.
pub(super) const AWAY_MAX: Duration = Duration::from_secs(10);
/// And so long before it is asked again.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// Returns whether a call failed because a node does not answer. Such a call has changed nothing.
pub(super) fn is_away(error: &FeatureError) -> bool {
    matches!(error, FeatureError::Store { error: StoreError::HolderAway, .. })
}

/// Memory that a store moves without a copy.
fn memory(
    features: &FeatureStore,
    pages: u32,
    bytes: usize,
) -> Result<(Arena, Registration), Failure> {
    let arena = Arena::with_headroom(pages.max(1), bytes)?;
    let registration = features.register(&arena)?;
    Ok((arena, registration))
}

/// A store has notes as well as tensors.
fn object_bytes_max(sizes: Sizes) -> usize {
    sizes.tensor_bytes.max(4096)
}

async fn open_disk(folder: &Path, sizes: Sizes) -> Result<Arc<DiskStore>, Failure> {
    const PATIENCE: Duration = Duration::from_secs(60);
    let disk = DiskConfig::new(folder, sizes.capacity_bytes, object_bytes_max(sizes));
    let waiting_since = Instant::now();
    loop {
        match DiskStore::open(disk.clone()) {
            Ok(store) => return Ok(Arc::new(store)),
            Err(OpenError::InUse { .. }) if waiting_since.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

fn open_mooncake(
    master: &str,
    clusters: &Config,
    sizes: Sizes,
) -> Result<Arc<MooncakeStore>, Failure> {
    const PATIENCE: Duration = Duration::from_secs(30);
    let config = clusters.mooncake(master, sizes.capacity_bytes, object_bytes_max(sizes))?;
    let store = MooncakeStore::open(config.for_features())?;
    store.connect_within(PATIENCE)?;
    Ok(Arc::new(store))
}

async fn open_nodes(
    nodes: &str,
    clusters: &Config,
    sizes: Sizes,
) -> Result<Arc<NodesStore>, Failure> {
    let store = NodesStore::new(clusters.nodes(nodes)?)?;
    store.reach_within(AWAY_MAX).await?;
    let needed = object_bytes_max(sizes) as u64;
    for node in store.peers().into_iter().filter(|node| node.is_up) {
        if node.object_bytes_max < needed {
            return Err(format!(
                "node {} takes objects up to {}, but a tensor has {needed}: start it with --object-max \
                 {needed} or more, or use a smaller --tensor",
                node.name, node.object_bytes_max
            )
            .into());
        }
    }
    Ok(Arc::new(store))
}

#[cfg(feature = "buckets")]
fn open_bucket(url: &str, sizes: Sizes) -> Result<Arc<dyn Store>, Failure> {
    use terrace_l3_buckets::{BucketsConfig, BucketsStore};
    let config = BucketsConfig::new(url, sizes.capacity_bytes, object_bytes_max(sizes));
    Ok(Arc::new(BucketsStore::open(config)?))
}

#[cfg(not(feature = "buckets"))]
fn open_bucket(url: &str, _: Sizes) -> Result<Arc<dyn Store>, Failure> {
    Err(format!("this build does not support buckets ({url}): build it with `--features buckets`")
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_written_as_for_serve() {
        assert_eq!(Place::parse("disk:a/b"), Ok(Place::Disk("a/b".into())));
        let master = Place::Mooncake("[::1]:50051".to_owned());
        assert_eq!(Place::parse("mooncake://[::1]:50051"), Ok(master));
        let nodes = Place::Nodes("one=10.0.0.1:7450,10.0.0.2:7450".to_owned());
        assert_eq!(Place::parse("nodes://one=10.0.0.1:7450,10.0.0.2:7450"), Ok(nodes));
        let bucket = Place::Bucket("file:///mnt/shared".to_owned());
        assert_eq!(Place::parse("bucket:file:///mnt/shared"), Ok(bucket));
        for wrong in ["", "nowhere", "none", "memory:1GiB", "disk:", "mooncake://host"] {
            assert!(Place::parse(wrong).unwrap_err().contains("mooncake://HOST:PORT"), "{wrong}");
        }
    }
}
