//! A client's view of its nodes: whether all are members of one store with the client's own list.
//!
//! A member with the client's seat proves that objects were placed by this list. A node without a
//! store proves nothing: it may be new to the list, and objects that it lacks may be elsewhere. It
//! is made a member of the store that the others agree on. If none is a member, the nodes found a
//! store once all of them are known to be empty. If two nodes contradict each other, none is
//! trusted.

use parking_lot::Mutex;

use super::config::NodesConfig;
use super::membership::{Mark, Membership, Standing, addresses, founded_by, seats};
use terrace_l3::StoreError;

#[derive(Debug)]
pub(super) struct MembershipView {
    names: Vec<String>,
    seats: Vec<Mark>,
    addresses: Mark,
    /// All nodes in the order of their names.
    order: Vec<usize>,
    entries: Mutex<Vec<NodeRecord>>,
}

/// Knowledge about a node.
#[derive(Clone, Debug, Default)]
struct NodeRecord {
    /// Standing that the node last reported.
    standing: Option<Standing>,
    /// The node does not let this client make it a member.
    refuses: bool,
}

/// Agreement of the nodes with the client and with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Agreement {
    /// All are members of one store.
    Full,
    /// Some are unknown or not members; the others agree.
    Partial,
    /// They cannot all have been used with this list.
    None,
}

/// A node has another seat, or two nodes are members of different stores.
struct Contradiction;

impl MembershipView {
    pub(super) fn new(config: &NodesConfig) -> Self {
        let names: Vec<String> = config.nodes.iter().map(|node| node.name.clone()).collect();
        let mut order: Vec<usize> = (0..names.len()).collect();
        order.sort_by_key(|number| &names[*number]);
        let entries = Mutex::new(vec![NodeRecord::default(); names.len()]);
        Self { names, seats: seats(config), addresses: addresses(config), order, entries }
    }

    /// Seat of a node.
    pub(super) fn seat(&self, number: usize) -> Mark {
        self.seats[number]
    }

    /// Digest of the addresses of all nodes.
    pub(super) fn addresses(&self) -> Mark {
        self.addresses
    }

    /// All nodes in the order in which they are made members, the same for all clients.
    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    pub(super) fn agreement(&self) -> Agreement {
        let entries = self.entries.lock();
        match self.store(&entries) {
            Err(Contradiction) => Agreement::None,
            Ok(_) if entries.iter().all(|entry| entry.member().is_some()) => Agreement::Full,
            Ok(_) => Agreement::Partial,
        }
    }

    /// Returns true if an object that this node should hold and lacks is nowhere else.
    pub(super) fn is_confirmed(&self, number: usize) -> bool {
        let entries = self.entries.lock();
        entries[number].member().is_some() && self.store(&entries).is_ok()
    }

    /// Store that a node should join, if it can be determined.
    pub(super) fn to_join(&self, number: usize) -> Option<Mark> {
        let entries = self.entries.lock();
        let entry = &entries[number];
        let standing = entry.standing.filter(|it| it.member.is_none() && !entry.refuses)?;
        let founded = self.founded(&entries);
        match self.store(&entries).ok()? {
            Some(store) => {
                let mut members = entries.iter().filter_map(NodeRecord::member);
                let is_where_it_was = members.all(|member| member.addresses == self.addresses);
                let was_started_again = !standing.is_durable && is_where_it_was;
                (was_started_again || founded == Some(store)).then_some(store)
            }
            // If several clients found a store concurrently, the first node decides which of them
            // succeeds.
            None => founded.filter(|_| number == self.order[0]),
        }
    }

    /// Records the standing of a node.
    pub(super) fn note(&self, number: usize, standing: Standing) {
        let mut entries = self.entries.lock();
        let was_well = self.store(&entries).is_ok();
        let before = entries[number].standing.replace(standing);
        if before.is_none_or(|before| before.birth != standing.birth) {
            entries[number].refuses = false;
        }
        let name = &self.names[number];
        match self.store(&entries) {
            Err(Contradiction) if was_well => tracing::warn!(
                "L3 is not used: node {name} belongs to another store, or was used with another list of nodes; \
                 use the list that all clients use, or change it as docs/nodes.md says"
            ),
            Ok(Some(_)) if standing.member.is_none() && before != Some(standing) => {
                drop(entries);
                if self.to_join(number).is_none() {
                    tracing::warn!(
                        "node {name} has nothing of what it had: what it has not got counts as unknown. Mount its disk \
                         and restart it, correct its address, or accept the loss with `terrace nodes --change`"
                    );
                }
            }
            Err(Contradiction) | Ok(_) => {}
        }
    }

    /// Records that a node has refused to become a member.
    pub(super) fn note_refusal(&self, number: usize, error: &StoreError) {
        tracing::debug!("node {} cannot be made a member: {error}", self.names[number]);
        self.entries.lock()[number].refuses = true;
    }

    /// Returns true if the node is a member with this client's seat, as far as is known.
    pub(super) fn is_member(&self, number: usize) -> bool {
        let member = self.entries.lock()[number].member();
        member.is_some_and(|member| member.seat == self.seats[number])
    }

    /// Store that all known members belong to.
    fn store(&self, entries: &[NodeRecord]) -> Result<Option<Mark>, Contradiction> {
        let mut agreed = None;
        for (entry, seat) in entries.iter().zip(&self.seats) {
            let Some(member) = entry.member() else { continue };
            if member.seat != *seat || agreed.is_some_and(|store| store != member.store) {
                return Err(Contradiction);
            }
            agreed = Some(member.store);
        }
        Ok(agreed)
    }

    /// Store that the nodes found or have founded together, if all of them are known.
    fn founded(&self, entries: &[NodeRecord]) -> Option<Mark> {
        let births = self.order.iter().map(|number| Some(entries[*number].standing?.birth));
        births.collect::<Option<Vec<_>>>().map(founded_by)
    }
}

impl NodeRecord {
    fn member(&self) -> Option<Membership> {
        self.standing?.member
    }
}

#[cfg(test)]
mod tests {
    use super::super::handshake::NodeSecret;
    use super::*;

    const MEMORY: bool = false;
    const DISK: bool = true;

    fn roll() -> MembershipView {
        let nodes = ["b=h:2", "a=h:1", "c=h:3"].map(|node| node.parse().unwrap());
        MembershipView::new(&NodesConfig::new(nodes.into(), NodeSecret::new(&[1; 16]).unwrap()))
    }

    fn born(number: u8, is_durable: bool) -> Standing {
        Standing { birth: Mark([number; 16]), is_durable, member: None }
    }

    fn member(roll: &MembershipView, number: usize, store: Mark) -> Standing {
        let member = Membership { store, seat: roll.seat(number), addresses: roll.addresses() };
        let member = Some(member);
        Standing { member, ..born(number as u8, DISK) }
    }

    fn joins(roll: &MembershipView) -> Vec<Option<Mark>> {
        (0..3).map(|number| roll.to_join(number)).collect()
    }

    #[test]
    fn a_store_is_founded_when_all_nodes_are_known() {
        let roll = roll();
        assert_eq!(roll.order(), [1, 0, 2]);
        for number in [0, 1] {
            roll.note(number, born(number as u8, DISK));
            assert_eq!(joins(&roll), [None; 3], "the other may know more");
        }
        roll.note(2, born(2, DISK));
        let founded = founded_by([1, 0, 2].map(|number| Mark([number; 16])));
        assert_eq!(joins(&roll), [None, Some(founded), None]);
        // The client that started to found the store did not finish.
        roll.note(1, member(&roll, 1, founded));
        assert_eq!(joins(&roll), [Some(founded), None, Some(founded)]);
        assert!(roll.is_confirmed(1) && !roll.is_confirmed(0));
        assert_eq!(roll.agreement(), Agreement::Partial);
        roll.note(0, member(&roll, 0, founded));
        roll.note(2, member(&roll, 2, founded));
        assert_eq!(roll.agreement(), Agreement::Full);
    }

    #[test]
    fn lost_memory_is_recognised_and_a_lost_disk_is_reported() {
        for (is_durable, expected) in [(MEMORY, true), (DISK, false)] {
            let roll = roll();
            let store = Mark([9; 16]);
            roll.note(0, member(&roll, 0, store));
            roll.note(1, born(7, is_durable));
            assert_eq!(roll.to_join(1), expected.then_some(store));
            assert!(!roll.is_confirmed(1) && roll.is_confirmed(0));
            roll.note_refusal(1, &StoreError::Forbidden);
            assert_eq!(roll.to_join(1), None);
        }
    }

    #[test]
    fn a_node_at_another_address_does_not_count_as_restarted() {
        let (here, store) = (roll(), Mark([9; 16]));
        let nodes = ["b=h:2", "a=h:7", "c=h:3"].map(|node| node.parse().unwrap());
        let moved = MembershipView::new(&NodesConfig::new(
            nodes.into(),
            NodeSecret::new(&[1; 16]).unwrap(),
        ));
        for (roll, expected) in [(&here, Some(store)), (&moved, None)] {
            roll.note(0, member(&here, 0, store));
            roll.note(1, born(1, MEMORY));
            assert_eq!(roll.to_join(1), expected);
        }
        // With its old data, it is accepted.
        moved.note(1, member(&here, 1, store));
        assert!(moved.is_confirmed(1));
    }

    #[test]
    fn contradicting_nodes_are_not_trusted() {
        let store = Mark([9; 16]);
        let swapped: fn(&MembershipView) -> Standing = |roll| member(roll, 1, Mark([9; 16]));
        let foreign: fn(&MembershipView) -> Standing = |roll| member(roll, 2, Mark([8; 16]));
        for other in [swapped, foreign] {
            let roll = roll();
            roll.note(0, member(&roll, 0, store));
            roll.note(1, born(1, MEMORY));
            assert!(roll.to_join(1).is_some());
            roll.note(2, other(&roll));
            assert_eq!(roll.agreement(), Agreement::None);
            assert_eq!(joins(&roll), [None; 3]);
            assert!(!roll.is_confirmed(0));
            // It has the right seat again.
            roll.note(2, member(&roll, 2, store));
            assert!(roll.is_confirmed(0) && roll.to_join(1).is_some());
        }
    }
}
