//! The native part of the Python module `terrace_kv`. Users call it through the classes in
//! `python/terrace_kv`, which document everything.
//!
//! A step needs one call into native code, however many rows it has: inputs and outputs are flat arrays.

mod calls;
mod errors;
mod features;
mod keys;
mod memory;
mod plan_bytes;
mod prefix_cache;
mod replay;
mod scheduler;
mod store;
mod transfers;

use pyo3::prelude::*;

/// Defines the native module of `terrace_kv`.
///
/// The module needs no GIL: objects that change are behind locks of their own, and `NativeLookups`, which has none, behind
/// the lock of its Python object. While such a lock is held, no Python code runs and no thread is detached from the interpreter,
/// so that a garbage collection that stops all threads never waits for a thread that waits for a lock.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("PLAN_HEAD_BYTES", plan_bytes::HEAD_BYTES)?;
    module.add("TRANSFER_BUCKETS", transfers::BUCKETS)?;
    module.add_class::<scheduler::NativeScheduler>()?;
    module.add_class::<store::NativeStore>()?;
    module.add_class::<memory::Memory>()?;
    module.add_class::<features::NativeFeatures>()?;
    module.add_function(wrap_pyfunction!(features::promise_feature, module)?)?;
    module.add_class::<transfers::NativeTransfers>()?;
    module.add_class::<transfers::NativeLookups>()?;
    module.add_function(wrap_pyfunction!(keys::namespace_digest, module)?)?;
    module.add_function(wrap_pyfunction!(keys::page_keys, module)?)?;
    module.add_class::<replay::NativeTrace>()?;
    module.add_function(wrap_pyfunction!(replay::fit_costs, module)?)?;
    module.add_function(wrap_pyfunction!(replay::replay, module)?)?;
    module.add_function(wrap_pyfunction!(replay::sweep, module)?)?;
    prefix_cache::add_to(module)?;
    errors::add_to(module)
}
