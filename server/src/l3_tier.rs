//! L3 as the settings describe it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use terrace_l3::{GuardConfig, Guarded, MemoryConfig, MemoryStore, Store, TierStats};
use terrace_l3_mooncake::MooncakeStore;
use terrace_l3_nodes::{NodesConfig, NodesError, NodesStore, PeerStats, RdmaChoice};

use crate::config::{Config, L3Choice};
use crate::disk_tier::DiskTier;
use crate::launch::LaunchError;
use crate::launch::sizes::Sizes;
use crate::summary::Tier;

/// A store and what is to be said about it.
pub(crate) struct OpenedL3 {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) tier: Tier,
    /// A secret that only those know who have the store.
    pub(crate) secret: Option<String>,
}

/// Opens the store that the settings name; none where they ask for none.
pub(crate) fn open_l3(config: &Config, sizes: &Sizes) -> Result<Option<OpenedL3>, LaunchError> {
    if sizes.host_pages == 0 {
        return match config.l3 {
            Some(
                L3Choice::Disk(_)
                | L3Choice::Memory(_)
                | L3Choice::Mooncake(_)
                | L3Choice::Nodes(_)
                | L3Choice::Bucket(_),
            ) => Err(LaunchError::NoHost),
            Some(L3Choice::None) | None => Ok(None),
        };
    }
    let mut guard = GuardConfig::default();
    let (mut on_nodes, mut notes, mut secret) = (None, Vec::new(), None);
    let mut on_disk = |folder: Option<&Path>| -> Result<Opened, LaunchError> {
        let disk = DiskTier::open(folder, config, sizes.page_bytes)?;
        (notes, secret) = (disk.notes, disk.secret);
        Ok((disk.store, Some(disk.place)))
    };
    let (store, place): (Arc<dyn Store>, _) = match &config.l3 {
        Some(L3Choice::None) => return Ok(None),
        Some(L3Choice::Memory(size)) => {
            let memory = MemoryConfig::new(size.as_u64(), sizes.page_bytes);
            (Arc::new(MemoryStore::new(memory).map_err(LaunchError::L3Memory)?), None)
        }
        Some(L3Choice::Mooncake(master)) => {
            // A cluster that comes back is found within seconds: one thread waits for it at a time.
            guard.pause_max_ms = 5_000;
            open_mooncake(master, config, sizes)?
        }
        Some(L3Choice::Nodes(nodes)) => {
            // Longer than a node may take: one that is away must not make the others look unwell.
            guard.exists_timeout_ms = 500;
            guard.get_timeout_ms = 2_000;
            guard.put_timeout_ms = 10_000;
            guard.control_timeout_ms = 2_000;
            guard.pause_max_ms = 2_000;
            let (opened, all) = open_nodes(nodes, config, sizes)?;
            on_nodes = Some(all);
            opened
        }
        Some(L3Choice::Bucket(url)) => {
            // A bucket that is far away takes longer than a disk, and is not unwell for that.
            guard.exists_timeout_ms = 1_000;
            guard.get_timeout_ms = 5_000;
            guard.put_timeout_ms = 10_000;
            guard.control_timeout_ms = 5_000;
            guard.pause_max_ms = 5_000;
            open_bucket(url, config, sizes)?
        }
        Some(L3Choice::Disk(folder)) => on_disk(Some(folder))?,
        None => on_disk(None)?,
    };
    let stats = store.stats();
    let lowest = on_nodes.or(stats.remote).or(stats.disk).or(stats.memory).unwrap_or_default();
    let pages = lowest.capacity_bytes / sizes.page_bytes as u64;
    let tier = sizes.tier_of(lowest.capacity_bytes, pages, lowest.objects, place);
    let tier = Tier { notes, ..tier };
    let store = Arc::new(Guarded::new(store, guard));
    Ok(Some(OpenedL3 { store, tier, secret }))
}

/// A store, and where it is, in words.
type Opened = (Arc<dyn Store>, Option<String>);

/// Opens the library and tries the cluster. One that cannot be reached now may be later, so the server
/// starts all the same; a library that cannot be used never will.
fn open_mooncake(master: &str, config: &Config, sizes: &Sizes) -> Result<Opened, LaunchError> {
    const PATIENCE: Duration = Duration::from_secs(2);
    let mooncake = config.mooncake(master, config.l3_capacity.as_u64(), sizes.page_bytes)?;
    let store = MooncakeStore::open(mooncake).map_err(LaunchError::L3Mooncake)?;
    let reached = if store.wait_until_connected(PATIENCE) { "" } else { ", not reached yet" };
    Ok((Arc::new(store), Some(format!("the Mooncake cluster at {master}{reached}"))))
}

/// Nothing is asked of the bucket yet: one that cannot be reached now may be later.
#[cfg(feature = "buckets")]
fn open_bucket(url: &str, config: &Config, sizes: &Sizes) -> Result<Opened, LaunchError> {
    use terrace_l3_buckets::{BucketsConfig, BucketsStore};
    let bucket = BucketsConfig::new(url, config.l3_capacity.as_u64(), sizes.page_bytes);
    let store =
        BucketsStore::open(bucket).map_err(|error| LaunchError::L3Bucket(error.to_string()))?;
    Ok((Arc::new(store), Some(format!("the bucket {url}"))))
}

#[cfg(not(feature = "buckets"))]
fn open_bucket(_: &str, _: &Config, _: &Sizes) -> Result<Opened, LaunchError> {
    Err(LaunchError::L3Bucket(
        "this build does not support buckets: build it with `--features buckets`".to_owned(),
    ))
}

/// Looks which of the nodes are there, and what they hold. Those that are not may come later, so the
/// server starts all the same.
fn open_nodes(
    nodes: &str,
    config: &Config,
    sizes: &Sizes,
) -> Result<(Opened, TierStats), LaunchError> {
    let nodes = config.nodes(nodes)?;
    let unusable = |error: NodesError| LaunchError::L3Nodes(error.to_string());
    let store = NodesStore::new(nodes.clone()).map_err(unusable)?;
    let seen = look_at(nodes).map_err(LaunchError::L3Nodes)?;
    for node in seen.iter().filter(|node| node.is_up) {
        if node.object_bytes_max < sizes.page_bytes as u64 {
            return Err(LaunchError::L3Nodes(format!(
                "node {} takes objects up to {}, but a page of this model has {}: start it with \
                 --object-max {} or more",
                node.name, node.object_bytes_max, sizes.page_bytes, sizes.page_bytes
            )));
        }
    }
    let reached = seen.iter().filter(|node| node.is_up).count();
    let place = match seen.len() {
        1 if reached == 1 => "a node".to_owned(),
        all if reached == all => format!("{all} nodes"),
        all => format!("{all} nodes, {reached} of them answer"),
    };
    let all = TierStats {
        objects: seen.iter().map(|node| node.objects).sum(),
        capacity_bytes: seen.iter().map(|node| node.capacity_bytes).sum(),
        ..TierStats::default()
    };
    Ok(((Arc::new(store), Some(place)), all))
}

/// What the nodes say about themselves at the moment. The runtime that this is called from cannot wait,
/// so another one does.
fn look_at(nodes: NodesConfig) -> Result<Vec<PeerStats>, String> {
    let look = move || -> Result<Vec<PeerStats>, String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| error.to_string())?;
        let nodes = NodesConfig { rdma: RdmaChoice::Never, ..nodes };
        let store = NodesStore::new(nodes).map_err(|error| error.to_string())?;
        runtime.block_on(store.reach());
        Ok(store.peers())
    };
    std::thread::spawn(look).join().map_err(|_| "the lookup failed".to_owned())?
}
