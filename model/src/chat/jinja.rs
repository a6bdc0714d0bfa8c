//! Templates in the language of model folders.

use jiff::Timestamp;
use jiff::fmt::strtime::{self, BrokenDownTime, PosixCustom};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize;

use super::ChatError;
use crate::conversation::{Conversation, PromptEnd};

#[derive(Clone, Debug)]
pub(super) struct Jinja {
    environment: Environment<'static>,
    begin: String,
    end: String,
    /// The source of all templates, which shows their features.
    source: String,
    has_one_for_tools: bool,
}

/// The template of an environment.
const TEMPLATE: &str = "chat";
/// The template for conversations with tools, in folders that have a separate one.
const TEMPLATE_FOR_TOOLS: &str = "chat with tools";
/// Instructions after which a template counts as endless. A few hundred per message are usual.
const FUEL: u64 = 10_000_000;

impl Jinja {
    /// See [`ChatTemplate::jinja`](super::ChatTemplate::jinja).
    pub(super) fn new(
        source: String,
        for_tools: Option<String>,
        begin: String,
        end: String,
    ) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message).with_source(Refusal))
        });
        environment
            .add_function("strftime_now", |format: &str| format_time(format, Timestamp::now()));
        environment.add_filter("tojson", to_json);
        let mut jinja =
            Jinja { environment, begin, end, source, has_one_for_tools: for_tools.is_some() };
        jinja.add(TEMPLATE, jinja.source.clone())?;
        if let Some(for_tools) = for_tools {
            jinja.source.push_str(&for_tools);
            jinja.add(TEMPLATE_FOR_TOOLS, for_tools)?;
        }
        Ok(jinja)
    }

    /// Returns whether a template contains this text.
    pub(super) fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    fn add(&mut self, name: &'static str, source: String) -> Result<(), String> {
        self.environment.add_template_owned(name, source).map_err(|error| error.to_string())
    }

    pub(super) fn render(&self, conversation: &Conversation) -> Result<String, ChatError> {
        let Conversation { messages, tools, variables, end, .. } = conversation;
        // Templates ask whether these are none, not whether they are defined.
        let none = Value::from(());
        let (name, tools) = match tools.is_empty() {
            true => (TEMPLATE, none.clone()),
            false if self.has_one_for_tools => (TEMPLATE_FOR_TOOLS, Value::from(Serde(tools))),
            false => (TEMPLATE, Value::from(Serde(tools))),
        };
        let template = self.environment.get_template(name).map_err(failure)?;
        let rendered = template.render(context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => *end == PromptEnd::Answer,
            bos_token => &self.begin,
            eos_token => &self.end,
            tools => tools,
            documents => none,
            ..Value::from(Serde(variables))
        });
        let text = rendered.map_err(failure)?;
        match (end, messages.last()) {
            (PromptEnd::Continued, Some(last)) => cut_within(text, &last.content),
            (PromptEnd::Answer | PromptEnd::LastMessage | PromptEnd::Continued, _) => Ok(text),
        }
    }
}

/// The text up to the end of what the last message says. Templates write that with or without the
/// blanks around it.
fn cut_within(mut text: String, last: &str) -> Result<String, ChatError> {
    let said = last.trim();
    let at = text.rfind(said).ok_or(ChatError::CannotContinue)?;
    let blanks = &last[last.trim_end().len()..];
    let mut end = at + said.len();
    if text[end..].starts_with(blanks) {
        end += blanks.len();
    }
    text.truncate(end);
    Ok(text)
}

/// Marks the errors that a template raises itself.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct Refusal;

fn failure(error: Error) -> ChatError {
    let source = std::error::Error::source(&error);
    match source.is_some_and(|source| source.is::<Refusal>()) {
        true => ChatError::Refused(error.detail().unwrap_or_default().to_owned()),
        false => ChatError::Failed(error.to_string()),
    }
}

/// JSON as Python writes it, which is what models were shown: with blanks after commas and colons.
fn to_json(value: &Value, options: minijinja::value::Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Other arguments of Python's function make no difference to templates.
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) => {
            let indent = vec![b' '; indent.min(16)];
            let formatter = serde_json::ser::PrettyFormatter::with_indent(&indent);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)),
    };
    let invalid = |error: String| Error::new(ErrorKind::BadSerialization, error);
    written.map_err(|error| invalid(error.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|error| invalid(error.to_string()))?;
    Ok(Value::from_safe_string(text))
}

struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

/// A time, in universal time, as Python's `strftime` writes it; codes that mean nothing stay as they are.
fn format_time(format: &str, time: Timestamp) -> Result<String, Error> {
    let as_python = strtime::Config::new().custom(PosixCustom::new()).lenient(true);
    let invalid = |error: jiff::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
    BrokenDownTime::from(time).to_string_with_config(&as_python, format).map_err(invalid)
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::format_time;
    use crate::chat::{ChatError, ChatTemplate};
    use crate::conversation::{Conversation, FunctionCall, Message, PromptEnd, ToolCall, ToolKind};

    fn says(role: &str, content: &str) -> Message {
        Message::new(role, content)
    }

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::jinja(source.to_owned(), None, "<s>".to_owned(), "</s>".to_owned()).unwrap()
    }

    fn render(chat: &ChatTemplate, messages: &[Message]) -> Result<String, ChatError> {
        chat.render(&Conversation::new(messages.to_vec()))
    }

    #[test]
    fn templates_are_written_in_the_dialect_of_model_folders() {
        let chat = template(
            "{{ bos_token }}{% for message in messages %}\n    {% if message['role'] == 'user' %}\n\
             [{{ message.content.strip() | upper }}]{% else %}({{ message['content'] }}){{ eos_token }}\
             {% endif %}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}",
        );
        let text = render(&chat, &[says("user", " hi "), says("assistant", "<b>")]).unwrap();
        assert_eq!(text, "<s>[HI](<b>)</s>>");
    }

    #[test]
    fn templates_may_use_what_those_of_real_models_use() {
        let chat = template(
            "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- set date_string = \
             strftime_now(\"%Y\") %}\n{%- endif %}\n{%- if messages[0]['role'] == 'system' %}\n    \
             {%- set system = messages[0]['content'] | trim %}\n    {%- set messages = messages[1:] \
             %}\n{%- else %}\n    {%- set system = \"\" %}\n{%- endif %}\n{%- if tools is not none \
             %}{{ tools }}{% endif %}\n{{- system }}|\n{%- set ns = namespace(last=-1) %}\n\
             {%- for message in messages[::-1] %}\n    {%- set ns.last = loop.index0 %}\n    \
             {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}\n        {{- \
             '<' + message['role'] + '>' + message['content'].split('#')[-1].lstrip('\\n') }}\n    \
             {%- endif %}\n    {%- if loop.last and message.content.startswith('b') %}{% break %}\
             {% endif %}\n{%- endfor %}\n{{- ns.last }}{{ date_string | length }}",
        );
        let messages = [says("system", " be nice\n"), says("user", "a"), says("user", "#\nb")];
        assert_eq!(render(&chat, &messages).unwrap(), "<s>be nice|<user>b<user>a14");
    }

    #[test]
    fn a_template_can_refuse_messages() {
        let chat = template("{{ raise_exception('roles must alternate') }}");
        let refused = Err(ChatError::Refused("roles must alternate".to_owned()));
        assert_eq!(render(&chat, &[]), refused);
        assert_eq!(render(&ChatTemplate::missing(), &[]), Err(ChatError::NoTemplate));
    }

    #[test]
    fn an_endless_template_ends() {
        let chat = template(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        );
        assert!(matches!(render(&chat, &[]), Err(ChatError::Failed(_))));
    }

    #[test]
    fn json_is_written_as_python_does() {
        let chat = template("{{ messages[0] | tojson }}");
        let text = render(&chat, &[says("user", "<ä> \"x\"")]).unwrap();
        assert_eq!(text, r#"{"role": "user", "content": "<ä> \"x\""}"#);
    }

    /// Writes tools and calls as templates of Qwen2 do.
    const WITH_TOOLS: &str = "{%- if tools %}\n{{- '<tools>' }}{%- for tool in tools %}{{- tool | \
        tojson }}{%- endfor %}{{- '</tools>' }}\n{%- endif %}\n{%- for message in messages %}\n{{- '<' + \
        message.role + '>' }}{%- if message.content %}{{- message.content }}{%- endif %}{%- for call in \
        message.tool_calls %}\n{%- if call.function is defined %}{%- set call = call.function %}\
        {%- endif %}{{- '<tool_call>' + call.name + call.arguments.city + (call.arguments | tojson) }}\
        {%- endfor %}{%- if message.tool_call_id %}{{- '#' + message.tool_call_id }}{%- endif %}\
        {%- endfor %}{%- if add_generation_prompt %}{{- '>' }}{%- endif %}\
        {%- if mood is defined %}{{- mood }}{%- endif %}";

    #[test]
    fn tools_and_calls_reach_a_template_as_it_expects_them() {
        let tool = json!({ "type": "function", "function": { "name": "f", "description": "d" } });
        let mut calls = says("assistant", "");
        calls.tool_calls.push(ToolCall {
            id: Some("1".to_owned()),
            kind: ToolKind::Function,
            function: FunctionCall { name: "f".to_owned(), arguments: json!({ "city": "x" }) },
        });
        let mut result = says("tool", "42");
        result.more.insert("tool_call_id".to_owned(), json!("1"));
        let conversation = Conversation {
            tools: vec![tool],
            variables: [("mood".to_owned(), json!("!"))].into_iter().collect(),
            ..Conversation::new(vec![says("user", "q"), calls, result])
        };
        let text = template(WITH_TOOLS).render(&conversation).unwrap();
        assert_eq!(
            text,
            "<tools>{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"d\"}}\
             </tools><user>q<assistant><tool_call>fx{\"city\": \"x\"}<tool>42#1>!"
        );
        let silent = template("{{ messages[0].content }}");
        assert_eq!(silent.render(&conversation), Err(ChatError::NoTools));
        let no_tools = Conversation { tools: Vec::new(), ..conversation.clone() };
        assert_eq!(silent.render(&no_tools), Err(ChatError::NoToolCalls));
        let two = ChatTemplate::jinja(
            "one tool_calls".to_owned(),
            Some("other tools".to_owned()),
            String::new(),
            String::new(),
        );
        let two = two.unwrap();
        assert_eq!(two.render(&conversation).unwrap(), "other tools");
        assert_eq!(two.render(&no_tools).unwrap(), "one tool_calls");
    }

    #[test]
    fn a_prompt_ends_where_it_is_told_to() {
        let chat = template(
            "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}\
             {% if add_generation_prompt %}<assistant>{% endif %}",
        );
        let until = |chat: &ChatTemplate, end, last: &str| {
            let messages = vec![says("user", "a b"), says("assistant", last)];
            chat.render(&Conversation { end, ..Conversation::new(messages) })
        };
        let said = "<user>a b</><assistant>b";
        let whole = format!("{said}</><assistant>");
        assert_eq!(until(&chat, PromptEnd::Answer, " b ").unwrap(), whole);
        assert_eq!(until(&chat, PromptEnd::LastMessage, " b ").unwrap(), format!("{said}</>"));
        assert_eq!(until(&chat, PromptEnd::Continued, " b ").unwrap(), said);
        let kept = template("{% for m in messages %}<{{ m.content }}>{% endfor %}");
        assert_eq!(until(&kept, PromptEnd::Continued, " b ").unwrap(), "<a b>< b ");
        let nothing = until(&chat, PromptEnd::Continued, " ");
        assert_eq!(nothing, Err(ChatError::NothingToContinue));
        let changed = until(&template("{{ messages | length }}"), PromptEnd::Continued, "b");
        assert_eq!(changed, Err(ChatError::CannotContinue));
        let built_in = until(&ChatTemplate::built_in(), PromptEnd::Continued, "b ").unwrap();
        assert_eq!(built_in, "<|begin|><|user|>a b<|end|><|assistant|>b ");
    }

    #[test]
    fn dates_are_right_around_leap_days() {
        let at = |format: &str, seconds: i64| {
            format_time(format, Timestamp::from_second(seconds).unwrap()).unwrap()
        };
        assert_eq!(at("%d %b %Y", 0), "01 Jan 1970");
        assert_eq!(at("%A %d %B %Y %H:%M:%S", 1_709_210_096), "Thursday 29 February 2024 12:34:56");
        assert_eq!(at("%a %y-%m-%d %E%%", 1_735_689_600), "Wed 25-01-01 %E%");
        assert_eq!(at("%-d %I %p %j %c %", 0), "1 12 AM 001 Thu Jan  1 00:00:00 1970 %");
    }
}
