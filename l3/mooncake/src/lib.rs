//! L3 in a Mooncake cluster, which several servers share.
//!
//! An object is one value in the cluster: our header, then the payload. The library takes one piece
//! of memory per value, so pages of arenas without headroom are copied. The header verifies
//! everything that is read, so an old or foreign value under a key is a miss and never wrong bytes.
//!
//! The cluster does not guarantee all that a [`Store`] does; this crate adds the rest. It keeps
//! pins, leases, generations and the eviction order for the objects that this client has put, in a
//! catalogue like that of any other store. It also keeps the client's share of the cluster and
//! evicts from it. Objects of other clients are looked up and read, and belong to them.

mod call_threads;
mod codes;
mod connection;
mod control;
mod get;
mod keeper;
mod ledger;
mod library;
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

use self::call_threads::{CallThreads, Refused};
pub use self::codes::OutcomeCount;
use self::codes::{CallOutcome, CountedCall, Outcomes};
use self::connection::{ConnectConfig, Connection, OWN_SEGMENT};
use self::ledger::{ClusterLedger, Seen};
pub use self::library::LibraryError;
use self::library::{Client, ClientMemory, Endpoint, Library, SegmentPlacement};
pub use self::stats::MooncakeStats;
use self::worker::Worker;
use terrace_l3::backend::{Traffic, cores, slots_of};
use terrace_l3::{
    Answer, Arena, ExistsOptions, Get, GetOptions, HEADER_BYTES, ObjectId, Pin, Presence, Put,
    PutOptions, Registration, Removal, Results, Served, Store, StoreError, StoreStats, Stored,
    TierStats,
};

/// Configuration of a cluster, and of this client's share of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MooncakeConfig {
    /// Path of `libmooncake_store.so`.
    pub library: PathBuf,
    /// Master as HOST:PORT.
    pub master: String,
    /// Address of the cluster's metadata server, or `P2PHANDSHAKE` if it has none.
    pub metadata_server: String,
    /// Transport: tcp or rdma.
    pub protocol: String,
    /// Network devices of an RDMA transport; empty for the library's choice.
    pub device: String,
    /// Prefix of the keys. Stores with different prefixes share nothing.
    pub prefix: String,
    /// Maximum payload of this client's objects in the cluster; beyond it, the client evicts its
    /// own objects.
    pub capacity_bytes: u64,
    /// Maximum object size.
    pub object_bytes_max: usize,
    /// Memory that this process contributes to the cluster while the store is open; 0 for none.
    /// Objects that the cluster has placed there, of any client, are lost when the store is shut
    /// down.
    pub segment_bytes: u64,
    /// Memory for the library's own use; 0 for none. Pages do not pass through it.
    pub buffer_bytes: u64,
    /// Number of segments in which the cluster keeps each object of this client, if it has as many.
    pub replicas: u32,
    /// Segments preferred for this client's objects while they have room, by their names in the
    /// cluster; [`MooncakeConfig::OWN_SEGMENT`] is the one contributed by this process.
    pub preferred_segments: Vec<String>,
    /// Time for which a lease protects from this client's own eviction and from plain removal. The
    /// cluster's own lease time is configured there.
    pub lease_ttl_ms: u64,
    /// Maximum share of this client's objects that may be leased at a time.
    pub leased_share_max: f64,
    /// Maximum wait of a put for room.
    pub full_wait_ms: u64,
    /// Time for which an object seen in the cluster is not looked up again. It should be several
    /// times the cluster's lease, which every lookup renews.
    pub seen_ttl_ms: u64,
    /// Maximum number of such objects that are remembered.
    pub seen_max: u32,
    /// Number of threads that make calls. Each call blocks its thread.
    pub threads: u32,
    /// Maximum number of calls that wait for a thread.
    pub queue_max: u32,
    /// Minimum size of the parts into which larger batches of puts and gets are split for idle
    /// threads.
    pub part_objects_min: u32,
    /// Interval at which leases of pinned objects are renewed and failed removals are retried.
    pub keep_interval_ms: u64,
    /// Delay between attempts to connect.
    pub connect_retry_ms: u64,
    /// Time for which pages of failed transfers stay reserved before a new connection replaces the
    /// one that may still access them.
    pub quarantine_ms: u64,
    /// Keep hard-pinned objects when this client is shut down, until they are removed: they belong
    /// to all users of the cluster. Otherwise they go with the client, and unpinning makes them
    /// ordinary objects.
    pub pinned_stay: bool,
}

impl MooncakeConfig {
    /// Placeholder for this client's own segment in `preferred_segments`: the cluster assigns a new
    /// name at every start.
    pub const OWN_SEGMENT: &str = "own";

    /// A share of `capacity_bytes` of the cluster with this master.
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
            lease_ttl_ms: 5_000,
            leased_share_max: 0.5,
            full_wait_ms: 500,
            seen_ttl_ms: 30_000,
            seen_max: 65_536,
            threads: 4,
            queue_max: 256,
            // The library has threads of its own. If they need all cores, parts wait for each
            // other.
            part_objects_min: if cores() < CORES_FOR_PARTS { u32::MAX } else { 4 },
            keep_interval_ms: 1_000,
            connect_retry_ms: 2_000,
            quarantine_ms: 2_000,
            pinned_stay: false,
        }
    }

    /// Adapts the configuration to a feature store: samples outlive the process that has put them,
    /// and objects removed by another process never count as present.
    #[must_use]
    pub fn for_features(self) -> Self {
        Self { pinned_stay: true, seen_ttl_ms: 0, ..self }
    }
}

/// Reason why the store cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MooncakeError {
    /// The library is unusable.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A setting is invalid.
    #[error("{0}")]
    Setting(String),
    /// The system cannot start threads or allocate memory.
    #[error("cannot start the threads for Mooncake: {0}")]
    System(#[from] io::Error),
    /// The cluster did not answer in time.
    #[error(
        "the Mooncake master at {master} was not reached within {patience:?}: is the address right, does the \
         master run, and is it of the same version as the library?"
    )]
    Away {
        /// Address of the master.
        master: String,
        /// Time limit.
        patience: Duration,
    },
}

/// A store in a Mooncake cluster. Clones are the same store.
#[derive(Clone, Debug)]
pub struct MooncakeStore {
    shared: Arc<MooncakeCore>,
}

#[derive(Debug)]
struct MooncakeCore {
    config: MooncakeConfig,
    connection: Connection,
    ledger: ClusterLedger,
    crew: CallThreads<Worker>,
    /// Number of the store's own arenas.
    own_arenas: usize,
    traffic: Traffic,
    outcomes: Outcomes,
    bounced_bytes: AtomicU64,
    closed: AtomicBool,
}

/// Maximum number of parts of a batch: twice the default number of threads, so that some compute
/// while others transfer.
const PARTS_MAX: usize = 8;

/// Minimum number of removals per part. The library makes one call per object and waits for the
/// master each time without using a core, so threads help on every machine.
const PART_REMOVALS_MIN: u32 = 8;

/// Minimum number of cores for splitting batches by default.
const CORES_FOR_PARTS: usize = 8;

impl MooncakeStore {
    /// Opens the library and starts to connect. Until that succeeds every call fails at once.
    /// Attempts continue while the store exists.
    ///
    /// # Errors
    /// If the library is unusable or a setting is invalid.
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
        let shared = Arc::new(MooncakeCore {
            ledger: ClusterLedger::new(slots, seen),
            own_arenas: workers.len() + 1,
            crew: CallThreads::new(workers, config.queue_max as usize)?,
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

    /// Waits until the cluster has been reached, and returns whether it has. Blocks the thread.
    #[must_use]
    pub fn wait_until_connected(&self, patience: Duration) -> bool {
        self.shared.connection.wait(patience)
    }

    /// Like [`Self::wait_until_connected`], with an error for callers that need the cluster.
    ///
    /// # Errors
    /// If the cluster was not reached.
    pub fn connect_within(&self, patience: Duration) -> Result<(), MooncakeError> {
        match self.wait_until_connected(patience) {
            true => Ok(()),
            false => {
                Err(MooncakeError::Away { master: self.shared.config.master.clone(), patience })
            }
        }
    }

    /// Name of the segment that this store contributes, once it does: other clients can use it in
    /// their preferences.
    #[must_use]
    pub fn segment(&self) -> Option<String> {
        self.shared.connection.segment().map(|name| name.to_string_lossy().into_owned())
    }

    /// Statistics of the cluster.
    #[must_use]
    pub fn cluster_stats(&self) -> MooncakeStats {
        let MooncakeCore { connection, ledger, crew, outcomes, .. } = &*self.shared;
        MooncakeStats {
            is_connected: connection.is_connected(),
            quarantined: connection.client().map_or(0, |client| client.kept() as u64),
            leaving: ledger.lock().departures.len() as u64,
            waiting: crew.waiting() as u64,
            outcomes: outcomes.read(),
        }
    }

    /// Runs a job for `objects` objects on a thread.
    async fn ask<T: Clone + Send + 'static>(
        &self,
        objects: usize,
        job: impl FnOnce(&MooncakeCore, &mut Worker, &Arc<Client>) -> Results<T> + Send + 'static,
    ) -> Results<T> {
        match objects {
            0 => Vec::new(),
            _ => self.start(objects, job).answer().await,
        }
    }

    /// Splits a batch into parts for several threads: while one of them computes checksums or waits
    /// for the master, the others transfer.
    async fn ask_in_parts<J: Send + 'static, T: Clone + Send + 'static>(
        &self,
        part_objects_min: u32,
        mut objects: Vec<J>,
        job: impl Fn(&MooncakeCore, &mut Worker, &Arc<Client>, Vec<J>) -> Results<T>
        + Copy
        + Send
        + 'static,
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
        job: impl FnOnce(&MooncakeCore, &mut Worker, &Arc<Client>) -> Results<T> + Send + 'static,
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

/// A job, if a thread has accepted it.
struct Started<T> {
    objects: usize,
    answer: Result<oneshot::Receiver<Results<T>>, StoreError>,
}

impl<T: Clone> Started<T> {
    async fn answer(self) -> Results<T> {
        let answer = match self.answer {
            // A job that was dropped never started, because the store was shut down.
            Ok(answer) => answer.await.map_err(|_| StoreError::Closed),
            Err(error) => Err(error),
        };
        answer.unwrap_or_else(|error| vec![Err(error); self.objects])
    }
}

impl MooncakeCore {
    fn check_open(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::Acquire) { Err(StoreError::Closed) } else { Ok(()) }
    }

    /// Key of an object: its complete id.
    fn key(&self, id: &ObjectId) -> CString {
        let ObjectId { namespace, key, generation } = id;
        let prefix = &self.config.prefix;
        let text = format!("{prefix}/{:032x}/{:032x}/{generation:x}", namespace.0, key.0);
        CString::new(text).expect("the prefix was checked")
    }

    fn keys<'a>(&self, ids: impl IntoIterator<Item = &'a ObjectId>) -> Vec<CString> {
        ids.into_iter().map(|id| self.key(id)).collect()
    }

    /// Counts a code and returns its outcome. A master that was gone may return without its state,
    /// so objects seen there no longer count.
    fn outcome(&self, call: CountedCall, code: i64) -> CallOutcome {
        let outcome = self.outcomes.count(call, code);
        if outcome == CallOutcome::MasterGone {
            self.ledger.lock().seen.clear();
        }
        outcome
    }

    /// Counts the result of a lookup, and returns whether the cluster has the object.
    fn found(&self, code: i32) -> Result<bool, CallOutcome> {
        match self.outcome(CountedCall::Exists, code.into()) {
            CallOutcome::Done => Ok(code == 1),
            CallOutcome::Absent | CallOutcome::Unfinished => Ok(false),
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
            let is_intact = names_repeat(puts.iter().map(|put| &put.id));
            let part = if is_intact { u32::MAX } else { self.shared.config.part_objects_min };
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
        let MooncakeCore { config, connection, ledger, .. } = &*self.shared;
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
                    shared.remove_last();
                    shared.connection.close();
                });
                let _ = end.await;
            }
            Ok(())
        })
    }
}

/// Returns true if the batch has several generations of an object. Pages have none, so they cost no
/// search.
fn names_repeat<'a>(ids: impl Iterator<Item = &'a ObjectId> + Clone) -> bool {
    if ids.clone().all(|id| id.generation == 0) {
        return false;
    }
    let mut names = BTreeSet::new();
    !ids.into_iter().all(|id| names.insert((id.namespace, id.key)))
}

/// Number of parts into which a batch is split.
fn parts_of(objects: usize, part_objects_min: u32, idle_threads: usize) -> usize {
    let parts_max = if idle_threads < 2 { 1 } else { PARTS_MAX };
    let parts = objects / part_objects_min.max(1) as usize;
    parts.clamp(1, parts_max).min(objects)
}

/// Connection parameters in the library's format.
fn way(config: &MooncakeConfig) -> Result<ConnectConfig, MooncakeError> {
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
    Ok(ConnectConfig {
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
        placement: SegmentPlacement { replicas: config.replicas as usize, preferred },
        retry: Duration::from_millis(config.connect_retry_ms),
    })
}

/// Address of this machine as the master sees it, determined from the system's route. Nothing is
/// sent.
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
