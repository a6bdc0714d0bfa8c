//! Accepts connections and serves them, as many as there may be at a time.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use crate::config::Limits;
use crate::connection::{Connection, Exchanges, LastPart};

/// How long connections may take to end once there is nothing more to say.
const FAREWELL: Duration = Duration::from_secs(2);
/// A pause after the system could not accept a connection, in the hope that it can then.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest head of a request, and what is kept of an answer before the client has taken it.
const BUFFER_BYTES: usize = 64 << 10;

/// Serves connections until `closed` says so, and then waits a little for those that are open.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    mut closed: watch::Receiver<bool>,
) {
    let slots = Arc::new(Semaphore::new(limits.connections_max));
    let limits = Arc::new(limits);
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            _ = closed.wait_for(|closed| *closed) => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = accept(&listener, &slots) => accepted,
        };
        match accepted {
            Ok((stream, slot)) => {
                let (router, limits, closed) = (router.clone(), limits.clone(), closed.clone());
                connections.spawn(serve_one(stream, router, limits, closed, slot));
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    drop(listener);
    let farewell = async { while connections.join_next().await.is_some() {} };
    let _ = tokio::time::timeout(FAREWELL, farewell).await;
    // What is left is dropped, and its connections with it.
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let slot = slots.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, slot))
}

async fn serve_one(
    stream: TcpStream,
    router: Router,
    limits: Arc<Limits>,
    mut closed: watch::Receiver<bool>,
    _slot: OwnedSemaphorePermit,
) {
    if let Err(error) = prepare(&stream, &limits) {
        tracing::debug!("cannot set up a connection: {error}");
        return;
    }
    let exchanges = Arc::new(Exchanges::default());
    let connection = Connection::new(stream, exchanges.clone(), &limits);
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |request: Request<Incoming>| {
        let exchange = exchanges.begin();
        let response = router.call(request);
        async move {
            let response: Response = response.await?;
            let last = |body| LastPart { body, _exchange: exchange };
            Ok::<_, Infallible>(response.map(last))
        }
    });
    // What hyper calls the time for a head includes the time before its first byte.
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.idle_timeout)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(connection), service);
    let mut served = pin!(served);
    let mut ended = tokio::select! {
        ended = served.as_mut() => Some(ended),
        _ = closed.wait_for(|closed| *closed) => None,
    };
    if ended.is_none() {
        served.as_mut().graceful_shutdown();
        ended = Some(served.await);
    }
    if let Some(Err(error)) = ended {
        tracing::debug!("a connection ended: {error}");
    }
}

/// Has the system notice clients that are gone, and keep no more for a client than it should.
fn prepare(stream: &TcpStream, limits: &Limits) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_send_buffer_size(limits.send_buffer.as_u64() as usize)?;
    let keepalive = TcpKeepalive::new().with_time(limits.idle_timeout.max(Duration::from_secs(1)));
    socket.set_tcp_keepalive(&keepalive)?;
    // A client that is there and takes nothing is dropped by its connection; this is for one that is
    // not there, should the connection have nothing to write.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(limits.write_timeout + Duration::from_secs(30)))?;
    Ok(())
}
