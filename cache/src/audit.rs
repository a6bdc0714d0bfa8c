//! Audit: every page is owned exactly once, every pin is counted, and every count is right.

use std::fmt;

use crate::chain::{Chain, Words};
use crate::node::{NONE, Node};
use crate::pin::{DevicePin, HostPin};
use crate::pool::Pool;
use crate::prefix::PrefixDigest;
use crate::tier::{Device, DevicePage, DevicePages, Host, HostPage, HostPages, Page, Tier};
use crate::tree::{NodeId, Tree, is_evictable};

/// Everything that is owned outside the cache, for [`Cache::audit`](crate::Cache::audit).
#[derive(Debug, Default)]
pub struct Claims {
    device_pages: Vec<DevicePage>,
    host_pages: Vec<HostPage>,
    device_pins: Vec<NodeId>,
    host_pins: Vec<NodeId>,
}

impl Claims {
    /// Adds device pages that are owned.
    pub fn device_pages(&mut self, pages: &DevicePages) {
        self.device_pages.extend_from_slice(pages.as_slice());
    }

    /// Adds host pages that are owned.
    pub fn host_pages(&mut self, pages: &HostPages) {
        self.host_pages.extend_from_slice(pages.as_slice());
    }

    /// Adds a pin of device pages.
    pub fn device_pin(&mut self, pin: &DevicePin) {
        self.device_pins.push(pin.node());
    }

    /// Adds a pin of host pages.
    pub fn host_pin(&mut self, pin: &HostPin) {
        self.host_pins.push(pin.node());
    }
}

/// Fault that an audit found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault(String);

impl Fault {
    /// Makes a fault from its description.
    #[must_use]
    pub fn new(what: String) -> Self {
        Self(what)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Fault {}

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(Fault(format!($($message)+)));
        }
    };
}

/// Checks a tree and its pools against everything that is owned outside of them.
pub(crate) fn audit(
    tree: &Tree,
    device: &Pool<Device>,
    host: &Pool<Host>,
    claims: &Claims,
) -> Result<(), Fault> {
    let live = live_nodes(tree);
    owned_once(device.total(), "device", device.iter(), &claims.device_pages, || {
        live.iter().flat_map(|&(_, node)| &node.device.pages)
    })?;
    owned_once(host.total(), "host", host.iter(), &claims.host_pages, || {
        live.iter().flat_map(|&(_, node)| &node.host.pages)
    })?;
    for &(index, node) in &live {
        shape(tree, index, node)?;
    }
    tier::<Device>(tree, &live, &claims.device_pins)?;
    tier::<Host>(tree, &live, &claims.host_pins)?;
    ensure!(live.len() == tree.by_key.len(), "the key index has a stale entry");
    Ok(())
}

fn live_nodes(tree: &Tree) -> Vec<(u32, &Node)> {
    let mut live = vec![true; tree.nodes.len()];
    for &index in &tree.vacant {
        live[index as usize] = false;
    }
    (0..).zip(&tree.nodes).filter(|&(index, _)| live[index as usize]).collect()
}

fn owned_once<'a, T: Tier, I: Iterator<Item = &'a Page<T>>>(
    total: usize,
    tier: &str,
    free: impl Iterator<Item = &'a Page<T>>,
    claimed: &'a [Page<T>],
    in_tree: impl Fn() -> I,
) -> Result<(), Fault> {
    const OWNERS: [&str; 4] = ["nothing", "the pool", "a request or operation", "the tree"];
    let mut owner = vec![0u8; total];
    let free = free.map(|page| (page, 1));
    let claimed = claimed.iter().map(|page| (page, 2));
    for (page, who) in free.chain(claimed).chain(in_tree().map(|page| (page, 3))) {
        let before = std::mem::replace(&mut owner[page.slot() as usize], who);
        ensure!(
            before == 0,
            "{page:?} is owned by {} and {}",
            OWNERS[usize::from(before)],
            OWNERS[usize::from(who)]
        );
    }
    let lost = owner.iter().position(|&who| who == 0);
    ensure!(lost.is_none(), "{tier} page {} is lost", lost.unwrap_or_default());
    Ok(())
}

fn shape(tree: &Tree, index: u32, node: &Node) -> Result<(), Fault> {
    let first = if node.is_root() { node.namespace } else { node.keys()[0] };
    ensure!(node.first_key == first, "node {index} has another first key than its first page");
    ensure!(tree.by_key.get(&first) == Some(&index), "node {index} cannot be found by its key");
    ensure!(
        node.excerpt.tokens().len() == node.len() * tree.page_size,
        "node {index} lacks tokens"
    );
    let (mut child, mut children, mut on_device, mut on_host) = (node.first_child, 0, 0, 0);
    while child != NONE {
        let below = &tree.nodes[child as usize];
        ensure!(below.parent == index, "node {child} has another parent than {index}");
        ensure!(below.start_page == node.end_page(), "node {child} does not follow {index}");
        children += 1;
        on_device += u32::from(!below.device.pages.is_empty());
        on_host += u32::from(!below.host.pages.is_empty());
        child = below.next_sibling;
    }
    ensure!(node.device.children == on_device, "node {index} miscounts its device children");
    ensure!(node.host.children == on_host, "node {index} miscounts its host children");
    if node.is_root() {
        let pins = node.device.pins + node.host.pins;
        ensure!(children > 0 || pins > 0, "an empty namespace was kept");
        return Ok(());
    }
    ensure!(node.held_by::<Device>() || node.held_by::<Host>(), "node {index} has no bytes");
    let parent = &tree.nodes[node.parent as usize];
    ensure!(
        !node.held_by::<Device>() || parent.held_by::<Device>(),
        "node {index} is on device without its prefix"
    );
    for pages in [node.device.pages.len(), node.host.pages.len()] {
        ensure!(pages == 0 || pages == node.len(), "node {index} is held in part");
    }
    let mut key = parent.keys().last().copied().unwrap_or(node.namespace);
    let words = Words::of(node.namespace);
    let pages = node.excerpt.tokens().chunks_exact(tree.page_size).zip(node.keys());
    for (place, (page, &expected)) in (node.start_page..).zip(pages) {
        let follows = node.excerpt.marks().map_or(key, |marks| marks.follow(key, place));
        key = Chain::behind(follows, &words).next(page);
        ensure!(key == expected, "node {index} has a key that is not its tokens'");
    }
    if let Some(known) = tree.digests.get(index) {
        let pages = node.start_page + 1..=node.end_page();
        ensure!(pages.contains(&known.page), "node {index} has a digest of pages that it has not");
        let expected = digest_before(tree, index, known.page);
        ensure!(known.digest == expected, "node {index} has a digest that is not its tokens'");
    }
    Ok(())
}

/// The digest of the pages before a place in a node, hashed from the first page on.
fn digest_before(tree: &Tree, index: u32, page: u32) -> PrefixDigest {
    let start = PrefixDigest::of_namespace(tree.nodes[index as usize].namespace);
    tree.path(index, 0).into_iter().fold(start, |before, index| {
        let node = &tree.nodes[index as usize];
        let pages = node.contents_from(node.start_page, tree.page_size);
        let pages = pages.take((page - node.start_page) as usize);
        pages.fold(before, |digest, (tokens, content)| digest.next(tokens, content))
    })
}

fn tier<T: Tier>(tree: &Tree, live: &[(u32, &Node)], pins: &[NodeId]) -> Result<(), Fault> {
    let mut counted = vec![0u32; tree.nodes.len()];
    for &pin in pins {
        let node = &tree.nodes[pin.index as usize];
        ensure!(node.generation == pin.generation, "a {:?} pin outlived its node", T::NAME);
        let mut index = pin.index;
        while index != NONE {
            counted[index as usize] += 1;
            index = tree.nodes[index as usize].parent;
        }
    }
    let mut evictable_children = vec![0u32; tree.nodes.len()];
    for (_, node) in live.iter().filter(|(_, node)| T::of(node).evictable) {
        evictable_children[node.parent as usize] += 1;
    }
    let mut evictable_pages = 0;
    for &(index, node) in live {
        let (holding, pins) = (T::of(node), counted[index as usize]);
        ensure!(
            holding.pins == pins,
            "node {index} counts {} {:?} pins, but {pins} are held",
            holding.pins,
            T::NAME
        );
        ensure!(
            holding.evictable_children == evictable_children[index as usize],
            "node {index} miscounts its evictable {:?} children",
            T::NAME
        );
        let evictable = is_evictable::<T>(node);
        ensure!(holding.evictable == evictable, "node {index} is wrongly evictable or not");
        let offered = evictable && holding.children == 0;
        ensure!(holding.offered == offered, "node {index} is wrongly on offer or not");
        evictable_pages += if evictable { node.len() } else { 0 };
    }
    let stated = T::state(tree).evictable_pages;
    ensure!(stated == evictable_pages, "{stated} evictable pages stated, {evictable_pages} found");
    Ok(())
}
