//! Situations under pressure, each with a figure that a healthy scheduler reaches: hits from a
//! contended tier, pages to keep or drop, and requests that must not wait for others.
//!
//! The sizes of every situation are random. There are no faults; transfers queue on links of known
//! speed.

mod bench;

use terrace_kit::Dice;
use terrace_scheduler::{
    AdmissionOrder, BatchConfig, Config, ConfigBuilder, CopyConfig, L3Config, PrefetchPolicy,
    QueueConfig, RateConfig, Reach, RequestId, WritePolicy,
};

use super::action::Action;
use super::stage::Violation;
use super::useful::Account;
use crate::world::Transfer;
use bench::{Bench, Link, Speeds, draw};

/// Text of the prompt that flushes the device.
const FLUSH_TEXT: u32 = 1_000;

/// Runs every situation once.
///
/// # Errors
/// Returns the first figure that is not reached, or any other violation.
pub(super) fn run_under_pressure(seed: u64, account: &mut Account) -> Result<(), Violation> {
    (0..SITUATIONS.len()).try_for_each(|place| run_situation(place, seed, account))
}

type Situation = fn(&mut Pressure<'_>) -> Result<(), Violation>;

/// The situations; each has its own random source.
const SITUATIONS: [Situation; 8] = [
    backlog,
    warm_host,
    replaced_weights,
    late_room,
    many_deferred,
    queued_load_backs,
    slow_shared_load_back,
    recovered_store,
];

fn run_situation(place: usize, seed: u64, account: &mut Account) -> Result<(), Violation> {
    let dice = Dice::new(seed.rotate_left(8 + place as u32) ^ 0x9E55);
    SITUATIONS[place](&mut Pressure { seed, dice, account })
}

/// Random source and account of a situation.
struct Pressure<'a> {
    seed: u64,
    dice: Dice,
    account: &'a mut Account,
}

impl Pressure<'_> {
    fn bench(&mut self, config: ConfigBuilder, speeds: Speeds) -> Bench<'_> {
        let config = config.kv_event_keys_max(0).build().expect("a legal configuration");
        Bench::new(self.seed, config, speeds, self.account)
    }

    fn page_size(&mut self) -> u32 {
        self.dice.pick(&[2, 4, 8])
    }
}

fn low_reuse<T>(what: String) -> Result<T, Violation> {
    Err(Violation::LowReuse(what))
}

/// Checks that at least a percentage of the prompts' pages was not computed.
fn check_hits(
    bench: &Bench<'_>,
    prompts: &[(RequestId, u32)],
    least_percent: u64,
    situation: &str,
) -> Result<(), Violation> {
    let page_size = u64::from(bench.stage.world.scheduler.config().cache.page_size);
    let pages: u64 = prompts.iter().map(|&(_, pages)| u64::from(pages)).sum();
    let tokens: u64 = prompts.iter().map(|&(id, _)| bench.recomputed_tokens(id)).sum();
    let computed = tokens.div_ceil(page_size);
    if (pages - computed.min(pages)) * 100 < pages * least_percent {
        return low_reuse(format!("{computed} of {pages} cached pages computed {situation}"));
    }
    Ok(())
}

/// L3 has the prompts of many requests, some of them larger than the share of prefetches. All wait
/// for slots longer than for their share.
fn backlog(pressure: &mut Pressure<'_>) -> Result<(), Violation> {
    let dice = &mut pressure.dice;
    let share = 32;
    let mut sizes: Vec<u32> = (0..8).map(|_| draw(dice, 8..=16)).collect();
    // The first behind a small one exceeds the share.
    (sizes[1], sizes[4]) = (draw(dice, 70..=100), draw(dice, 70..=100));
    let prefetch = dice.pick(&[
        PrefetchPolicy::Wait { max_ms: 100 },
        PrefetchPolicy::Deadline { base_ms: 100, per_page_us: 500 },
    ]);
    let page_size = pressure.page_size();
    let config = Config::builder()
        .page_size(page_size)
        .device_pages(240)
        .host_pages(300)
        .batch(BatchConfig {
            running_max: 2,
            step_tokens_max: 16 * page_size,
            ..BatchConfig::default()
        })
        .l3(L3Config {
            prefetch,
            prefetch_threshold_pages: 2,
            prefetch_pages_max: share,
            probe_timeout_ms: 1_000,
            ..L3Config::default()
        })
        .rates(RateConfig { prefill_ns_per_token: 1_000_000, ..RateConfig::default() });
    let speeds = Speeds { step_us: 10_000, ..Speeds::default() };
    let mut bench = pressure.bench(config, speeds);
    let prompts: Vec<(u32, u32)> = (0..).zip(sizes).collect();
    bench.prepare(&prompts)?;
    bench.perform(&Action::Clear)?;
    // Both slots are occupied longer than the wait for a share, and become free in the same step.
    bench.submit(FLUSH_TEXT, 1, 41)?;
    bench.submit(FLUSH_TEXT + 1, 1, 40)?;
    let mut requests = Vec::new();
    for &(text, pages) in &prompts {
        requests.push((bench.submit(text, pages, 30)?, pages));
    }
    bench.run_until_quiet()?;
    check_hits(&bench, &requests, 90, "with a backlog larger than the share of prefetches")
}

/// A large prompt is computed while the host is full and partly pinned by a backup that hangs.
fn warm_host(pressure: &mut Pressure<'_>) -> Result<(), Violation> {
    let held = draw(&mut pressure.dice, 8..=20);
    let page_size = pressure.page_size();
    let host = 64;
    let config = Config::builder()
        .page_size(page_size)
        .device_pages(200)
        .host_pages(host)
        .batch(BatchConfig {
            running_max: 4,
            step_tokens_max: 16 * page_size,
            ..BatchConfig::default()
        })
        .l3(L3Config { backup_pages_max: held, ..L3Config::default() });
    let speeds = Speeds { backup: Link::that_hangs(), ..Speeds::default() };
    let mut bench = pressure.bench(config, speeds);
    bench.prepare(&[(0, held)])?;
    let others: Vec<(u32, u32)> = (1..=12).map(|text| (text, 8)).collect();
    bench.prepare(&others)?;
    let before = bench.written_pages();
    bench.prepare(&[(100, 62)])?;
    let written = bench.written_pages() - before;
    // The answer of the first prompt may have its own page.
    let possible = (host - held) as usize - 2;
    if written < possible.min(62) {
        return low_reuse(format!("{written} of {possible} pages copied to a full host"));
    }
    Ok(())
}

/// The weights are replaced while copies to host and prefetches are in flight.
fn replaced_weights(pressure: &mut Pressure<'_>) -> Result<(), Violation> {
    let stored = draw(&mut pressure.dice, 8..=30);
    let written = draw(&mut pressure.dice, 8..=30);
    let page_size = pressure.page_size();
    let config = Config::builder()
        .page_size(page_size)
        .device_pages(100)
        .host_pages(100)
        .batch(BatchConfig {
            running_max: 4,
            step_tokens_max: 8 * page_size,
            ..BatchConfig::default()
        })
        .l3(L3Config {
            prefetch: PrefetchPolicy::Wait { max_ms: 60_000 },
            prefetch_threshold_pages: 2,
            ..L3Config::default()
        })
        .rates(RateConfig { prefill_ns_per_token: 1_000_000, ..RateConfig::default() });
    let mut bench = pressure.bench(config, Speeds::default());
    bench.prepare(&[(0, stored)])?;
    bench.perform(&Action::Clear)?;
    (bench.speeds.prefetch, bench.speeds.write_back) = (Link::new(100_000), Link::new(100_000));
    bench.submit(0, stored, 1)?;
    bench.submit(1, written, 1)?;
    let is_fetching = |bench: &Bench<'_>| {
        bench.has_in_flight(|transfer| matches!(transfer, Transfer::Prefetch(..)))
    };
    let is_writing = |bench: &Bench<'_>| {
        bench.has_in_flight(|transfer| matches!(transfer, Transfer::WriteBack(..)))
    };
    bench.run_until(|bench| {
        !bench.stage.world.in_step() && is_fetching(bench) && is_writing(bench)
    })?;
    let before = bench.stored_pages();
    bench.perform(&Action::ReplaceWeights(1))?;
    while !bench.stage.live.is_empty() {
        bench.perform(&Action::Abort(0))?;
        bench.plan()?;
    }
    bench.run_until_quiet()?;
    let stored = bench.stored_pages() - before;
    let usage = bench.stage.world.scheduler.stats().cache;
    for tier in [usage.device, usage.host] {
        if tier.free_pages != tier.total_pages {
            return Err(Violation::NotReturned(format!("pages of replaced weights: {tier:?}")));
        }
    }
    if stored > 0 {
        return low_reuse(format!("{stored} pages of replaced weights stored in L3"));
    }
    Ok(())
}

/// An urgent request waits for copies that free memory. A running request grows meanwhile, so the
/// freed memory is insufficient.
fn late_room(pressure: &mut Pressure<'_>) -> Result<(), Violation> {
    let page_size = pressure.page_size();
    let copy_us = draw(&mut pressure.dice, 1_000..=20_000);
    let config = Config::builder()
        .page_size(page_size)
        .device_pages(64)
        .host_pages(200)
        .write_policy(WritePolicy::WriteBack)
        .batch(BatchConfig {
            running_max: 4,
            step_tokens_max: 16 * page_size,
            ..BatchConfig::default()
        })
        .queue(QueueConfig {
            order: AdmissionOrder::Priority,
            preempts: true,
            ..QueueConfig::default()
        });
    let speeds = Speeds { write_back: Link::new(copy_us.into()), ..Speeds::default() };
    let mut bench = pressure.bench(config, speeds);
    bench.prepare(&[(0, 30)])?;
    let grows = bench.submit_with(1, 20, 40 * page_size, 0, Reach::L3)?;
    bench.run_until(|bench| bench.has_token(grows))?;
    let urgent = bench.submit_with(2, 32, 1, 5, Reach::L3)?;
    bench.run_until(|bench| bench.has_token(urgent) || !bench.is_live(grows))?;
    if !bench.has_token(urgent) {
        return low_reuse("a running request ended before a more urgent one had room".to_owned());
    }
    bench.run_until_quiet()
}

/// More requests than a plan examines wait for a prefix that another one loads, and a short request
/// follows them.
fn many_deferred(pressure: &mut Pressure<'_>) -> Result<(), Violation> {
    let prefix = draw(&mut pressure.dice, 50..=70);
    let deferred = draw(&mut pressure.dice, 8..=12);
    let shortest_first_percent = pressure.dice.pick(&[0, 75]);
    let page_size = pressure.page_size();
    let config = Config::builder()
        .page_size(page_size)
        .device_pages(160)
        .host_pages(100)
        .batch(BatchConfig {
            running_max: 8,
            step_tokens_max: 8 * page_size,
            shortest_first_percent,
            ..BatchConfig::default()
        })
        .queue(QueueConfig { window: 4, ..QueueConfig::default() });
    let mut bench = pressure.bench(config, Speeds::default());
    bench.prepare(&[(0, prefix)])?;
    bench.flush_device(FLUSH_TEXT)?;
    bench.speeds.load_back = Link::new(5_000);
    let first = bench.submit(0, prefix, 1)?;
    for _ in 0..deferred {
        bench.submit(0, prefix, 1)?;
    }
    let behind = bench.submit(1, 0, 1)?;
    bench.run_until(|bench| [first, behind].iter().any(|&id| bench.has_token(id)))?;
    if !bench.has_token(behind) {
        return low_reuse(format!("a request waited behind {deferred} deferred ones"));
    }
    bench.run_until_quiet()
}

/// Many equal load-backs start together and queue, and more of them follow.
fn queued_load_backs(pressure: &mut Pressure<'_>) -> Result<(), Violation> {
    let page_size = pressure.page_size();
    let pages = draw(&mut pressure.dice, 4..=7);
    let overlaps = pressure.dice.one_in(2);
    // Computing a page takes as long as loading three.
    let (load_us, token_us) = (1_000, 3_000 / u64::from(page_size));
    let config = Config::builder()
        .page_size(page_size)
        .device_pages(160)
        .host_pages(400)
        .batch(BatchConfig {
            running_max: 32,
            step_tokens_max: 32 * page_size,
            ..BatchConfig::default()
        })
        .copies(CopyConfig { load_back_overlaps: overlaps, ..CopyConfig::default() })
        .rates(RateConfig {
            prefill_ns_per_token: token_us * 1_000,
            load_back_ns_per_page: load_us * 1_000,
            ..RateConfig::default()
        });
    let speeds = Speeds { token_us, load_back: Link::new(load_us), ..Speeds::default() };
    let mut bench = pressure.bench(config, speeds);
    let prompts: Vec<(u32, u32)> = (0..32).map(|text| (text, pages)).collect();
    bench.prepare(&prompts)?;
    let mut requests = Vec::new();
    for together in prompts.chunks(16) {
        bench.flush_device(FLUSH_TEXT + together[0].0)?;
        for &(text, pages) in together {
            requests.push((bench.submit(text, pages, 2)?, pages));
        }
        bench.run_until_quiet()?;
    }
    check_hits(&bench, &requests, 95, "with load-backs that queue")
}

/// Requests wait for a shared load-back that takes longer than the limit for waits without
/// progress.
fn slow_shared_load_back(pressure: &mut Pressure<'_>) -> Result<(), Violation> {
    let page_size = pressure.page_size();
    let pages = draw(&mut pressure.dice, 20..=30);
    let others = draw(&mut pressure.dice, 2..=4);
    let config = Config::builder()
        .page_size(page_size)
        .device_pages(160)
        .host_pages(100)
        .batch(BatchConfig {
            running_max: 8,
            step_tokens_max: 32 * page_size,
            ..BatchConfig::default()
        })
        .rates(RateConfig { prefill_ns_per_token: 100_000_000, ..RateConfig::default() });
    let speeds = Speeds { token_us: 100_000, ..Speeds::default() };
    let mut bench = pressure.bench(config, speeds);
    bench.prepare(&[(0, pages)])?;
    bench.flush_device(FLUSH_TEXT)?;
    bench.speeds.load_back = Link::new(100_000);
    let mut requests = Vec::new();
    for _ in 0..=others {
        requests.push((bench.submit(0, pages, 1)?, pages));
    }
    bench.run_until_quiet()?;
    check_hits(&bench, &requests, 100, "with a shared load-back that is slow")
}

/// L3 was slow for a while, and is fast again.
fn recovered_store(pressure: &mut Pressure<'_>) -> Result<(), Violation> {
    let page_size = pressure.page_size();
    let pages = draw(&mut pressure.dice, 6..=10);
    let page_us = 1_000 * u64::from(page_size);
    let config = Config::builder()
        .page_size(page_size)
        .device_pages(60)
        .host_pages(100)
        .batch(BatchConfig {
            running_max: 4,
            step_tokens_max: 16 * page_size,
            ..BatchConfig::default()
        })
        .l3(L3Config {
            prefetch: PrefetchPolicy::Wait { max_ms: 60_000 },
            prefetch_threshold_pages: 2,
            ..L3Config::default()
        })
        .rates(RateConfig { prefill_ns_per_token: 1_000_000, ..RateConfig::default() });
    let mut bench = pressure.bench(config, Speeds::default());
    bench.prepare(&[(0, pages)])?;
    let fetch = |bench: &mut Bench<'_>| {
        bench.perform(&Action::Clear)?;
        let id = bench.submit(0, pages, 1)?;
        bench.run_until_quiet()?;
        Ok::<_, Violation>((id, pages))
    };
    // Fetching a page takes longer than computing it, until L3 is fast again.
    bench.speeds.prefetch = Link::new(6 * page_us);
    (0..8).try_for_each(|_| fetch(&mut bench).map(drop))?;
    bench.speeds.prefetch = Speeds::default().prefetch;
    let requests = (0..24).map(|_| fetch(&mut bench)).collect::<Result<Vec<_>, _>>()?;
    check_hits(&bench, &requests[16..], 95, "from an L3 that is fast again")
}
