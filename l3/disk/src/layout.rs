//! Encoding of the files, as `FORMAT.md` draws them.

use std::num::NonZeroU64;
use std::ops::Range;

use super::io::BLOCK_BYTES;
use terrace_l3::Owner;
use terrace_l3::backend::{Fields, Recorded, Slot, payload_checksum};

const MAGIC: [u8; 8] = *b"TERRACEI";
const VERSION: u32 = 2;
/// Version of an index whose entries have no owners: its entries are valid entries of [`VERSION`]
/// without a pin.
const VERSION_WITHOUT_OWNERS: u32 = 1;
const ENTRY_BYTES: usize = 64;
/// Bytes of an entry with the lower half of the owner of the hard pin.
const OWNER_LOW: Range<usize> = 44..48;
const OWNER_HIGH: Range<usize> = 52..56;

/// Number of entries in a block of the index.
pub(super) const ENTRIES_PER_BLOCK: u32 = (BLOCK_BYTES / ENTRY_BYTES) as u32;

/// Positions in files with objects of up to `object_bytes_max` bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) object_bytes_max: usize,
}

impl Layout {
    /// Distance from one slot to the next.
    pub(super) fn slot_bytes(self) -> u64 {
        (BLOCK_BYTES + self.object_bytes_max.next_multiple_of(BLOCK_BYTES)) as u64
    }

    /// Bytes that a slot takes in both files.
    pub(super) fn slot_and_entry_bytes(self) -> u64 {
        self.slot_bytes() + ENTRY_BYTES as u64
    }

    pub(super) fn slot_offset(self, slot: Slot) -> u64 {
        u64::from(slot) * self.slot_bytes()
    }

    /// Number of slots in a data file of this length.
    pub(super) fn slots_in(self, data_bytes: u64) -> u64 {
        data_bytes / self.slot_bytes()
    }

    /// Length of an index for `slots` slots.
    pub(super) fn index_bytes(slots: Slot) -> u64 {
        u64::from(slots.div_ceil(ENTRIES_PER_BLOCK) + 1) * BLOCK_BYTES as u64
    }

    /// Number of slots for which an index of this length has entries.
    pub(super) fn slots_of_index(index_bytes: u64) -> u64 {
        (index_bytes / BLOCK_BYTES as u64).saturating_sub(1) * u64::from(ENTRIES_PER_BLOCK)
    }

    /// Offset of a block of entries.
    pub(super) fn index_offset(block: u32) -> u64 {
        (u64::from(block) + 1) * BLOCK_BYTES as u64
    }

    /// Encodes the description of the store, the first block.
    pub(super) fn describe(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.object_bytes_max as u64).to_le_bytes());
        let checksum = payload_checksum(&bytes[..24]);
        bytes[24..32].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Returns true if these bytes can be a description that a crash interrupted, before the index
    /// had any entries.
    pub(super) fn may_be_torn(self, bytes: &[u8]) -> bool {
        let whole = self.describe();
        let (begun, rest) = bytes.split_at(whole.len());
        begun != whole
            && begun.iter().zip(whole).all(|(byte, whole)| *byte == 0 || *byte == whole)
            && rest.iter().all(|byte| *byte == 0)
    }

    /// Decodes the description of a store. It may differ from [`Self::describe`] if the store is
    /// older.
    pub(super) fn read(bytes: &[u8]) -> Result<Option<Layout>, &'static str> {
        if bytes[..32] == [0; 32] {
            return Ok(None);
        }
        if bytes[0..8] != MAGIC {
            return Err("its index is not that of a store");
        }
        if number(bytes, 24) != payload_checksum(&bytes[..24]) {
            return Err("the first block of its index is damaged");
        }
        if ![VERSION, VERSION_WITHOUT_OWNERS].map(u64::from).contains(&number(bytes, 8)) {
            return Err("it was written by a version with a different format");
        }
        Ok(Some(Layout { object_bytes_max: number(bytes, 16) as usize }))
    }
}

/// Encodes the entry of a slot at its position in a block of the index.
pub(super) fn write_entry(block: &mut [u8], slot: Slot, recorded: &Recorded) {
    let at = (slot % ENTRIES_PER_BLOCK) as usize * ENTRY_BYTES;
    let entry = &mut block[at..at + ENTRY_BYTES];
    let Recorded { id, length, owner } = recorded;
    let owner = owner.map_or(0, |owner| owner.0.get());
    entry[0..40].copy_from_slice(&id.to_bytes());
    entry[40..44].copy_from_slice(&length.to_le_bytes());
    entry[OWNER_LOW].copy_from_slice(&(owner as u32).to_le_bytes());
    entry[48..52].copy_from_slice(&slot.to_le_bytes());
    entry[OWNER_HIGH].copy_from_slice(&((owner >> 32) as u32).to_le_bytes());
    let checksum = entry_checksum(entry);
    entry[56..64].copy_from_slice(&checksum.to_le_bytes());
}

/// Checksum of an entry without the owner, which changes while the object stays: a torn change of
/// the owner must not lose the object.
fn entry_checksum(entry: &[u8]) -> u64 {
    let mut lasting: [u8; 56] = entry[..56].try_into().expect("56 bytes");
    lasting[OWNER_LOW].fill(0);
    lasting[OWNER_HIGH].fill(0);
    payload_checksum(&lasting)
}

/// Decodes the entries of consecutive slots from `first` on; `None` for empty slots.
pub(super) fn read_entries(
    blocks: &[u8],
    first: Slot,
) -> impl Iterator<Item = (Slot, Option<Recorded>)> {
    (first..).zip(blocks.chunks_exact(ENTRY_BYTES)).map(|(slot, entry)| {
        let sound = half(entry, 48) == slot && number(entry, 56) == entry_checksum(entry);
        let id = Fields::of(entry).id().expect("an entry begins with a name");
        let owner = u64::from(half(entry, OWNER_LOW.start))
            | u64::from(half(entry, OWNER_HIGH.start)) << 32;
        let owner = NonZeroU64::new(owner).map(Owner);
        (slot, sound.then_some(Recorded { id, length: half(entry, 40), owner }))
    })
}

/// Clears the entries of a block from `first` on.
pub(super) fn clear_entries(block: &mut [u8], first: u32) {
    block[first as usize * ENTRY_BYTES..].fill(0);
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn number(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use terrace_cache::PageKey;
    use terrace_l3::ObjectId;

    use super::*;

    fn recorded() -> Recorded {
        let id = ObjectId { namespace: PageKey(3), key: PageKey(4 << 100), generation: 5 };
        Recorded { id, length: 1234, owner: Some(Owner::named("owner")) }
    }

    #[test]
    fn an_entry_comes_back_and_an_empty_one_does_not() {
        let mut block = [0; BLOCK_BYTES];
        write_entry(&mut block, 66, &recorded());
        let entries: Vec<_> = read_entries(&block, 64).collect();
        assert_eq!(entries.len(), 64);
        for (slot, entry) in entries {
            assert_eq!(entry, (slot == 66).then_some(recorded()));
        }
    }

    #[test]
    fn every_flipped_bit_of_an_entry_empties_it_or_ends_its_pin() {
        let mut block = [0; BLOCK_BYTES];
        write_entry(&mut block, 0, &recorded());
        for bit in 0..ENTRY_BYTES * 8 {
            let mut flipped = block;
            flipped[bit / 8] ^= 1 << (bit % 8);
            let read = read_entries(&flipped, 0).next().unwrap().1;
            if OWNER_LOW.contains(&(bit / 8)) || OWNER_HIGH.contains(&(bit / 8)) {
                let read = read.expect("the object is there");
                assert_ne!(read.owner, recorded().owner, "bit {bit}");
                assert_eq!(Recorded { owner: recorded().owner, ..read }, recorded());
            } else {
                assert_eq!(read, None, "bit {bit}");
            }
        }
        assert_eq!(read_entries(&block, 64).next().unwrap().1, None, "another slot's entry");
    }

    /// Pins are changed in place, over the old entry.
    #[test]
    fn a_torn_change_of_owner_loses_no_object() {
        let pinned = recorded();
        let plain = Recorded { owner: None, ..pinned };
        for (before, after) in [(pinned, plain), (plain, pinned)] {
            let (mut old, mut new) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
            write_entry(&mut old, 0, &before);
            write_entry(&mut new, 0, &after);
            for torn in 0..=ENTRY_BYTES {
                old[..torn].copy_from_slice(&new[..torn]);
                let read = read_entries(&old, 0).next().unwrap().1.expect("the object is there");
                assert_eq!((read.id, read.length), (before.id, before.length), "{torn} bytes");
            }
        }
    }

    #[test]
    fn a_description_comes_back_or_says_what_is_wrong() {
        let layout = Layout { object_bytes_max: 65536 };
        let bytes = layout.describe();
        assert_eq!(Layout::read(&bytes).unwrap().unwrap().object_bytes_max, 65536);
        assert!(Layout::read(&[0; 32]).unwrap().is_none());
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Layout::read(&flipped).is_err(), "bit {bit}");
        }
        let mut older = bytes;
        older[8] = 1;
        let checksum = payload_checksum(&older[..24]);
        older[24..].copy_from_slice(&checksum.to_le_bytes());
        assert_eq!(Layout::read(&older).unwrap().unwrap().object_bytes_max, 65536);
        assert_eq!((layout.slot_bytes(), Layout::index_bytes(65)), (17 * 4096, 3 * 4096));
    }
}
