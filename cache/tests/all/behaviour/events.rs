//! KV events: which tier, which namespace, which pages, in which order.

use terrace_cache::{Cursor, KvEvent, TierName};

use super::*;

fn told(cache: &mut Cache) -> Vec<KvEvent> {
    cache.drain_events().collect()
}

/// The pages of a word from `start` on became available.
fn stored(tier: TierName, text: &str, start: usize) -> KvEvent {
    let word = word(text);
    let parent = if start == 0 { root() } else { word.keys().to_vec()[start - 1] };
    KvEvent::Stored {
        tier,
        namespace: root(),
        parent,
        keys: word.keys().to_vec()[start..].to_vec(),
    }
}

/// The pages of a word from `start` on are gone.
fn removed(tier: TierName, text: &str, start: usize) -> KvEvent {
    KvEvent::Removed { tier, namespace: root(), keys: word(text).keys().to_vec()[start..].to_vec() }
}

#[test]
fn events_name_tier_namespace_and_the_page_before() {
    use TierName::{Device, Host};
    let mut cache = cache(8, 8);
    let mut pin = publish_and_pin(&mut cache, "ab");
    lengthen(&mut cache, &mut pin, "abc");
    cache.unpin_device(pin);
    publish(&mut cache, "abxy");
    assert_eq!(
        told(&mut cache),
        [stored(Device, "ab", 0), stored(Device, "abc", 2), stored(Device, "abxy", 2)]
    );

    write_back(&mut cache, "abxy");
    assert_eq!(told(&mut cache), [stored(Host, "ab", 0), stored(Host, "abxy", 2)]);

    evict_device(&mut cache, 1);
    assert_eq!(told(&mut cache), [removed(Device, "abc", 2)]);
    evict_device(&mut cache, 1);
    assert_eq!(told(&mut cache), [removed(Device, "abxy", 3)]);

    let pin = pin_host(&mut cache, "abxy");
    cache.distrust_host(&pin, 3);
    cache.unpin_host(pin);
    assert_eq!(told(&mut cache), [removed(Host, "abxy", 3)]);
    evict_host(&mut cache, 1);
    assert_eq!(told(&mut cache), [], "nobody is told twice");
    cache.clear();
    assert_eq!(told(&mut cache), [KvEvent::Cleared]);
    end(cache);
}

#[test]
fn duplicates_and_what_has_not_arrived_are_not_told() {
    let mut cache = cache(8, 8);
    let mut late = cache.pin_device(root(), Cursor::START);
    publish(&mut cache, "ab");
    told(&mut cache);
    lengthen(&mut cache, &mut late, "ab");
    let arrival = cache.begin_write_back(&late, false, usize::MAX, &mut Vec::new());
    let pages = cache.take_host_pages(2).unwrap();
    assert_eq!(told(&mut cache), []);
    cache.end_write_back(&late, &arrival, pages, 1);
    assert_eq!(told(&mut cache), [stored(TierName::Host, "a", 0)]);
    cache.unpin_device(late);
    end(cache);
}

#[test]
fn a_log_that_nobody_drains_starts_over() {
    let mut cache =
        Cache::new(&CacheConfig { page_size: 1, kv_event_keys_max: 4, ..CacheConfig::default() });
    publish(&mut cache, "abc");
    publish(&mut cache, "xy");
    publish(&mut cache, "pq");
    let pq = stored(TierName::Device, "pq", 0);
    assert_eq!(told(&mut cache), [KvEvent::Cleared, pq]);
    // Draining makes room.
    publish(&mut cache, "ijkl");
    assert_eq!(told(&mut cache), [stored(TierName::Device, "ijkl", 0)]);
    // Even a single event that is too large only makes a router know less.
    publish(&mut cache, "lmnop");
    assert_eq!(told(&mut cache), [KvEvent::Cleared]);
    end(cache);
}

#[test]
fn a_cache_without_a_log_tells_nothing() {
    let mut cache = Cache::new(&CacheConfig { page_size: 1, ..CacheConfig::default() });
    publish(&mut cache, "abc");
    cache.clear();
    assert_eq!(told(&mut cache), []);
    end(cache);
}
