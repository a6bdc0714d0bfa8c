//! Weights in the safetensors files of a folder.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::{Metadata, SafeTensorError, SafeTensors, TensorInfo};
use serde::Deserialize;

use super::{LoadError, is_lfs_pointer, parse, read_if_any};
use crate::shape::Shape;
use crate::tensor_names::name_of;
use crate::weights::{Part, WeightSource};

/// All tensors of a model, checked: each has the shape that it must have and lies in its file.
#[derive(Debug)]
pub(super) struct Tensors {
    files: Vec<TensorFile>,
    parts: BTreeMap<Part, Tensor>,
}

#[derive(Debug)]
struct TensorFile {
    path: PathBuf,
    bytes: Mmap,
    header: Metadata,
    /// Offset of the numbers.
    start: usize,
}

/// A tensor of a model.
#[derive(Clone, Copy, Debug)]
struct Tensor {
    file: usize,
    start: usize,
    len: usize,
    dtype: Dtype,
}

/// Formats of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

#[derive(Debug, Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Opens the weights of a folder and finds all tensors of a model.
pub(super) fn open(folder: &Path, shape: &Shape) -> Result<Tensors, LoadError> {
    let single = folder.join("model.safetensors");
    let index_path = folder.join("model.safetensors.index.json");
    let mut files = Vec::new();
    let listing = if single.exists() {
        files.push(TensorFile::open(&single, "a model folder must have its weights")?);
        single
    } else if let Some(json) = read_if_any(&index_path)? {
        let index: Index = parse(&index_path, &json)?;
        let mut shards: Vec<&String> = index.weight_map.values().collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in shards {
            // A name that leads elsewhere is none that a download has written.
            if Path::new(shard).components().count() != 1 || shard.starts_with('.') {
                let problem = format!("{shard:?} is not a file name in the same folder");
                return Err(LoadError::Malformed { path: index_path, problem });
            }
            let advice = "model.safetensors.index.json names it; download all shards";
            files.push(TensorFile::open(&folder.join(shard), advice)?);
        }
        index_path
    } else {
        let advice = "weights must be in safetensors files, which are not in this folder";
        return Err(LoadError::Missing { path: single, advice });
    };

    let mut parts = BTreeMap::new();
    for part in Part::all(shape) {
        let name = name_of(part);
        let mut found = files
            .iter()
            .enumerate()
            .filter_map(|(number, file)| file.header.info(&name).map(|info| (number, file, info)));
        let Some((number, file, info)) = found.next() else {
            let problem = format!("there is no tensor {name}");
            return Err(LoadError::Mismatch { path: listing, problem });
        };
        parts.insert(part, file.locate(number, &name, info, part.size(shape))?);
    }
    Ok(Tensors { files, parts })
}

impl TensorFile {
    fn open(path: &Path, advice: &'static str) -> Result<Self, LoadError> {
        let read = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => LoadError::Missing { path: path.to_owned(), advice },
            _ => LoadError::Read { path: path.to_owned(), error },
        };
        let file = File::open(path).map_err(read)?;
        // SAFETY: the mapping is read only while the model is being loaded. Whoever cuts a model's
        // file short meanwhile ends the program; nobody gets at memory through it.
        let bytes = unsafe { Mmap::map(&file) }.map_err(read)?;
        if is_lfs_pointer(&bytes) {
            return Err(LoadError::LfsPointer { path: path.to_owned() });
        }
        // Tensors lie one behind the other and fill the file: none lies outside of it, and none where another does,
        // with which a small file could become a model of any size.
        let (length, header) = SafeTensors::read_metadata(&bytes).map_err(|error| {
            let problem = problem_of(&error, bytes.len());
            LoadError::Malformed { path: path.to_owned(), problem }
        })?;
        Ok(Self { path: path.to_owned(), header, start: size_of::<u64>() + length, bytes })
    }

    /// Checks a tensor and finds its bytes.
    fn locate(
        &self,
        file: usize,
        name: &str,
        info: &TensorInfo,
        (rows, columns): (Option<usize>, usize),
    ) -> Result<Tensor, LoadError> {
        let dtype = match info.dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            other => {
                let problem = format!("the dtype {other} of {name} is not supported");
                return Err(LoadError::Unsupported { path: self.path.clone(), problem });
            }
        };
        let expected: Vec<usize> = rows.into_iter().chain([columns]).collect();
        if info.shape != expected {
            let found = &info.shape;
            let problem = format!("{name} has the shape {found:?}, expected {expected:?}");
            return Err(LoadError::Mismatch { path: self.path.clone(), problem });
        }
        let (start, end) = info.data_offsets;
        Ok(Tensor { file, start: self.start + start, len: end - start, dtype })
    }
}

/// Describes a damaged file for users who have downloaded it.
fn problem_of(error: &SafeTensorError, file_bytes: usize) -> String {
    match error {
        SafeTensorError::HeaderTooSmall => format!("{file_bytes} bytes are not a safetensors file"),
        SafeTensorError::HeaderTooLarge | SafeTensorError::InvalidHeaderLength => {
            format!("its header should be longer than the file, which has {file_bytes} bytes")
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            format!("its weights do not end where the file does, after {file_bytes} bytes")
        }
        SafeTensorError::InvalidOffset(name) => {
            format!("{name} does not begin where the tensor before it ends")
        }
        SafeTensorError::TensorInvalidInfo => "a tensor has other bytes than its shape".to_owned(),
        other => other.to_string(),
    }
}

impl Tensors {
    /// All parts with their names, dtypes and bytes, in a fixed order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (String, Dtype, &[u8])> {
        self.parts.iter().map(|(part, tensor)| (name_of(*part), tensor.dtype, self.bytes(tensor)))
    }

    fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.files[tensor.file].bytes[tensor.start..][..tensor.len]
    }
}

impl WeightSource for Tensors {
    fn as_bf16(&self, part: Part) -> Option<&[u8]> {
        let tensor = &self.parts[&part];
        (tensor.dtype == Dtype::Bf16).then(|| self.bytes(tensor))
    }

    fn fingerprint(&self, shape: &Shape) -> String {
        super::fingerprint::of(shape, self)
    }

    fn row(&self, part: Part, row: usize, out: &mut [f32]) {
        let tensor = &self.parts[&part];
        let row_bytes = out.len() * tensor.dtype.bytes();
        let bytes = &self.bytes(tensor)[row * row_bytes..][..row_bytes];
        match tensor.dtype {
            Dtype::F32 => {
                for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = f32::from_le_bytes(*bytes);
                }
            }
            Dtype::F16 => {
                // Processors convert several at a time, but not where they lie unaligned.
                let mut aligned = [f16::ZERO; 64];
                for (out, bytes) in out.chunks_mut(64).zip(bytes.chunks(128)) {
                    let aligned = &mut aligned[..out.len()];
                    for (aligned, bytes) in aligned.iter_mut().zip(bytes.as_chunks().0) {
                        *aligned = f16::from_le_bytes(*bytes);
                    }
                    aligned.convert_to_f32_slice(out);
                }
            }
            Dtype::Bf16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                    *out = bf16::from_le_bytes(*bytes).to_f32();
                }
            }
        }
    }
}
