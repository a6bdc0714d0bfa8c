//! Text to tokens and back, for those who want to count or to see them.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};
use terrace_scheduler::Token;

use crate::body;
use crate::error::{ApiError, json_response};
use crate::fields::Fields;
use crate::messages::{self, Chat};
use crate::parameters::tokens;
use crate::state::State;

/// The tokens of a prompt or of a conversation.
pub(crate) async fn tokenize(
    state: Arc<State>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    answer(state, headers, body, tokens_of).await
}

/// The text of tokens, the names of special ones included.
pub(crate) async fn detokenize(
    state: Arc<State>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    answer(state, headers, body, text_of).await
}

async fn answer(
    state: Arc<State>,
    headers: HeaderMap,
    body: Body,
    find: fn(&State, Fields) -> Result<Value, ApiError>,
) -> Result<Response, ApiError> {
    state.check_open()?;
    state.gate.client(&headers)?;
    let received = body::receive(&headers, body, &state.limits, &state.bodies).await?;
    let found = body::understand(&state, received, move |state, bytes| {
        let mut fields = Fields::parse(bytes)?;
        if let Some(asked) = fields.text("model")? {
            state.model.check_name(&asked)?;
        }
        find(state, fields)
    });
    Ok(json_response(StatusCode::OK, &found.await?))
}

fn tokens_of(state: &State, mut fields: Fields) -> Result<Value, ApiError> {
    let model = &state.model;
    let tokenizer = &model.tokenizer;
    let with_names = fields.flag("return_token_strs")?;
    let tokens = match fields.text("prompt")? {
        Some(prompt) => {
            messages::refuse_chat_fields(&mut fields)?;
            let encoded = match fields.flag_or("add_special_tokens", true)? {
                true => tokenizer.encode(&prompt),
                false => tokenizer.encode_plain(&prompt),
            };
            encoded.map_err(|error| ApiError::field("prompt", error.to_string()))?
        }
        None => Chat::parse(&mut fields)?.encode(model)?,
    };
    let name = |token: &Token| tokenizer.token_name(*token);
    let names = with_names.then(|| tokens.iter().map(name).collect::<Vec<_>>());
    Ok(json!({
        "count": tokens.len(),
        "max_model_len": model.tokens_max,
        "tokens": tokens,
        "token_strs": names,
    }))
}

fn text_of(state: &State, mut fields: Fields) -> Result<Value, ApiError> {
    let wrong = || ApiError::field("tokens", "`tokens` must be a list of tokens");
    let Some(Value::Array(items)) = fields.take("tokens") else { return Err(wrong()) };
    let tokens = tokens(&items).ok_or_else(wrong)?;
    let tokenizer = &state.model.tokenizer;
    let vocabulary = tokenizer.vocabulary();
    if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
        let message = format!("token {token} does not exist: the model has {vocabulary} tokens");
        return Err(ApiError::field("tokens", message));
    }
    Ok(json!({ "prompt": tokenizer.decode_with_marks(&tokens) }))
}
