//! Finds stop strings in a text that comes in pieces.

/// Lets text through up to the first stop string, and keeps back what may be the beginning of one.
#[derive(Clone, Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    kept: String,
    /// Whether a stop string that has come is part of the text.
    keeps_stop: bool,
}

impl StopMatcher {
    /// Stop strings are not empty.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        debug_assert!(stops.iter().all(|stop| !stop.is_empty()));
        Self { stops, kept: String::new(), keeps_stop: false }
    }

    /// The same, but the stop string that has come is part of the text.
    pub(crate) fn keeping_stop(self, keeps_stop: bool) -> Self {
        Self { keeps_stop, ..self }
    }

    /// Adds text and returns what is certainly before any stop string, and whether one has come.
    pub(crate) fn push(&mut self, text: &str) -> (String, bool) {
        self.kept.push_str(text);
        // The stop string that is complete first counts, whatever the pieces; of two that end together
        // the longer one.
        let found = |stop: &String| self.kept.find(stop).map(|at| (at + stop.len(), at));
        if let Some((end, at)) = self.stops.iter().filter_map(found).min() {
            self.kept.truncate(if self.keeps_stop { end } else { at });
            return (std::mem::take(&mut self.kept), true);
        }
        let kept = self.kept.split_off(self.certain());
        (std::mem::replace(&mut self.kept, kept), false)
    }

    /// What was kept back, when no more text comes.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.kept)
    }

    /// Where the first beginning of a stop string is that reaches the end of the text.
    fn certain(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = (self.kept.len() + 1).saturating_sub(longest);
        let mut ends = (from..self.kept.len()).filter(|at| self.kept.is_char_boundary(*at));
        let may_begin = |at: &usize| {
            let end = &self.kept[*at..];
            self.stops.iter().any(|stop| stop.starts_with(end))
        };
        ends.find(may_begin).unwrap_or(self.kept.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|stop| (*stop).to_owned()).collect())
    }

    fn went(text: &str) -> (String, bool) {
        (text.to_owned(), false)
    }

    #[test]
    fn a_stop_string_may_come_in_pieces() {
        let mut stops = matcher(&["END", "\n\n"]);
        assert_eq!(stops.push("some E"), went("some "));
        assert_eq!(stops.push("N"), went(""));
        assert_eq!(stops.push("ergy EN"), went("ENergy "));
        assert_eq!(stops.push("D and more"), (String::new(), true));
    }

    #[test]
    fn what_was_kept_back_in_vain_comes_at_the_end() {
        let mut stops = matcher(&["aab"]);
        assert_eq!(stops.push("xaa"), went("x"));
        assert_eq!(stops.push("a"), went("a"));
        assert_eq!(stops.finish(), "aa");
        assert_eq!(matcher(&[]).push("all of it"), went("all of it"));
    }

    #[test]
    fn a_stop_string_may_be_part_of_the_text() {
        let mut stops = matcher(&["END"]).keeping_stop(true);
        assert_eq!(stops.push("the E"), went("the "));
        assert_eq!(stops.push("ND of it"), ("END".to_owned(), true));
    }

    #[test]
    fn the_first_of_several_to_be_complete_counts() {
        assert_eq!(matcher(&["lo", "el"]).push("hello"), ("h".to_owned(), true));
        assert_eq!(matcher(&["hello", "el"]).push("hello"), ("h".to_owned(), true));
        assert_eq!(matcher(&["lo", "ello"]).push("hello"), ("h".to_owned(), true));
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(
            text in "[abä]{0,24}",
            stops in prop::collection::vec("[abä]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..32, 0..6),
        ) {
            let mut boundaries = (0..=text.len()).filter(|at| text.is_char_boundary(*at));
            let ending = |end: usize| {
                let stop = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
                stop.map(|stop| end - stop.len()).min()
            };
            let first = boundaries.find_map(ending);
            let expected = &text[..first.unwrap_or(text.len())];
            let mut stop_matcher = StopMatcher::new(stops);
            let (mut seen, mut has_stopped) = (String::new(), false);
            let mut cuts: Vec<_> = cuts.into_iter().filter(|at| text.is_char_boundary(*at)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            for piece in cuts.windows(2) {
                let (certain, stopped) = stop_matcher.push(&text[piece[0]..piece[1]]);
                seen.push_str(&certain);
                has_stopped |= stopped;
                if stopped {
                    break;
                }
            }
            if !has_stopped {
                seen.push_str(&stop_matcher.finish());
            }
            prop_assert_eq!(seen, expected);
            prop_assert_eq!(has_stopped, first.is_some());
        }
    }
}
