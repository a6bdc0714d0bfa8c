//! Namespace digests interned as small numbers: there are few of them, and a digest is long.

use terrace_cache::{HashedMap, PageKey};

use crate::object::ObjectId;

/// Namespaces of the objects in a catalogue.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    numbers: HashedMap<PageKey, u32>,
    /// Each digest with the number of slots that refer to it; entries without slots are free.
    digests: Vec<(PageKey, u32)>,
    free: Vec<u32>,
}

impl Namespaces {
    pub(super) fn enter(&mut self, digest: PageKey) -> u32 {
        if let Some(number) = self.numbers.get(&digest) {
            self.digests[*number as usize].1 += 1;
            return *number;
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.digests.push((digest, 0));
            self.digests.len() as u32 - 1
        });
        self.digests[number as usize] = (digest, 1);
        self.numbers.insert(digest, number);
        number
    }

    pub(super) fn leave(&mut self, number: u32) {
        let (digest, slots) = &mut self.digests[number as usize];
        *slots -= 1;
        if *slots == 0 {
            self.numbers.remove(digest);
            self.free.push(number);
        }
    }

    pub(super) fn find(&self, id: &ObjectId) -> Option<u32> {
        self.numbers.get(&id.namespace).copied()
    }

    pub(super) fn digest(&self, number: u32) -> PageKey {
        self.digests[number as usize].0
    }

    pub(super) fn bytes(&self) -> usize {
        self.digests.capacity() * (size_of::<(PageKey, u32)>() + size_of::<(PageKey, u32)>())
            + self.free.capacity() * size_of::<u32>()
    }
}
