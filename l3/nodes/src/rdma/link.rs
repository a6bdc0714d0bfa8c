//! A connection to one peer, over which pages are read.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use super::address::LinkAddress;
use super::device::{Device, RemotePage};
use super::error::RdmaError;
use super::verbs::{Done, Ends, Events, MemoryRegion, QueuePair, Read};
use terrace_l3::Target;

/// A page to read from a peer: as many bytes as the target has.
#[derive(Debug)]
pub struct RemoteRead {
    /// Where its bytes go.
    pub target: Target,
    /// Where its bytes are.
    pub page: RemotePage,
}

/// Why pages were not read.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Unread {
    /// Why.
    pub error: RdmaError,
    /// The targets in their order, with undefined content. Empty if the adapter did not let go of all of
    /// them: what is missing then stays on loan.
    pub targets: Vec<Target>,
}

/// A connection to one peer. Either side reads what the other has registered, and neither notices being
/// read from.
///
/// Dropping a link closes it.
pub struct Link {
    shared: Arc<Shared>,
    address: LinkAddress,
    driver: AbortHandle,
}

struct Shared {
    device: Device,
    queue_pair: Mutex<QueuePair<Waiting>>,
    /// A permit for each read that the queue pair has room for.
    room: Arc<Semaphore>,
}

/// Pages that were read, or why they were not.
type Outcome = Result<Vec<Target>, Unread>;

/// Who waits for a batch.
struct Waiting {
    answer: oneshot::Sender<Outcome>,
    _room: OwnedSemaphorePermit,
}

impl Link {
    /// One end of a link. It serves and reads nothing until it is connected.
    ///
    /// # Errors
    /// When the device has not so many queues left.
    ///
    /// # Panics
    /// Outside of a Tokio runtime that has IO and time.
    pub fn new(device: &Device) -> Result<Self, RdmaError> {
        let system = |action| {
            let port = device.port().clone();
            move |error| RdmaError::system(port, action, &error)
        };
        let queue_pair = QueuePair::new(device.domain().clone(), device.reads_max());
        let queue_pair = queue_pair.map_err(system("make a queue pair"))?;
        let address = LinkAddress {
            gid: device.gid().bytes,
            queue_pair: queue_pair.number(),
            first_packet: RandomState::new().hash_one(()) as u32 & 0xFF_FFFF,
            mtu: device.mtu(),
            reads_served: device.reads_served(),
        };
        let events = queue_pair.events().map_err(system("wait for completions"))?;
        let shared = Arc::new(Shared {
            device: device.clone(),
            queue_pair: Mutex::new(queue_pair),
            room: Arc::new(Semaphore::new(device.reads_max() as usize)),
        });
        let driver = tokio::spawn(drive(shared.clone(), events)).abort_handle();
        Ok(Self { shared, address, driver })
    }

    /// What the peer must know to connect.
    #[must_use]
    pub fn address(&self) -> LinkAddress {
        self.address
    }

    /// Connects to the peer at that address, which from now on can read what is registered here.
    ///
    /// # Errors
    /// When the address cannot be reached from here, or the link was connected or closed before.
    pub fn connect(&self, peer: LinkAddress) -> Result<(), RdmaError> {
        let device = &self.shared.device;
        let ends = Ends {
            port: device.port().port,
            gid_index: device.gid().index,
            first_packet: self.address.first_packet,
            mtu: device.mtu().min(peer.mtu),
            reads_asked: device.reads_asked().min(peer.reads_served),
            reads_served: device.reads_served(),
            peer_gid: peer.gid,
            peer_queue_pair: peer.queue_pair,
            peer_first_packet: peer.first_packet,
        };
        let connected = self.shared.queue_pair.lock().connect(ends);
        connected.map_err(|error| RdmaError::system(device.port(), "connect to the peer", &error))
    }

    /// Reads pages, and gives the targets back in their order. All are read, or none can be relied on.
    ///
    /// Dropping the future ends the waiting only: what has begun goes on, and the pages are lent until it
    /// has ended or the link is closed.
    ///
    /// # Errors
    /// When the link is closed, or a read fails, which closes it. By then the adapter has let go of the
    /// targets, and they are handed back.
    pub async fn read(&self, reads: Vec<RemoteRead>) -> Result<Vec<Target>, Unread> {
        let count = reads.len();
        let bytes: usize = reads.iter().map(|read| read.target.len()).sum();
        let deadline = Instant::now() + patience(bytes);
        let (mut waiting, mut refused) = (Vec::new(), None);
        let mut targets = Vec::with_capacity(count);
        let mut batches = self.shared.batches(reads)?.into_iter();
        for batch in batches.by_ref() {
            match self.shared.begin(batch).await {
                Ok(answered) => waiting.push(answered),
                Err(unread) => {
                    refused = Some(unread);
                    break;
                }
            }
        }
        let mut failed = None;
        for batch in waiting {
            let outcome = self.shared.outcome(batch, deadline).await;
            targets.extend(outcome.unwrap_or_else(|unread| {
                failed.get_or_insert(unread.error);
                unread.targets
            }));
        }
        if let Some(unread) = refused {
            failed.get_or_insert(unread.error);
            targets.extend(unread.targets);
        }
        targets.extend(batches.flat_map(|batch| batch.reads).map(|read| read.target));
        match failed {
            None => Ok(targets),
            Some(error) => {
                let targets = if targets.len() == count { targets } else { Vec::new() };
                Err(Unread { error, targets })
            }
        }
    }

    /// Ends the link, now: when this returns, neither side reads from the other any more, and targets of
    /// reads under way are given back.
    pub fn close(&self) {
        self.driver.abort();
        self.shared.close(|shared| shared.closed());
    }

    /// Whether it was closed, by this side or by a failed read.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.queue_pair.lock().is_closed()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link of {:?} with {:?}", self.shared.device, self.shared.queue_pair.lock())
    }
}

/// How often a read that takes long looks whether it can still succeed.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const TOO_SLOW: &str = "the adapter neither completed nor gave up";
const PORT_DOWN: &str = "the port went down";

/// How long reads may take. Software adapters are slow.
fn patience(bytes: usize) -> Duration {
    const AT_LEAST: Duration = Duration::from_secs(15);
    const BYTES_PER_SECOND: usize = 1 << 20;
    AT_LEAST + Duration::from_secs((bytes / BYTES_PER_SECOND) as u64)
}

/// Reads that fit into the queue together.
struct Fitting {
    reads: Vec<Read>,
    pieces: u32,
}

impl Shared {
    /// Divides reads into batches that fit into the queue.
    fn batches(&self, reads: Vec<RemoteRead>) -> Result<Vec<Fitting>, Unread> {
        let checked: Result<Vec<_>, _> =
            reads.iter().map(|read| self.check(&read.target)).collect();
        let checked = match checked {
            Ok(checked) => checked,
            Err(error) => {
                let targets = reads.into_iter().map(|read| read.target).collect();
                return Err(Unread { error, targets });
            }
        };
        let mut batches: Vec<Fitting> = Vec::new();
        for (RemoteRead { target, page }, (region, pieces)) in reads.into_iter().zip(checked) {
            let read = Read { target, region, address: page.address, remote_key: page.key };
            match batches.last_mut() {
                Some(batch) if batch.pieces + pieces <= self.device.reads_max() => {
                    batch.reads.push(read);
                    batch.pieces += pieces;
                }
                Some(_) | None => batches.push(Fitting { reads: vec![read], pieces }),
            }
        }
        Ok(batches)
    }

    /// The region of a target, and in how many pieces it is read.
    fn check(&self, target: &Target) -> Result<(Arc<MemoryRegion>, u32), RdmaError> {
        let region = self.device.region_of(target.arena_id())?;
        let (piece_bytes, pieces_max) = (self.device.message_bytes_max(), self.device.reads_max());
        let pieces = u32::try_from(target.len().div_ceil(piece_bytes)).ok();
        let pieces = pieces.filter(|pieces| *pieces <= pieces_max);
        let pieces = pieces.ok_or_else(|| RdmaError::TooLong {
            port: self.device.port().clone(),
            bytes: target.len(),
            max: piece_bytes.saturating_mul(pieces_max as usize),
        })?;
        Ok((region, pieces))
    }

    /// Begins a batch as soon as there is room for it.
    async fn begin(&self, batch: Fitting) -> Result<oneshot::Receiver<Outcome>, Unread> {
        let Fitting { reads, pieces } = batch;
        let room = self.room.clone().acquire_many_owned(pieces).await;
        let mut queue_pair = self.queue_pair.lock();
        let (Ok(room), false) = (room, queue_pair.is_closed()) else {
            let targets = reads.into_iter().map(|read| read.target).collect();
            return Err(Unread { error: self.closed(), targets });
        };
        let (answer, answered) = oneshot::channel();
        if pieces == 0 {
            // Pages without bytes.
            let targets = reads.into_iter().map(|read| read.target).collect();
            answer.send(Ok(targets)).expect("it was just made");
            return Ok(answered);
        }
        let bytes = reads.iter().map(|read| read.target.len()).sum();
        let waiting = Waiting { answer, _room: room };
        match queue_pair.read(reads, self.device.message_bytes_max(), waiting) {
            Ok(pieces) => self.device.counting().posted(pieces, bytes),
            Err((error, ended)) => {
                self.room.close();
                let port = self.device.port();
                tell(ended, &RdmaError::system(port, "begin a read", &error));
            }
        }
        Ok(answered)
    }

    /// Waits for a batch. Adapters give up by themselves when the peer does not answer; one that does
    /// not, for example because its own cable was pulled, is not waited for without end.
    async fn outcome(&self, mut batch: oneshot::Receiver<Outcome>, deadline: Instant) -> Outcome {
        loop {
            match timeout(LOOK_EVERY, &mut batch).await {
                Ok(outcome) => return outcome.unwrap_or_else(|_| Err(self.closed().into())),
                Err(_) if Instant::now() > deadline => self.close(|shared| shared.failed(TOO_SLOW)),
                Err(_) if !self.device.is_active() => self.close(|shared| shared.failed(PORT_DOWN)),
                Err(_) => {}
            }
        }
    }

    fn failed(&self, status: &str) -> RdmaError {
        RdmaError::ReadFailed { port: self.device.port().clone(), status: status.to_owned() }
    }

    /// Takes what the adapter has to tell. Whether the link is still open.
    fn woken(&self) -> bool {
        let mut queue_pair = self.queue_pair.lock();
        let looked = queue_pair.woken().and_then(|was_woken| {
            if was_woken {
                self.device.counting().woken();
            }
            queue_pair.poll()
        });
        drop(queue_pair);
        let (completions, done) = match looked {
            Ok(looked) => looked,
            Err(error) => {
                self.close(|shared| {
                    RdmaError::system(shared.device.port(), "take completions", &error)
                });
                return false;
            }
        };
        self.device.counting().completed(completions);
        for done in done {
            match done {
                // Whoever has given up waiting gives the pages back by not taking them.
                Done::Batch(waiting, targets) => drop(waiting.answer.send(Ok(targets))),
                Done::Failed(status) => {
                    self.close(|shared| shared.failed(&status));
                    return false;
                }
            }
        }
        true
    }

    fn close(&self, why: impl FnOnce(&Self) -> RdmaError) {
        let ended = self.queue_pair.lock().close();
        self.room.close();
        if !ended.is_empty() {
            tell(ended, &why(self));
        }
    }

    fn closed(&self) -> RdmaError {
        RdmaError::Closed { port: self.device.port().clone() }
    }
}

/// Tells those who wait that their batches have failed.
fn tell(ended: Vec<(Waiting, Vec<Target>)>, why: &RdmaError) {
    for (waiting, targets) in ended {
        // Whoever has given up waiting gives the pages back by not taking them.
        drop(waiting.answer.send(Err(Unread { error: why.clone(), targets })));
    }
}

impl From<RdmaError> for Unread {
    fn from(error: RdmaError) -> Self {
        Self { error, targets: Vec::new() }
    }
}

/// Tells those who wait for reads that they have ended, until the link is closed.
async fn drive(shared: Arc<Shared>, events: AsyncFd<Events>) {
    loop {
        let Ok(mut ready) = events.readable().await else { return };
        if !shared.woken() {
            return;
        }
        // All that the descriptor had to tell was taken.
        ready.clear_ready();
    }
}
