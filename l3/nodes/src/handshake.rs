//! Mutual authentication of client and node by a shared secret, and derivation of the keys of a
//! connection.
//!
//! The client sends a hello with its name and a nonce, the node answers with a nonce of its own and
//! nothing else. Both mix their secret with all of these bytes, and derive from the result the two
//! proofs and one key per direction. A node reveals nothing else before it has seen the client's
//! proof.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use blake3::Hash;

use super::codec::{Malformed, Reader, Writer};

/// Version of the protocol.
pub const VERSION: u16 = 3;

const MAGIC: [u8; 8] = *b"TERRACEN";
/// Minimum length of a secret: an eavesdropper can try short ones.
const SECRET_BYTES_MIN: usize = 16;
const NAME_BYTES_MAX: usize = 64;
const NONCE_BYTES: usize = 32;

pub(super) const HELLO_BYTES: usize = 8 + 2 + 2 + 16 + NONCE_BYTES + NAME_BYTES_MAX;
pub(super) const CHALLENGE_BYTES: usize = 8 + 2 + 6 + NONCE_BYTES;
pub(super) const PROOF_BYTES: usize = 32;

/// Secret shared by clients and nodes.
#[derive(Clone, PartialEq, Eq)]
pub struct NodeSecret([u8; 32]);

/// Reason why a secret cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// The secret is too short.
    #[error(
        "a node's secret needs at least {SECRET_BYTES_MIN} bytes, this one has {0}; create one \
         with `head -c 32 /dev/urandom | base64`"
    )]
    Short(usize),
    /// Its file cannot be read.
    #[error("cannot read the secret in {}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Message of the system.
        error: io::Error,
    },
}

impl NodeSecret {
    /// Creates a secret from these bytes.
    ///
    /// # Errors
    /// If there are too few.
    pub fn new(bytes: &[u8]) -> Result<Self, SecretError> {
        if bytes.len() < SECRET_BYTES_MIN {
            return Err(SecretError::Short(bytes.len()));
        }
        Ok(Self(blake3::derive_key("terrace node 1: secret", bytes)))
    }

    /// Reads a secret from a file, without surrounding white space.
    ///
    /// # Errors
    /// If it cannot be read or is too short.
    pub fn read(path: &Path) -> Result<Self, SecretError> {
        let unreadable = |error| SecretError::File { path: path.to_owned(), error };
        Self::new(std::fs::read(path).map_err(unreadable)?.trim_ascii())
    }

    /// Creates a random secret.
    pub(super) fn random_secret() -> io::Result<Self> {
        random().map(Self)
    }
}

impl fmt::Debug for NodeSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeSecret")
    }
}

/// First message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Protocol version of the client.
    pub version: u16,
    /// Id of the process, the same on all of its connections.
    pub instance: [u8; 16],
    nonce: [u8; NONCE_BYTES],
    /// Claimed name of the client; empty if all clients share one secret.
    pub name: String,
}

impl Hello {
    /// Creates the hello of a client.
    ///
    /// # Errors
    /// If the name is too long, or the system has no random numbers.
    pub fn new(name: &str, instance: [u8; 16]) -> io::Result<Self> {
        if name.len() > NAME_BYTES_MAX {
            let message = format!("a client's name may have at most {NAME_BYTES_MAX} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        Ok(Self { version: VERSION, instance, nonce: random()?, name: name.to_owned() })
    }

    /// Encodes the hello.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HELLO_BYTES);
        let mut writer = Writer(&mut bytes);
        writer.bytes(&MAGIC);
        writer.u16(self.version);
        writer.u16(self.name.len() as u16);
        writer.bytes(&self.instance);
        writer.bytes(&self.nonce);
        writer.bytes(self.name.as_bytes());
        bytes.resize(HELLO_BYTES, 0);
        bytes
    }

    /// Decodes a hello.
    ///
    /// # Errors
    /// If the bytes are not a hello.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        check_magic(&mut reader)?;
        let version = reader.u16()?;
        let length = usize::from(reader.u16()?);
        let (instance, nonce) = (reader.bytes()?, reader.bytes()?);
        let name = reader.take(NAME_BYTES_MAX)?;
        reader.end()?;
        let too_long = Malformed::TooMuch { what: "a name", found: length, max: NAME_BYTES_MAX };
        let (name, padding) = name.split_at_checked(length).ok_or(too_long)?;
        if let Some(value) = padding.iter().copied().find(|byte| *byte != 0) {
            return Err(Malformed::Unknown { field: "padding", value });
        }
        let name = str::from_utf8(name);
        let name = name.map_err(|_| Malformed::Unknown { field: "a name", value: 0 })?.to_owned();
        Ok(Self { version, instance, nonce, name })
    }
}

/// Answer of a node to an unauthenticated client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// Protocol version of the node.
    pub version: u16,
    nonce: [u8; NONCE_BYTES],
}

impl Challenge {
    /// Creates a random challenge.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn new() -> io::Result<Self> {
        Ok(Self { version: VERSION, nonce: random()? })
    }

    /// Encodes the challenge.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(CHALLENGE_BYTES);
        let mut writer = Writer(&mut bytes);
        writer.bytes(&MAGIC);
        writer.u16(self.version);
        writer.bytes(&[0; 6]);
        writer.bytes(&self.nonce);
        bytes
    }

    /// Decodes a challenge.
    ///
    /// # Errors
    /// If the bytes are not a challenge.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        check_magic(&mut reader)?;
        let version = reader.u16()?;
        let reserved = reader.take(6)?;
        if let Some(value) = reserved.iter().copied().find(|byte| *byte != 0) {
            return Err(Malformed::Unknown { field: "padding", value });
        }
        let nonce = reader.bytes()?;
        reader.end()?;
        Ok(Self { version, nonce })
    }
}

/// Key material that both sides derive from hello, challenge and secret.
pub(super) struct SessionKeys {
    root: [u8; 32],
}

impl SessionKeys {
    pub(super) fn new(secret: &NodeSecret, hello: &[u8], challenge: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(&secret.0);
        hasher.update(hello).update(challenge);
        Self { root: *hasher.finalize().as_bytes() }
    }

    /// Proof that the client knows the secret.
    pub(super) fn client_proof(&self) -> Hash {
        self.derive(b"client proof")
    }

    /// Proof that the node knows the secret.
    pub(super) fn node_proof(&self) -> Hash {
        self.derive(b"node proof")
    }

    /// Key of messages from the client.
    pub(super) fn client_key(&self) -> [u8; 32] {
        *self.derive(b"client to node").as_bytes()
    }

    /// Key of messages from the node.
    pub(super) fn node_key(&self) -> [u8; 32] {
        *self.derive(b"node to client").as_bytes()
    }

    fn derive(&self, purpose: &[u8]) -> Hash {
        blake3::keyed_hash(&self.root, purpose)
    }
}

/// Returns random bytes from the operating system, fit for secrets.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

fn check_magic(reader: &mut Reader<'_>) -> Result<(), Malformed> {
    let magic: [u8; 8] = reader.bytes()?;
    if magic == MAGIC {
        Ok(())
    } else {
        Err(Malformed::Unknown { field: "the first byte", value: magic[0] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_and_challenge_come_back() {
        let hello = Hello::new("alice", [3; 16]).unwrap();
        assert_eq!(hello.encode().len(), HELLO_BYTES);
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let challenge = Challenge::new().unwrap();
        assert_eq!(challenge.encode().len(), CHALLENGE_BYTES);
        assert_eq!(Challenge::decode(&challenge.encode()), Ok(challenge));
    }

    #[test]
    fn keys_depend_on_all_messages_and_the_secret() {
        let secret = NodeSecret::new(&[1; 16]).unwrap();
        let other = NodeSecret::new(&[2; 16]).unwrap();
        let agreement = |secret, hello: &[u8], challenge: &[u8]| {
            SessionKeys::new(secret, hello, challenge).client_proof()
        };
        let right = agreement(&secret, b"hello", b"challenge");
        assert_eq!(right, agreement(&secret, b"hello", b"challenge"));
        assert_ne!(right, agreement(&other, b"hello", b"challenge"));
        assert_ne!(right, agreement(&secret, b"hellO", b"challenge"));
        assert_ne!(right, agreement(&secret, b"hello", b"challengE"));
        let agreement = SessionKeys::new(&secret, b"hello", b"challenge");
        let mut all =
            vec![*agreement.client_proof().as_bytes(), *agreement.node_proof().as_bytes()];
        all.extend([agreement.client_key(), agreement.node_key()]);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4, "each is for one purpose");
    }

    #[test]
    fn short_secrets_are_refused() {
        let error = NodeSecret::new(b"password").unwrap_err();
        assert!(error.to_string().contains("at least 16"), "{error}");
    }
}
