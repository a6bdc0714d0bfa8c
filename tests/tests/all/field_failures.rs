//! Failures of similar systems, and why they cannot happen here: one test for each row of the table
//! in `tests/README.md`, with the row's number in its name.
//!
//! Every test reproduces the situation of its row in a [`World`], in which a step that reads a
//! wrong page panics. It ends with [`Stage::finish`]: no page is lost or pinned, and no request
//! waits. If a planted bug reintroduces the failure, the same situation must fail with it. Rows
//! about the store use real stores, whose objects are checked byte by byte.

mod crafted;
mod hangs;
mod stage;
mod store;
mod structure;
mod wrong_copies;
mod wrong_kv;

use std::panic::{AssertUnwindSafe, catch_unwind};

use terrace_cache::planted::{Bug, plant};
use terrace_scheduler::{Config, L3Config, RateConfig};

use stage::{Kind, Stage};

/// Returns a configuration with pages of four tokens, without L3. Computing is slow, so that
/// loading always pays.
fn two_tiers(device_pages: u32, host_pages: u32) -> Config {
    let rates = RateConfig { prefill_ns_per_token: 1_000_000, ..RateConfig::default() };
    Config::builder()
        .page_size(4)
        .device_pages(device_pages)
        .host_pages(host_pages)
        .rates(rates)
        .build()
        .expect("it can work")
}

/// Same with L3, which is queried even for a single page.
fn three_tiers(device_pages: u32, host_pages: u32) -> Config {
    with_l3(device_pages, host_pages, |_| {})
}

/// Same with changes to the L3 settings.
fn with_l3(device_pages: u32, host_pages: u32, change: impl FnOnce(&mut L3Config)) -> Config {
    let mut l3 = L3Config { prefetch_threshold_pages: 1, ..L3Config::default() };
    change(&mut l3);
    Config { l3: Some(l3), ..two_tiers(device_pages, host_pages) }
}

/// Runs a situation, which must pass, and then again with a planted bug, which must fail.
fn only_fails_with(bugs: &[Bug], situation: impl Fn()) {
    situation();
    for &bug in bugs {
        plant(Some(bug));
        let played = catch_unwind(AssertUnwindSafe(&situation));
        plant(None);
        assert!(played.is_err(), "{bug} goes unnoticed");
    }
}
