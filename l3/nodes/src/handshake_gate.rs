//! Admission of unauthenticated connections.
//!
//! A handshake is short. When all places are taken, a new connection displaces the oldest one from
//! the address with the most connections. So silent connections block neither other addresses nor
//! other clients on the same machine.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

#[derive(Debug)]
pub(super) struct HandshakeGate {
    places: usize,
    strangers: Mutex<Unauthenticated>,
}

#[derive(Debug, Default)]
struct Unauthenticated {
    next: u64,
    /// In order of arrival: the origin, and the sender that tells the connection to close.
    here: BTreeMap<u64, (IpAddr, oneshot::Sender<()>)>,
}

/// Place of an unauthenticated connection.
#[derive(Debug)]
pub(super) struct HandshakeSlot {
    door: Arc<HandshakeGate>,
    number: u64,
    told: oneshot::Receiver<()>,
}

impl HandshakeGate {
    /// Creates a gate with `places` places, at least one.
    pub(super) fn new(places: usize) -> Arc<Self> {
        Arc::new(Self { places: places.max(1), strangers: Mutex::default() })
    }

    /// Takes a place, possibly that of another connection.
    pub(super) fn enter(self: &Arc<Self>, address: IpAddr) -> HandshakeSlot {
        let origin = origin(address);
        let (tell, told) = oneshot::channel();
        let mut strangers = self.strangers.lock();
        if strangers.here.len() >= self.places {
            let last = strangers.oldest_of_largest_origin();
            if let Some((_, tell)) = last.and_then(|last| strangers.here.remove(&last)) {
                // The other connection may have ended already.
                let _ = tell.send(());
            }
        }
        let number = strangers.next;
        strangers.next += 1;
        strangers.here.insert(number, (origin, tell));
        drop(strangers);
        HandshakeSlot { door: self.clone(), number, told }
    }
}

impl Unauthenticated {
    /// Oldest connection from the origin with the most connections.
    fn oldest_of_largest_origin(&self) -> Option<u64> {
        let mut origins: BTreeMap<IpAddr, (usize, u64)> = BTreeMap::new();
        for (number, (origin, _)) in &self.here {
            origins.entry(*origin).or_insert((0, *number)).0 += 1;
        }
        let most = origins.into_values().max_by_key(|(count, first)| (*count, u64::MAX - first));
        most.map(|(_, first)| first)
    }
}

impl HandshakeSlot {
    /// Resolves when the place was given to another connection.
    pub(super) async fn lost(&mut self) {
        // The sender is dropped without a message only after this place.
        let _ = (&mut self.told).await;
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        self.door.strangers.lock().here.remove(&self.number);
    }
}

/// Origin of a connection: an IPv4 address, or a whole IPv6 network.
fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

/// A rate-limited warning, for events that unauthenticated peers can cause.
#[derive(Debug, Default)]
pub(super) struct RateLimitedWarning {
    unsaid: Mutex<(Option<Instant>, u64)>,
}

impl RateLimitedWarning {
    /// Logs the warning, unless one was logged recently.
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

    fn is_lost(place: &mut HandshakeSlot) -> bool {
        place.told.try_recv().is_ok()
    }

    #[test]
    fn the_oldest_of_the_largest_origin_is_displaced() {
        let door = HandshakeGate::new(4);
        let enter = |address: &str| door.enter(address.parse().unwrap());
        let mut alone = enter("10.0.0.1");
        let mut crowd = ["10.0.0.2", "10.0.0.2", "10.0.0.2"].map(enter);
        let mut other = enter("10.0.0.3");
        assert_eq!(crowd.each_mut().map(is_lost), [true, false, false]);
        let _new = enter("10.0.0.2");
        assert_eq!(crowd.each_mut().map(is_lost), [false, true, false], "each is told once");
        assert!(!is_lost(&mut alone) && !is_lost(&mut other));
        // A connection that ends frees its place.
        drop(alone);
        let _another = enter("10.0.0.4");
        assert!(!is_lost(&mut crowd[2]) && !is_lost(&mut other));
    }

    #[test]
    fn an_ipv6_network_counts_as_one() {
        let door = HandshakeGate::new(2);
        let enter = |address: &str| door.enter(address.parse().unwrap());
        let mut alone = enter("::ffff:10.0.0.1");
        let mut one = enter("fd00::1");
        let _other = enter("fd00::2");
        assert!(is_lost(&mut alone), "the first of equals");
        let _third = enter("fd00::3");
        assert!(is_lost(&mut one));
    }
}
