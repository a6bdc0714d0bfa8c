//! Prompts that are part of their answers.

use terrace_engine::Logprobs;
use terrace_model::{Decoder, Tokenizer};
use terrace_scheduler::Token;

use crate::logprobs::Scribe;

/// A prompt as the text that its tokens are, and where its answer goes on.
#[derive(Clone, Debug)]
pub(crate) struct Echo {
    /// Each token with the text that is complete with it.
    tokens: Vec<(Token, String)>,
    decoder: Decoder,
}

impl Echo {
    pub(crate) fn new(tokenizer: &Tokenizer, prompt: &[Token], shows_special: bool) -> Self {
        let mut decoder = tokenizer.decoder();
        if shows_special {
            decoder = decoder.showing_special();
        }
        let tokens = prompt.iter().map(|token| (*token, decoder.push(*token))).collect();
        Self { tokens, decoder }
    }

    /// What turns the tokens after it into text.
    pub(crate) fn decoder(&self) -> Decoder {
        self.decoder.clone()
    }

    /// Its text; tells the scribe about its tokens, whose log-probabilities are known from the second on.
    pub(crate) fn tell(self, logprobs: Vec<Logprobs>, scribe: Option<&mut Scribe>) -> String {
        if let Some(scribe) = scribe {
            let logprobs = std::iter::once(None).chain(logprobs.into_iter().map(Some));
            for ((token, text), logprobs) in self.tokens.iter().zip(logprobs) {
                scribe.add(*token, logprobs, text);
            }
        }
        self.tokens.into_iter().map(|(_, text)| text).collect()
    }
}
