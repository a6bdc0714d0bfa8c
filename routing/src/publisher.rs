//! Tells events to whoever listens, as a ZeroMQ publisher, and again to those who ask for what they have missed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Semaphore, broadcast, mpsc, oneshot};
use tokio::task::JoinSet;

use crate::endpoint::{Door, Endpoint};
use crate::history::{History, Since, Told};
use crate::zmtp::{self, Incoming, Reader, Role, Subscriptions, Writer};

/// Batches that may wait for one who takes them slowly; older ones it misses, and sees that by their numbers.
const WAITING_MAX: usize = 1024;
/// What is kept for those who ask again, however few batches that is.
const HISTORY_BYTES_MAX: usize = 64 << 20;
/// Connections at a time, of each kind.
const CONNECTIONS_MAX: usize = 64;
/// How long to wait before going to one who was not there.
const KNOCK_AGAIN: Duration = Duration::from_secs(1);

/// Where and what to publish.
#[derive(Clone, Debug)]
pub struct PublisherConfig {
    /// Where events are told.
    pub door: Door,
    /// Where those ask who have missed some.
    pub replay: Option<Endpoint>,
    /// What stands before each batch, for those who listen to some publishers only.
    pub topic: String,
    /// How many batches are kept for those who ask.
    pub batches_max: usize,
}

/// Tells events to whoever listens. Dropping it closes all connections.
#[derive(Debug)]
pub struct Publisher {
    shared: Arc<Shared>,
    /// Where it listens, with the ports that the system chose if none were asked for.
    events: Option<std::net::SocketAddr>,
    replay: Option<std::net::SocketAddr>,
    _tasks: JoinSet<()>,
}

/// What a publisher has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublisherStats {
    /// Batches told.
    pub batches: u64,
    /// Their bytes, once for all who listen.
    pub bytes: u64,
    /// Batches that told all that is held, because some had got lost on the way to the publisher.
    pub snapshots: u64,
    /// Who listens.
    pub subscribers: u64,
    /// Batches that somebody took too slowly to get.
    pub missed: u64,
    /// Questions for what was missed.
    pub replays: u64,
}

#[derive(Debug)]
struct Shared {
    topic: String,
    history: Mutex<History>,
    told: broadcast::Sender<Arc<Told>>,
    wanted: mpsc::Sender<Wanted>,
    batches: AtomicU64,
    bytes: AtomicU64,
    snapshots: AtomicU64,
    subscribers: AtomicU64,
    missed: AtomicU64,
    replays: AtomicU64,
}

/// Somebody asks for more than is kept.
#[derive(Debug)]
struct Wanted {
    start: u64,
    done: oneshot::Sender<()>,
}

/// Tells when somebody asks for more than is kept, so that only all that is held helps.
#[derive(Debug)]
pub struct SnapshotWanted(mpsc::Receiver<Wanted>);

impl SnapshotWanted {
    /// Waits until somebody needs to hear all that is held. [`Publisher::keep_whole`] makes it known; dropping what
    /// this returns sends it to whoever asked.
    pub async fn next(&mut self, publisher: &Publisher) -> Option<impl Drop + use<>> {
        loop {
            let Wanted { start, done } = self.0.recv().await?;
            let is_lost = matches!(publisher.shared.history.lock().since(start), Since::Lost);
            if is_lost {
                return Some(Answered(Some(done)));
            }
            let _ = done.send(());
        }
    }
}

/// Lets whoever asked look again when it is dropped.
#[derive(Debug)]
struct Answered(Option<oneshot::Sender<()>>);

impl Drop for Answered {
    fn drop(&mut self) {
        let _ = self.0.take().map(|done| done.send(()));
    }
}

impl Publisher {
    /// Takes its addresses and serves whoever connects.
    ///
    /// # Errors
    /// When an address cannot be had; the error names it.
    pub async fn open(config: PublisherConfig) -> io::Result<(Self, SnapshotWanted)> {
        let PublisherConfig { door, replay, topic, batches_max } = config;
        let (wanted, asked) = mpsc::channel(CONNECTIONS_MAX);
        let shared = Arc::new(Shared {
            history: Mutex::new(History::new(topic.clone(), batches_max.max(1), HISTORY_BYTES_MAX)),
            told: broadcast::channel(WAITING_MAX).0,
            topic,
            wanted,
            batches: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            snapshots: AtomicU64::new(0),
            subscribers: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            replays: AtomicU64::new(0),
        });
        let mut tasks = JoinSet::new();
        let events = match door {
            Door::Open(endpoint) => {
                let listener = listen(&endpoint).await?;
                let address = listener.local_addr()?;
                tasks.spawn(accept(listener, shared.clone(), Role::Publisher));
                Some(address)
            }
            Door::Knock(endpoint) => {
                tasks.spawn(knock(endpoint, shared.clone()));
                None
            }
        };
        let replay = match replay {
            Some(endpoint) => {
                let listener = listen(&endpoint).await?;
                let address = listener.local_addr()?;
                tasks.spawn(accept(listener, shared.clone(), Role::Router));
                Some(address)
            }
            None => None,
        };
        Ok((Self { shared, events, replay, _tasks: tasks }, SnapshotWanted(asked)))
    }

    /// Tells a batch. One that is whole begins with everything being forgotten.
    pub fn publish(&self, payload: &[u8], is_whole: bool) {
        let shared = &self.shared;
        let mut history = shared.history.lock();
        let told = history.tell(payload, is_whole);
        shared.batches.fetch_add(1, Relaxed);
        shared.bytes.fetch_add(told.wire.len() as u64, Relaxed);
        shared.snapshots.fetch_add(u64::from(is_whole), Relaxed);
        // That nobody listens is no error. Under the lock, so that the order is that of the numbers.
        let _ = shared.told.send(told);
    }

    /// Keeps, for those who ask for more than is kept, all that is held after the latest batch.
    pub fn keep_whole(&self, payload: &[u8]) {
        self.shared.history.lock().set_base(payload);
    }

    /// Where it listens for subscribers, if it does.
    #[must_use]
    pub fn events_address(&self) -> Option<std::net::SocketAddr> {
        self.events
    }

    /// Where it listens for those who have missed something, if it does.
    #[must_use]
    pub fn replay_address(&self) -> Option<std::net::SocketAddr> {
        self.replay
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> PublisherStats {
        let shared = &self.shared;
        PublisherStats {
            batches: shared.batches.load(Relaxed),
            bytes: shared.bytes.load(Relaxed),
            snapshots: shared.snapshots.load(Relaxed),
            subscribers: shared.subscribers.load(Relaxed),
            missed: shared.missed.load(Relaxed),
            replays: shared.replays.load(Relaxed),
        }
    }
}

async fn listen(endpoint: &Endpoint) -> io::Result<TcpListener> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{endpoint}: {error}"));
    endpoint.listen().await.map_err(named)
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, role: Role) {
    let slots = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let mut connections = JoinSet::new();
    loop {
        let slot = slots.clone().acquire_owned().await.expect("it is never closed");
        let accepted = listener.accept().await;
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, peer)) => {
                let shared = shared.clone();
                connections.spawn(async move {
                    let served = serve(stream, &shared, role).await;
                    tracing::debug!("KV event subscriber {peer} disconnected: {served:?}");
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection for KV events: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn knock(endpoint: Endpoint, shared: Arc<Shared>) {
    loop {
        let served = match endpoint.connect().await {
            Ok(stream) => serve(stream, &shared, Role::Publisher).await,
            Err(error) => Err(error),
        };
        tracing::debug!("cannot deliver KV events to {endpoint}: {served:?}");
        tokio::time::sleep(KNOCK_AGAIN).await;
    }
}

async fn serve(stream: TcpStream, shared: &Shared, role: Role) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (reader, writer) = zmtp::meet(stream, role).await?;
    match role {
        Role::Router => answer(reader, writer, shared).await,
        Role::Publisher | Role::Subscriber | Role::Dealer => tell(reader, writer, shared).await,
    }
}

/// Counts somebody who listens for as long as this exists.
struct Counted<'a>(&'a AtomicU64);

impl<'a> Counted<'a> {
    fn new(counter: &'a AtomicU64) -> Self {
        counter.fetch_add(1, Relaxed);
        Self(counter)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

async fn tell(mut reader: Reader, mut writer: Writer, shared: &Shared) -> io::Result<()> {
    let _counted = Counted::new(&shared.subscribers);
    let mut told = shared.told.subscribe();
    let mut subscriptions = Subscriptions::default();
    loop {
        tokio::select! {
            incoming = reader.next() => {
                let incoming = incoming?;
                subscriptions.hear(&incoming)?;
                writer.answer(&incoming).await?;
            }
            batch = told.recv() => match batch {
                Ok(batch) if subscriptions.want(shared.topic.as_bytes()) => {
                    writer.send(&batch.wire).await?;
                }
                Ok(_) => {}
                Err(RecvError::Lagged(missed)) => {
                    shared.missed.fetch_add(missed, Relaxed);
                }
                Err(RecvError::Closed) => return Ok(()),
            },
        }
    }
}

/// Before each batch, an empty frame: the place of an envelope.
const ENVELOPE: [u8; 2] = [1, 0];

async fn answer(mut reader: Reader, mut writer: Writer, shared: &Shared) -> io::Result<()> {
    loop {
        let incoming = reader.next().await?;
        writer.answer(&incoming).await?;
        let Incoming::Message(frames) = incoming else { continue };
        let Some(start) = frames.last().and_then(|frame| <[u8; 8]>::try_from(&frame[..]).ok())
        else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the replay request has no number",
            ));
        };
        shared.replays.fetch_add(1, Relaxed);
        for told in since(shared, u64::from_be_bytes(start)).await {
            writer.send(&ENVELOPE).await?;
            writer.send(&told.wire).await?;
        }
        let end = zmtp::message(&[b"", b"", &(-1_i64).to_be_bytes(), b""]);
        writer.send(&end).await?;
    }
}

/// What somebody has to hear; nothing if all that is held cannot be had.
async fn since(shared: &Shared, start: u64) -> Vec<Arc<Told>> {
    // What was made for this question can be too old again by the time that it is looked at.
    for _ in 0..3 {
        let since = shared.history.lock().since(start);
        if let Since::Told(told) = since {
            return told;
        }
        let (done, made) = oneshot::channel();
        if shared.wanted.send(Wanted { start, done }).await.is_err() {
            break;
        }
        let _ = made.await;
    }
    Vec::new()
}
