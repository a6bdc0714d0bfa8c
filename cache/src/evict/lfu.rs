//! The least often used goes first, among equals the least recently used.

use super::ranked::Ranked;

/// The least often used goes first, among equals the least recently used.
pub(crate) fn policy() -> Ranked {
    Ranked::by(|usage| (usage.hits.into(), usage.last_used))
}

#[cfg(test)]
mod tests {
    use super::policy;
    use crate::evict::tests::{order, usage};

    #[test]
    fn the_least_often_used_goes_first() {
        let mut policy = policy();
        let nodes = [usage(0, 10, 5), usage(1, 20, 1), usage(2, 15, 1)];
        assert_eq!(order(&mut policy, &nodes), [2, 1, 0]);
    }
}
