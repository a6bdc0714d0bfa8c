//! A scripted library for tests, which detects calls with unregistered memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::*;

/// State shared by the clients of one master, found by the master's name.
#[derive(Debug, Default)]
pub(crate) struct ClusterScript {
    state: Mutex<ScriptState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ScriptState {
    objects: BTreeMap<CString, Vec<u8>>,
    /// Calls that transfer bytes wait while it is closed.
    is_gate_closed: bool,
    /// Number of waiting calls.
    waiting: usize,
    /// Transfers fail with this code, and continue.
    failing_with: Option<c_int>,
    /// Abandoned transfers: client, address, number of bytes.
    abandoned: Vec<(usize, usize, usize)>,
    /// Number of calls with unregistered memory.
    unregistered: usize,
    clients: usize,
    /// Total size of contributed segments.
    segment_bytes: u64,
    /// Requested placement of each put: replicas, and preferred segments.
    placements: Vec<(usize, Vec<CString>)>,
}

/// State behind a handle.
#[derive(Default)]
struct Fake {
    script: Mutex<Option<Arc<ClusterScript>>>,
    segment_bytes: AtomicU64,
    registered: Mutex<Vec<(usize, usize)>>,
}

static SCRIPTS: Mutex<BTreeMap<CString, Arc<ClusterScript>>> = Mutex::new(BTreeMap::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ClusterScript {
    /// The script of a master.
    pub(crate) fn of(master: &str) -> Arc<Self> {
        let master = CString::new(master).unwrap();
        locked(&SCRIPTS).entry(master).or_default().clone()
    }

    pub(crate) fn close_gate(&self) {
        locked(&self.state).is_gate_closed = true;
    }

    pub(crate) fn open_gate(&self) {
        locked(&self.state).is_gate_closed = false;
        self.changed.notify_all();
    }

    /// Waits until a call waits at the gate.
    pub(crate) fn wait_for_call(&self) {
        self.wait_for_calls(1);
    }

    /// Waits until `calls` calls wait at the gate.
    pub(crate) fn wait_for_calls(&self, calls: usize) {
        let mut state = locked(&self.state);
        while state.waiting < calls {
            state = self.changed.wait(state).unwrap();
        }
    }

    pub(crate) fn fail_with(&self, code: Option<c_int>) {
        locked(&self.state).failing_with = code;
    }

    /// Lets abandoned transfers write to their memory. Returns their number.
    pub(crate) fn complete_abandoned(&self) -> usize {
        let state = locked(&self.state);
        let places: BTreeSet<usize> = state.abandoned.iter().map(|(_, start, _)| *start).collect();
        for (_, start, bytes) in &state.abandoned {
            // SAFETY: the test asserts that this memory is kept.
            unsafe { std::ptr::write_bytes(*start as *mut u8, 0xEE, *bytes) };
        }
        places.len()
    }

    pub(crate) fn objects(&self) -> usize {
        locked(&self.state).objects.len()
    }

    pub(crate) fn clients(&self) -> usize {
        locked(&self.state).clients
    }

    pub(crate) fn unregistered(&self) -> usize {
        locked(&self.state).unregistered
    }

    pub(crate) fn segment_bytes(&self) -> u64 {
        locked(&self.state).segment_bytes
    }

    /// Replicas and preferred segments of all puts.
    pub(crate) fn placements(&self) -> Vec<(usize, Vec<CString>)> {
        locked(&self.state).placements.clone()
    }
}

impl Fake {
    fn of<'a>(handle: ClientHandle) -> &'a Self {
        // SAFETY: handles come from `create`, and are used until `destroy`.
        unsafe { &*handle.cast::<Self>() }
    }

    fn script(&self) -> Arc<ClusterScript> {
        locked(&self.script).clone().expect("it was set up")
    }

    /// Waits at the gate, checks the registration of the memory, and returns the scripted failure.
    fn transfer(&self, start: *mut c_void, bytes: usize, writes: bool) -> Option<c_int> {
        let script = self.script();
        let mut state = locked(&script.state);
        state.waiting += 1;
        script.changed.notify_all();
        while state.is_gate_closed {
            state = script.changed.wait(state).unwrap();
        }
        state.waiting -= 1;
        let start = start.addr();
        let is_known =
            |(from, known): &(usize, usize)| *from <= start && start + bytes <= from + known;
        if !locked(&self.registered).iter().any(is_known) {
            state.unregistered += 1;
        }
        let failing_with = state.failing_with;
        if failing_with.is_some() && writes {
            state.abandoned.push((std::ptr::from_ref(self).addr(), start, bytes));
        }
        failing_with
    }
}

/// A library whose masters have scripts.
pub(crate) fn library() -> Library {
    Library {
        functions: Functions {
            create,
            destroy,
            setup,
            hostname,
            batch_put_from,
            batch_get_into,
            batch_is_exist,
            object_size,
            remove,
            register_buffer,
            unregister_buffer,
        },
        _library: ManuallyDrop::new(Shared::this()),
    }
}

unsafe extern "C" fn create() -> ClientHandle {
    Box::into_raw(Box::<Fake>::default()).cast()
}

unsafe extern "C" fn destroy(handle: ClientHandle) {
    // SAFETY: it is destroyed once.
    let fake = unsafe { Box::from_raw(handle.cast::<Fake>()) };
    let script = locked(&fake.script).take();
    if let Some(script) = script {
        let mut state = locked(&script.state);
        state.clients -= 1;
        state.segment_bytes -= fake.segment_bytes.load(Ordering::Relaxed);
        state.abandoned.retain(|(client, _, _)| *client != handle.addr());
    }
}

unsafe extern "C" fn setup(
    handle: ClientHandle,
    _: *const c_char,
    _: *const c_char,
    segment_bytes: u64,
    _: u64,
    _: *const c_char,
    _: *const c_char,
    master: *const c_char,
) -> c_int {
    // SAFETY: a zero-terminated string.
    let master = unsafe { CStr::from_ptr(master) };
    let script = locked(&SCRIPTS).entry(master.to_owned()).or_default().clone();
    let mut state = locked(&script.state);
    state.clients += 1;
    state.segment_bytes += segment_bytes;
    drop(state);
    let fake = Fake::of(handle);
    fake.segment_bytes.store(segment_bytes, Ordering::Relaxed);
    *locked(&fake.script) = Some(script);
    0
}

/// Name of clients that contribute a segment.
unsafe extern "C" fn hostname(handle: ClientHandle, start: *mut c_char, bytes: usize) -> c_int {
    let offers = Fake::of(handle).segment_bytes.load(Ordering::Relaxed) > 0;
    let name = if offers { c"offers" } else { c"asks" }.to_bytes_with_nul();
    assert!(name.len() <= bytes);
    // SAFETY: an array of `bytes` bytes.
    unsafe { std::ptr::copy_nonoverlapping(name.as_ptr(), start.cast(), name.len()) };
    0
}

/// The keys of a batch.
fn keys(names: *mut *const c_char, count: usize) -> Vec<CString> {
    // SAFETY: an array of `count` zero-terminated strings.
    unsafe { (0..count).map(|at| CStr::from_ptr(*names.add(at)).to_owned()).collect() }
}

unsafe extern "C" fn batch_put_from(
    handle: ClientHandle,
    names: *mut *const c_char,
    starts: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
    replication: *const Replication,
    codes: *mut c_int,
) -> c_int {
    let fake = Fake::of(handle);
    // SAFETY: it is borrowed until the call returns.
    let Replication { replicas, preferred_segments, preferred_segments_count, .. } =
        unsafe { &*replication };
    let preferred = keys(preferred_segments.cast_mut(), *preferred_segments_count);
    let placement = (*replicas, preferred);
    locked(&fake.script().state).placements.extend(vec![placement; count]);
    for (at, key) in keys(names, count).into_iter().enumerate() {
        // SAFETY: arrays of `count` elements, each naming memory that can be read.
        unsafe {
            let (start, bytes) = (*starts.add(at), *sizes.add(at));
            let failed = fake.transfer(start, bytes, false);
            if failed.is_none() {
                let object = std::slice::from_raw_parts(start.cast::<u8>(), bytes).to_vec();
                locked(&fake.script().state).objects.entry(key).or_insert(object);
            }
            *codes.add(at) = failed.unwrap_or(0);
        }
    }
    0
}

unsafe extern "C" fn batch_get_into(
    handle: ClientHandle,
    names: *mut *const c_char,
    starts: *mut *mut c_void,
    sizes: *const usize,
    count: usize,
    codes: *mut i64,
) -> c_int {
    let fake = Fake::of(handle);
    for (at, key) in keys(names, count).into_iter().enumerate() {
        // SAFETY: arrays of `count` elements, each naming memory that can be written to.
        unsafe {
            let (start, bytes) = (*starts.add(at), *sizes.add(at));
            let failed = fake.transfer(start, bytes, true);
            let object = locked(&fake.script().state).objects.get(&key).cloned();
            *codes.add(at) = match (failed, object) {
                (Some(code), _) => code.into(),
                (None, None) => -704,
                (None, Some(object)) if object.len() > bytes => -600,
                (None, Some(object)) => {
                    std::ptr::copy_nonoverlapping(object.as_ptr(), start.cast(), object.len());
                    object.len() as i64
                }
            };
        }
    }
    0
}

unsafe extern "C" fn batch_is_exist(
    handle: ClientHandle,
    names: *mut *const c_char,
    count: usize,
    codes: *mut c_int,
) -> c_int {
    let script = Fake::of(handle).script();
    let state = locked(&script.state);
    for (at, key) in keys(names, count).into_iter().enumerate() {
        // SAFETY: an array of `count` elements.
        unsafe { *codes.add(at) = c_int::from(state.objects.contains_key(&key)) };
    }
    0
}

unsafe extern "C" fn object_size(handle: ClientHandle, key: *const c_char) -> i64 {
    // SAFETY: a zero-terminated string.
    let key = unsafe { CStr::from_ptr(key) };
    let script = Fake::of(handle).script();
    let state = locked(&script.state);
    state.objects.get(key).map_or(-704, |object| object.len() as i64)
}

unsafe extern "C" fn remove(handle: ClientHandle, key: *const c_char, _: c_int) -> c_int {
    // SAFETY: a zero-terminated string.
    let key = unsafe { CStr::from_ptr(key) };
    let script = Fake::of(handle).script();
    let removed = locked(&script.state).objects.remove(key);
    if removed.is_some() { 0 } else { -704 }
}

/// Code of the transport for memory that is partly registered.
const OVERLAPS: c_int = -7;

unsafe extern "C" fn register_buffer(
    handle: ClientHandle,
    start: *mut c_void,
    bytes: usize,
) -> c_int {
    let mut registered = locked(&Fake::of(handle).registered);
    let (start, end) = (start.addr(), start.addr() + bytes);
    if registered.iter().any(|(known, bytes)| *known < end && start < known + bytes) {
        return OVERLAPS;
    }
    registered.push((start, bytes));
    0
}

unsafe extern "C" fn unregister_buffer(handle: ClientHandle, start: *mut c_void) -> c_int {
    locked(&Fake::of(handle).registered).retain(|(known, _)| *known != start.addr());
    0
}

/// Another arena over the first pages of an arena's memory, as each call from Python creates one.
pub(crate) fn again(arena: &Arena, pages: u32) -> Arena {
    // SAFETY: the memory lives as long as the owner, and the tests write to no page of one arena
    // while the other uses it.
    unsafe { Arena::from_raw(arena.base(), pages, arena.page_bytes(), Box::new(arena.clone())) }
}
