//! Sampling kernels, compared with the engine's sampler on the CPU.

use std::sync::Arc;

use terrace_engine::{
    Arrival, Batch, Choice, Chooser, Choosing, Constraint, Continuation, Grammar, GrammarError,
    Sampler, Sampling, Scorer, Shaping, Span, Wanted,
};
use terrace_scheduler::Slot;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::library::{Arguments, Block, Kernels, powers_taken};
use crate::numbers::Noise;
use crate::with_some_sizes;

/// Sampling parameters of an output, as kernels read them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Draw {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    top_k: u32,
    drawn: u64,
    row: u32,
    is_shaped: u32,
    output: u32,
    unused: u32,
}

impl Draw {
    /// Creates parameters with the draw `drawn`, from 0 to 2^53.
    fn new(row: usize, sampling: Sampling, drawn: u64) -> Self {
        let Sampling { temperature, top_k, top_p, min_p, .. } = sampling;
        let row = row as u32;
        Self { temperature, top_p, min_p, top_k, drawn, row, is_shaped: 0, output: 0, unused: 0 }
    }
}

/// Changes to the logits of an output, as kernels read them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PlainShaping {
    row: u32,
    first_forbidden: u32,
    forbidden: u32,
    first_bias: u32,
    biases: u32,
    awaited: u32,
    counts: u32,
    mask: u32,
    output: u32,
    repetition: f32,
    frequency: f32,
    presence: f32,
}

/// An addition to a logit, as kernels read it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Bias {
    token: u32,
    bias: f32,
}

/// A log-probability, as kernels write it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
struct Likelihood {
    token: u32,
    logprob: f32,
}

const NONE: u32 = u32::MAX;
/// Flag in the table of counts: the prompt contains the token.
const OF_PROMPT: u32 = 1 << 31;
/// Shared memory for bins, a list of keys, a list of measures, and a few scalars.
const SELECTION_BYTES: usize = 2048 * 8 * 3 + 34 * 8 + 16;
const SAMPLING: Block = Block::new(1024, SELECTION_BYTES);

/// Rows of logits.
struct Rows {
    vocabulary: usize,
    logits: Vec<f32>,
}

impl Rows {
    fn new(rows: &[Vec<f32>]) -> Self {
        Self { vocabulary: rows[0].len(), logits: rows.concat() }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.logits[row * self.vocabulary..][..self.vocabulary]
    }

    /// Samples tokens from rows, one output after the other.
    fn sample(
        &self,
        kernels: &Kernels<'_>,
        shaped: &[f32],
        draws: &[(usize, Sampling, u32)],
    ) -> Vec<u32> {
        let draw = |&(row, sampling, index): &(usize, Sampling, u32)| {
            Draw::new(row, sampling, xxh3_64_with_seed(&index.to_le_bytes(), sampling.seed) >> 11)
        };
        self.sample_by(kernels, shaped, draws.iter().map(draw).collect())
    }

    fn sample_by(&self, kernels: &Kernels<'_>, shaped: &[f32], mut draws: Vec<Draw>) -> Vec<u32> {
        for (draw, output) in draws.iter_mut().zip(0..) {
            (draw.is_shaped, draw.output) = (u32::from(!shaped.is_empty()), output);
        }
        let mut chosen = vec![NONE; draws.len()];
        let arguments = Arguments::default().list(&self.logits).list(shaped);
        let arguments = arguments.number(self.vocabulary).list(&draws).out(&mut chosen);
        kernels.launch("sample", draws.len(), SAMPLING, arguments);
        chosen
    }

    /// Checks that the kernel samples the same tokens as the engine.
    fn check(&self, kernels: &Kernels<'_>, draws: &[(usize, Sampling, u32)]) -> Vec<u32> {
        let mut sampler = Sampler::default();
        let chosen = self.sample(kernels, &[], draws);
        for (&(row, sampling, index), &found) in draws.iter().zip(&chosen) {
            let expected = sampler.choose(self.row(row), &sampling, index);
            assert_eq!(found, expected, "token {index} of row {row} by {sampling:?}");
        }
        chosen
    }
}

fn sampling(temperature: f32, top_k: u32, top_p: f32, min_p: f32) -> Sampling {
    Sampling { temperature, top_k, top_p, min_p, seed: 11 }
}

/// Returns logits of several kinds: far apart, all equal, with many equals, and with infinities or
/// NaN.
fn kinds(vocabulary: usize) -> Vec<Vec<f32>> {
    let mut noise = Noise::new(vocabulary as u64);
    let wide = noise.numbers(vocabulary, 20.0);
    let narrow = noise.numbers(vocabulary, 0.5);
    let stepped: Vec<f32> = wide.iter().map(|logit| (logit / 4.0).round() + 0.5).collect();
    let some = |unlike: f32| -> Vec<f32> {
        let pick = |(at, &logit): (usize, &f32)| if at % 3 == 0 { unlike } else { logit };
        narrow.iter().enumerate().map(pick).collect()
    };
    let (impossible, no_numbers) = (some(f32::NEG_INFINITY), some(f32::NAN));
    let mut one = vec![f32::NEG_INFINITY; vocabulary];
    one[vocabulary / 2] = -7.0;
    vec![wide, narrow, stepped, impossible, no_numbers, one, vec![0.25; vocabulary]]
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn samples_the_same_tokens_as_the_engine() {
    with_some_sizes(|kernels| {
        for vocabulary in [3, 33, 1_000, 1_500] {
            let (rows, all) = (kinds(vocabulary), vocabulary as u32);
            let kinds = rows.len();
            let rows = Rows::new(&rows);
            let mut draws = Vec::new();
            let ways = [
                sampling(0.0, 0, 1.0, 0.0),
                sampling(0.7, 0, 1.0, 0.0),
                sampling(3.0, 0, 1.0, 0.3),
                sampling(1.0, 1, 1.0, 0.0),
                sampling(1.0, 2, 0.95, 0.0),
                sampling(0.5, 40, 1.0, 0.0),
                // More tokens than min_p leaves.
                sampling(1.0, all - 1, 1.0, 0.9),
                sampling(1.0, all, 1.0, 0.0),
                sampling(2.0, all + 5, 0.6, 0.1),
                sampling(1.5, 0, 0.35, 0.0),
                sampling(1.0, 0, 0.0, 0.0),
                sampling(1.0, 20, 0.8, 1.0),
            ];
            for (at, way) in ways.into_iter().enumerate() {
                for row in 0..kinds {
                    draws.extend((0..3).map(|index| (row, way, index + at as u32)));
                }
            }
            rows.check(kernels, &draws);
        }
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn draws_of_one_row_vary() {
    with_some_sizes(|kernels| {
        let rows = Rows::new(&[Noise::new(5).numbers(400, 2.0)]);
        for way in [sampling(1.0, 0, 1.0, 0.0), sampling(1.0, 0, 0.9, 0.0)] {
            let draws: Vec<_> = (0..200).map(|index| (0, way, index)).collect();
            let mut chosen = rows.check(kernels, &draws);
            chosen.sort_unstable();
            chosen.dedup();
            assert!(chosen.len() > 80, "{} tokens by {way:?}", chosen.len());
        }
    });
}

/// A token is drawn when the running sum exceeds the draw: the first token by 0, the last by the
/// largest draw.
#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn draw_at_a_boundary_selects_the_second_token() {
    with_some_sizes(|kernels| {
        let rows = Rows::new(&[vec![2.0; 4]]);
        const QUARTER: u64 = 1 << 51;
        let drawn = [0, QUARTER - 1, QUARTER, 2 * QUARTER, 3 * QUARTER - 1, 4 * QUARTER - 1];
        for way in [sampling(1.0, 0, 1.0, 0.0), sampling(1.0, 4, 1.0, 0.0)] {
            let draws = drawn.map(|drawn| Draw::new(0, way, drawn)).to_vec();
            assert_eq!(rows.sample_by(kernels, &[], draws), [0, 0, 1, 2, 2, 3], "{way:?}");
        }
    });
}

/// More equals than can be sorted are divided by their keys until few are left.
#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn many_equals_take_few_passes() {
    with_some_sizes(|kernels| {
        const VOCABULARY: usize = 12_000;
        const PASSES_MAX: u64 = 40;
        // All equal, and two kinds that differ in the last bit.
        let nearly = |at: usize| if at.is_multiple_of(3) { 1.0 } else { 1.0 + f32::EPSILON };
        let kinds = [vec![1.0; VOCABULARY], (0..VOCABULARY).map(nearly).collect()];
        for row in kinds {
            let rows = Rows::new(&[row]);
            for way in [sampling(1.0, 11_000, 1.0, 0.0), sampling(1.0, 5_000, 0.7, 0.0)] {
                rows.check(kernels, &[(0, way, 1)]);
                let powers = powers_taken();
                assert!(powers <= PASSES_MAX * VOCABULARY as u64, "{powers} powers by {way:?}");
            }
        }
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn equals_are_ordered_by_id() {
    with_some_sizes(|kernels| {
        let rows = Rows::new(&[vec![1.0; 2_100]]);
        let first = rows.check(kernels, &[(0, sampling(1.0, 1, 1.0, 0.0), 0)]);
        assert_eq!(first, [0]);
        rows.check(kernels, &[(0, sampling(1.0, 2_080, 0.5, 0.0), 3)]);
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn handles_all_masked_and_infinite_logits() {
    with_some_sizes(|kernels| {
        let mut infinite = vec![3.0; 50];
        infinite[40] = f32::INFINITY;
        let rows = Rows::new(&[vec![f32::NEG_INFINITY; 50], infinite]);
        let way = sampling(1.0, 0, 1.0, 0.0);
        assert_eq!(rows.check(kernels, &[(0, way, 0), (1, way, 0)]), [0, 40]);
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn logprobs_equal_those_of_the_engine() {
    with_some_sizes(|kernels| {
        const STRIDE: usize = 1 + 20;
        let rows = kinds(1_200);
        let (mut scorer, mut expected, mut scores) = (Scorer::default(), Vec::new(), Vec::new());
        let chosen = [1_199, 5];
        for (row, logits) in rows.iter().enumerate() {
            for (token, output, top) in [(7, NONE, 0), (600, NONE, 1), (NONE, 1, 20)] {
                scores.push([row as u32, token, output, top]);
                let token = if output == NONE { token } else { chosen[output as usize] };
                expected.push(scorer.score(logits, token, top));
            }
        }
        let untouched = Likelihood { token: 77, logprob: 1.0 };
        let mut found = vec![untouched; scores.len() * STRIDE];
        let rows = Rows::new(&rows);
        let arguments = Arguments::default().list(&rows.logits).number(rows.vocabulary);
        let arguments = arguments.list(&scores).list(&chosen).out(&mut found).number(STRIDE);
        kernels.launch("score", scores.len(), Block::of(1024), arguments);
        let is_same = |found: &Likelihood, (token, logprob): (u32, f32)| {
            let is_near = found.logprob == logprob || (found.logprob - logprob).abs() < 1e-6;
            found.token == token && (is_near || found.logprob.is_nan() && logprob.is_nan())
        };
        for (found, expected) in found.chunks(STRIDE).zip(&expected) {
            let all = [(expected.token, expected.logprob)].into_iter().chain(expected.top.clone());
            for (found, expected) in found.iter().zip(all) {
                assert!(is_same(found, expected), "{found:?}, not {expected:?}");
            }
            assert!(found[1 + expected.top.len()..].iter().all(|it| *it == untouched));
        }
    });
}

/// An answer whose logits are changed before its next token is chosen.
struct Answer {
    choosing: Choosing,
    produced: Vec<u32>,
    /// True if the step before has chosen the last token and its result has not been reported yet.
    is_awaited: bool,
    /// Tokens that the grammar allows, if there is one.
    allowed: Option<Vec<u32>>,
}

/// A grammar with a constant set of allowed tokens.
#[derive(Debug)]
struct Same(Vec<u32>);

impl Grammar for Same {
    fn advance(&mut self, _token: u32) -> Result<(), GrammarError> {
        Ok(())
    }

    fn allowed(&mut self) -> Result<Vec<u32>, GrammarError> {
        Ok(self.0.clone())
    }
}

impl Answer {
    fn random(noise: &mut Noise, vocabulary: usize, seed: u64) -> Self {
        let mut tokens = |count: usize| -> Vec<u32> {
            (0..count).map(|_| noise.below(vocabulary) as u32).collect()
        };
        let (prompt, produced) = (tokens(30), tokens(1 + seed as usize % 40));
        let (ends, bias) = (tokens(3), tokens(10));
        // Penalties one by one, and together.
        let on = |bit: u64, value: f32, off: f32| if seed >> bit & 1 == 1 { value } else { off };
        let shaping = Shaping {
            presence_penalty: on(0, 0.75, 0.0),
            frequency_penalty: on(1, 0.3, 0.0),
            repetition_penalty: on(2, 1.3, 1.0),
            bias: bias.into_iter().zip([3.0, -50.0].into_iter().cycle()).collect(),
            min_tokens: 20,
        };
        let choosing = Choosing {
            sampling: Sampling { seed, ..sampling(0.8, 0, 1.0, 0.0) },
            shaping,
            ends: ends.into(),
            prompt,
            logprobs: None,
            logits: false,
        };
        // Some tokens, few tokens, only stop tokens, and none of the last tokens.
        let mut words = |rare: usize, words: usize| -> Vec<u32> {
            let mut half = || noise.below(1 << 16) as u32;
            let mut word = || (0..rare).fold(u32::MAX, |all, _| all & (half() << 16 | half()));
            (0..words).map(|_| word()).collect()
        };
        let mut only_ends = vec![0_u32; vocabulary.div_ceil(32)];
        for end in choosing.ends.iter() {
            only_ends[*end as usize / 32] |= 1 << (end % 32);
        }
        let allowed = match seed / 2 % 6 {
            0 => Some(words(1, vocabulary.div_ceil(32))),
            1 => Some(words(5, vocabulary.div_ceil(32))),
            2 => Some(words(1, vocabulary / 32 - 2)),
            3 => Some(only_ends),
            _ => None,
        };
        Self { choosing, produced, is_awaited: seed.is_multiple_of(3), allowed }
    }

    fn index(&self) -> u32 {
        self.produced.len() as u32
    }

    /// Returns the token that the engine chooses, and whether its grammar is complete.
    fn expected(&self, logits: &[f32]) -> (u32, bool) {
        let slot = Slot(0);
        let arrival = Arrival::new(slot, Arc::new(self.choosing.clone()));
        let constraint = self.allowed.clone().map(|it| Constraint::new(Box::new(Same(it))));
        if let Some(constraint) = &constraint {
            self.produced.iter().for_each(|&token| constraint.push(token));
        }
        let mask = constraint.as_ref().map(|constraint| constraint.mask(self.index()));
        let choice = Choice { index: self.index(), mask };
        let batch = Batch {
            came: vec![Arrival { produced: self.produced.clone(), ..arrival }],
            spans: vec![Span { slot, start: 0, tokens: 0..1, logits: 1 }],
            tokens: vec![0],
            wanted: vec![Wanted { span: 0, choice: Some(choice), scored: 0..0 }],
            ..Batch::default()
        };
        let mut chooser = Chooser::new(1);
        chooser.tell(&batch);
        chooser.begin(&batch);
        chooser.take(&batch, logits.len(), logits);
        let chosen = chooser.end(&batch).unwrap().remove(0).chosen.unwrap();
        (chosen.token, chosen.continuation == Continuation::Complete)
    }

    /// Computes the changed logits by the definition.
    fn shaped(&self, logits: &[f32]) -> Vec<f32> {
        let Choosing { shaping, ends, prompt, .. } = &self.choosing;
        let mut shaped = logits.to_vec();
        for (token, logit) in (0_u32..).zip(&mut shaped) {
            let word = |allowed: &Vec<u32>| allowed.get(token as usize / 32).copied().unwrap_or(0);
            if self.allowed.as_ref().is_some_and(|it| word(it) >> (token % 32) & 1 == 0) {
                *logit = f32::NEG_INFINITY;
            }
            if self.index() < shaping.min_tokens && ends.contains(&token) {
                *logit = f32::NEG_INFINITY;
            }
            let times = self.produced.iter().filter(|it| **it == token).count();
            if times > 0 || prompt.contains(&token) {
                let penalty = shaping.repetition_penalty;
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
            if times > 0 {
                *logit -= shaping.frequency_penalty * times as f32 + shaping.presence_penalty;
            }
            for (_, bias) in shaping.bias.iter().filter(|(biased, _)| *biased == token) {
                *logit += bias;
            }
        }
        shaped
    }
}

/// The lists of all changes of a step.
#[derive(Default)]
struct Lists {
    shapings: Vec<PlainShaping>,
    forbidden: Vec<u32>,
    /// Row, token, and increment.
    counts: Vec<[u32; 3]>,
    biases: Vec<Bias>,
    /// Masks, concatenated.
    masks: Vec<u32>,
    /// Tokens chosen by the step before, by output.
    chosen_before: Vec<u32>,
}

impl Lists {
    fn add(&mut self, row: usize, answer: &Answer, vocabulary: usize) {
        let Choosing { shaping, ends, prompt, .. } = &answer.choosing;
        let known = answer.produced.len() - usize::from(answer.is_awaited);
        let (first_forbidden, first_bias) = (self.forbidden.len(), self.biases.len());
        if answer.index() < shaping.min_tokens {
            self.forbidden.extend(ends.iter());
        }
        let counts_tokens = shaping.presence_penalty != 0.0
            || shaping.frequency_penalty != 0.0
            || shaping.repetition_penalty != 1.0;
        if counts_tokens {
            let counts = answer.produced[..known].iter().map(|&token| [row as u32, token, 1]);
            self.counts.extend(counts);
        }
        if shaping.repetition_penalty != 1.0 {
            let mut tokens = prompt.clone();
            tokens.sort_unstable();
            tokens.dedup();
            self.counts.extend(tokens.into_iter().map(|token| [row as u32, token, OF_PROMPT]));
        }
        self.biases.extend(shaping.bias.iter().map(|&(token, bias)| Bias { token, bias }));
        let awaited = match answer.is_awaited {
            true => self.chosen_before.len() as u32,
            false => NONE,
        };
        if answer.is_awaited {
            self.chosen_before.push(answer.produced[known]);
        }
        let words = vocabulary.div_ceil(32);
        let mask = match &answer.allowed {
            Some(allowed) => {
                self.masks.extend(allowed);
                self.masks.resize(self.masks.len().next_multiple_of(words), 0);
                (self.masks.len() / words - 1) as u32
            }
            None => NONE,
        };
        self.shapings.push(PlainShaping {
            row: row as u32,
            first_forbidden: first_forbidden as u32,
            forbidden: (self.forbidden.len() - first_forbidden) as u32,
            first_bias: first_bias as u32,
            biases: (self.biases.len() - first_bias) as u32,
            awaited,
            counts: if counts_tokens { row as u32 } else { NONE },
            repetition: shaping.repetition_penalty,
            frequency: shaping.frequency_penalty,
            presence: shaping.presence_penalty,
            mask,
            output: row as u32,
        });
    }
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn samples_by_shaped_logits() {
    with_some_sizes(|kernels| {
        const VOCABULARY: usize = 300;
        let mut noise = Noise::new(9);
        let mut answers: Vec<Answer> =
            (0..48).map(|seed| Answer::random(&mut noise, VOCABULARY, seed)).collect();
        for answer in &mut answers {
            // Each token has at most one bias, because separate threads apply them.
            let bias = &mut answer.choosing.shaping.bias;
            bias.sort_unstable_by_key(|(token, _)| *token);
            bias.dedup_by_key(|(token, _)| *token);
            // Some awaited tokens occur earlier in the answer.
            if answer.is_awaited && answer.index().is_multiple_of(2) {
                let first = answer.produced[0];
                *answer.produced.last_mut().unwrap() = first;
            }
        }
        let logits: Vec<_> = answers.iter().map(|_| noise.numbers(VOCABULARY, 3.0)).collect();
        let rows = Rows::new(&logits);
        let mut lists = Lists::default();
        // Lists need not be in row order.
        for (row, answer) in answers.iter().enumerate().rev() {
            lists.add(row, answer, VOCABULARY);
        }
        // Counts arrive in two steps, and some rows of the table have no request.
        let mut counts = vec![0_u32; (answers.len() + 1) * VOCABULARY];
        let (first, second) = lists.counts.split_at(lists.counts.len() / 3);
        for (some, blocks) in [(first, 2), (second, 5)] {
            let arguments = Arguments::default().out(&mut counts).number(VOCABULARY);
            let arguments = arguments.list(some).number(some.len());
            kernels.launch("count", blocks, Block::of(256), arguments);
        }
        assert!(counts[answers.len() * VOCABULARY..].iter().all(|count| *count == 0));
        let mut shaped = vec![f32::NAN; rows.logits.len()];
        let mut is_complete = vec![NONE; answers.len()];
        let arguments = Arguments::default()
            .list(&rows.logits)
            .out(&mut shaped)
            .number(VOCABULARY)
            .list(&lists.shapings)
            .list(&lists.forbidden)
            .list(&lists.biases)
            .list(&counts)
            .list(&lists.masks)
            .list(&lists.chosen_before)
            .out(&mut is_complete);
        kernels.launch("shape", lists.shapings.len(), Block::of(1024), arguments);
        for (row, answer) in answers.iter().enumerate() {
            let (found, expected) =
                (&shaped[row * VOCABULARY..][..VOCABULARY], answer.shaped(&logits[row]));
            assert!(found == expected, "row {row}, {:?}", answer.choosing.shaping);
        }
        let draw =
            |(row, answer): (usize, &Answer)| (row, answer.choosing.sampling, answer.index());
        let draws: Vec<_> = answers.iter().enumerate().map(draw).collect();
        let chosen = rows.sample(kernels, &shaped, &draws);
        let mut complete = 0;
        for (row, answer) in answers.iter().enumerate() {
            let (token, expected) = answer.expected(&logits[row]);
            let found = if answer.allowed.is_some() { u32::from(expected) } else { NONE };
            assert_eq!((chosen[row], is_complete[row]), (token, found), "row {row}");
            complete += usize::from(expected);
        }
        assert!(complete > 2, "{complete} grammars are complete");
    });
}
