//! From a configuration to a running engine: model, memory, store.

mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "launch/no_cuda.rs")]
mod cuda;
mod scheduling;
pub(crate) mod sizes;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use terrace_engine::{Device, Engine, Model, StartError};
use terrace_l3_disk::{OpenError, SecretError};
use terrace_l3_mooncake::MooncakeError;
use terrace_model::{ChatTemplate, LoadError, Tokenizer, Unloaded};
use terrace_replay::Size;
use terrace_scheduler::Token;

use self::scheduling::scheduler_config;
use self::sizes::Sizes;
use crate::cluster::ClusterError;
use crate::config::{Config, ConfigError, DeviceChoice};
use crate::gpu::GpuWatch;
#[cfg(feature = "models")]
use crate::hub::{self, Downloaded, HubError, Needed};
use crate::l3_tier::open_l3;
use crate::planting::Planting;
use crate::reasoning;
use crate::recordings::Recordings;
use crate::served_model::ServedModel;
use crate::summary::Summary;
use crate::tool_calls::ToolFormat;

/// A running engine and what is to be known about it.
#[derive(Debug)]
pub struct Launched {
    /// The engine.
    pub engine: Engine,
    /// The model that it computes.
    pub model: ServedModel,
    /// Summary for the operator.
    pub summary: Summary,
    /// Figures of its GPU, if it has one.
    pub gpu: Option<GpuWatch>,
    /// Handle that plants wrong pages, if that is allowed.
    pub planting: Option<Planting>,
}

/// Why an engine could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The configuration cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model cannot be loaded.
    #[error("cannot load the model: {0}")]
    Model(#[from] LoadError),
    /// The model is no folder, and cannot be had from the hub.
    #[cfg(feature = "models")]
    #[error(transparent)]
    Hub(#[from] HubError),
    /// There is not enough memory for the device tier.
    #[error(
        "{memory} of device memory hold only {tokens} tokens of this model's KV, at {page} per \
         page of {page_size} tokens: raise --device-memory to {needed} or more"
    )]
    DeviceMemory {
        /// What there is.
        memory: Size,
        /// What it holds.
        tokens: u64,
        /// The size of a page.
        page: Size,
        /// Tokens in a page.
        page_size: u32,
        /// The least that is useful.
        needed: Size,
    },
    /// More pages than can be counted.
    #[error(
        "{memory} are more pages of {page} than can be counted: lower it, or raise --page-size"
    )]
    TooManyPages {
        /// What there is.
        memory: Size,
        /// The size of a page.
        page: Size,
    },
    /// L3 without host memory.
    #[error("L3 needs host memory for its transfers: raise --host-memory, or leave out --l3")]
    NoHost,
    /// The system does not give the memory.
    #[error(
        "cannot allocate {device} for the device tier and {host} for the host tier: {error}; lower \
         --device-memory or --host-memory"
    )]
    Memory {
        /// For the device.
        device: Size,
        /// For the host.
        host: Size,
        /// What the system says.
        error: io::Error,
    },
    /// There is no way to compute on a GPU.
    #[error("cannot compute on a GPU: {0}")]
    Gpu(String),
    /// What is to be on the GPU does not fit.
    #[error(
        "{gpu} has {free} of {total} free, too little for {weights} of weights, {steps} for steps \
         of {step_tokens} tokens and {kv} of KV: {advice}, or stop other processes that use it"
    )]
    GpuMemory {
        /// The GPU.
        gpu: String,
        /// What is free.
        free: Size,
        /// What it has.
        total: Size,
        /// For weights.
        weights: Size,
        /// For what steps compute in.
        steps: Size,
        /// How large steps may be.
        step_tokens: u32,
        /// For pages.
        kv: Size,
        /// What to change.
        advice: String,
    },
    /// There is no folder for L3.
    #[error("no folder for L3: set HOME or XDG_CACHE_HOME, or use --l3 disk:FOLDER or none")]
    NoCacheFolder,
    /// Another server has the store.
    #[error(
        "the L3 store in {} is in use by {owner}: stop it, or use --l3 disk:OTHER-FOLDER or --l3 none",
        path.display()
    )]
    L3InUse {
        /// Where.
        path: PathBuf,
        /// Who.
        owner: String,
    },
    /// The store on disk cannot be opened.
    #[error("cannot open L3: {0}; or use --l3 disk:OTHER-FOLDER or --l3 none")]
    L3Disk(OpenError),
    /// The secret of the folder cannot be used.
    #[error("cannot use the secret of L3: {0}; or give --l3-secret")]
    L3Secret(#[from] SecretError),
    /// The file system has no room for the store.
    #[error(
        "not enough space for L3 in {}: the file system has {free} free, {reserve} of it must stay \
         free, and L3 needs at least {needed}; free some space, lower --l3-reserve, or use --l3 \
         disk:OTHER-FOLDER or --l3 none",
        path.display()
    )]
    L3NoRoom {
        /// Where.
        path: PathBuf,
        /// What is free.
        free: Size,
        /// What of it stays free.
        reserve: Size,
        /// The least that would do.
        needed: Size,
    },
    /// Other servers have all that the folder may take.
    #[error(
        "not enough space for L3 in {}: stores with other page sizes in the same folder, in use by \
         {owners}, take {taken} of the {limit} for all; raise --l3-capacity, or use --l3 \
         disk:OTHER-FOLDER or --l3 none",
        path.display()
    )]
    L3FolderFull {
        /// Where.
        path: PathBuf,
        /// What all may take.
        limit: Size,
        /// What others have.
        taken: Size,
        /// Who.
        owners: String,
    },
    /// A recording that cannot be made.
    #[error("cannot record to {}: {error}; give the name of a new file", file.display())]
    Record {
        /// The file.
        file: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The store in memory cannot be made.
    #[error("cannot create an L3 store in memory: {0}; choose another size, or --l3 none")]
    L3Memory(io::Error),
    /// Something is missing to use a cluster or nodes.
    #[error("L3: {0}; or use --l3 disk:FOLDER or none")]
    Cluster(#[from] ClusterError),
    /// The library cannot be used.
    #[error("cannot use Mooncake for L3: {0}; or use --l3 disk:FOLDER or --l3 none")]
    L3Mooncake(MooncakeError),
    /// The nodes cannot be used.
    #[error("cannot use nodes for L3: {0}")]
    L3Nodes(String),
    /// The bucket cannot be used.
    #[error("cannot use a bucket for L3: {0}; or use --l3 disk:FOLDER or --l3 none")]
    L3Bucket(String),
    /// The engine does not start.
    #[error(transparent)]
    Engine(#[from] StartError),
}

/// Starts an engine on the tokio runtime that this is called from.
///
/// # Errors
/// What cannot work, and what to change.
pub fn launch(config: &Config) -> Result<Launched, LaunchError> {
    launch_telling(config, &mut |_| {})
}

/// Waits until no GPU is used any more, and says whether that came to be: a program whose engines have ended does so
/// before it ends itself, because they give a GPU back on threads of their own.
pub fn wait_for_gpus(patience: Duration) -> bool {
    cuda::wait_until_closed(patience)
}

/// What is under way while an engine starts.
#[derive(Clone, Copy, Debug)]
pub enum Progress<'a> {
    /// The files of a model are being downloaded.
    Download {
        /// The model.
        model: &'a str,
        /// Bytes that have arrived.
        bytes: u64,
        /// Bytes of all files that were missing.
        total_bytes: u64,
    },
    /// Weights are being copied to a GPU.
    Weights {
        /// Bytes that have arrived.
        bytes: u64,
        /// Bytes of all weights.
        total_bytes: u64,
    },
}

/// Starts an engine, as [`launch`] does, and calls `progress` while the model is downloaded and while weights are copied
/// to a GPU.
///
/// # Errors
/// What cannot work, and what to change.
pub fn launch_telling(
    config: &Config,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Launched, LaunchError> {
    config.check()?;
    let config = &with_folder(config, progress)?;
    match config.device {
        DeviceChoice::Cpu => cpu::launch(config),
        DeviceChoice::Cuda(ordinal) => {
            let mut progress =
                |bytes, total_bytes| progress(Progress::Weights { bytes, total_bytes });
            cuda::launch(config, ordinal, &mut progress)
        }
    }
}

/// Returns the settings with the folder of the model that they name, after downloading it if it is one of the hub.
#[cfg(feature = "models")]
fn with_folder<'a>(
    config: &'a Config,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Cow<'a, Config>, LaunchError> {
    let Some(model) = &config.model else { return Ok(Cow::Borrowed(config)) };
    let mut told = |model: &str, Downloaded { bytes, total_bytes }| {
        progress(Progress::Download { model, bytes, total_bytes });
    };
    let folder = hub::find_folder(model, Needed::Model, &mut told)?;
    let name = config.name.clone().or(folder.name);
    Ok(Cow::Owned(Config { model: Some(folder.path), name, ..config.clone() }))
}

/// Returns the settings as they are: a program without models from folders refuses them later.
#[cfg(not(feature = "models"))]
fn with_folder<'a>(
    config: &'a Config,
    _progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Cow<'a, Config>, LaunchError> {
    Ok(Cow::Borrowed(config))
}

/// The model that the settings name, before its weights are read.
fn open_model(config: &Config) -> Result<Unloaded, LaunchError> {
    Ok(match &config.model {
        Some(folder) => terrace_model::open(folder)?,
        None if config.random_model => terrace_model::unloaded_random(),
        None => terrace_model::unloaded_built_in(),
    })
}

/// A model on its device, ready to compute.
struct Ready<M, D> {
    model: M,
    device: Arc<D>,
    sizes: Sizes,
    text: Text,
    place: Place,
}

/// Tokenizer, chat template and name of a model.
struct Text {
    tokenizer: Tokenizer,
    chat: ChatTemplate,
    stop_tokens: Vec<Token>,
    name: String,
}

/// Device of a model.
struct Place {
    in_words: String,
    gpu: Option<GpuWatch>,
    /// Lines about the GPU for the summary.
    gpu_notes: Vec<String>,
}

/// Starts an engine with any model and its device.
fn start<M, D>(config: &Config, ready: Ready<M, D>) -> Result<Launched, LaunchError>
where
    D: Device,
    M: Model<Memory = D::Memory, Fence = D::Fence>,
{
    let Ready { model, device, sizes, text, place } = ready;
    let opened = open_l3(config, &sizes)?;
    let Text { tokenizer, chat, stop_tokens, name } = text;
    let device_tokens = u64::from(sizes.device_pages) * u64::from(config.page_size);
    // The KV of the last token is never needed.
    let tokens_max = (device_tokens + 1).min(u64::from(model.positions_max())) as u32;
    let model_served = ServedModel {
        name: config.name.clone().unwrap_or_else(|| name.clone()),
        tokenizer,
        stop_tokens: stop_tokens.into(),
        tokens_max,
        tool_format: config.tool_format.or_else(|| ToolFormat::of(&chat)),
        marks_reasoning: reasoning::is_marked_in(&chat),
        root: config.model.as_ref().map_or(name, |folder| folder.display().to_string()),
        created: config.model.as_deref().and_then(last_written).unwrap_or_else(now),
        fingerprint: model.fingerprint(),
        chat,
    };
    let recordings = Recordings::begin(config)?;
    let summary = Summary {
        name: model_served.name.clone(),
        about: about(config),
        place: place.in_words,
        gpu: place.gpu_notes,
        tokens_max,
        kv_bytes_per_token: sizes.kv_bytes_per_token(),
        device: sizes.device_tier(),
        host: sizes.host_tier(),
        l3: opened.as_ref().map(|opened| opened.tier.clone()),
        recordings: recordings.files,
    };
    let own_secret = opened.as_ref().and_then(|opened| opened.secret.clone());
    let store = opened.map(|opened| opened.store);
    let scheduler = scheduler_config(config, sizes.page_bytes, own_secret);
    let engine = Engine::start_watched(scheduler, model, device, store, recordings.witnesses)?;
    Ok(Launched { engine, model: model_served, summary, gpu: place.gpu, planting: None })
}

/// Returns a note about a model that comes with the program.
fn about(config: &Config) -> Option<&'static str> {
    match (&config.model, config.random_model) {
        (Some(_), _) => None,
        (None, false) => Some("built in: it answers questions about books like the page's"),
        (None, true) => Some("of random weights: it says nothing sensible"),
    }
}

/// When the latest of a folder's files was written.
fn last_written(folder: &Path) -> Option<u64> {
    let files = std::fs::read_dir(folder).ok()?;
    let written = files.filter_map(|file| file.ok()?.metadata().ok()?.modified().ok());
    written.max().map(seconds)
}

fn now() -> u64 {
    seconds(SystemTime::now())
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
