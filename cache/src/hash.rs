//! Maps and sets whose keys are hashes already. Lookups only: their order means nothing and is
//! never looked at.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

/// Takes bits of the key as its hash.
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
        self.0 = bits;
    }

    fn write_u128(&mut self, bits: u128) {
        self.0 = bits as u64;
    }
}

/// A map from hashes.
pub type HashedMap<K, V> = HashMap<K, V, BuildHasherDefault<KeepBits>>;
/// A set of hashes.
pub type HashedSet<K> = HashSet<K, BuildHasherDefault<KeepBits>>;
