//! The library's calls and nothing else, as a yardstick for the store: the same client, sizes and
//! batches, without catalogue and threads; and without checksums or with them.

use std::ffi::CString;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::library::{Client, Protection, Readable, Writable};
use super::{MooncakeStore, connection::Connection};
use terrace_l3::backend::{Headroom, payload_checksums};
use terrace_l3::{Arena, Source, StoreError, Target};

/// Batches as fast as the library moves them.
#[derive(Debug)]
pub struct PlainCalls {
    client: Arc<Client>,
    connection: Connection,
    keys: Vec<CString>,
    has_checksums: bool,
}

impl PlainCalls {
    /// Calls through the client of `store`, for batches of so many objects.
    ///
    /// # Errors
    /// When it is not connected.
    pub fn new(store: &MooncakeStore, objects: u32) -> Result<Self, StoreError> {
        let connection = store.shared.connection.clone();
        let client = connection.client()?;
        let key = |number| CString::new(format!("terrace-plain/{number}")).expect("no zero");
        let keys = (0..objects).map(key).collect();
        Ok(Self { client, connection, keys, has_checksums: false })
    }

    /// The same calls, with the checksums that the store computes before a put and after a get: what
    /// it adds to these is the rest of its work.
    #[must_use]
    pub fn with_checksums(self) -> Self {
        Self { has_checksums: true, ..self }
    }

    /// Puts the first pages of an arena that has headroom, as one batch, and answers how long it took.
    ///
    /// # Errors
    /// When the arena is not registered or the library fails.
    ///
    /// # Panics
    /// When the arena has no headroom or its pages are lent.
    pub fn put(&self, arena: &Arena) -> Result<Duration, StoreError> {
        let _buffer = self.connection.buffer(arena.id())?;
        let source = |page| -> (Source, Headroom) {
            let source = arena.source(page).expect("nobody writes to it");
            let headroom = source.headroom().expect("the arena has headroom");
            (source, headroom)
        };
        let lent: Vec<_> = (0..self.keys.len() as u32).map(source).collect();
        let pieces: Vec<_> = lent.iter().map(|(page, room)| Readable::page(room, page)).collect();
        let began = Instant::now();
        self.compute_checksums(lent.iter().map(|(page, _)| &**page));
        let codes = self.client.put(&self.keys, &pieces, Protection::None);
        let took = began.elapsed();
        succeeded(codes.iter().all(|code| *code == 0), took)
    }

    /// Reads what was put, as one batch, and answers how long it took.
    ///
    /// # Errors
    /// When the arena is not registered or the library fails.
    ///
    /// # Panics
    /// When the arena has no headroom or its pages are lent.
    pub fn get(&self, arena: &Arena) -> Result<Duration, StoreError> {
        let _buffer = self.connection.buffer(arena.id())?;
        let target = |page| -> (Target, Headroom) {
            let target = arena.target(page).expect("nobody uses it");
            let headroom = target.headroom().expect("the arena has headroom");
            (target, headroom)
        };
        let mut lent: Vec<_> = (0..self.keys.len() as u32).map(target).collect();
        let mut pieces: Vec<_> =
            lent.iter_mut().map(|(page, room)| Writable::page(room, page)).collect();
        let began = Instant::now();
        let codes = self.client.get(&self.keys, &mut pieces);
        drop(pieces);
        self.compute_checksums(lent.iter().map(|(page, _)| &**page));
        let took = began.elapsed();
        succeeded(codes.iter().all(|code| *code > 0), took)
    }

    fn compute_checksums<'a>(&self, pages: impl Iterator<Item = &'a [u8]>) {
        if self.has_checksums {
            std::hint::black_box(payload_checksums(&pages.collect::<Vec<_>>()));
        }
    }

    /// Removes what was put.
    pub fn remove(&self) {
        for key in &self.keys {
            self.client.remove(key, true, false);
        }
    }
}

fn succeeded(all: bool, took: Duration) -> Result<Duration, StoreError> {
    if all {
        return Ok(took);
    }
    let error = std::io::Error::other("the library refused an object");
    Err(StoreError::io("measuring the library", &error))
}
