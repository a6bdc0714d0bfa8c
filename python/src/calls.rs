//! Long-running calls. They run on threads of this module without the GIL; the caller waits or
//! passes a callback.

use std::future::Future;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::prelude::*;
use terrace_l3::backend::cores;
use tokio::runtime::Runtime;

use crate::errors::{TerraceError, broken};

/// Longest delay of Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

/// Runtime of the calls, and the process that it belongs to: a fork has none of its threads.
static RUNTIME: Mutex<Option<(u32, &'static Runtime)>> = Mutex::new(None);

/// Returns the runtime of this process.
pub(crate) fn runtime() -> PyResult<&'static Runtime> {
    let (process, mut kept) = (std::process::id(), RUNTIME.lock());
    if let Some((its_process, runtime)) = *kept
        && its_process == process
    {
        return Ok(runtime);
    }
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    // One or two threads cannot use the memory bandwidth of a large machine, and more than there
    // are cores would compete.
    let threads = cores().clamp(2, 4);
    let made = builder.worker_threads(threads).thread_name("terrace").enable_all().build()?;
    // A runtime inherited by a fork is leaked: its threads do not exist and cannot be joined.
    let made: &'static Runtime = Box::leak(Box::new(made));
    *kept = Some((process, made));
    Ok(made)
}

/// The process that created an object with threads or connections.
pub(crate) struct Process(u32);

impl Process {
    pub(crate) fn this() -> Self {
        Self(std::process::id())
    }

    /// Raises after a fork.
    pub(crate) fn check(&self, what: &str) -> PyResult<()> {
        if self.0 == std::process::id() {
            return Ok(());
        }
        Err(TerraceError::new_err(format!(
            "this {what} was opened before a fork, and its threads do not exist in this process: \
             open a new one here"
        )))
    }
}

/// Runs a call. Passes the value or exception to `then` if it is given; otherwise waits here.
pub(crate) fn call<T: Send + 'static>(
    python: Python<'_>,
    work: impl Future<Output = T> + Send + 'static,
    tell: impl FnOnce(Python<'_>, T) -> PyResult<Py<PyAny>> + Send + 'static,
    then: Option<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    let runtime = runtime()?;
    let work = runtime.spawn(work);
    if let Some(then) = then {
        runtime.spawn(async move {
            let done = work.await;
            // Fails when the interpreter is shutting down.
            Python::try_attach(|python| {
                let result = done.map_err(|error| broken(&error.to_string()));
                let result = result.and_then(|done| tell(python, done));
                let (value, error) = match result {
                    Ok(value) => (value, python.None()),
                    Err(error) => (python.None(), error.into_value(python).into_any()),
                };
                if let Err(error) = then.call1(python, (value, error)) {
                    error.write_unraisable(python, None);
                }
            });
        });
        return Ok(python.None());
    }
    let (sender, mut receiver) = sync_channel(1);
    runtime.spawn(async move { sender.send(work.await) });
    loop {
        let receiver = &mut receiver;
        match python.detach(move || receiver.recv_timeout(SIGNALS)) {
            Ok(done) => return tell(python, done.map_err(|error| broken(&error.to_string()))?),
            Err(RecvTimeoutError::Timeout) => python.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Err(broken("a call has panicked")),
        }
    }
}
