//! Whose hard pins they are, so that those of a client that is gone do not stay for ever.
//!
//! A client is a process; it may have many connections, and lose them all for a while. Its pins are
//! given up when it has had none for longer than the node's patience.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use terrace_l3::ObjectId;
use terrace_l3_disk::holding::Share;

/// Which process a connection belongs to.
pub(super) type Instance = [u8; 16];

#[derive(Debug, Default)]
pub(super) struct Holds {
    clients: Mutex<BTreeMap<Instance, Client>>,
}

#[derive(Debug, Default)]
struct Client {
    connections: usize,
    /// Since when there are none.
    gone_since: Option<Instant>,
    pins: BTreeMap<ObjectId, u32>,
    /// What it may have of the memory for transfers.
    share: Option<Share>,
}

impl Holds {
    /// A client has one more connection. All that it has use the same share of the memory for transfers.
    pub(super) fn enter(
        &self,
        instance: Instance,
        share: impl FnOnce() -> Option<Share>,
    ) -> Option<Share> {
        let mut clients = self.clients.lock();
        let client = clients.entry(instance).or_default();
        client.connections += 1;
        client.gone_since = None;
        client.share = client.share.take().or_else(share);
        client.share.clone()
    }

    /// A client has one connection less.
    pub(super) fn leave(&self, instance: Instance, now: Instant) {
        let mut clients = self.clients.lock();
        let Some(client) = clients.get_mut(&instance) else { return };
        client.connections -= 1;
        if client.connections == 0 {
            client.gone_since = Some(now);
            if client.pins.is_empty() {
                clients.remove(&instance);
            }
        }
    }

    pub(super) fn pinned(&self, instance: Instance, id: ObjectId) {
        let mut clients = self.clients.lock();
        *clients.entry(instance).or_default().pins.entry(id).or_default() += 1;
    }

    /// One pin of the object is gone: this client's if it had one, or else another's, since whoever
    /// consumes an object may take back its producer's pin.
    pub(super) fn unpinned(&self, instance: Instance, id: &ObjectId) {
        let mut clients = self.clients.lock();
        let own = clients.get_mut(&instance).filter(|client| client.pins.contains_key(id));
        let holder = match own {
            Some(own) => Some(own),
            None => clients.values_mut().find(|client| client.pins.contains_key(id)),
        };
        let Some(client) = holder else { return };
        let count = client.pins.get_mut(id).expect("it was looked for");
        *count -= 1;
        if *count == 0 {
            client.pins.remove(id);
        }
    }

    /// The object is gone, and all pins with it.
    pub(super) fn forget(&self, id: &ObjectId) {
        for client in self.clients.lock().values_mut() {
            client.pins.remove(id);
        }
    }

    /// Whether the client holds anything.
    pub(super) fn has_pins(&self, instance: Instance) -> bool {
        self.clients.lock().get(&instance).is_some_and(|client| !client.pins.is_empty())
    }

    /// The pins of clients that have been gone for so long, as often as each was pinned.
    pub(super) fn take_abandoned(&self, now: Instant, patience: Duration) -> Vec<ObjectId> {
        let mut abandoned = Vec::new();
        self.clients.lock().retain(|_, client| {
            let is_gone = client.gone_since.is_some_and(|since| now - since >= patience);
            if is_gone {
                let each = client.pins.iter();
                abandoned.extend(each.flat_map(|(id, count)| vec![*id; *count as usize]));
            }
            !is_gone
        });
        abandoned
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_cache::PageKey;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn id(key: u128) -> ObjectId {
        ObjectId::page(PageKey(1), PageKey(key))
    }

    #[test]
    fn pins_of_the_gone_are_given_up_after_a_while_and_not_before() {
        let (holds, now) = (Holds::default(), Instant::now());
        holds.enter([1; 16], || None);
        holds.enter([1; 16], || None);
        holds.pinned([1; 16], id(1));
        holds.pinned([1; 16], id(1));
        holds.pinned([1; 16], id(2));
        holds.unpinned([1; 16], &id(2));
        holds.leave([1; 16], now);
        assert_eq!(holds.take_abandoned(now + 2 * PATIENCE, PATIENCE), [], "one is left");
        holds.leave([1; 16], now);
        assert!(holds.has_pins([1; 16]));
        assert_eq!(holds.take_abandoned(now + PATIENCE / 2, PATIENCE), []);
        holds.enter([1; 16], || None);
        assert_eq!(holds.take_abandoned(now + 2 * PATIENCE, PATIENCE), [], "it came back");
        holds.leave([1; 16], now);
        assert_eq!(holds.take_abandoned(now + PATIENCE, PATIENCE), [id(1), id(1)]);
        assert_eq!(holds.take_abandoned(now + 2 * PATIENCE, PATIENCE), []);
        assert!(holds.clients.lock().is_empty());
    }

    #[test]
    fn a_consumer_takes_back_the_pin_of_a_producer() {
        let (holds, now) = (Holds::default(), Instant::now());
        for client in [[1; 16], [2; 16]] {
            holds.enter(client, || None);
            holds.pinned(client, id(7));
        }
        holds.unpinned([2; 16], &id(7));
        assert!(holds.has_pins([1; 16]) && !holds.has_pins([2; 16]), "its own first");
        holds.unpinned([2; 16], &id(7));
        assert!(!holds.has_pins([1; 16]));
        holds.pinned([1; 16], id(8));
        holds.forget(&id(8));
        holds.leave([1; 16], now);
        assert_eq!(holds.take_abandoned(now + PATIENCE, PATIENCE), []);
    }
}
