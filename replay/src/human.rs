//! Human-readable numbers: three digits and a suitable unit.

/// Formats a count, like `12.0k` or `3.41M`.
#[must_use]
pub fn count(value: f64) -> String {
    scaled(value, 1000.0, &["", "k", "M", "G", "T"], "")
}

/// Formats bytes, like `640 MiB`.
#[must_use]
pub fn bytes(value: f64) -> String {
    scaled(value, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"], " ")
}

/// Formats a bandwidth in decimal units, like `25.0 GB/s`.
#[must_use]
pub fn bandwidth(value: f64) -> String {
    scaled(value, 1000.0, &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], " ")
}

/// Formats a share, like `37.4 %`.
#[must_use]
pub fn percent(share: f64) -> String {
    let digits = usize::from(share.abs() < 0.9995 && share != 0.0);
    format!("{:.digits$} %", share * 100.0)
}

/// Formats a time, like `312 ms` or `1 h 02 min`.
#[must_use]
pub fn milliseconds(value: f64) -> String {
    if value >= 60_000.0 {
        seconds(value / 1000.0)
    } else if value >= 9999.5 {
        format!("{:.1} s", value / 1000.0)
    } else if value >= 999.5 {
        format!("{:.2} s", value / 1000.0)
    } else if value >= 0.9995 || value == 0.0 {
        format!("{} ms", three_digits(value))
    } else {
        format!("{} µs", three_digits(value * 1000.0))
    }
}

/// Formats a longer time, like `48 s` or `1 h 02 min`.
#[must_use]
pub fn seconds(value: f64) -> String {
    let whole = value.round() as u64;
    if whole >= 3600 {
        let minutes = (value / 60.0).round() as u64;
        format!("{} h {:02} min", minutes / 60, minutes % 60)
    } else if whole >= 60 {
        format!("{} min {:02} s", whole / 60, whole % 60)
    } else {
        format!("{} s", three_digits(value))
    }
}

/// Formats an integer with thousands separators, like `12,031`.
#[must_use]
pub fn whole(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn scaled(value: f64, base: f64, units: &[&str], space: &str) -> String {
    let mut value = value;
    let mut unit = 0;
    // A value that would be rounded up to the next unit is shown in that unit.
    while value.abs() >= base * 0.9995 && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    let space = if units[unit].is_empty() { "" } else { space };
    if unit == 0 && value.fract() == 0.0 {
        return format!("{value}{space}{}", units[unit]);
    }
    format!("{}{space}{}", three_digits(value), units[unit])
}

fn three_digits(value: f64) -> String {
    let size = value.abs();
    let digits = if size >= 99.95 || size == 0.0 {
        0
    } else if size >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        let counts = [0.0, 7.0, 999.0, 999.6, 12_031.0, 144_793_823.0].map(count);
        assert_eq!(counts, ["0", "7", "999", "1.00k", "12.0k", "145M"]);
        assert_eq!(
            [0.0, 512.0, 65536.0, 1.5e12].map(bytes),
            ["0 B", "512 B", "64.0 KiB", "1.36 TiB"]
        );
        assert_eq!(bandwidth(25e9), "25.0 GB/s");
        assert_eq!([0.0, 0.3736, 1.0, 0.99999].map(percent), ["0 %", "37.4 %", "100 %", "100 %"]);
    }

    #[test]
    fn times_use_a_suitable_unit() {
        let times = [0.0, 0.25, 1.0, 312.4, 1234.0, 12_345.0, 75_000.0].map(milliseconds);
        let expected = ["0 ms", "250 µs", "1.00 ms", "312 ms", "1.23 s", "12.3 s", "1 min 15 s"];
        assert_eq!(times, expected);
        assert_eq!([48.0, 3725.0].map(seconds), ["48.0 s", "1 h 02 min"]);
        assert_eq!([7, 1000, 12_031, 1_048_576].map(whole), ["7", "1,000", "12,031", "1,048,576"]);
    }
}
