//! Clients that are slow, greedy or gone.

use std::time::{Duration, Instant};

use serde_json::json;
use terrace_server::{Config, Limits, Size};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

use crate::client::{Response, complete, exchange, read_to_end, request, send};
use crate::world::World;

/// Long enough for those who dawdle on a busy machine without meaning to.
const SHORT: Duration = Duration::from_secs(1);

async fn impatient() -> World {
    let limits = Limits {
        body_max: Size::kib(8),
        header_timeout: SHORT,
        body_timeout: SHORT,
        idle_timeout: SHORT * 10,
        write_timeout: SHORT,
        send_buffer: Size::kib(8),
        ..Limits::default()
    };
    World::new(Config { limits, ..Config::default() }, Duration::ZERO).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_long_is_refused() {
    let world = impatient().await;
    let body = json!({ "prompt": "x".repeat(10_000) }).to_string();
    let response = send(world.address, "POST", "/v1/completions", "", &body).await;
    assert_eq!(response.status, 413);
    // One that does not say how long it is.
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
        body.len()
    );
    let response = Response::parse(&exchange(world.address, chunked.as_bytes()).await).unwrap();
    assert_eq!(response.status, 413);
    complete(world.address, &json!({ "prompt": "short" })).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_must_come_in_time() {
    let world = impatient().await;
    for sent in ["", "POST /v1/comple"] {
        let began = Instant::now();
        let mut stream = TcpStream::connect(world.address).await.unwrap();
        stream.write_all(sent.as_bytes()).await.unwrap();
        read_to_end(&mut stream).await;
        assert!(began.elapsed() >= SHORT, "{sent:?}");
        assert!(began.elapsed() < SHORT * 10, "{sent:?} {:?}", began.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_may_be_idle_for_longer_than_a_head_may_take() {
    let world = impatient().await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    stream.write_all(ask).await.unwrap();
    tokio::time::sleep(SHORT * 2).await;
    stream.write_all(ask).await.unwrap();
    let began = Instant::now();
    let answers = String::from_utf8(read_to_end(&mut stream).await).unwrap();
    assert_eq!(answers.matches("200 OK").count(), 2, "{answers}");
    assert!(began.elapsed() >= SHORT * 9, "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_must_come_in_time() {
    let world = impatient().await;
    let mut stream = TcpStream::connect(world.address).await.unwrap();
    let request = request("POST", "/v1/completions", "", r#"{"prompt":"x"}"#);
    stream.write_all(&request.as_bytes()[..request.len() - 1]).await.unwrap();
    let response = Response::parse(&read_to_end(&mut stream).await).unwrap();
    assert_eq!(response.status, 408);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_takes_nothing_is_dropped() {
    let world = impatient().await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(world.address).await.unwrap();
    let body = json!({ "prompt": "x", "max_tokens": 50_000, "stream": true }).to_string();
    let request = request("POST", "/v1/completions", "", &body);
    stream.write_all(request.as_bytes()).await.unwrap();
    world.wait_for("calling it off", |figures| figures.scheduler.aborted == 1).await;
    let produced = world.figures().await.scheduler.generated_tokens;
    assert!(produced < 50_000, "it was over before it could be dropped");
    drop(stream);
    complete(world.address, &json!({ "prompt": "for others" })).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_limit_wait_for_their_turn() {
    let limits = Limits { connections_max: 1, ..Limits::default() };
    let world = World::new(Config { limits, ..Config::default() }, Duration::ZERO).await;
    let first = TcpStream::connect(world.address).await.unwrap();
    let address = world.address;
    let second =
        tokio::spawn(async move { complete(address, &json!({ "prompt": "second" })).await });
    tokio::time::sleep(SHORT).await;
    assert!(!second.is_finished());
    drop(first);
    second.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_engine_has_ended_ends_too() {
    let world = World::quick().await;
    world.engine.shutdown(Duration::ZERO).await;
    world.stopped().await;
}
