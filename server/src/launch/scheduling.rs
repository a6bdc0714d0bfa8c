//! What the scheduler is told of the settings and of the device.

use terrace_cache::CacheConfig;
use terrace_scheduler::{
    BatchConfig, CopyConfig, L3Config, ModelConfig, PrefetchPolicy, QueueConfig, RateConfig,
};

use crate::config::{Config, DeviceChoice, StepSettings};

/// What the scheduler is to do with pages of so many bytes. What the engine knows better it fills in itself. The store
/// may have a secret of its own; one that is configured takes its place.
pub(super) fn scheduler_config(
    config: &Config,
    page_bytes: usize,
    own_secret: Option<String>,
) -> terrace_scheduler::Config {
    let StepSettings { step_tokens, running_max, steps_in_flight, load_back_overlaps } =
        config.steps();
    let secret = config.l3_secret.as_ref().map(|secret| secret.0.clone()).or(own_secret);
    let secret = secret.unwrap_or_default();
    terrace_scheduler::Config {
        model: ModelConfig { secret, ..ModelConfig::default() },
        cache: CacheConfig {
            page_size: config.page_size,
            eviction: config.eviction,
            write_policy: config.write_policy,
            ..CacheConfig::default()
        },
        batch: BatchConfig {
            running_max,
            step_tokens_max: step_tokens,
            steps_in_flight_max: steps_in_flight,
            chunk_tokens_min: config.chunk_tokens,
            context_tokens: config.context_tokens,
            ..BatchConfig::default()
        },
        queue: QueueConfig {
            order: config.admission,
            requests_max: config.limits.requests_max,
            preempts: config.preempts,
            preempt_margin: config.preempt_margin,
            ..QueueConfig::default()
        },
        copies: CopyConfig { load_back_overlaps, ..CopyConfig::default() },
        l3: Some(L3Config {
            prefetch_threshold_pages: 1,
            doubt_after_ms: config.l3_doubt_after.as_millis() as u64,
            prefetch: PrefetchPolicy::Deadline {
                base_ms: config.l3_wait.as_millis() as u64,
                per_page_us: 500,
            },
            probe_timeout_ms: (config.l3_wait * 2 / 5).as_millis() as u64,
            ..L3Config::default()
        }),
        rates: rates(config.device, page_bytes),
        ..terrace_scheduler::Config::default()
    }
}

/// What is usual, until it has been measured.
fn rates(device: DeviceChoice, page_bytes: usize) -> RateConfig {
    /// Bytes that a link to a GPU moves in a nanosecond.
    const LINK_BYTES_PER_NS: u64 = 50;
    match device {
        // Computing is slow enough that loading pays from the first request on.
        DeviceChoice::Cpu => RateConfig {
            prefill_ns_per_token: 400_000,
            load_back_ns_per_page: 50_000,
            prefetch_ns_per_page: 200_000,
            prefetch_latency_us: 2_000,
        },
        DeviceChoice::Cuda(_) => RateConfig {
            prefill_ns_per_token: 40_000,
            load_back_ns_per_page: (page_bytes as u64 / LINK_BYTES_PER_NS).max(1),
            // A good disk: 2.5 bytes in a nanosecond.
            prefetch_ns_per_page: (page_bytes as u64 * 2 / 5).max(1),
            prefetch_latency_us: 2_000,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_computes_faster_and_pages_take_as_long_as_their_bytes() {
        let gpu = rates(DeviceChoice::Cuda(0), 2 << 20);
        assert!(gpu.prefill_ns_per_token < rates(DeviceChoice::Cpu, 2 << 20).prefill_ns_per_token);
        assert_eq!((gpu.load_back_ns_per_page, gpu.prefetch_ns_per_page), (41_943, 838_860));
        assert_eq!(
            rates(DeviceChoice::Cuda(0), 1).load_back_ns_per_page,
            1,
            "nothing takes no time"
        );
    }

    #[test]
    fn steps_are_as_the_device_likes_them_unless_somebody_says_otherwise() {
        let told = |config: &Config| {
            let scheduler = scheduler_config(config, 1 << 20, None);
            let batch = scheduler.batch;
            let overlaps = scheduler.copies.load_back_overlaps;
            (batch.step_tokens_max, batch.running_max, batch.steps_in_flight_max, overlaps)
        };
        assert_eq!(told(&Config::default()), (512, 64, 1, false));
        let gpu = Config { device: DeviceChoice::Cuda(0), ..Config::default() };
        assert_eq!(told(&gpu), (8192, 256, 2, true));
        let chosen = Config {
            step_tokens: Some(1024),
            running_max: Some(32),
            steps_in_flight: Some(1),
            load_back_overlaps: Some(false),
            ..gpu
        };
        assert_eq!(told(&chosen), (1024, 32, 1, false));
    }
}
