//! Adjacent transfers joined into one system call. Slots that are reserved together are adjacent,
//! and a disk moves small objects faster in one large request.

use std::io;

use smallvec::{SmallVec, smallvec};

use super::engine::finish;
use super::io::{Direction, DiskFile, IoVector, Transfer};

/// Maximum size of a joined transfer: a MiB of objects with their headers. Larger requests are not
/// faster, and several of this size keep a disk busy. They never exceed the kernel's limit of 1024
/// pieces of memory per call, since no piece is shorter than a block.
const BYTES_MAX: usize = 9 << 17;

/// Transfers in one direction with consecutive ranges of a file.
#[derive(Debug)]
pub(super) struct Joined {
    /// At least one transfer, in order.
    transfers: SmallVec<[Transfer; 1]>,
    bytes: usize,
}

impl Joined {
    /// Joins adjacent transfers. They are sorted first, since their order does not matter: slots
    /// that were freed in sequence are reserved in the opposite order.
    pub(super) fn all(mut transfers: Vec<Transfer>) -> Vec<Self> {
        let place = |transfer: &Transfer| {
            (transfer.file() as u8, transfer.direction() as u8, transfer.offset())
        };
        transfers.sort_by_key(place);
        let mut all: Vec<Self> = Vec::new();
        for transfer in transfers {
            match all.last_mut() {
                Some(joined) if joined.is_followed_by(&transfer) => joined.push(transfer),
                Some(_) | None => all.push(Self::alone(transfer)),
            }
        }
        all
    }

    /// Ends the joined transfer: the disk has moved `moved` bytes, or failed. If that is not all of
    /// them, and there are several transfers, the failed one is unknown: each is returned
    /// separately, to be retried alone.
    #[must_use]
    pub(super) fn finish(mut self, moved: io::Result<usize>) -> SmallVec<[Self; 1]> {
        if self.transfers.len() == 1 {
            let transfer = self.transfers.pop().expect("there is one");
            finish(transfer, moved);
            return SmallVec::new();
        }
        if moved.is_ok_and(|moved| moved == self.bytes) {
            for transfer in self.transfers {
                let bytes = transfer.bytes();
                finish(transfer, Ok(bytes));
            }
            return SmallVec::new();
        }
        self.transfers.into_iter().map(Self::alone).collect()
    }

    pub(super) fn file(&self) -> DiskFile {
        self.transfers[0].file()
    }

    pub(super) fn direction(&self) -> Direction {
        self.transfers[0].direction()
    }

    pub(super) fn offset(&self) -> u64 {
        self.transfers[0].offset()
    }

    /// Memory of all transfers, which they own until they are finished.
    pub(super) fn vectors(&self) -> Vec<IoVector> {
        self.transfers.iter().flat_map(Transfer::vectors).collect()
    }

    fn alone(transfer: Transfer) -> Self {
        Self { bytes: transfer.bytes(), transfers: smallvec![transfer] }
    }

    fn is_followed_by(&self, transfer: &Transfer) -> bool {
        self.file() == transfer.file()
            && self.direction() == transfer.direction()
            && self.offset() + self.bytes as u64 == transfer.offset()
            && self.bytes + transfer.bytes() <= BYTES_MAX
    }

    fn push(&mut self, transfer: Transfer) {
        self.bytes += transfer.bytes();
        self.transfers.push(transfer);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::super::io::{BLOCK_BYTES, Blocks, Part, Parts};
    use super::*;

    type Told = (u64, io::Result<()>);

    fn transfer(
        answer: &Sender<Told>,
        direction: Direction,
        block: u64,
        blocks: usize,
    ) -> Transfer {
        let answer = answer.clone();
        let parts = Parts::from_iter([Part::blocks(Blocks::for_bytes(blocks * BLOCK_BYTES))]);
        let done = move |result: io::Result<()>, _: Parts| answer.send((block, result)).unwrap();
        Transfer::new(direction, DiskFile::Data, block * BLOCK_BYTES as u64, parts, done)
    }

    fn ranges(all: &[Joined]) -> Vec<(u64, usize)> {
        let range =
            |joined: &Joined| (joined.offset() / BLOCK_BYTES as u64, joined.bytes / BLOCK_BYTES);
        all.iter().map(range).collect()
    }

    fn told(answered: &Receiver<Told>) -> Vec<(u64, bool)> {
        let mut told: Vec<_> =
            answered.try_iter().map(|(block, result)| (block, result.is_ok())).collect();
        told.sort_unstable();
        told
    }

    #[test]
    fn adjacent_transfers_are_joined_in_any_order() {
        let (answer, _answered) = channel();
        let write = |block, blocks| transfer(&answer, Direction::Write, block, blocks);
        let read = transfer(&answer, Direction::Read, 6, 2);
        let all = Joined::all(vec![write(4, 2), write(2, 2), write(0, 2), write(9, 1), read]);
        assert_eq!(ranges(&all), [(6, 2), (0, 6), (9, 1)]);
        assert_eq!(all[1].vectors().len(), 3);
    }

    #[test]
    fn the_size_of_a_joined_transfer_is_limited() {
        let (answer, _answered) = channel();
        let most = BYTES_MAX / BLOCK_BYTES;
        let write = |block: usize| transfer(&answer, Direction::Write, block as u64, 1);
        let all = Joined::all((0..most + 3).map(write).collect());
        assert_eq!(ranges(&all), [(0, most), (most as u64, 3)]);
    }

    #[test]
    fn a_failed_joined_transfer_is_retried_one_by_one() {
        let (answer, answered) = channel();
        let write = |block| transfer(&answer, Direction::Write, block, 1);
        for moved in [Err(io::Error::other("a bad sector")), Ok(BLOCK_BYTES)] {
            let mut all = Joined::all(vec![write(0), write(1), write(2)]);
            let again = all.pop().unwrap().finish(moved);
            assert_eq!(ranges(&again), [(0, 1), (1, 1), (2, 1)]);
            assert_eq!(told(&answered), [], "no result before the failed transfer is known");
            for (number, joined) in again.into_iter().enumerate() {
                let moved = if number == 1 { 0 } else { BLOCK_BYTES };
                assert!(joined.finish(Ok(moved)).is_empty());
            }
            assert_eq!(told(&answered), [(0, true), (1, false), (2, true)]);
        }
    }
}
