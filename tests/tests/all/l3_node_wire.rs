//! What strangers may send to a node: nothing that they send makes it answer, crash or fall silent.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use terrace_cache::{PageKey, PrefixDigest};
use terrace_kit::Dice;
use terrace_l3::{
    Arena, ExistsOptions, HEADER_BYTES, MemoryConfig, MemoryStore, Mismatch, ObjectId, Pin, Place,
    Presence, PutOptions, Removal, Served, Store, StoreError, Stored,
};
use terrace_l3_nodes::wire::{
    Afar, Answer, Challenge, Gauges, Hello, Item, Joining, LINK_BYTES, Malformed, Offer, Parcel,
    Reply, Request,
};
use terrace_l3_nodes::{
    ClientLimits, Mark, Membership, NodeClient, NodeConfig, NodeSecret, NodeServer, NodesConfig,
    NodesStore, RunningNode, Standing,
};
use terrace_tests::l3::frames::read;
use terrace_tests::l3::nodes::{patient, secret};
use terrace_tests::l3::objects::{self, HARD, page};

const OBJECT_BYTES: usize = 5000;

fn ids(count: u64) -> Vec<ObjectId> {
    (0..count).map(|number| page(number).with_generation(number)).collect()
}

fn requests() -> Vec<Request> {
    let item = |number, length, prefix| Item { id: page(number), length, prefix };
    let items = || vec![item(1, 77, None), item(2, u64::MAX, None)];
    let prefix = PrefixDigest::of_namespace(PageKey(3));
    let offers = || vec![item(1, 77, Some(prefix)), item(2, u64::MAX, None)];
    let lease = ExistsOptions { prefetch_to_memory: true, lease: true };
    vec![
        Request::Exists { options: ExistsOptions::default(), ids: ids(3) },
        Request::Exists { options: lease, ids: Vec::new() },
        Request::Get { promotion_wait: None, wanted: items() },
        Request::Get { promotion_wait: Some(Duration::from_micros(5)), wanted: items() },
        Request::Put { options: PutOptions::default(), offers: offers() },
        Request::Put { options: PutOptions { pin: Some(HARD), durable: true }, offers: offers() },
        Request::Checksums(vec![1, 2, u64::MAX]),
        Request::Pin { pin: Pin::Soft, ids: ids(2) },
        Request::Unpin { pin: HARD, ids: ids(2) },
        Request::Remove { removal: Removal::Forced, ids: ids(1) },
        Request::Suspect(ids(2)),
        Request::Flush,
        Request::Ping,
        Request::Link([9; LINK_BYTES]),
        Request::Lend { promotion_wait: None, wanted: items() },
        Request::Taken,
        Request::Fetch { options: PutOptions::default(), offers: offers() },
        Request::Places(vec![(u64::MAX, Afar { address: 7, key: u32::MAX })]),
        Request::Enter { seat: Mark([1; 16]), joins: None },
        Request::Enter { seat: Mark([1; 16]), joins: joining(false) },
        Request::Enter { seat: Mark([1; 16]), joins: joining(true) },
    ]
}

fn joining(replaces: bool) -> Option<Joining> {
    Some(Joining { store: Mark([2; 16]), addresses: Mark([4; 16]), replaces })
}

fn errors() -> Vec<StoreError> {
    vec![
        StoreError::Missing,
        StoreError::BeingWritten,
        StoreError::Superseded { present: 9 },
        StoreError::TooLarge { bytes: 8, max: 7 },
        StoreError::Length { expected: 6, found: 5 },
        StoreError::Full,
        StoreError::Leased,
        StoreError::Pinned,
        StoreError::NotPinned,
        StoreError::Corrupt(Mismatch::Magic),
        StoreError::Corrupt(Mismatch::Payload),
        StoreError::Corrupt(Mismatch::Prefix),
        StoreError::TimedOut(Duration::from_micros(3)),
        StoreError::Unavailable { retry_after: Duration::from_secs(1) },
        StoreError::Forbidden,
        StoreError::Closed,
    ]
}

fn replies() -> Vec<Reply> {
    let served = Served { place: Place::Disk, waited: true };
    let mut parcels = vec![Parcel::Follows { header: [7; HEADER_BYTES], served }, Parcel::Later];
    parcels.extend(errors().into_iter().map(Parcel::Failed));
    let mut offers = vec![Offer::Wanted, Offer::There, Offer::Later];
    offers.extend(errors().into_iter().map(Offer::Failed));
    let membership =
        Membership { store: Mark([2; 16]), seat: Mark([1; 16]), addresses: Mark([4; 16]) };
    let entered = |is_durable, member| {
        Answer::Entered(Ok(Standing { birth: Mark([3; 16]), is_durable, member }))
    };
    let answers = [
        entered(false, None),
        entered(true, Some(membership)),
        Answer::Entered(Err(StoreError::Pinned)),
        Answer::Welcome { object_bytes_max: 1 << 20 },
        Answer::Presences(vec![
            Ok(Presence::Absent),
            Ok(Presence::Present(Place::Memory)),
            Ok(Presence::Present(Place::Disk)),
            Err(StoreError::Closed),
        ]),
        Answer::Parcels(parcels.clone()),
        Answer::Linked(None),
        Answer::Linked(Some([9; LINK_BYTES])),
        Answer::Lent(parcels, vec![Afar { address: u64::MAX, key: 1 }]),
        Answer::Offers(offers),
        Answer::Stored(vec![Ok(Stored::New), Ok(Stored::AlreadyThere), Err(StoreError::Full)]),
        Answer::Done(vec![Ok(()), Err(StoreError::Missing)]),
    ];
    let gauges = Gauges { stamp: 3, values: std::array::from_fn(|number| number as u64) };
    answers.map(|answer| Reply { gauges, answer }).into()
}

/// All kinds of messages, each after its kind.
fn messages() -> Vec<Vec<u8>> {
    let mut messages = vec![
        Hello::new("alice", [1; 16]).unwrap().encode(),
        Hello::new("", [0; 16]).unwrap().encode(),
        Challenge::new().unwrap().encode(),
    ];
    for request in requests() {
        let mut bytes = vec![request.kind()];
        request.encode(&mut bytes);
        messages.push(bytes);
    }
    for reply in replies() {
        let mut bytes = vec![reply.kind()];
        reply.encode(&mut bytes);
        messages.push(bytes);
    }
    messages
}

#[test]
fn every_message_comes_back_as_it_was() {
    for request in requests() {
        let mut body = Vec::new();
        request.encode(&mut body);
        assert_eq!(Request::decode(request.kind(), &body), Ok(request.clone()));
        body.push(0);
        assert_eq!(Request::decode(request.kind(), &body), Err(Malformed::Long(1)));
    }
    for reply in replies() {
        let mut body = Vec::new();
        reply.encode(&mut body);
        assert_eq!(Reply::decode(reply.kind(), &body), Ok(reply.clone()));
        for length in 0..body.len() {
            assert!(Reply::decode(reply.kind(), &body[..length]).is_err(), "{length}: {reply:?}");
        }
    }
}

/// Other versions are to understand them.
#[test]
fn messages_are_what_they_always_were() {
    let ids = vec![ObjectId { namespace: PageKey(1), key: PageKey(2 << 64), generation: 3 }];
    let request = Request::Remove { removal: Removal::Forced, ids };
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let namespace = "01000000000000000000000000000000";
    let key = "00000000000000000200000000000000";
    assert_eq!(hex, format!("0101000000{namespace}{key}0300000000000000"));
    assert_eq!(request.kind(), 7);
    let (seat, store) = (Mark(*b"0123456789abcdef"), Mark([0xee; 16]));
    let joins = Some(Joining { store, addresses: Mark([4; 16]), replaces: false });
    let request = Request::Enter { seat, joins };
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    assert_eq!(bytes, [&seat.0[..], &[1], &store.0, &[4; 16]].concat());
    assert_eq!(request.kind(), 17);
}

/// Messages with bits flipped, bytes changed, pieces left out, doubled and mixed.
#[test]
fn whatever_bytes_come_reading_them_ends_well() {
    let messages = messages();
    let mut dice = Dice::new(20);
    for round in 0..300_000 {
        let mut bytes = match round % 4 {
            0 => (0..dice.below(300)).map(|_| dice.below(256) as u8).collect(),
            _ => messages[dice.below(messages.len() as u64) as usize].clone(),
        };
        for _ in 0..dice.below(4) {
            if bytes.is_empty() {
                break;
            }
            let at = dice.below(bytes.len() as u64) as usize;
            match dice.below(6) {
                0 => bytes[at] ^= 1 << dice.below(8),
                1 => bytes[at] = dice.pick(&[0, 1, 2, 127, 128, 254, 255]),
                2 => bytes.truncate(at),
                3 => drop(bytes.remove(at)),
                4 => bytes.extend_from_within(at..),
                _ => {
                    let other = &messages[dice.below(messages.len() as u64) as usize];
                    bytes.splice(at.., other.iter().copied().skip(at));
                }
            }
        }
        read(&bytes);
    }
}

fn node(config: NodeConfig) -> RunningNode {
    let store =
        MemoryStore::new(MemoryConfig::new(64 * OBJECT_BYTES as u64, OBJECT_BYTES)).unwrap();
    NodeServer::bind("127.0.0.1:0", Arc::new(store), config).unwrap().start().unwrap()
}

fn client(address: SocketAddr, secret: NodeSecret) -> NodesStore {
    let node = address.to_string().parse().unwrap();
    NodesStore::new(patient(NodesConfig::new(vec![node], secret))).unwrap()
}

/// Sends something and answers everything that comes until the node closes the connection.
fn send(address: SocketAddr, pieces: &[&[u8]]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    for piece in pieces {
        // It may have been closed already.
        let _ = stream.write_all(piece);
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_learn_nothing_but_a_challenge() {
    let node = node(NodeConfig::new(secret()));
    let address = node.address();
    let hello = Hello::new("", [1; 16]).unwrap().encode();
    let challenge = Challenge::new().unwrap().encode().len();
    assert_eq!(send(address, &[b"GET / HTTP/1.1\r\n\r\n"]), b"");
    assert_eq!(send(address, &[&[0; 200]]), b"");
    assert_eq!(send(address, &[&hello]).len(), challenge);
    // A wrong proof is not answered, nor is anything after it.
    let ping = [1, 0, 0, 0, 10];
    assert_eq!(send(address, &[&hello, &[0; 32], &ping, &[0; 16]]).len(), challenge);
    let mut old = hello.clone();
    old[8] = 0;
    assert_eq!(send(address, &[&old, &[0; 32]]).len(), challenge);
    let mut dice = Dice::new(1);
    for _ in 0..50 {
        let mut bytes: Vec<u8> = hello.clone();
        bytes.extend((0..dice.below(400)).map(|_| dice.below(256) as u8));
        let at = dice.below(hello.len() as u64) as usize;
        bytes[at] ^= dice.below(256) as u8;
        assert!(send(address, &[&bytes]).len() <= challenge);
    }
    let stats = node.stats();
    assert_eq!((stats.accepted, stats.requests), (0, 0));
    assert!(stats.refused >= 50, "{stats:?}");
    // And it serves those who know the secret.
    let store = client(address, secret());
    assert_eq!(store.reach().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_with_another_secret_are_refused() {
    let node = node(NodeConfig::new(secret()));
    let wrong = NodeSecret::new(b"another one of sufficient length").unwrap();
    let store = client(node.address(), wrong);
    assert_eq!(store.reach().await, 0);
    let found = store.exists(&[page(1)], ExistsOptions::default()).await.remove(0);
    assert!(matches!(found, Err(StoreError::Unavailable { .. })), "{found:?}");
    assert_eq!(node.stats().accepted, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_use_their_namespaces_and_no_others() {
    let alices = NodeSecret::new(b"what only alice and nodes know").unwrap();
    let mine = page(1).namespace;
    let alice = NodeClient {
        name: "alice".to_owned(),
        secret: alices.clone(),
        limits: Some(ClientLimits::new([mine].into())),
    };
    let mut config = NodeConfig::new(secret());
    config.clients.push(alice);
    let node = node(config);
    let all = client(node.address(), secret());
    let address: Vec<_> = vec![node.address().to_string().parse().unwrap()];
    let name = "alice".to_owned();
    let config = NodesConfig { name, ..NodesConfig::new(address, alices.clone()) };
    let restricted = NodesStore::new(patient(config)).unwrap();
    assert_eq!(client(node.address(), alices).reach().await, 0, "she has to say who she is");

    let arena = Arena::new(2, OBJECT_BYTES).unwrap();
    let _registrations = (all.register(&arena).unwrap(), restricted.register(&arena).unwrap());
    let other = ObjectId { namespace: PageKey(mine.0 + 1), ..page(1) };
    let put = PutOptions::default();
    for id in [page(1), other] {
        assert_eq!(objects::put(&all, &arena, id, OBJECT_BYTES, put).await, Ok(Stored::New));
    }
    objects::get(&restricted, &arena, page(1), OBJECT_BYTES).await.unwrap();
    let forbidden = StoreError::Forbidden;
    let refused = objects::get(&restricted, &arena, other, OBJECT_BYTES).await;
    assert_eq!(refused.unwrap_err(), forbidden);
    let refused = objects::put(&restricted, &arena, other.with_generation(1), 10, put).await;
    assert_eq!(refused.unwrap_err(), forbidden);
    let both = [page(1), other];
    let found = restricted.exists(&both, ExistsOptions::default()).await;
    assert_eq!(found, [Ok(Presence::Present(Place::Memory)), Err(forbidden.clone())]);
    let done = [Ok(()), Err(forbidden)];
    assert_eq!(restricted.pin(&both, HARD).await, done);
    assert_eq!(restricted.unpin(&both, HARD).await, done);
    assert_eq!(restricted.remove(&both, Removal::Forced).await, done);
    objects::get(&all, &arena, other, OBJECT_BYTES).await.unwrap();
    assert!(node.stats().forbidden >= 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_only_connect_do_not_keep_others_out() {
    let config = NodeConfig { strangers_max: 4, ..NodeConfig::new(secret()) };
    // They would stay for ever.
    let node = node(NodeConfig { handshake_timeout_ms: 3_600_000, ..config });
    let mut silent = Vec::new();
    for round in 1..=5 {
        silent.extend((0..40).map(|_| TcpStream::connect(node.address()).unwrap()));
        let store = client(node.address(), secret());
        assert_eq!(store.reach().await, 1, "in round {round}");
    }
    let patience = tokio::time::Instant::now() + Duration::from_secs(60);
    while node.stats().refused < silent.len() as u64 - 4 {
        assert!(tokio::time::Instant::now() < patience, "{:?}", node.stats());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
