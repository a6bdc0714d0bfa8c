//! When an unwell store is left alone, and when it is tried again.

use std::time::Duration;

use tokio::time::Instant;

use super::{GuardConfig, after};
use crate::stats::BreakerState;

/// Lets calls through while all is well, none for a while after too many failures in a row, and
/// then a few to see whether all is well again.
#[derive(Debug)]
pub(crate) struct Breaker {
    failures_to_open: u32,
    probes: u32,
    pause_min: Duration,
    pause_max: Duration,
    /// How long the next pause takes.
    pause: Duration,
    stage: Stage,
    /// Counts the stages. A call says nothing about any stage but the one that it began in: what
    /// hung before a pause must not end the recovery after it.
    epoch: u64,
    opened: u64,
}

#[derive(Debug)]
enum Stage {
    Closed { failures: u32 },
    Open { until: Instant },
    HalfOpen { probing: u32 },
}

/// A call that was let through. Each must be handed back to [`Breaker::ended`].
#[derive(Debug)]
#[must_use]
pub(crate) struct Ticket {
    epoch: u64,
}

/// How a call went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The store answered as a store in good health does.
    Well,
    /// It did not, or not in time.
    Unwell,
    /// Nobody knows, because the call was given up.
    Unknown,
}

impl Breaker {
    pub(crate) fn new(config: &GuardConfig) -> Self {
        let pause_max = Duration::from_millis(config.pause_max_ms);
        let pause_min = Duration::from_millis(config.pause_ms).min(pause_max);
        Self {
            failures_to_open: config.failures_to_open,
            // Without any probe nothing would ever be tried again.
            probes: config.probes.max(1),
            pause_min,
            pause_max,
            pause: pause_min,
            stage: Stage::Closed { failures: 0 },
            epoch: 0,
            opened: 0,
        }
    }

    /// Asks whether a call may go through; if not, after how long to ask again.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<Ticket, Duration> {
        match &mut self.stage {
            Stage::Closed { .. } => {}
            Stage::Open { until } if now < *until => return Err(*until - now),
            Stage::Open { .. } => self.enter(Stage::HalfOpen { probing: 1 }),
            Stage::HalfOpen { probing } if *probing < self.probes => *probing += 1,
            Stage::HalfOpen { .. } => return Err(self.pause_min),
        }
        Ok(Ticket { epoch: self.epoch })
    }

    /// Notes how a call went.
    pub(crate) fn ended(&mut self, ticket: Ticket, verdict: Verdict, now: Instant) {
        if ticket.epoch != self.epoch {
            return;
        }
        match (&mut self.stage, verdict) {
            (Stage::Closed { failures }, Verdict::Well) => *failures = 0,
            (Stage::Closed { failures }, Verdict::Unwell) => {
                *failures += 1;
                if *failures >= self.failures_to_open {
                    self.open(now);
                }
            }
            (Stage::HalfOpen { .. }, Verdict::Well) => {
                self.pause = self.pause_min;
                self.enter(Stage::Closed { failures: 0 });
            }
            (Stage::HalfOpen { .. }, Verdict::Unwell) => self.open(now),
            (Stage::HalfOpen { probing }, Verdict::Unknown) => *probing -= 1,
            (Stage::Closed { .. }, Verdict::Unknown)
            | (Stage::Open { .. }, Verdict::Well | Verdict::Unwell | Verdict::Unknown) => {}
        }
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.stage {
            Stage::Closed { .. } => BreakerState::Closed,
            Stage::Open { .. } => BreakerState::Open,
            Stage::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// How often it has opened, after failed probes too.
    pub(crate) fn opened(&self) -> u64 {
        self.opened
    }

    fn open(&mut self, now: Instant) {
        self.opened += 1;
        self.enter(Stage::Open { until: after(now, self.pause) });
        self.pause = self.pause.saturating_mul(2).min(self.pause_max);
    }

    fn enter(&mut self, stage: Stage) {
        self.epoch += 1;
        self.stage = stage;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaker() -> (Breaker, Instant) {
        let config = GuardConfig {
            failures_to_open: 2,
            probes: 1,
            pause_ms: 100,
            pause_max_ms: 300,
            ..GuardConfig::default()
        };
        (Breaker::new(&config), Instant::now())
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    impl Breaker {
        fn call(&mut self, verdict: Verdict, now: Instant) {
            let ticket = self.admit(now).unwrap();
            self.ended(ticket, verdict, now);
        }
    }

    #[test]
    fn it_opens_after_failures_in_a_row() {
        let (mut breaker, now) = breaker();
        for verdict in [Verdict::Unwell, Verdict::Well, Verdict::Unwell, Verdict::Unknown] {
            breaker.call(verdict, now);
        }
        assert_eq!(breaker.state(), BreakerState::Closed);
        breaker.call(Verdict::Unwell, now);
        assert_eq!((breaker.state(), breaker.opened()), (BreakerState::Open, 1));
        assert_eq!(breaker.admit(now + ms(30)).unwrap_err(), ms(70));
    }

    #[test]
    fn pauses_double_with_each_failed_probe_and_start_over_after_a_success() {
        let (mut breaker, mut now) = breaker();
        breaker.call(Verdict::Unwell, now);
        let mut pauses = Vec::new();
        for _ in 0..4 {
            breaker.call(Verdict::Unwell, now);
            let pause = breaker.admit(now).unwrap_err();
            pauses.push(pause);
            now += pause;
        }
        assert_eq!(pauses, [ms(100), ms(200), ms(300), ms(300)]);
        breaker.call(Verdict::Well, now);
        assert_eq!(breaker.state(), BreakerState::Closed);
        breaker.call(Verdict::Unwell, now);
        breaker.call(Verdict::Unwell, now);
        assert_eq!(breaker.admit(now).unwrap_err(), ms(100));
    }

    #[test]
    fn half_open_lets_only_so_many_through_at_a_time() {
        let (mut breaker, now) = breaker();
        breaker.call(Verdict::Unwell, now);
        breaker.call(Verdict::Unwell, now);
        let now = now + ms(100);
        let probe = breaker.admit(now).unwrap();
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        assert!(breaker.admit(now).is_err());
        breaker.ended(probe, Verdict::Unknown, now);
        let probe = breaker.admit(now).expect("the probe that was given up has made room");
        breaker.ended(probe, Verdict::Well, now);
        assert_eq!(breaker.state(), BreakerState::Closed);
    }

    #[test]
    fn calls_from_before_the_pause_say_nothing_about_the_time_after_it() {
        let (mut breaker, now) = breaker();
        let (late_failure, late_success) =
            (breaker.admit(now).unwrap(), breaker.admit(now).unwrap());
        breaker.call(Verdict::Unwell, now);
        breaker.call(Verdict::Unwell, now);
        let now = now + ms(100);
        let probe = breaker.admit(now).unwrap();
        breaker.ended(late_success, Verdict::Well, now);
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        breaker.ended(late_failure, Verdict::Unwell, now);
        assert_eq!(breaker.state(), BreakerState::HalfOpen);
        breaker.ended(probe, Verdict::Well, now);
        assert_eq!(breaker.state(), BreakerState::Closed);
    }
}
