//! The salts that were used last, for those who look at the cache.

use std::collections::VecDeque;

/// The latest salts, the last one used at the end.
#[derive(Debug, Default)]
pub(crate) struct RecentSalts(VecDeque<String>);

impl RecentSalts {
    const SALTS_MAX: usize = 16;

    pub(crate) fn used(&mut self, salt: &str) {
        if self.0.back().is_some_and(|last| last == salt) {
            return;
        }
        self.0.retain(|known| known != salt);
        if self.0.len() == Self::SALTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(salt.to_owned());
    }

    pub(crate) fn all(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_salt_gives_way() {
        let mut salts = RecentSalts::default();
        (0..20).for_each(|number| salts.used(&number.to_string()));
        salts.used("10");
        let all = salts.all();
        assert_eq!((all.len(), all[0].as_str(), all[15].as_str()), (16, "4", "10"));
    }
}
