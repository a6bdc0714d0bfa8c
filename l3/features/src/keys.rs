//! Names of the objects of a feature store: readable keys, and the ids derived from them.

use terrace_cache::PageKey;

use super::error::FeatureError;
use terrace_l3::ObjectId;

/// Maximum number of producers that share a store: each has a number below this.
pub const OWNERS_MAX: u16 = 1024;

/// Number of cells for claims on a sample, shared by all of its producers. A put reads all of them,
/// independent of the number of producers, and on a bucket each read is a request. A claim belongs
/// to its producer, and only this one removes it.
pub(super) const CELLS: u8 = 8;

/// Number of copies of the note that names the process with a producer's number.
pub(super) const OWNER_COPIES: u8 = 3;

/// Number of cells for each copy. One may be blocked by a process that died while it wrote there.
pub(super) const OWNER_CELLS: u8 = 4;

/// Maximum number of claims of a producer on a sample: the new claim is written before the old one
/// is removed.
pub(super) const CELLS_OF_ONE: usize = 2;

/// First cell that a put tries. It depends on the generation, so that concurrent puts of a sample
/// rarely collide, and a later search knows where to start.
pub(super) fn first_cell(generation: u64) -> u8 {
    (generation % u64::from(CELLS)) as u8
}

const NAME_BYTES_MAX: usize = 128;
/// Limited by the space in a record.
pub(super) const SAMPLE_BYTES_MAX: usize = 512;

/// Names of the objects of one store.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    store: String,
    tensors: PageKey,
    notes: PageKey,
}

impl Keys {
    pub(super) fn new(store: &str) -> Result<Self, FeatureError> {
        check_name("the store", store)?;
        Ok(Self {
            tensors: digest(&["terrace feature tensors 1", store]),
            notes: digest(&["terrace feature notes 3", store]),
            store: store.to_owned(),
        })
    }

    pub(super) fn store(&self) -> &str {
        &self.store
    }

    /// Key of a tensor. Keys are unique: the names of the store and the tensor have no slash, and
    /// the last number is the generation.
    pub(super) fn tensor_key(&self, sample: &str, generation: u64, name: &str) -> String {
        format!("{}/{sample}/g{generation}/{name}", self.store)
    }

    /// Key of a generation of a sample.
    pub(super) fn sample_key(&self, sample: &str, generation: u64) -> String {
        format!("{}/{sample}/g{generation}", self.store)
    }

    /// Id of the object with the bytes of a tensor.
    pub(super) fn tensor(&self, sample: &str, generation: u64, name: &str) -> ObjectId {
        let key = self.tensor_key(sample, generation, name);
        ObjectId::page(self.tensors, digest(&[&key]))
    }

    /// Id of a tensor's object from its recorded key.
    pub(super) fn tensor_of(&self, key: PageKey) -> ObjectId {
        ObjectId::page(self.tensors, key)
    }

    /// Id of the record of a producer in slot `slot`.
    pub(super) fn record(&self, owner: u16, slot: u32) -> ObjectId {
        self.note(&["record", &owner.to_string(), &slot.to_string()])
    }

    /// Id of a note that names the process with a producer's number. The cells of a copy are on one
    /// node, and the copies on different ones.
    pub(super) fn owner(&self, owner: u16, copy: u8, cell: u8) -> ObjectId {
        let (owner, copy) = (owner.to_string(), copy.to_string());
        let parts = ["owner", &owner, &copy, &cell.to_string()];
        self.note_beside(&format!("owner {owner} {copy}"), &parts)
    }

    /// Ids of all such notes of a producer's number.
    pub(super) fn owners(&self, owner: u16) -> Vec<ObjectId> {
        let copies =
            (0..OWNER_COPIES).flat_map(|copy| (0..OWNER_CELLS).map(move |cell| (copy, cell)));
        copies.map(|(copy, cell)| self.owner(owner, copy, cell)).collect()
    }

    /// Ids of the heartbeat notes of a process.
    pub(super) fn signs_of(&self, owner: u16) -> [ObjectId; 2] {
        ["0", "1"].map(|turn| self.note(&["sign", &owner.to_string(), turn]))
    }

    /// Id of a claim on a sample.
    pub(super) fn claim(&self, sample: &str, cell: u8) -> ObjectId {
        self.note_beside(sample, &["claim", &cell.to_string(), sample])
    }

    /// Ids of all claims on a sample.
    pub(super) fn claims(&self, sample: &str) -> Vec<ObjectId> {
        (0..CELLS).map(|cell| self.claim(sample, cell)).collect()
    }

    /// Id of the revocation of a generation, for the case that none of its objects could be
    /// removed.
    pub(super) fn revocation(&self, sample: &str, generation: u64) -> ObjectId {
        self.note_beside(sample, &["revoked", &generation.to_string(), sample])
    }

    /// Id of a note on the same node as the sample's other notes, so that one request finds them
    /// all: the lower half of the key decides.
    fn note_beside(&self, sample: &str, parts: &[&str]) -> ObjectId {
        let (name, place) = (digest(parts).0 >> 64 << 64, digest(&[sample]).0 as u64);
        ObjectId::page(self.notes, PageKey(name | u128::from(place)))
    }

    fn note(&self, parts: &[&str]) -> ObjectId {
        ObjectId::page(self.notes, digest(parts))
    }
}

/// Checks that a name can be part of a key.
pub(super) fn check_name(what: &'static str, name: &str) -> Result<(), FeatureError> {
    let fine = (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains('/');
    if fine { Ok(()) } else { Err(FeatureError::Name { what, max: NAME_BYTES_MAX }) }
}

pub(super) fn check_sample(sample: &str) -> Result<(), FeatureError> {
    let fine = (1..=SAMPLE_BYTES_MAX).contains(&sample.len());
    if fine { Ok(()) } else { Err(FeatureError::Sample { max: SAMPLE_BYTES_MAX }) }
}

fn digest(parts: &[&str]) -> PageKey {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let hash = hasher.finalize();
    let first = hash.as_bytes().first_chunk().expect("a hash has 32 bytes");
    PageKey(u128::from_le_bytes(*first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_the_same_in_every_process() {
        let keys = Keys::new("run-7").unwrap();
        assert_eq!(keys.tensor_key("a/b", 3, "hidden"), "run-7/a/b/g3/hidden");
        let id = keys.tensor("a/b", 3, "hidden");
        assert_eq!(id.namespace.to_string(), "b3a8b4dbb8fc2b49876501963bd7613f");
        assert_eq!(id.key.to_string(), "aea92a2295eda5f1307e10088aff295b");
        assert_eq!(id.generation, 0);
    }

    #[test]
    fn ambiguous_names_are_refused() {
        for bad in ["", "a/b", &"x".repeat(129)] {
            assert!(check_name("the store", bad).is_err(), "{bad:?}");
        }
        assert!(check_sample("").is_err() && check_sample(&"x".repeat(513)).is_err());
        assert!(check_sample("epoch 1/0007").is_ok());
    }
}
