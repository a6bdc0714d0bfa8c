//! Human-readable output.

use terrace_bench::{
    CacheFigures, Distribution, FeaturesFigures, GapFigures, KeyCost, KeysFigures, L3Figures,
    LifetimesFigures, MooncakeFigures, NodesFigures, PlansFigures, RecoveryFigures, StepFigures,
};
use terrace_replay::Size;
use terrace_replay::human;

fn spread(distribution: &Distribution) -> String {
    let Distribution { mean, p50, p99, max } = distribution;
    let [mean, p50, p99, max] = [mean, p50, p99, max].map(|us| human::milliseconds(us / 1e3));
    format!("mean {mean}, p50 {p50}, p99 {p99}, max {max}")
}

pub(crate) fn cache_text(figures: &CacheFigures) -> String {
    let CacheFigures { requests, tokens, hit_tokens, hit_ratio, .. } = figures;
    let page = &figures.ns_per_page;
    format!(
        "{requests} requests, {tokens} tokens, {hit_tokens} cache hits (hit rate {hit_ratio:.5})\n\
         time per request: {}\n\
         time per page: hash {:.1}, match {:.1}, evict {:.1}, insert {:.1} ns\n\
         memory per page: {:.1} bytes of tree and {:.1} bytes of tokens\n",
        spread(&figures.us_per_request),
        page.hash,
        page.r#match,
        page.evict,
        page.insert,
        figures.bytes_per_page,
        figures.token_bytes_per_page
    )
}

pub(crate) fn keys_text(figures: &KeysFigures) -> String {
    let line = |cost: &KeyCost| {
        let KeyCost { page_size, ns_per_page, ns_per_token } = cost;
        format!(
            "pages of {page_size:>3} tokens: {ns_per_page:6.2} ns per page, {ns_per_token:.3} ns per token\n"
        )
    };
    figures.page_sizes.iter().map(line).collect()
}

pub(crate) fn steps_text(figures: &StepFigures) -> String {
    let ahead = figures.ahead.as_ref().map(|ahead| {
        format!(
            "with two in flight: plan    {}\n                    advance {}\n\
             \x20                   {:.2} allocations, {:.2} times the cost of one in flight\n",
            spread(&ahead.plan_us),
            spread(&ahead.advance_us),
            ahead.allocations_per_step,
            ahead.cost_ratio
        )
    });
    format!(
        "a decode step: plan    {}\n               advance {}\n               {:.2} allocations\n\
         {}\
         a request: submitted in {:.2} us, prefilled in {:.2} us, ended in {:.2} us\n\
         \x20          with all pages cached: admitted in {:.2} us, prefilled and ended in {:.2} us\n\
         stats: {:.3} us\n",
        spread(&figures.plan_us),
        spread(&figures.advance_us),
        figures.allocations_per_step,
        ahead.unwrap_or_default(),
        figures.submit_us_per_request,
        figures.admit_us_per_request,
        figures.finish_us_per_request,
        figures.full_hit_admission_us_per_request,
        figures.rehit_us_per_request,
        figures.stats_us
    )
}

pub(crate) fn gap_text(figures: &GapFigures) -> String {
    format!(
        "idle time of the device between {} steps: {}\n",
        figures.steps,
        spread(&figures.gap_us)
    )
}

pub(crate) fn plans_text(figures: &PlansFigures) -> String {
    let worst = &figures.worst;
    format!(
        "CPU time of {} plans: {}\n\
         the longest, number {}, starts copies of {} pages and L3 operations of {} pages,\n\
         evicts {} device pages, and computes {} tokens of prompts\n\
         {} tokens were found in the cache\n",
        figures.plans,
        spread(&figures.plan_us),
        worst.index,
        worst.copied_pages,
        worst.l3_pages,
        worst.evicted_pages,
        worst.prefill_tokens,
        figures.hit_tokens
    )
}

pub(crate) fn l3_text(figures: &L3Figures) -> String {
    let L3Figures { put_gb_s, get_gb_s, raw_write_gb_s, raw_read_gb_s, .. } = figures;
    format!(
        "put {put_gb_s:.2} GB/s, {:.0} % of the baseline {raw_write_gb_s:.2} GB/s\n\
         get {get_gb_s:.2} GB/s, {:.0} % of the baseline {raw_read_gb_s:.2} GB/s\n\
         exists of 1,024 objects: {:.1} us\n\
         index: {:.1} bytes per object\n",
        100.0 * figures.put_share,
        100.0 * figures.get_share,
        figures.exists_us,
        figures.bytes_per_object,
    )
}

pub(crate) fn recovery_text(run: &RecoveryFigures) -> String {
    let RecoveryFigures { objects, index_memory_bytes, index_file_bytes, open_s, plain_read_s } =
        run;
    format!(
        "{objects} objects: opened in {open_s:.2} s; index {} in memory ({:.1} bytes per object), {} on disk, \
         which plain reading takes {plain_read_s:.2} s\n",
        Size(*index_memory_bytes),
        *index_memory_bytes as f64 / *objects as f64,
        Size(*index_file_bytes),
    )
}

pub(crate) fn mooncake_text(run: &MooncakeFigures) -> String {
    let size = Size(run.object_bytes as u64);
    let MooncakeFigures { batch, put_us, get_us, checksums_us, .. } = run;
    let line = |call: &str, us: f64| {
        format!(
            "{batch} x {size}: {call} {us:.0} us; checksums alone take {checksums_us:.0} us, {:.1} % of it\n",
            100.0 * checksums_us / us
        )
    };
    line("put", *put_us) + &line("get", *get_us)
}

pub(crate) fn nodes_text(figures: &NodesFigures) -> String {
    let mut text = String::new();
    for run in &figures.transfers {
        let size = Size(run.object_bytes as u64);
        for (way, of) in [("put", &run.put), ("get", &run.get)] {
            text += &format!(
                "{} x {size}: {way} {:.2} GB/s, {:.0} % of the {:.2} GB/s of a plain TCP stream\n",
                run.batch,
                of.bytes_per_s / 1e9,
                100.0 * of.ratio,
                of.plain_bytes_per_s / 1e9
            );
        }
    }
    text + &format!(
        "exists of {} objects over {} nodes: {}\n",
        figures.exists,
        figures.nodes,
        spread(&figures.exists_us)
    )
}

pub(crate) fn features_text(figures: &FeaturesFigures) -> String {
    let size = |bytes: u64| Size(bytes);
    let mut text = format!(
        "put {:.2} GB/s, {:.0} % of a memory copy; get {:.2} GB/s, {:.0} % of a memory copy; memory copy {:.2} GB/s\n",
        figures.put_gb_s,
        100.0 * figures.put_share,
        figures.get_gb_s,
        100.0 * figures.get_share,
        figures.copy_gb_s
    );
    for run in &figures.residency {
        text += &format!(
            "leases of {} s: {} samples; memory in use {} on average, {} at most, {} at the end; {} evicted\n",
            run.lease_ttl_s,
            run.samples,
            size(run.mean_bytes),
            size(run.max_bytes),
            size(run.end_bytes),
            run.evicted
        );
    }
    text + &format!(
        "memory use differs by {:.1} % between lease durations\n",
        100.0 * figures.residency_spread
    )
}

pub(crate) fn lifetimes_text(run: &LifetimesFigures) -> String {
    let size = |bytes: u64| Size(bytes);
    format!(
        "leases of {} s: {} transferred in {} objects; memory in use {} on average, {} at most, {} at the end; \
         {} evicted\n",
        run.lease_ttl_s,
        size(run.bytes),
        run.objects,
        size(run.resident_mean_bytes),
        size(run.resident_max_bytes),
        size(run.resident_end_bytes),
        run.evicted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_use_a_suitable_unit() {
        let spread = |samples_ns| spread(&Distribution::of(samples_ns));
        let text = spread((1..=1000).map(|n| n * 1000).collect());
        assert_eq!(text, "mean 500 µs, p50 500 µs, p99 990 µs, max 1.00 ms");
        assert!(spread(vec![3_126_541_800]).ends_with("max 3.13 s"));
    }
}
