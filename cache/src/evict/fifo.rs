//! The oldest goes first.

use super::ranked::Ranked;

/// The oldest goes first.
pub(crate) fn policy() -> Ranked {
    Ranked::by(|usage| (usage.created, 0))
}

#[cfg(test)]
mod tests {
    use super::policy;
    use crate::evict::tests::{order, usage};

    #[test]
    fn use_does_not_save_the_oldest() {
        let mut policy = policy();
        assert_eq!(order(&mut policy, &[usage(2, 10, 0), usage(1, 99, 9)]), [1, 0]);
    }
}
