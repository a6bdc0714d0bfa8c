//! Subscription to the events of one worker, with recovery of missed batches.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;

use crate::endpoint::Endpoint;
use crate::zmtp::{self, Incoming, Reader, Role, Writer};

/// Largest batch: the whole content of a cache of about twenty million tokens.
const BATCH_BYTES_MAX: usize = 256 << 20;
/// Longest wait for the next part of a replay.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(30);
/// Delay before a replay request, so that the worker has registered the subscription.
const SUBSCRIBE_DELAY: Duration = Duration::from_millis(100);
const AGAIN_AT_FIRST: Duration = Duration::from_millis(200);
const AGAIN_AT_MOST: Duration = Duration::from_secs(5);

/// Addresses of a worker's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Address of the event stream.
    pub events: Endpoint,
    /// Address of the replay service.
    pub replay: Option<Endpoint>,
    /// Topic prefix to subscribe to; all topics if empty.
    pub topic: String,
}

/// An item of a worker's stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The next batch.
    Batch {
        /// Number.
        seq: u64,
        /// Bytes, for [`decode`](crate::decode).
        payload: Bytes,
    },
    /// Missed batches cannot be recovered: the state of this worker must be dropped.
    Forget,
}

/// Statistics of a subscription.
#[derive(Debug, Default)]
pub struct FollowStats {
    /// True while connected.
    pub is_connected: AtomicBool,
    /// Received batches.
    pub batches: AtomicU64,
    /// Gaps in the numbers.
    pub gaps: AtomicU64,
    /// Successful replays.
    pub replays: AtomicU64,
    /// Number of times that the state was dropped.
    pub forgotten: AtomicU64,
}

/// Subscribes to a worker while this is polled, and passes its items to `hear` in order. It
/// reconnects repeatedly. A worker that was disconnected may be another process, so a new
/// connection starts from scratch.
pub async fn follow(source: &Source, stats: &FollowStats, mut hear: impl FnMut(Heard)) {
    let mut again = AGAIN_AT_FIRST;
    loop {
        let mut following = Following { source, stats, hear: &mut hear, expected: None };
        let ended = following.run().await;
        let has_heard = following.expected.is_some();
        if stats.is_connected.swap(false, Relaxed) {
            following.forget();
        }
        tracing::debug!("the KV event stream of {} ended: {ended:?}", source.events);
        again = if has_heard { AGAIN_AT_FIRST } else { (again * 2).min(AGAIN_AT_MOST) };
        tokio::time::sleep(again).await;
    }
}

/// State of one connection.
struct Following<'a, H> {
    source: &'a Source,
    stats: &'a FollowStats,
    hear: &'a mut H,
    expected: Option<u64>,
}

impl<H: FnMut(Heard)> Following<'_, H> {
    /// Runs until the connection ends.
    async fn run(&mut self) -> io::Result<()> {
        let stream = self.source.events.connect().await?;
        let (mut reader, mut writer) = zmtp::meet(stream, Role::Subscriber).await?;
        reader.allow(BATCH_BYTES_MAX);
        writer.send(&zmtp::subscription(self.source.topic.as_bytes())).await?;
        self.stats.is_connected.store(true, Relaxed);
        if self.source.replay.is_some() {
            tokio::time::sleep(SUBSCRIBE_DELAY).await;
            if let Err(error) = self.replay(0).await {
                tracing::warn!(
                    "{} cannot replay its earlier KV events: {error}",
                    self.source.events
                );
            }
        }
        loop {
            let incoming = reader.next().await?;
            writer.answer(&incoming).await?;
            let Incoming::Message(frames) = incoming else { continue };
            let [_topic, seq, payload] = &frames[..] else { continue };
            let Some(seq) = number(seq) else { continue };
            self.live(seq, payload.clone()).await;
        }
    }

    async fn live(&mut self, seq: u64, payload: Bytes) {
        if self.expected.is_some_and(|expected| seq > expected) {
            self.stats.gaps.fetch_add(1, Relaxed);
            let expected = self.expected.unwrap_or_default();
            let replayed = self.replay(expected).await;
            if self.expected.is_some_and(|expected| seq > expected) {
                tracing::warn!(
                    "batches {expected} to {seq} of {} are lost: {replayed:?}",
                    self.source.events
                );
                self.forget();
            }
        }
        // Skips batches that the replay included.
        if self.expected.is_none_or(|expected| seq >= expected) {
            self.batch(seq, payload);
        }
    }

    /// Requests all batches from a number on.
    async fn replay(&mut self, start: u64) -> io::Result<()> {
        let Some(endpoint) = &self.source.replay else {
            return Err(io::Error::other("no replay endpoint is configured"));
        };
        let late = || io::Error::from(io::ErrorKind::TimedOut);
        let asking = async {
            let (mut reader, mut writer) =
                zmtp::meet(endpoint.connect().await?, Role::Dealer).await?;
            reader.allow(BATCH_BYTES_MAX);
            writer.send(&zmtp::message(&[b"", &start.to_be_bytes()])).await?;
            Ok::<(Reader, Writer), io::Error>((reader, writer))
        };
        let (mut reader, mut writer) =
            tokio::time::timeout(REPLAY_TIMEOUT, asking).await.map_err(|_| late())??;
        let mut is_first = true;
        loop {
            let next = tokio::time::timeout(REPLAY_TIMEOUT, reader.next());
            let incoming = next.await.map_err(|_| late())??;
            writer.answer(&incoming).await?;
            let Incoming::Message(frames) = incoming else { continue };
            // vLLM includes the topic, SGLang does not.
            let ([_, seq, payload] | [_, _, seq, payload]) = &frames[..] else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            if payload.is_empty() {
                break;
            }
            let seq = number(seq).ok_or(io::ErrorKind::InvalidData)?;
            // The replay starts later than requested. Unless it starts with a reset, the batches in
            // between are lost.
            if is_first && start > 0 && seq > start && !begins_anew(payload) {
                self.forget();
            }
            is_first = false;
            self.batch(seq, payload.clone());
        }
        self.stats.replays.fetch_add(1, Relaxed);
        Ok(())
    }

    fn batch(&mut self, seq: u64, payload: Bytes) {
        self.stats.batches.fetch_add(1, Relaxed);
        self.expected = Some(seq + 1);
        (self.hear)(Heard::Batch { seq, payload });
    }

    fn forget(&mut self) {
        self.stats.forgotten.fetch_add(1, Relaxed);
        (self.hear)(Heard::Forget);
    }
}

fn number(frame: &[u8]) -> Option<u64> {
    <[u8; 8]>::try_from(frame).ok().map(u64::from_be_bytes).filter(|&number| number != u64::MAX)
}

fn begins_anew(payload: &[u8]) -> bool {
    let batch = crate::decode(payload);
    batch.is_ok_and(|batch| matches!(batch.events.first(), Some(crate::Event::Cleared)))
}
