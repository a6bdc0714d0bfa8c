//! `terrace features` as people run it: a producer and a consumer as processes of their own over one
//! store on disk, killed at random. `TERRACE_KILL_SECONDS=120` for a long run.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const TENSOR: &str = "64KiB";
const MAX_RESIDENT: u64 = 2 << 20;

fn terrace(command: &str, store: &Path, arguments: &[&str]) -> Command {
    let mut terrace = Command::new(env!("CARGO_BIN_EXE_terrace"));
    terrace
        .args(["features", command, "--store", &format!("disk:{}", store.display())])
        .args(["--tensor", TENSOR, "--capacity", "64MiB", "--turn", "50ms", "--json"])
        .args(arguments)
        .env_remove("TERRACE_FEATURES_SECRET_FILE")
        .stdin(Stdio::null());
    terrace
}

fn produce(store: &Path, prefix: &str, samples: u64) -> Command {
    let (samples, resident) = (samples.to_string(), MAX_RESIDENT.to_string());
    let rest = ["--samples", &samples, "--prefix", prefix, "--max-resident", &resident];
    terrace("produce", store, &rest)
}

/// Runs a command to its end and reads what it prints.
fn run(mut command: Command) -> Value {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn gc(store: &Path, max_hold: &str) -> Value {
    run(terrace("gc", store, &["--max-hold", max_hold]))
}

#[test]
fn samples_go_from_a_producer_to_a_consumer() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let producer = produce(&store, "a", 60).stdout(Stdio::piped()).spawn().unwrap();
    let consumed = run(terrace("consume", &store, &["--samples", "60", "--patience", "60s"]));
    let produced = producer.wait_with_output().unwrap();
    assert!(produced.status.success());
    let produced: Value = serde_json::from_slice(&produced.stdout).unwrap();
    for (totals, samples) in [(&produced, 60), (&consumed, 60)] {
        assert_eq!(totals["samples"], samples, "{totals:#}");
        assert_eq!(totals["bytes"], 60 * 2 * (64 << 10));
    }
    assert_eq!((&consumed["gone"], &consumed["wrong"]), (&0.into(), &0.into()));
    let left = gc(&store, "1h");
    assert_eq!((&left["objects"], &left["features"]["live"]), (&0.into(), &0.into()), "{left:#}");
}

#[test]
fn refs_without_the_secret_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (store, secret) = (folder.path().join("store"), folder.path().join("secret"));
    std::fs::write(&secret, "of this run\n").unwrap();
    run(produce(&store, "a", 3));
    let secret = secret.display().to_string();
    let arguments = ["--secret-file", &secret, "--patience", "100ms"];
    let consumed = run(terrace("consume", &store, &arguments));
    assert_eq!((&consumed["forged"], &consumed["samples"]), (&3.into(), &0.into()));
}

#[test]
fn a_store_that_is_none_is_explained() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
    let output = command.args(["features", "gc", "--store", "nowhere"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("disk:FOLDER"), "{errors}");
}

/// Both sides are killed in the middle of whatever they were doing and started again. Nothing
/// half-written is ever read (a consumer that reads a wrong byte fails), and afterwards nothing is left
/// that gc does not find.
#[test]
fn killed_processes_leave_nothing_wrong_and_nothing_behind() {
    let seconds = std::env::var("TERRACE_KILL_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok()).unwrap_or(15);
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let start = |number: u64| {
        let mut command = match number % 2 {
            0 => produce(&store, &format!("life-{number}"), 1_000_000),
            _ => terrace("consume", &store, &["--patience", "1h"]),
        };
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut processes = [start(0), start(1)];
    let (mut lives, mut dice) = (2, 0x9E37_79B9_7F4A_7C15_u64);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut most_bytes = 0;
    while Instant::now() < until {
        dice = dice.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        std::thread::sleep(Duration::from_millis(50 + (dice >> 33) % 400));
        let victim = (dice >> 60) as usize % 2;
        kill(&mut processes[victim]);
        processes[victim] = start((lives / 2) * 2 + victim as u64);
        lives += 2;
        if lives.is_multiple_of(20) {
            // Everybody out for a moment: how much is there?
            processes.iter_mut().for_each(kill);
            let there = gc(&store, "1h");
            most_bytes = most_bytes.max(there["features"]["resident_bytes"].as_u64().unwrap());
            let objects = there["objects"].as_u64().unwrap();
            assert!(objects <= 2 * (MAX_RESIDENT >> 16) + 4, "{there:#}");
            processes = [start(lives), start(lives + 1)];
            lives += 2;
        }
    }
    processes.iter_mut().for_each(kill);
    assert!(lives > seconds, "only {lives} lives in {seconds} s");
    assert!(most_bytes <= MAX_RESIDENT, "{most_bytes} bytes");
    let consumed = run(terrace("consume", &store, &["--patience", "300ms"]));
    assert_eq!((&consumed["wrong"], &consumed["damaged"]), (&0.into(), &0.into()));
    let left = gc(&store, "0s");
    for count in ["objects", "stored_bytes"] {
        assert_eq!(left[count], 0, "{left:#}");
    }
    eprintln!("{lives} lives in {seconds} s, {most_bytes} bytes at most");
}

fn kill(process: &mut Child) {
    if let Some(status) = process.try_wait().unwrap() {
        let mut errors = String::new();
        let mut stderr = process.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut stderr, &mut errors).unwrap();
        panic!("it ended by itself: {status}, {errors}");
    }
    process.kill().unwrap();
    process.wait().unwrap();
}
