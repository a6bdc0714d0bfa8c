//! `terrace node`: shares this machine's memory and disk with the servers that know a secret.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use terrace_cache::PageKey;
use terrace_l3::disk::{OpenError, Opening, Shortage, usual_reserve_bytes};
use terrace_l3::node::{Holding, NodeClient, NodeConfig, NodeSecret, NodeServer, RdmaChoice};
use terrace_l3::{
    DiskConfig, DiskStore, MemoryConfig, MemoryStore, Store, TieredConfig, TieredStore,
};
use terrace_replay::human::whole;
use terrace_server::{Size, serve_node_figures};

use crate::serve::{duration, say, set, set_some, start_log};
use crate::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  terrace node --listen 10.0.0.1:7450 --memory 64GiB --secret-file /etc/terrace/secret
      Memory alone
  terrace node --listen 10.0.0.1:7450 --memory 64GiB --disk /var/lib/terrace --disk-capacity 1TiB \\
      --secret-file /etc/terrace/secret --metrics 127.0.0.1:9450
      Memory over disk, with figures for Prometheus
  terrace serve --l3 nodes://10.0.0.1:7450,10.0.0.2:7450 --node-secret-file /etc/terrace/secret
      A server that uses two nodes

Ctrl-C, SIGTERM and SIGHUP, which a terminal sends when it closes, stop the node once calls under way
have ended; with nohup, SIGHUP is ignored.

Everything can also be set in the file, where names have _ instead of -. There, tables [[clients]] with
name, secret_file and namespaces say who may use what.";

/// Arguments of `terrace node`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Settings in TOML; what is given here or by variables goes before them
    #[arg(long, value_name = "FILE", env = "TERRACE_NODE_CONFIG")]
    config: Option<PathBuf>,
    /// The address to listen at [default: 127.0.0.1:7450]
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_NODE_LISTEN")]
    listen: Option<String>,
    /// Memory to share [default: 1GiB]
    #[arg(long, value_name = "SIZE", env = "TERRACE_NODE_MEMORY")]
    memory: Option<Size>,
    /// A folder on the disk to share [default: none]
    #[arg(long, value_name = "FOLDER", env = "TERRACE_NODE_DISK")]
    disk: Option<PathBuf>,
    /// What may be stored in that folder [default: 16GiB]
    #[arg(long, value_name = "SIZE", env = "TERRACE_NODE_DISK_CAPACITY")]
    disk_capacity: Option<Size>,
    /// What is left free on the file system of that folder [default: a twentieth of it, between 1GiB and
    /// 16GiB and no more than a quarter]
    #[arg(long, value_name = "SIZE", env = "TERRACE_NODE_DISK_RESERVE")]
    disk_reserve: Option<Size>,
    /// The largest object; each takes a slot of this size, so it should be that of a page, which
    /// `terrace serve` prints [default: 1MiB]
    #[arg(long, value_name = "SIZE", env = "TERRACE_NODE_OBJECT_MAX")]
    object_max: Option<Size>,
    /// The file with the secret that all clients know
    #[arg(long, value_name = "FILE", env = "TERRACE_NODE_SECRET_FILE")]
    secret_file: Option<PathBuf>,
    /// The address for figures, at /metrics [default: none]
    #[arg(long, value_name = "ADDRESS", env = "TERRACE_NODE_METRICS")]
    metrics: Option<String>,
    /// Connections at a time; more are refused [default: 512]
    #[arg(long, value_name = "NUMBER", env = "TERRACE_NODE_CONNECTIONS_MAX")]
    connections_max: Option<usize>,
    /// Which RDMA adapter to use, in builds that can: auto, never or its name [default: auto]
    #[arg(long, value_name = "NAME", env = "TERRACE_NODE_RDMA")]
    rdma: Option<RdmaChoice>,
    /// How long objects stay pinned after the client that pinned them is gone [default: 10m]
    #[arg(long, value_name = "TIME", env = "TERRACE_NODE_PINS_KEPT", value_parser = duration)]
    pins_kept: Option<Duration>,
    /// How long calls under way may take when the node is told to stop [default: 10s]
    #[arg(long, value_name = "TIME", env = "TERRACE_SHUTDOWN_PATIENCE", value_parser = duration)]
    shutdown_patience: Option<Duration>,
    /// What to log, like `info` or `terrace_l3=debug`; RUST_LOG works too [default: warn]
    #[arg(long, value_name = "FILTER", env = "TERRACE_LOG")]
    log: Option<String>,
}

/// Everything that can be set about a node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Settings {
    listen: String,
    memory: Size,
    disk: Option<PathBuf>,
    disk_capacity: Size,
    disk_reserve: Option<Size>,
    object_max: Size,
    secret_file: Option<PathBuf>,
    metrics: Option<String>,
    connections_max: usize,
    rdma: RdmaChoice,
    #[serde(deserialize_with = "written_duration")]
    pins_kept: Duration,
    #[serde(deserialize_with = "written_duration")]
    shutdown_patience: Duration,
    log: Option<String>,
    clients: Vec<Client>,
}

/// Somebody who may use the node.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Client {
    name: String,
    secret_file: PathBuf,
    /// All, if not given.
    namespaces: Option<Vec<PageKey>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:7450".to_owned(),
            memory: Size::gib(1),
            disk: None,
            disk_capacity: Size::gib(16),
            disk_reserve: None,
            object_max: Size::mib(1),
            secret_file: None,
            metrics: None,
            connections_max: 512,
            rdma: RdmaChoice::Auto,
            pins_kept: Duration::from_secs(600),
            shutdown_patience: Duration::from_secs(10),
            log: None,
            clients: Vec::new(),
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let settings = arguments.settings()?;
    start_log(settings.log.as_deref())?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .thread_name("terrace-node")
        .enable_all()
        .build()?;
    let served = runtime.block_on(serve(&settings));
    // A disk that hangs must not keep the program: nobody listens for another Ctrl-C any more.
    runtime.shutdown_timeout(Duration::from_secs(1));
    served
}

async fn serve(settings: &Settings) -> Result<String, Box<dyn Error>> {
    let config = settings.node_config()?;
    let (holding, place) = settings.holding()?;
    let node = NodeServer::bind(&settings.listen, holding, config)?.start()?;
    let (address, node) = (node.address(), Arc::new(node));
    if let Some(metrics) = &settings.metrics {
        let listener = tokio::net::TcpListener::bind(metrics).await;
        let unusable = |error| format!("--metrics: cannot listen at {metrics}: {error}");
        let listener = listener.map_err(unusable)?;
        let address = listener.local_addr()?;
        say(&format!("figures http://{address}/metrics\n"));
        tokio::spawn(serve_node_figures(listener, node.clone()));
    }
    let mut signals = Signals::listen();
    say(&format!("node    {address}, {place}\n\nCtrl-C stops it.\n"));
    signals.told_to_stop().await;
    let patience = humantime::format_duration(settings.shutdown_patience);
    say(&format!("stopping: calls under way have {patience}; Ctrl-C again stops at once\n"));
    tokio::spawn(async move {
        signals.told_again().await;
        std::process::exit(130);
    });
    let all_ended = node.stop(settings.shutdown_patience).await?;
    say(if all_ended { "stopped\n" } else { "stopped: some calls were cut short\n" });
    Ok(String::new())
}

impl Arguments {
    /// The file's settings, and before them what is given here.
    fn settings(&self) -> Result<Settings, Box<dyn Error>> {
        let mut settings = match &self.config {
            Some(file) => read(file)?,
            None => Settings::default(),
        };
        set(&mut settings.listen, &self.listen);
        set(&mut settings.memory, &self.memory);
        set_some(&mut settings.disk, &self.disk);
        set(&mut settings.disk_capacity, &self.disk_capacity);
        set_some(&mut settings.disk_reserve, &self.disk_reserve);
        set(&mut settings.object_max, &self.object_max);
        set_some(&mut settings.secret_file, &self.secret_file);
        set_some(&mut settings.metrics, &self.metrics);
        set(&mut settings.connections_max, &self.connections_max);
        set(&mut settings.rdma, &self.rdma);
        set(&mut settings.pins_kept, &self.pins_kept);
        set(&mut settings.shutdown_patience, &self.shutdown_patience);
        set_some(&mut settings.log, &self.log);
        Ok(settings)
    }
}

impl Settings {
    fn node_config(&self) -> Result<NodeConfig, Box<dyn Error>> {
        let mut clients = Vec::new();
        if let Some(file) = &self.secret_file {
            let secret = NodeSecret::read(file)?;
            clients.push(NodeClient { name: String::new(), secret, namespaces: None });
        }
        for Client { name, secret_file, namespaces } in &self.clients {
            if name.is_empty() {
                return Err("a client in the list has no name".into());
            }
            let namespaces = namespaces.as_ref().map(|list| BTreeSet::from_iter(list.clone()));
            let secret = NodeSecret::read(secret_file)?;
            clients.push(NodeClient { name: name.clone(), secret, namespaces });
        }
        let Some(first) = clients.first() else {
            let advice = "make a secret with `head -c 32 /dev/urandom | base64 > FILE`, give it to all \
                          servers, and name it by --secret-file";
            return Err(format!("a node serves only those who know a secret: {advice}").into());
        };
        let defaults = NodeConfig::new(first.secret.clone());
        let pins_kept_ms = u64::try_from(self.pins_kept.as_millis()).unwrap_or(u64::MAX);
        let (connections_max, rdma) = (self.connections_max, self.rdma.clone());
        Ok(NodeConfig { clients, connections_max, pins_kept_ms, rdma, ..defaults })
    }

    /// What the node has to give, and the same in words.
    fn holding(&self) -> Result<(Holding, String), Box<dyn Error>> {
        let object_bytes_max = usize::try_from(self.object_max.as_u64())?;
        let memory = MemoryConfig::new(self.memory.as_u64(), object_bytes_max);
        let memory = MemoryStore::new(memory).map_err(|error| format!("--memory: {error}"))?;
        let place = format!("{} of memory", self.memory);
        let Some(folder) = &self.disk else { return Ok((Holding::Memory(memory), place)) };
        // Where the system does not tell how large it is, it does not tell what is free either.
        let usual = || usual_reserve_bytes(folder).unwrap_or(0);
        let disk = DiskConfig {
            reserve_bytes: self.disk_reserve.map_or_else(usual, Size::as_u64),
            ..DiskConfig::new(folder, self.disk_capacity.as_u64(), object_bytes_max)
        };
        let disk = DiskStore::open(disk).map_err(|error| format!("--disk: {}", advised(error)))?;
        let place = format!("{place} over {}", self.told_of(&disk, folder));
        Ok((Holding::Tiers(TieredStore::new(memory, disk, TieredConfig::default())?), place))
    }

    /// What the disk really has, and what became of what was there.
    fn told_of(&self, disk: &DiskStore, folder: &Path) -> String {
        let capacity = Size(disk.stats().disk.unwrap_or_default().capacity_bytes);
        let mut told = format!("{capacity} in {}", folder.display());
        let Opening { dropped, shortage } = disk.opening();
        if let Some(Shortage { free_bytes, reserve_bytes }) = shortage {
            told += &format!(
                "\n        warning: it cannot grow to --disk-capacity {}, because the file system has {} \
                 free, of which {} stay free (--disk-reserve)",
                self.disk_capacity,
                Size(free_bytes),
                Size(reserve_bytes)
            );
        }
        if dropped.objects > 0 {
            told += &format!(
                "\n        warning: it was larger; {} objects, the oldest, {}, were dropped to keep to \
                 --disk-capacity {}",
                whole(dropped.objects),
                Size(dropped.bytes),
                self.disk_capacity
            );
        }
        told
    }
}

/// What is wrong with the disk, and what to do.
fn advised(error: OpenError) -> String {
    match error {
        OpenError::LittleFree { path, free_bytes, reserve_bytes, needed_bytes } => format!(
            "there is no room in {}: the file system has {} free, of which {} stay free, and the least \
             that is needed is {}; make room, lower --disk-reserve, or name another folder",
            path.display(),
            Size(free_bytes),
            Size(reserve_bytes),
            Size(needed_bytes)
        ),
        other => other.to_string(),
    }
}

fn read(file: &Path) -> Result<Settings, Box<dyn Error>> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| named(&error))?;
    Ok(toml::from_str(&text).map_err(|error| named(&error))?)
}

fn written_duration<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    duration(&text).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        node: Arguments,
    }

    fn settings(line: &[&str]) -> Result<Settings, Box<dyn Error>> {
        Line::try_parse_from([&["node"], line].concat())?.node.settings()
    }

    #[test]
    fn arguments_go_before_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "memory = \"2GiB\"\nlisten = \"0.0.0.0:1\"\nshutdown_patience = \"3s\"\n\
                    rdma = \"mlx5_0/1\"\n\
                    [[clients]]\nname = \"alice\"\nsecret_file = \"a\"\n\
                    namespaces = [\"00000000000000000000000000000007\"]\n";
        std::fs::write(&file, text).unwrap();
        let path = file.path().to_str().unwrap();
        let settings = settings(&["--config", path, "--memory", "3GiB"]).unwrap();
        assert_eq!(settings.memory, Size::gib(3));
        assert_eq!(settings.listen, "0.0.0.0:1");
        assert_eq!(settings.rdma, RdmaChoice::Device("mlx5_0/1".to_owned()));
        assert_eq!(settings.shutdown_patience, Duration::from_secs(3));
        assert_eq!(settings.clients[0].namespaces, Some(vec![PageKey(7)]));
    }

    #[test]
    fn without_a_secret_it_says_how_to_make_one() {
        let error = settings(&[]).unwrap().node_config().unwrap_err().to_string();
        assert!(error.contains("/dev/urandom") && error.contains("--secret-file"), "{error}");
    }
}
