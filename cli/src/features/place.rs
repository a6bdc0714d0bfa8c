//! Where samples are, and how a process gets at them.
//!
//! A store on disk has one user at a time, so those who share one take turns: open, work for a moment,
//! close. A cluster has many, and a process keeps its connection.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use terrace_l3::{Arena, Registration, Store};
use terrace_l3_disk::{DiskConfig, DiskStore, OpenError};
use terrace_l3_features::{FeatureConfig, FeatureStore, GcReport};
use terrace_l3_mooncake::{MooncakeConfig, MooncakeStore};
use terrace_server::L3Choice;

type Failure = Box<dyn Error>;

/// A kind of store, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Disk(PathBuf),
    /// The address of the cluster's master.
    Mooncake(String),
}

impl Place {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(L3Choice::Disk(folder)) => Ok(Self::Disk(folder)),
            Ok(L3Choice::Mooncake(master)) => Ok(Self::Mooncake(master)),
            Ok(L3Choice::Memory(_) | L3Choice::Nodes(_) | L3Choice::None) | Err(_) => {
                Err("a store is disk:FOLDER or mooncake://HOST:PORT".to_owned())
            }
        }
    }

    /// The folder that refs go through if none is named.
    pub(super) fn refs(&self) -> Result<PathBuf, Failure> {
        match self {
            Self::Disk(folder) => Ok(folder.join("refs")),
            Self::Mooncake(_) => {
                Err("a cluster has no folder for refs: name one by --refs FOLDER, \
                                      the same for producers and consumers"
                    .into())
            }
        }
    }

    /// Whether processes take turns.
    pub(super) fn takes_turns(&self) -> bool {
        match self {
            Self::Disk(_) => true,
            Self::Mooncake(_) => false,
        }
    }
}

#[derive(Args)]
pub(super) struct MooncakeArguments {
    /// The libmooncake_store.so of your Mooncake installation, for --store mooncake://HOST:PORT
    #[arg(long, value_name = "PATH", env = "TERRACE_MOONCAKE_LIBRARY")]
    mooncake_library: Option<PathBuf>,
    /// How bytes travel to and from the Mooncake cluster: tcp or rdma
    #[arg(long, value_name = "NAME", env = "TERRACE_MOONCAKE_PROTOCOL", default_value = "tcp")]
    mooncake_protocol: String,
    /// The network devices for rdma [default: the library's choice]
    #[arg(long, value_name = "NAMES", env = "TERRACE_MOONCAKE_DEVICE")]
    mooncake_device: Option<String>,
}

/// How large things are, and how long a turn lasts.
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
    tended: Instant,
}

impl Turn {
    /// Waits until nobody else has the store, and opens it.
    pub(super) async fn begin(
        place: &Place,
        mooncake: &MooncakeArguments,
        sizes: Sizes,
        config: &FeatureConfig,
        pages: u32,
    ) -> Result<Self, Failure> {
        let (store, ends): (Arc<dyn Store>, _) = match place {
            Place::Disk(folder) => {
                (open_disk(folder, sizes).await?, Some(Instant::now() + sizes.turn))
            }
            Place::Mooncake(master) => (open_mooncake(master, mooncake, sizes)?, None),
        };
        let features = FeatureStore::open(store.clone(), config.clone()).await?;
        let (arena, registration) = memory(&features, pages, sizes.tensor_bytes)?;
        let tended = Instant::now();
        Ok(Self { store, features, arena, _registration: registration, ends, tended })
    }

    /// Has memory for a sample of so many tensors.
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

    /// Whether others can use the store meanwhile.
    pub(super) fn is_shared(&self) -> bool {
        self.ends.is_none()
    }

    /// Collects garbage now and then.
    pub(super) async fn tend(&mut self) -> Result<(), Failure> {
        const PAUSE: Duration = Duration::from_secs(1);
        if self.tended.elapsed() >= PAUSE {
            self.gc().await?;
        }
        Ok(())
    }

    pub(super) async fn gc(&mut self) -> Result<GcReport, Failure> {
        self.tended = Instant::now();
        Ok(self.features.gc().await?)
    }

    /// Gives the store to whoever waits for it.
    pub(super) async fn end(self) -> Result<(), Failure> {
        self.store.shutdown().await?;
        let others_wait = !self.is_shared();
        drop(self);
        if others_wait {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }
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
    arguments: &MooncakeArguments,
    sizes: Sizes,
) -> Result<Arc<MooncakeStore>, Failure> {
    const PATIENCE: Duration = Duration::from_secs(30);
    let library = arguments.mooncake_library.as_ref().ok_or(
        "a Mooncake cluster needs the library of your installation: name its libmooncake_store.so by \
         --mooncake-library, or use --store disk:FOLDER",
    )?;
    let config = MooncakeConfig {
        protocol: arguments.mooncake_protocol.clone(),
        device: arguments.mooncake_device.clone().unwrap_or_default(),
        ..MooncakeConfig::new(library, master, sizes.capacity_bytes, object_bytes_max(sizes))
    };
    let store = MooncakeStore::open(config.for_features())?;
    if !store.wait_until_connected(PATIENCE) {
        return Err(format!(
            "the Mooncake master at {master} was not reached within {PATIENCE:?}: is the address \
             right, does the master run, and is it of the same version as the library?"
        )
        .into());
    }
    Ok(Arc::new(store))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_written_as_for_serve() {
        assert_eq!(Place::parse("disk:a/b"), Ok(Place::Disk("a/b".into())));
        let master = Place::Mooncake("[::1]:50051".to_owned());
        assert_eq!(Place::parse("mooncake://[::1]:50051"), Ok(master));
        for wrong in ["", "nowhere", "none", "memory:1GiB", "disk:", "mooncake://host"] {
            assert!(Place::parse(wrong).unwrap_err().contains("mooncake://HOST:PORT"), "{wrong}");
        }
    }
}
