//! What each tenant may take of what all of them use: places and priorities.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use terrace_engine::Ticket;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::auth::Caller;
use crate::config::{Config, Key};
use crate::error::ApiError;

/// What everybody may take.
#[derive(Debug)]
pub(crate) struct Shares {
    tenants: BTreeMap<String, Share>,
    /// Answers to one request.
    answers_max: u32,
}

/// What one tenant may take.
#[derive(Debug)]
struct Share {
    places: Arc<Semaphore>,
    places_max: u32,
    priorities: RangeInclusive<i32>,
}

/// Places of one request that are not yet its answers'.
#[derive(Debug)]
pub(crate) struct Places(Option<OwnedSemaphorePermit>);

impl Places {
    /// A place for one answer: taken until the engine has forgotten it.
    pub(crate) fn one(&mut self) -> Option<Ticket> {
        let place = self.0.as_mut()?.split(1)?;
        Some(Arc::new(place))
    }
}

impl Shares {
    pub(crate) fn new(config: &Config) -> Self {
        let tenants = config.keys.iter().map(|key| (key.name.clone(), Share::new(key, config)));
        Self { tenants: tenants.collect(), answers_max: config.limits.answers_max }
    }

    /// Takes places for so many answers to one request.
    ///
    /// # Errors
    /// When the caller has no more, for now or at all.
    pub(crate) fn take(&self, caller: &Caller, answers: usize) -> Result<Places, ApiError> {
        if answers > self.answers_max as usize {
            let most = self.answers_max;
            return Err(ApiError::invalid(format!(
                "a request may ask for at most {most} completions, and this one asks for \
                 {answers}: send fewer prompts at a time, or lower `n`"
            )));
        }
        let Some((name, share)) = self.of(caller) else { return Ok(Places(None)) };
        let most = share.places_max;
        if answers > most as usize {
            return Err(ApiError::invalid(format!(
                "{name} may have at most {most} running completions, and this request asks for \
                 {answers}: send fewer prompts at a time, or lower `n`"
            )));
        }
        match share.places.clone().try_acquire_many_owned(answers as u32) {
            Ok(places) => Ok(Places(Some(places))),
            Err(_) => {
                let left = share.places.available_permits();
                Err(ApiError::busy(format!(
                    "{name} may have at most {most} running completions, {left} are free, and this \
                     request asks for {answers}: try again when some have finished"
                )))
            }
        }
    }

    /// Whether the caller may ask for this priority.
    ///
    /// # Errors
    /// When it may not; the error says what it may.
    pub(crate) fn check_priority(&self, caller: &Caller, priority: i32) -> Result<(), ApiError> {
        match self.of(caller) {
            Some((name, share)) if !share.priorities.contains(&priority) => {
                let (least, most) = (share.priorities.start(), share.priorities.end());
                let message = format!("`priority` of {name} must be from {least} to {most}");
                Err(ApiError::field("priority", message))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// The share of a tenant. Whoever is no tenant has all that there is: without keys nobody can be
    /// told from anybody else, and the operator knows what it does.
    fn of<'a>(&'a self, caller: &'a Caller) -> Option<(&'a str, &'a Share)> {
        match caller {
            Caller::Tenant(name) => self.tenants.get(name).map(|share| (name.as_str(), share)),
            Caller::Anyone | Caller::Operator => None,
        }
    }
}

impl Share {
    fn new(key: &Key, config: &Config) -> Self {
        let equal = config.limits.requests_max / config.keys.len() as u32;
        let places_max = key.requests_max.unwrap_or(equal).clamp(1, config.limits.requests_max);
        Self {
            places: Arc::new(Semaphore::new(places_max as usize)),
            places_max,
            priorities: key.priority_min.unwrap_or(i32::MIN)..=key.priority_max.unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::StatusCode;

    use super::*;

    fn shares(change: impl Fn(&mut Config)) -> Shares {
        let keys = ["alice=a", "bob=b", "carol=c"];
        let mut config =
            Config { keys: keys.map(|key| key.parse().unwrap()).to_vec(), ..Config::default() };
        config.limits.requests_max = 12;
        config.limits.answers_max = 10;
        change(&mut config);
        Shares::new(&config)
    }

    fn tenant(name: &str) -> Caller {
        Caller::Tenant(name.to_owned())
    }

    #[test]
    fn a_tenant_that_has_its_share_leaves_the_others_theirs() {
        let shares = shares(|_| {});
        let (alice, bob) = (tenant("alice"), tenant("bob"));
        let take = |who, answers| shares.take(who, answers).map_err(|error| error.status());
        let mut three = take(&alice, 3).unwrap();
        assert_eq!(take(&alice, 2).unwrap_err(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(take(&alice, 5).unwrap_err(), StatusCode::BAD_REQUEST, "never fits");
        assert!(take(&bob, 4).is_ok());
        let answer = three.one();
        drop(three);
        assert!(take(&alice, 4).is_err(), "one answer is still under way");
        drop(answer);
        assert!(take(&alice, 4).is_ok());
        assert!(take(&Caller::Operator, 10).is_ok());
        assert_eq!(take(&Caller::Anyone, 11).unwrap_err(), StatusCode::BAD_REQUEST);
    }

    #[test]
    fn a_share_can_be_set_and_is_never_nothing() {
        let shares_of = |requests_max: Option<u32>, all: u32| {
            let shares = shares(|config| {
                config.limits.requests_max = all;
                config.keys[0].requests_max = requests_max;
            });
            shares.tenants["alice"].places_max
        };
        assert_eq!(shares_of(Some(7), 12), 7);
        assert_eq!(shares_of(Some(100), 12), 12);
        assert_eq!(shares_of(None, 2), 1);
    }

    #[test]
    fn nobody_overtakes_the_others_unless_it_may() {
        let shares = shares(|config| {
            config.keys[1].priority_min = Some(-1);
            config.keys[1].priority_max = Some(5);
        });
        let may = |who: &str, priority| shares.check_priority(&tenant(who), priority).is_ok();
        assert!(may("alice", 0) && may("alice", i32::MIN) && !may("alice", 1));
        assert!(may("bob", 5) && may("bob", -1) && !may("bob", 6) && !may("bob", -2));
        let error = shares.check_priority(&tenant("bob"), 6).unwrap_err();
        assert!(error.json()["error"]["message"].as_str().unwrap().contains("from -1 to 5"));
        assert!(shares.check_priority(&Caller::Anyone, 100).is_ok());
        assert!(shares.check_priority(&Caller::Operator, 100).is_ok());
    }
}
