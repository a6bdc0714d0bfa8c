//! Nodes in trouble: real processes in network namespaces, cut off, frozen, killed, full and besieged.
//! Whatever happens, no page is wrong, every call ends in time, a node that is away costs one bounded
//! delay and then nothing, and hits come back by themselves. `scripts/test-nodes` provides what these
//! tests need and runs them.

mod client;
mod farm;
mod faults;
mod limits;
mod proxy;
mod servers;
mod soak;

/// A node that has memory alone, for some two thousand pages.
const MEMORY: &[&str] = &["--memory", "32MiB", "--object-max", "16KiB"];

/// So many pages, from that number on.
fn pages(first: u64, count: u64) -> Vec<terrace_l3::ObjectId> {
    (first..first + count).map(crate::objects::page).collect()
}
