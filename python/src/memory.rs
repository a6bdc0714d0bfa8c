//! Python memory that stores read and write.

use std::ptr::NonNull;

use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::prelude::*;
use terrace_l3::{Arena, Registration, Source, Target};

use crate::errors::{IntoPython, bad_argument};
use parking_lot::Mutex;

/// Pages in the memory of an array, which is referenced while it is registered or in use.
pub(crate) fn arena(array: &Bound<'_, PyArray1<u8>>, pages: u32) -> PyResult<Arena> {
    if !array.is_contiguous() {
        return Err(bad_argument("the array is not contiguous: use np.ascontiguousarray(...)"));
    }
    let (bytes, pages_) = (array.len(), pages as usize);
    if pages_ == 0 || !bytes.is_multiple_of(pages_) {
        return Err(bad_argument(format_args!(
            "{bytes} bytes cannot be {pages} pages of one size"
        )));
    }
    let base = NonNull::new(array.data()).ok_or_else(|| bad_argument("the array has no memory"))?;
    let owner: Box<Py<PyArray1<u8>>> = Box::new(array.clone().unbind());
    // SAFETY: the array has that many contiguous bytes, and stays in place until the owner is
    // dropped: NumPy does not move memory that is referenced. `terrace_kv.Memory` requires the
    // caller to leave pages alone while a transfer uses them.
    #[expect(unsafe_code, reason = "the memory is Python's")]
    Ok(unsafe { Arena::from_raw(base, pages, bytes / pages_, owner) })
}

/// Memory that a store may use until it is closed.
#[pyclass(frozen, module = "terrace_kv._native")]
pub(crate) struct Memory {
    pub(crate) arena: Arena,
    registration: Mutex<Option<Registration>>,
}

impl Memory {
    pub(crate) fn new(arena: Arena, registration: Registration) -> Self {
        Self { arena, registration: Mutex::new(Some(registration)) }
    }

    /// Borrows the pages of a batch for reading.
    pub(crate) fn sources(&self, pages: &[u32], lengths: Option<&[u64]>) -> PyResult<Vec<Source>> {
        self.lend(pages, lengths, |page, length| {
            Ok(self.arena.source(page).map_err(IntoPython::into_python)?.first(length))
        })
    }

    /// Borrows the pages of a batch for writing.
    pub(crate) fn targets(&self, pages: &[u32], lengths: Option<&[u64]>) -> PyResult<Vec<Target>> {
        self.lend(pages, lengths, |page, length| {
            Ok(self.arena.target(page).map_err(IntoPython::into_python)?.first(length))
        })
    }

    fn lend<L>(
        &self,
        pages: &[u32],
        lengths: Option<&[u64]>,
        lend: impl Fn(u32, usize) -> PyResult<L>,
    ) -> PyResult<Vec<L>> {
        let (all, page_bytes) = (self.arena.pages(), self.arena.page_bytes());
        let lend_one = |(place, &page): (usize, &u32)| {
            let length = lengths.map_or(page_bytes, |lengths| lengths[place] as usize);
            if page >= all || length > page_bytes {
                return Err(bad_argument(format_args!(
                    "there is no page {page} with {length} bytes: the memory has {all} pages of {page_bytes}"
                )));
            }
            lend(page, length)
        };
        pages.iter().enumerate().map(lend_one).collect()
    }
}

#[pymethods]
impl Memory {
    #[getter]
    fn pages(&self) -> u32 {
        self.arena.pages()
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        self.arena.page_bytes()
    }

    fn is_lent(&self, page: u32) -> PyResult<bool> {
        if page >= self.arena.pages() {
            return Err(bad_argument(format_args!("there is no page {page}")));
        }
        Ok(self.arena.is_lent(page))
    }

    fn close(&self) {
        // Outside of the lock, because ending a registration may take a while.
        let registration = self.registration.lock().take();
        drop(registration);
    }
}
