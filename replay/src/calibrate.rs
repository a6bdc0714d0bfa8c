//! Comparison of predicted step times with measured ones, for a preset and for fitted costs.

use serde::Serialize;

use crate::cost::CostModel;
use crate::error::ReplayError;
use crate::fit::{Fit, Measurement};

/// Accuracy of predicted step times.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Calibration {
    /// Accuracy of the preset, by kind of step and in total.
    pub preset: Vec<Accuracy>,
    /// Accuracy of fitted costs on steps held out from the fit; empty with too few steps.
    pub fitted: Vec<Accuracy>,
    /// The costs of the preset.
    pub preset_cost: CostModel,
    /// The fitted costs, and their residuals.
    pub fit: Fit,
    /// Predictions of each step.
    pub steps: Vec<CheckedStep>,
}

/// Kind of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StepKind {
    /// Prompts only.
    Prefill,
    /// Decodes only.
    Decode,
    /// Both.
    Mixed,
}

/// Errors of predictions, as shares of the measured time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Accuracy {
    /// Kind of steps; none for all.
    pub kind: Option<StepKind>,
    /// Number of steps.
    pub steps: usize,
    /// Mean absolute error.
    pub error_mean: f64,
    /// Largest absolute error.
    pub error_max: f64,
    /// Mean signed error; above 0 if predictions are too high.
    pub bias: f64,
}

/// A measured step and its predictions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CheckedStep {
    /// Measurement.
    #[serde(flatten)]
    pub measured: Measurement,
    /// Time predicted by the preset.
    pub preset_us: f64,
    /// Time predicted by costs fitted to the other parts; to all steps, if there are too few.
    pub fitted_us: f64,
}

/// Number of parts for cross-validation: each is predicted from the others.
const PARTS: usize = 5;
/// Below this number of steps there is no cross-validation.
const STEPS_MIN: usize = 20;

impl Measurement {
    /// Returns the kind of the step.
    #[must_use]
    pub fn kind(&self) -> StepKind {
        match (self.prefill_tokens, self.decode_rows) {
            (_, 0) => StepKind::Prefill,
            (0, _) => StepKind::Decode,
            _ => StepKind::Mixed,
        }
    }
}

impl Calibration {
    /// Compares a preset, and costs fitted to the measurements, with measured steps.
    ///
    /// # Errors
    /// Fails if there are too few measurements.
    pub fn new(preset_cost: CostModel, measured: &[Measurement]) -> Result<Self, ReplayError> {
        let fit = CostModel::fit(measured)?;
        let is_held_back = measured.len() >= STEPS_MIN;
        let costs: Vec<CostModel> = match is_held_back {
            true => (0..PARTS).map(|part| without(measured, part)).collect::<Result<_, _>>()?,
            false => vec![fit.cost; PARTS],
        };
        let step = |(place, &measured): (usize, &Measurement)| CheckedStep {
            measured,
            preset_us: measured.predicted_us(&preset_cost),
            fitted_us: measured.predicted_us(&costs[place % PARTS]),
        };
        let steps: Vec<CheckedStep> = measured.iter().enumerate().map(step).collect();
        Ok(Self {
            preset: accuracies(&steps, |step| step.preset_us),
            fitted: match is_held_back {
                true => accuracies(&steps, |step| step.fitted_us),
                false => Vec::new(),
            },
            preset_cost,
            fit,
            steps,
        })
    }
}

/// Fits costs to all steps except those of one part.
fn without(measured: &[Measurement], part: usize) -> Result<CostModel, ReplayError> {
    let others = measured.iter().enumerate().filter(|(place, _)| place % PARTS != part);
    let others: Vec<Measurement> = others.map(|(_, step)| *step).collect();
    CostModel::fit(&others).map(|fit| fit.cost)
}

fn accuracies(steps: &[CheckedStep], predicted: fn(&CheckedStep) -> f64) -> Vec<Accuracy> {
    let kinds = [StepKind::Prefill, StepKind::Decode, StepKind::Mixed].map(Some);
    let accuracy = |kind: Option<StepKind>| {
        let of_kind = |step: &&CheckedStep| kind.is_none_or(|kind| step.measured.kind() == kind);
        let error = |step: &CheckedStep| predicted(step) / step.measured.step_us - 1.0;
        let errors: Vec<f64> = steps.iter().filter(of_kind).map(error).collect();
        let count = errors.len().max(1) as f64;
        Accuracy {
            kind,
            steps: errors.len(),
            error_mean: errors.iter().map(|error| error.abs()).sum::<f64>() / count,
            error_max: errors.iter().map(|error| error.abs()).fold(0.0, f64::max),
            bias: errors.iter().sum::<f64>() / count,
        }
    };
    let all = kinds.into_iter().chain([None]).map(accuracy);
    all.filter(|accuracy| accuracy.steps > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::StepShape;

    /// Creates steps that take a model's time multiplied by a factor.
    fn measured(cost: &CostModel, factor: f64) -> Vec<Measurement> {
        let mut shapes = Vec::new();
        for tokens in [128, 512, 2048, 8192] {
            for start in [0, 4096, 32_768] {
                let mut shape = StepShape::default();
                shape.add_chunk(start, tokens);
                shapes.push(shape);
                shapes.push(StepShape { decode_rows: 16, decode_context: 16_000, ..shape });
            }
        }
        for decode_rows in [1, 8, 64, 256] {
            for context in [100, 1000, 4000] {
                let decode_context = decode_rows * context;
                shapes.push(StepShape { decode_rows, decode_context, ..StepShape::default() });
            }
        }
        let step = |shape: StepShape| Measurement {
            prefill_tokens: shape.prefill_tokens,
            prefill_pairs: shape.prefill_pairs,
            decode_rows: shape.decode_rows,
            decode_context: shape.decode_context,
            step_us: cost.step_ns(&shape) as f64 / 1000.0 * factor,
        };
        shapes.into_iter().map(step).collect()
    }

    #[test]
    fn reports_errors_by_kind_and_fit_removes_them() {
        let preset = CostModel::preset("llama-3.1-8b", "h200", 1).unwrap();
        let found = Calibration::new(preset, &measured(&preset, 1.25)).unwrap();
        let kinds: Vec<_> = found.preset.iter().map(|of| (of.kind, of.steps)).collect();
        let expected = [
            (Some(StepKind::Prefill), 12),
            (Some(StepKind::Decode), 12),
            (Some(StepKind::Mixed), 12),
            (None, 36),
        ];
        assert_eq!(kinds, expected);
        for of in &found.preset {
            assert!((of.error_mean - 0.2).abs() < 1e-3 && (of.bias + 0.2).abs() < 1e-3, "{of:?}");
        }
        assert!(found.fitted.iter().all(|of| of.error_mean < 0.02), "{:?}", found.fitted);
        let exact = Calibration::new(preset, &measured(&preset, 1.0)).unwrap();
        assert!(exact.preset.iter().all(|of| of.error_max < 1e-3), "{:?}", exact.preset);
    }

    #[test]
    fn few_steps_skip_cross_validation() {
        let preset = CostModel::preset("llama-3.1-8b", "h200", 1).unwrap();
        let few = &measured(&preset, 1.0)[..10];
        assert_eq!(Calibration::new(preset, few).unwrap().fitted, []);
        assert!(Calibration::new(preset, &few[..1]).is_err());
    }
}
