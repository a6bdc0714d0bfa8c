//! A store that processes meet in.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{Cluster, Options, library};
use crate::process::{figure, terrace};

/// The size of a tensor.
pub(crate) const TENSOR_BYTES: u64 = 64 << 10;
/// Budget of a producer: room for more than ten samples, each of which takes four slots.
pub(crate) const MAX_RESIDENT: u64 = 8 << 20;

/// A store, and the folder that refs go through.
pub(crate) struct Ground {
    folder: TempDir,
    store: Place,
}

enum Place {
    Disk,
    Cluster(Cluster),
    Nodes(Vec<Node>),
}

/// A `terrace node` on this machine. It is killed when this is dropped.
struct Node {
    process: Child,
    address: String,
    /// Where its figures are.
    figures: String,
}

impl Node {
    fn start(secret: &Path) -> Self {
        let mut command = terrace();
        command.args(["node", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]);
        command.args(["--memory", "64MiB", "--object-max", &TENSOR_BYTES.to_string()]);
        command.arg("--secret-file").arg(secret).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let mut figures = String::new();
        let address = loop {
            let line = lines.next().expect("the node ended").unwrap();
            if let Some((_, rest)) = line.split_once("http://") {
                figures = rest.trim_end_matches("/metrics").to_owned();
            }
            if let Some(rest) = line.strip_prefix("node ") {
                break rest.trim().split(',').next().unwrap().to_owned();
            }
        };
        // It goes on writing its log, and would end if nobody read it.
        std::thread::spawn(move || lines.for_each(drop));
        Self { process, address, figures }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Ground {
    /// A store on disk.
    pub(crate) fn disk() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), store: Place::Disk }
    }

    /// So many nodes.
    pub(crate) fn nodes(count: usize) -> Self {
        let ground = Self::disk();
        let secret = ground.node_secret();
        std::fs::write(&secret, "known to the nodes and to those who use them").unwrap();
        let nodes = (0..count).map(|_| Node::start(&secret)).collect();
        Self { store: Place::Nodes(nodes), ..ground }
    }

    /// A cluster of its own. `scripts/test-mooncake` provides what it needs.
    pub(crate) fn mooncake() -> Self {
        let cluster =
            Cluster::start(Options { node_mib: 128, unfinished_s: Some(5), ..Options::default() });
        Self::on(cluster)
    }

    /// A cluster that is there already.
    pub(crate) fn on(cluster: Cluster) -> Self {
        Self { store: Place::Cluster(cluster), ..Self::disk() }
    }

    fn node_secret(&self) -> PathBuf {
        self.folder().join("node-secret")
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn terrace(&self, command: &str, arguments: &[&str]) -> Command {
        let place = match &self.store {
            Place::Cluster(cluster) => format!("mooncake://{}", cluster.address()),
            Place::Disk => format!("disk:{}", self.folder().join("store").display()),
            Place::Nodes(nodes) => {
                let addresses: Vec<&str> = nodes.iter().map(|node| &*node.address).collect();
                format!("nodes://{}", addresses.join(","))
            }
        };
        let refs: PathBuf = self.folder().join("refs");
        let mut terrace = Command::new(env!("CARGO_BIN_EXE_terrace"));
        terrace
            .args(["features", command, "--store", &place, "--tensor", &TENSOR_BYTES.to_string()])
            .args(["--capacity", "64MiB", "--turn", "50ms", "--json", "--refs"])
            .arg(refs)
            .args(arguments)
            .env_remove("TERRACE_FEATURES_SECRET_FILE")
            .stdin(Stdio::null());
        match &self.store {
            Place::Cluster(_) => terrace.env("TERRACE_MOONCAKE_LIBRARY", library()),
            Place::Nodes(_) => terrace.arg("--node-secret-file").arg(self.node_secret()),
            Place::Disk => &mut terrace,
        };
        terrace
    }

    pub(crate) fn produce(&self, arguments: &[&str]) -> Command {
        let mut produce = self.terrace("produce", arguments);
        produce.args(["--max-resident", &MAX_RESIDENT.to_string()]);
        produce
    }

    /// Has a producer's garbage collected, and what is there then.
    pub(crate) fn gc(&self, owner: u16, max_hold: &str) -> Value {
        run(self.terrace("gc", &["--owner", &owner.to_string(), "--max-hold", max_hold]))
    }

    /// How many objects the store has, whoever's they are, and how many bytes they take.
    pub(crate) fn used(&self) -> (u64, u64) {
        match &self.store {
            Place::Nodes(nodes) => {
                let sum = |name: &str| -> f64 {
                    nodes.iter().map(|node| figure(&node.figures, name)).sum()
                };
                (sum("terrace_l3_objects") as u64, sum("terrace_l3_bytes") as u64)
            }
            Place::Cluster(cluster) => {
                let metrics = cluster.ask("/metrics");
                let metric = |name: &str| -> f64 {
                    let line = metrics.lines().find(|line| {
                        line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' '))
                    });
                    let line = line.unwrap_or_else(|| panic!("there is no {name} in {metrics}"));
                    line.rsplit_once(' ').unwrap().1.parse().unwrap()
                };
                (metric("master_key_count") as u64, metric("master_allocated_bytes") as u64)
            }
            Place::Disk => {
                // As a producer who has never put anything.
                let there = self.gc(31, "1h");
                let figure = |name: &str| there[name].as_u64().unwrap();
                (figure("objects"), figure("stored_bytes"))
            }
        }
    }
}

/// Runs a command to its end and reads what it prints.
pub(crate) fn run(mut command: Command) -> Value {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}
