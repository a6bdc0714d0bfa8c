//! Wrong KV served: the worst class, because it is silent. Each test ends with a step that reads
//! the pages.

use terrace_cache::planted::Bug;
use terrace_scheduler::{Config, Outcome, Request, StateName};
use terrace_tests::Damage;

use super::{Kind, Stage, only_fails_with, three_tiers, two_tiers, with_l3};

/// The first two pages of `1..=17` are on host only, and L3 has all four.
fn two_pages_on_host_four_in_l3() -> Stage {
    let mut stage = Stage::new(three_tiers(6, 16));
    stage.run(1, 1..=17);
    stage.clear();
    stage.run(2, (1..=8).chain([51]));
    stage.run(3, 101..=121);
    assert_eq!(stage.cached(1..=17), (0, 2));
    stage
}

/// Failure: the suffix from a prefetch was inserted as if it began at page 0, so that load-backs
/// used another page's KV. Here a prefetch begins behind the pin that it was planned with, and its
/// pages are inserted there.
#[test]
fn f01_prefetch_begins_behind_the_host_match() {
    only_fails_with(&[Bug::FetchFromPageZero], || {
        let mut stage = two_pages_on_host_four_in_l3();
        let keys = stage.keys(1..=17);
        stage.submit(4, 1..=17, 1);
        stage.plan();
        let probe = stage.done(Kind::Probe);
        assert_eq!(stage.l3_keys(probe), &keys[2..]);
        stage.plan();
        let prefetch = stage.done(Kind::Prefetch);
        assert_eq!(stage.l3_keys(prefetch), &keys[2..]);
        assert_eq!(stage.cached(1..=17), (0, 4));
        stage.plan();
        let load_back = stage.done(Kind::LoadBack);
        assert_eq!(stage.host_pages(load_back).len(), 4);
        stage.step();
        assert_eq!(stage.prefill_start(4), Some(16), "all four pages are read, none is computed");
        stage.finish();
    });
}

/// Failure: keys were listed at admission, and by the time of the prefetch the host match had
/// grown. Here the match is repeated when the prefetch is planned, and its keys are those of the
/// pages behind it.
#[test]
fn f02_match_grew_before_the_prefetch() {
    only_fails_with(&[Bug::UseKeysOfTheProbe], || {
        let mut stage = Stage::new(three_tiers(12, 16));
        stage.run(1, 1..=17);
        stage.clear();
        stage.submit(2, 1..=9, 1);
        stage.plan();
        let other_probe = stage.latest(Kind::Probe);
        stage.submit(3, 1..=17, 1);
        stage.plan();
        let probe = stage.latest(Kind::Probe);
        assert_eq!(stage.l3_keys(probe).len(), 4);
        // The other request computes the first two pages, while L3 reports all four.
        stage.report(other_probe, Outcome::Missing);
        stage.plan();
        stage.report(probe, Outcome::Done);
        stage.compute();
        stage.plan();
        let prefetch = stage.done(Kind::Prefetch);
        assert_eq!(stage.l3_keys(prefetch), &stage.keys(1..=17)[2..]);
        stage.plan();
        stage.done(Kind::LoadBack);
        stage.step();
        assert_eq!(stage.prefill_start(3), Some(16));
        stage.finish();
    });
}

/// Same, but the match has shrunk: keys of later pages were used for the first ones. Here L3 is
/// queried again for all pages that are missing now.
#[test]
fn f02_match_shrank_before_the_prefetch() {
    let mut stage = Stage::new(three_tiers(8, 16));
    stage.run(1, 1..=17);
    stage.clear();
    stage.run(2, (1..=8).chain([51]));
    stage.submit(3, 1..=17, 1);
    stage.plan();
    let probe = stage.done(Kind::Probe);
    assert_eq!(stage.l3_keys(probe), &stage.keys(1..=17)[2..]);
    stage.clear();
    stage.plan();
    let second_probe = stage.done(Kind::Probe);
    assert_eq!(stage.l3_keys(second_probe), stage.keys(1..=17));
    stage.plan();
    let prefetch = stage.done(Kind::Prefetch);
    assert_eq!(stage.l3_keys(prefetch), stage.keys(1..=17));
    stage.plan();
    stage.done(Kind::LoadBack);
    stage.step();
    assert_eq!(stage.prefill_start(3), Some(16));
    stage.finish();
}

/// Failure: a failed transfer was marked as loaded, so that undefined bytes were served. Here only
/// pages that were reported valid are published; the others return to the pool.
#[test]
fn f04_failed_load_is_no_hit() {
    let bugs = [Bug::BelieveWholePrefetch, Bug::BelieveWholeLoadBack, Bug::PublishFailedTransfer];
    only_fails_with(&bugs, || {
        let mut stage = Stage::new(with_l3(12, 16, |l3| l3.backoff_base_ms = 0));
        stage.run(1, 1..=9);
        stage.clear();
        stage.submit(2, 1..=9, 1);
        stage.plan();
        stage.done(Kind::Probe);
        stage.plan();
        stage.ends(Kind::Prefetch, Outcome::Failed);
        assert_eq!(stage.cached(1..=9), (0, 0));
        stage.step();
        assert_eq!(stage.prefill_start(2), Some(0));
        stage.settle();
        // Host has it now, and this time the copy to the device fails.
        stage.run(3, 101..=145);
        assert_eq!(stage.cached(1..=9), (0, 2));
        stage.submit(4, 1..=9, 1);
        stage.plan();
        stage.ends(Kind::LoadBack, Outcome::Failed);
        assert_eq!(stage.cached(1..=9), (0, 2));
        stage.step();
        assert_eq!(stage.prefill_start(4), Some(0));
        stage.finish();
    });
}

/// Failure: pages showed as a device hit before their load had ended, and the failed part was freed
/// while others shared it. Here pages in flight cannot be matched: other requests wait for the
/// operation.
#[test]
fn f05_load_is_invisible_until_it_has_ended() {
    only_fails_with(&[Bug::BelieveWholeLoadBack, Bug::PublishFailedTransfer], || {
        let mut stage = Stage::new(two_tiers(12, 32));
        stage.run(1, 1..=13);
        stage.run(2, 101..=145);
        assert_eq!(stage.cached(1..=13), (0, 3));
        stage.submit(3, 1..=13, 1);
        stage.submit(4, 1..=13, 1);
        assert!(stage.plan().step.is_none(), "both wait for one load-back");
        assert_eq!(stage.stats().load_backs.started, 1);
        assert_eq!(stage.state(4), Some(StateName::Submitted));
        assert_eq!(stage.cached(1..=13), (0, 3));
        stage.ends(Kind::LoadBack, Outcome::Partial(1));
        assert_eq!(stage.cached(1..=13), (1, 2));
        stage.step();
        assert_eq!(stage.prefill_start(3), Some(4));
        stage.finish();
    });
}

/// Failure: a prefetch ended after another request had published the same pages, and its insertion
/// freed the slots that it had been written to. Here existing pages stay; the prefetched ones are
/// dropped or become the missing copy.
#[test]
fn f06_prefetch_is_overtaken() {
    for overtaken_on_host in [false, true] {
        let mut config = with_l3(8, 32, |l3| l3.prefetch_threshold_pages = 2);
        config.queue.share_wait_max_ms = 0;
        let mut stage = Stage::new(config);
        stage.run(1, 1..=9);
        stage.clear();
        stage.submit(2, 1..=9, 1);
        stage.plan();
        stage.done(Kind::Probe);
        stage.plan();
        let prefetch = stage.latest(Kind::Prefetch);
        stage.submit(3, (1..=8).chain(51..=53), 2);
        stage.step();
        assert_eq!(stage.cached(1..=9), (2, 0));
        if overtaken_on_host {
            stage.step();
            stage.plan();
            stage.done(Kind::WriteBack);
        }
        let device_pages_before = stage.stats().cache.device;
        stage.report(prefetch, Outcome::Done);
        assert_eq!(stage.stats().cache.device, device_pages_before, "nothing is replaced");
        assert_eq!(stage.cached(1..=9), (2, 0));
        stage.step();
        assert_eq!(stage.prefill_start(2), Some(8));
        // Either host copy must be the right one as well.
        stage.settle();
        stage.run(4, 101..=129);
        assert_eq!(stage.cached(1..=9), (0, 2));
        stage.run(5, 1..=9);
        assert_eq!(stage.stats().load_backs.started, 1);
        stage.finish();
    }
}

/// Failure: a request was aborted with its load in flight, and its pages were reused while the copy
/// still ran. Here an operation owns its pages until it has released them.
#[test]
fn f08_abort_while_loading() {
    let mut stage = Stage::new(two_tiers(6, 16));
    stage.run(1, 1..=9);
    stage.run(2, 101..=121);
    stage.submit(3, 1..=9, 1);
    stage.plan();
    let load_back = stage.latest(Kind::LoadBack);
    stage.abort(3);
    assert_eq!(stage.stats().load_backs.quarantined_pages, 2);
    stage.submit(4, 201..=213, 2);
    stage.plan();
    assert_eq!(stage.world.last_plan().cancelled, [load_back]);
    let taken = stage.device_pages(load_back);
    assert!(stage.row(4).iter().all(|page| !taken.contains(page)));
    stage.compute();
    stage.report(load_back, Outcome::Done);
    stage.step();
    assert_eq!(stage.cached(1..=9), (2, 0), "what it brought is sound, and kept");
    stage.run(5, 1..=9);
    assert_eq!(stage.prefill_start(5), None, "it has ended");
    stage.finish();
}

/// Same with a prefetch, cancelled by an abort, by the scheduler's deadline or by the driver's.
#[test]
fn f08_prefetch_is_called_off() {
    only_fails_with(&[Bug::ReuseAfterDeadline, Bug::ReuseAfterTimeout], || {
        for how in ["abort", "deadline", "driver"] {
            let mut stage = Stage::new(three_tiers(16, 4));
            stage.run(1, 1..=9);
            stage.clear();
            stage.submit(2, 1..=9, 1);
            stage.plan();
            stage.done(Kind::Probe);
            stage.plan();
            let prefetch = stage.latest(Kind::Prefetch);
            match how {
                "abort" => stage.abort(2),
                "deadline" => stage.wait_for_deadline(),
                _ => stage.report(prefetch, Outcome::TimedOut),
            }
            // The write-back of other pages needs all of the host, and gets the two free pages.
            stage.submit(3, 101..=117, 1);
            stage.plan();
            if stage.stats().probes.in_flight > 0 {
                stage.ends(Kind::Probe, Outcome::Missing);
                stage.plan();
            }
            stage.compute();
            stage.plan();
            for copy in stage.world.last_plan().copies.clone() {
                let (copied, fetched) = (stage.host_pages(copy.op), stage.host_pages(prefetch));
                assert!(copied.iter().all(|page| !fetched.contains(page)), "{how}: {copied:?}");
                stage.report(copy.op, Outcome::Done);
            }
            stage.report(prefetch, Outcome::Done);
            stage.settle();
            // Both are read back from their current tiers.
            stage.run(4, 201..=261);
            stage.run(5, 101..=117);
            stage.run(6, 1..=9);
            stage.finish();
        }
    });
}

/// Same with a step: its pages are free after an abort, but not reused while it runs.
#[test]
fn f08_abort_while_computing() {
    let mut stage = Stage::new(two_tiers(5, 0));
    stage.submit(1, 1..=16, 1);
    stage.plan();
    stage.abort(1);
    stage.submit(2, 101..=117, 2);
    assert!(stage.plan().rows.is_empty(), "device pages were handed out during a step");
    stage.compute();
    assert_eq!(stage.cached(1..=16), (0, 0), "pages of an aborted step are not published");
    stage.step();
    stage.step();
    stage.finish();
}

/// Same with a copy to host: it completes, and its pages are matched if they are valid.
#[test]
fn f08_abort_while_writing_back() {
    let mut stage = Stage::new(two_tiers(4, 8));
    stage.submit(1, 1..=9, 1);
    stage.step();
    stage.plan();
    let write_back = stage.latest(Kind::WriteBack);
    stage.abort(1);
    // Device pages that are being copied are not available.
    stage.submit(2, 101..=113, 1);
    assert!(stage.plan().step.is_none());
    assert_eq!(stage.cached(1..=9), (2, 0));
    stage.report(write_back, Outcome::Done);
    stage.step();
    assert_eq!(stage.cached(1..=9), (0, 2));
    stage.settle();
    stage.run(3, 1..=9);
    assert_eq!(stage.stats().host_hit_tokens, 8);
    stage.finish();
}

/// Failure: auxiliary data was shorter than the KV, and the whole prefix was published. Here all
/// parts of a page report separately, and the shortest counts.
#[test]
fn f09_shortest_part_counts() {
    only_fails_with(&[Bug::BelieveBestRank], || {
        let mut config = three_tiers(8, 8);
        config.model.ranks = 2;
        let mut stage = Stage::new(config);
        stage.run(1, 1..=13);
        stage.clear();
        stage.submit(2, 1..=13, 1);
        stage.plan();
        stage.done(Kind::Probe);
        stage.plan();
        let prefetch = stage.latest(Kind::Prefetch);
        // The incomplete part reports last: its length counts.
        stage.report_rank(prefetch, 0, Outcome::Partial(1));
        assert_eq!(stage.cached(1..=13), (0, 0));
        stage.report_rank(prefetch, 1, Outcome::Done);
        assert_eq!(stage.cached(1..=13), (0, 1));
        stage.plan();
        stage.done(Kind::LoadBack);
        stage.step();
        assert_eq!(stage.prefill_start(2), Some(4));
        stage.finish();
    });
}

/// Failure: keys omitted weights, dtype, layout or page size, so that KV of another model was
/// served after a swap. Here all of these are part of the namespace, which every key includes.
#[test]
fn f10_keys_tell_models_apart() {
    let changes: [fn(&mut Config); 5] = [
        |config| config.model.fingerprint = "model, new weights".to_owned(),
        |config| config.model.dtype = "fp8".to_owned(),
        |config| config.model.layout = "page-first".to_owned(),
        |config| config.model.ranks = 2,
        |config| config.cache.page_size = 8,
    ];
    let mut before = Stage::new(three_tiers(8, 8));
    before.run(1, 1..=17);
    let stored = before.world.l3.clone();
    assert_eq!(stored.len(), 4);
    for change in changes {
        let mut config = three_tiers(8, 8);
        change(&mut config);
        let mut after = Stage::new(config);
        after.world.l3.clone_from(&stored);
        assert!(after.keys(1..=17).iter().all(|key| !stored.contains_key(key)));
        after.run(1, 1..=17);
        assert_eq!((after.stats().probes.started, after.stats().probes.sound_pages), (1, 0));
        assert_eq!(after.stats().prefilled_tokens, 17);
        after.finish();
    }
    before.finish();
}

fn salted(id: u64, salt: &str) -> Request {
    Request { salt: salt.to_owned(), ..Request::new(id, (1..=9).collect(), 1) }
}

/// Failure: the tenant's salt was not part of the key, so that one tenant hit another's KV. Here it
/// is part of the namespace, in every tier.
#[test]
fn f11_tenants_share_nothing() {
    only_fails_with(&[Bug::LeaveSaltOutOfNamespace], || {
        let mut stage = Stage::new(three_tiers(8, 8));
        for id in 1..=2 {
            stage.submit_request(salted(id, &format!("tenant {id}")));
            stage.settle();
        }
        assert_eq!(stage.stats().prefilled_tokens, 18, "nothing on device or host is shared");
        assert_eq!(stage.world.l3.len(), 4);
        stage.clear();
        stage.submit_request(salted(3, "tenant 3"));
        stage.settle();
        assert_eq!(stage.stats().l3_hit_tokens, 0, "nothing in L3 is shared");
        stage.clear();
        stage.submit_request(salted(4, "tenant 1"));
        stage.settle();
        assert_eq!(stage.stats().l3_hit_tokens, 8, "a tenant finds its own");
        stage.finish();
    });
}

/// Failure: a short read passed as complete, and the rest of the buffer was undefined. Here the
/// driver reports the number of valid pages, and no others are published.
#[test]
fn f12_short_read_is_not_published() {
    only_fails_with(&[Bug::BelieveWholePrefetch], || {
        let kinds =
            [Damage::ShortRead, Damage::FlippedBit, Damage::WrongPage, Damage::StaleGeneration];
        for damage in kinds {
            let mut stage = Stage::new(three_tiers(8, 8));
            stage.run(1, 1..=17);
            stage.clear();
            stage.submit(2, 1..=17, 1);
            stage.plan();
            stage.done(Kind::Probe);
            stage.plan();
            let prefetch = stage.latest(Kind::Prefetch);
            stage.world.report_damaged(prefetch, 0, 2, damage).expect("it was planned");
            assert_eq!(stage.cached(1..=17), (0, 2), "{damage:?}");
            stage.plan();
            stage.done(Kind::LoadBack);
            stage.step();
            assert_eq!(stage.prefill_start(2), Some(8));
            stage.finish();
        }
    });
}

/// Failure: keys were seeded per process: nothing, or the wrong page, was shared. Here keys depend
/// only on the namespace and the tokens, and never change.
#[test]
fn f13_keys_are_the_same_in_every_process() {
    let mut before = Stage::new(three_tiers(8, 8));
    before.run(1, 1..=9);
    let keys: Vec<String> = before.keys(1..=9).iter().map(ToString::to_string).collect();
    assert_eq!(keys, ["5a91caf4ae9f6b6216d6d328524b65a2", "d029a7e874c2fe8f225ec0f50c6e752c"]);
    // A scheduler in another thread, as in another process, finds what the first one stored.
    let stored = std::mem::take(&mut before.world.l3);
    let after = std::thread::spawn(move || {
        let mut stage = Stage::new(three_tiers(8, 8));
        stage.world.l3 = stored;
        stage.run(1, 1..=9);
        assert_eq!(stage.stats().l3_hit_tokens, 8);
        stage.finish();
    });
    after.join().expect("it finds them");
    before.finish();
}

/// Failure: a full hit of a prompt whose length is a multiple of the page size led to wrong
/// context. Here the last token is always computed, so the last page is computed again behind the
/// hits, in each tier.
#[test]
fn f74_a_full_hit_of_whole_pages() {
    for page_size in [1, 2, 4, 8] {
        for pages in 1..=4 {
            let mut config = three_tiers(16, 32);
            config.cache.page_size = page_size;
            // A single token is worth a prefetch.
            config.rates.prefill_ns_per_token = 10_000_000;
            let prompt = 1..=page_size * pages;
            let hit_tokens = u64::from(page_size * (pages - 1));
            let mut stage = Stage::new(config);
            stage.run(1, prompt.clone());
            stage.run(2, prompt.clone());
            assert_eq!(stage.stats().device_hit_tokens, hit_tokens);
            // Other requests need all of the device, and then device and host are cleared.
            stage.run(3, 1_001..=1_001 + page_size * 15);
            let first_hits = stage.stats().host_hit_tokens;
            stage.run(4, prompt.clone());
            assert_eq!(stage.stats().host_hit_tokens - first_hits, hit_tokens);
            stage.clear();
            stage.run(5, prompt.clone());
            assert_eq!(stage.stats().l3_hit_tokens, hit_tokens);
            // The answer continues behind it: each of its pages is read with the right context.
            stage.submit(6, prompt, page_size * 3);
            stage.settle();
            stage.finish();
        }
    }
}

/// Failure: in a training loop, KV of old weights was used with new ones. Here new weights have
/// another namespace, and transfers in flight during the change are kept on no tier.
#[test]
fn f77_pages_of_old_weights_are_not_kept() {
    only_fails_with(&[Bug::KeepPagesOfOldWeights], || {
        let mut stage = Stage::new(three_tiers(24, 24));
        stage.run(1, 1..=9);
        stage.clear();
        stage.submit(2, 101..=109, 1);
        stage.plan();
        stage.ends(Kind::Probe, Outcome::Missing);
        stage.step();
        stage.submit(3, 1..=9, 4);
        stage.plan();
        stage.done(Kind::Probe);
        stage.plan();
        let write_back = stage.latest(Kind::WriteBack);
        let prefetch = stage.latest(Kind::Prefetch);
        stage.world.replace_weights("second").expect("no step is in flight");
        stage.report(write_back, Outcome::Done);
        stage.report(prefetch, Outcome::Done);
        let host = stage.stats().cache.host;
        assert_eq!(host.free_pages, host.total_pages, "the host keeps pages of no use");
        let stored = stage.world.l3.len();
        stage.settle();
        assert_eq!(stage.stats().l3_hit_tokens, 0);
        // The answer of the third was computed with the new weights.
        assert_eq!(stage.world.l3.len(), stored + 3);
        stage.finish();
    });
}
