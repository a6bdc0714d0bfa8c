//! How long the hot paths take. Figures of one run can be compared with each other, and with those of
//! the run before if the machine has nothing else to do.

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, Criterion, SamplingMode};
use terrace_bench::hot_paths::{
    Admission, DecodeStepAtFirstPageEnd, DecodeStepAtPageEnd, DecodeStepInPage, EvictInsert,
    Exists, Hash, HotPath, Insert, Lookup, Stats,
};

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
        .configure_from_args();
    let mut group = criterion.benchmark_group("hot");
    // Preparing takes longer than most paths, so all samples are of the same, small size.
    group.sampling_mode(SamplingMode::Flat);
    measure::<Hash>(&mut group, "cache_hash");
    measure::<Lookup>(&mut group, "cache_lookup");
    measure::<Insert>(&mut group, "cache_insert");
    measure::<EvictInsert>(&mut group, "cache_evict_insert");
    measure::<DecodeStepInPage>(&mut group, "scheduler_decode_step");
    let first_page_end = "scheduler_decode_step_at_first_page_end";
    measure::<DecodeStepAtFirstPageEnd>(&mut group, first_page_end);
    measure::<DecodeStepAtPageEnd>(&mut group, "scheduler_decode_step_at_page_end");
    measure::<Admission>(&mut group, "scheduler_admission");
    measure::<Stats>(&mut group, "scheduler_stats");
    measure::<Exists>(&mut group, "l3_exists");
    group.finish();
    criterion.final_summary();
}

fn measure<P: HotPath>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str) {
    group.bench_function(name, |bencher| {
        bencher.iter_batched_ref(P::prepare, P::run, BatchSize::PerIteration);
    });
}
