//! Over a server that speaks S3, which `scripts/test-buckets` installs. It is stopped, killed and deceived here.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use terrace_l3_buckets::object_store::aws::AmazonS3Builder;
use tokio::task::JoinSet;

use super::*;

const BUCKET: &str = "terrace";
const KEY: &str = "tests";
const SECRET: &str = "not-a-secret";
const PATIENCE_MS: u64 = 1000;
/// What an answer may take in all: a request before it may have to fail first.
const ANSWERED_WITHIN: Duration = Duration::from_millis(4 * PATIENCE_MS);

/// A server of its own for a test. It is killed with it.
struct Server {
    root: TempDir,
    port: u16,
    process: Child,
}

impl Server {
    fn start() -> Self {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join(BUCKET)).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = start(root.path(), port);
        Self { root, port, process }
    }

    fn signal(&self, signal: &str) {
        let process = self.process.id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().unwrap().success());
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn start_again(&mut self) {
        self.process = start(self.root.path(), self.port);
    }

    fn client(&self) -> Client {
        client_at(self.port, BUCKET, SECRET)
    }
}

fn client_at(port: u16, bucket: &str, secret: &str) -> Client {
    let objects = AmazonS3Builder::new()
        .with_endpoint(format!("http://127.0.0.1:{port}"))
        .with_allow_http(true)
        .with_region("us-east-1")
        .with_bucket_name(bucket)
        .with_access_key_id(KEY)
        .with_secret_access_key(secret);
    let config = BucketsConfig { request_timeout_ms: PATIENCE_MS, ..config(String::new()) };
    let store = BucketsStore::over(config, Arc::new(objects.build().unwrap()), "kv".into());
    Client::new(store.unwrap())
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn start(root: &Path, port: u16) -> Child {
    let program = std::env::var_os("TERRACE_S3_SERVER").expect("run scripts/test-buckets");
    let port_text = port.to_string();
    let process = Command::new(program)
        .args(["--host", "127.0.0.1", "--port", &port_text])
        .args(["--access-key", KEY, "--secret-key", SECRET])
        .arg(root)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < until, "the server does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
    process
}

/// By its URL and the environment, as users name it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an S3 server: run scripts/test-buckets"]
async fn a_server_keeps_the_promises_of_a_store() {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let bucket = std::env::var("TERRACE_S3_BUCKET").expect("run scripts/test-buckets");
    let prefix = || format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    all(|| backend(config(format!("s3://{bucket}/{}", prefix())))).await;
}

async fn in_time<T>(answer: impl Future<Output = Result<T, StoreError>>) -> StoreError {
    let start = Instant::now();
    let Err(error) = answer.await else { panic!("nobody can have answered") };
    assert!(error.is_unwell(), "{error}");
    assert!(start.elapsed() < ANSWERED_WITHIN, "{:?}", start.elapsed());
    error
}

/// And when it goes on, so does everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an S3 server: run scripts/test-buckets"]
async fn a_server_that_is_stopped_or_killed_is_unwell_and_not_empty() {
    let mut server = Server::start();
    let client = server.client();
    for killed in [false, true] {
        for number in 0..2 {
            assert_eq!(client.put(page(number)).await, Ok(Stored::New));
        }
        if killed {
            server.kill()
        } else {
            server.signal("-STOP")
        }
        in_time(client.get(page(0))).await;
        in_time(client.put(page(2))).await;
        in_time(client.put(page(0))).await;
        in_time(client.remove(page(1))).await;
        in_time(client.store.flush()).await;
        let ids = [page(0)];
        let asked = client.store.exists(&ids, ExistsOptions::default());
        in_time(async { asked.await.remove(0) }).await;
        if killed {
            server.start_again()
        } else {
            server.signal("-CONT")
        }
        client.get(page(0)).await.unwrap();
        client.store.flush().await.unwrap();
        for gone in [1, 2] {
            assert_eq!(client.get(page(gone)).await, Err(StoreError::Missing));
        }
        assert_eq!(client.put(page(2)).await, Ok(Stored::New));
        client.get(page(2)).await.unwrap();
        for number in [0, 2] {
            client.remove(page(number)).await.unwrap();
        }
        let stats = client.store.stats().remote.unwrap();
        assert_eq!((stats.objects, stats.resident_bytes), (0, 0), "{stats:#?}");
    }
}

/// Every byte that is read is checked by `Client::get`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an S3 server: run scripts/test-buckets"]
async fn nothing_is_wrong_whenever_the_server_fails() {
    let mut server = Server::start();
    let mut clients = JoinSet::new();
    let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    for number in 0..4 {
        let (client, over) = (server.client(), over.clone());
        clients.spawn(async move {
            let (mut served, mut failed) = (0, 0);
            for round in number.. {
                let start = Instant::now();
                let answers = [
                    client.put(page(round * 7 % 40)).await.map(drop),
                    client.get(page(round * 3 % 40)).await,
                    if round % 5 == 0 { client.remove(page(round % 40)).await } else { Ok(()) },
                ];
                assert!(start.elapsed() < 3 * ANSWERED_WITHIN, "{:?}", start.elapsed());
                served += u32::from(answers[1].is_ok());
                for error in answers.into_iter().filter_map(Result::err) {
                    let (missing, written) = (StoreError::Missing, StoreError::BeingWritten);
                    assert!(error.is_unwell() || error == missing || error == written, "{error}");
                    failed += u32::from(error.is_unwell());
                }
                if over.load(Ordering::Relaxed) {
                    break;
                }
            }
            (served, failed)
        });
    }
    let pause = |ms| tokio::time::sleep(Duration::from_millis(ms));
    for round in 0..4 {
        pause(700 + 130 * round).await;
        server.signal("-STOP");
        pause(1300).await;
        server.signal("-CONT");
        pause(700).await;
        server.kill();
        pause(500).await;
        server.start_again();
    }
    over.store(true, Ordering::Relaxed);
    for (served, failed) in clients.join_all().await {
        assert!(served > 20 && failed > 0, "{served} served, {failed} failed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an S3 server: run scripts/test-buckets"]
async fn what_the_server_damages_is_removed_and_reads_as_missing() {
    let server = Server::start();
    let client = server.client();
    type Damage = fn(&mut Vec<u8>);
    let damages: [Damage; 4] = [
        Vec::clear,
        |bytes| bytes.truncate(bytes.len() / 2),
        |bytes| bytes.fill(0xA5),
        |bytes| bytes[5000] ^= 1,
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        assert_eq!(client.put(page(0)).await, Ok(Stored::New));
        let files = leaves(&server.root.path().join(BUCKET));
        let file = files.iter().find(|file| file.is_file()).expect("it is there");
        let mut bytes = fs::read(file).unwrap();
        damage(&mut bytes);
        fs::write(file, bytes).unwrap();
        let damaged = client.get(page(0)).await;
        assert!(matches!(damaged, Err(StoreError::Corrupt(_))), "damage {number}: {damaged:?}");
        assert_eq!(client.get(page(0)).await, Err(StoreError::Missing), "damage {number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an S3 server: run scripts/test-buckets"]
async fn what_is_wrong_with_a_bucket_is_said() {
    let server = Server::start();
    let stranger = client_at(server.port, BUCKET, "another");
    let refused = stranger.put(page(0)).await.unwrap_err().to_string();
    assert!(refused.contains("credentials"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs an S3 server: run scripts/test-buckets"]
async fn clients_of_a_server_share_what_they_put() {
    let server = Server::start();
    let (one, other) = (server.client(), server.client());
    assert_eq!(one.put(page(0)).await, Ok(Stored::New));
    assert_eq!(other.put(page(0)).await, Ok(Stored::AlreadyThere));
    other.get(page(0)).await.unwrap();
    let generation = |number| page(1).with_generation(number);
    assert_eq!(one.put(generation(3)).await, Ok(Stored::New));
    assert_eq!(other.put(generation(2)).await, Err(StoreError::Superseded { present: 3 }));
    assert_eq!(other.put(generation(4)).await, Ok(Stored::New));
    assert_eq!(one.get(generation(3)).await, Err(StoreError::Missing));
    one.get(generation(4)).await.unwrap();
}

/// A server that has no such bucket, or anything else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_is_not_there_is_no_empty_one_to_whoever_puts() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for connection in listener.incoming().map_while(Result::ok) {
            let mut connection = connection;
            let mut request = [0; 64 << 10];
            // One request, which may come in pieces; all of it is read before the connection ends.
            connection.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            while connection.read(&mut request).is_ok_and(|read| read > 0) {}
            let answer = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = connection.write_all(answer.as_bytes());
        }
    });
    let client = client_at(port, "no-such-bucket", SECRET);
    let refused = client.put(page(0)).await.unwrap_err();
    assert!(refused.is_unwell() && refused.to_string().contains("no such bucket"), "{refused}");
}
