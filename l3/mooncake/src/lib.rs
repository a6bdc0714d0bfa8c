//! L3 in a Mooncake cluster, which several servers share.
//!
//! An object is one value in the cluster: our header, then the payload. It is two values if the
//! payload is in memory without room for a header in front, because the library takes one piece of
//! memory per value and a copy would be needed otherwise. The header verifies everything that is
//! read, so an old or foreign value under a key is a miss and never wrong bytes.
//!
//! The cluster does not guarantee all that a [`Store`] does; this crate adds the rest. It keeps
//! pins, leases, generations and the eviction order for the objects that this client has put, in a
//! catalogue like that of any other store. It also keeps the client's share of the cluster and
//! evicts from it. Objects of other clients are looked up and read, and belong to them.

mod codes;
mod connection;
mod control;
mod crew;
mod get;
mod keeper;
mod ledger;
mod library;
mod plain;
mod put;
mod stats;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::BTreeSet;
use std::ffi::CString;
use std::io;
use std::net::{ToSocketAddrs, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

pub use self::codes::OutcomeCount;
use self::codes::{Call, Outcome, Outcomes};
use self::connection::{Connection, OWN_SEGMENT, Way};
use self::crew::{Crew, Refused};
use self::ledger::{Ledger, Seen};
pub use self::library::LibraryError;
use self::library::{Client, ClientMemory, Endpoint, Library, Placement};
pub use self::plain::PlainCalls;
pub use self::stats::MooncakeStats;
use self::worker::Worker;
use terrace_l3::backend::{Traffic, cores, slots_of};
use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, HEADER_BYTES, ObjectId, Pin, Presence, Put,
    PutOptions, Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored,
    TierStats,
};

/// Which cluster, and how much of it to use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MooncakeConfig {
    /// The `libmooncake_store.so` of the installation.
    pub library: PathBuf,
    /// HOST:PORT of the master.
    pub master: String,
    /// Where the clients of the cluster find each other: the address of its metadata server, or
    /// `P2PHANDSHAKE` if it has none.
    pub metadata_server: String,
    /// How bytes travel: tcp or rdma.
    pub protocol: String,
    /// The network devices of an RDMA transport; empty for the library's choice.
    pub device: String,
    /// What the keys begin with. Those with different prefixes share nothing.
    pub prefix: String,
    /// What this client may put into the cluster; beyond that it removes what it misses least.
    pub capacity_bytes: u64,
    /// The largest object.
    pub object_bytes_max: usize,
    /// Memory that this process gives to the cluster, for as long as the store is open; 0 for none. Objects
    /// that the cluster has put there, this client's or others', are gone when the store is shut down.
    pub segment_bytes: u64,
    /// Memory that the library takes for itself; 0 for none. Pages do not pass through it.
    pub buffer_bytes: u64,
    /// In how many segments the cluster keeps each object of this client, where it has so many.
    pub replicas: u32,
    /// Segments that this client's objects go to while there is room, as the cluster names them;
    /// [`MooncakeConfig::OWN_SEGMENT`] is the one that is offered here.
    pub preferred_segments: Vec<String>,
    /// Objects of so many bytes and more that are put from memory without headroom, or read into it, are not
    /// copied: header and payload are two values then. Smaller ones are copied, which takes less than a
    /// second value.
    pub apart_bytes_min: usize,
    /// How long a lease protects from this client's own eviction and from plain removal. The cluster
    /// protects as long as its own setting says.
    pub lease_ttl_ms: u64,
    /// The share of this client's objects that may be leased at a time.
    pub leased_share_max: f64,
    /// How long a put may wait for room.
    pub full_wait_ms: u64,
    /// How long an object that was seen in the cluster is not asked about again. It should be some
    /// times the cluster's lease, which every question renews.
    pub seen_ttl_ms: u64,
    /// How many such objects are remembered.
    pub seen_max: u32,
    /// Threads that make calls. Each call blocks its own for as long as the library likes.
    pub threads: u32,
    /// How many calls may wait for a thread.
    pub queue_max: u32,
    /// Puts and gets of twice as many objects and more are cut into parts of at least so many, which
    /// threads that have nothing to do work on at the same time.
    pub part_objects_min: u32,
    /// How often leases of pinned objects are renewed and failed removals are tried again.
    pub keep_interval_ms: u64,
    /// How long to wait between tries to connect.
    pub connect_retry_ms: u64,
    /// How long pages of transfers that have failed are kept back, before another connection takes the
    /// place of the one that may still touch them.
    pub quarantine_ms: u64,
    /// Hard-pinned objects belong to all who use the cluster: they stay when this client is shut down,
    /// and only a removal ends them. Otherwise they go with the client, and one that is unpinned
    /// becomes like any other.
    pub pinned_stay: bool,
}

impl MooncakeConfig {
    /// What stands for this client's own segment among `preferred_segments`: the cluster names it anew at
    /// every start.
    pub const OWN_SEGMENT: &str = "own";

    /// A share of `capacity_bytes` of the cluster whose master is at `master`.
    #[must_use]
    pub fn new(
        library: impl Into<PathBuf>,
        master: impl Into<String>,
        capacity_bytes: u64,
        object_bytes_max: usize,
    ) -> Self {
        Self {
            library: library.into(),
            master: master.into(),
            metadata_server: "P2PHANDSHAKE".to_owned(),
            protocol: "tcp".to_owned(),
            device: String::new(),
            prefix: "terrace".to_owned(),
            capacity_bytes,
            object_bytes_max,
            segment_bytes: 0,
            buffer_bytes: 0,
            replicas: 1,
            preferred_segments: Vec::new(),
            apart_bytes_min: 256 << 10,
            lease_ttl_ms: 5_000,
            leased_share_max: 0.5,
            full_wait_ms: 500,
            seen_ttl_ms: 30_000,
            seen_max: 65_536,
            threads: 4,
            queue_max: 256,
            // The library has threads of its own, and where they need all cores parts wait for each other.
            part_objects_min: if cores() < CORES_FOR_PARTS { u32::MAX } else { 4 },
            keep_interval_ms: 1_000,
            connect_retry_ms: 2_000,
            quarantine_ms: 2_000,
            pinned_stay: false,
        }
    }

    /// The same for a store of features: samples outlive the process that
    /// has put them, and what another process has removed is never taken for being there.
    #[must_use]
    pub fn for_features(self) -> Self {
        Self { pinned_stay: true, seen_ttl_ms: 0, ..self }
    }
}

/// Why there can be no such store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MooncakeError {
    /// The library is not usable.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A setting makes no sense.
    #[error("{0}")]
    Setting(String),
    /// The system gives no threads or memory.
    #[error("cannot start the threads for Mooncake: {0}")]
    System(#[from] io::Error),
    /// The cluster was waited for in vain.
    #[error(
        "the Mooncake master at {master} was not reached within {patience:?}: is the address right, does the \
         master run, and is it of the same version as the library?"
    )]
    Away {
        /// Where it should be.
        master: String,
        /// How long it was waited for.
        patience: Duration,
    },
}

/// A store in a Mooncake cluster. Clones are the same store.
#[derive(Clone, Debug)]
pub struct MooncakeStore {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: MooncakeConfig,
    connection: Connection,
    ledger: Ledger,
    crew: Crew<Worker>,
    /// How many arenas are the store's own.
    own_arenas: usize,
    traffic: Traffic,
    outcomes: Outcomes,
    bounced_bytes: AtomicU64,
    closed: AtomicBool,
}

/// A batch is cut into so many parts at the most: twice as many as there are threads by default, so that
/// some compute while others wait for bytes.
const PARTS_MAX: usize = 8;

/// Removals are cut into parts of at least so many. The library has a call for each object and waits for the
/// master every time, which takes no core, so threads are worth their while on every machine.
const PART_REMOVALS_MIN: u32 = 8;

/// With fewer cores no batch is cut into parts, unless so configured.
const CORES_FOR_PARTS: usize = 8;

impl MooncakeStore {
    /// Opens the library and begins to connect. Until that has succeeded every call fails at once, and
    /// it is tried again for as long as the store lives.
    ///
    /// # Errors
    /// When the library cannot be used or a setting makes no sense.
    pub fn open(config: MooncakeConfig) -> Result<Self, MooncakeError> {
        let library = Library::open(&config.library)?;
        Self::with_library(config, library)
    }

    fn with_library(config: MooncakeConfig, library: Library) -> Result<Self, MooncakeError> {
        let slots = slots_of(config.capacity_bytes, config.object_bytes_max as u64);
        let slots = slots.map_err(MooncakeError::Setting)?;
        let connection = Connection::new(Arc::new(library), way(&config)?)?;
        let worker = || Worker::new(&connection, config.object_bytes_max);
        let workers: Vec<Worker> =
            (0..config.threads.max(1)).map(|_| worker()).collect::<io::Result<_>>()?;
        let keeper = worker()?;
        let seen = Seen::new(Duration::from_millis(config.seen_ttl_ms), config.seen_max as usize);
        let shared = Arc::new(Shared {
            ledger: Ledger::new(slots, seen),
            own_arenas: workers.len() + 1,
            crew: Crew::new(workers, config.queue_max as usize)?,
            traffic: Traffic::default(),
            outcomes: Outcomes::default(),
            bounced_bytes: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            connection,
            config,
        });
        keeper::start(&shared, keeper)?;
        Ok(Self { shared })
    }

    /// Waits until the cluster has been reached, and answers whether it has. It blocks its thread.
    #[must_use]
    pub fn wait_until_connected(&self, patience: Duration) -> bool {
        self.shared.connection.wait(patience)
    }

    /// As [`Self::wait_until_connected`], for those who cannot begin without the cluster.
    ///
    /// # Errors
    /// When it was not reached.
    pub fn connect_within(&self, patience: Duration) -> Result<(), MooncakeError> {
        match self.wait_until_connected(patience) {
            true => Ok(()),
            false => {
                Err(MooncakeError::Away { master: self.shared.config.master.clone(), patience })
            }
        }
    }

    /// What the cluster calls the segment that this store offers, once it does: by that name other clients
    /// can prefer it.
    #[must_use]
    pub fn segment(&self) -> Option<String> {
        self.shared.connection.segment().map(|name| name.to_string_lossy().into_owned())
    }

    /// How the cluster answers.
    #[must_use]
    pub fn cluster_stats(&self) -> MooncakeStats {
        let Shared { connection, ledger, crew, outcomes, .. } = &*self.shared;
        MooncakeStats {
            is_connected: connection.is_connected(),
            quarantined: connection.client().map_or(0, |client| client.kept() as u64),
            leaving: ledger.lock().leaving.len() as u64,
            waiting: crew.waiting() as u64,
            outcomes: outcomes.read(),
        }
    }

    /// Has a thread of the crew answer for so many objects.
    async fn ask<T: Clone + Send + 'static>(
        &self,
        objects: usize,
        job: impl FnOnce(&Shared, &mut Worker, &Arc<Client>) -> Results<T> + Send + 'static,
    ) -> Results<T> {
        match objects {
            0 => Vec::new(),
            _ => self.start(objects, job).answer().await,
        }
    }

    /// Has threads of the crew answer for a part of the objects each: while one of them computes
    /// checksums or waits for the master, the bytes and questions of others are on their way.
    async fn ask_in_parts<J: Send + 'static, T: Clone + Send + 'static>(
        &self,
        part_objects_min: u32,
        mut objects: Vec<J>,
        job: impl Fn(&Shared, &mut Worker, &Arc<Client>, Vec<J>) -> Results<T> + Copy + Send + 'static,
    ) -> Results<T> {
        let mut results = Vec::with_capacity(objects.len());
        let parts = parts_of(objects.len(), part_objects_min, self.shared.crew.idle());
        let mut started = Vec::with_capacity(parts);
        for left in (1..=parts).rev() {
            let rest = objects.split_off(objects.len().div_ceil(left));
            let part = std::mem::replace(&mut objects, rest);
            started.push(self.start(part.len(), move |shared, worker, client| {
                job(shared, worker, client, part)
            }));
        }
        for part in started {
            results.extend(part.answer().await);
        }
        results
    }

    fn start<T: Send + 'static>(
        &self,
        objects: usize,
        job: impl FnOnce(&Shared, &mut Worker, &Arc<Client>) -> Results<T> + Send + 'static,
    ) -> Started<T> {
        let start = || {
            self.shared.check_open()?;
            let client = self.shared.connection.client()?;
            let shared = self.shared.clone();
            self.shared.crew.start(move |worker| job(&shared, worker, &client)).map_err(|refused| {
                match refused {
                    Refused::Closed => StoreError::Closed,
                    Refused::QueueFull => {
                        let message = "all threads are busy and the queue is full";
                        let error = io::Error::new(io::ErrorKind::WouldBlock, message);
                        StoreError::io("asking Mooncake", &error)
                    }
                }
            })
        };
        Started { objects, answer: start() }
    }
}

/// A job that a thread of the crew has been given, if it could be.
struct Started<T> {
    objects: usize,
    answer: Result<oneshot::Receiver<Results<T>>, StoreError>,
}

impl<T: Clone> Started<T> {
    async fn answer(self) -> Results<T> {
        let answer = match self.answer {
            // A job that was dropped never began, because the store was shut down.
            Ok(answer) => answer.await.map_err(|_| StoreError::Closed),
            Err(error) => Err(error),
        };
        answer.unwrap_or_else(|error| vec![Err(error); self.objects])
    }
}

impl Shared {
    fn check_open(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::Acquire) { Err(StoreError::Closed) } else { Ok(()) }
    }

    /// The key of an object: what it is named by, in full.
    fn key(&self, id: &ObjectId) -> CString {
        let ObjectId { namespace, key, generation } = id;
        let prefix = &self.config.prefix;
        let text = format!("{prefix}/{:032x}/{:032x}/{generation:x}", namespace.0, key.0);
        CString::new(text).expect("the prefix was checked")
    }

    fn keys<'a>(&self, ids: impl IntoIterator<Item = &'a ObjectId>) -> Vec<CString> {
        ids.into_iter().map(|id| self.key(id)).collect()
    }

    /// Counts a code and says what it means. A master that is gone may come back without anything that
    /// it knew, so what was seen there is no longer believed.
    fn outcome(&self, call: Call, code: i64) -> Outcome {
        let outcome = self.outcomes.count(call, code);
        if outcome == Outcome::MasterGone {
            self.ledger.lock().seen.clear();
        }
        outcome
    }

    /// Counts the answer to whether the cluster has an object, and says whether it has.
    fn found(&self, code: i32) -> Result<bool, Outcome> {
        match self.outcome(Call::Exists, code.into()) {
            Outcome::Done => Ok(code == 1),
            Outcome::Absent | Outcome::Unfinished => Ok(false),
            other => Err(other),
        }
    }

    fn bounced(&self, bytes: usize) {
        self.bounced_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Store for MooncakeStore {
    fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        self.shared.check_open()?;
        self.shared.connection.register(arena)
    }

    fn exists<'a>(
        &'a self,
        ids: &'a [ObjectId],
        options: ExistsOptions,
    ) -> Answer<'a, Results<Presence>> {
        Box::pin(async move {
            Traffic::count(&self.shared.traffic.exists, ids.len());
            let ids = ids.to_vec();
            self.ask(ids.len(), move |shared, _, client| shared.exist(client, &ids, options)).await
        })
    }

    fn put_from(&self, puts: Vec<Put>, options: PutOptions) -> Answer<'_, Results<Stored>> {
        Box::pin(async move {
            // Generations of one object are put in their order.
            let is_whole = names_repeat(puts.iter().map(|put| &put.id));
            let part = if is_whole { u32::MAX } else { self.shared.config.part_objects_min };
            let puts = self.shared.connection.buffered(puts, |put| put.source.arena_id());
            self.ask_in_parts(part, puts, move |shared, worker, client, puts| {
                shared.put(worker, client, puts, options)
            })
            .await
        })
    }

    fn get_into(&self, gets: Vec<Get>, _: GetOptions) -> Answer<'_, Results<Served>> {
        Box::pin(async move {
            let gets = self.shared.connection.buffered(gets, |get| get.target.arena_id());
            let part = self.shared.config.part_objects_min;
            self.ask_in_parts(part, gets, |shared, worker, client, gets| {
                shared.get(worker, client, gets)
            })
            .await
        })
    }

    fn pin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        let ids = ids.to_vec();
        Box::pin(self.ask(ids.len(), move |shared, _, client| shared.pin(client, &ids, pin)))
    }

    fn unpin<'a>(&'a self, ids: &'a [ObjectId], pin: Pin) -> Answer<'a, Results<()>> {
        Box::pin(async move {
            let closed = self.shared.check_open();
            let unpin = |id| closed.clone().and_then(|()| self.shared.unpin(id, pin));
            ids.iter().map(unpin).collect()
        })
    }

    fn remove<'a>(&'a self, ids: &'a [ObjectId], removal: Removal) -> Answer<'a, Results<()>> {
        let ids = ids.to_vec();
        Box::pin(self.ask_in_parts(PART_REMOVALS_MIN, ids, move |shared, _, client, ids| {
            shared.remove(client, &ids, removal)
        }))
    }

    fn flush(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async { self.shared.check_open() })
    }

    fn stats(&self) -> StoreStats {
        let Shared { config, connection, ledger, .. } = &*self.shared;
        let stats = ledger.lock().catalogue.stats(config.object_bytes_max, ledger.now_ms());
        let remote = TierStats {
            arenas: connection.arenas().saturating_sub(self.shared.own_arenas) as u64,
            bounced_bytes: self.shared.bounced_bytes.load(Ordering::Relaxed),
            ..stats
        };
        StoreStats {
            remote: Some(self.shared.traffic.fill(remote)),
            figures: self.cluster_stats().figures(),
            ..StoreStats::default()
        }
    }

    fn shutdown(&self) -> Answer<'_, Result<(), StoreError>> {
        Box::pin(async {
            if !self.shared.closed.swap(true, Ordering::AcqRel) {
                self.shared.crew.close().await;
                let shared = self.shared.clone();
                let end = tokio::task::spawn_blocking(move || {
                    shared.expel_last();
                    shared.connection.close();
                });
                let _ = end.await;
            }
            Ok(())
        })
    }
}

/// Whether an object is there in several generations. Pages have none, and nothing is looked up for them.
fn names_repeat<'a>(ids: impl Iterator<Item = &'a ObjectId> + Clone) -> bool {
    if ids.clone().all(|id| id.generation == 0) {
        return false;
    }
    let mut names = BTreeSet::new();
    !ids.into_iter().all(|id| names.insert((id.namespace, id.key)))
}

/// How many parts a batch of so many objects is cut into.
fn parts_of(objects: usize, part_objects_min: u32, idle_threads: usize) -> usize {
    let parts_max = if idle_threads < 2 { 1 } else { PARTS_MAX };
    let parts = objects / part_objects_min.max(1) as usize;
    parts.clamp(1, parts_max).min(objects)
}

/// How to connect, in the library's words.
fn way(config: &MooncakeConfig) -> Result<Way, MooncakeError> {
    let text = |name: &str, value: &str| {
        CString::new(value)
            .map_err(|_| MooncakeError::Setting(format!("{name} contains a zero byte: {value:?}")))
    };
    text("the prefix", &config.prefix)?;
    if config.replicas == 0 {
        return Err(MooncakeError::Setting("use at least one replica".to_owned()));
    }
    let preferred = config.preferred_segments.iter().map(|name| text("a segment's name", name));
    let preferred: Vec<CString> = preferred.collect::<Result<_, _>>()?;
    if config.segment_bytes == 0 && preferred.iter().any(|name| name.as_c_str() == OWN_SEGMENT) {
        let message = "this client contributes no segment, so it cannot prefer its own: give the segment a \
             size";
        return Err(MooncakeError::Setting(message.to_owned()));
    }
    Ok(Way {
        endpoint: Endpoint {
            local_host: text("the host", &local_host(&config.master))?,
            metadata: text("the metadata server's address", &config.metadata_server)?,
            protocol: text("the protocol", &config.protocol)?,
            device: text("the device", &config.device)?,
            master: text("the master's address", &config.master)?,
        },
        memory: ClientMemory {
            segment_bytes: config.segment_bytes,
            buffer_bytes: config.buffer_bytes,
        },
        placement: Placement { replicas: config.replicas as usize, preferred },
        retry: Duration::from_millis(config.connect_retry_ms),
    })
}

/// The address of this machine that the master sees, by the route that the system would take. Nothing
/// is sent.
fn local_host(master: &str) -> String {
    let route = || -> io::Result<String> {
        let master = master.to_socket_addrs()?.next();
        let master = master.ok_or_else(|| io::Error::other("no address"))?;
        let unspecified = if master.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = UdpSocket::bind(unspecified)?;
        socket.connect(master)?;
        Ok(socket.local_addr()?.ip().to_string())
    };
    route().unwrap_or_else(|_| "127.0.0.1".to_owned())
}
