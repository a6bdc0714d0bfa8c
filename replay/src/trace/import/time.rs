//! Parsing of times.

use serde_json::Value;

/// Numbers from this on are milliseconds since 1970, smaller ones seconds.
const MILLISECONDS_FROM: f64 = 1e11;

/// Parses a date and time like `2023-11-16 18:15:46.6805900`, with or without a zone, or a number
/// of seconds. Returns microseconds.
pub(super) fn microseconds(text: &str) -> Option<u64> {
    let text = text.trim();
    if let Ok(number) = text.parse::<f64>() {
        return of_number(number);
    }
    let (date, clock) = text.split_once([' ', 'T'])?;
    let mut date = date.split('-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let (clock, zone_s) = zone(clock)?;
    let mut clock = clock.split(':');
    let hours: f64 = clock.next()?.parse().ok()?;
    let minutes: f64 = clock.next()?.parse().ok()?;
    let seconds: f64 = clock.next().unwrap_or("0").parse().ok()?;
    let whole_s = days_since_1970(year, month, day) as f64 * 86_400.0;
    let since_1970 = whole_s + hours * 3600.0 + minutes * 60.0 - zone_s;
    // Whole seconds and the fraction are separate: a float of 1.7e9 seconds has no microsecond
    // precision.
    (since_1970 >= 0.0 && (0.0..61.0).contains(&seconds))
        .then(|| since_1970 as u64 * 1_000_000 + (seconds * 1e6).round() as u64)
}

/// Parses a JSON value.
pub(super) fn of_json(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => of_number(number.as_f64()?),
        Value::String(text) => microseconds(text),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

fn of_number(number: f64) -> Option<u64> {
    let scale = if number >= MILLISECONDS_FROM { 1e3 } else { 1e6 };
    (0.0..1e14).contains(&number).then(|| (number * scale).round() as u64)
}

/// Splits the time of day and the offset of its zone.
fn zone(clock: &str) -> Option<(&str, f64)> {
    if let Some(clock) = clock.strip_suffix('Z') {
        return Some((clock, 0.0));
    }
    let Some(place) = clock.rfind(['+', '-']) else { return Some((clock, 0.0)) };
    let (clock, zone) = clock.split_at(place);
    let sign = if zone.starts_with('-') { -1.0 } else { 1.0 };
    let (hours, minutes) = zone[1..].split_once(':').unwrap_or((&zone[1..], "0"));
    let (hours, minutes): (f64, f64) = (hours.parse().ok()?, minutes.parse().ok()?);
    Some((clock, sign * (hours * 3600.0 + minutes * 60.0)))
}

/// Returns the days since 1 January 1970 in the Gregorian calendar.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    // In years that start in March the leap day is the last day.
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_times() {
        assert_eq!(microseconds("1970-01-02 00:00:01.5"), Some(86_401_500_000));
        assert_eq!(microseconds("2023-11-16 18:15:46.6805900"), Some(1_700_158_546_680_590));
        assert_eq!(microseconds("2024-02-29T00:00:00.009930+00:00"), Some(1_709_164_800_009_930));
        assert_eq!(microseconds("2024-02-29T02:00:00+02:00"), Some(1_709_164_800_000_000));
        assert_eq!(microseconds("12.25"), Some(12_250_000));
        assert_eq!(microseconds("1700158546680"), Some(1_700_158_546_680_000));
        assert!(
            ["yesterday", "", "-5", "2023-11-16", "2023-11-16 25h"]
                .map(microseconds)
                .iter()
                .all(Option::is_none)
        );
    }
}
