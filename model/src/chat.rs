//! Conversations as the text that a model was trained on.

#[cfg(not(feature = "folders"))]
mod absent;
#[cfg(feature = "folders")]
mod jinja;

#[cfg(not(feature = "folders"))]
use absent::Jinja;
#[cfg(feature = "folders")]
use jinja::Jinja;

use crate::conversation::{Conversation, Message, PromptEnd};
use crate::tokenizer::EncodeError;

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
    /// There are functions, and the template has no place for them.
    #[error(
        "the model's chat template knows nothing of tools: leave `tools` out, or put a \
         chat_template.jinja that writes them into the model's folder"
    )]
    NoTools,
    /// A message calls functions, and the template does not write that.
    #[error(
        "the model's chat template knows nothing of `tool_calls`: write the calls as text, or put a \
         chat_template.jinja that writes them into the model's folder"
    )]
    NoToolCalls,
    /// The last message is to be continued, and there is none or it is empty.
    #[error("`continue_final_message` needs a last message that says something")]
    NothingToContinue,
    /// The last message is to be continued, and the template does not write it as it is.
    #[error("the model's chat template changes the last message, so that it cannot be continued")]
    CannotContinue,
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
    Jinja(Box<Jinja>),
}

impl ChatTemplate {
    /// The built-in model's template.
    pub(crate) fn built_in() -> Self {
        Self(Kind::BuiltIn)
    }

    /// No template: every conversation is refused.
    pub(crate) fn missing() -> Self {
        Self(Kind::Missing)
    }

    /// A template in the language of model folders, and perhaps another for conversations with tools.
    /// `begin` and `end` are the strings of the special tokens that begin and end a text.
    pub(crate) fn jinja(
        source: String,
        for_tools: Option<String>,
        begin: String,
        end: String,
    ) -> Result<Self, String> {
        let jinja = Jinja::new(source, for_tools, begin, end)?;
        Ok(Self(Kind::Jinja(Box::new(jinja))))
    }

    /// Whether there is a template.
    #[must_use]
    pub fn exists(&self) -> bool {
        match &self.0 {
            Kind::BuiltIn | Kind::Jinja(_) => true,
            Kind::Missing => false,
        }
    }

    /// Whether the template has this text in it, which says what it knows and how it writes it.
    #[must_use]
    pub fn mentions(&self, text: &str) -> bool {
        match &self.0 {
            Kind::BuiltIn => ["tools", "tool_calls", "<tool_call>"].contains(&text),
            Kind::Missing => false,
            Kind::Jinja(jinja) => jinja.mentions(text),
        }
    }

    /// A conversation as the text of a prompt. For tokens use
    /// [`Tokenizer::encode_chat`](crate::Tokenizer::encode_chat), which keeps the built-in model's
    /// marks apart from what messages say.
    ///
    /// # Errors
    /// When there is no template, or it cannot write the conversation.
    pub fn render(&self, conversation: &Conversation) -> Result<String, ChatError> {
        self.check(conversation)?;
        match &self.0 {
            Kind::Missing => Err(ChatError::NoTemplate),
            Kind::BuiltIn => Ok(render_built_in(conversation)),
            Kind::Jinja(jinja) => jinja.render(conversation),
        }
    }

    /// Whether everything in the conversation has a place in its prompt.
    pub(crate) fn check(&self, conversation: &Conversation) -> Result<(), ChatError> {
        let Conversation { messages, tools, end, .. } = conversation;
        if !self.exists() {
            return Err(ChatError::NoTemplate);
        }
        if !tools.is_empty() && !self.mentions("tools") {
            return Err(ChatError::NoTools);
        }
        let calls = messages.iter().any(|message| !message.tool_calls.is_empty());
        if calls && !self.mentions("tool_calls") {
            return Err(ChatError::NoToolCalls);
        }
        let last_says = messages.last().is_some_and(|last| !last.content.trim().is_empty());
        if *end == PromptEnd::Continued && !last_says {
            return Err(ChatError::NothingToContinue);
        }
        Ok(())
    }
}

fn render_built_in(conversation: &Conversation) -> String {
    let tools = conversation.tools_in_words();
    let tools = tools.map(|tools| format!("<|system|>{tools}<|end|>")).unwrap_or_default();
    let message = |m: &Message| format!("<|{}|>{}<|end|>", m.role, m.in_words());
    let said: String = conversation.messages.iter().map(message).collect();
    let text = format!("<|begin|>{tools}{said}");
    match conversation.end {
        PromptEnd::Answer => text + "<|assistant|>",
        PromptEnd::LastMessage => text,
        PromptEnd::Continued => text.strip_suffix("<|end|>").unwrap_or(&text).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::conversation::{FunctionCall, ToolCall, ToolKind};

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

    /// As Qwen2 and its kin write tools and calls.
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
        assert_eq!(format_time("%d %b %Y", 0), "01 Jan 1970");
        assert_eq!(
            format_time("%A %d %B %Y %H:%M:%S", 1_709_210_096),
            "Thursday 29 February 2024 12:34:56"
        );
        assert_eq!(format_time("%a %y-%m-%d %q%%", 1_735_689_600), "Wed 25-01-01 %q%");
    }
}
