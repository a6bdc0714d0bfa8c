//! Behaviour of the cache, one rule for each test. A page holds one token and a token is a letter, so a sequence
//! reads as a word and a prefix as the beginning of one.

mod distrust;
mod events;
mod eviction;
mod memory;
mod shape;
mod transfers;

use terrace_cache::{
    Cache, CacheConfig, Claims, DevicePage, DevicePin, EvictionKind, Freed, HostPin, Namespace,
    PageKey, Published, Sequence,
};

fn root() -> PageKey {
    Namespace::new("model", 1).digest()
}

fn word(text: &str) -> Sequence {
    Sequence::new(root(), 1, text.chars().map(u32::from).collect())
}

fn cache(device_pages: u32, host_pages: u32) -> Cache {
    cache_that_evicts(EvictionKind::Lru, device_pages, host_pages)
}

fn cache_that_evicts(eviction: EvictionKind, device_pages: u32, host_pages: u32) -> Cache {
    let kv_event_keys_max = 1 << 16;
    let plain = CacheConfig::default();
    Cache::new(&CacheConfig {
        page_size: 1,
        device_pages,
        host_pages,
        eviction,
        kv_event_keys_max,
        ..plain
    })
}

/// Number of pages of a word on device, and on device and host together.
fn depths(cache: &Cache, text: &str) -> (u32, u32) {
    let found = cache.lookup(&word(text), u32::MAX);
    (found.device.depth, found.host.depth)
}

fn pin_device(cache: &mut Cache, text: &str) -> DevicePin {
    let found = cache.lookup(&word(text), u32::MAX);
    let pin = cache.pin_device(root(), found.device);
    assert_eq!(pin.depth() as usize, text.len(), "{text} is not on device");
    pin
}

fn pin_host(cache: &mut Cache, text: &str) -> HostPin {
    let found = cache.lookup(&word(text), u32::MAX);
    let pin = cache.pin_host(root(), found.host);
    assert_eq!(pin.depth() as usize, text.len(), "{text} is neither on device nor on host");
    pin
}

/// Publishes what a word has beyond the pinned path.
fn lengthen(cache: &mut Cache, pin: &mut DevicePin, text: &str) -> Published {
    let (start, end) = (pin.depth(), text.len() as u32);
    let mut pages = cache.take_device_pages((end - start) as usize).expect("room on device");
    let published = cache.publish_device(pin, word(text).run(start, end), &mut pages, 0);
    assert!(pages.is_empty());
    published
}

/// Computes and publishes what the device lacks of a word, and keeps it pinned.
fn publish_and_pin(cache: &mut Cache, text: &str) -> DevicePin {
    let found = cache.lookup(&word(text), u32::MAX);
    let mut pin = cache.pin_device(root(), found.device);
    lengthen(cache, &mut pin, text);
    pin
}

fn publish(cache: &mut Cache, text: &str) {
    let pin = publish_and_pin(cache, text);
    cache.unpin_device(pin);
}

/// Copies what the host lacks of a word, which the device has; tells how many pages that were.
fn write_back(cache: &mut Cache, text: &str) -> usize {
    let pin = pin_device(cache, text);
    let mut sources = Vec::new();
    let arrival = cache.begin_write_back(&pin, false, usize::MAX, &mut sources);
    let pages = cache.take_host_pages(arrival.pages()).expect("room on host");
    cache.end_write_back(&pin, &arrival, pages, sources.len());
    cache.unpin_device(pin);
    sources.len()
}

/// Brings what neither tier has of a word from L3 to host.
fn fetch(cache: &mut Cache, text: &str) {
    let sequence = word(text);
    let found = cache.lookup(&sequence, u32::MAX);
    let mut pin = cache.pin_host(root(), found.host);
    let run = sequence.run(found.host.depth, text.len() as u32);
    let pages = cache.take_host_pages(run.len()).expect("room on host");
    cache.publish_from_l3(&mut pin, run, pages, 0);
    cache.unpin_host(pin);
}

fn evict_device(cache: &mut Cache, pages: usize) {
    assert!(cache.free_device_pages(cache.usage().device.free_pages + pages));
}

fn evict_host(cache: &mut Cache, pages: usize) {
    assert!(cache.free_host_pages(cache.usage().host.free_pages + pages));
}

fn pages_of(cache: &Cache, pin: &DevicePin) -> Vec<DevicePage> {
    let mut pages = Vec::new();
    cache.device_pages(pin, 0, &mut pages);
    pages
}

/// The nodes of the tree, the roots aside.
fn nodes(cache: &Cache, roots: usize) -> usize {
    cache.memory().nodes - roots
}

fn audit(cache: &Cache, device_pins: &[&DevicePin], host_pins: &[&HostPin]) {
    let mut claims = Claims::default();
    device_pins.iter().for_each(|pin| claims.device_pin(pin));
    host_pins.iter().for_each(|pin| claims.host_pin(pin));
    cache.audit(&claims).expect("every page has one owner");
}

/// Wants everything back: no page may be missing, no node may be left.
fn end(mut cache: Cache) {
    cache.clear();
    audit(&cache, &[], &[]);
    let usage = cache.usage();
    assert_eq!(usage.device.free_pages, usage.device.total_pages);
    assert_eq!(usage.host.free_pages, usage.host.total_pages);
    assert_eq!(cache.memory().nodes, 0);
}
