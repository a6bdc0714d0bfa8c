//! A client's connection that does not wait for ever.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::config::Limits;

/// A connection whose client must send the head of a request within some time of its first byte, and
/// must take something of an answer every so often.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    exchanges: Arc<Exchanges>,
    header_timeout: Duration,
    write_timeout: Duration,
    /// Runs from the first byte of a head, with the number of exchanges that had begun then.
    head: Option<(u64, Pin<Box<Sleep>>)>,
    /// Runs while the client takes nothing.
    write: Option<Pin<Box<Sleep>>>,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream, exchanges: Arc<Exchanges>, limits: &Limits) -> Self {
        // Whoever connects is about to ask.
        let head = Some((0, sleep(limits.header_timeout)));
        let (header_timeout, write_timeout) = (limits.header_timeout, limits.write_timeout);
        Self { stream, exchanges, header_timeout, write_timeout, head, write: None }
    }

    /// Whether the client takes too long over the head of a request.
    fn head_is_late(&mut self, context: &mut Context<'_>) -> bool {
        let begun = self.exchanges.begun.load(Ordering::Relaxed);
        match &mut self.head {
            Some((number, sleep)) if *number == begun => sleep.as_mut().poll(context).is_ready(),
            // That head is complete: its exchange has begun.
            Some(_) => {
                self.head = None;
                false
            }
            None => false,
        }
    }

    /// Starts the time for a head if this is its first byte.
    fn bytes_came(&mut self) {
        let begun = self.exchanges.begun.load(Ordering::Relaxed);
        let is_timed = self.head.as_ref().is_some_and(|(number, _)| *number == begun);
        if !is_timed && !self.exchanges.is_open() {
            self.head = Some((begun, sleep(self.header_timeout)));
        }
    }

    /// The outcome of a write, which may not be pending for too long.
    fn timed<T>(
        &mut self,
        context: &mut Context<'_>,
        outcome: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.write = None;
            return outcome;
        }
        let timeout = self.write_timeout;
        let late = self.write.get_or_insert_with(|| sleep(timeout));
        ready!(late.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client does not read its response",
        )))
    }
}

fn sleep(time: Duration) -> Pin<Box<Sleep>> {
    Box::pin(tokio::time::sleep_until(Instant::now() + time))
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled = buffer.filled().len();
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Pending if self.head_is_late(context) => {
                let late = "the request header did not arrive in time";
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, late)))
            }
            Poll::Pending => Poll::Pending,
            Poll::Ready(outcome) => {
                if buffer.filled().len() > filled {
                    self.bytes_came();
                }
                Poll::Ready(outcome)
            }
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.timed(context, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.timed(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The stream keeps nothing back, so this says nothing about what the client takes.
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_shutdown(context);
        self.timed(context, outcome)
    }
}

/// The requests of a connection and their responses.
#[derive(Debug, Default)]
pub(crate) struct Exchanges {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl Exchanges {
    /// A request has come. Its exchange ends when the returned value is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> Exchange {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Exchange(self.clone())
    }

    fn is_open(&self) -> bool {
        self.begun.load(Ordering::Relaxed) != self.ended.load(Ordering::Relaxed)
    }
}

/// A request that is not answered yet.
#[derive(Debug)]
pub(crate) struct Exchange(Arc<Exchanges>);

impl Drop for Exchange {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// The body of a response, whose end is the end of an exchange.
#[derive(Debug)]
pub(crate) struct LastPart {
    pub(crate) body: Body,
    pub(crate) _exchange: Exchange,
}

impl HttpBody for LastPart {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
