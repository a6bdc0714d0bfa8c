//! Generation numbers: the time, the producer, and a few random bits in case the clock is set back
//! between two runs of a producer.

use std::hash::{BuildHasher, Hasher, RandomState};

use parking_lot::Mutex;

use super::keys::OWNERS_MAX;

const OWNER_SHIFT: u32 = 12;
const TIME_SHIFT: u32 = 22;
const _: () = assert!(OWNERS_MAX as u32 <= 1 << (TIME_SHIFT - OWNER_SHIFT));

/// Highest generation that this process has promised, assigned to a put, or found in a store.
static LAST: Mutex<u64> = Mutex::new(0);

/// Takes an unused number: higher than `floor`, and than all that this process knows.
pub(super) fn take(floor: u64, now_ms: u64, owner: u16) -> u64 {
    let mut last = LAST.lock();
    *last = next(floor.max(*last), now_ms, owner);
    *last
}

/// Raises the numbers taken from now on above this one.
pub(super) fn found(generation: u64) {
    let mut last = LAST.lock();
    *last = generation.max(*last);
}

fn next(last: u64, now_ms: u64, owner: u16) -> u64 {
    let chance = RandomState::new().build_hasher().finish() & ((1 << OWNER_SHIFT) - 1);
    let ms = now_ms.max((last >> TIME_SHIFT) + 1);
    (ms << TIME_SHIFT) | (u64::from(owner) << OWNER_SHIFT) | chance
}

/// Producer of a generation.
pub(super) fn owner(generation: u64) -> u16 {
    ((generation >> OWNER_SHIFT) & ((1 << (TIME_SHIFT - OWNER_SHIFT)) - 1)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_rise_and_tell_their_producer() {
        let first = next(0, 1_700_000_000_000, OWNERS_MAX - 1);
        let second = next(first, 5, 0);
        assert!(second > first, "even if the clock was set back");
        assert_eq!((owner(first), owner(second)), (OWNERS_MAX - 1, 0));
    }
}
