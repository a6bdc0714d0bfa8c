//! One configuration of a sweep and its figures; with several seeds, their means and confidence
//! intervals.

use serde::Serialize;

use crate::prices::Spend;
use crate::report::{BytesMoved, Distribution, Report, Reuse};
use crate::slo::Goodput;

/// One configuration and its figures; means, if there are several seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SweepPoint {
    /// Values on the axes.
    pub values: Vec<String>,
    /// Size of a worker's device tier.
    pub device_tokens: u64,
    /// Size of a worker's host tier.
    pub host_tokens: u64,
    /// Size of L3; none if unlimited.
    pub l3_tokens: Option<u64>,
    /// Largest amount in L3.
    pub l3_peak_tokens: u64,
    /// Bytes of KV per token.
    pub kv_bytes_per_token: u64,
    /// Number of workers.
    pub workers: u32,
    /// Requests that got all their tokens.
    pub finished: u64,
    /// Requests that failed or were refused.
    pub failed: u64,
    /// Time from the first arrival to the last token.
    pub virtual_s: f64,
    /// Shares of the prompt tokens by source.
    pub reuse: Reuse,
    /// Time from arrival to the first token.
    pub ttft_ms: Distribution,
    /// Time between consecutive tokens.
    pub itl_ms: Distribution,
    /// Mean time per token after the first, by request.
    pub tpot_ms: Distribution,
    /// Time from arrival to the last token.
    pub e2e_ms: Distribution,
    /// Generated tokens per second.
    pub output_tokens_per_s: f64,
    /// Share of time in which workers computed.
    pub busy: f64,
    /// Bytes moved by kind of link.
    pub bytes_moved: BytesMoved,
    /// Requests that met the SLO, if there is one.
    pub goodput: Option<Goodput>,
    /// Costs.
    pub spend: Spend,
    /// True if the configuration is on the Pareto front of cost, time to first token and time
    /// between tokens.
    pub is_on_front: bool,
    /// Confidence intervals, with several seeds.
    pub confidence: Option<Confidence>,
}

/// Half widths of the 95 % confidence intervals of the means.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Confidence {
    /// Number of seeds.
    pub seeds: u32,
    /// Mean time to first token.
    pub ttft_ms_mean: f64,
    /// Its 90th percentile.
    pub ttft_ms_p90: f64,
    /// Its 99th percentile.
    pub ttft_ms_p99: f64,
    /// 90th percentile of the requests' mean times between tokens.
    pub tpot_ms_p90: f64,
    /// 99th percentile of the times between tokens.
    pub itl_ms_p99: f64,
    /// Share of reused prompt tokens.
    pub reuse: f64,
    /// Share of good requests.
    pub good_share: f64,
    /// Cost of a million tokens.
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

    /// Returns the means over several seeds.
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
                // An objective that is missed on one day is not met.
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

/// Returns half of the 95 % confidence interval of the mean of a few values.
fn half_width(values: &[f64]) -> f64 {
    let count = values.len() as f64;
    if values.len() < 2 {
        return 0.0;
    }
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    // For more values the table's last entry is slightly too wide.
    let student = STUDENT[(values.len() - 2).min(STUDENT.len() - 1)];
    student * (squares / (count - 1.0) / count).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_uses_student_t() {
        // Mean 12, deviation 2 of three values.
        assert!((half_width(&[10.0, 12.0, 14.0]) - 4.303 * 2.0 / 3f64.sqrt()).abs() < 1e-9);
        assert_eq!(half_width(&[5.0; 8]), 0.0);
        assert_eq!(half_width(&[5.0]), 0.0);
    }
}
