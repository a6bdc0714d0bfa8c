//! The conversion of a step's logits to its outputs.

use std::cell::RefCell;
use std::sync::Arc;

use rayon::prelude::*;
use terrace_scheduler::Token;

use super::grammar::Mask;
use super::logprobs::{Logprobs, Scorer};
use super::shaping::{Continuation, Seen};
use super::{Choosing, Sampler};
use crate::batch::{Arrival, Batch, Choice, Wanted};
use crate::model::ModelError;

/// The result of a span.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// The chosen token, if one was requested.
    pub chosen: Option<Chosen>,
    /// Log-probabilities of the prompt's tokens, if requested.
    pub scores: Vec<Logprobs>,
}

/// A token that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub token: Token,
    /// True if the answer can go on behind it.
    pub continuation: Continuation,
    /// Log-probability by the raw logits, if requested, before any change by sampling parameters.
    pub logprobs: Option<Box<Logprobs>>,
    /// Raw logits, if requested.
    pub logits: Option<Box<[f32]>>,
}

/// A sampler for the tokens of steps that uses all threads of the current pool and keeps the
/// sampling state of each row.
///
/// CPU models use it ([`Threaded`](crate::Threaded)); other models choose the same tokens.
#[derive(Debug)]
pub struct Chooser {
    rows: Vec<Option<Row>>,
    outputs: Vec<Output>,
    /// Index of the wanted output of the next logits row, and the number of its rows already taken.
    at: (usize, usize),
}

/// Sampling state of a sequence.
#[derive(Debug)]
struct Row {
    choosing: Arc<Choosing>,
    seen: Seen,
}

/// The use of one row of logits.
struct Use<'a> {
    output: usize,
    /// Token to score, and the number of likeliest alternatives to report.
    scored: Option<(Token, u32)>,
    choice: Option<(&'a Choice, &'a Row)>,
}

/// Buffers of each thread.
#[derive(Debug, Default)]
struct Scratch {
    sampler: Sampler,
    scorer: Scorer,
    shaped: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Below this number of logits, waking other threads takes longer than sampling.
const PARALLEL_MIN: usize = 1 << 15;

impl Chooser {
    /// Creates a sampler for the given number of page-table rows.
    #[must_use]
    pub fn new(rows: u32) -> Self {
        let rows = (0..rows).map(|_| None).collect();
        Self { rows, outputs: Vec::new(), at: (0, 0) }
    }

    /// Applies the departures and arrivals of a batch.
    pub fn tell(&mut self, batch: &Batch) {
        for slot in &batch.went {
            self.rows[slot.0 as usize] = None;
        }
        for Arrival { slot, choosing, produced, .. } in &batch.came {
            let seen = choosing.shaping.seen(&choosing.prompt, produced);
            self.rows[slot.0 as usize] = Some(Row { choosing: choosing.clone(), seen });
        }
    }

    /// Starts a step, whatever the result of the step before.
    ///
    /// # Panics
    /// Panics if a wanted row has no sequence, or tokens of its answer are missing.
    pub fn begin(&mut self, batch: &Batch) {
        self.outputs.clear();
        self.outputs.resize_with(batch.wanted.len(), Output::default);
        self.at = (0, 0);
        for Wanted { span, choice, .. } in &batch.wanted {
            let slot = batch.spans[*span].slot;
            let row = self.rows[slot.0 as usize].as_mut();
            let row = row.unwrap_or_else(|| panic!("no sequence is assigned to {slot:?}"));
            if let Some(choice) = choice {
                row.rewind(choice.index as usize);
            }
        }
    }

    /// Processes the next rows of logits of a step, of `vocabulary` values each.
    pub fn take(&mut self, batch: &Batch, vocabulary: usize, logits: &[f32]) {
        let Self { rows, outputs, at } = self;
        let rows: &[Option<Row>] = rows;
        let uses: Vec<Use<'_>> =
            logits.chunks_exact(vocabulary).map_while(|_| next_use(rows, batch, at)).collect();
        // Waits here so that pool threads do not block.
        let choices = uses.iter().filter_map(|of| of.choice);
        choices.filter_map(|(choice, _)| choice.mask.as_ref()).for_each(Mask::wait);
        let one = |(of, logits): (&Use<'_>, &[f32])| {
            SCRATCH.with_borrow_mut(|scratch| scratch.take(of, logits))
        };
        let taken: Vec<_> = match logits.len() {
            few if few < PARALLEL_MIN => {
                uses.iter().zip(logits.chunks_exact(vocabulary)).map(one).collect()
            }
            _ => uses.par_iter().zip(logits.par_chunks_exact(vocabulary)).map(one).collect(),
        };
        for (Use { output, .. }, (score, chosen)) in uses.iter().zip(taken) {
            let output = &mut outputs[*output];
            output.scores.extend(score);
            output.chosen = chosen.or(output.chosen.take());
        }
    }

    /// Returns the outputs of a step after all its logits were processed.
    ///
    /// # Errors
    /// Fails if logits are missing.
    pub fn end(&mut self, batch: &Batch) -> Result<Vec<Output>, ModelError> {
        if self.at != (batch.wanted.len(), 0) {
            let (done, all) = (self.at.0, batch.wanted.len());
            return Err(ModelError(format!("it has logits for {done} outputs instead of {all}")));
        }
        for (wanted, output) in batch.wanted.iter().zip(&self.outputs) {
            let slot = batch.spans[wanted.span].slot;
            if let (Some(row), Some(chosen)) = (&mut self.rows[slot.0 as usize], &output.chosen) {
                row.seen.push(&row.choosing.shaping, chosen.token);
            }
        }
        Ok(std::mem::take(&mut self.outputs))
    }
}

/// Returns the use of the next row of logits.
fn next_use<'a>(
    rows: &'a [Option<Row>],
    batch: &'a Batch,
    (output, taken): &mut (usize, usize),
) -> Option<Use<'a>> {
    let Wanted { span, choice, scored } = batch.wanted.get(*output)?;
    let span = &batch.spans[*span];
    let row = rows[span.slot.0 as usize].as_ref()?;
    let is_last = *taken + 1 == span.logits;
    let top = row.choosing.logprobs.unwrap_or(0);
    let next = Use {
        output: *output,
        scored: batch.scored[scored.clone()].get(*taken).map(|&token| (token, top)),
        choice: choice.as_ref().filter(|_| is_last).map(|choice| (choice, row)),
    };
    (*output, *taken) = if is_last { (*output + 1, 0) } else { (*output, *taken + 1) };
    Some(next)
}

impl Row {
    /// Discards all tokens chosen after the first `tokens`.
    fn rewind(&mut self, tokens: usize) {
        if self.choosing.shaping.counts_tokens() {
            let produced = self.seen.produced();
            assert!(tokens <= produced.len(), "{} of {tokens} tokens are known", produced.len());
            if tokens < produced.len() {
                self.seen = self.choosing.shaping.seen(&self.choosing.prompt, &produced[..tokens]);
            }
        }
    }
}

impl Scratch {
    fn take(&mut self, of: &Use<'_>, logits: &[f32]) -> (Option<Logprobs>, Option<Chosen>) {
        let score = of.scored.map(|(token, top)| self.scorer.score(logits, token, top));
        (score, of.choice.map(|(choice, row)| self.choose(choice, row, logits)))
    }

    fn choose(&mut self, choice: &Choice, row: &Row, logits: &[f32]) -> Chosen {
        let choosing = &*row.choosing;
        let (shaped, continuation) = if choosing.shapes() || choice.mask.is_some() {
            self.shaped.clear();
            self.shaped.extend_from_slice(logits);
            let continuation =
                choosing.shaping.apply(&row.seen, &choosing.ends, choice, &mut self.shaped);
            (&*self.shaped, continuation)
        } else {
            (logits, Continuation::Yes)
        };
        let token = self.sampler.choose(shaped, &choosing.sampling, choice.index);
        let logprobs = choosing.logprobs.map(|top| Box::new(self.scorer.score(logits, token, top)));
        Chosen { token, continuation, logprobs, logits: choosing.logits.then(|| logits.into()) }
    }
}

#[cfg(test)]
mod tests {
    use terrace_scheduler::Slot;

    use super::super::Sampling;
    use super::super::shaping::Shaping;
    use super::*;
    use crate::batch::Span;

    fn choosing() -> Choosing {
        Choosing {
            sampling: Sampling::GREEDY,
            shaping: Shaping::default(),
            ends: Arc::new([]),
            prompt: Vec::new(),
            logprobs: None,
            logits: false,
        }
    }

    fn arrival(slot: u32, choosing: Choosing, produced: &[Token]) -> Arrival {
        let produced = produced.to_vec();
        Arrival { produced, ..Arrival::new(Slot(slot), Arc::new(choosing)) }
    }

    /// Creates a step that chooses the `index`-th token of each row.
    fn batch(rows: u32, index: u32) -> Batch {
        let span = |slot| Span {
            slot: Slot(slot),
            start: 0,
            tokens: slot as usize..slot as usize + 1,
            logits: 1,
        };
        let wanted =
            |span| Wanted { span, choice: Some(Choice { index, mask: None }), scored: 0..0 };
        Batch {
            spans: (0..rows).map(span).collect(),
            tokens: vec![0; rows as usize],
            wanted: (0..rows as usize).map(wanted).collect(),
            ..Batch::default()
        }
    }

    fn step(chooser: &mut Chooser, batch: &Batch, logits: &[f32]) -> Vec<Output> {
        chooser.tell(batch);
        chooser.begin(batch);
        chooser.take(batch, logits.len() / batch.wanted.len(), logits);
        chooser.end(batch).unwrap()
    }

    fn tokens(outputs: &[Output]) -> Vec<Token> {
        outputs.iter().map(|output| output.chosen.as_ref().unwrap().token).collect()
    }

    #[test]
    fn parallel_sampling_equals_sequential() {
        const ROWS: u32 = 48;
        const VOCABULARY: usize = 2_000;
        let logit = |place: usize| (place.wrapping_mul(2_654_435_761) >> 7 & 1023) as f32 / 100.0;
        let logits: Vec<f32> = (0..ROWS as usize * VOCABULARY).map(logit).collect();
        let arrivals = || {
            (0..ROWS).map(|slot| {
                let (top_k, top_p) =
                    ([0, 40, 0, 5][slot as usize % 4], [1.0, 0.9][slot as usize % 2]);
                let sampling =
                    Sampling { temperature: 0.7, top_k, top_p, min_p: 0.0, seed: slot.into() };
                arrival(slot, Choosing { sampling, logprobs: Some(3), ..choosing() }, &[])
            })
        };
        assert!(logits.len() > PARALLEL_MIN && VOCABULARY < PARALLEL_MIN);
        let together = Batch { came: arrivals().collect(), ..batch(ROWS, 4) };
        let together = step(&mut Chooser::new(ROWS), &together, &logits);

        let mut chooser = Chooser::new(ROWS);
        let one_by_one = Batch { came: arrivals().collect(), ..batch(ROWS, 4) };
        chooser.tell(&one_by_one);
        chooser.begin(&one_by_one);
        logits.chunks(VOCABULARY).for_each(|row| chooser.take(&one_by_one, VOCABULARY, row));
        assert_eq!(together, chooser.end(&one_by_one).unwrap());
        let distinct: std::collections::BTreeSet<_> = tokens(&together).into_iter().collect();
        assert!(distinct.len() > 20, "{distinct:?}");
    }

    #[test]
    fn returns_logits_on_request() {
        let told = Choosing { logits: true, ..choosing() };
        let came = vec![arrival(0, told, &[]), arrival(1, choosing(), &[])];
        let batch = Batch { came, ..batch(2, 0) };
        let outputs = step(&mut Chooser::new(2), &batch, &[0.0, 1.0, 3.0, 2.0]);
        assert_eq!(tokens(&outputs), [1, 0]);
        let logits = outputs.iter().map(|output| output.chosen.as_ref().unwrap().logits.as_deref());
        assert_eq!(logits.collect::<Vec<_>>(), [Some(&[0.0, 1.0][..]), None]);
    }

    #[test]
    fn discards_tokens_of_a_failed_step() {
        let shaping = Shaping { frequency_penalty: 1.0, ..Shaping::default() };
        let came = vec![arrival(0, Choosing { shaping, ..choosing() }, &[2])];
        let mut chooser = Chooser::new(1);
        let logits = [1.5, 1.0, 1.9];
        let first = Batch { came, ..batch(1, 1) };
        assert_eq!(tokens(&step(&mut chooser, &first, &logits)), [0], "2 has come before");
        assert_eq!(tokens(&step(&mut chooser, &batch(1, 2), &logits)), [1]);
        assert_eq!(tokens(&step(&mut chooser, &batch(1, 3), &logits)), [2]);
        assert_eq!(
            tokens(&step(&mut chooser, &batch(1, 2), &logits)),
            [1],
            "as if for the first time"
        );
        // Logits of a step that fails before its end have no effect either.
        let failed = batch(1, 3);
        chooser.begin(&failed);
        chooser.take(&failed, 3, &logits);
        assert_eq!(tokens(&step(&mut chooser, &failed, &logits)), [2]);
    }

    #[test]
    fn rejects_a_step_without_all_logits() {
        let mut chooser = Chooser::new(2);
        let came = vec![arrival(0, choosing(), &[]), arrival(1, choosing(), &[])];
        let batch = Batch { came, ..batch(2, 0) };
        chooser.tell(&batch);
        chooser.begin(&batch);
        chooser.take(&batch, 2, &[0.0, 1.0]);
        assert!(chooser.end(&batch).is_err());
    }

    #[test]
    #[should_panic(expected = "no sequence is assigned")]
    fn panics_for_a_row_without_a_sequence() {
        let mut chooser = Chooser::new(1);
        let came = Batch { came: vec![arrival(0, choosing(), &[])], ..batch(1, 0) };
        step(&mut chooser, &came, &[0.0, 1.0]);
        step(&mut chooser, &Batch { went: vec![Slot(0)], ..batch(1, 1) }, &[0.0, 1.0]);
    }
}
