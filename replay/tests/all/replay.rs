//! Properties of whole replays that hold for every trace and configuration.

use proptest::prelude::*;
use terrace_replay::trace::{Synthetic, TraceBuilder, Turn};
use terrace_replay::{
    Arrival, Config, Distribution, Gpu, LinkName, ModelSpec, Outage, Phase, ReplayError, Report,
    Routing, Sessions, Trace, WarmUp, WorkerGroup, WorkerUse, replay,
};
use terrace_scheduler::{EvictionKind, WritePolicy};

const BLOCK_TOKENS: u32 = 64;

/// Creates conversations that grow turn by turn behind a few common prefixes.
fn conversations(seed: u64, requests: u64, gap_us: u64) -> Trace {
    let mut state = seed;
    let mut draw = |bound: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % bound
    };
    let mut builder = TraceBuilder::new(BLOCK_TOKENS).expect("a block size that is allowed");
    let mut talks: Vec<Vec<u64>> = Vec::new();
    let mut next_block = 1000;
    for number in 0..requests {
        if talks.len() < 3 || draw(4) == 0 {
            let opening = draw(3) * 10;
            talks.push(vec![opening, opening + 1]);
        }
        let place = draw(talks.len() as u64) as usize;
        for _ in 0..1 + draw(5) {
            talks[place].push(next_block);
            next_block += 1;
        }
        let blocks = &talks[place];
        let unused = draw(u64::from(BLOCK_TOKENS)) as u32;
        let input = blocks.len() as u32 * BLOCK_TOKENS - unused;
        builder.push(number * gap_us, input, 1 + draw(60) as u32, blocks).expect("a good request");
    }
    builder.finish()
}

/// Returns a configuration in which steps take little time beside transfers, and all requests are
/// measured.
fn fast_machine() -> Config {
    let machine = Config::for_machine(&ModelSpec::LLAMA_3_1_8B, &Gpu::H200, 4);
    Config { warm_up: WarmUp::Share(0.0), ..machine }
}

fn small(device_pages: u32, host_pages: u32) -> Config {
    let mut config = fast_machine();
    config.scheduler.cache.device_pages = device_pages;
    config.scheduler.cache.host_pages = host_pages;
    config.scheduler.batch.running_max = 16;
    config.scheduler.batch.step_tokens_max = 512;
    if host_pages == 0 {
        config.scheduler.l3 = None;
    }
    config
}

fn run(trace: &Trace, config: &Config) -> Report {
    let report = replay(trace, config).expect("a replay that ends");
    assert_eq!(report.finished + report.failed + report.refused, report.requests);
    assert_eq!(report.ttft_ms.count, report.finished);
    assert!(report.reuse_tokens.total <= report.reuse_tokens.ceiling);
    assert!(report.reuse.total <= report.reuse.ceiling);
    // The latency of a request is its time to the first token plus its gaps, retracted or not.
    let whole = |of: &Distribution| of.mean * of.count as f64;
    let parts = whole(&report.ttft_ms) + whole(&report.itl_ms);
    assert!((whole(&report.e2e_ms) - parts).abs() < 1e-6 * parts, "{} {parts}", report.e2e_ms.mean);
    report
}

fn json(report: &Report) -> String {
    serde_json::to_string(report).expect("a report is plain data")
}

#[test]
fn replay_is_deterministic_on_any_thread() {
    let trace = conversations(1, 300, 20_000);
    let mut config = small(600, 1500);
    config.workers = 2;
    config.router.routing = Routing::PrefixAware { load_weight: 0.5 };
    config.store.pages_max = Some(3000);
    config.store.read_failure_rate = 0.1;
    config.store.short_read_rate = 0.1;
    let first = json(&run(&trace, &config));
    let others: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| json(&run(&trace, &config)))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(others.iter().all(|other| *other == first));
    config.seed = 1;
    let mut other = run(&trace, &config);
    other.config.seed = 0;
    assert_ne!(json(&other), first, "the seed decides who fails");
}

#[test]
fn unlimited_store_reaches_the_ceiling() {
    // Far apart, so that no request overlaps another's writes; computing is so slow that even a
    // single page is worth a read.
    let trace = conversations(2, 400, 4_000_000);
    let mut config = small(400, 400);
    config.cost.prefill_token_ns = 1e6;
    let report = run(&trace, &config);
    assert!(report.workers[0].scheduler.cache.host.evicted_pages > 0, "the host is too small");
    assert!(report.reuse.l3 > 0.1, "{:?}", report.reuse);
    assert_eq!(report.reuse_tokens.total, report.reuse_tokens.ceiling, "{:?}", report.reuse);
}

#[test]
fn every_tier_adds_reuse_and_reduces_latency() {
    let trace = conversations(3, 400, 60_000);
    let device = run(&trace, &small(300, 0));
    let mut with_host = small(300, 900);
    with_host.scheduler.l3 = None;
    let host = run(&trace, &with_host);
    let all = run(&trace, &small(300, 900));
    assert_eq!((device.reuse.host, device.reuse.l3, host.reuse.l3), (0.0, 0.0, 0.0));
    assert!(device.reuse.total < host.reuse.total && host.reuse.total < all.reuse.total);
    assert!(device.computed_tokens > host.computed_tokens);
    assert!(host.computed_tokens > all.computed_tokens);
    assert!(all.store.is_some() && host.store.is_none());
}

#[test]
fn failing_store_blocks_no_request() {
    let trace = conversations(4, 200, 5_000);
    for rates in
        [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.3; 4], [1.0; 4]]
    {
        let mut config = small(300, 600);
        let [probe, read, short, write] = rates;
        config.store.probe_failure_rate = probe;
        config.store.read_failure_rate = read;
        config.store.short_read_rate = short;
        config.store.write_failure_rate = write;
        let report = run(&trace, &config);
        assert_eq!(report.finished, 200, "{rates:?}");
        assert!(report.store.is_some_and(|store| store.failures > 0), "{rates:?}");
    }
}

#[test]
fn slow_store_blocks_no_request() {
    let trace = conversations(5, 60, 5_000);
    let mut config = small(300, 600);
    config.store.read.latency_us = 600_000_000;
    config.store.probe_latency_us = 90_000_000;
    assert_eq!(run(&trace, &config).finished, 60);
}

#[test]
fn closed_loop_keeps_its_concurrency() {
    let trace = conversations(6, 300, 0);
    for concurrency in [1, 7] {
        let mut config = small(2000, 4000);
        config.arrival = Arrival::ClosedLoop { concurrency };
        let report = run(&trace, &config);
        assert_eq!(report.finished, 300);
        let series = &report.series;
        let alive = |place: usize| {
            series.waiting[place] + series.prefilling[place] + series.decoding[place]
        };
        let most = (0..series.waiting.len()).map(alive).fold(0.0, f64::max);
        assert!(most <= f64::from(concurrency) + 1e-9, "{most}");
        let usual: f64 = (0..series.waiting.len()).map(alive).sum::<f64>();
        let mean = usual / series.waiting.len() as f64;
        assert!(mean > f64::from(concurrency) * 0.8, "{mean}");
    }
}

#[test]
fn double_speed_ends_sooner() {
    let trace = conversations(7, 200, 100_000);
    let mut config = small(2000, 4000);
    let plain = run(&trace, &config).virtual_s;
    config.arrival = Arrival::Trace { speed_up: 2.0 };
    let fast = run(&trace, &config).virtual_s;
    assert!(fast < plain * 0.6, "{fast} against {plain}");
}

#[test]
fn workers_share_the_store() {
    let trace = conversations(8, 300, 100_000);
    let mut config = small(300, 600);
    config.workers = 3;
    let report = run(&trace, &config);
    let requests: Vec<u64> = report.workers.iter().map(|worker| worker.requests).collect();
    assert_eq!(requests, [100, 100, 100]);
    assert!(report.reuse.l3 > 0.1, "what one stored another reads: {:?}", report.reuse);
    assert_eq!(report.links.len(), 3 * 4 + 2);
    let bytes = |name| {
        let links = report.links.iter().filter(|link| link.link == name);
        links.map(|link| link.bytes).sum::<u64>()
    };
    assert_eq!(bytes(LinkName::StoreRead), bytes(LinkName::L3ToHost));
    assert_eq!(bytes(LinkName::StoreWrite), bytes(LinkName::HostToL3));
}

#[test]
fn prefix_routing_has_more_device_hits_than_round_robin() {
    let trace = conversations(9, 400, 2_000);
    let mut config = small(600, 600);
    config.workers = 4;
    config.scheduler.l3 = None;
    let round = run(&trace, &config);
    config.router.routing = Routing::PrefixAware { load_weight: 0.2 };
    let aware = run(&trace, &config);
    assert!(aware.reuse.total > round.reuse.total * 1.2, "{:?} {:?}", aware.reuse, round.reuse);
    assert!(aware.workers.iter().all(|worker| worker.requests > 0));
}

#[test]
fn figures_agree_with_each_other() {
    let trace = conversations(10, 300, 10_000);
    let report = run(&trace, &small(400, 800));
    let series = &report.series;
    let sum = |column: &[u64]| column.iter().sum::<u64>();
    assert_eq!(sum(&series.arrivals), 300);
    assert_eq!(sum(&series.first_tokens), report.finished);
    assert_eq!(sum(&series.output_tokens), report.output_tokens);
    assert_eq!(sum(&series.prompt_tokens), report.prompt_tokens);
    assert_eq!(sum(&series.device_hit_tokens), report.reuse_tokens.device);
    assert_eq!(sum(&series.l3_to_host_bytes), report.bytes_moved.l3_to_host);
    assert_eq!(report.itl_ms.count + report.ttft_ms.count, report.output_tokens);
    let wanted: u64 = trace.requests().iter().map(|r| u64::from(r.output_tokens)).sum();
    assert_eq!(report.output_tokens, wanted);
    assert_eq!(report.workers[0].scheduler.generated_tokens, wanted);
    assert!(series.busy.iter().chain(&series.device_used).all(|share| (0.0..=1.0).contains(share)));
    assert_eq!(report.slowest.len(), 10);
    assert!(report.slowest.is_sorted_by(|a, b| a.ttft_ms >= b.ttft_ms));
    assert_eq!(report.slowest[0].ttft_ms, report.ttft_ms.max);
    for slow in &report.slowest {
        let spans = &slow.spans;
        assert!(spans.windows(2).all(|pair| pair[0].to_ms == pair[1].from_ms), "{spans:?}");
        assert_eq!((spans[0].from_ms, spans[spans.len() - 1].to_ms), (0.0, slow.e2e_ms));
        let decodes = spans.iter().find(|span| span.phase == Phase::Decoding);
        assert!(decodes.is_none_or(|span| span.from_ms == slow.ttft_ms), "{slow:?}");
    }
}

#[test]
fn peaks_include_all_waiting_requests() {
    // All arrive at once, and a scheduler gets eight of them.
    let report = run(&conversations(13, 120, 0), &small(2000, 4000));
    let worker = &report.workers[0];
    assert!((104..=120).contains(&worker.waiting_peak), "{}", worker.waiting_peak);
    assert_eq!(worker.running_peak, 16);
    assert!(worker.device_pages_peak <= 2000 && worker.device_pages_peak > 500);
}

#[test]
fn warm_up_is_not_measured() {
    let trace = conversations(15, 200, 200_000);
    let mut config = small(2000, 4000);
    let whole = run(&trace, &config);
    config.warm_up = WarmUp::Share(0.25);
    let warm = replay(&trace, &config).expect("a replay that ends");
    assert_eq!((warm.ttft_ms.count, warm.e2e_ms.count, warm.finished), (150, 150, 200));
    assert!(warm.itl_ms.count < whole.itl_ms.count && warm.itl_ms.count > whole.itl_ms.count / 2);
    assert!((warm.virtual_s - warm.measured_s - 50.0 * 0.2).abs() < 0.001, "{}", warm.measured_s);
    config.warm_up = WarmUp::Until { time_us: 50 * 200_000 };
    let until = replay(&trace, &config).expect("a replay that ends");
    assert_eq!(until.ttft_ms, warm.ttft_ms);
    assert_eq!(until.reuse, whole.reuse, "reuse covers all requests");
}

#[test]
fn reports_slo_and_prices() {
    let trace = conversations(16, 200, 20_000);
    let mut config = small(2000, 4000);
    assert_eq!(run(&trace, &config).goodput, None);
    config.slo.ttft_ms = Some(1e6);
    config.slo.tpot_ms = Some(1e6);
    let all = run(&trace, &config);
    let goods = all.goodput.expect("something is promised");
    assert_eq!((goods.requests, goods.good, goods.is_kept), (200, 200, true));
    config.slo.ttft_ms = Some(all.ttft_ms.p50);
    config.slo.tpot_ms = Some(all.tpot_ms.p50);
    let goods = run(&trace, &config).goodput.expect("something is promised");
    assert!((0.48..0.53).contains(&goods.ttft_share), "{goods:?}");
    assert!((0.48..0.60).contains(&goods.tpot_share), "{goods:?}");
    assert!(goods.share <= goods.ttft_share.min(goods.tpot_share) && !goods.is_kept, "{goods:?}");
    // The time per token is the mean gap, weighted by answers instead of tokens.
    assert!(all.tpot_ms.mean > all.itl_ms.p50 / 2.0 && all.tpot_ms.mean < all.itl_ms.max);
    let gpus = f64::from(config.gpus * config.workers);
    assert!((all.spend.gpu_per_hour - gpus * config.prices.gpu_hour).abs() < 1e-9);
    assert!(all.spend.host_per_hour > 0.0 && all.spend.l3_per_hour > 0.0);
}

/// Creates sessions of `turns` turns each that start in sequence.
fn sessions(count: u64, turns: u64, gap_us: u64, think_us: Option<u64>) -> Trace {
    let mut builder = TraceBuilder::new(16).expect("a block size that is allowed");
    for session in 0..count {
        let mut length = 100;
        for turn in 0..turns {
            let blocks: Vec<u64> = (0..u64::from(u32::div_ceil(length, 16)))
                .map(|block| session << 32 | block)
                .collect();
            let at_us = session * gap_us + turn;
            let of = Turn { session, think_us };
            builder.push_turn(at_us, length, 70, &blocks, of).expect("a good request");
            length += 70 + 30;
        }
    }
    builder.finish()
}

#[test]
fn turns_wait_for_answers_and_reuse_them() {
    let trace = sessions(6, 4, 100_000, Some(2_000_000));
    let mut config = small(2000, 4000);
    config.cost.prefill_token_ns = 1e6;
    let waiting = run(&trace, &config);
    // Three times two seconds of thinking, and the answers.
    assert!(waiting.virtual_s > 6.5, "{}", waiting.virtual_s);
    // The whole prompt before the latest message is reusable, except for a partial page and the one
    // answer token that was never computed.
    let turn = |place: u32| (100 + 100 * (place - 1) + 69) / 16 * 16;
    let reusable = u64::from(turn(1) + turn(2) + turn(3)) * 6;
    assert_eq!(waiting.reuse_tokens.ceiling, reusable);
    assert_eq!(waiting.reuse_tokens.total, reusable);
    // By the clock all turns arrive at once: only prompts can be reused.
    config.sessions = Sessions::ByTheClock;
    let rushing = run(&trace, &config);
    assert!(rushing.virtual_s < waiting.virtual_s / 2.0, "{}", rushing.virtual_s);
    assert!(rushing.reuse_tokens.total < reusable);
}

#[test]
fn sessions_on_little_memory_and_many_workers_stay_below_the_ceiling() {
    let trace = sessions(20, 6, 10_000, Some(50_000));
    for (device, host, workers) in [(300, 0, 1), (100, 200, 2), (80, 100, 3)] {
        let mut config = small(device, host);
        config.workers = workers;
        config.router.routing = Routing::SessionAffine;
        let report = run(&trace, &config);
        assert_eq!(report.finished, 120);
        assert!(report.reuse_tokens.total > 0);
    }
}

#[test]
fn prefill_and_decode_workers_are_separate() {
    let trace = conversations(17, 150, 50_000);
    let mut config = small(1500, 3000);
    config.workers = 3;
    let together = run(&trace, &config);
    config.prefill_workers = 2;
    let apart = run(&trace, &config);
    assert_eq!(apart.finished, 150);
    let requests: Vec<u64> = apart.workers.iter().map(|worker| worker.requests).collect();
    let decoded = trace.requests().iter().filter(|request| request.output_tokens > 1).count();
    assert_eq!((requests[0] + requests[1], requests[2]), (150, decoded as u64));
    let wanted: u64 = trace.requests().iter().map(|r| u64::from(r.output_tokens)).sum();
    assert_eq!(apart.output_tokens, wanted);
    assert_eq!(apart.prompt_tokens, together.prompt_tokens);
    // The KV that the third worker decodes with arrived over the links of both and through the
    // store.
    let third = &apart.workers[2].scheduler;
    assert!(third.prefilled_tokens < third.prompt_tokens / 50, "{third:?}");
    assert!(third.l3_hit_tokens > 10_000, "{third:?}");
    assert!(apart.bytes_moved.l3_to_host > together.bytes_moved.l3_to_host);
    assert!(apart.workers[0].scheduler.generated_tokens < 150);
    let moving = apart.slowest.iter().flat_map(|slow| &slow.spans);
    assert!(moving.clone().any(|span| span.phase == Phase::Moving), "some request is transferred");
}

#[test]
fn load_follows_worker_speed() {
    let trace = conversations(18, 400, 20_000);
    let mut config = small(600, 1200);
    config.router.routing = Routing::LeastLoaded;
    let mut slow = config.cost;
    slow.prefill_token_ns *= 4.0;
    let group = WorkerGroup {
        workers: 1,
        gpus: 2,
        gpu_hour: 1.5,
        device_pages: 300,
        host_pages: 600,
        cost: slow,
        links: config.links,
    };
    config.also = vec![group];
    let report = run(&trace, &config);
    assert_eq!(report.workers.len(), 2);
    let [fast, slow] = [0, 1].map(|worker| report.workers[worker].requests);
    assert!(fast > slow * 3 / 2 && slow > 20, "{fast} {slow}");
    assert!(report.workers[1].device_pages_peak <= 300);
    let gpus = f64::from(config.gpus) * config.prices.gpu_hour + 2.0 * 1.5;
    assert!((report.spend.gpu_per_hour - gpus).abs() < 1e-9);
}

#[test]
fn worker_failure_loses_no_request() {
    let trace = conversations(19, 300, 20_000);
    let outage = |worker, from_us, to_us| Outage { worker, from_us, to_us };
    for (prefill_workers, outages) in [
        (0, vec![outage(1, 2_000_000, 4_000_000)]),
        (0, vec![outage(0, 1_000_000, 3_000_000), outage(1, 1_500_000, 2_500_000)]),
        (1, vec![outage(0, 1_000_000, 1_800_000)]),
        (1, vec![outage(1, 1_000_000, 1_800_000), outage(0, 9_000_000_000, 9_900_000_000)]),
    ] {
        let mut config = small(600, 1200);
        config.workers = 2;
        config.prefill_workers = prefill_workers;
        let healthy = run(&trace, &config);
        config.outages = outages.clone();
        let report = replay(&trace, &config).expect("a replay that ends");
        assert_eq!((report.finished, report.failed, report.refused), (300, 0, 0), "{outages:?}");
        assert!(report.e2e_ms.max > healthy.e2e_ms.max, "{outages:?}");
        assert!(report.reuse_tokens.total <= report.reuse_tokens.ceiling);
        let series_s = report.series.interval_s * report.series.arrivals.len() as f64;
        assert!(series_s < report.virtual_s * 2.0 + 1.0, "later outages do not extend the replay");
        assert_eq!(json(&report), json(&replay(&trace, &config).expect("the same again")));
    }
}

#[test]
fn transferred_requests_survive_a_failure_of_their_first_worker() {
    let trace = conversations(20, 120, 10_000);
    let mut config = small(1500, 3000);
    config.workers = 2;
    config.prefill_workers = 1;
    // So slow that many pages are in flight when it fails.
    config.links.host_to_l3.bytes_per_second = 200_000_000;
    let healthy = run(&trace, &config);
    let moving = healthy.slowest.iter().flat_map(|slow| &slow.spans);
    let longest =
        moving.filter(|span| span.phase == Phase::Moving).map(|span| span.to_ms - span.from_ms);
    assert!(longest.fold(0.0, f64::max) > 1000.0, "some transfer is slow");
    config.outages = vec![Outage { worker: 0, from_us: 1_000_000, to_us: 1_500_000 }];
    let report = replay(&trace, &config).expect("a replay that ends");
    assert_eq!((report.finished, report.failed), (120, 0));
}

#[test]
fn no_interval_exceeds_the_bandwidth() {
    let trace = conversations(14, 300, 3_000);
    // Computing is so slow that even these links are worth waiting for.
    let mut config = small(300, 600);
    config.cost.prefill_token_ns = 1e6;
    config.links.host_to_device.bytes_per_second = 3_000_000_000;
    config.links.l3_to_host.bytes_per_second = 2_000_000_000;
    config.links.host_to_l3.bytes_per_second = 1_000_000_000;
    config.store.read.bytes_per_second = 1_500_000_000;
    let report = run(&trace, &config);
    let series = &report.series;
    for (bytes, busy, link) in [
        (&series.host_to_device_bytes, &series.host_to_device_busy, &config.links.host_to_device),
        (&series.l3_to_host_bytes, &series.l3_to_host_busy, &config.links.l3_to_host),
        (&series.host_to_l3_bytes, &series.host_to_l3_busy, &config.links.host_to_l3),
    ] {
        let carries = link.bytes_per_second as f64 * series.interval_s;
        assert!(bytes.iter().any(|&bytes| bytes as f64 > carries / 20.0), "something moves");
        assert!(bytes.iter().all(|&bytes| bytes as f64 <= carries + 1.0), "{bytes:?}");
        assert!(busy.iter().all(|&busy| busy <= 1.0 + 1e-9), "{busy:?}");
    }
    let busy = |name| report.links.iter().find(|link| link.link == name).expect("a link").busy;
    assert!(busy(LinkName::L3ToHost) < 0.76 * busy(LinkName::StoreRead), "the store is slower");
}

#[test]
fn oversized_requests_are_refused_and_counted() {
    let trace = conversations(11, 100, 10_000);
    let longest = trace.requests().iter().map(|r| r.input_tokens).max().expect("requests");
    let report = run(&trace, &small(longest / 16 / 2, 100));
    assert!(report.refused > 0 && report.finished > 0, "{} {}", report.refused, report.finished);
}

#[test]
fn rejects_invalid_settings_with_limits() {
    let trace = conversations(12, 2, 0);
    let refused = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        replay(&trace, &config).expect_err("refused").to_string()
    };
    for (message, part) in [
        (refused(|c| c.workers = 0), "workers = 0: use 1 to 1024"),
        (refused(|c| c.arrival = Arrival::Trace { speed_up: 0.0 }), "arrival.speed_up = 0"),
        (refused(|c| c.store.read_failure_rate = 1.5), "store.read_failure_rate = 1.5: use 0 to 1"),
        (refused(|c| c.cost.step_ns = f64::NAN), "cost.step_ns = NaN"),
        (refused(|c| c.links.l3_to_host.bytes_per_second = 0), "links.l3_to_host"),
        (refused(|c| c.scheduler.cache.page_size = 48), "scheduler.cache.page_size = 48"),
    ] {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
    let empty = TraceBuilder::new(16).expect("a block size").finish();
    assert_eq!(replay(&empty, &Config::default()), Err(ReplayError::EmptyTrace));
}

/// The default traffic on the default machine uses every tier.
#[test]
fn default_traffic_uses_every_tier_of_the_default_machine() {
    let trace = Synthetic::default().trace().expect("a trace");
    let report = replay(&trace, &Config::default()).expect("a replay that ends");
    let reuse = report.reuse;
    assert!(reuse.device > 0.5 && reuse.host > 0.05 && reuse.l3 > 0.02, "{reuse:?}");
    assert!(reuse.ceiling - reuse.total < 0.02, "{reuse:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_and_hits_stay_below_the_ceiling(
        seed in 0u64..1 << 40,
        gap_us in prop_oneof![Just(0u64), 1..200_000u64],
        device_pages in 100u32..800,
        host_pages in prop_oneof![Just(0u32), 50..2000u32],
        store_pages in prop_oneof![Just(None), (1..4000u64).prop_map(Some)],
        workers in 1u32..4,
        waiting_max in prop_oneof![Just(1u32), Just(8), Just(1000)],
        page_size in prop_oneof![Just(1u32), Just(16), Just(64)],
        eviction in prop_oneof![Just(EvictionKind::Lru), Just(EvictionKind::Slru), Just(EvictionKind::S3Fifo)],
        write_back in any::<bool>(),
        failure_rate in prop_oneof![Just(0.0), 0.0..0.5f64],
        concurrency in prop_oneof![Just(None), (1u32..20).prop_map(Some)],
    ) {
        let trace = conversations(seed, 60, gap_us);
        let mut config = small(device_pages * 16 / page_size, host_pages * 16 / page_size);
        config.scheduler.cache.page_size = page_size;
        config.scheduler.cache.eviction = eviction;
        if write_back {
            config.scheduler.cache.write_policy = WritePolicy::WriteBack;
        }
        config.workers = workers;
        config.waiting_max = waiting_max;
        config.store.pages_max = store_pages;
        config.store.read_failure_rate = failure_rate;
        config.store.write_failure_rate = failure_rate;
        config.seed = seed;
        if let Some(concurrency) = concurrency {
            config.arrival = Arrival::ClosedLoop { concurrency };
        }
        let report = run(&trace, &config);
        prop_assert_eq!(report.failed, 0);
        // Steps that are repeated without a plan equal those that would have been planned.
        config.scheduler.batch.repeats_max = 0;
        let one_by_one = run(&trace, &config);
        let decided = |workers: &[WorkerUse]| {
            let mut workers = workers.to_vec();
            // A plan may look for pages to copy ahead, and find none.
            workers.iter_mut().for_each(|worker| worker.scheduler.node_visits = 0);
            workers
        };
        let workers = decided(&report.workers);
        prop_assert_eq!(&decided(&one_by_one.workers), &workers);
        let config = report.config.clone();
        let same = json(&Report { config, workers: workers.clone(), ..one_by_one });
        prop_assert_eq!(same, json(&Report { workers, ..report }));
    }
}

#[test]
fn shares_count_refused_requests_on_both_sides() {
    let mut builder = TraceBuilder::new(BLOCK_TOKENS).unwrap();
    for number in 0..20 {
        builder.push(number * 1_000_000, BLOCK_TOKENS, 5, &[1]).unwrap();
    }
    for number in 0..20 {
        let blocks: Vec<u64> = (0..50).map(|block| 100 + number * 50 + block).collect();
        builder.push(30_000_000 + number, 50 * BLOCK_TOKENS, 5, &blocks).unwrap();
    }
    let report = run(&builder.finish(), &small(128, 0));
    assert_eq!((report.finished, report.refused), (20, 20));
    assert!(report.reuse_tokens.total > 0);
}

#[test]
fn rejects_a_trace_of_centuries() {
    let mut builder = TraceBuilder::new(BLOCK_TOKENS).unwrap();
    for day in [0, 20_000_000_000_000, 21_000_000_000_000] {
        builder.push(day, BLOCK_TOKENS, 3, &[7]).unwrap();
    }
    let mut config = small(128, 0);
    config.arrival = Arrival::Trace { speed_up: 0.001 };
    let refused = replay(&builder.finish(), &config).unwrap_err();
    assert!(
        matches!(refused, ReplayError::Setting { setting: "arrival.speed_up", .. }),
        "{refused}"
    );
}

#[test]
fn store_counts_a_page_once_despite_failed_writes() {
    for seed in 0..20 {
        let trace = conversations(seed, 60, 20_000);
        let mut config = small(400, 600);
        config.workers = 2;
        config.seed = seed;
        config.store.write_failure_rate = 0.3;
        config.store.read.latency_us = 10_000_000;
        config.store.write.latency_us = 10_000_000;
        let pages = |config: &Config| run(&trace, config).store.map(|store| store.pages_peak);
        let unlimited = pages(&config);
        config.store.pages_max = Some(u64::from(u32::MAX / 2));
        assert_eq!(unlimited, pages(&config), "seed {seed}");
    }
}

/// Creates 100 prompts of 200 tokens per second, with answers of 16, and optionally a prompt of
/// 262,144 that arrives after a second.
fn short_prompts(with_a_long_one: bool) -> Trace {
    let mut builder = TraceBuilder::new(BLOCK_TOKENS).expect("a good size of blocks");
    for number in 0..2500 {
        let arrival_us = number * 10_000;
        if with_a_long_one && number == 100 {
            let blocks: Vec<u64> =
                (0..262_144 / u64::from(BLOCK_TOKENS)).map(|b| 1 << 32 | b).collect();
            builder.push(arrival_us, 262_144, 16, &blocks).expect("a good request");
        }
        let blocks: Vec<u64> =
            (0..200 / u64::from(BLOCK_TOKENS) + 1).map(|b| number << 8 | b).collect();
        builder.push(arrival_us, 200, 16, &blocks).expect("a good request");
    }
    builder.finish()
}

#[test]
fn long_prompt_at_most_triples_the_wait_of_short_ones() {
    for step_tokens_max in [512, 8192] {
        let mut config = fast_machine();
        config.scheduler.batch.step_tokens_max = step_tokens_max;
        let alone = run(&short_prompts(false), &config).ttft_ms.p99;
        let beside = run(&short_prompts(true), &config).ttft_ms.p99;
        assert!(beside < 3.0 * alone, "{step_tokens_max} tokens a step: {beside} ms, {alone} ms");
    }
}
