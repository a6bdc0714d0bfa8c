//! How the programs that serve are told to stop.
//!
//! SIGHUP stops a server as SIGTERM does. It comes when the terminal closes in which the server was
//! started: whoever closes it wants the server gone, and gone in order, with its pages on disk. There is
//! nothing to reload for which daemons use it otherwise. A server that was started with `nohup` ignores it.

/// Waits for Ctrl-C, SIGTERM or SIGHUP.
#[cfg(unix)]
pub(crate) async fn told_to_stop() {
    use tokio::signal::unix::{SignalKind, signal};
    let closing = async {
        // Whoever listens to it would no longer ignore it.
        match (!is_hangup_ignored()).then(|| signal(SignalKind::hangup())) {
            Some(Ok(mut hangup)) => drop(hangup.recv().await),
            Some(Err(_)) | None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = told_again() => {}
        () = closing => {}
    }
}

/// Waits for Ctrl-C or SIGTERM. One terminal that closes may send several SIGHUPs.
#[cfg(unix)]
pub(crate) async fn told_again() {
    use tokio::signal::unix::{SignalKind, signal};
    match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(mut interrupt), Ok(mut terminate)) => {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        }
        // Whoever cannot be told is ended by the system.
        (Err(_), _) | (_, Err(_)) => std::future::pending().await,
    }
}

/// Whether whoever started this process wants it to outlive the terminal.
#[cfg(unix)]
fn is_hangup_ignored() -> bool {
    const HANGUP: u64 = 1;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & HANGUP != 0)
}

#[cfg(not(unix))]
pub(crate) async fn told_to_stop() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

#[cfg(not(unix))]
pub(crate) use told_to_stop as told_again;
