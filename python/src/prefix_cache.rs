//! The prefix cache alone, for engines with their own scheduler. Pages and pins stay here: Python
//! has one object per request, which owns them until it is closed, and gets page numbers.

use std::borrow::Cow;
use std::sync::Arc;

use numpy::{PyArray1, PyArrayMethods};
use parking_lot::Mutex;
use pyo3::create_exception;
use pyo3::prelude::*;
use terrace_cache::{
    Cache, CacheConfig, DevicePage, DevicePages, DevicePin, EvictionKind, Namespace, PageKey,
    Sequence, TierUse, Token,
};

use crate::errors::{ConfigError, TerraceError, bad_argument, broken, unless_it_panics};

create_exception!(
    terrace_kv,
    OutOfPages,
    TerraceError,
    "Too many pages are held: close other holds, then try again."
);

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("OutOfPages", module.py().get_type::<OutOfPages>())?;
    module.add_class::<PrefixCache>()?;
    module.add_class::<HeldPages>()
}

/// Returns the tokens of an array or a list. They must not be read while the thread is detached from the interpreter.
fn tokens_of<'a>(tokens: &'a Bound<'_, PyAny>) -> PyResult<Cow<'a, [Token]>> {
    let Ok(array) = tokens.cast::<PyArray1<Token>>() else {
        return Ok(Cow::Owned(tokens.extract()?));
    };
    #[expect(unsafe_code, reason = "asking who else borrows the array takes longer than the call")]
    // SAFETY: with an interpreter's lock, no other thread writes before the tokens are copied. Without one, callers must not
    // write to an array that a call reads, as for NumPy's own functions: `docs/python.md` says so.
    let slice = unsafe { array.as_slice() };
    Ok(slice.map_or_else(|_| Cow::Owned(array.to_owned_array().to_vec()), Cow::Borrowed))
}

/// A cache that requests share with their pages. No Python object is created while it is locked:
/// that may collect garbage, which may close another request's pages.
#[derive(Clone)]
struct Shared {
    /// None after a broken invariant.
    cache: Arc<Mutex<Option<Cache>>>,
}

impl Shared {
    fn with<R>(&self, work: impl FnOnce(&mut Cache) -> PyResult<R>) -> PyResult<R> {
        let mut guard = self.cache.lock();
        let Some(cache) = guard.as_mut() else {
            return Err(broken("an earlier call has failed"));
        };
        let done = unless_it_panics(|| work(cache));
        if done.is_err() {
            *guard = None;
        }
        done?
    }
}

/// A prefix cache for the pages of a device, for engines with their own scheduler. It manages page numbers below
/// `device_pages`; the engine owns the memory of the pages.
#[pyclass(frozen, module = "terrace_kv._native")]
pub(crate) struct PrefixCache {
    shared: Shared,
    namespace: Namespace,
    /// Digest, cached: hashing it for each request would take as long as a hundred tokens.
    digest: PageKey,
}

impl PrefixCache {
    fn sequence(&self, prompt: &Bound<'_, PyAny>, adapter: &str, salt: &str) -> PyResult<Sequence> {
        let root = match (adapter, salt) {
            ("", "") => self.digest,
            _ => self.namespace.digest_with(adapter, salt),
        };
        // A million tokens take about a millisecond, so the GIL is not released.
        Ok(Sequence::copied(root, self.namespace.page_size, &tokens_of(prompt)?))
    }

    fn usage(&self) -> PyResult<TierUse> {
        self.shared.with(|cache| Ok(cache.usage().device))
    }
}

#[pymethods]
impl PrefixCache {
    #[new]
    #[pyo3(signature = (device_pages, *, page_size = 16, eviction = "lru"))]
    fn new(device_pages: u32, page_size: u32, eviction: &str) -> PyResult<Self> {
        if !page_size.is_power_of_two() || page_size > 256 {
            let refusal = format!("page_size = {page_size}: use a power of two from 1 to 256");
            return Err(ConfigError::new_err(refusal));
        }
        let eviction: EvictionKind = eviction.parse().map_err(|instead| {
            ConfigError::new_err(format!("eviction = {eviction:?}: {instead}"))
        })?;
        let config = CacheConfig {
            page_size,
            device_pages,
            eviction,
            kv_event_keys_max: 0,
            ..CacheConfig::default()
        };
        let cache = unless_it_panics(|| Cache::new(&config))?;
        let shared = Shared { cache: Arc::new(Mutex::new(Some(cache))) };
        let namespace = Namespace::new("", page_size);
        Ok(Self { shared, digest: namespace.digest(), namespace })
    }

    /// Finds the cached pages of a prompt, without its last token, and holds them. With `room`, allocates further pages, so
    /// that there is space for this number of tokens in total. Pages that no request holds are evicted if needed.
    #[pyo3(signature = (prompt, room = 0, *, adapter = "", salt = "", priority = 0))]
    fn hold(
        &self,
        prompt: &Bound<'_, PyAny>,
        room: usize,
        adapter: &str,
        salt: &str,
        priority: i32,
    ) -> PyResult<HeldPages> {
        let sequence = self.sequence(prompt, adapter, salt)?;
        let pages_max = sequence.len().saturating_sub(1) as u32 / sequence.page_size();
        let held = self.shared.with(|cache| {
            let found = cache.lookup(&sequence, pages_max).device;
            let path = cache.pin_device(sequence.root(), found);
            let mut held = Holding { sequence, path, tail: DevicePages::none(), priority };
            if let Err(refusal) = held.reserve(cache, room) {
                held.give_back(cache);
                return Err(refusal);
            }
            cache.touch(&held.path, true, priority);
            Ok(held)
        })?;
        let found_pages = held.path.depth();
        Ok(HeldPages { shared: self.shared.clone(), found_pages, holding: Mutex::new(Some(held)) })
    }

    /// The number of cached pages of a prompt. Changes nothing.
    #[pyo3(signature = (prompt, *, adapter = "", salt = ""))]
    fn cached(&self, prompt: &Bound<'_, PyAny>, adapter: &str, salt: &str) -> PyResult<u32> {
        let sequence = self.sequence(prompt, adapter, salt)?;
        self.shared.with(|cache| Ok(cache.lookup(&sequence, u32::MAX).device.depth))
    }

    /// Removes all pages that no request holds from the cache. Returns their number.
    fn clear(&self) -> PyResult<usize> {
        self.shared.with(|cache| Ok(cache.clear().device_pages))
    }

    /// The total number of pages.
    #[getter]
    fn device_pages(&self) -> PyResult<usize> {
        Ok(self.usage()?.total_pages)
    }

    /// The number of pages that are neither held nor cached.
    #[getter]
    fn free_pages(&self) -> PyResult<usize> {
        Ok(self.usage()?.free_pages)
    }

    /// The number of cached pages that no request holds, so they can be evicted.
    #[getter]
    fn evictable_pages(&self) -> PyResult<usize> {
        Ok(self.usage()?.evictable_pages)
    }

    /// The number of pages evicted so far.
    #[getter]
    fn evicted_pages(&self) -> PyResult<u64> {
        Ok(self.usage()?.evicted_pages)
    }
}

/// The pages of a request: those in the tree, then its own.
struct Holding {
    sequence: Sequence,
    path: DevicePin,
    tail: DevicePages,
    priority: i32,
}

impl Holding {
    /// Allocates space for `tokens` tokens in total, or changes nothing.
    fn reserve(&mut self, cache: &mut Cache, tokens: usize) -> PyResult<()> {
        let held = self.path.depth() as usize + self.tail.len();
        let missing = tokens.div_ceil(self.sequence.page_size() as usize).saturating_sub(held);
        let available = cache.usage().device.available_pages();
        if missing > available {
            return Err(OutOfPages::new_err(format!(
                "{missing} more pages are needed, but only {available} are available: close other \
                 holds, or create the cache with more pages"
            )));
        }
        let is_there =
            cache.free_device_pages(missing) && cache.grow_device_pages(&mut self.tail, missing);
        assert!(is_there, "what is evictable can be evicted");
        Ok(())
    }

    /// Publishes the whole pages of the first `tokens` tokens.
    fn publish(&mut self, cache: &mut Cache, tokens: usize) -> PyResult<Option<u32>> {
        let known = self.sequence.len();
        if tokens > known {
            return Err(bad_argument(format_args!(
                "cannot publish {tokens} tokens, only {known} are known: append the produced \
                 tokens first"
            )));
        }
        let (start, end) = (self.path.depth(), tokens as u32 / self.sequence.page_size());
        if end <= start {
            return Ok(None);
        }
        let (new, own) = ((end - start) as usize, self.tail.len());
        if new > own {
            return Err(bad_argument(format_args!(
                "cannot publish {new} pages, only {own} are reserved: reserve room for the tokens \
                 first"
            )));
        }
        let run = self.sequence.run(start, end);
        Ok(cache.publish_device(&mut self.path, run, &mut self.tail, self.priority).first_duplicate)
    }

    fn pages(&self, cache: &Cache) -> Vec<DevicePage> {
        let mut pages = Vec::with_capacity(self.path.depth() as usize + self.tail.len());
        cache.device_pages(&self.path, 0, &mut pages);
        pages.extend_from_slice(self.tail.as_slice());
        pages
    }

    fn give_back(self, cache: &mut Cache) {
        cache.give_device_pages(self.tail);
        cache.unpin_device(self.path);
    }
}

/// The pages that a request holds. They are not evicted or given to other requests until this is closed.
#[pyclass(frozen, module = "terrace_kv._native")]
pub(crate) struct HeldPages {
    shared: Shared,
    /// The number of pages that were found in the cache.
    #[pyo3(get)]
    found_pages: u32,
    /// None once it is closed.
    holding: Mutex<Option<Holding>>,
}

impl HeldPages {
    fn with<R>(&self, work: impl FnOnce(&mut Cache, &mut Holding) -> PyResult<R>) -> PyResult<R> {
        let mut holding = self.holding.lock();
        let Some(holding) = holding.as_mut() else {
            return Err(bad_argument("these pages were released: hold the prompt again"));
        };
        self.shared.with(|cache| work(cache, holding))
    }
}

#[pymethods]
impl HeldPages {
    /// A copy of the page numbers of all held pages, in the order of the request's tokens.
    #[getter]
    fn pages<'py>(&self, python: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let pages = self.with(|cache, holding| Ok(holding.pages(cache)))?;
        Ok(PyArray1::from_iter(python, pages.into_iter().map(DevicePage::slot)))
    }

    /// Allocates further pages, so that there is space for this number of tokens in total.
    fn reserve(&self, tokens: usize) -> PyResult<()> {
        self.with(|cache, holding| holding.reserve(cache, tokens))
    }

    /// Appends tokens to the request, such as those that the model has produced.
    fn append(&self, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = tokens_of(tokens)?;
        self.with(|_, holding| {
            holding.sequence.extend(&tokens);
            Ok(())
        })
    }

    /// Reports that the KV of the first `tokens` tokens is written, so that other requests can find their whole pages. If
    /// another request has published some of these pages in the meantime, returns the index of the first one. From that
    /// index on, `pages` has the other request's pages, and the replaced pages are free.
    fn publish(&self, tokens: usize) -> PyResult<Option<u32>> {
        self.with(|cache, holding| holding.publish(cache, tokens))
    }

    /// Releases all pages. Published pages stay cached, the others become free.
    fn close(&self) -> PyResult<()> {
        let holding = self.holding.lock().take();
        holding.map_or(Ok(()), |holding| {
            self.shared.with(|cache| {
                holding.give_back(cache);
                Ok(())
            })
        })
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close()
    }
}

impl Drop for HeldPages {
    fn drop(&mut self) {
        // The error cannot be reported here.
        let _ = self.close();
    }
}
