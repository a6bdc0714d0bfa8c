//! Payload transfers by RDMA, on the client.

use std::sync::Arc;
use std::time::Duration;

use super::{Got, Sent, settle, settle_offers};
use crate::codec::Malformed;
use crate::direct::{Direct, FailedRead, Region};
use crate::link::LinkError;
use crate::messages::{Answer, Offer, Parcel, Request};
use crate::peer::{Peer, PeerCall};
use terrace_l3::StoreError;
use terrace_l3::backend::payload_checksum;

/// Returns true if the adapter can read into all of these targets.
pub(super) fn can_read(peer: &Peer, parts: &[&mut Got]) -> bool {
    let Some(adapter) = peer.adapter() else { return false };
    let target = |part: &&mut Got| part.job.target.as_ref().map(|target| target.arena());
    parts
        .iter()
        .map(target)
        .all(|arena| arena.is_some_and(|arena| adapter.region(&arena).is_some()))
}

/// Registrations of the sources' memory, if all of it is registered.
pub(super) fn regions(peer: &Peer, parts: &[&mut Sent]) -> Option<Vec<Region>> {
    let adapter = peer.adapter()?;
    parts.iter().map(|part| adapter.region(&part.job.source.arena())).collect()
}

/// Has the node lend objects, and reads them. Objects that cannot be read get no result, and are
/// requested again by TCP.
pub(super) async fn get(
    call: &mut PeerCall<'_>,
    direct: &Arc<Direct>,
    request: &Request,
    parts: &mut [&mut Got],
    patience: Duration,
) -> Result<(), LinkError> {
    let (parcels, places) = match call.exchange(request, patience).await? {
        Answer::Lent(parcels, places) if parcels.len() == parts.len() => (parcels, places),
        _ => return Err(Malformed::Kind(request.kind()).into()),
    };
    let follows = |parcel: &Parcel| matches!(parcel, Parcel::Follows { .. });
    if places.len() != parcels.iter().filter(|parcel| follows(parcel)).count() {
        return Err(Malformed::Kind(request.kind()).into());
    }
    if places.is_empty() {
        settle(parts, parcels, |_| unreachable!("nothing was lent"));
        return Ok(());
    }
    let lent = parts.iter_mut().zip(&parcels).filter(|(_, parcel)| follows(parcel));
    let mut lent: Vec<&mut Got> = lent.map(|(part, _)| &mut **part).collect();
    let bytes = lent.iter().map(|part| part.job.length).sum();
    let targets = lent.iter_mut().map(|part| part.job.target.take().expect("it was checked"));
    let targets: Vec<_> = targets.collect();
    let read = direct.read(targets.into_iter().zip(places)).await;
    let (targets, error) = match read {
        Ok(targets) => (targets, None),
        Err(FailedRead { message, targets }) => (targets, Some(message)),
    };
    // If not all were returned, every target counts as lost.
    let mut targets = targets.into_iter();
    lent.iter_mut().for_each(|part| part.job.target = targets.next());
    let Some(error) = error else {
        call.peer.count_direct(bytes);
        settle(parts, parcels, |payload| payload_checksum(payload));
        return call.send(&Request::Taken).await;
    };
    for part in lent.iter_mut().filter(|part| part.job.target.is_none()) {
        part.result = Some(Err(StoreError::HolderAway));
    }
    call.lose_direct(&error);
    call.send(&Request::Taken).await
}

/// Offers objects for the node to read. Objects that it cannot read get no result, and are offered
/// again by TCP.
pub(super) async fn put(
    call: &mut PeerCall<'_>,
    regions: &[Region],
    request: &Request,
    parts: &mut [&mut Sent],
    patience: Duration,
) -> Result<(), LinkError> {
    let offers = match call.exchange(request, patience).await? {
        Answer::Offers(offers) if offers.len() == parts.len() => offers,
        _ => return Err(Malformed::Kind(request.kind()).into()),
    };
    let wanted = parts.iter().zip(regions).zip(&offers);
    let wanted = wanted.filter(|(_, offer)| **offer == Offer::Wanted);
    let places: Vec<_> = wanted
        .map(|((part, region), _)| {
            (payload_checksum(&part.job.source), region.place(&part.job.source))
        })
        .collect();
    if places.is_empty() {
        settle_offers(parts, offers, std::iter::empty());
        return Ok(());
    }
    let expected = places.len();
    let bytes: usize = parts
        .iter()
        .zip(&offers)
        .filter(|(_, offer)| **offer == Offer::Wanted)
        .map(|(part, _)| part.job.source.len())
        .sum();
    let request = Request::Places(places);
    match call.exchange(&request, patience + READING).await? {
        Answer::Stored(stored) if stored.len() == expected => {
            call.peer.count_direct(bytes);
            settle_offers(parts, offers, stored.into_iter());
        }
        Answer::Linked(None) => {
            call.lose_direct("the node cannot read from here");
            settle_offers(parts, offers, std::iter::empty());
        }
        _ => return Err(Malformed::Kind(request.kind()).into()),
    }
    Ok(())
}

/// Time that a node may take to read offered objects, in addition to the time to store them. Its
/// adapter gives up sooner if it makes no progress.
const READING: Duration = Duration::from_secs(15);
