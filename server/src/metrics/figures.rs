//! The engine's figures as metrics.

use std::fmt;

use terrace_engine::Figures;
use terrace_l3::{BreakerState, Figure, FigureKind, GuardStats, StoreStats, TierStats};
use terrace_scheduler::{OperationStats, Stats};

use super::exposition::Exposition;
use super::exposition::Kind::{Counter, Gauge};

/// All figures.
pub(crate) fn write(text: &mut Exposition<'_>, figures: &Figures) -> fmt::Result {
    let stats = &figures.scheduler;
    requests(text, figures)?;
    tokens(text, stats)?;
    operations(text, stats, figures.page_bytes as u64)?;
    pages(text, stats)?;
    steps(text, figures)?;
    match &figures.store {
        Some(store) => self::store(text, store),
        None => Ok(()),
    }
}

fn requests(text: &mut Exposition<'_>, figures: &Figures) -> fmt::Result {
    let stats = &figures.scheduler;
    text.counter(
        "terrace_requests_submitted_total",
        "Requests accepted by the scheduler.",
        stats.submitted,
    )?;
    text.metric(
        Counter,
        "terrace_requests_ended_total",
        "Requests that ended, by end state.",
        &[("finished", stats.finished), ("aborted", stats.aborted), ("failed", stats.failed)],
        "end",
    )?;
    text.metric(
        Gauge,
        "terrace_requests",
        "Unfinished requests: waiting (including retracted ones), running, or draining (waiting only for write-back).",
        &[("waiting", stats.waiting), ("running", stats.running), ("draining", stats.draining)],
        "state",
    )?;
    text.counter(
        "terrace_retractions_total",
        "Preemptions: running requests that lost their device memory.",
        stats.retractions,
    )?;
    text.counter(
        "terrace_stalls_total",
        "Decodes that skipped a step because device memory was full.",
        stats.stalls,
    )?;
    text.counter(
        "terrace_shared_waits_total",
        "Requests that waited for another request to compute or load their prefix.",
        stats.shared_waits,
    )?;
    text.histogram(
        "terrace_queue_seconds",
        "Queue time, from acceptance to first admission, in seconds.",
        &figures.queue,
    )
}

fn tokens(text: &mut Exposition<'_>, stats: &Stats) -> fmt::Result {
    let hits = stats.device_hit_tokens + stats.host_hit_tokens + stats.l3_hit_tokens;
    text.metric(
        Counter,
        "terrace_prompt_tokens_total",
        "Prompt tokens at first admission, by the tier of the cache hit, or computed.",
        &[
            ("device", stats.device_hit_tokens),
            ("host", stats.host_hit_tokens),
            ("l3", stats.l3_hit_tokens),
            ("computed", stats.prompt_tokens.saturating_sub(hits)),
        ],
        "tier",
    )?;
    text.counter(
        "terrace_prefilled_tokens_total",
        "Prefilled tokens, including recomputation after preemption.",
        stats.prefilled_tokens,
    )?;
    text.counter("terrace_generated_tokens_total", "Output tokens.", stats.generated_tokens)?;
    Ok(())
}

fn operations(text: &mut Exposition<'_>, stats: &Stats, page_bytes: u64) -> fmt::Result {
    let transfers = [
        ("prefetch", stats.prefetches),
        ("load_back", stats.load_backs),
        ("write_back", stats.write_backs),
        ("backup", stats.backups),
    ];
    text.metric(
        Counter,
        "terrace_moved_bytes_total",
        "KV bytes transferred successfully, by kind of transfer.",
        &transfers.map(|(kind, stats)| (kind, stats.sound_pages * page_bytes)),
        "kind",
    )?;
    let [prefetch, load_back, write_back, backup] = transfers;
    let all = [("probe", stats.probes), prefetch, load_back, write_back, backup];
    let mut each = |kind, name, help, figure: fn(&OperationStats) -> u64| {
        text.metric(kind, name, help, &all.map(|(of, stats)| (of, figure(&stats))), "kind")
    };
    each(Counter, "terrace_operations_total", "Operations started.", |stats| stats.started)?;
    each(
        Counter,
        "terrace_operation_failures_total",
        "Operations that failed, timed out or returned corrupt data.",
        |stats| stats.failures,
    )?;
    each(
        Counter,
        "terrace_operations_called_off_total",
        "Operations cancelled because no request waited for them any more.",
        |stats| stats.called_off,
    )?;
    each(
        Counter,
        "terrace_operation_sound_pages_total",
        "Pages transferred successfully; for probes, pages found.",
        |stats| stats.sound_pages,
    )?;
    each(
        Counter,
        "terrace_operation_unsound_pages_total",
        "Pages not transferred successfully; for probes, pages not found.",
        |stats| stats.unsound_pages,
    )?;
    each(Gauge, "terrace_operations_in_flight", "Operations in flight.", |stats| {
        stats.in_flight.into()
    })?;
    text.counter(
        "terrace_prefetches_priced_out_total",
        "Prefetches not started because recomputing is faster.",
        stats.prefetches_priced_out,
    )?;
    text.counter(
        "terrace_negative_hits_total",
        "Pages not requested from L3 because it recently failed to deliver them (negative cache).",
        stats.negative_hits,
    )?;
    text.counter(
        "terrace_write_backs_skipped_pages_total",
        "Pages not written back to host for lack of space or to yield to other transfers.",
        stats.write_backs_skipped_pages,
    )?;
    text.counter(
        "terrace_backups_skipped_total",
        "Backups to L3 skipped to yield to other transfers.",
        stats.backups_skipped,
    )?;
    text.gauge("terrace_backups_waiting", "Backups to L3 in the queue.", stats.backups_waiting)?;
    Ok(())
}

fn pages(text: &mut Exposition<'_>, stats: &Stats) -> fmt::Result {
    let tiers = [("device", stats.cache.device), ("host", stats.cache.host)];
    let mut each = |name, help, figure: fn(&terrace_cache::TierUse) -> usize| {
        text.metric(Gauge, name, help, &tiers.map(|(tier, pages)| (tier, figure(&pages))), "tier")
    };
    each("terrace_pages", "Pages of a tier.", |pages| pages.total_pages)?;
    each("terrace_pages_free", "Free pages of a tier.", |pages| pages.free_pages)?;
    each("terrace_pages_evictable", "Cached pages of a tier that can be evicted.", |pages| {
        pages.evictable_pages
    })?;
    text.metric(
        Counter,
        "terrace_evicted_pages_total",
        "Pages evicted to make room.",
        &tiers.map(|(tier, pages)| (tier, pages.evicted_pages)),
        "tier",
    )?;
    Ok(())
}

fn steps(text: &mut Exposition<'_>, figures: &Figures) -> fmt::Result {
    let steps = &figures.steps;
    text.counter("terrace_steps_total", "Completed forward steps.", steps.steps)?;
    text.counter("terrace_steps_failed_total", "Failed forward steps.", steps.failed)?;
    text.counter(
        "terrace_model_seconds_total",
        "Time spent in the model.",
        seconds(steps.model_us),
    )?;
    text.counter(
        "terrace_busy_seconds_total",
        "Busy time: from when a step could start until it ended.",
        seconds(steps.busy_us),
    )?;
    text.gauge(
        "terrace_engine_overhead_ratio",
        "Share of busy time not spent in the model.",
        steps.overhead_ratio(),
    )?;
    Ok(())
}

pub(crate) fn store(text: &mut Exposition<'_>, store: &StoreStats) -> fmt::Result {
    let tiers = [("memory", store.memory), ("disk", store.disk), ("cluster", store.remote)];
    let tiers: Vec<(&str, TierStats)> =
        tiers.into_iter().filter_map(|(tier, stats)| Some((tier, stats?))).collect();
    let mut each = |kind, name, help, figure: fn(&TierStats) -> u64| {
        let values: Vec<_> = tiers.iter().map(|(tier, stats)| (*tier, figure(stats))).collect();
        text.metric(kind, name, help, &values, "place")
    };
    each(Gauge, "terrace_l3_objects", "Objects in L3.", |tier| tier.objects)?;
    each(Gauge, "terrace_l3_bytes", "Payload bytes in L3.", |tier| tier.bytes)?;
    each(Gauge, "terrace_l3_capacity_bytes", "Capacity of L3.", |tier| tier.capacity_bytes)?;
    each(
        Gauge,
        "terrace_l3_hard_pinned_objects",
        "Hard-pinned objects, which are never evicted.",
        |tier| tier.hard_pinned,
    )?;
    each(
        Gauge,
        "terrace_l3_soft_pinned_objects",
        "Soft-pinned objects, which are evicted last.",
        |tier| tier.soft_pinned,
    )?;
    let help = "Puts refused because nothing could be evicted.";
    each(Counter, "terrace_l3_puts_full_total", help, |tier| tier.puts_full)?;
    each(Counter, "terrace_l3_evicted_total", "Objects evicted from L3.", |tier| tier.evicted)?;
    each(Counter, "terrace_l3_corrupt_total", "Objects that failed verification.", |tier| {
        tier.corrupt
    })?;
    each(
        Counter,
        "terrace_l3_io_errors_total",
        "Transfers that failed with an IO error.",
        |tier| tier.io_errors,
    )?;
    let help = "1 if the store can no longer make changes durable and therefore accepts none.";
    each(Gauge, "terrace_l3_broken", help, |tier| tier.broken)?;
    for Figure { name, help, kind, label, values } in &store.figures {
        let kind = match kind {
            FigureKind::Counter => Counter,
            FigureKind::Gauge => Gauge,
        };
        let values: Vec<_> = values.iter().map(|(of, value)| (&**of, *value)).collect();
        text.metric(kind, name, help, &values, label)?;
    }
    if let Some(guard) = &store.guard {
        self::guard(text, guard)?;
    }
    Ok(())
}

fn guard(text: &mut Exposition<'_>, guard: &GuardStats) -> fmt::Result {
    let is = |state| u32::from(guard.breaker == state);
    text.metric(
        Gauge,
        "terrace_l3_breaker",
        "1 for the current state of the L3 circuit breaker.",
        &[
            ("closed", is(BreakerState::Closed)),
            ("open", is(BreakerState::Open)),
            ("half_open", is(BreakerState::HalfOpen)),
        ],
        "state",
    )?;
    text.counter(
        "terrace_l3_breaker_opened_total",
        "Times that the circuit breaker opened.",
        guard.opened,
    )?;
    text.counter(
        "terrace_l3_refused_total",
        "Calls refused by the open circuit breaker.",
        guard.refused,
    )?;
    text.counter("terrace_l3_timed_out_total", "Calls that timed out.", guard.timed_out)?;
    Ok(())
}

pub(super) fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}
