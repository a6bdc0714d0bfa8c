//! Real nodes, each a process in a network namespace of its own, with a link to that of the test.
//! `scripts/test-nodes` gives the test a namespace as well.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use terrace_kit::Process;
use terrace_l3_nodes::{NodeAddress, NodeSecret, NodesConfig};

use crate::process::{figure, terrace};

const PATIENCE: Duration = Duration::from_secs(120);
const PORT: u16 = 7450;
const FIGURES_PORT: u16 = 9450;
pub(crate) const SECRET: &str = "known to the nodes of this farm and to their clients";

/// Several nodes. They are killed when this is dropped.
pub(crate) struct Farm {
    folder: tempfile::TempDir,
    nodes: Vec<Node>,
}

/// A machine, and the node on it while one runs.
struct Node {
    machine: Machine,
    arguments: Vec<String>,
    process: Option<Child>,
    log: Arc<Mutex<String>>,
}

impl Farm {
    /// One node for each list of arguments. Where these have `{folder}`, a folder stands in.
    pub(crate) fn start(arguments: &[&[&str]]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("secret"), SECRET).unwrap();
        let mut farm = Self { folder, nodes: Vec::new() };
        arguments.iter().for_each(|arguments| farm.add(arguments));
        farm
    }

    /// One more node.
    pub(crate) fn add(&mut self, arguments: &[&str]) {
        let folder = self.folder.path().display().to_string();
        let arguments = arguments.iter().map(|it| it.replace("{folder}", &folder)).collect();
        let machine = Machine::new();
        self.nodes.push(Node { machine, arguments, process: None, log: Arc::default() });
        self.start_node(self.nodes.len() - 1);
    }

    /// A folder that nodes and tests share.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A file with the nodes' secret.
    pub(crate) fn secret_file(&self) -> PathBuf {
        self.folder().join("secret")
    }

    /// How a client uses all nodes. Deadlines leave room for a machine that does other things too.
    pub(crate) fn config(&self) -> NodesConfig {
        let address = |number| NodeAddress {
            name: format!("node-{number}"),
            address: self.address(number),
            weight: 1.0,
        };
        let addresses = (0..self.nodes.len()).map(address).collect();
        NodesConfig {
            connect_timeout_ms: 1_500,
            exists_timeout_ms: 2_000,
            get_timeout_ms: 3_000,
            put_timeout_ms: 5_000,
            control_timeout_ms: 3_000,
            stall_timeout_ms: 2_000,
            retry_max_ms: 500,
            ..NodesConfig::new(addresses, NodeSecret::new(SECRET.as_bytes()).unwrap())
        }
    }

    /// What `--l3` of a server is.
    pub(crate) fn url(&self) -> String {
        let node = |NodeAddress { name, address, .. }| format!("{name}={address}");
        let nodes: Vec<String> = self.config().nodes.into_iter().map(node).collect();
        format!("nodes://{}", nodes.join(","))
    }

    /// HOST:PORT of a node.
    pub(crate) fn address(&self, node: usize) -> String {
        format!("{}:{PORT}", self.nodes[node].machine.far)
    }

    /// Starts a node that was killed.
    pub(crate) fn start_node(&mut self, number: usize) {
        let secret = self.secret_file();
        let node = &mut self.nodes[number];
        let Node { machine, arguments, .. } = node;
        let mut command = machine.command(&terrace());
        command.args(["node", "--listen", &format!("{}:{PORT}", machine.far)]);
        command.args(["--metrics", &format!("{}:{FIGURES_PORT}", machine.far)]);
        if !arguments.iter().any(|it| it == "--config") {
            command.arg("--secret-file").arg(secret);
        }
        let mut process = command.args(arguments).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        node.process = Some(process);
        loop {
            let line = lines.next().expect("the node ended").unwrap();
            node.say(&line);
            if line.starts_with("node ") {
                break;
            }
            assert!(!line.contains("error"), "{line}");
        }
        let log = node.log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                *log.lock().unwrap_or_else(PoisonError::into_inner) += &(line + "\n");
            }
        });
    }

    /// Ends a node as a power cut would.
    pub(crate) fn kill(&mut self, node: usize) {
        end(&mut self.nodes[node].process.take().expect("the node runs"));
    }

    /// Ends a node as an operator would.
    pub(crate) fn stop(&mut self, node: usize) {
        self.signal(node, "-TERM");
        let mut process = self.nodes[node].process.take().expect("the node runs");
        let until = Instant::now() + PATIENCE;
        while process.try_wait().unwrap().is_none() {
            assert!(Instant::now() < until, "node {node} does not stop");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(process.wait().unwrap().success(), "{}", self.said(node));
    }

    /// The node does nothing any more, and its connections stay.
    pub(crate) fn freeze(&self, node: usize) {
        self.signal(node, "-STOP");
        // The first of its threads to run has to stop the others.
        let until = Instant::now() + PATIENCE;
        while !is_stopped(self.process_id(node)) {
            assert!(Instant::now() < until, "it does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The node goes on.
    pub(crate) fn thaw(&self, node: usize) {
        self.signal(node, "-CONT");
    }

    /// Cuts a node's link.
    pub(crate) fn cut(&self, node: usize) {
        ip(&["link", "set", &self.nodes[node].machine.near_link, "down"]);
    }

    /// Joins what was cut.
    pub(crate) fn join(&self, node: usize) {
        ip(&["link", "set", &self.nodes[node].machine.near_link, "up"]);
    }

    /// Makes a node's link slow and lossy in both directions.
    pub(crate) fn spoil(&self, node: usize) {
        self.nodes[node].machine.spoil();
    }

    /// The link is as it was.
    pub(crate) fn mend(&self, node: usize) {
        self.nodes[node].machine.mend();
    }

    /// Waits until a node has printed something.
    pub(crate) async fn says(&self, node: usize, what: &str) {
        let until = Instant::now() + PATIENCE;
        while !self.said(node).contains(what) {
            assert!(Instant::now() < until, "node {node} does not say {what:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn said(&self, node: usize) -> String {
        self.nodes[node].log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A figure of a node's own; the sum if it has labels.
    pub(crate) fn figure(&self, node: usize, name: &str) -> f64 {
        let address = format!("{}:{FIGURES_PORT}", self.nodes[node].machine.far);
        figure(&address, name)
    }

    /// The memory of a node's process.
    pub(crate) fn resident_kib(&self, node: usize) -> u64 {
        resident_kib(self.process_id(node))
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    fn process_id(&self, node: usize) -> u32 {
        self.nodes[node].process.as_ref().expect("the node runs").id()
    }

    fn signal(&self, node: usize, signal: &str) {
        let process = self.process_id(node).to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
    }
}

impl Node {
    fn say(&self, line: &str) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        *log += line;
        *log += "\n";
    }
}

impl Drop for Farm {
    fn drop(&mut self) {
        for (number, node) in self.nodes.iter_mut().enumerate() {
            node.process.iter_mut().for_each(end);
            if std::thread::panicking() {
                eprintln!("node {number} said:\n{}", node.log.lock().unwrap());
            }
        }
    }
}

/// Whether all threads of a process are stopped.
fn is_stopped(process: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads.into_iter().all(|thread| {
        let status = std::fs::read_to_string(thread.unwrap().path().join("status"));
        // One that has ended since runs no more either.
        status.map_or(true, |status| status.contains("State:\tT"))
    })
}

/// The resident memory of a process.
pub(crate) fn resident_kib(process: u32) -> u64 {
    Process::Number(process).resident_bytes().unwrap_or(0) >> 10
}

/// A network namespace with one link to that of the test.
struct Machine {
    namespace: String,
    near_link: String,
    far_link: String,
    /// The address at the far end.
    far: String,
}

impl Machine {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let ours = std::env::var("TERRACE_NODES_NAMESPACE");
        let ours = ours.expect("a network namespace for the test: run scripts/test-nodes");
        let namespace = format!("{ours}-{number}");
        let (near_link, far_link) = (format!("near{number}"), format!("far{number}"));
        let (near, far) = (format!("10.78.{number}.1"), format!("10.78.{number}.2"));
        ip(&["netns", "add", &namespace]);
        let machine = Self { namespace, near_link, far_link, far };
        let Self { namespace, near_link, far_link, far } = &machine;
        ip(&["link", "add", near_link, "type", "veth", "peer", "name", far_link]);
        ip(&["link", "set", far_link, "netns", namespace]);
        ip(&["addr", "add", &format!("{near}/24"), "dev", near_link]);
        ip(&["link", "set", near_link, "up"]);
        ip(&["-n", namespace, "addr", "add", &format!("{far}/24"), "dev", far_link]);
        ip(&["-n", namespace, "link", "set", far_link, "up"]);
        ip(&["-n", namespace, "link", "set", "lo", "up"]);
        machine
    }

    /// The same command on this machine. It becomes the program, so killing the one kills the other.
    fn command(&self, program: &Command) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace]).arg(program.get_program());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    fn spoil(&self) {
        // Where the kernel cannot delay and lose packets at will, a narrow link with a short queue does.
        let lossy = ["netem", "delay", "10ms", "5ms", "loss", "2%"];
        let narrow = ["tbf", "rate", "40mbit", "burst", "16kb", "limit", "24kb"];
        if !self.discipline(&["replace"], &lossy) {
            assert!(
                self.discipline(&["replace"], &narrow),
                "this kernel has neither netem nor tbf"
            );
        }
    }

    fn mend(&self) {
        self.discipline(&["del"], &[]);
    }

    fn discipline(&self, verb: &[&str], what: &[&str]) -> bool {
        let tc = |before: &[&str], link: &str| {
            let mut command = Command::new("tc");
            command.args(before).arg("qdisc").args(verb).args(["dev", link, "root"]).args(what);
            command.stderr(Stdio::null()).status().expect("iproute2 is installed").success()
        };
        tc(&[], &self.near_link) & tc(&["-n", &self.namespace], &self.far_link)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // A link does not go with its namespace at once.
        let _ = Command::new("ip").args(["link", "del", &self.near_link]).status();
        let _ = Command::new("ip").args(["netns", "del", &self.namespace]).status();
    }
}

fn ip(arguments: &[&str]) {
    let done = Command::new("ip").args(arguments).status().expect("iproute2 is installed");
    assert!(done.success(), "ip {arguments:?}: run scripts/test-nodes");
}

fn end(process: &mut Child) {
    let _ = process.kill();
    let _ = process.wait();
}
