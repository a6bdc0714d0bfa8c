//! Errors as Python exceptions, with their Rust messages.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use terrace_scheduler as rust;

create_exception!(terrace_kv, TerraceError, PyException, "Base class of all errors of Terrace.");
create_exception!(terrace_kv, ConfigError, TerraceError, "Settings that cannot work.");
create_exception!(terrace_kv, SubmitError, TerraceError, "A request that cannot be accepted.");
create_exception!(
    terrace_kv,
    QueueFull,
    SubmitError,
    "The maximum number of requests is reached: submit again later."
);
create_exception!(terrace_kv, UnknownRequest, TerraceError, "An unknown request.");
create_exception!(
    terrace_kv,
    EventError,
    TerraceError,
    "An event that is not possible in this state."
);
create_exception!(
    terrace_kv,
    StepsInFlight,
    TerraceError,
    "Weights cannot be replaced while a step is in flight."
);
create_exception!(
    terrace_kv,
    Broken,
    TerraceError,
    "A bug in Terrace. The object can no longer be used; please report it."
);
create_exception!(
    terrace_kv,
    StoreError,
    TerraceError,
    "Why an object could not be stored, read or removed."
);
create_exception!(
    terrace_kv,
    MissingObject,
    StoreError,
    "The object does not exist, or it was removed."
);
create_exception!(
    terrace_kv,
    DamagedObject,
    StoreError,
    "The object did not verify; it counts as missing from now on."
);
create_exception!(
    terrace_kv,
    StoreFull,
    StoreError,
    "Everything in the store is pinned, leased or in use."
);
create_exception!(
    terrace_kv,
    StoreUnavailable,
    StoreError,
    "The store, or the node that would hold the object, does not answer: try again later."
);
create_exception!(
    terrace_kv,
    FeatureError,
    TerraceError,
    "Why a sample could not be put, read or released."
);
create_exception!(
    terrace_kv,
    Fenced,
    FeatureError,
    "Another process has taken the number of this producer."
);

/// `Gone` in Python: a [`FeatureError`] and a `KeyError`, which lookups of samples may expect.
pub(crate) struct Gone;

impl Gone {
    pub(crate) fn new_err(text: String) -> PyErr {
        Python::attach(|python| match Self::of(python) {
            Ok(gone) => PyErr::from_type(gone.clone(), text),
            Err(error) => error,
        })
    }

    fn of(python: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
        static GONE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let doc = "The sample was released, aborted, superseded, or freed because nobody released it in time.";
        let make = || {
            let key_error = python.get_type::<PyKeyError>();
            let bases = PyTuple::new(python, [python.get_type::<FeatureError>(), key_error])?;
            let attributes = PyDict::new(python);
            attributes.set_item("__module__", "terrace_kv")?;
            attributes.set_item("__doc__", doc)?;
            // A `KeyError` prints its text in quotes, like a key.
            attributes.set_item("__str__", python.get_type::<PyException>().getattr("__str__")?)?;
            let gone = python.get_type::<PyType>().call1(("Gone", bases, attributes))?;
            Ok::<_, PyErr>(gone.cast_into::<PyType>()?.unbind())
        };
        Ok(GONE.get_or_try_init(python, make)?.bind(python))
    }
}
create_exception!(
    terrace_kv,
    Superseded,
    FeatureError,
    "A later put of the same sample won, or it was aborted while it was put."
);
create_exception!(terrace_kv, OverBudget, FeatureError, "Too many samples are not consumed yet.");
create_exception!(
    terrace_kv,
    Damaged,
    FeatureError,
    "A tensor of the sample is truncated or damaged."
);
create_exception!(
    terrace_kv,
    Forged,
    FeatureError,
    "A ref, a tensor or a record was not created with the secret."
);
create_exception!(
    terrace_kv,
    TraceError,
    TerraceError,
    "A trace that cannot be read or generated."
);

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
    module.add("StoreError", python.get_type::<StoreError>())?;
    module.add("MissingObject", python.get_type::<MissingObject>())?;
    module.add("DamagedObject", python.get_type::<DamagedObject>())?;
    module.add("StoreFull", python.get_type::<StoreFull>())?;
    module.add("StoreUnavailable", python.get_type::<StoreUnavailable>())?;
    module.add("FeatureError", python.get_type::<FeatureError>())?;
    module.add("Fenced", python.get_type::<Fenced>())?;
    module.add("Gone", Gone::of(python)?)?;
    module.add("Superseded", python.get_type::<Superseded>())?;
    module.add("OverBudget", python.get_type::<OverBudget>())?;
    module.add("Damaged", python.get_type::<Damaged>())?;
    module.add("Forged", python.get_type::<Forged>())?;
    module.add("TraceError", python.get_type::<TraceError>())
}

/// Rust errors with distinct Python exceptions.
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

/// Creates the exception for an invalid argument.
pub(crate) fn bad_argument(message: impl Display) -> PyErr {
    PyValueError::new_err(message.to_string())
}

/// Runs code that may panic. If it does, the object that it worked on is broken.
pub(crate) fn unless_it_panics<R>(work: impl FnOnce() -> R) -> Result<R, PyErr> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        broken(text.unwrap_or("without words"))
    })
}

pub(crate) fn broken(why: &str) -> PyErr {
    Broken::new_err(format!("a bug in Terrace ({why}): please report it"))
}
