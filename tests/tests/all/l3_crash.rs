//! A disk store that loses power at any moment: at every write and every sync of long workloads. It
//! opens again, keeps what it has promised, and never answers bytes that are not the right ones.

mod calls;
mod checker;
mod moments;
mod promises;
mod workload;

use std::collections::BTreeSet;

use terrace_kit::Dice;
use terrace_l3_disk::DiskFile;
use terrace_tests::l3::simulated_disk::SimulatedDisk;

use checker::examine;
use workload::{Plan, Record, work};

/// Rounds come on demand only.
const ON_DEMAND_MS: u64 = 3_600_000;

/// How often each event is interrupted. What of the unsynced writes survives differs from time to time.
fn times() -> u64 {
    if terrace_tests::thorough() { 2 } else { 1 }
}

/// A store that is always full, and asked for one thing after the other.
fn plan(seed: u64) -> Plan {
    Plan {
        seed,
        slots: 48,
        keys: 90,
        calls: 2000,
        at_a_time: 1,
        commit_interval_ms: ON_DEMAND_MS,
        shuffled: false,
        lie: None,
    }
}

/// A store that never evicts, so that everything it says is binding.
fn roomy(seed: u64) -> Plan {
    Plan { slots: 200, keys: 60, ..plan(seed) }
}

/// Works on a new disk and crashes everywhere.
async fn live_and_crash(plan: &Plan) -> Record {
    let record = work(plan, SimulatedDisk::new(), BTreeSet::new()).await;
    let examined = examine(plan, &record, times()).await.unwrap();
    assert!(record.calls >= 2000 && record.superseded > 60, "{}", record.superseded);
    // The test would be worthless if little was promised.
    let per_crash = examined.kept / examined.crashes;
    let crashes_min = 1400 * times() as usize;
    assert!(examined.crashes > crashes_min && per_crash > 20, "{examined:?}");
    record
}

#[tokio::test]
async fn nothing_durable_is_lost_while_there_is_room() {
    let record = live_and_crash(&roomy(1)).await;
    assert_eq!(record.evicted, 0);
}

#[tokio::test]
async fn nothing_durable_is_lost_under_load() {
    let record = live_and_crash(&Plan { at_a_time: 4, shuffled: true, ..roomy(2) }).await;
    assert_eq!(record.evicted, 0);
}

#[tokio::test]
async fn a_store_that_evicts_is_honest() {
    let record = live_and_crash(&plan(3)).await;
    assert!(record.evicted > 200, "{}", record.evicted);
}

#[tokio::test]
async fn a_store_that_evicts_under_load_is_honest() {
    let plan = Plan { at_a_time: 4, shuffled: true, commit_interval_ms: 1, ..plan(4) };
    let record = live_and_crash(&plan).await;
    assert!(record.evicted > 200, "{}", record.evicted);
}

#[tokio::test]
async fn life_goes_on_after_a_crash() {
    let dice = &mut Dice::new(5);
    for full in [true, false] {
        let first = Plan { calls: 300, ..if full { plan(5) } else { roomy(5) } };
        let mut record = work(&first, SimulatedDisk::new(), BTreeSet::new()).await;
        for life in 0..12 {
            let at = dice.below(record.history.events().len() as u64 + 1) as usize;
            let disk = SimulatedDisk::after_crash(&record.history, at, dice);
            let plan = Plan { seed: 100 + life, calls: 60, ..first.clone() };
            record = work(&plan, disk, record.ids).await;
            examine(&plan, &record, times()).await.unwrap();
        }
    }
}

/// If this fails, the other tests prove nothing.
#[tokio::test]
async fn a_disk_that_lies_is_found_out() {
    for lie in [DiskFile::Data, DiskFile::Index] {
        for plan in [plan(6), roomy(6)] {
            let plan = Plan { calls: 200, lie: Some(lie), ..plan };
            let record = work(&plan, SimulatedDisk::new(), BTreeSet::new()).await;
            let examined = examine(&plan, &record, times()).await;
            assert!(examined.is_err(), "syncs of {lie:?} were not missed: {examined:?}");
        }
    }
}
