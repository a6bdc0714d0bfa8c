//! The way to the cluster: made in the background, since a master that is not there is waited for a
//! minute and a half, and made again until it succeeds. A client that keeps memory is replaced by another,
//! since nothing but its end ends the transfers that it has given up. What is offered to the cluster would
//! go with it, and all objects there; so a client of its own offers it, which moves no bytes and stays.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::library::{Client, ClientMemory, Endpoint, Library, Placement};
use terrace_l3::{Arena, Registration, Results, StoreError};

/// A client as soon as there is one, and the arenas that it must know.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    shared: Arc<Shared>,
}

/// How to connect, and with what.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) endpoint: Endpoint,
    pub(crate) memory: ClientMemory,
    /// Where objects go. [`OWN_SEGMENT`] stands for the segment that is offered here.
    pub(crate) placement: Placement,
    /// How long to wait between tries.
    pub(crate) retry: Duration,
}

/// What the segment that a client offers is called in its own settings: the cluster names it anew at every
/// start.
pub(crate) const OWN_SEGMENT: &CStr = c"own";

#[derive(Debug)]
struct Shared {
    library: Arc<Library>,
    way: Way,
    master: String,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    client: Option<Arc<Client>>,
    /// The client that offers a segment, if one is offered.
    offerer: Option<Arc<Client>>,
    /// Why the last try to connect failed.
    trouble: Option<String>,
    /// Whether somebody is connecting.
    connecting: bool,
    arenas: BTreeMap<u64, Arc<Buffer>>,
    closed: bool,
}

/// An arena that the library knows. It is unregistered when nobody uses it any more: neither its
/// registration nor a transfer.
#[derive(Debug)]
pub(crate) struct Buffer {
    arena: Arena,
    /// One client, and while it is being replaced two.
    known_to: Mutex<Vec<Weak<Client>>>,
}

/// What is to be done with an object, and the arena that it uses, which stays registered until this is
/// dropped.
#[derive(Debug)]
pub(crate) struct Buffered<J> {
    job: J,
    _buffer: Arc<Buffer>,
}

impl<J> Deref for Buffered<J> {
    type Target = J;

    fn deref(&self) -> &J {
        &self.job
    }
}

impl<J> DerefMut for Buffered<J> {
    fn deref_mut(&mut self) -> &mut J {
        &mut self.job
    }
}

impl Buffer {
    fn make_known(&self, client: &Arc<Client>) -> Result<(), StoreError> {
        match client.register(&self.arena) {
            0 => {
                let mut known_to = self.known_to.lock();
                known_to.retain(|client| client.strong_count() > 0);
                known_to.push(Arc::downgrade(client));
                Ok(())
            }
            code => {
                let message = format!("Mooncake returned {code}");
                Err(StoreError::io("registering an arena", &io::Error::other(message)))
            }
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        for client in self.known_to.get_mut().iter().filter_map(Weak::upgrade) {
            client.unregister(&self.arena);
        }
    }
}

impl Connection {
    /// Begins to connect.
    pub(crate) fn new(library: Arc<Library>, way: Way) -> io::Result<Self> {
        let connection = Self {
            shared: Arc::new(Shared {
                master: way.endpoint.master.to_string_lossy().into_owned(),
                library,
                way,
                state: Mutex::default(),
                changed: Condvar::new(),
            }),
        };
        connection.connect()?;
        Ok(connection)
    }

    /// Has a thread connect, if none is at it. Until it has, a client that is there already is used.
    pub(crate) fn connect(&self) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        if state.connecting || state.closed {
            return Ok(());
        }
        let (library, way) = (self.shared.library.clone(), self.shared.way.clone());
        let weak = Arc::downgrade(&self.shared);
        std::thread::Builder::new()
            .name("terrace-mooncake-connect".to_owned())
            .spawn(move || keep_trying(&weak, &library, &way))?;
        state.connecting = true;
        Ok(())
    }

    /// The client, or that there is none yet.
    pub(crate) fn client(&self) -> Result<Arc<Client>, StoreError> {
        let state = self.shared.state.lock();
        state.client.clone().ok_or_else(|| {
            let trouble = state.trouble.as_deref().unwrap_or("it has not been reached yet");
            let master = self.master();
            let message = format!("the Mooncake master at {master} cannot be used: {trouble}");
            let error = io::Error::new(io::ErrorKind::NotConnected, message);
            StoreError::io("asking Mooncake", &error)
        })
    }

    /// Waits until there is a client, and answers whether there is one.
    pub(crate) fn wait(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut state = self.shared.state.lock();
        while state.client.is_none() && !state.closed {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        state.client.is_some()
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.shared.state.lock().client.is_some()
    }

    /// What the cluster calls the segment that is offered here.
    pub(crate) fn segment(&self) -> Option<CString> {
        let offerer = self.shared.state.lock().offerer.clone();
        offerer.and_then(|offerer| offerer.name())
    }

    pub(crate) fn master(&self) -> &str {
        &self.shared.master
    }

    pub(crate) fn register(&self, arena: &Arena) -> Result<Registration, StoreError> {
        let mut state = self.shared.state.lock();
        if state.arenas.contains_key(&arena.id()) {
            return Err(StoreError::AlreadyRegistered { arena: arena.id() });
        }
        let buffer = Arc::new(Buffer { arena: arena.clone(), known_to: Mutex::default() });
        if let Some(client) = &state.client {
            buffer.make_known(client)?;
        }
        state.arenas.insert(arena.id(), buffer);
        Ok(Registration::new(Entry { shared: self.shared.clone(), arena: arena.id() }))
    }

    /// The arena, for as long as a transfer uses it.
    pub(crate) fn buffer(&self, arena: u64) -> Result<Arc<Buffer>, StoreError> {
        let state = self.shared.state.lock();
        state.arenas.get(&arena).cloned().ok_or(StoreError::NotRegistered { arena })
    }

    /// A batch with its arenas. They are looked up when a call is made: a registration that ends
    /// afterwards does not end the call.
    pub(crate) fn buffered<J>(
        &self,
        jobs: Vec<J>,
        arena: impl Fn(&J) -> u64,
    ) -> Results<Buffered<J>> {
        let with_buffer = |job| Ok(Buffered { _buffer: self.buffer(arena(&job))?, job });
        jobs.into_iter().map(with_buffer).collect()
    }

    pub(crate) fn arenas(&self) -> usize {
        self.shared.state.lock().arenas.len()
    }

    /// Lets go of the client, and of what is offered. Calls under way still have the client.
    pub(crate) fn close(&self) {
        let clients = {
            let mut state = self.shared.state.lock();
            state.closed = true;
            (state.client.take(), state.offerer.take())
        };
        self.shared.changed.notify_all();
        drop(clients);
    }
}

struct Entry {
    shared: Arc<Shared>,
    arena: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let buffer = self.shared.state.lock().arenas.remove(&self.arena);
        drop(buffer);
    }
}

/// Offers a segment, if one is to be.
fn offer(library: &Arc<Library>, way: &Way) -> Result<Option<Client>, String> {
    let memory = ClientMemory { buffer_bytes: 0, ..way.memory };
    if memory.segment_bytes == 0 {
        return Ok(None);
    }
    let placement = Placement { replicas: 1, preferred: Vec::new() };
    let offerer = Client::connect(library, &way.endpoint, memory, placement);
    offerer.map(Some).map_err(|code| {
        let bytes = memory.segment_bytes;
        format!(
            "the library returned {code} for a segment of {bytes} bytes; check that the address is \
             right, that the master runs and that there is enough memory"
        )
    })
}

/// Connects and asks a first question. A master of another version lets anybody connect, and answers
/// no question.
fn connect(library: &Arc<Library>, way: &Way, offerer: Option<&Client>) -> Result<Client, String> {
    const NOBODYS_KEY: &CStr = c"terrace/is-anybody-there";
    let memory = ClientMemory { segment_bytes: 0, ..way.memory };
    let mut placement = way.placement.clone();
    let own = offerer.and_then(Client::name);
    placement.preferred.retain_mut(|name| {
        if name.as_c_str() != OWN_SEGMENT {
            return true;
        }
        own.clone().map(|own| *name = own).is_some()
    });
    let client = Client::connect(library, &way.endpoint, memory, placement).map_err(|code| {
        format!("the library returned {code}; check that the address is right and the master runs")
    })?;
    match client.exist(&[NOBODYS_KEY.to_owned()])[0] {
        0.. => Ok(client),
        code => Err(format!(
            "it is reachable, but a lookup returned {code}, as with a master of a different \
             version; use library, master and storage nodes of the same Mooncake version"
        )),
    }
}

fn keep_trying(shared: &Weak<Shared>, library: &Arc<Library>, way: &Way) {
    let retry = way.retry;
    let mut tries = 0u32;
    loop {
        let Some(offerer) = shared.upgrade().map(|it| it.state.lock().offerer.clone()) else {
            return;
        };
        let offerer = match offerer {
            Some(offerer) => Ok(Some(offerer)),
            None => offer(library, way).map(|offerer| offerer.map(Arc::new)),
        };
        let connected = match &offerer {
            Ok(offerer) => connect(library, way, offerer.as_deref()),
            Err(trouble) => Err(trouble.clone()),
        };
        let Some(shared) = shared.upgrade() else { return };
        let mut state = shared.state.lock();
        if state.closed {
            return;
        }
        // It stays even if the other client is not there yet.
        state.offerer = offerer.ok().flatten();
        let trouble = match connected.map(Arc::new) {
            Ok(client) => {
                let unknown = state.arenas.values().map(|buffer| buffer.make_known(&client));
                match unknown.collect::<Result<(), _>>() {
                    Ok(()) => {
                        let former = state.client.replace(client);
                        state.connecting = false;
                        drop(state);
                        shared.changed.notify_all();
                        if tries > 0 {
                            tracing::info!(
                                "L3: connected to the Mooncake master at {}",
                                shared.master
                            );
                        }
                        // Its end may take a while. If calls are under way, the last of them ends it.
                        drop(former);
                        return;
                    }
                    Err(error) => error.to_string(),
                }
            }
            Err(trouble) => trouble,
        };
        tries += 1;
        tracing::warn!(
            "L3: cannot use the Mooncake master at {} (attempt {tries}): {trouble}. Requests \
             compute instead. Next attempt in {retry:?}",
            shared.master
        );
        state.trouble = Some(trouble);
        let until = Instant::now() + retry;
        while !state.closed && !shared.changed.wait_until(&mut state, until).timed_out() {}
        if state.closed {
            return;
        }
    }
}
