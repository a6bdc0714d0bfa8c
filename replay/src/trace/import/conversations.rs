//! Conversations with text: ShareGPT's, and OpenAI-style messages.

use std::collections::HashMap;
use std::io::BufRead;

use serde::Deserialize;
use serde::de::{DeserializeSeed, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::super::TraceError;
use super::{Conversation, Length, Sink, time};

/// Assumed tokens of an answer of unknown length.
const ANSWER_TOKENS: u32 = 256;
/// Role names of the assistant.
const ANSWERERS: [&str; 7] = ["assistant", "gpt", "chatgpt", "bing", "bard", "model", "claude"];

/// A message: role and content.
struct RoleMessage {
    role: String,
    content: String,
}

impl RoleMessage {
    fn is_answer(&self) -> bool {
        ANSWERERS.contains(&self.role.as_str())
    }
}

/// Builder of a conversation from messages.
struct ConversationBuilder {
    conversation: Conversation,
    /// True if there was a message since the last answer.
    is_asked: bool,
}

impl ConversationBuilder {
    fn new(session: Option<u64>) -> Self {
        Self { conversation: Conversation { session, ..Conversation::default() }, is_asked: false }
    }

    /// Adds a message: an answer completes a turn, whose prompt is everything before it.
    fn add_message(
        &mut self,
        message_text: &RoleMessage,
        at_us: Option<u64>,
        sink: &Sink<'_>,
    ) -> Result<(), String> {
        let tokens = &mut self.conversation.tokens;
        // A marker of the role, as in chat templates.
        let mark = sink.tokens(&format!("<|{}|>\n", message_text.role))?;
        let content = sink.tokens(&message_text.content)?;
        tokens.extend(mark);
        if message_text.is_answer() && self.is_asked {
            let input_tokens = length(tokens.len())?;
            let output_tokens = length(content.len())?.max(1);
            self.conversation.turns.push(Length { at_us, input_tokens, output_tokens });
        }
        tokens.extend(content);
        self.is_asked = !message_text.is_answer();
        Ok(())
    }

    /// Adds a request of whose answer only the length is known.
    fn add_request(
        &mut self,
        at_us: Option<u64>,
        output_tokens: u32,
        sink: &Sink<'_>,
    ) -> Result<(), String> {
        self.conversation.tokens.extend(sink.tokens("<|assistant|>\n")?);
        let input_tokens = length(self.conversation.tokens.len())?;
        self.conversation.turns.push(Length { at_us, input_tokens, output_tokens });
        Ok(())
    }
}

fn length(tokens: usize) -> Result<u32, String> {
    u32::try_from(tokens).map_err(|_| format!("{tokens} tokens in one conversation"))
}

// ---- ShareGPT ----

#[derive(Deserialize)]
struct Shared {
    conversations: Vec<SharedMessage>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Deserialize)]
struct SharedMessage {
    #[serde(alias = "role")]
    from: String,
    #[serde(alias = "content", alias = "text")]
    value: String,
}

/// Reads an array of conversations, or one per line. Each is a session.
pub(super) fn read_share_gpt(
    mut input: impl BufRead,
    sink: &mut Sink<'_>,
) -> Result<(), TraceError> {
    let start = input.fill_buf().map_err(|error| sink.input_error(error))?;
    let is_array = start.trim_ascii_start().starts_with(b"[");
    let mut json = serde_json::Deserializer::from_reader(input);
    let read = match is_array {
        // Streamed, because such files are larger than the resulting traces.
        true => serde::Deserializer::deserialize_seq(&mut json, Conversations(sink)),
        false => take_each(json.into_iter::<Value>(), sink),
    };
    match read {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(error),
        Err(error) => {
            let line = error.line() as u64;
            sink.turn_down(line, error.to_string())
        }
    }
}

fn take_each(
    conversations: impl Iterator<Item = serde_json::Result<Value>>,
    sink: &mut Sink<'_>,
) -> serde_json::Result<Result<(), TraceError>> {
    for (number, conversation) in (1..).zip(conversations) {
        if let Err(error) = take_shared(number, conversation?, sink) {
            return Ok(Err(error));
        }
    }
    Ok(Ok(()))
}

/// An array that is streamed.
struct Conversations<'s, 'a>(&'s mut Sink<'a>);

impl<'de> Visitor<'de> for Conversations<'_, '_> {
    type Value = Result<(), TraceError>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array of conversations")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Self::Value, A::Error> {
        for number in 1.. {
            let Some(conversation) = all.next_element_seed(Anything)? else { break };
            if let Err(error) = take_shared(number, conversation, self.0) {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }
}

struct Anything;

impl<'de> DeserializeSeed<'de> for Anything {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        Value::deserialize(json)
    }
}

fn take_shared(number: u64, conversation: Value, sink: &mut Sink<'_>) -> Result<(), TraceError> {
    sink.line = number;
    let conversation =
        serde_json::from_value::<Shared>(conversation).map_err(|error| error.to_string());
    let conversation = conversation.and_then(|shared| {
        let mut builder = ConversationBuilder::new(None);
        sink.ignore(shared.more.keys().map(String::as_str).filter(|name| *name != "id"));
        for message in shared.conversations {
            builder.add_message(
                &RoleMessage { role: message.from, content: message.value },
                None,
                sink,
            )?;
        }
        Ok(builder.conversation)
    });
    match conversation {
        // Some conversations have no answer, and thus no request.
        Ok(conversation) if conversation.turns.is_empty() => sink.skipped_lines += 1,
        Ok(conversation) => sink.push(conversation),
        Err(problem) => sink.turn_down(number, problem)?,
    }
    Ok(())
}

// ---- OpenAI ----

/// A request or a conversation, plain or as a line of a batch file.
#[derive(Deserialize)]
struct Line {
    messages: Option<Vec<Message>>,
    body: Option<Body>,
    #[serde(alias = "created", alias = "created_at")]
    timestamp: Option<Value>,
    #[serde(alias = "conversation_id", alias = "session")]
    session_id: Option<Value>,
    #[serde(alias = "max_completion_tokens")]
    max_tokens: Option<u32>,
    #[serde(alias = "output_length")]
    output_tokens: Option<u32>,
    usage: Option<Usage>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Deserialize)]
struct Body {
    messages: Vec<Message>,
    #[serde(alias = "max_completion_tokens")]
    max_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<Value>,
}

impl Message {
    /// Returns the text of the message's parts.
    fn message_text(self) -> RoleMessage {
        let content = match self.content {
            Some(Value::String(text)) => text,
            Some(Value::Array(parts)) => {
                let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
                texts.collect::<Vec<_>>().join("\n")
            }
            _ => String::new(),
        };
        RoleMessage { role: self.role, content }
    }
}

/// Reads one request or conversation per line. If the messages end with an answer, each answer is a
/// turn; otherwise the line is one request. Lines with the same session id are turns of it.
pub(super) fn read_open_ai(input: impl BufRead, sink: &mut Sink<'_>) -> Result<(), TraceError> {
    let mut sessions: HashMap<String, u64> = HashMap::new();
    // The current conversation of each session.
    let mut latest: HashMap<u64, usize> = HashMap::new();
    for (number, line) in (1..).zip(input.lines()) {
        let line = line.map_err(|error| sink.input_error(error))?;
        if line.trim().is_empty() {
            continue;
        }
        let parsed = serde_json::from_str::<Line>(&line).map_err(|error| error.to_string());
        let read = parsed.and_then(|line| conversation(line, &mut sessions, sink));
        let conversation = match read {
            Ok(conversation) => conversation,
            Err(problem) => {
                sink.turn_down(number, problem)?;
                continue;
            }
        };
        if let Some(session) = conversation.session {
            let before = latest.get(&session).map(|&place| &mut sink.conversations[place]);
            if let Some(before) = before
                && conversation.tokens.starts_with(&before.tokens)
            {
                before.tokens = conversation.tokens;
                before.turns.extend(conversation.turns);
                continue;
            }
            latest.insert(session, sink.conversations.len());
        }
        sink.line = number;
        sink.push(conversation);
    }
    Ok(())
}

fn conversation(
    line: Line,
    sessions: &mut HashMap<String, u64>,
    sink: &mut Sink<'_>,
) -> Result<Conversation, String> {
    let known = ["model", "custom_id", "method", "url", "id", "object", "stream", "temperature"];
    sink.ignore(line.more.keys().map(String::as_str).filter(|name| !known.contains(name)));
    let at_us = match &line.timestamp {
        None | Some(Value::Null) => None,
        Some(value) => {
            Some(time::of_json(value).ok_or_else(|| format!("timestamp {value} is not a time"))?)
        }
    };
    let session = line.session_id.filter(|value| !value.is_null()).map(|value| {
        let name = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let next = sessions.len() as u64;
        *sessions.entry(name).or_insert(next)
    });
    let limit = line.max_tokens.or(line.body.as_ref().and_then(|body| body.max_tokens));
    let given = line.output_tokens.or(line.usage.and_then(|usage| usage.completion_tokens));
    let messages = line.messages.or(line.body.map(|body| body.messages));
    let messages: Vec<RoleMessage> =
        messages.ok_or("no messages")?.into_iter().map(Message::message_text).collect();
    let mut builder = ConversationBuilder::new(session);
    if messages.last().is_some_and(RoleMessage::is_answer) {
        for message_text in &messages {
            builder.add_message(
                message_text,
                at_us.filter(|_| builder.conversation.turns.is_empty()),
                sink,
            )?;
        }
    } else {
        for message_text in &messages {
            builder.add_message(message_text, None, sink)?;
        }
        // Earlier messages are context: only the last answer is requested.
        builder.conversation.turns.clear();
        let answer_tokens = given.or(limit).unwrap_or(ANSWER_TOKENS);
        builder.add_request(at_us, answer_tokens, sink)?;
    }
    match builder.conversation.turns.is_empty() {
        true => Err("there is no user message before the response".to_owned()),
        false => Ok(builder.conversation),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{import, lengths};
    use super::*;
    use crate::trace::{ImportOptions, Trace};

    #[test]
    fn imports_share_gpt_as_sessions() {
        let one = r#"{"id": "a", "lang": "en", "conversations": [
            {"from": "human", "value": "What is a page, and why does it have sixteen tokens?"},
            {"from": "gpt", "value": "A page is what a cache keeps: consecutive tokens and their keys and values."},
            {"from": "human", "value": "And a block?"},
            {"from": "gpt", "value": "The same, in a trace."}]}"#;
        let unanswered = r#"{"id": "b", "conversations": [{"from": "human", "value": "Hello?"}]}"#;
        let array = format!("[{one}, {unanswered}]");
        let lines = format!("{}\n{unanswered}\n", one.replace('\n', " "));
        for text in [array, lines] {
            let reading = import(&text).unwrap();
            assert_eq!(
                (reading.skipped_lines, reading.ignored.len()),
                (1, 1),
                "{:?}",
                reading.ignored
            );
            let found = lengths(&reading.trace);
            // Markers of 3 and 2 tokens, and a quarter of the characters.
            assert_eq!(found, [(3 + 13 + 2, 19), (18 + 19 + 3 + 3 + 2, 6)]);
            let trace = &reading.trace;
            assert!(trace.has_sessions());
            // The answer without its last token, in whole pages.
            assert_eq!(trace.ceiling(4).by_request, [0, (18 + 19 - 1) / 4 * 4]);
        }
    }

    #[test]
    fn lines_of_a_session_are_linked() {
        let messages = |more: &str| {
            format!("{{\"role\": \"user\", \"content\": \"Tell me a long story.\"}}{more}")
        };
        let answer = ", {\"role\": \"assistant\", \"content\": \"Once upon a time there was a cache.\"}, \
                      {\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"Go on.\"}]}";
        let text = format!(
            "{{\"session_id\": \"s\", \"timestamp\": 10, \"usage\": {{\"completion_tokens\": 9}}, \"messages\": [{}]}}\n\
             {{\"session_id\": \"s\", \"timestamp\": 30.5, \"max_tokens\": 40, \"seed\": 1, \"messages\": [{}]}}\n\
             {{\"custom_id\": \"x\", \"body\": {{\"messages\": [{}]}}}}\n",
            messages(""),
            messages(answer),
            messages("")
        );
        let reading = import(&text).unwrap();
        assert_eq!(reading.ignored, ["seed"]);
        let trace = &reading.trace;
        let outputs: Vec<u32> =
            trace.requests().iter().map(|request| request.output_tokens).collect();
        assert!(outputs.contains(&9) && outputs.contains(&40) && outputs.contains(&ANSWER_TOKENS));
        let second = trace.requests().iter().find(|request| request.output_tokens == 40).unwrap();
        assert!(second.link.unwrap().after.is_some());
    }

    #[test]
    fn uses_a_tokenizer_and_names_invalid_lines() {
        let bytes = |text: &str| Ok(text.bytes().map(u32::from).collect());
        let options = ImportOptions { tokenise: Some(&bytes), ..ImportOptions::default() };
        let line = "{\"messages\": [{\"role\": \"user\", \"content\": \"abc\"}]}";
        let trace = Trace::import_from(line.as_bytes(), "x", &options).unwrap().trace;
        let marks = "<|user|>\n".len() + "<|assistant|>\n".len();
        assert_eq!(trace.requests()[0].input_tokens as usize, marks + 3);
        let refused = import(&format!("{line}\n{{\"messages\": 5}}\n")).unwrap_err().to_string();
        assert!(refused.starts_with("traffic, line 2: invalid type"), "{refused}");
    }
}
