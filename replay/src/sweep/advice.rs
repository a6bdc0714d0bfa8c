//! Conclusions of a sweep: the Pareto front, and the cheapest configuration that is good enough.

use super::{Axis, SweepPoint, describe};
use crate::human;
use crate::verdict::OVERLOADED_SHARE;

/// Without an SLO, times up to this factor above the best are good enough.
const GOOD_ENOUGH: f64 = 1.1;

/// Marks the configurations on the Pareto front.
pub(super) fn mark_front(points: &mut [SweepPoint]) {
    let measures: Vec<[f64; 4]> = points.iter().map(measures).collect();
    for (place, point) in points.iter_mut().enumerate() {
        let beats = |other: &[f64; 4]| {
            let pairs = || other.iter().zip(&measures[place]);
            pairs().all(|(other, own)| other <= own) && pairs().any(|(other, own)| other < own)
        };
        point.is_on_front = point.finished > 0 && !measures.iter().any(beats);
    }
}

/// Returns the measures to minimise: failures, cost, time to the first token, time between tokens.
fn measures(point: &SweepPoint) -> [f64; 4] {
    let (cost, ttft, tpot) = (point.spend.per_million_tokens, point.ttft_ms.p90, point.tpot_ms.p90);
    [point.failed as f64, cost, ttft, tpot]
}

/// Returns the cheapest configuration that is good enough, and the reason.
pub(super) fn answer(axes: &[Axis], points: &[SweepPoint]) -> (usize, String) {
    if points.iter().all(|point| point.finished == 0) {
        let answer =
            "No configuration could run any of the requests: they are too long for the device.";
        return (0, answer.to_owned());
    }
    // A configuration that fails requests is recommended only if all do.
    let fewest = points.iter().map(|point| point.failed).min().unwrap_or(0);
    let candidates: Vec<usize> =
        (0..points.len()).filter(|&place| points[place].failed == fewest).collect();
    let choice = match points.iter().any(|point| point.goodput.is_some()) {
        true => by_promise(points, &candidates),
        false => by_times(points, &candidates),
    };
    let sentence = sentence(axes, points, &choice);
    (choice.place, sentence)
}

/// A recommendation, its reason, and whether all others would have done as well.
struct Choice {
    place: usize,
    reason: String,
    all_are_good: bool,
}

fn cheapest(points: &[SweepPoint], among: &[usize]) -> Option<usize> {
    let cost = |place: usize| points[place].spend.per_million_tokens;
    let order = |&one: &usize, &other: &usize| {
        let by_time = || points[one].ttft_ms.p90.total_cmp(&points[other].ttft_ms.p90);
        cost(one).total_cmp(&cost(other)).then_with(by_time)
    };
    among.iter().copied().min_by(order)
}

/// Selects the cheapest that meets the SLO, or the one nearest to it.
fn by_promise(points: &[SweepPoint], candidates: &[usize]) -> Choice {
    let good = |place: usize| points[place].goodput.map_or(0.0, |goods| goods.share);
    let is_kept = |place: &usize| points[*place].goodput.is_some_and(|goods| goods.is_kept);
    let keeping: Vec<usize> = candidates.iter().copied().filter(is_kept).collect();
    if let Some(place) = cheapest(points, &keeping) {
        let reason = format!(
            "this is the cheapest of {} configurations that meet the SLO: {} of requests meet it",
            keeping.len(),
            human::percent(good(place))
        );
        return Choice { place, reason, all_are_good: keeping.len() == points.len() };
    }
    let nearest = candidates.iter().copied().max_by(|&a, &b| good(a).total_cmp(&good(b)));
    let place = nearest.unwrap_or(0);
    let reason = format!(
        "no configuration meets the SLO, and this one comes closest: {} of requests meet it",
        human::percent(good(place))
    );
    Choice { place, reason, all_are_good: false }
}

/// Selects the cheapest whose times are near the best combination.
fn by_times(points: &[SweepPoint], candidates: &[usize]) -> Choice {
    let least = |time: fn(&SweepPoint) -> f64| {
        let times = candidates.iter().map(|&place| time(&points[place]));
        times.fold(f64::INFINITY, f64::min).max(1e-9)
    };
    let (ttft, tpot) = (least(|point| point.ttft_ms.p90), least(|point| point.tpot_ms.p90));
    // The larger of the two ratios to the shortest time of any candidate.
    let longer = |place: usize| {
        let point = &points[place];
        (point.ttft_ms.p90 / ttft).max(point.tpot_ms.p90 / tpot)
    };
    let best = candidates.iter().copied().min_by(|&a, &b| longer(a).total_cmp(&longer(b)));
    let best = best.unwrap_or(0);
    let is_good = |place: &usize| longer(*place) <= longer(best) * GOOD_ENOUGH;
    let good: Vec<usize> = candidates.iter().copied().filter(is_good).collect();
    let place = cheapest(points, &good).unwrap_or(best);
    let reason = match good.len() {
        1 => "no other configuration is within 10 % of its latencies".to_owned(),
        count => {
            format!("this is the cheapest of {count} with latencies within 10 % of the best")
        }
    };
    Choice { place, reason, all_are_good: good.len() == points.len() && points.len() > 1 }
}

fn sentence(axes: &[Axis], points: &[SweepPoint], choice: &Choice) -> String {
    let point = &points[choice.place];
    let bytes = |tokens: u64| human::bytes((tokens * point.kv_bytes_per_token) as f64);
    let l3 = match point.l3_tokens {
        Some(0) => "no L3".to_owned(),
        Some(tokens) => format!("{} of L3", bytes(tokens)),
        None => format!("unlimited L3 ({} used)", bytes(point.l3_peak_tokens)),
    };
    let (take, reason) = match axes.is_empty() {
        true => ("W".to_owned(), "as configured"),
        false => (format!("Take {}: w", describe(axes, &point.values)), choice.reason.as_str()),
    };
    let mut answer = format!(
        "{take}ith {} of host memory per worker and {l3}, {reason}. TTFT p90 is {} and TPOT p90 is {}, at a \
         cost of ${:.2} per hour or ${:.3} per million tokens. The hit rate is {} of prompt tokens; an \
         unlimited cache would reach {}.",
        bytes(point.host_tokens),
        human::milliseconds(point.ttft_ms.p90),
        human::milliseconds(point.tpot_ms.p90),
        point.spend.per_hour,
        point.spend.per_million_tokens,
        human::percent(point.reuse.total),
        human::percent(point.reuse.ceiling)
    );
    if choice.all_are_good {
        answer += " All configurations are good enough, so only the cost matters.";
    }
    if point.failed > 0 {
        let failed = human::whole(point.failed);
        answer += &format!(" {failed} requests failed or were too long for the device.");
    }
    let is_without_l3 = |point: &SweepPoint| point.l3_tokens == Some(0);
    if points.iter().any(|point| point.host_tokens == 0) && !points.iter().all(is_without_l3) {
        answer += " Configurations without host memory were replayed without L3: pages reach L3 \
                   through host memory.";
    }
    // Decoding workers are always busy; they are overloaded if waiting dominates.
    if point.busy > OVERLOADED_SHARE && point.ttft_ms.p50 > point.e2e_ms.p50 / 2.0 {
        answer += " The workers are overloaded even so: more or faster workers would help more than \
                   memory.";
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Options, Setting};
    use crate::sweep::Sweep;
    use crate::trace::Synthetic;

    #[test]
    fn answer_mentions_that_l3_needs_host_memory() {
        let trace = Synthetic { requests: 60, ..Synthetic::default() }.trace().unwrap();
        let answer = |axes: &[&str]| {
            let axes = axes.iter().map(|axis| Axis::parse(axis).unwrap()).collect();
            Sweep::run(&trace, &Options::default(), axes, 2, &|| {}).unwrap().answer
        };
        assert!(answer(&["host=0,400k", "l3=0,1M"]).contains("without L3"));
        assert!(!answer(&["host=0,400k", "l3=0"]).contains("without L3"));
        assert!(!answer(&["host=400k", "l3=0,1M"]).contains("without L3"));
    }

    /// Creates three configurations of rising cost, with these times to the first token and between
    /// tokens.
    fn three(ttft: [f64; 3], tpot: [f64; 3], slo: Option<&str>) -> Sweep {
        let mut options = Options::default();
        options.set(Setting::Device, "200k");
        if let Some(ttft) = slo {
            options.set(Setting::SloTtft, ttft);
        }
        let trace = Synthetic { requests: 60, ..Synthetic::default() }.trace().unwrap();
        let axes = ["host=400k,600k,1M", "l3=0"].map(|axis| Axis::parse(axis).unwrap());
        let mut sweep = Sweep::run(&trace, &options, axes.to_vec(), 2, &|| {}).unwrap();
        for (place, point) in sweep.points.iter_mut().enumerate() {
            point.ttft_ms.p90 = ttft[place];
            point.tpot_ms.p90 = tpot[place];
            point.spend.per_million_tokens = 1.0 + place as f64;
        }
        mark_front(&mut sweep.points);
        sweep
    }

    fn front(sweep: &Sweep) -> Vec<bool> {
        sweep.points.iter().map(|point| point.is_on_front).collect()
    }

    #[test]
    fn recommends_the_cheapest_near_the_best() {
        let mut sweep = three([120.0, 104.0, 100.0], [20.0; 3], None);
        let (place, sentence) = answer(&sweep.axes, &sweep.points);
        assert_eq!(place, 1);
        assert!(sentence.starts_with("Take host 600k, l3 0: with 73.2 GiB of host memory"));
        assert!(sentence.contains("the cheapest of 2 with latencies within 10 %"), "{sentence}");
        assert_eq!(front(&sweep), [true; 3]);
        sweep.points[1].failed = 1;
        assert_eq!(answer(&sweep.axes, &sweep.points).0, 2);
    }

    #[test]
    fn tpot_counts_as_much_as_ttft() {
        let sweep = three([100.0, 100.0, 100.0], [40.0, 20.0, 20.0], None);
        assert_eq!(answer(&sweep.axes, &sweep.points).0, 1);
        // The third costs more than the second and is no better.
        assert_eq!(front(&sweep), [true, true, false]);
    }

    #[test]
    fn slo_decides_if_set() {
        let mut sweep = three([100.0; 3], [20.0; 3], Some("1s"));
        for (point, share) in sweep.points.iter_mut().zip([0.85, 0.91, 0.99]) {
            let goods = point.goodput.as_mut().unwrap();
            (goods.share, goods.is_kept) = (share, share >= 0.9);
        }
        let (place, sentence) = answer(&sweep.axes, &sweep.points);
        assert_eq!(place, 1);
        assert!(sentence.contains("the cheapest of 2 configurations that meet the SLO: 91.0 %"));
        for point in &mut sweep.points {
            point.goodput.as_mut().unwrap().is_kept = false;
        }
        let (place, sentence) = answer(&sweep.axes, &sweep.points);
        assert_eq!(place, 2);
        assert!(sentence.contains("no configuration meets the SLO"), "{sentence}");
    }
}
