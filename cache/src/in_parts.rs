//! Tokens and keys of a sequence, in two parts.

use std::ops::Range;

use crate::key::{PageKey, Token};

/// Elements of a sequence in two parts: those of the prompt, which are shared, and appended ones.
#[derive(Clone, Copy, Debug)]
pub struct InParts<'a, E> {
    /// Part that the sequence began with.
    pub prompt: &'a [E],
    /// Appended part.
    pub appended: &'a [E],
}

/// Tokens of a sequence.
pub type Tokens<'a> = InParts<'a, Token>;

/// Keys of a sequence's whole pages.
pub type Keys<'a> = InParts<'a, PageKey>;

impl<'a, E: Copy> InParts<'a, E> {
    /// Elements of a range: those from the prompt, then those that were appended.
    ///
    /// # Panics
    /// If the range exceeds the elements.
    #[must_use]
    pub fn range(&self, places: Range<usize>) -> [&'a [E]; 2] {
        let prompt = self.prompt.len();
        let (start, end) = (places.start, places.end);
        [
            &self.prompt[start.min(prompt)..end.min(prompt)],
            &self.appended[start.max(prompt) - prompt..end.max(prompt) - prompt],
        ]
    }

    /// Element at a place.
    #[must_use]
    #[inline]
    pub fn get(&self, place: usize) -> Option<E> {
        match place.checked_sub(self.prompt.len()) {
            None => Some(self.prompt[place]),
            Some(place) => self.appended.get(place).copied(),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.prompt.len() + self.appended.len()
    }

    /// Returns true if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Iterates over all elements.
    pub fn iter(&self) -> impl Iterator<Item = E> + use<'a, E> {
        self.prompt.iter().chain(self.appended).copied()
    }

    /// Copies all elements.
    #[must_use]
    pub fn to_vec(&self) -> Vec<E> {
        [self.prompt, self.appended].concat()
    }

    /// Appends all elements to `into`.
    pub fn append_to(&self, into: &mut Vec<E>) {
        into.extend_from_slice(self.prompt);
        into.extend_from_slice(self.appended);
    }
}
