//! `terrace features` as people run it: producers and consumers as processes of their own over one store,
//! on disk, on nodes or in a real Mooncake cluster.

mod ground;
mod soak;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::cluster::{Cluster, Options};

use self::ground::{Ground, TENSOR_BYTES, run};

fn samples_are_passed_on(ground: &Ground) {
    let mut producer = ground.produce(&["--samples", "60"]);
    let producer = producer.stdout(Stdio::piped()).spawn().unwrap();
    let consumed = run(ground.terrace("consume", &["--samples", "60", "--patience", "60s"]));
    let produced = producer.wait_with_output().unwrap();
    assert!(produced.status.success());
    let produced: Value = serde_json::from_slice(&produced.stdout).unwrap();
    for (totals, samples) in [(&produced, 60), (&consumed, 60)] {
        assert_eq!(totals["samples"], samples, "{totals:#}");
        assert_eq!(totals["bytes"], 60 * 2 * TENSOR_BYTES);
    }
    assert_eq!((&consumed["gone"], &consumed["wrong"]), (&0.into(), &0.into()));
    let left = ground.gc(0, "1h");
    assert_eq!((&left["objects"], &left["features"]["live"]), (&0.into(), &0.into()), "{left:#}");
    assert_eq!(ground.used(), (0, 0));
}

#[test]
fn samples_go_from_a_producer_to_a_consumer() {
    samples_are_passed_on(&Ground::disk());
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn samples_go_through_a_cluster() {
    samples_are_passed_on(&Ground::mooncake());
}

#[test]
fn samples_go_through_nodes() {
    samples_are_passed_on(&Ground::nodes(2));
}

#[test]
fn samples_of_a_producer_that_has_ended_are_on_two_nodes_each() {
    let ground = Ground::nodes(2);
    let copies = ["--node-copies", "2"];
    run(ground.produce(&[&["--samples", "4"], &copies[..]].concat()));
    // Two tensors and two notes a sample, and three notes of who has the producer's number.
    assert_eq!(ground.used().0, (4 * 4 + 3) * 2);
    let consumed =
        run(ground.terrace("consume", &[&["--patience", "500ms"], &copies[..]].concat()));
    assert_eq!((&consumed["samples"], &consumed["gone"]), (&4.into(), &0.into()), "{consumed:#}");
    let gc = ["--owner", "0", "--max-hold", "1h"];
    run(ground.terrace("gc", &[&gc[..], &copies[..]].concat()));
    assert_eq!(ground.used().0, 0);
}

/// The later one has the number, and the samples of the earlier one, which ends and says why. All that either has given
/// out can be read.
fn two_producers_with_one_number(ground: &Ground) {
    for round in 0..3 {
        let produce = |name: &str, samples: &str| {
            let prefix = format!("{name}-{round}");
            let mut produce = ground.produce(&["--samples", samples, "--prefix", &prefix]);
            produce.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let first = produce("first", "1000000");
        let refs = ground.folder().join("refs");
        let until = Instant::now() + Duration::from_secs(60);
        while std::fs::read_dir(&refs).map_or(0, Iterator::count) < 3 {
            assert!(Instant::now() < until, "nothing is put");
            std::thread::sleep(Duration::from_millis(20));
        }
        let consume = ["--patience", "10s"];
        let consumer = ground.terrace("consume", &consume).stdout(Stdio::piped()).spawn().unwrap();
        // It is anywhere in its work.
        std::thread::sleep(Duration::from_millis(137 * round));
        let second = produce("second", "100");
        let first = first.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&first.stderr);
        assert!(!first.status.success() && errors.contains("no longer producer 0"), "{errors}");
        let second = second.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&second.stderr);
        assert!(second.status.success(), "{errors}");
        let consumed = consumer.wait_with_output().unwrap();
        let consumed: Value = serde_json::from_slice(&consumed.stdout).unwrap();
        for lost in ["gone", "wrong", "damaged"] {
            assert_eq!(consumed[lost], 0, "{consumed:#}");
        }
        assert!(consumed["samples"].as_u64().unwrap() > 100, "both have put some: {consumed:#}");
        ground.gc(0, "1h");
        assert_eq!(ground.used().0, 0);
    }
}

#[test]
fn two_producers_with_one_number_lose_nothing_on_nodes() {
    two_producers_with_one_number(&Ground::nodes(2));
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn two_producers_with_one_number_lose_nothing_in_a_cluster() {
    two_producers_with_one_number(&Ground::mooncake());
}

/// Where its samples are in its own memory, it stays until they are consumed.
#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn a_producer_that_is_a_cluster_by_itself_stays_until_all_is_consumed() {
    let cluster = Cluster::start(Options { nodes: 0, ..Options::default() });
    let ground = Ground::on(cluster);
    let config = ground.folder().join("terrace.toml");
    std::fs::write(&config, "mooncake_segment = \"64MiB\"\nmooncake_prefer = \"own\"\n").unwrap();
    let config = config.display().to_string();
    let mut producer = ground.produce(&["--samples", "10", "--config", &config]);
    let mut producer = producer.stdout(Stdio::piped()).spawn().unwrap();
    let refs = ground.folder().join("refs");
    let until = Instant::now() + Duration::from_secs(60);
    while std::fs::read_dir(&refs).map_or(0, Iterator::count) < 10 {
        assert!(Instant::now() < until, "nothing is put");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(1));
    assert!(producer.try_wait().unwrap().is_none(), "it takes its samples along");
    let consumed = run(ground.terrace("consume", &["--samples", "10", "--patience", "60s"]));
    assert_eq!((&consumed["samples"], &consumed["gone"]), (&10.into(), &0.into()), "{consumed:#}");
    let produced = producer.wait_with_output().unwrap();
    assert!(produced.status.success());
}

/// A producer that is done leaves its samples for whoever comes.
#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn samples_in_a_cluster_outlive_their_producer() {
    let ground = Ground::mooncake();
    run(ground.produce(&["--samples", "10"]));
    let consumed = run(ground.terrace("consume", &["--patience", "500ms"]));
    assert_eq!((&consumed["samples"], &consumed["gone"]), (&10.into(), &0.into()), "{consumed:#}");
    ground.gc(0, "1h");
    assert_eq!(ground.used(), (0, 0));
}

#[test]
fn refs_without_the_secret_are_refused() {
    let ground = Ground::disk();
    let secret = ground.folder().join("secret");
    std::fs::write(&secret, "of this run\n").unwrap();
    run(ground.produce(&["--samples", "3"]));
    let secret = secret.display().to_string();
    let consumed =
        run(ground.terrace("consume", &["--secret-file", &secret, "--patience", "100ms"]));
    assert_eq!((&consumed["forged"], &consumed["samples"]), (&3.into(), &0.into()));
}

/// What `terrace features` says to arguments that make no sense.
fn complaint(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
    command.arg("features").args(arguments).env_remove("TERRACE_MOONCAKE_LIBRARY");
    let output = command.output().unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_store_that_is_none_is_explained() {
    let errors = complaint(&["gc", "--store", "nowhere"]);
    assert!(errors.contains("disk:FOLDER, mooncake://HOST:PORT, nodes://"), "{errors}");
}

#[test]
fn what_a_cluster_needs_is_explained() {
    let place = ["--store", "mooncake://127.0.0.1:1"];
    let errors = complaint(&[&["consume"], &place[..]].concat());
    assert!(errors.contains("--refs FOLDER"), "{errors}");
    let errors = complaint(&[&["gc"], &place[..]].concat());
    assert!(errors.contains("--mooncake-library"), "{errors}");
    let own = ["--mooncake-prefer", "own"];
    let errors = complaint(&[&["gc"], &place[..], &own[..]].concat());
    assert!(errors.contains("--mooncake-segment"), "{errors}");
    let errors = complaint(&["gc", "--store", "nodes://127.0.0.1:1"]);
    assert!(errors.contains("--node-secret-file"), "{errors}");
    let missing = ["--mooncake-library", "no/such.so"];
    let errors = complaint(&[&["gc"], &place[..], &missing[..]].concat());
    assert!(errors.contains("no/such.so"), "{errors}");
}
