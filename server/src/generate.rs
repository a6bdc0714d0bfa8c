//! Completions and chat completions: from the body of a request to its answers.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, SelectAll};
use terrace_engine::Generate;
use terrace_scheduler::Token;

use crate::answer::{Answer, Complete, Fragment, Manner, Piece};
use crate::auth::Caller;
use crate::body::{self, Received};
use crate::echo::Echo;
use crate::error::{ApiError, json_response};
use crate::metrics::AnswerClock;
use crate::parameters::{Input, Kind, Parameters, Prompt};
use crate::reply::{Reply, Usage};
use crate::served_model::ServedModel;
use crate::state::State;
use crate::stream;
use crate::structured::Compiled;

/// The answers to one request, under way.
pub(crate) struct Answers {
    /// Pieces of all answers, as they come, each with the place of its answer.
    pub(crate) pieces: SelectAll<BoxStream<'static, (usize, Piece)>>,
    pub(crate) reply: Reply,
    pub(crate) usage: Usage,
    pub(crate) count: usize,
    /// How many answers each prompt has.
    n: usize,
}

impl Answers {
    /// Counts an answer that is complete.
    pub(crate) fn add(&mut self, index: usize, complete: &Complete) {
        self.usage.add(complete, index.is_multiple_of(self.n));
    }
}

/// Answers a request.
pub(crate) async fn handle(
    kind: Kind,
    state: Arc<State>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let asked_at = Instant::now();
    state.check_open()?;
    let caller = state.gate.client(&headers)?;
    let received = body::receive(&headers, body, &state.limits, &state.bodies).await?;
    let asked = parse(kind, &state, received).await?;
    let (is_stream, include_usage) = (asked.parameters.stream, asked.parameters.include_usage);
    let rule = compile(&state, &asked.parameters).await?;
    let answers = submit(kind, &state, &caller, asked, rule, asked_at).await?;
    if is_stream {
        return Ok(stream::respond(answers, include_usage).into_response());
    }
    whole(answers).await
}

/// A request that is understood.
struct Asked {
    parameters: Parameters,
    prompts: Vec<Vec<Token>>,
    /// The prompts as parts of their answers, if they are.
    echoes: Vec<Option<Echo>>,
}

/// Understands a request. Long ones take a while, and are kept away from the threads that serve
/// everybody else.
async fn parse(kind: Kind, state: &Arc<State>, received: Received) -> Result<Asked, ApiError> {
    const QUICK_BYTES: usize = 16 << 10;
    if received.bytes.len() <= QUICK_BYTES {
        return understand(kind, state, &received);
    }
    let permit = state.parsers.acquire().await;
    let work = {
        let state = state.clone();
        move || understand(kind, &state, &received)
    };
    let asked = tokio::task::spawn_blocking(work).await;
    drop(permit);
    asked.unwrap_or_else(|_| Err(ApiError::invalid("the request could not be understood")))
}

fn understand(kind: Kind, state: &State, received: &Received) -> Result<Asked, ApiError> {
    let mut parameters = Parameters::parse(kind, &received.bytes, &state.limits)?;
    let model = &state.model;
    if let Some(asked) = &parameters.model
        && *asked != model.name
    {
        return Err(ApiError::no_such_model(asked, &model.name));
    }
    let input = std::mem::replace(&mut parameters.input, Input::Prompts(Vec::new()));
    let prompts = match input {
        Input::Chat(messages) => vec![model.tokenizer.encode_chat(&model.chat, &messages)?],
        Input::Prompts(prompts) => {
            let tokens = prompts.into_iter().map(|prompt| match prompt {
                Prompt::Tokens(tokens) => Ok(tokens),
                Prompt::Text(text) => model.tokenizer.encode(&text),
            });
            let tokens: Result<_, _> = tokens.collect();
            tokens.map_err(|error| ApiError::field("prompt", error.to_string()))?
        }
    };
    let echo = |prompt: &Vec<Token>| {
        let shows_special = parameters.choosing.shows_special;
        parameters.echo.then(|| Echo::new(&model.tokenizer, prompt, shows_special))
    };
    let echoes = prompts.iter().map(echo).collect();
    Ok(Asked { parameters, prompts, echoes })
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
        |_| Err(ApiError::invalid("the rule that the answer is to follow cannot be compiled"));
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
    let Asked { parameters, prompts, echoes } = asked;
    let choosing = &parameters.choosing;
    let model = &state.model;
    let salt = caller.salt(&parameters.cache_salt);
    state.salts.lock().used(&salt);
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let mut answers = Answers {
        pieces: SelectAll::new(),
        reply: Reply::new(kind, model.name.clone()).scored(parameters.scoring, &model.tokenizer),
        usage: Usage::new(asked_at, prompt_tokens),
        count: prompts.len() * parameters.n as usize,
        n: parameters.n as usize,
    };
    let stop_tokens = stop_tokens(&parameters, model);
    let mut index = 0;
    for (prompt, echo) in prompts.into_iter().zip(echoes) {
        let max_new_tokens = max_new_tokens(kind, &parameters, model, prompt.len());
        choosing.check(max_new_tokens, model.tokenizer.vocabulary())?;
        for choice in 0..parameters.n {
            let decoder = match (kind, &echo) {
                (_, Some(echo)) => echo.decoder(),
                (Kind::Completion, None) => model.tokenizer.decoder_after(&prompt),
                (Kind::Chat, None) => model.tokenizer.decoder(),
            };
            let decoder = match choosing.shows_special {
                true => decoder.showing_special(),
                false => decoder,
            };
            let generate = Generate {
                max_new_tokens,
                prompt: prompt.clone(),
                sampling: parameters.sampling(choice),
                shaping: choosing.shaping.clone(),
                grammar: rule.as_ref().map(|rule| rule.grammar(stop_tokens.clone())),
                stop_tokens: stop_tokens.clone(),
                keeps_stop_token: choosing.keeps_stop,
                logprobs: parameters.scoring.map(|scoring| scoring.top),
                prompt_logprobs: parameters.scoring.is_some() && parameters.echo,
                priority: parameters.priority,
                salt: salt.clone(),
                logits_checksum: parameters.logits_checksum,
            };
            // If one is refused, dropping the others calls them off.
            let generation = state.engine.submit(generate).await?;
            let clock = AnswerClock::new(state.metrics.latency(), asked_at, prompt.len());
            let manner = Manner {
                stops: parameters.stops.clone(),
                keeps_stop: choosing.keeps_stop,
                min_tokens: choosing.shaping.min_tokens,
                echo: echo.clone(),
                is_scored: parameters.scoring.is_some(),
            };
            let answer = Answer::new(generation, decoder, manner, clock);
            let place = index;
            answers.pieces.push(answer.pieces().map(move |piece| (place, piece)).boxed());
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

/// As many as were asked for. Without a wish it is what is usual for the kind of request, in a chat
/// no more than there is room for.
fn max_new_tokens(
    kind: Kind,
    parameters: &Parameters,
    model: &ServedModel,
    prompt_tokens: usize,
) -> u32 {
    const COMPLETION_TOKENS: u32 = 16;
    const CHAT_TOKENS: u32 = 256;
    let room = u64::from(model.tokens_max).saturating_sub(prompt_tokens as u64);
    parameters.max_tokens.unwrap_or(match kind {
        Kind::Completion => COMPLETION_TOKENS,
        // No room at all is for the engine to refuse.
        Kind::Chat => CHAT_TOKENS.min(room as u32).max(1),
    })
}

/// Waits for all answers and sends them at once.
async fn whole(mut answers: Answers) -> Result<Response, ApiError> {
    let mut texts = vec![Fragment::default(); answers.count];
    let mut choices = vec![serde_json::Value::Null; answers.count];
    while let Some((index, piece)) = answers.pieces.next().await {
        match piece {
            Piece::Text(fragment) => texts[index].push(fragment),
            Piece::Complete(complete) => {
                choices[index] = answers.reply.choice(index, &texts[index], &complete);
                answers.add(index, &complete);
            }
            Piece::Unfinished(reason) => return Err(ApiError::unfinished(reason)),
        }
    }
    Ok(json_response(StatusCode::OK, &answers.reply.whole(choices, &answers.usage)))
}
