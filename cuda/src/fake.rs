//! A driver without a GPU, for tests. Its device memory is ordinary memory and its streams are
//! threads. It delays work at random, fails on demand, and detects invalid accesses: see
//! [`FakeDriver::ban`].

#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use terrace_scheduler::CopyDirection;

use crate::canary::checksum;
use crate::driver::{
    CallError, CallErrorKind, DeviceAddress, DeviceMemory, Driver, Event, EventKind, PairList,
    Part, Piece, Priority, Stream,
};
use crate::lists::PAIR_BYTES;

/// A fake driver. Clones share the state.
#[derive(Clone)]
pub(crate) struct FakeDriver(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Faults to inject.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    /// Longest delay of work.
    pub(crate) delay_us_max: u64,
    /// Stream whose recorded events other streams ignore.
    pub(crate) not_waited_for: Option<Stream>,
    /// Threads do not wait for events.
    pub(crate) sleeps_are_short: bool,
    /// Flips one bit of the next copy of pages.
    pub(crate) corrupt_next: bool,
    /// Skips all copies, so that only the lane's own work takes time.
    pub(crate) copies_are_skipped: bool,
}

struct State {
    faults: Faults,
    random: u64,
    total: usize,
    pinnable: usize,
    allocated: BTreeMap<u64, Box<[u8]>>,
    pinned: BTreeMap<u64, usize>,
    streams: HashMap<u64, Queue>,
    events: HashMap<u64, Recorded>,
    next_id: u64,
    /// Calls that will fail: the name, and the number of successful calls before.
    failing: Vec<(&'static str, usize)>,
    is_lost: bool,
    bans: BTreeMap<u64, Range<u64>>,
    violations: Vec<String>,
    /// Cost of a piece for the copy engines, and of a KiB for the kernel.
    batch_piece_ns: u64,
    kernel_kib_ns: u64,
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    is_busy: bool,
    is_ending: bool,
    /// Virtual time of the stream's work.
    clock_ns: u64,
}

#[derive(Default)]
struct Recorded {
    /// Number of recordings, and those not passed yet. Points of several streams pass in any order.
    recorded: u64,
    to_be_passed: Vec<u64>,
    /// Stream of the last recording.
    stream: u64,
    /// Time at which the last recording passed, by the clock of its stream.
    at_ns: u64,
}

impl Recorded {
    fn is_passed(&self, recorded: u64) -> bool {
        !self.to_be_passed.contains(&recorded)
    }
}

enum Work {
    Wait {
        event: u64,
        recorded: u64,
    },
    Record {
        event: u64,
        recorded: u64,
    },
    /// Waits until the ban is lifted.
    Gate {
        ban: u64,
    },
    Touch(Box<dyn FnOnce(&mut State) -> u64 + Send>),
}

impl std::fmt::Debug for FakeDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeDriver")
    }
}

impl FakeDriver {
    pub(crate) fn new(total: usize, seed: u64) -> Self {
        let state = State {
            faults: Faults::default(),
            random: seed.wrapping_mul(2).wrapping_add(1),
            total,
            pinnable: usize::MAX,
            allocated: BTreeMap::new(),
            pinned: BTreeMap::new(),
            streams: HashMap::new(),
            events: HashMap::new(),
            next_id: 1,
            failing: Vec::new(),
            is_lost: false,
            bans: BTreeMap::new(),
            violations: Vec::new(),
            batch_piece_ns: 20_000,
            kernel_kib_ns: 20,
        };
        Self(Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }))
    }

    pub(crate) fn change_faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.0.state.lock().faults);
    }

    /// Limits the bytes that can be pinned.
    pub(crate) fn limit_pinned(&self, bytes: usize) {
        self.0.state.lock().pinnable = bytes;
    }

    /// Returns the sizes of all pinned ranges.
    pub(crate) fn pinned(&self) -> Vec<usize> {
        self.0.state.lock().pinned.values().copied().collect()
    }

    /// Sets the cost of a piece for the copy engines, and of a KiB for the kernel.
    pub(crate) fn set_costs(&self, batch_piece_ns: u64, kernel_kib_ns: u64) {
        let mut state = self.0.state.lock();
        (state.batch_piece_ns, state.kernel_kib_ns) = (batch_piece_ns, kernel_kib_ns);
    }

    /// Makes a call fail once, after a number of successful calls.
    pub(crate) fn fail(&self, call: &'static str, after: usize) {
        self.0.state.lock().failing.push((call, after));
    }

    /// Makes all later calls fail, and wakes all waiting work.
    pub(crate) fn lose(&self) {
        let mut state = self.0.state.lock();
        state.is_lost = true;
        state.streams.values_mut().for_each(|queue| queue.work.clear());
        self.0.changed.notify_all();
    }

    /// Bans access to these bytes: any access is recorded as a violation.
    pub(crate) fn ban(&self, bytes: Range<u64>) -> u64 {
        let mut state = self.0.state.lock();
        let id = state.id();
        state.bans.insert(id, bytes);
        id
    }

    /// Lifts a ban, and releases the streams that wait for it.
    pub(crate) fn lift(&self, ban: u64) {
        self.0.state.lock().bans.remove(&ban);
        self.0.changed.notify_all();
    }

    /// Holds a stream until a ban is lifted, like a long step.
    pub(crate) fn gate(&self, stream: Stream, ban: u64) {
        self.0.enqueue(stream, Work::Gate { ban });
    }

    /// Runs a computation in the stream, as a step would.
    pub(crate) fn compute(
        &self,
        stream: Stream,
        compute: impl FnOnce(&mut Access<'_>) + Send + 'static,
    ) {
        let touch = move |state: &mut State| {
            compute(&mut Access(state));
            0
        };
        self.0.enqueue(stream, Work::Touch(Box::new(touch)));
    }

    /// Fills memory with a byte in the stream.
    pub(crate) fn fill(&self, stream: Stream, at: DeviceAddress, bytes: usize, byte: u8) {
        self.compute(stream, move |access| access.bytes(at, bytes).fill(byte));
    }

    /// Records the value of a byte in the stream.
    pub(crate) fn peek(&self, stream: Stream, at: DeviceAddress, seen: &Arc<Mutex<Vec<u8>>>) {
        let seen = seen.clone();
        self.compute(stream, move |access| seen.lock().extend_from_slice(access.bytes(at, 1)));
    }

    /// Returns the content of device memory.
    pub(crate) fn read(&self, at: DeviceAddress, bytes: usize) -> Vec<u8> {
        let state = self.0.state.lock();
        assert!(state.is_there(at.0, bytes), "a test reads what there is");
        // SAFETY: as for filling; the lock keeps the streams away.
        unsafe { std::slice::from_raw_parts(pointer(at.0), bytes) }.to_vec()
    }

    /// Writes to device memory.
    pub(crate) fn write(&self, at: DeviceAddress, bytes: &[u8]) {
        let state = self.0.state.lock();
        assert!(state.is_there(at.0, bytes.len()), "a test writes to what there is");
        // SAFETY: as for reading.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), pointer(at.0), bytes.len()) };
    }

    /// Returns the recorded violations.
    pub(crate) fn violations(&self) -> Vec<String> {
        self.0.state.lock().violations.clone()
    }

    /// Counts resources that were not released: allocations, pinned memory, streams, events, and
    /// pending work.
    pub(crate) fn left_behind(&self) -> [usize; 5] {
        let state = self.0.state.lock();
        let streams = state.streams.values().filter(|queue| !queue.is_ending).count();
        let work = state.streams.values().map(|queue| queue.work.len()).sum();
        [state.allocated.len(), state.pinned.len(), streams, state.events.len(), work]
    }

    fn call(&self, call: &'static str) -> Result<MutexGuard<'_, State>, CallError> {
        let mut state = self.0.state.lock();
        let text = format!("{call} was made to fail");
        let error = CallError { call, kind: CallErrorKind::Other, text };
        if state.is_lost {
            return Err(error);
        }
        if let Some(place) = state.failing.iter().position(|(failing, _)| *failing == call) {
            match state.failing[place].1.checked_sub(1) {
                Some(fewer) => state.failing[place].1 = fewer,
                None => {
                    state.failing.remove(place);
                    return Err(error);
                }
            }
        }
        Ok(state)
    }

    fn touch(
        &self,
        call: &'static str,
        stream: Stream,
        touch: impl FnOnce(&mut State) -> u64 + Send + 'static,
    ) -> Result<(), CallError> {
        let is_skipped = self.call(call)?.faults.copies_are_skipped;
        if !is_skipped {
            self.0.enqueue(stream, Work::Touch(Box::new(touch)));
        }
        Ok(())
    }
}

/// Memory access of a step.
pub(crate) struct Access<'a>(&'a mut State);

impl Access<'_> {
    /// Returns bytes of the device, or none if they do not exist.
    pub(crate) fn bytes(&mut self, at: DeviceAddress, bytes: usize) -> &mut [u8] {
        if !self.0.may_touch(at.0, bytes, "a step") {
            return &mut [];
        }
        // SAFETY: the memory was allocated or pinned, which `may_touch` has checked, and the owner
        // of this value holds the driver's lock.
        unsafe { std::slice::from_raw_parts_mut(pointer(at.0), bytes) }
    }
}

impl Shared {
    fn enqueue(&self, stream: Stream, work: Work) {
        let mut state = self.state.lock();
        if !state.is_lost {
            state.streams.get_mut(&stream.0).expect("a stream that exists").work.push_back(work);
        }
        self.changed.notify_all();
    }

    /// Runs the work of a stream until the stream is destroyed.
    fn work(&self, stream: u64) {
        let mut state = self.state.lock();
        loop {
            let queue = state.streams.get_mut(&stream).expect("a stream that exists");
            queue.is_busy = false;
            let Some(work) = queue.work.pop_front() else {
                if queue.is_ending {
                    state.streams.remove(&stream);
                    return;
                }
                self.changed.notify_all();
                self.changed.wait(&mut state);
                continue;
            };
            queue.is_busy = true;
            let delay_us = state.delay_us();
            if delay_us > 0 {
                MutexGuard::unlocked(&mut state, || {
                    std::thread::sleep(Duration::from_micros(delay_us));
                });
            }
            match work {
                Work::Wait { event, recorded } => {
                    while !state.is_lost
                        && state.events.get(&event).is_some_and(|event| !event.is_passed(recorded))
                    {
                        self.changed.wait(&mut state);
                    }
                }
                Work::Gate { ban } => {
                    while !state.is_lost && state.bans.contains_key(&ban) {
                        self.changed.wait(&mut state);
                    }
                }
                Work::Record { event, recorded } => {
                    let clock_ns = state.streams[&stream].clock_ns;
                    if let Some(event) = state.events.get_mut(&event) {
                        event.to_be_passed.retain(|point| *point != recorded);
                        event.at_ns = clock_ns;
                    }
                }
                Work::Touch(touch) if !state.is_lost => {
                    let cost_ns = touch(&mut state);
                    let queue = state.streams.get_mut(&stream).expect("a stream that exists");
                    queue.clock_ns += cost_ns;
                }
                Work::Touch(_) => {}
            }
            self.changed.notify_all();
        }
    }
}

impl State {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn delay_us(&mut self) -> u64 {
        // A xorshift generator.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % (self.faults.delay_us_max + 1)
    }

    fn is_there(&self, at: u64, bytes: usize) -> bool {
        let end = at + bytes as u64;
        let allocated = self.allocated.range(..=at).next_back();
        let pinned = self.pinned.range(..=at).next_back();
        allocated.is_some_and(|(base, memory)| end <= base + memory.len() as u64)
            || pinned.is_some_and(|(base, bytes)| end <= base + *bytes as u64)
    }

    fn may_touch(&mut self, at: u64, bytes: usize, who: &str) -> bool {
        let end = at + bytes as u64;
        if !self.is_there(at, bytes) {
            self.violations.push(format!("{who} touches {at:#x}..{end:#x}, which is not there"));
            return false;
        }
        let banned = self.bans.values().find(|ban| at < ban.end && ban.start < end);
        if let Some(ban) = banned.cloned() {
            self.violations.push(format!("{who} touches {at:#x}..{end:#x} in spite of {ban:#x?}"));
        }
        true
    }

    fn copy(&mut self, to: u64, from: u64, bytes: usize, who: &str) {
        if self.may_touch(to, bytes, who) && self.may_touch(from, bytes, who) {
            // SAFETY: both are memory that was allocated or pinned; a page is never copied onto itself.
            unsafe { std::ptr::copy_nonoverlapping(pointer(from), pointer(to), bytes) };
        }
    }

    /// Copies pages, with an injected corruption if requested.
    fn copy_pages(&mut self, pieces: &[(u64, u64)], bytes: impl Fn(usize) -> usize, who: &str) {
        for (n, (to, from)) in pieces.iter().enumerate() {
            self.copy(*to, *from, bytes(n), who);
        }
        if let Some((to, _)) = pieces.first()
            && std::mem::take(&mut self.faults.corrupt_next)
            && self.is_there(*to, bytes(0))
        {
            // SAFETY: it was just written to.
            unsafe { *pointer(*to + bytes(0) as u64 - 1) ^= 0x10 };
        }
    }

    fn pairs(&mut self, list: PairList) -> Vec<(u64, u64)> {
        let bytes = list.pairs as usize * PAIR_BYTES;
        if !self.may_touch(list.at.0, bytes, "a list") {
            return Vec::new();
        }
        // SAFETY: `may_touch` has checked the memory.
        let bytes = unsafe { std::slice::from_raw_parts(pointer(list.at.0), bytes) };
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        bytes.chunks(PAIR_BYTES).map(|pair| (number(&pair[..8]), number(&pair[8..]))).collect()
    }
}

fn pointer(at: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(at as usize)
}

impl Driver for FakeDriver {
    fn bind_thread(&self) -> Result<(), CallError> {
        // As with CUDA, binding a thread to a lost device succeeds.
        Ok(())
    }

    fn check(&self) -> Result<(), CallError> {
        self.call("check").map(drop)
    }

    fn memory(&self) -> Result<DeviceMemory, CallError> {
        let state = self.call("memory")?;
        let used: usize = state.allocated.values().map(|memory| memory.len()).sum();
        Ok(DeviceMemory { free: state.total - used, total: state.total })
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress, CallError> {
        let free = self.memory()?.free;
        let mut state = self.call("allocate")?;
        if bytes > free {
            let (call, kind) = ("allocate", CallErrorKind::OutOfMemory);
            return Err(CallError { call, kind, text: "out of memory".to_owned() });
        }
        let mut memory = vec![0_u8; bytes].into_boxed_slice();
        let at = memory.as_mut_ptr().expose_provenance() as u64;
        state.allocated.insert(at, memory);
        Ok(DeviceAddress(at))
    }

    unsafe fn free(&self, at: DeviceAddress) {
        let freed = self.0.state.lock().allocated.remove(&at.0);
        assert!(freed.is_some(), "what is freed was allocated");
    }

    unsafe fn pin(&self, base: NonNull<u8>, bytes: usize) -> Result<DeviceAddress, CallError> {
        let mut state = self.call("pin")?;
        if state.pinned.values().sum::<usize>().saturating_add(bytes) > state.pinnable {
            let (call, kind) = ("pin", CallErrorKind::OutOfMemory);
            return Err(CallError { call, kind, text: "out of memory".to_owned() });
        }
        let at = base.as_ptr().expose_provenance() as u64;
        state.pinned.insert(at, bytes);
        Ok(DeviceAddress(at))
    }

    unsafe fn unpin(&self, base: NonNull<u8>) {
        let unpinned = self.0.state.lock().pinned.remove(&(base.addr().get() as u64));
        assert!(unpinned.is_some(), "what is unpinned was pinned");
    }

    fn create_stream(&self, _priority: Priority) -> Result<Stream, CallError> {
        let mut state = self.call("create_stream")?;
        let id = state.id();
        state.streams.insert(id, Queue::default());
        let shared = self.0.clone();
        std::thread::spawn(move || shared.work(id));
        Ok(Stream(id))
    }

    fn destroy_stream(&self, stream: Stream) {
        let mut state = self.0.state.lock();
        state.streams.get_mut(&stream.0).expect("a stream that exists").is_ending = true;
        self.0.changed.notify_all();
    }

    fn drain(&self, stream: Stream) -> Result<(), CallError> {
        drop(self.call("drain")?);
        let mut state = self.0.state.lock();
        while state
            .streams
            .get(&stream.0)
            .is_some_and(|queue| queue.is_busy || !queue.work.is_empty())
        {
            self.0.changed.wait(&mut state);
        }
        drop(state);
        self.call("drain").map(drop)
    }

    fn create_event(&self, _kind: EventKind) -> Result<Event, CallError> {
        let mut state = self.call("create_event")?;
        let id = state.id();
        state.events.insert(id, Recorded::default());
        Ok(Event(id))
    }

    fn destroy_event(&self, event: Event) {
        assert!(self.0.state.lock().events.remove(&event.0).is_some(), "an event that exists");
    }

    fn record(&self, event: Event, stream: Stream) -> Result<(), CallError> {
        let mut state = self.call("record")?;
        let recorded = state.events.get_mut(&event.0).expect("an event that exists");
        recorded.recorded += 1;
        recorded.stream = stream.0;
        recorded.to_be_passed.push(recorded.recorded);
        let work = Work::Record { event: event.0, recorded: recorded.recorded };
        state.streams.get_mut(&stream.0).expect("a stream that exists").work.push_back(work);
        self.0.changed.notify_all();
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<(), CallError> {
        let mut state = self.call("wait")?;
        if state.faults.not_waited_for.is_some_and(|it| it.0 == state.events[&event.0].stream) {
            return Ok(());
        }
        let work = Work::Wait { event: event.0, recorded: state.events[&event.0].recorded };
        state.streams.get_mut(&stream.0).expect("a stream that exists").work.push_back(work);
        self.0.changed.notify_all();
        Ok(())
    }

    fn is_passed(&self, event: Event) -> Result<bool, CallError> {
        let state = self.call("is_passed")?;
        let event = &state.events[&event.0];
        Ok(event.is_passed(event.recorded))
    }

    fn sleep_until(&self, event: Event) -> Result<(), CallError> {
        let mut state = self.call("sleep_until")?;
        let recorded = state.events[&event.0].recorded;
        while !state.is_lost
            && !state.faults.sleeps_are_short
            && !state.events[&event.0].is_passed(recorded)
        {
            self.0.changed.wait(&mut state);
        }
        drop(state);
        self.call("sleep_until").map(drop)
    }

    fn elapsed(&self, from: Event, to: Event) -> Result<Duration, CallError> {
        let state = self.call("elapsed")?;
        let [from, to] = [from, to].map(|event| state.events[&event.0].at_ns);
        Ok(Duration::from_nanos(to.saturating_sub(from)))
    }

    unsafe fn fetch_all(&self, stream: Stream, pieces: &[Piece]) -> Result<(), CallError> {
        let pieces = pieces.to_vec();
        self.touch("fetch", stream, move |state| {
            for Piece { to, from, bytes } in &pieces {
                state.copy(to.0, from.0, *bytes, "a fetch");
            }
            0
        })
    }

    unsafe fn copy_by_kernel(
        &self,
        stream: Stream,
        _direction: CopyDirection,
        list: PairList,
        part: Part,
    ) -> Result<(), CallError> {
        self.touch("copy_by_kernel", stream, move |state| {
            let offset = part.offset as u64;
            let pieces = state.pairs(list).into_iter();
            let pieces: Vec<_> = pieces.map(|(to, from)| (to + offset, from + offset)).collect();
            state.copy_pages(&pieces, |_| part.bytes, "the copy kernel");
            (pieces.len() * part.bytes) as u64 * state.kernel_kib_ns / 1024
        })
    }

    unsafe fn copy_by_batch(
        &self,
        stream: Stream,
        to: &mut [DeviceAddress],
        from: &mut [DeviceAddress],
        bytes: &mut [usize],
    ) -> Result<(), CallError> {
        let pieces = to.iter().zip(&*from).map(|(to, from)| (to.0, from.0));
        let (pieces, bytes): (Vec<_>, _) = (pieces.collect(), bytes.to_vec());
        self.touch("copy_by_batch", stream, move |state| {
            state.copy_pages(&pieces, |n| bytes[n], "a batch");
            pieces.len() as u64 * state.batch_piece_ns
        })
    }

    unsafe fn checksums(
        &self,
        stream: Stream,
        list: PairList,
        bytes: usize,
        sums: DeviceAddress,
    ) -> Result<(), CallError> {
        self.touch("checksums", stream, move |state| {
            for (n, (page, _)) in state.pairs(list).into_iter().enumerate() {
                let at = sums.0 + 8 * n as u64;
                if state.may_touch(page, bytes, "a checksum")
                    && state.may_touch(at, 8, "a checksum")
                {
                    // SAFETY: both were looked up.
                    let page = unsafe { std::slice::from_raw_parts(pointer(page), bytes) };
                    // SAFETY: as above.
                    unsafe { pointer(at).cast::<u64>().write_unaligned(checksum(page).to_le()) };
                }
            }
            0
        })
    }
}
