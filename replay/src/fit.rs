//! Fit of the cost model to measured steps.

use serde::{Deserialize, Serialize};

use crate::cost::{CostModel, StepShape};
use crate::error::ReplayError;

/// A measured step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Tokens of prefill chunks.
    #[serde(default)]
    pub prefill_tokens: u64,
    /// For each chunk, its tokens times those before it, and half its square.
    #[serde(default)]
    pub prefill_pairs: u64,
    /// Requests that decode.
    #[serde(default)]
    pub decode_rows: u64,
    /// Total context of those requests.
    #[serde(default)]
    pub decode_context: u64,
    /// Time of the step.
    pub step_us: f64,
}

/// A fitted cost model and its residuals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// The costs.
    pub cost: CostModel,
    /// Steps that it was fitted to.
    pub measurements: usize,
    /// Root mean square residual.
    pub residual_us: f64,
    /// Mean absolute residual, as a share of the measured time.
    pub relative_residual: f64,
}

/// Terms of the fit: a constant, the weights, and the four counts of a step.
const PARTS: usize = 6;
/// Index of the weights term.
const WEIGHTS: usize = 1;
/// Largest number of divisions into weight-bound and compute-bound steps to try.
const DIVISIONS_MAX: usize = 24;
/// Largest number of corrections of a division.
const CORRECTIONS_MAX: usize = 12;
/// Error ratio below which a fit with a weights term is preferred.
const BETTER: f64 = 0.98;
/// Largest number of measurements.
const MEASUREMENTS_MAX: usize = 1 << 20;

impl Measurement {
    /// Reads measurements: JSON with one object per line, or CSV with the same names in its first
    /// line.
    ///
    /// # Errors
    /// Returns the first line that is invalid.
    pub fn parse(text: &str) -> Result<Vec<Self>, ReplayError> {
        let mut lines = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
        let Some((_, first)) = lines.clone().next() else { return Ok(Vec::new()) };
        if first.trim_start().starts_with('{') {
            return bounded(lines.map(|(line, text)| Self::from_json(line, text)));
        }
        let names: Vec<&str> = first.split(',').map(str::trim).collect();
        lines.next();
        bounded(lines.map(|(line, text)| Self::from_csv(line, &names, text)))
    }

    fn from_json(line: usize, text: &str) -> Result<Self, ReplayError> {
        let parsed: Result<Self, _> = serde_json::from_str(text);
        parsed
            .map_err(|error| ReplayError::Measurement { line, problem: error.to_string() })?
            .checked(line)
    }

    fn from_csv(line: usize, names: &[&str], text: &str) -> Result<Self, ReplayError> {
        let refuse = |problem: String| ReplayError::Measurement { line, problem };
        let values: Vec<&str> = text.split(',').map(str::trim).collect();
        if values.len() != names.len() {
            let problem = format!("{} values for {} columns", values.len(), names.len());
            return Err(refuse(problem));
        }
        let mut measurement = Self { step_us: f64::NAN, ..Self::default() };
        for (name, value) in names.iter().zip(values) {
            let count = || {
                let parsed: Result<u64, _> = value.parse();
                parsed.map_err(|_| refuse(format!("{name} = {value:?} is not a count")))
            };
            match *name {
                "prefill_tokens" => measurement.prefill_tokens = count()?,
                "prefill_pairs" => measurement.prefill_pairs = count()?,
                "decode_rows" => measurement.decode_rows = count()?,
                "decode_context" => measurement.decode_context = count()?,
                "step_us" => {
                    let parsed: Result<f64, _> = value.parse();
                    measurement.step_us =
                        parsed.map_err(|_| refuse(format!("step_us = {value:?} is not a time")))?;
                }
                other => {
                    return Err(refuse(format!(
                        "unknown column {other:?}: use prefill_tokens, prefill_pairs, decode_rows, \
                         decode_context and step_us"
                    )));
                }
            }
        }
        measurement.checked(line)
    }

    fn checked(self, line: usize) -> Result<Self, ReplayError> {
        if self.step_us.is_finite() && self.step_us > 0.0 {
            return Ok(self);
        }
        let problem = "step_us must be given and above 0".to_owned();
        Err(ReplayError::Measurement { line, problem })
    }

    /// Returns the composition of the step.
    #[must_use]
    pub fn shape(&self) -> StepShape {
        StepShape {
            prefill_tokens: self.prefill_tokens,
            prefill_pairs: self.prefill_pairs,
            decode_rows: self.decode_rows,
            decode_context: self.decode_context,
        }
    }

    /// Returns the predicted time at these costs.
    #[must_use]
    pub fn predicted_us(&self, cost: &CostModel) -> f64 {
        cost.step_ns(&self.shape()) as f64 / 1000.0
    }

    fn tokens(&self) -> u64 {
        self.prefill_tokens + self.decode_rows
    }

    /// Returns the terms of the step's time: a weight-bound step has the weights term instead of
    /// products.
    fn parts(&self, waits_for_weights: bool) -> [f64; PARTS] {
        let products = f64::from(u8::from(!waits_for_weights));
        [
            1.0,
            f64::from(u8::from(waits_for_weights)),
            self.prefill_tokens as f64 * products,
            self.prefill_pairs as f64,
            self.decode_rows as f64 * products,
            self.decode_context as f64,
        ]
    }
}

fn bounded(
    measurements: impl Iterator<Item = Result<Measurement, ReplayError>>,
) -> Result<Vec<Measurement>, ReplayError> {
    let mut all = Vec::new();
    for measurement in measurements {
        if all.len() == MEASUREMENTS_MAX {
            let problem = format!("at most {MEASUREMENTS_MAX} measurements are supported");
            return Err(ReplayError::Measurement { line: all.len() + 1, problem });
        }
        all.push(measurement?);
    }
    Ok(all)
}

impl CostModel {
    /// Fits costs to measured steps by least squares of the relative errors, so that short steps
    /// count as much as long ones. Costs are non-negative: a term that would be negative is
    /// dropped, and the others are fitted again.
    ///
    /// It is unknown which steps are bound by the weights and which by products. Several divisions
    /// by the number of tokens are tried; each is corrected by its fit until it is stable, and the
    /// best is taken. Experts and exchanges between GPUs cannot be separated from the other terms,
    /// and are included in them.
    ///
    /// # Errors
    /// Fails if there are too few measurements.
    pub fn fit(measurements: &[Measurement]) -> Result<Fit, ReplayError> {
        // A term that is always zero cannot be fitted; the weights term is used only in divisions
        // with weight-bound steps.
        let counts = |part: usize| measurements.iter().any(|m| m.parts(false)[part] != 0.0);
        let used: [bool; PARTS] = std::array::from_fn(counts);
        let needed = used.iter().filter(|used| **used).count().max(2);
        if measurements.len() < needed {
            return Err(ReplayError::TooFewMeasurements { given: measurements.len(), needed });
        }
        let mut best = Fit::new(
            solve_positive(measurements, &vec![false; measurements.len()], used),
            measurements,
        );
        if measurements.len() > needed {
            for tokens in divisions(measurements) {
                let fit = fit_divided(measurements, used, tokens);
                if fit.relative_residual < best.relative_residual * BETTER {
                    best = fit;
                }
            }
        }
        Ok(best)
    }
}

impl Fit {
    fn new(cost: CostModel, measurements: &[Measurement]) -> Self {
        let (mut squares, mut relative) = (0.0, 0.0);
        for measurement in measurements {
            let off = measurement.predicted_us(&cost) - measurement.step_us;
            squares += off * off;
            relative += off.abs() / measurement.step_us;
        }
        let count = measurements.len() as f64;
        Self {
            cost,
            measurements: measurements.len(),
            residual_us: (squares / count).sqrt(),
            relative_residual: relative / count,
        }
    }
}

/// Returns candidates for the largest number of tokens of a weight-bound step: those that occur, or
/// a sample of them.
fn divisions(measurements: &[Measurement]) -> Vec<u64> {
    let mut tokens: Vec<u64> = measurements.iter().map(Measurement::tokens).collect();
    tokens.sort_unstable();
    tokens.dedup();
    let every = tokens.len().div_ceil(DIVISIONS_MAX).max(1);
    tokens.into_iter().step_by(every).collect()
}

/// Fits with the steps of up to `tokens` tokens as weight-bound, and corrects the division.
fn fit_divided(measurements: &[Measurement], mut used: [bool; PARTS], tokens: u64) -> Fit {
    used[WEIGHTS] = true;
    let mut waits: Vec<bool> = measurements.iter().map(|m| m.tokens() <= tokens).collect();
    let mut cost = solve_positive(measurements, &waits, used);
    for _ in 0..CORRECTIONS_MAX {
        let products = |m: &Measurement| {
            cost.prefill_token_ns * m.prefill_tokens as f64
                + cost.decode_row_ns * m.decode_rows as f64
        };
        let corrected: Vec<bool> =
            measurements.iter().map(|m| products(m) < cost.weights_ns).collect();
        if corrected == waits {
            break;
        }
        waits = corrected;
        cost = solve_positive(measurements, &waits, used);
    }
    Fit::new(cost, measurements)
}

/// Fits non-negative costs.
fn solve_positive(
    measurements: &[Measurement],
    waits: &[bool],
    mut used: [bool; PARTS],
) -> CostModel {
    let costs_us = loop {
        let costs = solve(measurements, waits, &used);
        let worst = (0..PARTS).min_by(|&a, &b| costs[a].total_cmp(&costs[b])).unwrap_or(0);
        if costs[worst] >= 0.0 {
            break costs;
        }
        used[worst] = false;
    };
    let ns = costs_us.map(|us| us * 1000.0);
    CostModel {
        step_ns: ns[0],
        weights_ns: ns[WEIGHTS],
        prefill_token_ns: ns[2],
        prefill_pair_ns: ns[3],
        decode_row_ns: ns[4],
        decode_context_ns: ns[5],
        ..CostModel::default()
    }
}

/// Least squares over the terms in use, by the normal equations. Columns are scaled to equal size
/// first, because pairs are in the millions and rows in the dozens.
fn solve(measurements: &[Measurement], waits: &[bool], used: &[bool; PARTS]) -> [f64; PARTS] {
    let relative = |(measurement, &waits): (&Measurement, &bool)| {
        measurement.parts(waits).map(|part| part / measurement.step_us)
    };
    let mut scale = [0.0f64; PARTS];
    for parts in measurements.iter().zip(waits).map(relative) {
        scale.iter_mut().zip(parts).for_each(|(scale, part)| *scale = scale.max(part));
    }
    let mut rows = [[0.0f64; PARTS + 1]; PARTS];
    for mut parts in measurements.iter().zip(waits).map(relative) {
        for place in 0..PARTS {
            let in_use = used[place] && scale[place] > 0.0;
            parts[place] = if in_use { parts[place] / scale[place] } else { 0.0 };
        }
        for place in 0..PARTS {
            for other in 0..PARTS {
                rows[place][other] += parts[place] * parts[other];
            }
            rows[place][PARTS] += parts[place];
        }
    }
    let mut costs = eliminate(rows);
    for place in 0..PARTS {
        let in_use = used[place] && scale[place] > 0.0;
        costs[place] = if in_use { costs[place] / scale[place] } else { 0.0 };
    }
    costs
}

/// Gaussian elimination with partial pivoting; undetermined values are 0.
fn eliminate(mut rows: [[f64; PARTS + 1]; PARTS]) -> [f64; PARTS] {
    let tiny = 1e-12 * rows.iter().flatten().fold(0.0f64, |most, value| most.max(value.abs()));
    let mut pivot_of = [None; PARTS];
    let mut next = 0;
    for column in 0..PARTS {
        let largest =
            (next..PARTS).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs()));
        let Some(largest) = largest.filter(|&row| rows[row][column].abs() > tiny) else { continue };
        rows.swap(next, largest);
        let pivot = rows[next];
        for (place, row) in rows.iter_mut().enumerate() {
            if place != next {
                let factor = row[column] / pivot[column];
                row.iter_mut().zip(pivot).for_each(|(value, above)| *value -= factor * above);
            }
        }
        pivot_of[column] = Some(next);
        next += 1;
    }
    let mut solution = [0.0; PARTS];
    for column in 0..PARTS {
        if let Some(row) = pivot_of[column] {
            solution[column] = rows[row][PARTS] / rows[row][column];
        }
    }
    solution
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(cost: &CostModel, noise: f64) -> Vec<Measurement> {
        let step = |index: u64| {
            let word = index.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            let shape = StepShape {
                prefill_tokens: (word >> 50) % 4096,
                prefill_pairs: (word >> 40) % 10_000_000,
                decode_rows: (word >> 30) % 200,
                decode_context: (word >> 20) % 900_000,
            };
            let sign = if index.is_multiple_of(2) { 1.0 } else { -1.0 };
            Measurement {
                prefill_tokens: shape.prefill_tokens,
                prefill_pairs: shape.prefill_pairs,
                decode_rows: shape.decode_rows,
                decode_context: shape.decode_context,
                step_us: cost.step_ns(&shape) as f64 / 1000.0 * (1.0 + sign * noise),
            }
        };
        (1..200).map(step).collect()
    }

    fn known() -> CostModel {
        CostModel {
            step_ns: 5_000_000.0,
            weights_ns: 0.0,
            prefill_token_ns: 30_000.0,
            prefill_pair_ns: 1.5,
            decode_row_ns: 40_000.0,
            decode_context_ns: 50.0,
            ..CostModel::default()
        }
    }

    /// Creates typical steps of an engine: chunks of prompts, decodes of few and of many requests,
    /// and mixed steps.
    fn usual_steps(cost: &CostModel, noise: f64) -> Vec<Measurement> {
        let mut shapes = Vec::new();
        for chunk in [16, 64, 256, 1024, 4096, 8192] {
            for start in [0, 2048, 16_384] {
                let mut shape = StepShape::default();
                shape.add_chunk(start, chunk);
                shapes.push(shape);
                let (decode_rows, decode_context) = (32, 32 * 4096);
                shapes.push(StepShape { decode_rows, decode_context, ..shape });
            }
        }
        for decode_rows in [1, 4, 16, 64, 128, 256] {
            for context in [128, 2048, 8192] {
                let decode_context = decode_rows * context;
                shapes.push(StepShape { decode_rows, decode_context, ..StepShape::default() });
            }
        }
        let measured = |(place, shape): (usize, StepShape)| Measurement {
            prefill_tokens: shape.prefill_tokens,
            prefill_pairs: shape.prefill_pairs,
            decode_rows: shape.decode_rows,
            decode_context: shape.decode_context,
            step_us: cost.step_ns(&shape) as f64 / 1000.0
                * (1.0 + if place % 3 == 0 { noise } else { -noise / 2.0 }),
        };
        shapes.into_iter().enumerate().map(measured).collect()
    }

    #[test]
    fn fits_weights_of_weight_bound_steps() {
        for (model, gpu) in
            [("llama-3.1-8b", "h200"), ("qwen2.5-32b", "h100"), ("mistral-7b", "l40s")]
        {
            let known = CostModel::preset(model, gpu, 1).unwrap();
            for (noise, near) in [(0.0, 0.01), (0.02, 0.15)] {
                let found = CostModel::fit(&usual_steps(&known, noise)).unwrap();
                let pairs = [
                    (found.cost.weights_ns, known.weights_ns),
                    (found.cost.prefill_token_ns, known.prefill_token_ns),
                    (found.cost.prefill_pair_ns, known.prefill_pair_ns),
                    (found.cost.decode_context_ns, known.decode_context_ns),
                ];
                for (part, known) in pairs {
                    assert!((part / known - 1.0).abs() < near, "{model}: {part} for {known}");
                }
                assert!(found.relative_residual <= noise + 0.001, "{found:?}");
            }
        }
    }

    #[test]
    fn fit_recovers_known_costs() {
        let fit = CostModel::fit(&measured(&known(), 0.0)).unwrap();
        let (found, known) = (fit.cost, known());
        let pairs = [
            (found.step_ns, known.step_ns),
            (found.prefill_token_ns, known.prefill_token_ns),
            (found.prefill_pair_ns, known.prefill_pair_ns),
            (found.decode_row_ns, known.decode_row_ns),
            (found.decode_context_ns, known.decode_context_ns),
        ];
        for (found, known) in pairs {
            assert!((found / known - 1.0).abs() < 1e-3, "{found} for {known}");
        }
        assert!(fit.residual_us < 1.0, "{fit:?}");
    }

    #[test]
    fn residual_reflects_noise() {
        let fit = CostModel::fit(&measured(&known(), 0.05)).unwrap();
        assert!((0.03..0.07).contains(&fit.relative_residual), "{fit:?}");
    }

    #[test]
    fn fitted_costs_are_non_negative() {
        let mut measurements = measured(&known(), 0.0);
        for measurement in &mut measurements {
            measurement.step_us = 1000.0 + 1e9 / (1.0 + measurement.decode_rows as f64);
        }
        let cost = CostModel::fit(&measurements).unwrap().cost;
        assert_eq!(cost.decode_row_ns, 0.0);
        assert!(cost.check().is_ok(), "{cost:?}");
    }

    #[test]
    fn csv_and_json_are_equivalent() {
        let csv = "decode_rows, decode_context, step_us\n8, 1000, 7000.5\n\n9, 2000, 7100\n";
        let json = "{\"decode_rows\":8,\"decode_context\":1000,\"step_us\":7000.5}\n\
                    {\"decode_rows\":9,\"decode_context\":2000,\"step_us\":7100}\n";
        let read = Measurement::parse(csv).unwrap();
        assert_eq!(read, Measurement::parse(json).unwrap());
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn error_names_the_invalid_line() {
        for (text, line) in [
            ("decode_rows,step_us\n1,2\n3\n", 3),
            ("decode_rows,step_us\n1,2\n\nx,3\n", 4),
            ("rows,step_us\n1,2\n", 2),
            ("decode_rows\n1\n", 2),
            ("{\"step_us\":1}\n{\"step_us\":0}\n", 2),
            ("{\"step_us\":1}\n{\"step_us\":\n", 2),
        ] {
            match Measurement::parse(text) {
                Err(ReplayError::Measurement { line: named, .. }) => assert_eq!(named, line),
                other => panic!("{text:?} gave {other:?}"),
            }
        }
        let few = CostModel::fit(&Measurement::parse("step_us\n5\n").unwrap());
        assert_eq!(few, Err(ReplayError::TooFewMeasurements { given: 1, needed: 2 }));
    }
}
