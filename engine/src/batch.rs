//! What a model computes in one step, and the page table that says where its KV is.

use std::ops::Range;

use terrace_scheduler::{DevicePage, Plan, Slot, Token};

/// Consecutive tokens of one sequence to compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The sequence's row of the page table.
    pub slot: Slot,
    /// The position of the first token. The KV of everything before it is in the row's pages.
    pub start: u32,
    /// Where the tokens are in [`Batch::tokens`].
    pub tokens: Range<usize>,
    /// After how many of its tokens logits are wanted, counted from the last: usually after that one, or
    /// after none.
    pub logits: usize,
}

impl Span {
    /// The position after the last token.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.start + self.tokens.len() as u32
    }
}

/// One forward step.
///
/// Spans are of different sequences and do not read what other spans of the same batch write.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// What to compute.
    pub spans: &'a [Span],
    /// The tokens of all spans, one span after the other.
    pub tokens: &'a [Token],
    /// Where the KV of each sequence is.
    pub table: &'a PageTable,
}

impl Batch<'_> {
    /// The tokens of a span.
    #[must_use]
    pub fn tokens_of(&self, span: &Span) -> &[Token] {
        &self.tokens[span.tokens.clone()]
    }

    /// The pages that hold, and will hold, the KV of a span's sequence up to the span's end.
    #[must_use]
    pub fn pages_of(&self, span: &Span) -> &[DevicePage] {
        let pages = span.end().div_ceil(self.table.page_size) as usize;
        &self.table.row(span.slot)[..pages]
    }

    /// Of those, the pages that the step writes to.
    #[must_use]
    pub fn written_pages_of(&self, span: &Span) -> &[DevicePage] {
        &self.pages_of(span)[(span.start / self.table.page_size) as usize..]
    }
}

/// For each running sequence the device pages of its KV, in order.
#[derive(Clone, Debug)]
pub struct PageTable {
    page_size: u32,
    rows: Vec<Vec<DevicePage>>,
}

impl PageTable {
    /// An empty table of so many rows.
    #[must_use]
    pub fn new(rows: u32, page_size: u32) -> Self {
        Self { page_size, rows: vec![Vec::new(); rows as usize] }
    }

    /// Changes the entries that a plan says have changed.
    pub fn apply(&mut self, plan: &Plan) {
        for change in &plan.rows {
            self.set(change.slot, change.first_entry, plan.row_pages(change));
        }
    }

    /// Replaces what a row holds from an entry on.
    pub fn set(&mut self, slot: Slot, first_entry: u32, pages: &[DevicePage]) {
        let row = &mut self.rows[slot.0 as usize];
        row.truncate(first_entry as usize);
        row.extend_from_slice(pages);
    }

    /// The pages of a row.
    #[must_use]
    pub fn row(&self, slot: Slot) -> &[DevicePage] {
        &self.rows[slot.0 as usize]
    }

    /// Tokens in a page.
    #[must_use]
    pub fn page_size(&self) -> u32 {
        self.page_size
    }
}
