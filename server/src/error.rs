//! Errors as clients see them: a status, and JSON in the shape that OpenAI's clients read.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use terrace_engine::{EndReason, SubmitError};
use terrace_model::ChatError;
use terrace_scheduler::FailReason;

/// An answer that says what went wrong, and what to do.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

const INVALID: &str = "invalid_request_error";

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None }
    }

    /// The request is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, message)
    }

    /// A field of the request is wrong.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::invalid(message) }
    }

    pub(crate) fn unsupported(param: &str) -> Self {
        let message = format!("`{param}` is not supported by this server: leave it out");
        Self { code: Some("unsupported_parameter"), ..Self::field(param, message) }
    }

    pub(crate) fn key_missing() -> Self {
        let message = "an API key is needed: send it as `Authorization: Bearer KEY`";
        Self::new(StatusCode::UNAUTHORIZED, INVALID, message)
    }

    pub(crate) fn key_wrong() -> Self {
        let error = Self::new(StatusCode::UNAUTHORIZED, INVALID, "this API key is not valid");
        Self { code: Some("invalid_api_key"), ..error }
    }

    pub(crate) fn operator_only() -> Self {
        let message = "this needs the operator key, which is set with --operator-key";
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    pub(crate) fn foreign_host() -> Self {
        let message = "this server has no API keys and accepts only the names of this machine: use \
                       localhost or 127.0.0.1, or set API keys";
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    pub(crate) fn foreign_origin() -> Self {
        let message = "a web page of another site may not send this request";
        Self::new(StatusCode::FORBIDDEN, "permission_error", message)
    }

    pub(crate) fn no_such_path(path: &str) -> Self {
        let message =
            format!("there is no endpoint {path}: see /v1/models and /v1/chat/completions");
        Self::new(StatusCode::NOT_FOUND, INVALID, message)
    }

    pub(crate) fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("there is no model `{asked}` here: use `{served}`");
        let error = Self::new(StatusCode::NOT_FOUND, INVALID, message);
        Self { param: Some("model".to_owned()), code: Some("model_not_found"), ..error }
    }

    pub(crate) fn method_not_allowed() -> Self {
        let message = "wrong method for this path: use POST for requests with a body and for resets, GET for \
             everything else";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, message)
    }

    pub(crate) fn not_json() -> Self {
        let message = "send JSON, with the header `Content-Type: application/json`";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, message)
    }

    pub(crate) fn body_too_large(max: u64) -> Self {
        let message = format!("a request may have at most {max} bytes: send less");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, message)
    }

    pub(crate) fn body_too_slow() -> Self {
        let message = "the request body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, INVALID, message)
    }

    pub(crate) fn busy(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
    }

    pub(crate) fn shutting_down() -> Self {
        let message = "the server is shutting down: try again later";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    /// The device has failed for good.
    pub(crate) fn device_lost(reason: &str) -> Self {
        let message =
            format!("the device has failed and the server ends ({reason}): try again later");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    /// A router that has nobody to send a request to.
    pub(crate) fn no_worker() -> Self {
        let message = "no worker is available: try again later, and check that the workers run";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    /// An answer that came to no end.
    pub(crate) fn unfinished(reason: EndReason) -> Self {
        let message = match reason {
            EndReason::Aborted | EndReason::Stop | EndReason::Length => {
                return Self::shutting_down();
            }
            EndReason::Grammar => {
                return Self::invalid(
                    "the constraint of the structured output is too expensive to check for every \
                     token: make it simpler",
                );
            }
            EndReason::Failed(FailReason::TimedOut) => {
                let message = "the request waited too long in the queue: try again later";
                return Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
            }
            EndReason::DeviceLost => {
                let message = "the device has failed and the server ends: try again later";
                return Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
            }
            EndReason::Failed(FailReason::StepFailed) => "the model failed: see the server's log",
        };
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    #[cfg(test)]
    pub(crate) fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.json());
        let headers = response.headers_mut();
        match self.status {
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            _ => {}
        }
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        use terrace_scheduler::SubmitError as Refused;
        let too_long = |message: String| Self {
            code: Some("context_length_exceeded"),
            ..Self::field("max_tokens", message)
        };
        match error {
            SubmitError::ShuttingDown => Self::shutting_down(),
            SubmitError::TooLong { .. } => too_long(error.to_string()),
            SubmitError::UnknownToken { .. } => Self::field("prompt", error.to_string()),
            SubmitError::Scheduler(Refused::NeverFits { .. }) => too_long(
                "prompt and output need more memory than the server has: shorten the prompt, ask \
                 for fewer tokens, or raise --device-memory"
                    .to_owned(),
            ),
            SubmitError::Scheduler(Refused::QueueFull { requests_max }) => {
                Self::busy(format!("{requests_max} completions are running: try again later"))
            }
            SubmitError::Scheduler(Refused::EmptyPrompt(_)) => {
                Self::field("prompt", "the prompt is empty: give it at least one token")
            }
            other => Self::invalid(other.to_string()),
        }
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        let param = match error {
            ChatError::NoTools => "tools",
            ChatError::NothingToContinue | ChatError::CannotContinue => "continue_final_message",
            _ => "messages",
        };
        Self::field(param, error.to_string())
    }
}

/// A response of JSON.
pub(crate) fn json_response(status: StatusCode, body: &Value) -> Response {
    let json = HeaderValue::from_static("application/json");
    (status, [(header::CONTENT_TYPE, json)], body.to_string()).into_response()
}
