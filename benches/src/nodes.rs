//! Nodes over the loopback interface, against a plain stream of bytes over it in the same run.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Instant;

use serde::Serialize;
use terrace_l3::node::{Holding, NodeAddress, NodeConfig, NodeSecret, NodeServer, RunningNode};
use terrace_l3::{
    Arena, ExistsOptions, Get, GetOptions, MemoryConfig, MemoryStore, NodesConfig, NodesStore,
    ObjectId, Put, PutOptions, Removal, Store,
};
use tokio::runtime::{Builder, Runtime};

use crate::figures::{Distribution, median, nanos};
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

/// How fast objects of one size moved between one client and one node, in bytes a second: medians.
#[derive(Clone, Debug, Serialize)]
pub struct TransferFigures {
    /// The size of an object.
    pub object_bytes: usize,
    /// Objects in a batch.
    pub batch: u32,
    /// A plain stream, from one thread to another.
    pub plain: f64,
    /// Batches of puts, one after the other.
    pub put: f64,
    /// Batches of gets, one after the other.
    pub get: f64,
    /// Of puts to the stream: the median over the rounds.
    pub put_ratio: f64,
    /// Of gets to the stream: the median over the rounds.
    pub get_ratio: f64,
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
        let mut stream = Stream::new(self.batch, object_bytes)?;
        let mut rounds = Vec::new();
        for _ in 0..=self.rounds {
            let plain = stream.move_pages(batches)?;
            let (put, get) = setup.runtime.block_on(self.batches(&setup.store, &arena, batches))?;
            rounds.push([plain, put, get].map(|seconds| bytes / seconds));
        }
        // The first round makes connections and touches memory.
        rounds.remove(0);
        let over = |figure: fn(&[f64; 3]) -> f64| median(rounds.iter().map(figure));
        Ok(TransferFigures {
            object_bytes,
            batch: self.batch,
            plain: over(|round| round[0]),
            put: over(|round| round[1]),
            get: over(|round| round[2]),
            put_ratio: over(|round| round[1] / round[0]),
            get_ratio: over(|round| round[2] / round[0]),
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
    _node_runtime: Runtime,
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
            let node = NodeServer::bind("127.0.0.1:0", Holding::Memory(store), config)?.start()?;
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
        Ok(Self { store, runtime: runtime(1)?, _nodes: running, _node_runtime: node_runtime })
    }
}

fn runtime(threads: usize) -> std::io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(threads).enable_all().build()
}

/// A connection over which one thread sends as fast as another receives.
struct Stream {
    sender: TcpStream,
    receiver: TcpStream,
    /// As many as in a batch: bytes that never leave the processor's cache would be no yardstick.
    pages: Vec<Vec<u8>>,
    targets: Vec<Vec<u8>>,
}

impl Stream {
    fn new(pages: u32, page_bytes: usize) -> Result<Self, Failure> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let receiver = TcpStream::connect(listener.local_addr()?)?;
        let (sender, _) = listener.accept()?;
        let memory = |byte| vec![vec![byte; page_bytes]; pages as usize];
        Ok(Self { sender, receiver, pages: memory(1), targets: memory(2) })
    }

    /// Seconds of moving all pages so many times.
    fn move_pages(&mut self, times: u64) -> Result<f64, Failure> {
        let Self { sender, receiver, pages, targets } = self;
        let began = Instant::now();
        std::thread::scope(|scope| {
            let sending = scope.spawn(|| {
                (0..times)
                    .try_for_each(|_| pages.iter().try_for_each(|page| sender.write_all(page)))
            });
            let received = (0..times)
                .try_for_each(|_| targets.iter_mut().try_for_each(|it| receiver.read_exact(it)));
            let sent = sending.join().unwrap_or_else(|_| Err(std::io::Error::other("it died")));
            sent.and(received)
        })?;
        Ok(began.elapsed().as_secs_f64())
    }
}
