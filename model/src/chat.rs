//! Conversations as the text that a model was trained on.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};

use crate::tokenizer::EncodeError;

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it: `system`, `user` or `assistant`, or whatever else a model's template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// Why a conversation could not be written as a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The model's folder has no template.
    #[error(
        "the model has no chat template; ask for a plain completion, or put a chat_template.jinja into \
         the model's folder"
    )]
    NoTemplate,
    /// The template does not allow such messages.
    #[error("the model's chat template refuses the messages: {0}")]
    Refused(String),
    /// The template itself failed.
    #[error(
        "the model's chat template failed: {0}; a chat_template.jinja in its folder replaces it"
    )]
    Failed(String),
    /// The model has no tokens for it.
    #[error(transparent)]
    Encode(#[from] EncodeError),
}

/// Writes conversations as prompts.
#[derive(Clone, Debug)]
pub struct ChatTemplate(Kind);

#[derive(Clone, Debug)]
enum Kind {
    BuiltIn,
    Missing,
    Jinja { environment: Box<Environment<'static>>, begin: String, end: String },
}

/// The name of the only template of an environment.
const TEMPLATE: &str = "chat";
/// What a template may do before it counts as endless: some hundred instructions a message are usual.
const FUEL: u64 = 10_000_000;

impl ChatTemplate {
    /// The built-in model's template.
    pub(crate) fn built_in() -> Self {
        Self(Kind::BuiltIn)
    }

    /// No template: every conversation is refused.
    pub(crate) fn missing() -> Self {
        Self(Kind::Missing)
    }

    /// A template in the language of model folders. `begin` and `end` are the strings of the special
    /// tokens that begin and end a text.
    pub(crate) fn jinja(source: String, begin: String, end: String) -> Result<Self, String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message).with_source(Refusal))
        });
        environment.add_function("strftime_now", |format: &str| format_time(format, now()));
        environment.add_filter("tojson", to_json);
        let parsed = environment.add_template_owned(TEMPLATE, source);
        parsed.map_err(|error| error.to_string())?;
        Ok(Self(Kind::Jinja { environment: Box::new(environment), begin, end }))
    }

    /// Whether there is a template.
    #[must_use]
    pub fn exists(&self) -> bool {
        match &self.0 {
            Kind::BuiltIn | Kind::Jinja { .. } => true,
            Kind::Missing => false,
        }
    }

    /// A conversation as the text of a prompt, up to where the assistant answers. For tokens use
    /// [`Tokenizer::encode_chat`](crate::Tokenizer::encode_chat), which keeps the built-in model's
    /// marks apart from what messages say.
    ///
    /// # Errors
    /// When there is no template, or it refuses the messages.
    pub fn render(&self, messages: &[Message]) -> Result<String, ChatError> {
        match &self.0 {
            Kind::Missing => Err(ChatError::NoTemplate),
            Kind::BuiltIn => {
                let message = |m: &Message| format!("<|{}|>{}<|end|>", m.role, m.content);
                let said: String = messages.iter().map(message).collect();
                Ok(format!("<|begin|>{said}<|assistant|>"))
            }
            Kind::Jinja { environment, begin, end } => {
                let template = environment.get_template(TEMPLATE).map_err(failure)?;
                let rendered = template.render(context! {
                    messages => Value::from(Serde(messages)),
                    add_generation_prompt => true,
                    bos_token => begin,
                    eos_token => end,
                    // Templates ask whether these are none, not whether they are defined.
                    tools => Value::from(()),
                    documents => Value::from(()),
                });
                rendered.map_err(failure)
            }
        }
    }
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
    // What else Python's function can be told makes no difference to templates.
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

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A time, in universal time, as `strftime` writes it. Templates ask for dates; codes that none of
/// them uses stay as they are.
fn format_time(format: &str, seconds: u64) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] =
        ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(next) = rest.next() {
        if next != '%' {
            text.push(next);
            continue;
        }
        match rest.next() {
            Some('Y') => text.push_str(&year.to_string()),
            Some('y') => text.push_str(&format!("{:02}", year % 100)),
            Some('m') => text.push_str(&format!("{month:02}")),
            Some('d') => text.push_str(&format!("{day:02}")),
            Some('B') => text.push_str(month_name),
            Some('b') => text.push_str(&month_name[..3]),
            Some('A') => text.push_str(day_name),
            Some('a') => text.push_str(&day_name[..3]),
            Some('H') => text.push_str(&format!("{:02}", second / 3600)),
            Some('M') => text.push_str(&format!("{:02}", second / 60 % 60)),
            Some('S') => text.push_str(&format!("{:02}", second % 60)),
            Some('%') => text.push('%'),
            Some(other) => text.extend(['%', other]),
            None => text.push('%'),
        }
    }
    text
}

/// Year, month and day of a number of days since 1970.
fn date(mut days: u64) -> (u64, u64, u64) {
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn says(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::jinja(source.to_owned(), "<s>".to_owned(), "</s>".to_owned()).unwrap()
    }

    #[test]
    fn templates_are_written_in_the_dialect_of_model_folders() {
        let chat = template(
            "{{ bos_token }}{% for message in messages %}\n    {% if message['role'] == 'user' %}\n\
             [{{ message.content.strip() | upper }}]{% else %}({{ message['content'] }}){{ eos_token }}\
             {% endif %}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}",
        );
        let text = chat.render(&[says("user", " hi "), says("assistant", "<b>")]).unwrap();
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
        assert_eq!(chat.render(&messages).unwrap(), "<s>be nice|<user>b<user>a14");
    }

    #[test]
    fn a_template_can_refuse_messages() {
        let chat = template("{{ raise_exception('roles must alternate') }}");
        let refused = Err(ChatError::Refused("roles must alternate".to_owned()));
        assert_eq!(chat.render(&[]), refused);
        assert_eq!(ChatTemplate::missing().render(&[]), Err(ChatError::NoTemplate));
    }

    #[test]
    fn an_endless_template_ends() {
        let chat = template(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        );
        assert!(matches!(chat.render(&[]), Err(ChatError::Failed(_))));
    }

    #[test]
    fn json_is_written_as_python_does() {
        let chat = template("{{ messages[0] | tojson }}");
        let text = chat.render(&[says("user", "<ä> \"x\"")]).unwrap();
        assert_eq!(text, r#"{"role": "user", "content": "<ä> \"x\""}"#);
    }

    #[test]
    fn dates_are_right_around_leap_days() {
        assert_eq!(format_time("%d %b %Y", 0), "01 Jan 1970");
        assert_eq!(
            format_time("%A %d %B %Y %H:%M:%S", 1_709_210_096),
            "Thursday 29 February 2024 12:34:56"
        );
        assert_eq!(format_time("%a %y-%m-%d %q%%", 1_735_689_600), "Wed 25-01-01 %q%");
    }
}
