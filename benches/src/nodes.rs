//! Nodes over the loopback interface, against plain bytes over it in the same run.

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

/// What to measure.
#[derive(Clone, Debug)]
pub struct NodesWorkload {
    /// The sizes of objects.
    pub object_bytes: Vec<usize>,
    /// Objects in a batch.
    pub batch: u32,
    /// How much to move, each way, in each round.
    pub total_bytes: u64,
    /// Rounds.
    pub rounds: u32,
    /// How many objects to ask about at a time.
    pub exists: u32,
    /// Over how many nodes these are spread.
    pub nodes: u32,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct NodesFigures {
    /// For each size of objects.
    pub transfers: Vec<TransferFigures>,
    /// How many objects were asked about at a time.
    pub exists: u32,
    /// Over how many nodes.
    pub nodes: u32,
    /// How long it took.
    pub exists_us: Distribution,
}

/// How fast objects of one size moved between one client and one node.
#[derive(Clone, Debug, Serialize)]
pub struct TransferFigures {
    /// The size of an object.
    pub object_bytes: usize,
    /// Objects in a batch.
    pub batch: u32,
    /// Batches of puts, one after the other.
    pub put: Comparison,
    /// Batches of gets, one after the other.
    pub get: Comparison,
}

/// One way, beside plain bytes that went the same way in the same round: over one connection between
/// the same threads, a batch at a time, each acknowledged or asked for by one byte. Of all rounds it is
/// the one whose ratio is in the middle.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Comparison {
    /// Objects, in bytes a second.
    pub bytes_per_s: f64,
    /// Plain bytes, in bytes a second.
    pub plain_bytes_per_s: f64,
    /// The one to the other.
    pub ratio: f64,
}

impl Comparison {
    fn new(bytes: f64, seconds: f64, plain_seconds: f64) -> Self {
        let (bytes_per_s, plain_bytes_per_s) = (bytes / seconds, bytes / plain_seconds);
        Self { bytes_per_s, plain_bytes_per_s, ratio: bytes_per_s / plain_bytes_per_s }
    }

    /// The round whose ratio is in the middle.
    fn middle(rounds: Vec<Self>) -> Option<Self> {
        middle_by(rounds, |a, b| a.ratio.total_cmp(&b.ratio))
    }
}

impl NodesWorkload {
    /// Measures.
    ///
    /// # Errors
    /// When the system has no room or no ports for it.
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
        // The first round makes connections and touches memory.
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

    /// Seconds of putting and of getting so many batches.
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
            // Every other one is there.
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

/// Nodes with threads of their own, and a client with a thread of its own.
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
        // Measurements of a busy machine are slow, not failures.
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

    /// A connection between the threads of the client and of the nodes.
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

/// Bytes over one connection, and nothing else: the yardstick. It is used as those of nodes are, or it
/// would be none: a batch at a time, between the same threads, and read in pieces of the same size.
struct Plain {
    stream: TcpStream,
    batch: Vec<u8>,
}

impl Plain {
    const PUT: u8 = 1;
    const GET: u8 = 2;
    /// What a link reads at a time.
    const PIECE_BYTES: usize = 256 << 10;

    /// The other end, until the connection ends.
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

    /// Seconds of sending and of receiving so many batches.
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
    fn objects_and_plain_bytes_go_both_ways() {
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
