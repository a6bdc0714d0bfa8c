//! The feature store, one sample per call.

use numpy::PyArray1;
use pyo3::prelude::*;
use serde::Serialize;
use terrace_l3::{Arena, Registration, Target};
use terrace_l3_features::{
    FeatureConfig, FeatureError, FeatureRef, FeatureStore, Secret, Tensor, TensorSpec,
};

use crate::calls::{Process, call};
use crate::errors::{IntoPython, bad_argument, unless_it_panics};
use crate::memory;
use crate::store::{NativeStore, bad_setting, nothing};

/// Native part of `terrace_kv.FeatureStore`.
#[pyclass(frozen, name = "FeatureStore", module = "terrace_kv._native")]
pub(crate) struct NativeFeatures {
    features: FeatureStore,
    process: Process,
}

impl NativeFeatures {
    fn ready(&self) -> PyResult<FeatureStore> {
        self.process.check("feature store")?;
        Ok(self.features.clone())
    }

    /// Lends these arrays to the store for a call.
    fn lend(&self, python: Python<'_>, arrays: &[Bound<'_, PyArray1<u8>>]) -> PyResult<Lent> {
        let arenas: PyResult<Vec<Arena>> =
            arrays.iter().map(|array| memory::arena(array, 1)).collect();
        let arenas = arenas?;
        let register = || arenas.iter().map(|arena| self.features.register(arena)).collect();
        let registered: Result<Vec<Registration>, _> =
            python.detach(|| unless_it_panics(register))?;
        Ok(Lent { _registered: registered.map_err(IntoPython::into_python)?, arenas })
    }
}

/// Arrays that a call may use while it runs.
struct Lent {
    arenas: Vec<Arena>,
    _registered: Vec<Registration>,
}

impl Lent {
    /// Returns the arrays as tensors with these specs.
    fn tensors(&self, specs: Vec<TensorSpec>) -> Vec<Tensor> {
        let tensor = |(spec, arena): (TensorSpec, &Arena)| {
            Tensor::new(spec, arena.source(0).expect("the arena is not shared yet"))
        };
        specs.into_iter().zip(&self.arenas).map(tensor).collect()
    }
}

#[pymethods]
impl NativeFeatures {
    /// Opens a feature store in `store`; `settings` is JSON.
    #[staticmethod]
    fn open(
        python: Python<'_>,
        store: &NativeStore,
        settings: &str,
        secret: Option<&[u8]>,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let mut config: FeatureConfig = serde_json::from_str(settings).map_err(bad_setting)?;
        config.secret = secret.map(Secret::new);
        let open = FeatureStore::open(store.ready()?, config);
        let tell = |python: Python<'_>, opened: Result<FeatureStore, FeatureError>| {
            let features = opened.map_err(IntoPython::into_python)?;
            let native = Self { features, process: Process::this() };
            Ok(native.into_pyobject(python)?.into_any().unbind())
        };
        call(python, open, tell, then)
    }

    /// Puts a sample of these tensors; returns its ref as JSON.
    fn put(
        &self,
        python: Python<'_>,
        sample: String,
        specs: &str,
        arrays: Vec<Bound<'_, PyArray1<u8>>>,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let features = self.ready()?;
        let specs: Vec<TensorSpec> = serde_json::from_str(specs).map_err(bad_argument)?;
        let lent = self.lend(python, &arrays)?;
        let tensors = lent.tensors(specs);
        let put = async move {
            let reference = features.put(&sample, tensors).await;
            drop(lent);
            reference
        };
        call(python, put, json, then)
    }

    /// Puts the sample of a promised ref; `specs` are its tensors in the order of the arrays.
    fn keep(
        &self,
        python: Python<'_>,
        promise: &str,
        specs: &str,
        arrays: Vec<Bound<'_, PyArray1<u8>>>,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (features, promise) = (self.ready()?, reference_of(promise)?);
        let specs: Vec<TensorSpec> = serde_json::from_str(specs).map_err(bad_argument)?;
        let lent = self.lend(python, &arrays)?;
        let tensors = lent.tensors(specs);
        let keep = async move {
            let kept = features.keep(&promise, tensors).await;
            drop(lent);
            kept
        };
        call(python, keep, nothing, then)
    }

    /// Reads a sample into these arrays, one per tensor.
    fn get_into(
        &self,
        python: Python<'_>,
        reference: &str,
        arrays: Vec<Bound<'_, PyArray1<u8>>>,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (features, reference) = (self.ready()?, reference_of(reference)?);
        let lent = self.lend(python, &arrays)?;
        let target = |arena: &Arena| arena.target(0).expect("the arena is not shared yet");
        let targets: Vec<Target> = lent.arenas.iter().map(target).collect();
        let get = async move {
            let read = features.get_into(&reference, targets).await;
            drop(lent);
            read
        };
        call(python, get, nothing, then)
    }

    /// Releases a sample; returns the result.
    fn release(
        &self,
        python: Python<'_>,
        reference: &str,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let (features, reference) = (self.ready()?, reference_of(reference)?);
        call(python, async move { features.release(reference).await }, json, then)
    }

    /// Aborts a sample; returns the number of its generations.
    fn abort(
        &self,
        python: Python<'_>,
        sample: String,
        then: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let features = self.ready()?;
        call(python, async move { features.abort(&sample).await }, json, then)
    }

    /// Frees what is due; returns the amounts.
    fn gc(&self, python: Python<'_>, then: Option<Py<PyAny>>) -> PyResult<Py<PyAny>> {
        let features = self.ready()?;
        call(python, async move { features.gc().await }, json, then)
    }

    /// Waits until all samples of this producer are consumed or expired.
    fn consumed(&self, python: Python<'_>, then: Option<Py<PyAny>>) -> PyResult<Py<PyAny>> {
        let features = self.ready()?;
        let consumed = async move {
            features.consumed().await;
            Ok::<(), FeatureError>(())
        };
        call(python, consumed, nothing, then)
    }

    /// Ends the work as a producer.
    fn close(&self, python: Python<'_>, then: Option<Py<PyAny>>) -> PyResult<Py<PyAny>> {
        let features = self.ready()?;
        call(python, async move { features.close().await }, nothing, then)
    }

    /// Returns the number of this producer.
    fn owner(&self) -> PyResult<Option<u16>> {
        Ok(self.ready()?.owner())
    }

    /// Returns counters and gauges, as JSON.
    fn stats(&self) -> PyResult<String> {
        serde_json::to_string(&self.ready()?.stats()).map_err(bad_argument)
    }
}

/// Returns the ref of a sample that producer `owner` will put, as JSON.
#[pyfunction]
pub(crate) fn promise_feature(
    store: &str,
    owner: u16,
    sample: &str,
    specs: &str,
    retain: bool,
    secret: Option<&[u8]>,
) -> PyResult<String> {
    let specs: Vec<TensorSpec> = serde_json::from_str(specs).map_err(bad_argument)?;
    let secret = secret.map(Secret::new);
    let promise = FeatureRef::promise(store, owner, sample, specs, retain, secret.as_ref());
    serde_json::to_string(&promise.map_err(IntoPython::into_python)?).map_err(bad_argument)
}

fn reference_of(text: &str) -> PyResult<FeatureRef> {
    serde_json::from_str(text)
        .map_err(|error| bad_argument(format_args!("this is not a ref: {error}")))
}

/// Converts a result to JSON.
fn json<T: Serialize>(python: Python<'_>, done: Result<T, FeatureError>) -> PyResult<Py<PyAny>> {
    let text =
        serde_json::to_string(&done.map_err(IntoPython::into_python)?).map_err(bad_argument)?;
    Ok(text.into_pyobject(python)?.into_any().unbind())
}

impl IntoPython for FeatureError {
    fn into_python(self) -> PyErr {
        use crate::errors::{
            Damaged, FeatureError as Other, Fenced, Forged, Gone, OverBudget, Superseded,
        };
        let text = self.to_string();
        match self {
            Self::Config(_) => bad_setting(text),
            Self::Fenced { .. } => Fenced::new_err(text),
            Self::Gone { .. } => Gone::new_err(text),
            Self::Superseded { .. } | Self::Aborted { .. } => Superseded::new_err(text),
            Self::OverBudget { .. } | Self::TooLarge { .. } | Self::StoreFull { .. } => {
                OverBudget::new_err(text)
            }
            Self::Damaged { .. } => Damaged::new_err(text),
            Self::Forged { .. } | Self::ForgedObject { .. } => Forged::new_err(text),
            Self::Store { error, .. } if error.may_have_happened() => {
                crate::errors::StoreUnavailable::new_err(text)
            }
            _ => Other::new_err(text),
        }
    }
}
