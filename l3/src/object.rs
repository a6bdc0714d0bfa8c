//! Object ids, and the header that proves that the bytes of an object are the right ones.
//!
//! `FORMAT.md` draws its bytes.

use crc_fast::{CrcAlgorithm, Digest, checksum, checksum_combine};
use serde::{Deserialize, Serialize};
use terrace_cache::{PageKey, PrefixDigest};

use crate::fields::Fields;
use crate::share_out::{share_out, threads_for};

/// Size of an encoded [`Header`].
pub const HEADER_BYTES: usize = 80;

const MAGIC: [u8; 8] = *b"TERRACEO";
/// Version of a header that names namespace, key and generation.
const VERSION: u32 = 1;
/// Version of a header with a prefix digest. Versions count for the whole format: 2 is the version
/// of an index.
const VERSION_WITH_PREFIX: u32 = 3;

/// Name of an object. A get, a pin or a removal means exactly this generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ObjectId {
    /// Digest of the object's namespace.
    pub namespace: PageKey,
    /// Page key, or any other 128 bits that name the object within its namespace.
    pub key: PageKey,
    /// Version of the object under this key: a put of a higher generation replaces the lower ones.
    /// Pages are named by their content and always have generation 0.
    pub generation: u64,
}

impl ObjectId {
    /// Size of an encoded id.
    pub const BYTES: usize = 40;

    /// Id of a page of KV.
    #[must_use]
    pub fn page(namespace: PageKey, key: PageKey) -> Self {
        Self { namespace, key, generation: 0 }
    }

    /// The same object in another generation.
    #[must_use]
    pub fn with_generation(self, generation: u64) -> Self {
        Self { generation, ..self }
    }

    /// Encodes namespace, key and generation, each in little-endian order.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..16].copy_from_slice(&self.namespace.0.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.key.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }
}

/// Header that precedes an object's payload wherever it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Id of the object.
    pub id: ObjectId,
    /// Length of the payload in bytes.
    pub length: u64,
    /// CRC-64/NVME of the payload.
    pub checksum: u64,
    /// Digest of the prefix that the payload is the KV of, if the key alone does not prove it.
    pub prefix: Option<PrefixDigest>,
}

/// Part of an object that did not verify.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// The first eight bytes are not those of an object.
    #[error("this is not an object")]
    Magic,
    /// The object was written in a different format version.
    #[error("the object has a different format version")]
    Version,
    /// The header's own checksum does not match.
    #[error("the header's checksum does not match")]
    HeaderChecksum,
    /// The object belongs to another namespace.
    #[error("the object belongs to a different namespace")]
    Namespace,
    /// The object has another key.
    #[error("the object has a different key")]
    Key,
    /// The object has another generation.
    #[error("the object has a different generation")]
    Generation,
    /// The length differs from the expected one.
    #[error("the object has a different length")]
    Length,
    /// The payload's checksum does not match.
    #[error("the payload's checksum does not match")]
    Payload,
    /// The object is the KV of other tokens whose page has the same key, or names no prefix.
    #[error("the object does not belong to these tokens")]
    Prefix,
}

impl Header {
    /// Creates the header of `payload` under `id`.
    #[must_use]
    pub fn new(id: ObjectId, payload: &[u8]) -> Self {
        Self::with_checksum(id, payload, payload_checksum(payload))
    }

    /// Creates the header of `payload` under `id` with a known checksum.
    pub fn with_checksum(id: ObjectId, payload: &[u8], checksum: u64) -> Self {
        Self { id, length: payload.len() as u64, checksum, prefix: None }
    }

    /// Adds the digest of the page's prefix.
    ///
    /// # Panics
    /// If the object has a generation: pages are named by their content.
    #[must_use]
    pub fn with_prefix(self, prefix: Option<PrefixDigest>) -> Self {
        assert!(prefix.is_none() || self.id.generation == 0, "a page has no generations");
        Self { prefix, ..self }
    }

    /// Encodes the header as `FORMAT.md` draws it.
    ///
    /// # Panics
    /// If a page has 4 GiB or more.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        match &self.prefix {
            None => {
                bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
                bytes[16..56].copy_from_slice(&self.id.to_bytes());
                bytes[56..64].copy_from_slice(&self.length.to_le_bytes());
            }
            Some(prefix) => {
                let length = u32::try_from(self.length).expect("a page is smaller than 4 GiB");
                bytes[8..12].copy_from_slice(&VERSION_WITH_PREFIX.to_le_bytes());
                bytes[12..16].copy_from_slice(&length.to_le_bytes());
                bytes[16..32].copy_from_slice(&self.id.key.0.to_le_bytes());
                bytes[32..64].copy_from_slice(&prefix.to_bytes());
            }
        }
        bytes[64..72].copy_from_slice(&self.checksum.to_le_bytes());
        let checksum = header_checksum(&bytes, self.prefix.is_some().then_some(&self.id));
        bytes[72..80].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    /// Decodes a header and verifies everything but payload and prefix: it must be that of `id`,
    /// with a payload of `length` bytes.
    ///
    /// # Errors
    /// The first part that does not match.
    pub fn verify(
        bytes: &[u8; HEADER_BYTES],
        id: &ObjectId,
        length: u64,
    ) -> Result<Self, Mismatch> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let check = |fits: bool, otherwise: Mismatch| if fits { Ok(()) } else { Err(otherwise) };
        check(bytes[0..8] == MAGIC, Mismatch::Magic)?;
        let (found, found_length, prefix, checksum) = match half(8) {
            VERSION => {
                check(half(12) == 0, Mismatch::Version)?;
                let found = Fields::of(&bytes[16..]).id().expect("a header has a name");
                (found, number(56), None, header_checksum(bytes, None))
            }
            VERSION_WITH_PREFIX => {
                let key = u128::from_le_bytes(*bytes[16..].first_chunk().expect("16 bytes"));
                let prefix = *bytes[32..].first_chunk().expect("32 bytes");
                // Its checksum covers the namespace.
                let found = ObjectId::page(id.namespace, PageKey(key));
                let checksum = header_checksum(bytes, Some(id));
                (found, u64::from(half(12)), Some(PrefixDigest::from_bytes(prefix)), checksum)
            }
            _ => return Err(Mismatch::Version),
        };
        check(number(72) == checksum, Mismatch::HeaderChecksum)?;
        check(found.namespace == id.namespace, Mismatch::Namespace)?;
        check(found.key == id.key, Mismatch::Key)?;
        check(found.generation == id.generation, Mismatch::Generation)?;
        check(found_length == length, Mismatch::Length)?;
        Ok(Self { id: *id, length, checksum: number(64), prefix })
    }

    /// Verifies that the payload is the KV of the wanted prefix. A header without a prefix digest
    /// proves nothing, so it fails if a prefix is wanted. If none is wanted, the key is proof
    /// enough.
    ///
    /// # Errors
    /// [`Mismatch::Prefix`].
    pub fn verify_prefix(self, wanted: Option<PrefixDigest>) -> Result<Self, Mismatch> {
        match wanted {
            Some(wanted) if self.prefix != Some(wanted) => Err(Mismatch::Prefix),
            Some(_) | None => Ok(self),
        }
    }

    /// Verifies the payload.
    ///
    /// # Errors
    /// [`Mismatch::Payload`].
    pub fn verify_payload(&self, payload: &[u8]) -> Result<(), Mismatch> {
        self.verify_checksum(payload_checksum(payload))
    }

    /// Verifies the known checksum of a payload.
    pub fn verify_checksum(&self, checksum: u64) -> Result<(), Mismatch> {
        if checksum == self.checksum { Ok(()) } else { Err(Mismatch::Payload) }
    }
}

/// Checksum at the end of a header. It covers the bytes before it and, if the header has a prefix
/// digest in place of the namespace, the namespace of `id`.
fn header_checksum(header: &[u8; HEADER_BYTES], id: Option<&ObjectId>) -> u64 {
    let mut digest = Digest::new(CHECKSUM);
    digest.update(&header[..72]);
    if let Some(id) = id {
        digest.update(&id.namespace.0.to_le_bytes());
    }
    digest.finalize()
}

const CHECKSUM: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;

/// CRC-64/NVME of `bytes`.
pub fn payload_checksum(bytes: &[u8]) -> u64 {
    checksum(CHECKSUM, bytes)
}

/// Checksums of payloads, in their order, at memory bandwidth.
pub fn payload_checksums(payloads: &[&[u8]]) -> Vec<u64> {
    let bytes = payloads.iter().map(|payload| payload.len()).sum();
    share_out(threads_for(bytes), payloads.iter(), |payload| payload_checksum(payload))
}

/// Copies and computes the checksum in one pass.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn copy_with_checksum(from: &[u8], to: &mut [u8]) -> u64 {
    assert_eq!(from.len(), to.len(), "a copy has the length of what is copied");
    let threads = threads_for(from.len());
    if threads == 1 {
        return copy_share_with_checksum(from, to);
    }
    // Combining two checksums takes a tenth of a millisecond, so each thread has one share.
    let share_bytes = from.len().div_ceil(threads);
    let shares = from.chunks(share_bytes).zip(to.chunks_mut(share_bytes));
    let copied = share_out(threads, shares, |(from, to)| {
        (copy_share_with_checksum(from, to), from.len() as u64)
    });
    let append =
        |(front, _), (back, bytes)| (checksum_combine(CHECKSUM, front, back, bytes), bytes);
    copied.into_iter().reduce(append).expect("there are shares").0
}

/// Copies in pieces, so that memory is read once, and prefetches the next piece during the
/// computation.
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

/// Prefetches memory that is about to be read, and memory that is about to be written.
#[cfg(target_arch = "x86_64")]
fn fetch(read: &[u8], written: &[u8]) {
    use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T1, _mm_prefetch};
    const LINE_BYTES: usize = 64;
    for (read, written) in read.chunks(LINE_BYTES).zip(written.chunks(LINE_BYTES)) {
        #[expect(unsafe_code, reason = "prefetch intrinsics take raw addresses")]
        // SAFETY: a prefetch changes nothing, whatever the addresses are.
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
    fn the_encoding_of_a_header_is_stable() {
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
    fn the_encoding_of_a_header_with_a_prefix_is_stable() {
        let id = ObjectId::page(PageKey(1), PageKey(0x0f0e_0d0c << 96));
        let prefix = PrefixDigest::from_bytes(std::array::from_fn(|at| at as u8));
        let bytes = Header::new(id, b"123456789").with_prefix(Some(prefix)).encode();
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            text[..144],
            "5445525241434 54f0300000009000000".replace(' ', "")
                + "0000000000000000000000000c0d0e0f"
                + "000102030405060708090a0b0c0d0e0f"
                + "101112131415161718191a1b1c1d1e1f"
                + "8898790a86148bae"
        );
        let mut covered = bytes[..72].to_vec();
        covered.extend_from_slice(&1u128.to_le_bytes());
        assert_eq!(bytes[72..], payload_checksum(&covered).to_le_bytes());
    }

    fn page() -> ObjectId {
        id().with_generation(0)
    }

    fn prefix() -> PrefixDigest {
        PrefixDigest::of_namespace(PageKey(5))
    }

    #[test]
    fn a_page_is_that_of_its_prefix_and_of_no_other() {
        let verify = |stored: Option<PrefixDigest>, wanted| {
            let bytes = Header::new(page(), &[3; 100]).with_prefix(stored).encode();
            let header = Header::verify(&bytes, &page(), 100).expect("nothing else differs");
            assert_eq!(header.prefix, stored);
            header.verify_prefix(wanted).map(drop)
        };
        let other = PrefixDigest::of_namespace(PageKey(6));
        assert_eq!(verify(Some(prefix()), Some(prefix())), Ok(()));
        assert_eq!(verify(Some(other), Some(prefix())), Err(Mismatch::Prefix));
        assert_eq!(verify(None, Some(prefix())), Err(Mismatch::Prefix), "it proves nothing");
        assert_eq!(verify(Some(prefix()), None), Ok(()));
        assert_eq!(verify(None, None), Ok(()));
    }

    #[test]
    fn a_page_with_its_prefix_is_refused_under_another_name() {
        let bytes = Header::new(page(), &[3; 100]).with_prefix(Some(prefix())).encode();
        let verify = |id: ObjectId, length| Header::verify(&bytes, &id, length).map(drop);
        let other = ObjectId { namespace: PageKey(9), ..page() };
        assert_eq!(verify(other, 100), Err(Mismatch::HeaderChecksum));
        assert_eq!(verify(ObjectId { key: PageKey(9), ..page() }, 100), Err(Mismatch::Key));
        assert_eq!(verify(id(), 100), Err(Mismatch::Generation));
        assert_eq!(verify(page(), 99), Err(Mismatch::Length));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let payload = [3; 100];
        let header = Header::new(id(), &payload);
        let with_prefix = Header::new(page(), &payload).with_prefix(Some(prefix()));
        for header in [header, with_prefix] {
            let bytes = header.encode();
            assert_eq!(Header::verify(&bytes, &header.id, 100), Ok(header));
            for bit in 0..HEADER_BYTES * 8 {
                let mut flipped = bytes;
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(Header::verify(&flipped, &header.id, 100).is_err(), "bit {bit}");
            }
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
