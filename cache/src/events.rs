//! KV events: what routers need to know about which prefixes this cache holds.

use serde::{Deserialize, Serialize};

use crate::key::PageKey;
use crate::tier::TierName;

/// One change of what the cache holds, in the order in which it happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "event")]
pub enum KvEvent {
    /// Pages became available in a tier.
    Stored {
        /// Where.
        tier: TierName,
        /// The namespace (model, adapter, tenant) they belong to.
        namespace: PageKey,
        /// The key of the page before the first of them; the namespace's digest if there is none.
        parent: PageKey,
        /// The pages' keys, in sequence order.
        keys: Vec<PageKey>,
    },
    /// Pages are gone from a tier.
    Removed {
        /// Where.
        tier: TierName,
        /// The namespace they belonged to.
        namespace: PageKey,
        /// The pages' keys.
        keys: Vec<PageKey>,
    },
    /// Forget everything heard so far; what follows starts from nothing.
    Cleared,
}

/// Events that wait to be drained, bounded.
///
/// When nobody drains them in time the log starts over with [`KvEvent::Cleared`]: a router then
/// knows less than the truth, never more.
#[derive(Debug, Default)]
pub struct KvEventLog {
    events: Vec<KvEvent>,
    keys: usize,
    keys_max: usize,
}

impl KvEventLog {
    pub(crate) fn new(keys_max: usize) -> Self {
        Self { events: Vec::new(), keys: 0, keys_max }
    }

    pub(crate) fn enabled(&self) -> bool {
        self.keys_max > 0
    }

    pub(crate) fn push(&mut self, event: KvEvent) {
        let keys = match &event {
            KvEvent::Stored { keys, .. } | KvEvent::Removed { keys, .. } => keys.len(),
            KvEvent::Cleared => 0,
        };
        if self.keys + keys > self.keys_max {
            self.clear();
            return;
        }
        self.keys += keys;
        self.events.push(event);
    }

    pub(crate) fn clear(&mut self) {
        self.events.clear();
        self.keys = 0;
        self.events.push(KvEvent::Cleared);
    }

    pub(crate) fn drain(&mut self) -> impl Iterator<Item = KvEvent> + '_ {
        self.keys = 0;
        self.events.drain(..)
    }
}
