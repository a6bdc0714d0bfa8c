//! Events: reports of steps and outcomes of operations.

use terrace_fsm::{OpId, Time};

use super::Scheduler;
use crate::error::EventError;
use crate::event::{Event, Outcome};
use crate::ids::StepId;
use crate::operations::{Reported, Work};
use crate::requests::Requests;
use crate::results::Report;
use crate::steps::Steps;

impl Scheduler {
    /// Applies an event. Late and repeated reports are counted and otherwise ignored.
    ///
    /// # Errors
    /// If the event contradicts the plans. Nothing has changed then.
    pub fn advance(&mut self, now: Time, event: Event<'_>) -> Result<(), EventError> {
        match event {
            Event::StepDone { step, results, failed } => {
                let check =
                    |steps: &mut Steps, requests: &Requests| steps.check(results, failed, requests);
                if self.step_reported(now, step, check)? {
                    if self.steps.next_may_wait() {
                        self.steps.hold(Report::done(self.now, results, failed));
                    } else {
                        let (step, took) = self.steps.end_first(self.now);
                        self.step_done(step, took, results, failed);
                    }
                }
            }
            Event::StepFailed { step } => {
                if self.step_reported(now, step, |_, _| Ok(()))? {
                    if self.steps.some_are_held() {
                        self.steps.hold(Report::failed(self.now));
                    } else {
                        let (step, _) = self.steps.end_first(self.now);
                        self.step_failed(step);
                    }
                }
            }
            Event::Operation { op, rank, outcome } => {
                self.operation_reported(now, op, rank, outcome)?
            }
        }
        self.end_held_steps();
        Ok(())
    }

    /// Returns true if the report of a step is new and passes `check`, false if it is repeated.
    fn step_reported(
        &mut self,
        now: Time,
        id: StepId,
        check: impl FnOnce(&mut Steps, &Requests) -> Result<(), EventError>,
    ) -> Result<bool, EventError> {
        if !self.steps.is_next(id)? {
            self.stats.ignored_steps += 1;
            return Ok(false);
        }
        check(&mut self.steps, &self.requests)?;
        self.now = self.now.max(now);
        Ok(true)
    }

    fn operation_reported(
        &mut self,
        now: Time,
        op: OpId,
        rank: u32,
        outcome: Outcome,
    ) -> Result<(), EventError> {
        let owner = self.operations.owner(op);
        let reported = self.operations.report(op, rank, outcome)?;
        self.now = self.now.max(now);
        match reported {
            Reported::Ignored => self.stats.ignored_outcomes += 1,
            // Pages that one rank found corrupt are not read again while other ranks still work.
            Reported::Pending => self.distrust_source(op),
            Reported::TimedOut => {
                if let Some(owner) = owner {
                    self.on_timeout(owner);
                }
            }
            Reported::Ended(operation) => match &operation.work {
                Work::Probe { .. } => self.probe_ended(op, operation),
                Work::Prefetch { .. } => self.prefetch_ended(op, operation),
                Work::LoadBack { .. } => self.load_back_ended(op, operation),
                Work::WriteBack { .. } => self.write_back_ended(op, operation),
                Work::Backup { .. } => self.backup_ended(operation),
            },
        }
        Ok(())
    }
}
