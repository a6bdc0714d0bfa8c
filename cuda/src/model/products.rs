//! Matrix products by cuBLASLt, the same to the bit whatever the number of rows.
//!
//! Algorithms that do not split the sum over inputs agree with each other, so the fastest of them
//! can be used for each number of rows. This is verified: see [`Products::settle`].

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};

use super::choices::Choices;
use crate::driver::{CallError, CallErrorKind, DeviceAddress, Driver, Stream};
use crate::error::CudaError;
use crate::memory::Allocation;

/// Workspace of cuBLASLt.
const WORKSPACE_BYTES: usize = 64 << 20;
/// Number of algorithms that are timed for a size.
const TRIED: usize = 8;

/// Computes products.
#[derive(Debug)]
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    preference: sys::cublasLtMatmulPreference_t,
    workspace: Allocation,
    plans: HashMap<Size, Plan>,
    choices: Choices,
}

// SAFETY: any thread may use handles of cuBLASLt, and only one owns this at a time.
unsafe impl Send for Products {}

/// The size of a product of rows and a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// True if outputs are f32, and not bf16.
    pub(super) is_wide: bool,
}

/// The algorithm of a size.
#[derive(Debug)]
struct Plan {
    layouts: Layouts,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Memory layouts of the operands of a size.
#[derive(Debug)]
struct Layouts {
    weights: sys::cublasLtMatrixLayout_t,
    rows: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

/// Addresses of the operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    /// `[output][input]`.
    pub(super) weights: DeviceAddress,
    /// `[row][input]`.
    pub(super) rows: DeviceAddress,
    /// `[row][output]`.
    pub(super) out: DeviceAddress,
}

fn failed(call: &'static str) -> impl Fn(result::CublasError) -> CallError {
    move |error| CallError { call, kind: CallErrorKind::Other, text: error.to_string() }
}

/// Returns the version of cuBLASLt: 130,100 is 13.1.0.
///
/// # Errors
/// Fails if the library is missing.
pub(super) fn version() -> Result<usize, CudaError> {
    // SAFETY: loading the library runs no code of it but its own initialisation.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoCublas);
    }
    // SAFETY: it may be called at any time.
    Ok(unsafe { sys::cublasLtGetVersion() })
}

impl Products {
    /// Creates products with the stored algorithms, if there are any.
    pub(super) fn new(driver: &Arc<dyn Driver>, choices: Choices) -> Result<Self, CudaError> {
        version()?;
        let workspace = Allocation::new(driver, WORKSPACE_BYTES)?;
        let handle = result::create_handle().map_err(failed("cublasLtCreate"))?;
        let f32_sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let product = result::create_matmul_desc(f32_sums, sys::cudaDataType::CUDA_R_32F);
        let product = product.map_err(failed("cublasLtMatmulDescCreate"))?;
        let preference = result::create_matmul_pref();
        let preference = preference.map_err(failed("cublasLtMatmulPreferenceCreate"))?;
        let products =
            Self { handle, product, preference, workspace, plans: HashMap::new(), choices };
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA as TURNED;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let (turned, workspace_bytes, no_splitting) = (1_i32, WORKSPACE_BYTES, 0_u32);
        // SAFETY: the descriptions exist, and the values are of the types that the attributes have.
        unsafe {
            result::set_matmul_desc_attribute(product, TURNED, (&raw const turned).cast(), 4)
                .map_err(failed("cublasLtMatmulDescSetAttribute"))?;
            for (attribute, value, bytes) in [
                (
                    Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    (&raw const workspace_bytes).cast::<c_void>(),
                    8,
                ),
                (
                    Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                    (&raw const no_splitting).cast(),
                    4,
                ),
            ] {
                result::set_matmul_pref_attribute(preference, attribute, value, bytes)
                    .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))?;
            }
        }
        Ok(products)
    }

    /// Submits a product to a stream.
    ///
    /// # Safety
    /// The operands must be device memory of the size's lengths until the product is done.
    pub(super) unsafe fn multiply(
        &mut self,
        stream: Stream,
        size: Size,
        operands: Operands,
    ) -> Result<(), CallError> {
        if !self.plans.contains_key(&size) {
            let plan = self.plan(size, 0)?;
            self.plans.insert(size, plan);
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.run(stream, &self.plans[&size], operands) }
    }

    /// Selects the fastest algorithm for each of some numbers of rows of one matrix, unless one is
    /// stored, and ensures that all of them give a row the same bits. Overwrites the output.
    ///
    /// # Safety
    /// Same as for [`Products::multiply`] with the largest of the sizes. No other work may use the
    /// stream.
    pub(super) unsafe fn settle(
        &mut self,
        driver: &dyn Driver,
        stream: Stream,
        sizes: &[Size],
        operands: Operands,
    ) -> Result<(), CudaError> {
        // SAFETY: guaranteed by the caller.
        unsafe {
            for size in sizes {
                let plan = match self.chosen_before(*size) {
                    Some(plan) => plan,
                    None => {
                        let plan = self.fastest(driver, stream, *size, operands)?;
                        self.choices.set(*size, plan.algorithm.data);
                        plan
                    }
                };
                self.plans.insert(*size, plan);
            }
            if self.agree(driver, stream, sizes, operands)? {
                return Ok(());
            }
            // They disagree: use one algorithm for all of them.
            let one = self.plans[&sizes[sizes.len() / 2]].algorithm;
            for size in sizes {
                let mut plan = self.plan(*size, 0)?;
                plan.algorithm = one;
                self.plans.insert(*size, plan);
            }
            if !self.agree(driver, stream, sizes, operands).unwrap_or(false) {
                for size in sizes {
                    let plan = self.plan(*size, 0)?;
                    self.plans.insert(*size, plan);
                }
            }
        }
        let Size { outputs, inputs, .. } = sizes[0];
        tracing::warn!(
            "products of {inputs} by {outputs} are not bit-identical for different batches: the \
             last bits of results may depend on the batch"
        );
        Ok(())
    }

    /// Stores the selected algorithms for the next start.
    pub(super) fn save_choices(&mut self) {
        self.choices.save();
    }

    /// Returns the plan with the stored algorithm of a size, if the library accepts it.
    fn chosen_before(&self, size: Size) -> Option<Plan> {
        let algorithm = sys::cublasLtMatmulAlgo_t { data: self.choices.get(size)? };
        let layouts = Layouts::new(size).ok()?;
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: all descriptions exist, and the result is written if the call succeeds.
        let checked = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                self.handle,
                self.product,
                layouts.weights,
                layouts.rows,
                layouts.out,
                layouts.out,
                &raw const algorithm,
                found.as_mut_ptr(),
            )
        };
        // SAFETY: it was zeroed, which is a valid result.
        let workspace_bytes = unsafe { found.assume_init_ref() }.workspaceSize;
        if checked.result().is_err() || workspace_bytes > WORKSPACE_BYTES {
            tracing::warn!(
                "cuBLASLt does not accept the algorithm kept for {size:?}: it is chosen again"
            );
            return None;
        }
        Some(Plan { layouts, algorithm })
    }

    /// Returns whether rows have the same bits for all numbers of rows.
    unsafe fn agree(
        &mut self,
        driver: &dyn Driver,
        stream: Stream,
        sizes: &[Size],
        operands: Operands,
    ) -> Result<bool, CudaError> {
        const ROWS_COMPARED: usize = 8;
        let mut reference: Option<Vec<u8>> = None;
        for size in sizes.iter().rev() {
            let row_bytes = size.outputs * if size.is_wide { 4 } else { 2 };
            let mut rows = vec![0_u8; size.rows.min(ROWS_COMPARED) * row_bytes];
            // SAFETY: guaranteed by the caller; the rows exist.
            unsafe {
                self.multiply(stream, *size, operands)?;
                driver.drain(stream)?;
                let copied = cudarc::driver::result::memcpy_dtoh_sync(&mut rows, operands.out.0);
                crate::context::call("cuMemcpyDtoH", copied)?;
            }
            match &reference {
                None => reference = Some(rows),
                Some(reference) if !reference.starts_with(&rows) => return Ok(false),
                Some(_) => {}
            }
        }
        Ok(true)
    }

    /// Returns the fastest algorithm for a size.
    unsafe fn fastest(
        &self,
        driver: &dyn Driver,
        stream: Stream,
        size: Size,
        operands: Operands,
    ) -> Result<Plan, CudaError> {
        use crate::driver::EventKind::Time;
        let (from, to) = (driver.create_event(Time)?, driver.create_event(Time)?);
        let mut best: Option<(std::time::Duration, Plan)> = None;
        for place in 0..TRIED {
            let Ok(plan) = self.plan(size, place) else { break };
            // SAFETY: guaranteed by the caller.
            let run = || unsafe { self.run(stream, &plan, operands) };
            // Warm-up: the first run loads code.
            if run().is_err() {
                continue;
            }
            driver.record(from, stream)?;
            for _ in 0..3 {
                run()?;
            }
            driver.record(to, stream)?;
            driver.drain(stream)?;
            let took = driver.elapsed(from, to)?;
            if best.as_ref().is_none_or(|(fastest, _)| took < *fastest) {
                best = Some((took, plan));
            }
        }
        driver.destroy_event(from);
        driver.destroy_event(to);
        match best {
            Some((_, plan)) => Ok(plan),
            None => Ok(self.plan(size, 0)?),
        }
    }

    unsafe fn run(&self, stream: Stream, plan: &Plan, operands: Operands) -> Result<(), CallError> {
        let (one, nothing) = (1.0_f32, 0.0_f32);
        let at = |address: DeviceAddress| address.0 as usize as *mut c_void;
        // SAFETY: guaranteed by the caller of `multiply`; handles and layouts exist as long as
        // `self`.
        let done = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                self.product,
                (&raw const one).cast(),
                at(operands.weights),
                plan.layouts.weights,
                at(operands.rows),
                plan.layouts.rows,
                (&raw const nothing).cast(),
                at(operands.out),
                plan.layouts.out,
                at(operands.out),
                plan.layouts.out,
                &raw const plan.algorithm,
                at(self.workspace.at()),
                WORKSPACE_BYTES,
                stream.raw().cast(),
            )
        };
        done.result().map_err(failed("cublasLtMatmul"))
    }

    /// Returns the algorithm at a rank in cuBLASLt's heuristic order, among those that do not split
    /// sums.
    fn plan(&self, size: Size, place: usize) -> Result<Plan, CallError> {
        let layouts = Layouts::new(size)?;
        let mut found =
            [const { MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit() }; TRIED];
        let mut count = 0;
        // SAFETY: all descriptions exist, and there is room for as many results as are asked for.
        let told = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                self.product,
                layouts.weights,
                layouts.rows,
                layouts.out,
                layouts.out,
                self.preference,
                TRIED as i32,
                found.as_mut_ptr().cast(),
                &raw mut count,
            )
        };
        told.result().map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?;
        let none = || CallError {
            call: "cublasLtMatmulAlgoGetHeuristic",
            kind: CallErrorKind::Other,
            text: format!("there is no algorithm for {size:?}"),
        };
        if place >= count.max(0) as usize {
            return Err(none());
        }
        // SAFETY: that many results were written.
        let algorithm = unsafe { found[place].assume_init_ref() }.algo;
        Ok(Plan { layouts, algorithm })
    }
}

impl Layouts {
    fn new(Size { rows, outputs, inputs, is_wide }: Size) -> Result<Self, CallError> {
        use sys::cudaDataType::{CUDA_R_16BF, CUDA_R_32F};
        let nowhere = std::ptr::null_mut();
        let mut layouts = Self { weights: nowhere, rows: nowhere, out: nowhere };
        let layout = |kind, rows: usize, columns: usize| {
            let made = result::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64);
            made.map_err(failed("cublasLtMatrixLayoutCreate"))
        };
        layouts.weights = layout(CUDA_R_16BF, inputs, outputs)?;
        layouts.rows = layout(CUDA_R_16BF, inputs, rows)?;
        layouts.out = layout(if is_wide { CUDA_R_32F } else { CUDA_R_16BF }, outputs, rows)?;
        Ok(layouts)
    }
}

impl Drop for Layouts {
    fn drop(&mut self) {
        for layout in [self.weights, self.rows, self.out].into_iter().filter(|it| !it.is_null()) {
            // SAFETY: they were created, and submitted products no longer need them.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: they were created and are no longer used.
        unsafe {
            let _ = result::destroy_matmul_pref(self.preference);
            let _ = result::destroy_matmul_desc(self.product);
            let _ = result::destroy_handle(self.handle);
        }
    }
}
