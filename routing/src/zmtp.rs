//! ZeroMQ's wire protocol, ZMTP 3, as far as events need it: greeting, frames and subscriptions,
//! without encryption.
//!
//! It is small enough to implement here. A library would have unbounded queues and would hide
//! missed batches, which must be detected.

use std::io;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Longest duration of the greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time without progress of a write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
const GREETING_BYTES: usize = 64;
/// Largest property, subscription or request.
pub(crate) const SMALL_BYTES_MAX: usize = 64 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Socket type of one side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Publisher,
    Subscriber,
    /// Answers requests.
    Router,
    /// Sends requests.
    Dealer,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Publisher => "PUB",
            Self::Subscriber => "SUB",
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
        }
    }

    /// Returns whether the other side's socket type is compatible.
    fn accepts(self, other: &[u8]) -> bool {
        let accepted: &[&[u8]] = match self {
            Self::Publisher => &[b"SUB", b"XSUB"],
            Self::Subscriber => &[b"PUB", b"XPUB"],
            Self::Router => &[b"DEALER", b"REQ", b"ROUTER"],
            Self::Dealer => &[b"ROUTER", b"REP", b"DEALER"],
        };
        accepted.contains(&other)
    }
}

/// A received item: the frames of a message, or a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Incoming {
    Message(Vec<Bytes>),
    Command(Bytes),
}

/// Receiving half. Dropping a call loses no bytes.
#[derive(Debug)]
pub(crate) struct Reader {
    half: OwnedReadHalf,
    buffer: BytesMut,
    frames: Vec<Bytes>,
    bytes_max: usize,
}

/// Sending half.
#[derive(Debug)]
pub(crate) struct Writer(OwnedWriteHalf);

/// Performs the greeting.
///
/// # Errors
/// Fails if it takes too long or the peer is incompatible.
pub(crate) async fn meet(stream: TcpStream, role: Role) -> io::Result<(Reader, Writer)> {
    let met = tokio::time::timeout(GREETING_TIMEOUT, introduce(stream, role));
    met.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn introduce(stream: TcpStream, role: Role) -> io::Result<(Reader, Writer)> {
    let (half, write) = stream.into_split();
    let buffer = BytesMut::new();
    let mut reader = Reader { half, buffer, frames: Vec::new(), bytes_max: SMALL_BYTES_MAX };
    let mut writer = Writer(write);
    writer.send(&greeting()).await?;
    while reader.buffer.len() < GREETING_BYTES {
        reader.more().await?;
    }
    let theirs = reader.buffer.split_to(GREETING_BYTES);
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 {
        return Err(malformed("the other side does not support ZMTP 3"));
    }
    if theirs[12..32] != greeting()[12..32] {
        return Err(malformed(
            "the other side requires encryption, which is not supported for events",
        ));
    }
    writer.send(&ready(role)).await?;
    let Incoming::Command(command) = reader.next().await? else {
        return Err(malformed("a message arrived before the handshake"));
    };
    match socket_type(&command) {
        Some(other) if role.accepts(other) => Ok((reader, writer)),
        Some(_) | None => Err(malformed("the other side has the wrong socket type")),
    }
}

fn malformed(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Version 3.0, in which subscriptions are messages, whatever the peer supports.
fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn ready(role: Role) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [("Socket-Type", role.name()), ("Identity", "")] {
        body.push(name.len() as u8);
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(&(value.len() as u32).to_be_bytes());
        body.extend_from_slice(value.as_bytes());
    }
    [&[COMMAND, body.len() as u8][..], &body].concat()
}

/// Returns the socket type in the peer's `READY` command.
fn socket_type(command: &[u8]) -> Option<&[u8]> {
    let mut rest = command.strip_prefix(b"\x05READY")?;
    loop {
        let (&length, after) = rest.split_first()?;
        let (name, after) = after.split_at_checked(usize::from(length))?;
        let (length, after) = after.split_first_chunk::<4>()?;
        let (value, after) = after.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(value);
        }
        rest = after;
    }
}

/// Encodes a message.
pub(crate) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (place, frame) in frames.iter().enumerate() {
        let more = if place + 1 < frames.len() { MORE } else { 0 };
        match u8::try_from(frame.len()) {
            Ok(length) => bytes.extend_from_slice(&[more, length]),
            Err(_) => {
                bytes.push(more | LONG);
                bytes.extend_from_slice(&(frame.len() as u64).to_be_bytes());
            }
        }
        bytes.extend_from_slice(frame);
    }
    bytes
}

/// Encodes a subscription to a topic prefix.
pub(crate) fn subscription(topic: &[u8]) -> Vec<u8> {
    message(&[&[&[1], topic].concat()])
}

/// Topic prefixes of a subscriber.
#[derive(Debug, Default)]
pub(crate) struct Subscriptions(Vec<Bytes>);

impl Subscriptions {
    const MAX: usize = 64;

    /// # Errors
    /// Fails if there are too many.
    pub(crate) fn hear(&mut self, incoming: &Incoming) -> io::Result<()> {
        let (subscribes, topic) = match incoming {
            Incoming::Message(frames) => match frames.first().and_then(|frame| frame.split_first())
            {
                Some((1, _)) => (true, frames[0].slice(1..)),
                Some((0, _)) => (false, frames[0].slice(1..)),
                Some(_) | None => return Ok(()),
            },
            Incoming::Command(command) if command.starts_with(b"\x09SUBSCRIBE") => {
                (true, command.slice(10..))
            }
            Incoming::Command(command) if command.starts_with(b"\x06CANCEL") => {
                (false, command.slice(7..))
            }
            Incoming::Command(_) => return Ok(()),
        };
        if !subscribes {
            let known = self.0.iter().position(|known| *known == topic);
            known.map(|place| self.0.swap_remove(place));
        } else if self.0.len() < Self::MAX {
            self.0.push(topic);
        } else {
            return Err(malformed("too many subscriptions"));
        }
        Ok(())
    }

    pub(crate) fn want(&self, topic: &[u8]) -> bool {
        self.0.iter().any(|wanted| topic.starts_with(wanted))
    }
}

impl Reader {
    /// Sets the largest message from here on.
    pub(crate) fn allow(&mut self, bytes_max: usize) {
        self.bytes_max = bytes_max;
    }

    /// Returns the next item.
    ///
    /// # Errors
    /// Fails if the peer is gone or exceeds a limit.
    pub(crate) async fn next(&mut self) -> io::Result<Incoming> {
        loop {
            if let Some(incoming) = self.parse()? {
                return Ok(incoming);
            }
            self.more().await?;
        }
    }

    async fn more(&mut self) -> io::Result<()> {
        match self.half.read_buf(&mut self.buffer).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Parses received frames until a message is complete.
    fn parse(&mut self) -> io::Result<Option<Incoming>> {
        while let Some((flags, head, length)) = self.frame_head() {
            let held: usize = self.frames.iter().map(Bytes::len).sum();
            // Each frame has a cost, so that empty frames are bounded too.
            let overhead = 16 * self.frames.len();
            if length > self.bytes_max as u64 || held + overhead + length as usize > self.bytes_max
            {
                return Err(malformed("the other side sends more than it may"));
            }
            if self.buffer.len() < head + length as usize {
                return Ok(None);
            }
            self.buffer.advance(head);
            let frame = self.buffer.split_to(length as usize).freeze();
            if flags & COMMAND != 0 {
                return Ok(Some(Incoming::Command(frame)));
            }
            self.frames.push(frame);
            if flags & MORE == 0 {
                return Ok(Some(Incoming::Message(std::mem::take(&mut self.frames))));
            }
        }
        Ok(None)
    }

    /// Returns the flags of the next frame, the length of its head and of its body.
    fn frame_head(&self) -> Option<(u8, usize, u64)> {
        let (&flags, rest) = self.buffer.split_first()?;
        match flags & LONG == 0 {
            true => Some((flags, 2, u64::from(*rest.first()?))),
            false => Some((flags, 9, u64::from_be_bytes(*rest.first_chunk()?))),
        }
    }
}

impl Writer {
    /// Sends an encoded message.
    ///
    /// # Errors
    /// Fails if the peer is gone or makes no progress for too long.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let sent = tokio::time::timeout(WRITE_TIMEOUT, self.0.write(rest)).await;
            match sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                sent => rest = &rest[sent..],
            }
        }
        Ok(())
    }

    /// Answers a heartbeat, if the item is one.
    ///
    /// # Errors
    /// Fails if the peer is gone.
    pub(crate) async fn answer(&mut self, incoming: &Incoming) -> io::Result<()> {
        let Incoming::Command(command) = incoming else { return Ok(()) };
        let Some(ping) = command.strip_prefix(b"\x04PING") else { return Ok(()) };
        // Two bytes are the peer's timeout; up to 16 further bytes are sent back.
        let context = ping.get(2..).unwrap_or_default();
        let body = [b"\x04PONG", &context[..context.len().min(16)]].concat();
        self.send(&[&[COMMAND, body.len() as u8][..], &body].concat()).await
    }
}
