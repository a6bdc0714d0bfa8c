//! Write-backs, load-backs and backups: visible when they have ended, and only as far as sound.

use terrace_cache::Cursor;

use super::*;

#[test]
fn a_write_back_is_not_on_host_before_it_has_ended() {
    let mut cache = cache(4, 8);
    publish(&mut cache, "abcd");
    let pin = pin_device(&mut cache, "abcd");
    let mut sources = Vec::new();
    let arrival = cache.begin_write_back(&pin, false, usize::MAX, &mut sources);
    assert_eq!((arrival.start_page(), arrival.pages()), (0, 4));
    assert_eq!(sources, pages_of(&cache, &pin));
    assert_eq!(cache.unwritten_pages(&pin, false), 0, "it is on its way");
    let pages = cache.take_host_pages(4).unwrap();

    // The copy reads the device pages: they cannot go, and nothing on host stands in for them.
    assert!(!cache.free_device_pages(1));
    assert!(cache.device_victim().is_none());
    let along = cache.pin_host_along(&pin);
    assert_eq!(along.depth(), 0);
    cache.unpin_host(along);

    cache.end_write_back(&pin, &arrival, pages, 4);
    cache.unpin_device(pin);
    assert!(cache.free_device_pages(4));
    assert_eq!(depths(&cache, "abcd"), (0, 4));
    end(cache);
}

#[test]
fn a_partly_sound_write_back_leaves_the_sound_part_and_returns_the_rest() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcdef");
    let pin = pin_device(&mut cache, "abcdef");
    let mut sources = Vec::new();
    let arrival = cache.begin_write_back(&pin, false, usize::MAX, &mut sources);
    let pages = cache.take_host_pages(6).unwrap();
    cache.end_write_back(&pin, &arrival, pages, 4);
    assert_eq!((cache.usage().host.free_pages, nodes(&cache, 1)), (4, 2));
    assert_eq!(cache.unwritten_pages(&pin, false), 2);
    audit(&cache, &[&pin], &[]);
    cache.unpin_device(pin);
    cache.free_device_pages(8);
    assert_eq!(depths(&cache, "abcdef"), (0, 4), "the unsound part is gone with the device's");
    end(cache);
}

#[test]
fn a_failed_write_back_leaves_nothing() {
    let mut cache = cache(4, 4);
    publish(&mut cache, "abcd");
    let pin = pin_device(&mut cache, "abcd");
    let mut sources = Vec::new();
    let arrival = cache.begin_write_back(&pin, false, usize::MAX, &mut sources);
    let pages = cache.take_host_pages(4).unwrap();
    cache.end_write_back(&pin, &arrival, pages, 0);
    assert_eq!((cache.usage().host.free_pages, nodes(&cache, 1)), (4, 1));
    cache.unpin_device(pin);
    assert_eq!(write_back(&mut cache, "abcd"), 4, "it can be tried again");
    end(cache);
}

#[test]
fn a_write_back_copies_only_what_the_host_lacks_and_as_much_as_it_may() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcdef");
    write_back(&mut cache, "ab");
    let pin = pin_device(&mut cache, "abcdef");
    let mut sources = Vec::new();
    let arrival = cache.begin_write_back(&pin, false, 3, &mut sources);
    assert_eq!((arrival.start_page(), arrival.pages()), (2, 3));
    assert_eq!(sources, pages_of(&cache, &pin)[2..5]);
    let mut others = Vec::new();
    let other = cache.begin_write_back(&pin, false, usize::MAX, &mut others);
    assert_eq!((other.start_page(), other.pages()), (5, 1), "nobody copies a page twice");
    for (arrival, count) in [(&other, 1), (&arrival, 3)] {
        let pages = cache.take_host_pages(count).unwrap();
        cache.end_write_back(&pin, arrival, pages, count);
    }
    assert_eq!(cache.usage().host.free_pages, 2);
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn two_write_backs_of_one_path_stay_apart_when_a_branch_between_them_goes() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcd");
    publish(&mut cache, "abx");
    let pins = [pin_device(&mut cache, "abcd"), pin_device(&mut cache, "abcd")];
    let mut sources = Vec::new();
    let upper = cache.begin_write_back(&pins[0], false, 2, &mut sources);
    let lower = cache.begin_write_back(&pins[1], false, 2, &mut sources);
    evict_device(&mut cache, 1);
    for (arrival, pin) in [upper, lower].iter().zip(pins) {
        let pages = cache.take_host_pages(2).unwrap();
        cache.end_write_back(&pin, arrival, pages, 2);
        cache.unpin_device(pin);
    }
    audit(&cache, &[], &[]);
    cache.free_device_pages(8);
    assert_eq!(depths(&cache, "abcd"), (0, 4));
    end(cache);
}

/// A word that only the host has, pinned as a load-back needs it.
fn on_host_only(cache: &mut Cache, text: &str) -> (HostPin, DevicePin) {
    fetch(cache, text);
    let host = pin_host(cache, text);
    let device = cache.pin_device_along(&host);
    (host, device)
}

#[test]
fn a_load_back_is_not_on_device_before_it_has_ended() {
    let mut cache = cache(8, 8);
    let (host, device) = on_host_only(&mut cache, "abcd");
    let mut sources = Vec::new();
    let arrival = cache.begin_load_back(&host, 0, &mut sources);
    assert_eq!((arrival.pages(), sources.len()), (4, 4));
    let found = cache.lookup(&word("abcd"), u32::MAX);
    assert_eq!((found.device.depth, found.host.depth, found.arriving), (0, 4, true));
    assert!(!cache.free_host_pages(5), "the copy reads the host pages");
    let pages = cache.take_device_pages(4).unwrap();
    cache.end_load_back(&host, &arrival, pages, 4);
    let found = cache.lookup(&word("abcd"), u32::MAX);
    assert_eq!((found.device.depth, found.arriving), (4, false));
    cache.unpin_host(host);
    cache.unpin_device(device);
    end(cache);
}

#[test]
fn a_partly_sound_load_back_leaves_the_sound_part_and_returns_the_rest() {
    let mut cache = cache(8, 8);
    let (host, device) = on_host_only(&mut cache, "abcdef");
    let arrival = cache.begin_load_back(&host, 0, &mut Vec::new());
    let pages = cache.take_device_pages(6).unwrap();
    cache.end_load_back(&host, &arrival, pages, 2);
    assert_eq!((depths(&cache, "abcdef"), nodes(&cache, 1)), ((2, 6), 2));
    assert_eq!(cache.usage().device.free_pages, 6);
    assert!(!cache.lookup(&word("abcdef"), u32::MAX).arriving);
    audit(&cache, &[&device], &[&host]);
    cache.unpin_host(host);
    cache.unpin_device(device);
    end(cache);
}

#[test]
fn pages_computed_during_a_load_back_stay_and_the_load_is_dropped() {
    let mut cache = cache(8, 8);
    let (host, device) = on_host_only(&mut cache, "abcd");
    let arrival = cache.begin_load_back(&host, 0, &mut Vec::new());
    let loaded = cache.take_device_pages(4).unwrap();
    let mut computing = cache.pin_device(root(), Cursor::START);
    let published = lengthen(&mut cache, &mut computing, "ab");
    assert_eq!(published, Published { published_pages: 2, first_duplicate: None });
    let computed = pages_of(&cache, &computing);

    cache.end_load_back(&host, &arrival, loaded, 4);
    assert_eq!(depths(&cache, "abcd"), (4, 4));
    let all = pin_device(&mut cache, "abcd");
    assert_eq!(pages_of(&cache, &all)[..2], computed, "the first to come stays");
    assert_eq!(cache.usage().device.free_pages, 4);
    for pin in [device, computing, all] {
        cache.unpin_device(pin);
    }
    cache.unpin_host(host);
    end(cache);
}

#[test]
fn pages_from_l3_are_inserted_where_they_belong_and_only_where_they_are_missing() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "ab");
    let sequence = word("abcdef");
    let mut anchor = pin_host(&mut cache, "ab");
    let arrived = cache.take_host_pages(4).unwrap();
    fetch(&mut cache, "abcd");
    let published = cache.publish_from_l3(&mut anchor, sequence.run(2, 6), arrived, 0);
    assert_eq!(published, Published { published_pages: 4, first_duplicate: Some(2) });
    assert_eq!((anchor.depth(), depths(&cache, "abcdef")), (6, (2, 6)));
    assert_eq!(cache.usage().host.free_pages, 4);
    cache.unpin_host(anchor);
    end(cache);
}

#[test]
fn a_backup_stores_what_l3_is_not_known_to_have() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "ab");
    write_back(&mut cache, "ab");
    fetch(&mut cache, "abcd");
    let pin = pin_host(&mut cache, "abcd");
    let (mut keys, mut sources) = (Vec::new(), Vec::new());
    let backup = cache.begin_backup(&pin, cache.l3_round(), usize::MAX, &mut keys, &mut sources);
    assert_eq!(
        (&keys[..], sources.len()),
        (&word("ab").keys().to_vec()[..], 2),
        "the rest came from L3"
    );
    let nothing =
        cache.begin_backup(&pin, cache.l3_round(), usize::MAX, &mut Vec::new(), &mut Vec::new());
    assert_eq!(nothing.pages(), 0, "it is on its way");
    assert!(!cache.free_host_pages(5), "the backup reads the host pages");

    cache.end_backup(&pin, &backup, 1);
    let again =
        cache.begin_backup(&pin, cache.l3_round(), usize::MAX, &mut Vec::new(), &mut Vec::new());
    assert_eq!(again.pages(), 2, "a run that was stored in part is stored again");
    cache.end_backup(&pin, &again, 2);
    let done =
        cache.begin_backup(&pin, cache.l3_round(), usize::MAX, &mut Vec::new(), &mut Vec::new());
    assert_eq!(done.pages(), 0);
    cache.unpin_host(pin);
    end(cache);
}

#[test]
fn pages_not_seen_in_l3_for_two_rounds_are_stored_again() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "ab");
    write_back(&mut cache, "ab");
    let pin = pin_host(&mut cache, "ab");
    let offered = |cache: &mut Cache, stored| {
        let backup = cache.begin_backup(
            &pin,
            cache.l3_round(),
            usize::MAX,
            &mut Vec::new(),
            &mut Vec::new(),
        );
        cache.end_backup(&pin, &backup, stored);
        backup.pages()
    };
    assert_eq!(offered(&mut cache, 2), 2);
    cache.begin_l3_round();
    assert_eq!(offered(&mut cache, 2), 0, "it was seen in the round before");
    cache.begin_l3_round();
    assert_eq!(offered(&mut cache, 0), 2, "that was long ago");
    assert_eq!(offered(&mut cache, 2), 2, "and L3 has not taken it");
    assert_eq!(offered(&mut cache, 2), 0);
    cache.unpin_host(pin);
    end(cache);
}

#[test]
fn pages_computed_behind_pages_from_l3_are_backed_up() {
    let mut cache = cache(8, 8);
    let (host, device) = on_host_only(&mut cache, "ab");
    let arrival = cache.begin_load_back(&host, 0, &mut Vec::new());
    let pages = cache.take_device_pages(2).unwrap();
    cache.end_load_back(&host, &arrival, pages, 2);
    cache.unpin_host(host);
    cache.unpin_device(device);
    evict_host(&mut cache, 2);
    // Only the device has "ab" and only its maker has it pinned; but L3 has it and not the rest.
    publish(&mut cache, "abcd");
    write_back(&mut cache, "abcd");
    let pin = pin_host(&mut cache, "abcd");
    let mut keys = Vec::new();
    let backup = cache.begin_backup(&pin, cache.l3_round(), usize::MAX, &mut keys, &mut Vec::new());
    assert_eq!(keys, word("abcd").keys().to_vec()[2..]);
    cache.end_backup(&pin, &backup, 2);
    cache.unpin_host(pin);
    end(cache);
}
