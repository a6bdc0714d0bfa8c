//! Crashes and broken structure: inconsistent trees, pins and pools. The audit runs after every
//! event, so each of these would fail its test at once.

use terrace_cache::planted::Bug;
use terrace_scheduler::{
    AdmissionOrder, EvictionKind, L3Config, OpId, Outcome, Request, RequestId, StateName,
    UnknownRequest, WritePolicy,
};

use super::{Kind, Stage, only_fails_with, three_tiers, two_tiers, with_l3};

/// Failure: pages from L3 were inserted below a parent without a host copy, and eviction later
/// failed on it. Here a host page may continue a device-only page; when that page is evicted, its
/// continuation goes with it.
#[test]
fn f14_refill_below_a_page_without_host_copy() {
    let mut stage = Stage::new(three_tiers(6, 8));
    stage.run(1, 1..=17);
    stage.clear();
    stage.submit(2, 1..=9, 1);
    stage.plan();
    stage.ends(Kind::Probe, Outcome::Missing);
    stage.step();
    stage.plan();
    stage.ends(Kind::WriteBack, Outcome::Failed);
    stage.submit(3, 1..=17, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.plan();
    stage.done(Kind::Prefetch);
    assert_eq!(stage.cached(1..=17), (2, 2));
    stage.abort(3);
    stage.run(4, 101..=121);
    assert_eq!(stage.cached(1..=17), (0, 0), "nothing leads to the pages on host any more");
    // Eviction continues to work on both tiers, and the prompt is found in L3 again.
    stage.run(5, 201..=221);
    stage.wait_ms(10_000);
    stage.run(6, 1..=17);
    assert_eq!(stage.stats().l3_hit_tokens, 16);
    stage.finish();
}

/// While a request waits for a prefetch, the pages before it are kept, on device as well as on
/// host.
#[test]
fn f14_prefix_of_a_prefetch_stays() {
    let mut stage = Stage::new(three_tiers(6, 8));
    stage.run(1, 1..=17);
    stage.clear();
    stage.submit(2, 1..=9, 1);
    stage.plan();
    stage.ends(Kind::Probe, Outcome::Missing);
    stage.step();
    stage.abort(2);
    stage.submit(3, 1..=17, 1);
    stage.submit(4, 101..=121, 1);
    stage.plan();
    for probe in [stage.latest(Kind::Probe).0 - 1, stage.latest(Kind::Probe).0] {
        stage.report(OpId(probe), Outcome::Done);
    }
    // The other request needs the whole device.
    stage.plan();
    let prefetch = stage.latest(Kind::Prefetch);
    assert!(stage.plan().step.is_none());
    assert_eq!(stage.cached(1..=17), (2, 0));
    stage.report(prefetch, Outcome::Done);
    assert_eq!(stage.cached(1..=17), (2, 2));
    stage.plan();
    stage.done(Kind::LoadBack);
    stage.step();
    assert_eq!(stage.prefill_start(3), Some(16));
    stage.finish();
}

/// The tree changed during a prefetch without waiters, and its prefix is gone. Here its pages
/// return to the pool.
#[test]
fn f14_refill_of_a_prefix_that_is_gone() {
    let mut stage = Stage::new(three_tiers(6, 8));
    stage.run(1, 1..=17);
    stage.clear();
    stage.run(2, (1..=8).chain([51]));
    stage.submit(3, 1..=17, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.plan();
    let prefetch = stage.latest(Kind::Prefetch);
    assert_eq!(stage.l3_keys(prefetch).len(), 2);
    stage.abort(3);
    stage.clear();
    assert_eq!(stage.cached(1..=17), (0, 0));
    stage.report(prefetch, Outcome::Done);
    assert_eq!(stage.cached(1..=17), (0, 0));
    assert_eq!(stage.stats().cache.host.free_pages, 8, "all of the host is free");
    stage.run(4, 1..=17);
    stage.finish();
}

/// Failure: pages were 'evicted to host' although the host had no memory for them. Here memory is
/// freed first; if there is none, the pages are dropped, and no host copy is recorded.
#[test]
fn f15_no_room_on_host_no_host_copy() {
    let mut config = three_tiers(4, 2);
    config.cache.write_policy = WritePolicy::WriteBack;
    let mut stage = Stage::new(config);
    stage.run(1, 1..=9);
    assert_eq!(stage.cached(1..=9), (2, 0));
    // The first request's pages are copied when the second needs the memory, and stored in L3. That
    // takes long, and fills the host.
    stage.submit(2, 101..=113, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.plan();
    stage.done(Kind::WriteBack);
    stage.plan();
    let backup = stage.latest(Kind::Backup);
    stage.compute();
    assert_eq!((stage.cached(1..=9), stage.cached(101..=113)), ((0, 2), (3, 0)));
    // The third one's memory is freed by dropping pages.
    stage.submit(3, 201..=213, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.step();
    assert_eq!(stage.stats().write_backs.started, 1);
    assert_eq!(stage.cached(101..=113), (0, 0));
    stage.report(backup, Outcome::Done);
    stage.settle();
    stage.run(4, 101..=113);
    stage.run(5, 1..=9);
    stage.finish();
}

/// Failure: host copies of pages on device could not be evicted, and prefetches starved. Here they
/// are evicted first.
#[test]
fn f16_host_copies_of_device_pages_give_way() {
    let mut stage = Stage::new(three_tiers(16, 4));
    stage.run(1, 1..=9);
    stage.clear();
    stage.run(2, 101..=117);
    assert_eq!(stage.stats().cache.host.free_pages, 0, "the host is full of such copies");
    stage.submit(3, 1..=9, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.plan();
    stage.done(Kind::Prefetch);
    assert_eq!(stage.cached(1..=9), (0, 2));
    assert_eq!(stage.cached(101..=117), (4, 0), "the device has kept its own");
    stage.plan();
    stage.done(Kind::LoadBack);
    stage.step();
    assert_eq!(stage.prefill_start(3), Some(8));
    stage.finish();
}

/// Failure: a load-back was not pinned until it was acknowledged, and eviction reentered the call
/// that held its node. Here the operation pins its source, its destination and its prefix, and
/// pinned pages are not evicted.
#[test]
fn f17_load_back_is_pinned_until_its_outcome() {
    only_fails_with(&[Bug::EvictPinnedDevicePages, Bug::EvictPinnedHostPages], || {
        let mut stage = Stage::new(two_tiers(8, 6));
        stage.run(1, 1..=17);
        // Its end is evicted from the device; host has all of it.
        stage.submit(2, 101..=125, 1);
        stage.plan();
        stage.abort(2);
        stage.compute();
        assert_eq!(stage.cached(1..=17), (1, 3));
        stage.submit(5, 1..=17, 1);
        stage.plan();
        let load_back = stage.latest(Kind::LoadBack);
        // Other requests need the rest of both tiers.
        stage.submit(6, 301..=309, 1);
        stage.submit(7, 401..=409, 1);
        stage.abort(5);
        for _ in 0..6 {
            stage.plan();
            for copy in stage.world.last_plan().copies.clone() {
                stage.report(copy.op, Outcome::Done);
            }
            if stage.world.in_step() {
                stage.compute();
            }
        }
        stage.report(load_back, Outcome::Done);
        stage.run(8, 1..=17);
        stage.finish();
    });
}

/// Runs a request and aborts it after `moves` moves. Every third operation has the given outcome;
/// the others succeed.
fn call_off_after(moves: usize, outcome: Outcome) {
    let mut stage = Stage::new(with_l3(6, 12, |l3: &mut L3Config| l3.backoff_base_ms = 0));
    stage.run(1, 1..=9);
    stage.clear();
    stage.submit(2, 101..=102, 12);
    stage.step();
    stage.submit(3, 1..=9, 9);
    let mut reported = stage.world.transfers.len();
    for _ in 0..moves {
        stage.plan();
        if stage.world.in_step() {
            stage.compute();
        }
        let planned: Vec<_> = stage.world.transfers.keys().copied().skip(reported).collect();
        reported += planned.len();
        for op in planned {
            stage.report(op, if op.0 % 3 == 0 { outcome } else { Outcome::Done });
        }
    }
    if stage.state(3).is_some() {
        stage.abort(3);
    }
    stage.finish();
}

/// Failure: pins were released twice, or never. Here releasing a pin consumes it, and no page is
/// pinned after any end of a request.
#[test]
fn f18_pins_balance_on_every_way_out() {
    only_fails_with(&[Bug::LeakPinOnAbort, Bug::LosePagesOnCompletion], || {
        let outcomes = [
            Outcome::Done,
            Outcome::Failed,
            Outcome::Corrupt,
            Outcome::Partial(0),
            Outcome::TimedOut,
        ];
        for outcome in outcomes {
            for moves in 0..30 {
                call_off_after(moves, outcome);
            }
        }
    });
}

/// Failure: an abort in an unexpected state threw out of the scheduler's loop. Here every state
/// accepts an abort; an abort of an ended request returns an error.
#[test]
fn f45_abort_in_any_state() {
    for wanted in [
        StateName::Submitted,
        StateName::Prefetching,
        StateName::PrefetchDone,
        StateName::Prefilling,
        StateName::Decoding,
        StateName::Retracted,
        StateName::Draining,
        StateName::WritingBack,
    ] {
        abort_when(wanted);
    }
}

/// Lets three requests compete for the device, and aborts the first that reaches this state.
fn abort_when(wanted: StateName) {
    let mut config = three_tiers(5, 8);
    config.batch.decode_reserve_pages = 0;
    let mut stage = Stage::new(config);
    stage.run(1, 1..=9);
    stage.clear();
    stage.submit(2, 101..=106, 12);
    stage.submit(3, 201..=206, 12);
    stage.submit(4, 1..=9, 4);
    let mut reported = stage.world.transfers.len();
    for _ in 0..60 {
        stage.plan();
        if abort_one_in(&mut stage, wanted) {
            return stage.finish();
        }
        if stage.world.in_step() {
            stage.compute();
        }
        if abort_one_in(&mut stage, wanted) {
            return stage.finish();
        }
        let planned: Vec<_> = stage.world.transfers.keys().copied().skip(reported).collect();
        reported += planned.len();
        for op in planned {
            stage.report(op, Outcome::Done);
            if abort_one_in(&mut stage, wanted) {
                return stage.finish();
            }
        }
    }
    panic!("no request reached {wanted:?}");
}

fn abort_one_in(stage: &mut Stage, wanted: StateName) -> bool {
    let Some(id) = (2..=4).find(|&id| stage.state(id) == Some(wanted)) else { return false };
    stage.abort(id);
    let again = stage.world.scheduler.abort(stage.world.now, RequestId(id));
    assert_eq!(again, Err(UnknownRequest(RequestId(id))));
    true
}

/// Failure: a retraction changed the request's state before it had checked the host memory, which
/// leaked pages until the pool was exhausted. Here the memory is checked first; pages without room
/// are not copied, and the request is retracted all the same.
#[test]
fn f46_retraction_checks_first() {
    only_fails_with(&[Bug::LoseSlotOnRetraction], || {
        for host_pages in [0, 1, 2, 8] {
            let mut config = two_tiers(4, host_pages);
            config.batch.decode_reserve_pages = 0;
            config.batch.running_max = 4;
            let mut stage = Stage::new(config);
            stage.submit(1, 1..=7, 9);
            stage.submit(2, 101..=107, 9);
            stage.settle();
            let stats = stage.stats();
            assert!(stats.retractions > 0, "memory was not short");
            assert_eq!((stats.finished, stats.generated_tokens), (2, 18));
            stage.finish();
        }
    });
}

/// Failure: plain LRU evicted a parent before its child, because the parent was used less recently.
/// Here every policy evicts only leaves.
#[test]
fn f19_leaves_go_first() {
    only_fails_with(&[Bug::EvictParentFirst], || {
        for eviction in EvictionKind::ALL {
            let mut config = two_tiers(6, 0);
            config.cache.eviction = eviction;
            let mut stage = Stage::new(config);
            stage.run(1, 1..=13);
            stage.run(2, (1..=4).chain(51..=59));
            for (id, first) in [(3, 101), (4, 201)] {
                stage.run(id, first..=first + 8);
                // The remaining pages are always a prefix of a prompt.
                let left = stage.cached(1..=13).0 + stage.cached((1..=4).chain(51..=59)).0;
                assert!(left < 5, "{eviction:?} evicted nothing");
            }
            stage.run(5, 1..=13);
            stage.run(6, (1..=4).chain(51..=59));
            stage.finish();
        }
    });
}

/// Failure: a request id was reused after a preemption, and blocks of its first use leaked, because
/// they were looked up by id. Here operations and pages belong to a unique handle.
#[test]
fn f71_an_id_is_used_again_after_a_preemption() {
    for last_outcome in [Outcome::Done, Outcome::Failed, Outcome::TimedOut] {
        let mut config = two_tiers(8, 8);
        config.batch.running_max = 1;
        config.queue.order = AdmissionOrder::Priority;
        config.queue.preempts = true;
        let mut stage = Stage::new(config);
        stage.submit(1, 1..=9, 8);
        stage.step();
        stage.step();
        stage.submit_request(Request { priority: 1, ..Request::new(2, (101..=109).collect(), 4) });
        stage.plan();
        assert_eq!(stage.state(1), Some(StateName::Retracted));
        let write_back = stage.latest(Kind::WriteBack);
        stage.abort(1);
        stage.plan();
        // The copy of the first use is still in flight when the id is reused for another prompt.
        stage.submit(1, 201..=209, 1);
        stage.report(write_back, last_outcome);
        if last_outcome == Outcome::TimedOut {
            stage.report(write_back, Outcome::Failed);
        }
        assert_eq!(stage.state(1), Some(StateName::Submitted), "the copy was of another request");
        stage.compute();
        stage.settle();
        assert_eq!((stage.stats().finished, stage.stats().aborted), (2, 1));
        assert_eq!(stage.cached(201..=209).0, 2);
        stage.finish();
    }
}
