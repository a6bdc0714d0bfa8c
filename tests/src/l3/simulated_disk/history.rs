//! History of a simulated disk, and the possible states after a crash at any moment.

use std::sync::Arc;

use terrace_l3_disk::DiskFile;

use super::SimulatedDisk;
use super::image::{Files, Image};
use terrace_kit::Dice;

/// Devices write sectors of this size, mostly whole.
const SECTOR_BYTES: usize = 512;

/// Something that changes what is on a disk, or what of it would survive.
#[derive(Clone, Debug)]
pub enum Event {
    /// A write began. From then on its bytes may reach the disk, all or some.
    Write {
        /// The file.
        file: DiskFile,
        /// Where in it.
        offset: u64,
        /// The event.
        bytes: Arc<[u8]>,
    },
    /// The write whose event has this number was finished.
    Finished {
        /// The number.
        write: usize,
    },
    /// A sync returned.
    Sync {
        /// The file.
        file: DiskFile,
        /// Number of events when it was called: writes finished before are durable.
        began: usize,
        /// True if it had an effect.
        honest: bool,
    },
    /// The file became longer, durably.
    Grow {
        /// The file.
        file: DiskFile,
        /// Its length.
        bytes: u64,
    },
    /// The file was cut, durably from the next sync on.
    Shrink {
        /// The file.
        file: DiskFile,
        /// Its length.
        bytes: u64,
    },
}

/// Everything that happened to a disk since it was made.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub(super) start: Files<Image>,
    pub(super) events: Vec<Event>,
}

impl History {
    /// All the moments at which there could be a crash.
    #[must_use]
    pub fn crashes(&self) -> Crashes<'_> {
        Crashes { history: self, at: 0, durable: self.start.clone(), pending: Vec::new() }
    }

    /// The events in their order.
    #[must_use]
    pub fn events(&self) -> &[Event] {
        &self.events
    }
}

/// Walks through a history and makes the disks that crashes would leave.
#[derive(Debug)]
pub struct Crashes<'a> {
    history: &'a History,
    /// The event that a crash would interrupt.
    at: usize,
    /// Writes that survive in any case.
    durable: Files<Image>,
    /// Writes and cuts that may survive.
    pending: Vec<Pending>,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    event: usize,
    file: DiskFile,
    /// The event that says so.
    finished: Option<usize>,
}

/// Fate of the writes that no sync has covered.
#[derive(Clone, Copy)]
enum Fate {
    /// All are lost.
    Lost,
    /// All are there.
    Kept,
    /// Each is there, lost or torn, and they reached the disk in any order.
    Mixed,
}

impl Crashes<'_> {
    /// Goes on to the next event. False at the end of the history, which is a moment as well.
    pub fn advance(&mut self) -> bool {
        let Some(event) = self.history.events.get(self.at) else { return false };
        match *event {
            Event::Write { file, .. } => {
                self.pending.push(Pending { event: self.at, file, finished: None });
            }
            Event::Shrink { file, .. } => {
                self.pending.push(Pending { event: self.at, file, finished: Some(self.at) });
            }
            Event::Finished { write } => {
                for pending in self.pending.iter_mut().filter(|pending| pending.event == write) {
                    pending.finished = Some(self.at);
                }
            }
            Event::Sync { file, began, honest: true } => {
                self.settle(|pending| {
                    pending.file == file
                        && pending.finished.is_some_and(|finished| finished < began)
                });
            }
            Event::Sync { honest: false, .. } => {}
            Event::Grow { file, bytes } => {
                let shrinks = self.history;
                self.settle(|pending| {
                    pending.file == file
                        && matches!(shrinks.events[pending.event], Event::Shrink { .. })
                });
                self.durable.of_mut(file).resize(bytes);
            }
        }
        self.at += 1;
        true
    }

    /// The number of the event that a crash would interrupt.
    #[must_use]
    pub fn at(&self) -> usize {
        self.at
    }

    /// Returns true if a crash at this event differs from one at the event before or after.
    #[must_use]
    pub fn is_interesting(&self) -> bool {
        !matches!(self.history.events.get(self.at), Some(Event::Finished { .. }))
    }

    /// A disk as a crash at this moment could leave it.
    #[must_use]
    pub fn disk(&self, dice: &mut Dice) -> SimulatedDisk {
        let mut files = self.durable.clone();
        let fate = match dice.below(6) {
            0 => Fate::Lost,
            1 => Fate::Kept,
            2.. => Fate::Mixed,
        };
        let mut writes = Vec::new();
        let pending = self.pending.iter().map(|pending| pending.event);
        for event in pending.chain((self.at < self.history.events.len()).then_some(self.at)) {
            match &self.history.events[event] {
                Event::Write { file, offset, bytes } => writes.push((*file, *offset, &bytes[..])),
                Event::Grow { file, bytes } | Event::Shrink { file, bytes } => {
                    let kept = match fate {
                        Fate::Lost => false,
                        Fate::Kept => true,
                        Fate::Mixed => dice.one_in(2),
                    };
                    if kept {
                        files.of_mut(*file).resize(*bytes);
                    }
                }
                Event::Finished { .. } | Event::Sync { .. } => {}
            }
        }
        match fate {
            Fate::Lost => {}
            Fate::Kept => {
                for (file, offset, bytes) in writes {
                    files.of_mut(file).write(offset, bytes);
                }
            }
            Fate::Mixed => {
                while !writes.is_empty() {
                    let (file, offset, bytes) =
                        writes.swap_remove(dice.below(writes.len() as u64) as usize);
                    land(files.of_mut(file), offset, bytes, dice);
                }
            }
        }
        SimulatedDisk::holding(files)
    }

    /// Makes some of what is pending durable.
    fn settle(&mut self, settles: impl Fn(&Pending) -> bool) {
        for pending in self.pending.extract_if(.., |pending| settles(pending)) {
            let image = self.durable.of_mut(pending.file);
            match &self.history.events[pending.event] {
                Event::Write { offset, bytes, .. } => image.write(*offset, bytes),
                Event::Shrink { bytes, .. } => image.resize(*bytes),
                Event::Finished { .. } | Event::Sync { .. } | Event::Grow { .. } => {
                    unreachable!("these are never pending")
                }
            }
        }
    }
}

impl SimulatedDisk {
    /// The disk after a crash that interrupts event number `at` of a history. Synced writes
    /// survive; of every other write all, a part or nothing does.
    #[must_use]
    pub fn after_crash(history: &History, at: usize, dice: &mut Dice) -> Self {
        let mut crashes = history.crashes();
        while crashes.at() < at && crashes.advance() {}
        crashes.disk(dice)
    }
}

/// A write that was under way, or had not left the device's cache, when the power went.
fn land(image: &mut Image, offset: u64, bytes: &[u8], dice: &mut Dice) {
    match dice.below(8) {
        0 | 1 => {}
        2 | 3 => image.write(offset, bytes),
        torn => {
            for (number, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                let at = offset + (number * SECTOR_BYTES) as u64;
                if dice.one_in(2) {
                    image.write(at, sector);
                } else if torn == 7 && dice.one_in(4) {
                    image.write(at, &sector[..dice.below(sector.len() as u64) as usize]);
                }
            }
        }
    }
}
