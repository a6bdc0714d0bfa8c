//! Servers that share nodes.

use std::time::{Duration, Instant};

use super::farm::Farm;
use crate::process::{PATIENT, Server, ask, terrace, wait_for_backups};

const NODE: &[&str] = &["--memory", "64MiB", "--object-max", "128KiB"];

fn serve(farm: &Farm, arguments: &[&str]) -> Server {
    let mut command = terrace();
    command.args(["serve", "--listen", "127.0.0.1:0", "--l3", &farm.url()]).args(arguments);
    command.arg("--node-secret-file").arg(farm.secret_file());
    Server::spawn(command)
}

#[test]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
fn what_one_server_computes_others_fetch_after_its_death_too() {
    let mut farm = Farm::start(&[NODE; 3]);
    let prompt = "A long text about nothing in particular. ".repeat(40);
    let first = serve(&farm, &[]);
    let (computed, l3) = ask(&first.address, &prompt, "").unwrap();
    assert_eq!(l3, 0, "there was nothing");
    wait_for_backups(&first.address, "terrace_node_objects{");
    let second = serve(&farm, &PATIENT);
    let (fetched, l3) = ask(&second.address, &prompt, "").unwrap();
    assert_eq!(fetched, computed);
    assert!(l3 > 1_500, "only {l3} tokens came from the first server");
    first.kill();
    let third = serve(&farm, &PATIENT);
    let (fetched, l3) = ask(&third.address, &prompt, "").unwrap();
    assert_eq!(fetched, computed);
    assert!(l3 > 1_500, "only {l3} tokens outlived the first server");
    // Nodes that vanish are no trouble for who answers.
    farm.freeze(0);
    farm.kill(1);
    let fourth = serve(&farm, &[]);
    for server in [&third, &fourth] {
        let began = Instant::now();
        let (answer, _) = ask(&server.address, &prompt, "").unwrap();
        assert_eq!(answer, computed);
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    }
    farm.thaw(0);
    farm.start_node(1);
    second.stop();
}
