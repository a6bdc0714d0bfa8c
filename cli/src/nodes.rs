//! `terrace nodes`: which store nodes belong to, and the change of their list.

use std::error::Error;
use std::path::PathBuf;

use terrace_l3_nodes::{NodesConfig, Surveyed, change_list, survey};
use terrace_replay::human::whole;
use terrace_server::L3Choice;

use crate::settings::GivenClusters;

const EXAMPLES: &str = "\
Examples:
  terrace nodes nodes://a:7450,b:7450 --node-secret-file secret
      Show whether the nodes are used with this list
  terrace nodes nodes://a:7450,b:7450,c:7450 --former nodes://a:7450,b:7450 --change --node-secret-file secret
      Add a node, after all clients were stopped and all samples consumed

--change is refused while a node has objects with hard pins. All clients need the new list from then on.
It also accepts a node that has lost its disk.";

/// Arguments of `terrace nodes`.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The list of nodes, written as for --l3: nodes://NODE,NODE
    #[arg(value_name = "NODES", value_parser = parse)]
    nodes: String,
    /// Have the nodes be used with this list from now on
    #[arg(long)]
    change: bool,
    /// The list so far: no node of it may have pinned objects either
    #[arg(long, value_name = "NODES", value_parser = parse, requires = "change")]
    former: Option<String>,
    /// TOML file with settings, as for `terrace serve`; flags and environment variables override it
    #[arg(long, value_name = "FILE", env = "TERRACE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    clusters: GivenClusters,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse(text: &str) -> Result<String, String> {
    match text.parse() {
        Ok(L3Choice::Nodes(nodes)) => Ok(nodes),
        Ok(
            L3Choice::Disk(_)
            | L3Choice::Mooncake(_)
            | L3Choice::Bucket(_)
            | L3Choice::Memory(_)
            | L3Choice::None,
        )
        | Err(_) => Err("write the nodes as nodes://HOST:PORT,HOST:PORT".to_owned()),
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<String, Box<dyn Error>> {
    let settings = arguments.clusters.over(arguments.config.as_deref())?;
    let patient = |nodes: &str| -> Result<NodesConfig, Box<dyn Error>> {
        Ok(NodesConfig {
            connect_timeout_ms: 3_000,
            control_timeout_ms: 3_000,
            ..settings.nodes(nodes)?
        })
    };
    let config = patient(&arguments.nodes)?;
    let former = arguments.former.as_deref().map(patient).transpose()?;
    let former = former.map_or_else(Vec::new, |former| former.nodes);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let nodes = runtime.block_on(async {
        match arguments.change {
            true => change_list(&config, &former).await,
            false => survey(&config).await,
        }
    })?;
    if arguments.json {
        return Ok(serde_json::to_string_pretty(&nodes)? + "\n");
    }
    let mut text = format!("{:<24} {:>10} {:>10}  {}\n", "node", "objects", "pinned", "state");
    for node in &nodes {
        let (objects, pinned) = (whole(node.objects), whole(node.hard_pinned));
        text += &format!("{:<24} {objects:>10} {pinned:>10}  {}\n", node.name, state(node));
    }
    Ok(text)
}

fn state(node: &Surveyed) -> String {
    match &node.standing {
        Err(problem) => problem.clone(),
        Ok(standing) => match standing.member {
            Some(member) if node.is_member => format!("member of store {}", member.store),
            Some(_) => "used with another list of nodes".to_owned(),
            None => "no member yet".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_written_as_for_serve() {
        assert_eq!(parse("nodes://a=h:1,h:2*3"), Ok("a=h:1,h:2*3".to_owned()));
        for wrong in ["", "h:1", "disk:folder", "none", "nodes://"] {
            assert!(parse(wrong).unwrap_err().contains("nodes://HOST:PORT"), "{wrong}");
        }
    }
}
