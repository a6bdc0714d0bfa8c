//! A connection to one peer, for reading pages.

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
use super::verbs::{Completion, Ends, Events, MemoryRegion, QueuePair, Read};
use terrace_l3::Target;

/// A page to read from a peer, with the length of the target.
#[derive(Debug)]
pub struct RemoteRead {
    /// Target of its bytes.
    pub target: Target,
    /// Location of its bytes.
    pub page: RemotePage,
}

/// Error of a failed read.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Unread {
    /// The error.
    pub error: RdmaError,
    /// The targets in their order, with undefined content. Empty if the adapter did not release all
    /// of them: the missing ones stay lent.
    pub targets: Vec<Target>,
}

/// A connection to one peer. Either side reads memory that the other has registered, and neither
/// notices being read from.
///
/// Dropping a link closes it.
pub struct Link {
    shared: Arc<LinkCore>,
    address: LinkAddress,
    driver: AbortHandle,
}

struct LinkCore {
    device: Device,
    queue_pair: Mutex<QueuePair<ReadWaiter>>,
    /// One permit for each read that fits in the queue pair.
    room: Arc<Semaphore>,
}

/// Pages that were read, or the error.
type ReadOutcome = Result<Vec<Target>, Unread>;

/// Receiver of a batch's outcome.
struct ReadWaiter {
    answer: oneshot::Sender<ReadOutcome>,
    _room: OwnedSemaphorePermit,
}

impl Link {
    /// Creates one end of a link. It neither serves nor reads until it is connected.
    ///
    /// # Errors
    /// If the device has no more queues.
    ///
    /// # Panics
    /// Outside a tokio runtime with IO and time.
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
        let shared = Arc::new(LinkCore {
            device: device.clone(),
            queue_pair: Mutex::new(queue_pair),
            room: Arc::new(Semaphore::new(device.reads_max() as usize)),
        });
        let driver = tokio::spawn(drive(shared.clone(), events)).abort_handle();
        Ok(Self { shared, address, driver })
    }

    /// Address that the peer needs to connect.
    #[must_use]
    pub fn address(&self) -> LinkAddress {
        self.address
    }

    /// Connects to the peer at this address, which can then read the memory registered here.
    ///
    /// # Errors
    /// If the address is unreachable, or the link was connected or closed before.
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

    /// Reads pages and returns the targets in their order. All are read, or none is valid.
    ///
    /// Dropping the future only ends the wait: reads in flight continue, and their pages stay lent
    /// until they have ended or the link is closed.
    ///
    /// # Errors
    /// If the link is closed, or if a read fails, which closes it. The adapter has then released
    /// the targets, and they are returned.
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

    /// Closes the link at once: when this returns, neither side reads from the other any more, and
    /// the targets of reads in flight are returned.
    pub fn close(&self) {
        self.driver.abort();
        self.shared.close(|shared| shared.closed());
    }

    /// Returns true if the link was closed, by this side or by a failed read.
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

/// Interval of checks whether a slow read can still succeed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
const TOO_SLOW: &str = "the adapter neither completed nor gave up";
const PORT_DOWN: &str = "the port went down";

/// Maximum duration of reads. Software adapters are slow.
fn patience(bytes: usize) -> Duration {
    const AT_LEAST: Duration = Duration::from_secs(15);
    const BYTES_PER_SECOND: usize = 1 << 20;
    AT_LEAST + Duration::from_secs((bytes / BYTES_PER_SECOND) as u64)
}

/// Reads that fit in the queue together.
struct ReadBatch {
    reads: Vec<Read>,
    pieces: u32,
}

impl LinkCore {
    /// Splits reads into batches that fit in the queue.
    fn batches(&self, reads: Vec<RemoteRead>) -> Result<Vec<ReadBatch>, Unread> {
        let checked: Result<Vec<_>, _> =
            reads.iter().map(|read| self.check(&read.target)).collect();
        let checked = match checked {
            Ok(checked) => checked,
            Err(error) => {
                let targets = reads.into_iter().map(|read| read.target).collect();
                return Err(Unread { error, targets });
            }
        };
        let mut batches: Vec<ReadBatch> = Vec::new();
        for (RemoteRead { target, page }, (region, pieces)) in reads.into_iter().zip(checked) {
            let read = Read { target, region, address: page.address, remote_key: page.key };
            match batches.last_mut() {
                Some(batch) if batch.pieces + pieces <= self.device.reads_max() => {
                    batch.reads.push(read);
                    batch.pieces += pieces;
                }
                Some(_) | None => batches.push(ReadBatch { reads: vec![read], pieces }),
            }
        }
        Ok(batches)
    }

    /// Region of a target, and the number of pieces in which it is read.
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

    /// Starts a batch as soon as there is room for it.
    async fn begin(&self, batch: ReadBatch) -> Result<oneshot::Receiver<ReadOutcome>, Unread> {
        let ReadBatch { reads, pieces } = batch;
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
        let waiting = ReadWaiter { answer, _room: room };
        match queue_pair.read(reads, self.device.message_bytes_max(), waiting) {
            Ok(pieces) => self.device.counting().posted(pieces, bytes),
            Err((error, ended)) => {
                self.room.close();
                let port = self.device.port();
                fail_waiters(ended, &RdmaError::system(port, "begin a read", &error));
            }
        }
        Ok(answered)
    }

    /// Waits for a batch. Adapters give up by themselves when the peer does not answer. The
    /// deadline covers adapters that do not, for example after a local cable was unplugged.
    async fn outcome(
        &self,
        mut batch: oneshot::Receiver<ReadOutcome>,
        deadline: Instant,
    ) -> ReadOutcome {
        loop {
            match timeout(CHECK_INTERVAL, &mut batch).await {
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

    /// Takes completions from the adapter. Returns whether the link is still open.
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
                // If the receiver is gone, the pages are returned by dropping them.
                Completion::Batch(waiting, targets) => drop(waiting.answer.send(Ok(targets))),
                Completion::Failed(status) => {
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
            fail_waiters(ended, &why(self));
        }
    }

    fn closed(&self) -> RdmaError {
        RdmaError::Closed { port: self.device.port().clone() }
    }
}

/// Reports the failure of batches to their receivers.
fn fail_waiters(ended: Vec<(ReadWaiter, Vec<Target>)>, why: &RdmaError) {
    for (waiting, targets) in ended {
        // If the receiver is gone, the pages are returned by dropping them.
        drop(waiting.answer.send(Err(Unread { error: why.clone(), targets })));
    }
}

impl From<RdmaError> for Unread {
    fn from(error: RdmaError) -> Self {
        Self { error, targets: Vec::new() }
    }
}

/// Reports completed reads to their receivers, until the link is closed.
async fn drive(shared: Arc<LinkCore>, events: AsyncFd<Events>) {
    loop {
        let Ok(mut ready) = events.readable().await else { return };
        if !shared.woken() {
            return;
        }
        // All events of the descriptor were taken.
        ready.clear_ready();
    }
}
