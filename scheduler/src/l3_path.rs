//! What an operation with L3 is about, together with what comes before it.

use terrace_cache::PageKey;

/// The keys of a sequence from its first page to the last that an operation with L3 is about, in pieces.
/// A plan tells the keys of the operation alone, and mostly those will do; a store that keeps pages by
/// what they follow needs the others too.
#[derive(Clone, Debug, Default)]
pub struct L3Path<'a> {
    pieces: Vec<L3Piece<'a>>,
}

/// Consecutive pages of an [`L3Path`].
#[derive(Clone, Copy, Debug)]
pub struct L3Piece<'a> {
    /// One key a page.
    pub keys: &'a [PageKey],
    /// Whether the operation is about these pages: otherwise they only come before some of those.
    pub is_asked: bool,
}

impl<'a> L3Path<'a> {
    /// The pieces, from the first page on.
    #[must_use]
    pub fn pieces(&self) -> &[L3Piece<'a>] {
        &self.pieces
    }

    /// The keys that the operation is about: those of the plan.
    pub fn asked(&self) -> impl DoubleEndedIterator<Item = PageKey> {
        self.asked_pieces().flat_map(|piece| piece.keys.iter().copied())
    }

    /// How many pages the operation is about.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.asked_pieces().map(|piece| piece.keys.len()).sum()
    }

    fn asked_pieces(&self) -> impl DoubleEndedIterator<Item = &L3Piece<'a>> {
        self.pieces.iter().filter(|piece| piece.is_asked)
    }

    /// Adds pieces of pages, asked or not, to the end.
    pub fn extend(&mut self, pieces: impl IntoIterator<Item = &'a [PageKey]>, is_asked: bool) {
        self.pieces.extend(pieces.into_iter().map(|keys| L3Piece { keys, is_asked }));
    }

    /// Removes the pieces behind the last one that the operation is about.
    pub(crate) fn end_with_asked(&mut self) {
        let end = self.pieces.iter().rposition(|piece| piece.is_asked);
        self.pieces.truncate(end.map_or(0, |last| last + 1));
    }
}
