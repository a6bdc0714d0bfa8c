//! Writing of traces: one JSON request per line, in Mooncake's format.

use std::io::{self, Write};

use serde::Serialize;

use super::Trace;

/// Block size that readers assume for lines without the field.
const USUAL_BLOCK_TOKENS: u32 = 512;

#[derive(Serialize)]
struct Line<'a> {
    timestamp: Milliseconds,
    input_length: u32,
    output_length: u32,
    hash_ids: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    block_size: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<u32>,
    /// User's think time after the answer before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    delay: Option<Milliseconds>,
}

/// Written as an integer if possible, since some readers reject fractions.
#[derive(Serialize)]
#[serde(untagged)]
enum Milliseconds {
    Whole(u64),
    Fraction(f64),
}

impl Trace {
    /// Writes the trace, one request per line. Reading it gives the same trace.
    ///
    /// # Errors
    /// Returns an error of `output`.
    pub fn write(&self, mut output: impl Write) -> io::Result<()> {
        let block_size = Some(self.block_tokens).filter(|&tokens| tokens != USUAL_BLOCK_TOKENS);
        for request in self.requests() {
            let milliseconds = |us: u64| match us.is_multiple_of(1000) {
                true => Milliseconds::Whole(us / 1000),
                false => Milliseconds::Fraction(us as f64 / 1000.0),
            };
            let line = Line {
                timestamp: milliseconds(request.arrival_us),
                input_length: request.input_tokens,
                output_length: request.output_tokens,
                hash_ids: self.blocks(request),
                block_size,
                session_id: request.link.map(|link| link.session),
                delay: request.link.and_then(|link| link.think_us).map(milliseconds),
            };
            serde_json::to_writer(&mut output, &line)?;
            output.write_all(b"\n")?;
        }
        output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ReadOptions, TraceBuilder, Turn};
    use super::*;

    #[test]
    fn written_trace_round_trips() {
        for block_tokens in [16, 512] {
            let mut builder = TraceBuilder::new(block_tokens).unwrap();
            builder.push(0, block_tokens + 1, 5, &[70, 80]).unwrap();
            builder.push(1_500, block_tokens, 1, &[80]).unwrap();
            let turn = |think_us| Turn { session: 7, think_us };
            builder.push_turn(1_600, block_tokens, 2, &[90], turn(None)).unwrap();
            builder.push_turn(1_700, block_tokens + 5, 2, &[90, 91], turn(Some(2_500))).unwrap();
            let trace = builder.finish();
            let mut text = Vec::new();
            trace.write(&mut text).unwrap();
            let options = ReadOptions::default();
            let again = Trace::read_from(text.as_slice(), "trace", &options).unwrap().trace;
            assert_eq!(again, trace);
            assert!(text.starts_with(b"{\"timestamp\":0,\"input_length\":"));
        }
    }
}
