//! The model's kernels compute what they should, without a GPU: their sources are compiled by g++ with a shim in CUDA's
//! place, and checked against what the definition says.

#![allow(unsafe_code)]

mod attention;
mod choosing;
mod layers;
mod library;
mod numbers;

use library::{Kernels, SCHEDULES, Sizes};

/// Sizes of heads and pages, the usual ones and odd ones.
const SIZES: [Sizes; 6] = [
    Sizes { head_dim: 16, kv_heads: 2, group: 1, page_size: 1 },
    Sizes { head_dim: 64, kv_heads: 1, group: 7, page_size: 16 },
    Sizes { head_dim: 128, kv_heads: 2, group: 4, page_size: 64 },
    Sizes { head_dim: 128, kv_heads: 1, group: 2, page_size: 4 },
    Sizes { head_dim: 96, kv_heads: 1, group: 1, page_size: 16 },
    Sizes { head_dim: 40, kv_heads: 1, group: 3, page_size: 8 },
];

/// Checks something with kernels of all sizes.
fn with_all_sizes(check: impl Fn(&Kernels)) {
    for sizes in SIZES {
        let mut kernels = Kernels::compile(sizes);
        for schedule in SCHEDULES {
            kernels = kernels.scheduled(schedule);
            check(&kernels);
        }
    }
}

/// Checks something for which sizes do not matter.
fn with_some_sizes(check: impl Fn(&Kernels)) {
    let mut kernels = Kernels::compile(SIZES[0]);
    for schedule in SCHEDULES {
        kernels = kernels.scheduled(schedule);
        check(&kernels);
    }
}
