//! Sizes, bandwidths and times with their units.

use super::Problem;

/// The size of a tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Size {
    Tokens(f64),
    Bytes(f64),
    Unlimited,
}

pub(super) fn size(text: &str) -> Result<Size, Problem> {
    if text == "unlimited" {
        return Ok(Size::Unlimited);
    }
    let parsed = split(text).and_then(|(number, unit)| match unit {
        "" => Some(Size::Tokens(number)),
        "k" => Some(Size::Tokens(number * 1e3)),
        "M" => Some(Size::Tokens(number * 1e6)),
        "G" => Some(Size::Tokens(number * 1e9)),
        bytes => byte_unit(bytes).map(|factor| Size::Bytes(number * factor)),
    });
    parsed.ok_or_else(|| "write tokens like 1000000 or 2M, or bytes like 64GiB".into())
}

pub(super) fn bytes_per_second(text: &str) -> Result<u64, Problem> {
    let parsed = split(text.trim_end_matches("/s"))
        .and_then(|(number, unit)| byte_unit(unit).map(|factor| number * factor));
    let in_limits = parsed.filter(|bytes| (1e3..=1e15).contains(bytes));
    in_limits
        .map(|bytes| bytes as u64)
        .ok_or_else(|| "write it like 25GB/s, from 1kB/s to 1000TB/s".into())
}

pub(super) fn microseconds(text: &str) -> Result<u64, Problem> {
    let parsed = split(text).and_then(|(number, unit)| match unit {
        "us" | "µs" => Some(number),
        "ms" => Some(number * 1e3),
        "s" => Some(number * 1e6),
        _ => None,
    });
    let in_limits = parsed.filter(|us| (0.0..=3.6e9).contains(us));
    in_limits.map(|us| us as u64).ok_or_else(|| "write it like 300us or 2ms, up to 3600s".into())
}

fn byte_unit(unit: &str) -> Option<f64> {
    let factor = match unit {
        "B" => 1.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => f64::from(1 << 20),
        "GiB" => f64::from(1 << 30),
        "TiB" => (1u64 << 40) as f64,
        _ => return None,
    };
    Some(factor)
}

/// Splits a number and its unit.
fn split(text: &str) -> Option<(f64, &str)> {
    let is_unit = |(place, letter): (usize, char)| {
        // An exponent belongs to the number.
        let next = text[place + letter.len_utf8()..].chars().next();
        let exponent =
            matches!(letter, 'e' | 'E') && next.is_some_and(|next| !next.is_alphabetic());
        letter.is_alphabetic() && !exponent
    };
    let end = text.char_indices().find(|&at| is_unit(at)).map_or(text.len(), |(place, _)| place);
    let number = text[..end].trim().parse::<f64>().ok().filter(|number| number.is_finite())?;
    Some((number, text[end..].trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_units() {
        let sizes =
            ["7", "2M", "1.5k", "64GiB", "1 GB", "1e3", "unlimited"].map(|text| size(text).ok());
        let expected = [
            Size::Tokens(7.0),
            Size::Tokens(2e6),
            Size::Tokens(1500.0),
            Size::Bytes(64.0 * 1024.0 * 1024.0 * 1024.0),
            Size::Bytes(1e9),
            Size::Tokens(1000.0),
            Size::Unlimited,
        ];
        assert_eq!(sizes, expected.map(Some));
        assert!(["", "GiB", "5XB", "1e", "nan", "inf"].iter().all(|text| size(text).is_err()));
        assert_eq!(microseconds("1.5ms").ok(), Some(1500));
        assert!(microseconds("5").is_err() && microseconds("-1s").is_err());
        assert_eq!(bytes_per_second("25GB/s").ok(), Some(25_000_000_000));
        assert!(bytes_per_second("25").is_err() && bytes_per_second("1B/s").is_err());
    }
}
