//! Queue pairs: reads in flight and their completion.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as sys;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use sys::{ibv_access_flags as Access, ibv_qp_attr_mask as Mask};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{Context, MemoryRegion, ProtectionDomain, check};
use terrace_l3::Target;

/// Completion channel: its descriptor becomes readable when there are completions.
struct Channel {
    raw: NonNull<sys::ibv_comp_channel>,
    context: Arc<Context>,
}

impl Channel {
    fn new(context: Arc<Context>) -> io::Result<Self> {
        // SAFETY: the context is open, and the channel holds it.
        let raw = unsafe { sys::ibv_create_comp_channel(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        let channel = Self { raw, context };
        let flags = fcntl_getfl(channel.descriptor())?;
        fcntl_setfl(channel.descriptor(), flags | OFlags::NONBLOCK)?;
        Ok(channel)
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor is open from its creation until it is destroyed, which
        // is when `self` is dropped; the field does not change.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: this is its only owner, and the completion queue that uses it is destroyed
        // before: it owns the channel.
        let freed = check(unsafe { sys::ibv_destroy_comp_channel(self.raw.as_ptr()) });
        if let Err(error) = freed {
            tracing::warn!(%error, "an RDMA completion channel could not be freed");
        }
    }
}

/// Completion queue of one queue pair.
struct CompletionQueue {
    raw: NonNull<sys::ibv_cq>,
    channel: Channel,
}

// SAFETY: the library's functions may be called from any thread at any time, also with the same queue and
// channel, and the fields that are read here never change.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    fn new(context: Arc<Context>, entries: u32) -> io::Result<Self> {
        let channel = Channel::new(context)?;
        let entries = i32::try_from(entries).map_err(io::Error::other)?;
        let (raw, nothing) = (channel.raw.as_ptr(), std::ptr::null_mut());
        // SAFETY: context and channel exist, and are owned by the returned value.
        let raw = unsafe { sys::ibv_create_cq(channel.context.raw(), entries, nothing, raw, 0) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        let queue = Self { raw, channel };
        queue.arm()?;
        Ok(queue)
    }

    /// Requests a notification of the next completion.
    fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue exists, and its context with it, whose table of functions is filled
        // when it is opened.
        check(unsafe {
            let request = (*self.raw.as_ref().context).ops.req_notify_cq;
            request.expect("every driver has it")(self.raw.as_ptr(), 0)
        })
    }

    /// Takes an event from the descriptor, if there is one. Does not block.
    fn take_event(&self) -> io::Result<bool> {
        let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        let channel = self.channel.raw.as_ptr();
        // SAFETY: the channel exists, and the function writes one pointer through each of the
        // others.
        if unsafe { sys::ibv_get_cq_event(channel, &raw mut queue, &raw mut context) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(false) } else { Err(error) };
        }
        // SAFETY: the channel serves only this queue, which exists; one event was taken, and one is
        // acknowledged.
        unsafe { sys::ibv_ack_cq_events(self.raw.as_ptr(), 1) };
        Ok(true)
    }

    /// Takes completions, as many as there are or fit, and returns their number.
    fn poll(&self, found: &mut [sys::ibv_wc]) -> io::Result<usize> {
        let room = i32::try_from(found.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue and its context's table of functions exist, and the function writes at
        // most `room` entries to memory with room for them.
        let count = unsafe {
            let poll = (*self.raw.as_ref().context).ops.poll_cq;
            poll.expect("every driver has it")(self.raw.as_ptr(), room, found.as_mut_ptr())
        };
        usize::try_from(count).map_err(|_| io::Error::other("the completion queue is broken"))
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: this is its only owner. The queue pair that reports to it holds an `Arc` of it
        // until it is destroyed, and every event that was taken has been acknowledged.
        let freed = check(unsafe { sys::ibv_destroy_cq(self.raw.as_ptr()) });
        if let Err(error) = freed {
            tracing::warn!(%error, "an RDMA completion queue could not be freed");
        }
    }
}

/// Descriptor by which the adapter wakes this process.
pub(in crate::rdma) struct Events(Arc<CompletionQueue>);

impl AsRawFd for Events {
    fn as_raw_fd(&self) -> RawFd {
        self.0.channel.descriptor().as_raw_fd()
    }
}

/// A page to read into all of `target`.
#[derive(Debug)]
pub(in crate::rdma) struct Read {
    pub(in crate::rdma) target: Target,
    /// Region of the target's arena.
    pub(in crate::rdma) region: Arc<MemoryRegion>,
    pub(in crate::rdma) address: u64,
    pub(in crate::rdma) remote_key: u32,
}

/// Both ends of a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct Ends {
    pub(in crate::rdma) port: u8,
    pub(in crate::rdma) gid_index: u8,
    pub(in crate::rdma) first_packet: u32,
    pub(in crate::rdma) mtu: u8,
    pub(in crate::rdma) reads_asked: u8,
    pub(in crate::rdma) reads_served: u8,
    pub(in crate::rdma) peer_gid: [u8; 16],
    pub(in crate::rdma) peer_queue_pair: u32,
    pub(in crate::rdma) peer_first_packet: u32,
}

/// Outcome that the adapter reported.
#[derive(Debug)]
pub(in crate::rdma) enum Completion<T> {
    /// A batch was read.
    Batch(T, Vec<Target>),
    /// A read failed, so no read in flight will succeed. With the status text of the library.
    Failed(String),
}

/// Tag of a batch that ended unfinished, and its targets if the adapter has released them.
pub(in crate::rdma) type Ended<T> = (T, Vec<Target>);

/// Reads that were posted together, and their targets.
struct PostedReads<T> {
    id: u64,
    targets: Vec<Target>,
    _regions: Vec<Arc<MemoryRegion>>,
    tag: T,
}

/// One end of a connection, and its reads in flight. Each batch of them has a tag.
pub(in crate::rdma) struct QueuePair<T> {
    /// `None` once it is closed.
    raw: Option<NonNull<sys::ibv_qp>>,
    number: u32,
    /// In the order of posting, which is the order of completion.
    in_flight: VecDeque<PostedReads<T>>,
    next_batch: u64,
    completions: Arc<CompletionQueue>,
    _domain: Arc<ProtectionDomain>,
}

// SAFETY: the library's functions may be called from any thread; everything else is `Send` if tags are.
unsafe impl<T: Send> Send for QueuePair<T> {}

/// Timeout of a reply in the numbering of the verbs: 4.096 microseconds times 2^16, so 0.27 s.
const REPLY_TIMEOUT: u8 = 16;
/// Number of retries. 7, the maximum, means unlimited to some adapters.
const RETRIES: u8 = 6;
const HOPS_MAX: u8 = 64;

impl<T> QueuePair<T> {
    /// Creates a queue pair with room for `reads` reads.
    pub(in crate::rdma) fn new(domain: Arc<ProtectionDomain>, reads: u32) -> io::Result<Self> {
        // When reads fail, each may have its own completion.
        let completions = Arc::new(CompletionQueue::new(domain.context().clone(), reads)?);
        let mut wanted = sys::ibv_qp_init_attr {
            send_cq: completions.raw.as_ptr(),
            recv_cq: completions.raw.as_ptr(),
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            cap: sys::ibv_qp_cap {
                max_send_wr: reads,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            ..Default::default()
        };
        // SAFETY: the domain and the completion queue exist and are held by the returned value; the
        // function reads the structure, writes the granted values to it, and does not keep it.
        let raw = unsafe { sys::ibv_create_qp(domain.raw(), &raw mut wanted) };
        let raw = NonNull::new(raw).ok_or_else(io::Error::last_os_error)?;
        // SAFETY: the queue pair was just created, and its number does not change.
        let number = unsafe { raw.as_ref().qp_num };
        Ok(Self {
            raw: Some(raw),
            number,
            in_flight: VecDeque::new(),
            next_batch: 0,
            completions,
            _domain: domain,
        })
    }

    /// Number by which the peer names the queue pair.
    pub(in crate::rdma) fn number(&self) -> u32 {
        self.number
    }

    /// Descriptor that becomes readable when there are completions. Call it in a tokio runtime.
    pub(in crate::rdma) fn events(&self) -> io::Result<AsyncFd<Events>> {
        let events = Events(self.completions.clone());
        // SAFETY: the descriptor is that of the channel, which never changes and stays open as long
        // as `Events` holds the completion queue.
        let registered = unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) };
        registered.map_err(|error| error.into_parts().1)
    }

    pub(in crate::rdma) fn is_closed(&self) -> bool {
        self.raw.is_none()
    }

    /// Connects to the peer, whose reads are served from then on.
    pub(in crate::rdma) fn connect(&mut self, ends: Ends) -> io::Result<()> {
        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_INIT,
            port_num: ends.port,
            qp_access_flags: Access::IBV_ACCESS_REMOTE_READ.0,
            ..Default::default()
        };
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_PKEY_INDEX
            | Mask::IBV_QP_PORT
            | Mask::IBV_QP_ACCESS_FLAGS;
        self.modify(&mut attributes, mask)?;

        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: u32::from(ends.mtu),
            dest_qp_num: ends.peer_queue_pair,
            rq_psn: ends.peer_first_packet,
            max_dest_rd_atomic: ends.reads_served,
            min_rnr_timer: 12,
            ..Default::default()
        };
        attributes.ah_attr.is_global = 1;
        attributes.ah_attr.port_num = ends.port;
        attributes.ah_attr.grh.dgid.raw = ends.peer_gid;
        attributes.ah_attr.grh.sgid_index = ends.gid_index;
        attributes.ah_attr.grh.hop_limit = HOPS_MAX;
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attributes, mask)?;

        let mut attributes = sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_RTS,
            sq_psn: ends.first_packet,
            timeout: REPLY_TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            max_rd_atomic: ends.reads_asked,
            ..Default::default()
        };
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attributes, mask)
    }

    fn modify(&mut self, attributes: &mut sys::ibv_qp_attr, mask: Mask) -> io::Result<()> {
        let raw = self.raw.ok_or(io::ErrorKind::NotConnected)?;
        // SAFETY: the queue pair exists, and the function reads the structure only during the call.
        check(unsafe { sys::ibv_modify_qp(raw.as_ptr(), attributes, mask.0.cast_signed()) })
    }

    /// Starts to read a batch, in pieces of at most `piece_bytes_max`. Only the completion of the
    /// last piece is reported. Returns the number of pieces.
    ///
    /// # Errors
    /// If the adapter does not accept all of them. The queue pair is closed then, and all batches
    /// in flight are returned, this one last.
    pub(in crate::rdma) fn read(
        &mut self,
        reads: Vec<Read>,
        piece_bytes_max: usize,
        tag: T,
    ) -> Result<usize, (io::Error, Vec<Ended<T>>)> {
        let Some(raw) = self.raw else {
            let targets = reads.into_iter().map(|read| read.target).collect();
            return Err((io::ErrorKind::NotConnected.into(), vec![(tag, targets)]));
        };
        let id = self.next_batch;
        self.next_batch += 1;
        let (mut pieces, mut requests) = pieces_of(&reads, piece_bytes_max, id);
        let count = requests.len();
        assert!(count > 0, "a batch has something to read");
        let mut batch = PostedReads { id, targets: Vec::new(), _regions: Vec::new(), tag };
        for read in reads {
            batch.targets.push(read.target);
            if !batch._regions.iter().any(|region| Arc::ptr_eq(region, &read.region)) {
                batch._regions.push(read.region);
            }
        }
        self.in_flight.push_back(batch);

        chain(&mut pieces, &mut requests);
        let mut refused = std::ptr::null_mut();
        // SAFETY: the queue pair and its context's table of functions exist. The requests form a
        // terminated list, each with one piece; list and pieces live until the function has
        // returned, which has copied them. The pieces point to memory of targets that `in_flight`
        // owns, in regions that it holds; they are removed only when the adapter has reported them
        // done (`poll`) or the queue pair is destroyed (`close`). So nothing else reads or writes
        // that memory while the adapter may write to it.
        let posted = check(unsafe {
            let post = (*raw.as_ref().context).ops.post_send;
            post.expect("every driver has it")(
                raw.as_ptr(),
                requests.as_mut_ptr(),
                &raw mut refused,
            )
        });
        // Requests before the refused one are in flight, and their completion would not be
        // reported.
        posted.map_err(|error| (error, self.close()))?;
        Ok(count)
    }

    /// Takes all events of the completion queue's descriptor, and requests a notification of the
    /// next completion. Returns whether there were any. Completions polled afterwards were not yet
    /// announced.
    pub(in crate::rdma) fn woken(&mut self) -> io::Result<bool> {
        let mut was_woken = false;
        while self.completions.take_event()? {
            was_woken = true;
        }
        if was_woken {
            self.completions.arm()?;
        }
        Ok(was_woken)
    }

    /// Returns finished batches, and the number of completions taken.
    pub(in crate::rdma) fn poll(&mut self) -> io::Result<(usize, Vec<Completion<T>>)> {
        let (mut completions, mut done) = (0, Vec::new());
        let mut found = [sys::ibv_wc::default(); 16];
        loop {
            let count = self.completions.poll(&mut found)?;
            completions += count;
            for completion in &found[..count] {
                if let Some((status, vendor)) = completion.error() {
                    done.push(Completion::Failed(describe(status, vendor)));
                    return Ok((completions, done));
                }
                // Requests of a connection complete in the order of posting. So when the last one
                // of a batch has completed, all of it has, and the adapter no longer touches its
                // memory.
                let last = completion.wr_id();
                while self.in_flight.front().is_some_and(|batch| batch.id <= last) {
                    let batch = self.in_flight.pop_front().expect("it was just seen");
                    done.push(Completion::Batch(batch.tag, batch.targets));
                }
            }
            if count < found.len() {
                return Ok((completions, done));
            }
        }
    }

    /// Ends the connection: neither side reads any more. Returns the batches in flight, with the
    /// targets if the adapter has released them.
    pub(in crate::rdma) fn close(&mut self) -> Vec<Ended<T>> {
        let Some(raw) = self.raw.take() else { return Vec::new() };
        // SAFETY: the queue pair exists and is destroyed once, since `raw` is taken. `self` holds
        // the objects that it belongs to.
        let destroyed = check(unsafe { sys::ibv_destroy_qp(raw.as_ptr()) });
        if let Err(error) = &destroyed {
            tracing::error!(%error, "an RDMA queue pair could not be destroyed; its pages are lost");
            // The adapter still uses everything that the queue pair belongs to.
            std::mem::forget((self.completions.clone(), self._domain.clone()));
        }
        let end = |PostedReads { targets, _regions, tag, .. }| {
            if destroyed.is_ok() {
                return (tag, targets);
            }
            // The adapter may still write to the targets.
            std::mem::forget((targets, _regions));
            (tag, Vec::new())
        };
        std::mem::take(&mut self.in_flight).into_iter().map(end).collect()
    }
}

impl<T> Drop for QueuePair<T> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<T> fmt::Debug for QueuePair<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair {} with {} batches under way", self.number, self.in_flight.len())
    }
}

/// Pieces of the reads, and one unlinked request per piece.
fn pieces_of(
    reads: &[Read],
    piece_bytes_max: usize,
    id: u64,
) -> (Vec<sys::ibv_sge>, Vec<sys::ibv_send_wr>) {
    let (mut pieces, mut requests) = (Vec::new(), Vec::new());
    for read in reads {
        let Read { target, region, address, remote_key } = read;
        assert_eq!(target.arena_id(), region.arena().id(), "the region is that of the target");
        for offset in (0..target.len()).step_by(piece_bytes_max) {
            let length = piece_bytes_max.min(target.len() - offset);
            pieces.push(sys::ibv_sge {
                addr: target.start().addr() as u64 + offset as u64,
                length: u32::try_from(length).expect("a port's messages have at most 2 GiB"),
                lkey: region.local_key(),
            });
            let mut request = sys::ibv_send_wr {
                wr_id: id,
                num_sge: 1,
                opcode: sys::ibv_wr_opcode::IBV_WR_RDMA_READ,
                ..Default::default()
            };
            request.wr.rdma.remote_addr = address.wrapping_add(offset as u64);
            request.wr.rdma.rkey = *remote_key;
            requests.push(request);
        }
    }
    (pieces, requests)
}

/// Links each request to its piece and its successor, and requests the completion of the last one.
fn chain(pieces: &mut [sys::ibv_sge], requests: &mut [sys::ibv_send_wr]) {
    let mut next = std::ptr::null_mut();
    let mut flags = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
    for (piece, request) in pieces.iter_mut().zip(requests).rev() {
        request.sg_list = piece;
        request.next = next;
        request.send_flags = std::mem::take(&mut flags);
        next = request;
    }
}

fn describe(status: sys::ibv_wc_status::Type, vendor: u32) -> String {
    // SAFETY: the function takes any number and returns a C string that is never freed.
    let words = unsafe { CStr::from_ptr(sys::ibv_wc_status_str(status)) };
    format!("{}, vendor code {vendor:#x}", words.to_string_lossy())
}
