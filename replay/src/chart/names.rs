//! Labels of axis ticks: rounded numbers without insignificant digits.

use crate::human::{bandwidth, count};

/// Formats a number without trailing zeros.
pub(super) fn plain(value: f64) -> String {
    format!("{}", (value * 1000.0).round() / 1000.0)
}

/// Formats milliseconds in a suitable unit.
#[must_use]
pub fn milliseconds_tick(ms: f64) -> String {
    match ms {
        ms if ms >= 3.6e6 => format!("{} h", plain(ms / 3.6e6)),
        ms if ms >= 1000.0 => format!("{} s", plain(ms / 1000.0)),
        ms if ms >= 1.0 => format!("{} ms", plain(ms)),
        ms if ms >= 1e-3 => format!("{} µs", plain(ms * 1e3)),
        ms => format!("{} ns", plain(ms * 1e6)),
    }
}

pub(crate) fn percent_tick(share: f64) -> String {
    format!("{} %", plain(share * 100.0))
}

pub(crate) fn short_count(value: f64) -> String {
    if value < 1000.0 { plain(value) } else { trimmed(&count(value)) }
}

pub(crate) fn short_bandwidth(value: f64) -> String {
    trimmed(&bandwidth(value))
}

/// Joins a number without trailing zeros and its unit.
fn trimmed(text: &str) -> String {
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number = match number.contains('.') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => number,
    };
    format!("{number}{unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tick_labels_have_no_trailing_zeros() {
        assert_eq!([0.1 + 0.2, 250.0].map(plain), ["0.3", "250"]);
        let times = [5e-6, 2e-3, 0.5, 20.0, 1500.0, 7.2e6].map(milliseconds_tick);
        assert_eq!(times, ["5 ns", "2 µs", "500 µs", "20 ms", "1.5 s", "2 h"]);
        assert_eq!([0.0, 0.25, 1.0].map(percent_tick), ["0 %", "25 %", "100 %"]);
        assert_eq!([0.5, 200.0, 12_000.0, 1.5e6].map(short_count), ["0.5", "200", "12k", "1.5M"]);
        assert_eq!([0.0, 2.5e9].map(short_bandwidth), ["0 B/s", "2.5 GB/s"]);
    }
}
