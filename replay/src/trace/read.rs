//! Reading of traces: one JSON request per line, as published by Mooncake, plain or compressed.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use serde::Deserialize;

use super::{Trace, TraceBuilder, Turn};

/// Default tokens in a block, as in Mooncake's traces.
const BLOCK_TOKENS: u32 = 512;

/// Longest line.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// Number of skipped lines that are named.
pub(super) const NAMED_MAX: usize = 5;

const BUFFER_BYTES: usize = 256 << 10;

/// Options of reading.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReadOptions {
    /// Tokens in a block for lines without the field; 512 by default.
    pub block_tokens: Option<u32>,
    /// Handling of invalid lines.
    pub bad_lines: BadLines,
}

/// Handling of invalid lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BadLines {
    /// The first one is an error.
    #[default]
    Refuse,
    /// They are skipped and counted.
    Skip,
}

/// A trace, with the skipped lines.
#[derive(Debug)]
pub struct Reading {
    /// The requests.
    pub trace: Trace,
    /// Number of lines that were skipped.
    pub skipped_lines: u64,
    /// The first few skipped lines.
    pub skipped: Vec<BadLine>,
    /// Ignored columns or fields, as far as they were seen.
    pub ignored: Vec<String>,
}

/// An invalid line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine {
    /// File.
    pub file: String,
    /// Line, from 1.
    pub line: u64,
    /// Problem.
    pub problem: String,
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, line {}: {}", self.file, self.line, self.problem)
    }
}

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// A file or folder cannot be opened.
    #[error("{}: {source}", path.display())]
    Open {
        /// Path.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A file cannot be read.
    #[error("{file}: {source}")]
    Input {
        /// File.
        file: String,
        /// Cause.
        source: io::Error,
    },
    /// A line is invalid.
    #[error("{0}; --bad-lines skip skips such lines")]
    Line(BadLine),
    /// No line is valid; this is the first.
    #[error("{0}; no other line is valid either")]
    NothingLeft(BadLine),
    /// There are no requests.
    #[error(
        "{file}: no requests; each line must be a JSON object with timestamp, input_length, \
         output_length and hash_ids"
    )]
    Empty {
        /// The file or folder.
        file: String,
    },
    /// The folder has no traces.
    #[error("{}: no file that ends in .jsonl, .json or .gz", .0.display())]
    EmptyFolder(PathBuf),
    /// The block size is invalid.
    #[error("{0}")]
    BlockTokens(String),
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
    block_size: Option<u32>,
    /// Session of a turn: a number or a text.
    session_id: Option<serde_json::Value>,
    /// User's think time after the answer before, in milliseconds.
    delay: Option<f64>,
}

impl Trace {
    /// Reads a file, or all files of a folder in the order of their names.
    ///
    /// # Errors
    /// Returns the file and line that cannot be read.
    pub fn read(path: &Path, options: &ReadOptions) -> Result<Reading, TraceError> {
        let open_error = |source| TraceError::Open { path: path.to_owned(), source };
        let mut reader = Reader::new(options)?;
        if path.is_dir() {
            let mut files = Vec::new();
            for entry in path.read_dir().map_err(open_error)? {
                let file = entry.map_err(open_error)?.path();
                let ending = file.extension().and_then(|ending| ending.to_str());
                if matches!(ending, Some("jsonl" | "json" | "gz")) && file.is_file() {
                    files.push(file);
                }
            }
            files.sort();
            if files.is_empty() {
                return Err(TraceError::EmptyFolder(path.to_owned()));
            }
            for file in files {
                reader.read_file(&file)?;
            }
        } else {
            reader.read_file(path)?;
        }
        reader.finish(&path.display().to_string())
    }

    /// Reads lines from any source, such as standard input; `name` is used in errors.
    ///
    /// # Errors
    /// Returns the line that cannot be read.
    pub fn read_from(
        input: impl Read,
        name: &str,
        options: &ReadOptions,
    ) -> Result<Reading, TraceError> {
        let mut reader = Reader::new(options)?;
        reader.read_lines(input, name)?;
        reader.finish(name)
    }
}

struct Reader {
    /// Created with the first line, which may set the block size.
    builder: Option<TraceBuilder>,
    block_tokens: u32,
    /// Sessions by name.
    sessions: HashMap<String, u64>,
    bad_lines: BadLines,
    skipped_lines: u64,
    skipped: Vec<BadLine>,
}

impl Reader {
    fn new(options: &ReadOptions) -> Result<Self, TraceError> {
        let block_tokens = options.block_tokens.unwrap_or(BLOCK_TOKENS);
        TraceBuilder::new(block_tokens).map_err(TraceError::BlockTokens)?;
        Ok(Self {
            builder: None,
            block_tokens,
            sessions: HashMap::new(),
            bad_lines: options.bad_lines,
            skipped_lines: 0,
            skipped: Vec::new(),
        })
    }

    fn read_file(&mut self, path: &Path) -> Result<(), TraceError> {
        let file = File::open(path)
            .map_err(|source| TraceError::Open { path: path.to_owned(), source })?;
        self.read_lines(file, &path.display().to_string())
    }

    fn read_lines(&mut self, input: impl Read, name: &str) -> Result<(), TraceError> {
        let mut input = BufReader::with_capacity(BUFFER_BYTES, input);
        let start = input
            .fill_buf()
            .map_err(|source| TraceError::Input { file: name.to_owned(), source })?;
        if start.starts_with(&[0x1f, 0x8b]) {
            let plain = MultiGzDecoder::new(input);
            self.read_plain(BufReader::with_capacity(BUFFER_BYTES, plain), name)
        } else {
            self.read_plain(input, name)
        }
    }

    fn read_plain(&mut self, mut input: impl BufRead, name: &str) -> Result<(), TraceError> {
        let mut bytes = Vec::new();
        for number in 1.. {
            bytes.clear();
            let read = (&mut input).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes);
            let problem = match read {
                Ok(0) => return Ok(()),
                Ok(_) if bytes.trim_ascii().is_empty() => continue,
                Ok(read) if read as u64 == LINE_BYTES_MAX && bytes.last() != Some(&b'\n') => {
                    skip_line(&mut input)
                        .map_err(|source| TraceError::Input { file: name.to_owned(), source })?;
                    format!("more than {} MiB; is this a trace?", LINE_BYTES_MAX >> 20)
                }
                Ok(_) => match self.take(bytes.trim_ascii()) {
                    Ok(()) => continue,
                    Err(problem) => problem,
                },
                // The file itself is damaged: earlier lines are valid, and no later ones can be
                // read.
                Err(error) => {
                    let problem = format!("the file is damaged from here on: {error}");
                    return self.turn_down(name, number, problem);
                }
            };
            self.turn_down(name, number, problem)?;
        }
        Ok(())
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), String> {
        let line: Line = serde_json::from_slice(bytes).map_err(|error| problem(bytes, &error))?;
        let block_tokens = line.block_size.unwrap_or(self.block_tokens);
        if !(0.0..=4e12).contains(&line.timestamp) {
            return Err(format!("a timestamp of {} ms; use 0 to 4e12", line.timestamp));
        }
        let arrival_us = (line.timestamp * 1000.0).round() as u64;
        let tokens = |length: u64| u32::try_from(length).unwrap_or(u32::MAX);
        // The first valid line sets the block size of the others.
        let builder = match &mut self.builder {
            Some(builder) if !builder.is_empty() => builder,
            empty => empty.insert(TraceBuilder::new(block_tokens)?),
        };
        if builder.block_tokens() != block_tokens {
            return Err(format!(
                "a block size of {block_tokens} after one of {}; a trace must have one block size",
                builder.block_tokens()
            ));
        }
        let (input, output) = (tokens(line.input_length), tokens(line.output_length));
        let Some(session) = line.session_id else {
            return builder.push(arrival_us, input, output, &line.hash_ids);
        };
        let session = match session {
            serde_json::Value::Number(number) if number.is_u64() => number.to_string(),
            serde_json::Value::String(name) => name,
            other => return Err(format!("session_id {other}: use a number or a string")),
        };
        if let Some(delay) = line.delay.filter(|delay| !(0.0..=1e9).contains(delay)) {
            return Err(format!("a delay of {delay} ms; use 0 to 1e9"));
        }
        let next = self.sessions.len() as u64;
        let session = *self.sessions.entry(session).or_insert(next);
        let think_us = line.delay.map(|delay| (delay * 1000.0).round() as u64);
        builder.push_turn(arrival_us, input, output, &line.hash_ids, Turn { session, think_us })
    }

    fn turn_down(&mut self, file: &str, line: u64, problem: String) -> Result<(), TraceError> {
        let bad_line = BadLine { file: file.to_owned(), line, problem };
        match self.bad_lines {
            BadLines::Refuse => return Err(TraceError::Line(bad_line)),
            BadLines::Skip => {
                self.skipped_lines += 1;
                if self.skipped.len() < NAMED_MAX {
                    self.skipped.push(bad_line);
                }
            }
        }
        Ok(())
    }

    fn finish(self, name: &str) -> Result<Reading, TraceError> {
        let builder = self.builder.filter(|builder| !builder.is_empty());
        let Some(builder) = builder else {
            return Err(match self.skipped.into_iter().next() {
                Some(first) => TraceError::NothingLeft(first),
                None => TraceError::Empty { file: name.to_owned() },
            });
        };
        let trace = builder.finish();
        let (skipped_lines, skipped) = (self.skipped_lines, self.skipped);
        Ok(Reading { trace, skipped_lines, skipped, ignored: Vec::new() })
    }
}

fn skip_line(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        let buffer = input.fill_buf()?;
        let end = buffer.iter().position(|&byte| byte == b'\n');
        let (length, found) = (buffer.len(), end.is_some() || buffer.is_empty());
        input.consume(end.map_or(length, |end| end + 1));
        if found {
            return Ok(());
        }
    }
}

/// Describes invalid JSON. The parser sees one line at a time, so its position gives only the
/// column.
fn problem(bytes: &[u8], error: &serde_json::Error) -> String {
    if std::str::from_utf8(bytes).is_err() {
        return "not UTF-8 text".to_owned();
    }
    if error.is_eof() {
        return "the line is incomplete".to_owned();
    }
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    format!("{what} (column {})", error.column())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    const GOOD: &str =
        r#"{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}"#;

    fn read(text: impl AsRef<[u8]>, bad_lines: BadLines) -> Result<Reading, TraceError> {
        let options = ReadOptions { block_tokens: None, bad_lines };
        Trace::read_from(text.as_ref(), "trace", &options)
    }

    fn refusal(text: impl AsRef<[u8]>) -> String {
        read(text, BadLines::Refuse).unwrap_err().to_string()
    }

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn invalid_lines_are_errors_or_skipped() {
        let line = |timestamp: &str, input: &str, output: &str, ids: &str| {
            format!(
                "{{\"timestamp\": {timestamp}, \"input_length\": {input}, \"output_length\": {output}, \
                 \"hash_ids\": {ids}}}"
            )
        };
        let cases: [(Vec<u8>, &str); 14] = [
            (GOOD.as_bytes()[..40].to_vec(), "incomplete"),
            (b"hello".to_vec(), "expected value (column 1)"),
            (b"[1, 2]".to_vec(), "invalid"),
            (b"{\"timestamp\": 1, \"input_length\": 4}".to_vec(), "missing field `output_length`"),
            (line("1", "-4", "1", "[1]").into(), "invalid value: integer `-4`"),
            (line("-1", "4", "1", "[1]").into(), "timestamp of -1 ms"),
            (line("1e300", "4", "1", "[1]").into(), "use 0 to 4e12"),
            (line("1", "99999999999999", "1", "[1]").into(), "the maximum is 16777216"),
            (line("1", "4", "99999999", "[1]").into(), "an output of 99999999 tokens"),
            (line("1", "0", "1", "[]").into(), "without tokens"),
            (line("1", "513", "1", "[1]").into(), "1 block ids for a prompt of 513 tokens"),
            (line("1", "16", "1", "[1, 2, 3]").into(), "is that the block size"),
            (line("1", "4", "1", "[1.5]").into(), "invalid type: floating point"),
            (b"{\"timestamp\": 1, \"text\": \"\xff\xfe\"}".to_vec(), "not UTF-8"),
        ];
        for (bad, expected) in cases {
            let text = [GOOD.as_bytes(), b"\n", &bad, b"\n", GOOD.as_bytes()].concat();
            let refused = refusal(&text);
            assert!(refused.starts_with("trace, line 2: "), "{refused}");
            assert!(refused.contains(expected), "{refused}");
            let reading = read(&text, BadLines::Skip).unwrap();
            assert_eq!((reading.trace.requests().len(), reading.skipped_lines), (2, 1));
            assert_eq!(reading.skipped[0].line, 2);
        }
    }

    #[test]
    fn error_names_a_truncated_last_line() {
        let text = format!("{GOOD}\n{}", &GOOD[..GOOD.len() - 5]);
        assert!(refusal(&text).starts_with("trace, line 2: the line is incomplete"));
        assert_eq!(read(&text, BadLines::Skip).unwrap().skipped_lines, 1);
    }

    #[test]
    fn empty_trace_error_describes_the_format() {
        assert!(
            refusal("").contains("no requests; each line must be a JSON object with timestamp")
        );
        assert!(refusal("\n \n").contains("no requests"));
        let all_bad = read("x\ny\n", BadLines::Skip).unwrap_err().to_string();
        assert!(all_bad.starts_with("trace, line 1: "), "{all_bad}");
    }

    #[test]
    fn detects_gzip_and_damage() {
        let whole = gzip(&format!("{GOOD}\n").repeat(1000));
        assert_eq!(read(&whole, BadLines::Refuse).unwrap().trace.requests().len(), 1000);
        let two_parts = [whole.clone(), gzip(GOOD)].concat();
        assert_eq!(read(two_parts, BadLines::Refuse).unwrap().trace.requests().len(), 1001);

        let half = &whole[..whole.len() / 2];
        assert!(refusal(half).contains("damaged from here on"), "{}", refusal(half));
        let reading = read(half, BadLines::Skip).unwrap();
        assert!((1..1000).contains(&reading.trace.requests().len()));
        let mut flipped = whole.clone();
        let end = flipped.len() - 6;
        flipped[end] ^= 1;
        assert!(refusal(&flipped).contains("damaged"));
    }

    #[test]
    fn sorts_times_and_subtracts_the_first() {
        let at = |ms: &str| GOOD.replace("5,", &format!("{ms},"));
        let text = [at("1700000000030"), at("1700000000010.5"), at("1700000000020")].join("\n");
        let trace = read(text, BadLines::Refuse).unwrap().trace;
        let times: Vec<u64> = trace.requests().iter().map(|request| request.arrival_us).collect();
        assert_eq!(times, [0, 9_500, 19_500]);
    }

    #[test]
    fn lines_agree_on_the_block_size() {
        let small = r#"{"timestamp":0,"input_length":20,"output_length":0,"hash_ids":[1,2],"block_size":16}"#;
        let trace = read(small, BadLines::Refuse).unwrap().trace;
        assert_eq!((trace.block_tokens(), trace.requests()[0].output_tokens), (16, 1));
        let mixed = refusal(format!("{small}\n{GOOD}"));
        assert!(mixed.contains("line 2: a block size of 512 after one of 16"), "{mixed}");
        let options = ReadOptions { block_tokens: Some(0), ..ReadOptions::default() };
        let refused = Trace::read_from(GOOD.as_bytes(), "trace", &options).unwrap_err();
        assert!(refused.to_string().contains("use 1 to 65536"));
    }

    #[test]
    fn reads_a_folder_as_one_trace() {
        let folder = tempfile::tempdir().unwrap();
        let options = ReadOptions::default();
        let empty = Trace::read(folder.path(), &options).unwrap_err();
        assert!(empty.to_string().contains("no file that ends in"));
        std::fs::write(folder.path().join("b.jsonl"), GOOD).unwrap();
        std::fs::write(folder.path().join("a.jsonl.gz"), gzip(&GOOD.replace("5,", "6,"))).unwrap();
        std::fs::write(folder.path().join("notes.txt"), "not a trace").unwrap();
        let trace = Trace::read(folder.path(), &options).unwrap().trace;
        assert_eq!(trace.requests().len(), 2);
        assert_eq!(trace.distinct_blocks(), 2);
        std::fs::write(folder.path().join("c.jsonl"), "?").unwrap();
        let refused = Trace::read(folder.path(), &options).unwrap_err().to_string();
        assert!(refused.contains("c.jsonl, line 1: "), "{refused}");
        let absent = Trace::read(&folder.path().join("absent"), &options).unwrap_err();
        assert!(absent.to_string().contains("absent: No such file"), "{absent}");
    }

    #[test]
    fn invalid_first_line_sets_no_block_size() {
        let bad =
            r#"{"timestamp":0,"input_length":600,"output_length":3,"hash_ids":[1],"block_size":7}"#;
        let reading = read(format!("{bad}\n{GOOD}\n{GOOD}\n"), BadLines::Skip).unwrap();
        assert_eq!((reading.trace.requests().len(), reading.skipped_lines), (2, 1));
        assert_eq!(reading.trace.block_tokens(), 512);
        let nothing = read(format!("{bad}\n{bad}\n"), BadLines::Skip).unwrap_err().to_string();
        assert!(nothing.contains("line 1") && !nothing.contains("--bad-lines"), "{nothing}");
    }
}
