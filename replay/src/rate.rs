//! Search for the largest request rate at which the SLO is met.

use std::sync::atomic::AtomicBool;

use serde::Serialize;

use crate::config::{Arrival, Config};
use crate::error::ReplayError;
use crate::report::Report;
use crate::slo::{Goodput, Slo, mean};
use crate::sweep::in_parallel;
use crate::trace::Trace;

/// Result of a search.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RateSearch {
    /// The largest tried rate that meets the SLO, if any.
    pub best: Option<TriedRate>,
    /// The smallest tried rate above it that violates the SLO, if any.
    pub broken: Option<TriedRate>,
    /// All tried rates, slowest first.
    pub tried: Vec<TriedRate>,
    /// Number of rounds of two replays.
    pub rounds: u32,
}

/// Result of the replays at one rate. Percentiles and costs are means over the days.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TriedRate {
    /// Factor by which the trace was replayed faster.
    pub speed_up: f64,
    /// Arriving requests per second.
    pub requests_per_s: f64,
    /// Good requests of all days together.
    pub goodput: Goodput,
    /// 90th percentile of the time to the first token.
    pub ttft_ms_p90: f64,
    /// 90th percentile of the time per output token.
    pub tpot_ms_p90: f64,
    /// Cost of a million tokens.
    pub per_million_tokens: f64,
}

/// Ratio of the limits at which the search ends.
const NEAR: f64 = 1.02;
/// Step between rates before both limits are known.
const STRIDE: f64 = 4.0;
/// Largest factor between a tried rate and that of the trace, in either direction.
const FACTOR_MAX: f64 = 4096.0;

/// Finds the largest rate at which the SLO is met, by replaying a trace faster or slower, two rates at a time.
///
/// Each rate is replayed on every one of `days`, and judged by the requests of all of them. The search assumes
/// that a higher rate never helps.
///
/// # Errors
/// Fails if there is no SLO or no day, if arrival times do not count, or the error of a replay.
pub fn find_rate(
    stop: &AtomicBool,
    days: &[Trace],
    config: &Config,
    threads: usize,
    progress: &(dyn Fn() + Sync),
) -> Result<RateSearch, ReplayError> {
    let refuse = |setting, limits| {
        Err(ReplayError::Setting { setting, value: "as it is".to_owned(), limits })
    };
    if !config.slo.promises() {
        return refuse("slo", "set an SLO first: --slo-ttft or --slo-tpot");
    }
    if !matches!(config.arrival, Arrival::Trace { .. }) {
        return refuse(
            "arrival",
            "a rate can only be found for requests that arrive at the times of the trace",
        );
    }
    let span_us = |day: &Trace| day.requests().last().map_or(0, |last| last.arrival_us);
    let span_s = days.iter().map(span_us).sum::<u64>() as f64 / 1e6;
    if span_s <= 0.0 {
        return refuse("trace", "use a trace whose requests do not all arrive at once");
    }
    let gaps: usize = days.iter().map(|day| day.requests().len().saturating_sub(1)).sum();
    let own_rate = gaps as f64 / span_s;
    let mut search = Search { tried: Vec::new(), rounds: 0 };
    while let Some(speed_ups) = search.next() {
        let replays = in_parallel(threads, speed_ups.len() * days.len(), &|place| {
            let (rate, day) = (place / days.len(), place % days.len());
            let arrival = Arrival::Trace { speed_up: speed_ups[rate] };
            let config = Config { arrival, ..config.clone() };
            let report = crate::replay_unless(stop, &days[day], &config);
            progress();
            report
        });
        let reports = replays.into_iter().collect::<Result<Vec<_>, _>>()?;
        for (speed_up, reports) in speed_ups.into_iter().zip(reports.chunks(days.len())) {
            search.tried.extend(TriedRate::new(speed_up, own_rate, &config.slo, reports));
        }
        search.tried.sort_by(|a, b| a.speed_up.total_cmp(&b.speed_up));
        search.rounds += 1;
    }
    let (best, broken) = search.limits();
    Ok(RateSearch {
        best: best.copied(),
        broken: broken.copied(),
        rounds: search.rounds,
        tried: search.tried,
    })
}

impl TriedRate {
    /// None without an SLO.
    fn new(speed_up: f64, own_rate: f64, slo: &Slo, days: &[Report]) -> Option<Self> {
        let goodputs: Vec<Goodput> = days.iter().filter_map(|day| day.goodput).collect();
        let mean = |figure: fn(&Report) -> f64| mean(days.iter().map(figure));
        Some(Self {
            speed_up,
            requests_per_s: own_rate * speed_up,
            goodput: Goodput::of_days(&goodputs, slo)?,
            ttft_ms_p90: mean(|day| day.ttft_ms.p90),
            tpot_ms_p90: mean(|day| day.tpot_ms.p90),
            per_million_tokens: mean(|day| day.spend.per_million_tokens),
        })
    }
}

struct Search {
    /// Slowest first.
    tried: Vec<TriedRate>,
    rounds: u32,
}

impl Search {
    /// Returns the largest rate before the first violation, and that violation.
    fn limits(&self) -> (Option<&TriedRate>, Option<&TriedRate>) {
        let broken = self.tried.iter().position(|tried| !tried.goodput.is_kept);
        let kept = broken.unwrap_or(self.tried.len()).checked_sub(1);
        (kept.map(|place| &self.tried[place]), broken.map(|place| &self.tried[place]))
    }

    /// Returns the next rates to try.
    fn next(&self) -> Option<[f64; 2]> {
        match self.limits() {
            (None, None) => Some([1.0, STRIDE]),
            (Some(best), None) => {
                let next = best.speed_up * STRIDE;
                (next <= FACTOR_MAX).then_some([next, next * STRIDE])
            }
            (None, Some(broken)) => {
                let next = broken.speed_up / STRIDE;
                (next >= 1.0 / FACTOR_MAX).then_some([next / STRIDE, next])
            }
            (Some(best), Some(broken)) => {
                let ratio = broken.speed_up / best.speed_up;
                let third = libm::cbrt(ratio);
                let between = [best.speed_up * third, best.speed_up * third * third];
                (ratio > NEAR).then_some(between)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Options, Setting};
    use crate::trace::Synthetic;

    fn config(choices: &[(Setting, &str)]) -> Config {
        let mut options = Options::default();
        options.set(Setting::Device, "200k");
        options.set(Setting::Gpus, "1");
        choices.iter().for_each(|(setting, value)| options.set(*setting, value));
        options.config().unwrap()
    }

    fn search(config: &Config, threads: usize) -> Result<RateSearch, ReplayError> {
        let trace = Synthetic { requests: 80, ..Synthetic::default() }.trace().unwrap();
        find_rate(&AtomicBool::new(false), &[trace], config, threads, &|| {})
    }

    #[test]
    fn limit_lies_between_met_and_violated_rates() {
        let config = config(&[(Setting::SloTtft, "2s"), (Setting::SloTpot, "60ms")]);
        let found = search(&config, 2).unwrap();
        let (best, broken) = (found.best.unwrap(), found.broken.unwrap());
        assert!(best.goodput.is_kept && !broken.goodput.is_kept);
        assert!(broken.speed_up / best.speed_up <= NEAR, "{best:?} {broken:?}");
        assert!(found.rounds <= 9, "{}", found.rounds);
        assert!(found.tried.is_sorted_by(|a, b| a.speed_up < b.speed_up));
        assert_eq!(found, search(&config, 1).unwrap(), "on any number of threads");
    }

    #[test]
    fn unreachable_or_trivial_slo_ends_the_search() {
        let never = search(&config(&[(Setting::SloTtft, "1us")]), 2).unwrap();
        assert!(never.best.is_none() && never.broken.is_some(), "{never:?}");
        let always = search(&config(&[(Setting::SloTtft, "3600s")]), 2).unwrap();
        assert!(always.best.is_some() && always.broken.is_none(), "{always:?}");
    }

    #[test]
    fn rate_is_judged_over_all_days() {
        let config = config(&[(Setting::SloTtft, "2s"), (Setting::SloTpot, "60ms")]);
        let first = Synthetic { requests: 80, ..Synthetic::default() }.trace().unwrap();
        let days = [first.another_day(1), first.another_day(2), first];
        let found = find_rate(&AtomicBool::new(false), &days, &config, 2, &|| {}).unwrap();
        let tried = found.best.unwrap();
        let arrival = Arrival::Trace { speed_up: tried.speed_up };
        let config = Config { arrival, ..config };
        let good: u64 =
            days.iter().map(|day| crate::replay(day, &config).unwrap().goodput.unwrap().good).sum();
        assert_eq!(tried.goodput.good, good);
    }

    #[test]
    fn search_needs_an_slo() {
        let refused = search(&config(&[]), 1).unwrap_err().to_string();
        assert!(refused.contains("set an SLO first"), "{refused}");
        let looped = [(Setting::SloTtft, "1s"), (Setting::Concurrency, "4")];
        assert!(search(&config(&looped), 1).is_err());
    }
}
