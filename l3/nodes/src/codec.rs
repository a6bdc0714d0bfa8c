//! Encoding of numbers, ids and errors. Input is not trusted: every length is checked before memory
//! is allocated for it.

use std::io;
use std::time::Duration;

use terrace_l3::backend::Fields;
use terrace_l3::{Mismatch, ObjectId, StoreError};

/// Maximum length of an error's text.
const TEXT_BYTES_MAX: usize = 160;

/// Reason why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// The message ends too early.
    #[error("the message ends in the middle of a field")]
    Short,
    /// Bytes follow the end of the message.
    #[error("{0} bytes follow the end of the message")]
    Long(usize),
    /// A field has an unknown value.
    #[error("{field} has the unknown value {value}")]
    Unknown {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u8,
    },
    /// A frame or a list exceeds its limit.
    #[error("{what} of {found} is more than the {max} allowed")]
    TooMuch {
        /// Kind of the limit.
        what: &'static str,
        /// Actual size.
        found: usize,
        /// Maximum size.
        max: usize,
    },
    /// The message has an unexpected kind.
    #[error("a message of kind {0} is not expected here")]
    Kind(u8),
    /// The message is not from the peer, or is out of sequence.
    #[error("the message is not authentic")]
    Forged,
}

/// Reads consecutive fields.
pub(super) struct Reader<'a>(Fields<'a>);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(Fields::of(bytes))
    }

    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        self.0.bytes(count).ok_or(Malformed::Short)
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.0.array().ok_or(Malformed::Short)
    }

    pub(super) fn u8(&mut self) -> Result<u8, Malformed> {
        self.bytes().map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self) -> Result<u16, Malformed> {
        self.bytes().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, Malformed> {
        self.0.u32().ok_or(Malformed::Short)
    }

    pub(super) fn u64(&mut self) -> Result<u64, Malformed> {
        self.0.u64().ok_or(Malformed::Short)
    }

    pub(super) fn id(&mut self) -> Result<ObjectId, Malformed> {
        self.0.id().ok_or(Malformed::Short)
    }

    /// Reads a list whose entries have at least `entry_bytes` each.
    pub(super) fn list<T>(
        &mut self,
        entry_bytes: usize,
        max: usize,
        mut entry: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let found = self.u32()? as usize;
        if found > max {
            return Err(Malformed::TooMuch { what: "a list", found, max });
        }
        if self.0.rest().len() < found * entry_bytes {
            return Err(Malformed::Short);
        }
        (0..found).map(|_| entry(self)).collect()
    }

    pub(super) fn microseconds(&mut self) -> Result<Duration, Malformed> {
        self.u64().map(Duration::from_micros)
    }

    pub(super) fn error(&mut self, code: u8) -> Result<StoreError, Malformed> {
        Ok(match code {
            1 => StoreError::Missing,
            2 => StoreError::BeingWritten,
            3 => StoreError::Superseded { present: self.u64()? },
            4 => StoreError::TooLarge { bytes: self.size()?, max: self.size()? },
            5 => StoreError::Length { expected: self.size()?, found: self.size()? },
            6 => StoreError::Full,
            7 => StoreError::Leased,
            8 => StoreError::Pinned,
            9 => StoreError::NotPinned,
            10 => StoreError::Corrupt(mismatch(self.u8()?)?),
            11 => {
                let length = usize::from(self.u16()?);
                let text = String::from_utf8_lossy(self.take(length)?);
                StoreError::io("a node's store", &io::Error::other(text))
            }
            12 => StoreError::TimedOut(self.microseconds()?),
            13 => StoreError::Unavailable { retry_after: self.microseconds()? },
            14 => StoreError::Closed,
            15 => StoreError::Forbidden,
            value => return Err(Malformed::Unknown { field: "a result", value }),
        })
    }

    fn size(&mut self) -> Result<usize, Malformed> {
        Ok(usize::try_from(self.u64()?).unwrap_or(usize::MAX))
    }

    pub(super) fn end(self) -> Result<(), Malformed> {
        match self.0.rest().len() {
            0 => Ok(()),
            left => Err(Malformed::Long(left)),
        }
    }
}

/// Writes consecutive fields.
pub(super) struct Writer<'a>(pub(super) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn id(&mut self, id: &ObjectId) {
        self.bytes(&id.to_bytes());
    }

    pub(super) fn ids(&mut self, ids: &[ObjectId]) {
        self.u32(ids.len() as u32);
        ids.iter().for_each(|id| self.id(id));
    }

    pub(super) fn microseconds(&mut self, time: Duration) {
        self.u64(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    pub(super) fn error(&mut self, error: &StoreError) {
        match error {
            StoreError::Missing => self.u8(1),
            StoreError::BeingWritten => self.u8(2),
            StoreError::Superseded { present } => self.with(3, &[*present]),
            StoreError::TooLarge { bytes, max } => self.with(4, &[*bytes as u64, *max as u64]),
            StoreError::Length { expected, found } => {
                self.with(5, &[*expected as u64, *found as u64]);
            }
            StoreError::Full => self.u8(6),
            StoreError::Leased => self.u8(7),
            StoreError::Pinned => self.u8(8),
            StoreError::NotPinned => self.u8(9),
            StoreError::Corrupt(mismatch) => {
                self.u8(10);
                self.u8(mismatch_code(*mismatch));
            }
            StoreError::TimedOut(time) => {
                self.u8(12);
                self.microseconds(*time);
            }
            StoreError::Unavailable { retry_after } => {
                self.u8(13);
                self.microseconds(*retry_after);
            }
            StoreError::Closed => self.u8(14),
            StoreError::Forbidden => self.u8(15),
            StoreError::Io { .. }
            | StoreError::HolderAway
            | StoreError::NotRegistered { .. }
            | StoreError::AlreadyRegistered { .. } => self.text(&error.to_string()),
        }
    }

    fn with(&mut self, code: u8, values: &[u64]) {
        self.u8(code);
        values.iter().for_each(|value| self.u64(*value));
    }

    fn text(&mut self, text: &str) {
        let length = text.floor_char_boundary(TEXT_BYTES_MAX);
        self.u8(11);
        self.u16(length as u16);
        self.bytes(&text.as_bytes()[..length]);
    }
}

const MISMATCHES: [Mismatch; 9] = [
    Mismatch::Magic,
    Mismatch::Version,
    Mismatch::HeaderChecksum,
    Mismatch::Namespace,
    Mismatch::Key,
    Mismatch::Generation,
    Mismatch::Length,
    Mismatch::Payload,
    Mismatch::Prefix,
];

fn mismatch(code: u8) -> Result<Mismatch, Malformed> {
    let found = MISMATCHES.get(usize::from(code)).copied();
    found.ok_or(Malformed::Unknown { field: "a damage", value: code })
}

fn mismatch_code(mismatch: Mismatch) -> u8 {
    let place = MISMATCHES.iter().position(|it| *it == mismatch);
    place.expect("every kind of damage has a number") as u8
}
