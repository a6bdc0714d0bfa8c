//! What tests of stores share: objects whose bytes follow from their names, a suite that every backend
//! passes, stores that fail or wait on command, and a disk that crashes.

pub mod faulty;
pub mod features;
pub mod frames;
pub mod gated;
pub mod mischief;
pub mod nodes;
pub mod simulated_disk;
pub mod watched_bucket;

pub use terrace_l3_conformance as conformance;
pub use terrace_l3_conformance::objects;
