//! A router in front of servers: requests go where their prefixes are, as the servers' KV events tell.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use serde_json::{Value, json};
use terrace_routing::{Door, Heard, Publisher, PublisherConfig, Recording};
use terrace_server::{Config, RouteSettings, RouterServer, Secret, WorkerPlace};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::client::{Response, begin, exchange, get, key, post, read_to_end, send};
use crate::world::World;

/// An address that nobody has at the moment.
fn free() -> String {
    format!("tcp://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

/// A server that tells what its cache holds.
struct Telling {
    world: World,
    config: Config,
}

impl Telling {
    async fn new(config: Config, step: Duration) -> Self {
        let config = Config {
            kv_events: Some(free().parse().unwrap()),
            kv_events_replay: Some(free().parse().unwrap()),
            ..config
        };
        Self { world: World::new(config.clone(), step).await, config }
    }

    fn place(&self) -> WorkerPlace {
        let Some(Door::Open(events)) = self.config.kv_events.clone() else { unreachable!() };
        let replay = self.config.kv_events_replay.clone();
        WorkerPlace { url: format!("http://{}", self.world.address), events: Some(events), replay }
    }
}

struct Routed {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    running: JoinHandle<usize>,
}

impl Routed {
    async fn new(settings: RouteSettings) -> Self {
        let settings = RouteSettings {
            listen: "127.0.0.1:0".to_owned(),
            health_interval: Duration::from_millis(100),
            ..settings
        };
        let router = RouterServer::bind(&settings).await.unwrap();
        let (address, (stop, told)) = (router.address(), oneshot::channel());
        let running = tokio::spawn(router.run(async {
            let _ = told.await;
        }));
        Self { address, stop, running }
    }

    async fn ask(&self, who: &str, body: &Value) -> Asked {
        let body = body.to_string();
        let response = send(self.address, "POST", "/v1/completions", &key(who), &body).await;
        Asked::new(response)
    }

    /// Waits until a figure of one worker is as it should be.
    async fn wait_for(&self, name: &str, worker: &str, is_so: impl Fn(f64) -> bool) {
        let line = format!("{name}{{worker=\"{worker}\"}} ");
        for _ in 0..1000 {
            let page = get(self.address, "/metrics").await.body;
            let value = page.lines().find_map(|it| it.strip_prefix(&line)).unwrap();
            if is_so(value.parse().unwrap()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{name} of {worker}:\n{}", get(self.address, "/metrics").await.body);
    }
}

/// Where a request went, and what of it was cached there: as the router believed, and as the server found.
#[derive(Debug)]
struct Asked {
    response: Response,
    worker: String,
    believed: u64,
    found: Option<u64>,
}

impl Asked {
    fn new(response: Response) -> Self {
        let header = |name: &str| {
            let line = response.head.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default().trim_start_matches(": ").to_owned()
        };
        let (worker, believed) = (header("x-terrace-worker"), header("x-terrace-cached-tokens"));
        let body: Value = serde_json::from_str(&response.body).unwrap_or_default();
        let found = body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        Self { worker, believed: believed.parse().unwrap_or(0), found, response }
    }
}

fn prompt(text: &str) -> Value {
    json!({ "prompt": text.repeat(20), "max_tokens": 2 })
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_where_their_prefixes_are() {
    let servers = [
        Telling::new(Config::default(), Duration::ZERO).await,
        Telling::new(Config::default(), Duration::ZERO).await,
    ];
    let places = servers.each_ref().map(Telling::place);
    let routed =
        Routed::new(RouteSettings { workers: places.to_vec(), ..RouteSettings::default() }).await;
    let texts = ["about cats and ", "about dogs, or ", "about all else "];
    let mut homes = Vec::new();
    for text in texts {
        let first = routed.ask("", &prompt(text)).await;
        assert_eq!((first.response.status, first.believed, first.found), (200, 0, Some(0)));
        homes.push(first.worker);
    }
    assert_ne!(homes[0], homes[1], "equals take turns");
    for place in &places {
        routed.wait_for("terrace_route_blocks", &place.url, |blocks| blocks >= 18.0).await;
    }
    for _ in 0..3 {
        for (text, home) in texts.iter().zip(&homes) {
            let again = routed.ask("", &prompt(text)).await;
            assert_eq!((&again.worker, again.believed), (home, 288), "{again:?}");
            assert_eq!(again.found, Some(288), "the server has what it told");
        }
    }
    // Another salt has another cache, which the router knows as well.
    let mut salted = prompt(texts[0]);
    salted["cache_salt"] = json!("s");
    let first = routed.ask("", &salted).await;
    assert_eq!((first.believed, first.found), (0, Some(0)));
    routed.wait_for("terrace_route_blocks", &first.worker, |blocks| blocks >= 36.0).await;
    let again = routed.ask("", &salted).await;
    assert_eq!((&again.worker, again.believed, again.found), (&first.worker, 288, Some(288)));
    // Conversations too, and what has nothing to do with the cache.
    let chat =
        json!({ "messages": [{ "role": "user", "content": "x".repeat(99) }], "max_tokens": 1 });
    let response =
        send(routed.address, "POST", "/v1/chat/completions", "", &chat.to_string()).await;
    assert_eq!(response.status, 200, "{response:?}");
    assert_eq!(get(routed.address, "/v1/models").await.json()["data"][0]["id"], "toy");
    assert_eq!(get(routed.address, "/nothing").await.status, 404);
    let foreign = b"GET /v1/models HTTP/1.1\r\nHost: example.com\r\nConnection: close\r\n\r\n";
    let foreign = Response::parse(&exchange(routed.address, foreign).await).unwrap();
    assert_eq!(foreign.status, 403, "a page of another site may have led a browser here");
    // What is wrong with a request is for the server to say.
    assert_eq!(routed.ask("", &json!({ "prompt": "a", "n": 0 })).await.response.status, 400);
    routed.stop.send(()).unwrap();
    assert_eq!(routed.running.await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_gone_is_avoided_and_comes_back_with_nothing() {
    let mut one = Telling::new(Config::default(), Duration::ZERO).await;
    let other = Telling::new(Config::default(), Duration::ZERO).await;
    let (place, text) = (one.place(), "about cats and ");
    let workers = vec![place.clone(), other.place()];
    let routed = Routed::new(RouteSettings { workers, ..RouteSettings::default() }).await;
    assert_eq!(routed.ask("", &prompt(text)).await.worker, place.url);
    routed.wait_for("terrace_route_blocks", &place.url, |blocks| blocks >= 18.0).await;
    one.world.stop();
    one.world.stopped().await;
    let instead = routed.ask("", &prompt(text)).await;
    assert_eq!((instead.response.status, instead.worker), (200, other.place().url));
    routed.wait_for("terrace_route_worker_up", &place.url, |up| up == 0.0).await;
    routed.wait_for("terrace_route_blocks", &place.url, |blocks| blocks == 0.0).await;
    assert_eq!(get(routed.address, "/health").await.status, 200);
    // Another process at the same addresses: its numbers begin anew.
    let listen = place.url.trim_start_matches("http://").to_owned();
    let world = World::at(Config { listen, ..one.config.clone() }).await;
    routed.wait_for("terrace_route_worker_up", &place.url, |up| up == 1.0).await;
    routed
        .wait_for("terrace_route_events_connected", &place.url, |connected| connected == 1.0)
        .await;
    // Equals take turns, so that it gets one of the next, whoever was sent more before.
    let mut fresh = None;
    for number in 10..14 {
        let asked = routed.ask("", &prompt(&format!("{number} of something else "))).await;
        fresh = fresh.or((asked.worker == place.url).then_some(asked.believed));
    }
    assert_eq!(fresh, Some(0), "nothing of it is known yet");
    routed.wait_for("terrace_route_blocks", &place.url, |blocks| blocks >= 22.0).await;
    drop((world, other));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_worker_it_says_so() {
    let workers = vec!["http://127.0.0.1:9".parse().unwrap()];
    let routed = Routed::new(RouteSettings { workers, ..RouteSettings::default() }).await;
    assert_eq!(get(routed.address, "/health").await.status, 503);
    let asked = routed.ask("", &prompt("a")).await;
    assert_eq!(asked.response.status, 503);
    assert!(asked.response.body.contains("no worker is available"), "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_passed_on_as_they_come_and_finish_when_it_stops() {
    let server = Telling::new(Config::default(), Duration::from_millis(20)).await;
    let workers = vec![server.place()];
    let routed = Routed::new(RouteSettings { workers, ..RouteSettings::default() }).await;
    let body = json!({ "prompt": "a", "max_tokens": 30, "stream": true });
    let mut stream = begin(routed.address, &body).await;
    server.world.wait_for("the beginning", |figures| figures.scheduler.running == 1).await;
    routed.stop.send(()).unwrap();
    let rest = String::from_utf8(read_to_end(&mut stream).await).unwrap();
    assert!(rest.contains("[DONE]"), "{rest}");
    assert_eq!(routed.running.await.unwrap(), 0, "nothing was cut short");
    // A client that goes away calls its request off, through the router.
    let workers = vec![server.place()];
    let routed = Routed::new(RouteSettings { workers, ..RouteSettings::default() }).await;
    let body = json!({ "prompt": "a", "max_tokens": 10_000, "stream": true });
    drop(begin(routed.address, &body).await);
    server.world.wait_for("the end", |figures| figures.scheduler.aborted == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_knows_the_tenants_knows_whose_prefixes_are_whose() {
    let keys = vec!["alice=alices-key".parse().unwrap(), "bob=bobs-key".parse().unwrap()];
    let operator_key = Some(Secret::from("operators-key"));
    let config = Config { keys: keys.clone(), ..Config::default() };
    let server = Telling::new(config, Duration::ZERO).await;
    let (workers, operator) = (vec![server.place()], operator_key.clone());
    let settings =
        RouteSettings { workers, keys, operator_key: operator, ..RouteSettings::default() };
    let routed = Routed::new(settings).await;
    assert_eq!(routed.ask("nobodys-key", &prompt("a")).await.response.status, 401);
    assert_eq!(get(routed.address, "/metrics").await.status, 401);
    let text = prompt("about cats and ");
    assert_eq!(routed.ask("alices-key", &text).await.believed, 0);
    let mut again = routed.ask("alices-key", &text).await;
    for _ in 0..200 {
        if again.believed > 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        again = routed.ask("alices-key", &text).await;
    }
    assert_eq!((again.believed, again.found), (288, Some(288)));
    let bobs = routed.ask("bobs-key", &text).await;
    assert_eq!((bobs.believed, bobs.found), (0, Some(0)));
}

/// More was told before than is kept for those who come late: they hear all that is held.
#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_comes_late_knows_everything() {
    let config = Config { kv_events_buffer: 2, ..Config::default() };
    let server = Telling::new(config, Duration::ZERO).await;
    let texts: Vec<_> = (10..30).map(|text| format!("of number {text}, ")).collect();
    for text in &texts {
        let asked = post(server.world.address, "/v1/completions", &prompt(text)).await;
        assert_eq!(asked.status, 200);
    }
    let (workers, url) = (vec![server.place()], server.place().url);
    let routed = Routed::new(RouteSettings { workers, ..RouteSettings::default() }).await;
    routed.wait_for("terrace_route_blocks", &url, |blocks| blocks >= 20.0 * 17.0).await;
    for text in &texts {
        let asked = routed.ask("", &prompt(text)).await;
        assert_eq!(Some(asked.believed), asked.found, "{asked:?}");
        assert!(asked.believed >= 17 * 16);
    }
    routed.wait_for("terrace_route_unplaced_blocks_total", &url, |blocks| blocks == 0.0).await;
}

/// The events of a real vLLM, as they were captured: its last prompt was tokens 10 to 74.
#[tokio::test(flavor = "multi_thread")]
async fn the_events_of_other_engines_count_as_well() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../routing/tests/data/vllm-0.32.jsonl");
    let any = "tcp://127.0.0.1:0";
    let (publisher, _wanted) = Publisher::open(PublisherConfig {
        door: any.parse().unwrap(),
        replay: Some(any.parse().unwrap()),
        topic: "kv@pod@tiny".to_owned(),
        batches_max: 100,
    })
    .await
    .unwrap();
    for line in Recording::new(std::io::BufReader::new(std::fs::File::open(file).unwrap())) {
        let Heard::Batch { payload, .. } = line.unwrap().1 else { unreachable!() };
        publisher.publish(&payload, false);
    }
    let (idle, vllm) = (World::quick().await, World::quick().await);
    let url = |world: &World| format!("http://{}", world.address);
    let endpoint =
        |address: Option<SocketAddr>| format!("tcp://{}", address.unwrap()).parse().unwrap();
    let workers = vec![
        url(&idle).parse().unwrap(),
        WorkerPlace {
            url: url(&vllm),
            events: Some(endpoint(publisher.events_address())),
            replay: Some(endpoint(publisher.replay_address())),
        },
    ];
    let routed = Routed::new(RouteSettings { workers, ..RouteSettings::default() }).await;
    routed.wait_for("terrace_route_blocks", &url(&vllm), |blocks| blocks == 3.0).await;
    let tokens: Vec<u32> = (10..100).collect();
    for _ in 0..3 {
        let asked = routed.ask("", &json!({ "prompt": tokens, "max_tokens": 1 })).await;
        assert_eq!((asked.worker, asked.believed), (url(&vllm), 64));
    }
    let other: Vec<u32> = (11..100).collect();
    let asked = routed.ask("", &json!({ "prompt": other, "max_tokens": 1 })).await;
    assert_eq!((asked.worker, asked.believed), (url(&idle), 0), "it was sent the fewest");
}
