//! Sampling on the GPU: the inputs of a step's outputs, and the results.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::result;
use parking_lot::Mutex;
use smallvec::SmallVec;
use terrace_engine::{Continuation, GrammarError, Logprobs, StepLimits};
use terrace_model::Shape;

use super::forward::Forward;
use super::header::{Header, Plan, Section};
use super::kernels::Parameters;
use super::plain::{self, Draw, Likelihood, Score};
use super::shaping::{RowsOfLogits, Shaper};
use super::step::Work;
use crate::context::call;
use crate::driver::{DeviceAddress, Driver, Piece};
use crate::error::CudaError;
use crate::memory::Allocation;
use crate::pinned::PinnedBytes;

/// Largest number of likeliest tokens that can be requested with each token.
const TOP_MAX: u32 = 64;

/// Places of the lists of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sections {
    draws: Section,
    scores: Section,
}

impl Sections {
    pub(super) fn new(plan: &mut Plan, rows: usize, tokens: usize) -> Self {
        Self { draws: plan.add::<Draw>(rows), scores: plan.add::<Score>(tokens + rows) }
    }
}

/// The sampler of a model.
#[derive(Debug)]
pub(super) struct Choosing {
    driver: Arc<dyn Driver>,
    sections: Sections,
    /// Chosen tokens by output: those of the step before, until this step samples.
    chosen: Allocation,
    /// By output with a mask: whether no token is left to choose.
    is_complete: Allocation,
    rows: usize,
    shaper: Shaper,
    likelihoods: Allocation,
    likelihoods_bytes: usize,
    spare: Arc<Mutex<Spare>>,
}

/// Pinned memory for results, reused: pinning takes longer than a step.
#[derive(Debug, Default)]
struct Spare {
    memory: Vec<PinnedBytes>,
    told: Vec<PinnedBytes>,
}

/// Results of a step.
#[derive(Debug)]
pub(super) struct Results {
    /// Chosen tokens, completion flags of grammars, and log-probabilities.
    memory: Option<PinnedBytes>,
    is_complete_at: usize,
    likelihoods_at: usize,
    stride: u32,
    /// Logits for the host, in consecutive rows.
    told: Option<PinnedBytes>,
    /// Outputs whose grammars have exceeded their limits.
    failed: Vec<(usize, GrammarError)>,
    spare: Arc<Mutex<Spare>>,
}

impl Results {
    /// Returns how the answer can go on behind the masked token of an output.
    pub(super) fn continuation(&self, output: usize) -> Continuation {
        if let Some((_, error)) = self.failed.iter().find(|(failed, _)| *failed == output) {
            return Continuation::Failed(error.clone());
        }
        let is_complete: u32 = plain::read(&self.bytes()[self.is_complete_at + output * 4..]);
        if is_complete == 0 { Continuation::Yes } else { Continuation::Complete }
    }

    /// Returns the token that an output has chosen.
    pub(super) fn chosen(&self, output: usize) -> u32 {
        plain::read(&self.bytes()[output * 4..])
    }

    /// Returns the result of a score.
    pub(super) fn logprobs(&self, score: usize, top: usize) -> Logprobs {
        let first = self.likelihoods_at + score * self.stride as usize * size_of::<Likelihood>();
        let at = |place: usize| -> Likelihood {
            plain::read(&self.bytes()[first + place * size_of::<Likelihood>()..])
        };
        let Likelihood { token, logprob } = at(0);
        let top = (1..=top).map(|place| (at(place).token, at(place).logprob)).collect();
        Logprobs { token, logprob, top }
    }

    /// Returns logits that were copied to the host.
    pub(super) fn logits(&self, row: usize, vocabulary: usize) -> Vec<f32> {
        let bytes = self.told.as_ref().expect("they were asked for").bytes();
        let row = &bytes[row * vocabulary * 4..][..vocabulary * 4];
        row.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn bytes(&self) -> &[u8] {
        self.memory.as_ref().expect("it is kept until the end").bytes()
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        let spare = &mut self.spare.lock();
        spare.memory.extend(self.memory.take());
        spare.told.extend(self.told.take());
    }
}

impl Choosing {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        shape: &Shape,
        limits: StepLimits,
        sections: Sections,
    ) -> Result<Self, CudaError> {
        let rows = limits.rows as usize;
        let likelihoods = limits.tokens_max as usize + rows * (TOP_MAX as usize + 1);
        let likelihoods_bytes = 4 * likelihoods * size_of::<Likelihood>();
        Ok(Self {
            driver: driver.clone(),
            sections,
            chosen: Allocation::new(driver, rows * 4)?,
            is_complete: Allocation::new(driver, rows * 4)?,
            rows,
            shaper: Shaper::new(driver, shape, limits)?,
            likelihoods: Allocation::new(driver, likelihoods_bytes)?,
            likelihoods_bytes,
            spare: Arc::default(),
        })
    }

    /// Returns the address of the tokens that the step before has chosen.
    pub(super) fn chosen(&self) -> DeviceAddress {
        self.chosen.at()
    }

    /// Writes the lists of a step.
    pub(super) fn write(&self, header: &mut Header, work: &Work) -> Result<(), CudaError> {
        let sections = &self.sections;
        header.write(sections.draws, &work.draws)?;
        header.write(sections.scores, &work.scores)
    }

    /// Allocates memory for the results.
    pub(super) fn begin(&self, work: &Work) -> Result<Results, CudaError> {
        let stride = 1 + work.scores.iter().map(|score| score.top).max().unwrap_or(0);
        let bytes = work.scores.len() * stride as usize * size_of::<Likelihood>();
        if bytes > self.likelihoods_bytes {
            return Err(CudaError::Config(
                "more log-probabilities are wanted than a step can have",
            ));
        }
        let spare = self.spare.lock().memory.pop();
        let memory = match spare {
            Some(memory) => memory,
            None => PinnedBytes::new(&self.driver, self.rows * 8 + self.likelihoods_bytes)?,
        };
        Ok(Results {
            memory: Some(memory),
            is_complete_at: self.rows * 4,
            likelihoods_at: self.rows * 8,
            stride,
            told: None,
            failed: Vec::new(),
            spare: self.spare.clone(),
        })
    }

    /// Submits the sampling of some rows of logits.
    pub(super) fn choose(
        &mut self,
        forward: &Forward,
        header: &Header,
        work: &Work,
        rows: Range<u32>,
        results: &mut Results,
    ) -> Result<(), CudaError> {
        let (stream, kernels) = (forward.stream, &forward.kernels);
        let vocabulary = forward.shape.vocabulary;
        let row_bytes = vocabulary * 4;
        // Lists index all rows of logits, but only these rows are in memory: the base address is
        // moved back accordingly.
        let before = rows.start as usize * row_bytes;
        let from = |allocation: &Allocation| allocation.at().0.wrapping_sub(before as u64);
        let (logits, shaped) = (from(&forward.buffers().logits), from(self.shaper.shaped()));
        self.tell(forward, work, &rows, logits, results)?;
        let parameters = || Parameters::default().wide(logits);
        // SAFETY, here and below: the lists were sent, they name rows and tokens that there are, and all memory lives as
        // long as `self`, which is kept until the stream has ended.
        let shapings = within(&work.shapings, &rows, |it| it.row);
        if !shapings.is_empty() {
            let (chosen, is_complete) = (self.chosen.at(), self.is_complete.at());
            let rows = RowsOfLogits { logits, shaped, chosen, is_complete };
            self.shaper.shape(forward, work, shapings, rows, &mut results.failed)?;
        }
        let draws = within(&work.draws, &rows, |it| it.row);
        if !draws.is_empty() {
            let parameters = parameters()
                .wide(shaped)
                .narrow(vocabulary as u32)
                .wide(header.at(self.sections.draws).0 + bytes::<Draw>(draws.start))
                .wide(self.chosen.at().0);
            unsafe { kernels.sample.launch(stream, draws.len(), parameters) }?;
        }
        let scores = within(&work.scores, &rows, |it| it.row);
        if !scores.is_empty() {
            let first = scores.start * results.stride as usize;
            let parameters = parameters()
                .narrow(vocabulary as u32)
                .wide(header.at(self.sections.scores).0 + bytes::<Score>(scores.start))
                .wide(self.chosen.at().0)
                .wide(self.likelihoods.at().0 + bytes::<Likelihood>(first))
                .narrow(results.stride);
            unsafe { kernels.score.launch(stream, scores.len(), parameters) }?;
        }
        Ok(())
    }

    /// Copies the requested logits to the host.
    fn tell(
        &self,
        forward: &Forward,
        work: &Work,
        rows: &Range<u32>,
        logits: u64,
        results: &mut Results,
    ) -> Result<(), CudaError> {
        let row_bytes = forward.shape.vocabulary * 4;
        for told in within(&work.told, rows, |row| *row) {
            if results.told.is_none() {
                // A power of two, so that reused buffers are soon large enough.
                let bytes = work.told.len().next_power_of_two() * row_bytes;
                let spare = self.spare.lock().told.pop();
                let spare = spare.filter(|spare| spare.bytes().len() >= bytes);
                let new = || PinnedBytes::new(&self.driver, bytes);
                results.told = Some(spare.map_or_else(new, Ok)?);
            }
            let memory = results.told.as_mut().expect("it was made").bytes_mut();
            let to = &mut memory[told * row_bytes..][..row_bytes];
            let from = logits.wrapping_add(u64::from(work.told[told]) * row_bytes as u64);
            // SAFETY: both are a row long, and the host reads it only when the step has ended.
            let copied = unsafe { result::memcpy_dtoh_async(to, from, forward.stream.raw()) };
            call("cuMemcpyDtoHAsync", copied)?;
        }
        Ok(())
    }

    /// Submits the copy of the results to the host.
    pub(super) fn end(
        &self,
        forward: &Forward,
        work: &Work,
        results: &Results,
    ) -> Result<(), CudaError> {
        let likelihoods_at = results.likelihoods_at;
        let likelihoods = work.scores.len() * results.stride as usize * size_of::<Likelihood>();
        let memory = results.memory.as_ref().expect("it is kept until the end");
        let outputs = work.draws.iter().map(|draw| draw.output as usize + 1).max().unwrap_or(0);
        let masked = work.masks.iter().map(|(_, output)| output + 1).max().unwrap_or(0);
        let mut pieces = SmallVec::<[Piece; 3]>::new();
        for (to, from, bytes) in [
            (memory.address(0), self.chosen.at(), outputs * 4),
            (memory.address(results.is_complete_at), self.is_complete.at(), masked * 4),
            (memory.address(likelihoods_at), self.likelihoods.at(), likelihoods),
        ] {
            if bytes > 0 {
                pieces.push(Piece { to, from, bytes });
            }
        }
        // Copied by a kernel: copy engines may be busy with pages for a long time. SAFETY: both
        // sides have equal sizes, and the host reads the result only when the step has ended.
        Ok(unsafe { self.driver.fetch_all(forward.stream, &pieces) }?)
    }
}

/// Returns the elements of a sorted list that belong to some rows.
fn within<T>(all: &[T], rows: &Range<u32>, row: impl Fn(&T) -> u32) -> Range<usize> {
    let first = all.partition_point(|it| row(it) < rows.start);
    first..all.partition_point(|it| row(it) < rows.end)
}

/// Returns the bytes of `count` values.
fn bytes<T>(count: usize) -> u64 {
    (count * size_of::<T>()) as u64
}
