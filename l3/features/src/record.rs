//! Encoding of the notes of a producer about a sample.
//!
//! The same note is written twice: under the producer's number and a slot, so that the producer
//! finds it after a restart, and under the sample's name, so that other producers of the sample
//! find it. A revocation is such a note too, without tensors.
//!
//! With a secret a note ends with a MAC over its name and its bytes, so that it cannot be created,
//! changed, or used under another name without the secret.

use terrace_cache::PageKey;

use super::config::Secret;
use super::keys::SAMPLE_BYTES_MAX;
use terrace_l3::ObjectId;
use terrace_l3::backend::Fields;

/// Size of an encoded [`Record`]; constant, because readers must know it.
pub(super) const RECORD_BYTES: usize = 4096;

/// Maximum number of tensors per sample.
pub const TENSORS_MAX: usize = 128;

const MAGIC: [u8; 8] = *b"TERRACEF";
const VERSION: u32 = 3;
const FIXED_BYTES: usize = 72;
const TENSOR_BYTES: usize = 24;
const CODE_BYTES: usize = 32;
/// Offset of the MAC.
const SIGNED_BYTES: usize = RECORD_BYTES - CODE_BYTES;

const _: () = assert!(FIXED_BYTES + SAMPLE_BYTES_MAX + TENSORS_MAX * TENSOR_BYTES <= SIGNED_BYTES);

/// A sample that is being put, or is stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) sample: String,
    pub(super) generation: u64,
    /// Producer that has put the sample and may remove the note; `u16::MAX` for none.
    pub(super) owner: u16,
    /// Start of the put, in milliseconds since 1970.
    pub(super) created_ms: u64,
    /// With a secret, a digest of the MACs of all tensors, which a promised ref cannot contain.
    pub(super) contents: [u8; CODE_BYTES],
    /// Keys of the tensors' objects, and their sizes.
    pub(super) tensors: Vec<(PageKey, u64)>,
}

impl Record {
    /// ```text
    ///  offset  bytes  field                            offset  bytes  field
    ///       0      8  magic: "TERRACEF"                    40     32  digest of the contents, or zeros
    ///       8      4  version: 3                           72      n  the sample's name
    ///      12      4  how many tensors                   72+n     24  for each tensor: key, size
    ///      16      8  generation                         4064     32  code, or zeros without a secret
    ///      24      8  when the put began
    ///      32      4  length n of the sample's name
    ///      36      2  producer
    ///      38      2  zero
    /// ```
    pub(super) fn encode(&self, id: &ObjectId, secret: Option<&Secret>, bytes: &mut [u8]) {
        let mut writer = RecordWriter { bytes, at: 0 };
        writer.put(&MAGIC);
        writer.put(&VERSION.to_le_bytes());
        writer.put(&(self.tensors.len() as u32).to_le_bytes());
        writer.put(&self.generation.to_le_bytes());
        writer.put(&self.created_ms.to_le_bytes());
        writer.put(&(self.sample.len() as u32).to_le_bytes());
        writer.put(&self.owner.to_le_bytes());
        writer.put(&[0; 2]);
        writer.put(&self.contents);
        writer.put(self.sample.as_bytes());
        for (key, size) in &self.tensors {
            writer.put(&key.0.to_le_bytes());
            writer.put(&size.to_le_bytes());
        }
        let rest = writer.at;
        bytes[rest..].fill(0);
        if let Some(secret) = secret {
            let code = code(secret, id, bytes);
            bytes[SIGNED_BYTES..].copy_from_slice(code.as_bytes());
        }
    }

    /// Verifies and decodes a note that was found under a name.
    pub(super) fn verify(
        id: &ObjectId,
        secret: Option<&Secret>,
        bytes: &[u8],
    ) -> Result<Self, Unsound> {
        let Some(found) = bytes.get(SIGNED_BYTES..RECORD_BYTES) else { return Err(Unsound::Other) };
        if let Some(secret) = secret {
            let found: [u8; CODE_BYTES] = found.try_into().expect("it is as long");
            // Hash comparison takes constant time.
            if code(secret, id, bytes) != blake3::Hash::from_bytes(found) {
                return Err(Unsound::Forged);
            }
        }
        Self::decode(bytes).ok_or(Unsound::Other)
    }

    /// `None` if it is not a record of this version.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields::of(bytes);
        let magic: [u8; 8] = fields.array()?;
        let (version, tensors) = (fields.u32()?, fields.u32()? as usize);
        let (generation, created_ms) = (fields.u64()?, fields.u64()?);
        let (name_bytes, owner) = (fields.u32()? as usize, fields.u32()? as u16);
        let fits = name_bytes <= SAMPLE_BYTES_MAX && tensors <= TENSORS_MAX;
        let contents = fields.array()?;
        if magic != MAGIC || version != VERSION || !fits {
            return None;
        }
        let sample = std::str::from_utf8(fields.bytes(name_bytes)?).ok()?.to_owned();
        let mut tensor = || Some((fields.key()?, fields.u64()?));
        let tensors = (0..tensors).map(|_| tensor()).collect::<Option<_>>()?;
        Some(Self { sample, generation, owner, created_ms, contents, tensors })
    }

    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> {
        self.tensors.iter().map(|(_, size)| *size)
    }
}

/// Reason why a note is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unsound {
    /// It was not written with the secret.
    Forged,
    /// It is not a note of this version.
    Other,
}

fn code(secret: &Secret, id: &ObjectId, bytes: &[u8]) -> blake3::Hash {
    let mut hasher = secret.for_notes();
    hasher.update(&id.namespace.0.to_le_bytes());
    hasher.update(&id.key.0.to_le_bytes());
    hasher.update(&bytes[..SIGNED_BYTES]);
    hasher.finalize()
}

struct RecordWriter<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl RecordWriter<'_> {
    fn put(&mut self, part: &[u8]) {
        self.bytes[self.at..self.at + part.len()].copy_from_slice(part);
        self.at += part.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(tensors: usize, sample: usize) -> Record {
        let tensors = (0..tensors as u64).map(|number| (PageKey(number.into()), number)).collect();
        let (sample, contents) = ("s".repeat(sample), [5; CODE_BYTES]);
        Record { sample, generation: 7, owner: 1023, created_ms: 9, contents, tensors }
    }

    fn id(key: u128) -> ObjectId {
        ObjectId::page(PageKey(1), PageKey(key))
    }

    #[test]
    fn records_come_back_up_to_the_largest() {
        let secret = Secret::new(b"of this run");
        for record in [record(1, 1), record(TENSORS_MAX, SAMPLE_BYTES_MAX)] {
            for secret in [None, Some(&secret)] {
                let mut bytes = [0xEE; RECORD_BYTES];
                record.encode(&id(1), secret, &mut bytes);
                assert_eq!(Record::verify(&id(1), secret, &bytes), Ok(record.clone()));
            }
        }
    }

    #[test]
    fn other_bytes_are_no_record() {
        let mut bytes = [0; RECORD_BYTES];
        assert_eq!(Record::decode(&bytes), None);
        record(2, 3).encode(&id(1), None, &mut bytes);
        for at in [0, 8, 14, 34] {
            let mut changed = bytes;
            changed[at] ^= 0xFF;
            assert_eq!(Record::decode(&changed), None, "byte {at}");
        }
    }

    #[test]
    fn with_a_secret_every_byte_and_the_name_are_authenticated() {
        let secret = Secret::new(b"of this run");
        let mut bytes = [0; RECORD_BYTES];
        record(2, 3).encode(&id(1), Some(&secret), &mut bytes);
        let verify = |id, secret, bytes: &[u8]| Record::verify(&id, Some(secret), bytes);
        assert!(verify(id(1), &secret, &bytes).is_ok());
        for at in 0..RECORD_BYTES {
            let mut changed = bytes;
            changed[at] ^= 1;
            assert_eq!(verify(id(1), &secret, &changed), Err(Unsound::Forged), "byte {at}");
        }
        assert_eq!(verify(id(2), &secret, &bytes), Err(Unsound::Forged), "it is another's");
        let other = Secret::new(b"of another run");
        assert_eq!(verify(id(1), &other, &bytes), Err(Unsound::Forged));
        record(2, 3).encode(&id(1), None, &mut bytes);
        assert_eq!(verify(id(1), &secret, &bytes), Err(Unsound::Forged), "it is not signed");
    }
}
