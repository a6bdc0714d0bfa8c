//! Fail the nth: in worlds without random faults, every single operation fails in every possible
//! way, one at a time. No wrong page is read, no page is lost, and all requests end.

use std::sync::atomic::{AtomicU64, Ordering};

use terrace_scheduler::OpId;
use terrace_tests::sim::{FaultKind, RunOptions, run_world};

/// Returns the number of worlds.
fn worlds() -> u64 {
    if terrace_tests::thorough() { 20 } else { 10 }
}

const STEPS: u64 = 16;

/// Ways in which an operation can fail. A way that does not apply to an operation has no effect.
const WAYS: [FaultKind; 11] = [
    FaultKind::Missing,
    FaultKind::Failed,
    FaultKind::TimedOut,
    FaultKind::NeverInTime,
    FaultKind::PartlyDone,
    FaultKind::ShortRead,
    FaultKind::FlippedBit,
    FaultKind::WrongPage,
    FaultKind::StaleGeneration,
    FaultKind::NoSpace,
    FaultKind::Corrupt,
];

/// Runs a world with at most this fault. Returns the numbers of operations and of faults.
fn world(seed: u64, fault: Option<(OpId, FaultKind)>) -> (u64, u64) {
    let life = run_world(RunOptions { only_fault: Some(fault), ..RunOptions::of(seed, STEPS) });
    if let Some(violation) = life.violation {
        panic!("world {seed}, {fault:?}: {violation}");
    }
    let operations = [
        life.stats.probes,
        life.stats.prefetches,
        life.stats.load_backs,
        life.stats.write_backs,
        life.stats.backups,
    ];
    let struck = WAYS.iter().map(|&way| life.faults.of(way)).sum();
    (operations.iter().map(|kind| kind.started).sum(), struck)
}

#[test]
fn every_operation_fails_in_every_way() {
    // Worlds with at least ten operations.
    let busy = |seed: &u64| world(*seed, None).0 >= 10;
    let seeds: Vec<u64> = (0..).filter(busy).take(worlds() as usize).collect();
    let next = AtomicU64::new(0);
    let strikes = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(&seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let (operations, _) = world(seed, None);
                    for op in 0..operations {
                        for way in WAYS {
                            let (_, struck) = world(seed, Some((OpId(op), way)));
                            strikes.fetch_add(struck, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    // Each world has ten operations or more, with at least three ways to fail each.
    let strikes = strikes.into_inner();
    assert!(strikes >= worlds() * 10 * 3, "only {strikes} faults struck");
}
