//! Requests of one client on one connection, served one after the other.

mod direct;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep, timeout_at};

use super::codec::Malformed;
use super::config::NodeClient;
use super::direct::Direct;
use super::holds::Portion;
use super::link::{LinkError, NodeLink, in_time};
use super::membership::{Admission, Mark, Membership, Standing};
use super::messages::{
    Answer, FRAME_BYTES_MAX, Item, Joining, OWNERS_MAX, Offer, Parcel, Reply, Request,
};
use super::server::NodeCore;
use terrace_cache::PrefixDigest;
use terrace_l3::backend::{Filled, LentObject, Offered, Room};
use terrace_l3::backend::{merge, split};
use terrace_l3::{
    GetOptions, Header, Mismatch, ObjectId, Owner, Pin, PutOptions, Results, StoreError, Stored,
    Target,
};

pub(super) struct Session {
    shared: Arc<NodeCore>,
    link: NodeLink,
    client: Arc<NodeClient>,
    /// Admission of the client.
    admission: Option<Admission>,
    /// Owners that the connection is registered for.
    owners: BTreeSet<Owner>,
    /// Quota of the client, for all of its connections.
    portion: Portion,
    /// RDMA link, if the client has requested one.
    direct: Option<Arc<Direct>>,
}

/// An object that is wanted, with the memory for its bytes.
struct Expected {
    id: ObjectId,
    prefix: Option<PrefixDigest>,
    // Dropped before the room, which would otherwise be reused while it is still lent.
    target: Target,
    room: Room,
    permit: OwnedSemaphorePermit,
}

/// Maximum wait of a get while other requests of the client use its whole quota: shorter than the
/// timeouts of clients.
const PORTION_WAIT: Duration = Duration::from_millis(300);

/// Objects in transfer to a client, and their part of its quota.
type LentToClient = (Vec<LentObject>, Option<OwnedSemaphorePermit>);

impl Session {
    pub(super) fn new(
        shared: Arc<NodeCore>,
        link: NodeLink,
        client: Arc<NodeClient>,
        portion: Portion,
    ) -> Self {
        let owners = BTreeSet::new();
        Self { shared, link, client, admission: None, owners, portion, direct: None }
    }

    /// Serves until the client disconnects or the node is told to stop.
    pub(super) async fn run(mut self, mut drain: watch::Receiver<bool>) -> Result<(), LinkError> {
        let object_bytes_max = self.shared.holder.object_bytes_max() as u64;
        self.reply(Answer::Welcome { object_bytes_max }, &[]).await?;
        let idle = Duration::from_millis(self.shared.config.idle_timeout_ms);
        loop {
            tokio::select! {
                woken = self.link.wakes() => woken?,
                _ = drain.wait_for(|draining| *draining) => return Ok(()),
                // If this is its last connection, an owner would be considered gone.
                () = sleep(idle) => match self.owners.is_empty() {
                    true => return Ok(()),
                    false => continue,
                },
            }
            let limit = self.link.limit(FRAME_BYTES_MAX);
            let (kind, body) = in_time(limit, self.link.receive(self.link.stall)).await?;
            let request = Request::decode(kind, body)?;
            self.answer(request).await?;
            self.shared.counters.requests.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn answer(&mut self, request: Request) -> Result<(), LinkError> {
        let shared = self.shared.clone();
        let store = shared.holder.store();
        match &request {
            Request::Enter { .. } => {}
            _ if !self.admission.is_some_and(|it| shared.member.admits(it)) => {
                return Err(LinkError::NotAdmitted);
            }
            Request::Put { options: PutOptions { pin: Some(Pin::Hard(owner)), .. }, .. }
            | Request::Fetch { options: PutOptions { pin: Some(Pin::Hard(owner)), .. }, .. }
            | Request::Pin { pin: Pin::Hard(owner), .. } => self.stand_for(*owner)?,
            _ => {}
        }
        let answer = match request {
            Request::Exists { options, ids } => {
                let (allowed, skipped) = self.split(ids, |id| *id);
                let found = store.exists(&allowed, options).await;
                Answer::Presences(merge(&skipped, found, &Err(StoreError::Forbidden)))
            }
            Request::Get { promotion_wait, wanted } => {
                return self.get(wanted, GetOptions { promotion_wait }).await;
            }
            Request::Put { options, offers } => return self.put(offers, options).await,
            Request::Link(end) => Answer::Linked(self.connect_direct(&end)),
            Request::Lend { promotion_wait, wanted } => {
                return self.lend(wanted, GetOptions { promotion_wait }).await;
            }
            Request::Fetch { options, offers } => return self.fetch(offers, options).await,
            Request::Pin { pin, ids } => {
                let (allowed, skipped) = self.split(ids, |id| *id);
                let pinned = store.pin(&allowed, pin).await;
                Answer::Done(merge(&skipped, pinned, &Err(StoreError::Forbidden)))
            }
            Request::Unpin { pin, ids } => {
                let (allowed, skipped) = self.split(ids, |id| *id);
                let unpinned = store.unpin(&allowed, pin).await;
                shared.holder.note_change();
                Answer::Done(merge(&skipped, unpinned, &Err(StoreError::Forbidden)))
            }
            Request::Remove { removal, ids } => {
                let (allowed, skipped) = self.split(ids, |id| *id);
                let removed = store.remove(&allowed, removal).await;
                shared.holder.note_change();
                Answer::Done(merge(&skipped, removed, &Err(StoreError::Forbidden)))
            }
            Request::Suspect(ids) => {
                let (allowed, skipped) = self.split(ids, |id| *id);
                for id in &allowed {
                    shared.holder.inspect(id);
                    // Each is read as a whole, and the thread serves other connections too.
                    tokio::task::yield_now().await;
                }
                Answer::Done(vec![Ok(()); skipped.len()])
            }
            Request::Enter { seat, joins } => Answer::Entered(self.enter(seat, joins).await),
            Request::Flush => Answer::Done(vec![store.flush().await]),
            Request::Ping => Answer::Done(Vec::new()),
            Request::Owners(owners) => {
                for owner in owners {
                    self.stand_for(owner)?;
                }
                Answer::Done(Vec::new())
            }
            Request::Checksums(_) | Request::Taken | Request::Places(_) => {
                return Err(Malformed::Kind(request.kind()).into());
            }
        };
        self.reply(answer, &[]).await
    }

    /// Admits a client whose list has the node in the same seat. First makes the node a member, if
    /// requested.
    async fn enter(&mut self, seat: Mark, joins: Option<Joining>) -> Result<Standing, StoreError> {
        let NodeCore { member, holder, .. } = &*self.shared;
        if let Some(Joining { store, addresses, replaces }) = joins {
            // The membership affects other clients.
            if self.client.limits.is_some() {
                return Err(StoreError::Forbidden);
            }
            // Pinned objects must stay where their owners look for them.
            let moves = member.standing().member.is_some_and(|it| it.seat != seat);
            if replaces && moves && holder.gauges(0).tier().hard_pinned > 0 {
                return Err(StoreError::Pinned);
            }
            member.join(Membership { store, seat, addresses }, replaces).await?;
        }
        self.admission = Some(member.admission(seat));
        Ok(member.standing())
    }

    /// Sends objects directly from their memory.
    async fn get(&mut self, wanted: Vec<Item>, options: GetOptions) -> Result<(), LinkError> {
        let shared = self.shared.clone();
        let (parcels, (lent, _permit)) = self.find(wanted, options).await;
        let payloads: Vec<&[u8]> = lent.iter().map(|lent| &lent.source()[..]).collect();
        let sent: usize = payloads.iter().map(|payload| payload.len()).sum();
        self.reply(Answer::Parcels(parcels), &payloads).await?;
        shared.counters.sent_bytes.fetch_add(sent as u64, Ordering::Relaxed);
        drop(lent);
        shared.holder.note_change();
        Ok(())
    }

    /// Answers for requested objects, and the loans of those that can be read.
    async fn find(&self, wanted: Vec<Item>, options: GetOptions) -> (Vec<Parcel>, LentToClient) {
        let shared = &self.shared;
        let (allowed, skipped) = self.split(wanted, |item| item.id);
        let object_bytes_max = shared.holder.object_bytes_max();
        let mut bytes = 0;
        let fits = |item: &&Item| {
            let before = bytes;
            bytes += clamp(item.length).min(object_bytes_max);
            before == 0 || bytes <= shared.config.call_bytes_max
        };
        let mut at_once: Vec<_> =
            allowed.iter().take_while(fits).map(|item| (item.id, clamp(item.length))).collect();
        let deadline = Instant::now() + PORTION_WAIT;
        let permit = match at_once.is_empty() {
            true => None,
            false => self.permit(deadline).await,
        };
        let permit = permit.map(|mut permit| {
            let more = (1..at_once.len()).map_while(|_| self.try_permit());
            let mut count = 1;
            more.for_each(|more| {
                permit.merge(more);
                count += 1;
            });
            at_once.truncate(count);
            permit
        });
        let mut lent = match permit {
            Some(_) => shared.holder.lend(&at_once, options, self.portion.scratch.as_ref()).await,
            None => at_once.iter().map(|_| Err(StoreError::Full)).collect(),
        };
        lent.resize_with(allowed.len(), || Ok(None));
        let mut next = lent.iter();
        let parcels = skipped.iter().map(|skipped| match skipped {
            true => Parcel::Failed(StoreError::Forbidden),
            false => parcel(next.next().expect("one for each that is allowed")),
        });
        let parcels = parcels.collect();
        (parcels, (lent.into_iter().flatten().flatten().collect(), permit))
    }

    /// Receives objects directly into their final memory.
    async fn put(&mut self, offers: Vec<Item>, options: PutOptions) -> Result<(), LinkError> {
        let shared = self.shared.clone();
        let (answers, mut expected) = self.reserve(offers, options).await;
        self.reply(Answer::Offers(answers), &[]).await?;
        if expected.is_empty() {
            return Ok(());
        }
        let limit = self.link.limit(expected.iter().map(|it| it.target.len()).sum());
        let received = in_time(limit, self.receive(&mut expected)).await;
        if received.is_err() {
            drop(expected);
            shared.holder.note_change();
            return received.map(drop);
        }
        let results = self.keep(expected, received?, options).await;
        self.reply(Answer::Stored(results), &[]).await
    }

    /// Answers for offered objects, and the memory for those that are wanted.
    async fn reserve(&self, offers: Vec<Item>, options: PutOptions) -> (Vec<Offer>, Vec<Expected>) {
        let shared = &self.shared;
        let mut expected: Vec<Expected> = Vec::new();
        let mut answers = Vec::with_capacity(offers.len());
        let wait = Duration::from_millis(shared.config.full_wait_ms);
        let mut deadline = Instant::now() + wait;
        let mut bytes = 0usize;
        for Item { id, length, prefix } in offers {
            let length = clamp(length);
            if !expected.is_empty() && bytes.saturating_add(length) > shared.config.call_bytes_max {
                answers.push(Offer::Later);
                continue;
            }
            if !expected.is_empty() {
                // The wait would be for room that the accepted offers hold.
                deadline = Instant::now();
            }
            let permit = match expected.is_empty() {
                true => self.permit(deadline).await,
                false => self.try_permit(),
            };
            let Some(permit) = permit else {
                let full = expected.is_empty();
                answers.push(if full { Offer::Failed(StoreError::Full) } else { Offer::Later });
                continue;
            };
            answers.push(match self.offer(&id, length, options, deadline).await {
                Ok(Offered::Room(mut room)) => {
                    bytes += length;
                    let target = room.target(length);
                    expected.push(Expected { id, prefix, room, target, permit });
                    Offer::Wanted
                }
                Ok(Offered::There) => Offer::There,
                Ok(Offered::NoRoom) if expected.is_empty() => Offer::Failed(StoreError::Full),
                Ok(Offered::NoRoom) => Offer::Later,
                Err(error) => Offer::Failed(error),
            });
        }
        (answers, expected)
    }

    async fn offer(
        &self,
        id: &ObjectId,
        length: usize,
        options: PutOptions,
        deadline: Instant,
    ) -> Result<Offered, StoreError> {
        if !self.is_allowed(id) {
            return Err(StoreError::Forbidden);
        }
        let max = self.shared.holder.object_bytes_max();
        if length > max {
            return Err(StoreError::TooLarge { bytes: length, max });
        }
        let scratch = self.portion.scratch.as_ref();
        self.shared.holder.offer(id, length, options.pin, deadline, scratch).await
    }

    /// Permit for one more object of the client in transfer.
    async fn permit(&self, deadline: Instant) -> Option<OwnedSemaphorePermit> {
        timeout_at(deadline, self.portion.objects.clone().acquire_owned()).await.ok()?.ok()
    }

    fn try_permit(&self) -> Option<OwnedSemaphorePermit> {
        self.portion.objects.clone().try_acquire_owned().ok()
    }

    /// Receives payloads. Returns pairs of the client's checksums and those computed here.
    async fn receive(&mut self, expected: &mut [Expected]) -> Result<Vec<(u64, u64)>, LinkError> {
        let mut targets: Vec<&mut [u8]> =
            expected.iter_mut().map(|expected| &mut expected.target[..]).collect();
        let seen = self.link.receive_payloads(&mut targets).await?;
        let (kind, body) = self.link.receive(self.link.stall).await?;
        match Request::decode(kind, body)? {
            Request::Checksums(sent) if sent.len() == seen.len() => {
                Ok(sent.into_iter().zip(seen).collect())
            }
            other => Err(Malformed::Kind(other.kind()).into()),
        }
    }

    /// Stores the objects that arrived undamaged.
    async fn keep(
        &self,
        expected: Vec<Expected>,
        checksums: Vec<(u64, u64)>,
        options: PutOptions,
    ) -> Results<Stored> {
        let bytes: usize = expected.iter().map(|expected| expected.target.len()).sum();
        self.shared.counters.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let mut filled = Vec::with_capacity(expected.len());
        let mut damaged = Vec::with_capacity(expected.len());
        let mut permits = Vec::with_capacity(expected.len());
        for (Expected { id, prefix, room, target, permit }, (sent, seen)) in
            expected.into_iter().zip(checksums)
        {
            permits.push(permit);
            let header = Header::with_checksum(id, &target, sent).with_prefix(prefix);
            drop(target);
            damaged.push(sent != seen);
            if sent == seen {
                filled.push(Filled { header, room });
            }
        }
        let kept = self.shared.holder.keep(filled, options).await;
        merge(&damaged, kept, &Err(StoreError::Corrupt(Mismatch::Payload)))
    }

    async fn reply(&mut self, answer: Answer, payloads: &[&[u8]]) -> Result<(), LinkError> {
        let gauges = self.shared.holder.gauges(self.shared.stamp());
        let reply = Reply { gauges, answer };
        let bytes: usize = payloads.iter().map(|payload| payload.len()).sum();
        let limit = self.link.limit(FRAME_BYTES_MAX + bytes);
        in_time(limit, self.link.send(reply.kind(), |body| reply.encode(body), payloads)).await
    }

    /// Registers the connection for an owner, until the connection ends.
    fn stand_for(&mut self, owner: Owner) -> Result<(), LinkError> {
        if self.owners.insert(owner) {
            if self.owners.len() > OWNERS_MAX {
                let (what, found) = ("a number of owners", self.owners.len());
                return Err(Malformed::TooMuch { what, found, max: OWNERS_MAX }.into());
            }
            let NodeCore { holds, holder, .. } = &*self.shared;
            holds.stand_for(owner, || holder.hold(owner));
        }
        Ok(())
    }

    /// Removes objects that the client may not use. The flags say which were removed.
    fn split<T>(&self, batch: Vec<T>, id: impl Fn(&T) -> ObjectId) -> (Vec<T>, Vec<bool>) {
        let (allowed, skipped) = split(batch, |object| !self.is_allowed(&id(object)));
        let forbidden = (skipped.len() - allowed.len()) as u64;
        self.shared.counters.forbidden.fetch_add(forbidden, Ordering::Relaxed);
        (allowed, skipped)
    }

    fn is_allowed(&self, id: &ObjectId) -> bool {
        self.client.limits.as_ref().is_none_or(|it| it.namespaces.contains(&id.namespace))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let NodeCore { holds, holder, config, .. } = &*self.shared;
        let patience = Duration::from_millis(config.pins_kept_ms);
        for owner in &self.owners {
            holds.stand_no_more(*owner, || holder.let_go(*owner, patience));
        }
    }
}

fn parcel(lent: &Result<Option<LentObject>, StoreError>) -> Parcel {
    match lent {
        Ok(Some(lent)) => Parcel::Follows { header: *lent.header(), served: lent.served() },
        Ok(None) => Parcel::Later,
        Err(error) => Parcel::Failed(error.clone()),
    }
}

/// Converts a length; one that is too large for this machine is too large for its store.
fn clamp(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}
