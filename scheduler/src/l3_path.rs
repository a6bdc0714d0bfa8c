//! Path of an L3 operation: its pages together with the pages before them.

use terrace_cache::PageKey;

/// Keys of a sequence from its first page to the last page of an L3 operation, in pieces. A plan contains the keys of
/// the operation alone. Stores that index pages by their prefix need the keys before them too.
#[derive(Clone, Debug, Default)]
pub struct L3Path<'a> {
    pieces: Vec<L3Piece<'a>>,
}

/// Consecutive pages of an [`L3Path`].
#[derive(Clone, Copy, Debug)]
pub struct L3Piece<'a> {
    /// One key for each page.
    pub keys: &'a [PageKey],
    /// True if the operation reads or writes these pages, false if they only precede such pages.
    pub is_asked: bool,
}

impl<'a> L3Path<'a> {
    /// Pieces from the first page on.
    #[must_use]
    pub fn pieces(&self) -> &[L3Piece<'a>] {
        &self.pieces
    }

    /// Keys of the operation's pages, as in the plan.
    pub fn asked(&self) -> impl DoubleEndedIterator<Item = PageKey> {
        self.asked_pieces().flat_map(|piece| piece.keys.iter().copied())
    }

    /// Number of the operation's pages.
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

    /// Removes the pieces behind the last one of the operation.
    pub(crate) fn end_with_asked(&mut self) {
        let end = self.pieces.iter().rposition(|piece| piece.is_asked);
        self.pieces.truncate(end.map_or(0, |last| last + 1));
    }
}
