//! `GET /metrics`.

use std::sync::OnceLock;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::error::ApiError;
use crate::figures;
use crate::state::State;

/// Everything there is to measure, as Prometheus reads it.
///
/// # Errors
/// When the engine has ended.
pub(crate) async fn render(state: &State) -> Result<String, ApiError> {
    let figures = state.engine.figures().await.ok_or_else(ApiError::shutting_down)?;
    let mut text = figures::render(&figures, resident_bytes());
    if let Some(histograms) = &state.histograms {
        text.push_str(&histograms.render());
    }
    Ok(text)
}

/// The histograms that the engine records, which are those of the whole process. Nothing where the
/// program around this server keeps them itself.
pub(crate) fn histograms() -> Option<PrometheusHandle> {
    static HISTOGRAMS: OnceLock<Option<PrometheusHandle>> = OnceLock::new();
    HISTOGRAMS.get_or_init(install).clone()
}

fn install() -> Option<PrometheusHandle> {
    const FIRST_TOKEN: &str = "terrace_time_to_first_token_seconds";
    const BETWEEN: &str = "terrace_inter_token_seconds";
    const FIRST_TOKEN_S: [f64; 14] =
        [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
    const BETWEEN_S: [f64; 13] =
        [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0];
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Full(FIRST_TOKEN.to_owned()), &FIRST_TOKEN_S)
        .and_then(|builder| {
            builder.set_buckets_for_metric(Matcher::Full(BETWEEN.to_owned()), &BETWEEN_S)
        })
        .ok()?
        .build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).ok()?;
    metrics::describe_histogram!(
        FIRST_TOKEN,
        "From when a request was taken until its first token, in seconds."
    );
    metrics::describe_histogram!(BETWEEN, "From a token of an answer to the next one, in seconds.");
    Some(handle)
}

/// The memory that the process has, where the system says.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}
