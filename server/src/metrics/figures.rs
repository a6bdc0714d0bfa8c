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
    text.counter("terrace_requests_submitted_total", "Requests taken.", stats.submitted)?;
    text.metric(
        Counter,
        "terrace_requests_ended_total",
        "Requests that have ended, by how.",
        &[("finished", stats.finished), ("aborted", stats.aborted), ("failed", stats.failed)],
        "end",
    )?;
    text.metric(
        Gauge,
        "terrace_requests",
        "Requests that have not ended: waiting, retracted ones included; running; draining, which \
         only wait for their write-back.",
        &[("waiting", stats.waiting), ("running", stats.running), ("draining", stats.draining)],
        "state",
    )?;
    text.counter(
        "terrace_retractions_total",
        "Running requests that had to give up their device memory.",
        stats.retractions,
    )?;
    text.counter(
        "terrace_stalls_total",
        "Times that a decode sat out a step for want of memory.",
        stats.stalls,
    )?;
    text.counter(
        "terrace_shared_waits_total",
        "Requests that waited for another that computed or loaded their prefix.",
        stats.shared_waits,
    )?;
    text.histogram(
        "terrace_queue_seconds",
        "From when a request was taken until it was first admitted, in seconds.",
        &figures.queue,
    )
}

fn tokens(text: &mut Exposition<'_>, stats: &Stats) -> fmt::Result {
    let hits = stats.device_hit_tokens + stats.host_hit_tokens + stats.l3_hit_tokens;
    text.metric(
        Counter,
        "terrace_prompt_tokens_total",
        "Tokens of prompts at first admission, by the tier that held their KV, or computed.",
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
        "Tokens of prompts, and of retracted requests again, that were computed.",
        stats.prefilled_tokens,
    )?;
    text.counter("terrace_generated_tokens_total", "Tokens produced.", stats.generated_tokens)?;
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
        "Bytes of KV that arrived sound, by the kind of transfer.",
        &transfers.map(|(kind, stats)| (kind, stats.sound_pages * page_bytes)),
        "kind",
    )?;
    let [prefetch, load_back, write_back, backup] = transfers;
    let all = [("probe", stats.probes), prefetch, load_back, write_back, backup];
    let mut each = |kind, name, help, figure: fn(&OperationStats) -> u64| {
        text.metric(kind, name, help, &all.map(|(of, stats)| (of, figure(&stats))), "kind")
    };
    each(Counter, "terrace_operations_total", "Operations begun.", |stats| stats.started)?;
    each(
        Counter,
        "terrace_operation_failures_total",
        "Outcomes that said failed, corrupt or timed out.",
        |stats| stats.failures,
    )?;
    each(
        Counter,
        "terrace_operations_called_off_total",
        "Operations that were stopped because nobody waited for them any more.",
        |stats| stats.called_off,
    )?;
    each(
        Counter,
        "terrace_operation_sound_pages_total",
        "Pages that arrived sound; for probes, pages found.",
        |stats| stats.sound_pages,
    )?;
    each(
        Counter,
        "terrace_operation_unsound_pages_total",
        "Pages that did not arrive sound; for probes, pages not found.",
        |stats| stats.unsound_pages,
    )?;
    each(Gauge, "terrace_operations_in_flight", "Operations under way.", |stats| {
        stats.in_flight.into()
    })?;
    text.counter(
        "terrace_prefetches_priced_out_total",
        "Prefetches that were not begun because computing is faster.",
        stats.prefetches_priced_out,
    )?;
    text.counter(
        "terrace_negative_hits_total",
        "Pages that L3 was not asked for because it failed to deliver them lately.",
        stats.negative_hits,
    )?;
    text.counter(
        "terrace_write_backs_skipped_pages_total",
        "Pages that were to be copied to host and found no room, or gave way.",
        stats.write_backs_skipped_pages,
    )?;
    text.counter("terrace_backups_skipped_total", "Backups that gave way.", stats.backups_skipped)?;
    text.gauge(
        "terrace_backups_waiting",
        "Backups that wait for their turn.",
        stats.backups_waiting,
    )?;
    Ok(())
}

fn pages(text: &mut Exposition<'_>, stats: &Stats) -> fmt::Result {
    let tiers = [("device", stats.cache.device), ("host", stats.cache.host)];
    let mut each = |name, help, figure: fn(&terrace_cache::TierUse) -> usize| {
        text.metric(Gauge, name, help, &tiers.map(|(tier, pages)| (tier, figure(&pages))), "tier")
    };
    each("terrace_pages", "Pages of a tier.", |pages| pages.total_pages)?;
    each("terrace_pages_free", "Pages of a tier that nobody owns.", |pages| pages.free_pages)?;
    each("terrace_pages_evictable", "Cached pages of a tier that could be evicted.", |pages| {
        pages.evictable_pages
    })?;
    text.metric(
        Counter,
        "terrace_evicted_pages_total",
        "Pages that were evicted to make room for others.",
        &tiers.map(|(tier, pages)| (tier, pages.evicted_pages)),
        "tier",
    )?;
    Ok(())
}

fn steps(text: &mut Exposition<'_>, figures: &Figures) -> fmt::Result {
    let steps = &figures.steps;
    text.counter("terrace_steps_total", "Forward steps that have ended.", steps.steps)?;
    text.counter("terrace_steps_failed_total", "Steps that came to nothing.", steps.failed)?;
    text.counter(
        "terrace_model_seconds_total",
        "Time that the model took.",
        seconds(steps.model_us),
    )?;
    text.counter(
        "terrace_busy_seconds_total",
        "From when a step could have begun until it had ended, added up.",
        seconds(steps.busy_us),
    )?;
    text.gauge(
        "terrace_engine_overhead_ratio",
        "The share of busy time that was not spent in the model.",
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
    each(Gauge, "terrace_l3_bytes", "Payload in L3.", |tier| tier.bytes)?;
    each(Gauge, "terrace_l3_capacity_bytes", "What L3 could hold.", |tier| tier.capacity_bytes)?;
    each(Gauge, "terrace_l3_hard_pinned_objects", "Objects that are never evicted.", |tier| {
        tier.hard_pinned
    })?;
    each(Gauge, "terrace_l3_soft_pinned_objects", "Objects that are evicted last.", |tier| {
        tier.soft_pinned
    })?;
    let help = "Puts refused because nothing could be evicted.";
    each(Counter, "terrace_l3_puts_full_total", help, |tier| tier.puts_full)?;
    each(Counter, "terrace_l3_evicted_total", "Objects evicted from L3.", |tier| tier.evicted)?;
    each(Counter, "terrace_l3_corrupt_total", "Objects that did not verify.", |tier| tier.corrupt)?;
    each(Counter, "terrace_l3_io_errors_total", "Transfers that the medium failed.", |tier| {
        tier.io_errors
    })?;
    let help = "1 when changes cannot be made durable any more, and so none are taken.";
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
        "1 for the state that the breaker of L3 is in.",
        &[
            ("closed", is(BreakerState::Closed)),
            ("open", is(BreakerState::Open)),
            ("half_open", is(BreakerState::HalfOpen)),
        ],
        "state",
    )?;
    text.counter("terrace_l3_breaker_opened_total", "Times that it opened.", guard.opened)?;
    text.counter("terrace_l3_refused_total", "Calls that the breaker refused.", guard.refused)?;
    text.counter(
        "terrace_l3_timed_out_total",
        "Calls that ran into their deadline.",
        guard.timed_out,
    )?;
    Ok(())
}

pub(super) fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}
