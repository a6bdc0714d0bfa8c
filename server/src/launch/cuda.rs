//! A model on a GPU.

mod room;

use std::sync::{Arc, Weak};

use terrace_cuda::canary::CanaryConfig;
use terrace_cuda::model::kv_layout;
pub(super) use terrace_cuda::wait_until_closed;
use terrace_cuda::{Context, CopyWays, CudaConfig, CudaDevice, CudaError, CudaLlama, LinkStats};
use terrace_engine::{StartError, StepLimits};
use terrace_model::Unloaded;
use terrace_replay::Size;

use self::room::Room;
use super::sizes::{DEVICE_PAGES_MIN, Sizes};
use super::{LaunchError, Launched, Place, Ready, Text, open_model, start};
use crate::config::{Config, StepSettings};
use crate::disk_tier::cache_folder;
use crate::gpu::{GpuFigures, GpuWatch, LinkFigures};

pub(super) fn launch(
    config: &Config,
    ordinal: u32,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Launched, LaunchError> {
    let context = Context::open(ordinal).map_err(unusable)?;
    let Unloaded { shape, weights, tokenizer, chat, stop_tokens, name } = open_model(config)?;
    let kv = kv_layout(&shape);
    let page_bytes = kv.pages(config.page_size).map_err(StartError::from)?.bytes() as u64;
    let StepSettings { step_tokens, running_max, .. } = config.steps();
    let limits =
        StepLimits { page_size: config.page_size, rows: running_max, tokens_max: step_tokens };
    let memory = context.memory().map_err(|error| unusable(error.into()))?;
    let room = Room {
        gpu: context.name().to_owned(),
        free: memory.free as u64,
        total: memory.total as u64,
        weights: CudaLlama::weight_bytes(&shape) as u64,
        steps: CudaLlama::step_bytes(&shape, limits) as u64,
        step_tokens,
        kv_min: page_bytes * u64::from(DEVICE_PAGES_MIN),
    };
    let device_memory = room.device_memory(config.device_memory)?;
    let sizes = Sizes::new(&kv, config.page_size, device_memory, config.host_memory)?;
    let cuda = CudaConfig {
        device_pages: sizes.device_pages,
        host_pages: sizes.host_pages,
        layout: sizes.layout.clone(),
        canary: config.canary.map(|one_page_in| CanaryConfig { one_page_in }),
        ways: None,
    };
    let device = Arc::new(CudaDevice::new(&context, cuda).map_err(unusable)?);
    let mut told_tenths = None;
    let mut tell = |brought: u64, all: u64| {
        let tenths = u128::from(brought) * 10 / u128::from(all.max(1));
        if told_tenths.replace(tenths) != Some(tenths) {
            tracing::info!("loaded {} of {} of weights to the GPU", Size(brought), Size(all));
        }
        progress(brought, all);
    };
    let model = CudaLlama::load(&context, &shape, &*weights, &mut tell).map_err(unusable)?;
    let model = model.keep_choices_in(config.gpu_tuning.clone().or_else(|| cache_folder("gpu")));
    let mut gpu_notes = vec![room.to_string(), ways_in_words(device.ways())];
    if let Some(one_page_in) = config.canary {
        gpu_notes.push(format!("one page in {one_page_in} is verified after it was copied"));
    }
    let text = Text { tokenizer, chat, stop_tokens, name };
    let gpu = Some(watch(context.name().to_owned(), Arc::downgrade(&device)));
    let place = Place { in_words: context.name().to_owned(), gpu, gpu_notes };
    start(config, Ready { model, device, sizes, text, place })
}

fn unusable(error: CudaError) -> LaunchError {
    LaunchError::Gpu(error.to_string())
}

/// By which way pages are copied.
fn ways_in_words(ways: CopyWays) -> String {
    let way = |batch_from: Option<usize>| match batch_from {
        Some(bytes) => {
            format!("pieces below {} by a kernel, others by copy engines", Size(bytes as u64))
        }
        None => "all by a kernel".to_owned(),
    };
    let CopyWays { to_device_batch_from, to_host_batch_from } = ways;
    let (to_device, to_host) = (way(to_device_batch_from), way(to_host_batch_from));
    format!("copies to the GPU: {to_device}; to host: {to_host}")
}

/// Tells of a device as long as its engine has it.
fn watch(name: String, device: Weak<CudaDevice>) -> GpuWatch {
    GpuWatch::new(move || {
        let stats = device.upgrade()?.stats();
        let (free, total) = (stats.memory.free as u64, stats.memory.total as u64);
        Some(GpuFigures {
            name: name.clone(),
            memory_bytes: total,
            memory_used_bytes: total.saturating_sub(free),
            to_device: link(stats.to_device),
            to_host: link(stats.to_host),
        })
    })
}

fn link(stats: LinkStats) -> LinkFigures {
    let LinkStats { bytes, busy, by_kernel, by_batch, failed, pages_compared, pages_corrupt } =
        stats;
    let busy_us = u64::try_from(busy.as_micros()).unwrap_or(u64::MAX);
    LinkFigures { bytes, busy_us, by_kernel, by_batch, failed, pages_compared, pages_corrupt }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_told_in_words() {
        let ways = CopyWays { to_device_batch_from: Some(1 << 20), to_host_batch_from: None };
        assert_eq!(
            ways_in_words(ways),
            "copies to the GPU: pieces below 1.0 MiB by a kernel, others by copy engines; to host: all by \
             a kernel"
        );
    }
}
