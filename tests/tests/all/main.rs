//! The tests across crates, as one program: linking many would take longer than most of them run.
//!
//! Some need an environment that only a script provides, and are ignored otherwise; a part of their
//! name states which: `mooncake::` is for `scripts/test-mooncake`, `buckets::s3::` for
//! `scripts/test-buckets`.

mod buckets;
mod cost;
mod determinism;
mod engine;
mod engine_requests;
mod fail_the_nth;
mod field_failures;
mod l3_conformance;
mod l3_crash;
mod l3_faults;
mod l3_features;
mod l3_features_away;
mod l3_features_cycles;
mod l3_features_model;
mod l3_kill;
mod l3_model;
mod l3_node_limits;
mod l3_node_wire;
mod l3_nodes;
mod l3_nodes_bad_disk;
mod l3_nodes_list;
mod l3_pins;
mod l3_trouble;
mod mooncake;
mod purity;
mod sameness;
mod scenarios;
mod simulation;
