//! State of a thread that makes calls: memory for copies of objects whose page has no headroom.

use std::ffi::CStr;
use std::io;

use super::codes::CallOutcome;
use super::connection::{Buffered, Connection};
use super::library::{Client, Writable};
use terrace_l3::{Arena, HEADER_BYTES, Lent, Registration, StoreError, Target};

/// Number of objects copied at a time.
pub(super) const BOUNCE_PAGES: u32 = 8;

#[derive(Debug)]
pub(super) struct Worker {
    connection: Connection,
    bounce: Arena,
    registration: Registration,
}

impl Worker {
    pub(super) fn new(connection: &Connection, object_bytes_max: usize) -> io::Result<Self> {
        let bounce = Arena::new(BOUNCE_PAGES, HEADER_BYTES + object_bytes_max)?;
        let registration = connection.register(&bounce).map_err(io::Error::other)?;
        Ok(Self { connection: connection.clone(), bounce, registration })
    }

    /// Memory for objects of these sizes, including the header.
    pub(super) fn copies(
        &mut self,
        bytes: impl Iterator<Item = usize> + Clone,
    ) -> Result<Vec<Buffered<Target>>, StoreError> {
        let lent = match self.lend(bytes.clone()) {
            Ok(lent) => lent,
            // A failed transfer may still write to it, so the client keeps it: allocate other
            // memory.
            Err(_) => {
                self.take_other_memory()
                    .map_err(|error| StoreError::io("allocating memory", &error))?;
                self.lend(bytes).expect("the arena is new")
            }
        };
        self.connection.buffered(lent, Target::arena_id).into_iter().collect()
    }

    fn lend(&self, bytes: impl Iterator<Item = usize>) -> Result<Vec<Target>, Lent> {
        let lend = |(page, bytes)| self.bounce.target(page).map(|target| target.first(bytes));
        (0..).zip(bytes).map(lend).collect()
    }

    fn take_other_memory(&mut self) -> io::Result<()> {
        let other = Arena::new(BOUNCE_PAGES, self.bounce.page_bytes())?;
        self.registration = self.connection.register(&other).map_err(io::Error::other)?;
        self.bounce = other;
        Ok(())
    }

    /// Reads an object of `bytes` bytes, including the header. Returns the library's code, and the
    /// bytes if the object has this size.
    pub(super) fn read(
        &mut self,
        client: &Client,
        key: &CStr,
        bytes: usize,
    ) -> Result<(i64, Option<Buffered<Target>>), StoreError> {
        let mut copy = self.copies(std::iter::once(bytes))?.remove(0);
        let code = client.get(&[key.to_owned()], &mut [Writable::bytes(&mut copy)])[0];
        match CallOutcome::of(code) {
            outcome if outcome.may_continue() => {
                client.keep(copy);
                Ok((code, None))
            }
            CallOutcome::Done if code == bytes as i64 => Ok((code, Some(copy))),
            // The cluster was free to overwrite it during the read; the caller verifies it.
            CallOutcome::LeaseLapsed => Ok((code, Some(copy))),
            _ => Ok((code, None)),
        }
    }
}
