//! Addresses of event sockets, in ZeroMQ's notation.

use std::fmt;
use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};

/// An address like `tcp://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Direction in which a publisher connects to subscribers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Door {
    /// Listens for subscribers: `tcp://HOST:PORT`, with `*` for all addresses of this machine.
    Open(Endpoint),
    /// Connects to a waiting subscriber: `connect:tcp://HOST:PORT`.
    Knock(Endpoint),
}

/// An invalid address.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not an event endpoint: write it as tcp://HOST:PORT")]
pub struct EndpointError(String);

impl Endpoint {
    pub(crate) async fn connect(&self) -> io::Result<TcpStream> {
        let stream = TcpStream::connect((&*self.host, self.port)).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    pub(crate) async fn listen(&self) -> io::Result<TcpListener> {
        match &*self.host {
            "*" => TcpListener::bind(("0.0.0.0", self.port)).await,
            host => TcpListener::bind((host, self.port)).await,
        }
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        let parts = text.trim().strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':'));
        let wrong = || EndpointError(text.to_owned());
        let (host, port) = parts.ok_or_else(wrong)?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() || host.contains('/') {
            return Err(wrong());
        }
        Ok(Self { host: host.to_owned(), port: port.parse().map_err(|_| wrong())? })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "tcp://[{}]:{}", self.host, self.port),
            false => write!(f, "tcp://{}:{}", self.host, self.port),
        }
    }
}

impl FromStr for Door {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        match text.strip_prefix("connect:") {
            Some(endpoint) => endpoint.parse().map(Self::Knock),
            None => text.parse().map(Self::Open),
        }
    }
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(endpoint) => endpoint.fmt(f),
            Self::Knock(endpoint) => write!(f, "connect:{endpoint}"),
        }
    }
}

macro_rules! as_text {
    ($($type:ty)*) => {$(
        impl TryFrom<String> for $type {
            type Error = EndpointError;

            fn try_from(text: String) -> Result<Self, EndpointError> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(value: $type) -> Self {
                value.to_string()
            }
        }
    )*};
}

as_text! { Door Endpoint }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["tcp://*:5557", "tcp://10.0.0.1:5557", "tcp://[::1]:5557", "tcp://a.b:1"] {
            assert_eq!(text.parse::<Endpoint>().unwrap().to_string(), text);
            let knock = format!("connect:{text}");
            assert_eq!(knock.parse::<Door>().unwrap().to_string(), knock);
        }
        for wrong in ["", "5557", "tcp://", "tcp://:1", "tcp://a", "tcp://a:b", "ipc:///x:1"] {
            assert!(wrong.parse::<Door>().is_err(), "{wrong}");
        }
    }
}
