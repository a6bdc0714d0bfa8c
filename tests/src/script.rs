//! Scripts: short readable texts, run in a [`World`], with a trace of the results. The audit runs
//! after every line.
//!
//! Comments (`#`) and settings are copied to the trace. Every other line is followed by the
//! resulting plan or errors, the changes of state, the cached length of each prompt on device and
//! (behind that) on host, and the number of pages in use by tier; `held` pages cannot be evicted at
//! present.
//!
//! | line | what it does |
//! |---|---|
//! | `set KEY = VALUE` | a setting, as in a configuration file; before anything else |
//! | `submit ID TOKENS new=N` | and `priority=N`, `adapter=X`, `salt=X`, `computes_prompt=true`, `waits_for_tokens=true`, `passage=3..7:ab` (content of these positions, in hexadecimal digits), `reads=TIER` and `writes=TIER` (`nothing`, `device`, `host` or `l3`: how far), `whole=3..7` or `whole=3..7:ab` (not to be cut), `siblings=r2,r3` (further answers to the same prompt); TOKENS like `1-8+100-103` |
//! | `run ID TOKENS new=N` | `submit`, then plans, steps and `done` until idle; its plans are not shown |
//! | `abort ID` | cancels a request |
//! | `priority ID N` | sets the priority of a request |
//! | `last ID` | its next tokens are its last |
//! | `plan` | requests a plan and starts it |
//! | `compute` | performs the first step in flight |
//! | `step` | `plan`, then `compute` |
//! | `break`, `break ID` | the first step in flight fails, or one request's part of it |
//! | `done OP`, `partial OP N`, `missing OP`, `failed OP`, `corrupt OP`, `corrupt OP N`, `called-off OP N`, `timeout OP` | the outcome of an operation; `rank=N` for one rank of several, otherwise all |
//! | `unreported done OP`, … | the result of a load-back, before it is reported: a step may read its pages |
//! | `wait MS` | time passes |
//! | `accept N` | decodes accept at most N tokens |
//! | `forget`, `forget KEY` | L3 loses everything, or one page: its key as the trace shows it |
//! | `clear` | evicts all unpinned pages |
//! | `deadline` | prints the scheduler's next deadline |
//! | `events` | prints the KV events with their numbers, or a snapshot, if some were lost |
//! | `completed` | prints the requests that the last plan reported as complete |
//! | `stats KEY…` | prints counters |

use std::fmt::Write;
use std::ops::Range;

use terrace_scheduler::{
    AdapterId, Config, ContentKey, CopyDirection, KvEvent, KvEvents, L3Kind, OpId, Outcome,
    PageKey, Passage, Plan, Reach, Request, RequestId, Sequence, Token,
};

use crate::world::World;

/// Runs a script and returns its trace.
///
/// # Errors
/// Returns the error in the script.
///
/// # Panics
/// Panics if an audit fails or the engine reads a wrong page: then Terrace has a bug, not the
/// script.
pub fn run(script: &str) -> Result<String, String> {
    let lines = || script.lines().map(str::trim).filter(|line| !line.is_empty());
    let settings: String = lines()
        .filter_map(|line| line.strip_prefix("set "))
        .map(|setting| format!("{setting}\n"))
        .collect();
    let mut config: Config = toml::from_str(&settings).map_err(|error| error.to_string())?;
    config.trace_max = 10_000;
    let world = World::new(config).map_err(|error| error.to_string())?;
    let mut player = Player {
        world,
        prompts: Vec::new(),
        in_use: String::new(),
        events: KvEvents::default(),
        trace: String::new(),
    };
    player.in_use = player.pages_in_use();
    // Events are recorded from the start.
    player.world.scheduler.drain_kv_events(&mut player.events);
    for line in lines() {
        // Comments and settings explain the trace.
        if line.starts_with('#') || line.starts_with("set ") {
            writeln!(player.trace, "{line}").expect("writing to a string");
            continue;
        }
        writeln!(player.trace, "> {line}").expect("writing to a string");
        player.play(line).map_err(|error| format!("`{line}`: {error}"))?;
        player.after_line();
    }
    Ok(player.trace)
}

struct Player {
    world: World,
    /// Prompts so far, whose cached lengths are traced.
    prompts: Vec<Prompt>,
    /// Pages in use by tier, as last traced.
    in_use: String,
    events: KvEvents,
    trace: String,
}

struct Prompt {
    name: String,
    request: Request,
    cached: (u32, u32),
}

macro_rules! say {
    ($player:expr, $($message:tt)+) => {
        writeln!($player.trace, $($message)+).expect("writing to a string")
    };
}

impl Player {
    fn play(&mut self, line: &str) -> Result<(), String> {
        let mut words = line.split_whitespace();
        let command = words.next().unwrap_or_default();
        let words: Vec<&str> = words.collect();
        match command {
            "submit" => self.submit(&words)?,
            "run" => {
                self.submit(&words)?;
                self.run_until_idle();
            }
            "abort" => {
                if let Err(error) = self.world.scheduler.abort(self.world.now, request(&words, 0)?)
                {
                    say!(self, "  error: {error}");
                }
            }
            "priority" => {
                let (id, priority) = (request(&words, 0)?, number(&words, 1)?);
                if let Err(error) = self.world.scheduler.set_priority(id, priority) {
                    say!(self, "  error: {error}");
                }
            }
            "completed" => {
                let completed = &self.world.last_plan().completed;
                say!(self, "  {completed:?}");
            }
            "last" => {
                self.world.finishing.insert(request(&words, 0)?);
            }
            "plan" => self.plan(),
            "compute" => self.compute(),
            "step" => {
                self.plan();
                self.compute();
            }
            "break" if words.is_empty() => self.world.fail_step(),
            "break" => {
                let failed = Some(request(&words, 0)?);
                let done = self.world.finish_step_but(failed);
                done.unwrap_or_else(|wrong| panic!("{wrong}\n{}", self.trace));
            }
            "done" | "partial" | "missing" | "failed" | "corrupt" | "called-off" | "timeout" => {
                self.outcome(command, &words)?;
            }
            "unreported" => {
                let command = words.first().ok_or("which outcome?")?;
                let (op, outcome, ranks) = self.parse_outcome(command, &words[1..])?;
                ranks.for_each(|rank| self.world.arrive(op, rank, outcome));
            }
            "wait" => self.world.now.0 += number::<u64>(&words, 0)? * 1000,
            "accept" => self.world.accepted_tokens = number(&words, 0)?,
            "forget" if words.is_empty() => self.world.l3.clear(),
            "forget" => self.forget(words[0])?,
            "clear" => {
                self.world.scheduler.clear_cache();
            }
            "weights" => {
                let name = words.first().ok_or("give the weights a name")?;
                self.world.replace_weights(name).map_err(|error| error.to_string())?;
            }
            "deadline" => match self.world.scheduler.deadline() {
                Some(at) => {
                    let (now, at) = (self.world.now.0 / 1000, at.0.div_ceil(1000));
                    say!(self, "  it is {now} ms, plan again at {at} ms");
                }
                None => say!(self, "  none"),
            },
            "events" => self.events(),
            "stats" => self.stats(&words)?,
            other => return Err(format!("unknown command {other}")),
        }
        Ok(())
    }

    /// Traces transitions and changes of the cache, and runs the audit.
    fn after_line(&mut self) {
        let transitions: Vec<_> = self.world.scheduler.drain_trace().collect();
        for transition in transitions {
            say!(self, "  {transition}");
        }
        for prompt in &mut self.prompts {
            let Request { prompt: tokens, adapter, salt, passages, .. } = &prompt.request;
            let scheduler = &self.world.scheduler;
            let page_size = scheduler.config().cache.page_size;
            let namespace = scheduler.namespace_of(adapter, salt);
            let sequence = Sequence::with_passages(namespace, page_size, tokens.clone(), passages);
            let now = scheduler.cached_of(&sequence.expect("the scheduler took them"));
            let now = (now.device_pages, now.host_pages);
            if now != prompt.cached {
                prompt.cached = now;
                say!(self, "  cached of {}: {} on device, {} on host", prompt.name, now.0, now.1);
            }
        }
        let in_use = self.pages_in_use();
        if in_use != self.in_use {
            say!(self, "  pages in use: {in_use}");
            self.in_use = in_use;
        }
        self.world.scheduler.audit();
    }

    fn pages_in_use(&self) -> String {
        let usage = self.world.scheduler.stats().cache;
        let mut words = Vec::new();
        for (name, tier) in [("device", usage.device), ("host", usage.host)] {
            let used = tier.total_pages - tier.free_pages;
            let held = used - tier.evictable_pages;
            words.push(format!("{name} {used} ({held} held)"));
        }
        words.push(format!("L3 {}", self.world.l3.len()));
        words.join(", ")
    }

    /// Removes the page from L3 whose key starts with a text.
    fn forget(&mut self, start_of_key: &str) -> Result<(), String> {
        let key = self.world.l3.keys().copied().find(|&key| short(key) == start_of_key);
        self.world.l3.remove(&key.ok_or("L3 has no such page")?);
        Ok(())
    }

    fn submit(&mut self, words: &[&str]) -> Result<(), String> {
        let id = request(words, 0)?;
        let tokens = tokens(words.get(1).ok_or("which tokens?")?)?;
        let mut request = Request::new(id.0, tokens, 1);
        for word in &words[2..] {
            match word.split_once('=').ok_or("expected key=value")? {
                ("new", value) => request.max_new_tokens = parse(value)?,
                ("priority", value) => request.priority = parse(value)?,
                ("adapter", value) => value.clone_into(&mut request.adapter),
                ("salt", value) => value.clone_into(&mut request.salt),
                ("computes_prompt", value) => request.computes_prompt = parse(value)?,
                ("waits_for_tokens", value) => request.waits_for_tokens = parse(value)?,
                ("reads", value) => request.reads = tier(value)?,
                ("writes", value) => request.writes = tier(value)?,
                ("passage", value) => request.passages.push(passage(value, false)?),
                ("whole", value) => request.passages.push(passage(value, true)?),
                ("siblings", value) => {
                    let names = value.split(',').map(name);
                    request.siblings = names.collect::<Result<_, _>>()?;
                }
                (key, _) => return Err(format!("unknown key {key}")),
            }
        }
        match self.world.submit(request.clone()) {
            Ok(()) => {
                let known = self.prompts.iter().any(|prompt| {
                    let Request { prompt, adapter, salt, passages, .. } = &prompt.request;
                    (prompt, adapter, salt, passages)
                        == (&request.prompt, &request.adapter, &request.salt, &request.passages)
                });
                if !known {
                    let name = format!("{id}'s prompt");
                    self.prompts.push(Prompt { name, request, cached: (0, 0) });
                }
            }
            Err(error) => say!(self, "  error: {error}"),
        }
        Ok(())
    }

    fn plan(&mut self) {
        let plan = self.world.plan();
        let text = describe(plan);
        self.trace.push_str(&text);
    }

    fn compute(&mut self) {
        if self.world.in_step() {
            self.world.finish_step().unwrap_or_else(|wrong| panic!("{wrong}\n{}", self.trace));
        }
    }

    /// Executes plans successfully until the scheduler is idle.
    fn run_until_idle(&mut self) {
        let ranks = self.world.scheduler.config().model.ranks;
        loop {
            let plan = self.world.plan();
            if plan.is_idle() {
                return;
            }
            let copies = plan.copies.iter().map(|copy| copy.op);
            let ops: Vec<OpId> = copies.chain(plan.l3.iter().map(|op| op.op)).collect();
            self.compute();
            for (op, rank) in ops.into_iter().flat_map(|op| (0..ranks).map(move |r| (op, r))) {
                self.world.report(op, rank, Outcome::Done).expect("it was just planned");
            }
        }
    }

    fn outcome(&mut self, command: &str, words: &[&str]) -> Result<(), String> {
        let (op, outcome, ranks) = self.parse_outcome(command, words)?;
        for rank in ranks {
            if let Err(error) = self.world.report(op, rank, outcome) {
                say!(self, "  error: {error}");
            }
        }
        Ok(())
    }

    fn parse_outcome(
        &self,
        command: &str,
        words: &[&str],
    ) -> Result<(OpId, Outcome, Range<u32>), String> {
        let op = OpId(parse(words.first().and_then(|w| w.strip_prefix("op")).ok_or("which op?")?)?);
        let outcome = match command {
            "done" => Outcome::Done,
            "partial" => Outcome::Partial(number(words, 1)?),
            "missing" => Outcome::Missing,
            "failed" => Outcome::Failed,
            "corrupt" if words.get(1).is_some_and(|word| !word.starts_with("rank=")) => {
                Outcome::CorruptAfter(number(words, 1)?)
            }
            "corrupt" => Outcome::Corrupt,
            "called-off" => Outcome::CalledOff(number(words, 1)?),
            "timeout" => Outcome::TimedOut,
            other => return Err(format!("{other} is no outcome")),
        };
        let rank = words.iter().find_map(|word| word.strip_prefix("rank="));
        let ranks = match rank {
            Some(rank) => parse(rank)?..parse::<u32>(rank)? + 1,
            None => 0..self.world.scheduler.config().model.ranks,
        };
        Ok((op, outcome, ranks))
    }

    fn events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        self.world.scheduler.drain_kv_events(&mut events);
        if events.is_snapshot {
            say!(self, "  all that is held before event {}:", events.next);
        }
        for (number, event) in (events.first()..).zip(events.iter()) {
            let number = if events.is_snapshot { String::new() } else { format!("{number} ") };
            match event {
                KvEvent::Stored { tier, namespace, parent, keys, tokens, .. } => {
                    let (keys, namespace) = (short_keys(&keys), short(namespace));
                    let after = short(parent);
                    let tokens = ranges(&tokens);
                    say!(
                        self,
                        "  {number}stored on {tier:?} in {namespace}: {keys} after {after}, tokens {tokens}"
                    );
                }
                KvEvent::Removed { tier, namespace, keys } => {
                    let (keys, namespace) = (short_keys(&keys), short(namespace));
                    say!(self, "  {number}removed from {tier:?} in {namespace}: {keys}");
                }
                KvEvent::Cleared => say!(self, "  {number}cleared"),
            }
        }
        self.events = events;
    }

    fn stats(&mut self, keys: &[&str]) -> Result<(), String> {
        let stats = serde_json::to_value(self.world.scheduler.stats())
            .map_err(|error| error.to_string())?;
        for key in keys {
            let value = key.split('.').try_fold(&stats, |value, part| value.get(part));
            say!(self, "  {key} = {}", value.ok_or(format!("no counter {key}"))?);
        }
        Ok(())
    }
}

/// Formats a plan, in its order.
pub(crate) fn describe(plan: &Plan) -> String {
    let mut text = String::new();
    let mut line = |words: String| writeln!(text, "  {words}").expect("writing to a string");
    for prefill in &plan.prefills {
        let end = prefill.start + prefill.tokens;
        let last = if prefill.produces_token { ", last" } else { "" };
        let (slot, adapter) = (prefill.slot.0, with(prefill.adapter));
        let waits = prefill.waits_for.map_or_else(String::new, |op| format!(", waits for {op}"));
        line(format!(
            "prefill {} in slot {slot}: {}..{end}{adapter}{last}{waits}",
            prefill.request, prefill.start
        ));
    }
    for decode in &plan.decodes {
        let end = decode.start + decode.tokens;
        let input = decode.input.zip(plan.behind).map_or_else(String::new, |(row, step)| {
            format!(" from what row {row} of step {} produces", step.0)
        });
        line(format!(
            "decode {} in slot {}: {}..{end}{}{input}",
            decode.request,
            decode.slot.0,
            decode.start,
            with(decode.adapter)
        ));
    }
    if plan.repeats_max > 0 {
        line(format!("repeat at most {} times", plan.repeats_max));
    }
    for change in &plan.rows {
        let pages = pages(plan.row_pages(change));
        line(format!("row {} from {}: {pages}", change.slot.0, change.first_entry));
    }
    for copy in &plan.copies {
        let (device, host) = (pages(plan.device_pages(copy)), pages(plan.host_pages(copy)));
        line(match copy.direction {
            CopyDirection::LoadBack => format!("load-back {}: {host} -> {device}", copy.op),
            CopyDirection::WriteBack => format!("write-back {}: {device} -> {host}", copy.op),
        });
    }
    for op in &plan.l3 {
        let (keys, host) = (short_keys(plan.l3_keys(op)), pages(plan.l3_host_pages(op)));
        line(match op.kind {
            L3Kind::Probe => format!("probe {}: {keys}", op.op),
            L3Kind::Prefetch => format!("prefetch {}: {keys} -> {host}", op.op),
            L3Kind::Backup => format!("backup {}: {host} -> {keys}", op.op),
        });
    }
    for op in &plan.cancelled {
        line(format!("cancelled {op}"));
    }
    for ended in &plan.ended {
        let reason = ended.reason.map_or(String::new(), |reason| format!(" ({reason:?})"));
        line(format!("ended {}: {:?}{reason}", ended.request, ended.state));
    }
    if text.is_empty() {
        text.push_str("  nothing to do\n");
    }
    text
}

/// Formats the adapter of a row, if it has one.
fn with(adapter: AdapterId) -> String {
    if adapter.is_none() { String::new() } else { format!(" with adapter {}", adapter.0) }
}

fn pages<T: std::fmt::Debug>(pages: &[T]) -> String {
    pages.iter().map(|page| format!("{page:?}")).collect::<Vec<_>>().join(" ")
}

/// Formats tokens as in a script.
fn ranges(tokens: &[Token]) -> String {
    let runs = tokens.chunk_by(|a, b| a + 1 == *b);
    let run = |run: &[Token]| match run {
        [one] => one.to_string(),
        run => format!("{}-{}", run[0], run[run.len() - 1]),
    };
    runs.map(run).collect::<Vec<_>>().join("+")
}

fn short(key: PageKey) -> String {
    key.to_string()[..4].to_owned()
}

fn short_keys(keys: &[PageKey]) -> String {
    keys.iter().map(|&key| short(key)).collect::<Vec<_>>().join(" ")
}

fn request(words: &[&str], place: usize) -> Result<RequestId, String> {
    name(words.get(place).ok_or("which request?")?)
}

fn name(word: &str) -> Result<RequestId, String> {
    parse(word.strip_prefix('r').ok_or("a request is called r1, r2, …")?).map(RequestId)
}

fn number<N: std::str::FromStr>(words: &[&str], place: usize) -> Result<N, String> {
    parse(words.get(place).ok_or("a number is missing")?)
}

fn parse<N: std::str::FromStr>(word: &str) -> Result<N, String> {
    word.parse().map_err(|_| format!("{word} is not a number here"))
}

/// Parses `3..7` or `3..7:ab`: positions, and their content.
fn passage(text: &str, is_whole: bool) -> Result<Passage, String> {
    let (positions, content) = text.split_once(':').map_or((text, None), |(p, c)| (p, Some(c)));
    let (start, end) = positions.split_once("..").ok_or("a passage is written like 3..7:ab")?;
    let digits = |text| u128::from_str_radix(text, 16).map(ContentKey);
    let content = content.map(digits).transpose().map_err(|error| error.to_string())?;
    Ok(Passage { start: parse(start)?, end: parse(end)?, content, is_whole })
}

fn tier(text: &str) -> Result<Reach, String> {
    serde_json::from_value(text.into()).map_err(|error| error.to_string())
}

/// Parses tokens: `1-8+100-103` is 1 to 8, then 100 to 103; `none` is no token.
fn tokens(text: &str) -> Result<Vec<Token>, String> {
    if text == "none" {
        return Ok(Vec::new());
    }
    let mut tokens = Vec::new();
    for part in text.split('+') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        tokens.extend(parse::<Token>(first)?..=parse(last)?);
    }
    Ok(tokens)
}
