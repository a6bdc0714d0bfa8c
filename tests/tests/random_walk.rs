//! Random worlds: any order of submissions, plans, outcomes and aborts keeps every page right and
//! accounted for, and once the world behaves, everything ends and everything is given back.

use terrace_scheduler::{
    AdmissionOrder, BatchConfig, Config, CopyConfig, EvictionKind, L3Config, OpId, Outcome,
    PrefetchPolicy, QueueConfig, RateConfig, Request, RequestId, Token, WritePolicy, replay,
};
use terrace_tests::World;

/// A small generator of pseudo-random numbers: the same seed, the same walk.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (word ^ (word >> 31)) % bound
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.below(bound) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

fn config(dice: &mut Dice) -> Config {
    let page_size = dice.pick(&[1, 2, 4, 8]);
    let host_pages = dice.pick(&[0, 3, 8, 20, 60]);
    let decode_tokens = dice.pick(&[1, 1, 2, 4]);
    let running_max = dice.pick(&[1, 2, 4, 8]);
    let mut config = Config::builder()
        .page_size(page_size)
        .device_pages(dice.pick(&[4, 8, 12, 24, 60]))
        .host_pages(host_pages)
        .ranks(dice.pick(&[1, 1, 1, 2, 3]))
        .eviction(dice.pick(&EvictionKind::ALL))
        .write_policy(dice.pick(&[
            WritePolicy::WriteThrough,
            WritePolicy::SelectiveWriteThrough { hits: 1 },
            WritePolicy::WriteBack,
        ]))
        .kv_event_keys_max(dice.pick(&[0, 10, 1000]))
        .batch(BatchConfig {
            running_max,
            decode_tokens,
            step_tokens_max: (running_max * decode_tokens).max(dice.pick(&[1, 5, 16, 64])),
            mixed: dice.one_in(2),
            prefill_streak_max: dice.pick(&[1, 3]),
            decode_reserve_pages: dice.pick(&[0, 1, 2]),
            step_failures_max: 3,
        })
        .queue(QueueConfig {
            order: dice.pick(&[
                AdmissionOrder::Arrival,
                AdmissionOrder::Priority,
                AdmissionOrder::LongestPrefix,
                AdmissionOrder::TreeOrder,
            ]),
            requests_max: 16,
            window: dice.pick(&[1, 4, 16]),
            wait_max_ms: dice.pick(&[10, 1000]),
            share_wait_max_ms: dice.pick(&[0, 10, 100]),
            start_timeout_ms: dice.pick(&[0, 0, 500]),
        })
        .copies(CopyConfig {
            load_back_threshold_pages: dice.pick(&[1, 2]),
            load_back_pages_max: dice.pick(&[2, 100]),
            load_back_timeout_ms: 50,
            write_back_pages_max: dice.pick(&[1, 4, 100]),
            write_back_timeout_ms: 50,
        })
        .rates(RateConfig {
            prefill_ns_per_token: dice.pick(&[1_000_000, 1_000]),
            ..RateConfig::default()
        });
    if host_pages > 0 && !dice.one_in(4) {
        config = config.l3(L3Config {
            prefetch_threshold_pages: dice.pick(&[1, 2]),
            prefetch: dice.pick(&[
                PrefetchPolicy::BestEffort,
                PrefetchPolicy::Wait { max_ms: 100 },
                PrefetchPolicy::Deadline { base_ms: 5, per_page_us: 500 },
            ]),
            prefetch_pages_max: dice.pick(&[2, 4, 100]),
            quarantine_pages_max: dice.pick(&[1, 100]),
            probes_max: dice.pick(&[1, 8]),
            probe_timeout_ms: 10,
            backup: !dice.one_in(5),
            backup_pages_max: dice.pick(&[1, 3, 100]),
            backup_queue_max: dice.pick(&[1, 8]),
            negative_ttl_ms: dice.pick(&[1, 30]),
            negative_max: 4,
            backoff_base_ms: 1,
            backoff_max_ms: 8,
        });
    }
    config.build().expect("a legal configuration")
}

/// One of a few conversations, up to some point, perhaps with a turn of its own.
fn prompt(dice: &mut Dice) -> Vec<Token> {
    let start = dice.pick(&[1, 1, 1, 100]);
    let mut tokens: Vec<Token> = (start..=start + dice.pick(&[3, 12, 24, 39])).collect();
    if dice.one_in(2) {
        let turn = dice.pick(&[200, 300]);
        tokens.extend(turn..=turn + dice.below(10) as Token);
    }
    tokens
}

/// An outcome; one in `faults_in` is a fault.
fn outcome(dice: &mut Dice, faults_in: u64) -> Outcome {
    if !dice.one_in(faults_in) {
        return Outcome::Done;
    }
    match dice.below(6) {
        0 => Outcome::Missing,
        1 => Outcome::Failed,
        2 => Outcome::Corrupt,
        3 => Outcome::TimedOut,
        _ => Outcome::Partial(dice.below(6) as u32),
    }
}

fn walk(seed: u64, steps: u32) {
    let mut dice = Dice(seed);
    let config = Config { trace_max: 100_000, ..config(&mut dice) };
    let ranks = config.model.ranks;
    let faults_in = dice.pick(&[2, 6, 30]);
    let mut world = World::new(config).expect("a legal configuration");
    let mut next_request = 0;
    // Outcomes still owed, by rank; repeated and late ones come from those that were reported.
    let mut owed: Vec<(OpId, u32)> = Vec::new();
    let mut reported: Vec<(OpId, u32)> = Vec::new();
    let mut seen = OpId(0);
    for _ in 0..steps {
        world.now.0 += dice.pick(&[0, 100, 3_000]);
        match dice.below(20) {
            0..=2 => {
                let mut request =
                    Request::new(next_request, prompt(&mut dice), 1 + dice.below(12) as u32);
                next_request += 1;
                request.priority = dice.below(3) as i32;
                request.adapter = dice.pick(&["", "", "lora"]).to_owned();
                request.salt = dice.pick(&["", "", "tenant"]).to_owned();
                world.finishing.extend(dice.one_in(4).then_some(request.id));
                let _ = world.submit(request);
            }
            3 if next_request > 0 => {
                let id = RequestId(next_request - 1 - dice.below(next_request.min(8)));
                let _ = world.scheduler.abort(world.now, id);
            }
            4 if world.in_step() && dice.one_in(6) => world.fail_step(),
            5 if dice.one_in(10) => world.scheduler.clear_cache(),
            6 if dice.one_in(40) => world.l3.clear(),
            7 => world.accepted_tokens = 1 + dice.below(4) as u32,
            8..=11 => {
                world.plan();
            }
            12..=14 if world.in_step() => {
                world.finish_step().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
            }
            15 if !reported.is_empty() && dice.one_in(4) => {
                let (op, rank) = dice.pick(&reported);
                let _ = world.scheduler.advance(
                    world.now,
                    terrace_scheduler::Event::Operation { op, rank, outcome: Outcome::Done },
                );
            }
            _ if !owed.is_empty() => {
                let place = dice.below(owed.len() as u64) as usize;
                let (op, rank) = owed[place];
                let outcome = outcome(&mut dice, faults_in);
                // An outcome that claims too much is refused, and stays owed.
                if world.report(op, rank, outcome).is_ok() && outcome != Outcome::TimedOut {
                    owed.swap_remove(place);
                    reported.push((op, rank));
                }
            }
            _ => {}
        }
        collect_new(&world, &mut seen, ranks, &mut owed);
        if let Err(fault) = world.scheduler.try_audit() {
            panic!("seed {seed}: {fault}");
        }
        world.scheduler.drain_kv_events().for_each(drop);
    }
    settle(seed, &mut world, &mut owed, &mut seen, ranks);
}

fn collect_new(world: &World, seen: &mut OpId, ranks: u32, owed: &mut Vec<(OpId, u32)>) {
    for (&op, _) in world.transfers.range(*seen..) {
        owed.extend((0..ranks).map(|rank| (op, rank)));
        *seen = OpId(op.0 + 1);
    }
}

/// No more faults: every request ends, and everything is given back.
fn settle(seed: u64, world: &mut World, owed: &mut Vec<(OpId, u32)>, seen: &mut OpId, ranks: u32) {
    world.accepted_tokens = u32::MAX;
    for round in 0.. {
        assert!(round < 3_000, "seed {seed}: a request never ends: {:?}", world.scheduler.stats());
        world.now.0 += 1_000;
        let idle = world.plan().is_idle();
        collect_new(world, seen, ranks, owed);
        let idle = idle && owed.is_empty();
        for (op, rank) in owed.drain(..) {
            world.report(op, rank, Outcome::Done).expect("it is owed");
        }
        if world.in_step() {
            world.finish_step().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        }
        world.scheduler.audit();
        let stats = world.scheduler.stats();
        let live = stats.waiting + stats.running + stats.draining;
        if idle && live == 0 && world.scheduler.deadline().is_none() {
            break;
        }
    }
    let stats = world.scheduler.stats();
    for kind in [stats.probes, stats.prefetches, stats.load_backs, stats.write_backs, stats.backups]
    {
        assert_eq!((kind.in_flight, kind.in_flight_pages), (0, 0), "seed {seed}");
    }
    assert_eq!(stats.submitted, stats.finished + stats.aborted + stats.failed, "seed {seed}");
    if std::env::var("WALK_STATS").is_ok() {
        println!("STATS {}", serde_json::to_string(&stats).expect("plain"));
    }
    let lives =
        replay(world.scheduler.drain_trace()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    assert!(lives.values().all(|state| state.is_end()), "seed {seed}: {lives:?}");
    world.scheduler.clear_cache();
    let usage = world.scheduler.stats().cache;
    assert_eq!(usage.device.free_pages, usage.device.total_pages, "seed {seed}: {stats:?}");
    assert_eq!(usage.host.free_pages, usage.host.total_pages, "seed {seed}: {stats:?}");
}

#[test]
fn random_walks_keep_every_page_right() {
    let seeds = std::env::var("WALK_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(300);
    let first = std::env::var("WALK_FIRST").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in first..first + seeds {
        walk(seed, 600);
    }
}
