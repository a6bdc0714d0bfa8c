//! A disk in memory that crashes, fails and lies on demand.
//!
//! It keeps a [`History`] of what was written and synced, from which it makes the disks that a
//! crash at any moment could leave behind. It also watches its user: two transfers in flight over
//! the same bytes, one of them a write, are an error of the store and panic.

mod fault;
mod history;
mod image;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use terrace_l3_disk::{Direction, Disk, DiskFile, Transfer};

use self::fault::Faults;
pub use self::fault::{Errno, Failure, Fault, Operation};
pub use self::history::{Crashes, Event, History};
use self::image::{Files, Image};
use terrace_kit::Dice;

/// Two files in memory.
#[derive(Debug)]
pub struct SimulatedDisk {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    files: Files<Image>,
    history: History,
    faults: Faults,
    /// Per file, true if its syncs do nothing.
    lies: Files<bool>,
    /// Per file, true if its syncs do not return.
    held: Files<bool>,
    /// Number of syncs being held.
    waiting_syncs: usize,
    /// True while reads must wait.
    reads_held: bool,
    /// Transfers that wait for the worker.
    waiting: Vec<Started>,
    in_flight: Vec<InFlight>,
    /// Decides about order and delays, if there is a worker.
    dice: Option<Dice>,
    closed: bool,
}

/// A transfer that has begun.
#[derive(Debug)]
struct Started {
    transfer: Transfer,
    failure: Option<Failure>,
    /// The event of a write.
    event: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct InFlight {
    file: DiskFile,
    direction: Direction,
    range: Range<u64>,
}

impl SimulatedDisk {
    /// An empty disk that performs transfers at once, in their order.
    #[must_use]
    pub fn new() -> Self {
        Self::holding(Files::default())
    }

    /// The same disk, but a thread performs transfers in any order, and syncs take their time.
    #[must_use]
    pub fn shuffled(mut self, seed: u64) -> Self {
        self.shared.lock().dice = Some(Dice::new(seed));
        let shared = self.shared.clone();
        self.worker = Some(std::thread::spawn(move || shared.work()));
        self
    }

    fn holding(files: Files<Image>) -> Self {
        let history = History { start: files.clone(), events: Vec::new() };
        let state = Mutex::new(State { files, history, ..State::default() });
        Self { shared: Arc::new(Shared { state, changed: Condvar::new() }), worker: None }
    }

    /// Lets an operation fail.
    pub fn fail(&self, fault: Fault) {
        self.shared.lock().faults.add(fault);
    }

    /// Nothing fails from now on. Answers how many faults had not struck for the last time.
    pub fn heal(&self) -> usize {
        self.shared.lock().faults.clear()
    }

    /// From now on syncs of the file do nothing but say that they have.
    pub fn lie_about_sync(&self, file: DiskFile) {
        *self.shared.lock().lies.of_mut(file) = true;
    }

    /// From now on syncs of the file do not return until [`SimulatedDisk::release`].
    pub fn hold_syncs(&self, file: DiskFile) {
        *self.shared.lock().held.of_mut(file) = true;
    }

    /// Blocks until a sync is being held.
    ///
    /// # Panics
    /// If none arrives in time.
    pub fn wait_for_held_sync(&self) {
        const PATIENCE: Duration = Duration::from_secs(120);
        let free = |state: &mut State| state.waiting_syncs == 0;
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), PATIENCE, free);
        let (state, waited) = waited.expect("nobody panics while holding it");
        drop(state);
        assert!(!waited.timed_out(), "nobody syncs");
    }

    /// From now on reads do not end until [`SimulatedDisk::release`]. Only a shuffled disk can do
    /// this.
    ///
    /// # Panics
    /// When the disk performs transfers at once.
    pub fn hold_reads(&self) {
        assert!(self.worker.is_some(), "a disk without a worker does not let anybody wait");
        self.shared.lock().reads_held = true;
    }

    /// Releases held syncs.
    pub fn release(&self) {
        let mut state = self.shared.lock();
        state.held = Files::default();
        state.reads_held = false;
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Flips a bit on the medium.
    pub fn flip_bit(&self, file: DiskFile, offset: u64, bit: u32) {
        self.shared.lock().files.of_mut(file).flip_bit(offset, bit);
    }

    /// Number of events.
    #[must_use]
    pub fn position(&self) -> usize {
        self.shared.lock().history.events.len()
    }

    /// Everything that happened so far.
    #[must_use]
    pub fn history(&self) -> History {
        self.shared.lock().history.clone()
    }

    /// Bytes of a file as a reader would see them now.
    #[must_use]
    pub fn bytes(&self, file: DiskFile, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let length = self.shared.lock().files.of(file).read(range.start, &mut bytes);
        bytes.truncate(length);
        bytes
    }

    /// A disk that holds what a reader would see now, with a history of its own.
    #[must_use]
    pub fn copy(&self) -> Self {
        Self::holding(self.shared.lock().files.clone())
    }
}

impl Default for SimulatedDisk {
    fn default() -> Self {
        Self::new()
    }
}

impl Disk for SimulatedDisk {
    fn start(&self, transfers: Vec<Transfer>) {
        let mut state = self.shared.lock();
        let mut started = Vec::new();
        for transfer in transfers {
            if let Some(disturbed) = state.disturbed_by(&transfer) {
                // A thread whose sync is held could not see the panic.
                drop(state);
                self.release();
                panic!("{transfer:?} while there is {disturbed:?}");
            }
            started.push(state.begin(transfer));
        }
        if state.dice.is_some() {
            state.waiting.extend(started);
            drop(state);
            self.shared.changed.notify_all();
            return;
        }
        drop(state);
        for started in started {
            self.shared.perform(started);
        }
    }

    fn sync(&self, file: DiskFile) -> io::Result<()> {
        /// Long enough for a few more writes to begin.
        const DAWDLE: Duration = Duration::from_micros(400);
        let mut state = self.shared.lock();
        let began = state.history.events.len();
        if let Some(failure) = state.faults.strike(Operation::Sync, file) {
            return Err(failure.error());
        }
        if state.dice.as_mut().is_some_and(|dice| dice.one_in(2)) {
            let idle = |state: &mut State| state.history.events.len() < began + 4;
            let waited = self.shared.changed.wait_timeout_while(state, DAWDLE, idle);
            state = waited.expect("nobody panics while holding it").0;
        }
        state.waiting_syncs += 1;
        self.shared.changed.notify_all();
        let held = |state: &mut State| *state.held.of(file);
        let released = self.shared.changed.wait_while(state, held);
        state = released.expect("nobody panics while holding it");
        state.waiting_syncs -= 1;
        let honest = !*state.lies.of(file);
        state.history.events.push(Event::Sync { file, began, honest });
        Ok(())
    }

    fn grow(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        let mut state = self.shared.lock();
        if state.files.of(file).length() >= bytes {
            return Ok(());
        }
        if let Some(failure) = state.faults.strike(Operation::Grow, file) {
            return Err(failure.error());
        }
        state.files.of_mut(file).resize(bytes);
        state.history.events.push(Event::Grow { file, bytes });
        Ok(())
    }

    fn shrink(&self, file: DiskFile, bytes: u64) -> io::Result<()> {
        let mut state = self.shared.lock();
        if state.files.of(file).length() > bytes {
            state.files.of_mut(file).resize(bytes);
            state.history.events.push(Event::Shrink { file, bytes });
        }
        Ok(())
    }

    fn length(&self, file: DiskFile) -> io::Result<u64> {
        Ok(self.shared.lock().files.of(file).length())
    }
}

impl Drop for SimulatedDisk {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        // The last user of a disk may be a transfer of its own.
        if let Some(worker) = self.worker.take()
            && worker.thread().id() != std::thread::current().id()
        {
            worker.join().expect("the worker does not panic");
        }
    }
}

impl State {
    /// Writes down that a transfer begins, and decides how it will end.
    fn begin(&mut self, transfer: Transfer) -> Started {
        let (file, direction, offset) = (transfer.file(), transfer.direction(), transfer.offset());
        self.in_flight.push(InFlight::of(&transfer));
        let (failure, event) = match direction {
            Direction::Read => (self.faults.strike(Operation::Read, file), None),
            Direction::Write => {
                let mut bytes: Vec<u8> = transfer.pieces().flatten().copied().collect();
                let failure = self.faults.strike(Operation::Write, file);
                match failure {
                    Some(Failure::Error(_)) => bytes.truncate(bytes.len() / 2),
                    Some(Failure::Short(length)) => bytes.truncate(length),
                    Some(Failure::Lost) => bytes.clear(),
                    None => {}
                }
                self.history.events.push(Event::Write { file, offset, bytes: bytes.into() });
                (failure, Some(self.history.events.len() - 1))
            }
        };
        Started { transfer, failure, event }
    }

    /// A transfer in flight that must not be disturbed by this one.
    fn disturbed_by(&self, transfer: &Transfer) -> Option<InFlight> {
        let new = InFlight::of(transfer);
        self.in_flight.iter().find(|other| new.disturbs(other)).cloned()
    }

    /// Which of the waiting transfers may be performed.
    fn ready(&self) -> Vec<usize> {
        let is_ready = |started: &Started| {
            !self.reads_held || started.transfer.direction() == Direction::Write
        };
        (0..self.waiting.len()).filter(|number| is_ready(&self.waiting[*number])).collect()
    }
}

impl InFlight {
    fn of(transfer: &Transfer) -> Self {
        let end = transfer.offset() + transfer.bytes() as u64;
        let range = transfer.offset()..end;
        Self { file: transfer.file(), direction: transfer.direction(), range }
    }

    fn disturbs(&self, other: &Self) -> bool {
        let one_writes = self.direction == Direction::Write || other.direction == Direction::Write;
        self.file == other.file
            && one_writes
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

impl Shared {
    /// Performs transfers in any order until the disk is closed.
    fn work(&self) {
        const DAWDLE: Duration = Duration::from_micros(60);
        loop {
            let mut state = self.lock();
            while state.ready().is_empty() {
                if state.closed {
                    return;
                }
                state = self.changed.wait(state).expect("nobody panics while holding it");
            }
            let dawdles = state.dice.as_mut().is_some_and(|dice| dice.one_in(3));
            if dawdles && !state.closed {
                let waited = self.changed.wait_timeout(state, DAWDLE);
                state = waited.expect("nobody panics while holding it").0;
            }
            let ready = state.ready();
            let choice = state.dice.as_mut().map_or(0, |dice| dice.below(ready.len() as u64));
            let started = state.waiting.swap_remove(ready[choice as usize]);
            drop(state);
            self.perform(started);
        }
    }

    /// Moves the bytes and ends the transfer.
    fn perform(&self, started: Started) {
        let Started { mut transfer, failure, event } = started;
        let (file, offset) = (transfer.file(), transfer.offset());
        let mut state = self.lock();
        let moved = match event {
            Some(write) => {
                let Event::Write { bytes, .. } = &state.history.events[write] else {
                    unreachable!("the event of a write is a write")
                };
                let bytes = bytes.clone();
                state.files.of_mut(file).write(offset, &bytes);
                state.history.events.push(Event::Finished { write });
                bytes.len()
            }
            None => read(state.files.of(file), &mut transfer, failure),
        };
        let ended = InFlight::of(&transfer);
        let position = state.in_flight.iter().position(|other| *other == ended);
        state.in_flight.swap_remove(position.expect("it was in flight"));
        drop(state);
        self.changed.notify_all();
        match failure {
            Some(Failure::Error(errno)) => transfer.finish(Err(errno.error())),
            Some(Failure::Lost) => {
                let bytes = transfer.bytes();
                transfer.finish(Ok(bytes));
            }
            Some(Failure::Short(_)) | None => transfer.finish(Ok(moved)),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics while holding it")
    }
}

fn read(image: &Image, transfer: &mut Transfer, failure: Option<Failure>) -> usize {
    let mut at = transfer.offset();
    let mut budget = match failure {
        Some(Failure::Short(length)) => length,
        Some(Failure::Error(_) | Failure::Lost) | None => usize::MAX,
    };
    let mut moved = 0;
    for piece in transfer.pieces_mut() {
        if matches!(failure, Some(Failure::Error(_))) {
            piece.fill(0xDB);
            continue;
        }
        let wanted = piece.len().min(budget);
        let length = image.read(at, &mut piece[..wanted]);
        moved += length;
        at += length as u64;
        budget -= length;
        if length < piece.len() {
            break;
        }
    }
    moved
}
