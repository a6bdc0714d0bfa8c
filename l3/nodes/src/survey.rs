//! Status reports of nodes, and changes of a list of nodes.
//!
//! Clients never change the membership of a node. An operator does, once no object is left that was
//! pinned under the former list.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Serialize;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::codec::Malformed;
use super::config::{NodeAddress, NodesConfig};
use super::handshake::{Hello, random};
use super::link::{LinkError, NodeLink};
use super::membership::{Mark, Standing, addresses, founded_by, seats};
use super::messages::{Answer, Joining, Reply, Request};
use terrace_l3::{StoreError, TierStats};

/// Status report of a node.
#[derive(Clone, Debug, Serialize)]
pub struct Surveyed {
    /// Name in the list.
    pub name: String,
    /// Address of the node.
    pub address: String,
    /// Standing of the node, or the reason why it is unknown.
    pub standing: Result<Standing, String>,
    /// True if it is a member with this list.
    pub is_member: bool,
    /// Objects on the node.
    pub objects: u64,
    /// Objects with hard pins.
    pub hard_pinned: u64,
}

/// Reason why the list of nodes was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// The configuration is invalid.
    #[error("{0}")]
    Config(String),
    /// A node does not answer.
    #[error("node {name} does not answer: {problem}; nothing was changed")]
    Away {
        /// Name of the node.
        name: String,
        /// Reason.
        problem: String,
    },
    /// Objects are in use that could not be found any more.
    #[error(
        "node {name} has {objects} objects with hard pins: have them consumed with the former list, or wait until \
         their owners have been gone for --pins-kept; nothing was changed"
    )]
    Pinned {
        /// Name of the node.
        name: String,
        /// Number of objects.
        objects: u64,
    },
    /// A node has refused.
    #[error("node {name} has refused: {error}; run the command again")]
    Refused {
        /// Name of the node.
        name: String,
        /// Reason.
        error: StoreError,
    },
}

/// Asks all nodes of a list for their standing.
///
/// # Errors
/// If the configuration is invalid.
pub async fn survey(config: &NodesConfig) -> Result<Vec<Surveyed>, ChangeError> {
    config.check().map_err(ChangeError::Config)?;
    let mut surveyed = Vec::new();
    for (node, seat) in config.nodes.iter().zip(seats(config)) {
        surveyed.push(ask(config, node, seat, None).await);
    }
    Ok(surveyed)
}

/// Makes all nodes of the list members with this list, and returns their standing. Nodes of the
/// `former` list are checked for pins as well. Clients with another list are not served any more.
///
/// # Errors
/// If a node does not answer, or has objects with hard pins that could not be found any more.
pub async fn change_list(
    config: &NodesConfig,
    former: &[NodeAddress],
) -> Result<Vec<Surveyed>, ChangeError> {
    let before = survey(config).await?;
    let mut standings = Vec::new();
    for node in &before {
        let away = |problem: &String| ChangeError::Away {
            name: node.name.clone(),
            problem: problem.clone(),
        };
        standings.push(*node.standing.as_ref().map_err(away)?);
    }
    let placed_otherwise = |node: &Surveyed| {
        !node.is_member && node.standing.as_ref().is_ok_and(|it| it.member.is_some())
    };
    let stays = !before.iter().any(placed_otherwise);
    let stores: BTreeSet<Mark> =
        standings.iter().filter_map(|it| it.member).map(|member| member.store).collect();
    if !stays || stores.len() > 1 {
        let names: BTreeSet<&str> = config.nodes.iter().map(|node| &*node.address).collect();
        let mut all = before.clone();
        for node in former.iter().filter(|node| !names.contains(&*node.address)) {
            let asked = ask(config, node, Mark([0; 16]), None).await;
            if let Err(problem) = asked.standing {
                return Err(ChangeError::Away { name: asked.name, problem });
            }
            all.push(asked);
        }
        if let Some(node) = all.iter().find(|node| node.hard_pinned > 0) {
            let (name, objects) = (node.name.clone(), node.hard_pinned);
            return Err(ChangeError::Pinned { name, objects });
        }
    }
    let mut order: Vec<usize> = (0..before.len()).collect();
    order.sort_by_key(|number| &before[*number].name);
    let births = order.iter().map(|number| standings[*number].birth);
    let store = match stores.first() {
        Some(store) if stays && stores.len() == 1 => *store,
        Some(_) | None => founded_by(births),
    };
    let seats = seats(config);
    let mut after = before;
    for number in order {
        let joining = Joining { store, addresses: addresses(config), replaces: true };
        let node = &config.nodes[number];
        let changed = visit(config, node, seats[number], Some(joining)).await;
        let (standing, _) = changed.map_err(|error| ChangeError::Away {
            name: node.name.clone(),
            problem: error.to_string(),
        })?;
        let standing =
            standing.map_err(|error| ChangeError::Refused { name: node.name.clone(), error })?;
        after[number] = Surveyed {
            is_member: standing.member.is_some_and(|it| it.seat == seats[number]),
            standing: Ok(standing),
            ..after[number].clone()
        };
    }
    Ok(after)
}

async fn ask(
    config: &NodesConfig,
    node: &NodeAddress,
    seat: Mark,
    joins: Option<Joining>,
) -> Surveyed {
    let (standing, tier) = match visit(config, node, seat, joins).await {
        Ok((standing, tier)) => (standing.map_err(|error| error.to_string()), tier),
        Err(error) => (Err(error.to_string()), TierStats::default()),
    };
    let member = standing.as_ref().ok().and_then(|standing| standing.member);
    Surveyed {
        name: node.name.clone(),
        address: node.address.clone(),
        is_member: member.is_some_and(|member| member.seat == seat),
        standing,
        objects: tier.objects,
        hard_pinned: tier.hard_pinned,
    }
}

/// Connects to a node and enters; returns its standing, and statistics of its store.
async fn visit(
    config: &NodesConfig,
    node: &NodeAddress,
    seat: Mark,
    joins: Option<Joining>,
) -> Result<(Result<Standing, StoreError>, TierStats), LinkError> {
    let limit = Duration::from_millis(config.connect_timeout_ms + config.control_timeout_ms);
    let visit = async {
        let stream = TcpStream::connect(&node.address).await?;
        let hello = Hello::new(&config.name, random()?)?;
        let mut link = NodeLink::greet(stream, &config.secret, &hello, limit).await?;
        link.receive(limit).await?;
        let request = Request::Enter { seat, joins };
        link.send(request.kind(), |body| request.encode(body), &[]).await?;
        let (kind, body) = link.receive(limit).await?;
        let Reply { gauges, answer } = Reply::decode(kind, body)?;
        match answer {
            Answer::Entered(standing) => Ok((standing, gauges.tier())),
            _ => Err(Malformed::Kind(kind).into()),
        }
    };
    timeout(limit, visit).await.map_err(|_| LinkError::Stalled(limit))?
}
