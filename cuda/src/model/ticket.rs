//! A submitted step, until its tokens are known.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use terrace_engine::{Chosen, Continuation, Finished, ModelError, Output, StepTicket};

use super::choosing::Results;
use super::step::{Choice, Expected, Row};
use crate::fence::CudaFence;

/// A launched step.
#[derive(Debug)]
pub struct CudaTicket {
    pub(super) fence: CudaFence,
    pub(super) expected: Vec<Expected>,
    pub(super) results: Results,
    pub(super) rows: Arc<Mutex<Vec<Option<Row>>>>,
    pub(super) times: Arc<Times>,
    pub(super) launched_at: Instant,
    pub(super) vocabulary: usize,
}

/// End of the last step, as far as known.
#[derive(Debug, Default)]
pub(super) struct Times(Mutex<Option<Instant>>);

impl StepTicket for CudaTicket {
    type Fence = CudaFence;

    fn fence(&self) -> CudaFence {
        self.fence.clone()
    }

    fn finish(self) -> Finished {
        let ended = self.fence.wait();
        let ended_at = Instant::now();
        // Steps run in sequence: this one started when it was submitted and the one before had
        // ended.
        let before = self.times.0.lock().replace(ended_at);
        let began_at = before.map_or(self.launched_at, |before| before.max(self.launched_at));
        let result = match ended {
            Ok(()) => Ok(self.outputs()),
            Err(error) => Err(ModelError(error.to_string())),
        };
        Finished { result, began_at: began_at.min(ended_at), ended_at }
    }
}

impl CudaTicket {
    fn outputs(&self) -> Vec<Output> {
        let outputs = self.expected.iter().enumerate();
        outputs.map(|(place, expected)| self.output(place, expected)).collect()
    }

    fn output(&self, place: usize, expected: &Expected) -> Output {
        let rows = &mut self.rows.lock();
        let row = rows[expected.slot.0 as usize].as_mut();
        // The row may have been assigned to another sequence.
        let mut row = row.filter(|row| row.arrival == expected.arrival);
        let top = row.as_ref().and_then(|row| row.choosing.logprobs).unwrap_or(0) as usize;
        let top = top.min(self.vocabulary);
        let scores = expected.prompt_scores.clone();
        let scores = scores.map(|score| self.results.logprobs(score, top)).collect();
        let chosen = match expected.choice {
            Choice::None => None,
            Choice::OnDevice { is_masked } => {
                let logprobs = expected.score.map(|score| self.results.logprobs(score, top));
                let logits = expected.logits.map(|row| self.results.logits(row, self.vocabulary));
                Some(Chosen {
                    token: self.results.chosen(place),
                    continuation: if is_masked {
                        self.results.continuation(place)
                    } else {
                        Continuation::Yes
                    },
                    logprobs: logprobs.map(Box::new),
                    logits: logits.map(Into::into),
                })
            }
        };
        if let (Some(row), Some(chosen)) = (&mut row, &chosen) {
            row.push(chosen.token);
        }
        Output { chosen, scores }
    }
}
