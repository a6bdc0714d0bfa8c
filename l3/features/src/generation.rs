//! The numbers of generations: the time, the producer, and a few bits of chance for clocks that were set back
//! between two lives of a producer.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::keys::OWNERS_MAX;

const OWNER_SHIFT: u32 = 12;
const TIME_SHIFT: u32 = 22;
const _: () = assert!(OWNERS_MAX as u32 <= 1 << (TIME_SHIFT - OWNER_SHIFT));

/// A number that no put has had, and higher than `last`.
pub(super) fn next(last: u64, now_ms: u64, owner: u16) -> u64 {
    let chance = RandomState::new().build_hasher().finish() & ((1 << OWNER_SHIFT) - 1);
    let ms = now_ms.max((last >> TIME_SHIFT) + 1);
    (ms << TIME_SHIFT) | (u64::from(owner) << OWNER_SHIFT) | chance
}

/// Whose generation it is.
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
