//! Import of traffic in other formats than Mooncake's.

mod bench;
mod conversations;
mod tables;
mod text;
mod time;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use terrace_kit::Dice;

use super::{BadLine, BadLines, Reading, TraceBuilder, TraceError, Turn};
use crate::draws::Draws;
use text::block_ids;

/// A traffic format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Mooncake's traces: one request per line, with the blocks of its prompt.
    Mooncake,
    /// Azure's CSV of LLM inference: TIMESTAMP, ContextTokens, GeneratedTokens.
    Azure,
    /// BurstGPT's CSV: Timestamp, Model, Request tokens, Response tokens and more.
    BurstGpt,
    /// ShareGPT conversations: a JSON array, or one conversation per line.
    ShareGpt,
    /// OpenAI-style messages, one request or conversation per line.
    OpenAi,
    /// Detailed output of vLLM's and SGLang's serving benchmarks.
    Bench,
}

/// A tokenizer.
pub type Tokenise<'a> = &'a dyn Fn(&str) -> Result<Vec<u32>, String>;

/// Options of an import.
#[derive(Clone, Copy)]
pub struct ImportOptions<'a> {
    /// Format; detected from the start of the file if absent.
    pub format: Option<Format>,
    /// Tokens in a block; 16 by default.
    pub block_tokens: Option<u32>,
    /// Handling of invalid lines.
    pub bad_lines: BadLines,
    /// Requests per second, for traffic without times.
    pub rate_per_s: f64,
    /// Seed of unknown times.
    pub seed: u64,
    /// Tokenizer; by default four characters are a token.
    pub tokenise: Option<Tokenise<'a>>,
}

impl std::fmt::Debug for ImportOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImportOptions").field("format", &self.format).finish_non_exhaustive()
    }
}

impl Default for ImportOptions<'_> {
    fn default() -> Self {
        Self {
            format: None,
            block_tokens: None,
            bad_lines: BadLines::default(),
            rate_per_s: 4.0,
            seed: 0,
            tokenise: None,
        }
    }
}

/// Default tokens in a block: a typical page.
const BLOCK_TOKENS: u32 = 16;
/// Default median of a user's think time.
const THINK_S: f64 = 20.0;
/// Largest number of ignored columns that are named.
const IGNORED_MAX: usize = 40;
/// Bytes read to detect the format.
const BEGINNING_BYTES: usize = 64 << 10;

/// A conversation on its way to a trace: turns whose prompts extend each other.
#[derive(Debug, Default)]
struct Conversation {
    /// First line in the file.
    line: u64,
    session: Option<u64>,
    /// Tokens of all prompts and answers but the last; empty if only lengths are known.
    tokens: Vec<u32>,
    turns: Vec<Length>,
}

/// A turn of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Length {
    /// Arrival time, if known; unit and origin are common to all.
    at_us: Option<u64>,
    input_tokens: u32,
    output_tokens: u32,
}

/// Receiver of a reader's conversations and errors.
struct Sink<'a> {
    options: &'a ImportOptions<'a>,
    file: String,
    /// Current line, or index of the conversation in formats without lines.
    line: u64,
    conversations: Vec<Conversation>,
    skipped_lines: u64,
    skipped: Vec<BadLine>,
    ignored: BTreeSet<String>,
}

impl super::Trace {
    /// Reads traffic of any format, plain or gzip.
    ///
    /// # Errors
    /// Returns the invalid line.
    pub fn import(path: &Path, options: &ImportOptions<'_>) -> Result<Reading, TraceError> {
        let file = File::open(path)
            .map_err(|source| TraceError::Open { path: path.to_owned(), source })?;
        Self::import_from(file, &path.display().to_string(), options)
    }

    /// Reads traffic from any source; `name` is used in errors.
    ///
    /// # Errors
    /// Same as [`Trace::import`](super::Trace::import).
    pub fn import_from(
        input: impl Read,
        name: &str,
        options: &ImportOptions<'_>,
    ) -> Result<Reading, TraceError> {
        let broken = |source| TraceError::Input { file: name.to_owned(), source };
        let mut input = BufReader::with_capacity(BEGINNING_BYTES, input);
        let is_packed = input.fill_buf().map_err(broken)?.starts_with(&[0x1f, 0x8b]);
        let mut input: Box<dyn BufRead + '_> = match is_packed {
            true => Box::new(BufReader::with_capacity(BEGINNING_BYTES, MultiGzDecoder::new(input))),
            false => Box::new(input),
        };
        let format = match options.format {
            Some(format) => format,
            None => Format::of(input.fill_buf().map_err(broken)?),
        };
        let mut sink = Sink {
            options,
            file: name.to_owned(),
            line: 1,
            conversations: Vec::new(),
            skipped_lines: 0,
            skipped: Vec::new(),
            ignored: BTreeSet::new(),
        };
        match format {
            Format::Mooncake => {
                let block_tokens = options.block_tokens;
                let options = super::ReadOptions { block_tokens, bad_lines: options.bad_lines };
                return Self::read_from(input, name, &options);
            }
            Format::Azure => tables::read_azure(input, &mut sink)?,
            Format::BurstGpt => tables::read_burst_gpt(input, &mut sink)?,
            Format::ShareGpt => conversations::read_share_gpt(input, &mut sink)?,
            Format::OpenAi => conversations::read_open_ai(input, &mut sink)?,
            Format::Bench => bench::read(input, &mut sink)?,
        }
        sink.finish()
    }
}

impl Format {
    /// All formats with their names.
    pub const ALL: [(&'static str, Self); 6] = [
        ("mooncake", Self::Mooncake),
        ("azure", Self::Azure),
        ("burstgpt", Self::BurstGpt),
        ("sharegpt", Self::ShareGpt),
        ("openai", Self::OpenAi),
        ("bench", Self::Bench),
    ];

    /// Detects the format by the start of a file; Mooncake's by default.
    #[must_use]
    pub fn of(beginning: &[u8]) -> Self {
        let text = String::from_utf8_lossy(beginning);
        let text = text.trim_start_matches('\u{feff}').trim_start();
        let first = text.lines().next().unwrap_or_default();
        let has = |name: &str| text.contains(&format!("\"{name}\""));
        match text.chars().next() {
            Some('[') => Self::ShareGpt,
            Some('{') if has("hash_ids") => Self::Mooncake,
            Some('{') if has("conversations") => Self::ShareGpt,
            Some('{') if has("messages") => Self::OpenAi,
            Some('{') if has("input_lens") || has("request_rate") => Self::Bench,
            Some(_) if first.contains("ContextTokens") => Self::Azure,
            Some(_) if first.contains("Request tokens") => Self::BurstGpt,
            Some(_) | None => Self::Mooncake,
        }
    }
}

impl Sink<'_> {
    fn push(&mut self, conversation: Conversation) {
        self.conversations.push(Conversation { line: self.line, ..conversation });
    }

    /// Records an invalid line.
    fn turn_down(&mut self, line: u64, problem: String) -> Result<(), TraceError> {
        let bad_line = BadLine { file: self.file.clone(), line, problem };
        match self.options.bad_lines {
            BadLines::Refuse => return Err(TraceError::Line(bad_line)),
            BadLines::Skip => {
                self.skipped_lines += 1;
                if self.skipped.len() < super::read::NAMED_MAX {
                    self.skipped.push(bad_line);
                }
            }
        }
        Ok(())
    }

    /// Records ignored columns or fields.
    fn ignore<'n>(&mut self, names: impl Iterator<Item = &'n str>) {
        for name in names {
            if self.ignored.len() < IGNORED_MAX && !self.ignored.contains(name) {
                self.ignored.insert(name.to_owned());
            }
        }
    }

    fn input_error(&self, source: std::io::Error) -> TraceError {
        TraceError::Input { file: self.file.clone(), source }
    }

    /// Tokenizes text.
    fn tokens(&self, text: &str) -> Result<Vec<u32>, String> {
        match self.options.tokenise {
            Some(tokenise) => tokenise(text),
            None => Ok(text::tokens_by_length(text)),
        }
    }

    fn finish(mut self) -> Result<Reading, TraceError> {
        let block_tokens = self.options.block_tokens.unwrap_or(BLOCK_TOKENS);
        let mut builder = TraceBuilder::new(block_tokens).map_err(TraceError::BlockTokens)?;
        let all = || self.conversations.iter().flat_map(|conversation| &conversation.turns);
        let requests = all().count();
        if requests == 0 {
            return Err(match self.skipped.into_iter().next() {
                Some(first) => TraceError::NothingLeft(first),
                None => TraceError::Empty { file: self.file },
            });
        }
        let first_us = all().filter_map(|turn| turn.at_us).min().unwrap_or(0);
        // Conversations without times start in sequence, so that requests arrive at the rate.
        let turns_each = requests as f64 / self.conversations.len() as f64;
        let interval_us = turns_each / self.options.rate_per_s * 1e6;
        let mut dice = Dice::new(self.options.seed);
        let mut begins_us = 0.0;
        let mut own_blocks = OwnBlocks::default();
        for (place, conversation) in std::mem::take(&mut self.conversations).iter().enumerate() {
            begins_us += dice.exponential(interval_us);
            let ids = match conversation.tokens.is_empty() {
                true => own_blocks.next(conversation, block_tokens),
                false => block_ids(&conversation.tokens, block_tokens),
            };
            let mut at_us = begins_us;
            for (number, turn) in conversation.turns.iter().enumerate() {
                let think_us = dice.skewed(THINK_S, 1.0) * 1e6;
                let arrival_us = match turn.at_us {
                    Some(known_us) => known_us - first_us,
                    None => at_us as u64,
                };
                let blocks = &ids[..turn.input_tokens.div_ceil(block_tokens) as usize];
                let (input, output) = (turn.input_tokens, turn.output_tokens);
                let is_session = conversation.session.is_some() || conversation.turns.len() > 1;
                let pushed = if is_session {
                    // Generated session numbers are above all given ones.
                    let session = conversation.session.unwrap_or(place as u64 | 1 << 63);
                    let think_us = (turn.at_us.is_none() && number > 0).then_some(think_us as u64);
                    builder.push_turn(arrival_us, input, output, blocks, Turn { session, think_us })
                } else {
                    builder.push(arrival_us, input, output, blocks)
                };
                if let Err(problem) = pushed {
                    self.turn_down(conversation.line, problem)?;
                }
                at_us = arrival_us as f64 + think_us + f64::from(turn.output_tokens) * 20_000.0;
            }
        }
        Ok(Reading {
            trace: builder.finish(),
            skipped_lines: self.skipped_lines,
            skipped: self.skipped,
            ignored: self.ignored.into_iter().collect(),
        })
    }
}

/// Unique blocks for prompts of which only lengths are known.
#[derive(Default)]
struct OwnBlocks(u64);

impl OwnBlocks {
    fn next(&mut self, conversation: &Conversation, block_tokens: u32) -> Vec<u64> {
        let longest = conversation.turns.iter().map(|turn| turn.input_tokens).max().unwrap_or(0);
        let first = self.0;
        self.0 += u64::from(longest.div_ceil(block_tokens));
        (first..self.0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Trace;

    pub(super) fn import(text: &str) -> Result<Reading, TraceError> {
        Trace::import_from(text.as_bytes(), "traffic", &ImportOptions::default())
    }

    pub(super) fn lengths(trace: &Trace) -> Vec<(u32, u32)> {
        let lengths = trace.requests().iter();
        lengths.map(|request| (request.input_tokens, request.output_tokens)).collect()
    }

    #[test]
    fn detects_formats() {
        for (beginning, format) in [
            ("TIMESTAMP,ContextTokens,GeneratedTokens\n", Format::Azure),
            (
                "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens\n",
                Format::BurstGpt,
            ),
            ("[{\"id\": \"a\", \"conversations\": []}]", Format::ShareGpt),
            ("{\"id\": \"a\", \"conversations\": []}", Format::ShareGpt),
            ("{\"messages\": []}", Format::OpenAi),
            ("{\"custom_id\": \"x\", \"body\": {\"messages\": []}}", Format::OpenAi),
            ("{\n \"request_rate\": 4,\n \"input_lens\": [", Format::Bench),
            ("{\"timestamp\": 0, \"hash_ids\": []}", Format::Mooncake),
            ("", Format::Mooncake),
        ] {
            assert_eq!(Format::of(beginning.as_bytes()), format, "{beginning}");
        }
    }

    #[test]
    fn reads_mooncake_lines() {
        let line =
            r#"{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}"#;
        let trace = import(line).unwrap().trace;
        assert_eq!((trace.block_tokens(), lengths(&trace)), (512, vec![(600, 3)]));
    }
}
