//! Upload of a step's lists: pinned memory on the host, and fixed places on the device, so that
//! kernels find the lists at the same addresses in every step.

#![allow(unsafe_code)]

use std::sync::Arc;

use smallvec::SmallVec;

use super::plain::{Plain, bytes_of};
use crate::driver::{DeviceAddress, Driver, Piece, Stream};
use crate::error::CudaError;
use crate::fence::CudaFence;
use crate::memory::Allocation;
use crate::pinned::PinnedBytes;

/// Alignment of lists.
const ALIGNMENT: usize = 256;
/// Lists are sent together if the gap between them is at most this.
const GAP_BYTES: usize = 16 << 10;
/// Steps whose lists are on the host at once: one runs, one is queued behind it, one is being
/// written.
const SLOTS: usize = 3;

/// The place of a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Section {
    offset: usize,
    bytes: usize,
}

/// Allocates places for lists.
#[derive(Debug, Default)]
pub(super) struct Plan {
    bytes: usize,
}

impl Plan {
    /// Adds a list of at most `count` elements.
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
    /// Written ranges, in the order of offsets.
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

    /// Returns the device address of a list.
    pub(super) fn at(&self, section: Section) -> DeviceAddress {
        self.device.at().offset(section.offset)
    }

    /// Starts a step. Waits until the step that used the slot before has been taken in.
    pub(super) fn begin(&mut self, driver: &dyn Driver, stream: Stream) -> Result<(), CudaError> {
        self.turn = (self.turn + 1) % SLOTS;
        self.written.clear();
        let taken_in = self.slots[self.turn].1.take();
        if taken_in.is_some_and(|taken_in| taken_in.wait().is_err()) {
            // The step was not submitted completely, so its state on the device is unknown.
            driver.drain(stream)?;
        }
        Ok(())
    }

    /// Writes a list. Lists are written in the order of their places.
    ///
    /// # Errors
    /// Fails if the list is longer than planned.
    pub(super) fn write<T: Plain>(&mut self, section: Section, all: &[T]) -> Result<(), CudaError> {
        let bytes = bytes_of(all);
        self.place(section, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }

    /// Returns the place of a list of `bytes` bytes, all of which the caller writes, in the order
    /// of lists.
    ///
    /// # Errors
    /// Fails if the list is longer than planned.
    pub(super) fn place(&mut self, section: Section, bytes: usize) -> Result<&mut [u8], CudaError> {
        if bytes > section.bytes {
            return Err(CudaError::Config("a step is larger than the model was prepared for"));
        }
        let (start, end) = (section.offset, section.offset + bytes);
        match self.written.last_mut() {
            Some((_, before)) if start >= *before && start - *before <= GAP_BYTES => *before = end,
            _ if bytes == 0 => {}
            _ => self.written.push((start, end)),
        }
        Ok(&mut self.slots[self.turn].0.bytes_mut()[start..end])
    }

    /// Sends the written lists. They may be overwritten when `taken_in` has passed.
    pub(super) fn send(
        &mut self,
        driver: &dyn Driver,
        stream: Stream,
        taken_in: &CudaFence,
    ) -> Result<(), CudaError> {
        let (pinned, waits_for) = &mut self.slots[self.turn];
        let piece = |&(start, end): &(usize, usize)| Piece {
            to: self.device.at().offset(start),
            from: pinned.address(start),
            bytes: end - start,
        };
        let pieces: SmallVec<[Piece; 8]> = self.written.iter().map(piece).collect();
        // Copied by a kernel: copy engines may be busy with pages for a long time. SAFETY: the
        // device memory is large enough, pieces do not overlap, and the pinned memory is not
        // written to before they have arrived.
        unsafe { driver.fetch_all(stream, &pieces) }?;
        *waits_for = Some(taken_in.clone());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::Priority;
    use crate::fake::FakeDriver;
    use crate::fence::EventPool;

    #[test]
    fn distant_lists_are_sent_in_one_call_without_the_gap() {
        let fake = FakeDriver::new(1 << 20, 1);
        let driver: Arc<dyn Driver> = Arc::new(fake.clone());
        let mut plan = Plan::default();
        let near = [plan.add::<u32>(4), plan.add::<u32>(GAP_BYTES)];
        let far = [plan.add::<u32>(GAP_BYTES), plan.add::<u32>(2)];
        let mut header = Header::new(&driver, &plan).unwrap();
        let untouched = vec![0xee; plan.bytes];
        fake.write(header.device.at(), &untouched);
        let stream = driver.create_stream(Priority::High).unwrap();
        let taken_in = EventPool::new(&driver).fence().unwrap();
        header.begin(&*driver, stream).unwrap();
        header.write(near[0], &[1, 2]).unwrap();
        header.write(near[1], &[3]).unwrap();
        header.write::<u32>(far[0], &[]).unwrap();
        header.write(far[1], &[4, 5]).unwrap();
        assert!(header.write(far[1], &[4, 5, 6]).is_err(), "there is no room for a third");
        fake.fail("fetch", 1);
        header.send(&*driver, stream, &taken_in).expect("one call is enough");
        driver.drain(stream).unwrap();
        let found = |section, count| fake.read(header.at(section), count * 4);
        assert_eq!(found(near[0], 2), bytes_of(&[1_u32, 2]));
        assert_eq!(found(near[1], 1), bytes_of(&[3_u32]));
        assert_eq!(found(far[0], GAP_BYTES), untouched[..4 * GAP_BYTES]);
        assert_eq!(found(far[1], 2), bytes_of(&[4_u32, 5]));
        driver.destroy_stream(stream);
        drop(header);
        assert_eq!(fake.violations(), Vec::<String>::new());
    }
}
