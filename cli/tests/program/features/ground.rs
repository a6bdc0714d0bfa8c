//! A store that processes meet in.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::{Cluster, Options, library};

/// The size of a tensor.
pub(crate) const TENSOR_BYTES: u64 = 64 << 10;
/// What a producer may have in a store.
pub(crate) const MAX_RESIDENT: u64 = 2 << 20;

/// A store, and the folder that refs go through.
pub(crate) struct Ground {
    folder: TempDir,
    cluster: Option<Cluster>,
}

impl Ground {
    /// A store on disk.
    pub(crate) fn disk() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), cluster: None }
    }

    /// A cluster of its own. `scripts/test-mooncake` provides what it needs.
    pub(crate) fn mooncake() -> Self {
        let cluster =
            Cluster::start(Options { node_mib: 128, unfinished_s: Some(5), ..Options::default() });
        Self { cluster: Some(cluster), ..Self::disk() }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn terrace(&self, command: &str, arguments: &[&str]) -> Command {
        let place = match &self.cluster {
            Some(cluster) => format!("mooncake://{}", cluster.address()),
            None => format!("disk:{}", self.folder().join("store").display()),
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
        if self.cluster.is_some() {
            terrace.env("TERRACE_MOONCAKE_LIBRARY", library());
        }
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
        match &self.cluster {
            Some(cluster) => {
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
            None => {
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
