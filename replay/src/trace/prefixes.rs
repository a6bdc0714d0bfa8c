//! Numbered prefixes of prompts: equal prefixes have equal numbers.

use std::collections::HashMap;

/// Numbers of block lists. A block nearly always follows the same prefix, so its own number serves
/// as that of the prefix; only exceptions are looked up.
#[derive(Debug)]
pub(super) struct Prefixes {
    /// By block: the prefix that it first followed, if it has appeared.
    usual: Vec<Option<u32>>,
    others: HashMap<(u32, u32), u32>,
    next: u32,
}

impl Prefixes {
    /// The empty prefix.
    pub(super) const ROOT: u32 = u32::MAX;

    pub(super) fn new(distinct_blocks: u32) -> Self {
        let usual = vec![None; distinct_blocks as usize];
        Self { usual, others: HashMap::new(), next: distinct_blocks }
    }

    /// Returns the number of `prefix` extended by `block`.
    pub(super) fn extend(&mut self, prefix: u32, block: u32) -> u32 {
        let usual = self.usual[block as usize].get_or_insert(prefix);
        if *usual == prefix {
            return block;
        }
        *self.others.entry((prefix, block)).or_insert_with(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Returns an upper bound of all numbers.
    pub(super) fn bound(&self) -> u32 {
        self.next
    }
}
