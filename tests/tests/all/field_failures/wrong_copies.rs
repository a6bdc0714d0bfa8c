//! Wrong KV stored: errors between device, host and L3 that are read much later. Each test ends
//! with a step that reads the pages.

use std::collections::BTreeSet;

use terrace_cache::planted::Bug;
use terrace_scheduler::{DevicePage, Outcome, RequestId, StateName, Token};

use super::{Kind, Stage, only_fails_with, three_tiers, two_tiers};

/// Failure: host pages were evicted and reused during a backup, so that unrelated KV was stored
/// under their keys. Here a backup holds a pin until its outcome.
#[test]
fn f03_backup_holds_its_host_pages() {
    only_fails_with(&[Bug::UnpinDuringBackup], || {
        let mut stage = Stage::new(three_tiers(12, 3));
        stage.submit(1, 1..=9, 1);
        stage.plan();
        stage.ends(Kind::Probe, Outcome::Missing);
        stage.step();
        stage.plan();
        stage.done(Kind::WriteBack);
        stage.plan();
        let backup = stage.latest(Kind::Backup);
        // The next request's write-back needs two pages and gets one.
        stage.submit(2, 101..=109, 1);
        stage.plan();
        stage.ends(Kind::Probe, Outcome::Missing);
        stage.step();
        stage.plan();
        let write_back = stage.done(Kind::WriteBack);
        assert_eq!(stage.host_pages(write_back).len(), 1);
        stage.report(backup, Outcome::Done);
        stage.settle();
        // L3 holds the first request's KV under its keys.
        stage.clear();
        stage.submit(3, 1..=9, 1);
        stage.plan();
        stage.done(Kind::Probe);
        stage.plan();
        stage.done(Kind::Prefetch);
        stage.plan();
        stage.done(Kind::LoadBack);
        stage.step();
        assert_eq!(stage.prefill_start(3), Some(8));
        stage.finish();
    });
}

/// Returns the device pages that a step in flight writes.
fn written_pages(stage: &Stage) -> BTreeSet<DevicePage> {
    let plan = stage.world.last_plan();
    let prefills = plan.prefills.iter().map(|p| (p.request, p.start, p.tokens));
    let decodes = plan.decodes.iter().map(|d| (d.request, d.start, d.tokens));
    let mut written = BTreeSet::new();
    for (request, start, tokens) in prefills.chain(decodes) {
        let row = stage.row(request.0);
        written.extend(&row[start as usize / 4..(start + tokens).div_ceil(4) as usize]);
    }
    written
}

/// Failure: the copy to host read device pages that compute was still writing. Here a page is
/// published, and then copied, only when the step that completed it was reported.
#[test]
fn f07_write_back_follows_compute() {
    only_fails_with(&[Bug::PublishUncomputedPage], || {
        let mut stage = Stage::new(two_tiers(8, 32));
        // The token that follows 1..=7 completes a page; its KV is computed only if it is read.
        stage.submit(1, 1..=7, 2);
        stage.step();
        let eight: Vec<Token> =
            stage.world.scheduler.tokens(RequestId(1)).expect("it runs").to_vec();
        stage.abort(1);
        stage.clear();
        stage.submit(2, 1..=7, 1);
        stage.submit(3, 101..=107, 6);
        for _ in 0..8 {
            stage.plan();
            let written = written_pages(&stage);
            let copies = stage.world.last_plan().copies.clone();
            for copy in &copies {
                let read = stage.device_pages(copy.op);
                assert!(read.iter().all(|page| !written.contains(page)), "{read:?} is written");
            }
            // The copies end before the step.
            for copy in copies {
                stage.report(copy.op, Outcome::Done);
            }
            if stage.world.in_step() {
                stage.compute();
            }
        }
        stage.run(4, 201..=229);
        let host_copy = stage.cached(eight.iter().copied());
        assert_eq!(host_copy, (0, 1), "the page that was not computed in full is not there");
        stage.run(5, eight.into_iter().chain([51]));
        assert!(stage.stats().load_backs.started > 0);
        stage.finish();
    });
}

/// Failure: an abort between the last token and the copy to host left matchable host pages without
/// content. Here host pages are allocated when the copy starts, with or without an abort, and
/// matched when it has succeeded.
#[test]
fn f42_abort_while_draining() {
    only_fails_with(&[Bug::PublishFailedTransfer], || {
        let mut stage = Stage::new(two_tiers(4, 8));
        stage.submit(1, 1..=9, 1);
        stage.step();
        assert_eq!(stage.state(1), Some(StateName::Draining));
        stage.abort(1);
        stage.plan();
        assert_eq!(stage.cached(1..=9), (2, 0));
        stage.ends(Kind::WriteBack, Outcome::Failed);
        stage.run(2, 101..=116);
        assert_eq!(stage.cached(1..=9), (0, 0), "the host has nothing of it");
        stage.run(3, 1..=9);
        assert_eq!(stage.stats().load_backs.started, 0);
        stage.finish();
    });
}

/// Same, but the copy is in flight and ends early: one page of two is on host.
#[test]
fn f42_abort_while_writing_back() {
    only_fails_with(&[Bug::PublishFailedTransfer], || {
        let mut stage = Stage::new(two_tiers(4, 8));
        stage.submit(1, 1..=9, 1);
        stage.step();
        stage.plan();
        stage.abort(1);
        stage.ends(Kind::WriteBack, Outcome::Partial(1));
        stage.run(2, 101..=116);
        assert_eq!(stage.cached(1..=9), (0, 1));
        stage.submit(3, 1..=9, 1);
        stage.plan();
        stage.done(Kind::LoadBack);
        stage.step();
        assert_eq!(stage.prefill_start(3), Some(4));
        stage.finish();
    });
}

/// Failure: a failed copy to host was published, the device copy dropped, and the invalid bytes
/// stored in L3. Here a failed copy is neither matched nor backed up.
#[test]
fn f43_failed_write_back_is_no_copy() {
    only_fails_with(&[Bug::PublishFailedTransfer], || {
        for outcome in [Outcome::Failed, Outcome::Corrupt, Outcome::Partial(0)] {
            let mut stage = Stage::new(three_tiers(4, 8));
            stage.submit(1, 1..=9, 1);
            stage.plan();
            stage.done(Kind::Probe);
            stage.step();
            stage.plan();
            stage.ends(Kind::WriteBack, outcome);
            stage.settle();
            assert_eq!(stage.cached(1..=9), (2, 0), "the device copy stays");
            assert_eq!(stage.stats().backups.started, 0);
            stage.run(2, 101..=116);
            assert_eq!(stage.cached(1..=9), (0, 0));
            stage.run(3, 1..=9);
            assert_eq!(stage.stats().load_backs.started, 0);
            stage.finish();
        }
    });
}

/// Failure: a page refused by the store counted as stored. Here an incomplete backup is retried,
/// and L3 is assumed to have a page only after it has confirmed it.
#[test]
fn f44_failed_backup_is_offered_again() {
    for outcome in [Outcome::Failed, Outcome::Partial(1), Outcome::Missing] {
        let mut stage = Stage::new(three_tiers(8, 8));
        stage.submit(1, 1..=9, 1);
        stage.plan();
        stage.done(Kind::Probe);
        stage.step();
        stage.plan();
        stage.done(Kind::WriteBack);
        stage.plan();
        let first = stage.ends(Kind::Backup, outcome);
        if outcome == Outcome::Failed {
            stage.wait_for_deadline();
        }
        stage.plan();
        let second = stage.done(Kind::Backup);
        assert_ne!(first, second, "{outcome:?} is offered again");
        assert_eq!(stage.l3_keys(second), stage.keys(1..=9));
        stage.run(2, 1..=9);
        assert_eq!(stage.stats().backups.started, 2, "once stored, it is not offered again");
        stage.clear();
        stage.run(3, 1..=9);
        assert_eq!(stage.stats().l3_hit_tokens, 8);
        stage.finish();
    }
}
