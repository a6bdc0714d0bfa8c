//! Order of admission.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use terrace_cache::is_name_of;

/// Order in which queued requests are admitted. Requests that were submitted longer than `wait_max_ms` ago are first
/// in any order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdmissionOrder {
    /// First come, first served.
    #[default]
    Arrival,
    /// Highest priority first, then by arrival.
    Priority,
    /// Retracted requests first, then by the longest cached prefix.
    LongestPrefix,
}

impl AdmissionOrder {
    /// Every order.
    pub const ALL: [AdmissionOrder; 3] = [Self::Arrival, Self::Priority, Self::LongestPrefix];

    /// Name in flags, files and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Arrival => "arrival",
            Self::Priority => "priority",
            Self::LongestPrefix => "longest-prefix",
        }
    }
}

impl fmt::Display for AdmissionOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for AdmissionOrder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|order| is_name_of(text, order.name()));
        named.ok_or_else(|| "use arrival, priority or longest-prefix".to_owned())
    }
}

impl Serialize for AdmissionOrder {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for AdmissionOrder {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_is_parsed_as_printed_and_with_underscores() {
        for order in AdmissionOrder::ALL {
            assert_eq!(order.to_string().parse(), Ok(order));
            assert_eq!(order.name().replace('-', "_").parse(), Ok(order));
            let json = serde_json::to_string(&order).unwrap();
            assert_eq!(json, format!("\"{order}\""));
            assert_eq!(serde_json::from_str::<AdmissionOrder>(&json).unwrap(), order);
            let advice = "random".parse::<AdmissionOrder>().unwrap_err();
            assert!(advice.contains(order.name()), "{advice}");
        }
    }
}
