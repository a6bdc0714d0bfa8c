//! Axes: the place of values, and the labelled ticks.

use super::names::plain;

/// An axis of a plot.
#[derive(Clone, Debug)]
pub struct Scale {
    logarithmic: bool,
    from: f64,
    to: f64,
    /// Labelled values.
    pub(super) ticks: Vec<(f64, String)>,
    /// Quantity and unit.
    pub(super) label: String,
}

impl Scale {
    /// Creates an axis from 0 to the largest value or a little more.
    pub(crate) fn linear(most: f64, label: &str, name: impl Fn(f64) -> String) -> Self {
        let most = if most > 0.0 && most.is_finite() { most } else { 1.0 };
        let step = nice_step(most / 5.0);
        let steps = (most / step - 1e-9).ceil().max(1.0);
        let ticks = (0..=steps as u32).map(|place| f64::from(place) * step);
        Self {
            logarithmic: false,
            from: 0.0,
            to: steps * step,
            ticks: ticks.map(|value| (value, name(value))).collect(),
            label: label.to_owned(),
        }
    }

    /// Creates a linear axis of bytes, in the unit that suits the largest.
    pub(crate) fn bytes(most: f64, label: &str) -> Self {
        let names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
        let most = if most.is_finite() { most.max(1.0) } else { 1.0 };
        let power = (most.log2() / 10.0).floor().min(names.len() as f64 - 1.0) as usize;
        Self::in_unit(most, 1024f64.powi(power as i32), |value| {
            format!("{} {}", plain(value), names[power])
        })
        .labelled(label)
    }

    /// Creates a linear axis of milliseconds; the label names the unit.
    pub(crate) fn milliseconds(most: f64, label: &str) -> Self {
        let (unit, name) = match most {
            ms if ms < 2.0 => (0.001, "µs"),
            ms if ms < 2000.0 => (1.0, "ms"),
            ms if ms < 180_000.0 => (1000.0, "s"),
            ms if ms < 3.0 * 3.6e6 => (60_000.0, "min"),
            _ => (3.6e6, "h"),
        };
        Self::in_unit(most, unit, plain).labelled(&format!("{label} in {name}"))
    }

    fn in_unit(most: f64, unit: f64, name: impl Fn(f64) -> String) -> Self {
        let mut scale = Self::linear(most / unit, "", name);
        scale.to *= unit;
        scale.ticks.iter_mut().for_each(|tick| tick.0 *= unit);
        scale
    }

    fn labelled(self, label: &str) -> Self {
        Self { label: label.to_owned(), ..self }
    }

    /// Creates an axis from 0 to exactly `seconds`.
    pub(crate) fn time(seconds: f64) -> Self {
        let seconds = if seconds > 0.0 && seconds.is_finite() { seconds } else { 1.0 };
        let (unit, name) = match seconds {
            s if s < 180.0 => (1.0, "s"),
            s if s < 3.0 * 3600.0 => (60.0, "min"),
            s if s < 3.0 * 86_400.0 => (3600.0, "h"),
            _ => (86_400.0, "days"),
        };
        let step = nice_step(seconds / unit / 8.0);
        let count = (seconds / unit / step + 1e-9).floor() as u32;
        let ticks = (0..=count).map(|place| {
            let value = f64::from(place) * step;
            (value * unit, plain(value))
        });
        Self {
            logarithmic: false,
            from: 0.0,
            to: seconds,
            ticks: ticks.collect(),
            label: format!("time in {name}"),
        }
    }

    /// Creates an axis of categories, each centred in its place.
    pub(crate) fn named(names: &[String], label: &str) -> Self {
        let ticks = names.iter().enumerate();
        Self {
            logarithmic: false,
            from: 0.0,
            to: names.len().max(1) as f64,
            ticks: ticks.map(|(place, name)| (place as f64 + 0.5, name.clone())).collect(),
            label: label.to_owned(),
        }
    }

    /// Creates a logarithmic axis; 0 is placed at the left end.
    #[must_use]
    pub fn logarithmic(from: f64, to: f64, label: &str, name: impl Fn(f64) -> String) -> Self {
        let from = if from > 0.0 && from.is_finite() { from } else { 1.0 };
        let to = if to.is_finite() { to.max(from * 10.0) } else { from * 10.0 };
        let decades = (to / from).log10();
        // With few decades there is room for labels in between.
        let steps: &[f64] = if decades > 2.5 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let mut ticks: Vec<f64> = Vec::new();
        let first = from.log10().floor() as i32;
        let last = to.log10().ceil() as i32;
        for power in first..=last {
            ticks.extend(steps.iter().map(|step| step * 10f64.powi(power)));
        }
        ticks.retain(|&value| value >= from * 0.999 && value <= to * 1.001);
        let every = ticks.len().div_ceil(8).max(1);
        let ticks = ticks.into_iter().step_by(every);
        Self {
            logarithmic: true,
            from,
            to,
            ticks: ticks.map(|value| (value, name(value))).collect(),
            label: label.to_owned(),
        }
    }

    /// Creates a logarithmic axis of labelled sizes.
    #[must_use]
    pub fn logarithmic_sizes(sizes: Vec<(f64, String)>, label: &str) -> Self {
        let from = sizes.first().map_or(1.0, |size| size.0);
        let last = sizes.last().map_or(from, |size| size.0);
        // A single size needs an axis of positive length.
        let to = if last > from { last } else { from * 10.0 };
        Self { logarithmic: true, from, to, ticks: sizes, label: label.to_owned() }
    }

    /// Returns the place of a value, from 0 to 1.
    pub(super) fn place(&self, value: f64) -> f64 {
        let place = if self.logarithmic {
            (value.max(self.from) / self.from).ln() / (self.to / self.from).ln()
        } else {
            (value - self.from) / (self.to - self.from)
        };
        place.clamp(0.0, 1.0)
    }
}

/// Returns the smallest round number (1, 2 or 5 times a power of ten) that is not below `least`.
fn nice_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|&step| step >= least * 0.999).unwrap_or(power * 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(scale: &Scale) -> Vec<&str> {
        scale.ticks.iter().map(|(_, name)| name.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_and_cover_the_range() {
        let scale = Scale::linear(0.37, "", plain);
        assert_eq!(names(&scale), ["0", "0.1", "0.2", "0.3", "0.4"]);
        assert_eq!(scale.place(0.4), 1.0);
        assert_eq!(names(&Scale::time(3600.0)), ["0", "10", "20", "30", "40", "50", "60"]);
        assert_eq!(Scale::time(3600.0).label, "time in min");
        let scale = Scale::logarithmic(3.0, 40_000.0, "", plain);
        assert_eq!(names(&scale), ["10", "100", "1000", "10000"]);
        assert_eq!(names(&Scale::bytes(2.9e9, ""))[..3], ["0 GiB", "1 GiB", "2 GiB"]);
        let scale = Scale::milliseconds(2.4e6, "wait");
        assert_eq!(
            (names(&scale), scale.label.as_str()),
            (vec!["0", "10", "20", "30", "40"], "wait in min")
        );
        assert_eq!(scale.place(2.4e6), 1.0);
        let sizes = [32.0, 64.0, 128.0].map(|size| (size, plain(size)));
        let scale = Scale::logarithmic_sizes(sizes.to_vec(), "");
        assert_eq!([32.0, 64.0, 128.0].map(|size| scale.place(size)), [0.0, 0.5, 1.0]);
    }

    #[test]
    fn axis_of_zero_length_is_valid() {
        for scale in [
            Scale::linear(0.0, "", plain),
            Scale::linear(f64::NAN, "", plain),
            Scale::time(0.0),
            Scale::logarithmic(0.0, 0.0, "", plain),
            Scale::logarithmic_sizes(vec![(4.0, String::new())], ""),
        ] {
            assert!(!scale.ticks.is_empty());
            assert!((0.0..=1.0).contains(&scale.place(7.0)));
        }
    }
}
