//! Transfers between a client's pages and one node.

mod direct;

use std::sync::Arc;
use std::time::Duration;

use super::codec::Malformed;
use super::link::{LinkError, in_time};
use super::messages::{Answer, IDS_MAX, Item, Offer, Parcel, Request};
use super::peer::{Away, Peer, PeerCall, Purpose};
use terrace_cache::PrefixDigest;
use terrace_l3::{
    Get, GetOptions, Header, Mismatch, ObjectId, Put, PutOptions, Removal, Served, StoreError,
    Stored, Target,
};

/// Maximum payload that is requested or offered in one call.
const CALL_BYTES: usize = 64 << 20;

/// Number of consecutive "later" answers after which a node is not asked again.
const LATERS_MAX: u32 = 100;

/// An object of a batch.
#[derive(Debug)]
pub(super) struct BatchItem<T, R> {
    /// Index in the batch.
    pub(super) number: usize,
    /// Request for the object.
    pub(super) job: T,
    /// Result; `None` while it is unknown.
    pub(super) result: Option<Result<R, StoreError>>,
}

impl<T, R> BatchItem<T, R> {
    pub(super) fn new(number: usize, job: T) -> Self {
        Self { number, job, result: None }
    }
}

/// An object to read.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) id: ObjectId,
    pub(super) length: usize,
    /// Prefix that it must be the KV of.
    pub(super) prefix: Option<PrefixDigest>,
    /// Target of its bytes. `None` only if an adapter did not release it.
    pub(super) target: Option<Target>,
}

impl From<Get> for Wanted {
    fn from(Get { id, target, prefix }: Get) -> Self {
        Self { id, length: target.len(), prefix, target: Some(target) }
    }
}

impl Wanted {
    fn bytes(&mut self) -> &mut [u8] {
        self.target.as_mut().expect("it is there while a result is waited for")
    }
}

pub(super) type Got = BatchItem<Wanted, Served>;
pub(super) type Sent = BatchItem<Put, Stored>;

impl Peer {
    /// Reads objects from this node. All have a result afterwards.
    pub(super) async fn get(
        self: &Arc<Self>,
        mut parts: Vec<Got>,
        options: GetOptions,
    ) -> Vec<Got> {
        let mut laters = Laters::default();
        while laters.go_on(&mut parts) {
            let mut some = unanswered(&mut parts, |get| get.length);
            let asked = self.get_some(&mut some, options).await;
            if asked == Err(Away) {
                give_up(&mut parts, &StoreError::HolderAway);
            }
        }
        let mut suspects: Vec<ObjectId> = Vec::new();
        let mut foreign: Vec<ObjectId> = Vec::new();
        for part in &parts {
            match part.result {
                // The object is sound, so the node would keep it and never accept the wanted one
                // under this id.
                Some(Err(StoreError::Corrupt(Mismatch::Prefix))) => foreign.push(part.job.id),
                Some(Err(StoreError::Corrupt(_))) => suspects.push(part.job.id),
                Some(Ok(_) | Err(_)) | None => {}
            }
        }
        if !foreign.is_empty() {
            let objects = foreign.len();
            let limit_ms = self.config.control_timeout_ms;
            let removal = Request::Remove { removal: Removal::Forced, ids: foreign };
            self.change(removal, objects, limit_ms).await;
        }
        if !suspects.is_empty() {
            // The bytes may have been damaged on either side or in between: the node verifies its
            // copy.
            let objects = suspects.len();
            let limit_ms = self.config.control_timeout_ms;
            self.change(Request::Suspect(suspects), objects, limit_ms).await;
        }
        parts
    }

    async fn get_some(
        self: &Arc<Self>,
        parts: &mut [&mut Got],
        options: GetOptions,
    ) -> Result<(), Away> {
        loop {
            let mut call = self.call(Purpose::Transfer).await?;
            let bytes = parts.iter().map(|part| part.job.length).sum();
            let limit_ms = self.config.get_timeout_ms;
            let wait = options.promotion_wait.unwrap_or_default();
            let limit = wait + Duration::from_millis(limit_ms) + call.link.limit(bytes);
            match in_time(limit, get(&mut call, parts, options, limit_ms)).await {
                Ok(()) => {
                    call.end();
                    return Ok(());
                }
                Err(error) if call.is_stale(&error) => {}
                Err(error) => return Err(call.failed(&error).await),
            }
        }
    }

    /// Stores objects on this node. All have a result afterwards.
    pub(super) async fn put(
        self: &Arc<Self>,
        mut parts: Vec<Sent>,
        options: PutOptions,
    ) -> Vec<Sent> {
        let mut laters = Laters::default();
        while laters.go_on(&mut parts) {
            let mut some = unanswered(&mut parts, |put| put.source.len());
            if self.put_some(&mut some, options).await == Err(Away) {
                give_up(&mut parts, &StoreError::HolderAway);
            }
        }
        parts
    }

    async fn put_some(
        self: &Arc<Self>,
        parts: &mut [&mut Sent],
        options: PutOptions,
    ) -> Result<(), Away> {
        loop {
            let mut call = self.call(Purpose::Transfer).await?;
            let bytes = parts.iter().map(|part| part.job.source.len()).sum();
            let limit_ms = self.config.put_timeout_ms;
            // The node has the time limit twice: to find room, and to store.
            let limit = Duration::from_millis(2 * limit_ms) + call.link.limit(bytes);
            match in_time(limit, put(&mut call, parts, options, limit_ms)).await {
                Ok(()) => {
                    call.end();
                    return Ok(());
                }
                Err(error) if call.is_stale(&error) => {}
                Err(error) => return Err(call.failed(&error).await),
            }
        }
    }
}

async fn get(
    call: &mut PeerCall<'_>,
    parts: &mut [&mut Got],
    options: GetOptions,
    limit_ms: u64,
) -> Result<(), LinkError> {
    let item =
        |part: &&mut Got| Item { id: part.job.id, length: part.job.length as u64, prefix: None };
    let wanted = parts.iter().map(item).collect();
    let promotion_wait = options.promotion_wait;
    let patience = Duration::from_millis(limit_ms) + promotion_wait.unwrap_or_default();
    if direct::can_read(call.peer, parts)
        && let Some(direct) = call.direct(patience).await?
    {
        let request = Request::Lend { promotion_wait, wanted };
        return direct::get(call, &direct, &request, parts, patience).await;
    }
    let request = Request::Get { promotion_wait, wanted };
    let parcels = match call.exchange(&request, patience).await? {
        Answer::Parcels(parcels) if parcels.len() == parts.len() => parcels,
        _ => return Err(Malformed::Kind(request.kind()).into()),
    };
    let follows = |parcel: &Parcel| matches!(parcel, Parcel::Follows { .. });
    let mut targets: Vec<&mut [u8]> = parts
        .iter_mut()
        .zip(&parcels)
        .filter(|(_, parcel)| follows(parcel))
        .map(|(part, _)| part.job.bytes())
        .collect();
    let mut checksums = call.link.receive_payloads(&mut targets).await?.into_iter();
    settle(parts, parcels, |_| checksums.next().expect("one for each that followed"));
    Ok(())
}

/// Sets the results of requested objects, whose payloads have been received.
fn settle(
    parts: &mut [&mut Got],
    parcels: Vec<Parcel>,
    mut checksum: impl FnMut(&mut [u8]) -> u64,
) {
    for (part, parcel) in parts.iter_mut().zip(parcels) {
        part.result = match parcel {
            Parcel::Follows { header, served } => {
                let checksum = checksum(part.job.bytes());
                let Wanted { id, length, prefix, .. } = &part.job;
                let verified = Header::verify(&header, id, *length as u64)
                    .and_then(|header| header.verify_prefix(*prefix))
                    .and_then(|header| header.verify_checksum(checksum));
                Some(verified.map(|()| served).map_err(StoreError::Corrupt))
            }
            Parcel::Later => None,
            Parcel::Failed(error) => Some(Err(error)),
        };
    }
}

async fn put(
    call: &mut PeerCall<'_>,
    parts: &mut [&mut Sent],
    options: PutOptions,
    limit_ms: u64,
) -> Result<(), LinkError> {
    let patience = Duration::from_millis(limit_ms);
    let item = |part: &&mut Sent| Item {
        id: part.job.id,
        length: part.job.source.len() as u64,
        prefix: part.job.prefix(),
    };
    let offers = parts.iter().map(item).collect();
    if let Some(regions) = direct::regions(call.peer, parts)
        && call.direct(patience).await?.is_some()
    {
        let request = Request::Fetch { options, offers };
        return direct::put(call, &regions, &request, parts, patience).await;
    }
    let request = Request::Put { options, offers };
    let offers = match call.exchange(&request, patience).await? {
        Answer::Offers(offers) if offers.len() == parts.len() => offers,
        _ => return Err(Malformed::Kind(request.kind()).into()),
    };
    let payloads: Vec<&[u8]> = parts
        .iter()
        .zip(&offers)
        .filter(|(_, offer)| **offer == Offer::Wanted)
        .map(|(part, _)| &part.job.source[..])
        .collect();
    let expected = payloads.len();
    let mut stored = Vec::new().into_iter();
    if expected > 0 {
        let checksums = call.link.send_payloads(&payloads).await?;
        let request = Request::Checksums(checksums);
        stored = match call.exchange(&request, patience).await? {
            Answer::Stored(stored) if stored.len() == expected => stored.into_iter(),
            _ => return Err(Malformed::Kind(request.kind()).into()),
        };
    }
    settle_offers(parts, offers, stored);
    Ok(())
}

/// Sets the results of offered objects, given the results of those that were wanted.
fn settle_offers(
    parts: &mut [&mut Sent],
    offers: Vec<Offer>,
    mut stored: impl Iterator<Item = Result<Stored, StoreError>>,
) {
    for (part, offer) in parts.iter_mut().zip(offers) {
        part.result = match offer {
            Offer::Wanted => stored.next(),
            Offer::There => Some(Ok(Stored::AlreadyThere)),
            Offer::Later => None,
            Offer::Failed(error) => Some(Err(error)),
        };
    }
}

/// Next objects without a result, as many as fit in one call.
fn unanswered<T, R>(
    parts: &mut [BatchItem<T, R>],
    bytes: impl Fn(&T) -> usize,
) -> Vec<&mut BatchItem<T, R>> {
    let mut left = CALL_BYTES;
    let mut some: Vec<&mut BatchItem<T, R>> = Vec::new();
    for part in parts.iter_mut().filter(|part| part.result.is_none()) {
        let bytes = bytes(&part.job);
        if some.len() == IDS_MAX || (bytes > left && !some.is_empty()) {
            break;
        }
        left = left.saturating_sub(bytes);
        some.push(part);
    }
    some
}

fn give_up<T, R>(parts: &mut [BatchItem<T, R>], error: &StoreError) {
    for part in parts.iter_mut().filter(|part| part.result.is_none()) {
        part.result = Some(Err(error.clone()));
    }
}

/// Limit on repeated requests.
#[derive(Debug, Default)]
struct Laters {
    left_before: Option<usize>,
    in_vain: u32,
}

impl Laters {
    /// Returns true if objects are left to request, and the limit is not reached.
    fn go_on<T, R>(&mut self, parts: &mut [BatchItem<T, R>]) -> bool {
        let left = parts.iter().filter(|part| part.result.is_none()).count();
        self.in_vain = if self.left_before == Some(left) { self.in_vain + 1 } else { 0 };
        self.left_before = Some(left);
        if self.in_vain == LATERS_MAX {
            give_up(parts, &StoreError::Full);
        }
        left > 0 && self.in_vain < LATERS_MAX
    }
}
