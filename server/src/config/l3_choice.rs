//! Where KV outlives requests.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use terrace_l3_nodes::NodeAddress;

use terrace_replay::Size;

/// Where KV outlives requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum L3Choice {
    /// In a folder on disk, where it outlives the server too.
    Disk(PathBuf),
    /// In so much memory.
    Memory(Size),
    /// In the Mooncake cluster whose master is at HOST:PORT, which other servers share.
    Mooncake(String),
    /// On these nodes, which other servers share: `[NAME=]HOST:PORT[*WEIGHT]`, separated by commas.
    Nodes(String),
    /// In the bucket of this URL, which other servers share.
    Bucket(String),
    /// Nowhere.
    None,
}

impl FromStr for L3Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("disk", folder)) if !folder.is_empty() => Ok(Self::Disk(folder.into())),
            Some(("memory", size)) => size.parse().map(Self::Memory),
            Some(("mooncake", address)) if is_address(address.strip_prefix("//")) => {
                Ok(Self::Mooncake(address["//".len()..].to_owned()))
            }
            Some(("nodes", nodes)) if nodes.starts_with("//") => {
                let nodes = &nodes["//".len()..];
                parse_nodes(nodes).map(|_| Self::Nodes(nodes.to_owned()))
            }
            Some(("bucket", url)) if url.contains("://") => Ok(Self::Bucket(url.to_owned())),
            Some((cloud, bucket)) if is_cloud(cloud) && bucket.starts_with("//") => {
                Ok(Self::Bucket(text.to_owned()))
            }
            None if text == "none" => Ok(Self::None),
            Some(_) | None => {
                let places = "disk:FOLDER, memory:SIZE, mooncake://HOST:PORT, \
                              nodes://HOST:PORT,HOST:PORT, s3://BUCKET/PREFIX, bucket:URL or none";
                Err(format!("write it as {places}"))
            }
        }
    }
}

/// The nodes of an [`L3Choice::Nodes`].
pub(crate) fn parse_nodes(text: &str) -> Result<Vec<NodeAddress>, String> {
    text.split(',').map(str::parse).collect()
}

/// Whether URLs that begin so are those of buckets and of nothing else.
fn is_cloud(scheme: &str) -> bool {
    matches!(scheme, "s3" | "gs" | "az")
}

/// Whether it is written as HOST:PORT.
fn is_address(text: Option<&str>) -> bool {
    text.and_then(|text| text.rsplit_once(':'))
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

impl TryFrom<String> for L3Choice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for L3Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(folder) => write!(f, "disk:{}", folder.display()),
            Self::Memory(size) => write!(f, "memory:{}", size.written()),
            Self::Mooncake(address) => write!(f, "mooncake://{address}"),
            Self::Nodes(nodes) => write!(f, "nodes://{nodes}"),
            Self::Bucket(url) if url.split_once(':').is_some_and(|it| is_cloud(it.0)) => {
                f.write_str(url)
            }
            Self::Bucket(url) => write!(f, "bucket:{url}"),
            Self::None => f.write_str("none"),
        }
    }
}

impl From<L3Choice> for String {
    fn from(choice: L3Choice) -> Self {
        choice.to_string()
    }
}
