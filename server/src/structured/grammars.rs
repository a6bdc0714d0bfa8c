//! Rules as llguidance follows them, token by token.

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use terrace_engine::{Allowed, Grammar, GrammarError};
use terrace_model::Tokenizer;
use terrace_scheduler::Token;

use super::{Rule, Structure};
use crate::error::ApiError;

/// The parts of a grammar that may lie in one another.
const NESTING_MAX: usize = 128;

/// What all rules need to know of the model's tokens. It takes a while to make, and is made for the first
/// request that has a rule.
#[derive(Default)]
pub(crate) struct Grammars(OnceLock<Result<Factory, String>>);

struct Factory {
    factory: ParserFactory,
    /// A token of its own that stands for the end of an answer.
    end: Token,
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Grammars").field(&self.0.get().is_some()).finish()
    }
}

impl Grammars {
    /// Compiles a rule, which is bounded but may take some tens of milliseconds, and at first longer.
    ///
    /// # Errors
    /// Why it cannot be followed.
    pub(crate) fn compile(
        &self,
        tokenizer: &Tokenizer,
        structure: &Structure,
    ) -> Result<Compiled, ApiError> {
        let factory = self.0.get_or_init(|| Factory::new(tokenizer));
        let Factory { factory, end } = factory.as_ref().map_err(|why| structure.wrong(why))?;
        let grammar = match &structure.rule {
            Rule::Schema(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Rule::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Rule::Choice(choices) => TopLevelGrammar::from_regex(&alternatives(choices)),
            Rule::Lark(grammar) => {
                check_nesting(grammar).map_err(|why| structure.wrong(why))?;
                TopLevelGrammar::from_lark(grammar.clone())
            }
        };
        let matcher = Matcher::new(factory.create_parser(grammar));
        match matcher.get_error() {
            Some(why) => Err(structure.wrong(why)),
            None => Ok(Compiled { matcher, end: *end }),
        }
    }
}

impl Factory {
    fn new(tokenizer: &Tokenizer) -> Result<Self, String> {
        let end = tokenizer.vocabulary() as Token;
        let is_text = |word: &Vec<u8>| word.first().is_some_and(|byte| *byte != SPECIAL);
        let mut words: Vec<Vec<u8>> = (0..end).map(|token| word(tokenizer, token)).collect();
        if !words.iter().any(is_text) {
            return Err(
                "the model's tokenizer.json does not define the bytes of its tokens".to_owned()
            );
        }
        words.push(special("<|end of answer|>"));
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, end), &words);
        let tokens: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| error.to_string())?;
        // Of messages only what helps whoever wrote the rule.
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        limits.max_lexer_states = 50_000;
        limits.max_grammar_size = 200_000;
        Ok(Self { factory, end })
    }
}

/// Begins what stands for a special token: no text has this byte.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

fn special(name: &str) -> Vec<u8> {
    [&[SPECIAL], name.as_bytes()].concat()
}

/// What the parser knows a token by.
fn word(tokenizer: &Tokenizer, token: Token) -> Vec<u8> {
    match tokenizer.token_bytes(token) {
        None => Vec::new(),
        Some(token) if token.is_special => [&[SPECIAL], &token.bytes[..]].concat(),
        Some(token) => token.bytes,
    }
}

/// A regular expression for any of some texts.
fn alternatives(choices: &[String]) -> String {
    let escaped = |choice: &String| {
        let mut out = String::new();
        for character in choice.chars() {
            if character.is_ascii_punctuation() || character.is_ascii_whitespace() {
                out.push_str(&format!("\\x{:02x}", u32::from(character)));
            } else {
                out.push(character);
            }
        }
        out
    };
    format!("({})", choices.iter().map(escaped).collect::<Vec<_>>().join("|"))
}

/// Parsers go as deep as a grammar does, and the stack does not.
fn check_nesting(grammar: &str) -> Result<(), String> {
    let (mut depth, mut deepest) = (0usize, 0);
    for byte in grammar.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    match deepest > NESTING_MAX {
        true => Err(format!("it is nested more than {NESTING_MAX} levels deep")),
        false => Ok(()),
    }
}

/// A rule that can be followed.
pub(crate) struct Compiled {
    matcher: Matcher,
    end: Token,
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Compiled").finish_non_exhaustive()
    }
}

impl Compiled {
    /// For one answer, which these tokens end.
    pub(crate) fn grammar(&self, ends: Arc<[Token]>) -> Box<dyn Grammar> {
        Box::new(Followed { matcher: self.matcher.deep_clone(), end: self.end, ends })
    }
}

/// A rule as one answer follows it.
struct Followed {
    matcher: Matcher,
    end: Token,
    ends: Arc<[Token]>,
}

impl std::fmt::Debug for Followed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stopped = self.matcher.is_stopped();
        formatter.debug_struct("Followed").field("stopped", &stopped).finish_non_exhaustive()
    }
}

impl Grammar for Followed {
    fn advance(&mut self, token: Token) -> Result<(), GrammarError> {
        self.matcher.consume_token(token).map_err(|error| GrammarError(error.to_string()))
    }

    fn allowed(&mut self) -> Result<Allowed, GrammarError> {
        let mut allowed =
            self.matcher.compute_mask_or_eos().map_err(|error| GrammarError(error.to_string()))?;
        if allowed.is_allowed(self.end) {
            allowed.disallow_token(self.end);
            for end in self.ends.iter().filter(|end| **end < self.end) {
                allowed.allow_token(*end);
            }
        }
        Ok(allowed.into())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const END: Token = 257;

    fn compile(rule: Rule) -> Result<Compiled, String> {
        let structure = Structure { field: "guided".to_owned(), rule };
        let compiled = Grammars::default().compile(&Tokenizer::bytes(), &structure);
        compiled.map_err(|error| error.json()["error"]["message"].as_str().unwrap().to_owned())
    }

    /// Whether a text can be said, and whether it may end there.
    fn says(compiled: &Compiled, text: &str) -> Option<bool> {
        let mut grammar = compiled.grammar([END].into());
        let has =
            |allowed: &Allowed, token: Token| allowed[token as usize / 32] >> (token % 32) & 1 == 1;
        for byte in text.bytes() {
            let allowed = grammar.allowed().unwrap();
            has(&allowed, byte.into()).then_some(())?;
            grammar.advance(byte.into()).unwrap();
        }
        Some(has(&grammar.allowed().unwrap(), END))
    }

    #[test]
    fn texts_follow_every_kind_of_rule() {
        let schema = json!({
            "type": "object",
            "properties": { "a": { "type": "integer" }, "b": { "enum": ["x", "ß"] } },
            "required": ["a"],
            "additionalProperties": false,
        });
        let object = compile(Rule::Schema(schema)).unwrap();
        assert_eq!(says(&object, r#"{"a": 12"#), Some(false));
        assert_eq!(says(&object, r#"{"a": 12, "b": "ß"}"#), Some(true));
        assert_eq!(says(&object, r#"{"b"#), None);
        let regex = compile(Rule::Regex("[0-9]{3}(-x)?".to_owned())).unwrap();
        assert_eq!(says(&regex, "123"), Some(true));
        assert_eq!(says(&regex, "123-"), Some(false));
        assert_eq!(says(&regex, "12a"), None);
        let texts = ["a.b", "a b (c)", "ß|\n"].map(str::to_owned);
        let choice = compile(Rule::Choice(texts.to_vec())).unwrap();
        for text in &texts {
            assert_eq!(says(&choice, text), Some(true), "{text}");
        }
        assert_eq!(says(&choice, "axb"), None);
        let lark = compile(Rule::Lark("start: \"<\" start \">\" | \"x\"".to_owned())).unwrap();
        assert_eq!(says(&lark, "<<x>"), Some(false));
        assert_eq!(says(&lark, "<<x>>"), Some(true));
        assert_eq!(says(&lark, "<<x>>>"), None);
    }

    #[test]
    fn a_rule_that_makes_no_sense_is_told_with_the_reason() {
        let wrong = [
            Rule::Schema(json!({ "type": "nonsense" })),
            Rule::Schema(json!({ "type": "integer", "minimum": 3, "maximum": 1 })),
            Rule::Regex("(a".to_owned()),
            Rule::Lark("start: nowhere".to_owned()),
            Rule::Lark("(".repeat(100_000)),
            Rule::Lark(format!("start: {}\"a\"{}", "[".repeat(5_000), "]".repeat(5_000))),
        ];
        for rule in wrong {
            let shown = format!("{rule:.60?}");
            let message = compile(rule).unwrap_err();
            assert!(message.starts_with("`guided` cannot be satisfied: "), "{shown}: {message}");
            assert!(message.len() < 2_000, "{shown}: {message}");
        }
    }

    #[test]
    fn without_tokens_that_end_it_an_answer_goes_on_while_it_can() {
        let regex = compile(Rule::Regex("aa?".to_owned())).unwrap();
        let mut grammar = regex.grammar([].into());
        for _ in 0..2 {
            assert_eq!(grammar.allowed().unwrap()[3], 1 << (u32::from(b'a') % 32));
            grammar.advance(b'a'.into()).unwrap();
        }
        assert!(grammar.allowed().unwrap().iter().all(|word| *word == 0));
    }
}
