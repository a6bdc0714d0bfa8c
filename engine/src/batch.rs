//! The input of one model step, and the page table that locates KV.

use std::ops::Range;
use std::sync::Arc;

use terrace_scheduler::{DevicePage, Passage, Plan, Slot, StepId, Token};

use crate::device::{CopyError, CopyProgress};
use crate::sampling::Choosing;
use crate::sampling::grammar::Mask;

/// Consecutive tokens of one sequence to compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Row of the sequence in the page table.
    pub slot: Slot,
    /// Position of the first token. The pages of the row hold the KV of all positions before it.
    pub start: u32,
    /// Range of the span's tokens in [`Batch::tokens`].
    pub tokens: Range<usize>,
    /// Number of trailing tokens whose logits are wanted: usually one or none.
    pub logits: usize,
}

impl Span {
    /// Returns the position after the last token.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.start + self.tokens.len() as u32
    }
}

/// One forward step as it is handed to a model. The model keeps the page table and the sampling
/// state from one step to the next, so a batch lists only changes.
///
/// Spans belong to different sequences and do not read pages that other spans of the same batch
/// write.
#[derive(Debug, Default)]
pub struct Batch {
    /// Id of the step, for traces.
    pub step: Option<StepId>,
    /// Rows whose sequence has ended; the model drops their state. Applied before `came`.
    pub went: Vec<Slot>,
    /// Sequences that are assigned to a row. They replace the row's previous sequence, whether or
    /// not `went` lists it.
    pub came: Vec<Arrival>,
    /// Page-table entries that change, in order.
    pub changes: Vec<RowChange>,
    /// Pages of all changes.
    pub pages: Vec<DevicePage>,
    /// Spans to compute.
    pub spans: Vec<Span>,
    /// The tokens of all spans, one span after the other.
    pub tokens: Vec<Token>,
    /// Tokens that the previous step has not chosen yet.
    pub awaited: Vec<Awaited>,
    /// Uses of the logits, in the order of the spans that want any. The model returns one output
    /// for each.
    pub wanted: Vec<Wanted>,
    /// Prompt tokens whose log-probability is wanted.
    pub scored: Vec<Token>,
    /// Incomplete load-backs of pages that these spans, or spans of steps launched before, read. A
    /// layer of such a page is read only after it has arrived. If a load-back fails, the step may
    /// fail or go on with the bytes that are there: the engine discards all results that depend on
    /// them.
    pub arriving: Vec<CopyProgress>,
}

/// A sequence that is assigned to a row of the page table.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// The row.
    pub slot: Slot,
    /// Sampling parameters of the sequence.
    pub choosing: Arc<Choosing>,
    /// Tokens already generated, if sampling depends on them.
    pub produced: Vec<Token>,
    /// Adapter to compute with: one of [`Model::adapters`](crate::Model::adapters).
    pub adapter: Option<Arc<str>>,
    /// Prompt ranges that stand for other content, such as images. The [content](Passage::content)
    /// key names what the model puts there.
    pub passages: Arc<[Passage]>,
}

impl Arrival {
    /// Creates an arrival without generated tokens, adapter or passages.
    #[must_use]
    pub fn new(slot: Slot, choosing: Arc<Choosing>) -> Self {
        Self { slot, choosing, produced: Vec::new(), adapter: None, passages: Arc::new([]) }
    }
}

/// Consecutive changed entries of one page-table row. The row ends behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowChange {
    /// The row.
    pub slot: Slot,
    /// Index of the first entry.
    pub first_entry: u32,
    /// Range of the pages in [`Batch::pages`].
    pub pages: Range<usize>,
}

/// A token that the previously launched step chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Index in [`Batch::tokens`]; the token there is a placeholder.
    pub token: usize,
    /// Index of the output in the previous step.
    pub output: usize,
}

/// The use of a span's logits.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Index of the span in [`Batch::spans`].
    pub span: usize,
    /// Choice of the token behind the span, if any.
    pub choice: Option<Choice>,
    /// Range in [`Batch::scored`] of the prompt tokens whose log-probability is wanted: the
    /// successor of each of the span's tokens, except behind the last token of the prompt.
    pub scored: Range<usize>,
}

/// The choice of a token.
#[derive(Clone, Debug)]
pub struct Choice {
    /// Number of tokens that the answer has before this one. A model that has chosen more, in a
    /// step that failed, discards them.
    pub index: u32,
    /// Tokens that may be chosen; all tokens if there is no mask. The mask depends on the previous
    /// token, which may still be awaited; only the choice waits for it.
    pub mask: Option<Mask>,
}

impl Batch {
    /// Clears the batch and keeps its memory.
    pub(crate) fn clear(&mut self) {
        let Self {
            step,
            went,
            came,
            changes,
            pages,
            spans,
            tokens,
            awaited,
            wanted,
            scored,
            arriving,
        } = self;
        *step = None;
        went.clear();
        came.clear();
        changes.clear();
        pages.clear();
        spans.clear();
        tokens.clear();
        awaited.clear();
        wanted.clear();
        scored.clear();
        arriving.clear();
    }

    /// Copies the changed page-table entries of a plan.
    pub(crate) fn take_rows(&mut self, plan: &Plan) {
        for change in &plan.rows {
            let pages = plan.row_pages(change);
            self.add_change(change.slot, change.first_entry, pages);
        }
    }

    fn add_change(&mut self, slot: Slot, first_entry: u32, pages: &[DevicePage]) {
        let first = self.pages.len();
        self.pages.extend_from_slice(pages);
        self.changes.push(RowChange { slot, first_entry, pages: first..self.pages.len() });
    }

    /// Returns the row changes without the spans.
    pub(crate) fn row_changes(&self) -> Batch {
        Batch {
            went: self.went.clone(),
            came: self.came.clone(),
            changes: self.changes.clone(),
            pages: self.pages.clone(),
            ..Batch::default()
        }
    }

    /// Prepends the row changes of a batch that could not be launched.
    pub(crate) fn prepend_rows(&mut self, mut earlier: Batch) {
        // Departures come before arrivals: a sequence that arrived and left in between is dropped.
        earlier.came.retain(|came| !self.went.contains(&came.slot));
        earlier.went.append(&mut self.went);
        earlier.came.append(&mut self.came);
        for (slot, first_entry, pages) in self.changes() {
            earlier.add_change(slot, first_entry, pages);
        }
        (self.went, self.came) = (earlier.went, earlier.came);
        (self.changes, self.pages) = (earlier.changes, earlier.pages);
    }

    /// Iterates over the changed page-table entries.
    pub fn changes(&self) -> impl Iterator<Item = (Slot, u32, &[DevicePage])> {
        let pages = |change: &RowChange| &self.pages[change.pages.clone()];
        self.changes.iter().map(move |change| (change.slot, change.first_entry, pages(change)))
    }
}

/// One forward step as a [`Forward`](crate::Forward) sees it: all tokens are known, and the page
/// table is complete.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Spans to compute.
    pub spans: &'a [Span],
    /// The tokens of all spans, one span after the other.
    pub tokens: &'a [Token],
    /// Pages of each sequence's KV.
    pub table: &'a PageTable,
    /// Load-backs in flight; a layer of them is read only after it has arrived.
    pub arriving: &'a [CopyProgress],
}

impl Step<'_> {
    /// Waits until a layer of all load-backs has arrived.
    ///
    /// # Errors
    /// Returns the error of a copy that failed or was cancelled.
    pub fn wait_for_layer(&self, layer: usize) -> Result<(), CopyError> {
        self.arriving.iter().try_for_each(|progress| progress.wait_for(layer))
    }

    /// Returns the tokens of a span.
    #[must_use]
    pub fn tokens_of(&self, span: &Span) -> &[Token] {
        &self.tokens[span.tokens.clone()]
    }

    /// Returns the pages of a span's sequence up to the end of the span.
    #[must_use]
    pub fn pages_of(&self, span: &Span) -> &[DevicePage] {
        let pages = span.end().div_ceil(self.table.page_size) as usize;
        &self.table.row(span.slot)[..pages]
    }

    /// Returns the pages of a span that the step writes to.
    #[must_use]
    pub fn written_pages_of(&self, span: &Span) -> &[DevicePage] {
        &self.pages_of(span)[(span.start / self.table.page_size) as usize..]
    }
}

/// The device pages of each running sequence, in order.
#[derive(Clone, Debug)]
pub struct PageTable {
    page_size: u32,
    rows: Vec<Vec<DevicePage>>,
}

impl PageTable {
    /// Creates an empty table with the given number of rows.
    #[must_use]
    pub fn new(rows: u32, page_size: u32) -> Self {
        Self { page_size, rows: vec![Vec::new(); rows as usize] }
    }

    /// Applies the page-table changes of a batch.
    pub fn apply(&mut self, batch: &Batch) {
        for (slot, first_entry, pages) in batch.changes() {
            self.set(slot, first_entry, pages);
        }
    }

    /// Replaces the pages of a row from an entry on.
    pub fn set(&mut self, slot: Slot, first_entry: u32, pages: &[DevicePage]) {
        let row = &mut self.rows[slot.0 as usize];
        row.truncate(first_entry as usize);
        row.extend_from_slice(pages);
    }

    /// Returns the pages of a row.
    #[must_use]
    pub fn row(&self, slot: Slot) -> &[DevicePage] {
        &self.rows[slot.0 as usize]
    }

    /// Returns the number of tokens in a page.
    #[must_use]
    pub fn page_size(&self) -> u32 {
        self.page_size
    }
}

#[cfg(test)]
mod tests {
    use terrace_cache::{Cache, CacheConfig};

    use super::*;
    use crate::sampling::shaping::Shaping;
    use crate::sampling::{Choosing, Sampling};

    fn arrival(slot: u32, produced: Token) -> Arrival {
        let choosing = Choosing {
            sampling: Sampling::GREEDY,
            shaping: Shaping::default(),
            ends: Arc::new([]),
            prompt: Vec::new(),
            logprobs: None,
            logits: false,
        };
        let produced = vec![produced];
        Arrival { produced, ..Arrival::new(Slot(slot), Arc::new(choosing)) }
    }

    #[test]
    fn prepends_row_changes_of_a_failed_launch() {
        let pages = Cache::new(&CacheConfig::default()).take_device_pages(4).unwrap();
        let pages = pages.as_slice();
        let mut earlier = Batch { went: vec![Slot(3)], ..Batch::default() };
        earlier.came = vec![arrival(0, 10), arrival(1, 11)];
        earlier.add_change(Slot(0), 0, &pages[..2]);
        earlier.add_change(Slot(1), 0, &pages[2..3]);
        let mut batch = Batch { tokens: vec![7], went: vec![Slot(1)], ..Batch::default() };
        batch.came = vec![arrival(1, 12)];
        batch.add_change(Slot(1), 0, &pages[3..]);
        batch.add_change(Slot(0), 1, &pages[3..]);

        batch.prepend_rows(earlier.row_changes());
        assert_eq!(batch.went, [Slot(3), Slot(1)]);
        let came: Vec<_> = batch.came.iter().map(|came| (came.slot, came.produced[0])).collect();
        assert_eq!(came, [(Slot(0), 10), (Slot(1), 12)], "who has gone meanwhile never came");
        assert_eq!(batch.tokens, [7], "what is computed stays");
        let mut table = PageTable::new(4, 16);
        table.apply(&batch);
        assert_eq!(table.row(Slot(0)), [pages[0], pages[3]]);
        assert_eq!(table.row(Slot(1)), [pages[3]]);
    }
}
