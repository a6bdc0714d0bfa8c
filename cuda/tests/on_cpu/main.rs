//! Tests of the model's kernels without a GPU: their sources are compiled by g++ with a shim for
//! CUDA and checked against the definitions.

#![allow(unsafe_code)]

mod attention;
mod choosing;
mod few_rows;
mod layers;
mod library;
mod numbers;

use std::ops::Range;
use std::sync::OnceLock;

use library::{Compiled, Kernels, SCHEDULES, Sizes};

/// Sizes of tokens, heads and pages, usual and unusual; a block has threads for 2,048 numbers of a
/// token.
const SIZES: [Sizes; 6] = [
    Sizes { dim: 8, head_dim: 16, kv_heads: 2, group: 1, page_size: 1, segment: 1024 },
    Sizes { dim: 64, head_dim: 64, kv_heads: 1, group: 7, page_size: 16, segment: 1024 },
    Sizes { dim: 2056, head_dim: 128, kv_heads: 2, group: 4, page_size: 64, segment: 1024 },
    Sizes { dim: 1600, head_dim: 128, kv_heads: 1, group: 2, page_size: 4, segment: 1024 },
    Sizes { dim: 64, head_dim: 96, kv_heads: 1, group: 1, page_size: 16, segment: 1024 },
    Sizes { dim: 120, head_dim: 40, kv_heads: 1, group: 3, page_size: 8, segment: 1024 },
];

/// Sizes with Hopper kernels in addition to those above: more boxes in a tile, heads that do not
/// fill a tile of queries, and smaller segments.
const HOPPER_SIZES: Sizes =
    Sizes { dim: 64, head_dim: 128, kv_heads: 1, group: 7, page_size: 16, segment: 256 };

/// Kernels of each of these sizes, which all tests share.
static COMPILED: [OnceLock<Compiled>; SIZES.len()] = [const { OnceLock::new() }; SIZES.len()];
static COMPILED_FOR_HOPPER: OnceLock<Compiled> = OnceLock::new();

/// Runs a check with kernels of some sizes, under every schedule.
fn with_sizes(some: Range<usize>, check: impl Fn(&Kernels<'_>)) {
    for (sizes, compiled) in SIZES.into_iter().zip(&COMPILED).take(some.end).skip(some.start) {
        let compiled = compiled.get_or_init(|| Compiled::new(sizes));
        for schedule in SCHEDULES {
            check(&Kernels { sizes, schedule, compiled });
        }
    }
}

fn with_all_sizes(check: impl Fn(&Kernels<'_>)) {
    with_sizes(0..SIZES.len(), check);
}

/// Runs a check with Hopper's kernels of all sizes.
fn with_hopper_sizes(check: impl Fn(&Kernels<'_>)) {
    with_some_hopper_sizes(&check);
    let first = SIZES.iter().position(Sizes::are_for_hopper).expect("one of them is");
    with_sizes(first..first + 1, check);
}

/// Runs a check that does not depend on sizes, with Hopper's kernels.
fn with_some_hopper_sizes(check: impl Fn(&Kernels<'_>)) {
    let compiled = COMPILED_FOR_HOPPER.get_or_init(|| Compiled::new(HOPPER_SIZES));
    for schedule in SCHEDULES {
        check(&Kernels { sizes: HOPPER_SIZES, schedule, compiled });
    }
}

/// A statement of a kernel, and the text before it.
type Statement = (&'static str, &'static str);

/// Asserts that each statement is needed: without it, the check fails under some schedule.
fn assert_missed(statements: &[Statement], is_right: impl Fn(&Kernels<'_>) -> bool) {
    let compiled = Compiled::with_omissions(HOPPER_SIZES, statements);
    let by = |schedule| Kernels { sizes: HOPPER_SIZES, schedule, compiled: &compiled };
    let is_right_by_all = || SCHEDULES.into_iter().all(|schedule| is_right(&by(schedule)));
    for (number, statement) in (1..).zip(statements) {
        by(SCHEDULES[0]).omit(number);
        assert!(!is_right_by_all(), "without {statement:?} nothing was noticed");
    }
    by(SCHEDULES[0]).omit(0);
    assert!(is_right_by_all(), "with all that is left out otherwise, something is wrong");
}

/// Runs a check that does not depend on sizes.
fn with_some_sizes(check: impl Fn(&Kernels<'_>)) {
    with_sizes(0..1, check);
}
