//! Publishers and subscribers over real sockets.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::Mutex;
use terrace_routing::{
    Door, Endpoint, FollowStats, Heard, Publisher, PublisherConfig, SnapshotWanted, Source, follow,
};
use tokio::task::JoinHandle;

fn endpoint(address: SocketAddr) -> Endpoint {
    format!("tcp://{address}").parse().unwrap()
}

async fn publisher(batches_max: usize) -> (Publisher, SnapshotWanted) {
    let any: Endpoint = "tcp://127.0.0.1:0".parse().unwrap();
    let config = PublisherConfig {
        door: Door::Open(any.clone()),
        replay: Some(any),
        topic: "kv@pod@model".to_owned(),
        batches_max,
    };
    Publisher::open(config).await.unwrap()
}

/// A subscriber, and the batches that it has received.
struct Listener {
    heard: Arc<Mutex<Vec<String>>>,
    stats: Arc<FollowStats>,
    task: JoinHandle<()>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Listener {
    fn to(publisher: &Publisher, asks_again: bool, topic: &str) -> Self {
        let replay = publisher.replay_address().filter(|_| asks_again).map(endpoint);
        let events = endpoint(publisher.events_address().unwrap());
        let source = Source { events, replay, topic: topic.to_owned() };
        let (heard, stats) = (Arc::<Mutex<Vec<String>>>::default(), Arc::<FollowStats>::default());
        let task = tokio::spawn({
            let (heard, stats) = (heard.clone(), stats.clone());
            async move {
                follow(&source, &stats, |item| {
                    heard.lock().push(match item {
                        Heard::Batch { seq, payload } => {
                            format!("{seq} {}", String::from_utf8_lossy(&payload))
                        }
                        Heard::Forget => "forget".to_owned(),
                    });
                })
                .await;
            }
        });
        Self { heard, stats, task }
    }

    async fn hears(&self, expected: &[&str]) {
        for _ in 0..1000 {
            if *self.heard.lock() == expected {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(*self.heard.lock(), expected);
    }

    async fn is_there(&self, publisher: &Publisher) {
        for _ in 0..1000 {
            if publisher.stats().subscribers > 0 && self.stats.is_connected.load(Relaxed) {
                // The subscription is in flight.
                tokio::time::sleep(Duration::from_millis(300)).await;
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("no publisher connected");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriber_gets_history_and_new_batches() {
    let (publisher, _wanted) = publisher(100).await;
    publisher.publish(b"all", true);
    publisher.publish(b"one", false);
    let listener = Listener::to(&publisher, true, "kv@");
    listener.hears(&["0 all", "1 one"]).await;
    publisher.publish(b"two", false);
    listener.hears(&["0 all", "1 one", "2 two"]).await;
    let deaf = Listener::to(&publisher, false, "other");
    deaf.is_there(&publisher).await;
    publisher.publish(&[b'x'; 70_000], false);
    let long = format!("3 {}", "x".repeat(70_000));
    listener.hears(&["0 all", "1 one", "2 two", &long]).await;
    deaf.hears(&[]).await;
    assert_eq!(listener.stats.gaps.load(Relaxed), 0);
    assert_eq!(publisher.stats().batches, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn request_beyond_the_history_gets_a_snapshot() {
    let (publisher, mut wanted) = publisher(2).await;
    let publisher = Arc::new(publisher);
    publisher.publish(b"all", true);
    ["a", "b", "c"].iter().for_each(|text| publisher.publish(text.as_bytes(), false));
    let keeper = tokio::spawn({
        let publisher = publisher.clone();
        async move {
            let mut made = 0;
            while let Some(_asked) = wanted.next(&publisher).await {
                publisher.keep_whole(b"whole");
                made += 1;
                if made == 1 {
                    break;
                }
            }
        }
    });
    let listener = Listener::to(&publisher, true, "");
    listener.hears(&["3 whole"]).await;
    keeper.await.unwrap();
    publisher.publish(b"d", false);
    listener.hears(&["3 whole", "4 d"]).await;
    // A snapshot made for one subscriber serves all.
    let other = Listener::to(&publisher, true, "");
    other.hears(&["3 whole", "4 d"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gap_without_replay_drops_the_state() {
    let (publisher, _wanted) = publisher(100).await;
    publisher.publish(b"all", true);
    let listener = Listener::to(&publisher, false, "");
    listener.is_there(&publisher).await;
    publisher.publish(b"one", false);
    listener.hears(&["1 one"]).await;
    let address = publisher.events_address().unwrap();
    drop(publisher);
    listener.hears(&["1 one", "forget"]).await;
    // Another process takes its place, and numbers from the beginning.
    let config = PublisherConfig {
        door: Door::Open(endpoint(address)),
        replay: None,
        topic: String::new(),
        batches_max: 10,
    };
    let (publisher, _wanted) = Publisher::open(config).await.unwrap();
    for _ in 0..500 {
        publisher.publish(b"again", false);
        if listener.heard.lock().iter().any(|heard| heard.ends_with("again")) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it did not come back: {:?}", listener.heard.lock());
}

/// A stalled subscriber costs a bounded number of batches, and does not affect others.
#[tokio::test(flavor = "multi_thread")]
async fn slow_subscriber_misses_batches_and_replays_them() {
    let (publisher, _wanted) = publisher(100_000).await;
    let address = publisher.events_address().unwrap();
    // A subscriber that completes the greeting and then reads nothing.
    let mut sleeper = std::net::TcpStream::connect(address).unwrap();
    let mut greeting = [0_u8; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    sleeper.write_all(&greeting).unwrap();
    let ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB";
    sleeper.write_all(ready).unwrap();
    sleeper.write_all(b"\x00\x01\x01").unwrap();
    let mut theirs = [0; 64];
    sleeper.read_exact(&mut theirs).unwrap();
    let listener = Listener::to(&publisher, true, "");
    listener.is_there(&publisher).await;
    let mut expected = Vec::new();
    for number in 0..3000 {
        publisher.publish(&[b'x'; 8000], false);
        expected.push(format!("{number} {}", "x".repeat(8000)));
        if number % 100 == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let expected: Vec<_> = expected.iter().map(String::as_str).collect();
    listener.hears(&expected).await;
    // Missed batches are counted at the next read.
    let mut taken = vec![0; 1 << 20];
    for _ in 0..100 {
        if publisher.stats().missed > 0 {
            return;
        }
        assert!(sleeper.read(&mut taken).unwrap() > 0);
    }
    panic!("no subscriber missed a batch: {:?}", publisher.stats());
}

#[tokio::test(flavor = "multi_thread")]
async fn rejects_foreign_protocols() {
    let (publisher, _wanted) = publisher(10).await;
    let address = publisher.events_address().unwrap();
    let http = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n and so on until it is as long as a greeting is";
    let mut curve = [0_u8; 64];
    (curve[0], curve[9], curve[10]) = (0xff, 0x7f, 3);
    curve[12..17].copy_from_slice(b"CURVE");
    for wrong in [&http[..], &curve] {
        let stream = std::net::TcpStream::connect(address).unwrap();
        (&stream).write_all(wrong).unwrap();
        let mut answer = Vec::new();
        // It sends its greeting, and then ends.
        let _ = (&stream).read_to_end(&mut answer);
        assert!(answer.len() <= 64, "{answer:?}");
    }
    assert_eq!(publisher.stats().subscribers, 0);
}

/// The publisher connects to a waiting subscriber, as llm-d does.
#[tokio::test(flavor = "multi_thread")]
async fn publisher_connects_to_a_waiting_subscriber() {
    let waiting = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let door = Door::Knock(endpoint(waiting.local_addr().unwrap()));
    let config = PublisherConfig { door, replay: None, topic: "t".to_owned(), batches_max: 10 };
    let (publisher, _wanted) = Publisher::open(config).await.unwrap();
    let visited = tokio::task::spawn_blocking(move || {
        let (mut stream, _) = waiting.accept().unwrap();
        let mut greeting = [0; 64];
        stream.read_exact(&mut greeting).unwrap();
        stream.write_all(&greeting).unwrap();
        stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB").unwrap();
        stream.write_all(b"\x00\x01\x01").unwrap();
        let mut heard = Vec::new();
        while !heard.ends_with(b"news") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            heard.push(byte[0]);
        }
        heard
    });
    while !visited.is_finished() {
        publisher.publish(b"news", false);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let heard = visited.await.unwrap();
    assert!(heard.windows(3).any(|frame| frame == b"\x01\x01t"), "{heard:?}");
    assert_eq!(publisher.events_address(), None);
}
