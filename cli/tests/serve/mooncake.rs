//! Servers that share a real Mooncake cluster, in health and in trouble. `scripts/test-mooncake`
//! provides what these tests need and runs them.

// What another crate publishes is private here.
#[allow(unreachable_pub)]
#[path = "../../../tests/src/mooncake.rs"]
mod cluster;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use self::cluster::{Cluster, Options, free_port, library};
use super::process::{Answer, Server, ask, request, terrace};
use super::{answers_without_cache, complaint, load};

/// Memory for a third of the prompts, so that the rest must come from L3 or be computed.
const TINY: [&str; 4] = ["--device-memory", "8MiB", "--host-memory", "6MiB"];

/// Prompts that share beginnings, and what a server without any cache answers.
fn questions() -> &'static (Vec<String>, Vec<Answer>) {
    static QUESTIONS: OnceLock<(Vec<String>, Vec<Answer>)> = OnceLock::new();
    QUESTIONS.get_or_init(|| {
        // A prime number of them: `load` steps through them by sevens.
        let prompts: Vec<String> = super::prompts().into_iter().step_by(3).take(13).collect();
        let answers = answers_without_cache(&prompts);
        (prompts, answers)
    })
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
    let (prompts, expected) = questions();
    let mut from_l3 = 0;
    for (prompt, expected) in prompts.iter().zip(expected) {
        let (answer, l3) = ask(&server.address, prompt, "").expect("no request fails");
        assert_eq!(&answer, expected, "the same answer as without any cache");
        from_l3 += l3;
    }
    from_l3
}

/// A figure of the server's metrics; the sum if it has labels.
fn figure(server: &Server, name: &str) -> f64 {
    let (status, page) = request(&server.address, "GET", "/metrics", "").unwrap();
    assert_eq!(status, 200);
    let lines = page.lines().filter(|line| line.starts_with(name));
    let values = lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap());
    let values: Vec<f64> = values.collect();
    assert!(!values.is_empty(), "there is no {name} in {page}");
    values.iter().sum()
}

/// Waits until everything that the server wants to store is stored.
fn wait_for_backups(server: &Server) {
    let stored = || figure(server, "terrace_mooncake_put_total{outcome=\"done\"}");
    let until = Instant::now() + Duration::from_secs(30);
    let mut before = 0.0;
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = stored();
        if now > 0.0 && now == before {
            return;
        }
        before = now;
        assert!(Instant::now() < until, "{now} objects are stored");
    }
}

/// Asks everything over and over until something comes from L3 again.
fn hits_come_back(server: &Server) {
    let (prompts, expected) = questions();
    let until = Instant::now() + Duration::from_secs(60);
    while load(server, prompts, expected, prompts.len()) == 0 {
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
    wait_for_backups(&first);
    let second = serve(&cluster.address(), &[]);
    let from_l3 = ask_all(&second);
    assert!(from_l3 > 500, "only {from_l3} tokens came from the first server");
    first.kill();
    second.kill();
    let third = serve(&cluster.address(), &[]);
    let from_l3_again = ask_all(&third);
    assert!(from_l3_again > 500, "only {from_l3_again} tokens were left by the dead");
    assert_eq!(figure(&third, "terrace_l3_corrupt_total"), 0.0);
    assert_eq!(figure(&third, "terrace_mooncake_connected"), 1.0);
    third.stop();
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_lose_a_storage_node() {
    let mut cluster = Cluster::start(Options::default());
    let server = serve(&cluster.address(), &TINY);
    let (prompts, expected) = questions();
    load(&server, prompts, expected, prompts.len());
    hits_come_back(&server);
    cluster.kill_node(0);
    load(&server, prompts, expected, 2 * prompts.len());
    cluster.start_node(0);
    hits_come_back(&server);
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_lose_its_master_and_all_that_it_knew() {
    let mut cluster = Cluster::start(Options::default());
    let server = serve(&cluster.address(), &TINY);
    let (prompts, expected) = questions();
    hits_come_back(&server);
    cluster.kill_master();
    let mut asked = 0;
    let until = Instant::now() + Duration::from_secs(30);
    while !server.said().contains("L3 is unwell") {
        load(&server, prompts, expected, prompts.len());
        asked += prompts.len();
        assert!(Instant::now() < until, "nothing was noticed in {asked} requests");
    }
    // Its calls hang for seconds, and nobody waits for them.
    let began = Instant::now();
    load(&server, prompts, expected, prompts.len());
    let dead = began.elapsed();
    assert!(dead < Duration::from_secs(30), "{} requests took {dead:?}", prompts.len());
    cluster.start_master();
    hits_come_back(&server);
    is_told(&server, "L3 is well again");
    let of = |call: &str| format!("terrace_mooncake_{call}_total{{outcome=\"master-gone\"}}");
    let gone: f64 = ["put", "get", "exists"].iter().map(|call| figure(&server, &of(call))).sum();
    assert!(gone + figure(&server, "terrace_l3_timed_out_total") > 0.0, "it is counted");
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_be_cut_off_and_joined_again() {
    let cluster = Cluster::start_apart(Options::default());
    let server = serve(&cluster.address(), &TINY);
    let (prompts, expected) = questions();
    hits_come_back(&server);
    cluster.cut();
    load(&server, prompts, expected, 2 * prompts.len());
    cluster.join();
    hits_come_back(&server);
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_be_full_of_leased_objects() {
    let options = Options { nodes: 1, node_mib: 16, lease_ms: 60_000, ..Options::default() };
    let cluster = Cluster::start(options);
    let server = serve(&cluster.address(), &TINY);
    let (prompts, expected) = questions();
    for _ in 0..3 {
        load(&server, prompts, expected, prompts.len());
    }
    assert!(figure(&server, "terrace_mooncake_put_total{outcome=\"full\"}") > 0.0);
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_have_leases_that_are_too_short() {
    let cluster = Cluster::start(Options { lease_ms: 1, ..Options::default() });
    let server = serve(&cluster.address(), &TINY);
    let (prompts, expected) = questions();
    load(&server, prompts, expected, 3 * prompts.len());
    let of_get = figure(&server, "terrace_mooncake_get_total");
    assert!(of_get > 0.0, "nothing was read");
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn mooncake_may_come_later_than_the_server() {
    let nobody = format!("127.0.0.1:{}", free_port());
    let server = serve(&nobody, &TINY);
    assert!(server.summary.contains("not reached yet"), "{}", server.summary);
    assert_eq!(ask_all(&server), 0);
    assert_eq!(figure(&server, "terrace_mooncake_connected"), 0.0);
    is_told(&server, "L3 is unwell");
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
