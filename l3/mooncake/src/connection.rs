//! Connection to the cluster. It is opened in the background, because the library waits a minute
//! and a half for an absent master, and retried until it succeeds. A client that keeps memory of
//! failed transfers is replaced by another, since only its end stops those transfers. A segment
//! that it contributed would go with it, and all objects there. So a separate client contributes
//! the segment; it transfers nothing and stays.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::library::{Client, ClientMemory, Endpoint, Library, SegmentPlacement};
use terrace_l3::{Arena, Registration, Results, StoreError};

/// The client, once connected, and the arenas to register with it.
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    shared: Arc<ConnectionCore>,
}

/// Parameters of a connection.
#[derive(Clone, Debug)]
pub(crate) struct ConnectConfig {
    pub(crate) endpoint: Endpoint,
    pub(crate) memory: ClientMemory,
    /// Placement of objects. [`OWN_SEGMENT`] stands for the segment contributed by this process.
    pub(crate) placement: SegmentPlacement,
    /// Delay between attempts.
    pub(crate) retry: Duration,
}

/// Placeholder for the name of the contributed segment in the settings: the cluster assigns a new
/// name at every start.
pub(crate) const OWN_SEGMENT: &CStr = c"own";

#[derive(Debug)]
struct ConnectionCore {
    library: Arc<Library>,
    way: ConnectConfig,
    master: String,
    state: Mutex<ConnectionState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ConnectionState {
    client: Option<Arc<Client>>,
    /// Client that contributes a segment, if one is configured.
    contributor: Option<Arc<Client>>,
    /// Error of the last attempt to connect.
    last_error: Option<String>,
    /// True while a thread is connecting.
    connecting: bool,
    arenas: BTreeMap<u64, Arc<Buffer>>,
    closed: bool,
}

/// An arena registered with the library. It is unregistered when neither a registration nor a
/// transfer uses it.
#[derive(Debug)]
pub(crate) struct Buffer {
    arena: Arena,
    /// One client, or two while it is being replaced.
    known_to: Mutex<Vec<Weak<Client>>>,
}

/// A request for an object, and the arena that it uses, which stays registered until this is
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
    /// Starts to connect.
    pub(crate) fn new(library: Arc<Library>, way: ConnectConfig) -> io::Result<Self> {
        let connection = Self {
            shared: Arc::new(ConnectionCore {
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

    /// Starts a thread that connects, unless one is running. Until it succeeds, an existing client
    /// stays in use.
    pub(crate) fn connect(&self) -> io::Result<()> {
        let mut state = self.shared.state.lock();
        if state.connecting || state.closed {
            return Ok(());
        }
        let (library, way) = (self.shared.library.clone(), self.shared.way.clone());
        let weak = Arc::downgrade(&self.shared);
        std::thread::Builder::new()
            .name("terrace-mooncake-connect".to_owned())
            .spawn(move || connect_until_closed(&weak, &library, &way))?;
        state.connecting = true;
        Ok(())
    }

    /// Returns the client, or an error if there is none yet.
    pub(crate) fn client(&self) -> Result<Arc<Client>, StoreError> {
        let state = self.shared.state.lock();
        state.client.clone().ok_or_else(|| {
            let last_error = state.last_error.as_deref().unwrap_or("it has not been reached yet");
            let master = self.master();
            let message = format!("the Mooncake master at {master} cannot be used: {last_error}");
            let error = io::Error::new(io::ErrorKind::NotConnected, message);
            StoreError::io("asking Mooncake", &error)
        })
    }

    /// Waits until there is a client, and returns whether there is one.
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

    /// Name of the contributed segment in the cluster.
    pub(crate) fn segment(&self) -> Option<CString> {
        let contributor = self.shared.state.lock().contributor.clone();
        contributor.and_then(|contributor| contributor.name())
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
        Ok(Registration::new(ArenaGuard { shared: self.shared.clone(), arena: arena.id() }))
    }

    /// The arena, kept registered for a transfer.
    pub(crate) fn buffer(&self, arena: u64) -> Result<Arc<Buffer>, StoreError> {
        let state = self.shared.state.lock();
        state.arenas.get(&arena).cloned().ok_or(StoreError::NotRegistered { arena })
    }

    /// A batch with its arenas. They are looked up when a call is made: a registration that ends
    /// afterwards does not affect the call.
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

    /// Releases the client and the contributed segment. Calls in flight keep the client.
    pub(crate) fn close(&self) {
        let clients = {
            let mut state = self.shared.state.lock();
            state.closed = true;
            (state.client.take(), state.contributor.take())
        };
        self.shared.changed.notify_all();
        drop(clients);
    }
}

struct ArenaGuard {
    shared: Arc<ConnectionCore>,
    arena: u64,
}

impl Drop for ArenaGuard {
    fn drop(&mut self) {
        let buffer = self.shared.state.lock().arenas.remove(&self.arena);
        drop(buffer);
    }
}

/// Contributes a segment, if configured.
fn contribute(library: &Arc<Library>, way: &ConnectConfig) -> Result<Option<Client>, String> {
    let memory = ClientMemory { buffer_bytes: 0, ..way.memory };
    if memory.segment_bytes == 0 {
        return Ok(None);
    }
    let placement = SegmentPlacement { replicas: 1, preferred: Vec::new() };
    let contributor = Client::connect(library, &way.endpoint, memory, placement);
    contributor.map(Some).map_err(|code| {
        let bytes = memory.segment_bytes;
        format!(
            "the library returned {code} for a segment of {bytes} bytes; check that the address is \
             right, that the master runs and that there is enough memory"
        )
    })
}

/// Connects and sends a first lookup. A master of another version accepts connections, but answers
/// no lookup.
fn connect(
    library: &Arc<Library>,
    way: &ConnectConfig,
    contributor: Option<&Client>,
) -> Result<Client, String> {
    const PROBE_KEY: &CStr = c"terrace/is-anybody-there";
    let memory = ClientMemory { segment_bytes: 0, ..way.memory };
    let mut placement = way.placement.clone();
    let own = contributor.and_then(Client::name);
    placement.preferred.retain_mut(|name| {
        if name.as_c_str() != OWN_SEGMENT {
            return true;
        }
        own.clone().map(|own| *name = own).is_some()
    });
    let client = Client::connect(library, &way.endpoint, memory, placement).map_err(|code| {
        format!("the library returned {code}; check that the address is right and the master runs")
    })?;
    match client.exist(&[PROBE_KEY.to_owned()])[0] {
        0.. => Ok(client),
        code => Err(format!(
            "it is reachable, but a lookup returned {code}, as with a master of a different \
             version; use library, master and storage nodes of the same Mooncake version"
        )),
    }
}

fn connect_until_closed(
    shared: &Weak<ConnectionCore>,
    library: &Arc<Library>,
    way: &ConnectConfig,
) {
    let retry = way.retry;
    let mut tries = 0u32;
    loop {
        let Some(contributor) = shared.upgrade().map(|it| it.state.lock().contributor.clone())
        else {
            return;
        };
        let contributor = match contributor {
            Some(contributor) => Ok(Some(contributor)),
            None => contribute(library, way).map(|contributor| contributor.map(Arc::new)),
        };
        let connected = match &contributor {
            Ok(contributor) => connect(library, way, contributor.as_deref()),
            Err(last_error) => Err(last_error.clone()),
        };
        let Some(shared) = shared.upgrade() else { return };
        let mut state = shared.state.lock();
        if state.closed {
            return;
        }
        // It stays even if the other client could not connect yet.
        state.contributor = contributor.ok().flatten();
        let last_error = match connected.map(Arc::new) {
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
                        // Its destruction may take a while. If calls are in flight, the last of
                        // them destroys it.
                        drop(former);
                        return;
                    }
                    Err(error) => error.to_string(),
                }
            }
            Err(last_error) => last_error,
        };
        tries += 1;
        tracing::warn!(
            "L3: cannot use the Mooncake master at {} (attempt {tries}): {last_error}. Requests \
             compute instead. Next attempt in {retry:?}",
            shared.master
        );
        state.last_error = Some(last_error);
        let until = Instant::now() + retry;
        while !state.closed && !shared.changed.wait_until(&mut state, until).timed_out() {}
        if state.closed {
            return;
        }
    }
}
