//! Shrinks a store. Objects that stay move to the remaining slots, and the objects that are dropped
//! are those that the store would have evicted next.
//!
//! A crash in between loses only objects that are dropped anyway. Slots are overwritten after the
//! index on disk has released them, entries are written after their bytes are durable, and an
//! object that two entries name is restored from one of them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use super::blocking::{blocks, perform, write_index};
use super::commit::entries_of;
use super::io::{BLOCK_BYTES, Blocks, Direction, Disk, DiskFile};
use super::layout::{ENTRIES_PER_BLOCK, Layout, write_entry};
use super::open::{DiskConfig, restore};
use terrace_l3::backend::{Catalogue, Slot};

/// Objects that were dropped because a store may take less space than before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Number of objects.
    pub objects: u64,
    /// Their payload in bytes.
    pub bytes: u64,
}

/// Drops objects of a store of `old` slots, and moves the others to the first `slots`. Does not
/// truncate the files.
pub(super) fn shrink(
    disk: &Arc<dyn Disk>,
    config: &DiskConfig,
    old: Slot,
    slots: Slot,
) -> io::Result<Dropped> {
    let mut catalogue = Catalogue::new(old, old);
    restore(disk, &mut catalogue, config.object_bytes_max)?;
    catalogue.doubt_owners(PINS_END_MS);
    let mut dropped = drop_objects(disk, config, &mut catalogue, slots)?;
    let lost = move_objects(disk, config, &catalogue, slots)?;
    dropped.objects += lost.objects;
    dropped.bytes += lost.bytes;
    Ok(dropped)
}

/// End of all pins, on a clock that otherwise stands at 0.
const PINS_END_MS: u64 = 1;

/// Evicts objects that do not fit, and removes them from the index.
fn drop_objects(
    disk: &Arc<dyn Disk>,
    config: &DiskConfig,
    catalogue: &mut Catalogue,
    slots: Slot,
) -> io::Result<Dropped> {
    // Keep no more than the watermark above which the store evicts.
    let kept = ((f64::from(slots) * config.watermark_high) as Slot).clamp(1, slots);
    let before = catalogue.stats(config.object_bytes_max, 0);
    let excess = before.objects.saturating_sub(u64::from(kept));
    for _ in 0..excess {
        // Pinned objects are dropped last.
        let evicted = catalogue.evict(0) || catalogue.evict(PINS_END_MS);
        assert!(evicted, "nothing else protects what is in a store that is being opened");
    }
    let after = catalogue.stats(config.object_bytes_max, 0);
    let mut cleared = BTreeSet::new();
    for slot in catalogue.take_doomed() {
        catalogue.set_recorded(slot, false);
        cleared.insert(slot / ENTRIES_PER_BLOCK);
    }
    write_blocks(disk, cleared.into_iter().map(|block| (block, entries_of(catalogue, block))))?;
    Ok(Dropped { objects: excess, bytes: before.bytes - after.bytes })
}

/// Copies the objects beyond the first `slots` to free slots below, and records them in the index.
/// Unreadable objects are lost.
fn move_objects(
    disk: &Arc<dyn Disk>,
    config: &DiskConfig,
    catalogue: &Catalogue,
    slots: Slot,
) -> io::Result<Dropped> {
    const CHUNK_BYTES: usize = 32 << 20;
    let layout = config.layout();
    let mut free = (0..slots).filter(|slot| !catalogue.is_present(*slot));
    let beyond = (slots..catalogue.slots()).filter(|slot| catalogue.is_present(*slot));
    let moves: Vec<(Slot, Slot)> =
        beyond.map(|from| (from, free.next().expect("so many were dropped"))).collect();
    let mut lost = Dropped::default();
    let mut entries: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    let at_a_time = (CHUNK_BYTES as u64 / layout.slot_bytes()).max(1) as usize;
    for moves in moves.chunks(at_a_time) {
        let read = |(from, _): &(Slot, Slot)| {
            let length = catalogue.length(*from) as usize;
            let memory = Blocks::for_bytes(BLOCK_BYTES + length);
            (layout.slot_offset(*from), blocks(memory))
        };
        let reads = moves.iter().map(read).collect();
        let mut writes = Vec::new();
        for (read, (from, to)) in
            perform(disk, Direction::Read, DiskFile::Data, reads).into_iter().zip(moves)
        {
            let length = catalogue.length(*from);
            match read {
                Ok(bytes) => {
                    let block = to / ENTRIES_PER_BLOCK;
                    let block =
                        entries.entry(block).or_insert_with(|| entries_of(catalogue, block));
                    let recorded = catalogue.recorded(*from).expect("it was restored");
                    write_entry(block, *to, &recorded);
                    writes.push((layout.slot_offset(*to), bytes));
                }
                Err(_) => {
                    lost.objects += 1;
                    lost.bytes += u64::from(length);
                }
            }
        }
        for written in perform(disk, Direction::Write, DiskFile::Data, writes) {
            drop(written?);
        }
    }
    if !entries.is_empty() {
        disk.sync(DiskFile::Data)?;
    }
    write_blocks(disk, entries.into_iter())?;
    Ok(lost)
}

/// Writes blocks of the index and makes them durable.
fn write_blocks(
    disk: &Arc<dyn Disk>,
    changed: impl Iterator<Item = (u32, Vec<u8>)>,
) -> io::Result<()> {
    let writes: Vec<_> = changed
        .map(|(block, entries)| (Layout::index_offset(block), blocks(Blocks::holding(&entries))))
        .collect();
    if writes.is_empty() {
        return Ok(());
    }
    write_index(disk, writes)?;
    disk.sync(DiskFile::Index)
}
