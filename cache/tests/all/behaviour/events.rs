//! KV events: which tier, which namespace, which pages, in which order.

use terrace_cache::{Cursor, KvEvent, KvEvents, KvTier};

use super::*;

/// Events without numbers; a snapshot begins with "all".
fn told(cache: &mut Cache) -> Vec<String> {
    let mut events = KvEvents::default();
    cache.drain_events(&mut events);
    let all = events.is_snapshot.then(|| "all".to_owned());
    all.into_iter().chain(events.iter().map(|event| in_words(&event))).collect()
}

fn in_words(event: &KvEvent<'_>) -> String {
    // The pages of these tests have one token.
    match event {
        KvEvent::Stored { tier, namespace, parent, keys, tokens, .. } => {
            assert_eq!((*namespace, keys.len()), (root(), tokens.len()));
            let pages: String = tokens.iter().copied().filter_map(char::from_u32).collect();
            format!("{tier:?} +{pages} after {parent}")
        }
        KvEvent::Removed { tier, keys, .. } => format!("{tier:?} -{keys:?}"),
        KvEvent::Cleared => "cleared".to_owned(),
    }
}

/// The pages of a word from `start` on became available.
fn stored(tier: KvTier, text: &str, start: usize) -> String {
    let parent = if start == 0 { root() } else { word(text).keys().to_vec()[start - 1] };
    format!("{tier:?} +{} after {parent}", &text[start..])
}

/// The pages of a word from `start` on are gone.
fn removed(tier: KvTier, text: &str, start: usize) -> String {
    format!("{tier:?} -{:?}", &word(text).keys().to_vec()[start..])
}

/// A cache whose events are drained.
fn followed(device_pages: u32, host_pages: u32) -> Cache {
    let mut cache = cache(device_pages, host_pages);
    assert_eq!(told(&mut cache), ["all"]);
    cache
}

const NOTHING: [String; 0] = [];

#[test]
fn events_name_tier_namespace_and_the_page_before() {
    use KvTier::{Device, Host};
    let mut cache = followed(8, 8);
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
    assert_eq!(told(&mut cache), NOTHING, "nobody is told twice");
    cache.clear();
    assert_eq!(told(&mut cache), ["cleared"]);
    end(cache);
}

#[test]
fn pages_in_l3_are_reported_once_and_revoked_when_doubted() {
    let mut cache = followed(8, 8);
    publish(&mut cache, "ab");
    write_back(&mut cache, "ab");
    told(&mut cache);
    let pin = pin_host(&mut cache, "ab");
    for expected in [vec![stored(KvTier::L3, "ab", 0)], vec![]] {
        let (mut keys, mut pages) = (Vec::new(), Vec::new());
        let arrival = cache.begin_backup(&pin, 9, usize::MAX, &mut keys, &mut pages);
        cache.end_backup(&pin, &arrival, 2);
        assert_eq!(told(&mut cache), expected, "it is told when it is news");
    }
    cache.distrust_host(&pin, 1);
    cache.unpin_host(pin);
    assert_eq!(told(&mut cache), [removed(KvTier::Host, "ab", 1), removed(KvTier::L3, "ab", 1)]);
    cache.clear();
    assert_eq!(told(&mut cache), ["cleared"], "L3 keeps what it has");
    end(cache);
}

#[test]
fn duplicates_and_pages_in_flight_are_not_reported() {
    let mut cache = followed(8, 8);
    let mut late = cache.pin_device(root(), Cursor::START);
    publish(&mut cache, "ab");
    told(&mut cache);
    lengthen(&mut cache, &mut late, "ab");
    let arrival = cache.begin_write_back(&late, false, usize::MAX, &mut Vec::new());
    let pages = cache.take_host_pages(2).unwrap();
    assert_eq!(told(&mut cache), NOTHING);
    cache.end_write_back(&late, &arrival, pages, 1);
    assert_eq!(told(&mut cache), [stored(KvTier::Host, "a", 0)]);
    cache.unpin_device(late);
    end(cache);
}

#[test]
fn pinned_pages_are_reported_again_after_a_clear() {
    let mut cache = followed(8, 8);
    let pin = publish_and_pin(&mut cache, "ab");
    publish(&mut cache, "abc");
    publish(&mut cache, "xy");
    told(&mut cache);
    cache.clear();
    assert_eq!(told(&mut cache), ["cleared".to_owned(), stored(KvTier::Device, "ab", 0)]);
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn a_snapshot_has_parents_before_their_children() {
    let mut cache = cache(16, 16);
    publish(&mut cache, "abcd");
    publish(&mut cache, "abxy");
    publish(&mut cache, "p");
    write_back(&mut cache, "abxy");
    use KvTier::{Device, Host};
    let held = [
        "all".to_owned(),
        stored(Device, "p", 0),
        stored(Device, "ab", 0),
        stored(Host, "ab", 0),
        stored(Device, "abxy", 2),
        stored(Host, "abxy", 2),
        stored(Device, "abcd", 2),
    ];
    assert_eq!(told(&mut cache), held);
    publish(&mut cache, "q");
    let (mut asked, mut drained) = (KvEvents::default(), KvEvents::default());
    cache.snapshot(&mut asked);
    cache.drain_events(&mut drained);
    assert_eq!((asked.len(), asked.is_snapshot, asked.next), (7, true, drained.next));
    assert_eq!(drained.from_number(asked.next).map(Iterator::count), Some(0), "it has that one");
    assert_eq!((drained.len(), drained.first()), (1, drained.next - 1));
    end(cache);
}

#[test]
fn a_late_drain_returns_a_snapshot() {
    let mut cache =
        Cache::new(&CacheConfig { page_size: 1, kv_event_keys_max: 4, ..CacheConfig::default() });
    assert_eq!(told(&mut cache), ["all"]);
    publish(&mut cache, "abc");
    publish(&mut cache, "xy");
    publish(&mut cache, "pq");
    let all = ["pq", "xy", "abc"].map(|text| stored(KvTier::Device, text, 0));
    assert_eq!(told(&mut cache), [&["all".to_owned()], &all[..]].concat());
    // Draining makes room.
    publish(&mut cache, "ijkl");
    assert_eq!(told(&mut cache), [stored(KvTier::Device, "ijkl", 0)]);
    publish(&mut cache, "lmnop");
    assert_eq!(told(&mut cache).len(), 6, "a single event that is too large");
    publish(&mut cache, "z");
    cache.stop_events();
    publish(&mut cache, "y");
    assert_eq!(told(&mut cache)[0], "all", "nobody had followed");
    end(cache);
}

#[test]
fn without_room_for_events_each_drain_is_a_snapshot() {
    let without = CacheConfig { page_size: 1, kv_event_keys_max: 0, ..CacheConfig::default() };
    let mut cache = Cache::new(&without);
    publish(&mut cache, "abc");
    for _ in 0..2 {
        assert_eq!(told(&mut cache), ["all".to_owned(), stored(KvTier::Device, "abc", 0)]);
    }
    end(cache);
}
