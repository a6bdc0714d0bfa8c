//! Tells routers what the cache holds: from the engine's events to a publisher's batches.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use terrace_engine::KvFeed;
use terrace_routing::{
    Door, L3Sharing, Manner, Publisher, PublisherConfig, SnapshotWanted, encode,
};
use terrace_scheduler::{KvEvent, KvEvents, PageKey};

use crate::config::{Config, L3Choice};
use crate::state::State;

/// Batches that may wait to be told. What does not fit is told as a snapshot of everything.
const WAITING_MAX: usize = 256;
/// Namespaces whose salts are remembered.
const NAMESPACES_MAX: usize = 4096;

/// Tells events until the engine ends.
#[derive(Debug)]
pub(crate) struct KvTeller {
    publisher: Arc<Publisher>,
    wanted: SnapshotWanted,
    manner: Manner,
    door: Door,
    /// What tells the pages of a namespace from those of requests without a salt.
    extra_keys: HashMap<PageKey, Option<String>>,
}

impl KvTeller {
    /// Takes the addresses, if routers are to be told anything.
    ///
    /// # Errors
    /// When an address cannot be had.
    pub(crate) async fn open(config: &Config) -> io::Result<Option<Self>> {
        let Some(door) = config.kv_events.clone() else { return Ok(None) };
        let (publisher, wanted) = Publisher::open(PublisherConfig {
            door: door.clone(),
            replay: config.kv_events_replay.clone(),
            topic: config.kv_events_topic.clone(),
            batches_max: config.kv_events_buffer,
        })
        .await?;
        let l3 = config.kv_events_l3.then(|| sharing(config.l3.as_ref()));
        let manner = Manner { page_size: config.page_size, l3 };
        let publisher = Arc::new(publisher);
        Ok(Some(Self { publisher, wanted, manner, door, extra_keys: HashMap::new() }))
    }

    pub(crate) fn publisher(&self) -> Arc<Publisher> {
        self.publisher.clone()
    }

    /// Where it tells them, in words.
    pub(crate) fn place(&self) -> String {
        let events = match (&self.door, self.publisher.events_address()) {
            (Door::Open(_), Some(address)) => format!("tcp://{address}"),
            (door, _) => door.to_string(),
        };
        match self.publisher.replay_address() {
            Some(replay) => format!("{events}, replay at tcp://{replay}"),
            None => events,
        }
    }

    pub(crate) async fn run(mut self, state: Arc<State>) {
        let Some(mut feed) = state.engine.kv_events(WAITING_MAX).await else { return };
        // The number of the event after those that were told.
        let mut next = 0;
        loop {
            tokio::select! {
                events = feed.next() => {
                    let Some(events) = events else { return };
                    next = events.next;
                    self.tell(&state, &events).await;
                }
                asked = self.wanted.next(&self.publisher) => {
                    let Some(_answered) = asked else { return };
                    let Some(after) = self.make_whole(&state, &mut feed, next).await else { return };
                    next = after;
                }
            }
        }
    }

    async fn tell(&mut self, state: &State, events: &KvEvents) {
        if let Some(payload) = self.payload(state, events).await {
            self.publisher.publish(&payload, events.is_snapshot);
        }
    }

    /// Keeps all that is held after some batch, for one who has missed more than is kept. The batches up to there are
    /// told meanwhile; the number of the event after them.
    async fn make_whole(&mut self, state: &State, feed: &mut KvFeed, told: u64) -> Option<u64> {
        let snapshot = state.engine.kv_events(1).await?.next().await?;
        let mut next = told;
        while next < snapshot.next {
            let events = feed.next().await?;
            next = events.next;
            self.tell(state, &events).await;
        }
        // If it is later, all that is held was told meanwhile, to everybody.
        if next == snapshot.next
            && let Some(payload) = self.payload(state, &snapshot).await
        {
            self.publisher.keep_whole(&payload);
        }
        Some(next)
    }

    async fn payload(&mut self, state: &State, events: &KvEvents) -> Option<Vec<u8>> {
        for event in events.iter() {
            match event {
                KvEvent::Stored { namespace, parent, .. } if namespace == parent => {
                    self.learn(state, namespace).await;
                }
                KvEvent::Stored { .. } | KvEvent::Removed { .. } | KvEvent::Cleared => {}
            }
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        encode(events, now.as_secs_f64(), self.manner, |namespace| {
            self.extra_keys.get(&namespace).cloned().flatten()
        })
    }

    /// Finds out which salt a namespace has. One that nobody remembers is told apart by its digest.
    async fn learn(&mut self, state: &State, namespace: PageKey) {
        if self.extra_keys.contains_key(&namespace) {
            return;
        }
        if self.extra_keys.len() >= NAMESPACES_MAX {
            self.extra_keys.clear();
        }
        let mut salts = state.salts.lock().all();
        salts.push(String::new());
        let namespaces = state.engine.namespaces(salts.clone()).await.unwrap_or_default();
        let learned = namespaces.into_iter().zip(salts.iter().map(|salt| extra_key(salt)));
        self.extra_keys.extend(learned);
        self.extra_keys.entry(namespace).or_insert_with(|| Some(format!("{:032x}", namespace.0)));
    }
}

/// What events say of a salt: nothing if there is none, and else what the request said, as other engines do, or what
/// stands for tenant and salt.
pub(crate) fn extra_key(salt: &str) -> Option<String> {
    (!salt.is_empty()).then(|| salt.strip_prefix(':').unwrap_or(salt).to_owned())
}

/// A folder and memory are this server's own.
fn sharing(l3: Option<&L3Choice>) -> L3Sharing {
    match l3 {
        None | Some(L3Choice::None | L3Choice::Disk(_) | L3Choice::Memory(_)) => L3Sharing::Own,
        Some(L3Choice::Mooncake(_) | L3Choice::Nodes(_) | L3Choice::Bucket(_)) => L3Sharing::Shared,
    }
}
