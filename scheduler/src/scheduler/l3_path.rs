//! Paths and digests of L3 operations in flight.

use terrace_cache::{Arrival, PrefixDigest};
use terrace_fsm::OpId;

use super::Scheduler;
use crate::l3_path::L3Path;
use crate::operations::{Anchor, Work};

impl Scheduler {
    /// Path of an L3 operation in flight; `None` for any other operation, and for a probe without a waiting request.
    #[must_use]
    pub fn l3_path(&self, op: OpId) -> Option<L3Path<'_>> {
        let operation = self.operations.get(op)?;
        let mut path = L3Path::default();
        match &operation.work {
            Work::Probe { start_page, .. } => {
                let keys = self.requests.get(operation.owner?)?.sequence.keys();
                let (start, pages) = (*start_page as usize, operation.pages as usize);
                path.extend(keys.range(0..start), false);
                path.extend(keys.range(start..start + pages), true);
            }
            Work::Prefetch { anchor, run, .. } => {
                match anchor {
                    Anchor::Pinned(pin) => {
                        let none = Arrival::default();
                        let before = self.cache.keys_along(pin, &none);
                        path.extend(before.map(|(keys, _)| keys), false);
                    }
                    Anchor::Remembered(prefix) => {
                        let keys = prefix.keys();
                        path.extend([keys.prompt, keys.appended], false);
                    }
                }
                let keys = run.keys();
                path.extend([keys.prompt, keys.appended], true);
            }
            Work::Backup { source, arrival, .. } => {
                for (keys, is_asked) in self.cache.keys_along(source, arrival) {
                    path.extend([keys], is_asked);
                }
                path.end_with_asked();
            }
            Work::LoadBack { .. } | Work::WriteBack { .. } => return None,
        }
        Some(path)
    }

    /// Appends the digest of each page of a prefetch or backup in flight to `into`, in the order of its keys. A store
    /// keeps them with the pages, and a prefetch accepts only pages with its own digests: keys alone do not prove
    /// that a page belongs to these tokens. Other operations have none.
    ///
    /// This hashes the pages of the operation, and those before them that no earlier operation has hashed. Call it
    /// while a step is running.
    pub fn l3_digests(&mut self, op: OpId, into: &mut Vec<PrefixDigest>) {
        let Some(operation) = self.operations.get(op) else { return };
        match &operation.work {
            Work::Prefetch { anchor, run, .. } => {
                let (before, start_page) = match anchor {
                    Anchor::Pinned(pin) => {
                        let none = Arrival::default();
                        (self.cache.digests_along(pin, &none, into), pin.depth())
                    }
                    Anchor::Remembered(prefix) => {
                        let pages = prefix.keys().len() as u32;
                        let root = PrefixDigest::of_namespace(prefix.root());
                        (root.behind(prefix.run(0, pages)), pages)
                    }
                };
                before.extend_along(run.run(start_page, run.keys().len()), into);
            }
            Work::Backup { source, arrival, .. } => {
                self.cache.digests_along(source, arrival, into);
            }
            Work::Probe { .. } | Work::LoadBack { .. } | Work::WriteBack { .. } => {}
        }
    }
}
