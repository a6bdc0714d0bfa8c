//! Opening of a store: configuration, errors, and reading of the index.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::blocking::{blocks, read_index as read, visit_index, write_index};
use super::io::{BLOCK_BYTES, Blocks, Disk, DiskFile};
use super::layout::{ENTRIES_PER_BLOCK, Layout, clear_entries, read_entries};
use super::shrink::{Dropped, shrink};
use terrace_l3::backend::{Catalogue, Recorded, Slot, check_shares, slots_of};

/// Configuration of a disk store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Directory of the store; it is created if necessary.
    pub path: PathBuf,
    /// Maximum size of the data file.
    pub capacity_bytes: u64,
    /// Space to leave free on the file system: the store does not grow into it.
    pub reserve_bytes: u64,
    /// Maximum object size; every object takes a slot of this size and one block. It is fixed when
    /// the store is created.
    pub object_bytes_max: usize,
    /// IO engine.
    pub io: IoEngine,
    /// Number of transfers in flight at a time.
    pub depth: usize,
    /// Maximum growth of the data file at a time, in bytes. A small file grows by less.
    pub grow_bytes: u64,
    /// Maximum time until changes become durable. Callers can wait for it sooner.
    pub commit_interval_ms: u64,
    /// Eviction starts when more than this share of the slots is in use ...
    pub watermark_high: f64,
    /// ... and continues down to this share.
    pub watermark_low: f64,
    /// Maximum wait of a put for room before the store counts as full.
    pub full_wait_ms: u64,
    /// Duration of a lease.
    pub lease_ttl_ms: u64,
    /// Maximum share of the slots that may be leased at a time, so that puts always find room.
    pub leased_share_max: f64,
    /// Time for which hard pins found at opening protect their objects before their owner connects.
    pub pins_kept_ms: u64,
}

/// IO engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoEngine {
    /// io_uring if the kernel has it, else threads.
    #[default]
    Auto,
    /// io_uring.
    Uring,
    /// Blocking threads.
    Threads,
}

impl DiskConfig {
    /// A store in `path` of up to `capacity_bytes`, for objects of up to `object_bytes_max`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>, capacity_bytes: u64, object_bytes_max: usize) -> Self {
        Self {
            path: path.into(),
            capacity_bytes,
            reserve_bytes: 0,
            object_bytes_max,
            io: IoEngine::Auto,
            depth: 64,
            grow_bytes: 256 << 20,
            commit_interval_ms: 50,
            watermark_high: 0.98,
            watermark_low: 0.96,
            full_wait_ms: 1_000,
            lease_ttl_ms: 5_000,
            leased_share_max: 0.5,
            pins_kept_ms: 600_000,
        }
    }

    pub(super) fn layout(&self) -> Layout {
        Layout { object_bytes_max: self.object_bytes_max }
    }

    /// Maximum number of slots.
    pub(super) fn slots(&self) -> Result<Slot, OpenError> {
        // Maximum size of a system call, minus the block of the header.
        const OBJECT_BYTES_MAX: usize = 0x7fff_f000 - BLOCK_BYTES;
        const DEPTH_MAX: usize = 4096;
        if !(1..=OBJECT_BYTES_MAX).contains(&self.object_bytes_max) || self.depth > DEPTH_MAX {
            return Err(OpenError::Config(format!(
                "object_bytes_max must be 1 to {OBJECT_BYTES_MAX}, not {}, and at most {DEPTH_MAX} \
                 transfers can be in flight, not {}",
                self.object_bytes_max, self.depth
            )));
        }
        let slots = slots_of(self.capacity_bytes, self.layout().slot_bytes());
        check_shares(self.watermark_low, self.watermark_high, self.leased_share_max)
            .and(slots)
            .map_err(OpenError::Config)
    }

    /// Number of slots by which a data file of `usable` slots grows: a quarter of them, within
    /// limits.
    pub(super) fn grow_slots(&self, usable: Slot) -> Slot {
        const GROWTH_MIN_BYTES: u64 = 16 << 20;
        let slots_in = |bytes| self.layout().slots_in(bytes).clamp(1, u64::from(u32::MAX)) as Slot;
        let most = slots_in(self.grow_bytes);
        (usable / 4).clamp(slots_in(GROWTH_MIN_BYTES).min(most), most)
    }
}

/// Reason why a store could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The settings are invalid.
    #[error("{0}")]
    Config(String),
    /// The directory or its files cannot be created, read or written.
    #[error("cannot use {path} as a store: {error}; it must be a writable directory")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Message of the system.
        error: io::Error,
    },
    /// Another process or handle has the store open.
    #[error("the store in {path} is in use by {owner}; stop it, or choose another directory")]
    InUse {
        /// The directory.
        path: PathBuf,
        /// Description of the process.
        owner: String,
    },
    /// The store was created for other objects.
    #[error(
        "the store in {path} was created for objects of up to {found} bytes, not {wanted}; choose \
         another directory, or delete this one to start over"
    )]
    OtherObjects {
        /// The directory.
        path: PathBuf,
        /// Maximum object size of the store.
        found: usize,
        /// Maximum object size requested.
        wanted: usize,
    },
    /// The directory has no store that this version can read.
    #[error("{path} is not a readable store: {reason}; move it away, or choose another directory")]
    Unreadable {
        /// The directory.
        path: PathBuf,
        /// Reason.
        reason: &'static str,
    },
    /// The file system has no space that a store may use.
    #[error(
        "not enough space for the store in {path}: the file system has {free_bytes} bytes free, \
         {reserve_bytes} of them must stay free, and the store needs at least {needed_bytes}"
    )]
    LittleFree {
        /// The directory.
        path: PathBuf,
        /// Free space.
        free_bytes: u64,
        /// Space to leave free.
        reserve_bytes: u64,
        /// Space that a store of one object needs.
        needed_bytes: u64,
    },
    /// Other stores in the folder take all of its limit.
    #[error(
        "not enough space for the store in {path}: other stores in the same folder, in use by \
         {owners}, take {taken_bytes} of the {limit_bytes} bytes for all"
    )]
    FolderFull {
        /// The directory.
        path: PathBuf,
        /// Limit of the folder.
        limit_bytes: u64,
        /// Space of the stores in use.
        taken_bytes: u64,
        /// Descriptions of their processes.
        owners: String,
    },
    /// The disk has no space for the smallest store.
    #[error("not enough space for the store in {path}: {error}")]
    NoRoom {
        /// The directory.
        path: PathBuf,
        /// Message of the system.
        error: io::Error,
    },
}

/// Effects of opening a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opening {
    /// Objects dropped because the store may take less space than before.
    pub dropped: Dropped,
    /// Set if the store cannot become as large as configured.
    pub shortage: Option<Shortage>,
}

/// The file system has less space than a store may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Free space, including that of stores not in use.
    pub free_bytes: u64,
    /// Part of it that is to stay free.
    pub reserve_bytes: u64,
}

/// Reads the index and returns the catalogue. Creates the first block of a new store.
pub(super) fn read_index(
    disk: &Arc<dyn Disk>,
    config: &DiskConfig,
) -> Result<(Catalogue, Opening), OpenError> {
    let unusable = |error| OpenError::Directory { path: config.path.clone(), error };
    let no_room = |error| OpenError::NoRoom { path: config.path.clone(), error };
    let layout = config.layout();
    let wanted = config.slots()?;
    let index_bytes = disk.length(DiskFile::Index).map_err(unusable)?;
    if index_bytes < BLOCK_BYTES as u64 {
        disk.grow(DiskFile::Index, BLOCK_BYTES as u64).map_err(no_room)?;
    }
    let first = read(disk, 0, BLOCK_BYTES).map_err(unusable)?;
    let unreadable = |reason| OpenError::Unreadable { path: config.path.clone(), reason };
    // An index is longer than its first block once that block is durable.
    let is_torn = index_bytes <= BLOCK_BYTES as u64 && layout.may_be_torn(&first);
    let found = if is_torn { None } else { Layout::read(&first).map_err(unreadable)? };
    if let Some(found) = found
        && found.object_bytes_max != config.object_bytes_max
    {
        return Err(OpenError::OtherObjects {
            path: config.path.clone(),
            found: found.object_bytes_max,
            wanted: config.object_bytes_max,
        });
    }
    // There is no description, or an older version's, which must not read entries of this version.
    let description = layout.describe();
    if first[..description.len()] != description {
        let first = blocks(Blocks::holding(&description));
        write_index(disk, vec![(0, first)]).map_err(unusable)?;
        disk.sync(DiskFile::Index).map_err(unusable)?;
    }
    let data_bytes = disk.length(DiskFile::Data).map_err(unusable)?;
    let there = layout.slots_in(data_bytes).min(Layout::slots_of_index(index_bytes));
    let mut opening = Opening::default();
    if there > u64::from(wanted) {
        // Entries that cannot be counted cannot have existed.
        let there = Slot::try_from(there).unwrap_or(Slot::MAX - 1);
        opening.dropped = shrink(disk, config, there, wanted).map_err(unusable)?;
    }
    let usable = layout.slots_in(data_bytes).min(u64::from(wanted)) as Slot;
    let slots = match fitting(disk, config, wanted, usable)? {
        AvailableSlots::All => wanted,
        AvailableSlots::Fewer(slots, shortage) => {
            opening.shortage = Some(shortage);
            slots
        }
    };
    disk.shrink(DiskFile::Index, Layout::index_bytes(usable)).map_err(unusable)?;
    disk.shrink(DiskFile::Data, layout.slot_offset(usable)).map_err(unusable)?;
    disk.grow(DiskFile::Index, Layout::index_bytes(usable)).map_err(no_room)?;
    let mut catalogue = Catalogue::new(slots, usable);
    restore(disk, &mut catalogue, config.object_bytes_max).map_err(unusable)?;
    catalogue.doubt_owners(config.pins_kept_ms);
    Ok((catalogue, opening))
}

/// Number of the wanted slots that fit.
enum AvailableSlots {
    All,
    Fewer(Slot, Shortage),
}

/// Determines how much of the configured size is available. Existing slots stay.
fn fitting(
    disk: &Arc<dyn Disk>,
    config: &DiskConfig,
    wanted: Slot,
    usable: Slot,
) -> Result<AvailableSlots, OpenError> {
    let Some(free_bytes) = disk.available() else { return Ok(AvailableSlots::All) };
    let reserve_bytes = config.reserve_bytes;
    // The index begins with one block, and its last block may be partly empty.
    let room = free_bytes.saturating_sub(reserve_bytes).saturating_sub(2 * BLOCK_BYTES as u64);
    let more = room / config.layout().slot_and_entry_bytes();
    let slots = u64::from(usable).saturating_add(more);
    if slots >= u64::from(wanted) {
        return Ok(AvailableSlots::All);
    }
    if slots == 0 {
        let needed_bytes = config.layout().slot_and_entry_bytes() + 2 * BLOCK_BYTES as u64;
        let path = config.path.clone();
        return Err(OpenError::LittleFree { path, free_bytes, reserve_bytes, needed_bytes });
    }
    Ok(AvailableSlots::Fewer(slots as Slot, Shortage { free_bytes, reserve_bytes }))
}

/// Restores all entries of the index into the catalogue.
pub(super) fn restore(
    disk: &Arc<dyn Disk>,
    catalogue: &mut Catalogue,
    object_bytes_max: usize,
) -> io::Result<()> {
    let usable = catalogue.usable();
    let mut cleared = Vec::new();
    visit_index(disk, usable.div_ceil(ENTRIES_PER_BLOCK), |block, bytes| {
        let mut has_excess = false;
        for (slot, entry) in read_entries(bytes, block * ENTRIES_PER_BLOCK) {
            let fits = |entry: &Recorded| entry.length as usize <= object_bytes_max;
            let Some(recorded) = entry.filter(fits) else { continue };
            if slot < usable {
                catalogue.restore(slot, &recorded);
            } else {
                has_excess = true;
            }
        }
        // The data file has no slots for these entries. They must be gone before it grows.
        if has_excess {
            let last = block + (bytes.len() / BLOCK_BYTES) as u32 - 1;
            let mut bytes = bytes[bytes.len() - BLOCK_BYTES..].to_vec();
            clear_entries(&mut bytes, usable % ENTRIES_PER_BLOCK);
            cleared.push((Layout::index_offset(last), blocks(Blocks::holding(&bytes))));
        }
    })?;
    if !cleared.is_empty() {
        write_index(disk, cleared)?;
        disk.sync(DiskFile::Index)?;
    }
    Ok(())
}
