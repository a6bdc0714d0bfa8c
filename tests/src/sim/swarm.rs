//! Random configuration, load and fault rates of a seed.

use terrace_scheduler::{
    AdmissionOrder, BatchConfig, Config, CopyConfig, EvictionKind, L3Config, PrefetchPolicy,
    QueueConfig, RateConfig, WritePolicy,
};

use super::faults::FaultKind;
use terrace_kit::Dice;

/// Parameters of a world.
#[derive(Clone, Debug)]
pub struct Swarm {
    /// Configuration of the scheduler.
    pub config: Config,
    /// The load.
    pub load: Load,
    /// One in this many operations has this fault; 0 for never. Indexed by [`FaultKind`].
    pub fault_odds: [u64; FaultKind::ALL.len()],
}

/// The shape of the load.
#[derive(Clone, Debug)]
pub struct Load {
    /// Number of shared texts that prompts begin with.
    pub texts: u64,
    /// Largest prompt, in tokens.
    pub prompt_max: u64,
    /// Largest number of new tokens.
    pub new_max: u64,
    /// One in this many requests continues an ended conversation; 0 for never.
    pub follow_up_odds: u64,
    /// Mean time between arrivals.
    pub gap_us: u64,
    /// Requests that arrive together.
    pub burst: u64,
    /// Number of namespaces.
    pub namespaces: u64,
    /// Time to compute a prompt token. If it is short, loading does not pay and soon stops.
    pub token_us: u64,
    /// Longest time between two calls of the scheduler.
    pub jitter_us: u64,
}

impl Swarm {
    /// Draws a world.
    ///
    /// # Panics
    /// Never: all draws are valid.
    #[must_use]
    pub fn draw(dice: &mut Dice) -> Self {
        let config = draw_config(dice);
        let device_tokens = u64::from(config.cache.device_pages * config.cache.page_size);
        let load = Load {
            texts: dice.pick(&[1, 2, 4]),
            prompt_max: dice.pick(&[8, 24, 60, device_tokens]).min(device_tokens),
            new_max: dice.pick(&[1, 4, 12]),
            follow_up_odds: dice.pick(&[0, 2, 4]),
            gap_us: dice.pick(&[500, 5_000, 30_000]),
            burst: dice.pick(&[1, 1, 4, 10]),
            namespaces: dice.pick(&[1, 1, 3]),
            token_us: dice.pick(&[0, 1_000, 4_000, 4_000]),
            jitter_us: dice.pick(&[0, 5, 200]),
        };
        // Each seed enables only some kinds of faults, so that rare ones coincide.
        let mut fault_odds = [0; FaultKind::ALL.len()];
        for kind in FaultKind::ALL {
            // Stops of cancelled operations have their own random source.
            if kind != FaultKind::CalledOff {
                fault_odds[kind as usize] = dice.pick(&[0, 0, 0, 4, 15, 60]);
            }
        }
        // Prefetches are rarer than other operations.
        for kind in [
            FaultKind::ShortRead,
            FaultKind::FlippedBit,
            FaultKind::WrongPage,
            FaultKind::StaleGeneration,
        ] {
            fault_odds[kind as usize] = dice.pick(&[0, 0, 6, 20]);
        }
        if config.l3.is_some() {
            // Pages are read from L3 only if device and host have lost them.
            fault_odds[FaultKind::CacheCleared as usize] = dice.pick(&[0, 2, 4]);
        }
        Self { config, load, fault_odds }
    }
}

fn draw_config(dice: &mut Dice) -> Config {
    let host_pages = dice.pick(&[0, 1, 6, 20, 60, 60]);
    let steps_in_flight_max = dice.pick(&[1, 2]);
    let (decode_tokens, repeats_max) = match (steps_in_flight_max, dice.pick(&[1, 1, 2, 4])) {
        (1, 1) => (1, dice.pick(&[0, 1, 7])),
        (1, decode_tokens) => (decode_tokens, 0),
        _ => (1, 0),
    };
    let order = dice.pick(&[
        AdmissionOrder::Arrival,
        AdmissionOrder::Priority,
        AdmissionOrder::LongestPrefix,
    ]);
    let running_max = dice.pick(&[1, 2, 4, 8]);
    let mut builder = Config::builder()
        .page_size(dice.pick(&[1, 2, 2, 4, 8]))
        .device_pages(dice.pick(&[1, 6, 12, 24, 40]))
        .host_pages(host_pages)
        .ranks(dice.pick(&[1, 1, 1, 2, 3]))
        .eviction(dice.pick(&EvictionKind::ALL))
        .write_policy(dice.pick(&[
            WritePolicy::WriteThrough,
            WritePolicy::WriteThrough,
            WritePolicy::SelectiveWriteThrough { hits: 1 },
            WritePolicy::WriteBack,
        ]))
        .kv_event_keys_max(dice.pick(&[0, 0, 10, 1000]))
        .batch(BatchConfig {
            running_max,
            decode_tokens,
            repeats_max,
            steps_in_flight_max,
            step_tokens_max: (running_max * decode_tokens).max(dice.pick(&[1, 5, 16, 64])),
            context_tokens: if decode_tokens == 2 { 6 } else { 49_152 },
            chunk_tokens_min: if decode_tokens == 4 { 3 } else { 128 },
            mixed: dice.one_in(2),
            shortest_first_percent: dice.pick(&[0, 25, 25, 100]),
            prefill_streak_max: dice.pick(&[1, 3]),
            decode_reserve_pages: dice.pick(&[0, 1, 2]),
            adapters_max: 0,
            step_failures_max: 3,
        })
        .queue(QueueConfig {
            order,
            requests_max: 16,
            window: dice.pick(&[1, 4, 16]),
            wait_max_ms: dice.pick(&[10, 100]),
            share_wait_max_ms: dice.pick(&[0, 10, 100]),
            share_stall_max_ms: dice.pick(&[5, 100]),
            start_timeout_ms: dice.pick(&[0, 0, 0, 500]),
            preempts: order == AdmissionOrder::Priority && dice.one_in(2),
            preempt_margin: dice.pick(&[1, 2, 10]),
        })
        .copies(CopyConfig {
            load_back_threshold_pages: dice.pick(&[1, 1, 2]),
            load_back_pages_max: dice.pick(&[2, 100]),
            load_back_timeout_ms: dice.pick(&[5, 50]),
            load_back_overlaps: false,
            write_back_pages_max: dice.pick(&[1, 4, 100]),
            write_back_timeout_ms: dice.pick(&[5, 50]),
        })
        .rates(RateConfig {
            // In most worlds computing is expensive, so that loading is attempted.
            prefill_ns_per_token: dice.pick(&[50_000_000, 50_000_000, 50_000_000, 1_000]),
            ..RateConfig::default()
        });
    if host_pages > 0 && !dice.one_in(5) {
        builder = builder.l3(draw_l3(dice, host_pages));
    }
    builder.build().expect("what is drawn is legal")
}

fn draw_l3(dice: &mut Dice, host_pages: u32) -> L3Config {
    let prefetch_pages_max = dice.pick(&[1, 4, 100]);
    L3Config {
        prefetch_threshold_pages: dice.pick(&[1, 1, 3]).min(host_pages).min(prefetch_pages_max),
        prefetch: dice.pick(&[
            PrefetchPolicy::BestEffort,
            PrefetchPolicy::Wait { max_ms: 100 },
            PrefetchPolicy::Deadline { base_ms: 5, per_page_us: 500 },
            PrefetchPolicy::Deadline { base_ms: 50, per_page_us: 500 },
        ]),
        prefetch_pages_max,
        quarantine_pages_max: dice.pick(&[1, 100]),
        probes_max: dice.pick(&[1, 8]),
        probe_timeout_ms: dice.pick(&[2, 20, 200]),
        backup: !dice.one_in(8),
        backup_pages_max: dice.pick(&[1, 3, 100]),
        backup_queue_max: dice.pick(&[1, 8]),
        negative_ttl_ms: dice.pick(&[1, 30]),
        doubt_after_ms: if host_pages == 20 { 40 } else { 600_000 },
        negative_max: 4,
        backoff_base_ms: 1,
        backoff_max_ms: 8,
    }
}
