//! Payload transfers by RDMA, on the node.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Expected, Session};
use crate::codec::Malformed;
use crate::direct::{Direct, FailedRead, HeldForReads};
use crate::link::{LinkError, in_time};
use crate::messages::{Afar, Answer, FRAME_BYTES_MAX, Item, LINK_BYTES, Request};
use terrace_l3::backend::LentObject;
use terrace_l3::backend::payload_checksum;
use terrace_l3::{GetOptions, PutOptions, Target};

impl Session {
    /// Links with the client, if this machine has an adapter. A link gives access to all registered
    /// memory, so restricted clients get none.
    pub(super) fn connect_direct(&mut self, peer: &[u8; LINK_BYTES]) -> Option<[u8; LINK_BYTES]> {
        self.direct = None;
        let adapter = self.shared.adapter.as_ref().filter(|_| self.client.limits.is_none())?;
        let linked = adapter.link().and_then(|direct| direct.connect(peer).map(|()| direct));
        match linked {
            Ok(direct) => {
                let end = direct.end();
                self.direct = Some(Arc::new(direct));
                Some(end)
            }
            Err(error) => {
                tracing::warn!("pages of a client use TCP: {error}");
                None
            }
        }
    }

    /// Lends objects for the client to read, until it has read them, its time limit passes, or it
    /// disconnects.
    pub(super) async fn lend(
        &mut self,
        wanted: Vec<Item>,
        options: GetOptions,
    ) -> Result<(), LinkError> {
        let direct = self.direct(Request::Taken.kind())?;
        let (parcels, (lent, _permit)) = self.find(wanted, options).await;
        let places = lent.iter().map(|lent| self.place(lent)).collect::<Option<Vec<_>>>();
        let places = places.expect("all memory that objects are lent from is registered");
        let (nothing, bytes) = (lent.is_empty(), lent.iter().map(|lent| lent.source().len()).sum());
        let held = HeldForReads::new(&direct, lent);
        self.reply(Answer::Lent(parcels, places), &[]).await?;
        if !nothing {
            let lease = Duration::from_millis(self.shared.config.rdma_lease_ms);
            let limit = lease + self.link.stall;
            let (kind, body) = in_time(limit, self.link.receive(lease)).await?;
            match Request::decode(kind, body)? {
                Request::Taken => {}
                other => return Err(Malformed::Kind(other.kind()).into()),
            }
        }
        drop(held.release());
        self.count(bytes);
        self.shared.counters.sent_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.shared.holder.note_change();
        Ok(())
    }

    /// Reads objects from the client's memory directly into their final memory.
    pub(super) async fn fetch(
        &mut self,
        offers: Vec<Item>,
        options: PutOptions,
    ) -> Result<(), LinkError> {
        let direct = self.direct(Request::Places(Vec::new()).kind())?;
        let (answers, expected) = self.reserve(offers, options).await;
        self.reply(Answer::Offers(answers), &[]).await?;
        if expected.is_empty() {
            return Ok(());
        }
        let limit = self.link.limit(FRAME_BYTES_MAX);
        let (kind, body) = in_time(limit, self.link.receive(self.link.stall)).await?;
        let places = match Request::decode(kind, body)? {
            Request::Places(places) if places.len() == expected.len() => places,
            other => return Err(Malformed::Kind(other.kind()).into()),
        };
        let Some((expected, checksums)) = read(&direct, expected, places).await else {
            self.direct = None;
            self.shared.holder.note_change();
            return self.reply(Answer::Linked(None), &[]).await;
        };
        self.count(expected.iter().map(|expected| expected.target.len()).sum());
        let results = self.keep(expected, checksums, options).await;
        self.reply(Answer::Stored(results), &[]).await
    }

    /// Link that a request needs.
    fn direct(&self, kind: u8) -> Result<Arc<Direct>, LinkError> {
        self.direct.clone().ok_or_else(|| Malformed::Kind(kind).into())
    }

    fn place(&self, lent: &LentObject) -> Option<Afar> {
        let region = self.shared.adapter.as_ref()?.region(&lent.source().arena())?;
        Some(region.place(lent.source()))
    }

    fn count(&self, bytes: usize) {
        self.shared.counters.direct_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Reads payloads. Returns pairs of the client's checksums and those computed here.
async fn read(
    direct: &Arc<Direct>,
    expected: Vec<Expected>,
    places: Vec<(u64, Afar)>,
) -> Option<(Vec<Expected>, Vec<(u64, u64)>)> {
    let (mut rooms, mut reads): (Vec<_>, Vec<(Target, Afar)>) = (Vec::new(), Vec::new());
    for (Expected { id, prefix, room, target, permit }, (_, place)) in
        expected.into_iter().zip(&places)
    {
        rooms.push((id, prefix, room, permit));
        reads.push((target, *place));
    }
    // Slots must not be released while the adapter may write to them, even if this future is
    // dropped.
    let rooms = HeldForReads::new(direct, rooms);
    match direct.read(reads.into_iter()).await {
        Ok(targets) => {
            let seen = targets.iter().map(|target| payload_checksum(target));
            let checksums = places.iter().map(|(sent, _)| *sent).zip(seen).collect();
            let expected = rooms.release().into_iter().zip(targets);
            let expected = expected.map(|((id, prefix, room, permit), target)| Expected {
                id,
                prefix,
                room,
                target,
                permit,
            });
            Some((expected.collect(), checksums))
        }
        Err(FailedRead { message, targets }) => {
            tracing::warn!("a client's pages cannot be read by RDMA and use TCP: {message}");
            if targets.is_empty() {
                // The adapter has not released the targets, so their slots are lost.
                std::mem::forget(rooms);
            }
            None
        }
    }
}
