//! History of the last minutes for the page: prompt tokens by the source of their KV, and responses that were no success.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State as Shared};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use parking_lot::Mutex;
use serde::Serialize;
use terrace_scheduler::Hits;

/// Duration of a bucket.
const BUCKET_S: u64 = 5;
/// Number of buckets that are kept: five minutes.
const BUCKETS: usize = 60;

/// Counts of the last minutes.
#[derive(Debug)]
pub(crate) struct History {
    start: Instant,
    buckets: Mutex<Buckets>,
}

/// The latest buckets. Those in which nothing happened are missing.
#[derive(Debug, Default)]
struct Buckets(VecDeque<(u64, Bucket)>);

/// Counts of a few seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    prompt_tokens: u64,
    device_tokens: u64,
    host_tokens: u64,
    l3_tokens: u64,
    busy: u64,
    client_errors: u64,
    server_errors: u64,
}

/// The history in columns, each with one number per bucket, the oldest first.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Columns {
    /// Seconds per bucket.
    bucket_s: u64,
    /// Prompt tokens of requests that were admitted.
    prompt_tokens: Vec<u64>,
    /// Prompt tokens whose KV was found on the device.
    device: Vec<u64>,
    /// Prompt tokens whose KV was found on the host.
    host: Vec<u64>,
    /// Prompt tokens whose KV was found in L3.
    l3: Vec<u64>,
    /// Responses with status 429.
    busy: Vec<u64>,
    /// Other responses with a status 4xx.
    client_errors: Vec<u64>,
    /// Responses with a status 5xx, and streams that ended with an error.
    server_errors: Vec<u64>,
}

impl Default for History {
    fn default() -> Self {
        Self { start: Instant::now(), buckets: Mutex::default() }
    }
}

impl History {
    /// Counts the prompt of a request that was admitted.
    pub(crate) fn prompt(&self, prompt_tokens: usize, hits: Hits) {
        let mut buckets = self.buckets.lock();
        buckets.at(self.bucket()).add_prompt(prompt_tokens, hits);
    }

    /// Counts a response by its status.
    pub(crate) fn response(&self, status: StatusCode) {
        if status.is_client_error() || status.is_server_error() {
            self.buckets.lock().at(self.bucket()).add_response(status);
        }
    }

    /// The history up to this moment.
    pub(crate) fn columns(&self) -> Columns {
        self.buckets.lock().columns(self.bucket())
    }

    fn bucket(&self) -> u64 {
        self.start.elapsed().as_secs() / BUCKET_S
    }
}

impl Buckets {
    fn at(&mut self, index: u64) -> &mut Bucket {
        // A bucket that is late by the time the lock is taken counts as the latest one.
        if self.0.back().is_none_or(|(latest, _)| *latest < index) {
            if self.0.len() == BUCKETS {
                self.0.pop_front();
            }
            self.0.push_back((index, Bucket::default()));
        }
        &mut self.0.back_mut().expect("a bucket was added").1
    }

    fn columns(&self, now: u64) -> Columns {
        let mut latest = [Bucket::default(); BUCKETS];
        for (index, bucket) in &self.0 {
            let age = now.saturating_sub(*index) as usize;
            if age < BUCKETS {
                latest[BUCKETS - 1 - age] = *bucket;
            }
        }
        let column = |count: fn(&Bucket) -> u64| latest.iter().map(count).collect();
        Columns {
            bucket_s: BUCKET_S,
            prompt_tokens: column(|bucket| bucket.prompt_tokens),
            device: column(|bucket| bucket.device_tokens),
            host: column(|bucket| bucket.host_tokens),
            l3: column(|bucket| bucket.l3_tokens),
            busy: column(|bucket| bucket.busy),
            client_errors: column(|bucket| bucket.client_errors),
            server_errors: column(|bucket| bucket.server_errors),
        }
    }
}

impl Bucket {
    fn add_prompt(&mut self, prompt_tokens: usize, hits: Hits) {
        self.prompt_tokens += prompt_tokens as u64;
        self.device_tokens += u64::from(hits.device_tokens);
        self.host_tokens += u64::from(hits.host_tokens);
        self.l3_tokens += u64::from(hits.l3_tokens);
    }

    fn add_response(&mut self, status: StatusCode) {
        match status {
            StatusCode::TOO_MANY_REQUESTS => self.busy += 1,
            _ if status.is_client_error() => self.client_errors += 1,
            _ => self.server_errors += 1,
        }
    }
}

/// Counts the responses to POST requests. GET requests only ask for state.
pub(crate) async fn count(
    Shared(history): Shared<Arc<History>>,
    request: Request,
    next: Next,
) -> Response {
    let is_post = request.method() == Method::POST;
    let response = next.run(request).await;
    if is_post {
        history.response(response.status());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_shown_until_it_is_five_minutes_old() {
        let mut buckets = Buckets::default();
        let hits = Hits { device_tokens: 64, host_tokens: 16, l3_tokens: 8 };
        buckets.at(3).add_prompt(100, hits);
        buckets.at(3).add_prompt(50, Hits::default());
        let columns = buckets.columns(5);
        let at = BUCKETS - 3;
        assert_eq!(columns.prompt_tokens.len(), BUCKETS);
        assert_eq!(columns.prompt_tokens[at], 150);
        assert_eq!((columns.device[at], columns.host[at], columns.l3[at]), (64, 16, 8));
        assert_eq!(columns.prompt_tokens.iter().sum::<u64>(), 150);
        assert_eq!(buckets.columns(62).prompt_tokens[0], 150);
        assert_eq!(buckets.columns(63).prompt_tokens, [0; BUCKETS]);
    }

    #[test]
    fn responses_are_counted_by_kind() {
        let history = History::default();
        for status in [200, 204, 301, 429, 429, 400, 404, 500, 503] {
            history.response(StatusCode::from_u16(status).unwrap());
        }
        let columns = history.columns();
        let sums = [&columns.busy, &columns.client_errors, &columns.server_errors]
            .map(|column| column.iter().sum::<u64>());
        assert_eq!(sums, [2, 2, 2]);
    }

    #[test]
    fn the_memory_of_a_history_is_bounded() {
        let mut buckets = Buckets::default();
        (0..1000).for_each(|index| buckets.at(2 * index).busy += 1);
        assert_eq!(buckets.0.len(), BUCKETS);
        assert_eq!(buckets.columns(1998).busy.iter().sum::<u64>(), BUCKETS as u64 / 2);
    }
}
