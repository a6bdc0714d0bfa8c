//! Wall-clock times of the hot paths. Figures are comparable within one run, and with an earlier
//! run on an idle machine.

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BatchSize, BenchmarkGroup, Criterion, SamplingMode};
use terrace_bench::hot_paths::{HotPath, Visitor, visit_all};

fn main() {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
        .configure_from_args();
    let mut group = criterion.benchmark_group("hot");
    // Preparation takes longer than most paths, so all samples have the same, small size.
    group.sampling_mode(SamplingMode::Flat);
    visit_all(&mut Measure(&mut group));
    group.finish();
    criterion.final_summary();
}

struct Measure<'a, 'b>(&'a mut BenchmarkGroup<'b, WallTime>);

impl Visitor for Measure<'_, '_> {
    fn visit<P: HotPath>(&mut self, name: &str) {
        self.0.bench_function(name, |bencher| {
            bencher.iter_batched_ref(P::prepare, P::run, BatchSize::PerIteration);
        });
    }
}
