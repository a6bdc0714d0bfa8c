//! Hangs, stalls and silent loss of function: unbounded waits, budgets that are never released,
//! counters that do not count.

use std::time::{Duration, Instant};

use terrace_cache::planted::Bug;
use terrace_scheduler::{
    AdmissionOrder, Config, EvictionKind, KvEvents, OpId, Outcome, PrefetchPolicy, Request,
    RequestId, StateName, SubmitError, Token, WritePolicy,
};
use terrace_tests::World;

use super::{Kind, Stage, only_fails_with, three_tiers, two_tiers, with_l3};

/// Creates a stage with a prompt in L3 only.
fn only_in_l3(config: Config, prompt: impl IntoIterator<Item = Token>) -> Stage {
    let mut stage = Stage::new(config);
    stage.run(1, prompt);
    stage.clear();
    stage
}

/// Failure: ranks disagreed about the length of a hit, by their own free space or timeout, and
/// waited for each other for ever. Here one scheduler decides for all, and the minimum of the ranks
/// counts.
#[test]
fn f20_least_of_the_ranks_counts() {
    only_fails_with(&[Bug::BelieveBestRank, Bug::CountRankTwice], || {
        let mut config = three_tiers(8, 8);
        config.model.ranks = 3;
        let mut stage = only_in_l3(config, 1..=17);
        stage.submit(2, 1..=17, 1);
        stage.plan();
        let probe = stage.latest(Kind::Probe);
        for (rank, found) in [(2, 4), (0, 3), (1, 4)] {
            stage.report_rank(probe, rank, Outcome::Partial(found));
        }
        stage.plan();
        let prefetch = stage.latest(Kind::Prefetch);
        assert_eq!(stage.l3_keys(prefetch).len(), 3);
        stage.report_rank(prefetch, 1, Outcome::Done);
        stage.report_rank(prefetch, 1, Outcome::Done);
        stage.report_rank(prefetch, 0, Outcome::Done);
        assert_eq!(stage.state(2), Some(StateName::Prefetching), "one rank has not reported");
        assert_eq!(stage.stats().ignored_outcomes, 1);
        stage.report_rank(prefetch, 2, Outcome::Partial(2));
        assert_eq!(stage.cached(1..=17), (0, 2));
        stage.plan();
        let load_back = stage.latest(Kind::LoadBack);
        for (rank, loaded) in [(0, 2), (1, 1), (2, 2)] {
            stage.report_rank(load_back, rank, Outcome::Partial(loaded));
        }
        stage.step();
        assert_eq!(stage.prefill_start(2), Some(4), "one page on all ranks");
        stage.finish();
    });
}

/// Failure: an aborted prefetch never released its budget, and in the end none could start. Here an
/// operation releases its budget when it ends.
#[test]
fn f21_aborted_prefetch_gives_back_its_share() {
    only_fails_with(&[Bug::DropBudgetOfLateOperation], || {
        let config = with_l3(16, 8, |l3| {
            l3.prefetch_pages_max = 2;
            l3.negative_ttl_ms = 0;
            l3.backoff_base_ms = 0;
        });
        let mut stage = only_in_l3(config, 1..=9);
        let ways_to_end = [Outcome::Done, Outcome::Missing, Outcome::Failed, Outcome::Corrupt];
        for (id, outcome) in (2..).zip(ways_to_end.into_iter().cycle().take(20)) {
            stage.submit(id, 1..=9, 1);
            stage.plan();
            stage.done(Kind::Probe);
            stage.plan();
            let prefetch = stage.latest(Kind::Prefetch);
            stage.abort(id);
            assert_eq!(stage.stats().prefetches.in_flight_pages, 2, "the driver is still at it");
            stage.report(prefetch, outcome);
            assert_eq!(stage.stats().prefetches.in_flight_pages, 0);
            stage.clear();
        }
        stage.run(100, 1..=9);
        assert_eq!((stage.stats().prefetches.started, stage.stats().l3_hit_tokens), (21, 8));
        stage.finish();
    });
}

/// Failure: the end of a prefetch was noticed only when a scan of the queue reached its request.
/// Here the outcome itself advances the request, and requests that wait for L3 do not block others.
#[test]
fn f22_finished_prefetch_is_noticed_at_once() {
    let mut config = three_tiers(24, 16);
    config.queue.window = 1;
    config.queue.order = AdmissionOrder::Arrival;
    let mut stage = Stage::new(config);
    stage.run(1, 1..=9);
    stage.run(2, 101..=109);
    stage.clear();
    stage.submit(3, 1..=9, 1);
    stage.submit(4, 101..=109, 1);
    stage.plan();
    let probe_of_4 = stage.latest(Kind::Probe);
    stage.report(OpId(probe_of_4.0 - 1), Outcome::Done);
    stage.report(probe_of_4, Outcome::Done);
    stage.plan();
    // The pages of the later one arrive first.
    stage.done(Kind::Prefetch);
    assert_eq!(stage.state(4), Some(StateName::PrefetchDone), "without a plan in between");
    assert_eq!(stage.stats().prefetches.in_flight, 1);
    stage.plan();
    stage.done(Kind::LoadBack);
    stage.step();
    assert_eq!(stage.prefill_start(4), Some(8));
    assert_eq!(stage.state(3), Some(StateName::Prefetching));
    stage.finish();
}

/// Failure: the timeout of a prefetch did not count while another part of it was pending. Here a
/// request has one deadline, whatever is in flight.
#[test]
fn f23_deadline_counts_whatever_is_pending() {
    let mut config = with_l3(12, 16, |l3| {
        l3.prefetch = PrefetchPolicy::Deadline { base_ms: 10, per_page_us: 1_000 };
    });
    config.model.ranks = 2;
    let mut stage = only_in_l3(config, 1..=9);
    stage.submit(2, 1..=9, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.plan();
    let prefetch = stage.latest(Kind::Prefetch);
    let begun = stage.world.now;
    stage.report_rank(prefetch, 0, Outcome::Done);
    assert!(stage.plan().step.is_none());
    stage.wait_for_deadline();
    assert_eq!(stage.world.now.0 - begun.0, 12_000);
    stage.step();
    assert_eq!(stage.prefill_start(2), Some(0), "it computes");
    assert_eq!(stage.stats().prefetches.quarantined_pages, 2);
    stage.report_rank(prefetch, 1, Outcome::Done);
    assert_eq!(stage.stats().prefetches.quarantined_pages, 0);
    stage.finish();
}

/// Failure: a store reported a page and did not deliver it, and every request tried again. Here a
/// page that was not delivered is not requested again for some time.
#[test]
fn f24_undelivered_pages_are_not_asked_for_again() {
    for how in [Outcome::Missing, Outcome::Failed, Outcome::Corrupt, Outcome::TimedOut] {
        let config = with_l3(16, 16, |l3| {
            l3.negative_ttl_ms = 5_000;
            l3.backoff_base_ms = 0;
        });
        let mut stage = only_in_l3(config, 1..=9);
        stage.submit(2, 1..=9, 1);
        stage.plan();
        stage.done(Kind::Probe);
        stage.plan();
        stage.ends(Kind::Prefetch, how);
        stage.abort(2);
        let probes = stage.stats().probes.started;
        for id in 3..10 {
            stage.submit(id, 1..=9, 1);
            stage.plan();
            assert_eq!(stage.prefill_start(id), Some(0), "it computes at once");
            stage.abort(id);
            stage.compute();
            stage.clear();
        }
        assert_eq!(stage.stats().probes.started, probes, "{how:?}");
        assert_eq!(stage.stats().negative_hits, 14);
        stage.wait_ms(5_000);
        stage.submit(10, 1..=9, 1);
        stage.plan();
        assert_eq!(stage.stats().probes.started, probes + 1, "then L3 gets another chance");
        stage.finish();
    }
}

/// Failure: the first pages of a prompt were missing in the store, so that every prefetch was
/// revoked, with only a debug log. Here the probe's answer is counted, and the computed pages are
/// stored again.
#[test]
fn f25_missing_head_is_stored_again() {
    let mut stage = only_in_l3(three_tiers(8, 8), 1..=9);
    let head = stage.keys(1..=9)[0];
    stage.world.l3.remove(&head);
    let before = stage.stats().probes;
    stage.run(2, 1..=9);
    let after = stage.stats().probes;
    assert_eq!(after.unsound_pages - before.unsound_pages, 2, "it can be seen");
    assert!(stage.world.l3.contains_key(&head));
    stage.clear();
    stage.run(3, 1..=9);
    assert_eq!(stage.stats().l3_hit_tokens, 8);
    stage.finish();
}

/// Failure: a prefix survived as an index entry without bytes and counted as a match, so that L3
/// was never queried. Here a node without bytes does not exist.
#[test]
fn f26_no_bytes_no_match() {
    let mut stage = Stage::new(three_tiers(6, 5));
    stage.run(1, 1..=17);
    // Both tiers need all their memory for others.
    stage.run(2, 101..=121);
    assert_eq!(stage.cached(1..=17), (0, 0));
    stage.submit(3, 1..=17, 1);
    stage.plan();
    let probe = stage.latest(Kind::Probe);
    assert_eq!(stage.l3_keys(probe), stage.keys(1..=17), "L3 is asked from the first page on");
    stage.settle();
    assert_eq!(stage.stats().l3_hit_tokens, 16);
    stage.finish();
}

/// Failure: a full hit in L3 was silently truncated to the free host memory. Here memory is freed
/// first, and pages for which there is none are counted.
#[test]
fn f27_shortened_prefetch_is_counted() {
    let mut stage = only_in_l3(three_tiers(12, 5), 1..=17);
    // The host is full of evictable pages.
    stage.run(2, 101..=121);
    assert_eq!(stage.stats().cache.host.free_pages, 0);
    stage.run(3, 1..=17);
    assert_eq!((stage.stats().l3_hit_tokens, stage.stats().prefetch_shortened_pages), (16, 0));
    // Three of its five pages are pinned by a backup.
    stage.clear();
    stage.submit(4, 201..=213, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.step();
    stage.plan();
    stage.done(Kind::WriteBack);
    stage.plan();
    let backup = stage.latest(Kind::Backup);
    stage.submit(5, 1..=17, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.plan();
    let prefetch = stage.done(Kind::Prefetch);
    assert_eq!(stage.l3_keys(prefetch).len(), 2);
    stage.plan();
    stage.done(Kind::LoadBack);
    // The other two are waited for as in any prefetch.
    assert!(stage.plan().step.is_none());
    assert_eq!(stage.stats().prefetch_shortened_pages, 0);
    stage.wait_for_deadline();
    stage.step();
    assert_eq!(stage.stats().prefetch_shortened_pages, 2);
    assert_eq!(stage.prefill_start(5), Some(8), "the rest is computed");
    stage.report(backup, Outcome::Done);
    stage.finish();
}

/// Failure: a hit on a slow disk took forty seconds where computing took one. Here a prefetch is
/// priced by the duration of the last ones, and a wait is limited by the deadline.
#[test]
fn f28_slow_store_is_priced_out() {
    let config = with_l3(12, 16, |l3| l3.prefetch = PrefetchPolicy::Wait { max_ms: 60_000 });
    let mut stage = only_in_l3(config, 1..=17);
    let mut prefetches = 0;
    for id in 2..20 {
        stage.clear();
        stage.submit(id, 1..=17, 1);
        stage.plan();
        stage.done(Kind::Probe);
        stage.plan();
        if stage.state(id) == Some(StateName::Prefetching) {
            prefetches += 1;
            stage.wait_ms(40_000);
            stage.done(Kind::Prefetch);
        }
        stage.settle();
    }
    assert!((1..=4).contains(&prefetches), "{prefetches} of 18 requests waited for 40 s");
    assert_eq!(stage.stats().prefetches_priced_out, 18 - prefetches);
    stage.finish();
}

/// A store that is slow from the start delays a request by at most its deadline.
#[test]
fn f28_nobody_waits_longer_than_the_deadline() {
    let mut stage = only_in_l3(three_tiers(12, 16), 1..=17);
    stage.submit(2, 1..=17, 1);
    stage.plan();
    stage.done(Kind::Probe);
    stage.plan();
    let begun = stage.world.now;
    stage.wait_for_deadline();
    stage.plan();
    assert_eq!(stage.prefill_start(2), Some(0));
    assert_eq!(stage.world.now.0 - begun.0, 502_000, "500 ms, and half of one for each page");
    stage.compute();
    stage.finish();
}

/// Failure: an object disappeared between lookup and read, and the request failed. Here missing
/// pages are computed, and the others are used.
#[test]
fn f29_gone_between_probe_and_prefetch() {
    only_fails_with(&[Bug::BelieveWholePrefetch], || {
        for gone_from in [0, 2, 3] {
            let mut stage = only_in_l3(three_tiers(12, 16), 1..=17);
            stage.submit(2, 1..=17, 1);
            stage.plan();
            stage.done(Kind::Probe);
            let keys = stage.keys(1..=17);
            keys[gone_from..].iter().for_each(|key| drop(stage.world.l3.remove(key)));
            stage.plan();
            stage.done(Kind::Prefetch);
            assert_eq!(stage.cached(1..=17), (0, gone_from as u32));
            stage.settle();
            let stats = stage.stats();
            assert_eq!((stats.finished, stats.failed), (2, 0));
            assert_eq!(stats.l3_hit_tokens, 4 * gone_from as u64);
            assert_eq!(stage.world.l3.len(), 4, "what was lost is stored again");
            stage.finish();
        }
    });
}

/// Failure: the store's master was down, each call took seconds, and the scheduler's loop waited.
/// Here the scheduler does not block: a store that never answers costs a few requests a bounded
/// time, then nothing.
#[test]
fn f30_dead_store_costs_a_bounded_time() {
    let mut stage = Stage::new(with_l3(12, 8, |l3| l3.probe_timeout_ms = 50));
    let mut waited_ms = 0;
    for id in 1..=40 {
        let first = id as Token * 100;
        stage.submit(id, first..=first + 8, 1);
        let asked = stage.world.now;
        while stage.plan().step.is_none() {
            stage.wait_for_deadline();
        }
        waited_ms += (stage.world.now.0 - asked.0) / 1000;
        stage.compute();
        // The host answers, L3 does not: neither probes nor backups.
        stage.plan();
        for copy in stage.world.last_plan().copies.clone() {
            stage.report(copy.op, Outcome::Done);
        }
    }
    let stats = stage.stats();
    assert_eq!(stats.generated_tokens, 40, "every request got its token");
    assert!(stats.probes.started <= 5, "{} probes", stats.probes.started);
    assert!(waited_ms <= 250, "{waited_ms} ms");
    assert!(stats.backups.in_flight_pages <= 8 && stats.probes.in_flight == 0);
    stage.finish();
}

/// Failure: probes renewed leases, and waiting requests probed repeatedly, so that the store could
/// evict nothing. Here a request probes once, however long it waits.
#[test]
fn f31_one_probe_for_each_request() {
    let mut config = three_tiers(32, 32);
    config.batch.running_max = 1;
    let mut stage = Stage::new(config);
    stage.submit(1, 1..=4, 100);
    for id in 2..=6 {
        stage.submit(id, (id as Token * 100)..=(id as Token * 100 + 8), 1);
    }
    stage.plan();
    stage.compute();
    for probe in stage.world.transfers.keys().copied().collect::<Vec<_>>() {
        stage.report(probe, Outcome::Missing);
    }
    for _ in 0..90 {
        stage.step();
    }
    assert_eq!(stage.stats().probes.started, 5, "five wait, and each has asked once");
    stage.finish();
}

/// Failure: hits were counted again at each chunk and each retry. Here they are counted once, and
/// those that need a load only after it.
#[test]
fn f32_hits_are_counted_once() {
    let mut config = two_tiers(8, 64);
    config.batch.running_max = 4;
    config.batch.step_tokens_max = 4;
    config.batch.decode_reserve_pages = 0;
    let mut stage = Stage::new(config);
    stage.run(1, 1..=9);
    stage.submit(2, 1..=13, 10);
    stage.submit(3, (1..=4).chain(51..=59), 10);
    stage.settle();
    let stats = stage.stats();
    assert!(stats.retractions > 0, "no request was retracted");
    assert!(stats.steps > 15, "there were no chunks: {} steps", stats.steps);
    assert_eq!(stats.prompt_tokens, 9 + 13 + 13);
    // The second found two pages, the third one.
    assert_eq!((stats.device_hit_tokens, stats.host_hit_tokens, stats.l3_hit_tokens), (12, 0, 0));
    // A load that fails is no hit; one of three pages is three hits.
    stage.run(4, 101..=129);
    let before = stage.stats().host_hit_tokens;
    stage.submit(5, 1..=13, 1);
    stage.plan();
    stage.ends(Kind::LoadBack, Outcome::Failed);
    stage.settle();
    assert_eq!(stage.stats().host_hit_tokens, before);
    stage.run(6, 201..=229);
    stage.run(7, 1..=13);
    assert_eq!(stage.stats().host_hit_tokens - before, 12);
    stage.finish();
}

/// Failure: a prompt that could never fit waited for ever, a second request with the same id was
/// ignored, and ids were served in alphabetical order. Here the first two are refused with a
/// reason, and requests are served in order of arrival.
#[test]
fn f47_bad_requests_are_refused_and_order_is_arrival() {
    let mut config = two_tiers(4, 0);
    config.batch.running_max = 1;
    let mut stage = Stage::new(config);
    for (prompt, new) in [(17, 1), (16, 2), (1, 17)] {
        let refused = stage.world.submit(Request::new(1, (1..=prompt).collect(), new));
        assert!(matches!(refused, Err(SubmitError::NeverFits { .. })), "{refused:?}");
    }
    let arrivals = [9, 10, 2, 1];
    for id in arrivals {
        stage.submit(id, (id as Token * 10)..=(id as Token * 10 + 2), 1);
        let again = stage.world.submit(Request::new(id, vec![1], 1));
        assert_eq!(again, Err(SubmitError::DuplicateId(RequestId(id))));
    }
    let mut served = Vec::new();
    for _ in arrivals {
        served.extend(stage.plan().prefills.iter().map(|prefill| prefill.request.0));
        stage.compute();
    }
    assert_eq!(served, arrivals);
    stage.submit(20, 1..=16, 1);
    stage.finish();
}

/// Returns the time of a plan that admits 64 requests to a full device of `pages` pages. Each page
/// belongs to a separate prompt, so that each admission evicts.
fn plan_for_a_full_device(pages: u32) -> Duration {
    let mut world = World::new(two_tiers(pages, 0)).expect("it can work");
    let mut ids = 1..;
    let mut quickest = Duration::MAX;
    for round in 0..pages / 64 + 20 {
        for id in ids.by_ref().take(64) {
            let first = id as Token * 8;
            let request = Request::new(id, (first..first + 5).collect(), 1);
            world.submit(request).expect("a sound request");
        }
        let begun = Instant::now();
        world.plan();
        if round > pages / 64 {
            quickest = quickest.min(begun.elapsed());
        }
        world.finish_step().expect("no wrong page");
    }
    assert!(world.scheduler.stats().cache.device.free_pages <= 64, "the device is not full");
    world.scheduler.audit();
    quickest
}

/// Failure: with a full pool each admission examined all blocks, and a step took 0.8 s to plan.
/// Here evictable pages are ordered and counted, so the cost does not depend on their number.
#[test]
fn f48_full_pool_plans_stay_cheap() {
    let small = plan_for_a_full_device(1_000);
    let large = plan_for_a_full_device(32_000);
    assert!(large < small * 8, "32 times the pages: {small:?} became {large:?}");
}

/// Returns all outputs of a scheduler in a random run.
fn said(seed: u64) -> Vec<String> {
    let mut config = three_tiers(12, 12);
    config.cache.kv_event_keys_max = 10_000;
    config.trace_max = 10_000;
    let mut stage = Stage::new(config);
    let mut state = seed;
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    let mut said = Vec::new();
    let mut reported = 0;
    for id in 1..400 {
        let first = draw(3) as Token * 100;
        let _ =
            stage.world.submit(Request::new(id, (first..=first + draw(20) as Token).collect(), 3));
        said.push(format!("{:?}", stage.plan()));
        if stage.world.in_step() {
            stage.compute();
        }
        let planned: Vec<_> = stage.world.transfers.keys().copied().skip(reported).collect();
        reported += planned.len();
        for op in planned {
            let outcomes = [
                Outcome::Done,
                Outcome::Done,
                Outcome::Failed,
                Outcome::Missing,
                Outcome::TimedOut,
            ];
            stage.report(op, outcomes[draw(5) as usize]);
        }
        stage.wait_ms(draw(50));
        let mut events = KvEvents::default();
        stage.world.scheduler.drain_kv_events(&mut events);
        let transitions: Vec<_> = stage.world.scheduler.drain_trace().collect();
        said.push(format!("{events:?} {transitions:?} {:?}", stage.stats()));
    }
    stage.finish();
    said
}

/// Failure: ranks that mirrored one scheduler iterated in the order of pointers or hash maps, and
/// hung in a collective. Here no decision or list depends on either.
#[test]
fn f49_mirrored_schedulers_say_the_same() {
    for seed in 1..=3 {
        let mirrors: Vec<_> = (0..3).map(|_| std::thread::spawn(move || said(seed))).collect();
        let mut heard = mirrors.into_iter().map(|mirror| mirror.join().expect("it goes well"));
        let first = heard.next().expect("there are three");
        assert!(heard.all(|other| other == first));
    }
}

/// Failure: a best-effort prefetch started only if the plan came in the microsecond of the probe's
/// answer, and the next plan cancelled it if there was room. Here it starts, and gets its expected
/// duration.
#[test]
fn f53_best_effort_begins_and_gets_its_time() {
    only_fails_with(&[Bug::CallOffBestEffort], || {
        let config = with_l3(12, 16, |l3| l3.prefetch = PrefetchPolicy::BestEffort);
        let mut stage = only_in_l3(config, 1..=17);
        stage.submit(2, 1..=17, 1);
        stage.plan();
        stage.done(Kind::Probe);
        stage.wait_ms(1);
        stage.plan();
        stage.wait_ms(1);
        stage.plan();
        stage.done(Kind::Prefetch);
        stage.settle();
        assert_eq!(stage.stats().l3_hit_tokens, 16);
        stage.finish();
    });
}

/// Failure: a short prompt waited until the longest one had been computed. Here a part of each step
/// is reserved for the requests with the fewest remaining tokens: one that fits in it waits only
/// for the step in flight and its own.
#[test]
fn f54_a_short_prompt_waits_for_two_steps_at_the_most() {
    only_fails_with(&[Bug::StarveTheShort], || {
        for order in AdmissionOrder::ALL {
            let mut config = two_tiers(200, 0);
            config.batch.running_max = 8;
            config.batch.step_tokens_max = 16;
            config.queue.order = order;
            let mut stage = Stage::new(config);
            stage.submit(1, 1..=400, 1);
            stage.submit(2, 1001..=1200, 1);
            stage.plan();
            stage.submit(3, 2001..=2004, 1);
            stage.compute();
            stage.step();
            assert_eq!(stage.state(3), Some(StateName::Draining), "{order}");
            stage.settle();
            stage.finish();
        }
    });
}

/// Failure: requests with one prompt waited a second for the first of them, whatever happened to
/// it, and then computed pages that it had published meanwhile. Here they wait as long as it makes
/// progress; a request that does not wait takes over.
#[test]
fn f55_a_shared_prompt_is_computed_once() {
    let play = |wait_ms: u64| {
        let mut config = two_tiers(200, 0);
        config.batch.running_max = 8;
        // A step has spare tokens that make no page: the others are admitted for those.
        config.batch.step_tokens_max = 18;
        config.queue.share_wait_max_ms = wait_ms;
        let mut stage = Stage::new(config);
        for id in 1..=4 {
            stage.submit(id, 1..=101, 1);
        }
        while stage.plan().step.is_some() {
            stage.wait_ms(300);
            stage.compute();
        }
        // Each computes its last token.
        assert_eq!(stage.stats().prefilled_tokens, 100 + 4);
        stage.finish();
    };
    play(60_000);
    only_fails_with(&[Bug::NeverTakeOver], || play(20));
}

/// Failure: nearly all pages were evictable, and eviction made no progress, so that a request
/// waited for ever. Here every unpinned page can be evicted, by every policy, on the device at once
/// and on host as far as possible.
#[test]
fn f62_all_that_can_be_evicted_is_evicted() {
    for eviction in EvictionKind::ALL {
        for write_policy in [
            WritePolicy::WriteThrough,
            WritePolicy::SelectiveWriteThrough { hits: 2 },
            WritePolicy::WriteBack,
        ] {
            let mut config = two_tiers(24, 24);
            config.cache.eviction = eviction;
            config.cache.write_policy = write_policy;
            let mut stage = Stage::new(config);
            // Branches of one, two and three levels, the first of them hot.
            for round in 0..3 {
                stage.run(10 + round, 1..=25);
                stage.run(20 + round, (1..=12).chain(101..=109));
                stage.run(30 + round, (1..=12).chain(101..=104).chain(201..=209));
            }
            stage.run(40, 301..=321);
            // A request in the middle of it runs and pins four pages, and one to decode to.
            stage.submit(2, (1..=12).chain(401..=403), 4);
            stage.step();
            let held = 5;
            let tokens = (24 - held) * 4 - 1;
            stage.submit(3, 501..501 + tokens, 1);
            let mut plans = 0;
            while stage.prefill_start(3).is_none() {
                plans += 1;
                assert!(plans < 8, "{eviction:?}, {write_policy:?}: it is not admitted");
                stage.plan();
                let copies: Vec<OpId> =
                    stage.world.last_plan().copies.iter().map(|copy| copy.op).collect();
                for op in copies {
                    stage.report(op, Outcome::Done);
                }
                if stage.world.in_step() {
                    stage.compute();
                }
            }
            stage.finish();
        }
    }
}

/// Failure: pages were promoted for every waiting request until the host was full of pinned pages.
/// Running requests could write nothing back, and the first promoted pages were promoted again.
/// Here the pages of waiting requests have a share of the host, and each page is fetched once.
#[test]
fn f69_waiting_requests_leave_room_on_host() {
    let mut config = three_tiers(24, 16);
    config.batch.running_max = 1;
    let mut stage = Stage::new(config);
    let waiting = 2..=11_u64;
    let prompt = |id: u64| id as Token * 100..=id as Token * 100 + 16;
    for id in waiting.clone() {
        stage.run(id, prompt(id));
    }
    stage.clear();
    // While one request runs, L3 answers and delivers at once.
    stage.submit(1, 1..=9, 8);
    for id in waiting {
        stage.submit(100 + id, prompt(id), 1);
    }
    let mut least_available = 16;
    for _ in 0..8 {
        stage.plan();
        let ops: Vec<OpId> = stage.world.last_plan().l3.iter().map(|op| op.op).collect();
        for op in ops {
            stage.report(op, Outcome::Done);
        }
        if stage.world.in_step() {
            stage.compute();
        }
        least_available = least_available.min(stage.stats().cache.host.available_pages());
    }
    assert!((1..=4).contains(&least_available), "{least_available} host pages are left");
    stage.settle();
    let stats = stage.stats();
    assert_eq!(stats.l3_hit_tokens, 16 * 10, "every hit was used");
    assert_eq!(stats.prefetches.sound_pages, 4 * 10, "and fetched once");
    assert_eq!(stats.write_backs_skipped_pages, 0, "what ran found room on host");
    stage.finish();
}

/// Failure: a request for more host memory than available got none, and all queued backups were
/// dropped for it. Here it gets what is available, for copies and prefetches alike.
#[test]
fn f83_room_for_a_part_is_used() {
    only_fails_with(&[Bug::HostRoomAllOrNothing], || {
        let mut stage = Stage::new(three_tiers(32, 8));
        stage.run(1, 1..=21);
        // Three pages are on their way to L3: the others are all that is available.
        stage.submit(2, 101..=113, 1);
        stage.plan();
        stage.ends(Kind::Probe, Outcome::Missing);
        stage.step();
        stage.plan();
        stage.done(Kind::WriteBack);
        stage.plan();
        let backup = stage.latest(Kind::Backup);
        stage.submit(3, 201..=233, 1);
        stage.plan();
        stage.ends(Kind::Probe, Outcome::Missing);
        stage.step();
        stage.plan();
        let write_back = stage.latest(Kind::WriteBack);
        assert_eq!(stage.host_pages(write_back).len(), 5);
        stage.report(write_back, Outcome::Done);
        stage.report(backup, Outcome::Done);
        stage.finish();
    });
}
