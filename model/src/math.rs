//! The functions between matrix products.

/// Numbers that a sum is spread over, so that a processor can add them side by side.
pub(crate) const LANES: usize = 16;

/// `e` to the `x`, to within about one part in ten million; zero below -87.
///
/// The library's function is exact to the last bit, but handles one number at a time.
#[inline(always)]
#[allow(clippy::excessive_precision)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding and subtracting it rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    // The logarithm of two in two parts; multiples of the first are exact.
    const LN_2_HIGH: f32 = 0.693_359_375;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let power = rounded - ROUND;
    let rest = power * -LN_2_HIGH + clamped;
    let rest = power * -LN_2_LOW + rest;
    let mut sum = 1.987_569_15e-4;
    for coefficient in
        [1.398_199_95e-3, 8.333_451_9e-3, 4.166_579_6e-2, 1.666_666_55e-1, 5.000_000_1e-1]
    {
        sum = sum * rest + coefficient;
    }
    sum = sum * (rest * rest) + rest + 1.0;
    // The integer is in the lowest bits, and becomes the exponent of a power of two.
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    let scale = f32::from_bits(exponent << 23);
    if x < -87.0 { 0.0 } else { sum * scale }
}

/// Divides each row of `x` by its root mean square and multiplies it with `weights`.
pub(crate) fn rms_norm(x: &[f32], weights: &[f32], epsilon: f32, out: &mut [f32]) {
    let rows = x.chunks_exact(weights.len()).zip(out.chunks_exact_mut(weights.len()));
    for (x, out) in rows {
        let scale = inverse_rms(x, epsilon);
        for ((out, value), weight) in out.iter_mut().zip(x).zip(weights) {
            *out = value * scale * weight;
        }
    }
}

/// Norms each row of `x` as [`rms_norm`] does, where it lies.
pub(crate) fn rms_norm_in_place(x: &mut [f32], weights: &[f32], epsilon: f32) {
    for row in x.chunks_exact_mut(weights.len()) {
        let scale = inverse_rms(row, epsilon);
        for (value, weight) in row.iter_mut().zip(weights) {
            *value = *value * scale * weight;
        }
    }
}

/// One divided by the root mean square of a row.
#[inline(always)]
fn inverse_rms(row: &[f32], epsilon: f32) -> f32 {
    let mut squares = [0.0; LANES];
    for values in row.chunks(LANES) {
        for (sum, value) in squares.iter_mut().zip(values) {
            *sum += value * value;
        }
    }
    let mean = squares.iter().sum::<f32>() / row.len() as f32;
    1.0 / (mean + epsilon).sqrt()
}

/// The gated activation: of each row of `gate_up`, the first half, made smooth steps, times the
/// second half.
pub(crate) fn swiglu(gate_up: &[f32], out: &mut [f32], columns: usize) {
    for (gate_up, out) in gate_up.chunks_exact(2 * columns).zip(out.chunks_exact_mut(columns)) {
        let (gate, up) = gate_up.split_at(columns);
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp(-gate)) * up;
        }
    }
}

/// The softmax of one query so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running {
    /// The highest score.
    pub(crate) max: f32,
    /// The sum of all `exp(score - max)`.
    pub(crate) sum: f32,
    /// Factor for the sums before the last tile.
    pub(crate) correction: f32,
}

impl Running {
    pub(crate) const START: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, correction: 0.0 };
}

/// Turns the scores of a tile of keys into weights relative to the highest score so far. Scores
/// from `visible` on become zeros. There are whole lanes of scores, and one at least is visible.
pub(crate) fn soften(scores: &mut [f32], visible: usize, running: &mut Running) {
    debug_assert!(scores.len().is_multiple_of(LANES));
    scores[visible..].fill(f32::NEG_INFINITY);
    let mut highest = [running.max; LANES];
    for scores in scores.chunks_exact(LANES) {
        for (highest, score) in highest.iter_mut().zip(scores) {
            *highest = if *score > *highest { *score } else { *highest };
        }
    }
    let max = highest.iter().fold(f32::NEG_INFINITY, |max, value| max.max(*value));
    let mut sums = [0.0; LANES];
    for scores in scores.chunks_exact_mut(LANES) {
        for (sum, score) in sums.iter_mut().zip(scores) {
            *score = exp(*score - max);
            *sum += *score;
        }
    }
    running.correction = exp(running.max - max);
    running.sum = running.sum * running.correction + sums.iter().sum::<f32>();
    running.max = max;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_exact_one() {
        for i in -86_000..88_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            let ours = exp(x);
            assert!((f64::from(ours) / exact - 1.0).abs() < 3e-7, "{x}: {ours}, not {exact}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn softening_in_tiles_is_softmax() {
        let scores: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 20.0) / 7.0).collect();
        let sum: f64 = scores[..50].iter().map(|score| f64::from(*score).exp()).sum();
        let mut running = Running::START;
        let mut weights = Vec::new();
        for (tile, visible) in scores.chunks(32).zip([32, 18]) {
            let mut tile = tile.to_vec();
            soften(&mut tile, visible, &mut running);
            weights.iter_mut().for_each(|weight| *weight *= running.correction);
            weights.extend(tile);
        }
        assert_eq!(weights[50..], [0.0; 14]);
        for (score, weight) in scores.iter().zip(&weights[..50]) {
            let exact = f64::from(*score).exp() / sum;
            assert!((f64::from(weight / running.sum) - exact).abs() < 1e-6);
        }
    }

    #[test]
    fn norms_and_gates_are_right_for_any_width() {
        let x: Vec<f32> = (0..2 * 38).map(|i| (i * 29 % 38) as f32 / 7.0 - 2.5).collect();
        let weights: Vec<f32> = (0..38).map(|i| i as f32 / 20.0).collect();
        let mut normed = vec![f32::NAN; x.len()];
        rms_norm(&x, &weights, 0.1, &mut normed);
        let mut in_place = x.clone();
        rms_norm_in_place(&mut in_place, &weights, 0.1);
        assert_eq!(in_place, normed);
        let mut gated = vec![f32::NAN; x.len() / 2];
        swiglu(&x, &mut gated, 19);
        for (row, x) in x.chunks(38).enumerate() {
            let mean = x.iter().map(|x| f64::from(x * x)).sum::<f64>() / 38.0;
            for (column, value) in x.iter().map(|x| f64::from(*x)).enumerate() {
                let exact = value / (mean + 0.1).sqrt() * f64::from(weights[column]);
                assert!((f64::from(normed[row * 38 + column]) - exact).abs() < 1e-5);
            }
            for column in 0..19 {
                let (gate, up) = (f64::from(x[column]), f64::from(x[column + 19]));
                let exact = gate / (1.0 + (-gate).exp()) * up;
                assert!((f64::from(gated[row * 19 + column]) - exact).abs() < 1e-5);
            }
        }
    }
}
