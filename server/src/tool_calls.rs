//! Calls of functions, found in the text of an answer as it comes.

use std::fmt;
use std::str::FromStr;

use futures_util::StreamExt;
use futures_util::stream::{self, Stream};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use terrace_model::ChatTemplate;

use crate::answer::{Finish, Piece};
use crate::parameters::random;
use crate::tools::{Forced, Offer};

/// Format in which a model writes function calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen.
    Hermes,
    /// `{"name": ..., "parameters": {...}}` and nothing else, perhaps after `<|python_tag|>`: Llama.
    Llama,
    /// `[TOOL_CALLS]` and a list of `{"name": ..., "arguments": {...}}`: Mistral.
    Mistral,
}

const OPENED: &str = "<tool_call>";
const CLOSED: &str = "</tool_call>";
const PYTHON_TAG: &str = "<|python_tag|>";
const TOOL_CALLS: &str = "[TOOL_CALLS]";

impl ToolFormat {
    /// The format that a template writes calls in.
    #[must_use]
    pub fn of(chat: &ChatTemplate) -> Option<Self> {
        if chat.mentions(OPENED) {
            Some(Self::Hermes)
        } else if chat.mentions(TOOL_CALLS) {
            Some(Self::Mistral)
        } else if chat.mentions(PYTHON_TAG) || chat.mentions("ipython") {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// Returns the marks of calls. Models may have special tokens for them.
    pub(crate) fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[OPENED, CLOSED],
            Self::Llama => &[PYTHON_TAG],
            Self::Mistral => &[TOOL_CALLS],
        }
    }

    /// Returns the mark at the start of a call.
    fn opening(self) -> &'static str {
        self.marks()[0]
    }

    fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
        }
    }

    /// A name for a call that its result can refer to. Templates for Mistral's models insist on nine
    /// letters or digits.
    fn call_id(self) -> String {
        let number = random();
        match self {
            Self::Hermes | Self::Llama => format!("call_{number:016x}"),
            Self::Mistral => format!("{:09x}", number & 0xf_ffff_ffff),
        }
    }
}

impl fmt::Display for ToolFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ToolFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = [Self::Hermes, Self::Llama, Self::Mistral].into_iter();
        all.find(|format| format.name() == text)
            .ok_or_else(|| "write hermes, llama or mistral".to_owned())
    }
}

/// A call that an answer makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// Position among the calls of the answer.
    pub(crate) index: usize,
    pub(crate) id: String,
    pub(crate) name: String,
    /// The text of a JSON object.
    pub(crate) arguments: String,
}

impl Call {
    /// Returns the call as part of a whole answer.
    pub(crate) fn json(&self) -> Value {
        json!({
            "id": self.id,
            "type": "function",
            "function": { "name": self.name, "arguments": self.arguments },
        })
    }

    /// Returns the call as part of a chunk of a stream.
    pub(crate) fn delta(&self) -> Value {
        let mut delta = json!({ "index": self.index });
        if let (Value::Object(delta), Value::Object(call)) = (&mut delta, self.json()) {
            delta.extend(call);
        }
        delta
    }
}

/// Puts calls into the message of a whole answer.
pub(crate) fn add_to_message(choice: &mut Value, calls: &[Call]) {
    if calls.is_empty() {
        return;
    }
    let message = &mut choice["message"];
    if message["content"] == "" {
        message["content"] = Value::Null;
    }
    message["tool_calls"] = calls.iter().map(Call::json).collect();
}

/// The pieces of an answer, with its calls apart from its text where there may be calls.
pub(crate) fn apart(
    pieces: impl Stream<Item = Piece> + Send + 'static,
    mut reader: Option<CallReader>,
) -> impl Stream<Item = Piece> + Send + 'static {
    pieces.flat_map(move |piece| {
        stream::iter(match &mut reader {
            Some(reader) => reader.take(piece),
            None => vec![piece],
        })
    })
}

/// Reads an answer that may call functions.
#[derive(Debug)]
pub(crate) struct CallReader {
    format: ToolFormat,
    offer: Offer,
    /// Text that may belong to a call, or blanks that nothing has come after.
    held: String,
    /// Length of the held text that does not contain the end of a call.
    searched: usize,
    /// Text that opened the current call, with the blanks before it.
    opening: Option<String>,
    has_begun: bool,
    calls: usize,
}

impl CallReader {
    pub(crate) fn new(format: ToolFormat, offer: Offer) -> Self {
        let (held, searched) = (String::new(), 0);
        Self { format, offer, held, searched, opening: None, has_begun: false, calls: 0 }
    }

    fn take(&mut self, piece: Piece) -> Vec<Piece> {
        let mut pieces = Vec::new();
        match piece {
            // Requests with both tools and log-probabilities are refused.
            Piece::Text(fragment) => self.push(&fragment.text, &mut pieces),
            Piece::Complete(mut complete) => {
                self.finish(&mut pieces);
                if self.calls > 0 && complete.finish == Finish::Stop {
                    complete.finish = Finish::ToolCalls;
                }
                pieces.push(Piece::Complete(complete));
            }
            other @ (Piece::Reasoning(_) | Piece::Call(_) | Piece::Unfinished(_)) => {
                pieces.push(other);
            }
        }
        pieces
    }

    fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        self.held.push_str(text);
        if self.offer.forced.is_some() {
            // It is a call only when it is whole.
            return;
        }
        loop {
            if self.opening.is_none() && !self.find_opening(pieces) {
                return;
            }
            if !self.find_end(pieces) {
                return;
            }
        }
    }

    /// Looks for the beginning of a call and lets go of the text that is certainly before any.
    fn find_opening(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let opening = self.format.opening();
        // A Llama's call needs no mark if there is nothing else.
        let is_bare = self.format == ToolFormat::Llama
            && !self.has_begun
            && self.held.trim_start().starts_with('{');
        let found = match is_bare {
            true => Some(0..0),
            false => self.held.find(opening).map(|at| at..at + opening.len()),
        };
        if let Some(opening) = found {
            let rest = self.held.split_off(opening.end);
            let before = std::mem::replace(&mut self.held, rest);
            let text = before[..opening.start].trim_end();
            self.say(text, pieces);
            (self.opening, self.searched) = (Some(before[text.len()..].to_owned()), 0);
            return true;
        }
        let may_begin = |at: &usize| opening.starts_with(&self.held[*at..]);
        let from = (self.held.len() + 1).saturating_sub(opening.len());
        let mut ends = (from..self.held.len()).filter(|at| self.held.is_char_boundary(*at));
        let certain = ends.find(may_begin).unwrap_or(self.held.len());
        let certain = self.held[..certain].trim_end().len();
        let rest = self.held.split_off(certain);
        let text = std::mem::replace(&mut self.held, rest);
        self.say(&text, pieces);
        false
    }

    /// Looks for the end of the call that has begun, where its format has one.
    fn find_end(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match self.format {
            ToolFormat::Hermes => {}
            ToolFormat::Llama | ToolFormat::Mistral => return false,
        }
        let Some(at) = self.held[self.searched..].find(CLOSED) else {
            let mut searched = self.held.len().saturating_sub(CLOSED.len());
            while !self.held.is_char_boundary(searched) {
                searched -= 1;
            }
            self.searched = searched;
            return false;
        };
        let at = self.searched + at;
        let rest = self.held.split_off(at + CLOSED.len());
        let call = std::mem::replace(&mut self.held, rest);
        self.call_or_say(hermes(&call[..at]), &call, pieces);
        true
    }

    fn finish(&mut self, pieces: &mut Vec<Piece>) {
        let held = std::mem::take(&mut self.held);
        if let Some(forced) = &self.offer.forced {
            let calls = forced_calls(forced, &held);
            return self.call_or_say(calls, &held, pieces);
        }
        if self.opening.is_none() {
            // Blanks after a call say nothing.
            if self.calls == 0 || !held.trim().is_empty() {
                self.say(&held, pieces);
            }
            return;
        }
        let calls = match self.format {
            ToolFormat::Hermes => hermes(&held),
            ToolFormat::Llama => llama(&held),
            ToolFormat::Mistral => mistral(&held),
        };
        self.call_or_say(calls, &held, pieces);
    }

    /// Ends what began like a call: with its calls, or as the text that it is.
    fn call_or_say(&mut self, calls: Option<Vec<Found>>, text: &str, pieces: &mut Vec<Piece>) {
        let opening = self.opening.take().unwrap_or_default();
        match calls.filter(|calls| self.are_offered(calls)) {
            Some(calls) => self.call(calls, pieces),
            None => self.say(&format!("{opening}{text}"), pieces),
        }
    }

    /// Returns whether the request offered all these functions. A call of another function stays text.
    fn are_offered(&self, calls: &[Found]) -> bool {
        calls.iter().all(|call| self.offer.names.contains(&call.name))
    }

    fn call(&mut self, calls: Vec<Found>, pieces: &mut Vec<Piece>) {
        for Found { name, arguments } in calls {
            if self.calls > 0 && !self.offer.parallel {
                return;
            }
            let (index, id) = (self.calls, self.format.call_id());
            self.calls += 1;
            pieces.push(Piece::Call(Call { index, id, name, arguments }));
        }
    }

    fn say(&mut self, text: &str, pieces: &mut Vec<Piece>) {
        if !text.is_empty() {
            self.has_begun = true;
            pieces.push(Piece::Text(text.to_owned().into()));
        }
    }
}

/// A call in the text of an answer.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    name: String,
    arguments: String,
}

impl Found {
    fn of(value: &Value) -> Option<Self> {
        let name = value.get("name")?.as_str()?.to_owned();
        let given = value.get("arguments").or_else(|| value.get("parameters"));
        let arguments = match given {
            None | Some(Value::Null) => "{}".to_owned(),
            Some(arguments @ Value::Object(_)) => arguments.to_string(),
            // Some models write the text of an object.
            Some(Value::String(text)) => {
                serde_json::from_str::<Map<String, Value>>(text).ok()?;
                text.clone()
            }
            Some(Value::Bool(_) | Value::Number(_) | Value::Array(_)) => return None,
        };
        Some(Self { name, arguments })
    }
}

/// Reads the calls of an answer that had to call. An answer that was cut off has none.
fn forced_calls(forced: &Forced, text: &str) -> Option<Vec<Found>> {
    match forced {
        Forced::Arguments(name) => {
            let arguments: Map<String, Value> = serde_json::from_str(text).ok()?;
            let arguments = Value::Object(arguments).to_string();
            Some(vec![Found { name: name.clone(), arguments }])
        }
        Forced::Calls => {
            let values: Vec<Value> = serde_json::from_str(text).ok()?;
            values.iter().map(Found::of).collect()
        }
    }
}

fn hermes(text: &str) -> Option<Vec<Found>> {
    let value: Value = serde_json::from_str(text).ok()?;
    Found::of(&value).map(|call| vec![call])
}

/// Objects one after the other, perhaps with semicolons between them.
fn llama(text: &str) -> Option<Vec<Found>> {
    let mut calls = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let (value, after) = first_value(rest)?;
        calls.push(Found::of(&value)?);
        rest = after.trim_start_matches(|c: char| c.is_whitespace() || c == ';');
    }
    (!calls.is_empty()).then_some(calls)
}

/// A list of calls, or, as later models have it, name and arguments of each after a mark of its own.
fn mistral(text: &str) -> Option<Vec<Found>> {
    if text.trim_start().starts_with('[') {
        let values: Vec<Value> = serde_json::from_str(text).ok()?;
        let calls: Vec<_> = values.iter().map(Found::of).collect::<Option<_>>()?;
        return (!calls.is_empty()).then_some(calls);
    }
    let call = |text: &str| {
        let (head, _) = text.split_once('{')?;
        let (arguments, after) = first_value(&text[head.len()..])?;
        let name = head.split('[').next().unwrap_or_default().trim().to_owned();
        let is_whole = after.trim().is_empty() && !name.is_empty() && arguments.is_object();
        is_whole.then(|| Found { name, arguments: arguments.to_string() })
    };
    text.split(TOOL_CALLS).map(call).collect()
}

/// The JSON that a text begins with, and what comes after it.
fn first_value(text: &str) -> Option<(Value, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next()?.ok()?;
    Some((value, &text[values.byte_offset()..]))
}

#[cfg(test)]
mod tests {
    use terrace_scheduler::Hits;

    use super::*;
    use crate::answer::Complete;

    /// What is read from a text that comes in pieces of so many characters: the text, the calls, and
    /// why it ended.
    fn read(
        format: ToolFormat,
        text: &str,
        size: usize,
    ) -> (String, Vec<(String, String)>, Finish) {
        let offer =
            Offer { names: ["f".to_owned(), "g".to_owned()].into(), parallel: true, forced: None };
        read_with(CallReader::new(format, offer), text, size)
    }

    fn read_with(
        mut reader: CallReader,
        text: &str,
        size: usize,
    ) -> (String, Vec<(String, String)>, Finish) {
        let letters: Vec<char> = text.chars().collect();
        let mut pieces: Vec<Piece> = letters
            .chunks(size)
            .map(|part| Piece::Text(part.iter().collect::<String>().into()))
            .collect();
        pieces.push(Piece::Complete(Complete {
            finish: Finish::Stop,
            tokens: 0,
            reasoning_tokens: 0,
            hits: Hits::default(),
            logits_checksum: None,
            first_token_at: None,
        }));
        let (mut said, mut calls, mut finish) = (String::new(), Vec::new(), None);
        for piece in pieces.into_iter().flat_map(|piece| reader.take(piece)) {
            assert_eq!(finish, None, "nothing comes after the end");
            match piece {
                Piece::Text(fragment) => {
                    assert!(!fragment.text.is_empty());
                    said.push_str(&fragment.text);
                }
                Piece::Call(call) => {
                    assert_eq!(call.index, calls.len());
                    calls.push((call.name, call.arguments));
                }
                Piece::Complete(complete) => finish = Some(complete.finish),
                Piece::Reasoning(_) | Piece::Unfinished(_) => panic!("{piece:?}"),
            }
        }
        (said, calls, finish.unwrap())
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (name.to_owned(), arguments.to_owned())
    }

    #[test]
    fn calls_are_found_in_every_format_whatever_the_pieces() {
        let cases = [
            (
                ToolFormat::Hermes,
                "Let me see ...\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"b\": 1, \"a\": \"ä\"}}\n\
                 </tool_call>\n<tool_call>{\"name\": \"g\", \"arguments\": \"{}\"}</tool_call>\n",
                "Let me see ...",
                vec![call("f", "{\"b\":1,\"a\":\"ä\"}"), call("g", "{}")],
            ),
            (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\"}", "", vec![call("f", "{}")]),
            (
                ToolFormat::Llama,
                "{\"name\": \"f\", \"parameters\": {\"x\": [1]}}; {\"name\": \"g\", \"parameters\": {}}",
                "",
                vec![call("f", "{\"x\":[1]}"), call("g", "{}")],
            ),
            (
                ToolFormat::Llama,
                "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"x\": 1}}",
                "",
                vec![call("f", "{\"x\":1}")],
            ),
            (
                ToolFormat::Mistral,
                "Well. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\"}]",
                "Well.",
                vec![call("f", "{\"x\":1}"), call("g", "{}")],
            ),
            (
                ToolFormat::Mistral,
                "[TOOL_CALLS]f{\"x\": 1}[TOOL_CALLS]g[ARGS]{}",
                "",
                vec![call("f", "{\"x\":1}"), call("g", "{}")],
            ),
        ];
        for (format, text, said, calls) in cases {
            for size in [1, 2, 3, 7, 1000] {
                let expected = (said.to_owned(), calls.clone(), Finish::ToolCalls);
                assert_eq!(read(format, text, size), expected, "{format} {size} {text}");
            }
        }
    }

    #[test]
    fn what_is_no_call_stays_text_to_the_letter() {
        let texts = [
            "plain text \n",
            " \n",
            "a < b, <tool> and <tool_cal",
            "<tool_call>no JSON</tool_call> rest",
            "<tool_call>{\"name\": \"unknown\", \"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \"f\", \"argu",
            "{\"name\": \"Bob\", \"age\": 7}",
            "{\"name\": \"f\", \"parameters\": 7}",
            "<|python_tag|>print(1)",
            "say {\"name\": \"f\", \"parameters\": {}}",
            "[TOOL_CALLS] none",
            "[TOOL_CALLS]f{\"x\": 1} and so on",
            "[TOOL",
        ];
        for format in [ToolFormat::Hermes, ToolFormat::Llama, ToolFormat::Mistral] {
            for text in texts {
                for size in [1, 2, 5, 1000] {
                    let expected = (text.to_owned(), Vec::new(), Finish::Stop);
                    assert_eq!(read(format, text, size), expected, "{format} {size}");
                }
            }
        }
    }

    #[test]
    fn only_one_call_comes_where_only_one_is_wanted() {
        let offer = Offer { names: ["f".to_owned()].into(), parallel: false, forced: None };
        let one = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        let (_, calls, _) =
            read_with(CallReader::new(ToolFormat::Hermes, offer), &one.repeat(3), 4);
        assert_eq!(calls.len(), 1);
    }

    #[test]
    fn ids_are_what_templates_accept() {
        let id = ToolFormat::Mistral.call_id();
        assert!(id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric()), "{id}");
        assert_ne!(ToolFormat::Hermes.call_id(), ToolFormat::Hermes.call_id());
        for format in [ToolFormat::Hermes, ToolFormat::Llama, ToolFormat::Mistral] {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert!("xml".parse::<ToolFormat>().is_err());
    }
}
