//! Upload of address lists to the device: a ring of pinned memory, and a ring of the same size in
//! device memory.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use crate::driver::{DeviceAddress, Driver, PairList};
use crate::error::CudaError;
use crate::memory::Allocation;
use crate::pinned::PinnedBytes;

/// Size of a pair of addresses: the destination and the source of a piece.
pub(crate) const PAIR_BYTES: usize = 16;

/// A ring of places for pairs of addresses. They are allocated and freed in the same order, as the
/// copies of a lane complete.
#[derive(Debug)]
pub(crate) struct Lists {
    host: PinnedBytes,
    device: Allocation,
    places: usize,
    /// Allocated ranges, the oldest first. Each is contiguous.
    taken: VecDeque<Range<usize>>,
}

impl Lists {
    /// Creates a ring with `places` places of 16 bytes.
    pub(crate) fn new(driver: &Arc<dyn Driver>, places: usize) -> Result<Self, CudaError> {
        let host = PinnedBytes::new(driver, places * PAIR_BYTES)?;
        let device = Allocation::new(driver, places * PAIR_BYTES)?;
        Ok(Self { host, device, places, taken: VecDeque::new() })
    }

    /// Allocates contiguous places, if there are enough.
    pub(crate) fn take(&mut self, count: usize) -> Option<Range<usize>> {
        let start = match (self.taken.front(), self.taken.back()) {
            (Some(oldest), Some(newest)) if newest.start >= oldest.start => {
                if newest.end + count <= self.places {
                    newest.end
                } else if count <= oldest.start {
                    0
                } else {
                    return None;
                }
            }
            (Some(oldest), Some(newest)) if newest.end + count <= oldest.start => newest.end,
            (Some(_), Some(_)) => return None,
            (None, _) | (_, None) if count <= self.places => 0,
            (None, _) | (_, None) => return None,
        };
        self.taken.push_back(start..start + count);
        Some(start..start + count)
    }

    /// Frees the oldest range.
    pub(crate) fn give_back_oldest(&mut self) {
        self.taken.pop_front();
    }

    /// Frees the newest range.
    pub(crate) fn give_back_newest(&mut self) {
        self.taken.pop_back();
    }

    pub(crate) fn write(&mut self, place: usize, to: DeviceAddress, from: DeviceAddress) {
        self.write_all(place..place + 1, std::iter::once((to, from)));
    }

    /// Writes consecutive places.
    pub(crate) fn write_all(
        &mut self,
        places: Range<usize>,
        pairs: impl Iterator<Item = (DeviceAddress, DeviceAddress)>,
    ) {
        let bytes = &mut self.host.bytes_mut()[places.start * PAIR_BYTES..places.end * PAIR_BYTES];
        let (of_places, _) = bytes.as_chunks_mut::<PAIR_BYTES>();
        for (place, (to, from)) in of_places.iter_mut().zip(pairs) {
            place[..8].copy_from_slice(&to.0.to_le_bytes());
            place[8..].copy_from_slice(&from.0.to_le_bytes());
        }
    }

    pub(crate) fn read(&self, place: usize) -> (DeviceAddress, DeviceAddress) {
        (self.word(2 * place), self.word(2 * place + 1))
    }

    /// Returns the n-th number from the start of a place: half a pair.
    pub(crate) fn number(&self, place: usize, n: usize) -> u64 {
        self.word(2 * place + n).0
    }

    /// Returns the device address of a place in pinned memory.
    pub(crate) fn seen_at(&self, place: usize) -> DeviceAddress {
        self.host.address(place * PAIR_BYTES)
    }

    /// Returns places in device memory.
    pub(crate) fn on_device(&self, places: Range<usize>) -> PairList {
        let at = self.device.at().offset(places.start * PAIR_BYTES);
        PairList { at, pairs: places.len() as u32 }
    }

    fn word(&self, word: usize) -> DeviceAddress {
        let bytes = self.host.bytes()[8 * word..].first_chunk();
        DeviceAddress(u64::from_le_bytes(*bytes.expect("a place has two words")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeDriver;

    #[test]
    fn places_are_reused_in_a_ring() {
        let driver: Arc<dyn Driver> = Arc::new(FakeDriver::new(1 << 20, 1));
        let mut lists = Lists::new(&driver, 10).unwrap();
        assert_eq!((lists.take(11), lists.take(6)), (None, Some(0..6)));
        assert_eq!((lists.take(3), lists.take(2)), (Some(6..9), None));
        lists.give_back_oldest();
        assert_eq!(
            (lists.take(7), lists.take(4)),
            (None, Some(0..4)),
            "behind the end, from the start"
        );
        assert_eq!((lists.take(3), lists.take(2)), (None, Some(4..6)));
        lists.give_back_newest();
        lists.give_back_oldest();
        assert_eq!((lists.take(7), lists.take(6)), (None, Some(4..10)));
        lists.give_back_oldest();
        lists.give_back_oldest();
        assert_eq!(lists.take(10), Some(0..10), "all are free again");
    }

    #[test]
    fn written_places_are_visible_to_the_device() {
        let driver: Arc<dyn Driver> = Arc::new(FakeDriver::new(1 << 20, 1));
        let mut lists = Lists::new(&driver, 4).unwrap();
        let (one, two) = (DeviceAddress(u64::MAX - 1), DeviceAddress(7));
        lists.write(3, one, two);
        assert_eq!((lists.read(3), lists.number(3, 1), lists.read(2).0.0), ((one, two), 7, 0));
        lists.write_all(0..2, [(two, one), (one, one)].into_iter());
        assert_eq!([0, 1, 2].map(|place| lists.read(place).0.0), [7, one.0, 0]);
        assert_eq!(lists.seen_at(3).0 - lists.seen_at(1).0, 32);
        let of_two = lists.on_device(2..4);
        assert_eq!((of_two.at.0 - lists.on_device(0..1).at.0, of_two.pairs), (32, 2));
    }
}
