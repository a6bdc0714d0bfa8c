//! A real `terrace serve` in a process of its own, and a client for it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(300);

/// The program under test, or, in what cargo does not run as its test, the one that is installed.
pub(crate) fn terrace() -> Command {
    let mut command = Command::new(option_env!("CARGO_BIN_EXE_terrace").unwrap_or("terrace"));
    command.env("NO_COLOR", "1").env_remove("RUST_LOG").env_remove("TERRACE_API_KEYS");
    command.env_remove("TERRACE_MOONCAKE_LIBRARY").env_remove("TERRACE_THOROUGH");
    // Answers as long as they are asked for, which no prompt ends early.
    command.env("TERRACE_RANDOM_MODEL", "true");
    command
}

/// What a server gets that is to wait for L3 however busy the machine is, rather than compute.
pub(crate) const PATIENT: [&str; 2] = ["--l3-wait", "60s"];

/// A server, which is killed when this is dropped.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: String,
    /// What it printed before it was ready.
    pub(crate) summary: String,
    /// What it printed since.
    log: Arc<Mutex<String>>,
}

impl Server {
    /// Starts a server on a free port, with a store in a folder.
    pub(crate) fn start(store: &Path, arguments: &[&str]) -> Self {
        let store = format!("disk:{}", store.display());
        let mut command = terrace();
        // Whatever else is on the disk of whoever runs this.
        command.args(["serve", "--listen", "127.0.0.1:0", "--l3-reserve", "0", "--l3", &store]);
        command.args(arguments);
        Self::spawn(command)
    }

    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let mut summary = String::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("it ended: {summary}")).unwrap();
            summary.push_str(&line);
            summary.push('\n');
            if let Some((_, rest)) = line.split_once("http://") {
                break rest.split(['/', ' ']).next().unwrap().to_owned();
            }
        };
        let log = Arc::new(Mutex::new(String::new()));
        std::thread::spawn({
            let log = log.clone();
            move || {
                lines.map_while(Result::ok).for_each(|line| *log.lock().unwrap() += &(line + "\n"))
            }
        });
        Self { process, address, summary, log }
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// What it has printed since it was ready.
    pub(crate) fn said(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Sends it a signal, like `TERM`.
    pub(crate) fn signal(&self, name: &str) {
        let (name, pid) = (format!("-{name}"), self.process.id().to_string());
        assert!(Command::new("kill").args([name, pid]).status().unwrap().success());
    }

    /// Ends it as an operator would, and waits.
    pub(crate) fn stop(self) {
        self.signal("TERM");
        self.wait();
    }

    /// Waits until it has ended by itself, in order.
    pub(crate) fn wait(mut self) {
        let until = Instant::now() + PATIENCE;
        while self.process.try_wait().unwrap().is_none() {
            assert!(Instant::now() < until, "it did not stop");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(self.process.wait().unwrap().success());
    }

    /// Ends it as a power cut would.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What a server answered to a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) checksum: String,
}

/// Asks for the likeliest continuation; the answer, and how many tokens came from L3.
pub(crate) fn ask(address: &str, prompt: &str, salt: &str) -> Result<(Answer, u64), String> {
    let body = json!({
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "cache_salt": salt,
        "logits_checksum": true,
    });
    let (status, body) = request(address, "POST", "/v1/completions", &body.to_string())?;
    let answer: Value = serde_json::from_str(&body).map_err(|error| format!("{error}: {body}"))?;
    if status != 200 {
        return Err(format!("{status}: {body}"));
    }
    let choice = &answer["choices"][0];
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{body}")).to_owned();
    let found = Answer { text: text(&choice["text"]), checksum: text(&choice["logits_checksum"]) };
    let tiers = &answer["usage"]["prompt_tokens_details"]["cached_by_tier"];
    Ok((found, tiers["l3"].as_u64().unwrap()))
}

/// One request and its whole response.
pub(crate) fn request(
    address: &str,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, String), String> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect(address).map_err(text)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(text)?;
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.0\r\nhost: {address}\r\ncontent-length: {length}\r\n");
    let request = format!("{head}content-type: application/json\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).map_err(text)?;
    let mut response = String::new();
    stream.read_to_string(&mut response).map_err(text)?;
    let (head, body) = response.split_once("\r\n\r\n").ok_or("no response")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or("no status")?, body.to_owned()))
}

/// A figure of the metrics at that address; the sum if it has labels.
pub(crate) fn figure(address: &str, name: &str) -> f64 {
    let (status, page) = request(address, "GET", "/metrics", "").unwrap();
    assert_eq!(status, 200);
    let lines = page.lines().filter(|line| line.starts_with(name));
    let values = lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap());
    let values: Vec<f64> = values.collect();
    assert!(!values.is_empty(), "there is no {name} in {page}");
    values.iter().sum()
}

/// Waits until everything that the server wants to store is stored, by the figure that counts it.
pub(crate) fn wait_for_backups(address: &str, stored: &str) {
    let until = Instant::now() + Duration::from_secs(30);
    let mut before = 0.0;
    loop {
        std::thread::sleep(Duration::from_millis(500));
        let now = figure(address, stored);
        if now > 0.0 && now == before {
            return;
        }
        before = now;
        assert!(Instant::now() < until, "{now} objects are stored");
    }
}
