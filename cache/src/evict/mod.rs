//! Eviction policies: which of the evictable nodes goes next.
//!
//! A policy sees only nodes that may go right now (unpinned and, in their tier, without children):
//! the tree offers a node when it becomes evictable and withdraws it when it no longer is. One
//! policy, one file.

mod fifo;
mod heap;
mod lfu;
mod lru;
mod priority;
mod ranked;
mod s3fifo;
mod slru;

use std::fmt::{self, Debug};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::name::is_name_of;
use crate::planted::{Bug, planted};
use crate::reach::Reach;

/// Use of a node. The tree keeps it, policies read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// A tick that no other node shares: when the node came to be.
    pub(crate) created: u64,
    /// The tick of the latest use.
    pub(crate) last_used: u64,
    /// Number of requests that found the node in the cache.
    pub(crate) hits: u32,
    /// The highest priority among the requests that used it.
    pub(crate) priority: i32,
    /// Bits of the first page's key: the same prefix has the same ones when it returns.
    pub(crate) fingerprint: u64,
    /// Deepest tier that the node may be written to: the deepest of all requests that used it.
    pub(crate) reach: Reach,
}

impl Usage {
    /// Returns true if it may be written to host.
    pub(crate) fn may_be_on_host(&self) -> bool {
        self.reach >= Reach::Host || planted(Bug::WriteBeyondReach)
    }

    /// Returns true if both have been used alike, regardless of their age.
    pub(crate) fn is_like(&self, other: &Usage) -> bool {
        (self.last_used, self.hits, self.priority) == (other.last_used, other.hits, other.priority)
    }
}

/// Chooses victims among the evictable nodes of one tier.
pub(crate) trait EvictionPolicy: Debug + Send + Sync {
    /// The node may be evicted from here on. Its usage does not change until it is withdrawn.
    fn offer(&mut self, node: u32, usage: &Usage);

    /// The node may not be evicted any more, or is gone.
    fn withdraw(&mut self, node: u32);

    /// The node to evict next. It stays on offer until withdrawn.
    fn victim(&mut self) -> Option<u32>;

    /// A victim was evicted, at least in part. Called before it is withdrawn.
    fn evicted(&mut self, _node: u32, _usage: &Usage) {}
}

/// The eviction policies on offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionKind {
    /// The least recently used goes first.
    #[default]
    Lru,
    /// The least often used goes first, among equals the least recently used.
    Lfu,
    /// Segmented LRU: what was never hit goes before what was.
    Slru,
    /// The oldest goes first.
    Fifo,
    /// The lowest priority goes first, among equals the least recently used.
    Priority,
    /// Three queues: newcomers prove themselves in a small one, returners are remembered.
    S3Fifo,
}

impl EvictionKind {
    /// Every policy, for those who want to try them all.
    pub const ALL: [EvictionKind; 6] =
        [Self::Lru, Self::Lfu, Self::Slru, Self::Fifo, Self::Priority, Self::S3Fifo];

    /// Name in flags, files and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Slru => "slru",
            Self::Fifo => "fifo",
            Self::Priority => "priority",
            Self::S3Fifo => "s3-fifo",
        }
    }

    /// Returns true if the policy evicts by the use of a node alone. Then it does not matter in which of two nodes
    /// with the same use a page is. The other policies also depend on a node's age or number.
    pub(crate) fn goes_by_use(self) -> bool {
        match self {
            Self::Lru | Self::Lfu | Self::Priority => true,
            Self::Slru | Self::Fifo | Self::S3Fifo => false,
        }
    }

    pub(crate) fn build(self) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(lru::policy()),
            Self::Lfu => Box::new(lfu::policy()),
            Self::Slru => Box::new(slru::Slru::default()),
            Self::Fifo => Box::new(fifo::policy()),
            Self::Priority => Box::new(priority::policy()),
            Self::S3Fifo => Box::new(s3fifo::S3Fifo::default()),
        }
    }
}

impl fmt::Display for EvictionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for EvictionKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|kind| is_name_of(text, kind.name()));
        named.ok_or_else(|| "use lru, lfu, slru, fifo, priority or s3-fifo".to_owned())
    }
}

impl Serialize for EvictionKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for EvictionKind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn every_policy_is_parsed_as_printed_and_with_underscores() {
        for kind in EvictionKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(kind.name().replace('-', "_").parse(), Ok(kind));
            let json = serde_json::to_string(&kind).unwrap();
            assert_eq!(json, format!("\"{kind}\""));
            assert_eq!(serde_json::from_str::<EvictionKind>(&json).unwrap(), kind);
            let advice = "random".parse::<EvictionKind>().unwrap_err();
            assert!(advice.contains(kind.name()), "{advice}");
        }
        assert_eq!("s3fifo".parse(), Ok(EvictionKind::S3Fifo));
    }

    pub(crate) fn usage(created: u64, last_used: u64, hits: u32) -> Usage {
        Usage { created, last_used, hits, priority: 0, fingerprint: created, reach: Reach::L3 }
    }

    /// Offers the nodes, evicts them all and tells in which order they went.
    pub(crate) fn order(policy: &mut dyn EvictionPolicy, nodes: &[Usage]) -> Vec<u32> {
        for (node, usage) in nodes.iter().enumerate() {
            policy.offer(node as u32, usage);
        }
        let mut gone = Vec::new();
        while let Some(node) = policy.victim() {
            policy.withdraw(node);
            gone.push(node);
        }
        gone
    }

    #[test]
    fn every_policy_evicts_each_offered_node_once_and_no_withdrawn_one() {
        for kind in EvictionKind::ALL {
            let mut policy = kind.build();
            for node in 0..100u32 {
                policy.offer(node, &usage(node.into(), u64::from(node * 7 % 100), node % 5));
            }
            for node in (0..100).step_by(3) {
                policy.withdraw(node);
            }
            let mut nodes = order(policy.as_mut(), &[]);
            nodes.sort_unstable();
            let expected: Vec<u32> = (0..100).filter(|node| node % 3 != 0).collect();
            assert_eq!(nodes, expected, "{kind:?}");
        }
    }
}
