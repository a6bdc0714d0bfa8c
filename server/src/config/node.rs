//! Settings of nodes.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use terrace_cache::PageKey;
use terrace_l3_nodes::RdmaChoice;

use super::setting::{Configuration, Form, Setting, settings};
use super::value::Value;
use terrace_replay::Size;

settings! {
    /// All settings of a node.
    NodeSettings, "TERRACE_NODE_" {
        "Node" {
            /// The address to listen on.
            listen: String = "127.0.0.1:7450".to_owned(), "ADDRESS" { is_common: true };
            /// Memory to share.
            memory: Size = Size::gib(1), "SIZE" { is_common: true };
            /// A folder for the disk store to share.
            disk: Option<PathBuf> = None, "FOLDER" { is_common: true, default_in_words: Some("none") };
            /// Capacity of the disk store.
            disk_capacity: Size = Size::gib(16), "SIZE" { is_common: true };
            /// Space that the disk store leaves free on its file system.
            disk_reserve: Option<Size> = None, "SIZE" { default_in_words:
                Some("1/20 of the file system, between 1GiB and 16GiB, at most 1/4") };
            /// Maximum size of an object. Each object takes a slot of this size, so set it to the page size in
            /// bytes that `terrace serve` prints.
            object_max: Size = Size::mib(1), "SIZE" { is_common: true };
            /// The file with the secret that all clients share.
            secret_file: Option<PathBuf> = None, "FILE" { is_common: true };
            /// The address for metrics, at /metrics.
            metrics: Option<String> = None, "ADDRESS" { is_common: true, default_in_words: Some("none") };
            /// Maximum number of connections. Further ones are refused. Each server opens up to 16.
            connections_max: usize = 512, "NUMBER";
            /// The RDMA adapter, in builds with RDMA: auto, never or its name.
            rdma: RdmaChoice = RdmaChoice::Auto, "NAME";
            /// How long pins are kept while their owner is not connected.
            pins_kept: Duration = Duration::from_secs(600), "TIME";
            /// How long running calls may take to finish after the node is told to stop.
            shutdown_patience: Duration = Duration::from_secs(10), "TIME"
                { variable: Some("TERRACE_SHUTDOWN_PATIENCE") };
            /// The log filter, for example `info` or `terrace_l3=debug`. RUST_LOG works too.
            log: Option<String> = None, "FILTER"
                { is_common: true, variable: Some("TERRACE_LOG"), default_in_words: Some("warn,terrace_l3=info") };
            /// Clients and their rights: tables `[[clients]]` with `name`, `secret_file` and, to restrict a client,
            /// `namespaces` and the `share` of memory, disk and connections that it may take (0.5 by default).
            clients: Vec<ClientSettings> = Vec::new(), "CLIENTS";
        }
    }
}

/// A client of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientSettings {
    /// Name of the client.
    pub name: String,
    /// The file with what only this client and the node know.
    pub secret_file: PathBuf,
    /// Namespaces that it may use. Without a list, all.
    pub namespaces: Option<Vec<PageKey>>,
    /// The share of the node that objects of these namespaces may take.
    pub share: Option<f64>,
}

impl Value for Vec<ClientSettings> {
    const FORM: Form = Form::Tables;

    fn read(_: &str) -> Result<Self, String> {
        Err("set it in the file; it has no flag".to_owned())
    }

    fn written(&self) -> Option<String> {
        None
    }
}
