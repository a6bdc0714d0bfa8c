//! What a node shares, and with whom.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrace_cache::PageKey;
use terrace_l3_disk::PromotionConfig;
use terrace_l3_nodes::RdmaChoice;

use super::setting::{Configuration, Form, Setting, settings};
use super::value::Value;
use terrace_replay::Size;

settings! {
    /// Everything that can be set about a node.
    NodeSettings, "TERRACE_NODE_" {
        "Node" {
            /// The address to listen at.
            listen: String = "127.0.0.1:7450".to_owned(), "ADDRESS";
            /// Memory to share.
            memory: Size = Size::gib(1), "SIZE";
            /// A folder on the disk to share.
            disk: Option<PathBuf> = None, "FOLDER" { default_in_words: Some("none") };
            /// What may be stored in that folder.
            disk_capacity: Size = Size::gib(16), "SIZE";
            /// What is left free on the file system of that folder.
            disk_reserve: Option<Size> = None, "SIZE" { default_in_words:
                Some("a twentieth of it, between 1GiB and 16GiB and no more than a quarter") };
            /// How many objects are moved from disk to memory at a time.
            promotion_workers: u32 = 4, "NUMBER";
            /// How many objects are looked for at a time: the moves of some begin before the others are
            /// looked for.
            promotion_chunk: u32 = 128, "OBJECTS";
            /// How long nothing is moved to memory after there was no room in it.
            promotion_cooldown: Duration = Duration::from_millis(500), "TIME";
            /// How long a read waits for objects that are being moved to memory.
            promotion_wait: Duration = Duration::from_millis(10), "TIME";
            /// The largest object; each takes a slot of this size, so it should be that of a page, which
            /// `terrace serve` prints.
            object_max: Size = Size::mib(1), "SIZE";
            /// The file with the secret that all clients know.
            secret_file: Option<PathBuf> = None, "FILE";
            /// The address for figures, at /metrics.
            metrics: Option<String> = None, "ADDRESS" { default_in_words: Some("none") };
            /// Connections at a time; more are refused. Each server makes up to 16.
            connections_max: usize = 512, "NUMBER";
            /// Which RDMA adapter to use, in builds that can: auto, never or its name.
            rdma: RdmaChoice = RdmaChoice::Auto, "NAME";
            /// How long objects stay pinned while nobody stands for the owner of their pins.
            pins_kept: Duration = Duration::from_secs(600), "TIME";
            /// How long calls under way may take when the node is told to stop.
            shutdown_patience: Duration = Duration::from_secs(10), "TIME"
                { variable: Some("TERRACE_SHUTDOWN_PATIENCE") };
            /// What to log, like `info` or `terrace_l3=debug`; RUST_LOG works too.
            log: Option<String> = None, "FILTER"
                { variable: Some("TERRACE_LOG"), default_in_words: Some("warn,terrace_l3=info") };
            /// Who may use what: tables `[[clients]]` with `name`, `secret_file` and, for some alone,
            /// `namespaces`.
            clients: Vec<ClientSettings> = Vec::new(), "CLIENTS";
        }
    }
}

impl NodeSettings {
    /// How objects move from disk to memory.
    #[must_use]
    pub fn promotion(&self) -> PromotionConfig {
        super::promotion(
            self.promotion_workers,
            self.promotion_chunk,
            self.promotion_cooldown,
            self.promotion_wait,
        )
    }
}

/// Somebody who may use a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientSettings {
    /// Who.
    pub name: String,
    /// The file with what only this client and the node know.
    pub secret_file: PathBuf,
    /// What it may use; everything, if not given.
    pub namespaces: Option<Vec<PageKey>>,
}

impl Value for Vec<ClientSettings> {
    const FORM: Form = Form::Tables;

    fn read(_: &str) -> Result<Self, String> {
        Err("write it into the file".to_owned())
    }

    fn written(&self) -> Option<String> {
        None
    }
}
