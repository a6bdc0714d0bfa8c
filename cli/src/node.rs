//! `terrace node`: shares this machine's memory and disk with the servers that know a secret.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::ArgAction;
use terrace_l3::{LendingStore, MemoryConfig, MemoryStore, Store};
use terrace_l3_disk::{
    DiskConfig, DiskStore, OpenError, Opening, Shortage, TieredConfig, TieredStore,
    usual_reserve_bytes,
};
use terrace_l3_nodes::{ClientLimits, NodeClient, NodeConfig, NodeSecret, NodeServer};
use terrace_replay::human::whole;
use terrace_server::{ClientSettings, NodeSettings, Size, serve_node_figures};

use crate::serve::{say, start_log};
use crate::settings::Given;
use crate::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  terrace node --listen 10.0.0.1:7450 --memory 64GiB --secret-file /etc/terrace/secret
      Share memory only
  terrace node --listen 10.0.0.1:7450 --memory 64GiB --disk /var/lib/terrace --disk-capacity 1TiB \\
      --secret-file /etc/terrace/secret --metrics 127.0.0.1:9450
      Share memory and disk, with Prometheus metrics
  terrace serve --l3 nodes://10.0.0.1:7450,10.0.0.2:7450 --node-secret-file /etc/terrace/secret
      A server that uses two nodes

Ctrl-C, SIGTERM and SIGHUP stop the node after running calls have finished. A terminal sends SIGHUP when
it closes; under nohup, SIGHUP is ignored.

All settings can also be in the file. Names there have _ instead of -. Tables [[clients]] with name,
secret_file, namespaces and share say which client may use which namespaces, and how much of the node.";

/// Arguments of `terrace node`.
#[derive(clap::Args)]
#[command(disable_help_flag = true, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Print the settings that most users need, and exit
    #[arg(short, long, action = ArgAction::HelpShort)]
    help: Option<bool>,
    /// Print all settings, and exit
    #[arg(long, action = ArgAction::HelpLong)]
    help_all: Option<bool>,
    /// TOML file with settings; flags and environment variables override it
    #[arg(long, value_name = "FILE", env = "TERRACE_NODE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    settings: Given<NodeSettings>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let settings = arguments.settings.over(arguments.config.as_deref())?.config;
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

async fn serve(settings: &NodeSettings) -> Result<String, Box<dyn Error>> {
    let config = node_config(settings)?;
    let (holding, place) = holding(settings)?;
    let node = NodeServer::bind(&settings.listen, holding, config)?.start()?;
    let (address, node) = (node.address(), Arc::new(node));
    if let Some(metrics) = &settings.metrics {
        let listener = tokio::net::TcpListener::bind(metrics).await;
        let unusable = |error| format!("--metrics: cannot listen at {metrics}: {error}");
        let listener = listener.map_err(unusable)?;
        let address = listener.local_addr()?;
        say(&format!("metrics http://{address}/metrics\n"));
        tokio::spawn(serve_node_figures(listener, node.clone()));
    }
    let mut signals = Signals::listen();
    say(&format!("node    {address}, {place}\n\nCtrl-C stops it.\n"));
    signals.told_to_stop().await;
    let patience = humantime::format_duration(settings.shutdown_patience);
    say(&format!(
        "stopping: running calls have {patience} to finish; press Ctrl-C again to stop at once\n"
    ));
    tokio::spawn(async move {
        signals.told_again().await;
        std::process::exit(130);
    });
    let all_ended = node.stop(settings.shutdown_patience).await?;
    say(if all_ended { "stopped\n" } else { "stopped: some calls were aborted\n" });
    Ok(String::new())
}

fn node_config(settings: &NodeSettings) -> Result<NodeConfig, Box<dyn Error>> {
    let mut clients = Vec::new();
    if let Some(file) = &settings.secret_file {
        let secret = NodeSecret::read(file)?;
        clients.push(NodeClient { name: String::new(), secret, limits: None });
    }
    for ClientSettings { name, secret_file, namespaces, share } in &settings.clients {
        if name.is_empty() {
            return Err("a client in the list has no name".into());
        }
        let limits = match (namespaces, share) {
            (Some(namespaces), share) => {
                let limits = ClientLimits::new(BTreeSet::from_iter(namespaces.clone()));
                Some(ClientLimits { share: share.unwrap_or(limits.share), ..limits })
            }
            (None, Some(_)) => {
                return Err(
                    format!("client {name} has a share and no namespaces that it is for").into()
                );
            }
            (None, None) => None,
        };
        let secret = NodeSecret::read(secret_file)?;
        clients.push(NodeClient { name: name.clone(), secret, limits });
    }
    let Some(first) = clients.first() else {
        let advice = "create one with `head -c 32 /dev/urandom | base64 > FILE`, copy it to all \
                      servers, and pass it with --secret-file";
        return Err(format!("a node needs a secret: {advice}").into());
    };
    let defaults = NodeConfig::new(first.secret.clone());
    let pins_kept_ms = pins_kept_ms(settings);
    let (connections_max, rdma) = (settings.connections_max, settings.rdma.clone());
    let folder = settings.disk.clone();
    Ok(NodeConfig { clients, connections_max, pins_kept_ms, rdma, folder, ..defaults })
}

fn pins_kept_ms(settings: &NodeSettings) -> u64 {
    u64::try_from(settings.pins_kept.as_millis()).unwrap_or(u64::MAX)
}

/// Opens the store that the node shares, and describes it.
fn holding(settings: &NodeSettings) -> Result<(Arc<dyn LendingStore>, String), Box<dyn Error>> {
    let object_bytes_max = usize::try_from(settings.object_max.as_u64())?;
    let memory = MemoryConfig::new(settings.memory.as_u64(), object_bytes_max);
    let memory = MemoryStore::new(memory).map_err(|error| format!("--memory: {error}"))?;
    let place = format!("{} of memory", settings.memory);
    let Some(folder) = &settings.disk else { return Ok((Arc::new(memory), place)) };
    // A system that does not report the size of the file system does not report its free space either.
    let usual = || usual_reserve_bytes(folder).unwrap_or(0);
    let disk = DiskConfig {
        reserve_bytes: settings.disk_reserve.map_or_else(usual, Size::as_u64),
        pins_kept_ms: pins_kept_ms(settings),
        ..DiskConfig::new(folder, settings.disk_capacity.as_u64(), object_bytes_max)
    };
    let disk = DiskStore::open(disk).map_err(|error| format!("--disk: {}", advised(error)))?;
    let place = format!("{place} over {}", told_of(settings, &disk, folder));
    let tiers = TieredConfig::default();
    Ok((Arc::new(TieredStore::new(memory, disk, tiers)?), place))
}

/// Describes the space on the disk, and what happened to the objects on it.
fn told_of(settings: &NodeSettings, disk: &DiskStore, folder: &Path) -> String {
    let capacity = Size(disk.stats().disk.unwrap_or_default().capacity_bytes);
    let mut told = format!("{capacity} in {}", folder.display());
    let Opening { dropped, shortage } = disk.opening();
    if let Some(Shortage { free_bytes, reserve_bytes }) = shortage {
        told += &format!(
            "\n        warning: the store cannot grow to --disk-capacity {}: the file system has {} free, \
             and {} must stay free (--disk-reserve)",
            settings.disk_capacity,
            Size(free_bytes),
            Size(reserve_bytes)
        );
    }
    if dropped.objects > 0 {
        told += &format!(
            "\n        warning: the store was larger; the {} oldest objects, {}, were dropped to keep to \
             --disk-capacity {}",
            whole(dropped.objects),
            Size(dropped.bytes),
            settings.disk_capacity
        );
    }
    told
}

/// Returns the problem with the disk, and what to do.
fn advised(error: OpenError) -> String {
    match error {
        OpenError::LittleFree { path, free_bytes, reserve_bytes, needed_bytes } => format!(
            "not enough space in {}: the file system has {} free, {} of it must stay free, and the store \
             needs at least {}; free some space, lower --disk-reserve, or use another folder",
            path.display(),
            Size(free_bytes),
            Size(reserve_bytes),
            Size(needed_bytes)
        ),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use terrace_cache::PageKey;
    use terrace_l3_nodes::RdmaChoice;
    use terrace_server::Size;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        node: Arguments,
    }

    fn settings(line: &[&str]) -> Result<NodeSettings, Box<dyn Error>> {
        let node = Line::try_parse_from([&["node"], line].concat())?.node;
        Ok(node.settings.over(node.config.as_deref())?.config)
    }

    #[test]
    fn arguments_go_before_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "memory = \"2GiB\"\nlisten = \"0.0.0.0:1\"\nshutdown_patience = \"3s\"\n\
                    rdma = \"mlx5_0/1\"\n\
                    [[clients]]\nname = \"alice\"\nsecret_file = \"a\"\n\
                    namespaces = [\"00000000000000000000000000000007\"]\nshare = 0.25\n";
        std::fs::write(&file, text).unwrap();
        let path = file.path().to_str().unwrap();
        let settings = settings(&["--config", path, "--memory", "3GiB"]).unwrap();
        assert_eq!(settings.memory, Size::gib(3));
        assert_eq!(settings.listen, "0.0.0.0:1");
        assert_eq!(settings.rdma, RdmaChoice::Device("mlx5_0/1".to_owned()));
        assert_eq!(settings.shutdown_patience, Duration::from_secs(3));
        assert_eq!(settings.clients[0].namespaces, Some(vec![PageKey(7)]));
        assert_eq!(settings.clients[0].share, Some(0.25));
    }

    #[test]
    fn without_a_secret_it_says_how_to_make_one() {
        let error = node_config(&settings(&[]).unwrap()).unwrap_err().to_string();
        assert!(error.contains("/dev/urandom") && error.contains("--secret-file"), "{error}");
    }
}
