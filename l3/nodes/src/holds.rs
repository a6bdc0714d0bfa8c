//! Users of a node: processes, and the pin owners that they are connected for.
//!
//! A process, or all processes of a restricted client, share one quota of the node.
//!
//! A process may have many connections, and may lose all of them for a while. When no connection is
//! left for an owner, its pins expire after the node's patience.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use terrace_l3::Owner;
use terrace_l3::backend::Share;

/// Id of the process that a connection belongs to.
pub(super) type Instance = [u8; 16];

#[derive(Debug, Default)]
pub(super) struct Holds {
    users: Mutex<BTreeMap<User, UserConnections>>,
    /// Number of connections per owner.
    owners: Mutex<BTreeMap<Owner, usize>>,
}

/// Unit that has one quota of the node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum User {
    /// A process of an unrestricted client.
    Process(Instance),
    /// All processes of a restricted client, since a process chooses its id itself.
    Client(String),
}

/// Quota of a user. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Portion {
    /// Permits for objects in memory that are in transfer from or to the user.
    pub(super) objects: Arc<Semaphore>,
    /// Quota of the scratch memory, if there is any.
    pub(super) scratch: Option<Share>,
}

#[derive(Debug)]
struct UserConnections {
    connections: usize,
    portion: Portion,
}

impl Holds {
    /// Adds a connection of a user, unless it has its maximum. All its connections share one quota.
    pub(super) fn enter(
        &self,
        user: &User,
        connections_max: usize,
        portion: impl FnOnce() -> Portion,
    ) -> Option<Portion> {
        let mut users = self.users.lock();
        let presence = users
            .entry(user.clone())
            .or_insert_with(|| UserConnections { connections: 0, portion: portion() });
        (presence.connections < connections_max).then(|| {
            presence.connections += 1;
            presence.portion.clone()
        })
    }

    /// Removes a connection of a user.
    pub(super) fn leave(&self, user: User) {
        if let Entry::Occupied(mut presence) = self.users.lock().entry(user) {
            presence.get_mut().connections -= 1;
            if presence.get().connections == 0 {
                presence.remove();
            }
        }
    }

    /// Adds a connection for an owner. Runs `change` under the lock, before another session sees
    /// the count.
    pub(super) fn stand_for(&self, owner: Owner, change: impl FnOnce()) {
        let mut owners = self.owners.lock();
        *owners.entry(owner).or_default() += 1;
        change();
    }

    /// Removes a connection for an owner. Runs `change` if it was the last.
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
    }

    #[test]
    fn a_user_has_as_many_connections_as_it_may_have() {
        let holds = Holds::default();
        let portion = || Portion { objects: Arc::new(Semaphore::new(1)), scratch: None };
        let user = User::Client("it".to_owned());
        let enter = || holds.enter(&user, 2, portion).is_some();
        assert_eq!([enter(), enter(), enter()], [true, true, false]);
        assert!(holds.enter(&User::Process([1; 16]), 1, portion).is_some());
        holds.leave(user.clone());
        assert_eq!([enter(), enter()], [true, false]);
        holds.leave(user.clone());
        holds.leave(user.clone());
        holds.leave(User::Process([1; 16]));
        assert!(holds.users.lock().is_empty());
    }
}
