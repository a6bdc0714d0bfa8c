//! What to serve, and how.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use bytesize::ByteSize;
use serde::{Deserialize, Serialize};
use terrace_cache::{EvictionKind, WritePolicy};
use terrace_l3::node::{NodeAddress, RdmaChoice};
use terrace_scheduler::AdmissionOrder;

use crate::tool_calls::ToolFormat;

/// Everything that can be set about a server. The default serves the built-in model to this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The address to listen at.
    pub listen: String,
    /// The folder of the model; without it, the model that comes with the program.
    pub model: Option<PathBuf>,
    /// What clients call the model; the folder's name if not given.
    pub name: Option<String>,
    /// How the model writes calls of functions: hermes, llama or mistral; as its chat template says if
    /// not given.
    pub tool_format: Option<ToolFormat>,
    /// Threads that compute; all cores if not given.
    pub threads: Option<usize>,
    /// Memory for KV that steps compute with.
    pub device_memory: ByteSize,
    /// Memory for KV that no step uses at the moment; 0 for none.
    pub host_memory: ByteSize,
    /// Where KV outlives requests; on disk in the user's cache folder if not given.
    pub l3: Option<L3Choice>,
    /// What a store on disk may grow to, and what this server may put into a cluster.
    pub l3_size: ByteSize,
    /// The library of a Mooncake installation, `libmooncake_store.so`.
    pub mooncake_library: Option<PathBuf>,
    /// How bytes travel to and from a Mooncake cluster: tcp or rdma.
    pub mooncake_protocol: String,
    /// The network devices for rdma; the library's choice if empty.
    pub mooncake_device: String,
    /// The file with the secret that the nodes of `nodes://` know.
    pub node_secret_file: Option<PathBuf>,
    /// What this server calls itself, where the nodes have a list of clients.
    pub node_client: String,
    /// On how many nodes each page is kept: 1 or 2.
    pub node_copies: usize,
    /// Which RDMA adapter to use with nodes: auto, never or its name.
    pub node_rdma: RdmaChoice,
    /// Tokens in a page.
    pub page_size: u32,
    /// Tokens that one step computes at the most.
    pub step_tokens: u32,
    /// Requests that run at once.
    pub running_max: u32,
    /// Which pages go first.
    pub eviction: EvictionKind,
    /// When pages are copied from device to host.
    pub write_policy: WritePolicy,
    /// Who is admitted first.
    pub admission: AdmissionOrder,
    /// Who may ask; without any, everybody who can reach the address.
    pub keys: Vec<Key>,
    /// The key for figures and the page of the operator.
    pub operator_key: Option<Secret>,
    /// How long requests that run may take when the server is told to stop.
    #[serde(with = "crate::duration")]
    pub shutdown_patience: Duration,
    /// What to log, as `RUST_LOG` has it.
    pub log: Option<String>,
    /// A new file for the traffic: times, lengths and page keys of all requests, as a trace that
    /// replays accept.
    pub record: Option<PathBuf>,
    /// A new file for everything that the scheduler is told and plans, the tokens of prompts included.
    pub decision_log: Option<PathBuf>,
    /// What clients may take.
    pub limits: Limits,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".to_owned(),
            model: None,
            name: None,
            tool_format: None,
            threads: None,
            device_memory: ByteSize::mib(256),
            host_memory: ByteSize::gib(1),
            l3: None,
            l3_size: ByteSize::gib(4),
            mooncake_library: None,
            mooncake_protocol: "tcp".to_owned(),
            mooncake_device: String::new(),
            node_secret_file: None,
            node_client: String::new(),
            node_copies: 1,
            node_rdma: RdmaChoice::Auto,
            page_size: 16,
            step_tokens: 512,
            running_max: 64,
            eviction: EvictionKind::default(),
            write_policy: WritePolicy::WriteThrough,
            admission: AdmissionOrder::Priority,
            keys: Vec::new(),
            operator_key: None,
            shutdown_patience: Duration::from_secs(10),
            log: None,
            record: None,
            decision_log: None,
            limits: Limits::default(),
        }
    }
}

/// The longest wait. What is far longer cannot be added to a moment.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl Config {
    /// Whether this configuration can work, as far as that can be told without trying.
    ///
    /// # Errors
    /// The first setting that cannot, and what to change.
    pub fn check(&self) -> Result<(), ConfigError> {
        let page_size = self.page_size;
        if !page_size.is_power_of_two() || page_size > 256 {
            return Err(ConfigError::new("page_size", page_size, "use a power of two up to 256"));
        }
        if self.step_tokens < self.running_max {
            let advice = "raise it to running_max, so that all that run fit into a step";
            return Err(ConfigError::new("step_tokens", self.step_tokens, advice));
        }
        if self.shutdown_patience > WAIT_MAX {
            let patience = humantime::format_duration(self.shutdown_patience);
            return Err(ConfigError::new("shutdown_patience", patience, "use a year at the most"));
        }
        let mut names = BTreeSet::new();
        let mut secrets: BTreeSet<_> = self.operator_key.iter().collect();
        for Key { name, key, requests_max, priority_min, priority_max } in &self.keys {
            if *requests_max == Some(0) {
                return Err(ConfigError::new("keys.requests_max", 0, "use at least 1"));
            }
            if priority_min.unwrap_or(i32::MIN) > priority_max.unwrap_or(0) {
                let advice =
                    "lower keys.priority_min, or raise keys.priority_max, which is 0 if not given";
                return Err(ConfigError::new("keys", name, advice));
            }
            if name.is_empty() || !names.insert(name) {
                return Err(ConfigError::new("keys", name, "give every key a name of its own"));
            }
            if !secrets.insert(key) {
                return Err(ConfigError::new("keys", name, "give everybody another key"));
            }
        }
        if secrets.iter().any(|secret| secret.0.is_empty()) {
            return Err(ConfigError::new("keys", "", "a key must not be empty"));
        }
        self.limits.check()
    }
}

/// What somebody sends as `Authorization: Bearer`. It does not appear in logs.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub(crate) String);

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a secret")
    }
}

/// A client's key. Its name is a tenant's: tenants share no page of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The tenant.
    pub name: String,
    /// What the client sends.
    pub key: Secret,
    /// Answers that the tenant may have under way; an equal share of limits.requests_max if not given.
    #[serde(default)]
    pub requests_max: Option<u32>,
    /// The lowest priority that the tenant may ask for; any if not given.
    #[serde(default)]
    pub priority_min: Option<i32>,
    /// The highest; 0, which is everybody's, if not given.
    #[serde(default)]
    pub priority_max: Option<i32>,
}

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, key)) if !name.is_empty() && !key.is_empty() => Ok(Self {
                name: name.to_owned(),
                key: key.into(),
                requests_max: None,
                priority_min: None,
                priority_max: None,
            }),
            Some(_) | None => Err("write it as NAME=KEY".to_owned()),
        }
    }
}

/// Where KV outlives requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum L3Choice {
    /// In a folder on disk, where it outlives the server too.
    Disk(PathBuf),
    /// In so much memory.
    Memory(ByteSize),
    /// In the Mooncake cluster whose master is at HOST:PORT, which other servers share.
    Mooncake(String),
    /// On these nodes, which other servers share: `[NAME=]HOST:PORT[*WEIGHT]`, separated by commas.
    Nodes(String),
    /// Nowhere.
    None,
}

impl FromStr for L3Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("disk", folder)) if !folder.is_empty() => Ok(Self::Disk(folder.into())),
            Some(("memory", size)) => size.parse().map(Self::Memory),
            Some(("mooncake", address)) if is_address(address.strip_prefix("//")) => {
                Ok(Self::Mooncake(address["//".len()..].to_owned()))
            }
            Some(("nodes", nodes)) if nodes.starts_with("//") => {
                let nodes = &nodes["//".len()..];
                parse_nodes(nodes).map(|_| Self::Nodes(nodes.to_owned()))
            }
            None if text == "none" => Ok(Self::None),
            Some(_) | None => {
                let places = "disk:FOLDER, memory:SIZE, mooncake://HOST:PORT, \
                              nodes://HOST:PORT,HOST:PORT or none";
                Err(format!("write it as {places}"))
            }
        }
    }
}

/// The nodes of an [`L3Choice::Nodes`].
pub(crate) fn parse_nodes(text: &str) -> Result<Vec<NodeAddress>, String> {
    text.split(',').map(str::parse).collect()
}

/// Whether it is written as HOST:PORT.
fn is_address(text: Option<&str>) -> bool {
    text.and_then(|text| text.rsplit_once(':'))
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

impl TryFrom<String> for L3Choice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<L3Choice> for String {
    fn from(choice: L3Choice) -> Self {
        match choice {
            L3Choice::Disk(folder) => format!("disk:{}", folder.display()),
            L3Choice::Memory(size) => format!("memory:{}", size.display().iec()),
            L3Choice::Mooncake(address) => format!("mooncake://{address}"),
            L3Choice::Nodes(nodes) => format!("nodes://{nodes}"),
            L3Choice::None => "none".to_owned(),
        }
    }
}

/// What clients may take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Connections at a time; more wait until one ends.
    pub connections_max: usize,
    /// Answers under way at a time, waiting ones included; more are refused.
    pub requests_max: u32,
    /// The longest body of a request.
    pub body_max: ByteSize,
    /// Memory for the bodies of all requests together while they are read.
    pub bodies_max: ByteSize,
    /// How long a client may take to send the head of a request.
    #[serde(with = "crate::duration")]
    pub header_timeout: Duration,
    /// How long a client may take to send the body of a request.
    #[serde(with = "crate::duration")]
    pub body_timeout: Duration,
    /// How long a connection may be idle.
    #[serde(with = "crate::duration")]
    pub idle_timeout: Duration,
    /// How long a client may take nothing of its answer.
    #[serde(with = "crate::duration")]
    pub write_timeout: Duration,
    /// How much of an answer the system keeps for a client that does not take it.
    pub send_buffer: ByteSize,
    /// The longest stop string, in bytes.
    pub stop_bytes_max: usize,
    /// Prompts in one request.
    pub prompts_max: usize,
    /// Answers to each prompt.
    pub n_max: u32,
    /// Answers to one request: prompts times answers to each.
    pub answers_max: u32,
    /// Viewers of the page at a time.
    pub viewers_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 1024,
            requests_max: 1024,
            body_max: ByteSize::mib(4),
            bodies_max: ByteSize::mib(64),
            header_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(75),
            write_timeout: Duration::from_secs(30),
            send_buffer: ByteSize::kib(256),
            stop_bytes_max: 256,
            prompts_max: 64,
            n_max: 16,
            answers_max: 256,
            viewers_max: 16,
        }
    }
}

impl Limits {
    fn check(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("limits.connections_max", self.connections_max as u64),
            ("limits.requests_max", u64::from(self.requests_max)),
            ("limits.body_max", self.body_max.as_u64()),
            ("limits.send_buffer", self.send_buffer.as_u64()),
            ("limits.prompts_max", self.prompts_max as u64),
            ("limits.n_max", u64::from(self.n_max)),
            ("limits.answers_max", u64::from(self.answers_max)),
        ];
        if let Some((setting, _)) = sizes.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::new(setting, 0, "use at least 1"));
        }
        let counts = [
            ("limits.connections_max", self.connections_max as u64),
            ("limits.viewers_max", self.viewers_max as u64),
            ("limits.send_buffer", self.send_buffer.as_u64()),
        ];
        if let Some((setting, value)) = counts.iter().find(|(_, value)| *value > 1 << 30) {
            return Err(ConfigError::new(setting, value, "use 1073741824 at the most"));
        }
        // What a semaphore can count.
        if self.bodies_max < self.body_max || self.bodies_max > ByteSize::gib(1) {
            let advice = "use at least limits.body_max, and 1 GiB at the most";
            return Err(ConfigError::new("limits.bodies_max", self.bodies_max, advice));
        }
        let waits = [
            ("limits.header_timeout", self.header_timeout),
            ("limits.body_timeout", self.body_timeout),
            ("limits.idle_timeout", self.idle_timeout),
            ("limits.write_timeout", self.write_timeout),
        ];
        match waits.iter().find(|(_, wait)| wait.is_zero() || *wait > WAIT_MAX) {
            Some((setting, wait)) => {
                let wait = humantime::format_duration(*wait);
                Err(ConfigError::new(setting, wait, "use more than 0s and a year at the most"))
            }
            None => Ok(()),
        }
    }
}

/// A configuration that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting} = {value}: {advice}")]
pub struct ConfigError {
    setting: &'static str,
    value: String,
    advice: &'static str,
}

impl ConfigError {
    fn new(setting: &'static str, value: impl fmt::Display, advice: &'static str) -> Self {
        Self { setting, value: value.to_string(), advice }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_survives_its_file() {
        let config = Config {
            keys: vec!["alice=secret".parse().unwrap()],
            l3: Some(L3Choice::Memory(ByteSize::mib(64))),
            write_policy: WritePolicy::SelectiveWriteThrough { hits: 2 },
            ..Config::default()
        };
        let text = toml::to_string(&config).unwrap();
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), config, "{text}");
        assert_eq!(toml::from_str::<Config>("").unwrap(), Config::default());
        assert!(toml::from_str::<Config>("lisen = \"127.0.0.1:1\"").is_err());
    }

    #[test]
    fn places_for_l3_are_written_in_one_way() {
        assert_eq!("disk:/x:y".parse(), Ok(L3Choice::Disk("/x:y".into())));
        assert_eq!("memory:1GiB".parse(), Ok(L3Choice::Memory(ByteSize::gib(1))));
        assert_eq!("none".parse(), Ok(L3Choice::None));
        let master = L3Choice::Mooncake("[::1]:50051".to_owned());
        assert_eq!("mooncake://[::1]:50051".parse(), Ok(master.clone()));
        assert_eq!(String::from(master), "mooncake://[::1]:50051");
        let wrong = ["mooncake:x:1", "mooncake://", "mooncake://host", "mooncake://host:port"];
        for wrong in wrong.into_iter().chain(["disk", "disk:", "memory:much", "none:", ""]) {
            assert!(wrong.parse::<L3Choice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_beyond_what_can_be_counted_are_refused() {
        let with = |limits: &str| toml::from_str::<Config>(&format!("[limits]\n{limits}")).unwrap();
        assert_eq!(with("connections_max = 100000").check(), Ok(()));
        for wrong in [
            "connections_max = 9000000000000000000",
            "viewers_max = 9000000000000000000",
            "send_buffer = \"8GiB\"",
            "write_timeout = \"18446744073709551615s\"",
            "idle_timeout = \"18446744073709551615s\"",
        ] {
            assert!(with(wrong).check().is_err(), "{wrong}");
        }
        let patience = Duration::MAX;
        assert!(Config { shutdown_patience: patience, ..Config::default() }.check().is_err());
    }

    #[test]
    fn keys_belong_to_one_tenant_each() {
        let with = |keys: &[&str], operator: Option<&str>| Config {
            keys: keys.iter().map(|key| key.parse().unwrap()).collect(),
            operator_key: operator.map(Secret::from),
            ..Config::default()
        };
        assert_eq!(with(&["a=1", "b=2"], Some("3")).check(), Ok(()));
        assert!(with(&["a=1", "a=2"], None).check().is_err());
        assert!(with(&["a=1", "b=1"], None).check().is_err());
        assert!(with(&["a=1"], Some("1")).check().is_err());
        assert!(with(&[], Some("")).check().is_err());
        assert!("=1".parse::<Key>().is_err());
        assert!(!format!("{:?}", with(&["a=hush"], None)).contains("hush"));
    }
}
