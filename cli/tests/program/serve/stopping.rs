//! How a server and a node are told to stop.

use std::process::Command;

use crate::process::{PATIENT, Server, ask, request, terrace};

/// The program as a terminal starts it, whoever runs this test, and with whatever signals ignored.
fn in_a_terminal() -> Command {
    let mut command = Command::new("env");
    command
        .args(["--default-signal=HUP", "NO_COLOR=1", "TERRACE_RANDOM_MODEL=true"])
        .arg(terrace().get_program());
    command
}

#[test]
fn a_terminal_that_closes_stops_a_server_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = "A text that is long enough for several pages. ".repeat(8);
    let mut command = in_a_terminal();
    command.args(["serve", "--listen", "127.0.0.1:0", "--l3-reserve", "0", "--l3"]);
    command.arg(format!("disk:{}", folder.path().display()));
    let server = Server::spawn(command);
    let (computed, _) = ask(&server.address, &prompt, "").unwrap();
    // The shell and the system may each send one.
    server.signal("HUP");
    server.signal("HUP");
    server.wait();
    let server = Server::start(folder.path(), &PATIENT);
    let (fetched, l3) = ask(&server.address, &prompt, "").unwrap();
    assert_eq!(fetched, computed);
    assert!(l3 > 300, "only {l3} tokens were kept");
}

#[test]
fn a_server_that_ignores_the_terminal_outlives_it() {
    let mut command = Command::new("nohup");
    command.arg(terrace().get_program());
    command.args(["serve", "--listen", "127.0.0.1:0", "--l3", "none"]);
    let server = Server::spawn(command);
    server.signal("HUP");
    // What is told by a signal is told before what is sent later.
    assert_eq!(request(&server.address, "GET", "/health", "").unwrap().0, 200);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(request(&server.address, "GET", "/health", "").unwrap().0, 200);
    assert!(!server.said().contains("stopping"), "{}", server.said());
    server.stop();
}

#[test]
fn a_terminal_that_closes_stops_a_node_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "a secret that is long enough").unwrap();
    let mut command = in_a_terminal();
    command.args(["node", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]);
    command.args(["--memory", "16MiB", "--secret-file"]).arg(&secret);
    let node = Server::spawn(command);
    // It says this last, and listens to signals before.
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !node.said().contains("Ctrl-C") {
        assert!(std::time::Instant::now() < until, "{}", node.said());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    node.signal("HUP");
    node.wait();
}
