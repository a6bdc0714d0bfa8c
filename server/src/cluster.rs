//! Clusters and nodes as the settings describe them, for servers and for whoever else keeps things there.

use std::path::PathBuf;

use terrace_l3_mooncake::MooncakeConfig;
use terrace_l3_nodes::{NodeSecret, NodesConfig, SecretError};

use crate::config::{Config, parse_nodes};

/// Reason why a cluster or nodes cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// No library is set.
    #[error(
        "a Mooncake cluster needs the library of your installation: give the path of its \
         libmooncake_store.so with --mooncake-library"
    )]
    NoLibrary,
    /// Nobody said what the nodes know.
    #[error("nodes need their secret: give its file with --node-secret-file")]
    NoSecret,
    /// The secret cannot be used.
    #[error("--node-secret-file: {0}")]
    Secret(#[from] SecretError),
    /// The nodes are not written as they should be.
    #[error("{0}")]
    Nodes(String),
}

impl Config {
    /// The Mooncake cluster whose master is at `master`, and what this process may put into it.
    ///
    /// # Errors
    /// When no library is named.
    pub fn mooncake(
        &self,
        master: &str,
        capacity_bytes: u64,
        object_bytes_max: usize,
    ) -> Result<MooncakeConfig, ClusterError> {
        let library: &PathBuf = self.mooncake_library.as_ref().ok_or(ClusterError::NoLibrary)?;
        Ok(MooncakeConfig {
            protocol: self.mooncake_protocol.clone(),
            device: self.mooncake_device.clone(),
            metadata_server: self.mooncake_metadata.clone(),
            segment_bytes: self.mooncake_segment.as_u64(),
            replicas: self.mooncake_replicas,
            preferred_segments: self.preferred_segments().map(str::to_owned).collect(),
            ..MooncakeConfig::new(library, master, capacity_bytes, object_bytes_max)
        })
    }

    /// The nodes that are written as `nodes`, as [`L3Choice::Nodes`](crate::L3Choice::Nodes) has them.
    ///
    /// # Errors
    /// When no secret is named, or something cannot be read.
    pub fn nodes(&self, nodes: &str) -> Result<NodesConfig, ClusterError> {
        let secret = self.node_secret_file.as_ref().ok_or(ClusterError::NoSecret)?;
        let addresses = parse_nodes(nodes).map_err(ClusterError::Nodes)?;
        Ok(NodesConfig {
            name: self.node_client.clone(),
            copies: self.node_copies,
            rdma: self.node_rdma.clone(),
            ..NodesConfig::new(addresses, NodeSecret::read(secret)?)
        })
    }
}
