//! The stores of L3, one batch per call.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use terrace_cache::PageKey;
use terrace_l3::{
    ExistsOptions, Get, GetOptions, GuardConfig, Guarded, MemoryConfig, MemoryStore, ObjectId,
    Owner, Pin, Place, Presence, Put, PutOptions, Removal, Results, Served, Store, StoreError,
    Stored,
};
use terrace_l3_buckets::{BucketsConfig, BucketsStore};
use terrace_l3_disk::{
    DiskConfig, DiskStore, OpenError, StoreFolder, TieredConfig, TieredStore, usual_reserve_bytes,
};
use terrace_l3_mooncake::{MooncakeConfig, MooncakeStore};
use terrace_l3_nodes::{NodeAddress, NodeSecret, NodesConfig, NodesStore, RdmaChoice};

use crate::calls::{Process, call, runtime};
use crate::errors::{ConfigError, IntoPython, bad_argument, unless_it_panics};
use crate::memory::{self, Memory};

/// Longest wait for a node or a master when a store is opened.
const PATIENCE: Duration = Duration::from_secs(10);

/// Native part of `terrace_kv.Store`.
#[pyclass(frozen, name = "Store", module = "terrace_kv._native")]
pub(crate) struct NativeStore {
    pub(crate) store: Arc<dyn Store>,
    process: Process,
}

/// Settings of every store.
#[derive(Deserialize)]
struct Common {
    #[serde(default)]
    capacity_bytes: u64,
    #[serde(default)]
    object_bytes_max: usize,
    /// Memory cache on top of a disk store.
    #[serde(default)]
    memory_bytes: u64,
    /// True if the memory cache accepts objects before they are on disk.
    #[serde(default)]
    write_behind: bool,
    #[serde(default)]
    for_features: bool,
    /// Uses one store per object size in the folder; they share `capacity_bytes`.
    #[serde(default)]
    for_engines: bool,
    guard: Option<GuardConfig>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Settings of a folder for engines.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct FolderSettings {
    reserve_bytes: Option<u64>,
}

/// Settings of nodes.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct NodesSettings {
    secret_file: Option<PathBuf>,
    client: String,
    copies: Option<usize>,
    rdma: RdmaChoice,
    exists_timeout_ms: Option<u64>,
    get_timeout_ms: Option<u64>,
    put_timeout_ms: Option<u64>,
}

/// One result code per object, and the errors by index.
type BatchResult = (Py<PyBytes>, Vec<(usize, PyErr)>);

impl NativeStore {
    pub(crate) fn ready(&self) -> PyResult<Arc<dyn Store>> {
        self.process.check("store")?;
        Ok(self.store.clone())
    }
}

#[pymethods]
impl NativeStore {
    /// Opens the store at `place`; `settings` is JSON.
    #[new]
    fn open(python: Python<'_>, place: &str, settings: &str) -> PyResult<Self> {
        let settings: Common = serde_json::from_str(settings).map_err(bad_setting)?;
        let runtime = runtime()?;
        let guard = settings.guard.clone();
        let store = python.detach(|| {
            let _context = runtime.enter();
            unless_it_panics(|| open(place, settings))?
        })?;
        let store: Arc<dyn Store> = match guard {
            Some(guard) => Arc::new(Guarded::new(store, guard)),
            None => store,
        };
        Ok(Self { store, process: Process::this() })
    }

    /// Registers an array with the store, divided into pages.
    fn register(
        &self,
        python: Python<'_>,
        array: &Bound<'_, PyArray1<u8>>,
        pages: u32,
    ) -> PyResult<Memory> {
        let (store, arena) = (self.ready()?, memory::arena(array, pages)?);
        let register = || unless_it_panics(|| store.register(&arena));
        let registration = python.detach(register)?.map_err(IntoPython::into_python)?;
        Ok(Memory::new(arena, registration))
    }

    #[expect(clippy::too_many_arguments, reason = "Python names them")]
    fn put(
        &self,
        python: Python<'_>,
        objects: Objects<'_>,
        memory: &Memory,
        pages: PyReadonlyArray1<'_, u32>,
        lengths: Option<PyReadonlyArray1<'_, u64>>,
        pin: Option<&str>,
        durable: bool,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (store, ids) = (self.ready()?, objects.ids()?);
        let (pages, lengths) = batch(&ids, &pages, lengths.as_ref())?;
        let sources = memory.sources(pages, lengths)?;
        let puts: Vec<Put> =
            ids.into_iter().zip(sources).map(|(id, from)| Put::new(id, from)).collect();
        let options = PutOptions { pin: pin.map(pin_of).transpose()?, durable };
        let work = async move { store.put_from(puts, options).await };
        let code = |stored: Stored| u8::from(stored == Stored::AlreadyThere);
        call(python, work, move |python, results| tell(python, results, code), then)
    }

    fn get(
        &self,
        python: Python<'_>,
        objects: Objects<'_>,
        memory: &Memory,
        pages: PyReadonlyArray1<'_, u32>,
        lengths: Option<PyReadonlyArray1<'_, u64>>,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (store, ids) = (self.ready()?, objects.ids()?);
        let (pages, lengths) = batch(&ids, &pages, lengths.as_ref())?;
        let targets = memory.targets(pages, lengths)?;
        let gets: Vec<Get> =
            ids.into_iter().zip(targets).map(|(id, to)| Get::new(id, to)).collect();
        let work = async move { store.get_into(gets, GetOptions::default()).await };
        let code = |served: Served| place_code(served.place);
        call(python, work, move |python, results| tell(python, results, code), then)
    }

    fn exists(
        &self,
        python: Python<'_>,
        objects: Objects<'_>,
        lease: bool,
        prefetch_to_memory: bool,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (store, ids) = (self.ready()?, objects.ids()?);
        let options = ExistsOptions { prefetch_to_memory, lease };
        let work = async move { store.exists(&ids, options).await };
        let code = |presence: Presence| match presence {
            Presence::Absent => 0,
            Presence::Present(place) => place_code(place),
        };
        call(python, work, move |python, results| tell(python, results, code), then)
    }

    fn remove(
        &self,
        python: Python<'_>,
        objects: Objects<'_>,
        removal: &str,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (store, ids) = (self.ready()?, objects.ids()?);
        let removal = match removal {
            "plain" => Removal::Plain,
            "forced" => Removal::Forced,
            "final" => Removal::Final,
            other => {
                return Err(bad_argument(format_args!(
                    "there is no removal {other:?}: use plain, forced or final"
                )));
            }
        };
        let work = async move { store.remove(&ids, removal).await };
        call(python, work, |python, results| tell(python, results, |()| 1), then)
    }

    fn pin(
        &self,
        python: Python<'_>,
        objects: Objects<'_>,
        pin: &str,
        on: bool,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (store, ids, pin) = (self.ready()?, objects.ids()?, pin_of(pin)?);
        let work = async move {
            if on { store.pin(&ids, pin).await } else { store.unpin(&ids, pin).await }
        };
        call(python, work, |python, results| tell(python, results, |()| 1), then)
    }

    fn flush(&self, python: Python<'_>, then: Option<Py<PyAny>>) -> PyResult<Py<PyAny>> {
        let store = self.ready()?;
        call(python, async move { store.flush().await }, nothing, then)
    }

    fn shutdown(&self, python: Python<'_>, then: Option<Py<PyAny>>) -> PyResult<Py<PyAny>> {
        let store = self.ready()?;
        call(python, async move { store.shutdown().await }, nothing, then)
    }

    /// Returns counters and gauges, as JSON.
    fn stats(&self) -> PyResult<String> {
        serde_json::to_string(&self.ready()?.stats()).map_err(bad_argument)
    }
}

/// The objects of a batch: the digest of their namespace, their concatenated keys, and their
/// generations.
#[derive(FromPyObject)]
pub(crate) struct Objects<'py>(
    Bound<'py, PyBytes>,
    PyReadonlyArray1<'py, u8>,
    Option<PyReadonlyArray1<'py, u64>>,
);

impl Objects<'_> {
    fn ids(&self) -> PyResult<Vec<ObjectId>> {
        let Self(namespace, keys, generations) = self;
        let namespace = namespace.as_bytes().try_into().map(u128::from_le_bytes);
        let namespace = namespace.map_err(|_| bad_argument("a namespace must have 16 bytes"))?;
        let (keys, rest) = keys.as_slice().map_err(bad_argument)?.as_chunks::<16>();
        let generations = generations.as_ref().map(|generations| generations.as_slice());
        let generations = generations.transpose().map_err(bad_argument)?;
        if !rest.is_empty() || generations.is_some_and(|given| given.len() != keys.len()) {
            return Err(bad_argument(
                "give 16 bytes per key, and a generation for all keys or for none",
            ));
        }
        let id = |(place, key): (usize, &[u8; 16])| {
            let id = ObjectId::page(PageKey(namespace), PageKey(u128::from_le_bytes(*key)));
            id.with_generation(generations.map_or(0, |generations| generations[place]))
        };
        Ok(keys.iter().enumerate().map(id).collect())
    }
}

/// Returns the pages of a batch with their lengths, if there is one per object.
fn batch<'a>(
    ids: &[ObjectId],
    pages: &'a PyReadonlyArray1<'_, u32>,
    lengths: Option<&'a PyReadonlyArray1<'_, u64>>,
) -> PyResult<(&'a [u32], Option<&'a [u64]>)> {
    let pages = pages.as_slice().map_err(bad_argument)?;
    let lengths = lengths.map(|lengths| lengths.as_slice()).transpose().map_err(bad_argument)?;
    if pages.len() != ids.len() || lengths.is_some_and(|lengths| lengths.len() != ids.len()) {
        return Err(bad_argument(format_args!(
            "{} keys and {} pages: give one of each per object, and a length for all or for none",
            ids.len(),
            pages.len()
        )));
    }
    Ok((pages, lengths))
}

fn tell<T>(python: Python<'_>, results: Results<T>, code: impl Fn(T) -> u8) -> PyResult<Py<PyAny>> {
    let mut errors = Vec::new();
    let codes = results.into_iter().enumerate().map(|(place, result)| match result {
        Ok(done) => code(done),
        Err(error) => {
            errors.push((place, error.into_python()));
            u8::MAX
        }
    });
    let codes: Vec<u8> = codes.collect();
    let result: BatchResult = (PyBytes::new(python, &codes).unbind(), errors);
    Ok(result.into_pyobject(python)?.into_any().unbind())
}

pub(crate) fn nothing<E: IntoPython>(
    python: Python<'_>,
    done: Result<(), E>,
) -> PyResult<Py<PyAny>> {
    done.map_err(IntoPython::into_python)?;
    Ok(python.None())
}

fn place_code(place: Place) -> u8 {
    match place {
        Place::Memory => 1,
        Place::Disk => 2,
    }
}

/// Parses `soft`, or the owner of a hard pin.
fn pin_of(text: &str) -> PyResult<Pin> {
    match text.split_once(':') {
        None if text == "soft" => Ok(Pin::Soft),
        Some(("hard", owner)) if !owner.is_empty() => Ok(Pin::Hard(Owner::named(owner))),
        _ => Err(bad_argument(format_args!("there is no pin {text:?}: use soft or hard:OWNER"))),
    }
}

fn open(place: &str, settings: Common) -> PyResult<Arc<dyn Store>> {
    let Common {
        capacity_bytes,
        object_bytes_max,
        memory_bytes,
        write_behind,
        for_features,
        for_engines,
        others,
        guard: _,
    } = settings;
    if write_behind && (memory_bytes == 0 || !place.starts_with("disk:")) {
        return Err(ConfigError::new_err(
            "write_behind needs a memory cache on top of a disk: use disk:FOLDER and set memory, \
             like 8GiB",
        ));
    }
    if place == "memory" {
        let config = with(MemoryConfig::new(capacity_bytes, object_bytes_max), others)?;
        return Ok(Arc::new(MemoryStore::new(config).map_err(bad_setting)?));
    }
    if let Some(folder) = place.strip_prefix("disk:") {
        let disk = if for_engines {
            let settings = serde_json::from_value(others.into()).map_err(bad_setting)?;
            open_folder(folder, capacity_bytes, object_bytes_max, settings)?
        } else {
            let config = with(DiskConfig::new(folder, capacity_bytes, object_bytes_max), others)?;
            DiskStore::open(config).map_err(bad_setting)?
        };
        if memory_bytes == 0 {
            return Ok(Arc::new(disk));
        }
        let memory = MemoryConfig::new(memory_bytes, object_bytes_max);
        let memory = MemoryStore::new(memory).map_err(bad_setting)?;
        let tiers = TieredConfig { write_behind, ..TieredConfig::default() };
        let tiered = TieredStore::new(memory, disk, tiers);
        return Ok(Arc::new(tiered.map_err(IntoPython::into_python)?));
    }
    if let Some(master) = place.strip_prefix("mooncake://") {
        let library = PathBuf::new();
        let config =
            with(MooncakeConfig::new(library, master, capacity_bytes, object_bytes_max), others)?;
        let config = if for_features { config.for_features() } else { config };
        let store = MooncakeStore::open(config).map_err(bad_setting)?;
        store.connect_within(PATIENCE).map_err(bad_setting)?;
        return Ok(Arc::new(store));
    }
    if let Some(nodes) = place.strip_prefix("nodes://") {
        let settings: NodesSettings = serde_json::from_value(others.into()).map_err(bad_setting)?;
        return Ok(Arc::new(open_nodes(nodes, settings)?));
    }
    if let Some(url) = bucket_url(place) {
        if !cfg!(feature = "s3") && is_cloud(url) {
            let instead = "use a shared folder, bucket:file:///FOLDER";
            return Err(not_built("cloud buckets", "s3", instead));
        }
        let config = with(BucketsConfig::new(url, capacity_bytes, object_bytes_max), others)?;
        return Ok(Arc::new(BucketsStore::open(config).map_err(bad_setting)?));
    }
    Err(ConfigError::new_err(format!(
        "there is no store {place:?}: use memory, disk:FOLDER, nodes://HOST:PORT,..., \
         mooncake://HOST:PORT, s3://BUCKET/PREFIX or bucket:URL"
    )))
}

/// Opens the store in a folder for objects of exactly this size.
fn open_folder(
    folder: &str,
    limit_bytes: u64,
    object_bytes_max: usize,
    settings: FolderSettings,
) -> PyResult<DiskStore> {
    let path = PathBuf::from(folder);
    // A system that does not report the file system's size does not report free space either.
    let usual = || usual_reserve_bytes(&path).unwrap_or(0);
    let reserve_bytes = settings.reserve_bytes.unwrap_or_else(usual);
    let folder = StoreFolder { path, limit_bytes, reserve_bytes };
    folder.open(object_bytes_max).map(|opened| opened.store).map_err(|error| match error {
        OpenError::InUse { path, owner } => ConfigError::new_err(format!(
            "the store in {} is in use by {owner}, and only one process can use a folder. To share \
             it between processes of this machine (ranks, engines), start `terrace node --disk {}` \
             once and give all of them \"store\": \"nodes://HOST:PORT\", or give each its own \
             folder",
            path.display(),
            folder.path.display(),
        )),
        error @ OpenError::LittleFree { .. } => ConfigError::new_err(format!(
            "{error}. Free some space, use another folder, or set a smaller \"reserve\""
        )),
        other => bad_setting(other),
    })
}

/// Returns the URL of a bucket, if `place` is one.
fn bucket_url(place: &str) -> Option<&str> {
    place.strip_prefix("bucket:").or(is_cloud(place).then_some(place))
}

fn is_cloud(place: &str) -> bool {
    ["s3://", "gs://", "az://"].iter().any(|cloud| place.starts_with(cloud))
}

/// Creates the error for a feature that this build lacks, with the remedy.
fn not_built(what: &str, feature: &str, instead: &str) -> PyErr {
    ConfigError::new_err(format!(
        "this build of terrace_kv has no {what}: from a checkout of Terrace, install it with `pip install ./python \
         --config-settings=build-args=\"--features {feature}\"`, or {instead}"
    ))
}

fn open_nodes(nodes: &str, settings: NodesSettings) -> PyResult<NodesStore> {
    if let (false, RdmaChoice::Device(name)) = (cfg!(feature = "rdma"), &settings.rdma) {
        let instead = format!("leave out \"rdma\": {name:?}, and pages use TCP");
        return Err(not_built("RDMA", "rdma", &instead));
    }
    let secret = settings.secret_file.ok_or_else(|| {
        ConfigError::new_err("nodes need their secret: give its file as secret_file")
    })?;
    let addresses: Result<Vec<NodeAddress>, _> = nodes.split(',').map(str::parse).collect();
    let config = NodesConfig::new(
        addresses.map_err(bad_setting)?,
        NodeSecret::read(&secret).map_err(bad_setting)?,
    );
    let config = NodesConfig {
        name: settings.client,
        copies: settings.copies.unwrap_or(config.copies),
        rdma: settings.rdma,
        exists_timeout_ms: settings.exists_timeout_ms.unwrap_or(config.exists_timeout_ms),
        get_timeout_ms: settings.get_timeout_ms.unwrap_or(config.get_timeout_ms),
        put_timeout_ms: settings.put_timeout_ms.unwrap_or(config.put_timeout_ms),
        ..config
    };
    let store = NodesStore::new(config).map_err(bad_setting)?;
    runtime()?.block_on(store.reach_within(PATIENCE)).map_err(bad_setting)?;
    Ok(store)
}

/// Applies settings over defaults.
fn with<C: Serialize + DeserializeOwned>(defaults: C, settings: Map<String, Value>) -> PyResult<C> {
    let Value::Object(mut all) = serde_json::to_value(defaults).map_err(bad_setting)? else {
        unreachable!("settings have names")
    };
    all.extend(settings);
    serde_json::from_value(all.into()).map_err(bad_setting)
}

pub(crate) fn bad_setting(error: impl std::fmt::Display) -> PyErr {
    ConfigError::new_err(error.to_string())
}

impl IntoPython for StoreError {
    fn into_python(self) -> PyErr {
        use crate::errors::{DamagedObject, MissingObject, StoreFull, StoreUnavailable};
        let text = self.to_string();
        match self {
            Self::Missing | Self::Superseded { .. } => MissingObject::new_err(text),
            Self::Corrupt(_) | Self::Length { .. } => DamagedObject::new_err(text),
            Self::Full => StoreFull::new_err(text),
            Self::Io { .. } | Self::TimedOut(_) | Self::Unavailable { .. } | Self::HolderAway => {
                StoreUnavailable::new_err(text)
            }
            _ => crate::errors::StoreError::new_err(text),
        }
    }
}

impl IntoPython for terrace_l3::Lent {
    fn into_python(self) -> PyErr {
        crate::errors::StoreError::new_err(self.to_string())
    }
}
