//! What a server records can be replayed, and what its scheduler did can be done again.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::process::{Server, ask, request, terrace};

fn run(arguments: &[&str], file: &Path) -> Output {
    terrace().args(arguments).arg(file).output().unwrap()
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// A server that has answered some prompts, several of them at a time, and records.
fn recording_server(folder: &Path) -> Server {
    let (traffic, decisions) = (folder.join("traffic.jsonl"), folder.join("decisions.jsonl"));
    let server = Server::start(
        &folder.join("store"),
        &[
            "--device-memory=24MiB",
            "--host-memory=16MiB",
            &format!("--record={}", traffic.display()),
            &format!("--decision-log={}", decisions.display()),
        ],
    );
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let address = &server.address;
            scope.spawn(move || {
                for turn in 1..6 {
                    let prompt =
                        format!("Conversation {thread}. ") + &"And then? ".repeat(9 * turn);
                    ask(address, &prompt, "").unwrap();
                    if thread == 0 && turn == 3 {
                        let path = "/reset_prefix_cache?host=false";
                        assert_eq!(request(address, "POST", path, "").unwrap().0, 200);
                    }
                }
            });
        }
    });
    server
}

#[test]
fn recorded_traffic_is_replayed_and_decisions_are_the_same_again() {
    let folder = tempfile::tempdir().unwrap();
    recording_server(folder.path()).stop();
    let traffic = folder.path().join("traffic.jsonl");
    let text = fs::read_to_string(&traffic).unwrap();
    assert_eq!(text.lines().count(), 20);
    assert!(!text.contains("Conversation"), "no text is recorded");
    let replayed = run(&["replay", "--json"], &traffic);
    let report: Value =
        serde_json::from_slice(&replayed.stdout).unwrap_or_else(|_| panic!("{}", told(&replayed)));
    assert_eq!(report["requests"], 20);
    let reuse = report["reuse"]["ceiling"].as_f64().unwrap();
    assert!(reuse > 0.3, "each turn repeats the one before: {reuse}");

    let log = folder.path().join("decisions.jsonl");
    assert!(
        fs::read_to_string(&log).unwrap().contains("\"device_cleared\""),
        "the reset is a decision"
    );
    let checked = run(&["decisions", "--json"], &log);
    assert!(checked.status.success(), "{}", told(&checked));
    let checked: Value = serde_json::from_slice(&checked.stdout).unwrap();
    assert!(checked["steps"].as_u64().unwrap() > 20, "{checked}");
    assert_eq!(checked["difference"], Value::Null);

    // As if another version had planned it.
    let text = fs::read_to_string(&log).unwrap();
    let (place, line) =
        text.lines().enumerate().find(|(_, line)| line.contains("\"slot\":1")).unwrap();
    let other = text.replacen(line, &line.replace("\"slot\":1", "\"slot\":7"), 1);
    fs::write(&log, other).unwrap();
    let differs = run(&["decisions"], &log);
    assert!(!differs.status.success());
    assert!(told(&differs).contains(&format!("line {}", place + 1)), "{}", told(&differs));
    assert!(told(&differs).contains("slot: was 7, is 1"), "{}", told(&differs));
}

#[test]
fn the_log_of_a_killed_server_is_good_up_to_its_last_line() {
    let folder = tempfile::tempdir().unwrap();
    let server = recording_server(folder.path());
    // What was noted is on its way to the file for a fraction of a second.
    std::thread::sleep(std::time::Duration::from_secs(1));
    server.kill();
    let log = folder.path().join("decisions.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    fs::write(&log, &text[..text.trim_end().len() - 5]).unwrap();
    let checked = run(&["decisions", "--steps"], &log);
    assert!(checked.status.success(), "{}", told(&checked));
    assert!(told(&checked).contains("are the same"), "{}", told(&checked));
    assert!(told(&checked).contains("the last line is incomplete"), "{}", told(&checked));
    assert!(told(&checked).contains(" prefills 0.."), "{}", told(&checked));
}

#[test]
fn what_is_no_decision_log_is_not_called_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    for (text, problem) in [
        ("", "must begin with the scheduler's configuration"),
        ("{\"at\":0,\"planned\":{}}\n", "must begin with the scheduler's configuration"),
        ("{\"at\":0,\"began\":{}}\n{\"at\":0,\"began\":{}}\n", "line 2: a second scheduler starts"),
        ("{\"timestamp\":0}\n", "is this a decision log?"),
    ] {
        fs::write(&log, text).unwrap();
        let refused = run(&["decisions"], &log);
        assert!(
            !refused.status.success() && told(&refused).contains(problem),
            "{}",
            told(&refused)
        );
    }
}

#[test]
fn a_server_that_is_started_again_records_beside_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let record = format!("--record={}", folder.path().join("traffic.jsonl").display());
    let log = format!("--decision-log={}", folder.path().join("decisions.jsonl").display());
    for files in [["traffic.jsonl", "decisions.jsonl"], ["traffic.2.jsonl", "decisions.2.jsonl"]] {
        let mut command = terrace();
        command.args(["serve", "--listen=127.0.0.1:0", "--l3=none", &record, &log]);
        let server = Server::spawn(command);
        for file in files {
            let path = folder.path().join(file).display().to_string();
            assert!(server.summary.contains(&path), "{path}: {}", server.summary);
        }
        ask(&server.address, "Hello", "").unwrap();
        server.stop();
    }
    for file in ["traffic.jsonl", "traffic.2.jsonl"] {
        let text = fs::read_to_string(folder.path().join(file)).unwrap();
        assert_eq!(text.lines().count(), 1, "{file}");
    }
}
