//! The memory in which a step's lists travel to the device: pinned on the host, and at fixed places on the device, so that
//! kernels find them where they were the step before.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::plain::{Plain, bytes_of};
use crate::driver::{DeviceAddress, Driver, Stream};
use crate::error::CudaError;
use crate::fence::CudaFence;
use crate::memory::Allocation;
use crate::pinned::PinnedBytes;

/// Lists begin at multiples of this.
const ALIGNMENT: usize = 256;
/// Lists with no more between them travel together.
const GAP_BYTES: usize = 16 << 10;
/// Steps whose lists are on the host at once: one runs, one waits behind it, one is being written.
const SLOTS: usize = 3;

/// A list's place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Section {
    offset: usize,
    bytes: usize,
}

/// Decides where lists lie.
#[derive(Debug, Default)]
pub(super) struct Plan {
    bytes: usize,
}

impl Plan {
    /// A list of at most so many.
    pub(super) fn add<T: Plain>(&mut self, count: usize) -> Section {
        let (offset, bytes) = (self.bytes, count * size_of::<T>());
        self.bytes = (offset + bytes).next_multiple_of(ALIGNMENT);
        Section { offset, bytes }
    }
}

/// The lists of steps.
#[derive(Debug)]
pub(super) struct Header {
    device: Allocation,
    slots: Vec<(PinnedBytes, Option<CudaFence>)>,
    turn: usize,
    /// What is written, in the order of offsets.
    written: Vec<(usize, usize)>,
}

impl Header {
    pub(super) fn new(driver: &Arc<dyn Driver>, plan: &Plan) -> Result<Self, CudaError> {
        let slot = || Ok::<_, CudaError>((PinnedBytes::new(driver, plan.bytes)?, None));
        Ok(Self {
            device: Allocation::new(driver, plan.bytes)?,
            slots: (0..SLOTS).map(|_| slot()).collect::<Result<_, _>>()?,
            turn: 0,
            written: Vec::new(),
        })
    }

    /// Where the device finds a list.
    pub(super) fn at(&self, section: Section) -> DeviceAddress {
        self.device.at().offset(section.offset)
    }

    /// Begins with another step. Waits until one of long ago has been taken in.
    pub(super) fn begin(&mut self, driver: &dyn Driver, stream: Stream) -> Result<(), CudaError> {
        self.turn = (self.turn + 1) % SLOTS;
        self.written.clear();
        let taken_in = self.slots[self.turn].1.take();
        if taken_in.is_some_and(|taken_in| taken_in.wait().is_err()) {
            // It was not handed over whole, and nobody knows what of it was.
            driver.drain(stream)?;
        }
        Ok(())
    }

    /// Writes a list. Lists are written in the order of their places.
    ///
    /// # Errors
    /// When it is longer than was planned.
    pub(super) fn write<T: Plain>(&mut self, section: Section, all: &[T]) -> Result<(), CudaError> {
        let bytes = bytes_of(all);
        if bytes.len() > section.bytes {
            return Err(CudaError::Config("a step is larger than the model was prepared for"));
        }
        let pinned = self.slots[self.turn].0.bytes_mut();
        pinned[section.offset..][..bytes.len()].copy_from_slice(bytes);
        let (start, end) = (section.offset, section.offset + bytes.len());
        match self.written.last_mut() {
            Some((_, before)) if start >= *before && start - *before <= GAP_BYTES => *before = end,
            _ if bytes.is_empty() => {}
            _ => self.written.push((start, end)),
        }
        Ok(())
    }

    /// Sends what was written. It may be written over when `taken_in` is passed.
    pub(super) fn send(
        &mut self,
        driver: &dyn Driver,
        stream: Stream,
        taken_in: &CudaFence,
    ) -> Result<(), CudaError> {
        let (pinned, waits_for) = &mut self.slots[self.turn];
        for &(start, end) in &self.written {
            let to = self.device.at().offset(start);
            // By a kernel: copy engines may be busy with pages for a long time.
            // SAFETY: the device's memory is as large, and the pinned one is not written to before it has arrived.
            unsafe { driver.fetch(stream, to, pinned.address(start), end - start) }?;
        }
        *waits_for = Some(taken_in.clone());
        Ok(())
    }
}
