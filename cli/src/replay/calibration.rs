//! Predicted against measured steps, for a terminal.

use std::fmt::Write;

use terrace_replay::human::{milliseconds, percent};
use terrace_replay::{Accuracy, Calibration, CheckedStep, StepKind};

/// More steps than this are not listed.
const LISTED_MAX: usize = 60;

pub(super) fn draw(file: &str, machine: &str, calibration: &Calibration) -> String {
    let mut text = format!("{file}: {} measured steps\n\n", calibration.steps.len());
    let _ = writeln!(
        text,
        "  {:<10}{:>8}{:>14}{:>10}{:>9}{:>16}{:>10}{:>9}",
        "", "steps", "preset", "largest", "bias", "fitted", "largest", "bias"
    );
    for (place, preset) in calibration.preset.iter().enumerate() {
        let _ = write!(text, "  {:<10}{:>8}", name(preset.kind), preset.steps);
        accuracy(&mut text, preset, 14);
        match calibration.fitted.get(place) {
            Some(fitted) => accuracy(&mut text, fitted, 16),
            None => text.push_str("               –"),
        }
        text.push('\n');
    }
    let _ = write!(
        text,
        "\n  preset: prediction for {machine}\n  \
         fitted: prediction for one fifth of the steps by costs fitted to the other four fifths\n\n  \
         costs fitted to all steps, mean error {} (use them with --costs {file}):\n",
        percent(calibration.fit.relative_residual)
    );
    let (fitted, preset) = (&calibration.fit.cost, &calibration.preset_cost);
    for (name, fitted, preset) in [
        ("per step", fitted.step_ns, preset.step_ns),
        ("reading the weights", fitted.weights_ns, preset.weights_ns),
        ("per prefill token", fitted.prefill_token_ns, preset.prefill_token_ns),
        ("per attention pair", fitted.prefill_pair_ns, preset.prefill_pair_ns),
        ("per decoding request", fitted.decode_row_ns, preset.decode_row_ns),
        ("per context token", fitted.decode_context_ns, preset.decode_context_ns),
    ] {
        let _ = writeln!(text, "    {name:<22}{fitted:>16.2} ns   preset {preset:>16.2} ns");
    }
    if calibration.steps.len() <= LISTED_MAX {
        text += &steps(&calibration.steps);
    }
    text
}

fn name(kind: Option<StepKind>) -> &'static str {
    match kind {
        Some(StepKind::Prefill) => "prefill",
        Some(StepKind::Decode) => "decode",
        Some(StepKind::Mixed) => "mixed",
        None => "all",
    }
}

fn accuracy(text: &mut String, of: &Accuracy, width: usize) {
    let sign = if of.bias < 0.0 { "-" } else { "+" };
    let bias = format!("{sign}{}", percent(of.bias.abs()));
    let (mean, largest) = (percent(of.error_mean), percent(of.error_max));
    let _ = write!(text, "{mean:>width$}{largest:>10}{bias:>9}");
}

fn steps(steps: &[CheckedStep]) -> String {
    let mut text = format!(
        "\n  {:>14}{:>14}{:>12}{:>15}{:>12}{:>12}{:>12}\n",
        "prefill tokens", "pairs", "decodes", "context", "measured", "preset", "fitted"
    );
    for step in steps {
        let measured = &step.measured;
        let times = [measured.step_us, step.preset_us, step.fitted_us].map(|us| us / 1000.0);
        let [took, preset, fitted] = times.map(milliseconds);
        let _ = writeln!(
            text,
            "  {:>14}{:>14}{:>12}{:>15}{took:>12}{preset:>12}{fitted:>12}",
            measured.prefill_tokens,
            measured.prefill_pairs,
            measured.decode_rows,
            measured.decode_context,
        );
    }
    text
}
