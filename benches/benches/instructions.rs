//! How many instructions the hot paths take, counted by Callgrind. `scripts/instructions` compares the
//! counts with `instructions.toml`.

#![expect(missing_docs, reason = "the macros make public items")]

use gungraun::prelude::*;
use terrace_bench::hot_paths::{
    Admission, DecodeStepAtFirstPageEnd, DecodeStepAtPageEnd, DecodeStepInPage, EvictInsert,
    Exists, Hash, HotPath, Insert, Lookup, Stats,
};

// The path comes back, so that dropping it is not counted.
#[library_benchmark]
#[bench::cache_hash(Hash::prepare())]
#[bench::cache_lookup(Lookup::prepare())]
#[bench::cache_insert(Insert::prepare())]
#[bench::cache_evict_insert(EvictInsert::prepare())]
#[bench::scheduler_decode_step(DecodeStepInPage::prepare())]
#[bench::scheduler_decode_step_at_first_page_end(DecodeStepAtFirstPageEnd::prepare())]
#[bench::scheduler_decode_step_at_page_end(DecodeStepAtPageEnd::prepare())]
#[bench::scheduler_admission(Admission::prepare())]
#[bench::scheduler_stats(Stats::prepare())]
#[bench::l3_exists(Exists::prepare())]
fn path<P: HotPath>(mut path: P) -> P {
    path.run();
    path
}

library_benchmark_group!(name = hot, benchmarks = path);

mod counting {
    use gungraun::prelude::*;
    use gungraun::{Callgrind, main};

    use super::hot;

    main!(
        // Caches are not simulated: what they would say depends on addresses, and nobody compares it.
        config = LibraryBenchmarkConfig::default().tool(Callgrind::with_args(["--cache-sim=no"])),
        library_benchmark_groups = hot
    );

    pub(super) fn start() {
        main();
    }
}

fn main() {
    // `cargo test --all-targets` starts benchmarks as well, and nothing that counts may be installed.
    if std::env::args().any(|argument| argument == "--bench" || argument == "--gungraun-run") {
        counting::start();
    }
}
