//! A world without faults whose transfers queue on links of known speed.

use std::collections::{BTreeMap, BTreeSet};

use terrace_kit::Dice;
use terrace_scheduler::{Config, CopyDirection, Outcome, Reach, RequestId};

use super::super::action::{Action, Opening, RequestOptions};
use super::super::stage::{Stage, Violation};
use super::super::story::{trace_action, trace_header};
use super::super::useful::Account;
use crate::world::Transfer;

/// Largest number of events; a situation that takes more is a violation.
const EVENTS_MAX: u64 = 20_000;
/// Distance between the first tokens of two texts.
const TEXT_TOKENS: u32 = 10_000;
/// First of the unique tokens of prompts.
const OWN_TOKENS: u32 = 1_000_000_000;

/// End of a transfer that hangs.
const NEVER: u64 = u64::MAX;

/// A link that moves one transfer at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// Time of a page on the link; [`NEVER`] for a link that hangs.
    page_us: u64,
    busy_until: u64,
}

impl Link {
    pub(super) fn new(page_us: u64) -> Self {
        Self { page_us, busy_until: 0 }
    }

    pub(super) fn that_hangs() -> Self {
        Self::new(NEVER)
    }

    /// Returns the end of a transfer that starts now.
    fn move_pages(&mut self, pages: usize, now: u64) -> u64 {
        if self.page_us == NEVER {
            return NEVER;
        }
        self.busy_until = self.busy_until.max(now) + self.page_us * pages as u64;
        self.busy_until
    }
}

/// Speeds of steps and links.
#[derive(Clone, Copy, Debug)]
pub(super) struct Speeds {
    /// Time of a step beside its prompt tokens.
    pub(super) step_us: u64,
    pub(super) token_us: u64,
    pub(super) probe_us: u64,
    pub(super) load_back: Link,
    pub(super) write_back: Link,
    pub(super) prefetch: Link,
    pub(super) backup: Link,
}

impl Default for Speeds {
    fn default() -> Self {
        Self {
            step_us: 500,
            token_us: 1_000,
            probe_us: 300,
            load_back: Link::new(10),
            write_back: Link::new(10),
            prefetch: Link::new(50),
            backup: Link::new(50),
        }
    }
}

/// A world, and statistics of its engine and transfers.
pub(super) struct Bench<'a> {
    pub(super) stage: Stage,
    pub(super) speeds: Speeds,
    account: &'a mut Account,
    /// Due time of each pending outcome, in the order of the stage's list.
    due: Vec<u64>,
    step_due: Option<u64>,
    page_size: u32,
    next_own: u32,
    /// Prompt tokens that steps have computed, by request.
    computed: BTreeMap<RequestId, u64>,
    /// Requests that have had their first token.
    first_tokens: BTreeSet<RequestId>,
    /// Pages of write-backs and of backups so far.
    written_pages: usize,
    stored_pages: usize,
}

impl<'a> Bench<'a> {
    pub(super) fn new(
        seed: u64,
        mut config: Config,
        speeds: Speeds,
        account: &'a mut Account,
    ) -> Self {
        if let Some(story) = &mut account.story {
            *story = trace_header(seed, &mut config);
        }
        Self {
            page_size: config.cache.page_size,
            stage: Stage::new(config),
            speeds,
            account,
            due: Vec::new(),
            step_due: None,
            next_own: OWN_TOKENS,
            computed: BTreeMap::new(),
            first_tokens: BTreeSet::new(),
            written_pages: 0,
            stored_pages: 0,
        }
    }

    // ---- requests ----

    /// Submits a request for a prompt of `pages` pages of a text and one unique token.
    pub(super) fn submit(
        &mut self,
        text: u32,
        pages: u32,
        new_tokens: u32,
    ) -> Result<RequestId, Violation> {
        self.submit_with(text, pages, new_tokens, 0, Reach::L3)
    }

    /// Submits a request with a priority and the tiers that it writes to.
    pub(super) fn submit_with(
        &mut self,
        text: u32,
        pages: u32,
        new_tokens: u32,
        priority: i32,
        writes: Reach,
    ) -> Result<RequestId, Violation> {
        self.next_own += 1_000;
        self.perform(&Action::Submit {
            opening: Opening::Text(1 + text * TEXT_TOKENS),
            opening_tokens: pages * self.page_size,
            own_tokens: 1,
            own_start: self.next_own,
            new_tokens,
            priority,
            namespace: 0,
            stops_at_once: false,
            wishes: RequestOptions { writes, ..RequestOptions::default() },
            siblings: 0,
        })?;
        let id = *self.stage.live.last().expect("the prompt fits");
        self.plan()?;
        Ok(id)
    }

    /// Computes prompts, given as text and pages, and waits until all of their copies are complete.
    pub(super) fn prepare(&mut self, prompts: &[(u32, u32)]) -> Result<(), Violation> {
        for &(text, pages) in prompts {
            self.submit(text, pages, 1)?;
            self.run_until_quiet()?;
        }
        Ok(())
    }

    /// Evicts all other pages from the device by prompts that are not written to host.
    pub(super) fn flush_device(&mut self, text: u32) -> Result<(), Violation> {
        let device = self.stage.world.scheduler.stats().cache.device.total_pages as u32;
        self.submit_with(text, device - 2, 1, 0, Reach::Device)?;
        self.run_until_quiet()
    }

    /// Returns the prompt tokens computed for a request, except its unique one.
    pub(super) fn recomputed_tokens(&self, id: RequestId) -> u64 {
        self.computed.get(&id).copied().unwrap_or_default().saturating_sub(1)
    }

    /// Returns whether the request has had its first token.
    pub(super) fn has_token(&self, id: RequestId) -> bool {
        self.first_tokens.contains(&id)
    }

    pub(super) fn is_live(&self, id: RequestId) -> bool {
        self.stage.live.contains(&id)
    }

    /// Returns the pages of write-backs that have started.
    pub(super) fn written_pages(&self) -> usize {
        self.written_pages
    }

    /// Returns the pages of backups that have started.
    pub(super) fn stored_pages(&self) -> usize {
        self.stored_pages
    }

    /// Returns whether a transfer of this kind is in flight.
    pub(super) fn has_in_flight(&self, is_of_kind: impl Fn(&Transfer) -> bool) -> bool {
        self.stage.world.transfers.values().any(is_of_kind)
    }

    // ---- time ----

    fn now(&self) -> u64 {
        self.stage.world.now.0
    }

    pub(super) fn perform(&mut self, action: &Action) -> Result<(), Violation> {
        self.stage.world.now.0 += 1;
        let at = self.now();
        let performed = self.stage.perform(action);
        if let Some(story) = &mut self.account.story {
            trace_action(story, at, action, &mut self.stage);
        }
        performed
    }

    pub(super) fn run_until_quiet(&mut self) -> Result<(), Violation> {
        self.run_until(|_| false)
    }

    /// Runs until the condition holds or no event is left.
    pub(super) fn run_until(&mut self, holds: impl Fn(&Self) -> bool) -> Result<(), Violation> {
        for _ in 0..EVENTS_MAX {
            if holds(self) || !self.next_event()? {
                return Ok(());
            }
        }
        Err(Violation::Unending(format!("{:?} under pressure", self.stage.live)))
    }

    /// Processes the next event and plans. Returns false if there is none.
    fn next_event(&mut self) -> Result<bool, Violation> {
        let next_report = self.due.iter().copied().min().filter(|&due| due < NEVER);
        let deadline = self.stage.world.scheduler.deadline().map(|time| time.0);
        let Some(next) = [next_report, self.step_due, deadline].into_iter().flatten().min() else {
            return Ok(false);
        };
        self.stage.world.now.0 = self.now().max(next);
        if next_report == Some(next) {
            let place = self.due.iter().position(|&due| due == next).expect("it is the first");
            self.due.remove(place);
            self.perform(&Action::Report(place as u32, Outcome::Done))?;
        } else if self.step_due == Some(next) {
            self.step_due = None;
            self.perform(&Action::Compute(1))?;
            self.note_first_tokens();
        }
        self.plan()?;
        Ok(true)
    }

    fn note_first_tokens(&mut self) {
        for &id in &self.stage.live {
            let tokens = self.stage.world.scheduler.tokens(id);
            if tokens.is_some_and(|tokens| !tokens.appended.is_empty()) {
                self.first_tokens.insert(id);
            }
        }
    }

    pub(super) fn plan(&mut self) -> Result<(), Violation> {
        self.account.plans += 1;
        self.perform(&Action::Plan)?;
        let plan = self.stage.world.last_plan();
        for prefill in &plan.prefills {
            *self.computed.entry(prefill.request).or_default() += u64::from(prefill.tokens);
        }
        for copy in &plan.copies {
            if copy.direction == CopyDirection::WriteBack {
                self.written_pages += plan.host_pages(copy).len();
            }
        }
        let now = self.now();
        if self.stage.world.in_step() && self.step_due.is_none() {
            let tokens: u64 = plan.prefills.iter().map(|prefill| u64::from(prefill.tokens)).sum();
            self.step_due = Some(now + self.speeds.step_us + tokens * self.speeds.token_us);
        }
        while self.due.len() < self.stage.owed.len() {
            let (op, _) = self.stage.owed[self.due.len()];
            let speeds = &mut self.speeds;
            let ends = match self.stage.world.transfers.get(&op) {
                None => now,
                Some(Transfer::Probe(_)) => now + speeds.probe_us,
                Some(transfer @ Transfer::LoadBack(..)) => {
                    speeds.load_back.move_pages(transfer.pages(), now)
                }
                Some(transfer @ Transfer::WriteBack(..)) => {
                    speeds.write_back.move_pages(transfer.pages(), now)
                }
                Some(transfer @ Transfer::Prefetch(..)) => {
                    speeds.prefetch.move_pages(transfer.pages(), now)
                }
                Some(transfer @ Transfer::Backup(..)) => {
                    self.stored_pages += transfer.pages();
                    speeds.backup.move_pages(transfer.pages(), now)
                }
            };
            self.due.push(ends);
        }
        Ok(())
    }
}

/// Draws a number from an inclusive range.
pub(super) fn draw(dice: &mut Dice, range: std::ops::RangeInclusive<u32>) -> u32 {
    range.start() + dice.below(u64::from(range.end() - range.start()) + 1) as u32
}
