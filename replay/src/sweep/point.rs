//! One configuration of a sweep and its figures; with several seeds, their means and how sure they are.

use serde::Serialize;

use crate::prices::Spend;
use crate::report::{BytesMoved, Distribution, Report, Reuse};
use crate::slo::Goodput;

/// One configuration and its figures: with several seeds, the means over them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SweepPoint {
    /// The values on the axes.
    pub values: Vec<String>,
    /// The size of a worker's device tier.
    pub device_tokens: u64,
    /// The size of a worker's host tier.
    pub host_tokens: u64,
    /// The size of L3; none for no limit.
    pub l3_tokens: Option<u64>,
    /// The most that L3 held.
    pub l3_peak_tokens: u64,
    /// Bytes of KV for one token.
    pub kv_bytes_per_token: u64,
    /// Workers.
    pub workers: u32,
    /// Requests that got all their tokens.
    pub finished: u64,
    /// Requests that failed or could not be taken.
    pub failed: u64,
    /// From the first arrival to the last token.
    pub virtual_s: f64,
    /// Which share of the prompt tokens was found where.
    pub reuse: Reuse,
    /// From arrival to the first token.
    pub ttft_ms: Distribution,
    /// Between one token and the next.
    pub itl_ms: Distribution,
    /// Of each request, how long its tokens took on average after the first.
    pub tpot_ms: Distribution,
    /// From arrival to the last token.
    pub e2e_ms: Distribution,
    /// Tokens produced in a second.
    pub output_tokens_per_s: f64,
    /// The share of the time in which workers computed.
    pub busy: f64,
    /// Bytes that went over each kind of link.
    pub bytes_moved: BytesMoved,
    /// How many got what was promised, if anything was.
    pub goodput: Option<Goodput>,
    /// What it costs.
    pub spend: Spend,
    /// Whether no other configuration is as good in every respect (cost, time to first token, time
    /// between tokens) and better in one.
    pub is_on_front: bool,
    /// How sure the figures are, if there were several seeds.
    pub confidence: Option<Confidence>,
}

/// By how much the mean over more and more seeds is expected to differ from what is told, at the most,
/// in 95 of 100 cases.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Confidence {
    /// How many seeds there were.
    pub seeds: u32,
    /// Of the mean time to first token.
    pub ttft_ms_mean: f64,
    /// Of its 90th percentile.
    pub ttft_ms_p90: f64,
    /// Of its 99th percentile.
    pub ttft_ms_p99: f64,
    /// Of the 90th percentile of the requests' mean times between tokens.
    pub tpot_ms_p90: f64,
    /// Of the 99th percentile of the times between tokens.
    pub itl_ms_p99: f64,
    /// Of the share of prompt tokens that was reused.
    pub reuse: f64,
    /// Of the share of good requests.
    pub good_share: f64,
    /// Of what a million tokens cost.
    pub per_million_tokens: f64,
}

impl SweepPoint {
    pub(super) fn new(values: Vec<String>, report: &Report) -> Self {
        let config = &report.config;
        let page_size = u64::from(config.scheduler.cache.page_size);
        let tokens = |pages: u64| pages * page_size;
        let workers = report.workers.len().max(1) as f64;
        Self {
            values,
            device_tokens: tokens(config.scheduler.cache.device_pages.into()),
            host_tokens: tokens(config.scheduler.cache.host_pages.into()),
            l3_tokens: match config.scheduler.l3 {
                Some(_) => config.store.pages_max.map(tokens),
                None => Some(0),
            },
            l3_peak_tokens: report.store.map_or(0, |store| tokens(store.pages_peak)),
            kv_bytes_per_token: config.kv_bytes_per_token,
            workers: config.workers_in_all(),
            finished: report.finished,
            failed: report.failed + report.refused,
            virtual_s: report.virtual_s,
            reuse: report.reuse,
            ttft_ms: report.ttft_ms,
            itl_ms: report.itl_ms,
            tpot_ms: report.tpot_ms,
            e2e_ms: report.e2e_ms,
            output_tokens_per_s: report.output_tokens_per_s,
            busy: report.workers.iter().map(|worker| worker.busy).sum::<f64>() / workers,
            bytes_moved: report.bytes_moved,
            goodput: report.goodput,
            spend: report.spend,
            is_on_front: false,
            confidence: None,
        }
    }

    /// The means over several seeds.
    pub(super) fn mean_of(points: &[Self]) -> Option<Self> {
        let first = points.first()?;
        if points.len() == 1 {
            return Some(first.clone());
        }
        let mean =
            |of: &dyn Fn(&Self) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
        let whole = |of: &dyn Fn(&Self) -> u64| mean(&|point| of(point) as f64).round() as u64;
        let distribution = |of: fn(&Self) -> &Distribution| Distribution {
            count: whole(&|point| of(point).count),
            mean: mean(&|point| of(point).mean),
            p50: mean(&|point| of(point).p50),
            p90: mean(&|point| of(point).p90),
            p99: mean(&|point| of(point).p99),
            max: mean(&|point| of(point).max),
        };
        let goodput =
            |of: fn(&Goodput) -> f64| mean(&|point| point.goodput.as_ref().map_or(0.0, of));
        let spend = |of: fn(&Spend) -> f64| mean(&|point| of(&point.spend));
        Some(Self {
            finished: whole(&|point| point.finished),
            failed: whole(&|point| point.failed),
            l3_peak_tokens: whole(&|point| point.l3_peak_tokens),
            virtual_s: mean(&|point| point.virtual_s),
            reuse: Reuse {
                device: mean(&|point| point.reuse.device),
                host: mean(&|point| point.reuse.host),
                l3: mean(&|point| point.reuse.l3),
                total: mean(&|point| point.reuse.total),
                ceiling: mean(&|point| point.reuse.ceiling),
            },
            ttft_ms: distribution(|point| &point.ttft_ms),
            itl_ms: distribution(|point| &point.itl_ms),
            tpot_ms: distribution(|point| &point.tpot_ms),
            e2e_ms: distribution(|point| &point.e2e_ms),
            output_tokens_per_s: mean(&|point| point.output_tokens_per_s),
            busy: mean(&|point| point.busy),
            bytes_moved: BytesMoved {
                host_to_device: whole(&|point| point.bytes_moved.host_to_device),
                device_to_host: whole(&|point| point.bytes_moved.device_to_host),
                l3_to_host: whole(&|point| point.bytes_moved.l3_to_host),
                host_to_l3: whole(&|point| point.bytes_moved.host_to_l3),
            },
            goodput: first.goodput.map(|_| Goodput {
                requests: whole(&|point| point.goodput.map_or(0, |goods| goods.requests)),
                good: whole(&|point| point.goodput.map_or(0, |goods| goods.good)),
                share: goodput(|goods| goods.share),
                requests_per_s: goodput(|goods| goods.requests_per_s),
                ttft_share: goodput(|goods| goods.ttft_share),
                tpot_share: goodput(|goods| goods.tpot_share),
                // A promise that one day of several breaks is not kept.
                is_kept: points
                    .iter()
                    .all(|point| point.goodput.is_some_and(|goods| goods.is_kept)),
            }),
            spend: Spend {
                per_hour: spend(|spend| spend.per_hour),
                gpu_per_hour: spend(|spend| spend.gpu_per_hour),
                host_per_hour: spend(|spend| spend.host_per_hour),
                l3_per_hour: spend(|spend| spend.l3_per_hour),
                per_million_tokens: spend(|spend| spend.per_million_tokens),
                per_million_output_tokens: spend(|spend| spend.per_million_output_tokens),
            },
            confidence: Some(Confidence::of(points)),
            ..first.clone()
        })
    }
}

impl Confidence {
    fn of(points: &[SweepPoint]) -> Self {
        let of = |value: fn(&SweepPoint) -> f64| {
            half_width(&points.iter().map(value).collect::<Vec<_>>())
        };
        Self {
            seeds: points.len() as u32,
            ttft_ms_mean: of(|point| point.ttft_ms.mean),
            ttft_ms_p90: of(|point| point.ttft_ms.p90),
            ttft_ms_p99: of(|point| point.ttft_ms.p99),
            tpot_ms_p90: of(|point| point.tpot_ms.p90),
            itl_ms_p99: of(|point| point.itl_ms.p99),
            reuse: of(|point| point.reuse.total),
            good_share: of(|point| point.goodput.map_or(0.0, |goods| goods.share)),
            per_million_tokens: of(|point| point.spend.per_million_tokens),
        }
    }
}

/// Student's 97.5th percentile for one degree of freedom and more.
const STUDENT: [f64; 15] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131,
];

/// Half of the 95 % interval around the mean of a few values.
fn half_width(values: &[f64]) -> f64 {
    let count = values.len() as f64;
    if values.len() < 2 {
        return 0.0;
    }
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    // The table's last value is a little too careful for more.
    let student = STUDENT[(values.len() - 2).min(STUDENT.len() - 1)];
    student * (squares / (count - 1.0) / count).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_student_s() {
        // Mean 12, deviation 2 of three values.
        assert!((half_width(&[10.0, 12.0, 14.0]) - 4.303 * 2.0 / 3f64.sqrt()).abs() < 1e-9);
        assert_eq!(half_width(&[5.0; 8]), 0.0);
        assert_eq!(half_width(&[5.0]), 0.0);
    }
}
