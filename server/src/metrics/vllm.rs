//! The same figures under the names that dashboards made for vLLM ask for.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;
use terrace_cache::TierUse;

use super::exposition::{Exposition, Kind};
use super::latency::Latency;
use super::{Latest, Moment};

/// Figures under vLLM's names. The registry they are in adds the model's name to each.
#[derive(Debug)]
pub(super) struct VllmNames {
    latest: Latest,
    latency: Arc<Latency>,
}

impl VllmNames {
    pub(super) fn new(latest: Latest, latency: Arc<Latency>) -> Self {
        Self { latest, latency }
    }

    pub(super) fn register(self, registry: &mut Registry) {
        let Latency { first_token, inter_token, request, .. } = &*self.latency;
        // Older dashboards have the last one's name for the one before it.
        for (name, help, histogram) in [
            (
                "vllm:time_to_first_token_seconds",
                "terrace_time_to_first_token_seconds",
                first_token,
            ),
            ("vllm:e2e_request_latency_seconds", "terrace_request_seconds", request),
            ("vllm:inter_token_latency_seconds", "terrace_inter_token_seconds", inter_token),
            ("vllm:time_per_output_token_seconds", "terrace_inter_token_seconds", inter_token),
        ] {
            registry.register(name, format!("The same as {help}"), histogram.clone());
        }
        registry.register_collector(Box::new(self));
    }
}

impl Collector for VllmNames {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let latest = self.latest.lock();
        let Some(Moment { figures, .. }) = &*latest else { return Ok(()) };
        let stats = &figures.scheduler;
        let mut text = Exposition::new(encoder);
        let help = "The same as terrace_requests of state running.";
        text.gauge("vllm:num_requests_running", help, stats.running)?;
        let help = "The same as terrace_requests of state waiting.";
        text.gauge("vllm:num_requests_waiting", help, stats.waiting)?;
        let in_use = in_use(&stats.cache.device);
        let help = "Share of device pages in use, from 0 to 1.";
        text.gauge("vllm:kv_cache_usage_perc", help, in_use)?;
        text.gauge("vllm:gpu_cache_usage_perc", help, in_use)?;
        let help = "Prompt tokens, cached or not.";
        text.counter("vllm:prompt_tokens_total", help, stats.prompt_tokens)?;
        text.counter("vllm:prefix_cache_queries_total", help, stats.prompt_tokens)?;
        let hits = stats.device_hit_tokens + stats.host_hit_tokens + stats.l3_hit_tokens;
        let help = "Prompt tokens found in any tier.";
        text.counter("vllm:prefix_cache_hits_total", help, hits)?;
        let help = "The same as terrace_generated_tokens_total.";
        text.counter("vllm:generation_tokens_total", help, stats.generated_tokens)?;
        let help = "The same as terrace_retractions_total.";
        text.counter("vllm:num_preemptions_total", help, stats.retractions)?;
        text.metric(
            Kind::Counter,
            "vllm:request_success_total",
            "The same as terrace_answers_total.",
            &self.latency.ended(),
            "finished_reason",
        )
    }
}

/// Cached pages that could be evicted are as good as free.
fn in_use(device: &TierUse) -> f64 {
    let held = device.total_pages.saturating_sub(device.free_pages + device.evictable_pages);
    held as f64 / device.total_pages.max(1) as f64
}
