//! Who uses a node: which processes, and for which owners of pins.
//!
//! A process may have many connections, and lose them all for a while. The pins of an owner that nobody has a
//! connection for are given up after the node's patience.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use parking_lot::Mutex;

use terrace_l3::Owner;
use terrace_l3_disk::holding::Share;

/// Which process a connection belongs to.
pub(super) type Instance = [u8; 16];

#[derive(Debug, Default)]
pub(super) struct Holds {
    clients: Mutex<BTreeMap<Instance, Client>>,
    /// How many connections stand for each owner.
    owners: Mutex<BTreeMap<Owner, usize>>,
}

#[derive(Debug, Default)]
struct Client {
    connections: usize,
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
        client.share = client.share.take().or_else(share);
        client.share.clone()
    }

    /// A client has one connection less.
    pub(super) fn leave(&self, instance: Instance) {
        if let Entry::Occupied(mut client) = self.clients.lock().entry(instance) {
            client.get_mut().connections -= 1;
            if client.get().connections == 0 {
                client.remove();
            }
        }
    }

    /// One more connection stands for the owner; `change` happens before anybody else hears of it.
    pub(super) fn stand_for(&self, owner: Owner, change: impl FnOnce()) {
        let mut owners = self.owners.lock();
        *owners.entry(owner).or_default() += 1;
        change();
    }

    /// One connection less does; `change` happens if it was the last.
    pub(super) fn stand_no_more(&self, owner: Owner, change: impl FnOnce()) {
        let mut owners = self.owners.lock();
        if let Entry::Occupied(mut connections) = owners.entry(owner) {
            *connections.get_mut() -= 1;
            if *connections.get() == 0 {
                connections.remove();
                change();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_gone_with_its_last_connection() {
        let (holds, owner) = (Holds::default(), Owner::named("it"));
        let gone = || {
            let mut gone = false;
            holds.stand_no_more(owner, || gone = true);
            gone
        };
        holds.stand_for(owner, || ());
        holds.stand_for(owner, || ());
        assert_eq!([gone(), gone(), gone()], [false, true, false]);
        assert!(holds.owners.lock().is_empty());
        holds.enter([1; 16], || None);
        holds.enter([1; 16], || None);
        holds.leave([1; 16]);
        assert_eq!(holds.clients.lock().len(), 1);
        holds.leave([1; 16]);
        assert!(holds.clients.lock().is_empty());
    }
}
