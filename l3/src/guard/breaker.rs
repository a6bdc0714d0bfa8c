//! Circuit breaker.

use std::time::Duration;

use tokio::time::Instant;

use super::{GuardConfig, after};
use crate::stats::BreakerState;

/// Admits all calls while the store is healthy, none during a pause after consecutive failures, and
/// then a few probes.
#[derive(Debug)]
pub(crate) struct Breaker {
    failures_to_open: u32,
    probes: u32,
    pause_min: Duration,
    pause_max: Duration,
    /// Length of the next pause.
    pause: Duration,
    stage: BreakerStage,
    /// Counts the changes of stage. A call counts only for the stage that it began in: a call that
    /// hung before a pause must not end the recovery after it.
    epoch: u64,
    opened: u64,
}

#[derive(Debug)]
enum BreakerStage {
    Closed { failures: u32 },
    Open { until: Instant },
    HalfOpen { probing: u32 },
}

/// An admitted call. Each must be returned to [`Breaker::ended`].
#[derive(Debug)]
#[must_use]
pub(crate) struct BreakerTicket {
    epoch: u64,
}

/// Outcome of a call for the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The store is healthy.
    Well,
    /// The store failed, or did not answer in time.
    Unwell,
    /// Unknown: the call was abandoned.
    Unknown,
}

impl Breaker {
    pub(crate) fn new(config: &GuardConfig) -> Self {
        let pause_max = Duration::from_millis(config.pause_max_ms);
        let pause_min = Duration::from_millis(config.pause_ms).min(pause_max);
        Self {
            failures_to_open: config.failures_to_open,
            // Without probes, the breaker would never close again.
            probes: config.probes.max(1),
            pause_min,
            pause_max,
            pause: pause_min,
            stage: BreakerStage::Closed { failures: 0 },
            epoch: 0,
            opened: 0,
        }
    }

    /// Admits a call, or returns the time after which to ask again.
    pub(crate) fn admit(&mut self, now: Instant) -> Result<BreakerTicket, Duration> {
        match &mut self.stage {
            BreakerStage::Closed { .. } => {}
            BreakerStage::Open { until } if now < *until => return Err(*until - now),
            BreakerStage::Open { .. } => self.enter(BreakerStage::HalfOpen { probing: 1 }),
            BreakerStage::HalfOpen { probing } if *probing < self.probes => *probing += 1,
            BreakerStage::HalfOpen { .. } => return Err(self.pause_min),
        }
        Ok(BreakerTicket { epoch: self.epoch })
    }

    /// Records the outcome of a call.
    pub(crate) fn ended(&mut self, ticket: BreakerTicket, verdict: Verdict, now: Instant) {
        if ticket.epoch != self.epoch {
            return;
        }
        match (&mut self.stage, verdict) {
            (BreakerStage::Closed { failures }, Verdict::Well) => *failures = 0,
            (BreakerStage::Closed { failures }, Verdict::Unwell) => {
                *failures += 1;
                if *failures >= self.failures_to_open {
                    self.open(now);
                }
            }
            (BreakerStage::HalfOpen { .. }, Verdict::Well) => {
                self.pause = self.pause_min;
                self.enter(BreakerStage::Closed { failures: 0 });
            }
            (BreakerStage::HalfOpen { .. }, Verdict::Unwell) => self.open(now),
            (BreakerStage::HalfOpen { probing }, Verdict::Unknown) => *probing -= 1,
            (BreakerStage::Closed { .. }, Verdict::Unknown)
            | (BreakerStage::Open { .. }, Verdict::Well | Verdict::Unwell | Verdict::Unknown) => {}
        }
    }

    pub(crate) fn state(&self) -> BreakerState {
        match self.stage {
            BreakerStage::Closed { .. } => BreakerState::Closed,
            BreakerStage::Open { .. } => BreakerState::Open,
            BreakerStage::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// Times that the breaker opened, including after failed probes.
    pub(crate) fn opened(&self) -> u64 {
        self.opened
    }

    fn open(&mut self, now: Instant) {
        self.opened += 1;
        self.enter(BreakerStage::Open { until: after(now, self.pause) });
        self.pause = self.pause.saturating_mul(2).min(self.pause_max);
    }

    fn enter(&mut self, stage: BreakerStage) {
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
    fn half_open_admits_a_limited_number_of_probes() {
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
