//! From a batch to what kernels read: which tokens go where, who looks at which keys, and how tokens are chosen. None of
//! it needs a device.

use std::collections::BTreeMap;
use std::sync::Arc;

use terrace_engine::{Batch, Choosing, ModelError, PageTable, Span};
use terrace_model::Shape;
use terrace_scheduler::{Slot, Token};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::kernels::{FEW_ROWS, ROWS, SEGMENT};
use super::plain::{self, Awaited, Bias, Change, Draw, Item, NONE, Score, Seen, Segments, WHOLE};

/// What the choice of a row's tokens depends on.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) choosing: Arc<Choosing>,
    /// Changes with whoever is in the row.
    pub(super) arrival: u64,
    /// The answer, where choosing depends on it.
    pub(super) produced: Vec<Token>,
    /// How often the answer has each of its tokens; never, for some of the prompt's.
    times: BTreeMap<Token, u32>,
}

impl Row {
    pub(super) fn new(choosing: &Arc<Choosing>, produced: &[Token], arrival: u64) -> Self {
        let (choosing, times) = (choosing.clone(), BTreeMap::new());
        let mut row = Self { choosing, arrival, produced: Vec::new(), times };
        row.begin(produced);
        row
    }

    /// The answer has this and nothing else.
    fn begin(&mut self, produced: &[Token]) {
        self.times.clear();
        self.produced.clear();
        if self.choosing.shaping.repetition_penalty != 1.0 {
            self.times.extend(self.choosing.prompt.iter().map(|&token| (token, 0)));
        }
        produced.iter().for_each(|&token| self.push(token));
    }

    /// The answer has another token.
    pub(super) fn push(&mut self, token: Token) {
        if self.counts_tokens() {
            *self.times.entry(token).or_default() += 1;
            self.produced.push(token);
        }
    }

    /// What was chosen after so many tokens is forgotten.
    fn rewind(&mut self, tokens: usize) {
        if self.counts_tokens() && tokens < self.produced.len() {
            let produced = self.produced[..tokens].to_vec();
            self.begin(&produced);
        }
    }

    fn counts_tokens(&self) -> bool {
        let shaping = &self.choosing.shaping;
        shaping.presence_penalty != 0.0
            || shaping.frequency_penalty != 0.0
            || shaping.repetition_penalty != 1.0
    }
}

/// What a step is for the device. Its memory is used again.
#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) tokens: Vec<plain::Token>,
    pub(super) changes: Vec<Change>,
    pub(super) pages: Vec<u32>,
    pub(super) awaited: Vec<Awaited>,
    /// Tokens of which there are few in a span, each with one segment of its keys.
    pub(super) few: Vec<Item>,
    pub(super) segments: Vec<Segments>,
    /// Partial results that they leave.
    pub(super) partials: u32,
    /// Tokens of which there are many, with all their keys; those with the most first.
    pub(super) many: Vec<Item>,
    /// Which tokens logits are wanted after.
    pub(super) logits_of: Vec<u32>,
    /// In the order of logits, like all that follows.
    pub(super) draws: Vec<Draw>,
    pub(super) shapings: Vec<plain::Shaping>,
    pub(super) forbidden: Vec<u32>,
    pub(super) seen: Vec<Seen>,
    pub(super) biases: Vec<Bias>,
    pub(super) scores: Vec<Score>,
    /// Rows of logits that the host gets.
    pub(super) told: Vec<u32>,
}

/// What is known of the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Partial results that there is room for.
    pub(super) partials_max: u32,
    /// Blocks that it computes at once.
    pub(super) blocks: usize,
}

/// Where an output comes from.
#[derive(Debug)]
pub(super) enum Choice {
    /// Nothing is chosen.
    None,
    /// The device chooses.
    OnDevice,
    /// The host does, by these logits of those that it is told.
    OnHost(usize),
}

/// What an output consists of.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) slot: Slot,
    pub(super) arrival: u64,
    pub(super) choice: Choice,
    /// Of the scores, that of the chosen token.
    pub(super) score: Option<usize>,
    /// Of the scores, those of the prompt's tokens.
    pub(super) prompt_scores: std::ops::Range<usize>,
    /// Of the logits that the host is told, those to be handed on.
    pub(super) logits: Option<usize>,
}

impl Work {
    /// Says what a batch is for the device. The table and the rows have taken in what it tells.
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
            self.add_items(shape, limits.partials_max, span);
        }
        // Those that take longest begin first.
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
        let Self { logits_of, draws, shapings, forbidden, seen, biases, scores, told, .. } = self;
        logits_of.clear();
        draws.clear();
        shapings.clear();
        forbidden.clear();
        seen.clear();
        biases.clear();
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

    /// Who looks at which keys.
    fn add_items(&mut self, shape: &Shape, partials_max: u32, span: &Span) {
        let (first, count) = (span.tokens.start as u32, span.tokens.len() as u32);
        let group = shape.group();
        let segments = span.end().div_ceil(SEGMENT);
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
                    keys_from: segment * SEGMENT,
                    keys_end: span.end().min((segment + 1) * SEGMENT),
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

    /// Where few tokens look at many keys, one block for each tile of tokens would leave most of the device idle: their
    /// segments are computed apart and joined, like those of decodes.
    fn split_many(&mut self, shape: &Shape, limits: Limits) {
        const UNITS: u32 = (ROWS / FEW_ROWS) as u32;
        if self.many.len() * shape.kv_heads > limits.blocks {
            return;
        }
        for item in std::mem::take(&mut self.many) {
            let count = item.keys_end.div_ceil(SEGMENT);
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
                keys_from: segment * SEGMENT,
                keys_end: item.keys_end.min((segment + 1) * SEGMENT),
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
        let nobody = || ModelError(format!("nobody has come to {:?}", span.slot));
        let row = rows[span.slot.0 as usize].as_mut().ok_or_else(nobody)?;
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
        let is_told = choice.mask.is_some() || row.choosing.logits;
        if is_told {
            self.told.push(last);
        }
        let told = self.told.len().wrapping_sub(1);
        if choice.mask.is_some() {
            expected.choice = Choice::OnHost(told);
            return Ok(expected);
        }
        expected.choice = Choice::OnDevice;
        expected.logits = row.choosing.logits.then_some(told);
        if row.choosing.logprobs.is_some() {
            expected.score = Some(self.scores.len());
            self.scores.push(Score { row: last, token: 0, output: output as u32, top });
        }
        let is_shaped = row.choosing.shaping != terrace_engine::Shaping::default();
        if is_shaped {
            let awaited = batch.awaited.iter().find(|it| it.token + 1 == span.tokens.end);
            let awaited = awaited.map(|it| it.output as u32);
            self.add_shaping(shape, last, row, choice.index, awaited)?;
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
        logits_row: u32,
        row: &Row,
        index: u32,
        awaited: Option<u32>,
    ) -> Result<(), ModelError> {
        let shaping = &row.choosing.shaping;
        let (first_forbidden, first_seen) = (self.forbidden.len() as u32, self.seen.len() as u32);
        let first_bias = self.biases.len() as u32;
        let is_known = |token: Token| (token as usize) < shape.vocabulary;
        if index < shaping.min_tokens {
            self.forbidden.extend(row.choosing.ends.iter().filter(|end| is_known(**end)));
        }
        let seen = row.times.iter().filter(|(token, _)| is_known(**token));
        self.seen.extend(seen.map(|(&token, &times)| Seen { token, times }));
        for &(token, bias) in shaping.bias.iter().filter(|(token, _)| is_known(*token)) {
            // Each is added by a thread of its own.
            let same = self.biases[first_bias as usize..].iter_mut().find(|it| it.token == token);
            match same {
                Some(same) => same.bias += bias,
                None => self.biases.push(Bias { token, bias }),
            }
        }
        let known = row.produced.len() as u32;
        let awaited = match (row.counts_tokens(), awaited) {
            (false, _) => NONE,
            (true, _) if known == index => NONE,
            // The step before has chosen it, and nobody has heard of that yet.
            (true, Some(output)) if known + 1 == index => output,
            (true, _) => {
                return Err(ModelError(format!(
                    "{known} of {index} tokens of an answer are known"
                )));
            }
        };
        self.shapings.push(plain::Shaping {
            row: logits_row,
            first_forbidden,
            forbidden: self.forbidden.len() as u32 - first_forbidden,
            first_seen,
            seen: self.seen.len() as u32 - first_seen,
            first_bias,
            biases: self.biases.len() as u32 - first_bias,
            awaited,
            repetition: shaping.repetition_penalty,
            frequency: shaping.frequency_penalty,
            presence: shaping.presence_penalty,
            unused: 0,
        });
        Ok(())
    }
}

/// What is wrong with a batch, if anything is.
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
