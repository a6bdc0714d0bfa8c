//! Recorded event streams: a JSON line per received batch, with its original bytes.

use std::fmt::Write as _;
use std::io::{self, BufRead, Write};

use serde::{Deserialize, Serialize};

use crate::follow::Heard;

/// A line of a recording.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recorded {
    /// Time of reception, in seconds since 1970.
    pub at: f64,
    /// Worker.
    pub worker: String,
    /// Number of the batch; none for a reset of the worker's state.
    pub seq: Option<u64>,
    /// Bytes of the batch, in hexadecimal digits.
    pub payload: String,
}

/// An error of a recording.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// The file cannot be read.
    #[error("cannot read the recording: {0}")]
    Read(#[from] io::Error),
    /// A line is invalid.
    #[error("line {line} is not a recorded batch of KV events: {problem}")]
    Line {
        /// Line, from 1.
        line: usize,
        /// Problem.
        problem: String,
    },
}

impl Recorded {
    /// Records an item of a worker's stream.
    #[must_use]
    pub fn new(at: f64, worker: &str, heard: &Heard) -> Self {
        let worker = worker.to_owned();
        match heard {
            Heard::Batch { seq, payload } => {
                Self { at, worker, seq: Some(*seq), payload: digits(payload) }
            }
            Heard::Forget => Self { at, worker, seq: None, payload: String::new() },
        }
    }

    /// Returns the item; none if the digits are invalid.
    #[must_use]
    pub fn heard(&self) -> Option<Heard> {
        match self.seq {
            Some(seq) => Some(Heard::Batch { seq, payload: bytes(&self.payload)?.into() }),
            None => Some(Heard::Forget),
        }
    }

    /// Writes the line.
    ///
    /// # Errors
    /// Fails if the write fails.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut to, self)?;
        to.write_all(b"\n")
    }
}

/// Reads a recording line by line.
#[derive(Debug)]
pub struct Recording<R> {
    lines: io::Lines<R>,
    line: usize,
}

impl<R: BufRead> Recording<R> {
    /// Creates a reader.
    pub fn new(from: R) -> Self {
        Self { lines: from.lines(), line: 0 }
    }
}

impl<R: BufRead> Iterator for Recording<R> {
    type Item = Result<(Recorded, Heard), RecordingError>;

    fn next(&mut self) -> Option<Self::Item> {
        let text = match self.lines.next()? {
            Ok(text) => text,
            Err(error) => return Some(Err(error.into())),
        };
        self.line += 1;
        let line = self.line;
        let recorded = serde_json::from_str::<Recorded>(&text);
        let recorded = recorded.map_err(|error| error.to_string()).and_then(|recorded| {
            let heard = recorded.heard().ok_or("the payload is not hexadecimal")?;
            Ok((recorded, heard))
        });
        Some(recorded.map_err(|problem| RecordingError::Line { line, problem }))
    }
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn bytes(digits: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    let pair = |pair: &[u8; 2]| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok();
    rest.is_empty().then(|| pairs.iter().map(pair).collect())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_round_trip() {
        let batch = Heard::Batch { seq: 7, payload: vec![0, 255, 16].into() };
        let lines = [Recorded::new(1.5, "a", &batch), Recorded::new(2.0, "b", &Heard::Forget)];
        let mut file = Vec::new();
        lines.iter().for_each(|line| line.write(&mut file).unwrap());
        let read: Vec<_> = Recording::new(&file[..]).map(Result::unwrap).collect();
        assert_eq!(read, [(lines[0].clone(), batch), (lines[1].clone(), Heard::Forget)]);
        let wrong = String::from_utf8(file).unwrap().replace("00ff10", "0zff10");
        let error = Recording::new(wrong.as_bytes()).next().unwrap().unwrap_err().to_string();
        assert!(error.contains("line 1") && error.contains("hexadecimal"), "{error}");
    }
}
