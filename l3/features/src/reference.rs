//! Refs that a producer passes to a consumer.

use std::fmt;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::config::Secret;
use super::error::FeatureError;
use super::keys::OWNERS_MAX;
use super::tensor::TensorSpec;
use super::{check_specs, generation, keys};

/// Names one generation of a sample and describes its tensors. It is small, serialises with serde,
/// and can be copied and sent anywhere; it does not keep the sample alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureRef {
    pub(super) store: String,
    pub(super) sample: String,
    pub(super) generation: u64,
    pub(super) tensors: Vec<TensorSpec>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) retain: bool,
    /// It was given out before the sample was put.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) promised: bool,
    /// With a secret, a MAC of each tensor's bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) contents: Vec<Mac>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) mac: Option<Mac>,
}

impl FeatureRef {
    /// Creates the ref of a sample that producer `owner` of the store is about to put with
    /// [`FeatureStore::keep`](super::FeatureStore::keep): for callers that must answer before the
    /// bytes are in place, in the same process or another. Until it is put, readers find the sample
    /// [gone](FeatureError::Gone). With `retain_on_release` it stays for further epochs.
    ///
    /// In a store with a secret, the ref needs the same `secret`. It cannot be bound to bytes that
    /// do not exist yet, so readers compare the sample with the record of its producer.
    ///
    /// # Errors
    /// If no such sample can be put.
    pub fn promise(
        store: &str,
        owner: u16,
        sample: &str,
        tensors: Vec<TensorSpec>,
        retain_on_release: bool,
        secret: Option<&Secret>,
    ) -> Result<Self, FeatureError> {
        keys::check_name("the store", store)?;
        keys::check_sample(sample)?;
        check_specs(&tensors)?;
        if owner >= OWNERS_MAX {
            return Err(FeatureError::Config(format!("owner must be a number below {OWNERS_MAX}")));
        }
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_ms = since.unwrap_or(Duration::ZERO).as_millis() as u64;
        let promise = Self {
            store: store.to_owned(),
            sample: sample.to_owned(),
            generation: generation::take(0, now_ms, owner),
            tensors,
            retain: retain_on_release,
            promised: true,
            contents: Vec::new(),
            mac: None,
        };
        Ok(promise.sign(secret))
    }

    /// Name of the sample.
    #[must_use]
    pub fn sample(&self) -> &str {
        &self.sample
    }

    /// Generation of the sample: higher than those that it superseded.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The tensors, in the order in which they were put.
    #[must_use]
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Returns true if the ref was given out before the sample was put: then waiting for it makes
    /// sense.
    #[must_use]
    pub fn is_promised(&self) -> bool {
        self.promised
    }

    /// Total size of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().filter_map(TensorSpec::bytes).map(|bytes| bytes as u64).sum()
    }

    pub(super) fn sign(mut self, secret: Option<&Secret>) -> Self {
        self.mac = secret.map(|secret| self.code(secret));
        self
    }

    pub(super) fn is_authentic(&self, secret: &Secret) -> bool {
        // The comparison takes constant time.
        self.mac.is_some_and(|mac| mac.0 == self.code(secret).0)
    }

    fn code(&self, secret: &Secret) -> Mac {
        let mut hasher = secret.for_refs();
        let text = |hasher: &mut blake3::Hasher, text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        let number = |hasher: &mut blake3::Hasher, number: u64| {
            hasher.update(&number.to_le_bytes());
        };
        text(&mut hasher, &self.store);
        text(&mut hasher, &self.sample);
        number(&mut hasher, self.generation);
        number(&mut hasher, self.retain.into());
        number(&mut hasher, self.promised.into());
        number(&mut hasher, self.tensors.len() as u64);
        for TensorSpec { name, dtype, shape } in &self.tensors {
            text(&mut hasher, name);
            text(&mut hasher, dtype.name());
            number(&mut hasher, shape.len() as u64);
            shape.iter().for_each(|size| number(&mut hasher, *size));
        }
        number(&mut hasher, self.contents.len() as u64);
        for Mac(content) in &self.contents {
            hasher.update(content.as_bytes());
        }
        Mac(hasher.finalize())
    }
}

/// A message authentication code, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Mac(pub(super) blake3::Hash);

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mac({})", self.0.to_hex())
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_hex())
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        blake3::Hash::from_hex(text).map(Mac).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;

    #[test]
    fn every_part_of_a_ref_is_authenticated() {
        let secret = Secret::new(b"of this run");
        let plain = FeatureRef {
            store: "run".to_owned(),
            sample: "7".to_owned(),
            generation: 3,
            tensors: vec![TensorSpec::new("hidden", Dtype::Bf16, [4, 8])],
            retain: false,
            promised: false,
            contents: vec![Mac(secret.of_tensor(&[7; 64]))],
            mac: None,
        };
        assert!(!plain.is_authentic(&secret), "it is not signed");
        let signed = plain.sign(Some(&secret));
        assert!(signed.is_authentic(&secret));
        assert!(!signed.is_authentic(&Secret::new(b"of another run")));
        let changes: [fn(&mut FeatureRef); 11] = [
            |changed| changed.store.push('x'),
            |changed| changed.sample = "8".to_owned(),
            |changed| changed.generation += 1,
            |changed| changed.retain = true,
            |changed| changed.promised = true,
            |changed| changed.tensors[0].name.push('x'),
            |changed| changed.tensors[0].dtype = Dtype::F16,
            |changed| changed.tensors[0].shape = vec![8, 4],
            |changed| changed.tensors.push(changed.tensors[0].clone()),
            |changed| changed.contents.clear(),
            |changed| changed.contents[0] = Mac(blake3::hash(b"other")),
        ];
        for change in changes {
            let mut changed = signed.clone();
            change(&mut changed);
            assert!(!changed.is_authentic(&secret), "{changed:?}");
        }
    }
}
