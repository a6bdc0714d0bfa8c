//! Changes to logits before sampling, and the table of counts for penalties.
//!
//! The table is in device memory, with an entry for each token of each row; only changes since the
//! step before are sent. It takes four bytes for each token of the vocabulary and each row, with or
//! without penalties; rows without penalties are neither read nor written. Lists are sent behind
//! the forward pass, in as many rounds as they need, so their length does not limit a step.
//!
//! Grammars use masks: one bit per token, about 16 KB for a vocabulary of 128k. A mask may depend
//! on a token of the step before. The launching thread waits for it after it has submitted the
//! forward pass, so only sampling is delayed.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::result;
use terrace_engine::{GrammarError, Mask, StepLimits};
use terrace_model::Shape;

use super::forward::{Forward, LOGITS_ROWS};
use super::header::{Header, Plan, Section};
use super::kernels::Parameters;
use super::plain::{self, Bias, Count, NONE, bytes_of};
use super::step::Work;
use crate::context::call;
use crate::driver::{DeviceAddress, Driver};
use crate::error::CudaError;
use crate::fence::EventPool;
use crate::memory::Allocation;

/// Returns the bytes of the table of counts.
pub(super) fn counts_bytes(shape: &Shape, limits: StepLimits) -> usize {
    limits.rows as usize * shape.vocabulary * 4
}

/// Capacity of a round. The lists of a single row always fit.
#[derive(Clone, Copy, Debug)]
struct RoundLimits {
    counts: usize,
    forbidden: usize,
    biases: usize,
}

impl RoundLimits {
    fn new(shape: &Shape) -> Self {
        const LEAST: usize = 1 << 16;
        let each = shape.vocabulary.max(LEAST);
        Self { counts: LEAST, forbidden: each, biases: each }
    }
}

/// The outputs whose lists are sent together.
#[derive(Clone, Debug, PartialEq)]
struct Round {
    counts: Range<usize>,
    shapings: Range<usize>,
}

/// Divides outputs into rounds. All counts are applied before the first logits are changed.
fn rounds(
    counts: Range<usize>,
    all: &[plain::Shaping],
    shapings: Range<usize>,
    limits: RoundLimits,
) -> Vec<Round> {
    let mut rounds = Vec::with_capacity(1);
    let mut counted = counts.start;
    while counts.end - counted > limits.counts {
        let end = counted + limits.counts;
        rounds.push(Round { counts: counted..end, shapings: 0..0 });
        counted = end;
    }
    let mut first = shapings.start;
    let (mut forbidden, mut biases) = (0, 0);
    for at in shapings.clone() {
        let (more_forbidden, more_biases) = (all[at].forbidden as usize, all[at].biases as usize);
        if forbidden + more_forbidden > limits.forbidden || biases + more_biases > limits.biases {
            rounds.push(Round { counts: counted..counts.end, shapings: first..at });
            (counted, first, forbidden, biases) = (counts.end, at, 0, 0);
        }
        (forbidden, biases) = (forbidden + more_forbidden, biases + more_biases);
    }
    rounds.push(Round { counts: counted..counts.end, shapings: first..shapings.end });
    rounds
}

/// Addresses of the rows of logits and of the tokens that the step before has chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowsOfLogits {
    pub(super) logits: u64,
    pub(super) shaped: u64,
    pub(super) chosen: DeviceAddress,
    /// By output: address of the flag that no token is left to choose.
    pub(super) is_complete: DeviceAddress,
}

/// Places of the lists of a round.
#[derive(Clone, Copy, Debug)]
struct Sections {
    counts: Section,
    shapings: Section,
    forbidden: Section,
    biases: Section,
    masks: Section,
}

/// Applies changes to logits.
#[derive(Debug)]
pub(super) struct Shaper {
    driver: Arc<dyn Driver>,
    header: Header,
    sections: Sections,
    limits: RoundLimits,
    events: EventPool,
    /// `[row][token]`: changed logits.
    shaped: Allocation,
    /// `[row][token]`: the table of counts.
    counts: Allocation,
}

impl Shaper {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        shape: &Shape,
        limits: StepLimits,
    ) -> Result<Self, CudaError> {
        let counts = Allocation::new(driver, counts_bytes(shape, limits))?;
        let limits = RoundLimits::new(shape);
        let mut plan = Plan::default();
        let sections = Sections {
            counts: plan.add::<Count>(limits.counts),
            shapings: plan.add::<plain::Shaping>(LOGITS_ROWS),
            forbidden: plan.add::<u32>(limits.forbidden),
            biases: plan.add::<Bias>(limits.biases),
            masks: plan.add::<u32>(LOGITS_ROWS * mask_words(shape.vocabulary)),
        };
        Ok(Self {
            driver: driver.clone(),
            header: Header::new(driver, &plan)?,
            sections,
            limits,
            events: EventPool::new(driver),
            shaped: Allocation::new(driver, LOGITS_ROWS * shape.vocabulary * 4)?,
            counts,
        })
    }

    /// Returns the changed logits.
    pub(super) fn shaped(&self) -> &Allocation {
        &self.shaped
    }

    /// Submits the changes of some outputs' logits. The first call of a step also updates the table
    /// of counts.
    pub(super) fn shape(
        &mut self,
        forward: &Forward,
        work: &Work,
        shapings: Range<usize>,
        rows: RowsOfLogits,
        failed: &mut Vec<(usize, GrammarError)>,
    ) -> Result<(), CudaError> {
        let all = &work.counting.counts;
        let counts = if shapings.start == 0 { 0..all.len() } else { all.len()..all.len() };
        if shapings.start == 0 {
            self.clear(forward, &work.counting.cleared)?;
        }
        for round in rounds(counts, &work.shapings, shapings, self.limits) {
            self.send(forward, work, &round, failed)?;
            self.hand_over(forward, work, &round, rows)?;
        }
        Ok(())
    }

    /// Submits the clearing of rows of the table.
    fn clear(&self, forward: &Forward, cleared: &[u32]) -> Result<(), CudaError> {
        let row_bytes = forward.shape.vocabulary * 4;
        for &row in cleared {
            let at = self.counts.at().offset(row as usize * row_bytes);
            // SAFETY: the table has a row for each row of the page table.
            let cleared =
                unsafe { result::memset_d8_async(at.0, 0, row_bytes, forward.stream.raw()) };
            call("cuMemsetD8Async", cleared)?;
        }
        Ok(())
    }

    fn send(
        &mut self,
        forward: &Forward,
        work: &Work,
        round: &Round,
        failed: &mut Vec<(usize, GrammarError)>,
    ) -> Result<(), CudaError> {
        let Self { driver, header, sections, events, .. } = self;
        let shapings = &work.shapings[round.shapings.clone()];
        let (forbidden, biases) = lists_of(shapings);
        header.begin(&**driver, forward.stream)?;
        header.write(sections.counts, &work.counting.counts[round.counts.clone()])?;
        header.write(sections.shapings, shapings)?;
        header.write(sections.forbidden, &work.forbidden[forbidden])?;
        header.write(sections.biases, &work.biases[biases])?;
        let masks = &work.masks[masks_of(shapings)];
        let bytes = mask_words(forward.shape.vocabulary) * 4;
        let places = header.place(sections.masks, masks.len() * bytes)?.chunks_exact_mut(bytes);
        // In reverse, because another thread computes them from the first on.
        for ((mask, output), to) in masks.iter().zip(places).rev() {
            failed.extend(write_mask(mask, to).err().map(|error| (*output, error)));
        }
        let taken_in = events.fence()?;
        header.send(&**driver, forward.stream, &taken_in)?;
        taken_in.record(forward.stream)
    }

    fn hand_over(
        &self,
        forward: &Forward,
        work: &Work,
        round: &Round,
        rows: RowsOfLogits,
    ) -> Result<(), CudaError> {
        let (stream, kernels, sections) = (forward.stream, &forward.kernels, &self.sections);
        let vocabulary = forward.shape.vocabulary as u32;
        // SAFETY, here and below: the lists were sent, they name rows and tokens that there are, and all memory lives as
        // long as `self`, which is kept until the stream has ended.
        if !round.counts.is_empty() {
            let parameters = Parameters::default()
                .wide(self.counts.at().0)
                .narrow(vocabulary)
                .wide(self.header.at(sections.counts).0)
                .narrow(round.counts.len() as u32);
            unsafe { kernels.count.launch(stream, round.counts.len().div_ceil(256), parameters) }?;
        }
        if !round.shapings.is_empty() {
            let shapings = &work.shapings[round.shapings.clone()];
            let (forbidden, biases) = lists_of(shapings);
            let mask_bytes = mask_words(forward.shape.vocabulary) * 4;
            // Lists cover all rounds, but only this round is in memory: the base address is moved
            // back accordingly.
            let from = |section, first: usize, each: usize| {
                self.header.at(section).0.wrapping_sub((first * each) as u64)
            };
            let parameters = Parameters::default()
                .wide(rows.logits)
                .wide(rows.shaped)
                .narrow(vocabulary)
                .wide(self.header.at(sections.shapings).0)
                .wide(from(sections.forbidden, forbidden.start, size_of::<u32>()))
                .wide(from(sections.biases, biases.start, size_of::<Bias>()))
                .wide(self.counts.at().0)
                .wide(from(sections.masks, masks_of(shapings).start, mask_bytes))
                .wide(rows.chosen.0)
                .wide(rows.is_complete.0);
            unsafe { kernels.shape.launch(stream, round.shapings.len(), parameters) }?;
        }
        Ok(())
    }
}

/// Returns the number of words of a mask.
fn mask_words(vocabulary: usize) -> usize {
    vocabulary.div_ceil(32)
}

/// Writes a mask once it is known. If it allows no token, all are set: the token chosen then is not
/// part of the answer.
fn write_mask(mask: &Mask, to: &mut [u8]) -> Result<(), GrammarError> {
    let written = mask.read(|allowed| {
        let bytes = bytes_of(allowed);
        let (some, rest) = to.split_at_mut(bytes.len().min(to.len()));
        some.copy_from_slice(&bytes[..some.len()]);
        rest.fill(0);
    });
    written.inspect_err(|_| to.fill(0xff))
}

/// Returns the masks of consecutive outputs.
fn masks_of(shapings: &[plain::Shaping]) -> Range<usize> {
    let masks = || shapings.iter().map(|it| it.mask).filter(|mask| *mask != NONE);
    let first = masks().next().map_or(0, |first| first as usize);
    first..first + masks().count()
}

/// Returns the forbidden tokens and biases of consecutive outputs.
fn lists_of(shapings: &[plain::Shaping]) -> (Range<usize>, Range<usize>) {
    let (Some(first), Some(last)) = (shapings.first(), shapings.last()) else {
        return (0..0, 0..0);
    };
    let forbidden = first.first_forbidden..last.first_forbidden + last.forbidden;
    let biases = first.first_bias..last.first_bias + last.biases;
    let range = |range: Range<u32>| range.start as usize..range.end as usize;
    (range(forbidden), range(biases))
}

#[cfg(test)]
mod tests {
    use super::*;

    use terrace_engine::{Constraint, Grammar};

    const LIMITS: RoundLimits = RoundLimits { counts: 10, forbidden: 6, biases: 8 };

    /// Creates outputs with the given numbers of forbidden tokens and biases.
    fn shapings(lists: &[(u32, u32)]) -> Vec<plain::Shaping> {
        let (mut first_forbidden, mut first_bias, mut masks) = (0, 0, 0..);
        let each = |&(forbidden, biases): &(u32, u32)| {
            let mask = if biases == 0 { masks.next().unwrap() } else { NONE };
            let shaping = plain::Shaping {
                mask,
                first_forbidden,
                forbidden,
                first_bias,
                biases,
                ..plain::Shaping::default()
            };
            (first_forbidden, first_bias) = (first_forbidden + forbidden, first_bias + biases);
            shaping
        };
        lists.iter().map(each).collect()
    }

    #[test]
    fn rounds_fit_lists_of_any_length() {
        let all = shapings(&[(0, 0), (6, 8), (0, 0), (1, 0), (3, 3), (3, 0), (0, 5), (0, 1)]);
        for counts in [0, 1, 10, 11, 30, 31] {
            let rounds = rounds(0..counts, &all, 0..all.len(), LIMITS);
            let (mut counted, mut shaped, mut masked) = (0, 0, 0);
            for Round { counts: some, shapings } in rounds {
                assert_eq!(some.start, counted, "in their order");
                assert!(some.len() <= LIMITS.counts);
                counted = some.end;
                let (forbidden, biases) = lists_of(&all[shapings.clone()]);
                assert!(forbidden.len() <= LIMITS.forbidden && biases.len() <= LIMITS.biases);
                let masks = masks_of(&all[shapings.clone()]);
                assert!(masks.is_empty() || masks.start == masked, "in their order");
                masked += masks.len();
                if !shapings.is_empty() {
                    assert_eq!((shapings.start, counted), (shaped, counts), "counted before");
                    shaped = shapings.end;
                }
            }
            assert_eq!((counted, shaped, masked), (counts, all.len(), 4));
        }
    }

    #[test]
    fn small_lists_take_one_round() {
        let all = shapings(&[(1, 2), (5, 6)]);
        assert_eq!(rounds(3..12, &all, 0..2, LIMITS), [Round { counts: 3..12, shapings: 0..2 }]);
    }

    #[test]
    fn mask_has_a_bit_per_token_and_all_bits_if_empty() {
        #[derive(Debug)]
        struct Words(Result<Vec<u32>, GrammarError>);

        impl Grammar for Words {
            fn advance(&mut self, _token: u32) -> Result<(), GrammarError> {
                Ok(())
            }

            fn allowed(&mut self) -> Result<Vec<u32>, GrammarError> {
                self.0.clone()
            }
        }

        let written = |words| {
            let constraint = Constraint::new(Box::new(Words(words)));
            let mut to = [0x77; 8];
            let written = write_mask(&constraint.mask(0), &mut to);
            (u64::from_le_bytes(to), written)
        };
        assert_eq!(written(Ok(vec![1, 2])), (2 << 32 | 1, Ok(())));
        assert_eq!(written(Ok(vec![5])), (5, Ok(())), "what has no bit is not allowed");
        assert_eq!(written(Ok(vec![1, 2, 3])), (2 << 32 | 1, Ok(())), "more than there are");
        let error = GrammarError("it is too large".to_owned());
        assert_eq!(written(Err(error.clone())), (u64::MAX, Err(error)));
    }
}
