//! A real Mooncake cluster on this machine, for the duration of a test.
//!
//! Its programs bind ports on every interface, so tests that use them run in a separate network
//! namespace. `scripts/test-mooncake` creates it and passes the locations of programs and library.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Options of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of storage nodes.
    pub nodes: usize,
    /// Memory of each node.
    pub node_mib: u64,
    /// Lease duration.
    pub lease_ms: u64,
    /// Timeout of an unfinished put in the master, after which the key can be put again; the
    /// default if `None`.
    pub unfinished_s: Option<u64>,
    /// True if the master is older than the library. Nodes do not work with it.
    pub has_older_master: bool,
    /// True if members find each other by a metadata server instead of peer to peer.
    pub has_metadata_server: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            nodes: 2,
            node_mib: 64,
            lease_ms: 2_000,
            unfinished_s: None,
            has_older_master: false,
            has_metadata_server: false,
        }
    }
}

/// A master and storage nodes. They are killed on drop.
#[derive(Debug)]
pub struct Cluster {
    options: Options,
    /// Network namespace of its processes, if separate.
    apart: Option<Apart>,
    host: String,
    master_port: u16,
    metrics_port: u16,
    metadata_port: u16,
    master: Option<Child>,
    nodes: Vec<Option<Child>>,
}

const PATIENCE: Duration = Duration::from_secs(120);
const PORTS_TRIED: u32 = 4;

impl Cluster {
    /// Starts a cluster beside the test.
    ///
    /// # Panics
    /// Panics if it does not start or the locations of its programs are not set.
    #[must_use]
    pub fn start(options: Options) -> Self {
        Self::start_at(options, None)
    }

    /// Starts a cluster in a separate network namespace, from which it can be disconnected.
    ///
    /// # Panics
    /// Same as [`Cluster::start`], and if the namespace cannot be created.
    #[must_use]
    pub fn start_apart(options: Options) -> Self {
        Self::start_at(options, Some(Apart::new()))
    }

    /// Creates a cluster that has an address and no processes yet.
    #[must_use]
    pub fn to_come(options: Options) -> Self {
        Self::at(options, None)
    }

    fn start_at(options: Options, apart: Option<Apart>) -> Self {
        let mut cluster = Self::at(options, apart);
        cluster.start_all();
        cluster
    }

    fn at(options: Options, apart: Option<Apart>) -> Self {
        let host = apart.as_ref().map_or_else(|| transport().host, |apart| apart.far.clone());
        let nodes = (0..options.nodes).map(|_| None).collect();
        let [master_port, metrics_port, metadata_port] = std::array::from_fn(|_| free_port());
        let master = None;
        Self { options, apart, host, master_port, metrics_port, metadata_port, master, nodes }
    }

    /// Starts the master and all storage nodes.
    ///
    /// # Panics
    /// Panics if they do not start.
    pub fn start_all(&mut self) {
        self.start_master();
        for node in 0..self.options.nodes {
            self.start_node(node);
        }
    }

    /// Returns HOST:PORT of the master.
    #[must_use]
    pub fn address(&self) -> String {
        format!("{}:{}", self.host, self.master_port)
    }

    /// Returns the address of the metadata service.
    #[must_use]
    pub fn metadata(&self) -> String {
        if self.options.has_metadata_server {
            format!("http://{}:{}/metadata", self.host, self.metadata_port)
        } else {
            "P2PHANDSHAKE".to_owned()
        }
    }

    /// Queries the master: `/metrics`, or `/get_all_keys`, one key per line.
    ///
    /// # Panics
    /// Panics if it does not answer.
    #[must_use]
    pub fn ask(&self, path: &str) -> String {
        let mut answer = Vec::new();
        let address = (self.host.as_str(), self.metrics_port);
        let mut stream = TcpStream::connect(address).expect("the master answers");
        let request = format!("GET {path} HTTP/1.1\r\nHost: master\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("the master listens");
        stream.read_to_end(&mut answer).expect("the master ends its answer");
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
        assert!(head.starts_with("HTTP/1.1 200"), "{path}: {head}");
        body.to_owned()
    }

    /// Starts or restarts the master, without its former state.
    ///
    /// # Panics
    /// Panics if it does not start.
    pub fn start_master(&mut self) {
        let older = self.options.has_older_master;
        let programs =
            if older { "TERRACE_MOONCAKE_OLDER_PROGRAMS" } else { "TERRACE_MOONCAKE_PROGRAMS" };
        let mut command = self.command(&setting(programs).join("mooncake_master"));
        command
            .arg(format!("--rpc_address={}", self.host))
            .arg(format!("--rpc_port={}", self.master_port))
            .arg(format!("--metrics_port={}", self.metrics_port))
            .arg(format!("--default_kv_lease_ttl={}", self.options.lease_ms))
            .arg(format!("--enable_http_metadata_server={}", self.options.has_metadata_server))
            .arg(format!("--http_metadata_server_host={}", self.host))
            .arg(format!("--http_metadata_server_port={}", self.metadata_port));
        if let Some(seconds) = self.options.unfinished_s {
            command.arg(format!("--put_start_discard_timeout_sec={seconds}"));
            command.arg(format!("--put_start_release_timeout_sec={}", seconds + 1));
        }
        self.master = Some(command.spawn().expect("the master starts"));
        wait_for(&self.address());
        if self.options.has_metadata_server {
            wait_for(&format!("{}:{}", self.host, self.metadata_port));
        }
    }

    /// Starts or restarts a storage node.
    ///
    /// # Panics
    /// Panics if it does not start.
    pub fn start_node(&mut self, node: usize) {
        // Another process may take the port between its selection and its use; the node then exits.
        for _ in 0..PORTS_TRIED {
            let port = free_port();
            let mut command =
                self.command(&setting("TERRACE_MOONCAKE_PROGRAMS").join("mooncake_client"));
            command
                .arg(format!("--host={}", self.host))
                .arg(format!("--port={port}"))
                .arg(format!("--global_segment_size={} MB", self.options.node_mib))
                .arg("--local_buffer_size=0")
                .arg(format!("--master_server_address={}", self.address()))
                .arg(format!("--metadata_server={}", self.metadata()))
                .arg(format!("--protocol={}", transport().protocol))
                .arg(format!("--device_names={}", transport().device))
                .arg("--threads=2");
            let mut process = command.spawn().expect("the node starts");
            if comes_up(&mut process, &format!("{}:{port}", self.host)) {
                self.nodes[node] = Some(process);
                return;
            }
        }
        panic!("the node ended {PORTS_TRIED} times before it listened");
    }

    /// Kills the master without a shutdown.
    ///
    /// # Panics
    /// Panics if it is not running.
    pub fn kill_master(&mut self) {
        end(&mut self.master.take().expect("the master runs"));
    }

    /// Kills a storage node without a shutdown.
    ///
    /// # Panics
    /// Panics if it is not running.
    pub fn kill_node(&mut self, node: usize) {
        end(&mut self.nodes[node].take().expect("the node runs"));
    }

    /// Disconnects the test from the cluster.
    ///
    /// # Panics
    /// Panics if the cluster is not in a separate namespace.
    pub fn cut(&self) {
        self.apart.as_ref().expect("it is apart").link("down");
    }

    /// Reconnects the cluster.
    ///
    /// # Panics
    /// Panics if the cluster is not in a separate namespace.
    pub fn join(&self) {
        self.apart.as_ref().expect("it is apart").link("up");
    }

    /// Freezes a storage node: transfers to it hang.
    ///
    /// # Panics
    /// Panics if it is not running.
    pub fn suspend_node(&self, node: usize) {
        self.signal_node(node, "-STOP");
    }

    /// Resumes a frozen storage node.
    ///
    /// # Panics
    /// Panics if it is not running.
    pub fn wake_node(&self, node: usize) {
        self.signal_node(node, "-CONT");
    }

    fn signal_node(&self, node: usize, signal: &str) {
        let process = self.nodes[node].as_ref().expect("the node runs").id().to_string();
        let done = Command::new("kill").args([signal, &process]).status().expect("there is kill");
        assert!(done.success(), "kill {signal} {process}");
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = match &self.apart {
            None => Command::new(program),
            Some(Apart { namespace, .. }) => {
                let mut command = Command::new("ip");
                // `ip netns exec` replaces itself with the program, so a kill reaches the program.
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
        };
        command.arg("--logtostderr").stdout(Stdio::null());
        if std::env::var_os("TERRACE_MOONCAKE_LOG").is_none() {
            command.stderr(Stdio::null());
        }
        command
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.nodes.iter_mut().flatten().chain(&mut self.master).for_each(end);
    }
}

/// Transport of transfers.
#[derive(Clone, Debug)]
pub struct Transport {
    /// Address that nodes listen on.
    host: String,
    /// tcp or rdma.
    pub protocol: String,
    /// Name of the RDMA adapter, if any.
    pub device: String,
}

/// Returns TCP on this machine or, if `TERRACE_MOONCAKE_RDMA` names an adapter and its address, as
/// in `rxe0@10.77.0.1`, RDMA.
#[must_use]
pub fn transport() -> Transport {
    let (protocol, device, host) = match std::env::var("TERRACE_MOONCAKE_RDMA").ok() {
        None => ("tcp", String::new(), "127.0.0.1".to_owned()),
        Some(adapter) => {
            let (device, host) = adapter.split_once('@').expect("an adapter has an address");
            ("rdma", device.to_owned(), host.to_owned())
        }
    };
    Transport { host, protocol: protocol.to_owned(), device }
}

/// Returns the library that tests load.
///
/// # Panics
/// Panics if its location is not set.
#[must_use]
pub fn library() -> PathBuf {
    setting("TERRACE_MOONCAKE_LIBRARY")
}

/// Returns a free port.
///
/// # Panics
/// Panics if there is none.
#[must_use]
pub fn free_port() -> u16 {
    // From the ephemeral range, which is above the ports that the cluster selects itself.
    TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port is free").port()
}

/// A network namespace with one link to the test's namespace.
#[derive(Debug)]
struct Apart {
    namespace: String,
    near_link: String,
    /// Address at the far end.
    far: String,
}

impl Apart {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let process = std::process::id();
        let namespace = format!("terrace-apart-{process}-{number}");
        let (near_link, far_link) = (format!("near{number}"), format!("far{number}"));
        let (near, far) = (format!("10.77.{number}.1"), format!("10.77.{number}.2"));
        ip(&["netns", "add", &namespace]);
        let apart = Self { namespace, near_link, far };
        let Self { namespace, near_link, far } = &apart;
        ip(&["link", "add", near_link, "type", "veth", "peer", "name", &far_link]);
        ip(&["link", "set", &far_link, "netns", namespace]);
        ip(&["addr", "add", &format!("{near}/24"), "dev", near_link]);
        ip(&["link", "set", near_link, "up"]);
        ip(&["-n", namespace, "addr", "add", &format!("{far}/24"), "dev", &far_link]);
        ip(&["-n", namespace, "link", "set", &far_link, "up"]);
        ip(&["-n", namespace, "link", "set", "lo", "up"]);
        apart
    }

    fn link(&self, state: &str) {
        ip(&["link", "set", &self.near_link, state]);
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        // A link is not removed with its namespace at once.
        let _ = Command::new("ip").args(["link", "del", &self.near_link]).status();
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).status();
    }
}

fn ip(arguments: &[&str]) {
    let done = Command::new("ip").args(arguments).status().expect("iproute2 is installed");
    assert!(done.success(), "ip {arguments:?}");
}

fn setting(name: &str) -> PathBuf {
    let set = std::env::var_os(name).map(PathBuf::from);
    set.unwrap_or_else(|| panic!("{name} is not set: run scripts/test-mooncake"))
}

fn wait_for(address: &str) {
    let until = Instant::now() + PATIENCE;
    while TcpStream::connect(address).is_err() {
        assert!(Instant::now() < until, "no process listens at {address}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until a process listens. Returns false if it exits first.
fn comes_up(process: &mut Child, address: &str) -> bool {
    let until = Instant::now() + PATIENCE;
    while TcpStream::connect(address).is_err() {
        if process.try_wait().expect("the process is ours").is_some() {
            return false;
        }
        assert!(Instant::now() < until, "no process listens at {address}");
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

fn end(process: &mut Child) {
    let _ = process.kill();
    let _ = process.wait();
}
