//! Errors as Python's exceptions, with the messages that they have in Rust.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use terrace_scheduler as rust;

create_exception!(terrace_kv, TerraceError, PyException, "Whatever Terrace refuses to do.");
create_exception!(terrace_kv, ConfigError, TerraceError, "Settings that cannot work.");
create_exception!(terrace_kv, SubmitError, TerraceError, "A request that cannot be taken.");
create_exception!(
    terrace_kv,
    QueueFull,
    SubmitError,
    "Too many requests are alive: submit again later."
);
create_exception!(terrace_kv, UnknownRequest, TerraceError, "A request that is not there.");
create_exception!(terrace_kv, EventError, TerraceError, "Something that cannot have happened.");
create_exception!(
    terrace_kv,
    StepsInFlight,
    TerraceError,
    "Weights cannot be replaced under a step."
);
create_exception!(
    terrace_kv,
    Broken,
    TerraceError,
    "Terrace has broken one of its own rules. The object is of no use any more; please report it."
);
create_exception!(terrace_kv, TraceError, TerraceError, "A trace that cannot be read or made up.");

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let python = module.py();
    module.add("TerraceError", python.get_type::<TerraceError>())?;
    module.add("ConfigError", python.get_type::<ConfigError>())?;
    module.add("SubmitError", python.get_type::<SubmitError>())?;
    module.add("QueueFull", python.get_type::<QueueFull>())?;
    module.add("UnknownRequest", python.get_type::<UnknownRequest>())?;
    module.add("EventError", python.get_type::<EventError>())?;
    module.add("StepsInFlight", python.get_type::<StepsInFlight>())?;
    module.add("Broken", python.get_type::<Broken>())?;
    module.add("TraceError", python.get_type::<TraceError>())
}

/// Of the errors of Rust, those of which Python tells kinds apart.
pub(crate) trait IntoPython {
    fn into_python(self) -> PyErr;
}

impl IntoPython for rust::ConfigError {
    fn into_python(self) -> PyErr {
        ConfigError::new_err(self.to_string())
    }
}

impl IntoPython for rust::SubmitError {
    fn into_python(self) -> PyErr {
        match self {
            Self::QueueFull { .. } => QueueFull::new_err(self.to_string()),
            _ => SubmitError::new_err(self.to_string()),
        }
    }
}

impl IntoPython for rust::UnknownRequest {
    fn into_python(self) -> PyErr {
        UnknownRequest::new_err(self.to_string())
    }
}

impl IntoPython for rust::EventError {
    fn into_python(self) -> PyErr {
        EventError::new_err(self.to_string())
    }
}

impl IntoPython for rust::StepsInFlight {
    fn into_python(self) -> PyErr {
        StepsInFlight::new_err(self.to_string())
    }
}

/// An argument that cannot be meant.
pub(crate) fn bad_argument(message: impl Display) -> PyErr {
    PyValueError::new_err(message.to_string())
}

/// Does something that might panic. If it does, what it worked on is broken.
pub(crate) fn unless_it_panics<R>(work: impl FnOnce() -> R) -> Result<R, PyErr> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        broken(text.unwrap_or("without words"))
    })
}

pub(crate) fn broken(why: &str) -> PyErr {
    Broken::new_err(format!("Terrace has broken one of its own rules ({why}): please report it"))
}
