//! Verdict of a replay in a few sentences: the bottleneck, the unused potential of the cache, and
//! suggestions.

use serde::Serialize;

use crate::config::Arrival;
use crate::human::{count, milliseconds, percent, whole};
use crate::report::{LinkName, LinkUse, Report, Series};

/// Share of time above which computing workers may be overloaded.
pub(crate) const OVERLOADED_SHARE: f64 = 0.98;
/// Share of time above which a link delays transfers.
const LINK_BUSY_SHARE: f64 = 0.8;
/// A phase above this share of the time to first token is the bottleneck.
const BOTTLENECK_SHARE: f64 = 0.5;
/// Used share above which a tier is full.
const FULL_SHARE: f64 = 0.95;
/// Smallest share of prompt tokens that justifies a suggestion.
const SUGGESTION_SHARE_MIN: f64 = 0.02;
/// Share of the hits below which a tier is hardly used.
const HARDLY_USED_SHARE: f64 = 0.01;

/// Bottleneck of a configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Device capacity: prompts do not fit.
    DeviceSize,
    /// Compute: requests arrive faster than they are computed.
    Compute,
    /// A link that is nearly always busy.
    Link(LinkName),
    /// Device memory: requests wait for it.
    DeviceMemory,
    /// The limit of running requests.
    RunningMax,
    /// L3 fetches: they take most of the time to first token.
    Fetching,
    /// Queueing for other reasons.
    Waiting,
    /// No shortage: the time to first token is the time to compute prompts.
    #[default]
    Nothing,
}

/// Verdict of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// Bottleneck.
    pub limit: Limit,
    /// Bottleneck, unused potential of the cache, and suggestions, in sentences.
    pub text: String,
}

impl Verdict {
    pub(crate) fn of(report: &Report) -> Self {
        let limit = limit(report);
        let mut sentences = vec![found(report, limit), suggestion(limit).to_owned()];
        if limit != Limit::DeviceSize {
            sentences.push(cache(report));
        }
        Self { limit, text: sentences.join(" ") }
    }
}

/// Shares of the time to first token by phase: summed gauges of a state are the time spent in it.
struct BeforeFirst {
    waiting: f64,
    fetching: f64,
    prefilling: f64,
}

impl BeforeFirst {
    fn of(series: &Series) -> Self {
        let sum = |column: &[f64]| column.iter().sum::<f64>();
        let fetching = sum(&series.prefetching);
        // Fetching requests are counted among the waiting.
        let waiting = (sum(&series.waiting) - fetching).max(0.0);
        let prefilling = sum(&series.prefilling);
        let all = (waiting + fetching + prefilling).max(f64::MIN_POSITIVE);
        Self { waiting: waiting / all, fetching: fetching / all, prefilling: prefilling / all }
    }
}

fn limit(report: &Report) -> Limit {
    if report.finished == 0 {
        return Limit::DeviceSize;
    }
    let before = BeforeFirst::of(&report.series);
    let is_loaded = match report.config.arrival {
        Arrival::Trace { .. } => report.queue_ms.p50 > report.itl_ms.p50,
        // A closed loop is meant to keep the system loaded.
        Arrival::ClosedLoop { .. } => true,
    };
    let running_max = report.config.scheduler.batch.running_max;
    let running_peak = report.workers.iter().map(|worker| worker.running_peak).max();
    if let Some(link) = busiest(&report.links).filter(|link| link.busy > LINK_BUSY_SHARE) {
        Limit::Link(link.link)
    } else if before.waiting > BOTTLENECK_SHARE && running_peak >= Some(running_max) {
        Limit::RunningMax
    } else if before.waiting > BOTTLENECK_SHARE
        && pinned(&report.series) > FULL_SHARE
        && computing_prompts(report) < BOTTLENECK_SHARE
    {
        Limit::DeviceMemory
    } else if is_loaded && report.busy() > OVERLOADED_SHARE {
        Limit::Compute
    } else if before.waiting > BOTTLENECK_SHARE {
        Limit::Waiting
    } else if before.fetching > BOTTLENECK_SHARE {
        Limit::Fetching
    } else {
        Limit::Nothing
    }
}

fn busiest(links: &[LinkUse]) -> Option<&LinkUse> {
    links.iter().max_by(|one, other| one.busy.total_cmp(&other.busy))
}

/// Returns the approximate share of compute time spent on prompts. If it is most of the time,
/// requests beside a full device wait for prompts; otherwise they wait for room to decode.
fn computing_prompts(report: &Report) -> f64 {
    let computing_s =
        report.workers.iter().map(|worker| worker.busy).sum::<f64>() * report.virtual_s;
    let prompts_s = report.computed_tokens as f64 * report.config.cost.prefill_token_ns / 1e9;
    prompts_s / computing_s.max(f64::MIN_POSITIVE)
}

/// Returns the share of the device pinned by running requests and transfers while requests wait.
fn pinned(series: &Series) -> f64 {
    let while_waiting = series.device_pinned.iter().zip(&series.waiting);
    let (sum, weight) = while_waiting.fold((0.0, 0.0), |(sum, weight), (held, waiting)| {
        (sum + held * waiting, weight + waiting)
    });
    if weight > 0.0 { sum / weight } else { 0.0 }
}

/// Describes the bottleneck.
fn found(report: &Report, limit: Limit) -> String {
    let before = BeforeFirst::of(&report.series);
    let busy = percent(report.busy());
    match limit {
        Limit::DeviceSize => {
            "No request could run: the prompts are longer than what the device holds.".to_owned()
        }
        Limit::Compute => match report.config.arrival {
            Arrival::Trace { .. } => format!(
                "The GPUs are the limit: they compute {busy} of the time, requests come faster than they \
                 are served, and half of them wait {} or longer for their turn.",
                milliseconds(report.queue_ms.p50)
            ),
            Arrival::ClosedLoop { concurrency } => format!(
                "The GPUs are the limit: with {} requests at a time they compute {busy} of the time.",
                whole(concurrency.into())
            ),
        },
        Limit::Link(name) => {
            let link = busiest(&report.links);
            format!(
                "The link {} is the limit: it carries something {} of the time, and transfers wait {} for \
                 those before them.",
                name.in_words(),
                percent(link.map_or(0.0, |link| link.busy)),
                milliseconds(link.map_or(0.0, |link| link.wait_ms_mean))
            )
        }
        Limit::DeviceMemory => format!(
            "The memory of the device is the limit: {} of the time before first tokens is spent waiting, \
             while running requests hold {} of the device.",
            percent(before.waiting),
            percent(pinned(&report.series))
        ),
        Limit::RunningMax => format!(
            "The number of requests that may run at once is the limit: {} of the time before first tokens \
             is spent waiting for one of {} to end.",
            percent(before.waiting),
            whole(report.config.scheduler.batch.running_max.into())
        ),
        Limit::Fetching => format!(
            "L3 is the limit: {} of the time before first tokens is spent waiting for pages from it.",
            percent(before.fetching)
        ),
        Limit::Waiting => format!(
            "{} of the time before first tokens is spent waiting for the turn of others.",
            percent(before.waiting)
        ),
        Limit::Nothing => format!(
            "Nothing is short: requests hardly wait, and {} of the time before first tokens is spent \
             loading and computing prompts.",
            percent(before.prefilling)
        ),
    }
}

/// Returns a suggestion.
fn suggestion(limit: Limit) -> &'static str {
    match limit {
        Limit::DeviceSize => "Try more or larger GPUs (--gpus, --gpu).",
        Limit::Compute => {
            "Try more workers (--workers), more GPUs (--gpus) or faster ones (--gpu)."
        }
        Limit::Link(LinkName::HostToDevice) => {
            "Try a device that holds more (--gpus, --gpu), or computing what is short (--load-threshold)."
        }
        Limit::Link(LinkName::DeviceToHost) => {
            "Try copying only what is used again (--write-policy selective-write-through:2)."
        }
        Limit::Link(LinkName::L3ToHost | LinkName::StoreRead) => {
            "Try a larger host tier (--host) or a faster L3 (--l3-bandwidth, --store-bandwidth)."
        }
        Limit::Link(LinkName::HostToL3 | LinkName::StoreWrite) => {
            "Try a faster L3 (--l3-bandwidth, --store-bandwidth), or copying only what is used again \
             (--write-policy selective-write-through:2)."
        }
        Limit::DeviceMemory => {
            "Try more or larger GPUs (--gpus, --gpu), or more workers (--workers)."
        }
        Limit::RunningMax => "Try more at once (--running-max), or more workers (--workers).",
        Limit::Fetching => {
            "Try a larger host tier (--host), a faster L3 (--l3-bandwidth, --l3-latency), or not waiting \
             for what is short (--fetch-threshold)."
        }
        Limit::Waiting => "Try larger steps (--step-tokens) or more workers (--workers).",
        Limit::Nothing => {
            "Faster GPUs (--gpu, --gpus) would shorten it; --find-rate says how many requests it can take."
        }
    }
}

/// Describes the unused potential of the cache, with suggestions.
fn cache(report: &Report) -> String {
    let reuse = &report.reuse;
    let lost = (reuse.ceiling - reuse.total).max(0.0);
    if lost < SUGGESTION_SHARE_MIN {
        return match has_host(report) && reuse.host + reuse.l3 < HARDLY_USED_SHARE {
            true => "The device alone finds nearly all that can be reused: host and L3 could be smaller."
                .to_owned(),
            false => "The tiers find nearly all that can be reused: larger ones would not help.".to_owned(),
        };
    }
    format!(
        "{} of the prompt tokens were computed although an earlier prompt had them: {}.",
        percent(lost),
        why_lost(report)
    )
}

fn has_host(report: &Report) -> bool {
    report.config.scheduler.cache.host_pages > 0
}

fn why_lost(report: &Report) -> String {
    let cache = &report.config.scheduler.cache;
    let is_full = |pages: u64| pages as f64 >= FULL_SHARE * f64::from(cache.host_pages);
    let host_is_full = report.workers.iter().any(|worker| is_full(worker.host_pages_peak));
    let several = report.workers.len() > 1;
    match &report.store {
        _ if !has_host(report) => {
            "there is no host tier to keep them; try --host and --l3".to_owned()
        }
        None if host_is_full => {
            "the host tier is full and there is no L3; try a larger --host, or --l3".to_owned()
        }
        None if several => {
            "without an L3, workers compute what others have; try --l3, or --routing \
                            prefix-aware"
                .to_owned()
        }
        Some(store) if store.evicted_pages > 0 => {
            let tokens = store.evicted_pages as f64 * f64::from(cache.page_size);
            format!("L3 had to let go of {} tokens; try a larger --l3", count(tokens))
        }
        Some(store) if store.failures > 0 => {
            format!("L3 failed {} times (--l3-failures)", whole(store.failures))
        }
        Some(_) | None if several => {
            "workers compute at the same time what they have in common; try --routing prefix-aware"
                .to_owned()
        }
        Some(_) | None => {
            "requests that share them come at the same time, or share too little to ask L3 for it \
             (--fetch-threshold)"
                .to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Options, Setting};
    use crate::trace::{Synthetic, Trace};

    fn traffic() -> Trace {
        Synthetic { requests: 250, ..Synthetic::default() }.trace().unwrap()
    }

    /// Replays some traffic with settings.
    fn replayed(settings: &[(Setting, &str)]) -> Report {
        let mut options = Options::default();
        settings.iter().for_each(|&(setting, value)| options.set(setting, value));
        crate::replay(&traffic(), &options.config().unwrap()).unwrap()
    }

    fn assert_says(settings: &[(Setting, &str)], limit: Limit, words: &[&str]) {
        let Verdict { limit: found, text } = replayed(settings).verdict;
        assert_eq!(found, limit, "{text}");
        for word in words {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
    }

    #[test]
    fn reports_no_bottleneck() {
        let words = ["Nothing is short", "--find-rate", "device alone finds nearly all"];
        let large = [(Setting::Gpu, "h200"), (Setting::Gpus, "4")];
        assert_says(&large, Limit::Nothing, &words);
    }

    #[test]
    fn reports_a_compute_bottleneck() {
        let fast = (Setting::SpeedUp, "10000");
        let by_clock = (Setting::Sessions, "by-the-clock");
        let words = ["come faster than they are served", "--workers"];
        assert_says(&[fast, by_clock], Limit::Compute, &words);
        assert_says(&[(Setting::Concurrency, "64")], Limit::Compute, &["64 requests at a time"]);
    }

    #[test]
    fn reports_a_slow_link() {
        let small = [(Setting::Device, "150k"), (Setting::Host, "2M")];
        let slow = [small[0], small[1], (Setting::HostBandwidth, "100MB/s")];
        let Verdict { limit, text } = replayed(&slow).verdict;
        assert!(
            matches!(limit, Limit::Link(LinkName::HostToDevice | LinkName::DeviceToHost)),
            "{text}"
        );
        assert!(text.contains("carries something"), "{text}");
    }

    #[test]
    fn reports_the_running_limit() {
        assert_says(&[(Setting::RunningMax, "1")], Limit::RunningMax, &["one of 1 to end"]);
    }

    #[test]
    fn reports_a_small_device() {
        assert_says(&[(Setting::Device, "320")], Limit::DeviceSize, &["No request could run"]);
    }

    #[test]
    fn explains_lost_reuse() {
        let device = (Setting::Device, "150k");
        let lost = |settings: &[(Setting, &str)]| cache(&replayed(settings));
        let without_host = lost(&[device, (Setting::Host, "0")]);
        assert!(without_host.contains("there is no host tier"), "{without_host}");
        let without_l3 = lost(&[device, (Setting::Host, "150k"), (Setting::L3, "0")]);
        assert!(without_l3.contains("full and there is no L3"), "{without_l3}");
        let small_l3 = lost(&[device, (Setting::Host, "150k"), (Setting::L3, "150k")]);
        assert!(small_l3.contains("L3 had to let go of"), "{small_l3}");
        let enough = lost(&[device, (Setting::Host, "300k")]);
        assert!(enough.contains("larger ones would not help"), "{enough}");
    }

    #[test]
    fn distinguishes_waits_for_l3_and_memory() {
        let mut report = replayed(&[]);
        let length = report.series.waiting.len();
        let series = &mut report.series;
        (series.waiting, series.prefetching) = (vec![9.0; length], vec![8.0; length]);
        series.prefilling = vec![1.0; length];
        assert_eq!(Verdict::of(&report).limit, Limit::Fetching);
        report.series.prefetching = vec![0.0; length];
        assert_eq!(Verdict::of(&report).limit, Limit::Waiting);
        report.series.device_pinned = vec![0.99; length];
        let Verdict { limit, text } = Verdict::of(&report);
        assert_eq!(limit, Limit::DeviceMemory);
        assert!(text.contains("90.0 % of the time before first tokens"), "{text}");
        // Constant prefill keeps the device full.
        report.computed_tokens *= 1_000;
        report.workers.iter_mut().for_each(|worker| worker.busy = 1.0);
        report.queue_ms.p50 = 10.0 * report.itl_ms.p50;
        assert_eq!(Verdict::of(&report).limit, Limit::Compute);
    }
}
