//! A ZeroMQ publisher of events, with a replay service for missed batches.

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
use crate::history::{History, PublishedBatch, Since};
use crate::zmtp::{self, Incoming, Reader, Role, Subscriptions, Writer};

/// Batches queued for a slow subscriber; older ones are dropped, which the subscriber detects by
/// their numbers.
const WAITING_MAX: usize = 1024;
/// Largest size of the history in bytes, whatever its number of batches.
const HISTORY_BYTES_MAX: usize = 64 << 20;
/// Largest number of connections of each kind.
const CONNECTIONS_MAX: usize = 64;
/// Delay between connection attempts.
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);

/// Configuration of a publisher.
#[derive(Clone, Debug)]
pub struct PublisherConfig {
    /// Address of the event stream.
    pub door: Door,
    /// Address of the replay service.
    pub replay: Option<Endpoint>,
    /// Topic of each batch, for subscribers that filter.
    pub topic: String,
    /// Number of batches in the history.
    pub batches_max: usize,
}

/// A publisher. Dropping it closes all connections.
#[derive(Debug)]
pub struct Publisher {
    shared: Arc<Shared>,
    /// Listening address, with the port that the system assigned if none was given.
    events: Option<std::net::SocketAddr>,
    replay: Option<std::net::SocketAddr>,
    _tasks: JoinSet<()>,
}

/// Statistics of a publisher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PublisherStats {
    /// Published batches.
    pub batches: u64,
    /// Their bytes, counted once for all subscribers.
    pub bytes: u64,
    /// Published snapshots, after events were lost on the way to the publisher.
    pub snapshots: u64,
    /// Current subscribers.
    pub subscribers: u64,
    /// Batches dropped for slow subscribers.
    pub missed: u64,
    /// Replay requests.
    pub replays: u64,
}

#[derive(Debug)]
struct Shared {
    topic: String,
    history: Mutex<History>,
    published: broadcast::Sender<Arc<PublishedBatch>>,
    wanted: mpsc::Sender<Wanted>,
    batches: AtomicU64,
    bytes: AtomicU64,
    snapshots: AtomicU64,
    subscribers: AtomicU64,
    missed: AtomicU64,
    replays: AtomicU64,
}

/// A replay request beyond the history.
#[derive(Debug)]
struct Wanted {
    start: u64,
    done: oneshot::Sender<()>,
}

/// Receiver of replay requests beyond the history, which only a snapshot can answer.
#[derive(Debug)]
pub struct SnapshotWanted(mpsc::Receiver<Wanted>);

impl SnapshotWanted {
    /// Waits until a snapshot is needed. Pass it to [`Publisher::keep_whole`]; dropping the
    /// returned value then answers the request.
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

/// Wakes the waiting request when it is dropped.
#[derive(Debug)]
struct Answered(Option<oneshot::Sender<()>>);

impl Drop for Answered {
    fn drop(&mut self) {
        let _ = self.0.take().map(|done| done.send(()));
    }
}

impl Publisher {
    /// Binds the addresses and starts serving.
    ///
    /// # Errors
    /// Fails if an address cannot be bound; the error names it.
    pub async fn open(config: PublisherConfig) -> io::Result<(Self, SnapshotWanted)> {
        let PublisherConfig { door, replay, topic, batches_max } = config;
        let (wanted, asked) = mpsc::channel(CONNECTIONS_MAX);
        let shared = Arc::new(Shared {
            history: Mutex::new(History::new(topic.clone(), batches_max.max(1), HISTORY_BYTES_MAX)),
            published: broadcast::channel(WAITING_MAX).0,
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

    /// Publishes a batch. A whole batch starts with a reset.
    pub fn publish(&self, payload: &[u8], is_whole: bool) {
        let shared = &self.shared;
        let mut history = shared.history.lock();
        let batch = history.publish(payload, is_whole);
        shared.batches.fetch_add(1, Relaxed);
        shared.bytes.fetch_add(batch.wire.len() as u64, Relaxed);
        shared.snapshots.fetch_add(u64::from(is_whole), Relaxed);
        // Without subscribers this fails, which is ignored. Sent under the lock, so that the order
        // is that of the numbers.
        let _ = shared.published.send(batch);
    }

    /// Sets a snapshot of the state after the latest batch, for requests beyond the history.
    pub fn keep_whole(&self, payload: &[u8]) {
        self.shared.history.lock().set_base(payload);
    }

    /// Returns the listening address of the event stream, if it listens.
    #[must_use]
    pub fn events_address(&self) -> Option<std::net::SocketAddr> {
        self.events
    }

    /// Returns the listening address of the replay service, if it listens.
    #[must_use]
    pub fn replay_address(&self) -> Option<std::net::SocketAddr> {
        self.replay
    }

    /// Returns statistics.
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
        tokio::time::sleep(RECONNECT_INTERVAL).await;
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

/// Counts a subscriber while it exists.
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
    let mut published = shared.published.subscribe();
    let mut subscriptions = Subscriptions::default();
    loop {
        tokio::select! {
            incoming = reader.next() => {
                let incoming = incoming?;
                subscriptions.hear(&incoming)?;
                writer.answer(&incoming).await?;
            }
            batch = published.recv() => match batch {
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

/// An empty frame before each batch: the envelope delimiter.
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
        for batch in since(shared, u64::from_be_bytes(start)).await {
            writer.send(&ENVELOPE).await?;
            writer.send(&batch.wire).await?;
        }
        let end = zmtp::message(&[b"", b"", &(-1_i64).to_be_bytes(), b""]);
        writer.send(&end).await?;
    }
}

/// Returns the batches from a number on; empty if no snapshot can be had.
async fn since(shared: &Shared, start: u64) -> Vec<Arc<PublishedBatch>> {
    // A snapshot made for this request may be outdated when it is read.
    for _ in 0..3 {
        let since = shared.history.lock().since(start);
        if let Since::Available(batches) = since {
            return batches;
        }
        let (done, made) = oneshot::channel();
        if shared.wanted.send(Wanted { start, done }).await.is_err() {
            break;
        }
        let _ = made.await;
    }
    Vec::new()
}
