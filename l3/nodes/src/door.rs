//! The door of a node: connections that have proved nothing yet.
//!
//! A handshake takes a moment. When all places are taken, whoever has stood there longest gives way to the
//! newcomer, of those from the address that has the most: so silent ones keep out neither others nor those who
//! come from the same machine.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

#[derive(Debug)]
pub(super) struct Door {
    places: usize,
    strangers: Mutex<Strangers>,
}

#[derive(Debug, Default)]
struct Strangers {
    next: u64,
    /// In the order in which they came: from where, and how they are told to go.
    here: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
}

/// A place at the door.
#[derive(Debug)]
pub(super) struct Place {
    door: Arc<Door>,
    number: u64,
    told: oneshot::Receiver<()>,
}

impl Door {
    /// A door with so many places, at least one.
    pub(super) fn new(places: usize) -> Arc<Self> {
        Arc::new(Self { places: places.max(1), strangers: Mutex::default() })
    }

    /// Takes a place, which may be somebody else's.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> Place {
        let origin = origin(address);
        let (tell, told) = oneshot::channel();
        let mut strangers = self.strangers.lock();
        if strangers.here.len() >= self.places {
            let last = strangers.longest_of_the_most();
            if let Some((_, tell)) = last.and_then(|last| strangers.here.remove(&last)) {
                // Whoever does not listen any more has gone already.
                let _ = tell.send(());
            }
        }
        let number = strangers.next;
        strangers.next += 1;
        strangers.here.insert(number, (origin, tell));
        drop(strangers);
        Place { door: self.clone(), number, told }
    }
}

impl Strangers {
    /// Who has stood here longest, of those from the address that has the most.
    fn longest_of_the_most(&self) -> Option<u64> {
        let mut origins: BTreeMap<IpAddr, (usize, u64)> = BTreeMap::new();
        for (number, (origin, _)) in &self.here {
            origins.entry(*origin).or_insert((0, *number)).0 += 1;
        }
        let most = origins.into_values().max_by_key(|(count, first)| (*count, u64::MAX - first));
        most.map(|(_, first)| first)
    }
}

impl Place {
    /// Comes when the place is another's.
    pub(super) async fn lost(&mut self) {
        // The door drops no sender without a word while this is there.
        let _ = (&mut self.told).await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.door.strangers.lock().here.remove(&self.number);
    }
}

/// Where somebody comes from: a machine has one address, or a whole network of the sixth version.
fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// A warning that strangers can cause, and so is given now and then only.
#[derive(Debug, Default)]
pub(super) struct SparingWarning {
    unsaid: Mutex<(Option<Instant>, u64)>,
}

impl SparingWarning {
    /// Says it, unless it was said a moment ago.
    pub(super) fn say(&self, what: fmt::Arguments<'_>) {
        const PAUSE: Duration = Duration::from_secs(5);
        let now = Instant::now();
        let mut unsaid = self.unsaid.lock();
        let (said, count) = &mut *unsaid;
        if said.is_some_and(|said| now - said < PAUSE) {
            *count += 1;
            return;
        }
        match std::mem::take(count) {
            0 => tracing::warn!("{what}"),
            others => tracing::warn!("{what} (and {others} more since the last message)"),
        }
        *said = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_lost(place: &mut Place) -> bool {
        place.told.try_recv().is_ok()
    }

    #[test]
    fn the_longest_of_the_most_gives_way() {
        let door = Door::new(4);
        let enter = |address: &str| door.enter(address.parse().unwrap());
        let mut alone = enter("10.0.0.1");
        let mut crowd = ["10.0.0.2", "10.0.0.2", "10.0.0.2"].map(enter);
        let mut other = enter("10.0.0.3");
        assert_eq!(crowd.each_mut().map(is_lost), [true, false, false]);
        let _new = enter("10.0.0.2");
        assert_eq!(crowd.each_mut().map(is_lost), [false, true, false], "each is told once");
        assert!(!is_lost(&mut alone) && !is_lost(&mut other));
        // One that has gone leaves its place.
        drop(alone);
        let _another = enter("10.0.0.4");
        assert!(!is_lost(&mut crowd[2]) && !is_lost(&mut other));
    }

    #[test]
    fn a_network_of_the_sixth_version_counts_as_one() {
        let door = Door::new(2);
        let enter = |address: &str| door.enter(address.parse().unwrap());
        let mut alone = enter("::ffff:10.0.0.1");
        let mut one = enter("fd00::1");
        let _other = enter("fd00::2");
        assert!(is_lost(&mut alone), "of as many, the first");
        let _third = enter("fd00::3");
        assert!(is_lost(&mut one));
    }
}
