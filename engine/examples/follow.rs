//! A router that follows the contents of an engine's cache: `cargo run --example follow -p
//! terrace-engine`.
//!
//! It starts from a snapshot and applies the events that follow. It then knows how many tokens of a
//! prompt the engine has cached without a query.

use std::collections::{HashMap, HashSet};
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use terrace_engine::{
    CpuDevice, CpuMemory, Engine, Forward, Generate, KvEvent, KvEvents, KvFeed, KvLayout, KvShape,
    KvTier, Logits, ModelError, Step, Threaded,
};
use terrace_scheduler::{Config, PageKey, Token};

const PAGE_SIZE: u32 = 4;

/// A router's copy of the cache state of one engine.
#[derive(Default)]
struct Router {
    /// Number of the next expected event.
    expected: u64,
    /// Key of the page with the given tokens behind a parent page. The namespace is the parent of a
    /// prompt's first page.
    pages: HashMap<(PageKey, Vec<Token>), PageKey>,
    /// Pages held, by tier.
    held: HashSet<(KvTier, PageKey)>,
}

impl Router {
    /// Applies events. Returns false if events are missing before them; a snapshot is then needed.
    fn hear(&mut self, events: &KvEvents) -> bool {
        if events.is_snapshot {
            *self = Self { expected: events.next, ..Self::default() };
        }
        let Some(news) = events.from_number(self.expected) else { return false };
        for event in news {
            match event {
                KvEvent::Stored { tier, parent, keys, tokens, .. } => {
                    let mut before = parent;
                    for (&key, tokens) in keys.iter().zip(tokens.chunks(PAGE_SIZE as usize)) {
                        self.pages.insert((before, tokens.to_vec()), key);
                        self.held.insert((tier, key));
                        before = key;
                    }
                }
                KvEvent::Removed { tier, keys, .. } => {
                    for &key in keys.iter() {
                        self.held.remove(&(tier, key));
                    }
                }
                KvEvent::Cleared => self.held.retain(|(tier, _)| *tier == KvTier::L3),
            }
        }
        self.expected = self.expected.max(events.next);
        true
    }

    /// Returns the number of tokens of a prompt that the engine has on device or host.
    fn cached_tokens(&self, namespace: PageKey, prompt: &[Token]) -> usize {
        let mut before = namespace;
        let pages = prompt.chunks_exact(PAGE_SIZE as usize).take_while(|page| {
            let Some(&key) = self.pages.get(&(before, page.to_vec())) else { return false };
            before = key;
            [KvTier::Device, KvTier::Host].iter().any(|&tier| self.held.contains(&(tier, key)))
        });
        pages.count() * PAGE_SIZE as usize
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let layout = Counter.kv_layout().pages(PAGE_SIZE)?;
    let device = CpuDevice::new(64, 64, layout)?;
    let config = Config::builder().page_size(PAGE_SIZE).build()?;
    let engine = Engine::start(config, Threaded::new(Counter), Arc::new(device), None)?;

    let mut feed = engine.kv_events(16).await.ok_or("the engine has ended")?;
    let mut router = Router::default();
    let greeting: Vec<Token> = (1..=12).collect();
    ask(&engine, &greeting).await?;
    let namespace = follow(&mut feed, &mut router).await.ok_or("nothing was told")?;

    for prompt in [greeting.clone(), [&greeting[..8], &[7, 7, 7, 7]].concat(), vec![9; 12]] {
        let cached = router.cached_tokens(namespace, &prompt);
        println!("of {prompt:?} the engine has {cached} tokens");
    }
    engine.clear_cache().await;
    follow(&mut feed, &mut router).await;
    println!("cleared: {} tokens are left", router.cached_tokens(namespace, &greeting));
    engine.shutdown(Duration::from_secs(5)).await;
    Ok(())
}

/// Applies all events until none arrive for a while, and returns the namespace of the events.
async fn follow(feed: &mut KvFeed, router: &mut Router) -> Option<PageKey> {
    let mut about = None;
    while let Ok(Some(events)) = tokio::time::timeout(Duration::from_millis(200), feed.next()).await
    {
        println!("{}", describe(&events));
        assert!(router.hear(&events), "a feed has no gaps: those are for what travels further");
        about = events.iter().fold(about, |about, event| match event {
            KvEvent::Stored { namespace, .. } => Some(namespace),
            KvEvent::Removed { .. } | KvEvent::Cleared => about,
        });
    }
    about
}

fn describe(events: &KvEvents) -> String {
    let told = events.iter().map(|event| match event {
        KvEvent::Stored { tier, keys, .. } => format!("{} pages on {tier:?}", keys.len()),
        KvEvent::Removed { tier, keys, .. } => format!("{} pages gone from {tier:?}", keys.len()),
        KvEvent::Cleared => "cleared".to_owned(),
    });
    let told = told.collect::<Vec<_>>().join(", ");
    match events.is_snapshot {
        true => format!("snapshot before event {}: {told}", events.next),
        false => format!("from event {}: {told}", events.first()),
    }
}

async fn ask(engine: &Engine, prompt: &[Token]) -> Result<(), Box<dyn Error>> {
    let mut answer = engine.submit(Generate::new(prompt.to_vec(), 4)).await?;
    while answer.next().await.is_some() {}
    Ok(())
}

/// A model whose output for each token is the token's successor.
struct Counter;

impl Forward for Counter {
    type Memory = CpuMemory;

    fn kv_layout(&self) -> KvLayout {
        KvShape { layers: 1, heads: 1, head_elements: 16 }.layout()
    }

    fn vocabulary(&self) -> usize {
        100
    }

    fn positions_max(&self) -> u32 {
        1024
    }

    fn fingerprint(&self) -> String {
        "counter".to_owned()
    }

    fn forward(
        &mut self,
        _memory: &CpuMemory,
        step: &Step<'_>,
        logits: &mut Logits<'_>,
    ) -> Result<(), ModelError> {
        for span in step.spans.iter().filter(|span| span.logits > 0) {
            let last = step.tokens_of(span).last().copied().unwrap_or_default() as usize;
            logits.add(1, |row| {
                row.fill(0.0);
                row[(last + 1) % 100] = 1.0;
            });
        }
        Ok(())
    }
}
