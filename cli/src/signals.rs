//! Signals that stop the serving commands.
//!
//! SIGHUP stops a server as SIGTERM does. It comes when the terminal closes in which the server was
//! started: whoever closes it wants the server gone, and gone in order, with its pages on disk. There is
//! nothing to reload for which daemons use it otherwise. A server that was started with `nohup` ignores it.

#[cfg(unix)]
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end a program, listened to from the moment on that this exists. Those that cannot be
/// listened to do what the system does with them.
#[cfg(unix)]
pub(crate) struct Signals {
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
}

#[cfg(unix)]
impl Signals {
    pub(crate) fn listen() -> Self {
        // Whoever listens to it would no longer ignore it.
        let hangup = (!is_hangup_ignored()).then(|| signal(SignalKind::hangup()).ok()).flatten();
        Self {
            interrupt: signal(SignalKind::interrupt()).ok(),
            terminate: signal(SignalKind::terminate()).ok(),
            hangup,
        }
    }

    /// Waits for Ctrl-C, SIGTERM or SIGHUP.
    pub(crate) async fn told_to_stop(&mut self) {
        tokio::select! {
            () = heard(&mut self.interrupt) => {}
            () = heard(&mut self.terminate) => {}
            () = heard(&mut self.hangup) => {}
        }
    }

    /// Waits for Ctrl-C or SIGTERM. One terminal that closes may send several SIGHUPs.
    pub(crate) async fn told_again(&mut self) {
        tokio::select! {
            () = heard(&mut self.interrupt) => {}
            () = heard(&mut self.terminate) => {}
        }
    }
}

#[cfg(unix)]
async fn heard(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => drop(signal.recv().await),
        None => std::future::pending().await,
    }
}

/// Returns whether this process was started to outlive its terminal.
#[cfg(unix)]
fn is_hangup_ignored() -> bool {
    const HANGUP: u64 = 1;
    let ignored = terrace_kit::Process::Own.status("SigIgn");
    let ignored = ignored.and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    ignored.is_some_and(|mask| mask & HANGUP != 0)
}

/// Ctrl-C.
#[cfg(not(unix))]
pub(crate) struct Signals;

#[cfg(not(unix))]
impl Signals {
    pub(crate) fn listen() -> Self {
        Self
    }

    pub(crate) async fn told_to_stop(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending().await
        }
    }

    pub(crate) async fn told_again(&mut self) {
        self.told_to_stop().await;
    }
}
