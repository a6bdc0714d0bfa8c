//! Two real servers behind a real router, and what `terrace replay` makes of their events.

use std::net::TcpListener;
use std::process::Command;

use serde_json::Value;

use crate::process::{Server, ask, figure, terrace};

fn free() -> String {
    format!("tcp://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

/// A server that tells its KV events, and how a router names it.
fn telling() -> (Server, String) {
    let (events, replay) = (free(), free());
    let mut command = terrace();
    command.args(["serve", "--listen", "127.0.0.1:0", "--l3", "none"]);
    command.args(["--kv-events", &events, "--kv-events-replay", &replay]);
    let server = Server::spawn(command);
    assert!(server.summary.contains(&format!("events  {events}")), "{}", server.summary);
    let place = format!("http://{}+{events}+{replay}", server.address);
    (server, place)
}

fn router(workers: [&str; 2]) -> Server {
    let mut command = terrace();
    command.args(["route", "--listen", "127.0.0.1:0", "--health-interval", "200ms"]);
    command.args(workers.iter().flat_map(|worker| ["--worker", worker]));
    Server::spawn(command)
}

fn json(mut command: Command) -> Value {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn two_servers_behind_one_address() {
    let ((one, first), (other, second)) = (telling(), telling());
    let router = router([&first, &second]);
    assert!(router.summary.contains("answers; events from tcp://"), "{}", router.summary);
    let prompts: Vec<_> = (0..6).map(|text| format!("Text number {text}. ").repeat(40)).collect();
    let answers: Vec<_> =
        prompts.iter().map(|prompt| ask(&router.address, prompt, "").unwrap().0).collect();
    let cached = || figure(&router.address, "terrace_route_cached_tokens_total");
    let all: usize = prompts.iter().map(|prompt| prompt.len() / 16 * 16).sum();
    // Events are on their way for a moment.
    for _ in 0..200 {
        if figure(&router.address, "terrace_route_blocks") >= (all / 16) as f64 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let before = cached();
    for (prompt, answer) in prompts.iter().zip(&answers) {
        assert_eq!(ask(&router.address, prompt, "").unwrap().0, *answer);
    }
    assert_eq!(cached() - before, all as f64, "each went where it was");
    for server in [&one, &other] {
        assert!(figure(&server.address, "terrace_kv_event_subscribers") >= 1.0);
        let hits = figure(&server.address, "terrace_prompt_tokens_total{tier=\"device\"}");
        assert!(hits > 1000.0, "{hits} tokens were found");
    }

    // The same streams, recorded and looked at.
    let folder = tempfile::tempdir().unwrap();
    let recording = folder.path().join("events.jsonl").display().to_string();
    let mut listen = terrace();
    listen.args(["replay", "--json", "--kv-time", "3s", "--kv-record", &recording]);
    for place in [&first, &second] {
        listen.args(["--kv-events", place.split_once('+').unwrap().1]);
    }
    let live = json(listen);
    let blocks = |report: &Value| report["held_blocks"].as_u64().unwrap();
    let known = figure(&router.address, "terrace_route_blocks");
    assert_eq!(blocks(&live) as f64, known, "it hears what the router does: {live}");
    assert_eq!(live["held_elsewhere_tokens"], 0, "nothing was computed twice");
    let mut read = terrace();
    read.args(["replay", "--json", "--kv-events", &recording]);
    assert_eq!(json(read), live);

    // One dies; the other answers all, the same.
    one.kill();
    for (prompt, answer) in prompts.iter().zip(&answers) {
        assert_eq!(ask(&router.address, prompt, "").unwrap().0, *answer);
    }
    router.stop();
    other.stop();
}

#[test]
fn events_of_vllm_are_read_from_a_file() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../routing/tests/data/vllm-0.32.jsonl");
    let output = terrace().args(["replay", "--kv-events", file]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("computed     896 tokens"), "{text}");
    let wrong = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let output = terrace().args(["replay", "--kv-events", wrong]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("line 1 is not a recorded batch"), "{said}");
}

#[test]
fn listening_to_an_address_without_events_is_an_error() {
    let silent = free();
    let listen = ["replay", "--kv-time", "300ms", "--kv-events", &silent];
    let output = terrace().args(listen).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("no KV events came from tcp://"), "{said}");
}

#[test]
fn a_router_says_what_it_lacks() {
    let complaint = |arguments: &[&str]| {
        let output = terrace().arg("route").args(arguments).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(complaint(&[]).contains("--worker http://HOST:PORT"), "{}", complaint(&[]));
    let wrong = ["--worker", "localhost:8000"];
    assert!(complaint(&wrong).contains("is not a worker"), "{}", complaint(&wrong));
}
