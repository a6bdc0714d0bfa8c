//! The least recently used goes first.

use super::ranked::Ranked;
use crate::planted::{Bug, planted};

/// The least recently used goes first.
pub(crate) fn policy() -> Ranked {
    Ranked::by(|usage| match planted(Bug::EvictLatestFirst) {
        true => (u64::MAX - usage.last_used, usage.created),
        false => (usage.last_used, usage.created),
    })
}

#[cfg(test)]
mod tests {
    use super::policy;
    use crate::evict::tests::{order, usage};

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut policy = policy();
        let nodes = [usage(0, 30, 9), usage(1, 10, 9), usage(2, 20, 0)];
        assert_eq!(order(&mut policy, &nodes), [1, 2, 0]);
    }
}
