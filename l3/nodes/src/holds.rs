//! Who uses a node: which processes, and for which owners of pins.
//!
//! A process, or all processes of a client that is restricted, use their portion of the node together.
//!
//! A process may have many connections, and lose them all for a while. The pins of an owner that nobody has a
//! connection for are given up after the node's patience.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Semaphore;

use terrace_l3::Owner;
use terrace_l3_disk::holding::Share;

/// Which process a connection belongs to.
pub(super) type Instance = [u8; 16];

#[derive(Debug, Default)]
pub(super) struct Holds {
    users: Mutex<BTreeMap<User, Presence>>,
    /// How many connections stand for each owner.
    owners: Mutex<BTreeMap<Owner, usize>>,
}

/// Who shares a portion of the node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum User {
    /// A process whose client may use everything.
    Process(Instance),
    /// All processes of a restricted client, since a process says itself which one it is.
    Client(String),
}

/// What a user may have at a time. Clones are the same portion.
#[derive(Clone, Debug)]
pub(super) struct Portion {
    /// Objects in memory that are on their way from or to the user.
    pub(super) objects: Arc<Semaphore>,
    /// Of the memory for transfers of what is on disk only, where there is such.
    pub(super) scratch: Option<Share>,
}

#[derive(Debug)]
struct Presence {
    connections: usize,
    portion: Portion,
}

impl Holds {
    /// A user has one more connection, unless it has as many as it may have. All of them use the same portion.
    pub(super) fn enter(
        &self,
        user: &User,
        connections_max: usize,
        portion: impl FnOnce() -> Portion,
    ) -> Option<Portion> {
        let mut users = self.users.lock();
        let presence = users
            .entry(user.clone())
            .or_insert_with(|| Presence { connections: 0, portion: portion() });
        (presence.connections < connections_max).then(|| {
            presence.connections += 1;
            presence.portion.clone()
        })
    }

    /// A user has one connection less.
    pub(super) fn leave(&self, user: User) {
        if let Entry::Occupied(mut presence) = self.users.lock().entry(user) {
            presence.get_mut().connections -= 1;
            if presence.get().connections == 0 {
                presence.remove();
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
