//! Complete programs on the two machines.

// Shared with the program's own tests; partly unused here.
#[allow(dead_code)]
#[path = "../../../../cli/tests/program/process.rs"]
mod process;

use std::process::Command;
use std::time::{Duration, Instant};

use self::process::{Server, ask, figure, terrace, wait_for_backups};
use super::pages::Pool;
use super::reader::Reader;

const SECRET_FILE: &str = "/tmp/secret";

/// Starts `terrace` with these arguments on this machine, and waits until it is ready.
pub(crate) fn start(arguments: &str) -> Server {
    std::fs::write(SECRET_FILE, "known to both machines, and to nobody else").expect("some memory");
    let mut command = terrace();
    command.args(arguments.split(' ')).env("HOME", "/tmp");
    Server::spawn(command)
}

pub(crate) async fn what_one_server_computes_others_fetch_by_rdma(reader: Reader) {
    const NODE: &str = "node --listen 10.77.0.1:7450 --metrics 10.77.0.1:9450 --memory 64MiB \
                        --object-max 128KiB --log info --secret-file";
    let serve = |machine: &str| {
        format!(
            "serve --listen {machine}:0 --l3 nodes://10.77.0.1:7450 --node-secret-file {SECRET_FILE} \
             --device-memory 32MiB --host-memory 32MiB --log info"
        )
    };
    // Just over seven pages: more would take emulated machines long.
    let prompt = "A long text about nothing in particular. ".repeat(3);
    let (mut of_node, mut of_server) = (reader.holder(), reader.holder());
    let figures = of_node.ask(&format!("terrace {NODE} {SECRET_FILE}"));
    let first = of_server.ask(&format!("terrace {}", serve("10.77.0.1")));
    let (computed, l3) = ask(&first, &prompt, "").unwrap();
    assert_eq!(l3, 0, "there was nothing");
    wait_for_backups(&first, "terrace_node_objects{");
    assert!(figure(&first, "terrace_node_direct_bytes_total") > 0.0, "it was put by RDMA");
    println!("reader: {} objects are on the node", figure(&figures, "terrace_l3_objects"));
    // The remote server is killed with its connection; the node is not.
    for first_is_dead in [false, true] {
        let server = start(&serve("10.77.0.2"));
        let (fetched, l3) = ask(&server.address, &prompt, "").unwrap();
        assert_eq!(fetched, computed);
        assert!(l3 > 90, "only {l3} tokens came from the first server: {}", server.said());
        let direct = figure(&server.address, "terrace_node_direct_bytes_total");
        let all = figure(&server.address, "terrace_moved_bytes_total{kind=\"prefetch\"}");
        println!(
            "reader: {l3} tokens came by {direct} bytes of RDMA of {all} (dead: {first_is_dead})"
        );
        assert!(direct > 0.0 && direct >= all, "all of it came by RDMA");
        if !first_is_dead {
            drop(std::mem::replace(&mut of_server, reader.holder()));
        }
    }
}

/// Returns the standard bandwidth benchmark of adapters.
pub(crate) fn ib_read_bw(arguments: &str) -> Command {
    let mut command = Command::new("ib_read_bw");
    let bytes = Pool::Usual.page_bytes().to_string();
    command.args(["--ib-dev", "rxe0", "--gid-index", "1", "--iters", "500", "--size", &bytes]);
    command.args(arguments.split_whitespace());
    command
}

/// Prints the rate of page reads beside that of `ib_read_bw` with the same size. It is not checked,
/// because emulated adapters are not representative.
pub(crate) async fn as_fast_as_what_others_measure(reader: Reader) {
    const ROUNDS: u32 = 8;
    let (link, mut holder) = reader.link();
    let (memory, pages) = (reader.memory(Pool::Usual), holder.pages(Pool::Usual));
    let start = Instant::now();
    for _ in 0..ROUNDS {
        drop(link.read(memory.reads(&pages)).await.unwrap());
    }
    let megabytes = f64::from(ROUNDS) * Pool::Usual.bytes() as f64 / 1e6;
    println!("reader: {:.1} MB/s in pages of 64 KiB", megabytes / start.elapsed().as_secs_f64());
    holder.ask("ib_read_bw -F");
    tokio::time::sleep(Duration::from_secs(1)).await;
    let measured = ib_read_bw("-F 10.77.0.1").output().expect("the machine has ib_read_bw");
    let table = String::from_utf8_lossy(&measured.stdout);
    assert!(measured.status.success(), "{table}{}", String::from_utf8_lossy(&measured.stderr));
    for line in table.lines().filter(|line| line.contains("BW average") || line.contains("65536")) {
        println!("reader: ib_read_bw: {}", line.trim());
    }
}
