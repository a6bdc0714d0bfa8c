//! The native part of the Python module `terrace_kv`. Python sees it through the classes of
//! `python/terrace_kv`, which say what everything means.
//!
//! A call crosses once for a step, however many rows it has: what goes in and out is flat memory.

mod errors;
mod plan_bytes;
mod prefix_cache;
mod scheduler;

use pyo3::prelude::*;

/// What `terrace_kv` is made of.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("PLAN_HEAD_BYTES", plan_bytes::HEAD_BYTES)?;
    module.add_class::<scheduler::NativeScheduler>()?;
    prefix_cache::add_to(module)?;
    errors::add_to(module)
}
