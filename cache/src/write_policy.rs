//! When device pages are copied to host.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::name::is_name_of;

const WRITE_THROUGH: &str = "write-through";
const SELECTIVE: &str = "selective-write-through";
const WRITE_BACK: &str = "write-back";
const ADVICE: &str = "use write-through, write-back or selective-write-through:HITS";

/// When device pages are copied to host. It is written as `write-through`, `write-back` or
/// `selective-write-through:HITS`; a file may also have the last as a table with `hits` in it.
///
/// ```
/// use terrace_cache::WritePolicy;
///
/// assert_eq!("write_through".parse(), Ok(WritePolicy::WriteThrough));
/// assert_eq!(WritePolicy::SelectiveWriteThrough { hits: 2 }.to_string(), "selective-write-through:2");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePolicy {
    /// All of them: those of a prompt when it is computed, the others when their request ends or is aborted.
    WriteThrough,
    /// When their request ends or is aborted, those that at least `hits` requests have found in the cache.
    SelectiveWriteThrough {
        /// Number of hits from which a page is copied to host.
        hits: u32,
    },
    /// When the device wants their room.
    WriteBack,
}

impl WritePolicy {
    /// Returns true if pages with this number of hits are copied when their request ends.
    #[must_use]
    pub fn writes_at_end(self, hits: u32) -> bool {
        match self {
            Self::WriteThrough => true,
            Self::SelectiveWriteThrough { hits: wanted } => hits >= wanted,
            Self::WriteBack => false,
        }
    }

    /// Tells whether the pages of a prompt are copied as soon as it is computed.
    #[must_use]
    pub fn writes_after_prefill(self) -> bool {
        match self {
            Self::WriteThrough => true,
            Self::SelectiveWriteThrough { .. } | Self::WriteBack => false,
        }
    }

    /// Returns true if pages without a host copy are copied before their eviction from device.
    #[must_use]
    pub fn writes_at_eviction(self) -> bool {
        match self {
            Self::WriteThrough | Self::SelectiveWriteThrough { .. } => false,
            Self::WriteBack => true,
        }
    }
}

impl fmt::Display for WritePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WriteThrough => f.write_str(WRITE_THROUGH),
            Self::SelectiveWriteThrough { hits } => write!(f, "{SELECTIVE}:{hits}"),
            Self::WriteBack => f.write_str(WRITE_BACK),
        }
    }
}

impl FromStr for WritePolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if is_name_of(text, WRITE_THROUGH) => Ok(Self::WriteThrough),
            None if is_name_of(text, WRITE_BACK) => Ok(Self::WriteBack),
            Some((name, hits)) if is_name_of(name, SELECTIVE) => match hits.trim().parse() {
                Ok(hits) if hits > 0 => Ok(Self::SelectiveWriteThrough { hits }),
                Ok(_) | Err(_) => Err("HITS must be a number of at least 1".to_owned()),
            },
            Some(_) | None => Err(ADVICE.to_owned()),
        }
    }
}

impl Serialize for WritePolicy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WritePolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Written;

        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Selective {
            hits: u32,
        }

        impl<'de> Visitor<'de> for Written {
            type Value = WritePolicy;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("write-through, write-back or selective-write-through:HITS")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<WritePolicy, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WritePolicy, A::Error> {
                match map.next_key::<String>()? {
                    Some(name) if is_name_of(&name, SELECTIVE) => {
                        let Selective { hits } = map.next_value()?;
                        match map.next_key::<String>()? {
                            None => Ok(WritePolicy::SelectiveWriteThrough { hits }),
                            Some(_) => Err(A::Error::custom(ADVICE)),
                        }
                    }
                    Some(_) | None => Err(A::Error::custom(ADVICE)),
                }
            }
        }

        deserializer.deserialize_any(Written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_parsed_in_its_current_and_former_spelling() {
        let selective = WritePolicy::SelectiveWriteThrough { hits: 3 };
        let cases = [
            (WritePolicy::WriteThrough, ["write-through", "write_through"]),
            (WritePolicy::WriteBack, ["write-back", "write_back"]),
            (selective, ["selective-write-through:3", "selective_write_through:3"]),
        ];
        for (policy, texts) in cases {
            assert_eq!(policy.to_string(), texts[0]);
            assert_eq!(serde_json::to_string(&policy).unwrap(), format!("\"{policy}\""));
            for text in texts {
                assert_eq!(text.parse(), Ok(policy));
                let json = format!("\"{text}\"");
                assert_eq!(serde_json::from_str::<WritePolicy>(&json).unwrap(), policy);
            }
        }
        for name in ["selective-write-through", "selective_write_through"] {
            let json = format!("{{\"{name}\": {{\"hits\": 3}}}}");
            assert_eq!(serde_json::from_str::<WritePolicy>(&json).unwrap(), selective);
        }
    }

    #[test]
    fn an_unknown_policy_is_rejected_with_the_known_ones() {
        for wrong in ["write", "", "write-through:2", "selective-write-through", "3"] {
            assert!(wrong.parse::<WritePolicy>().unwrap_err().contains("write-back"), "{wrong}");
        }
        for wrong in ["selective-write-through:", "selective-write-through:0"] {
            assert!(wrong.parse::<WritePolicy>().unwrap_err().contains("HITS"), "{wrong}");
        }
        for wrong in
            ["{}", "{\"write_back\": {}}", "{\"selective_write_through\": {\"hit\": 1}}", "3"]
        {
            assert!(serde_json::from_str::<WritePolicy>(wrong).is_err(), "{wrong}");
        }
    }
}
