//! A connection between a client and a node: authenticated frames, with payloads between them.
//!
//! Each frame has a MAC over its content and position. Payloads have none: frames carry their
//! checksums.

use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut};
use std::time::Duration;

use crc_fast::{CrcAlgorithm, Digest};
use smallvec::SmallVec;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::codec::Malformed;
use super::direct::Shortcut;
use super::handshake::{
    CHALLENGE_BYTES, Challenge, HELLO_BYTES, Hello, NodeSecret, PROOF_BYTES, SessionKeys, VERSION,
};
use super::messages::FRAME_BYTES_MAX;

const MAC_BYTES: usize = 16;

/// Number of bytes that are read or sent at a time, so that their checksum is computed while they
/// are in the cache.
const PIECE_BYTES: usize = 256 << 10;

/// Minimum rate of a transfer, in bytes per millisecond: 4 MB per second. Slower peers time out.
const BYTES_PER_MS_MIN: usize = 4_000;

/// Maximum number of memory pieces in one system call.
const PIECES: usize = 64;

/// Reason why a connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// The network failed, or the peer closed the connection.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer made no progress, or too little, for too long.
    #[error("no data was transferred, or too little, for {0:?}")]
    Stalled(Duration),
    /// The peer sent an invalid message.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// The peer uses another protocol version.
    #[error("the other side uses protocol version {0}, this one version {VERSION}")]
    Version(u16),
    /// The peer does not have the secret.
    #[error(
        "the handshake was refused: both sides need the same secret, and the node must know the \
         client's name if it has a list of clients"
    )]
    Refused,
    /// The node's objects were placed by another list than the client's.
    #[error(
        "the node was used with another list of nodes, other names or weights in it, or another number of copies"
    )]
    OtherList,
    /// The client sent a request without having been admitted.
    #[error("the client was not admitted, or the node's membership has changed since")]
    NotAdmitted,
    /// The peer is authenticated, but the node has no free connections.
    #[error("the node accepts no more connections: raise its --connections-max")]
    Crowded,
}

/// Authenticates the frames of one direction.
pub(super) struct Seal {
    key: [u8; 32],
    sequence: u64,
}

impl Seal {
    pub(super) fn new(key: [u8; 32]) -> Self {
        Self { key, sequence: 0 }
    }

    /// MAC of the next frame.
    fn code(&mut self, frame: &[u8]) -> [u8; MAC_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.sequence.to_le_bytes()).update(frame);
        self.sequence += 1;
        let hash = hasher.finalize();
        hash.as_bytes()[..MAC_BYTES].try_into().expect("a hash is longer")
    }

    /// Completes a frame that begins with room for its length.
    pub(super) fn close(&mut self, frame: &mut Vec<u8>) {
        let length = (frame.len() - 4) as u32;
        frame[..4].copy_from_slice(&length.to_le_bytes());
        let code = self.code(frame);
        frame.extend_from_slice(&code);
    }

    /// Verifies a complete frame and returns its kind and body.
    pub(super) fn open<'a>(&mut self, frame: &'a [u8]) -> Result<(u8, &'a [u8]), Malformed> {
        let at = frame.len().checked_sub(MAC_BYTES).ok_or(Malformed::Short)?;
        let (signed, code) = frame.split_at(at);
        let difference = self.code(signed).iter().zip(code).fold(0, |sum, (a, b)| sum | (a ^ b));
        if difference != 0 {
            return Err(Malformed::Forged);
        }
        let (kind, body) = signed[4..].split_first().ok_or(Malformed::Short)?;
        Ok((*kind, body))
    }
}

/// A connection after the handshake.
pub(super) struct NodeLink {
    stream: TcpStream,
    outgoing: Seal,
    incoming: Seal,
    /// Buffer for the frame that is being built or read; kept for reuse.
    frame: Vec<u8>,
    /// Maximum time without progress while the peer should make some.
    pub(super) stall: Duration,
    /// RDMA link of the client.
    pub(super) shortcut: Shortcut,
}

impl NodeLink {
    /// Authenticates this client to a node, and the node to this client.
    pub(super) async fn greet(
        stream: TcpStream,
        secret: &NodeSecret,
        hello: &Hello,
        stall: Duration,
    ) -> Result<Self, LinkError> {
        stream.set_nodelay(true)?;
        let hello = hello.encode();
        write_all(&stream, &hello, stall).await?;
        let mut challenge = [0; CHALLENGE_BYTES];
        read_exact(&stream, &mut challenge, stall).await?;
        let version = Challenge::decode(&challenge)?.version;
        if version != VERSION {
            return Err(LinkError::Version(version));
        }
        let agreement = SessionKeys::new(secret, &hello, &challenge);
        write_all(&stream, agreement.client_proof().as_bytes(), stall).await?;
        let mut proof = [0; PROOF_BYTES];
        match read_exact(&stream, &mut proof, stall).await {
            Err(LinkError::Io(_)) => return Err(LinkError::Refused),
            other => other?,
        }
        if agreement.node_proof() != blake3::Hash::from_bytes(proof) {
            return Err(LinkError::Refused);
        }
        let (outgoing, incoming) = (agreement.client_key(), agreement.node_key());
        Ok(Self::new(stream, Seal::new(outgoing), Seal::new(incoming), stall))
    }

    /// Authenticates a client by the secret that `secret_of` returns for its name, and this node to
    /// the client.
    pub(super) async fn welcome(
        stream: TcpStream,
        secret_of: impl FnOnce(&Hello) -> NodeSecret,
        stall: Duration,
    ) -> Result<(Self, Hello), LinkError> {
        stream.set_nodelay(true)?;
        enable_keepalive(&stream)?;
        let mut bytes = [0; HELLO_BYTES];
        read_exact(&stream, &mut bytes, stall).await?;
        let hello = Hello::decode(&bytes)?;
        let challenge = Challenge::new()?.encode();
        write_all(&stream, &challenge, stall).await?;
        if hello.version != VERSION {
            return Err(LinkError::Version(hello.version));
        }
        let agreement = SessionKeys::new(&secret_of(&hello), &bytes, &challenge);
        let mut proof = [0; PROOF_BYTES];
        read_exact(&stream, &mut proof, stall).await?;
        if agreement.client_proof() != blake3::Hash::from_bytes(proof) {
            return Err(LinkError::Refused);
        }
        write_all(&stream, agreement.node_proof().as_bytes(), stall).await?;
        let (outgoing, incoming) = (agreement.node_key(), agreement.client_key());
        Ok((Self::new(stream, Seal::new(outgoing), Seal::new(incoming), stall), hello))
    }

    fn new(stream: TcpStream, outgoing: Seal, incoming: Seal, stall: Duration) -> Self {
        let (frame, shortcut) = (Vec::new(), Shortcut::Untried);
        Self { stream, outgoing, incoming, frame, stall, shortcut }
    }

    /// Maximum duration of the transfer of `bytes` bytes, even with steady progress.
    pub(super) fn limit(&self, bytes: usize) -> Duration {
        self.stall + Duration::from_millis((bytes / BYTES_PER_MS_MIN) as u64)
    }

    /// Returns true if the peer has neither closed the connection nor sent anything unexpected.
    pub(super) fn is_quiet(&self) -> bool {
        let nothing = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
        self.stream.try_read(&mut [0]).is_err_and(|error| nothing(&error))
    }

    /// Waits until the peer sends something or closes the connection.
    pub(super) async fn wakes(&self) -> io::Result<()> {
        self.stream.readable().await
    }

    /// Sends a frame, followed by payloads.
    pub(super) async fn send(
        &mut self,
        kind: u8,
        encode: impl FnOnce(&mut Vec<u8>),
        payloads: &[&[u8]],
    ) -> Result<(), LinkError> {
        let mut frame = std::mem::take(&mut self.frame);
        frame.clear();
        frame.extend_from_slice(&[0, 0, 0, 0, kind]);
        encode(&mut frame);
        debug_assert!(frame.len() - 4 <= FRAME_BYTES_MAX);
        self.outgoing.close(&mut frame);
        let sent = self.send_pieces(&frame, payloads).await;
        self.frame = frame;
        sent
    }

    /// Sends payloads without a frame, and returns their checksums.
    pub(super) async fn send_payloads(
        &mut self,
        payloads: &[&[u8]],
    ) -> Result<Vec<u64>, LinkError> {
        let mut checksums = Vec::with_capacity(payloads.len());
        let mut pending: Vec<&[u8]> = Vec::new();
        let mut pending_bytes = 0;
        for payload in payloads {
            let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
            for piece in payload.chunks(PIECE_BYTES) {
                digest.update(piece);
                pending.push(piece);
                pending_bytes += piece.len();
                if pending_bytes >= PIECE_BYTES {
                    self.send_pieces(&[], &pending).await?;
                    pending.clear();
                    pending_bytes = 0;
                }
            }
            checksums.push(digest.finalize());
        }
        self.send_pieces(&[], &pending).await?;
        Ok(checksums)
    }

    async fn send_pieces(&self, first: &[u8], rest: &[&[u8]]) -> Result<(), LinkError> {
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(1 + rest.len());
        slices.push(IoSlice::new(first));
        slices.extend(rest.iter().map(|piece| IoSlice::new(piece)));
        let mut left = &mut slices[..];
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            let some = &left[..left.len().min(PIECES)];
            match self.stream.try_write_vectored(some) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
                Ok(sent) => IoSlice::advance_slices(&mut left, sent),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let writable = timeout(self.stall, self.stream.writable()).await;
                    writable.map_err(|_| LinkError::Stalled(self.stall))??;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Receives a frame and returns its kind and body. It must begin within `patience`.
    pub(super) async fn receive(&mut self, patience: Duration) -> Result<(u8, &[u8]), LinkError> {
        let mut length = [0; 4];
        read_exact(&self.stream, &mut length, patience).await?;
        let found = u32::from_le_bytes(length) as usize;
        if found > FRAME_BYTES_MAX {
            let max = FRAME_BYTES_MAX;
            return Err(Malformed::TooMuch { what: "a frame", found, max }.into());
        }
        let frame = &mut self.frame;
        frame.clear();
        frame.extend_from_slice(&length);
        frame.resize(4 + found + MAC_BYTES, 0);
        read_exact(&self.stream, &mut frame[4..], self.stall).await?;
        Ok(self.incoming.open(&self.frame)?)
    }

    /// Receives payloads into consecutive targets and returns their checksums.
    pub(super) async fn receive_payloads(
        &mut self,
        targets: &mut [&mut [u8]],
    ) -> Result<Vec<u64>, LinkError> {
        let mut arrival = PayloadProgress::default();
        while !arrival.is_complete(targets) {
            let read = self.stream.try_read_vectored(&mut arrival.next(targets));
            match read {
                Ok(0) => return Err(closed().into()),
                // Directly after the read, the bytes are in the cache.
                Ok(read) => arrival.received(targets, read),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let readable = timeout(self.stall, self.stream.readable()).await;
                    readable.map_err(|_| LinkError::Stalled(self.stall))??;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(arrival.checksums)
    }
}

impl fmt::Debug for NodeLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link {:?}", self.stream)
    }
}

/// Progress of the reception of payloads.
struct PayloadProgress {
    /// Checksums of complete payloads.
    checksums: Vec<u64>,
    /// Bytes received of the next payload, and their checksum.
    at: usize,
    digest: Digest,
}

impl Default for PayloadProgress {
    fn default() -> Self {
        Self { checksums: Vec::new(), at: 0, digest: Digest::new(CrcAlgorithm::Crc64Nvme) }
    }
}

impl PayloadProgress {
    fn is_complete(&mut self, targets: &[&mut [u8]]) -> bool {
        while targets.get(self.checksums.len()).is_some_and(|target| target.len() == self.at) {
            let digest = std::mem::replace(&mut self.digest, Digest::new(CrcAlgorithm::Crc64Nvme));
            self.checksums.push(digest.finalize());
            self.at = 0;
        }
        self.checksums.len() == targets.len()
    }

    /// Memory for the next bytes.
    fn next<'a>(&self, targets: &'a mut [&mut [u8]]) -> SmallVec<[IoSliceMut<'a>; 8]> {
        let mut left = PIECE_BYTES;
        let mut pieces = SmallVec::new();
        let mut start = self.at;
        for target in targets[self.checksums.len()..].iter_mut().take(PIECES) {
            let end = target.len().min(start + left);
            left -= end - start;
            pieces.push(IoSliceMut::new(&mut target[start..end]));
            if left == 0 {
                break;
            }
            start = 0;
        }
        pieces
    }

    /// Accounts for `bytes` received bytes.
    fn received(&mut self, targets: &[&mut [u8]], mut bytes: usize) {
        while bytes > 0 && !self.is_complete(targets) {
            let target = &targets[self.checksums.len()];
            let end = target.len().min(self.at + bytes);
            self.digest.update(&target[self.at..end]);
            bytes -= end - self.at;
            self.at = end;
        }
    }
}

/// Aborts a part of a call after `limit`, even if it makes progress.
pub(super) async fn in_time<T>(
    limit: Duration,
    part: impl Future<Output = Result<T, LinkError>>,
) -> Result<T, LinkError> {
    timeout(limit, part).await.unwrap_or(Err(LinkError::Stalled(limit)))
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the other side closed the connection")
}

/// Enables TCP keep-alive, to detect the failure of the peer's machine on an idle connection.
fn enable_keepalive(stream: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}

async fn read_exact(
    stream: &TcpStream,
    bytes: &mut [u8],
    stall: Duration,
) -> Result<(), LinkError> {
    let mut read = 0;
    while read < bytes.len() {
        match stream.try_read(&mut bytes[read..]) {
            Ok(0) => return Err(closed().into()),
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let readable = timeout(stall, stream.readable()).await;
                readable.map_err(|_| LinkError::Stalled(stall))??;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

async fn write_all(stream: &TcpStream, bytes: &[u8], stall: Duration) -> Result<(), LinkError> {
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.try_write(&bytes[sent..]) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero).into()),
            Ok(more) => sent += more,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let writable = timeout(stall, stream.writable()).await;
                writable.map_err(|_| LinkError::Stalled(stall))??;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(seal: &mut Seal, kind: u8, body: &[u8]) -> Vec<u8> {
        let mut frame = vec![0, 0, 0, 0, kind];
        frame.extend_from_slice(body);
        seal.close(&mut frame);
        frame
    }

    #[test]
    fn a_frame_is_accepted_once_at_its_place_and_unchanged() {
        let (mut ours, mut theirs) = (Seal::new([7; 32]), Seal::new([7; 32]));
        let (first, second) = (frame(&mut ours, 1, b"one"), frame(&mut ours, 2, b"two"));
        assert_eq!(Seal::new([7; 32]).open(&second), Err(Malformed::Forged), "out of order");
        assert_eq!(theirs.open(&first), Ok((1, &b"one"[..])));
        assert_eq!(theirs.open(&second), Ok((2, &b"two"[..])));
        assert_eq!(theirs.open(&second), Err(Malformed::Forged), "sent again");
        assert_eq!(Seal::new([8; 32]).open(&first), Err(Malformed::Forged), "another key");
        for bit in 0..first.len() * 8 {
            let mut flipped = first.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Seal::new([7; 32]).open(&flipped), Err(Malformed::Forged), "bit {bit}");
        }
    }
}
