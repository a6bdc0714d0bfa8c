//! `terrace serve`: an inference server with OpenAI's interface.

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytesize::ByteSize;
use clap::builder::TypedValueParser;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde_json::json;
use terrace_cache::{EvictionKind, WritePolicy};
use terrace_l3::node::RdmaChoice;
use terrace_scheduler::AdmissionOrder;
use terrace_server::{Config, Key, L3Choice, Secret, ServedModel, Server, ToolFormat, launch};
use tracing_subscriber::EnvFilter;

const EXAMPLES: &str = "\
Examples:
  terrace serve
      The model that comes with the program, for this machine only
  terrace serve --model ./SmolLM2-135M-Instruct --device-memory 2GiB
      A model of the Llama family from a folder with config.json, tokenizer.json and safetensors
  terrace serve --listen 0.0.0.0:8000 --api-key alice=KEY1 --api-key bob=KEY2 --operator-key KEY3
      For others: each tenant has a key and a cache of its own, the operator sees figures
  terrace serve --config terrace.toml --l3 none
      Settings from a file; flags and TERRACE_* variables go before it

Everything can also be set in the file, where names have _ instead of -, and there is a table [limits]
for what clients may take.";

/// Arguments of `terrace serve`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Settings in TOML; what is given here or by variables goes before them
    #[arg(long, value_name = "FILE", env = "TERRACE_CONFIG")]
    config: Option<PathBuf>,
    /// Print the settings that result, without keys, and do not start
    #[arg(long)]
    print_config: bool,
    /// The address to listen at [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_LISTEN")]
    listen: Option<String>,
    /// How long answers under way may take when the server is told to stop [default: 10s]
    #[arg(long, value_name = "TIME", env = "TERRACE_SHUTDOWN_PATIENCE", value_parser = duration)]
    shutdown_patience: Option<Duration>,
    /// What to log, like `info` or `terrace_engine=debug`; RUST_LOG works too [default:
    /// warn,terrace_l3=info]
    #[arg(long, value_name = "FILTER", env = "TERRACE_LOG")]
    log: Option<String>,
    /// Record the traffic into a new file: times, lengths and page keys, no text; `terrace replay`
    /// accepts it
    #[arg(long, value_name = "FILE", env = "TERRACE_RECORD")]
    record: Option<PathBuf>,
    /// Record everything that the scheduler is told and plans into a new file, the tokens of prompts
    /// included; `terrace decisions` does it again
    #[arg(long, value_name = "FILE", env = "TERRACE_DECISION_LOG")]
    decision_log: Option<PathBuf>,

    #[command(flatten)]
    model: ModelArguments,
    #[command(flatten)]
    cache: CacheArguments,
    #[command(flatten)]
    batch: BatchArguments,
    #[command(flatten)]
    security: SecurityArguments,
    #[command(flatten)]
    limits: LimitArguments,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Model")]
struct ModelArguments {
    /// The folder of a model, as Hugging Face lays it out [default: the model that comes with the
    /// program]
    #[arg(long, value_name = "FOLDER", env = "TERRACE_MODEL")]
    model: Option<PathBuf>,
    /// What clients call the model [default: the folder's name]
    #[arg(long, env = "TERRACE_NAME")]
    name: Option<String>,
    /// How the model writes calls of functions: hermes, llama or mistral [default: as its chat template
    /// says]
    #[arg(long, value_name = "FORMAT", env = "TERRACE_TOOL_FORMAT")]
    tool_format: Option<ToolFormat>,
    /// Threads that compute [default: all cores]
    #[arg(long, env = "TERRACE_THREADS")]
    threads: Option<usize>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Cache")]
struct CacheArguments {
    /// Memory for KV that steps compute with [default: 256MiB]
    #[arg(long, value_name = "SIZE", env = "TERRACE_DEVICE_MEMORY")]
    device_memory: Option<ByteSize>,
    /// Memory for KV that no step uses at the moment; 0 for none [default: 1GiB]
    #[arg(long, value_name = "SIZE", env = "TERRACE_HOST_MEMORY")]
    host_memory: Option<ByteSize>,
    /// Where KV outlives requests: disk:FOLDER, memory:SIZE, mooncake://HOST:PORT,
    /// nodes://HOST:PORT,HOST:PORT or none [default: disk, in terrace/l3 of the user's cache folder]
    #[arg(long, value_name = "PLACE", env = "TERRACE_L3")]
    l3: Option<L3Choice>,
    /// What L3 on disk may grow to, or what this server may put into a cluster [default: 4GiB]
    #[arg(long, value_name = "SIZE", env = "TERRACE_L3_SIZE")]
    l3_size: Option<ByteSize>,
    /// The libmooncake_store.so of your Mooncake installation, for --l3 mooncake://HOST:PORT
    #[arg(long, value_name = "PATH", env = "TERRACE_MOONCAKE_LIBRARY")]
    mooncake_library: Option<PathBuf>,
    /// How bytes travel to and from the Mooncake cluster: tcp or rdma [default: tcp]
    #[arg(long, value_name = "NAME", env = "TERRACE_MOONCAKE_PROTOCOL")]
    mooncake_protocol: Option<String>,
    /// The network devices for rdma [default: the library's choice]
    #[arg(long, value_name = "NAMES", env = "TERRACE_MOONCAKE_DEVICE")]
    mooncake_device: Option<String>,
    /// The file with the secret that the nodes know, for --l3 nodes://HOST:PORT
    #[arg(long, value_name = "FILE", env = "TERRACE_NODE_SECRET_FILE")]
    node_secret_file: Option<PathBuf>,
    /// What this server calls itself, where the nodes have a list of clients
    #[arg(long, value_name = "NAME", env = "TERRACE_NODE_CLIENT")]
    node_client: Option<String>,
    /// On how many nodes each page is kept: 1, or 2 so that a node's death costs no hits [default: 1]
    #[arg(long, value_name = "NUMBER", env = "TERRACE_NODE_COPIES")]
    node_copies: Option<usize>,
    /// Which RDMA adapter to use with nodes, in builds that can: auto, never or its name [default: auto]
    #[arg(long, value_name = "NAME", env = "TERRACE_NODE_RDMA")]
    node_rdma: Option<RdmaChoice>,
    /// Tokens in a page: a power of two up to 256 [default: 16]
    #[arg(long, value_name = "TOKENS", env = "TERRACE_PAGE_SIZE")]
    page_size: Option<u32>,
    /// Which pages go first [default: lru]
    #[arg(long, env = "TERRACE_EVICTION", value_parser = named::<EvictionKind>(
        &["lru", "lfu", "slru", "fifo", "priority", "s3-fifo"]))]
    eviction: Option<EvictionKind>,
    /// When pages are copied to host: write_through, write_back, or selective_write_through:HITS
    /// [default: write_through]
    #[arg(long, value_name = "POLICY", env = "TERRACE_WRITE_POLICY", value_parser = write_policy)]
    write_policy: Option<WritePolicy>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Batching")]
struct BatchArguments {
    /// Tokens that one step computes at the most [default: 512]
    #[arg(long, value_name = "TOKENS", env = "TERRACE_STEP_TOKENS")]
    step_tokens: Option<u32>,
    /// Requests that run at once [default: 64]
    #[arg(long, value_name = "REQUESTS", env = "TERRACE_RUNNING_MAX")]
    running_max: Option<u32>,
    /// Who is admitted first [default: priority]
    #[arg(long, value_name = "ORDER", env = "TERRACE_ADMISSION", value_parser =
        named::<AdmissionOrder>(&["arrival", "priority", "longest-prefix", "tree-order"]))]
    admission: Option<AdmissionOrder>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Security")]
struct SecurityArguments {
    /// A tenant and its key; without any, everybody may ask. Better in TERRACE_API_KEYS, separated by
    /// commas, or in the file: others can see arguments
    #[arg(
        long = "api-key",
        value_name = "NAME=KEY",
        env = "TERRACE_API_KEYS",
        hide_env_values = true,
        value_delimiter = ','
    )]
    keys: Option<Vec<Key>>,
    /// The key for /metrics and the page
    #[arg(long, value_name = "KEY", env = "TERRACE_OPERATOR_KEY", hide_env_values = true)]
    operator_key: Option<Secret>,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Limits")]
struct LimitArguments {
    /// Connections at a time; more wait [default: 1024]
    #[arg(long, value_name = "NUMBER", env = "TERRACE_CONNECTIONS_MAX")]
    connections_max: Option<usize>,
    /// Answers under way at a time; more are refused [default: 1024]
    #[arg(long, value_name = "NUMBER", env = "TERRACE_REQUESTS_MAX")]
    requests_max: Option<u32>,
    /// The longest body of a request [default: 4MiB]
    #[arg(long, value_name = "SIZE", env = "TERRACE_BODY_MAX")]
    body_max: Option<ByteSize>,
    /// How long a client may take to send the head of a request [default: 10s]
    #[arg(long, value_name = "TIME", env = "TERRACE_HEADER_TIMEOUT", value_parser = duration)]
    header_timeout: Option<Duration>,
    /// How long a client may take to send the body of a request [default: 30s]
    #[arg(long, value_name = "TIME", env = "TERRACE_BODY_TIMEOUT", value_parser = duration)]
    body_timeout: Option<Duration>,
    /// How long a connection may be idle [default: 75s]
    #[arg(long, value_name = "TIME", env = "TERRACE_IDLE_TIMEOUT", value_parser = duration)]
    idle_timeout: Option<Duration>,
    /// How long a client may take nothing of its answer [default: 30s]
    #[arg(long, value_name = "TIME", env = "TERRACE_WRITE_TIMEOUT", value_parser = duration)]
    write_timeout: Option<Duration>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let config = arguments.config()?;
    config.check()?;
    if arguments.print_config {
        let shown = Config { keys: Vec::new(), operator_key: None, ..config };
        return Ok(toml::to_string(&shown)?);
    }
    start_log(config.log.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("terrace-serve")
        .enable_all()
        .build()?;
    let served = runtime.block_on(serve(&config));
    // A disk that hangs must not keep the program: nobody listens for another Ctrl-C any more.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

async fn serve(config: &Config) -> Result<String, Box<dyn Error>> {
    let launched = launch(config)?;
    let example = example(&launched.model, !config.keys.is_empty());
    let server = Server::bind(config, launched.engine, launched.model).await?;
    let address = server.address();
    let summary = launched.summary;
    say(&format!(
        "{summary}open    http://{address}/\n\ncurl http://{address}{example}\n\nCtrl-C stops it.\n"
    ));
    let mut is_told = false;
    let stop = async {
        told_to_stop(config.shutdown_patience).await;
        is_told = true;
    };
    let drained = server.run(stop).await;
    if !is_told {
        return Err(
            "the engine has died of a defect: start it again, and report what it said".into()
        );
    }
    if drained.aborted > 0 || drained.abandoned_transfers > 0 {
        say(&format!(
            "stopped: {} answers were cut short, {} transfers were given up\n",
            drained.aborted, drained.abandoned_transfers
        ));
    } else {
        say("stopped\n");
    }
    Ok(String::new())
}

/// Tells the person who started the server. If nobody can be told any more, it serves all the same.
pub(crate) fn say(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// A request that the server can answer, as the rest of a command.
fn example(model: &ServedModel, has_keys: bool) -> String {
    let key = if has_keys { "-H 'Authorization: Bearer KEY' " } else { "" };
    let (path, body) = if model.chat.exists() {
        let messages = json!([{ "role": "user", "content": "Hello" }]);
        ("/v1/chat/completions", json!({ "messages": messages, "max_tokens": 64 }))
    } else {
        ("/v1/completions", json!({ "prompt": "Hello" }))
    };
    format!("{path} {key}\\\n  -H 'Content-Type: application/json' -d '{body}'")
}

/// Waits for Ctrl-C or a signal to end. Another one after that ends the program at once.
async fn told_to_stop(patience: Duration) {
    signal().await;
    let patience = humantime::format_duration(patience);
    say(&format!("stopping: answers under way have {patience}; Ctrl-C again stops at once\n"));
    tokio::spawn(async {
        signal().await;
        std::process::exit(130);
    });
}

#[cfg(unix)]
pub(crate) async fn signal() {
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

#[cfg(not(unix))]
pub(crate) async fn signal() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

/// What is wrong; and of L3, which comes and goes, also that all is well again, or whoever reads the
/// log would think that the trouble lasts.
const LOG_FILTER: &str = "warn,terrace_l3=info";

pub(crate) fn start_log(filter: Option<&str>) -> Result<(), Box<dyn Error>> {
    let filter = match filter {
        Some(filter) => EnvFilter::try_new(filter).map_err(|error| format!("--log: {error}"))?,
        None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG_FILTER)),
    };
    // Where nothing can be written, saying so would panic: in whichever task had something to say.
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false)
        .init();
    Ok(())
}

impl Arguments {
    /// The file's settings, and before them what is given here.
    fn config(&self) -> Result<Config, Box<dyn Error>> {
        let mut config = match &self.config {
            Some(file) => read(file)?,
            None => Config::default(),
        };
        let Arguments { listen, shutdown_patience, log, model, cache, batch, security, .. } = self;
        set_some(&mut config.record, &self.record);
        set_some(&mut config.decision_log, &self.decision_log);
        set(&mut config.listen, listen);
        set(&mut config.shutdown_patience, shutdown_patience);
        set_some(&mut config.log, log);
        set_some(&mut config.model, &model.model);
        set_some(&mut config.name, &model.name);
        set_some(&mut config.tool_format, &model.tool_format);
        set_some(&mut config.threads, &model.threads);
        set(&mut config.device_memory, &cache.device_memory);
        set(&mut config.host_memory, &cache.host_memory);
        set_some(&mut config.l3, &cache.l3);
        set(&mut config.l3_size, &cache.l3_size);
        set_some(&mut config.mooncake_library, &cache.mooncake_library);
        set(&mut config.mooncake_protocol, &cache.mooncake_protocol);
        set(&mut config.mooncake_device, &cache.mooncake_device);
        set_some(&mut config.node_secret_file, &cache.node_secret_file);
        set(&mut config.node_client, &cache.node_client);
        set(&mut config.node_copies, &cache.node_copies);
        set(&mut config.node_rdma, &cache.node_rdma);
        set(&mut config.page_size, &cache.page_size);
        set(&mut config.eviction, &cache.eviction);
        set(&mut config.write_policy, &cache.write_policy);
        set(&mut config.step_tokens, &batch.step_tokens);
        set(&mut config.running_max, &batch.running_max);
        set(&mut config.admission, &batch.admission);
        set(&mut config.keys, &security.keys);
        set_some(&mut config.operator_key, &security.operator_key);
        let (limits, given) = (&mut config.limits, &self.limits);
        set(&mut limits.connections_max, &given.connections_max);
        set(&mut limits.requests_max, &given.requests_max);
        set(&mut limits.body_max, &given.body_max);
        limits.bodies_max = limits.bodies_max.max(limits.body_max);
        set(&mut limits.header_timeout, &given.header_timeout);
        set(&mut limits.body_timeout, &given.body_timeout);
        set(&mut limits.idle_timeout, &given.idle_timeout);
        set(&mut limits.write_timeout, &given.write_timeout);
        Ok(config)
    }
}

pub(crate) fn set<T: Clone>(setting: &mut T, given: &Option<T>) {
    if let Some(given) = given {
        setting.clone_from(given);
    }
}

pub(crate) fn set_some<T: Clone>(setting: &mut Option<T>, given: &Option<T>) {
    if given.is_some() {
        setting.clone_from(given);
    }
}

fn read(file: &Path) -> Result<Config, Box<dyn Error>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| named(&error))?;
    Ok(toml::from_str(&text).map_err(|error| named(&error))?)
}

pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 10s"))
}

/// One of the names that a setting has in configuration files.
fn named<T>(names: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: for<'de> Deserialize<'de> + Clone + Send + Sync + 'static,
{
    clap::builder::PossibleValuesParser::new(names).try_map(|name| {
        let name = name.as_str().into_deserializer();
        T::deserialize(name).map_err(|error: serde::de::value::Error| error.to_string())
    })
}

fn write_policy(text: &str) -> Result<WritePolicy, String> {
    match text.split_once(':') {
        None if text == "write_through" => Ok(WritePolicy::WriteThrough),
        None if text == "write_back" => Ok(WritePolicy::WriteBack),
        Some(("selective_write_through", hits)) => {
            let hits = hits.parse().map_err(|_| "HITS must be a number".to_owned())?;
            Ok(WritePolicy::SelectiveWriteThrough { hits })
        }
        Some(_) | None => {
            Err("use write_through, write_back or selective_write_through:HITS".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        serve: Arguments,
    }

    fn config(line: &[&str]) -> Config {
        let line = [&["serve"], line].concat();
        Line::try_parse_from(line).unwrap().serve.config().unwrap()
    }

    #[test]
    fn without_arguments_everything_is_as_the_server_has_it() {
        assert_eq!(config(&[]), Config::default());
    }

    #[test]
    fn arguments_go_before_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "page_size = 32\nstep_tokens = 128\n[limits]\nwrite_timeout = \"5s\"\n";
        std::fs::write(&file, text).unwrap();
        let path = file.path().to_str().unwrap();
        let config = config(&["--config", path, "--step-tokens", "256", "--eviction", "s3-fifo"]);
        assert_eq!((config.page_size, config.step_tokens), (32, 256));
        assert_eq!(config.eviction, EvictionKind::S3Fifo);
        assert_eq!(config.limits.write_timeout, Duration::from_secs(5));
    }

    #[test]
    fn sizes_times_and_keys_are_read_as_people_write_them() {
        let config = config(&[
            "--device-memory=64MiB",
            "--l3=memory:1GiB",
            "--shutdown-patience=1m",
            "--api-key=alice=a",
            "--api-key=bob=b=c",
            "--write-policy=selective_write_through:2",
        ]);
        assert_eq!(config.device_memory, ByteSize::mib(64));
        assert_eq!(config.l3, Some(L3Choice::Memory(ByteSize::gib(1))));
        assert_eq!(config.shutdown_patience, Duration::from_secs(60));
        assert_eq!(config.keys[1].key, Secret::from("b=c"));
        assert_eq!(config.write_policy, WritePolicy::SelectiveWriteThrough { hits: 2 });
    }
}
