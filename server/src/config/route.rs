//! Settings of routers.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrace_replay::Size;
use terrace_routing::Endpoint;

use super::key::{self, Key, Secret};
use super::setting::{Configuration, Form, Setting, settings};
use super::value::Value;
use super::{ConfigError, Limits};

settings! {
    /// All settings of a router.
    RouteSettings, "TERRACE_ROUTE_" {
        "Router" {
            /// The address to listen on.
            listen: String = "127.0.0.1:8080".to_owned(), "ADDRESS";
            /// A worker: a server to send requests to. Give its address, its KV event endpoint and its replay
            /// endpoint. A worker without events is chosen by load only.
            workers: Vec<WorkerPlace> = Vec::new(), "http://HOST:PORT+tcp://EVENTS+tcp://REPLAY"
                {
                    flag: Some("worker"),
                    example: Some(r#"[{ url = "http://HOST:PORT", events = "tcp://HOST:PORT", replay = "tcp://HOST:PORT" }]"#)
                };
            /// The model that the workers serve: a folder, or a model of the Hugging Face Hub as org/name. The router
            /// uses its tokenizer and chat template to turn requests into tokens and match them with KV events.
            model: Option<PathBuf> = None, "MODEL"
                { default_in_words: Some("the model that comes with the program") };
            /// Subscribe only to event topics with this prefix.
            topic: String = String::new(), "TOPIC" { default_in_words: Some("all topics") };
            /// Weight of a worker's queued prefill tokens, relative to the tokens of the request that it would have
            /// to prefill. With 0 a request goes to the worker with the longest cached prefix, however busy it is.
            load_weight: f64 = 1.0, "NUMBER";
            /// Weight of a context token of a decoding request, relative to a token to prefill.
            decode_weight: f64 = 0.25, "NUMBER";
            /// Interval of the workers' health checks.
            health_interval: Duration = Duration::from_secs(2), "TIME";
            /// Blocks remembered per worker, at about 64 bytes each.
            blocks_max: usize = 4_000_000, "BLOCKS";
            /// How long running requests may take to finish after the router is told to stop.
            shutdown_patience: Duration = Duration::from_secs(10), "TIME"
                { variable: Some("TERRACE_SHUTDOWN_PATIENCE") };
            /// The log filter, for example `info` or `terrace_routing=debug`. RUST_LOG works too.
            log: Option<String> = None, "FILTER"
                { variable: Some("TERRACE_LOG"), default_in_words: Some("warn,terrace_l3=info") };
            /// Maximum number of connections. Further ones wait.
            connections_max: usize = 1024, "NUMBER";
            /// Maximum size of a request body.
            body_max: Size = Size::mib(4), "SIZE";
            /// A tenant and its API key, as on the workers. The router needs them to keep the prefixes of tenants
            /// apart. Prefer TERRACE_API_KEYS or the file: other users can see command lines.
            keys: Vec<Key> = Vec::new(), "NAME=KEY" as API_KEYS;
            /// Allow everyone who can reach the address to use the workers without a key. Without this setting, a router
            /// that has no keys starts only on an address of this machine, like 127.0.0.1.
            allow_anonymous: bool = false, "SWITCH";
            /// The key for /metrics.
            operator_key: Option<Secret> = None, "KEY" { is_secret: true };
        }
    }
}

impl RouteSettings {
    /// Checks that the settings are valid.
    ///
    /// # Errors
    /// The first setting that cannot, and what to change.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.workers.is_empty() {
            let advice = "give at least one: --worker http://HOST:PORT+tcp://EVENTS+tcp://REPLAY";
            return Err(ConfigError::new("workers", "none", advice));
        }
        for (setting, weight) in
            [("load_weight", self.load_weight), ("decode_weight", self.decode_weight)]
        {
            if !(0.0..=1e6).contains(&weight) {
                return Err(ConfigError::new(setting, weight, "use 0 to 1000000"));
            }
        }
        if self.health_interval.is_zero() || self.health_interval > super::WAIT_MAX {
            let time = humantime::format_duration(self.health_interval);
            let advice = "use more than 0s and at most one year";
            return Err(ConfigError::new("health_interval", time, advice));
        }
        key::check(&self.keys, self.operator_key.as_ref())?;
        self.limits().check()
    }

    /// Returns the limits for clients.
    pub(crate) fn limits(&self) -> Limits {
        let usual = Limits::default();
        let bodies_max = usual.bodies_max.max(self.body_max);
        Limits {
            connections_max: self.connections_max,
            body_max: self.body_max,
            bodies_max,
            ..usual
        }
    }
}

/// A server that requests are sent to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerPlace {
    /// Its address, without a path.
    pub url: String,
    /// Endpoint of its KV events.
    pub events: Option<Endpoint>,
    /// Endpoint for the replay of events.
    pub replay: Option<Endpoint>,
}

impl FromStr for WorkerPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a worker: write it as http://HOST:PORT+tcp://EVENTS+tcp://REPLAY"
            )
        };
        let mut parts = text.trim().split('+');
        let url = parts.next().unwrap_or_default().trim_end_matches('/').to_owned();
        let host =
            url.strip_prefix("http://").filter(|host| !host.is_empty() && !host.contains('/'));
        host.ok_or_else(wrong)?;
        let mut endpoint = || parts.next().map(str::parse).transpose().map_err(|_| wrong());
        let (events, replay) = (endpoint()?, endpoint()?);
        match parts.next() {
            None => Ok(Self { url, events, replay }),
            Some(_) => Err(wrong()),
        }
    }
}

impl fmt::Display for WorkerPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)?;
        let endpoints = self.events.iter().chain(&self.replay);
        endpoints.into_iter().try_for_each(|endpoint| write!(f, "+{endpoint}"))
    }
}

impl Value for Vec<WorkerPlace> {
    const FORM: Form = Form::List;

    fn read(text: &str) -> Result<Self, String> {
        text.split(',').map(str::parse).collect()
    }

    fn written(&self) -> Option<String> {
        let places: Vec<_> = self.iter().map(WorkerPlace::to_string).collect();
        (!places.is_empty()).then(|| places.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_read_as_they_are_written() {
        let texts = ["http://a:1", "http://a:1+tcp://a:2", "http://a:1+tcp://a:2+tcp://a:3"];
        for text in texts {
            assert_eq!(text.parse::<WorkerPlace>().unwrap().to_string(), text);
        }
        for wrong in [
            "",
            "a:1",
            "https://a:1",
            "http://a/v1",
            "http://a:1+x",
            "http://a+tcp://a:1+tcp://a:1+tcp://a:1",
        ] {
            assert!(wrong.parse::<WorkerPlace>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let sound = RouteSettings {
            workers: vec!["http://a:1".parse().unwrap()],
            ..RouteSettings::default()
        };
        assert_eq!(sound.check(), Ok(()));
        let refused = |settings: RouteSettings| settings.check().unwrap_err().setting;
        assert_eq!(refused(RouteSettings::default()), "workers");
        assert_eq!(
            refused(RouteSettings { load_weight: f64::NAN, ..sound.clone() }),
            "load_weight"
        );
        let health_interval = Duration::ZERO;
        assert_eq!(refused(RouteSettings { health_interval, ..sound.clone() }), "health_interval");
        let keys = vec!["a=x".parse().unwrap(), "b=x".parse().unwrap()];
        assert_eq!(refused(RouteSettings { keys, ..sound }), "keys");
    }
}
