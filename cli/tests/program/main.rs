//! The `terrace` program, used as people use it.
//!
//! Some of it needs what only a script provides, and is ignored otherwise: `nodes::` is for
//! `scripts/test-nodes`, what has `mooncake` in its name for `scripts/test-mooncake`.

// What another crate publishes is private here, and not all of it is used.
#[allow(unreachable_pub, dead_code)]
#[path = "../../../tests/src/mooncake.rs"]
mod cluster;
mod features;
mod nodes;
#[allow(unreachable_pub, dead_code)]
#[path = "../../../l3/conformance/src/objects.rs"]
mod objects;
mod process;
mod replay;
mod routing;
mod serve;
