//! The machine whose pages are read. It executes commands, one per line.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use terrace_l3::{LendingStore, MemoryConfig, MemoryStore, Source};
use terrace_l3_disk::{DiskConfig, DiskStore, TieredConfig, TieredStore};
use terrace_l3_nodes::rdma::{Device, Link, LinkAddress, Region, RemotePage};
use terrace_l3_nodes::{NodeConfig, NodeServer, RunningNode};
use terrace_tests::l3::nodes::secret;
use terrace_tests::l3::objects::page;
use tokio::runtime::Handle;

use super::nodes::LEASE_TTL_MS;
use super::pages::Pool;
use super::servers;

struct Holder {
    device: Device,
    pools: Vec<(Region, Vec<Source>)>,
}

pub(crate) async fn run(address: &str) {
    let device = Device::open(None).expect("the machine has soft-RoCE");
    println!("holder: {device:?}");
    let pools = Pool::ALL.into_iter().map(|pool| {
        let arena = pool.arena();
        pool.fill(&arena);
        let region = device.register(&arena).expect("memory can be registered");
        let sources =
            (0..pool.pages()).map(|page| arena.source(page).expect("the page has no writer"));
        (region, sources.collect())
    });
    let pools = pools.collect();
    let holder = Arc::new(Holder { device, pools });
    let listener = TcpListener::bind(address).expect("the address is this machine's");
    println!("holder: ready");
    loop {
        let (stream, _) = listener.accept().expect("the reader connects");
        let (holder, runtime) = (holder.clone(), Handle::current());
        thread::spawn(move || {
            let _inside = runtime.enter();
            holder.serve(stream);
        });
    }
}

impl Holder {
    /// Serves one connection, which has one link at a time.
    fn serve(&self, stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().expect("a stream can be cloned")).lines();
        let mut stream = stream;
        let (mut link, mut nodes, mut programs) = (None, Vec::new(), Vec::new());
        while let Some(Ok(line)) = lines.next() {
            let reply = match line.split_once(' ') {
                Some(("node", which)) => start_node(which, &mut nodes),
                Some(("terrace", arguments)) => {
                    let program = servers::start(arguments);
                    let address = program.address.clone();
                    programs.push(program);
                    address
                }
                _ => self.obey(&line, &mut link),
            };
            writeln!(stream, "{reply}").expect("the reader listens");
        }
    }

    fn obey(&self, line: &str, link: &mut Option<Arc<Link>>) -> String {
        let (command, argument) = line.split_once(' ').unwrap_or((line, ""));
        let number = || argument.parse::<u64>().expect("a number");
        match command {
            "link" => {
                let new = Link::new(&self.device).expect("there are queues left");
                let reply = hex(&new.address().encode());
                let peer = LinkAddress::decode(&bytes_of(argument)).expect("the reader's address");
                new.connect(peer).expect("the reader can be reached");
                *link = Some(Arc::new(new));
                reply
            }
            "pages" => {
                let (region, sources) = &self.pools[usize::try_from(number()).expect("an index")];
                let found = sources.iter().map(|source| {
                    let RemotePage { address, key } = region.page(source);
                    format!("{address}:{key}")
                });
                found.collect::<Vec<_>>().join(" ")
            }
            // A page whose registration ends before it is read.
            "forgotten" => {
                let arena = Pool::Usual.arena();
                let region = self.device.register(&arena).expect("memory can be registered");
                let RemotePage { address, key } = region.page(&arena.source(0).expect("free"));
                format!("{address}:{key}")
            }
            // It exits after one use.
            "ib_read_bw" => {
                let mut program = servers::ib_read_bw(argument);
                thread::spawn(move || program.status());
                "soon".to_owned()
            }
            "counters" => format!("{:?}", self.device.counters()),
            "close-after-ms" => {
                let (link, delay) =
                    (link.clone().expect("a link"), Duration::from_millis(number()));
                thread::spawn(move || {
                    thread::sleep(delay);
                    link.close();
                });
                "in time".to_owned()
            }
            "vanish-after-ms" => {
                let delay = Duration::from_millis(number());
                thread::spawn(move || {
                    thread::sleep(delay);
                    // The machine stops at once, as in a power failure.
                    std::fs::write("/proc/sysrq-trigger", "b").expect("it is a virtual machine");
                });
                "in time".to_owned()
            }
            other => panic!("the reader says {other:?}"),
        }
    }
}

/// Starts a node of the given kind, slots and slot size. It ends with the connection.
fn start_node(which: &str, nodes: &mut Vec<RunningNode>) -> String {
    let words: Vec<&str> = which.split(' ').collect();
    let [kind, slots, bytes] = words[..] else { panic!("the reader wants a node {which:?}") };
    let (slots, bytes): (u64, usize) = (slots.parse().unwrap(), bytes.parse().unwrap());
    let memory = MemoryStore::new(MemoryConfig {
        lease_ttl_ms: LEASE_TTL_MS,
        ..MemoryConfig::new(slots * bytes as u64, bytes)
    });
    let memory = memory.expect("there is memory");
    let mut config = NodeConfig { full_wait_ms: 5_000, ..NodeConfig::new(secret()) };
    let mut holding: Arc<dyn LendingStore> = Arc::new(memory.clone());
    match kind {
        "usual" => {}
        "impatient" => config.rdma_lease_ms = 1_000,
        "restrictive" => config.clients[0].namespaces = Some([page(0).namespace].into()),
        "tiered" => {
            let folder = format!("/tmp/disk-{}", nodes.len());
            let disk = DiskStore::open(DiskConfig::new(folder, 8 * slots * bytes as u64, bytes));
            let disk = disk.expect("there is room");
            let tiers = TieredStore::new(memory, disk, TieredConfig::default());
            holding = Arc::new(tiers.expect("both take objects of that size"));
        }
        other => panic!("the reader wants a {other} node"),
    }
    let node = NodeServer::bind("10.77.0.1:0", holding, config).expect("a free port");
    let node = node.start().expect("a runtime with input and output");
    let address = node.address().to_string();
    nodes.push(node);
    address
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn bytes_of(hex: &str) -> [u8; terrace_l3_nodes::rdma::ADDRESS_BYTES] {
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("two digits");
    std::array::from_fn(byte)
}
