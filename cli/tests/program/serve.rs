//! The whole program: a real `terrace serve` with the built-in model, over real sockets and a real
//! disk, stopped, killed and started again.

mod configuring;
mod gpu;
mod mooncake;
mod recording;
mod small_disk;
mod stopping;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::process::{Answer, PATIENT, Server, ask, figure, request, terrace};

/// A device too small for the load, and a host too.
const SMALL: [&str; 4] = ["--device-memory", "24MiB", "--host-memory", "16MiB"];

fn prompts() -> Vec<String> {
    let document = |number: usize| {
        format!("Document {number}. ").repeat(8 + 3 * number) + "Now answer this question: "
    };
    let question = |number: usize| "what, and why not? ".chars().cycle().take(5 + 11 * number);
    let pairs = (0..8).flat_map(|first| (0..5).map(move |second| (first, second)));
    pairs.map(|(first, second)| document(first) + &question(second).collect::<String>()).collect()
}

/// A server without host memory and L3. Salts keep requests from sharing what is on the device.
fn server_without_cache() -> Server {
    let mut command = terrace();
    command.args(["serve", "--listen", "127.0.0.1:0", "--l3", "none", "--host-memory", "0B"]);
    Server::spawn(command)
}

/// What a server answers that shares nothing between requests.
fn answers_without_cache(prompts: &[String]) -> Vec<Answer> {
    let server = server_without_cache();
    let salted = prompts.iter().enumerate();
    salted
        .map(|(salt, prompt)| ask(&server.address, prompt, &salt.to_string()).unwrap().0)
        .collect()
}

/// So many clients ask at once.
const CLIENTS: u32 = 6;

/// Asks everything from several threads, over and over until `enough` answers are there, and compares
/// all answers; how many tokens came from L3, and how long the slowest answer took.
fn load(
    server: &Server,
    prompts: &[String],
    expected: &[Answer],
    enough: usize,
) -> (u64, Duration) {
    let (next, answered, from_l3) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicU64::new(0));
    let slowest = Mutex::new(Duration::ZERO);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while answered.load(Ordering::Relaxed) < enough {
                    let place = next.fetch_add(7, Ordering::Relaxed) % prompts.len();
                    let began = Instant::now();
                    let (answer, l3) = ask(&server.address, &prompts[place], "").unwrap();
                    let took = began.elapsed();
                    assert_eq!(answer, expected[place], "prompt {place}");
                    let mut slowest = slowest.lock().unwrap();
                    *slowest = took.max(*slowest);
                    drop(slowest);
                    from_l3.fetch_add(l3, Ordering::Relaxed);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    (from_l3.into_inner(), slowest.into_inner().unwrap())
}

#[test]
fn a_server_that_is_killed_under_load_restarts_warm_and_answers_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let prompts = prompts();
    let expected = answers_without_cache(&prompts);
    for round in 0..3 {
        let server = Server::start(folder.path(), &SMALL);
        let address = server.address.clone();
        let (from_l3, _) = load(&server, &prompts, &expected, 25);
        assert!(round == 0 || from_l3 > 0, "round {round} began cold");
        // Killed while clients are waiting for answers, and pages are on their way to disk.
        std::thread::scope(|scope| {
            for prompt in &prompts[..12] {
                let address = &address;
                scope.spawn(move || ask(address, prompt, "").is_ok());
            }
            std::thread::sleep(Duration::from_millis(150));
            server.kill();
        });
    }
    let server = Server::start(folder.path(), &SMALL);
    let (from_l3, _) = load(&server, &prompts, &expected, 80);
    assert!(from_l3 > 1000, "only {from_l3} tokens came from L3");
    server.stop();
}

#[test]
fn a_server_that_was_stopped_has_everything_in_l3() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = "A long text about nothing in particular. ".repeat(40);
    let server = Server::start(folder.path(), &[]);
    let (computed, l3) = ask(&server.address, &prompt, "").unwrap();
    assert_eq!(l3, 0);
    server.stop();
    let server = Server::start(folder.path(), &PATIENT);
    let (fetched, l3) = ask(&server.address, &prompt, "").unwrap();
    assert_eq!(fetched, computed);
    assert!(l3 > 1500, "{l3} of {} tokens", prompt.len());
    let (_, other) = ask(&server.address, &prompt, "salted").unwrap();
    assert_eq!(other, 0, "another salt has another cache");
}

/// Asking about pages moves them to the memory over the disk before they are read.
#[test]
fn memory_over_the_disk_is_filled_ahead_of_reads() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = "A long text about nothing in particular. ".repeat(40);
    let server = Server::start(folder.path(), &[]);
    let (computed, _) = ask(&server.address, &prompt, "").unwrap();
    server.stop();
    let with_memory = [&PATIENT[..], &["--l3-memory", "64MiB"]].concat();
    let server = Server::start(folder.path(), &with_memory);
    assert!(server.summary.contains("with 64.0 MiB of memory on top"), "{}", server.summary);
    let (fetched, l3) = ask(&server.address, &prompt, "").unwrap();
    assert_eq!(fetched, computed);
    assert!(l3 > 1500, "{l3} of {} tokens", prompt.len());
    let figure = |name: &str| figure(&server.address, name);
    let promoted = || figure("terrace_l3_promotions_total{outcome=\"done\"}");
    let until = Instant::now() + Duration::from_secs(30);
    while promoted() <= 90.0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(promoted() > 90.0);
    // Reads may be quicker than promotions, so only a second one is certain to find memory filled.
    let from_memory = || figure("terrace_l3_gets_total{source=\"memory");
    let before = from_memory();
    request(&server.address, "POST", "/reset_prefix_cache", "").unwrap();
    let (again, l3) = ask(&server.address, &prompt, "").unwrap();
    assert_eq!(again, computed);
    assert!(l3 > 1500, "{l3} of {} tokens", prompt.len());
    assert!(from_memory() - before > 90.0);
    server.stop();
}

#[test]
fn what_is_written_behind_is_on_disk_when_the_server_has_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = "A long text about nothing in particular. ".repeat(40);
    let server = Server::start(folder.path(), &["--l3-memory", "64MiB", "--l3-write-behind"]);
    assert!(server.summary.contains("that writes behind"), "{}", server.summary);
    let (computed, _) = ask(&server.address, &prompt, "").unwrap();
    server.stop();
    let server = Server::start(folder.path(), &PATIENT);
    let (fetched, l3) = ask(&server.address, &prompt, "").unwrap();
    assert_eq!(fetched, computed);
    assert!(l3 > 1500, "{l3} of {} tokens", prompt.len());
    server.stop();
}

#[test]
fn a_server_says_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path(), &["--device-memory", "64MiB"]);
    let summary = &server.summary;
    for said in ["64.0 MiB", "8,192 tokens", &folder.path().display().to_string()] {
        assert!(summary.contains(said), "{said} is missing:\n{summary}");
    }
    let (status, page) = request(&server.address, "GET", "/", "").unwrap();
    assert!(status == 200 && page.contains("<title>"), "{page}");
    assert_eq!(request(&server.address, "GET", "/health", "").unwrap().0, 200);
}

/// What a command that cannot work says.
fn complaint(arguments: &[&str]) -> String {
    let output = terrace().arg("serve").args(arguments).output().unwrap();
    assert!(!output.status.success(), "{arguments:?} worked");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn what_cannot_work_is_said_clearly() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(folder.path(), &[]);
    let store = format!("disk:{}", folder.path().display());
    let settings = folder.path().join("terrace.toml").display().to_string();
    std::fs::write(&settings, "host_memory = \"lots\"\n").unwrap();
    let cases = [
        (vec!["--listen", &*server.address, "--l3", "none"], "in use by another program"),
        (vec!["--listen", "127.0.0.1:0", "--l3", &*store], "stop it, or use --l3"),
        (vec!["--l3", "none", "--model", "/no/such/folder"], "/no/such/folder"),
        (vec!["--l3", "somewhere"], "disk:"),
        (vec!["--l3", "none", "--device-memory", "1KiB"], "raise --device-memory"),
        (vec!["--l3", "none", "--page-size", "17"], "power of two"),
        (vec!["--config", "/no/such/file.toml"], "/no/such/file.toml"),
        (
            vec!["--device-memory", "foo"],
            "\"foo\" is not a size: write a number and its unit, like",
        ),
        (vec!["--l3", "memory:much"], "\"much\" is not a size"),
        (vec!["--config", &*settings], "\"lots\" is not a size"),
        (vec!["--l3", "none", "--threads", "0"], "use at least 1"),
        (vec!["--l3", "none", "--threads", "100000"], "cores"),
    ];
    for (arguments, expected) in cases {
        let said = complaint(&arguments);
        assert!(said.contains(expected), "{arguments:?} said: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn flags_come_before_the_environment_and_that_before_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("terrace.toml");
    let settings = "l3 = \"none\"\nname = \"from-file\"\ndevice_memory = \"32MiB\"\n";
    std::fs::write(&file, settings).unwrap();
    let model = |environment: Option<&str>, flag: Option<&str>| {
        let mut command = terrace();
        command.args(["serve", "--listen", "127.0.0.1:0", "--config"]).arg(&file);
        command.args(flag.iter().flat_map(|name| ["--name", name]));
        command.envs(environment.map(|name| ("TERRACE_NAME", name)));
        let server = Server::spawn(command);
        assert!(server.summary.contains("32.0 MiB"), "{}", server.summary);
        request(&server.address, "GET", "/v1/models", "").unwrap().1
    };
    assert!(model(None, None).contains("from-file"));
    assert!(model(Some("from-environment"), None).contains("from-environment"));
    assert!(model(Some("from-environment"), Some("from-flag")).contains("from-flag"));
}
