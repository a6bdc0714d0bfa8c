//! Prefixes of prompts, numbered: two prompts have the same prefix where the numbers are the same.

use std::collections::HashMap;

/// Numbers for lists of blocks. A block nearly always follows the same prefix, so the block's own
/// number serves as that of the prefix, and only the exceptions are looked up.
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

    /// The number of `prefix` with `block` behind it.
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

    /// All numbers are below this.
    pub(super) fn bound(&self) -> u32 {
        self.next
    }
}
