//! Shared parts of the tests across crates: a [`World`] in which pages have bytes, and [`run`],
//! which executes scripts in it and returns a trace.

pub mod engine;
pub mod l3;
pub mod mooncake;
mod script;
pub mod sim;
mod world;

/// Returns whether sampling tests should take more samples, as `scripts/test --everything`
/// requests.
#[must_use]
pub fn thorough() -> bool {
    std::env::var_os("TERRACE_THOROUGH").is_some()
}

pub use script::run;
pub use world::{Damage, Object, Transfer, World, WrongPage};

/// Examples of the documentation. They are here because published crates do not refer to files
/// outside their folders.
#[cfg(doctest)]
mod documentation {
    #[doc = include_str!("../../docs/feature-store.md")]
    struct FeatureStore;

    #[doc = include_str!("../../docs/library.md")]
    struct Library;

    #[doc = include_str!("../../docs/requests.md")]
    struct Requests;
}
