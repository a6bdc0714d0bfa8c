//! The tree as people look at it.

use serde::Serialize;

use crate::cache::Cache;
use crate::key::{PageKey, Token};
use crate::node::NONE;
use crate::tier::{Device, Host};

/// Maximum number of tokens of a node that are shown.
const TOKENS_SHOWN: usize = 64;

/// A node of the tree: a run of pages that sequences share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeView {
    /// The place of its parent in the list; roots of namespaces have none, and no pages.
    pub parent: Option<u32>,
    /// The digest of the namespace.
    pub namespace: PageKey,
    /// The place of its first page in its sequences.
    pub start_page: u32,
    /// Number of pages.
    pub pages: u32,
    /// Its first tokens.
    pub tokens: Vec<Token>,
    /// True if the device holds it.
    pub on_device: bool,
    /// True if the host holds it.
    pub on_host: bool,
    /// True if L3 is known to hold it.
    pub in_l3: bool,
    /// True while pages of it are in flight to device, host or L3.
    pub moving: bool,
    /// Number of pins that keep it on device, including those on nodes below it.
    pub device_pins: u32,
    /// Number of pins that keep it on host.
    pub host_pins: u32,
}

impl Cache {
    /// The first nodes of what some namespaces hold, breadth first, so parents come before their
    /// children. Costs as much as it returns.
    #[must_use]
    pub fn view(&self, namespaces: &[PageKey], nodes_max: usize) -> Vec<NodeView> {
        let tree = &self.tree;
        let roots = namespaces.iter().filter_map(|namespace| tree.by_key.get(namespace));
        let mut places: Vec<(u32, Option<u32>)> =
            roots.map(|&root| (root, None)).take(nodes_max).collect();
        let mut views = Vec::new();
        while let Some(&(index, parent)) = places.get(views.len()) {
            let node = &tree.nodes[index as usize];
            let mut child = node.first_child;
            while child != NONE && places.len() < nodes_max {
                places.push((child, Some(views.len() as u32)));
                child = tree.nodes[child as usize].next_sibling;
            }
            views.push(NodeView {
                parent,
                namespace: node.namespace,
                start_page: node.start_page,
                pages: node.len() as u32,
                tokens: node.excerpt.tokens().iter().take(TOKENS_SHOWN).copied().collect(),
                on_device: node.held_by::<Device>(),
                on_host: node.held_by::<Host>(),
                in_l3: node.in_l3,
                moving: node.device.arriving || node.host.arriving || node.backing_up,
                device_pins: node.device.pins,
                host_pins: node.host.pins,
            });
        }
        views
    }
}
