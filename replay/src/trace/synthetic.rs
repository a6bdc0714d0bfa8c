//! Synthetic traces: the same seed gives the same trace on every machine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use terrace_kit::Dice;

use super::{Trace, TraceBuilder, Turn};
use crate::draws::Draws;

/// Largest prompt.
const PROMPT_TOKENS_MAX: u32 = 131_072;

/// Largest number of requests: they are held in memory.
const REQUESTS_MAX: u32 = 1_000_000;

/// Share of the turns of a mix that follow a break.
const BREAKS_PERCENT: u64 = 15;
/// Median length of a break.
const BREAK_MEDIAN_S: f64 = 300.0;

/// Kind of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Chat: a few shared system prompts, and conversations that grow turn by turn.
    Chat,
    /// Agents with tools: long shared instructions, many quick turns with tool results, and
    /// occasional sub-agents with the same context.
    Agents,
    /// Questions about long documents, of which a few are popular.
    Documents,
    /// Chat in bursts: half a minute of every five minutes has most of the traffic.
    Bursts,
    /// Chat, agents and documents together, with users who take breaks: their context has left the
    /// device and in part the host.
    Mix,
}

/// Parameters of a synthetic trace.
#[derive(Clone, Copy, Debug)]
pub struct Synthetic {
    /// Kind of traffic.
    pub workload: Workload,
    /// Number of requests.
    pub requests: u32,
    /// Approximate requests per second.
    pub rate_per_s: f64,
    /// Seed; another seed is another day of the same kind.
    pub seed: u64,
    /// Tokens in a block: common prefixes are multiples of it.
    pub block_tokens: u32,
}

/// Invalid parameters of a synthetic trace.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SyntheticError(String);

impl Default for Synthetic {
    fn default() -> Self {
        Self {
            workload: Workload::Mix,
            requests: 5_000,
            rate_per_s: 4.0,
            seed: 0,
            block_tokens: 512,
        }
    }
}

impl Synthetic {
    /// Generates the trace.
    ///
    /// # Errors
    /// Returns the invalid parameter and its limit.
    pub fn trace(&self) -> Result<Trace, SyntheticError> {
        if !(1..=REQUESTS_MAX).contains(&self.requests) {
            let requests = self.requests;
            return Err(SyntheticError(format!("{requests} requests: use 1 to {REQUESTS_MAX}")));
        }
        if !(1e-3..=1e5).contains(&self.rate_per_s) {
            let rate = self.rate_per_s;
            return Err(SyntheticError(format!("{rate} requests per second: use 0.001 to 100000")));
        }
        let mut builder = TraceBuilder::new(self.block_tokens).map_err(SyntheticError)?;
        let mut users = Users::new(self);
        while builder.len() < self.requests as usize {
            let Coming { at_us, input_tokens, output_tokens, blocks, session, think_us, .. } =
                users.next();
            let turn = Turn { session, think_us };
            let pushed = builder.push_turn(at_us, input_tokens, output_tokens, &blocks, turn);
            pushed.map_err(SyntheticError)?;
        }
        Ok(builder.finish())
    }
}

/// A growing prompt.
#[derive(Clone, Default)]
struct Prompt {
    tokens: u32,
    blocks: Vec<u64>,
    session: u64,
    /// User's think time before the next turn.
    think_us: Option<u64>,
}

/// A future request, ordered by time.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Coming {
    at_us: u64,
    number: u64,
    input_tokens: u32,
    output_tokens: u32,
    blocks: Vec<u64>,
    session: u64,
    think_us: Option<u64>,
}

/// All simulated users.
struct Users {
    workload: Workload,
    block_tokens: u32,
    session_interval_s: f64,
    dice: Dice,
    /// Start of the next session, before bursts.
    clock_s: f64,
    coming: BinaryHeap<Reverse<Coming>>,
    sessions: u64,
    turns: u64,
    next_block: u64,
    system_prompts: Vec<Prompt>,
    instructions: Vec<Prompt>,
    documents: Vec<Prompt>,
}

impl Users {
    fn new(synthetic: &Synthetic) -> Self {
        // Mean requests per session, measured.
        let session_requests = match synthetic.workload {
            Workload::Chat | Workload::Bursts => 5.0,
            Workload::Agents => 13.8,
            Workload::Documents => 3.0,
            Workload::Mix => 6.8,
        };
        let mut users = Self {
            workload: synthetic.workload,
            block_tokens: synthetic.block_tokens,
            session_interval_s: session_requests / synthetic.rate_per_s,
            dice: Dice::new(synthetic.seed),
            clock_s: 0.0,
            coming: BinaryHeap::new(),
            turns: 0,
            sessions: 0,
            next_block: 0,
            system_prompts: Vec::new(),
            instructions: Vec::new(),
            documents: Vec::new(),
        };
        users.system_prompts = users.common_prompts(12, 900, 0.8);
        users.instructions = users.common_prompts(6, 6_000, 0.5);
        users.documents = users.common_prompts(400, 18_000, 0.8);
        users
    }

    /// Returns the next request. Starts all sessions that could come before it.
    fn next(&mut self) -> Coming {
        loop {
            let start_us = self.start_us();
            if self.coming.peek().is_some_and(|Reverse(turn)| turn.at_us <= start_us)
                && let Some(Reverse(turn)) = self.coming.pop()
            {
                return turn;
            }
            match self.workload {
                Workload::Chat | Workload::Bursts => self.chat(start_us),
                Workload::Agents => self.agent(start_us),
                Workload::Documents => self.reader(start_us),
                Workload::Mix => match self.dice.below(100) {
                    0..60 => self.chat(start_us),
                    60..85 => self.agent(start_us),
                    _ => self.reader(start_us),
                },
            }
            self.clock_s += self.dice.exponential(self.session_interval_s);
        }
    }

    /// Returns the start of the next session. In bursts, three fifths of the time are compressed
    /// into a tenth.
    fn start_us(&self) -> u64 {
        let seconds = match self.workload {
            Workload::Bursts => {
                let (cycle, within) = (self.clock_s / 300.0, self.clock_s % 300.0);
                let pressed =
                    if within < 180.0 { within / 6.0 } else { 30.0 + (within - 180.0) * 2.25 };
                cycle.floor() * 300.0 + pressed
            }
            Workload::Chat | Workload::Agents | Workload::Documents | Workload::Mix => self.clock_s,
        };
        (seconds * 1e6) as u64
    }

    fn chat(&mut self, start_us: u64) {
        let mut prompt = pick(&mut self.dice, &self.system_prompts);
        self.begin_session(&mut prompt);
        let mut at_us = start_us;
        for _ in 0..self.dice.geometric(5.0) {
            let message = self.dice.skewed_tokens(90, 1.1, 8_000);
            let output = self.dice.skewed_tokens(260, 0.8, 4_000);
            if !self.turn(at_us, &mut prompt, message, output) {
                return;
            }
            at_us += self.answer_time_us(output) + self.think(&mut prompt, 25.0, 1.0);
        }
    }

    fn agent(&mut self, start_us: u64) {
        let mut prompt = pick(&mut self.dice, &self.instructions);
        self.begin_session(&mut prompt);
        let mut at_us = start_us;
        let mut next = self.dice.skewed_tokens(700, 0.8, 16_000);
        for _ in 0..self.dice.geometric(12.0) {
            let output = self.dice.skewed_tokens(110, 0.9, 4_000);
            if !self.turn(at_us, &mut prompt, next, output) {
                return;
            }
            at_us += self.answer_time_us(output) + self.think(&mut prompt, 2.0, 1.2);
            next = self.dice.skewed_tokens(600, 1.2, 24_000);
            if self.dice.percent(5) {
                for _ in 0..1 + self.dice.below(3) {
                    let mut helper = self.branch(&prompt);
                    self.begin_session(&mut helper);
                    let task = self.dice.skewed_tokens(300, 0.6, 4_000);
                    let output = self.dice.skewed_tokens(400, 0.7, 4_000);
                    self.turn(at_us, &mut helper, task, output);
                }
            }
        }
    }

    fn reader(&mut self, start_us: u64) {
        let mut prompt = pick(&mut self.dice, &self.documents);
        self.begin_session(&mut prompt);
        let mut at_us = start_us;
        for _ in 0..self.dice.geometric(3.0) {
            let question = self.dice.skewed_tokens(60, 0.7, 2_000);
            let output = self.dice.skewed_tokens(220, 0.7, 4_000);
            if !self.turn(at_us, &mut prompt, question, output) {
                return;
            }
            at_us += self.answer_time_us(output) + self.think(&mut prompt, 40.0, 1.0);
        }
    }

    /// Adds one request: the prompt so far and a new message. The answer becomes part of the
    /// prompt. Returns whether there was room for it.
    fn turn(&mut self, at_us: u64, prompt: &mut Prompt, message: u32, output: u32) -> bool {
        if prompt.tokens + message > PROMPT_TOKENS_MAX {
            return false;
        }
        self.extend(prompt, message);
        self.coming.push(Reverse(Coming {
            at_us,
            number: self.turns,
            input_tokens: prompt.tokens,
            output_tokens: output,
            blocks: prompt.blocks.clone(),
            session: prompt.session,
            think_us: prompt.think_us,
        }));
        self.turns += 1;
        self.extend(prompt, output);
        true
    }

    fn begin_session(&mut self, prompt: &mut Prompt) {
        prompt.session = self.sessions;
        self.sessions += 1;
    }

    /// Draws the think time or break before the next turn.
    fn think(&mut self, prompt: &mut Prompt, median_s: f64, spread: f64) -> u64 {
        let is_break = self.workload == Workload::Mix && self.dice.percent(BREAKS_PERCENT);
        let (median_s, spread) = if is_break { (BREAK_MEDIAN_S, 0.8) } else { (median_s, spread) };
        let think_us = seconds(self.dice.skewed(median_s, spread));
        prompt.think_us = Some(think_us);
        think_us
    }

    /// Returns the time that users wait for an answer, as on a mid-range machine.
    fn answer_time_us(&self, output: u32) -> u64 {
        500_000 + u64::from(output) * 20_000
    }

    fn extend(&mut self, prompt: &mut Prompt, tokens: u32) {
        prompt.tokens += tokens;
        while (prompt.blocks.len() as u64) * u64::from(self.block_tokens) < prompt.tokens.into() {
            prompt.blocks.push(self.next_block);
            self.next_block += 1;
        }
    }

    /// Returns a copy of a prompt. A partial last block continues differently, so it is not shared.
    fn branch(&mut self, prompt: &Prompt) -> Prompt {
        let mut branch = prompt.clone();
        if !branch.tokens.is_multiple_of(self.block_tokens) {
            branch.blocks.pop();
            branch.blocks.push(self.next_block);
            self.next_block += 1;
        }
        branch
    }

    /// Creates shared prompts of whole blocks.
    fn common_prompts(&mut self, count: u32, median: u32, spread: f64) -> Vec<Prompt> {
        let make = |_| {
            let tokens = self.dice.skewed_tokens(median, spread, PROMPT_TOKENS_MAX - 10_000);
            let mut prompt = Prompt::default();
            self.extend(&mut prompt, tokens.next_multiple_of(self.block_tokens));
            prompt
        };
        (0..count).map(make).collect()
    }
}

fn pick(dice: &mut Dice, prompts: &[Prompt]) -> Prompt {
    prompts[dice.popular(prompts.len() as u64) as usize].clone()
}

fn seconds(seconds: f64) -> u64 {
    (seconds.min(86_400.0) * 1e6) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Workload; 5] =
        [Workload::Chat, Workload::Agents, Workload::Documents, Workload::Bursts, Workload::Mix];

    fn make(workload: Workload, seed: u64) -> Trace {
        let synthetic = Synthetic { workload, requests: 3_000, seed, ..Synthetic::default() };
        synthetic.trace().unwrap()
    }

    #[test]
    fn trace_depends_only_on_the_seed() {
        for workload in ALL {
            let trace = make(workload, 7);
            assert_eq!(trace.requests().len(), 3_000);
            assert_eq!(trace, make(workload, 7));
            assert_ne!(trace, make(workload, 8));
        }
    }

    #[test]
    fn synthetic_traffic_has_the_requested_rate_and_sharing() {
        for workload in ALL {
            let trace = make(workload, 1);
            let span_s = trace.requests().last().unwrap().arrival_us as f64 / 1e6;
            let rate = 3_000.0 / span_s;
            assert!((2.0..8.0).contains(&rate), "{workload:?}: {rate} a second");
            let reuse = trace.ceiling(16).ratio();
            let expected = match workload {
                Workload::Chat | Workload::Bursts => 0.5..0.95,
                Workload::Agents | Workload::Documents | Workload::Mix => 0.7..0.97,
            };
            assert!(expected.contains(&reuse), "{workload:?}: {reuse}");
        }
    }

    #[test]
    fn bursts_concentrate_traffic() {
        let busiest_minute = |workload| {
            let trace = make(workload, 3);
            let mut minutes = [0; 1000];
            for request in trace.requests() {
                minutes[(request.arrival_us / 60_000_000) as usize] += 1;
            }
            minutes.into_iter().max().unwrap()
        };
        let (bursts, chat) = (busiest_minute(Workload::Bursts), busiest_minute(Workload::Chat));
        assert!(bursts * 2 > chat * 3, "{bursts} against {chat}");
    }

    #[test]
    fn rejects_invalid_values_with_the_limit() {
        let refusal = |synthetic: Synthetic| synthetic.trace().unwrap_err().to_string();
        let usual = Synthetic::default();
        assert!(refusal(Synthetic { requests: 0, ..usual }).contains("use 1 to 1000000"));
        assert!(refusal(Synthetic { rate_per_s: f64::NAN, ..usual }).contains("0.001 to 100000"));
        assert!(refusal(Synthetic { block_tokens: 0, ..usual }).contains("1 to 65536"));
    }
}
