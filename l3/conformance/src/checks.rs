//! Runner of the checks of a suite.

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

/// Runs all checks, `at_a_time` of them concurrently. Each is created when it starts.
///
/// # Panics
/// If a check fails or does not end within `patience`; names all that fail.
pub async fn run_checks<C>(
    checks: impl Iterator<Item = (&'static str, C)>,
    at_a_time: usize,
    patience: Duration,
) where
    C: Future<Output = ()> + Send + 'static,
{
    let mut checks = checks.fuse();
    let (mut running, mut failed, mut count) = (JoinSet::new(), Vec::new(), 0);
    loop {
        while running.len() < at_a_time
            && let Some((name, check)) = checks.next()
        {
            count += 1;
            running.spawn(async move { (name, tokio::spawn(timeout(patience, check)).await) });
        }
        let Some(ended) = running.join_next().await else { break };
        match ended.expect("it only waits for the check") {
            (_, Ok(Ok(()))) => {}
            (name, Ok(Err(_))) => failed.push(format!("{name} does not end")),
            (name, Err(panic)) => failed.push(format!("{name}: {panic}")),
        }
    }
    assert!(failed.is_empty(), "{} of {count} checks failed: {failed:#?}", failed.len());
}
