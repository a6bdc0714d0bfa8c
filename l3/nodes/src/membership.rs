//! Membership of a node in a store: the list of nodes by which its objects were placed.
//!
//! Clients place objects by their own lists. With a different list, a client would ask a node for
//! objects that it never had. A node therefore records its seat: a digest of the list and of its
//! own name in it. It serves only clients with the same seat. `roll.rs` is the client's part.

use std::fmt::{self, Write as _};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde::{Serialize, Serializer};

use super::config::NodesConfig;
use super::handshake::random;
use terrace_l3::StoreError;

const MARK_BYTES: usize = 16;

/// A random number or digest that identifies a node, a seat or a store.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mark(pub [u8; MARK_BYTES]);

impl Mark {
    fn random() -> io::Result<Self> {
        random().map(Self)
    }

    fn parse(text: &str) -> Option<Self> {
        let is_hex = text.len() == 2 * MARK_BYTES && text.bytes().all(|it| it.is_ascii_hexdigit());
        is_hex.then(|| u128::from_str_radix(text, 16).ok())?.map(|it| Self(it.to_be_bytes()))
    }

    fn of(hasher: &blake3::Hasher) -> Self {
        let hash = hasher.finalize();
        Self(*hash.as_bytes().first_chunk().expect("a hash is longer"))
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Mark {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The store that a node belongs to, and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Membership {
    /// Id of the store: a digest of the births of its first nodes.
    pub store: Mark,
    /// Digest of the list of nodes, with the node's own name in it.
    pub seat: Mark,
    /// Digest of the addresses in the list. A node without a disk counts as restarted only if its
    /// address is unchanged.
    pub addresses: Mark,
}

/// Status that a node reports when a client enters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Standing {
    /// Random number drawn when the node started empty.
    pub birth: Mark,
    /// True if objects and membership survive a restart of the node.
    pub is_durable: bool,
    /// `None` until a client makes the node a member.
    pub member: Option<Membership>,
}

/// Seats of all nodes of a list, in its order. Addresses do not count: a node that moves keeps its
/// seat.
pub(super) fn seats(config: &NodesConfig) -> Vec<Mark> {
    let mut nodes: Vec<_> = config.nodes.iter().collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let mut list = blake3::Hasher::new_derive_key("terrace node 3: seat");
    list.update(&(config.copies as u64).to_le_bytes()).update(&(nodes.len() as u64).to_le_bytes());
    for node in nodes {
        list.update(&(node.name.len() as u64).to_le_bytes()).update(node.name.as_bytes());
        list.update(&node.weight.to_bits().to_le_bytes());
    }
    let seat = |name: &str| Mark::of(list.clone().update(name.as_bytes()));
    config.nodes.iter().map(|node| seat(&node.name)).collect()
}

/// Digest that distinguishes lists with the same seats at other addresses.
pub(super) fn addresses(config: &NodesConfig) -> Mark {
    let mut nodes: Vec<_> = config.nodes.iter().collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let mut list = blake3::Hasher::new_derive_key("terrace node 3: addresses");
    for node in nodes {
        list.update(&(node.address.len() as u64).to_le_bytes()).update(node.address.as_bytes());
    }
    Mark::of(&list)
}

/// Id of the store that empty nodes found together, from their births in the order of their names.
pub(super) fn founded_by(births: impl IntoIterator<Item = Mark>) -> Mark {
    let mut hasher = blake3::Hasher::new_derive_key("terrace node 3: store");
    for birth in births {
        hasher.update(&birth.0);
    }
    Mark::of(&hasher)
}

/// Record of a node's membership.
#[derive(Debug)]
pub(super) struct Member {
    /// File that survives restarts, if any.
    file: Option<PathBuf>,
    standing: Mutex<Standing>,
    /// Held by the change in progress; one at a time.
    changing: tokio::sync::Mutex<()>,
}

/// State of the membership when a client was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Admission {
    seat: Mark,
    store: Option<Mark>,
}

impl Member {
    /// Reads the record in `folder`; a node without a record starts empty.
    ///
    /// # Errors
    /// If the file cannot be read, parsed or written.
    pub(super) fn open(folder: Option<&Path>) -> io::Result<Self> {
        let file = folder.map(|folder| folder.join("membership"));
        let read = file.as_ref().map_or(Ok(None), |file| match fs::read_to_string(file) {
            Ok(text) => read(&text).map(Some).ok_or_else(|| {
                let problem =
                    "it is damaged; restore it, or remove it to have the node begin with nothing";
                io::Error::new(io::ErrorKind::InvalidData, problem)
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        });
        let standing = match read? {
            Some(standing) => standing,
            None => {
                let (birth, is_durable) = (Mark::random()?, file.is_some());
                let standing = Standing { birth, is_durable, member: None };
                file.as_ref().map_or(Ok(()), |file| write(file, &standing))?;
                standing
            }
        };
        let changing = tokio::sync::Mutex::default();
        Ok(Self { file, standing: Mutex::new(standing), changing })
    }

    pub(super) fn standing(&self) -> Standing {
        *self.standing.lock()
    }

    /// Admission of a client that has this seat in its list.
    pub(super) fn admission(&self, seat: Mark) -> Admission {
        Admission { seat, store: self.standing().member.map(|member| member.store) }
    }

    /// Returns true while an admission is still valid.
    pub(super) fn admits(&self, admission: Admission) -> bool {
        self.standing().member.is_none_or(|member| {
            let Admission { seat, store } = admission;
            member.seat == seat && store.is_none_or(|store| store == member.store)
        })
    }

    /// Makes the node a member. An existing membership is kept, unless `replaces` is set.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub(super) async fn join(
        &self,
        membership: Membership,
        replaces: bool,
    ) -> Result<(), StoreError> {
        let _alone = self.changing.lock().await;
        let standing = self.standing();
        let is_changed = standing.member != Some(membership);
        if !is_changed || (standing.member.is_some() && !replaces) {
            return Ok(());
        }
        let standing = Standing { member: Some(membership), ..standing };
        if let Some(file) = self.file.clone() {
            let written = tokio::task::spawn_blocking(move || write(&file, &standing)).await;
            let written = written.unwrap_or_else(|died| Err(io::Error::other(died)));
            written.map_err(|error| StoreError::io("writing the membership", &error))?;
        }
        *self.standing.lock() = standing;
        Ok(())
    }
}

const TITLE: &str = "terrace node membership 1";

fn read(text: &str) -> Option<Standing> {
    let mut lines = text.lines();
    if lines.next()? != TITLE {
        return None;
    }
    let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
    let birth = Mark::parse(field("birth")?)?;
    let member = match (field("store")?, field("seat")?, field("addresses")?) {
        ("none", "none", "none") => None,
        (store, seat, addresses) => Some(Membership {
            store: Mark::parse(store)?,
            seat: Mark::parse(seat)?,
            addresses: Mark::parse(addresses)?,
        }),
    };
    lines.next().is_none().then_some(Standing { birth, is_durable: true, member })
}

/// Replaces the file durably.
fn write(path: &Path, standing: &Standing) -> io::Result<()> {
    let Standing { birth, member, .. } = standing;
    let mut text = format!("{TITLE}\nbirth {birth}\n");
    let _ = match member {
        Some(Membership { store, seat, addresses }) => {
            writeln!(text, "store {store}\nseat {seat}\naddresses {addresses}")
        }
        None => writeln!(text, "store none\nseat none\naddresses none"),
    };
    let draft = path.with_extension("new");
    let mut file = File::create(&draft)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&draft, path)?;
    path.parent().map_or(Ok(()), |folder| File::open(folder)?.sync_all())
}

#[cfg(test)]
mod tests {
    use super::super::handshake::NodeSecret;
    use super::*;

    fn config(nodes: &str) -> NodesConfig {
        let nodes = nodes.split(',').map(|node| node.parse().unwrap()).collect();
        NodesConfig::new(nodes, NodeSecret::new(&[1; 16]).unwrap())
    }

    #[test]
    fn a_seat_depends_on_names_weights_and_copies_alone() {
        let list = seats(&config("a=h:1,b=h:2"));
        assert_ne!(list[0], list[1]);
        let turned = seats(&config("b=h:2,a=h:1"));
        assert_eq!([turned[1], turned[0]], list[..]);
        assert_eq!(seats(&config("a=elsewhere:1,b=h:2")), list, "a node that moves keeps its seat");
        for other in ["a=h:1", "a=h:1,b=h:2,c=h:3", "a=h:1,x=h:2", "a=h:1,b=h:2*2"] {
            assert_ne!(seats(&config(other))[0], list[0], "{other}");
        }
        let twice = NodesConfig { copies: 2, ..config("a=h:1,b=h:2") };
        assert_ne!(seats(&twice), list);
    }

    /// Nodes and clients of other builds of this version agree.
    #[test]
    fn seats_and_stores_are_stable() {
        let seats = seats(&config("a=h:1,b=h:2*2"));
        assert_eq!(seats[1].to_string(), "437e93e85a4494fa91f9e43accbd79fa");
        assert_eq!(
            founded_by([Mark([1; 16]), Mark([2; 16])]).to_string(),
            "e0c99a8a52039b89ad8c1bacee936088"
        );
    }

    #[tokio::test]
    async fn a_node_with_a_folder_remembers() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Member::open(Some(folder.path())).unwrap();
        let born = open().standing();
        assert_eq!((born.is_durable, born.member), (true, None));
        assert_eq!(open().standing(), born);
        let addresses = Mark([4; 16]);
        let membership = Membership { store: Mark([1; 16]), seat: Mark([2; 16]), addresses };
        let other = Membership { seat: Mark([3; 16]), ..membership };
        open().join(membership, false).await.unwrap();
        assert_eq!(open().standing(), Standing { member: Some(membership), ..born });
        open().join(other, false).await.unwrap();
        assert_eq!(open().standing().member, Some(membership), "it stays what it is");
        open().join(other, true).await.unwrap();
        assert_eq!(open().standing().member, Some(other));
        fs::write(folder.path().join("membership"), "terrace node membership 1\nbirth 7\n")
            .unwrap();
        assert_eq!(
            Member::open(Some(folder.path())).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[tokio::test]
    async fn other_seats_and_other_stores_are_not_admitted() {
        let node = Member::open(None).unwrap();
        let (seat, store) = (Mark([1; 16]), Mark([2; 16]));
        let early = node.admission(seat);
        let other = node.admission(Mark([9; 16]));
        assert!(node.admits(early) && node.admits(other), "it belongs to no store yet");
        let membership = Membership { store, seat, addresses: Mark([4; 16]) };
        node.join(membership, false).await.unwrap();
        assert!(node.admits(early) && !node.admits(other));
        let late = node.admission(seat);
        node.join(Membership { store: Mark([3; 16]), ..membership }, true).await.unwrap();
        assert!(node.admits(early) && !node.admits(late), "it belongs to another store");
    }
}
