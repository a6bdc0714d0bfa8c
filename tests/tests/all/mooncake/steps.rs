//! What the steps of an engine feel of a cluster in trouble: nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrace_engine::{CpuDevice, Engine, Forward, Generate, Threaded, Update};
use terrace_l3::{GuardConfig, Guarded, Store};
use terrace_l3_mooncake::MooncakeConfig;
use terrace_scheduler::{Config, RateConfig, Token};
use terrace_tests::engine::{PAGE_SIZE, ToyModel};
use terrace_tests::mooncake::{Cluster, Options};

use super::{config, open};

/// Tokens of the one long answer whose pace is measured.
const TOKENS: u32 = 1_500;

/// Ninety-nine of a hundred times between two tokens of a long answer are shorter, in microseconds.
/// Meanwhile others ask for prompts that nobody has, each of which L3 is asked for and then given.
async fn pace_us(engine: &Engine, seed: u32) -> (f64, f64) {
    let others = async {
        for number in 0u32.. {
            let prompt = (0..64).map(|place| (place * 7 + number * 31 + seed * 17) % 97).collect();
            let mut generation = engine.submit(Generate::new(prompt, 2)).await.unwrap();
            while !matches!(generation.next().await, None | Some(Update::Ended(_))) {}
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let measured = async {
        let prompt: Vec<Token> = vec![seed % 97; 3];
        let mut generation = engine.submit(Generate::new(prompt, TOKENS)).await.unwrap();
        let mut times = Vec::with_capacity(TOKENS as usize);
        let mut last = Instant::now();
        while let Some(update) = generation.next().await {
            if matches!(update, Update::Ended(_)) {
                break;
            }
            let now = Instant::now();
            times.push((now - last).as_secs_f64() * 1e6);
            last = now;
        }
        times.sort_by(f64::total_cmp);
        (times[times.len() * 99 / 100], times[times.len() - 1])
    };
    tokio::select! {
        () = others => unreachable!("they go on for ever"),
        times = measured => times,
    }
}

/// An engine with a cluster of its own.
struct Side {
    cluster: Cluster,
    store: Arc<dyn Store>,
    engine: Engine,
}

impl Side {
    fn start() -> Self {
        let cluster = Cluster::start(Options::default());
        let layout = ToyModel::default().kv_layout().pages(PAGE_SIZE).unwrap();
        let page_bytes = layout.bytes();
        let mooncake = MooncakeConfig {
            capacity_bytes: 64 << 20,
            object_bytes_max: page_bytes,
            ..config(&cluster)
        };
        // As a server has it.
        let guard = GuardConfig { pause_max_ms: 5_000, ..GuardConfig::default() };
        let store: Arc<dyn Store> = Arc::new(Guarded::new(Arc::new(open(mooncake)), guard));
        let rates = RateConfig { prefill_ns_per_token: 10_000_000, ..RateConfig::default() };
        let scheduler = Config::builder().page_size(PAGE_SIZE).rates(rates).build().unwrap();
        let device = Arc::new(CpuDevice::new(2_048, 4_096, layout).unwrap());
        let engine = Engine::start(
            scheduler,
            Threaded::new(ToyModel::default()),
            device,
            Some(store.clone()),
        )
        .unwrap();
        Self { cluster, store, engine }
    }
}

/// What two sides feel that are measured in turns, so that whatever else the machine does troubles both
/// alike.
struct Comparison {
    /// The best p99 of each: in microseconds.
    p99_us: [f64; 2],
    /// The second's p99 by the first's, the median over the rounds.
    ratio: f64,
    /// The second's longest step in its best round.
    longest_us: f64,
}

async fn compare(first: &Side, second: &Side, seed: u32) -> Comparison {
    const ROUNDS: u32 = 5;
    let (mut best, mut longest_us, mut ratios) = ([f64::MAX; 2], f64::MAX, Vec::new());
    for round in 0..ROUNDS {
        let mut p99 = [0.0; 2];
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for place in order {
            let side = [first, second][place];
            let (p99_us, longest) = pace_us(&side.engine, seed + round).await;
            p99[place] = p99_us;
            best[place] = best[place].min(p99_us);
            if place == 1 {
                longest_us = longest_us.min(longest);
            }
        }
        ratios.push(p99[1] / p99[0]);
    }
    ratios.sort_by(f64::total_cmp);
    Comparison { p99_us: best, ratio: ratios[ratios.len() / 2], longest_us }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
async fn steps_do_not_feel_a_dead_master() {
    let (well, mut dying) = (Side::start(), Side::start());
    let alike = compare(&well, &dying, 1).await;
    for side in [&well, &dying] {
        let puts = side.store.stats().remote.unwrap().puts;
        assert!(puts > 100, "the cluster was given {puts} pages");
    }
    dying.cluster.kill_master();
    let dead = compare(&well, &dying, 100).await;
    let stats = dying.store.stats();
    let is_gone = |(of, count): &(_, u64)| *of == "master-gone" && *count > 0;
    let gone = stats.figures.iter().any(|figure| figure.values.iter().any(is_gone));
    assert!(gone || stats.guard.unwrap().timed_out > 0, "nobody noticed the master's death");
    let [alive_us, dead_us] = dead.p99_us;
    println!(
        "p99 of a step: {alive_us:.0} us with a master, {dead_us:.0} us with a dead one, {:+.1} % \
         (medians of neighbours: {:+.1} %; two that have masters: {:+.1} %); the longest with a dead \
         one: {:.0} us",
        100.0 * (dead_us / alive_us - 1.0),
        100.0 * (dead.ratio - 1.0),
        100.0 * (alike.ratio - 1.0),
        dead.longest_us
    );
    // A call to a dead master takes seconds. A busy machine makes steps longer, but not by as much.
    assert!(dead_us < 2.0 * alive_us + 100_000.0, "{alive_us:.0} us became {dead_us:.0} us");
    assert!(dead.longest_us < 2e6, "a step took {:.0} us", dead.longest_us);
}
