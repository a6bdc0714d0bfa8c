//! Servers that share a real Mooncake cluster, in health and in trouble. `scripts/test-mooncake`
//! provides what these tests need and runs them.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::{CLIENTS, complaint, server_without_cache};
use crate::cluster::{Cluster, Options, free_port, library};
use crate::process::{Answer, Server, ask, figure, terrace, wait_for_backups};

/// Memory for a third of the prompts, so that the rest must come from L3 or be computed.
const TINY: [&str; 4] = ["--device-memory", "8MiB", "--host-memory", "6MiB"];

/// Prompts that share beginnings, and what a server without any cache answers.
struct Questions {
    prompts: Vec<String>,
    expected: Vec<Answer>,
    /// How long it took to answer one, at the most.
    computing: Duration,
}

fn questions() -> &'static Questions {
    static QUESTIONS: OnceLock<Questions> = OnceLock::new();
    QUESTIONS.get_or_init(|| {
        // A prime number of them: `load` steps through them by sevens.
        let prompts: Vec<String> = super::prompts().into_iter().step_by(3).take(13).collect();
        let server = server_without_cache();
        let (mut expected, mut computing) = (Vec::new(), Duration::ZERO);
        for (salt, prompt) in prompts.iter().enumerate() {
            let began = Instant::now();
            expected.push(ask(&server.address, prompt, &salt.to_string()).unwrap().0);
            computing = computing.max(began.elapsed());
        }
        Questions { prompts, expected, computing }
    })
}

/// Asks from several threads until so many answers are there; how many tokens came from L3. Whatever
/// the cluster does, no request takes longer than computing it and the deadlines of L3 together.
fn load(server: &Server, enough: usize) -> u64 {
    /// Of a probe and a read, as the server has them by default.
    const DEADLINES: Duration = Duration::from_millis(50 + 1_000);
    /// For a machine that has other things to do.
    const MARGIN: Duration = Duration::from_secs(2);
    let Questions { prompts, expected, computing } = questions();
    let (from_l3, slowest) = super::load(server, prompts, expected, enough);
    // The clients compete, and so does another test.
    let bound = DEADLINES + 2 * CLIENTS * *computing + MARGIN;
    println!("the slowest request took {slowest:?} of {bound:?}");
    assert!(
        slowest < bound,
        "a request took {slowest:?} and may take {bound:?}: {}",
        server.said()
    );
    from_l3
}

/// How many questions there are.
fn all_of_them() -> usize {
    questions().prompts.len()
}

/// A server whose L3 is in the cluster.
fn serve(address: &str, arguments: &[&str]) -> Server {
    let mut command = terrace();
    let l3 = format!("mooncake://{address}");
    command.args(["serve", "--listen", "127.0.0.1:0", "--l3", &l3]).args(arguments);
    command.env("TERRACE_MOONCAKE_LIBRARY", library());
    Server::spawn(command)
}

/// Asks everything once; how many tokens came from L3.
fn ask_all(server: &Server) -> u64 {
    let Questions { prompts, expected, .. } = questions();
    let mut from_l3 = 0;
    for (prompt, expected) in prompts.iter().zip(expected) {
        let (answer, l3) = ask(&server.address, prompt, "").expect("no request fails");
        assert_eq!(&answer, expected, "the same answer as without any cache");
        from_l3 += l3;
    }
    from_l3
}

/// Asks everything over and over until something comes from L3 again.
fn hits_come_back(server: &Server) {
    let until = Instant::now() + Duration::from_secs(60);
    while load(server, all_of_them()) == 0 {
        assert!(Instant::now() < until, "nothing comes from L3 any more: {}", server.said());
    }
}

/// Waits until the server has told something.
fn is_told(server: &Server, what: &str) {
    let until = Instant::now() + Duration::from_secs(30);
    while !server.said().contains(what) {
        assert!(Instant::now() < until, "it does not say {what:?}: {}", server.said());
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_shares_what_one_server_computed_with_all_others() {
    let cluster = Cluster::start(Options::default());
    let first = serve(&cluster.address(), &[]);
    assert!(first.summary.contains("the Mooncake cluster at"), "{}", first.summary);
    assert_eq!(ask_all(&first), 0, "there was nothing");
    wait_for_backups(&first.address, "terrace_mooncake_put_total{outcome=\"done\"}");
    let second = serve(&cluster.address(), &[]);
    let from_l3 = ask_all(&second);
    assert!(from_l3 > 500, "only {from_l3} tokens came from the first server");
    first.kill();
    second.kill();
    let third = serve(&cluster.address(), &[]);
    let from_l3_again = ask_all(&third);
    assert!(from_l3_again > 500, "only {from_l3_again} tokens were left by the dead");
    assert_eq!(figure(&third.address, "terrace_l3_corrupt_total"), 0.0);
    assert_eq!(figure(&third.address, "terrace_mooncake_connected"), 1.0);
    third.stop();
}

/// Servers that are the cluster themselves, each with what it has computed in its own memory.
#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_have_its_memory_of_servers_alone() {
    let cluster = Cluster::start(Options { nodes: 0, ..Options::default() });
    let segment = ["--mooncake-segment", "64MiB", "--mooncake-prefer", "own"];
    let first = serve(&cluster.address(), &segment);
    assert_eq!(ask_all(&first), 0, "there was nothing");
    wait_for_backups(&first.address, "terrace_mooncake_put_total{outcome=\"done\"}");
    let second = serve(&cluster.address(), &segment);
    let from_l3 = ask_all(&second);
    assert!(from_l3 > 500, "only {from_l3} tokens came from the first server");
    assert_eq!(cluster.ask("/get_all_segments").split_whitespace().count(), 2);
    first.stop();
    second.stop();
    assert_eq!(cluster.ask("/get_all_segments").split_whitespace().count(), 0);
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_lose_a_storage_node() {
    let mut cluster = Cluster::start(Options::default());
    let server = serve(&cluster.address(), &TINY);
    load(&server, all_of_them());
    hits_come_back(&server);
    cluster.kill_node(0);
    load(&server, 2 * all_of_them());
    cluster.start_node(0);
    hits_come_back(&server);
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_lose_its_master_and_all_that_it_knew() {
    let mut cluster = Cluster::start(Options::default());
    let server = serve(&cluster.address(), &TINY);
    hits_come_back(&server);
    cluster.kill_master();
    let mut asked = 0;
    let began = Instant::now();
    let until = began + Duration::from_secs(60);
    while !server.said().contains("L3 is failing") {
        load(&server, all_of_them());
        asked += all_of_them();
        assert!(Instant::now() < until, "nothing was noticed in {asked} requests");
    }
    println!("it was noticed after {asked} requests and {:?}", began.elapsed());
    // Its calls hang for seconds, and nobody waits for them.
    let began = Instant::now();
    load(&server, all_of_them());
    let dead = began.elapsed();
    assert!(dead < Duration::from_secs(30), "{} requests took {dead:?}", all_of_them());
    cluster.start_master();
    hits_come_back(&server);
    is_told(&server, "INFO terrace_l3::guard: L3 has recovered");
    let of = |call: &str| format!("terrace_mooncake_{call}_total{{outcome=\"master-gone\"}}");
    let gone: f64 =
        ["put", "get", "exists"].iter().map(|call| figure(&server.address, &of(call))).sum();
    assert!(gone + figure(&server.address, "terrace_l3_timed_out_total") > 0.0, "it is counted");
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_be_cut_off_and_joined_again() {
    let cluster = Cluster::start_apart(Options::default());
    let server = serve(&cluster.address(), &TINY);
    hits_come_back(&server);
    cluster.cut();
    load(&server, 2 * all_of_them());
    cluster.join();
    hits_come_back(&server);
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_be_full_of_leased_objects() {
    let options = Options { nodes: 1, node_mib: 16, lease_ms: 60_000, ..Options::default() };
    let cluster = Cluster::start(options);
    let server = serve(&cluster.address(), &TINY);
    for _ in 0..3 {
        load(&server, all_of_them());
    }
    assert!(figure(&server.address, "terrace_mooncake_put_total{outcome=\"full\"}") > 0.0);
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_have_leases_that_are_too_short() {
    let cluster = Cluster::start(Options { lease_ms: 1, ..Options::default() });
    let server = serve(&cluster.address(), &TINY);
    load(&server, 3 * all_of_them());
    let of_get = figure(&server.address, "terrace_mooncake_get_total");
    assert!(of_get > 0.0, "nothing was read");
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_come_later_than_the_server() {
    let mut cluster = Cluster::to_come(Options::default());
    let server = serve(&cluster.address(), &TINY);
    assert!(server.summary.contains("not reached yet"), "{}", server.summary);
    assert_eq!(ask_all(&server), 0);
    assert_eq!(figure(&server.address, "terrace_mooncake_connected"), 0.0);
    is_told(&server, "L3 is failing");
    cluster.start_all();
    hits_come_back(&server);
    assert_eq!(figure(&server.address, "terrace_mooncake_connected"), 1.0);
    is_told(&server, "INFO terrace_l3::guard: L3 has recovered");
}

/// Wrong for as long as the server lives.
#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_be_at_another_address() {
    let nobody = format!("127.0.0.1:{}", free_port());
    let server = serve(&nobody, &TINY);
    load(&server, 2 * all_of_them());
    is_told(&server, &format!("the Mooncake master at {nobody} cannot be used"));
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_of_another_version_is_called_that() {
    let options = Options { nodes: 0, has_older_master: true, ..Options::default() };
    let cluster = Cluster::start(options);
    let server = serve(&cluster.address(), &TINY);
    assert_eq!(ask_all(&server), 0);
    is_told(&server, "of the same Mooncake version");
    assert_eq!(figure(&server.address, "terrace_mooncake_connected"), 0.0);
}

#[test]
fn mooncake_without_a_library_that_works_is_refused_clearly() {
    let l3 = ["--listen", "127.0.0.1:0", "--l3", "mooncake://127.0.0.1:1"];
    let cases = [
        (vec![], "--mooncake-library"),
        (vec!["--mooncake-library", "/no/such/library.so"], "/no/such/library.so"),
        (vec!["--mooncake-library", "libc.so.6"], "no function mooncake_store_create"),
    ];
    for (arguments, expected) in cases {
        let said = complaint(&[&l3[..], &arguments].concat());
        assert!(said.contains(expected), "{arguments:?} said: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}
