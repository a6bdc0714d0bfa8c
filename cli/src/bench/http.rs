//! A server as its clients see it, over HTTP.

use std::error::Error;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// A server that says nothing for so long has lost the request.
const SILENCE_MAX: Duration = Duration::from_secs(60);

pub(super) type Failure = Box<dyn Error + Send + Sync>;

/// A server, and the connections to it that are kept.
#[derive(Clone, Debug)]
pub(super) struct Server {
    /// Host and port.
    address: String,
    /// The operator's or a client's key.
    key: Option<String>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Server {
    pub(super) fn new(address: &str, key: Option<&str>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self {
            address: address.to_owned(),
            key: key.map(str::to_owned),
            client: Client::builder(TokioExecutor::new()).build(connector),
        }
    }

    /// The text at a path.
    pub(super) async fn get(&self, path: &str) -> Result<String, Failure> {
        let cannot = |error: Failure| {
            format!("{}: {error}; is `terrace serve` running there?", self.address)
        };
        let body = self.send(Method::GET, path, String::new()).await.map_err(cannot)?;
        let bytes = tokio::time::timeout(SILENCE_MAX, body.collect()).await??.to_bytes();
        Ok(String::from_utf8(bytes.into())?)
    }

    /// Sends JSON, and gives the answer line by line as it comes.
    pub(super) async fn post(&self, path: &str, json: String) -> Result<Lines, Failure> {
        let body = self.send(Method::POST, path, json).await?;
        Ok(Lines { body, buffer: BytesMut::new() })
    }

    async fn send(&self, method: Method, path: &str, json: String) -> Result<Incoming, Failure> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{path}", self.address))
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let response = self.client.request(request.body(Full::from(json))?);
        let response = tokio::time::timeout(SILENCE_MAX, response).await?.map_err(in_full)?;
        match response.status() {
            StatusCode::OK => Ok(response.into_body()),
            status => {
                let rest = response.into_body().collect().await?.to_bytes();
                Err(format!("{path}: {status}: {}", String::from_utf8_lossy(&rest)).into())
            }
        }
    }
}

/// What the client says of an error is only which part of it failed; what happened there is behind it.
fn in_full(error: hyper_util::client::legacy::Error) -> Failure {
    match error.source() {
        Some(source) => format!("{error}: {source}").into(),
        None => error.into(),
    }
}

/// The lines of an answer as they come.
#[derive(Debug)]
pub(super) struct Lines {
    body: Incoming,
    buffer: BytesMut,
}

impl Lines {
    /// The next line without its end; none after the last whole one.
    pub(super) async fn next(&mut self) -> Result<Option<String>, Failure> {
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line = self.buffer.split_to(end);
                self.buffer.advance(1);
                return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
            }
            match tokio::time::timeout(SILENCE_MAX, self.body.frame()).await? {
                None => return Ok(None),
                Some(frame) => self.buffer.extend(frame?.data_ref().into_iter().flatten()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// A server that gives one answer to whoever asks, and tells what it was asked.
    async fn asked(answer: &'static str) -> (Server, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Server::new(&listener.local_addr().unwrap().to_string(), Some("hush"));
        let told = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
            String::from_utf8_lossy(&request[..length]).into_owned()
        });
        (server, told)
    }

    #[tokio::test]
    async fn lines_are_whole_however_the_answer_is_cut() {
        let (server, told) = asked(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\
             3\r\none\r\n8\r\n\r\ntwo\n\nr\r\n4\r\nest!\r\n0\r\n\r\n",
        )
        .await;
        let mut lines = server.post("/path", "{}".to_owned()).await.unwrap();
        let mut found = Vec::new();
        while let Some(line) = lines.next().await.unwrap() {
            found.push(line);
        }
        assert_eq!(found, ["one", "two", ""]);
        let request = told.await.unwrap().to_lowercase();
        assert!(request.starts_with("post /path http/1.1\r\n"), "{request}");
        assert!(request.contains("authorization: bearer hush\r\n"), "{request}");
    }

    #[tokio::test]
    async fn an_error_says_what_the_server_said() {
        let answer = "HTTP/1.1 401 Unauthorized\r\ncontent-length: 6\r\n\r\nno key";
        let (server, _told) = asked(answer).await;
        let error = server.get("/metrics").await.unwrap_err().to_string();
        for part in ["/metrics", "401", "no key", "is `terrace serve` running there?"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
