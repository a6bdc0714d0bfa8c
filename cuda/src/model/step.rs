//! The conversion of a batch to kernel inputs: the place of each token, the keys that it attends
//! to, and its sampling parameters. It does not need a device.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use terrace_engine::{Batch, Choosing, Mask, ModelError, PageTable, Span};
use terrace_model::Shape;
use terrace_scheduler::{Slot, Token};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::kernels::{FEW_ROWS, ROWS};
use super::plain::{
    self, Awaited, Bias, Change, Count, Draw, Item, NONE, OF_PROMPT, Score, Segments, WHOLE,
};

/// Sampling state of a row.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) choosing: Arc<Choosing>,
    /// Changes when another sequence is assigned to the row.
    pub(super) arrival: u64,
    /// Tokens of the answer, if sampling depends on them.
    produced: Vec<Token>,
    /// Tokens that end the answer, without duplicates.
    ends: Vec<u32>,
    /// Additions to logits, one per token, because separate threads apply them.
    biases: Vec<Bias>,
    /// Number of the answer's tokens in the device's table of counts. `None` if the row's content
    /// is unknown.
    counted: Option<usize>,
}

impl Row {
    pub(super) fn new(
        choosing: &Arc<Choosing>,
        produced: &[Token],
        arrival: u64,
        vocabulary: usize,
    ) -> Self {
        let is_known = |token: Token| (token as usize) < vocabulary;
        let ends = choosing.ends.iter().copied().filter(|end| is_known(*end));
        let ends: Vec<u32> = ends.collect::<BTreeSet<_>>().into_iter().collect();
        let mut biases = BTreeMap::new();
        for &(token, bias) in choosing.shaping.bias.iter().filter(|(token, _)| is_known(*token)) {
            biases.entry(token).and_modify(|all| *all += bias).or_insert(bias);
        }
        let biases = biases.into_iter().map(|(token, bias)| Bias { token, bias }).collect();
        let (choosing, answer) = (choosing.clone(), Vec::new());
        let mut row = Self { choosing, arrival, produced: answer, ends, biases, counted: None };
        produced.iter().for_each(|&token| row.push(token));
        row
    }

    /// Adds a token to the answer.
    pub(super) fn push(&mut self, token: Token) {
        if self.counts_tokens() {
            self.produced.push(token);
        }
    }

    /// Discards tokens chosen after the first `tokens`.
    fn rewind(&mut self, tokens: usize) {
        self.produced.truncate(tokens);
        if self.counted.is_some_and(|counted| counted > tokens) {
            self.counted = None;
        }
    }

    /// Marks the device's counts as unknown.
    pub(super) fn forget_counts(&mut self) {
        self.counted = None;
    }

    fn counts_tokens(&self) -> bool {
        let shaping = &self.choosing.shaping;
        shaping.presence_penalty != 0.0
            || shaping.frequency_penalty != 0.0
            || shaping.repetition_penalty != 1.0
    }
}

/// Changes to the device's table of counts, in order: rows are cleared first, then tokens are
/// counted.
#[derive(Debug, Default)]
pub(super) struct Counting {
    /// Rows to clear.
    pub(super) cleared: Vec<u32>,
    /// Tokens to count: usually the one that each row has got since the step before.
    pub(super) counts: Vec<Count>,
    /// Bit set of a prompt's tokens, while it is added.
    seen: Vec<u64>,
}

impl Counting {
    fn clear(&mut self) {
        self.cleared.clear();
        self.counts.clear();
    }

    /// Adds the changes that bring a row of the table up to date.
    fn add(&mut self, vocabulary: usize, slot: u32, row: &mut Row) {
        let is_known = |token: &Token| (*token as usize) < vocabulary;
        let counted = row.counted.replace(row.produced.len());
        if counted.is_none() {
            self.cleared.push(slot);
            if row.choosing.shaping.repetition_penalty != 1.0 {
                self.seen.clear();
                self.seen.resize(vocabulary.div_ceil(64), 0);
                for &token in row.choosing.prompt.iter().filter(|token| is_known(token)) {
                    let (word, bit) = (token as usize / 64, 1 << (token % 64));
                    if self.seen[word] & bit == 0 {
                        self.seen[word] |= bit;
                        self.counts.push(Count { row: slot, token, by: OF_PROMPT });
                    }
                }
            }
        }
        let new = row.produced[counted.unwrap_or(0)..].iter().filter(|token| is_known(token));
        self.counts.extend(new.map(|&token| Count { row: slot, token, by: 1 }));
    }
}

/// The kernel inputs of a step. Its memory is reused.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) tokens: Vec<plain::Token>,
    pub(super) changes: Vec<Change>,
    pub(super) pages: Vec<u32>,
    pub(super) awaited: Vec<Awaited>,
    /// Tokens of short spans, each with one segment of its keys.
    pub(super) few: Vec<Item>,
    pub(super) segments: Vec<Segments>,
    /// Number of partial results of these.
    pub(super) partials: u32,
    /// Tokens of long spans, each with all of its keys; those with the most keys first.
    pub(super) many: Vec<Item>,
    /// Tokens whose logits are wanted.
    pub(super) logits_of: Vec<u32>,
    /// In the order of logits, as are the following fields.
    pub(super) draws: Vec<Draw>,
    pub(super) shapings: Vec<plain::Shaping>,
    pub(super) forbidden: Vec<u32>,
    pub(super) counting: Counting,
    pub(super) biases: Vec<Bias>,
    /// Masks by output. They may not be known before the step is submitted.
    pub(super) masks: Vec<(Mask, usize)>,
    pub(super) scores: Vec<Score>,
    /// Rows of logits to copy to the host.
    pub(super) told: Vec<u32>,
}

/// Limits of the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Capacity for partial results.
    pub(super) partials_max: u32,
    /// Blocks that the device computes at once.
    pub(super) blocks: usize,
    /// Keys of a segment.
    pub(super) segment: u32,
}

/// The source of an output.
#[derive(Debug)]
pub(super) enum Choice {
    /// No token is chosen.
    None,
    /// The device samples.
    OnDevice {
        /// True if a grammar masks the output.
        is_masked: bool,
    },
}

/// Index of the shaped output.
#[derive(Clone, Copy, Debug)]
struct Place {
    logits_row: u32,
    slot: u32,
    output: usize,
}

/// The parts of an output.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) slot: Slot,
    pub(super) arrival: u64,
    pub(super) choice: Choice,
    /// Index of the chosen token's score.
    pub(super) score: Option<usize>,
    /// Indices of the prompt tokens' scores.
    pub(super) prompt_scores: std::ops::Range<usize>,
    /// Index of the logits to return, among those copied to the host.
    pub(super) logits: Option<usize>,
}

impl Work {
    /// Prepares the kernel inputs of a batch. The page table and the rows already reflect the
    /// batch's changes.
    pub(super) fn prepare(
        &mut self,
        shape: &Shape,
        limits: Limits,
        batch: &Batch,
        table: &PageTable,
        rows: &mut [Option<Row>],
    ) -> Result<Vec<Expected>, ModelError> {
        check(shape, batch)?;
        self.clear();
        for (slot, first_entry, pages) in batch.changes() {
            let first_page = self.pages.len() as u32;
            self.pages.extend(pages.iter().map(|page| page.slot()));
            let pages = pages.len() as u32;
            self.changes.push(Change { row: slot.0, first_entry, first_page, pages });
        }
        let awaited = |it: &terrace_engine::Awaited| Awaited {
            token: it.token as u32,
            output: it.output as u32,
        };
        self.awaited.extend(batch.awaited.iter().map(awaited));
        for span in &batch.spans {
            self.add_tokens(span, batch, table);
            self.add_items(shape, limits, span);
        }
        // The longest start first.
        self.few.sort_unstable_by_key(|item| {
            (std::cmp::Reverse(item.keys_end - item.keys_from), item.first_token, item.keys_from)
        });
        self.split_many(shape, limits);
        self.many.sort_by_key(|item| std::cmp::Reverse(item.keys_end - item.keys_from));
        let mut expected = Vec::with_capacity(batch.wanted.len());
        for (output, wanted) in batch.wanted.iter().enumerate() {
            expected.push(self.add_output(shape, batch, output, wanted, rows)?);
        }
        Ok(expected)
    }

    /// Prepares consecutive tokens of one sequence in the first row, with the device's first pages
    /// in order.
    pub(super) fn prepare_probe(
        &mut self,
        shape: &Shape,
        limits: Limits,
        tokens: &[Token],
        start: u32,
        page_size: u32,
    ) {
        self.clear();
        let pages = (start + tokens.len() as u32).div_ceil(page_size);
        self.pages.extend(0..pages);
        self.changes.push(Change { row: 0, first_entry: 0, first_page: 0, pages });
        let placed =
            |(position, &token)| plain::Token { token, position, place: position, unused: 0 };
        self.tokens.extend((start..).zip(tokens).map(placed));
        let span = Span { slot: Slot(0), start, tokens: 0..tokens.len(), logits: 0 };
        self.add_items(shape, limits, &span);
        self.split_many(shape, limits);
    }

    fn clear(&mut self) {
        let Self { tokens, changes, pages, awaited, few, segments, partials, many, .. } = self;
        *partials = 0;
        tokens.clear();
        changes.clear();
        pages.clear();
        awaited.clear();
        few.clear();
        segments.clear();
        many.clear();
        let Self {
            logits_of,
            draws,
            shapings,
            forbidden,
            counting,
            biases,
            masks,
            scores,
            told,
            ..
        } = self;
        logits_of.clear();
        draws.clear();
        shapings.clear();
        forbidden.clear();
        counting.clear();
        biases.clear();
        masks.clear();
        scores.clear();
        told.clear();
    }

    fn add_tokens(&mut self, span: &Span, batch: &Batch, table: &PageTable) {
        let (page_size, pages) = (table.page_size(), table.row(span.slot));
        for (position, &token) in (span.start..).zip(&batch.tokens[span.tokens.clone()]) {
            let page = pages[(position / page_size) as usize].slot();
            let place = page * page_size + position % page_size;
            self.tokens.push(plain::Token { token, position, place, unused: 0 });
        }
    }

    /// Adds the attention items of a span.
    fn add_items(&mut self, shape: &Shape, limits: Limits, span: &Span) {
        let Limits { partials_max, segment: keys, .. } = limits;
        let (first, count) = (span.tokens.start as u32, span.tokens.len() as u32);
        let group = shape.group();
        let segments = span.end().div_ceil(keys);
        let partials = if segments > 1 { segments } else { 0 };
        let is_room = self.partials + partials <= partials_max;
        let item = Item {
            row: span.slot.0,
            first_token: first,
            tokens: count,
            position: span.start,
            keys_from: 0,
            keys_end: span.end(),
            partial: WHOLE,
            unused: 0,
        };
        if count as usize * group <= FEW_ROWS && is_room {
            for segment in 0..segments {
                self.few.push(Item {
                    keys_from: segment * keys,
                    keys_end: span.end().min((segment + 1) * keys),
                    partial: if segments > 1 { self.partials + segment } else { WHOLE },
                    ..item
                });
            }
            if segments > 1 {
                self.segments.push(Segments {
                    first_token: first,
                    tokens: count,
                    first_partial: self.partials,
                    count: segments,
                    units: 1,
                    unused: [0; 3],
                });
                self.partials += segments;
            }
            return;
        }
        let tile = (ROWS / group) as u32;
        for begin in (0..count).step_by(tile as usize) {
            let tokens = tile.min(count - begin);
            let position = span.start + begin;
            let (first_token, keys_end) = (first + begin, position + tokens);
            self.many.push(Item { first_token, tokens, position, keys_end, ..item });
        }
    }

    /// Divides long spans into segments where needed. If few tokens attend to many keys, one block
    /// per tile of tokens would leave most of the device idle, so their segments are computed
    /// separately and joined, as for decodes.
    fn split_many(&mut self, shape: &Shape, limits: Limits) {
        const UNITS: u32 = (ROWS / FEW_ROWS) as u32;
        if self.many.len() * shape.kv_heads > limits.blocks {
            return;
        }
        for item in std::mem::take(&mut self.many) {
            let count = item.keys_end.div_ceil(limits.segment);
            if count < 2 || self.partials + count * UNITS > limits.partials_max {
                self.many.push(item);
                continue;
            }
            let Item { first_token, tokens, .. } = item;
            let (first_partial, units, unused) = (self.partials, UNITS, [0; 3]);
            self.segments.push(Segments {
                first_token,
                tokens,
                first_partial,
                count,
                units,
                unused,
            });
            self.many.extend((0..count).map(|segment| Item {
                keys_from: segment * limits.segment,
                keys_end: item.keys_end.min((segment + 1) * limits.segment),
                partial: first_partial + segment * UNITS,
                ..item
            }));
            self.partials += count * UNITS;
        }
    }

    fn add_output(
        &mut self,
        shape: &Shape,
        batch: &Batch,
        output: usize,
        wanted: &terrace_engine::Wanted,
        rows: &mut [Option<Row>],
    ) -> Result<Expected, ModelError> {
        let span = &batch.spans[wanted.span];
        let unassigned = || ModelError(format!("no sequence is assigned to {:?}", span.slot));
        let row = rows[span.slot.0 as usize].as_mut().ok_or_else(unassigned)?;
        let first = self.logits_of.len() as u32;
        let end = span.tokens.end as u32;
        self.logits_of.extend(end - span.logits as u32..end);
        let top = row.choosing.logprobs.unwrap_or(0).min(shape.vocabulary as u32);
        let first_score = self.scores.len();
        for (row, &token) in (first..).zip(&batch.scored[wanted.scored.clone()]) {
            self.scores.push(Score { row, token, output: NONE, top });
        }
        let mut expected = Expected {
            slot: span.slot,
            arrival: row.arrival,
            choice: Choice::None,
            score: None,
            prompt_scores: first_score..self.scores.len(),
            logits: None,
        };
        let Some(choice) = &wanted.choice else { return Ok(expected) };
        let last = first + span.logits as u32 - 1;
        row.rewind(choice.index as usize);
        if row.choosing.logits {
            expected.logits = Some(self.told.len());
            self.told.push(last);
        }
        expected.choice = Choice::OnDevice { is_masked: choice.mask.is_some() };
        if row.choosing.logprobs.is_some() {
            expected.score = Some(self.scores.len());
            self.scores.push(Score { row: last, token: 0, output: output as u32, top });
        }
        let is_shaped =
            choice.mask.is_some() || row.choosing.shaping != terrace_engine::Shaping::default();
        if is_shaped {
            let awaited = batch.awaited.iter().find(|it| it.token + 1 == span.tokens.end);
            let awaited = awaited.map(|it| it.output as u32);
            let place = Place { logits_row: last, slot: span.slot.0, output };
            self.add_shaping(shape, place, row, choice, awaited)?;
        }
        let sampling = &row.choosing.sampling;
        self.draws.push(Draw {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            top_k: sampling.top_k,
            drawn: xxh3_64_with_seed(&choice.index.to_le_bytes(), sampling.seed) >> 11,
            row: last,
            is_shaped: is_shaped.into(),
            output: output as u32,
            unused: 0,
        });
        Ok(expected)
    }

    fn add_shaping(
        &mut self,
        shape: &Shape,
        Place { logits_row, slot, output }: Place,
        row: &mut Row,
        choice: &terrace_engine::Choice,
        awaited: Option<u32>,
    ) -> Result<(), ModelError> {
        let index = choice.index;
        let known = row.produced.len() as u32;
        let awaited = match (row.counts_tokens(), awaited) {
            (false, _) => NONE,
            (true, _) if known == index => NONE,
            // The step before has chosen it, and its result has not been reported yet.
            (true, Some(output)) if known + 1 == index => output,
            (true, _) => {
                return Err(ModelError(format!(
                    "{known} of {index} tokens of an answer are known"
                )));
            }
        };
        if row.counts_tokens() {
            self.counting.add(shape.vocabulary, slot, row);
        }
        let shaping = &row.choosing.shaping;
        let (first_forbidden, first_bias) = (self.forbidden.len(), self.biases.len());
        if index < shaping.min_tokens {
            self.forbidden.extend_from_slice(&row.ends);
        }
        self.biases.extend_from_slice(&row.biases);
        let mask = match &choice.mask {
            Some(mask) => {
                self.masks.push((mask.clone(), output));
                self.masks.len() as u32 - 1
            }
            None => NONE,
        };
        self.shapings.push(plain::Shaping {
            row: logits_row,
            first_forbidden: first_forbidden as u32,
            forbidden: (self.forbidden.len() - first_forbidden) as u32,
            first_bias: first_bias as u32,
            biases: (self.biases.len() - first_bias) as u32,
            awaited,
            counts: if row.counts_tokens() { slot } else { NONE },
            mask,
            output: output as u32,
            repetition: shaping.repetition_penalty,
            frequency: shaping.frequency_penalty,
            presence: shaping.presence_penalty,
        });
        Ok(())
    }
}

/// Checks a batch.
fn check(shape: &Shape, batch: &Batch) -> Result<(), ModelError> {
    let vocabulary = shape.vocabulary as u32;
    let is_awaited = |place: usize| batch.awaited.iter().any(|it| it.token == place);
    let is_unknown = |(place, token): &(usize, &u32)| **token >= vocabulary && !is_awaited(*place);
    if let Some((_, token)) = batch.tokens.iter().enumerate().find(is_unknown) {
        return Err(ModelError(format!("token {token} is not one of the model's {vocabulary}")));
    }
    for span in &batch.spans {
        let (end, max) = (span.end(), shape.positions_max);
        if end > max {
            let text = format!("a sequence of {end} tokens is longer than the model's {max}");
            return Err(ModelError(text));
        }
        if span.tokens.is_empty() || span.logits > span.tokens.len() {
            return Err(ModelError("a span has too few tokens".to_owned()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use terrace_engine::{Sampling, Shaping};
    use terrace_kit::Dice;

    use super::*;

    const VOCABULARY: usize = 40;

    /// The table of counts as the device holds it.
    #[derive(Default)]
    struct Table(BTreeMap<(u32, Token), u32>);

    impl Table {
        fn take(&mut self, counting: &Counting) {
            for slot in &counting.cleared {
                self.0.retain(|(row, _), _| row != slot);
            }
            for count in &counting.counts {
                *self.0.entry((count.row, count.token)).or_default() += count.by;
            }
        }
    }

    fn row(prompt: &[Token], produced: &[Token], repetition_penalty: f32) -> Row {
        let shaping = Shaping { repetition_penalty, frequency_penalty: 0.5, ..Shaping::default() };
        let choosing = Choosing {
            sampling: Sampling::GREEDY,
            shaping,
            ends: Arc::new([]),
            prompt: prompt.to_vec(),
            logprobs: None,
            logits: false,
        };
        Row::new(&Arc::new(choosing), produced, 0, VOCABULARY)
    }

    /// Returns the expected counts of a row.
    fn expected(slot: u32, row: &Row) -> BTreeMap<(u32, Token), u32> {
        let mut all = BTreeMap::new();
        let is_known = |token: &&Token| (**token as usize) < VOCABULARY;
        if row.choosing.shaping.repetition_penalty != 1.0 {
            let prompt = row.choosing.prompt.iter().filter(is_known);
            all.extend(prompt.map(|&token| ((slot, token), OF_PROMPT)));
        }
        for &token in row.produced.iter().filter(is_known) {
            *all.entry((slot, token)).or_default() += 1;
        }
        all
    }

    #[test]
    fn step_sends_only_new_counts() {
        let (mut counting, mut table) = (Counting::default(), Table::default());
        // More tokens than a round's lists have room for.
        let answer: Vec<Token> = (0..(1 << 20) + 10).map(|at| at % 30).collect();
        let mut row = row(&[3, 3, 39, 40], &answer, 1.5);
        counting.add(VOCABULARY, 2, &mut row);
        assert_eq!((&*counting.cleared, counting.counts.len()), (&[2][..], answer.len() + 2));
        table.take(&counting);
        assert_eq!(table.0, expected(2, &row));
        for token in [39, 7, 7] {
            row.push(token);
            counting.clear();
            counting.add(VOCABULARY, 2, &mut row);
            assert!(counting.cleared.is_empty(), "what is there stays");
            assert_eq!(counting.counts, [Count { row: 2, token, by: 1 }]);
            table.take(&counting);
        }
        counting.clear();
        counting.add(VOCABULARY, 2, &mut row);
        assert_eq!(counting.counts, [], "a retried step changes no count");
        assert_eq!(table.0, expected(2, &row));
    }

    /// Rows start, end, get tokens and drop some, and some steps are not submitted.
    #[test]
    fn table_of_counts_follows_all_row_changes() {
        let mut dice = Dice::new(17);
        let (mut counting, mut table) = (Counting::default(), Table::default());
        let mut rows: Vec<Option<Row>> = (0..4).map(|_| None).collect();
        for _ in 0..3_000 {
            let slot = dice.below(4) as u32;
            let held = &mut rows[slot as usize];
            match (dice.below(12), held) {
                (0, held) => *held = None,
                (1, held) | (_, held @ None) => {
                    let [prompt, produced] = [20, 9].map(|most| {
                        let count = dice.place(most);
                        dice.tokens(count, VOCABULARY + 2)
                    });
                    *held = Some(row(&prompt, &produced, dice.pick(&[1.0, 1.5])));
                }
                (2, Some(row)) => row.rewind(dice.place(row.produced.len() + 1)),
                (_, Some(row)) => row.push(dice.place(VOCABULARY) as Token),
            }
            counting.clear();
            let some = dice.below(16);
            for (slot, row) in (0..).zip(&mut rows) {
                if let Some(row) = row.as_mut().filter(|_| some >> slot & 1 == 1) {
                    counting.add(VOCABULARY, slot, row);
                }
            }
            if dice.one_in(10) {
                // The launch failed, completely or in part.
                counting.counts.truncate(dice.place(3));
                rows.iter_mut().flatten().for_each(Row::forget_counts);
                table.take(&counting);
                continue;
            }
            table.take(&counting);
            for (slot, row) in (0..).zip(&rows) {
                if let Some(row) = row.as_ref().filter(|_| some >> slot & 1 == 1) {
                    let of_row = table.0.range((slot, 0)..(slot + 1, 0));
                    let of_row = of_row.map(|(at, count)| (*at, *count)).collect();
                    assert_eq!(expected(slot, row), of_row);
                }
            }
        }
    }
}
