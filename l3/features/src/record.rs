//! What a producer notes in the store about a sample, drawn byte by byte.
//!
//! The same note is written twice: under the producer's number and a slot, so that the producer finds it
//! after a restart, and under the sample's name, so that others who put the sample find it.

use terrace_cache::PageKey;

use super::keys::SAMPLE_BYTES_MAX;

/// The size of an encoded [`Record`], whatever is in it: readers must know it.
pub(super) const RECORD_BYTES: usize = 4096;

/// How many tensors a sample may have.
pub const TENSORS_MAX: usize = 128;

const MAGIC: [u8; 8] = *b"TERRACEF";
const VERSION: u32 = 1;
const FIXED_BYTES: usize = 40;
const TENSOR_BYTES: usize = 24;

const _: () = assert!(FIXED_BYTES + SAMPLE_BYTES_MAX + TENSORS_MAX * TENSOR_BYTES <= RECORD_BYTES);

/// A sample that is being put, or is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) sample: String,
    pub(super) generation: u64,
    /// When the put began, in milliseconds since 1970.
    pub(super) created_ms: u64,
    /// The keys of the tensors' objects, and their sizes.
    pub(super) tensors: Vec<(PageKey, u64)>,
}

impl Record {
    /// ```text
    ///  offset  bytes  field                            offset  bytes  field
    ///       0      8  magic: "TERRACEF"                    40      n  the sample's name
    ///       8      4  version: 1                         40+n     24  for each tensor: key, size
    ///      12      4  how many tensors
    ///      16      8  generation
    ///      24      8  when the put began
    ///      32      4  length n of the sample's name
    ///      36      4  zero
    /// ```
    pub(super) fn encode(&self, bytes: &mut [u8]) {
        let mut writer = Writer { bytes, at: 0 };
        writer.put(&MAGIC);
        writer.put(&VERSION.to_le_bytes());
        writer.put(&(self.tensors.len() as u32).to_le_bytes());
        writer.put(&self.generation.to_le_bytes());
        writer.put(&self.created_ms.to_le_bytes());
        writer.put(&(self.sample.len() as u32).to_le_bytes());
        writer.put(&[0; 4]);
        writer.put(self.sample.as_bytes());
        for (key, size) in &self.tensors {
            writer.put(&key.0.to_le_bytes());
            writer.put(&size.to_le_bytes());
        }
        let rest = writer.at;
        bytes[rest..].fill(0);
    }

    /// `None` if it is not a record of this version.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (magic, mut rest) = bytes.split_first_chunk()?;
        let (version, tensors) = (take_u32(&mut rest)?, take_u32(&mut rest)? as usize);
        let (generation, created_ms) = (take_u64(&mut rest)?, take_u64(&mut rest)?);
        let (name_bytes, _) = (take_u32(&mut rest)? as usize, take_u32(&mut rest)?);
        let fits = name_bytes <= SAMPLE_BYTES_MAX && tensors <= TENSORS_MAX;
        if *magic != MAGIC || version != VERSION || !fits {
            return None;
        }
        let (name, mut rest) = rest.split_at_checked(name_bytes)?;
        let sample = std::str::from_utf8(name).ok()?.to_owned();
        let mut tensor = || {
            let (key, after) = rest.split_first_chunk()?;
            rest = after;
            Some((PageKey(u128::from_le_bytes(*key)), take_u64(&mut rest)?))
        };
        let tensors = (0..tensors).map(|_| tensor()).collect::<Option<_>>()?;
        Some(Self { sample, generation, created_ms, tensors })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.tensors.iter().map(|(_, size)| size).sum()
    }
}

struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, part: &[u8]) {
        self.bytes[self.at..self.at + part.len()].copy_from_slice(part);
        self.at += part.len();
    }
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    let (number, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u32::from_le_bytes(*number))
}

fn take_u64(rest: &mut &[u8]) -> Option<u64> {
    let (number, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(u64::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(tensors: usize, sample: usize) -> Record {
        let tensors = (0..tensors as u64).map(|number| (PageKey(number.into()), number)).collect();
        Record { sample: "s".repeat(sample), generation: 7, created_ms: 9, tensors }
    }

    #[test]
    fn records_come_back_up_to_the_largest() {
        for record in [record(1, 1), record(TENSORS_MAX, SAMPLE_BYTES_MAX)] {
            let mut bytes = [0xEE; RECORD_BYTES];
            record.encode(&mut bytes);
            assert_eq!(Record::decode(&bytes), Some(record));
        }
    }

    #[test]
    fn other_bytes_are_no_record() {
        let mut bytes = [0; RECORD_BYTES];
        assert_eq!(Record::decode(&bytes), None);
        record(2, 3).encode(&mut bytes);
        for at in [0, 8, 14, 34] {
            let mut changed = bytes;
            changed[at] ^= 0xFF;
            assert_eq!(Record::decode(&changed), None, "byte {at}");
        }
    }
}
