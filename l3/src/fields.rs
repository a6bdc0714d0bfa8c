//! Parser for consecutive little-endian fields of headers, notes and messages.

use terrace_cache::PageKey;

use crate::object::ObjectId;

/// Reads consecutive fields; each read returns `None` if the bytes end before the field does.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Starts at the first of `bytes`.
    #[must_use]
    pub fn of(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Bytes that were not read yet.
    #[must_use]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Reads `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    /// Reads as many bytes as the array has.
    pub fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*taken)
    }

    /// Reads a number of 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a number of 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads a page key.
    pub fn key(&mut self) -> Option<PageKey> {
        self.array().map(|bytes| PageKey(u128::from_le_bytes(bytes)))
    }

    /// Reads an object id, as [`ObjectId::to_bytes`] writes it.
    pub fn id(&mut self) -> Option<ObjectId> {
        Some(ObjectId { namespace: self.key()?, key: self.key()?, generation: self.u64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_as_they_were_written_and_never_beyond_the_end() {
        let id = ObjectId { namespace: PageKey(7), key: PageKey(9 << 100), generation: 11 };
        let bytes = [&id.to_bytes()[..], &5u32.to_le_bytes(), b"rest"].concat();
        let mut fields = Fields::of(&bytes);
        assert_eq!((fields.id(), fields.u32()), (Some(id), Some(5)));
        assert_eq!(fields.u64(), None, "four bytes are left");
        assert_eq!((fields.bytes(3), fields.rest()), (Some(&b"res"[..]), &b"t"[..]));
        assert_eq!((fields.key(), fields.array::<2>(), fields.rest()), (None, None, &b"t"[..]));
        for length in 0..ObjectId::BYTES {
            assert_eq!(Fields::of(&bytes[..length]).id(), None);
        }
    }
}
