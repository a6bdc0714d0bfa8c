//! Medians.

use std::cmp::Ordering;

/// Returns the median, the larger of two middle values; 0 without values.
///
/// ```
/// assert_eq!(terrace_kit::median([3.0, 1.0, 2.0]), 2.0);
/// ```
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    middle_by(values, f64::total_cmp).unwrap_or_default()
}

/// Returns the median by an order; none without values.
pub fn middle_by<T>(
    values: impl IntoIterator<Item = T>,
    order: impl FnMut(&T, &T) -> Ordering,
) -> Option<T> {
    let mut values: Vec<T> = values.into_iter().collect();
    let middle = values.len() / 2;
    if values.is_empty() {
        return None;
    }
    values.select_nth_unstable_by(middle, order);
    Some(values.swap_remove(middle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_ignores_order() {
        assert_eq!(middle_by([5, 1, 4, 2, 3], Ord::cmp), Some(3));
        assert_eq!(middle_by([4, 1, 3, 2], Ord::cmp), Some(3), "the larger of two");
        assert_eq!(middle_by([7], Ord::cmp), Some(7));
        assert_eq!(middle_by([0; 0], Ord::cmp), None);
        assert_eq!(median([f64::INFINITY, 1.0, 2.0]), 2.0);
        assert_eq!(median([]), 0.0);
    }
}
