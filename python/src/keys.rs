//! Names of objects.

use numpy::{PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use terrace_cache::{Namespace, PageKey, Sequence, Token};

use crate::errors::bad_argument;
use crate::store::bad_setting;

/// Returns the digest of a namespace, whose fields are JSON.
#[pyfunction]
pub(crate) fn namespace_digest<'py>(
    python: Python<'py>,
    fields: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    let namespace: Namespace = serde_json::from_str(fields).map_err(bad_setting)?;
    Ok(PyBytes::new(python, &namespace.digest().0.to_le_bytes()))
}

/// Returns the concatenated keys of the whole pages of a prompt.
#[pyfunction]
pub(crate) fn page_keys<'py>(
    python: Python<'py>,
    namespace: [u8; 16],
    tokens: PyReadonlyArray1<'py, Token>,
    page_size: u32,
) -> PyResult<Bound<'py, PyBytes>> {
    if !page_size.is_power_of_two() || page_size > 256 {
        return Err(bad_argument("page_size must be a power of two up to 256"));
    }
    let (root, prompt) =
        (PageKey(u128::from_le_bytes(namespace)), tokens.as_slice().map_err(bad_argument)?);
    let hash = || Sequence::new(root, page_size, prompt.to_vec());
    let sequence = if tokens.len() < 4096 { hash() } else { python.detach(hash) };
    let pages = tokens.len() / page_size as usize;
    PyBytes::new_with(python, 16 * pages, |bytes| {
        for (place, page) in bytes.chunks_exact_mut(16).zip(0..pages) {
            let key = sequence.keys().get(page).expect("it is a whole page");
            place.copy_from_slice(&key.0.to_le_bytes());
        }
        Ok(())
    })
}
