//! Rotary positions: pairs of elements of queries and keys are turned by angles that grow with the
//! position.

/// Speed at which each pair turns.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Ratio of the longest wavelength of a pair to the shortest, about.
    pub theta: f64,
    /// Scaling for longer sequences.
    pub scaling: Scaling,
}

/// Scaling of a model to longer sequences than it was first trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// None.
    None,
    /// All angles are divided.
    Linear {
        /// By this.
        factor: f64,
    },
    /// The angles of slow pairs are divided, those of fast pairs are not, and those between are interpolated.
    Llama3 {
        /// By this.
        factor: f64,
        /// Pairs that turn fewer times than this over `original_positions` are slow ...
        low_frequency: f64,
        /// ... and those that turn more often than this are fast.
        high_frequency: f64,
        /// The sequence length of the first training.
        original_positions: f64,
    },
}

impl Rope {
    /// Checks the values.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut values = vec![("rope_theta", self.theta)];
        match self.scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => values.push(("rope_scaling.factor", factor)),
            Scaling::Llama3 { factor, low_frequency, high_frequency, original_positions } => {
                values.extend([
                    ("rope_scaling.factor", factor),
                    ("rope_scaling.low_freq_factor", low_frequency),
                    ("rope_scaling.high_freq_factor", high_frequency),
                    ("rope_scaling.original_max_position_embeddings", original_positions),
                ]);
                if high_frequency <= low_frequency {
                    return Err(format!(
                        "rope_scaling.high_freq_factor is {high_frequency}, but must be greater \
                         than low_freq_factor, {low_frequency}"
                    ));
                }
            }
        }
        match values.into_iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
            Some((name, value)) => Err(format!("{name} is {value}, but must be more than 0")),
            None => Ok(()),
        }
    }

    /// Angle by which each of a head's pairs turns from one position to the next, in radians.
    pub(crate) fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let unscaled = |pair| self.theta.powf(-2.0 * pair as f64 / head_dim as f64);
        let scaled = |frequency: f64| match self.scaling {
            Scaling::None => frequency,
            Scaling::Linear { factor } => frequency / factor,
            Scaling::Llama3 { factor, low_frequency, high_frequency, original_positions } => {
                let turns = original_positions * frequency / std::f64::consts::TAU;
                let fast = (turns - low_frequency) / (high_frequency - low_frequency);
                let fast = fast.clamp(0.0, 1.0);
                fast * frequency + (1.0 - fast) * frequency / factor
            }
        };
        (0..head_dim / 2).map(|pair| scaled(unscaled(pair)) as f32).collect()
    }
}

/// Writes the cosines and then the sines of all pairs' angles at a position.
pub(crate) fn angles(frequencies: &[f32], position: u32, out: &mut [f32]) {
    let (cosines, sines) = out.split_at_mut(frequencies.len());
    for ((frequency, cosine), sine) in frequencies.iter().zip(cosines).zip(sines) {
        (*sine, *cosine) = (position as f32 * frequency).sin_cos();
    }
}

/// Turns the pairs of one head. A pair is an element of the first half and one of the second.
pub(crate) fn turn(head: &mut [f32], angles: &[f32]) {
    let (first, second) = head.split_at_mut(head.len() / 2);
    let (cosines, sines) = angles.split_at(first.len());
    for (((a, b), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
        (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaling_slows_down_the_slow_pairs_only() {
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_frequency: 1.0,
            high_frequency: 4.0,
            original_positions: 8192.0,
        };
        let plain = Rope { theta: 500_000.0, scaling: Scaling::None }.frequencies(128);
        let scaled = Rope { theta: 500_000.0, scaling }.frequencies(128);
        assert_eq!(plain[0], scaled[0]);
        assert_eq!(plain[20], scaled[20]);
        assert_eq!(plain[63] / 8.0, scaled[63]);
        let between = scaled[32] / plain[32];
        assert!(between > 0.125 && between < 1.0, "{between}");
    }

    #[test]
    fn turning_keeps_lengths() {
        let mut head = [3.0, 1.0, 4.0, 2.0];
        let mut turned_by = [0.0; 4];
        angles(&[1.0, 0.01], 7, &mut turned_by);
        turn(&mut head, &turned_by);
        assert!((head[0].hypot(head[2]) - 5.0).abs() < 1e-5);
        assert_ne!(head[0], 3.0);
    }
}
