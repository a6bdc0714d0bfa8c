//! The keys and the borrowed memory of a job.

use std::ptr::NonNull;

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sha2::{Digest, Sha256};
use terrace_cache::PageKey;
use terrace_l3::{Arena, Lent, ObjectId, Registration, Source, Store, StoreError, Target};

use crate::errors::bad_argument;

/// Prefix of hashed keys, so that other uses of the hash give different names.
const DOMAIN: &[u8] = b"terrace-kv engine key 1\0";

/// Concatenated engine keys of any length.
#[derive(Default)]
pub(super) struct Keys {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Keys {
    /// Copies the keys of a batch, so that no Python object is needed afterwards.
    pub(super) fn of(keys: &Bound<'_, PyAny>) -> PyResult<Self> {
        let expected = keys.len().unwrap_or(0);
        let (mut bytes, mut ends) =
            (Vec::with_capacity(40 * expected), Vec::with_capacity(expected));
        for key in keys.try_iter()? {
            bytes.extend_from_slice(key?.cast::<PyBytes>()?.as_bytes());
            ends.push(bytes.len());
        }
        Ok(Self { bytes, ends })
    }

    pub(super) fn push(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len());
    }

    /// Returns an empty list with the same capacity.
    pub(super) fn room_for_as_many(&self) -> Self {
        Self {
            bytes: Vec::with_capacity(self.bytes.len()),
            ends: Vec::with_capacity(self.ends.len()),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let mut start = 0;
        self.ends.iter().map(move |&end| {
            let key = &self.bytes[start..end];
            start = end;
            key
        })
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the keys of the parts of each key: the key followed by the part's number.
    pub(super) fn in_parts(&self, parts: u32) -> Self {
        let count = self.ends.len() * parts as usize;
        let mut all =
            Self { bytes: Vec::with_capacity(40 * count), ends: Vec::with_capacity(count) };
        for key in self.iter() {
            for part in 0..parts {
                all.bytes.extend_from_slice(key);
                all.push(&part.to_be_bytes());
            }
        }
        all
    }

    /// Returns the object ids. Tenants may influence the engine's hash input, so the hash must be
    /// collision-resistant.
    pub(super) fn ids(&self, namespace: PageKey) -> Vec<ObjectId> {
        let id = |key: &[u8]| {
            let digest = Sha256::new().chain_update(DOMAIN).chain_update(key).finalize();
            let first = digest[..16].try_into().expect("a digest has 32 bytes");
            ObjectId::page(namespace, PageKey(u128::from_le_bytes(first)))
        };
        self.iter().map(id).collect()
    }
}

/// The memory of a batch.
#[derive(FromPyObject)]
pub(super) enum Places<'py> {
    /// Pages of a region, and the used length of each.
    Pages(usize, PyReadonlyArray1<'py, u32>, Option<PyReadonlyArray1<'py, u64>>),
    /// Addresses, lengths, and the owner of the memory.
    Addresses(PyReadonlyArray1<'py, u64>, PyReadonlyArray1<'py, u64>, Py<PyAny>),
}

/// A page borrowed for reading or for writing.
pub(super) trait Loan: Sized + Send + 'static {
    fn lend(arena: &Arena, page: u32, length: usize) -> Result<Self, Lent>;
    fn page(&self) -> (Arena, u32);
    fn bytes(&self) -> usize;
}

impl Loan for Source {
    fn lend(arena: &Arena, page: u32, length: usize) -> Result<Self, Lent> {
        Ok(arena.source(page)?.first(length))
    }

    fn page(&self) -> (Arena, u32) {
        (self.arena(), Source::page(self))
    }

    fn bytes(&self) -> usize {
        self.len()
    }
}

impl Loan for Target {
    fn lend(arena: &Arena, page: u32, length: usize) -> Result<Self, Lent> {
        Ok(arena.target(page)?.first(length))
    }

    fn page(&self) -> (Arena, u32) {
        (self.arena(), Target::page(self))
    }

    fn bytes(&self) -> usize {
        self.len()
    }
}

/// The memory of a job: a loan per key, or the reason why there is none.
pub(super) struct Batch<L> {
    pub(super) loans: Vec<Result<L, String>>,
    /// Registrations for this job alone.
    pub(super) registrations: Vec<Registration>,
}

/// Parameters for memory that the engine has not registered.
pub(super) struct Transient<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) owner: &'a Py<PyAny>,
}

impl<L: Loan> Batch<L> {
    pub(super) fn of_pages(
        keys: &Keys,
        arena: &Arena,
        pages: &PyReadonlyArray1<'_, u32>,
        lengths: Option<&PyReadonlyArray1<'_, u64>>,
    ) -> PyResult<Self> {
        let pages = pages.as_slice().map_err(bad_argument)?;
        let lengths =
            lengths.map(|lengths| lengths.as_slice()).transpose().map_err(bad_argument)?;
        one_for_each(keys, pages.len(), lengths.map_or(pages.len(), <[u64]>::len))?;
        let (all, page_bytes) = (arena.pages(), arena.page_bytes());
        let lend = |(place, &page): (usize, &u32)| {
            let length = lengths.map_or(page_bytes, |lengths| lengths[place] as usize);
            if page >= all || length > page_bytes {
                return Err(bad_argument(format_args!(
                    "there is no page {page} with {length} bytes: the region has {all} pages of {page_bytes}"
                )));
            }
            Ok(L::lend(arena, page, length).map_err(|error| error.to_string()))
        };
        let loans: PyResult<Vec<_>> = pages.iter().enumerate().map(lend).collect();
        Ok(Self { loans: loans?, registrations: Vec::new() })
    }

    pub(super) fn of_addresses<'a>(
        keys: &Keys,
        regions: impl Iterator<Item = &'a Arena> + Clone,
        addresses: &PyReadonlyArray1<'_, u64>,
        lengths: &PyReadonlyArray1<'_, u64>,
        transient: &Transient<'_>,
    ) -> PyResult<Self> {
        let addresses = addresses.as_slice().map_err(bad_argument)?;
        let lengths = lengths.as_slice().map_err(bad_argument)?;
        one_for_each(keys, addresses.len(), lengths.len())?;
        let mut batch = Self { loans: Vec::with_capacity(keys.len()), registrations: Vec::new() };
        for (&address, &length) in addresses.iter().zip(lengths) {
            let (address, length) = (address as usize, length as usize);
            let page = regions.clone().find_map(|arena| {
                page_at(arena, address, length).map(|page| L::lend(arena, page, length))
            });
            let loan = match page {
                Some(loan) => loan.map_err(|error| error.to_string()),
                None => batch.once(address, length, transient)?.map_err(|error| error.to_string()),
            };
            batch.loans.push(loan);
        }
        Ok(batch)
    }

    /// Registers memory for this job alone.
    fn once(
        &mut self,
        address: usize,
        length: usize,
        transient: &Transient<'_>,
    ) -> PyResult<Result<L, StoreError>> {
        let owner = Python::attach(|python| transient.owner.clone_ref(python));
        let arena = arena_at(address, length, length, owner)?;
        Ok(transient.store.register(&arena).map(|registration| {
            self.registrations.push(registration);
            L::lend(&arena, 0, length).expect("the arena is not shared yet")
        }))
    }
}

/// Returns the page of the arena that begins at the address and is long enough.
fn page_at(arena: &Arena, address: usize, length: usize) -> Option<u32> {
    let offset = address.checked_sub(arena.base().as_ptr().addr())?;
    let page_bytes = arena.page_bytes();
    let fits = offset < arena.bytes() && offset.is_multiple_of(page_bytes) && length <= page_bytes;
    fits.then(|| (offset / page_bytes) as u32)
}

fn one_for_each(keys: &Keys, places: usize, lengths: usize) -> PyResult<()> {
    if places == keys.len() && lengths == keys.len() {
        return Ok(());
    }
    Err(bad_argument(format_args!(
        "{} keys, {places} places and {lengths} lengths: give one of each per object",
        keys.len()
    )))
}

/// Divides engine memory into pages.
pub(super) fn arena_at(
    address: usize,
    bytes: usize,
    page_bytes: usize,
    owner: Py<PyAny>,
) -> PyResult<Arena> {
    let base =
        NonNull::new(address as *mut u8).ok_or_else(|| bad_argument("0 is not an address"))?;
    let pages = bytes.checked_div(page_bytes).and_then(|pages| u32::try_from(pages).ok());
    let pages = pages.filter(|&pages| pages > 0 && bytes.is_multiple_of(page_bytes));
    let pages = pages.ok_or_else(|| {
        bad_argument(format_args!("{bytes} bytes cannot be pages of {page_bytes} each"))
    })?;
    // SAFETY: `terrace_kv.transfers` requires the engine's adapter to guarantee that the bytes
    // exist while the owner is referenced, and that pages are left alone while a job uses them.
    #[expect(unsafe_code, reason = "the memory is the engine's")]
    Ok(unsafe { Arena::from_raw(base, pages, page_bytes, Box::new(owner)) })
}
