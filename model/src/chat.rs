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

/// Reasons why a conversation cannot be written as a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The model's folder has no template.
    #[error(
        "the model has no chat template; use /v1/completions, or put a chat_template.jinja into \
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
        "the model's chat template does not support tools: leave `tools` out, or put a \
         chat_template.jinja that writes them into the model's folder"
    )]
    NoTools,
    /// A message calls functions, and the template does not write that.
    #[error(
        "the model's chat template does not support `tool_calls`: write the calls as text, or put \
         a chat_template.jinja that writes them into the model's folder"
    )]
    NoToolCalls,
    /// The last message is to be continued, and there is none or it is empty.
    #[error("`continue_final_message` needs a last message that is not empty")]
    NothingToContinue,
    /// The last message is to be continued, and the template does not write it as it is.
    #[error("the model's chat template changes the last message, so it cannot be continued")]
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

    /// Returns whether there is a template.
    #[must_use]
    pub fn exists(&self) -> bool {
        match &self.0 {
            Kind::BuiltIn | Kind::Jinja(_) => true,
            Kind::Missing => false,
        }
    }

    /// Returns whether the template contains this text. That shows which features it supports.
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
    /// Fails if there is no template, or if it cannot write the conversation.
    pub fn render(&self, conversation: &Conversation) -> Result<String, ChatError> {
        self.check(conversation)?;
        match &self.0 {
            Kind::Missing => Err(ChatError::NoTemplate),
            Kind::BuiltIn => Ok(render_built_in(conversation)),
            Kind::Jinja(jinja) => jinja.render(conversation),
        }
    }

    /// Checks that the prompt has a place for everything in the conversation.
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
