//! What an object is called, and the header that proves that its bytes are the right ones.
//!
//! `FORMAT.md` draws its bytes.

use crc_fast::{CrcAlgorithm, Digest, checksum, checksum_combine};
use serde::{Deserialize, Serialize};
use terrace_cache::PageKey;

use crate::fields::Fields;
use crate::share_out::{share_out, threads_for};

/// The size of an encoded [`Header`].
pub const HEADER_BYTES: usize = 80;

const MAGIC: [u8; 8] = *b"TERRACEO";
const VERSION: u32 = 1;

/// The name of an object. A get, a pin or a removal means exactly this generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId {
    /// The digest of the namespace that the object belongs to.
    pub namespace: PageKey,
    /// The page's key, or any other 128 bits that name the object within its namespace.
    pub key: PageKey,
    /// Which writing of the key this is: a put of a higher generation replaces the lower ones. Pages
    /// are named by their content and have generation 0 for ever.
    pub generation: u64,
}

impl ObjectId {
    /// The size of an encoded one.
    pub const BYTES: usize = 40;

    /// A page of KV.
    #[must_use]
    pub fn page(namespace: PageKey, key: PageKey) -> Self {
        Self { namespace, key, generation: 0 }
    }

    /// The same object in another generation.
    #[must_use]
    pub fn with_generation(self, generation: u64) -> Self {
        Self { generation, ..self }
    }

    /// Namespace, key and generation as bytes, each with its lowest byte first.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..16].copy_from_slice(&self.namespace.0.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.key.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }
}

/// What precedes an object's payload wherever it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Whose payload it is.
    pub id: ObjectId,
    /// The payload's length in bytes.
    pub length: u64,
    /// The payload's CRC-64/NVME.
    pub checksum: u64,
}

/// Which part of an object did not verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// The first eight bytes are not an object's.
    #[error("this is not an object")]
    Magic,
    /// Written by a version with another layout.
    #[error("the object has a different format version")]
    Version,
    /// The header's own checksum does not fit.
    #[error("the header's checksum does not match")]
    HeaderChecksum,
    /// It belongs to another namespace.
    #[error("the object belongs to a different namespace")]
    Namespace,
    /// It is another page's.
    #[error("the object has a different key")]
    Key,
    /// It is another generation's.
    #[error("the object has a different generation")]
    Generation,
    /// It is longer or shorter than its index entry says.
    #[error("the object has a different length")]
    Length,
    /// The payload's checksum does not fit.
    #[error("the payload's checksum does not match")]
    Payload,
}

impl Header {
    /// The header of `payload` under `id`.
    #[must_use]
    pub fn new(id: ObjectId, payload: &[u8]) -> Self {
        Self::with_checksum(id, payload, payload_checksum(payload))
    }

    /// The header of `payload` under `id`, whose checksum is known.
    pub fn with_checksum(id: ObjectId, payload: &[u8], checksum: u64) -> Self {
        Self { id, length: payload.len() as u64, checksum }
    }

    /// The bytes of the header, as `FORMAT.md` draws them.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[16..56].copy_from_slice(&self.id.to_bytes());
        bytes[56..64].copy_from_slice(&self.length.to_le_bytes());
        bytes[64..72].copy_from_slice(&self.checksum.to_le_bytes());
        let checksum = payload_checksum(&bytes[..72]);
        bytes[72..80].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Reads a header and checks everything about it but the payload: it must be that of `id`, with a
    /// payload of `length` bytes.
    ///
    /// # Errors
    /// Whatever does not fit.
    pub fn verify(
        bytes: &[u8; HEADER_BYTES],
        id: &ObjectId,
        length: u64,
    ) -> Result<Self, Mismatch> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let found = Fields::of(&bytes[16..]).id().expect("a header has a name");
        let check = |fits: bool, otherwise: Mismatch| if fits { Ok(()) } else { Err(otherwise) };
        check(bytes[0..8] == MAGIC, Mismatch::Magic)?;
        check(number(8) == u64::from(VERSION), Mismatch::Version)?;
        check(number(72) == payload_checksum(&bytes[..72]), Mismatch::HeaderChecksum)?;
        check(found.namespace == id.namespace, Mismatch::Namespace)?;
        check(found.key == id.key, Mismatch::Key)?;
        check(found.generation == id.generation, Mismatch::Generation)?;
        check(number(56) == length, Mismatch::Length)?;
        Ok(Self { id: *id, length, checksum: number(64) })
    }

    /// Checks the payload.
    ///
    /// # Errors
    /// [`Mismatch::Payload`].
    pub fn verify_payload(&self, payload: &[u8]) -> Result<(), Mismatch> {
        self.verify_checksum(payload_checksum(payload))
    }

    /// Checks a payload whose checksum was computed already.
    pub fn verify_checksum(&self, checksum: u64) -> Result<(), Mismatch> {
        if checksum == self.checksum { Ok(()) } else { Err(Mismatch::Payload) }
    }
}

const CHECKSUM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// CRC-64/NVME of the bytes.
pub fn payload_checksum(bytes: &[u8]) -> u64 {
    checksum(CHECKSUM, bytes)
}

/// The checksums of payloads, in their order. They take as long as reading the memory does.
pub fn payload_checksums(payloads: &[&[u8]]) -> Vec<u64> {
    let bytes = payloads.iter().map(|payload| payload.len()).sum();
    share_out(threads_for(bytes), payloads.iter(), |payload| payload_checksum(payload))
}

/// Copies, and computes the checksum on the way.
///
/// # Panics
/// When the sides differ in length.
pub(crate) fn copy_with_checksum(from: &[u8], to: &mut [u8]) -> u64 {
    assert_eq!(from.len(), to.len(), "a copy has the length of what is copied");
    let threads = threads_for(from.len());
    if threads == 1 {
        return copy_share_with_checksum(from, to);
    }
    // Appending one checksum to another takes a tenth of a millisecond, so each thread has one.
    let share_bytes = from.len().div_ceil(threads);
    let shares = from.chunks(share_bytes).zip(to.chunks_mut(share_bytes));
    let copied = share_out(threads, shares, |(from, to)| {
        (copy_share_with_checksum(from, to), from.len() as u64)
    });
    let append =
        |(front, _), (back, bytes)| (checksum_combine(CHECKSUM, front, back, bytes), bytes);
    copied.into_iter().reduce(append).expect("there are shares").0
}

/// Goes piece by piece, so that memory is read once, and fetches the next piece while it computes.
fn copy_share_with_checksum(from: &[u8], to: &mut [u8]) -> u64 {
    const PIECE_BYTES: usize = 2 << 10;
    let mut digest = Digest::new(CHECKSUM);
    let mut pieces = from.chunks(PIECE_BYTES).zip(to.chunks_mut(PIECE_BYTES)).peekable();
    while let Some((from, to)) = pieces.next() {
        to.copy_from_slice(from);
        if let Some((next_from, next_to)) = pieces.peek() {
            fetch(next_from, next_to);
        }
        digest.update(to);
    }
    digest.finalize()
}

/// Has memory come closer that is about to be read, and other memory that is about to be written.
#[cfg(target_arch = "x86_64")]
fn fetch(read: &[u8], written: &[u8]) {
    use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T1, _mm_prefetch};
    const LINE_BYTES: usize = 64;
    for (read, written) in read.chunks(LINE_BYTES).zip(written.chunks(LINE_BYTES)) {
        #[expect(unsafe_code, reason = "it is told addresses")]
        // SAFETY: it changes nothing, whatever the addresses are.
        unsafe {
            _mm_prefetch::<_MM_HINT_T1>(read.as_ptr().cast());
            _mm_prefetch::<_MM_HINT_ET0>(written.as_ptr().cast());
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fetch(_: &[u8], _: &[u8]) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> ObjectId {
        ObjectId { namespace: PageKey(0x0102 << 64), key: PageKey(77), generation: 5 }
    }

    #[test]
    fn a_header_is_what_it_always_was() {
        let header = Header::new(
            ObjectId { namespace: PageKey(1), key: PageKey(0x0f0e_0d0c << 96), generation: 3 },
            b"123456789",
        );
        // The check value of CRC-64/NVME over these nine digits is published with the algorithm.
        assert_eq!(header.checksum, 0xae8b_1486_0a79_9888);
        let bytes: String =
            header.encode()[..72].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            bytes,
            "5445525241434 54f0100000000000000".replace(' ', "")
                + "01000000000000000000000000000000"
                + "0000000000000000000000000c0d0e0f"
                + "03000000000000000900000000000000"
                + "8898790a86148bae"
        );
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let payload = [3; 100];
        let header = Header::new(id(), &payload);
        let bytes = header.encode();
        assert_eq!(Header::verify(&bytes, &id(), 100), Ok(header));
        for bit in 0..HEADER_BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::verify(&flipped, &id(), 100).is_err(), "bit {bit}");
        }
        for bit in 0..payload.len() * 8 {
            let mut flipped = payload;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(header.verify_payload(&flipped), Err(Mismatch::Payload), "bit {bit}");
        }
    }

    #[test]
    fn a_sound_header_of_another_object_says_what_differs() {
        let bytes = Header::new(id(), &[3; 100]).encode();
        let verify = |id: ObjectId, length| Header::verify(&bytes, &id, length).unwrap_err();
        let other = ObjectId { namespace: PageKey(9), ..id() };
        assert_eq!(verify(other, 100), Mismatch::Namespace);
        assert_eq!(verify(ObjectId { key: PageKey(9), ..id() }, 100), Mismatch::Key);
        assert_eq!(verify(id().with_generation(6), 100), Mismatch::Generation);
        assert_eq!(verify(id(), 99), Mismatch::Length);
    }

    fn varied_bytes() -> Vec<u8> {
        (0..(9 << 20) + 5).map(|at: u32| (at.wrapping_mul(40_503) >> 8) as u8).collect()
    }

    #[test]
    fn a_copy_has_the_checksum_of_its_bytes() {
        let all = varied_bytes();
        for bytes in [0, 1, 50_000, 8 << 20, (8 << 20) + 1, all.len()] {
            let (from, mut to) = (&all[..bytes], vec![0; bytes]);
            assert_eq!(copy_with_checksum(from, &mut to), payload_checksum(from), "{bytes} bytes");
            assert_eq!(from, to);
        }
    }

    #[test]
    fn each_payload_has_its_own_checksum_however_the_batch_is_shared_out() {
        let bytes = varied_bytes();
        for payload_bytes in [1 << 10, 100_001, 1 << 20, 5 << 20, 9 << 20] {
            let payloads: Vec<&[u8]> = bytes.chunks(payload_bytes).collect();
            let expected: Vec<u64> = payloads.iter().map(|it| payload_checksum(it)).collect();
            assert_eq!(payload_checksums(&payloads), expected, "payloads of {payload_bytes} bytes");
        }
        assert_eq!(payload_checksums(&[]), []);
    }
}
