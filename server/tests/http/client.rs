//! A client that can be as careful or as rude as a test wants it to be.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A response, read to its end.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Response {
    /// Takes apart what a server sent until it closed the connection.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(bytes);
        let (head, body) = text.split_once("\r\n\r\n")?;
        let status = head.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
        let head = head.to_ascii_lowercase();
        let body = match head.contains("transfer-encoding: chunked") {
            true => unchunked(body),
            false => body.to_owned(),
        };
        Some(Self { status, head, body })
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The JSON of all events, without the closing mark, which must be there.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut data: Vec<_> =
            self.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{self:?}");
        data.into_iter().map(|json| serde_json::from_str(json).unwrap()).collect()
    }
}

fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap_or(0);
        if size == 0 || rest.len() < size + 2 {
            break;
        }
        text.push_str(&rest[..size]);
        body = &rest[size + 2..];
    }
    text
}

/// Sends bytes and reads until the server closes.
pub(crate) async fn exchange(address: SocketAddr, request: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // A server that has answered need not read the rest.
    let _ = stream.write_all(request).await;
    read_to_end(&mut stream).await
}

/// What comes until the server closes, which it must.
pub(crate) async fn read_to_end(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let reading = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut bytes));
    let _ = reading.await.expect("the server neither answers nor closes");
    bytes
}

/// A request as text.
pub(crate) fn request(method: &str, path: &str, headers: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

pub(crate) async fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> Response {
    let bytes = exchange(address, request(method, path, headers, body).as_bytes()).await;
    Response::parse(&bytes).unwrap_or_else(|| panic!("no response: {bytes:?}"))
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Response {
    send(address, "GET", path, "", "").await
}

pub(crate) async fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    send(address, "POST", path, "", &body.to_string()).await
}

/// The answer to a completion, which must succeed.
pub(crate) async fn complete(address: SocketAddr, body: &Value) -> Value {
    let response = post(address, "/v1/completions", body).await;
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

/// A header with a key.
pub(crate) fn key(key: &str) -> String {
    format!("Authorization: Bearer {key}\r\n")
}

/// Opens a stream and reads its beginning, up to the first event.
pub(crate) async fn begin(address: SocketAddr, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = request("POST", "/v1/completions", "", &body.to_string());
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("data: ") {
        let mut byte = [0];
        assert_eq!(stream.read(&mut byte).await.unwrap(), 1, "{seen:?}");
        seen.extend(byte);
    }
    stream
}

/// The first that the page of a server is told.
pub(crate) async fn first_view(address: SocketAddr, headers: &str) -> Value {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /ui/events HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut seen = String::new();
    loop {
        let mut bytes = [0; 4096];
        let count = stream.read(&mut bytes).await.unwrap();
        assert!(count > 0, "{seen}");
        seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        if let Some((_, data)) = seen.split_once("data: ")
            && let Some((json, _)) = data.split_once("\n\n")
        {
            return serde_json::from_str(json).unwrap();
        }
    }
}
