//! Lookups of existing objects for an engine's scheduler.
//!
//! A scheduler looks up every chunk of every waiting request in every step, on its critical thread.
//! A lookup therefore takes no lock and reads contiguous memory. New keys are sent to the store
//! together, once per step, and a thread of the store writes the answers where lookups find them.

mod known;

use std::cell::RefCell;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use terrace_l3::ExistsOptions;

pub(super) use self::known::Question;
use self::known::{Answer, Known};
use super::NativeTransfers;
use super::batch::Keys;
use crate::errors::bad_argument;

/// Native part of `terrace_kv.transfers.Transfers.lookups`.
#[pyclass(frozen, name = "Lookups", module = "terrace_kv._native")]
pub(crate) struct NativeLookups {
    transfers: Py<NativeTransfers>,
    known: OneAtATime,
    hit: Py<PyAny>,
    miss: Py<PyAny>,
    retry: Py<PyAny>,
}

/// The state, accessed under the GIL.
struct OneAtATime(RefCell<Known>);

#[expect(unsafe_code, reason = "a lock of its own would take as long as a lookup")]
// SAFETY: only `NativeLookups::with_known` accesses it. It holds the GIL or, in free-threaded
// builds, the object's lock, and ends all borrows before it returns.
unsafe impl Sync for OneAtATime {}

#[pymethods]
impl NativeLookups {
    #[new]
    fn new(
        transfers: Py<NativeTransfers>,
        hit: Py<PyAny>,
        miss: Py<PyAny>,
        retry: Py<PyAny>,
        seconds: f64,
    ) -> PyResult<Self> {
        let keep = Duration::try_from_secs_f64(seconds).map_err(bad_argument)?;
        let known = OneAtATime(RefCell::new(Known::new(keep)));
        Ok(Self { transfers, known, hit, miss, retry })
    }

    /// Returns the function `lookup(key, context)`, which returns the known state of a key: `retry`
    /// if it is new or the store has not answered.
    #[getter]
    fn lookup<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let definition = (&raw const LOOKUP.0).cast_mut();
        #[expect(unsafe_code, reason = "PyO3's functions take three times as long to call")]
        // SAFETY: the definition is static, and `lookup` has its signature.
        unsafe {
            let function = ffi::PyCFunction_New(definition, this.as_ptr());
            Bound::from_owned_ptr_or_err(this.py(), function)
        }
    }

    /// Sends the new keys to the store.
    fn flush(this: &Bound<'_, Self>) -> PyResult<()> {
        let now = Instant::now();
        let Some(question) = Self::with_known(this, |known| known.ask(now)) else { return Ok(()) };
        let options = ExistsOptions { prefetch_to_memory: true, lease: false };
        this.get().transfers.get().ask(question, options)
    }

    /// Marks keys as misses for a while, because their objects could not be read.
    fn missed(this: &Bound<'_, Self>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        Self::with_known(this, |known| keys.iter().for_each(|key| known.miss(key)));
        Ok(())
    }

    /// Makes keys be looked up again, because their objects were stored.
    fn forget(this: &Bound<'_, Self>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Keys::of(keys)?;
        Self::with_known(this, |known| keys.iter().for_each(|key| known.forget(key)));
        Ok(())
    }

    /// Returns whether lookups are unanswered.
    fn pending(this: &Bound<'_, Self>) -> bool {
        Self::with_known(this, |known| known.is_open())
    }
}

impl NativeLookups {
    /// Passes the state to `with`, which must not call Python: that might release the lock.
    fn with_known<T>(this: &Bound<'_, Self>, with: impl FnOnce(&mut Known) -> T) -> T {
        with_critical_section(this.as_any(), || with(&mut this.get().known.0.borrow_mut()))
    }
}

static LOOKUP: Definition = Definition(ffi::PyMethodDef {
    ml_name: c"lookup".as_ptr(),
    ml_meth: ffi::PyMethodDefPointer { PyCFunctionFast: lookup },
    ml_flags: ffi::METH_FASTCALL,
    ml_doc: std::ptr::null(),
});

struct Definition(ffi::PyMethodDef);

#[expect(unsafe_code, reason = "it has pointers")]
// SAFETY: it and its targets are never written to.
unsafe impl Sync for Definition {}

#[expect(unsafe_code, reason = "Python calls it")]
unsafe extern "C" fn lookup(
    this: *mut ffi::PyObject,
    arguments: *mut *mut ffi::PyObject,
    count: ffi::Py_ssize_t,
) -> *mut ffi::PyObject {
    // SAFETY: this thread is attached while Python calls it, and `this` is the object that the
    // function was created with.
    let (python, this) = unsafe {
        let python = Python::assume_attached();
        (python, Borrowed::from_ptr(python, this).cast_unchecked::<NativeLookups>())
    };
    if count != 2 {
        PyTypeError::new_err("lookup() takes a key and a context").restore(python);
        return std::ptr::null_mut();
    }
    let (mut start, mut length) = (std::ptr::null_mut(), 0);
    // SAFETY: there are two arguments, which are unchanged until this returns; the call raises
    // unless the first is bytes.
    let key = unsafe {
        if ffi::PyBytes_AsStringAndSize(*arguments, &raw mut start, &raw mut length) < 0 {
            return std::ptr::null_mut();
        }
        std::slice::from_raw_parts(start.cast::<u8>(), length as usize)
    };
    let answer = NativeLookups::with_known(&this, |known| known.lookup(key));
    let this = this.get();
    let said = match answer {
        Answer::Hit => &this.hit,
        Answer::Miss => &this.miss,
        Answer::Asked => &this.retry,
    };
    said.clone_ref(python).into_ptr()
}
