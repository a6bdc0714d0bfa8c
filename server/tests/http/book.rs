//! The model that comes with the program reads a book that it was not trained on. Its answers are right wherever the
//! book's KV comes from, and wrong when a page of it is.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use terrace_engine::Drained;
use terrace_server::{Config, L3Choice, Server, Size, launch};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::client::{complete, post, send};

const ROWS: usize = 29;
/// Names of the kind that the model was trained on, none of which is in its lists.
const FIRST_NAMES: [&str; 7] = ["Belor", "Kimas", "Tovel", "Paren", "Sidol", "Lomak", "Revin"];
const LAST_NAMES: [&str; 6] = ["Doran", "Falis", "Gaven", "Nokim", "Pozar", "Zavel"];
const CROPS: [&str; 5] = ["barley", "lentils", "flax", "mint", "hops"];

struct Row {
    number: usize,
    crop: &'static str,
    keeper: String,
}

/// Rows in an order that no rule of the model's could guess.
fn rows(seed: usize) -> Vec<Row> {
    let row = |index: usize| Row {
        number: (index * 11 + seed) % ROWS + 1,
        crop: CROPS[(index * 3 + seed) % CROPS.len()],
        keeper: format!(
            "{} {}",
            FIRST_NAMES[(index + seed) % FIRST_NAMES.len()],
            LAST_NAMES[(index * 5 + seed) % LAST_NAMES.len()]
        ),
    };
    (0..ROWS).map(row).collect()
}

fn book(rows: &[Row]) -> String {
    let row =
        |Row { number, crop, keeper }: &Row| format!("Row {number}: {crop}, kept by {keeper}.\n");
    rows.iter().map(row).collect()
}

/// A server with the built-in model that stops when it is told to.
struct Answering {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Drained>,
}

impl Answering {
    async fn start(config: &Config) -> Self {
        let launched = launch(config).unwrap();
        let server = Server::bind(config, launched.engine, launched.model).await.unwrap();
        let server = server.with_planting(launched.planting);
        let (stop, told) = oneshot::channel::<()>();
        let address = server.address();
        let running = tokio::spawn(server.run(async {
            let _ = told.await;
        }));
        Self { address, stop, running }
    }

    async fn stop(self) {
        self.stop.send(()).unwrap();
        self.running.await.unwrap();
    }

    /// The answer, and how many tokens of the prompt came from which tier.
    async fn ask(&self, prompt: &str) -> (String, Value) {
        let request = json!({ "prompt": prompt, "max_tokens": 24, "temperature": 0 });
        let answer = complete(self.address, &request).await;
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let text = answer["choices"][0]["text"].as_str().unwrap().to_owned();
        (text, answer["usage"]["prompt_tokens_details"]["cached_by_tier"].clone())
    }

    /// Empties device and host. Pages that are still being copied are forgotten a moment later.
    async fn forget(&self) {
        self.reset("/reset_prefix_cache").await;
    }

    /// Sends a reset until nothing is left to forget.
    async fn reset(&self, path: &str) {
        let mut nothing_left = 0;
        while nothing_left < 3 {
            let told = post(self.address, path, &json!(null)).await.json();
            let is_empty = told["device_pages"] == 0 && told["host_pages"] == 0;
            nothing_left = if is_empty { nothing_left + 1 } else { 0 };
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Asks about a row of a book, whose KV must all come from one tier.
    async fn expect(&self, rows: &[Row], asked: usize, tier: Option<&str>) {
        let Row { number, crop, keeper } = &rows[asked];
        for (question, right) in [("Who keeps", keeper.as_str()), ("What grows in", crop)] {
            let prompt = format!("{}{question} row {number}?\n", book(rows));
            let (answer, from) = self.ask(&prompt).await;
            assert_eq!(answer, right, "row {number}, from {tier:?}");
            let pages = book(rows).len() as u64 / 16 * 16;
            for name in ["device", "host", "l3"] {
                let tokens = from[name].as_u64().unwrap();
                // The second question finds on the device what the first has brought there.
                let all = tier == Some(name) && question == "Who keeps"
                    || name == "device" && question != "Who keeps";
                assert_eq!(tokens >= pages, all, "row {number} from {tier:?}: {from}");
            }
        }
    }
}

fn config(folder: &Path) -> Config {
    Config {
        listen: "127.0.0.1:0".to_owned(),
        threads: Some(1),
        // Room for two books.
        device_memory: Some(Size::mib(22)),
        host_memory: Size::mib(64),
        l3: Some(L3Choice::Disk(folder.to_owned())),
        l3_capacity: Size::mib(256),
        l3_reserve: Some(Size(0)),
        l3_wait: Duration::from_secs(60),
        ..Config::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_right_wherever_the_kv_comes_from() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path());
    let rows_asked = rows(0);
    let server = Answering::start(&config).await;
    server.expect(&rows_asked, 3, None).await;
    server.expect(&rows_asked, 17, Some("device")).await;
    server.reset("/reset_prefix_cache?host=false").await;
    server.expect(&rows_asked, 5, Some("host")).await;
    for other in 1..4 {
        server.expect(&rows(other), other, None).await;
    }
    server.expect(&rows_asked, 11, Some("host")).await;
    server.forget().await;
    server.expect(&rows_asked, 24, Some("l3")).await;
    server.stop().await;
    let restarted = Answering::start(&config).await;
    restarted.expect(&rows_asked, 8, Some("l3")).await;
    restarted.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_page_makes_a_wrong_answer_until_it_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config { plant_wrong_pages: true, ..config(folder.path()) };
    let rows = rows(5);
    let server = Answering::start(&config).await;
    server.expect(&rows, 12, None).await;
    let (text, keeper) = (book(&rows), &rows[12].keeper);
    // One token begins every text.
    let token = 1 + text.find(&format!("kept by {keeper}")).unwrap() + "kept by ".len();
    let planted =
        post(server.address, &format!("/plant_wrong_page?token={token}"), &json!(null)).await;
    assert_eq!(planted.status, 200, "{}", planted.body);
    let prompt = format!("{text}Who keeps row {}?\n", rows[12].number);
    let (answer, from) = server.ask(&prompt).await;
    assert_ne!(answer, *keeper, "the page with the answer is wrong");
    assert!(from["device"].as_u64().unwrap() > 0, "{from}");
    server.forget().await;
    server.expect(&rows, 12, Some("l3")).await;
    server.stop().await;
    // Nothing of it is found by a server that plants no wrong pages, and none are planted there.
    let other = Answering::start(&Config { plant_wrong_pages: false, ..config }).await;
    other.expect(&rows, 12, None).await;
    let refused =
        post(other.address, &format!("/plant_wrong_page?token={token}"), &json!(null)).await;
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("--plant-wrong-pages"), "{}", refused.body);
    let told = send(other.address, "GET", "/plant_wrong_page", "", "").await;
    assert_eq!(told.json(), json!({ "plants_wrong_pages": false }));
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chats_are_answered_too() {
    let folder = tempfile::tempdir().unwrap();
    let server = Answering::start(&config(folder.path())).await;
    let messages = json!([{ "role": "user", "content": "What is 20 + 22?" }]);
    let request = json!({ "messages": messages, "temperature": 0 });
    let answer = post(server.address, "/v1/chat/completions", &request).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "42", "{answer}");
    server.stop().await;
}
