//! Nodes over the loopback interface, compared with a plain TCP stream in the same run.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use terrace_kit::middle_by;
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, MemoryConfig, MemoryStore, ObjectId, Put, PutOptions,
    Removal, Store,
};
use terrace_l3_nodes::{
    NodeAddress, NodeConfig, NodeSecret, NodeServer, NodesConfig, NodesStore, RunningNode,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};

use crate::figures::{Distribution, nanos};
use crate::l3::{all, id};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Parameters of the benchmark.
#[derive(Clone, Debug)]
pub struct NodesWorkload {
    /// Object sizes.
    pub object_bytes: Vec<usize>,
    /// Objects per batch.
    pub batch: u32,
    /// Bytes to move in each direction per round.
    pub total_bytes: u64,
    /// Number of rounds.
    pub rounds: u32,
    /// Objects per lookup.
    pub exists: u32,
    /// Number of nodes for lookups.
    pub nodes: u32,
}

/// Results of the benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct NodesFigures {
    /// Transfers, by object size.
    pub transfers: Vec<TransferFigures>,
    /// Objects per lookup.
    pub exists: u32,
    /// Number of nodes.
    pub nodes: u32,
    /// Time of a lookup.
    pub exists_us: Distribution,
}

/// Speeds of transfers between one client and one node, for one object size.
#[derive(Clone, Debug, Serialize)]
pub struct TransferFigures {
    /// Size of an object.
    pub object_bytes: usize,
    /// Objects per batch.
    pub batch: u32,
    /// Sequential batches of puts.
    pub put: Comparison,
    /// Sequential batches of gets.
    pub get: Comparison,
}

/// Speed in one direction, with that of a plain stream in the same round: over one connection
/// between the same threads, a batch at a time, each acknowledged or requested by one byte. Of all
/// rounds, the one with the median ratio.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Comparison {
    /// Objects, in bytes per second.
    pub bytes_per_s: f64,
    /// Plain stream, in bytes per second.
    pub plain_bytes_per_s: f64,
    /// Ratio of objects to plain stream.
    pub ratio: f64,
}

impl Comparison {
    fn new(bytes: f64, seconds: f64, plain_seconds: f64) -> Self {
        let (bytes_per_s, plain_bytes_per_s) = (bytes / seconds, bytes / plain_seconds);
        Self { bytes_per_s, plain_bytes_per_s, ratio: bytes_per_s / plain_bytes_per_s }
    }

    /// Returns the round with the median ratio.
    fn middle(rounds: Vec<Self>) -> Option<Self> {
        middle_by(rounds, |a, b| a.ratio.total_cmp(&b.ratio))
    }
}

impl NodesWorkload {
    /// Runs the benchmark.
    ///
    /// # Errors
    /// Fails if the system lacks memory or ports.
    pub fn run(&self) -> Result<NodesFigures, Failure> {
        let transfers = self.object_bytes.iter().map(|bytes| self.transfers(*bytes));
        Ok(NodesFigures {
            transfers: transfers.collect::<Result<_, _>>()?,
            exists: self.exists,
            nodes: self.nodes,
            exists_us: self.exists()?,
        })
    }

    fn transfers(&self, object_bytes: usize) -> Result<TransferFigures, Failure> {
        let setup = Setup::new(1, object_bytes, 2 * self.batch)?;
        let arena = Arena::new(self.batch, object_bytes)?;
        for page in 0..self.batch {
            arena.target(page)?.fill(page as u8 | 1);
        }
        let _registration = setup.store.register(&arena)?;
        let batches = (self.total_bytes / (u64::from(self.batch) * object_bytes as u64)).max(1);
        let bytes = (batches * u64::from(self.batch) * object_bytes as u64) as f64;
        let mut plain = setup.plain(self.batch as usize * object_bytes)?;
        let (mut puts, mut gets) = (Vec::new(), Vec::new());
        // The first round opens connections and touches memory.
        for round in 0..=self.rounds {
            let (plain_put, plain_get) = setup.runtime.block_on(plain.batches(batches))?;
            let (put, get) = setup.runtime.block_on(self.batches(&setup.store, &arena, batches))?;
            if round > 0 {
                puts.push(Comparison::new(bytes, put, plain_put));
                gets.push(Comparison::new(bytes, get, plain_get));
            }
        }
        let none = "nothing was measured: ask for at least one round";
        Ok(TransferFigures {
            object_bytes,
            batch: self.batch,
            put: Comparison::middle(puts).ok_or(none)?,
            get: Comparison::middle(gets).ok_or(none)?,
        })
    }

    /// Returns the seconds of putting and of getting `batches` batches.
    async fn batches(
        &self,
        store: &NodesStore,
        arena: &Arena,
        batches: u64,
    ) -> Result<(f64, f64), Failure> {
        let ids: Vec<ObjectId> = (0..self.batch).map(id).collect();
        let (mut put_seconds, mut get_seconds) = (0.0, 0.0);
        for _ in 0..batches {
            let put = |(id, page): (&ObjectId, u32)| Ok(Put::new(*id, arena.source(page)?));
            let puts = ids.iter().zip(0..).map(put).collect::<Result<_, Failure>>()?;
            let began = Instant::now();
            all(store.put_from(puts, PutOptions::default()).await)?;
            put_seconds += began.elapsed().as_secs_f64();
            let get = |(id, page): (&ObjectId, u32)| Ok(Get::new(*id, arena.target(page)?));
            let gets = ids.iter().zip(0..).map(get).collect::<Result<_, Failure>>()?;
            let began = Instant::now();
            all(store.get_into(gets, GetOptions::default()).await)?;
            get_seconds += began.elapsed().as_secs_f64();
            all(store.remove(&ids, Removal::Forced).await)?;
        }
        Ok((put_seconds, get_seconds))
    }

    fn exists(&self) -> Result<Distribution, Failure> {
        const OBJECT_BYTES: usize = 64;
        const ASKED: usize = 300;
        let setup = Setup::new(self.nodes, OBJECT_BYTES, 2 * self.exists)?;
        let arena = Arena::new(self.exists, OBJECT_BYTES)?;
        let _registration = setup.store.register(&arena)?;
        let ids: Vec<ObjectId> = (0..self.exists).map(id).collect();
        setup.runtime.block_on(async {
            let put = |(id, page): (&ObjectId, u32)| Ok(Put::new(*id, arena.source(page)?));
            // Every other object exists.
            let puts = ids.iter().zip(0..).step_by(2).map(put).collect::<Result<_, Failure>>()?;
            all(setup.store.put_from(puts, PutOptions::default()).await)?;
            let mut samples = Vec::new();
            for _ in 0..ASKED + ASKED / 10 {
                let began = Instant::now();
                let found = setup.store.exists(&ids, ExistsOptions::default()).await;
                samples.push(nanos(began.elapsed()));
                let there = found.iter().flatten().filter(|found| found.is_present()).count();
                if there != ids.len().div_ceil(2) {
                    return Err(format!("{there} of {} objects were found", ids.len()).into());
                }
            }
            Ok(Distribution::of(samples.split_off(ASKED / 10)))
        })
    }
}

/// Nodes on separate threads, and a client on another.
struct Setup {
    store: NodesStore,
    runtime: Runtime,
    _nodes: Vec<RunningNode>,
    node_runtime: Runtime,
}

impl Setup {
    fn new(nodes: u32, object_bytes: usize, objects: u32) -> Result<Self, Failure> {
        let secret = NodeSecret::new(b"for this measurement alone")?;
        let node_runtime = runtime(nodes as usize)?;
        let entered = node_runtime.enter();
        let (mut running, mut addresses) = (Vec::new(), Vec::new());
        for number in 0..nodes {
            let capacity = u64::from(objects) * object_bytes as u64;
            let store = MemoryStore::new(MemoryConfig::new(capacity, object_bytes))?;
            let config = NodeConfig::new(secret.clone());
            let node = NodeServer::bind("127.0.0.1:0", Arc::new(store), config)?.start()?;
            let (name, address) = (format!("node-{number}"), node.address().to_string());
            addresses.push(NodeAddress { name, address, weight: 1.0 });
            running.push(node);
        }
        drop(entered);
        // On a busy machine measurements are slow, not failures.
        let patient = NodesConfig {
            connect_timeout_ms: 5_000,
            exists_timeout_ms: 5_000,
            get_timeout_ms: 10_000,
            stall_timeout_ms: 10_000,
            ..NodesConfig::new(addresses, secret)
        };
        let store = NodesStore::new(patient)?;
        Ok(Self { store, runtime: runtime(1)?, _nodes: running, node_runtime })
    }

    /// Opens a connection between the threads of the client and of the nodes.
    fn plain(&self, batch_bytes: usize) -> Result<Plain, Failure> {
        let listener = self.node_runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))?;
        let stream = self.runtime.block_on(TcpStream::connect(listener.local_addr()?))?;
        stream.set_nodelay(true)?;
        let (other, _) = self.node_runtime.block_on(listener.accept())?;
        other.set_nodelay(true)?;
        self.node_runtime.spawn(Plain::serve(other, vec![2; batch_bytes]));
        Ok(Plain { stream, batch: vec![1; batch_bytes] })
    }
}

fn runtime(threads: usize) -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(threads).enable_all().build()
}

/// A plain TCP stream as the reference. It is used like a node's connection: a batch at a time,
/// between the same threads, and read in pieces of the same size.
struct Plain {
    stream: TcpStream,
    batch: Vec<u8>,
}

impl Plain {
    const PUT: u8 = 1;
    const GET: u8 = 2;
    /// Bytes that a link reads at a time.
    const PIECE_BYTES: usize = 256 << 10;

    /// Serves the other end until the connection ends.
    async fn serve(mut stream: TcpStream, mut batch: Vec<u8>) -> std::io::Result<()> {
        loop {
            match stream.read_u8().await? {
                Self::PUT => {
                    Self::read(&mut stream, &mut batch).await?;
                    stream.write_u8(Self::PUT).await?;
                }
                _ => stream.write_all(&batch).await?,
            }
        }
    }

    /// Returns the seconds of sending and of receiving `batches` batches.
    async fn batches(&mut self, batches: u64) -> Result<(f64, f64), Failure> {
        let Self { stream, batch } = self;
        let (mut put_seconds, mut get_seconds) = (0.0, 0.0);
        for _ in 0..batches {
            let began = Instant::now();
            stream.write_u8(Self::PUT).await?;
            stream.write_all(batch).await?;
            stream.read_u8().await?;
            put_seconds += began.elapsed().as_secs_f64();
            let began = Instant::now();
            stream.write_u8(Self::GET).await?;
            Self::read(stream, batch).await?;
            get_seconds += began.elapsed().as_secs_f64();
        }
        Ok((put_seconds, get_seconds))
    }

    async fn read(stream: &mut TcpStream, batch: &mut [u8]) -> std::io::Result<()> {
        for piece in batch.chunks_mut(Self::PIECE_BYTES) {
            stream.read_exact(piece).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_and_ratios_are_of_one_round() {
        let rounds = [(2.0, 1.0), (1.0, 4.0), (3.0, 3.0)];
        let rounds = rounds.map(|(seconds, plain)| Comparison::new(12.0, seconds, plain));
        let middle = Comparison::middle(rounds.to_vec()).unwrap();
        assert_eq!((middle.bytes_per_s, middle.plain_bytes_per_s, middle.ratio), (4.0, 4.0, 1.0));
    }

    #[test]
    fn transfers_objects_and_plain_bytes_both_ways() {
        let workload = NodesWorkload {
            object_bytes: vec![4096],
            batch: 2,
            total_bytes: 64 << 10,
            rounds: 1,
            exists: 4,
            nodes: 1,
        };
        let figures = workload.run().unwrap();
        let TransferFigures { put, get, .. } = &figures.transfers[0];
        for it in [put, get] {
            assert!(it.bytes_per_s > 0.0 && it.plain_bytes_per_s > 0.0, "{it:?}");
            assert!((it.ratio * it.plain_bytes_per_s / it.bytes_per_s - 1.0).abs() < 1e-9);
        }
    }
}
