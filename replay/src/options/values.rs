//! Parsing of setting values.

use terrace_cache::is_name_of;
use terrace_scheduler::PrefetchPolicy;

use super::Problem;
use super::quantity::{Size, microseconds, size};
use crate::cluster::{Outage, WorkerGroup};
use crate::config::{Config, Copies, LinksConfig, Routing, Sessions, WarmUp};
use crate::copies::CopyWay;
use crate::cost::CostModel;
use crate::machine::{Gpu, ModelSpec};

pub(super) fn number(text: &str, least: f64, most: f64) -> Result<f64, Problem> {
    let number = text.parse::<f64>().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("use a number from {least} to {most}").into())
}

pub(super) fn within(text: &str, least: u32, most: u32) -> Result<u32, Problem> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("use a number from {least} to {most}").into())
}

pub(super) fn step_tokens(text: &str) -> Result<u32, Problem> {
    within(text, 1, 1 << 20)
}

pub(super) fn copy_way(text: &str) -> Result<CopyWay, Problem> {
    let ways =
        [("kernel", CopyWay::Kernel), ("batch", CopyWay::Batch), ("single", CopyWay::Single)];
    let found = ways.into_iter().find(|(name, _)| is_name_of(text, name));
    found.map(|(_, way)| way).ok_or_else(|| "use kernel, batch or single".into())
}

pub(super) fn piece_bytes(text: &str) -> Result<u64, Problem> {
    match size(text)? {
        Size::Bytes(bytes) if (1.0..=1e12).contains(&bytes) => Ok(bytes as u64),
        Size::Bytes(_) | Size::Tokens(_) | Size::Unlimited => {
            Err("write bytes like 32KiB, up to 1TB".into())
        }
    }
}

/// Parses the size of a page.
///
/// # Errors
/// Returns the valid values.
pub fn page_size(text: &str) -> Result<u32, String> {
    let size = text.parse().ok().filter(|size: &u32| size.is_power_of_two() && *size <= 256);
    size.ok_or_else(|| "use a power of two from 1 to 256".to_owned())
}

pub(super) fn routing(text: &str) -> Result<Routing, Problem> {
    match text.split_once(':') {
        None if is_name_of(text, "round-robin") => Ok(Routing::RoundRobin),
        None if is_name_of(text, "least-loaded") => Ok(Routing::LeastLoaded),
        None if is_name_of(text, "session-affine") => Ok(Routing::SessionAffine),
        None if is_name_of(text, "prefix-aware") => Ok(Routing::PrefixAware { load_weight: 1.0 }),
        Some((name, weight)) if is_name_of(name, "prefix-aware") => {
            Ok(Routing::PrefixAware { load_weight: number(weight, 0.0, 1e6)? })
        }
        Some(_) | None => Err("use round-robin, least-loaded, session-affine, prefix-aware or \
                               prefix-aware:LOAD_WEIGHT"
            .into()),
    }
}

/// Parses a share like 0.1 or 10%.
pub(super) fn share(text: &str) -> Result<f64, Problem> {
    let share = match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().map(|percent| percent / 100.0),
        None => text.parse(),
    };
    let share = share.ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "use a share like 0.9 or 90%".into())
}

pub(super) fn warm_up(text: &str) -> Result<WarmUp, Problem> {
    if let Ok(share) = share(text)
        && share < 1.0
    {
        return Ok(WarmUp::Share(share));
    }
    let problem = |_| Problem::from("use a share of the requests like 10%, or a time like 300s");
    Ok(WarmUp::Until { time_us: microseconds(text).map_err(problem)? })
}

/// Parses worker groups like `2xh100:1+1xl40s:4`: count, GPU, and GPUs per worker. Their host tiers
/// have the same size as the others.
pub(super) fn also(
    text: &str,
    model: &ModelSpec,
    copies: &Copies,
    step_tokens: u32,
    config: &Config,
) -> Result<Vec<WorkerGroup>, Problem> {
    let page_size = config.scheduler.cache.page_size;
    let group = |part: &str| {
        let wrong = || Problem::from("write it like 2xh100:1; join several with +");
        let (workers, rest) = part.trim().split_once('x').ok_or_else(wrong)?;
        let (gpu, gpus) = rest.split_once(':').ok_or_else(wrong)?;
        let (gpu, gpus) = (Gpu::named(gpu)?, within(gpus, 1, 64)?);
        let tokens = model.device_tokens(&gpu, gpus, step_tokens);
        let device_pages = (tokens / u64::from(page_size)).min(1 << 28) as u32;
        if device_pages == 0 {
            return Err(format!("{part}: the weights leave no room for KV").into());
        }
        Ok(WorkerGroup {
            workers: within(workers, 1, 1024)?,
            gpus,
            gpu_hour: gpu.hour_price,
            device_pages,
            host_pages: config.scheduler.cache.host_pages,
            cost: CostModel::of_machine(model, &gpu, gpus),
            links: LinksConfig::of_machine(model, &gpu, gpus, copies),
        })
    };
    text.split('+').map(group).collect()
}

/// Parses outages like `1:600s-900s+0:20s-30s`.
pub(super) fn outages(text: &str) -> Result<Vec<Outage>, Problem> {
    let outage = |part: &str| {
        let wrong = || Problem::from("write it like 1:600s-900s; join several with +");
        let (worker, times) = part.trim().split_once(':').ok_or_else(wrong)?;
        let (from, to) = times.split_once('-').ok_or_else(wrong)?;
        let worker = within(worker, 0, 1023)?;
        Ok(Outage { worker, from_us: microseconds(from)?, to_us: microseconds(to)? })
    };
    text.split('+').map(outage).collect()
}

pub(super) fn sessions(text: &str) -> Result<Sessions, Problem> {
    match text {
        wait if is_name_of(wait, "wait") => Ok(Sessions::Wait),
        clock if is_name_of(clock, "by-the-clock") => Ok(Sessions::ByTheClock),
        _ => Err("use wait or by-the-clock".into()),
    }
}

pub(super) fn milliseconds(text: &str) -> Result<f64, Problem> {
    match microseconds(text)? {
        0 => Err("use a time above 0".into()),
        us => Ok(us as f64 / 1000.0),
    }
}

pub(super) fn fetch_wait(text: &str) -> Result<PrefetchPolicy, Problem> {
    if is_name_of(text, "best-effort") {
        return Ok(PrefetchPolicy::BestEffort);
    }
    let us =
        microseconds(text).map_err(|_| Problem::from("use best-effort, or a time like 500ms"))?;
    Ok(PrefetchPolicy::Wait { max_ms: us.div_ceil(1000) })
}
