//! What to serve, and how: every setting once, with all that is said about it.

mod device_choice;
mod key;
mod l3_choice;
mod node;
mod route;
mod setting;
pub(crate) mod value;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use terrace_cache::{EvictionKind, WritePolicy};
use terrace_l3_disk::PromotionConfig;
use terrace_l3_mooncake::MooncakeConfig;
use terrace_l3_nodes::RdmaChoice;
use terrace_replay::Size;
use terrace_routing::{Door, Endpoint};
use terrace_scheduler::AdmissionOrder;

use crate::tool_calls::ToolFormat;
use setting::settings;
use value::Value;

pub use device_choice::DeviceChoice;
pub(crate) use device_choice::{DEVICE_MEMORY_ON_CPU, StepSettings};
pub use key::{Key, Secret};
pub use l3_choice::L3Choice;
pub(crate) use l3_choice::parse_nodes;
pub use node::{ClientSettings, NodeSettings};
pub use route::{RouteSettings, WorkerPlace};
pub use setting::{Configuration, Form, Setting};

settings! {
    /// Everything that can be set about a server. The default serves the built-in model to this machine.
    Config, "TERRACE_" {
        "Server" {
            /// The address to listen at.
            listen: String = "127.0.0.1:8000".to_owned(), "ADDRESS";
            /// How long answers under way may take when the server is told to stop.
            shutdown_patience: Duration = Duration::from_secs(10), "TIME";
            /// What to log, like `info` or `terrace_engine=debug`; RUST_LOG works too.
            log: Option<String> = None, "FILTER" { default_in_words: Some("warn,terrace_l3=info") };
            /// Record the traffic into a new file: times, lengths and page keys, no text; `terrace replay`
            /// accepts it. If there is such a file, a number is added to the name, as in traffic.2.jsonl.
            record: Option<PathBuf> = None, "FILE";
            /// Record everything that the scheduler is told and plans into a new file, the tokens of
            /// prompts included; `terrace decisions` does it again. Names are found as for `record`.
            decision_log: Option<PathBuf> = None, "FILE";
            /// Tell metrics also by the names that dashboards made for vLLM ask for.
            metrics_vllm_names: bool = false, "SWITCH";
        }
        "Model" {
            /// The folder of a model, as Hugging Face lays it out; for programs built with `--features models`.
            model: Option<PathBuf> = None, "FOLDER"
                { default_in_words: Some("the model that comes with the program") };
            /// Without a folder, serve a model of random weights in place of the one that comes with the program. It
            /// says nothing sensible and does not end its answers: for tests and benches.
            random_model: bool = false, "SWITCH";
            /// What clients call the model.
            name: Option<String> = None, "NAME" { default_in_words: Some("the folder's name") };
            /// How the model writes calls of functions: hermes, llama or mistral.
            tool_format: Option<ToolFormat> = None, "FORMAT"
                { default_in_words: Some("as its chat template says") };
            /// What steps compute on: cpu, or, in programs built with `--features cuda`, cuda for the first NVIDIA
            /// GPU and cuda:NUMBER for another.
            device: DeviceChoice = DeviceChoice::Cpu, "DEVICE";
            /// Threads that compute on the CPU, four times as many as there are cores at the most.
            threads: Option<usize> = None, "NUMBER" { default_in_words: Some("all cores") };
        }
        "Cache" {
            /// Memory for KV that steps compute with.
            device_memory: Option<Size> = None, "SIZE"
                { default_in_words: Some("256MiB on a CPU, what is left of a GPU") };
            /// Memory for KV that no step uses at the moment; 0 for none.
            host_memory: Size = Size::gib(1), "SIZE";
            /// Where KV outlives requests: disk:FOLDER, memory:SIZE, mooncake://HOST:PORT,
            /// nodes://HOST:PORT,HOST:PORT or none; in builds that can, s3://BUCKET/PREFIX or bucket:URL.
            l3: Option<L3Choice> = None, "PLACE"
                { default_in_words: Some("disk, in terrace/l3 of the user's cache folder") };
            /// What the folder of L3 on disk may grow to, with the pages of all models, or what this server
            /// may put into a cluster or a bucket.
            l3_size: Size = Size::gib(4), "SIZE";
            /// What L3 on disk leaves free on its file system.
            l3_reserve: Option<Size> = None, "SIZE" { default_in_words:
                Some("a twentieth of it, between 1GiB and 16GiB and no more than a quarter") };
            /// For how long it is believed that L3 still has what it had, twice that at the most; what is used
            /// after that is offered to it again. With 0s it is believed for good.
            l3_doubt_after: Duration = Duration::from_secs(600), "TIME";
            /// How long a request waits for its pages from L3, and half a millisecond more for each; two fifths
            /// of that for the answer whether L3 has them. After that they are computed.
            l3_wait: Duration = Duration::from_millis(500), "TIME";
            /// Memory over L3 on disk: pages that a request asks about are moved there before they are read; 0
            /// for none.
            l3_memory: Size = Size(0), "SIZE";
            /// How many pages are moved from disk to memory at a time.
            promotion_workers: u32 = 4, "NUMBER";
            /// How many pages are looked for at a time: the moves of some begin before the others are
            /// looked for.
            promotion_chunk: u32 = 128, "PAGES";
            /// How long nothing is moved to memory after there was no room in it.
            promotion_cooldown: Duration = Duration::from_millis(500), "TIME";
            /// How long a read waits for pages that are being moved to memory.
            promotion_wait: Duration = Duration::from_millis(10), "TIME";
            /// The libmooncake_store.so of your Mooncake installation, for mooncake://HOST:PORT.
            mooncake_library: Option<PathBuf> = None, "PATH";
            /// How bytes travel to and from the Mooncake cluster: tcp or rdma.
            mooncake_protocol: String = "tcp".to_owned(), "NAME";
            /// The network devices for rdma.
            mooncake_device: String = String::new(), "NAMES"
                { default_in_words: Some("the library's choice") };
            /// Where those who use the Mooncake cluster find each other: the address of its metadata server,
            /// like http://HOST:8080/metadata, or P2PHANDSHAKE if it has none.
            mooncake_metadata: String = "P2PHANDSHAKE".to_owned(), "ADDRESS";
            /// Memory that this process gives to the Mooncake cluster while it runs; 0 for none. What the
            /// cluster keeps there is gone when it ends.
            mooncake_segment: Size = Size(0), "SIZE";
            /// Memory that the Mooncake library takes for itself; 0 for none. No page needs it.
            mooncake_buffer: Size = Size(0), "SIZE";
            /// How often the Mooncake cluster keeps each object, where it has so many segments.
            mooncake_replicas: u32 = 1, "NUMBER";
            /// Segments of the Mooncake cluster that objects go to while there is room, separated by commas;
            /// `own` is the one that this process offers.
            mooncake_prefer: String = String::new(), "SEGMENTS"
                { default_in_words: Some("the cluster's choice") };
            /// The file with the secret that the nodes know, for nodes://HOST:PORT.
            node_secret_file: Option<PathBuf> = None, "FILE";
            /// What this process calls itself, where the nodes have a list of clients.
            node_client: String = String::new(), "NAME";
            /// On how many nodes each object is kept: 1, or 2 so that a node's death costs nothing.
            node_copies: usize = 1, "NUMBER";
            /// Which RDMA adapter to use with nodes, in builds that can: auto, never or its name.
            node_rdma: RdmaChoice = RdmaChoice::Auto, "NAME";
            /// Tokens in a page: a power of two up to 256.
            page_size: u32 = 16, "TOKENS";
            /// Which pages go first: lru, lfu, slru, fifo, priority or s3-fifo.
            eviction: EvictionKind = EvictionKind::Lru, "POLICY";
            /// When pages are copied to host: write-through, write-back, or selective-write-through:HITS
            /// for those that so many requests have found in the cache.
            write_policy: WritePolicy = WritePolicy::WriteThrough, "POLICY";
            /// On a GPU, one in so many pages that are copied between it and host is compared on both sides: a
            /// copy that was damaged is found, counted and not used.
            canary: Option<u32> = None, "PAGES" { default_in_words: Some("none is compared") };
            /// Let the operator put a wrong page on the device on purpose (POST /plant_wrong_page?token=POSITION), to see
            /// what it does to answers; on a CPU. Servers without this setting use nothing that one with it has computed.
            plant_wrong_pages: bool = false, "SWITCH";
        }
        "Batching" {
            /// Tokens that one step computes at the most.
            step_tokens: Option<u32> = None, "TOKENS"
                { default_in_words: Some("512 on a CPU, 8192 on a GPU") };
            /// Requests that run at once.
            running_max: u32 = 64, "REQUESTS";
            /// Steps in flight: with 2 the next one is planned, and launched, while one runs. A new request
            /// waits for both then, which is long on a CPU.
            steps_in_flight: Option<u32> = None, "STEPS"
                { default_in_words: Some("1 on a CPU, 2 on a GPU") };
            /// Whether a step begins while pages that it reads are still copied from host: the model waits for
            /// each layer of them instead of for all.
            load_back_overlaps: Option<bool> = None, "SWITCH"
                { default_in_words: Some("false on a CPU, true on a GPU") };
            /// Who is admitted first: arrival, priority, longest-prefix or tree-order.
            admission: AdmissionOrder = AdmissionOrder::Priority, "ORDER";
            /// Whether the least urgent of those who run gives up its place to one in line that is more
            /// urgent, with admission by priority; what it has computed stays in the cache.
            preempts: bool = false, "SWITCH";
            /// Tokens of a step that prompts which it cannot finish get in any case; they get more while
            /// no other request is expected, so that short prompts do not wait for long ones.
            chunk_tokens: u32 = 128, "TOKENS";
            /// A token of a prompt with more than so many before it counts for more in a step, since it
            /// attends to them all: steps take about as long everywhere in a long prompt. With 0 all count
            /// the same.
            context_tokens: u32 = 49_152, "TOKENS";
        }
        "Routers" {
            /// Where to tell routers what the cache holds, as vLLM does over ZeroMQ: tcp://ADDRESS:PORT, with * for
            /// all addresses, or connect:tcp://HOST:PORT to go to a router that waits there. It tells prompts to
            /// whoever listens.
            kv_events: Option<Door> = None, "ENDPOINT" { default_in_words: Some("nobody is told") };
            /// Where routers ask for what they have missed.
            kv_events_replay: Option<Endpoint> = None, "ENDPOINT" { default_in_words: Some("nowhere") };
            /// What stands before every batch of events; llm-d wants `kv@POD@MODEL`.
            kv_events_topic: String = String::new(), "TOPIC" { default_in_words: Some("nothing") };
            /// How many batches of events are kept for routers that ask again.
            kv_events_buffer: usize = 10_000, "BATCHES";
            /// Tell routers also what this server has seen in L3, as medium STORAGE, which few of them know. What
            /// others share is told as being nobody's.
            kv_events_l3: bool = false, "SWITCH";
        }
        "Security" {
            /// A tenant and its key; without any, everybody who can reach the address may ask. Better in
            /// TERRACE_API_KEYS, separated by commas, or in the file: others can see arguments.
            keys: Vec<Key> = Vec::new(), "NAME=KEY"
                {
                    flag: Some("api-key"),
                    variable: Some("TERRACE_API_KEYS"),
                    example: Some(r#"[{ name = "NAME", key = "KEY" }]"#),
                    is_secret: true
                };
            /// The key for /metrics and the page.
            operator_key: Option<Secret> = None, "KEY" { is_secret: true };
            /// What page keys are hashed with, the same on all servers that share an L3: 32 random characters or more.
            /// Without it, whoever may choose tokens can compute prompts that take the place of others in L3.
            l3_secret: Option<Secret> = None, "SECRET" { is_secret: true };
        }
    }
    /// What clients may take.
    limits: Limits, "Limits" {
        /// Connections at a time; more wait until one ends.
        connections_max: usize = 1024, "NUMBER";
        /// Answers under way at a time, waiting ones included; more are refused.
        requests_max: u32 = 1024, "NUMBER";
        /// The longest body of a request.
        body_max: Size = Size::mib(4), "SIZE";
        /// Memory for the bodies of all requests together while they are read; not less than one may have.
        bodies_max: Size = Size::mib(64), "SIZE";
        /// How long a client may take to send the head of a request.
        header_timeout: Duration = Duration::from_secs(10), "TIME";
        /// How long a client may take to send the body of a request.
        body_timeout: Duration = Duration::from_secs(30), "TIME";
        /// How long a connection may be idle.
        idle_timeout: Duration = Duration::from_secs(75), "TIME";
        /// How long a client may take nothing of its answer.
        write_timeout: Duration = Duration::from_secs(30), "TIME";
        /// How much of an answer the system keeps for a client that does not take it.
        send_buffer: Size = Size::kib(256), "SIZE";
        /// The longest stop string, in bytes.
        stop_bytes_max: usize = 256, "BYTES";
        /// Prompts in one request.
        prompts_max: usize = 64, "NUMBER";
        /// Answers to each prompt.
        n_max: u32 = 16, "NUMBER";
        /// Answers to one request: prompts times answers to each.
        answers_max: u32 = 256, "NUMBER";
        /// Viewers of the page at a time.
        viewers_max: usize = 16, "NUMBER";
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
        self.check_threads(cores())?;
        if self.running_max == 0 {
            return Err(ConfigError::new("running_max", 0, "use at least 1"));
        }
        let steps = self.steps();
        if !(1..=2).contains(&steps.steps_in_flight) {
            return Err(ConfigError::new("steps_in_flight", steps.steps_in_flight, "use 1 or 2"));
        }
        if self.chunk_tokens == 0 {
            return Err(ConfigError::new("chunk_tokens", 0, "use at least 1"));
        }
        if self.preempts && self.admission != AdmissionOrder::Priority {
            let advice = "use it with priority for admission (--admission): else whoever gives up its \
                          place gets it back";
            return Err(ConfigError::new("preempts", true, advice));
        }
        if steps.step_tokens < self.running_max {
            let advice =
                "raise it to running_max (--running-max), so that all that run fit into a step";
            return Err(ConfigError::new("step_tokens", steps.step_tokens, advice));
        }
        self.check_canary()?;
        if self.plant_wrong_pages && self.device != DeviceChoice::Cpu {
            let advice =
                "it is for models on a CPU: leave it out, or use cpu for device (--device)";
            return Err(ConfigError::new("plant_wrong_pages", true, advice));
        }
        if let WritePolicy::SelectiveWriteThrough { hits: 0 } = self.write_policy {
            let advice = "use at least 1 for HITS, or write-through";
            return Err(ConfigError::new("write_policy", self.write_policy, advice));
        }
        let is_on_disk = matches!(self.l3, Some(L3Choice::Disk(_)) | None);
        if self.l3_memory != Size(0) && !is_on_disk {
            let advice = "it lies over L3 on disk: use it with disk:FOLDER for l3 (--l3)";
            return Err(ConfigError::new("l3_memory", self.l3_memory.written(), advice));
        }
        self.check_clusters()?;
        if let (None, Some(replay)) = (&self.kv_events, &self.kv_events_replay) {
            let advice = "it is for those who follow events: use it with kv_events (--kv-events)";
            return Err(ConfigError::new("kv_events_replay", replay, advice));
        }
        let times = [
            ("shutdown_patience", self.shutdown_patience),
            ("l3_doubt_after", self.l3_doubt_after),
        ];
        if let Some((setting, time)) = times.into_iter().find(|(_, time)| *time > WAIT_MAX) {
            let time = humantime::format_duration(time);
            return Err(ConfigError::new(setting, time, "use a year at the most"));
        }
        let mut names = BTreeSet::new();
        let mut secrets: BTreeSet<_> = self.operator_key.iter().collect();
        for Key { name, key, requests_max, priority_min, priority_max } in &self.keys {
            if *requests_max == Some(0) {
                return Err(ConfigError::new("keys", name, "use at least 1 for its requests_max"));
            }
            if priority_min.unwrap_or(i32::MIN) > priority_max.unwrap_or(0) {
                let advice =
                    "lower its priority_min, or raise its priority_max, which is 0 if not given";
                return Err(ConfigError::new("keys", name, advice));
            }
            if name.is_empty() || !names.insert(name) {
                return Err(ConfigError::new("keys", name, "give every key a name of its own"));
            }
            if !secrets.insert(key) {
                return Err(ConfigError::new("keys", name, "give everybody another key"));
            }
        }
        if self.operator_key.as_ref().is_some_and(|secret| secret.0.is_empty()) {
            return Err(ConfigError::new("operator_key", "\"\"", "a key must not be empty"));
        }
        if let Some(Key { name, .. }) = self.keys.iter().find(|key| key.key.0.is_empty()) {
            return Err(ConfigError::new("keys", name, "a key must not be empty"));
        }
        self.limits.check()
    }

    /// Whether a cluster or nodes could be used like this.
    ///
    /// # Errors
    /// As for [`Config::check`].
    pub fn check_clusters(&self) -> Result<(), ConfigError> {
        if self.mooncake_replicas == 0 {
            return Err(ConfigError::new("mooncake_replicas", 0, "use at least 1"));
        }
        let own = MooncakeConfig::OWN_SEGMENT;
        if self.mooncake_segment == Size(0) && self.preferred_segments().any(|name| name == own) {
            let advice = "offer a segment (--mooncake-segment), or leave out `own`";
            return Err(ConfigError::new("mooncake_prefer", &self.mooncake_prefer, advice));
        }
        if !(1..=2).contains(&self.node_copies) {
            return Err(ConfigError::new("node_copies", self.node_copies, "use 1 or 2"));
        }
        Ok(())
    }

    /// The names in `mooncake_prefer`.
    pub(crate) fn preferred_segments(&self) -> impl Iterator<Item = &str> {
        self.mooncake_prefer.split(',').map(str::trim).filter(|name| !name.is_empty())
    }

    /// How pages move from disk to memory over it.
    pub(crate) fn promotion(&self) -> PromotionConfig {
        promotion(
            self.promotion_workers,
            self.promotion_chunk,
            self.promotion_cooldown,
            self.promotion_wait,
        )
    }

    /// Whether a machine with so many cores can compute on so many threads.
    fn check_threads(&self, cores: usize) -> Result<(), ConfigError> {
        let threads_max = (4 * cores).clamp(16, 1024);
        match self.threads {
            Some(0) => {
                let advice = "use at least 1, or leave it out to use all cores";
                Err(ConfigError::new("threads", 0, advice))
            }
            Some(threads) if threads > threads_max => {
                let advice = format!(
                    "this machine has {cores} cores, and more threads than cores make it slower: use \
                     {threads_max} at the most, or leave it out to use all cores"
                );
                Err(ConfigError::new("threads", threads, advice))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// How objects move from disk to memory, where it is set.
fn promotion(workers: u32, chunk: u32, cooldown: Duration, wait: Duration) -> PromotionConfig {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    PromotionConfig {
        workers,
        chunk_keys: chunk.max(1),
        cooldown_ms: ms(cooldown),
        get_wait_ms: ms(wait),
        ..PromotionConfig::default()
    }
}

/// How many threads this machine can run at once.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
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
        if self.bodies_max < self.body_max || self.bodies_max > Size::gib(1) {
            let advice = "use at least limits.body_max (--body-max), and 1GiB at the most";
            return Err(ConfigError::new("limits.bodies_max", self.bodies_max.written(), advice));
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
    /// The setting, by its [`Setting::path`].
    pub setting: &'static str,
    /// What it was set to.
    pub value: String,
    /// What to change.
    pub advice: Cow<'static, str>,
}

impl ConfigError {
    fn new(
        setting: &'static str,
        value: impl fmt::Display,
        advice: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { setting, value: value.to_string(), advice: advice.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_cannot_help_are_refused_with_what_can() {
        let refused = |threads: usize, cores| {
            let config = Config { threads: Some(threads), ..Config::default() };
            config.check_threads(cores).err().map(|error| error.to_string())
        };
        for (threads, cores) in [(1, 1), (16, 1), (16, 2), (32, 8), (1024, 512)] {
            assert_eq!(refused(threads, cores), None);
        }
        let none = refused(0, 8).unwrap();
        assert!(none.contains("threads = 0: use at least 1"), "{none}");
        let many = refused(1000, 8).unwrap();
        assert!(many.contains("has 8 cores") && many.contains("use 32 at the most"), "{many}");
        assert!(refused(1025, 512).is_some());
        assert!(Config { threads: Some(0), ..Config::default() }.check().is_err());
    }

    #[test]
    fn a_configuration_survives_its_file() {
        let config = Config {
            keys: vec!["alice=secret".parse().unwrap()],
            l3: Some(L3Choice::Memory(Size::mib(64))),
            write_policy: WritePolicy::SelectiveWriteThrough { hits: 2 },
            ..Config::default()
        };
        let text = toml::to_string(&config).unwrap();
        assert_eq!(toml::from_str::<Config>(&text).unwrap(), config, "{text}");
        assert_eq!(toml::from_str::<Config>("").unwrap(), Config::default());
        assert!(toml::from_str::<Config>("lisen = \"127.0.0.1:1\"").is_err());
    }

    #[test]
    fn every_setting_is_described_and_has_names_of_its_own() {
        let mut names = BTreeSet::new();
        for setting in Config::SETTINGS {
            let description = setting.description();
            assert!(description.ends_with('.') && description.len() > 10, "{setting:?}");
            assert!(!setting.heading.is_empty() && !setting.value_name.is_empty(), "{setting:?}");
            assert!(
                names.insert(setting.flag()) && names.insert(setting.variable()),
                "{setting:?}"
            );
            assert_eq!(Config::setting(&setting.path()).map(|same| same.name), Some(setting.name));
        }
        let described = |name| Config::setting(name).unwrap().description();
        for kind in EvictionKind::ALL {
            assert!(described("eviction").contains(kind.name()));
        }
        for order in AdmissionOrder::ALL {
            assert!(described("admission").contains(order.name()));
        }
        assert_eq!(Config::setting("limits.body_max").unwrap().variable(), "TERRACE_BODY_MAX");
        assert_eq!(Config::setting("keys").unwrap().flag(), "api-key");
    }

    #[test]
    fn what_a_setting_says_it_is_it_can_be_set_to() {
        let config = Config::default();
        for setting in Config::SETTINGS.iter().filter(|setting| !setting.is_secret) {
            let mut same = config.clone();
            if let Some(value) = setting.get(&config) {
                setting.set(&mut same, &value).unwrap();
            }
            assert_eq!(same, config, "{}", setting.name);
        }
        let mut config = config;
        for (path, value) in [("threads", "3"), ("limits.idle_timeout", "5m"), ("l3", "none")] {
            let setting = Config::setting(path).unwrap();
            setting.set(&mut config, value).unwrap();
            assert_eq!(setting.get(&config).as_deref(), Some(value));
            assert!(
                setting.form == Form::Text && path == "l3"
                    || setting.set(&mut config, "x").is_err()
            );
        }
        assert_eq!((config.threads, config.limits.idle_timeout.as_secs()), (Some(3), 300));
    }

    #[test]
    fn policies_have_the_names_that_older_files_gave_them() {
        let policy = |text: &str| {
            let file = format!("write_policy = {text}");
            toml::from_str::<Config>(&file).unwrap().write_policy
        };
        let selective = WritePolicy::SelectiveWriteThrough { hits: 2 };
        assert_eq!(policy("\"write_through\""), WritePolicy::WriteThrough);
        assert_eq!(policy("\"write-back\""), WritePolicy::WriteBack);
        assert_eq!(policy("\"selective-write-through:2\""), selective);
        assert_eq!(policy("{ selective_write_through = { hits = 2 } }"), selective);
        let file = "[write_policy.selective_write_through]\nhits = 2\n";
        assert_eq!(toml::from_str::<Config>(file).unwrap().write_policy, selective);
    }

    #[test]
    fn places_for_l3_are_written_in_one_way() {
        assert_eq!("disk:/x:y".parse(), Ok(L3Choice::Disk("/x:y".into())));
        assert_eq!("memory:1GiB".parse(), Ok(L3Choice::Memory(Size::gib(1))));
        assert_eq!("none".parse(), Ok(L3Choice::None));
        let master = L3Choice::Mooncake("[::1]:50051".to_owned());
        assert_eq!("mooncake://[::1]:50051".parse(), Ok(master.clone()));
        assert_eq!(String::from(master), "mooncake://[::1]:50051");
        for bucket in ["s3://bucket/prefix", "gs://bucket", "bucket:file:///mnt/shared/kv"] {
            let url = bucket.strip_prefix("bucket:").unwrap_or(bucket).to_owned();
            assert_eq!(bucket.parse(), Ok(L3Choice::Bucket(url.clone())));
            assert_eq!(String::from(L3Choice::Bucket(url)), bucket);
        }
        for wrong in ["s3:bucket", "bucket:", "bucket:folder", "ftp://host"] {
            assert!(wrong.parse::<L3Choice>().is_err(), "{wrong}");
        }
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
    fn what_cannot_work_is_refused_by_the_name_of_a_setting() {
        let cases = [
            "page_size = 17",
            "running_max = 0",
            "steps_in_flight = 3",
            "chunk_tokens = 0",
            "preempts = true\nadmission = \"arrival\"",
            "step_tokens = 8",
            "canary = 64",
            "device = \"cuda\"\ncanary = 0",
            "l3 = \"memory:1GiB\"\nl3_memory = \"1GiB\"",
            "node_copies = 3",
            "shutdown_patience = \"9999years\"",
            "l3_doubt_after = \"9999years\"",
            "write_policy = { selective_write_through = { hits = 0 } }",
            "operator_key = \"\"",
            "[limits]\nn_max = 0",
            "[limits]\nviewers_max = 9000000000000000000",
            "[limits]\nbodies_max = \"2GiB\"",
            "[limits]\nbody_timeout = \"0s\"",
        ];
        for wrong in cases {
            let error = toml::from_str::<Config>(wrong).unwrap().check().unwrap_err();
            let setting = Config::setting(error.setting).expect("a setting");
            assert!(wrong.contains(setting.name), "{wrong}: {error}");
        }
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
