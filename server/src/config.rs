//! Settings of servers, nodes and routers, each with its description.

mod device_choice;
mod key;
mod l3_choice;
mod node;
mod route;
mod setting;
pub(crate) mod value;

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use terrace_cache::{EvictionKind, WritePolicy};
use terrace_l3_mooncake::MooncakeConfig;
use terrace_l3_nodes::RdmaChoice;
use terrace_replay::Size;
use terrace_routing::{Door, Endpoint};
use terrace_scheduler::AdmissionOrder;
use tower_http::cors::CorsLayer;

use crate::cors;
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
    /// All settings of a server. The defaults serve the built-in model to this machine only.
    Config, "TERRACE_" {
        "Server" {
            /// The address to listen on.
            listen: String = "127.0.0.1:8000".to_owned(), "ADDRESS" { is_common: true };
            /// How long running requests may take to finish after the server is told to stop.
            shutdown_patience: Duration = Duration::from_secs(10), "TIME";
            /// The log filter, for example `info` or `terrace_engine=debug`. RUST_LOG works too.
            log: Option<String> = None, "FILTER" { is_common: true, default_in_words: Some("warn,terrace_l3=info") };
            /// Record the traffic to a new file: arrival times, lengths and page keys, no text. `terrace replay`
            /// reads it. If the file exists, a number is added to the name, as in traffic.2.jsonl.
            record: Option<PathBuf> = None, "FILE";
            /// Record every input and plan of the scheduler to a new file, including the tokens of prompts.
            /// `terrace decisions` re-runs it. File names are chosen as for `record`.
            decision_log: Option<PathBuf> = None, "FILE";
            /// Also export metrics under vLLM's names, for existing vLLM dashboards.
            metrics_vllm_names: bool = false, "SWITCH";
        }
        "Model" {
            /// The model: a folder in Hugging Face layout, or a model of the Hugging Face Hub as org/name or
            /// org/name@revision. A model of the hub is downloaded to the cache that Hugging Face's programs use
            /// (HF_HOME, HF_HUB_CACHE). HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work too.
            model: Option<PathBuf> = None, "MODEL"
                { is_common: true, default_in_words: Some("the model that comes with the program") };
            /// Serve a model with random weights instead of the built-in one. Its outputs are gibberish and do not end
            /// early: for tests and benchmarks.
            random_model: bool = false, "SWITCH";
            /// The model name that clients use.
            name: Option<String> = None, "NAME"
                { is_common: true, default_in_words: Some("the folder's name, or org/name") };
            /// The format in which the model writes tool calls: hermes, llama or mistral.
            tool_format: Option<ToolFormat> = None, "FORMAT"
                { is_common: true, default_in_words: Some("as its chat template says") };
            /// The compute device: cpu; or, in programs built with `--features cuda`, cuda for the first NVIDIA
            /// GPU and cuda:NUMBER for another.
            device: DeviceChoice = DeviceChoice::Cpu, "DEVICE" { is_common: true };
            /// CPU compute threads. The maximum is four times the number of cores.
            threads: Option<usize> = None, "NUMBER" { default_in_words: Some("all cores") };
        }
        "Cache" {
            /// Size of the device tier: KV cache memory on the compute device, like vLLM's GPU KV cache.
            device_memory: Option<Size> = None, "SIZE"
                { is_common: true, default_in_words: Some("256MiB on a CPU, the free memory of a GPU") };
            /// Size of the host tier: host memory for offloaded KV pages. 0 turns the tier off.
            host_memory: Size = Size::gib(1), "SIZE" { is_common: true };
            /// The L3 tier, which keeps KV pages beyond device and host memory: disk:FOLDER, memory:SIZE,
            /// mooncake://HOST:PORT, nodes://HOST:PORT,HOST:PORT or none; in builds with buckets,
            /// s3://BUCKET/PREFIX or bucket:URL.
            l3: Option<L3Choice> = None, "PLACE"
                { is_common: true, default_in_words: Some("disk, in terrace/l3 of the user's cache folder") };
            /// Capacity of L3. On disk: the maximum size of the folder, for all models together. In a cluster or
            /// a bucket: the maximum that this server stores there.
            l3_capacity: Size = Size::gib(4), "SIZE" { is_common: true };
            /// Space that L3 on disk leaves free on its file system.
            l3_reserve: Option<Size> = None, "SIZE" { default_in_words:
                Some("1/20 of the file system, between 1GiB and 16GiB, at most 1/4") };
            /// How long the server trusts that L3 still holds a page it was seen to hold (at most twice this
            /// time). Pages that are used later are offered to L3 again. 0s trusts forever.
            l3_doubt_after: Duration = Duration::from_secs(600), "TIME";
            /// Prefetch timeout: how long a request waits for its pages from L3, plus 0.5 ms per page. The lookup in
            /// L3 may take two fifths of that. After the timeout the pages are computed.
            l3_wait: Duration = Duration::from_millis(500), "TIME";
            /// Memory cache on top of L3 on disk. Pages that a request looks up are promoted to it before they are
            /// read. 0 turns it off.
            l3_memory: Size = Size(0), "SIZE";
            /// Pages count as stored in L3 once its memory cache has them, and are written to disk in the background.
            /// Pages that are not on disk yet are lost if the process dies.
            l3_write_behind: bool = false, "SWITCH";
            /// The libmooncake_store.so of your Mooncake installation, for mooncake://HOST:PORT.
            mooncake_library: Option<PathBuf> = None, "PATH";
            /// The transport to the Mooncake cluster: tcp or rdma.
            mooncake_protocol: String = "tcp".to_owned(), "NAME";
            /// The network devices for rdma.
            mooncake_device: String = String::new(), "NAMES"
                { default_in_words: Some("the library's choice") };
            /// The metadata server of the Mooncake cluster, like http://HOST:8080/metadata, or P2PHANDSHAKE if the
            /// cluster has none.
            mooncake_metadata: String = "P2PHANDSHAKE".to_owned(), "ADDRESS";
            /// Memory that this process contributes to the Mooncake cluster while it runs. 0 contributes none. What
            /// the cluster stores there is lost when the process ends.
            mooncake_segment: Size = Size(0), "SIZE";
            /// Replicas of each object in the Mooncake cluster, if it has enough segments.
            mooncake_replicas: u32 = 1, "NUMBER";
            /// Preferred segments of the Mooncake cluster, separated by commas. Objects go there while there is
            /// space. `own` is the segment of this process.
            mooncake_prefer: String = String::new(), "SEGMENTS"
                { default_in_words: Some("the cluster's choice") };
            /// The file with the secret of the nodes, for nodes://HOST:PORT.
            node_secret_file: Option<PathBuf> = None, "FILE";
            /// The client name of this process, if the nodes have a list of clients.
            node_client: String = String::new(), "NAME";
            /// Number of nodes that store each object: 1, or 2 so that no page is lost when a node fails.
            node_copies: usize = 1, "NUMBER";
            /// The RDMA adapter for nodes, in builds with RDMA: auto, never or its name.
            node_rdma: RdmaChoice = RdmaChoice::Auto, "NAME";
            /// Tokens per page (vLLM: block size). A power of two up to 256.
            page_size: u32 = 16, "TOKENS";
            /// Eviction policy: lru, lfu, slru, fifo, priority or s3-fifo.
            eviction: EvictionKind = EvictionKind::Lru, "POLICY";
            /// When pages are copied to the host tier: write-through (after the prefill, and when their request ends),
            /// write-back (when the device evicts them) or selective-write-through:HITS (when their request ends, after
            /// at least that many cache hits).
            write_policy: WritePolicy = WritePolicy::WriteThrough, "POLICY";
            /// On a GPU, verify one in this many pages that are copied between GPU and host. A damaged copy is
            /// detected, counted and not used.
            canary: Option<u32> = None, "PAGES" { default_in_words: Some("no page is verified") };
            /// On a GPU, the folder where the algorithms that were measured to be the fastest for matrix products are kept,
            /// so that a restart is quicker and computes the same bits.
            gpu_tuning: Option<PathBuf> = None, "FOLDER"
                { default_in_words: Some("terrace/gpu of the user's cache folder") };
            /// Allow the operator to plant a wrong page on the device (POST /plant_wrong_page?token=POSITION), to show its
            /// effect on outputs. Only with the built-in model on a CPU. Servers without this setting never use the pages
            /// of one with it.
            plant_wrong_pages: bool = false, "SWITCH";
        }
        "Batching" {
            /// Maximum number of tokens in one step (vLLM: max_num_batched_tokens).
            step_tokens: Option<u32> = None, "TOKENS"
                { is_common: true, default_in_words: Some("512 on a CPU, 8192 on a GPU") };
            /// Maximum number of requests in a batch (vLLM: max_num_seqs).
            running_max: Option<u32> = None, "REQUESTS"
                { is_common: true, default_in_words: Some("64 on a CPU, 256 on a GPU") };
            /// Steps in flight. With 2, the next step is planned and launched while one runs. A new request then
            /// waits for both, which takes long on a CPU.
            steps_in_flight: Option<u32> = None, "STEPS"
                { default_in_words: Some("1 on a CPU, 2 on a GPU") };
            /// Start a step while its pages are still being loaded from host. The model then waits layer by layer
            /// instead of for the whole copy.
            load_back_overlaps: Option<bool> = None, "SWITCH"
                { default_in_words: Some("false on a CPU, true on a GPU") };
            /// Admission order: arrival, priority or longest-prefix.
            admission: AdmissionOrder = AdmissionOrder::Priority, "ORDER";
            /// Let a waiting request with higher priority preempt the running request with the lowest priority.
            /// Needs admission by priority. What the preempted request has computed stays in the cache.
            preempts: bool = false, "SWITCH";
            /// How much higher the priority of a waiting request must be to preempt a running one that was submitted more
            /// than 10 seconds ago.
            preempt_margin: u32 = 10, "PRIORITIES";
            /// Minimum number of tokens per step for chunked prefill, that is, for prompts that do not fit into the
            /// step. They get more while no other request is expected, so that short prompts do not wait for long ones.
            chunk_tokens: u32 = 128, "TOKENS";
            /// Context length after which a prompt token counts for more than one token of a step, because its
            /// attention costs more. This keeps step times even throughout a long prompt. 0 counts all tokens the same.
            context_tokens: u32 = 49_152, "TOKENS";
        }
        "Routers" {
            /// Publish KV events over ZeroMQ in vLLM's format: tcp://ADDRESS:PORT, with * for all addresses, or
            /// connect:tcp://HOST:PORT to connect to a router. Events contain the tokens of prompts; anyone who can
            /// connect can read them.
            kv_events: Option<Door> = None, "ENDPOINT" { default_in_words: Some("no events") };
            /// The endpoint where routers request events that they missed.
            kv_events_replay: Option<Endpoint> = None, "ENDPOINT" { default_in_words: Some("none") };
            /// The ZeroMQ topic of KV events. llm-d expects `kv@POD@MODEL`.
            kv_events_topic: String = String::new(), "TOPIC" { default_in_words: Some("empty") };
            /// Event batches that are kept for replay.
            kv_events_buffer: usize = 10_000, "BATCHES";
            /// Also publish events for pages that this server has seen in L3, with medium STORAGE. Few routers
            /// know it. Pages in a shared L3 are published without an owner.
            kv_events_l3: bool = false, "SWITCH";
        }
        "Security" {
            /// Allow everyone who can reach the address to use the server without a key. Without this setting, a server
            /// that has no keys starts only on an address of this machine, like 127.0.0.1.
            allow_anonymous: bool = false, "SWITCH" { is_common: true };
            /// Origins of web pages that may send requests from a browser (CORS), separated by commas, for example
            /// `https://example.com`; `*` for all. Operator requests that change the server stay refused for them.
            cors_origins: String = String::new(), "ORIGINS" { default_in_words: Some("no other origin") };
            /// A tenant and its API key. Without keys, everybody who can reach the address may send requests. Prefer
            /// TERRACE_API_KEYS, separated by commas, or the file: other users can see command lines.
            keys: Vec<Key> = Vec::new(), "NAME=KEY" { is_common: true } as API_KEYS;
            /// The key for /metrics and the web page.
            operator_key: Option<Secret> = None, "KEY" { is_common: true, is_secret: true };
            /// The secret that page keys are hashed with: at least 32 random characters, the same on all servers that
            /// share an L3. Without it, a client that can choose tokens can craft prompts whose pages have the keys of
            /// other prompts' in a shared L3, and evict those.
            l3_secret: Option<Secret> = None, "SECRET"
                { is_secret: true, default_in_words: Some("a random one, kept in the folder of an L3 on disk") };
        }
    }
    /// Limits for clients.
    limits: Limits, "Limits" {
        /// Maximum number of connections. Further ones wait.
        connections_max: usize = 1024, "NUMBER";
        /// Maximum number of unfinished completions, including queued ones. Further ones are refused.
        requests_max: u32 = 1024, "NUMBER";
        /// Maximum size of a request body.
        body_max: Size = Size::mib(4), "SIZE";
        /// Memory for all request bodies that are being read. At least body_max.
        bodies_max: Size = Size::mib(64), "SIZE";
        /// Timeout for receiving the header of a request.
        header_timeout: Duration = Duration::from_secs(10), "TIME";
        /// Timeout for receiving the body of a request.
        body_timeout: Duration = Duration::from_secs(30), "TIME";
        /// Timeout for idle connections.
        idle_timeout: Duration = Duration::from_secs(75), "TIME";
        /// How long a client may stop reading its response before the connection is closed.
        write_timeout: Duration = Duration::from_secs(30), "TIME";
        /// Socket send buffer for a client that does not read.
        send_buffer: Size = Size::kib(256), "SIZE";
        /// Maximum length of a stop string, in bytes.
        stop_bytes_max: usize = 256, "BYTES";
        /// Maximum number of prompts per request.
        prompts_max: usize = 64, "NUMBER";
        /// Maximum number of completions per prompt (n).
        n_max: u32 = 16, "NUMBER";
        /// Maximum number of completions per request: prompts times n.
        answers_max: u32 = 256, "NUMBER";
    }
}

/// The longest wait. What is far longer cannot be added to a moment.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

impl Config {
    /// Checks that the settings are valid and agree with each other.
    ///
    /// # Errors
    /// The first setting that cannot, and what to change.
    pub fn check(&self) -> Result<(), ConfigError> {
        let page_size = self.page_size;
        if !page_size.is_power_of_two() || page_size > 256 {
            return Err(ConfigError::new("page_size", page_size, "use a power of two up to 256"));
        }
        self.check_threads(cores())?;
        let steps = self.steps();
        if steps.running_max == 0 {
            return Err(ConfigError::new("running_max", 0, "use at least 1"));
        }
        if !(1..=2).contains(&steps.steps_in_flight) {
            return Err(ConfigError::new("steps_in_flight", steps.steps_in_flight, "use 1 or 2"));
        }
        if self.chunk_tokens == 0 {
            return Err(ConfigError::new("chunk_tokens", 0, "use at least 1"));
        }
        if self.preempts && self.admission != AdmissionOrder::Priority {
            let advice = "preemption needs admission by priority: set admission (--admission) to priority, or \
                          turn it off";
            return Err(ConfigError::new("preempts", true, advice));
        }
        if steps.step_tokens < steps.running_max {
            let advice = "raise it to at least running_max (--running-max), so that all running requests fit into a step";
            return Err(ConfigError::new("step_tokens", steps.step_tokens, advice));
        }
        self.check_canary()?;
        if self.plant_wrong_pages && self.device != DeviceChoice::Cpu {
            let advice =
                "it is for models on a CPU: leave it out, or use cpu for device (--device)";
            return Err(ConfigError::new("plant_wrong_pages", true, advice));
        }
        if self.plant_wrong_pages && self.model.is_some() {
            let advice =
                "it is for the built-in model only: leave it out, or leave model (--model) out";
            return Err(ConfigError::new("plant_wrong_pages", true, advice));
        }
        self.cors()?;
        if let WritePolicy::SelectiveWriteThrough { hits: 0 } = self.write_policy {
            let advice = "use at least 1 for HITS, or write-through";
            return Err(ConfigError::new("write_policy", self.write_policy, advice));
        }
        let is_on_disk = matches!(self.l3, Some(L3Choice::Disk(_)) | None);
        if self.l3_memory != Size(0) && !is_on_disk {
            let advice = "it is a cache on top of L3 on disk: set l3 (--l3) to disk:FOLDER";
            return Err(ConfigError::new("l3_memory", self.l3_memory.written(), advice));
        }
        if self.l3_write_behind && self.l3_memory == Size(0) {
            let advice = "pages wait for the disk in its memory cache: set l3_memory (--l3-memory)";
            return Err(ConfigError::new("l3_write_behind", true, advice));
        }
        self.check_clusters()?;
        if let (None, Some(replay)) = (&self.kv_events, &self.kv_events_replay) {
            let advice = "replay needs KV events: also set kv_events (--kv-events)";
            return Err(ConfigError::new("kv_events_replay", replay, advice));
        }
        let times = [
            ("shutdown_patience", self.shutdown_patience),
            ("l3_doubt_after", self.l3_doubt_after),
        ];
        if let Some((setting, time)) = times.into_iter().find(|(_, time)| *time > WAIT_MAX) {
            let time = humantime::format_duration(time);
            return Err(ConfigError::new(setting, time, "use at most one year"));
        }
        key::check(&self.keys, self.operator_key.as_ref())?;
        self.limits.check()
    }

    /// Returns what tells browsers which pages may read responses.
    ///
    /// # Errors
    /// If one of the origins is none.
    pub(crate) fn cors(&self) -> Result<Option<CorsLayer>, ConfigError> {
        let advice =
            "write each as http://HOST[:PORT] or https://HOST[:PORT] without a path, or only *";
        cors::layer(&self.cors_origins)
            .map_err(|wrong| ConfigError::new("cors_origins", wrong, advice))
    }

    /// Checks the settings of clusters and nodes.
    ///
    /// # Errors
    /// As for [`Config::check`].
    pub fn check_clusters(&self) -> Result<(), ConfigError> {
        if self.mooncake_replicas == 0 {
            return Err(ConfigError::new("mooncake_replicas", 0, "use at least 1"));
        }
        let own = MooncakeConfig::OWN_SEGMENT;
        if self.mooncake_segment == Size(0) && self.preferred_segments().any(|name| name == own) {
            let advice = "contribute a segment (--mooncake-segment), or remove `own`";
            return Err(ConfigError::new("mooncake_prefer", &self.mooncake_prefer, advice));
        }
        if !(1..=2).contains(&self.node_copies) {
            return Err(ConfigError::new("node_copies", self.node_copies, "use 1 or 2"));
        }
        Ok(())
    }

    /// Whether several tenants share an L3 that other servers have too, with page keys that any of them could compute.
    pub(crate) fn tenants_need_l3_secret(&self) -> bool {
        // A disk has a secret of its own.
        let is_private = matches!(
            self.l3,
            None | Some(L3Choice::Memory(_) | L3Choice::Disk(_) | L3Choice::None)
        );
        self.keys.len() > 1 && !is_private && self.l3_secret.is_none()
    }

    /// The names in `mooncake_prefer`.
    pub(crate) fn preferred_segments(&self) -> impl Iterator<Item = &str> {
        self.mooncake_prefer.split(',').map(str::trim).filter(|name| !name.is_empty())
    }

    /// Checks the number of threads for a machine with the given number of cores.
    fn check_threads(&self, cores: usize) -> Result<(), ConfigError> {
        let threads_max = (4 * cores).clamp(16, 1024);
        match self.threads {
            Some(0) => {
                let advice = "use at least 1, or leave it out to use all cores";
                Err(ConfigError::new("threads", 0, advice))
            }
            Some(threads) if threads > threads_max => {
                let advice = format!(
                    "this machine has {cores} cores, and more threads than cores are slower: use at most \
                     {threads_max}, or leave it out to use all cores"
                );
                Err(ConfigError::new("threads", threads, advice))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// Returns the number of threads that this machine can run at once.
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
            ("limits.send_buffer", self.send_buffer.as_u64()),
        ];
        if let Some((setting, value)) = counts.iter().find(|(_, value)| *value > 1 << 30) {
            return Err(ConfigError::new(setting, value, "use at most 1073741824"));
        }
        // What a semaphore can count.
        if self.bodies_max < self.body_max || self.bodies_max > Size::gib(1) {
            let advice = "use at least limits.body_max (--body-max) and at most 1GiB";
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
                Err(ConfigError::new(setting, wait, "use more than 0s and at most one year"))
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
    use std::collections::BTreeSet;

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
        assert!(many.contains("has 8 cores") && many.contains("use at most 32"), "{many}");
        assert!(refused(1025, 512).is_some());
        assert!(Config { threads: Some(0), ..Config::default() }.check().is_err());
    }

    #[test]
    fn tenants_of_a_shared_l3_need_a_secret() {
        let config = |keys: &[&str], l3: &str, secret: Option<&str>| Config {
            keys: keys.iter().map(|key| key.parse().unwrap()).collect(),
            l3: Some(l3.parse().unwrap()),
            l3_secret: secret.map(|secret| Secret(secret.to_owned())),
            ..Config::default()
        };
        let two = ["alice=one", "bob=two"];
        assert!(config(&two, "nodes://a:1", None).tenants_need_l3_secret());
        assert!(!config(&two[..1], "nodes://a:1", None).tenants_need_l3_secret());
        assert!(!config(&two, "disk:/kv", None).tenants_need_l3_secret());
        assert!(!config(&two, "memory:1GiB", None).tenants_need_l3_secret());
        let secret = Some("thirty-two characters of a secret");
        assert!(!config(&two, "nodes://a:1", secret).tenants_need_l3_secret());
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
            "l3_write_behind = true",
            "cors_origins = \"https://example.com/path\"",
            "plant_wrong_pages = true\nmodel = \"a-folder\"",
            "node_copies = 3",
            "shutdown_patience = \"9999years\"",
            "l3_doubt_after = \"9999years\"",
            "write_policy = { selective_write_through = { hits = 0 } }",
            "operator_key = \"\"",
            "[limits]\nn_max = 0",
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
