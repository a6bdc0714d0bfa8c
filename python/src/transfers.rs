//! Transfers for engine adapters: jobs that never block their submitter, and whose end is recorded
//! without the GIL.
//!
//! A job ends when the store has released all its memory, whatever the result: engines reuse memory
//! as soon as the end is reported, and a late store must not touch it then.

mod batch;
mod board;
mod figures;
mod job;
mod lookups;

use std::sync::Arc;

use parking_lot::RwLock;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use terrace_cache::PageKey;
use terrace_l3::{Arena, ExistsOptions, Registration, Source, Store, Target};

use self::batch::{Batch, Keys, Loan, Places, Transient, arena_at};
use self::board::{Board, Ended};
use self::job::{Kind, Work, exists, perform};
use self::lookups::Question;
use crate::calls::{Process, call, runtime};
use crate::errors::{IntoPython, bad_argument, unless_it_panics};
use crate::store::NativeStore;

pub(crate) use self::figures::BUCKETS;
pub(crate) use self::lookups::NativeLookups;

/// Native part of `terrace_kv.transfers.Transfers`.
#[pyclass(frozen, name = "Transfers", module = "terrace_kv._native")]
pub(crate) struct NativeTransfers {
    /// None once it is closed.
    store: RwLock<Option<Arc<dyn Store>>>,
    process: Process,
    namespace: RwLock<PageKey>,
    board: Arc<Board>,
    /// Regions by number; none for unregistered ones.
    regions: RwLock<Vec<Option<Region>>>,
}

/// Registered memory of the engine, divided into pages.
struct Region {
    arena: Arena,
    registration: Registration,
}

/// The result of a job for Python: its number, its kind, a code per key, bytes, seconds, and the
/// message of the first error.
type CompletedTuple = (u64, &'static str, Py<PyBytes>, u64, f64, Option<String>);

#[pymethods]
impl NativeTransfers {
    #[new]
    fn new(store: &NativeStore, namespace: [u8; 16]) -> PyResult<Self> {
        Ok(Self {
            store: RwLock::new(Some(store.ready()?)),
            process: Process::this(),
            namespace: RwLock::new(PageKey(u128::from_le_bytes(namespace))),
            board: Arc::default(),
            regions: RwLock::default(),
        })
    }

    /// Moves jobs that are submitted from now on to another namespace. Jobs in flight stay in theirs.
    fn move_to(&self, namespace: [u8; 16]) {
        *self.namespace.write() = PageKey(u128::from_le_bytes(namespace));
    }

    /// Registers `bytes` at `address`, divided into pages; `owner` is referenced while they may be
    /// accessed.
    fn register(
        &self,
        python: Python<'_>,
        address: usize,
        bytes: usize,
        page_bytes: usize,
        owner: Py<PyAny>,
    ) -> PyResult<usize> {
        let store = self.store()?;
        let arena = arena_at(address, bytes, page_bytes, owner)?;
        let register = || unless_it_panics(|| store.register(&arena));
        let registration = python.detach(register)?.map_err(IntoPython::into_python)?;
        let mut regions = self.regions.write();
        regions.push(Some(Region { arena, registration }));
        Ok(regions.len() - 1)
    }

    /// Unregisters a region.
    fn unregister(&self, python: Python<'_>, region: usize) -> PyResult<()> {
        let taken = self.regions.write().get_mut(region).and_then(Option::take);
        let taken = taken.ok_or_else(|| bad_argument("there is no such region"))?;
        let Region { arena, registration } = taken;
        // Unregistering may take a while.
        python.detach(|| drop(registration));
        // The owner is a Python object, and is released at once if no job uses the memory.
        drop(arena);
        Ok(())
    }

    /// Stores memory, and returns the number of the job; with `wait`, its result.
    fn put(
        &self,
        python: Python<'_>,
        keys: &Bound<'_, PyAny>,
        places: Places<'_>,
        durable: bool,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let keys = Keys::of(keys)?;
        let batch = self.lend::<Source>(&keys, &places)?;
        self.start(python, Work::Put { keys, batch, durable }, wait)
    }

    /// Reads into memory.
    fn get(
        &self,
        python: Python<'_>,
        keys: &Bound<'_, PyAny>,
        places: Places<'_>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let keys = Keys::of(keys)?;
        let batch = self.lend::<Target>(&keys, &places)?;
        self.start(python, Work::Get { keys, batch }, wait)
    }

    /// Looks up objects. Unless `parts` is 0, each key stands for that many objects.
    fn exists(
        &self,
        python: Python<'_>,
        keys: &Bound<'_, PyAny>,
        parts: u32,
        lease: bool,
        prefetch_to_memory: bool,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        let options = ExistsOptions { prefetch_to_memory, lease };
        self.start(python, Work::Exists { keys: Keys::of(keys)?, parts, options }, wait)
    }

    /// Marks objects as recently used; has no result.
    fn touch(&self, keys: &Bound<'_, PyAny>, parts: u32) -> PyResult<()> {
        let store = self.store()?;
        let options = ExistsOptions { prefetch_to_memory: false, lease: true };
        let work = Work::Exists { keys: Keys::of(keys)?, parts, options };
        let job = self.board.begin(work.kind(), work.keys(), true);
        let namespace = *self.namespace.read();
        runtime()?.spawn(async move { job.end(perform(store, namespace, work).await) });
        Ok(())
    }

    /// Removes objects, whether leased or not.
    fn remove(
        &self,
        python: Python<'_>,
        keys: &Bound<'_, PyAny>,
        wait: bool,
    ) -> PyResult<Py<PyAny>> {
        self.start(python, Work::Remove { keys: Keys::of(keys)? }, wait)
    }

    /// Returns the ended jobs that were not returned yet.
    fn drain(&self, python: Python<'_>) -> Vec<CompletedTuple> {
        self.board.take().into_iter().map(|ended| completed(python, ended)).collect()
    }

    /// Waits until no job is in flight, for at most `seconds`; returns whether none is.
    fn wait_idle(&self, python: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        self.board.wait_idle(python, seconds)
    }

    /// Returns the number of jobs in flight.
    fn pending(&self) -> u64 {
        self.board.pending()
    }

    /// Returns a descriptor that is readable while there are jobs to drain.
    fn event_fd(&self) -> PyResult<i32> {
        self.board.event_fd()
    }

    /// Releases the store, and all regions that no job uses.
    fn close(&self, python: Python<'_>) {
        let store = self.store.write().take();
        let regions = std::mem::take(&mut *self.regions.write());
        let (arenas, registrations): (Vec<Arena>, Vec<Registration>) =
            regions.into_iter().flatten().map(|region| (region.arena, region.registration)).unzip();
        python.detach(|| drop((registrations, store)));
        drop(arenas);
    }

    /// Returns statistics since the start, as JSON.
    fn stats(&self) -> PyResult<String> {
        serde_json::to_string(&self.board.figures()).map_err(bad_argument)
    }
}

impl NativeTransfers {
    fn store(&self) -> PyResult<Arc<dyn Store>> {
        self.process.check("store")?;
        let store = self.store.read().clone();
        store.ok_or_else(|| bad_argument("these transfers are closed"))
    }

    /// Lends the memory of a batch to its job.
    fn lend<L: Loan>(&self, keys: &Keys, places: &Places<'_>) -> PyResult<Batch<L>> {
        let regions = self.regions.read();
        match places {
            Places::Pages(region, pages, lengths) => {
                let region = regions.get(*region).and_then(Option::as_ref);
                let region = region.ok_or_else(|| bad_argument("there is no such region"))?;
                Batch::of_pages(keys, &region.arena, pages, lengths.as_ref())
            }
            Places::Addresses(addresses, lengths, owner) => {
                let arenas = regions.iter().flatten().map(|region| &region.arena);
                let store = self.store()?;
                let transient = Transient { store: &*store, owner };
                Batch::of_addresses(keys, arenas, addresses, lengths, &transient)
            }
        }
    }

    /// Sends a question to the store. Its answers are recorded before the job ends.
    fn ask(&self, question: Question, options: ExistsOptions) -> PyResult<()> {
        let store = self.store()?;
        let job = self.board.begin(Kind::Exists, question.keys.len(), true);
        let namespace = *self.namespace.read();
        runtime()?.spawn(async move {
            let done = exists(&*store, namespace, &question.keys, options).await;
            question.answer(&done.codes);
            job.end(done);
        });
        Ok(())
    }

    fn start(&self, python: Python<'_>, work: Work, wait: bool) -> PyResult<Py<PyAny>> {
        let store = self.store()?;
        let job = self.board.begin(work.kind(), work.keys(), wait);
        let number = job.number;
        let namespace = *self.namespace.read();
        let performed = async move { job.end(perform(store, namespace, work).await) };
        if wait {
            let tell = |python: Python<'_>, ended: Option<Ended>| {
                let ended = ended.expect("it is waited for");
                Ok(completed(python, ended).into_pyobject(python)?.into_any().unbind())
            };
            return call(python, performed, tell, None);
        }
        runtime()?.spawn(performed);
        Ok(number.into_pyobject(python)?.into_any().unbind())
    }
}

fn completed(python: Python<'_>, ended: Ended) -> CompletedTuple {
    let Ended { number, kind, codes, bytes, seconds, error } = ended;
    (number, kind.name(), PyBytes::new(python, &codes).unbind(), bytes, seconds, error)
}
