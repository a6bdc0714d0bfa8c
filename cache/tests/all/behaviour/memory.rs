//! Memory of the tree besides the tokens.

use terrace_cache::CacheMemory;

use super::*;

const PAGE_SIZE: u32 = 16;

/// Publishes prompts of `pages` pages, each of which shares `shared` pages with the first.
fn prompts(cache: &mut Cache, pages: u32, shared: impl Fn(u32) -> u32, count: u32) {
    let root = Namespace::new("model", PAGE_SIZE).digest();
    for prompt in 0..count {
        let common = shared(prompt) * PAGE_SIZE;
        let tokens = 0..pages * PAGE_SIZE;
        let own = |token| if token < common { token } else { token + (prompt + 1) * 1_000_000 };
        let sequence = Sequence::new(root, PAGE_SIZE, tokens.map(own).collect());
        publish_and_write_back(cache, &sequence);
    }
}

fn publish_and_write_back(cache: &mut Cache, sequence: &Sequence) {
    let pages = sequence.keys().len() as u32;
    let found = cache.lookup(sequence, u32::MAX);
    let mut pin = cache.pin_device(sequence.root(), found.device);
    // A few chunks and then decoding, as requests do.
    for end in [pages / 3, 2 * pages / 3].into_iter().chain(pages - 8..=pages) {
        if pin.depth() < end {
            let run = sequence.run(pin.depth(), end);
            let mut new = cache.take_device_pages(run.len()).expect("room on device");
            cache.publish_device(&mut pin, run, &mut new, 0);
        }
    }
    let mut sources = Vec::new();
    let arrival = cache.begin_write_back(&pin, false, usize::MAX, &mut sources);
    let copies = cache.take_host_pages(arrival.pages()).expect("room on host");
    cache.end_write_back(&pin, &arrival, copies, sources.len());
    cache.unpin_device(pin);
}

fn large_cache() -> Cache {
    large_cache_that_evicts(EvictionKind::Lru)
}

fn large_cache_that_evicts(eviction: EvictionKind) -> Cache {
    let pages = 200_000;
    Cache::new(&CacheConfig {
        page_size: PAGE_SIZE,
        device_pages: pages,
        host_pages: pages,
        eviction,
        ..CacheConfig::default()
    })
}

fn bytes_a_page(memory: CacheMemory) -> usize {
    println!("{memory:?}: {} bytes a page", memory.metadata_bytes / memory.pages);
    memory.metadata_bytes / memory.pages
}

#[test]
fn long_prompts_cost_at_most_64_bytes_a_page() {
    let mut cache = large_cache();
    prompts(&mut cache, 750, |_| 375, 200);
    assert_eq!(cache.memory().pages, 375 + 200 * 375);
    assert!(bytes_a_page(cache.memory()) <= 64);
    end(cache);
}

#[test]
fn prompts_that_leave_the_first_one_everywhere_cost_no_more() {
    let mut cache = large_cache();
    prompts(&mut cache, 750, |prompt| if prompt == 0 { 750 } else { 3 * prompt }, 200);
    // Each splits the first one, and has a node for its prompt and perhaps one for what it decodes.
    let memory = cache.memory();
    assert!((1 + 2 * 199 + 1..=1 + 3 * 199 + 1).contains(&memory.nodes), "{memory:?}");
    assert!(bytes_a_page(memory) <= 64);
    assert!(memory.token_bytes <= memory.pages * PAGE_SIZE as usize * 4 * 2);
    end(cache);
}

#[test]
fn nodes_that_share_a_prompt_count_its_tokens_and_keys_once() {
    // The device loses its part bit by bit, and where age matters this splits the prompt's node.
    let mut cache = large_cache_that_evicts(EvictionKind::Fifo);
    prompts(&mut cache, 750, |_| 0, 1);
    let whole = cache.memory();
    for _ in 0..5 {
        evict_device(&mut cache, 50);
    }
    let parts = cache.memory();
    assert!(parts.nodes > whole.nodes + 2, "{parts:?}");
    assert_eq!(parts.token_bytes, whole.token_bytes);
    let node_bytes = (parts.metadata_bytes - whole.metadata_bytes) / (parts.nodes - whole.nodes);
    assert!(node_bytes < 500, "{node_bytes} bytes a node");
    end(cache);
}

#[test]
fn evicted_pages_use_no_memory() {
    let mut cache = large_cache();
    let empty = cache.memory();
    prompts(&mut cache, 750, |_| 375, 200);
    // A little of each prompt's end at a time, so that nodes shrink before they go.
    while cache.usage().host.evictable_pages > 1000 {
        evict_host(&mut cache, 100);
    }
    while cache.usage().device.evictable_pages > 1000 {
        evict_device(&mut cache, 100);
    }
    let memory = cache.memory();
    assert!(memory.pages <= 2000, "{memory:?}");
    // The path at which eviction stopped may keep its whole prompt.
    let token_bytes = |pages: usize| pages * PAGE_SIZE as usize * 4;
    assert!(memory.token_bytes <= token_bytes(2 * memory.pages + 750), "{memory:?}");
    // What the nodes themselves took is kept for the next ones.
    assert!(memory.metadata_bytes <= empty.metadata_bytes + 400 * 1024, "{memory:?}");
    end(cache);
}

#[test]
fn the_rest_of_a_path_is_copied_when_eviction_leaves_it() {
    let mut cache = large_cache();
    let root = Namespace::new("model", PAGE_SIZE).digest();
    let [first, second] = [0, 1_000_000].map(|start| {
        let sequence = Sequence::new(root, PAGE_SIZE, (start..start + 750 * PAGE_SIZE).collect());
        publish_and_write_back(&mut cache, &sequence);
        sequence
    });
    evict_device(&mut cache, 500);
    let left = cache.lookup(&first, u32::MAX).device;
    assert_eq!(left.depth, 250);
    let pin = cache.pin_host(root, left);
    drop((first, second));
    let token_bytes = |pages: usize| pages * PAGE_SIZE as usize * 4;
    evict_host(&mut cache, 500);
    assert_eq!(cache.memory().token_bytes, token_bytes(2 * 750), "it may go on shrinking");
    let all = cache.usage().device.total_pages;
    assert!(cache.free_device_pages(all) && cache.free_host_pages(all - 250));
    assert_eq!((cache.memory().pages, cache.memory().token_bytes), (250, token_bytes(250)));
    cache.unpin_host(pin);
    end(cache);
}

#[test]
fn a_tier_without_pages_uses_no_memory() {
    let mut cache = large_cache();
    prompts(&mut cache, 750, |_| 375, 50);
    let (before, pages) = (cache.memory(), cache.memory().pages);
    assert!(cache.free_device_pages(cache.usage().device.total_pages));
    let after = cache.memory();
    assert_eq!(after.pages, pages, "the host has everything");
    assert!(before.metadata_bytes - after.metadata_bytes >= pages * 4);
    end(cache);
}
