//! The lowest priority goes first, among equals the least recently used.

use super::ranked::Ranked;

/// The lowest priority goes first, among equals the least recently used.
pub(crate) fn policy() -> Ranked {
    Ranked::by(|usage| (u64::from(usage.priority.cast_unsigned() ^ (1 << 31)), usage.last_used))
}

#[cfg(test)]
mod tests {
    use super::policy;
    use crate::evict::tests::{order, usage};

    #[test]
    fn the_lowest_priority_goes_first() {
        let mut policy = policy();
        let mut nodes = [usage(0, 9, 0), usage(1, 9, 0), usage(2, 9, 0)];
        for (node, priority) in nodes.iter_mut().zip([3, -2, 0]) {
            node.priority = priority;
        }
        assert_eq!(order(&mut policy, &nodes), [1, 2, 0]);
    }
}
