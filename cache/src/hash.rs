//! Maps and sets that hash the same way in every process. Lookups only: their order means nothing
//! and is never looked at.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// Takes bits of a 128-bit key as its hash, since they are hashed already, and spreads the bits of
/// shorter ones.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeepBits(u64);

impl Hasher for KeepBits {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, bits: u64) {
        self.0 = bits.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_u128(&mut self, bits: u128) {
        self.0 = bits as u64;
    }
}

/// A map that is only looked up.
pub type HashedMap<K, V> = HashMap<K, V, BuildHasherDefault<KeepBits>>;
/// A set that is only looked up.
pub type HashedSet<K> = HashSet<K, BuildHasherDefault<KeepBits>>;
