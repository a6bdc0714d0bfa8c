//! Full disks, strangers, crowds, clients with few rights, and nodes that join.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use terrace_cache::PageKey;
use terrace_l3::{ObjectId, Removal, Store, StoreError};
use terrace_l3_nodes::wire::{Challenge, Hello, VERSION};
use terrace_l3_nodes::{NodeSecret, NodesConfig, change_list, survey};

use super::client::{BATCH, Client, all_ok, is_a_miss, owners, part};
use super::farm::Farm;
use super::{MEMORY, pages};

/// A file system of its own for as long as it is held.
struct SmallDisk {
    folder: tempfile::TempDir,
}

impl SmallDisk {
    fn new(size: &str) -> Self {
        let disk = Self { folder: tempfile::tempdir().unwrap() };
        disk.mount(&format!("size={size}"));
        disk
    }

    fn path(&self) -> &str {
        self.folder.path().to_str().unwrap()
    }

    fn grow(&self, size: &str) {
        self.mount(&format!("remount,size={size}"));
    }

    fn mount(&self, options: &str) {
        let arguments = ["-t", "tmpfs", "-o", options, "tmpfs", self.path()];
        assert!(Command::new("mount").args(arguments).status().unwrap().success(), "{arguments:?}");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l", self.path()]).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_full_disk_costs_what_does_not_fit() {
    let disk = SmallDisk::new("6m");
    let small = ["--memory", "1MiB", "--object-max", "16KiB", "--disk", disk.path()];
    let small = [&small[..], &["--disk-capacity", "64MiB"]].concat();
    let farm = Farm::start(&[MEMORY, &small, MEMORY]);
    let client = Client::new(farm.config());
    let ids = pages(0, 1_500);
    let mut stored = Vec::new();
    let (mut refused, mut longest) = (0, Duration::ZERO);
    for batch in ids.chunks(BATCH) {
        let began = Instant::now();
        for (id, put) in batch.iter().zip(client.put(batch).await) {
            match put {
                Ok(_) => stored.push(*id),
                Err(error) => {
                    let is_known = matches!(error, StoreError::HolderAway | StoreError::Full);
                    assert!(is_known, "{error}");
                    refused += 1;
                }
            }
        }
        longest = longest.max(began.elapsed());
    }
    let (mut hits, mut gone) = (0, 0);
    for served in client.get(&stored).await {
        match served {
            Ok(()) => hits += 1,
            Err(StoreError::Missing) => gone += 1,
            Err(error) => panic!("{error}"),
        }
    }
    println!("{hits} hits, {gone} evicted, {refused} refused; a put took up to {longest:?}");
    assert!(refused + gone > 100, "the disk was not full");
    assert!(hits > 900, "two nodes of three have room");
    assert!((0..3).all(|node| client.is_up(node)), "a full disk is no reason to be away");
    disk.grow("64m");
    let until = Instant::now() + Duration::from_secs(30);
    let fresh = pages(50_000, 150);
    // A store that has once been refused room stays small, so what is new may displace what is new.
    while !(all_ok(&client.put(&fresh).await) && all_ok(&client.get(&fresh).await)) {
        assert!(Instant::now() < until, "what is new cannot be stored and read");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn whoever_has_another_secret_gets_nothing() {
    let farm = Farm::start(&[MEMORY; 3]);
    let client = Client::new(farm.config());
    let ids = pages(0, 60);
    assert!(all_ok(&client.put(&ids).await));
    let secret = NodeSecret::new(b"not the secret of this farm").unwrap();
    let stranger = Client::new(NodesConfig { secret, ..farm.config() });
    let began = Instant::now();
    for _ in 0..20 {
        let gets = stranger.get(&ids).await;
        assert!(gets.iter().all(|it| it.as_ref().is_err_and(is_a_miss)), "{gets:?}");
        let puts = stranger.put(&pages(100, 20)).await;
        assert!(puts.iter().all(|it| it.as_ref().is_err_and(is_a_miss)), "{puts:?}");
        let _ = stranger.store.remove(&ids, Removal::Forced).await;
    }
    assert!(began.elapsed() < Duration::from_secs(5), "nobody waits: {:?}", began.elapsed());
    assert!(farm.figure(0, "terrace_node_refused_total") > 0.0);
    farm.says(0, "was refused").await;
    assert!(all_ok(&client.get(&ids).await), "those who know it notice nothing");
    assert!(client.get(&pages(100, 20)).await.iter().all(|it| *it == Err(StoreError::Missing)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_node_tells_other_versions_its_own_and_nothing_more() {
    let farm = Farm::start(&[MEMORY]);
    let mut hello = Hello::new("", [7; 16]).unwrap();
    hello.version = VERSION + 1;
    let mut stream = TcpStream::connect(farm.address(0)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(&hello.encode()).unwrap();
    let mut said = Vec::new();
    stream.read_to_end(&mut said).unwrap();
    assert_eq!(Challenge::decode(&said).unwrap().version, VERSION);
    farm.says(0, "version").await;
}

/// Something that listens where a node should be: one of another version, and an impostor who knows how
/// to talk and not the secret.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn whoever_is_no_node_of_ours_is_not_believed() {
    let farm = Farm::start(&[MEMORY; 3]);
    let ids = pages(0, 300);
    let client = Client::new(farm.config());
    assert!(all_ok(&client.put(&ids).await));
    let owners = owners(&farm, &ids).await;
    for version in [VERSION, VERSION + 1] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut config = farm.config();
        config.nodes[1].address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut heard = [0; 256];
                let mut challenge = Challenge::new().unwrap();
                challenge.version = version;
                let _ = stream.write_all(&challenge.encode());
                let _ = stream.read(&mut heard);
                let _ = stream.write_all(&[0x55; 4_096]);
                let _ = stream.read(&mut heard);
            }
        });
        let client = Client::new(config);
        for _ in 0..5 {
            for (served, owner) in client.get(&ids).await.iter().zip(&owners) {
                assert_eq!(served.is_ok(), *owner != 1, "{served:?}");
            }
        }
        assert!(!client.is_up(1));
        assert!(client.put(&part(&ids, &owners, |it| it == 1)).await.iter().all(|it| it.is_err()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_crowd_of_silent_strangers_does_not_disturb_those_who_are_in() {
    let farm = Farm::start(&[MEMORY]);
    let client = Client::new(farm.config());
    let ids = pages(0, 60);
    assert!(all_ok(&client.put(&ids).await));
    let crowd: Vec<_> = (0..300).filter_map(|_| TcpStream::connect(farm.address(0)).ok()).collect();
    assert!(crowd.len() > 200);
    for _ in 0..50 {
        assert!(all_ok(&client.get(&ids).await));
    }
    // Others are let in before the silent ones.
    let other = Client::new(farm.config());
    println!("a new client is in after {:?}", other.hits_come_back(&ids).await);
    assert!(farm.figure(0, "terrace_node_refused_total") > 200.0);
    drop(crowd);
    let until = Instant::now() + Duration::from_secs(20);
    while farm.figure(0, "terrace_node_connections") > 20.0 {
        assert!(Instant::now() < until, "connections are left over");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// More clients than a node takes: those who are in are served, others try again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn too_many_connections_are_refused_and_calls_still_end() {
    let few = [MEMORY, &["--connections-max", "6"]].concat();
    let farm = Farm::start(&[&few]);
    let client = Client::new(farm.config());
    let ids = pages(0, 200);
    assert!(all_ok(&client.put(&ids).await));
    let workers: Vec<_> = (0..12)
        .map(|_| {
            let (client, ids) = (client.beside(), ids.clone());
            tokio::spawn(async move {
                let (mut hits, mut misses) = (0, 0);
                let until = Instant::now() + Duration::from_secs(3);
                while Instant::now() < until {
                    for served in client.get(&ids).await {
                        match served {
                            Ok(()) => hits += 1,
                            Err(error) => {
                                assert!(is_a_miss(&error), "{error}");
                                misses += 1;
                            }
                        }
                    }
                }
                (hits, misses)
            })
        })
        .collect();
    let (mut hits, mut misses) = (0, 0);
    for worker in workers {
        let (more_hits, more_misses) = worker.await.unwrap();
        (hits, misses) = (hits + more_hits, misses + more_misses);
    }
    let refused = farm.figure(0, "terrace_node_refused_total");
    println!("{hits} hits, {misses} misses, {refused} connections refused");
    assert!(hits > 0, "the connections that there are serve some calls");
    assert!(refused > 0.0, "twelve at a time do not fit");
    client.hits_come_back(&ids).await;
    assert!(farm.figure(0, "terrace_node_connections") <= 6.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_client_with_namespaces_has_those_and_no_others() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (ours, theirs) = (PageKey(0xa11ce), PageKey(0xb0b));
    let alice = file("alice", "the secret that alice has");
    let operator = file("operator", "the secret of the operator");
    let settings = format!(
        "memory = \"32MiB\"\nobject_max = \"16KiB\"\n[[clients]]\nname = \"alice\"\n\
         secret_file = \"{alice}\"\nnamespaces = [\"{:032x}\"]\n[[clients]]\nname = \"operator\"\n\
         secret_file = \"{operator}\"\n",
        ours.0
    );
    let settings = file("node.toml", &settings);
    let arguments: &[&str] = &["--config", &settings];
    let farm = Farm::start(&[arguments; 3]);
    let config = |name: &str, secret: &[u8]| NodesConfig {
        name: name.to_owned(),
        secret: NodeSecret::new(secret).unwrap(),
        ..farm.config()
    };
    let alice = Client::new(config("alice", b"the secret that alice has"));
    let operator = Client::new(config("operator", b"the secret of the operator"));
    let of = |namespace| -> Vec<ObjectId> {
        (0..60).map(|key| ObjectId::page(namespace, PageKey(key << 100))).collect()
    };
    let (ours, theirs) = (of(ours), of(theirs));
    assert!(all_ok(&operator.put(&theirs).await));
    assert!(all_ok(&alice.put(&ours).await));
    let both: Vec<ObjectId> =
        ours.iter().zip(&theirs).flat_map(|(ours, theirs)| [*ours, *theirs]).collect();
    for (id, served) in both.iter().zip(alice.get(&both).await) {
        let expected = if ours.contains(id) { Ok(()) } else { Err(StoreError::Forbidden) };
        assert_eq!(served, expected);
    }
    let forbidden = |results: Vec<Option<StoreError>>| {
        assert!(results.iter().all(|it| *it == Some(StoreError::Forbidden)), "{results:?}");
    };
    forbidden(alice.put(&theirs).await.into_iter().map(Result::err).collect());
    forbidden(alice.exists(&theirs).await.into_iter().map(Result::err).collect());
    let removed = alice.store.remove(&theirs, Removal::Forced).await;
    forbidden(removed.into_iter().map(Result::err).collect());
    assert!(all_ok(&operator.get(&both).await), "nothing was touched");
    assert!(farm.figure(0, "terrace_node_forbidden_total") > 0.0);
    // One client's secret is no other's.
    let mallory = Client::new(config("operator", b"the secret that alice has"));
    assert!(mallory.get(&ours).await.iter().all(|it| it.as_ref().is_err_and(is_a_miss)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_node_that_joins_takes_its_share_and_nothing_else_moves() {
    let mut farm = Farm::start(&[MEMORY; 3]);
    let three = Client::new(farm.config());
    let ids = pages(0, 1_200);
    assert!(all_ok(&three.put(&ids).await));
    let before = owners(&farm, &ids).await;
    let former = farm.config().nodes;
    farm.add(MEMORY);
    let early = Client::new(farm.config());
    let unknown = early.exists(&ids).await;
    assert!(
        unknown.iter().all(|it| *it == Err(StoreError::HolderAway)),
        "nobody has changed the list"
    );
    change_list(&farm.config(), &former).await.unwrap();
    let four = Client::new(farm.config());
    let found = four.get(&ids).await;
    let moved: Vec<ObjectId> =
        ids.iter().zip(&found).filter(|(_, it)| it.is_err()).map(|(id, _)| *id).collect();
    let share = moved.len() as f64 / ids.len() as f64;
    println!("{:.1} % moved", 100.0 * share);
    assert!((0.19..0.31).contains(&share), "{share} moved, not a quarter");
    assert!(all_ok(&four.put(&moved).await));
    assert!(all_ok(&four.get(&ids).await));
    // What the old ones had before is all that they have.
    for (node, surveyed) in survey(&farm.config()).await.unwrap().into_iter().enumerate() {
        let expected = match node {
            3 => moved.len(),
            _ => part(&ids, &before, |it| it == node).len(),
        };
        assert_eq!(surveyed.objects, expected as u64, "on node {node}");
    }
}
