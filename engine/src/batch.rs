//! What a model computes in one step: what is handed over with it, and the page table that says where KV is.

use std::ops::Range;
use std::sync::Arc;

use terrace_scheduler::{DevicePage, Passage, Plan, Slot, StepId, Token};

use crate::device::{CopyError, CopyProgress};
use crate::sampling::Choosing;
use crate::sampling::grammar::Mask;

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

/// One forward step as it is handed to a model, which keeps the page table and what choosing depends on
/// from one to the next: only what changes is told.
///
/// Spans are of different sequences and do not read what other spans of the same batch write.
#[derive(Debug, Default)]
pub struct Batch {
    /// The step's name, for those who look at it.
    pub step: Option<StepId>,
    /// Rows whose sequence has ended: what was kept for them can be forgotten. Comes before `came`.
    pub went: Vec<Slot>,
    /// Sequences that come to a row. What was in it before has gone, told or not.
    pub came: Vec<Arrival>,
    /// Entries of the page table that change, in order.
    pub changes: Vec<RowChange>,
    /// The pages of all of them.
    pub pages: Vec<DevicePage>,
    /// What to compute.
    pub spans: Vec<Span>,
    /// The tokens of all spans, one span after the other.
    pub tokens: Vec<Token>,
    /// Those of them that are not known yet.
    pub awaited: Vec<Awaited>,
    /// What the logits are for, in the order of the spans that want some: as many outputs are given back.
    pub wanted: Vec<Wanted>,
    /// The tokens of prompts whose log-probability is wanted.
    pub scored: Vec<Token>,
    /// Load-backs whose pages the spans, or those of steps launched before, read though not all of them has arrived:
    /// of these, a layer is read only after it has. If one does not come the step may fail, or go on with whatever
    /// is there: nothing of it is believed that follows from that.
    pub arriving: Vec<CopyProgress>,
}

/// A sequence that comes to a row of the page table.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// The row.
    pub slot: Slot,
    /// How its tokens are chosen.
    pub choosing: Arc<Choosing>,
    /// What its answer has already, where choosing depends on it.
    pub produced: Vec<Token>,
    /// The adapter to compute it with, one of [`Model::adapters`](crate::Model::adapters).
    pub adapter: Option<Arc<str>>,
    /// Where its prompt says more than its tokens do: what the model was given under each
    /// [content](Passage::content) goes there.
    pub passages: Arc<[Passage]>,
}

impl Arrival {
    /// One without answer, adapter or passages.
    #[must_use]
    pub fn new(slot: Slot, choosing: Arc<Choosing>) -> Self {
        Self { slot, choosing, produced: Vec::new(), adapter: None, passages: Arc::new([]) }
    }
}

/// Consecutive entries of one row of the page table that change. The row has none behind them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowChange {
    /// The row.
    pub slot: Slot,
    /// The first entry.
    pub first_entry: u32,
    /// Where the pages are in [`Batch::pages`].
    pub pages: Range<usize>,
}

/// A token that the step launched before chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Its place in [`Batch::tokens`], where nothing of meaning stands.
    pub token: usize,
    /// Which of that step's outputs it is.
    pub output: usize,
}

/// What the logits of a span are for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its place in [`Batch::spans`].
    pub span: usize,
    /// What to choose after its last token, if anything.
    pub choice: Option<Choice>,
    /// Where in [`Batch::scored`] the tokens are that follow its own in the prompt, one for each of its
    /// tokens, except for the prompt's last: how likely they were is wanted.
    pub scored: Range<usize>,
}

/// The choice of a token.
#[derive(Clone, Debug)]
pub struct Choice {
    /// How many tokens the answer has before it. A model that has chosen more, in a step that came to
    /// nothing, forgets them.
    pub index: u32,
    /// Tokens that may be chosen; all of them without a mask. It depends on the token before, which may be awaited: nothing but the
    /// choice waits for it.
    pub mask: Option<Mask>,
}

impl Batch {
    /// Forgets everything, and keeps the memory.
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

    /// Takes over the entries that a plan says have changed.
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

    /// What it tells of rows.
    pub(crate) fn told(&self) -> Batch {
        Batch {
            went: self.went.clone(),
            came: self.came.clone(),
            changes: self.changes.clone(),
            pages: self.pages.clone(),
            ..Batch::default()
        }
    }

    /// Tells what another batch was to tell, and no model has taken in, before what it tells itself.
    pub(crate) fn tell_first(&mut self, mut untold: Batch) {
        // Who goes is told before who comes: one that has come and gone meanwhile was never there.
        untold.came.retain(|came| !self.went.contains(&came.slot));
        untold.went.append(&mut self.went);
        untold.came.append(&mut self.came);
        for (slot, first_entry, pages) in self.changes() {
            untold.add_change(slot, first_entry, pages);
        }
        (self.went, self.came) = (untold.went, untold.came);
        (self.changes, self.pages) = (untold.changes, untold.pages);
    }

    /// The entries of the page table that change.
    pub fn changes(&self) -> impl Iterator<Item = (Slot, u32, &[DevicePage])> {
        let pages = |change: &RowChange| &self.pages[change.pages.clone()];
        self.changes.iter().map(move |change| (change.slot, change.first_entry, pages(change)))
    }
}

/// One forward step as a [`Forward`](crate::Forward) sees it: all tokens known, and the whole page table.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// What to compute.
    pub spans: &'a [Span],
    /// The tokens of all spans, one span after the other.
    pub tokens: &'a [Token],
    /// Where the KV of each sequence is.
    pub table: &'a PageTable,
    /// Load-backs of which a layer is read only after it has arrived.
    pub arriving: &'a [CopyProgress],
}

impl Step<'_> {
    /// Waits until a layer of all that is loaded is there.
    ///
    /// # Errors
    /// When it does not come.
    pub fn wait_for_layer(&self, layer: usize) -> Result<(), CopyError> {
        self.arriving.iter().try_for_each(|progress| progress.wait_for(layer))
    }

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

    /// Changes the entries that a batch says have changed.
    pub fn apply(&mut self, batch: &Batch) {
        for (slot, first_entry, pages) in batch.changes() {
            self.set(slot, first_entry, pages);
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
    fn what_no_model_has_taken_in_is_told_first() {
        let pages = Cache::new(&CacheConfig::default()).take_device_pages(4).unwrap();
        let pages = pages.as_slice();
        let mut untold = Batch { went: vec![Slot(3)], ..Batch::default() };
        untold.came = vec![arrival(0, 10), arrival(1, 11)];
        untold.add_change(Slot(0), 0, &pages[..2]);
        untold.add_change(Slot(1), 0, &pages[2..3]);
        let mut batch = Batch { tokens: vec![7], went: vec![Slot(1)], ..Batch::default() };
        batch.came = vec![arrival(1, 12)];
        batch.add_change(Slot(1), 0, &pages[3..]);
        batch.add_change(Slot(0), 1, &pages[3..]);

        batch.tell_first(untold.told());
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
