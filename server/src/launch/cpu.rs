//! A model on the CPU.

use std::sync::Arc;

use terrace_engine::{CpuDevice, Forward, Threaded};
use terrace_model::Loaded;

use super::sizes::Sizes;
use super::{LaunchError, Launched, Place, Ready, Text, open_model, start};
use crate::config::{Config, DEVICE_MEMORY_ON_CPU, cores};
use crate::planting::{Plantable, Planting};

pub(super) fn launch(config: &Config) -> Result<Launched, LaunchError> {
    let threads = config.threads.unwrap_or_else(cores);
    let Loaded { model, tokenizer, chat, stop_tokens, name } = open_model(config)?.on_cpu(threads);
    let device_memory = config.device_memory.unwrap_or(DEVICE_MEMORY_ON_CPU);
    let sizes =
        Sizes::new(&model.kv_layout(), config.page_size, device_memory, config.host_memory)?;
    let device = CpuDevice::new(sizes.device_pages, sizes.host_pages, sizes.layout.clone());
    let device = device.map_err(|error| LaunchError::Memory {
        device: device_memory,
        host: config.host_memory,
        error,
    })?;
    let text = Text { tokenizer, chat, stop_tokens, name };
    let place = Place { in_words: format!("{threads} threads"), gpu: None, gpu_notes: Vec::new() };
    let device = Arc::new(device);
    if !config.plant_wrong_pages {
        return start(config, Ready { model: Threaded::new(model), device, sizes, text, place });
    }
    let planting = Planting::default();
    let model = Threaded::new(Plantable { model, planting: planting.clone() });
    let launched = start(config, Ready { model, device, sizes, text, place })?;
    Ok(Launched { planting: Some(planting), ..launched })
}
