//! Minimum hit rates in a benign world.
//!
//! For every request the world knows which pages of its prompt were available when it arrived, and
//! where: on device, on host, in L3, or from another request that was about to compute them. This
//! is an upper bound, and a good scheduler reuses nearly all of it; `Yield::judge` sets the
//! thresholds. The clock advances a little between calls. In some worlds L3 fails for a while.
//! Nothing is required of that time, and the usual thresholds apply after it.

use std::collections::{BTreeMap, BTreeSet};

use terrace_scheduler::{
    AdmissionOrder, BatchConfig, Config, CopyConfig, EvictionKind, L3Config, Outcome, PageKey,
    PrefetchPolicy, QueueConfig, RateConfig, RequestId, Sequence, StateName,
};

use super::action::{Action, Opening, RequestOptions};
use super::pressure::run_under_pressure;
use super::simulation::{AnswerDice, overlaps};
use super::stage::{Stage, Violation};
use super::story::{trace_action, trace_header};
use crate::world::Transfer;
use terrace_kit::Dice;

/// Requests before the L3 failure, if there is one, and after it.
const REQUESTS: u64 = 48;
/// Time after which all back-offs of the scheduler have ended.
const RECOVERY_US: u64 = 8_000_000;
/// Tolerance of the thresholds, in pages or steps.
const ODDS: u64 = 8;
/// Number of texts that prompts begin with.
const TEXTS: u64 = 10;
/// Longest prompts, with their unique part and the answer.
const LONG_PAGES: usize = 28;
/// Requests that run at once.
const RUNNING_MAX: u32 = 8;
/// Cancelled prefetches.
const CALLED_OFF: u64 = 6;
/// Time after a request's end by which a page must be in L3.
const STORED_AFTER_US: u64 = 200_000;

/// Place of a page of a prompt when its request arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Device,
    Host,
    L3,
    /// About to be computed by another request.
    Another,
    /// Lost, though computed by a request that ended long before.
    Nowhere,
}

impl Place {
    /// Returns the minimum percentage of reuse for available pages.
    fn least_percent(self) -> u64 {
        match self {
            Self::Device | Self::Host => 97,
            Self::L3 => 95,
            Self::Another => 95,
            // Lost pages: any reuse of them is a bonus.
            Self::Nowhere => 0,
        }
    }
}

/// Reuse of available pages.
#[derive(Clone, Debug, Default)]
struct Yield {
    /// By place: available pages, and those of them that were not computed.
    places: BTreeMap<Place, (u64, u64)>,
    /// Recently used pages that must be on device, and those that were.
    recent: (u64, u64),
    /// Pages of prompts with several answers, and those of them computed more than once.
    answered: (u64, u64),
    /// Pages of conversations whose long answer had just ended, without other requests, and those
    /// on device.
    continued: (u64, u64),
    /// Short prompts, and the steps that they waited for.
    short: (u64, u64),
    /// Time in which requests waited, and the part of it without work in flight.
    busy_us: (u64, u64),
}

impl Yield {
    fn judge(&self, when: &str) -> Result<(), Violation> {
        let low_reuse = |what: String| Err(Violation::LowReuse(format!("{what} {when}")));
        let (shared, twice) = self.answered;
        // Like any page, it may be evicted between two answers.
        if falls_short(shared - twice, shared, 99) {
            return low_reuse(format!(
                "{twice} of {shared} pages of several answers computed twice"
            ));
        }
        for (place, &(bound, had)) in &self.places {
            if falls_short(had, bound, place.least_percent()) {
                return low_reuse(format!("{had} of {bound} pages taken from {place:?}"));
            }
        }
        let all: u64 = self.places.values().map(|(bound, _)| bound).sum();
        let (lost, _) = self.places.get(&Place::Nowhere).copied().unwrap_or_default();
        if falls_short(all - lost, all, 98) {
            return low_reuse(format!("{lost} of {all} pages lost"));
        }
        let (recent, on_device) = self.recent;
        if falls_short(on_device, recent, 75) {
            return low_reuse(format!("{on_device} of {recent} recent pages on device"));
        }
        let (continued, on_device) = self.continued;
        if falls_short(on_device, continued, 95) {
            return low_reuse(format!(
                "{on_device} of {continued} pages of conversations on device"
            ));
        }
        let (shorts, steps) = self.short;
        if steps > shorts * 3 + ODDS {
            return low_reuse(format!("{shorts} short prompts waited for {steps} steps"));
        }
        let (busy_us, idle_us) = self.busy_us;
        if idle_us * 100 > busy_us * 2 {
            return low_reuse(format!("nothing under way for {idle_us} of {busy_us} us"));
        }
        Ok(())
    }
}

/// Returns whether less than a percentage was reused, with a tolerance.
fn falls_short(taken: u64, bound: u64, least_percent: u64) -> bool {
    (taken + ODDS) * 100 < bound * least_percent
}

/// A temporary failure of L3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    None,
    Fails,
    Hangs,
    Slow,
    /// It answers at once and delivers so slowly that computing is cheaper.
    Dear,
    Missing,
}

/// A request with available pages.
#[derive(Debug)]
struct Asked {
    keys: Vec<PageKey>,
    /// Place of each available page, from the first on.
    places: Vec<Place>,
    /// Completed steps at its arrival.
    steps_before: u64,
    /// Requests that were about to compute their prompts then.
    others: Vec<RequestId>,
    /// Earlier answers to its prompt that arrived with it.
    siblings: Vec<RequestId>,
    /// Number of whole pages of its prompt that others can reuse.
    pages_max: usize,
    is_short: bool,
    priority: i32,
    counts: bool,
}

/// Results of a benign world.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Number of plans.
    pub(super) plans: u64,
    /// Trace, if it is recorded.
    pub(super) story: Option<String>,
}

/// Runs a benign world.
///
/// # Errors
/// Returns an unmet threshold or any other violation.
pub(super) fn run_benign(seed: u64, account: &mut Account) -> Result<(), Violation> {
    let mut dice = Dice::new(seed ^ 0x5EED);
    let mut config = draw_config(&mut dice);
    config.copies.load_back_overlaps = overlaps(seed);
    if let Some(story) = &mut account.story {
        *story = trace_header(seed, &mut config);
    }
    let trouble = dice.pick(&[
        Trouble::None,
        Trouble::Fails,
        Trouble::Hangs,
        Trouble::Slow,
        Trouble::Missing,
    ]);
    let trouble = match trouble {
        Trouble::Slow if (seed / 4).is_multiple_of(2) => Trouble::Dear,
        other => other,
    };
    Useful {
        by_priority: config.cache.eviction == EvictionKind::Priority,
        device_pages: config.cache.device_pages as usize,
        page_size: config.cache.page_size,
        step_tokens: config.batch.step_tokens_max,
        threshold: config.l3.as_ref().map_or(1, |l3| l3.prefetch_threshold_pages) as usize,
        stage: Stage::new(config),
        dice,
        answers: AnswerDice::new(seed),
        trouble: Trouble::None,
        due: Vec::new(),
        step_due: None,
        asked: BTreeMap::new(),
        ended_at: BTreeMap::new(),
        computed: BTreeMap::new(),
        uses: BTreeMap::new(),
        clock: 0,
        account: &mut *account,
        steps: 0,
        next_own: 0,
        new_tokens: None,
        continues: false,
        measures: true,
        taken: Yield::default(),
    }
    .live(trouble)?;
    run_under_pressure(seed, account)
}

struct Useful<'a> {
    account: &'a mut Account,
    stage: Stage,
    dice: Dice,
    answers: AnswerDice,
    by_priority: bool,
    device_pages: usize,
    page_size: u32,
    step_tokens: u32,
    threshold: usize,
    trouble: Trouble,
    /// Due time of each pending outcome, in the order of the stage's list.
    due: Vec<u64>,
    step_due: Option<u64>,
    /// Requests without a token so far.
    asked: BTreeMap<RequestId, Asked>,
    /// Latest end of the requests that have computed a page.
    ended_at: BTreeMap<PageKey, u64>,
    /// Requests that have computed a page of their prompt.
    computed: BTreeMap<PageKey, BTreeSet<RequestId>>,
    /// Number of the last use of each page (0 if it need not be kept), and the priority of its
    /// user.
    uses: BTreeMap<PageKey, (u64, i32)>,
    clock: u64,
    steps: u64,
    next_own: u32,
    /// Number of tokens of the next request, unless it is random.
    new_tokens: Option<u32>,
    /// True if the next request continues a conversation at once.
    continues: bool,
    measures: bool,
    taken: Yield,
}

impl Useful<'_> {
    fn live(&mut self, trouble: Trouble) -> Result<(), Violation> {
        self.requests(REQUESTS)?;
        self.taken.judge("in a world without trouble")?;
        if trouble != Trouble::None {
            self.live_through(trouble)?;
        }
        self.call_off_prefetches()
    }

    fn live_through(&mut self, trouble: Trouble) -> Result<(), Violation> {
        (self.trouble, self.measures) = (trouble, false);
        for _ in 0..4 {
            self.forget_memory()?;
            self.requests(REQUESTS / 16)?;
        }
        self.trouble = Trouble::None;
        let now = self.now();
        self.due.iter_mut().for_each(|due| *due = (*due).min(now));
        self.run_until_quiet()?;
        self.perform(Action::Wait(RECOVERY_US))?;
        // The first successes, and the lookups skipped because of the failures, reset the
        // scheduler's back-off.
        for _ in 0..4 {
            self.forget_memory()?;
            self.requests(REQUESTS / 6)?;
        }
        self.measures = true;
        self.taken = Yield::default();
        self.ended_at.clear();
        self.requests(REQUESTS)?;
        self.taken.judge(&format!("after trouble: {trouble:?}"))
    }

    /// Aborts requests with prefetches in flight. This is no sign of an L3 failure: later requests
    /// for the same prompt must get it from there.
    fn call_off_prefetches(&mut self) -> Result<(), Violation> {
        self.taken = Yield::default();
        for _ in 0..CALLED_OFF {
            self.store_all()?;
            self.forget_memory()?;
            let text = self.dice.below(TEXTS) as u32;
            let submit =
                |useful: &mut Self| useful.submit(Opening::Text(1 + 1_000 * text), 8 + text, false);
            self.measures = false;
            submit(self)?;
            while !self.is_prefetching() && self.next_thing()? {}
            self.perform(Action::Abort(0))?;
            self.plan()?;
            while let Some(place) = self.first_cancelled() {
                let (op, _) = self.stage.owed[place];
                let pages = self.stage.world.transfers.get(&op).map_or(0, Transfer::pages);
                let moved = self.dice.below(pages as u64 + 1) as u32;
                self.due.remove(place);
                self.perform(Action::Report(place as u32, Outcome::CalledOff(moved)))?;
            }
            self.asked.clear();
            self.run_until_quiet()?;
            self.forget_memory()?;
            self.measures = true;
            submit(self)?;
            self.run_until_quiet()?;
        }
        self.taken.judge("after prefetches were called off")
    }

    fn is_prefetching(&self) -> bool {
        self.stage
            .world
            .transfers
            .values()
            .any(|under_way| matches!(under_way, Transfer::Prefetch(..)))
    }

    /// Returns the first pending outcome of a cancelled operation.
    fn first_cancelled(&self) -> Option<usize> {
        self.stage.owed.iter().position(|(op, _)| self.stage.cancelled.contains(op))
    }

    /// Runs `requests` requests, mostly one by one, to their end.
    fn requests(&mut self, requests: u64) -> Result<(), Violation> {
        let mut left = requests;
        while left > 0 {
            let burst = if self.dice.one_in(6) { self.dice.pick(&[2, 4]) } else { 1 };
            match self.dice.below(8) {
                // Distinct long prompts, and short ones behind them.
                0 => {
                    for _ in 0..burst {
                        self.submit(Opening::Text(0), LONG_PAGES as u32 - 4, false)?;
                    }
                    self.go_on(2)?;
                    for _ in 0..2 {
                        self.submit(Opening::Text(0), 0, true)?;
                        self.go_on(3)?;
                    }
                }
                1 => self.long_answer()?,
                2 | 3 => {
                    let nth = self.dice.below(4) as u32;
                    self.submit(Opening::Conversation(nth), 0, false)?;
                }
                _ => {
                    let text = self.dice.below(TEXTS) as u32;
                    for _ in 0..burst {
                        self.submit(Opening::Text(1 + 1_000 * text), 8 + text, false)?;
                    }
                }
            }
            left = left.saturating_sub(burst);
            if self.dice.one_in(3) {
                self.go_on(3)?;
            } else {
                self.run_until_quiet()?;
            }
            if self.dice.one_in(12) {
                self.store_all()?;
                if self.dice.one_in(2) {
                    // The cache loses pages that many requests wait for, and L3 has them.
                    for _ in 0..2 * RUNNING_MAX {
                        self.submit_text()?;
                    }
                }
                self.forget_memory()?;
            }
        }
        self.run_until_quiet()
    }

    /// Runs a conversation whose answer outlasts many others and continues at once.
    fn long_answer(&mut self) -> Result<(), Violation> {
        self.new_tokens = Some(24 * self.page_size);
        self.submit(Opening::Text(0), 8, false)?;
        self.go_on(12)?;
        for _ in 0..6 {
            self.new_tokens = Some(1);
            self.submit(Opening::Text(0), 16, false)?;
            self.go_on(12)?;
        }
        self.run_until_quiet()?;
        self.new_tokens = Some(1);
        self.submit(Opening::Text(0), 10, false)?;
        self.run_until_quiet()?;
        self.continues = !self.by_priority;
        self.submit(Opening::Conversation(1), 0, false)?;
        self.continues = false;
        Ok(())
    }

    /// Completes all requests and backups.
    fn store_all(&mut self) -> Result<(), Violation> {
        self.run_until_quiet()?;
        self.perform(Action::Wait(STORED_AFTER_US))?;
        self.plan()?;
        self.run_until_quiet()
    }

    /// Clears device and host. Waiting requests can then get the pages only from L3.
    fn forget_memory(&mut self) -> Result<(), Violation> {
        self.uses.clear();
        self.perform(Action::Clear)?;
        for asked in self.asked.values_mut() {
            for (place, key) in asked.places.iter_mut().zip(&asked.keys) {
                if matches!(place, Place::Device | Place::Host)
                    && self.stage.world.l3.contains_key(key)
                {
                    *place = Place::L3;
                }
            }
        }
        Ok(())
    }

    // ---- requests ----

    fn submit_text(&mut self) -> Result<(), Violation> {
        let text = self.dice.below(TEXTS) as u32;
        self.submit(Opening::Text(1 + 1_000 * text), 8 + text, false)
    }

    /// Submits a prompt of `pages` pages of a text (a unique one, if the text is 0) and a unique
    /// suffix.
    fn submit(&mut self, opening: Opening, pages: u32, is_short: bool) -> Result<(), Violation> {
        self.next_own += 1;
        let own_start = 1_000_000 + 1_000 * self.next_own;
        let opening = match opening {
            Opening::Text(0) => Opening::Text(own_start + 500_000_000),
            other => other,
        };
        let short_tokens = (self.step_tokens / 4).clamp(1, self.page_size);
        let own_tokens = if is_short { short_tokens } else { 1 + self.dice.below(8) as u32 };
        let priority = i32::from(self.dice.one_in(4));
        let drawn = 1 + self.dice.below(3 * u64::from(self.page_size)) as u32;
        let new_tokens = self.new_tokens.take().unwrap_or(drawn);
        let siblings = if is_short { 0 } else { self.answers.siblings() };
        let before = self.stage.live.len();
        self.perform(Action::Submit {
            opening,
            opening_tokens: pages * self.page_size,
            own_tokens,
            own_start,
            new_tokens,
            priority,
            namespace: 0,
            stops_at_once: false,
            wishes: RequestOptions::default(),
            siblings,
        })?;
        for place in before..self.stage.live.len() {
            let (id, siblings) = (self.stage.live[place], self.stage.live[before..place].to_vec());
            self.expect_hits(id, is_short, priority, siblings);
        }
        self.plan()
    }

    /// Records the available pages of a new request.
    fn expect_hits(
        &mut self,
        id: RequestId,
        is_short: bool,
        priority: i32,
        siblings: Vec<RequestId>,
    ) {
        let scheduler = &self.stage.world.scheduler;
        let tokens = scheduler.tokens(id).expect("it is live").to_vec();
        let cached = scheduler.cached(&tokens, "", "");
        let on_device = cached.device_pages as usize;
        let in_memory = on_device + cached.host_pages as usize;
        let keys = self.keys(&tokens);
        let pages_max = (tokens.len() - 1) / self.page_size as usize;
        let others: BTreeSet<PageKey> =
            self.asked.values().flat_map(|asked| asked.keys.iter().copied()).collect();
        let now = self.now();
        let place = |page: usize| match keys[page] {
            _ if page < on_device => Some(Place::Device),
            _ if page < in_memory => Some(Place::Host),
            key if self.stage.world.l3.contains_key(&key) => Some(Place::L3),
            key if others.contains(&key) => Some(Place::Another),
            key => {
                let stored = self.ended_at.get(&key).is_some_and(|at| at + STORED_AFTER_US < now);
                stored.then_some(Place::Nowhere)
            }
        };
        let mut places: Vec<Place> = (0..pages_max).map_while(place).collect();
        // Fewer pages are not fetched.
        let from_l3 = places.iter().filter(|&&place| place == Place::L3).count();
        if from_l3 < self.threshold
            && let Some(first) = places.iter().position(|&place| place == Place::L3)
        {
            places.truncate(first);
        }
        if self.measures {
            for (page, &key) in keys.iter().enumerate().take(pages_max) {
                if self.is_recent(key) {
                    let counted = match self.continues {
                        true => &mut self.taken.continued,
                        false => &mut self.taken.recent,
                    };
                    counted.0 += 1;
                    counted.1 += u64::from(page < on_device);
                    if let Some(story) = self.account.story.as_mut().filter(|_| page >= on_device) {
                        story.push_str(&format!(
                            "  {id} comes for page {page}, recently used, and not on device\n"
                        ));
                    }
                }
            }
        }
        // Pages that have left the device are counted once.
        for key in keys.iter().skip(on_device) {
            self.uses.entry(*key).and_modify(|(at, _)| *at = 0);
        }
        // Evicted pages lose their claim; former priority does not count when they return.
        for key in keys.iter().skip(in_memory) {
            self.uses.remove(key);
        }
        // A request without a slot or memory waits for those, and not for long prompts.
        let stats = self.stage.world.scheduler.stats();
        let room_for_all =
            stats.waiting as usize * LONG_PAGES < stats.cache.device.available_pages();
        let is_short = is_short && room_for_all && stats.waiting + stats.running < RUNNING_MAX;
        let (steps_before, counts) = (self.steps, self.measures);
        let others = self.asked.keys().copied().collect();
        self.asked.insert(
            id,
            Asked {
                keys,
                places,
                steps_before,
                others,
                siblings,
                pages_max,
                is_short,
                priority,
                counts,
            },
        );
    }

    fn keys(&self, tokens: &[u32]) -> Vec<PageKey> {
        let namespace = self.stage.world.scheduler.namespace_of("", "");
        Sequence::new(namespace, self.page_size, tokens.to_vec()).keys().iter().collect()
    }

    /// Returns whether a page was used so recently that a device of a quarter of the size would
    /// still hold it. Under eviction by priority only urgent pages count, but against others at any
    /// age.
    fn is_recent(&self, key: PageKey) -> bool {
        let Some(&(used, by)) = self.uses.get(&key) else { return false };
        if used == 0 || (self.by_priority && by == 0) {
            return false;
        }
        let recent = self.device_pages / if self.by_priority { 3 } else { 4 };
        let counts = |&&(at, by): &&(u64, i32)| at > used && (!self.by_priority || by > 0);
        self.uses.values().filter(counts).count() < recent
    }

    fn note_use(&mut self, keys: &[PageKey], priority: i32) {
        self.clock += 1;
        for &key in keys {
            let (at, by) = self.uses.entry(key).or_insert((0, 0));
            (*at, *by) = (self.clock, priority.max(*by));
        }
    }

    /// Counts the reuse of requests with a first token, and records the uses of ended ones.
    fn count_hits(&mut self) {
        let scheduler = &self.stage.world.scheduler;
        let mut used = Vec::new();
        for &id in &self.stage.live {
            let state = scheduler.state(id);
            if !matches!(state, Some(StateName::Decoding | StateName::Draining)) {
                continue;
            }
            if let Some(asked) = self.asked.remove(&id) {
                for (key, place) in asked.keys.iter().zip(&asked.places).filter(|_| asked.counts) {
                    let computed = self.computed.get(key);
                    let by = |id: &RequestId| computed.is_some_and(|by| by.contains(id));
                    let had = match place {
                        // The first of them computes it, once.
                        Place::Another => !by(&id) || !asked.others.iter().any(by),
                        Place::Device | Place::Host | Place::L3 | Place::Nowhere => !by(&id),
                    };
                    let counted = self.taken.places.entry(*place).or_default();
                    counted.0 += 1;
                    counted.1 += u64::from(had);
                    if let Some(story) = self.account.story.as_mut().filter(|_| !had) {
                        story.push_str(&format!(
                            "  {id} missed {key:?}, which was to be had: {place:?}\n"
                        ));
                    }
                }
                for key in asked.keys.iter().take(asked.pages_max) {
                    if !asked.counts || asked.siblings.is_empty() {
                        break;
                    }
                    let computed = self.computed.get(key);
                    let by = |id: &RequestId| computed.is_some_and(|by| by.contains(id));
                    let twice = by(&id) && asked.siblings.iter().any(by);
                    self.taken.answered.0 += 1;
                    self.taken.answered.1 += u64::from(twice);
                    if let Some(story) = self.account.story.as_mut().filter(|_| twice) {
                        story.push_str(&format!("  {id} computed {key:?}, as a sibling did\n"));
                    }
                }
                if asked.counts && asked.is_short {
                    self.taken.short.0 += 1;
                    self.taken.short.1 += self.steps - asked.steps_before;
                }
                used.push((asked.keys, asked.priority));
            }
            if state == Some(StateName::Draining) {
                let tokens = scheduler.tokens(id).expect("it is live").to_vec();
                let keys = self.keys(&tokens[..tokens.len() - 1]);
                let now = self.now();
                self.ended_at.extend(keys.iter().map(|&key| (key, now)));
                used.push((keys, 0));
            }
        }
        for (keys, priority) in used {
            self.note_use(&keys, priority);
        }
    }

    // ---- time ----

    fn now(&self) -> u64 {
        self.stage.world.now.0
    }

    /// Performs an action, a moment later.
    fn perform(&mut self, action: Action) -> Result<(), Violation> {
        self.stage.world.now.0 += 1 + self.dice.below(20);
        let at = self.now();
        let performed = self.stage.perform(&action);
        if let Some(story) = &mut self.account.story {
            trace_action(story, at, &action, &mut self.stage);
        }
        performed
    }

    /// Processes a few events.
    fn go_on(&mut self, things: u64) -> Result<(), Violation> {
        for _ in 0..things {
            if !self.next_thing()? {
                break;
            }
        }
        Ok(())
    }

    fn run_until_quiet(&mut self) -> Result<(), Violation> {
        for _ in 0..20_000 {
            if !self.next_thing()? {
                return Ok(());
            }
        }
        Err(Violation::Unending(format!("{:?} in a world that means well", self.stage.live)))
    }

    /// Processes the next event and plans. Returns false if there is none.
    fn next_thing(&mut self) -> Result<bool, Violation> {
        let next_report = self.due.iter().copied().min();
        let deadline = self.stage.world.scheduler.deadline().map(|time| time.0);
        let Some(next) = [next_report, self.step_due, deadline].into_iter().flatten().min() else {
            return Ok(false);
        };
        let passes = next.saturating_sub(self.now());
        let stats = self.stage.world.scheduler.stats();
        if self.measures && stats.waiting + stats.running > 0 {
            let idle = next_report.is_none() && self.step_due.is_none();
            self.taken.busy_us.0 += passes;
            self.taken.busy_us.1 += if idle { passes } else { 0 };
        }
        self.stage.world.now.0 += passes;
        if next_report == Some(next) {
            self.report()?;
        } else if self.step_due == Some(next) {
            self.step_due = None;
            self.steps += 1;
            self.perform(Action::Compute(1))?;
            self.count_hits();
        }
        self.plan()?;
        Ok(true)
    }

    fn plan(&mut self) -> Result<(), Violation> {
        self.account.plans += 1;
        self.perform(Action::Plan)?;
        if self.stage.world.in_step() && self.step_due.is_none() {
            let prefills = &self.stage.world.last_plan().prefills;
            let tokens: u64 = prefills.iter().map(|prefill| u64::from(prefill.tokens)).sum();
            for prefill in prefills {
                let Some(asked) = self.asked.get(&prefill.request) else { continue };
                let end = (prefill.start + prefill.tokens).div_ceil(self.page_size) as usize;
                let pages = (prefill.start / self.page_size) as usize..end.min(asked.keys.len());
                for &key in &asked.keys[pages] {
                    self.computed.entry(key).or_default().insert(prefill.request);
                }
            }
            self.step_due = Some(self.now() + 300 + self.dice.below(300) + tokens * 1_000);
        }
        let device = self.stage.world.scheduler.stats().cache.device;
        if device.available_pages() * 3 < device.total_pages {
            // Running requests need most of the device, so no other page must stay.
            self.uses.values_mut().for_each(|(at, _)| *at = 0);
        }
        let slowness = match self.trouble {
            Trouble::None | Trouble::Fails | Trouble::Missing => (1, 1),
            Trouble::Hangs => (10_000, 10_000),
            Trouble::Slow => (300, 300),
            Trouble::Dear => (1, 60),
        };
        while self.due.len() < self.stage.owed.len() {
            let (op, _) = self.stage.owed[self.due.len()];
            let takes = match self.stage.world.transfers.get(&op) {
                Some(Transfer::LoadBack(..) | Transfer::WriteBack(..)) | None => {
                    50 + self.dice.below(200)
                }
                Some(Transfer::Probe(_)) => (200 + self.dice.below(500)) * slowness.0,
                Some(Transfer::Prefetch(keys, _) | Transfer::Backup(keys, _)) => {
                    let pages = keys.len() as u64;
                    (300 + 20 * pages + self.dice.below(500)) * slowness.1
                }
            };
            self.due.push(self.now() + takes);
        }
        Ok(())
    }

    fn report(&mut self) -> Result<(), Violation> {
        let place = (0..self.due.len()).min_by_key(|&place| self.due[place]).expect("one is owed");
        self.due.remove(place);
        let (op, _) = self.stage.owed[place];
        let is_l3 = !matches!(
            self.stage.world.transfers.get(&op),
            Some(Transfer::LoadBack(..) | Transfer::WriteBack(..)) | None
        );
        let outcome = match self.trouble {
            Trouble::Fails if is_l3 => Outcome::Failed,
            Trouble::Missing if is_l3 => Outcome::Missing,
            Trouble::None
            | Trouble::Fails
            | Trouble::Hangs
            | Trouble::Slow
            | Trouble::Dear
            | Trouble::Missing => Outcome::Done,
        };
        self.perform(Action::Report(place as u32, outcome))
    }
}

fn draw_config(dice: &mut Dice) -> Config {
    let page_size = dice.pick(&[2, 4, 8]);
    Config::builder()
        .page_size(page_size)
        .device_pages(dice.pick(&[120, 150]))
        .kv_event_keys_max(0)
        .host_pages(dice.pick(&[200, 300]))
        .ranks(dice.pick(&[1, 1, 2]))
        .eviction(dice.pick(&[EvictionKind::Lru, EvictionKind::Lru, EvictionKind::Priority]))
        .batch(BatchConfig {
            running_max: RUNNING_MAX,
            step_tokens_max: (4 * page_size).max(8),
            mixed: !dice.one_in(4),
            ..BatchConfig::default()
        })
        .queue(QueueConfig {
            order: dice.pick(&[AdmissionOrder::Arrival, AdmissionOrder::Priority]),
            // Some wait for each other, others take over published pages.
            share_wait_max_ms: dice.pick(&[60_000, 5]),
            ..QueueConfig::default()
        })
        .copies(CopyConfig::default())
        .l3(L3Config {
            prefetch_threshold_pages: dice.pick(&[1, 4]),
            prefetch: dice.pick(&[
                PrefetchPolicy::BestEffort,
                PrefetchPolicy::Wait { max_ms: 1_000 },
                PrefetchPolicy::Deadline { base_ms: 100, per_page_us: 500 },
            ]),
            probe_timeout_ms: 50,
            negative_ttl_ms: 1_000,
            backoff_base_ms: 10,
            backoff_max_ms: 1_000,
            ..L3Config::default()
        })
        // Computing a token takes a millisecond, so loading always pays.
        .rates(RateConfig { prefill_ns_per_token: 1_000_000, ..RateConfig::default() })
        .build()
        .expect("what is drawn is legal")
}
