//! Completions and chat completions: from the body of a request to its answers.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, SelectAll};
use terrace_engine::{Generate, Sibling};
use terrace_model::PromptEnd;
use terrace_scheduler::Token;

use crate::answer::{Answer, Complete, Fragment, Manner, Piece};
use crate::auth::Caller;
use crate::body;
use crate::config::Limits;
use crate::echo::Echo;
use crate::error::{ApiError, json_response};
use crate::history::History;
use crate::metrics::AnswerClock;
use crate::parameters::{Input, Kind, Parameters, Prompt, TellsUsage};
use crate::reasoning::{self, ReasoningReader};
use crate::reply::{self, Reply, Usage};
use crate::responses;
use crate::served_model::ServedModel;
use crate::state::State;
use crate::stream;
use crate::structured::Compiled;
use crate::tool_calls::{self, CallReader, ToolFormat};
use crate::tools::Offer;

/// The answers to one request, under way.
pub(crate) struct Answers {
    /// Pieces of all answers, as they come, each with the place of its answer.
    pub(crate) pieces: SelectAll<BoxStream<'static, (usize, Piece)>>,
    pub(crate) reply: Reply,
    pub(crate) usage: Usage,
    pub(crate) count: usize,
    /// Span for log lines about them.
    pub(crate) span: tracing::Span,
    /// Number of answers to each prompt.
    n: usize,
    /// Counts a stream that ends with an error.
    pub(crate) history: Arc<History>,
}

impl Answers {
    /// Counts an answer that is complete.
    pub(crate) fn add(&mut self, index: usize, complete: &Complete) {
        self.usage.add(complete, index.is_multiple_of(self.n));
    }
}

/// Answers a completion or a chat.
pub(crate) async fn handle(
    kind: Kind,
    state: Arc<State>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let parse = move |bytes: &[u8], limits: &Limits| -> Result<_, ApiError> {
        Ok((Parameters::parse(kind, bytes, limits)?, ()))
    };
    let Begun { answers, is_stream, tells_usage, .. } =
        begin(kind, state, headers, body, parse).await?;
    if is_stream {
        return Ok(stream::respond(answers, tells_usage).into_response());
    }
    whole(answers).await
}

/// Answers a request of the Responses API.
pub(crate) async fn respond(
    state: Arc<State>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let begun = begin(Kind::Chat, state, headers, body, responses::parse).await?;
    let Begun { answers, is_stream, more, .. } = begun;
    match is_stream {
        true => Ok(responses::stream(answers, more)),
        false => responses::whole(answers, more).await,
    }
}

/// A request whose answers are under way.
struct Begun<T> {
    answers: Answers,
    is_stream: bool,
    tells_usage: TellsUsage,
    /// Other parts that were read from the request.
    more: T,
}

/// Reads a request and submits it.
async fn begin<T: Send + 'static>(
    kind: Kind,
    state: Arc<State>,
    headers: HeaderMap,
    body: Body,
    parse: impl FnOnce(&[u8], &Limits) -> Result<(Parameters, T), ApiError> + Send + 'static,
) -> Result<Begun<T>, ApiError> {
    let asked_at = Instant::now();
    state.check_open()?;
    let caller = state.gate.client(&headers)?;
    let received = body::receive(&headers, body, &state.limits, &state.bodies).await?;
    let asked = body::understand(&state, received, move |state, bytes| {
        let (parameters, more) = parse(bytes, &state.limits)?;
        Ok((understand(kind, state, parameters)?, more))
    });
    let (asked, more) = asked.await?;
    let (is_stream, tells_usage) = (asked.parameters.stream, asked.parameters.tells_usage);
    let rule = compile(&state, &asked.parameters).await?;
    let answers = submit(kind, &state, &caller, asked, rule, asked_at).await?;
    Ok(Begun { answers, is_stream, tells_usage, more })
}

/// A request that is understood.
struct Asked {
    parameters: Parameters,
    prompts: Vec<Vec<Token>>,
    /// The prompts as parts of their answers, if they are.
    echoes: Vec<Option<Echo>>,
    /// Functions that the answers may call, and the format of calls.
    calls: Option<(ToolFormat, Offer)>,
    /// Whether the answers continue the last message.
    continues: bool,
}

fn understand(kind: Kind, state: &State, mut parameters: Parameters) -> Result<Asked, ApiError> {
    let model = &state.model;
    if let Some(asked) = &parameters.model {
        model.check_name(asked)?;
    }
    let input = std::mem::replace(&mut parameters.input, Input::Prompts(Vec::new()));
    let (mut calls, mut continues) = (None, false);
    let mut prompts = match input {
        Input::Chat(chat) => {
            let prompt = chat.encode(model)?;
            continues = chat.conversation.end == PromptEnd::Continued;
            // A forced call has no format of its own.
            let format = model.tool_format.unwrap_or(ToolFormat::Hermes);
            calls = chat.offer.map(|offer| (format, offer));
            // Log-probabilities are undefined for the text of a call.
            if calls.is_some() && parameters.scoring.is_some() {
                let message = "`logprobs` and `tools` cannot be combined: leave one of them out";
                return Err(ApiError::field("logprobs", message));
            }
            vec![prompt]
        }
        Input::Prompts(prompts) => {
            let tokens = prompts.into_iter().map(|prompt| match prompt {
                Prompt::Tokens(tokens) => Ok(tokens),
                Prompt::Text(text) if parameters.add_special_tokens => {
                    model.tokenizer.encode(&text)
                }
                Prompt::Text(text) => model.tokenizer.encode_plain(&text),
            });
            let tokens: Result<_, _> = tokens.collect();
            tokens.map_err(|error| ApiError::field("prompt", error.to_string()))?
        }
    };
    let answer_tokens = parameters.max_tokens.unwrap_or(match kind {
        Kind::Completion => COMPLETION_TOKENS,
        Kind::Chat => 1,
    });
    for prompt in &mut prompts {
        let room = model.tokens_max.saturating_sub(answer_tokens);
        parameters.truncation.apply(prompt, room as usize);
    }
    let echo = |prompt: &Vec<Token>| {
        let shows_special = parameters.choosing.shows_special;
        parameters.echo.then(|| Echo::new(&model.tokenizer, prompt, shows_special))
    };
    let echoes = prompts.iter().map(echo).collect();
    Ok(Asked { parameters, prompts, echoes, calls, continues })
}

/// Compiles the rule that the answers have to follow, if there is one, away from the threads that serve
/// everybody else.
async fn compile(
    state: &Arc<State>,
    parameters: &Parameters,
) -> Result<Option<Compiled>, ApiError> {
    let Some(structure) = parameters.structure.clone() else { return Ok(None) };
    let permit = state.parsers.acquire().await;
    let work = {
        let state = state.clone();
        move || state.grammars.compile(&state.model.tokenizer, &structure)
    };
    let compiled = tokio::task::spawn_blocking(work).await;
    drop(permit);
    let failed =
        |_| Err(ApiError::invalid("the constraint of the structured output cannot be compiled"));
    compiled.unwrap_or_else(failed).map(Some)
}

async fn submit(
    kind: Kind,
    state: &State,
    caller: &Caller,
    asked: Asked,
    rule: Option<Compiled>,
    asked_at: Instant,
) -> Result<Answers, ApiError> {
    let Asked { parameters, prompts, echoes, calls, continues } = asked;
    let choosing = &parameters.choosing;
    let model = &state.model;
    state.shares.check_priority(caller, parameters.priority)?;
    let count = prompts.len() * parameters.n as usize;
    let mut places = state.shares.take(caller, count)?;
    // An answer with a constraint follows it from its first token, so it has no reasoning.
    let separates = kind == Kind::Chat && model.marks_reasoning && rule.is_none();
    let mut marks = Vec::new();
    if let Some((format, _)) = &calls {
        marks.extend(model.tokens_of_marks(format.marks()));
    }
    if separates {
        marks.extend(model.tokens_of_marks(reasoning::MARKS));
    }
    let salt = caller.salt(&parameters.cache_salt);
    state.salts.lock().used(&salt);
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let mut answers = Answers {
        pieces: SelectAll::new(),
        reply: Reply::new(kind, model).scored(parameters.scoring, &model.tokenizer),
        usage: Usage::new(asked_at, prompt_tokens),
        count,
        span: tracing::Span::current(),
        n: parameters.n as usize,
        history: state.history.clone(),
    };
    let stop_tokens = stop_tokens(&parameters, model);
    let mut index = 0;
    for (prompt, echo) in prompts.into_iter().zip(echoes) {
        let max_new_tokens = max_new_tokens(kind, &parameters, model, prompt.len());
        choosing.check(max_new_tokens, model.tokenizer.vocabulary())?;
        let decoder = match (kind, &echo) {
            (_, Some(echo)) => echo.decoder(),
            (Kind::Completion, None) => model.tokenizer.decoder_after(&prompt),
            (Kind::Chat, None) if continues => model.tokenizer.decoder_after(&prompt),
            (Kind::Chat, None) => model.tokenizer.decoder(),
        };
        let decoder = match choosing.shows_special {
            true => decoder.showing_special(),
            false => decoder,
        };
        let prompt_tokens = prompt.len();
        let is_reasoning_open = separates && reasoning::is_open_after(&model.tokenizer, &prompt);
        let mut answer = |choice| Sibling {
            sampling: parameters.sampling(choice),
            grammar: rule.as_ref().map(|rule| rule.grammar(stop_tokens.clone())),
            ticket: places.one(),
        };
        let first = answer(0);
        let siblings = (1..parameters.n).map(answer).collect();
        let generate = Generate {
            sampling: first.sampling,
            shaping: choosing.shaping.clone(),
            grammar: first.grammar,
            stop_tokens: stop_tokens.clone(),
            keeps_stop_token: choosing.keeps_stop,
            logprobs: parameters.scoring.map(|scoring| scoring.top),
            prompt_logprobs: parameters.scoring.is_some() && parameters.echo,
            priority: parameters.priority,
            salt: salt.clone(),
            logits_checksum: parameters.logits_checksum,
            ticket: first.ticket,
            ..Generate::new(prompt, max_new_tokens)
        };
        // If those of one prompt are refused, dropping the others calls them off.
        for generation in state.engine.submit_answers(generate, siblings).await? {
            let (latency, history) = (state.metrics.latency(), state.history.clone());
            let clock = AnswerClock::new(latency, history, asked_at, prompt_tokens);
            let manner = Manner {
                stops: parameters.stops.clone(),
                keeps_stop: choosing.keeps_stop,
                min_tokens: choosing.shaping.min_tokens,
                echo: echo.clone(),
                is_scored: parameters.scoring.is_some(),
                marks: marks.clone(),
            };
            let answer = Answer::new(generation, decoder.clone(), manner, clock);
            let reader = separates.then(|| ReasoningReader::new(is_reasoning_open));
            let pieces = reasoning::separate(answer.pieces(), reader);
            let reader = calls.clone().map(|(format, offer)| CallReader::new(format, offer));
            let pieces = tool_calls::apart(pieces, reader);
            let place = index;
            answers.pieces.push(pieces.map(move |piece| (place, piece)).boxed());
            index += 1;
        }
    }
    Ok(answers)
}

/// The tokens that end an answer: the model's, unless they are to be ignored, and those asked for.
fn stop_tokens(parameters: &Parameters, model: &ServedModel) -> Arc<[Token]> {
    let asked_for = &parameters.choosing.stop_tokens;
    match (parameters.ignore_eos, asked_for.is_empty()) {
        (true, _) => asked_for.as_slice().into(),
        (false, true) => model.stop_tokens.clone(),
        (false, false) => model.stop_tokens.iter().chain(asked_for).copied().collect(),
    }
}

/// Output tokens of a completion without `max_tokens`.
const COMPLETION_TOKENS: u32 = 16;

/// Returns the maximum number of output tokens. Without `max_tokens`, a completion has a few, and a chat continues to
/// the end of the context.
fn max_new_tokens(
    kind: Kind,
    parameters: &Parameters,
    model: &ServedModel,
    prompt_tokens: usize,
) -> u32 {
    let room = u64::from(model.tokens_max).saturating_sub(prompt_tokens as u64);
    parameters.max_tokens.unwrap_or(match kind {
        Kind::Completion => COMPLETION_TOKENS,
        // No room at all is for the engine to refuse.
        Kind::Chat => (room as u32).max(1),
    })
}

/// Waits for all answers and sends them at once.
async fn whole(mut answers: Answers) -> Result<Response, ApiError> {
    let mut texts = vec![Fragment::default(); answers.count];
    let mut reasonings = vec![String::new(); answers.count];
    let mut calls = vec![Vec::new(); answers.count];
    let mut choices = vec![serde_json::Value::Null; answers.count];
    while let Some((index, piece)) = answers.pieces.next().await {
        match piece {
            Piece::Text(fragment) => texts[index].push(fragment),
            Piece::Reasoning(fragment) => {
                reasonings[index].push_str(&fragment.text);
                texts[index].scored.extend(fragment.scored);
            }
            Piece::Call(call) => calls[index].push(call),
            Piece::Complete(complete) => {
                choices[index] = answers.reply.choice(index, &texts[index], &complete);
                reply::add_reasoning(&mut choices[index], &reasonings[index]);
                tool_calls::add_to_message(&mut choices[index], &calls[index]);
                answers.add(index, &complete);
            }
            Piece::Unfinished(reason) => {
                tracing::warn!("a completion ended without a result: {reason:?}");
                return Err(ApiError::unfinished(reason));
            }
        }
    }
    Ok(json_response(StatusCode::OK, &answers.reply.whole(choices, &answers.usage)))
}
