//! The kernel compiler.

#![allow(unsafe_code)]

use std::ffi::{CString, OsString};
use std::sync::OnceLock;

use cudarc::nvrtc::{result, sys};
use libloading::Library;

use crate::error::CudaError;

/// Environment variable with the path of the compiler's library, if it is not on the library path.
pub const NVRTC_VARIABLE: &str = "TERRACE_NVRTC";

/// Compiles kernel source for GPUs of a compute capability (90 is 9.0) and returns an image for the
/// driver. The image is for that GPU alone, so drivers need not understand the output of newer
/// compilers. The compiler reports the source as `name`. Options are those of `nvcc`, as far as
/// NVRTC has them.
///
/// # Errors
/// Fails if there is no compiler or the source does not compile.
pub fn compile(
    name: &str,
    source: &str,
    capability: u32,
    options: &[String],
) -> Result<Vec<u8>, CudaError> {
    find()?;
    // A target for one GPU alone enables all of its features.
    let suffix = if capability == 90 { "a" } else { "" };
    let architecture = format!("sm_{capability}{suffix}");
    let failed = |log: String| CudaError::Compile {
        kernel: name.to_owned(),
        architecture: architecture.clone(),
        log,
    };
    let text = |what: &str| CString::new(what).map_err(|nul| failed(nul.to_string()));
    let (source, c_name) = (text(source)?, text(name)?);
    let program = result::create_program(&source, Some(&c_name));
    let program = Program(program.map_err(|error| failed(error.to_string()))?);
    let mut all = vec![format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
    all.extend_from_slice(options);
    // SAFETY: the program lives until the end of this function, and its source and name as long.
    if let Err(error) = unsafe { result::compile_program(program.0, &all) } {
        return Err(failed(format!("{error}\n{}", program.log())));
    }
    program.image().map_err(|error| failed(error.to_string()))
}

/// Returns the version of the compiler: 13.0 is 13 and 0.
///
/// # Errors
/// Fails if there is no compiler.
pub fn version() -> Result<(i32, i32), CudaError> {
    find()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: it writes two numbers.
    let told = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    told.result().map(|()| (major, minor)).map_err(|error| CudaError::NoNvrtc {
        tried: Some(format!("its version is not known: {error}")),
    })
}

/// Checks that kernels can be compiled.
///
/// # Errors
/// Fails if there is no compiler.
pub fn find() -> Result<(), CudaError> {
    static FOUND: OnceLock<Result<(), Option<String>>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        if let Some(path) = std::env::var_os(NVRTC_VARIABLE) {
            load_for_good(&path).map_err(Some)?;
        }
        // SAFETY: loading the library runs no code of it but its own initialisation.
        if unsafe { sys::is_culib_present() } { Ok(()) } else { Err(None) }
    });
    found.clone().map_err(|tried| CudaError::NoNvrtc { tried })
}

/// Loads a library permanently: later lookups by its name find this one.
fn load_for_good(path: &OsString) -> Result<(), String> {
    // SAFETY: the user declares it to be the compiler's library, whose initialisation has no other
    // effects.
    let library = unsafe { Library::new(path) };
    library.map(std::mem::forget).map_err(|error| match std::error::Error::source(&error) {
        Some(why) => format!("{error}: {why}"),
        None => error.to_string(),
    })
}

/// A program, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        // SAFETY: the program exists.
        let log = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.into_iter().map(|byte| byte as u8).collect();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').trim().to_owned()
    }

    fn image(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut bytes = 0;
        // SAFETY: the program exists and was compiled; it writes one number.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut bytes) }.result()?;
        let mut image = vec![0_u8; bytes];
        // SAFETY: it writes as many bytes as it has said.
        unsafe { sys::nvrtcGetCUBIN(self.0, image.as_mut_ptr().cast()) }.result()?;
        Ok(image)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program exists and is no longer used.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}
