//! A complete run of a random world: a phase with load and faults, then a phase without faults in
//! which all requests must end.

use std::panic::{AssertUnwindSafe, catch_unwind};

use terrace_cache::planted::{Bug, plant};
use terrace_scheduler::{Config, OpId, Outcome, Reach, Stats};

use super::action::{Action, Opening, PassageOption, RequestOptions};
use super::faults::{FaultCounts, FaultKind};
use super::stage::{Stage, Violation};
use super::swarm::Swarm;
use super::useful::{Account, run_benign};
use crate::world::{Damage, LAYERS, Transfer};
use terrace_kit::Dice;

/// One in this many seeds also runs a benign world.
const USEFUL_EVERY: u64 = 4;
/// Largest number of further answers to a prompt.
const SIBLINGS_MAX: u32 = 3;
/// Requests that arrive in the calm phase.
const LATE_ARRIVALS: u64 = 40;
/// Delay beyond every deadline.
const NEVER_IN_TIME_US: u64 = 10_000_000;

/// Result of a run.
#[derive(Debug)]
pub struct RunResult {
    /// Seed.
    pub seed: u64,
    /// Configuration, load and faults drawn from the seed.
    pub swarm: Swarm,
    /// All actions, if they were recorded.
    pub actions: Vec<Action>,
    /// Number of plans.
    pub steps: u64,
    /// Faults that occurred.
    pub faults: FaultCounts,
    /// Hash of every plan.
    pub fingerprint: u64,
    /// The scheduler's counters at the end.
    pub stats: Stats,
    /// Violation, if any.
    pub violation: Option<Violation>,
}

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Seed.
    pub seed: u64,
    /// Steps of the phase with faults.
    pub steps: u64,
    /// Planted bug, if any.
    pub bug: Option<Bug>,
    /// Replaces random faults: at most this one, of this operation.
    pub only_fault: Option<Option<(OpId, FaultKind)>>,
}

impl RunOptions {
    /// Returns the default parameters for a seed.
    #[must_use]
    pub fn of(seed: u64, steps: u64) -> Self {
        Self { seed, steps, bug: None, only_fault: None }
    }
}

/// Runs a world: steps with faults, then until all requests have ended.
#[must_use]
pub fn run_world(options: RunOptions) -> RunResult {
    plant(options.bug);
    let seed = options.seed;
    let mut dice = Dice::new(seed);
    let mut swarm = Swarm::draw(&mut dice);
    if options.only_fault.is_some() {
        swarm.fault_odds = Default::default();
    }
    if overlaps(seed) {
        swarm.config.copies.load_back_overlaps = true;
        // Computing is expensive, so that pages are loaded.
        swarm.config.rates.prefill_ns_per_token = 50_000_000;
        swarm.load.token_us = 4_000;
    }
    let mut wishes = RequestOptionDice::new(seed);
    let answers = AnswerDice::new(seed);
    wishes.configure(&mut swarm.config);
    let mut simulation = Simulation {
        stage: Stage::new(swarm.config.clone()),
        swarm,
        dice,
        wishes,
        answers,
        stops: StopDice::new(seed, options.only_fault.is_none()),
        layers: LayerDice::new(seed),
        only_fault: options.only_fault.flatten(),
        actions: Vec::new(),
        faults: FaultCounts::default(),
        steps: 0,
        due: Vec::new(),
        step_due: None,
        next_arrival: 0,
        calm: false,
    };
    let lived = catch_unwind(AssertUnwindSafe(|| {
        simulation.fault_phase(options.steps)?;
        simulation.calm_phase()
    }));
    let mut violation = violation_of(lived);
    let Simulation { stage, swarm, actions, faults, mut steps, .. } = simulation;
    // Low hit rates do no harm in these worlds; only a benign world detects them.
    if violation.is_none() && options.only_fault.is_none() && seed.is_multiple_of(USEFUL_EVERY) {
        let mut account = Account::default();
        let lived = catch_unwind(AssertUnwindSafe(|| run_benign(seed, &mut account)));
        violation = violation_of(lived);
        steps += account.plans;
    }
    plant(None);
    let (fingerprint, stats) = (stage.fingerprint, stage.world.scheduler.stats());
    RunResult { seed, swarm, actions, steps, faults, fingerprint, stats, violation }
}

/// Returns whether load-backs overlap with steps in the worlds of a seed. It has its own random
/// source, so that other draws of the seed stay the same.
pub(super) fn overlaps(seed: u64) -> bool {
    Dice::new(seed.rotate_left(32)).one_in(2)
}

fn violation_of(lived: std::thread::Result<Result<(), Violation>>) -> Option<Violation> {
    match lived {
        Ok(result) => result.err(),
        Err(panic) => Some(Violation::Panic(panic_message(panic.as_ref()))),
    }
}

/// Returns the message of a panic.
#[must_use]
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without words").to_owned()
}

struct Simulation {
    swarm: Swarm,
    only_fault: Option<(OpId, FaultKind)>,
    stage: Stage,
    dice: Dice,
    wishes: RequestOptionDice,
    answers: AnswerDice,
    stops: StopDice,
    layers: LayerDice,
    actions: Vec<Action>,
    faults: FaultCounts,
    steps: u64,
    /// Due time of each pending outcome, in the order of the stage's list.
    due: Vec<u64>,
    step_due: Option<u64>,
    next_arrival: u64,
    /// True in the calm phase.
    calm: bool,
}

/// Draws optional properties of requests. It has its own random source, so that other draws of the
/// seed stay the same.
struct RequestOptionDice {
    dice: Dice,
    has_wishes: bool,
}

impl RequestOptionDice {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(!seed);
        let has_wishes = dice.one_in(2);
        Self { dice, has_wishes }
    }

    /// Sets the parts of the configuration that optional properties need.
    fn configure(&mut self, config: &mut Config) {
        if self.has_wishes {
            config.batch.adapters_max = self.dice.pick(&[0, 1, 2]);
        }
    }

    fn draw(&mut self) -> RequestOptions {
        let mut wishes = RequestOptions::default();
        if !self.has_wishes {
            return wishes;
        }
        if self.dice.one_in(2) {
            wishes.passage = Some(PassageOption {
                start: self.dice.pick(&[0, 3, 9]),
                tokens: self.dice.pick(&[1, 4, 9]),
                content: self.dice.pick(&[0, 1, 2]),
                is_whole: self.dice.one_in(2),
            });
        }
        let tiers = [Reach::Nothing, Reach::Device, Reach::Host, Reach::L3, Reach::L3, Reach::L3];
        if self.dice.one_in(2) {
            (wishes.reads, wishes.writes) = (self.dice.pick(&tiers), self.dice.pick(&tiers));
        }
        wishes.adapter = self.dice.pick(&[None, None, Some(1), Some(2), Some(3)]);
        wishes
    }

    /// Draws new weights at times, including former ones.
    fn new_weights(&mut self) -> Option<u32> {
        (self.has_wishes && self.dice.one_in(400)).then(|| self.dice.below(3) as u32)
    }
}

/// Draws numbers of further answers. It has its own random source, like [`RequestOptionDice`].
#[derive(Debug)]
pub(super) struct AnswerDice {
    dice: Dice,
    has_siblings: bool,
}

impl AnswerDice {
    pub(super) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed.rotate_left(32) ^ 0xA45);
        let has_siblings = dice.one_in(2);
        Self { dice, has_siblings }
    }

    pub(super) fn siblings(&mut self) -> u32 {
        if self.has_siblings { self.dice.pick(&[0, 0, 0, 0, 1, SIBLINGS_MAX]) } else { 0 }
    }
}

/// Draws the progress of cancelled operations when the driver stops them. It has its own random
/// source.
struct StopDice {
    dice: Dice,
    /// True if the driver of this world stops operations.
    stops: bool,
}

impl StopDice {
    fn new(seed: u64, may_stop: bool) -> Self {
        let mut dice = Dice::new(seed ^ 0xCA11);
        let stops = dice.one_in(2) && may_stop;
        Self { dice, stops }
    }

    /// Returns the number of pages after which an operation was stopped, if it was.
    fn draw(&mut self, pages: usize) -> Option<u32> {
        let stopped = self.stops && !self.dice.one_in(4);
        stopped.then(|| self.dice.below(pages as u64 + 1) as u32)
    }
}

/// Draws when layers arrive and are computed. It has its own random source.
struct LayerDice {
    dice: Dice,
    /// True if layers are separate in this world.
    are_apart: bool,
}

impl LayerDice {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed.rotate_left(32) ^ 0x1A7E);
        let are_apart = dice.one_in(2);
        Self { dice, are_apart }
    }
}

impl Simulation {
    /// Performs an action, a moment after the previous one.
    fn perform(&mut self, action: Action) -> Result<(), Violation> {
        let jitter_us = self.swarm.load.jitter_us;
        if jitter_us > 0 && !matches!(action, Action::Wait(_)) {
            let moment = Action::Wait(1 + self.dice.below(jitter_us));
            self.stage.perform(&moment)?;
            self.actions.push(moment);
        }
        self.actions.push(action);
        self.stage.perform(self.actions.last().expect("it was just pushed"))
    }

    fn now(&self) -> u64 {
        self.stage.world.now.0
    }

    /// Draws whether a fault of this kind occurs now, and counts it.
    fn strikes(&mut self, kind: FaultKind) -> bool {
        let odds = self.swarm.fault_odds[kind as usize];
        !self.calm && odds > 0 && self.dice.one_in(odds)
    }

    // ---- the two phases ----

    fn fault_phase(&mut self, steps: u64) -> Result<(), Violation> {
        while self.steps < steps {
            self.next_event()?;
            self.chaos()?;
            // Sometimes several events occur between two plans.
            if !self.dice.one_in(6) {
                self.plan()?;
            }
        }
        Ok(())
    }

    /// Without faults, live requests must end within a bound while others arrive; then all
    /// resources must be released.
    fn calm_phase(&mut self) -> Result<(), Violation> {
        self.calm = true;
        let now = self.now();
        self.due.iter_mut().for_each(|due| *due = now);
        let waiting_for = self.stage.live.clone();
        let bound = self.steps + self.bound_on_rounds();
        let mut arrivals = LATE_ARRIVALS;
        loop {
            let alive = self.stage.live.iter().any(|request| waiting_for.contains(request));
            let stats = self.stage.world.scheduler.stats();
            let quiet = self.due.is_empty() && self.step_due.is_none();
            if !alive && quiet && stats.waiting + stats.running + stats.draining == 0 {
                break;
            }
            if self.steps > bound {
                return Err(Violation::Unending(format!(
                    "{:?} after {bound} steps",
                    self.stage.live
                )));
            }
            if alive && arrivals > 0 && self.dice.one_in(4) {
                arrivals -= 1;
                self.submit()?;
            }
            self.next_event()?;
            self.plan()?;
        }
        // Backups continue after the last request has ended, a share at a time.
        for _ in 0..1_000 {
            self.perform(Action::Wait(NEVER_IN_TIME_US))?;
            self.plan()?;
            if self.due.is_empty() && self.stage.world.last_plan().is_idle() {
                return self.check_released();
            }
            while !self.due.is_empty() {
                self.report_next()?;
            }
        }
        Err(Violation::Unending("backups go on for ever".to_owned()))
    }

    /// Returns an upper bound of the rounds for live and arriving requests.
    fn bound_on_rounds(&self) -> u64 {
        let load = &self.swarm.load;
        let step_tokens = u64::from(self.swarm.config.batch.step_tokens_max);
        let page_size = u64::from(self.swarm.config.cache.page_size);
        let device_tokens = u64::from(self.swarm.config.cache.device_pages) * page_size;
        let requests = self.stage.live.len() as u64 + LATE_ARRIVALS * u64::from(1 + SIBLINGS_MAX);
        let each = device_tokens.div_ceil(step_tokens.min(page_size)) + load.new_max + 10;
        // Retractions repeat work, and waits take rounds: both are bounded by the requests.
        requests * each * 4 + 2_000
    }

    fn check_released(&mut self) -> Result<(), Violation> {
        let not_returned = |what: String| Err(Violation::NotReturned(what));
        let stats = self.stage.world.scheduler.stats();
        for kind in
            [stats.probes, stats.prefetches, stats.load_backs, stats.write_backs, stats.backups]
        {
            if (kind.in_flight, kind.in_flight_pages, kind.quarantined_pages) != (0, 0, 0) {
                return not_returned(format!("a budget: {kind:?}"));
            }
        }
        if stats.submitted != stats.finished + stats.aborted + stats.failed {
            return not_returned(format!("a request: {stats:?}"));
        }
        self.perform(Action::Clear)?;
        let usage = self.stage.world.scheduler.stats().cache;
        for tier in [usage.device, usage.host] {
            if tier.free_pages != tier.total_pages {
                return not_returned(format!("pages, or the pins that hold them: {tier:?}"));
            }
        }
        Ok(())
    }

    // ---- events ----

    /// Advances the time to the next event and processes it.
    fn next_event(&mut self) -> Result<(), Violation> {
        let next_report = self.due.iter().copied().min();
        let next_arrival = (!self.calm).then_some(self.next_arrival);
        let deadline = self.stage.world.scheduler.deadline().map(|time| time.0);
        let times = [next_report, self.step_due, next_arrival, deadline];
        let Some(next) = times.into_iter().flatten().min() else {
            let stats = self.stage.world.scheduler.stats();
            return if stats.waiting + stats.running == 0 {
                Ok(())
            } else {
                Err(Violation::Unending("requests wait, and nothing is to come".to_owned()))
            };
        };
        if next > self.now() {
            self.perform(Action::Wait(next - self.now()))?;
        }
        if next_report == Some(next) {
            self.report_next()
        } else if self.step_due == Some(next) {
            self.end_step()
        } else if next_arrival == Some(next) {
            self.arrive()
        } else {
            Ok(())
        }
    }

    fn arrive(&mut self) -> Result<(), Violation> {
        let load = &self.swarm.load;
        let (burst, gap) = (load.burst, load.gap_us * load.burst);
        self.next_arrival = self.now() + 1 + self.dice.below(2 * gap);
        for _ in 0..burst {
            self.submit()?;
        }
        Ok(())
    }

    fn submit(&mut self) -> Result<(), Violation> {
        let load = self.swarm.load.clone();
        let follow_up = load.follow_up_odds > 0 && self.dice.one_in(load.follow_up_odds);
        let prompt_tokens = 1 + self.dice.below(load.prompt_max) as u32;
        let opening = if follow_up {
            Opening::Conversation(self.dice.below(4) as u32)
        } else {
            Opening::Text(1 + 1000 * self.dice.below(load.texts) as u32)
        };
        // Most prompts share their suffix, some are unique.
        let own_tokens = self.dice.pick(&[0, 0, 3, 8]).min(prompt_tokens);
        let namespace = self.dice.below(load.namespaces) as u32;
        if namespace > 0 {
            self.faults.count(FaultKind::SharedTokens);
        }
        let action = Action::Submit {
            opening,
            opening_tokens: prompt_tokens - own_tokens,
            own_tokens,
            own_start: 100_000 + 100 * self.dice.below(3) as u32,
            // Some requests only have their prompt computed.
            new_tokens: self.dice.below(load.new_max + 1) as u32,
            priority: self.dice.below(3) as i32,
            namespace,
            stops_at_once: self.dice.one_in(8),
            wishes: self.wishes.draw(),
            siblings: self.answers.siblings(),
        };
        self.perform(action)
    }

    fn plan(&mut self) -> Result<(), Violation> {
        self.steps += 1;
        self.perform(Action::Plan)?;
        if self.step_due.is_none() {
            let prefills = &self.stage.world.last_plan().prefills;
            self.begin_step(prefills.iter().map(|prefill| u64::from(prefill.tokens)).sum());
        }
        while self.due.len() < self.stage.owed.len() {
            let (op, _) = self.stage.owed[self.due.len()];
            let takes = match self.stage.world.transfers.get(&op) {
                Some(Transfer::LoadBack(..) | Transfer::WriteBack(..)) => {
                    100 + self.dice.below(400)
                }
                Some(Transfer::Probe(_)) => 200 + self.dice.below(8_000),
                Some(Transfer::Prefetch(keys, _) | Transfer::Backup(keys, _)) => {
                    500 + self.dice.below(100 * keys.len() as u64 + 1_000)
                }
                None => 0,
            };
            let never = self.only_fault == Some((op, FaultKind::NeverInTime));
            let takes = if never || self.strikes(FaultKind::NeverInTime) {
                self.faults.count(FaultKind::NeverInTime);
                NEVER_IN_TIME_US
            } else if self.strikes(FaultKind::StoreSlow) {
                self.faults.count(FaultKind::StoreSlow);
                takes * 1_000
            } else {
                takes
            };
            self.due.push(self.now() + takes);
        }
        Ok(())
    }

    /// Starts the time of the first step in flight.
    fn begin_step(&mut self, prefilled_tokens: u64) {
        if self.stage.world.in_step() {
            let tokens_us = prefilled_tokens * self.swarm.load.token_us;
            self.step_due = Some(self.now() + 200 + self.dice.below(2_000) + tokens_us);
        }
    }

    fn end_step(&mut self) -> Result<(), Violation> {
        self.step_due = None;
        let action = if self.dice.one_in(4) && self.strikes(FaultKind::StepFailed) {
            self.faults.count(FaultKind::StepFailed);
            match self.dice.one_in(2) {
                true => Action::FailStep,
                false => Action::FailMember(self.dice.below(16) as u32),
            }
        } else {
            Action::Compute(1 + self.dice.below(4) as u32)
        };
        self.perform(action)?;
        self.begin_step(0);
        Ok(())
    }

    /// Performs aborts, restarts and similar actions at random times.
    fn chaos(&mut self) -> Result<(), Violation> {
        let overlaps = self.swarm.config.copies.load_back_overlaps;
        if overlaps && !self.due.is_empty() && self.dice.one_in(2) {
            self.arrive_unreported()?;
        }
        let runs_ahead = self.swarm.config.batch.steps_in_flight_max > 1;
        if (runs_ahead || overlaps) && self.dice.one_in(4) {
            self.perform(Action::Execute)?;
        }
        let alive = !self.stage.live.is_empty();
        if alive && self.dice.one_in(8) && self.strikes(FaultKind::Abort) {
            self.faults.count(FaultKind::Abort);
            let nth = self.dice.below(self.stage.live.len() as u64) as u32;
            self.perform(Action::Abort(nth))?;
        }
        if alive && self.dice.one_in(16) {
            let nth = self.dice.below(self.stage.live.len() as u64) as u32;
            let priority = self.dice.below(3) as i32;
            self.perform(Action::SetPriority(nth, priority))?;
        }
        if self.dice.one_in(4) && self.strikes(FaultKind::Repeated) {
            self.faults.count(FaultKind::Repeated);
            let nth = self.dice.below(16) as u32;
            self.perform(Action::Repeat(nth))?;
        }
        if self.dice.one_in(64) && self.strikes(FaultKind::StoreRestart) {
            self.faults.count(FaultKind::StoreRestart);
            let leftovers = self.dice.one_in(2);
            self.perform(Action::RestartL3(leftovers))?;
        }
        if self.dice.one_in(8) && self.strikes(FaultKind::CacheCleared) {
            self.faults.count(FaultKind::CacheCleared);
            self.perform(Action::Clear)?;
        }
        if self.layers.are_apart {
            self.layers()?;
        }
        if let Some(nth) = self.wishes.new_weights() {
            self.perform(Action::ReplaceWeights(nth))?;
        }
        Ok(())
    }

    /// Lets layers of copies arrive in any order before they are reported, while steps are computed
    /// layer by layer.
    fn layers(&mut self) -> Result<(), Violation> {
        let owed = self.due.len() as u64;
        if owed > 0 && self.layers.dice.one_in(2) {
            let place = self.layers.dice.below(owed) as usize;
            let transfer = self.stage.world.transfers.get(&self.stage.owed[place].0);
            if let Some(Transfer::LoadBack(..) | Transfer::WriteBack(..)) = transfer {
                let layer = self.layers.dice.below(LAYERS as u64) as u32;
                let (nth, outcome) = self.draw_arrival(place);
                self.perform(Action::ArriveLayer(nth, layer, outcome))?;
            }
        }
        if self.layers.dice.one_in(4) {
            self.perform(Action::ExecuteLayer)?;
        }
        Ok(())
    }

    // ---- outcomes ----

    /// Reports the next outcome or, out of order, another.
    fn report_next(&mut self) -> Result<(), Violation> {
        let mut place =
            (0..self.due.len()).min_by_key(|&place| self.due[place]).expect("one is owed");
        if self.due.len() > 1 && self.strikes(FaultKind::Reordered) {
            self.faults.count(FaultKind::Reordered);
            place = self.dice.below(self.due.len() as u64) as usize;
        }
        let action = self.draw_report(place);
        if let Action::Report(_, Outcome::TimedOut) = action {
            self.due[place] = self.now() + 1_000 + self.dice.below(30_000);
        } else {
            self.due.remove(place);
            if self.stage.cancelled.contains(&self.stage.owed[place].0) {
                self.faults.count(FaultKind::LateAfterCancel);
            }
        }
        self.perform(action)
    }

    /// Moves the bytes of a load-back before it is reported.
    fn arrive_unreported(&mut self) -> Result<(), Violation> {
        let place = self.dice.below(self.due.len() as u64) as usize;
        let (op, _) = self.stage.owed[place];
        let Some(Transfer::LoadBack(..)) = self.stage.world.transfers.get(&op) else {
            return Ok(());
        };
        let (nth, outcome) = self.draw_arrival(place);
        self.perform(Action::Arrive(nth, outcome))
    }

    /// Draws the outcome of a copy between device and host.
    fn draw_arrival(&mut self, place: usize) -> (u32, Outcome) {
        match self.draw_report(place) {
            Action::Report(nth, outcome) => (nth, outcome),
            other => unreachable!("{other} is no outcome of a copy"),
        }
    }

    fn draw_report(&mut self, place: usize) -> Action {
        let (op, _) = self.stage.owed[place];
        let nth = place as u32;
        let transfer = self.stage.world.transfers.get(&op);
        let pages = transfer.map_or(1, Transfer::pages);
        if self.stage.cancelled.contains(&op)
            && let Some(moved) = self.stops.draw(pages)
        {
            self.faults.count(FaultKind::CalledOff);
            return Action::Report(nth, Outcome::CalledOff(moved));
        }
        let kinds: &[FaultKind] = match transfer {
            Some(Transfer::LoadBack(..)) => &ON_LOAD_BACK,
            Some(Transfer::WriteBack(..)) => &ON_WRITE_BACK,
            Some(Transfer::Probe(_)) => &ON_PROBE,
            Some(Transfer::Prefetch(..)) => &ON_PREFETCH,
            Some(Transfer::Backup(..)) => &ON_BACKUP,
            None => &[],
        };
        let only = self.only_fault.take_if(|(struck, kind)| *struck == op && kinds.contains(kind));
        let kind = match only {
            Some((_, kind)) => Some(kind),
            None => kinds.iter().copied().find(|&kind| self.strikes(kind)),
        };
        let Some(kind) = kind else { return Action::Report(nth, Outcome::Done) };
        if kind == FaultKind::RankDisagreement && self.swarm.config.model.ranks == 1 {
            return Action::Report(nth, Outcome::Done);
        }
        self.faults.count(kind);
        let page = self.dice.below(pages as u64) as u32;
        match kind {
            FaultKind::Missing => Action::Report(nth, Outcome::Missing),
            FaultKind::Failed => Action::Report(nth, Outcome::Failed),
            FaultKind::TimedOut => Action::Report(nth, Outcome::TimedOut),
            FaultKind::Corrupt if page > 0 => Action::Report(nth, Outcome::CorruptAfter(page)),
            FaultKind::Corrupt => Action::Report(nth, Outcome::Corrupt),
            FaultKind::ShortRead => Action::ReportDamaged(nth, page, Damage::ShortRead),
            FaultKind::FlippedBit => Action::ReportDamaged(nth, page, Damage::FlippedBit),
            FaultKind::WrongPage => Action::ReportDamaged(nth, page, Damage::WrongPage),
            FaultKind::StaleGeneration => Action::ReportDamaged(nth, page, Damage::StaleGeneration),
            FaultKind::PartlyDone | FaultKind::NoSpace | FaultKind::RankDisagreement => {
                Action::Report(nth, Outcome::Partial(page))
            }
            FaultKind::LateAfterCancel
            | FaultKind::Repeated
            | FaultKind::Reordered
            | FaultKind::StoreRestart
            | FaultKind::StoreSlow
            | FaultKind::Abort
            | FaultKind::SharedTokens
            | FaultKind::StepFailed
            | FaultKind::NeverInTime
            | FaultKind::CacheCleared
            | FaultKind::CalledOff => unreachable!("{kind} is no outcome"),
        }
    }
}

const ON_LOAD_BACK: [FaultKind; 5] = [
    FaultKind::Failed,
    FaultKind::TimedOut,
    FaultKind::PartlyDone,
    FaultKind::Corrupt,
    FaultKind::RankDisagreement,
];
const ON_WRITE_BACK: [FaultKind; 4] =
    [FaultKind::Failed, FaultKind::TimedOut, FaultKind::PartlyDone, FaultKind::RankDisagreement];
const ON_PROBE: [FaultKind; 5] = [
    FaultKind::Missing,
    FaultKind::Failed,
    FaultKind::TimedOut,
    FaultKind::PartlyDone,
    FaultKind::RankDisagreement,
];
const ON_PREFETCH: [FaultKind; 10] = [
    FaultKind::Missing,
    FaultKind::Failed,
    FaultKind::TimedOut,
    FaultKind::PartlyDone,
    FaultKind::ShortRead,
    FaultKind::FlippedBit,
    FaultKind::WrongPage,
    FaultKind::StaleGeneration,
    FaultKind::Corrupt,
    FaultKind::RankDisagreement,
];
const ON_BACKUP: [FaultKind; 6] = [
    FaultKind::Failed,
    FaultKind::Corrupt,
    FaultKind::TimedOut,
    FaultKind::PartlyDone,
    FaultKind::NoSpace,
    FaultKind::RankDisagreement,
];
