//! What a thread that makes calls has for itself: memory for objects whose page has no room for a header.

use std::ffi::CStr;
use std::io;

use super::codes::Outcome;
use super::connection::{Buffered, Connection};
use super::library::{Client, Writable};
use terrace_l3::{Arena, HEADER_BYTES, Lent, Registration, StoreError, Target};

/// How many objects go through a thread's own memory at a time.
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

    /// Memory for objects of these sizes, header included.
    pub(super) fn copies(
        &mut self,
        bytes: impl Iterator<Item = usize> + Clone,
    ) -> Result<Vec<Buffered<Target>>, StoreError> {
        let lent = match self.lend(bytes.clone()) {
            Ok(lent) => lent,
            // A transfer that has failed may still write to it: the client that keeps it has it.
            Err(_) => {
                self.take_other_memory()
                    .map_err(|error| StoreError::io("allocating memory", &error))?;
                self.lend(bytes).expect("nobody else knows it")
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

    /// Reads an object of so many bytes, header included. Answers the library's code, and the bytes if
    /// there are as many.
    pub(super) fn read(
        &mut self,
        client: &Client,
        key: &CStr,
        bytes: usize,
    ) -> Result<(i64, Option<Buffered<Target>>), StoreError> {
        let mut copy = self.copies(std::iter::once(bytes))?.remove(0);
        let code = client.get(&[key.to_owned()], &mut [Writable::bytes(&mut copy)])[0];
        match Outcome::of(code) {
            outcome if outcome.may_go_on() => {
                client.keep(copy);
                Ok((code, None))
            }
            Outcome::Done if code == bytes as i64 => Ok((code, Some(copy))),
            // The cluster was free to overwrite it while it was read: it is verified anyway.
            Outcome::LeaseLapsed => Ok((code, Some(copy))),
            _ => Ok((code, None)),
        }
    }
}
