//! Evictable pages, their order, and the pages that are evicted with them.

use super::*;

#[test]
fn every_policy_takes_children_before_parents_and_nothing_pinned() {
    for kind in EvictionKind::ALL {
        let mut cache = cache_that_evicts(kind, 32, 0);
        let words = ["abcd", "abce", "abxy", "abxyz", "pq", "pqrs"];
        for text in words {
            publish(&mut cache, text);
        }
        // Parents are used more than their children, and less recently.
        for text in ["abxyz", "ab", "ab", "pq"] {
            let pin = pin_device(&mut cache, text);
            cache.touch(&pin, true, 1);
            cache.unpin_device(pin);
        }
        let pinned = pin_device(&mut cache, "abxy");
        let mut before = words.map(|text| depths(&cache, text).0);
        while cache.usage().device.evictable_pages > 0 {
            let victim = cache.device_victim().expect("something is evictable");
            assert!(victim.is_last_copy);
            evict_device(&mut cache, 1);
            let after = words.map(|text| depths(&cache, text).0);
            // One page went, from the end of a word: what is left of each is still a prefix.
            assert!(before.iter().zip(&after).all(|(before, after)| before - after <= 1));
            assert_ne!(before, after, "{kind:?} took a page out of the middle");
            assert_eq!(depths(&cache, "abxy").0, 4, "{kind:?} took a pinned page");
            audit(&cache, &[&pinned], &[]);
            before = after;
        }
        assert_eq!(cache.device_victim(), None);
        assert_eq!(cache.usage().device.free_pages, 32 - 4);
        cache.unpin_device(pinned);
        end(cache);
    }
}

#[test]
fn too_large_requests_for_room_fail() {
    let mut cache = cache(8, 0);
    let pin = publish_and_pin(&mut cache, "abc");
    publish(&mut cache, "xy");
    assert_eq!(cache.usage().device.available_pages(), 5);
    assert!(cache.free_device_pages(5));
    assert!(!cache.free_device_pages(6));
    assert!(cache.take_device_pages(6).is_none());
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn only_the_requested_pages_are_evicted() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcdefgh");
    evict_device(&mut cache, 3);
    assert_eq!((depths(&cache, "abcdefgh"), nodes(&cache, 1)), ((5, 5), 1));
    write_back(&mut cache, "abcde");
    evict_device(&mut cache, 2);
    assert_eq!(depths(&cache, "abcdefgh"), (3, 5));
    evict_host(&mut cache, 4);
    assert_eq!(depths(&cache, "abcdefgh"), (3, 3), "host copies go from the end, too");
    end(cache);
}

#[test]
fn a_victim_that_lost_pages_keeps_its_place_in_the_order() {
    let mut cache = cache_that_evicts(EvictionKind::Slru, 32, 0);
    for text in ["aaaa", "bbbb", "cccc", "dddd", "eeee"] {
        let pin = publish_and_pin(&mut cache, text);
        cache.touch(&pin, true, 1);
        cache.unpin_device(pin);
    }
    // All were hit. The protected segment is too small for all, so the first of them is not protected any more.
    evict_device(&mut cache, 1);
    publish(&mut cache, "yyyy");
    publish(&mut cache, "zzzz");
    evict_device(&mut cache, 1);
    assert_eq!((depths(&cache, "aaaa").0, depths(&cache, "yyyy").0), (2, 4));
    end(cache);
}

#[test]
fn a_host_copy_of_device_pages_can_be_evicted() {
    let mut cache = cache(4, 4);
    publish(&mut cache, "abcd");
    write_back(&mut cache, "abcd");
    let pin = pin_device(&mut cache, "abcd");
    assert_eq!(cache.usage().host.evictable_pages, 4);
    assert!(cache.free_host_pages(4));
    assert_eq!(depths(&cache, "abcd"), (4, 4));
    assert_eq!(pages_of(&cache, &pin).len(), 4);
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn an_evicted_prefix_takes_the_host_pages_below_it_along() {
    let mut cache = cache(4, 4);
    publish(&mut cache, "ab");
    fetch(&mut cache, "abcd");
    fetch(&mut cache, "abxy");
    assert_eq!(depths(&cache, "abcd"), (2, 4));
    evict_device(&mut cache, 1);
    assert_eq!(cache.usage().host.free_pages, 4);
    assert_eq!((depths(&cache, "abcd"), depths(&cache, "abxy")), ((1, 1), (1, 1)));
    audit(&cache, &[], &[]);
    end(cache);
}

#[test]
fn a_host_pin_keeps_its_prefix_on_device_where_only_the_device_has_it() {
    let mut cache = cache(4, 4);
    publish(&mut cache, "ab");
    fetch(&mut cache, "abcd");
    let pin = pin_host(&mut cache, "abcd");
    assert_eq!(cache.usage().device.evictable_pages, 0);
    assert!(!cache.free_device_pages(3) && !cache.free_host_pages(3));
    assert_eq!(depths(&cache, "abcd"), (2, 4));
    // With a host copy of the prefix the device need not keep it any more.
    write_back(&mut cache, "ab");
    assert!(cache.free_device_pages(4));
    assert_eq!(depths(&cache, "abcd"), (0, 4));
    audit(&cache, &[], &[&pin]);
    cache.unpin_host(pin);
    end(cache);
}

#[test]
fn pages_above_pinned_ones_do_not_count_as_evictable() {
    let mut cache = cache(8, 4);
    publish(&mut cache, "ab");
    write_back(&mut cache, "ab");
    publish(&mut cache, "abcd");
    // "cd" has no host copy, so the pin keeps it on device, and with it its prefix.
    let pin = pin_host(&mut cache, "abcd");
    assert_eq!(cache.usage().device.evictable_pages, 0);
    assert!(!cache.free_device_pages(5));
    write_back(&mut cache, "abcd");
    assert_eq!(cache.usage().device.evictable_pages, 4);
    assert!(cache.free_device_pages(8));
    cache.unpin_host(pin);
    end(cache);
}

#[test]
fn the_next_victim_can_be_pinned_and_copied() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcd");
    publish(&mut cache, "xy");
    let victim = cache.device_victim().unwrap();
    assert_eq!((victim.pages, victim.is_last_copy), (4, true));
    let pin = cache.pin_victim(victim);
    assert_eq!((pin.depth(), pages_of(&cache, &pin).len()), (4, 4));
    assert_eq!(cache.device_victim().unwrap().pages, 2, "the next in line");
    cache.unpin_device(pin);
    write_back(&mut cache, "abcd");
    assert!(!cache.device_victim().unwrap().is_last_copy);
    end(cache);
}

#[test]
fn clearing_spares_pinned_pages() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcd");
    write_back(&mut cache, "abcd");
    let on_device = pin_device(&mut cache, "ab");
    fetch(&mut cache, "xyz");
    let on_host = pin_host(&mut cache, "xy");
    assert_eq!(cache.clear(), Freed { device_pages: 2, host_pages: 5 });
    assert_eq!((depths(&cache, "abcd"), depths(&cache, "xyz")), ((2, 2), (0, 2)));
    audit(&cache, &[&on_device], &[&on_host]);
    cache.unpin_device(on_device);
    cache.unpin_host(on_host);
    end(cache);
}

#[test]
fn clearing_the_device_keeps_host_copies_and_pinned_pages() {
    let mut cache = cache(12, 8);
    publish(&mut cache, "abcd");
    write_back(&mut cache, "abcd");
    publish(&mut cache, "xyz");
    let pin = publish_and_pin(&mut cache, "uv");
    assert_eq!(cache.clear_device(), Freed { device_pages: 7, host_pages: 0 });
    assert_eq!(depths(&cache, "abcd"), (0, 4), "the host keeps its copies");
    assert_eq!(depths(&cache, "xyz"), (0, 0), "there was no copy");
    assert_eq!(depths(&cache, "uv").0, 2, "pinned pages stay");
    audit(&cache, &[&pin], &[]);
    cache.unpin_device(pin);
    end(cache);
}
