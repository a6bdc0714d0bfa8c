//! What the tests across crates share: a [`World`] in which pages have bytes, and [`run`], which
//! executes scripts in it and returns a trace of what happened.

pub mod engine;
pub mod l3;
pub mod mooncake;
mod script;
pub mod sim;
mod world;

/// Whether tests that sample should sample more: `scripts/test --everything` asks for it.
#[must_use]
pub fn thorough() -> bool {
    std::env::var_os("TERRACE_THOROUGH").is_some()
}

pub use script::run;
pub use world::{Damage, Object, Transfer, World, WrongPage};

/// The examples of the documentation. They stand here because crates that are published have nothing of outside their folders.
#[cfg(doctest)]
mod documentation {
    #[doc = include_str!("../../docs/feature-store.md")]
    struct FeatureStore;

    #[doc = include_str!("../../docs/library.md")]
    struct Library;

    #[doc = include_str!("../../docs/requests.md")]
    struct Requests;
}
