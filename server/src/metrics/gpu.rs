//! A GPU's figures as metrics.

use std::fmt;

use terrace_engine::StepFigures;

use super::exposition::Exposition;
use super::exposition::Kind::Counter;
use super::figures::seconds;
use crate::gpu::{GpuFigures, LinkFigures};

pub(super) fn write(
    text: &mut Exposition<'_>,
    gpu: &GpuFigures,
    steps: &StepFigures,
) -> fmt::Result {
    text.gauge("terrace_gpu_memory_bytes", "Total GPU memory.", gpu.memory_bytes)?;
    text.gauge(
        "terrace_gpu_memory_used_bytes",
        "Used GPU memory, by all processes.",
        gpu.memory_used_bytes,
    )?;
    text.counter(
        "terrace_gpu_waiting_seconds_total",
        "GPU idle time between steps while a step could have run.",
        seconds(steps.busy_us.saturating_sub(steps.model_us)),
    )?;
    let by_kernel = gpu.to_device.by_kernel + gpu.to_host.by_kernel;
    let by_batch = gpu.to_device.by_batch + gpu.to_host.by_batch;
    text.metric(
        Counter,
        "terrace_gpu_copies_total",
        "Parts of copies between GPU and host, by method: kernel, or batched copy engine.",
        &[("kernel", by_kernel), ("batch", by_batch)],
        "way",
    )?;
    let links = [("to_device", &gpu.to_device), ("to_host", &gpu.to_host)];
    text.metric(
        Counter,
        "terrace_gpu_link_busy_seconds_total",
        "Time with copies between GPU and host in flight.",
        &links.map(|(direction, link)| (direction, seconds(link.busy_us))),
        "direction",
    )?;
    let mut each = |name, help, figure: fn(&LinkFigures) -> u64| {
        let values = links.map(|(direction, link)| (direction, figure(link)));
        text.metric(Counter, name, help, &values, "direction")
    };
    let help = "Bytes copied between GPU and host.";
    each("terrace_gpu_link_bytes_total", help, |link| link.bytes)?;
    let help = "Failed copies between GPU and host.";
    each("terrace_gpu_copies_failed_total", help, |link| link.failed)?;
    let help = "Pages verified on both sides after a copy.";
    each("terrace_gpu_pages_compared_total", help, |link| link.pages_compared)?;
    let help = "Verified pages that differed and were not used.";
    each("terrace_gpu_pages_corrupt_total", help, |link| link.pages_corrupt)
}
