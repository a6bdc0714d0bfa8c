//! Host copies that proved unsound are never read again, and give way to sound ones.

use terrace_cache::Cursor;

use super::*;

fn distrust(cache: &mut Cache, text: &str, start_page: u32) {
    let pin = pin_host(cache, text);
    cache.distrust_host(&pin, start_page);
    cache.unpin_host(pin);
}

#[test]
fn a_distrusted_copy_is_not_found_and_what_came_before_it_is() {
    let mut cache = cache(8, 8);
    fetch(&mut cache, "abcd");
    distrust(&mut cache, "abcd", 1);
    assert_eq!(depths(&cache, "abcd"), (0, 1));
    audit(&cache, &[], &[]);
    end(cache);
}

#[test]
fn distrust_of_a_copy_leaves_the_device_alone() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcd");
    write_back(&mut cache, "abcd");
    distrust(&mut cache, "abcd", 2);
    assert_eq!(depths(&cache, "abcd"), (4, 4));
    assert!(cache.device_victim().unwrap().is_last_copy);
    assert!(cache.free_device_pages(8));
    assert_eq!(depths(&cache, "abcd"), (0, 2), "the device had the last sound copy of the rest");
    end(cache);
}

#[test]
fn the_next_write_back_replaces_a_distrusted_copy() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcd");
    write_back(&mut cache, "abcd");
    distrust(&mut cache, "abcd", 0);
    assert_eq!(write_back(&mut cache, "abcd"), 4);
    assert_eq!(cache.usage().host.free_pages, 4);
    cache.free_device_pages(8);
    assert_eq!(depths(&cache, "abcd"), (0, 4));
    end(cache);
}

#[test]
fn a_distrusted_copy_that_is_still_read_stays_until_the_reader_is_done() {
    let mut cache = cache(8, 8);
    publish(&mut cache, "abcd");
    write_back(&mut cache, "abcd");
    let reader = pin_host(&mut cache, "abcd");
    cache.distrust_host(&reader, 0);
    let pin = pin_device(&mut cache, "abcd");
    assert_eq!(cache.unwritten_pages(&pin, false), 0);
    assert_eq!(write_back(&mut cache, "abcd"), 0);
    assert!(!cache.free_host_pages(8));
    cache.unpin_host(reader);
    assert_eq!(cache.unwritten_pages(&pin, false), 4);
    assert_eq!(write_back(&mut cache, "abcd"), 4);
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn pages_fetched_anew_replace_a_distrusted_copy() {
    let mut cache = cache(8, 8);
    fetch(&mut cache, "abcd");
    distrust(&mut cache, "abcd", 0);
    assert_eq!(depths(&cache, "abcd"), (0, 0));
    fetch(&mut cache, "abcd");
    assert_eq!(depths(&cache, "abcd"), (0, 4));
    assert_eq!(cache.usage().host.free_pages, 4);
    end(cache);
}

#[test]
fn a_write_back_replaces_what_came_and_was_distrusted_while_it_was_under_way() {
    let mut cache = cache(8, 8);
    let mut anchor = cache.pin_host(root(), Cursor::START);
    let fetched = cache.take_host_pages(2).unwrap();
    publish(&mut cache, "ab");
    let pin = pin_device(&mut cache, "ab");
    let arrival = cache.begin_write_back(&pin, false, usize::MAX, &mut Vec::new());
    let copies = cache.take_host_pages(2).unwrap();
    cache.publish_from_l3(&mut anchor, word("ab").run(0, 2), fetched, 0);
    cache.distrust_host(&anchor, 0);
    cache.unpin_host(anchor);
    cache.end_write_back(&pin, &arrival, copies, 2);
    assert_eq!(cache.usage().host.free_pages, 6);
    cache.unpin_device(pin);
    cache.free_device_pages(8);
    assert_eq!(depths(&cache, "ab"), (0, 2));
    end(cache);
}

#[test]
fn pages_loaded_from_a_copy_that_is_distrusted_meanwhile_are_dropped() {
    let mut cache = cache(8, 8);
    fetch(&mut cache, "abcd");
    let host = pin_host(&mut cache, "abcd");
    let device = cache.pin_device_along(&host);
    let arrival = cache.begin_load_back(&host, 0, &mut Vec::new());
    let pages = cache.take_device_pages(4).unwrap();
    distrust(&mut cache, "abcd", 1);
    cache.end_load_back(&host, &arrival, pages, 4);
    assert_eq!(depths(&cache, "abcd"), (1, 1), "only the first page was read from a sound copy");
    assert_eq!(cache.usage().device.free_pages, 7);
    audit(&cache, &[&device], &[&host]);
    cache.unpin_host(host);
    cache.unpin_device(device);
    end(cache);
}

#[test]
fn pages_below_a_distrusted_prefix_are_matched_once_it_is_sound_again() {
    let mut cache = cache(8, 8);
    fetch(&mut cache, "ab");
    let mut anchor = pin_host(&mut cache, "ab");
    let pages = cache.take_host_pages(2).unwrap();
    distrust(&mut cache, "ab", 0);
    cache.publish_from_l3(&mut anchor, word("abcd").run(2, 4), pages, 0);
    assert_eq!((anchor.depth(), depths(&cache, "abcd")), (4, (0, 0)));
    audit(&cache, &[], &[&anchor]);
    cache.unpin_host(anchor);
    publish(&mut cache, "ab");
    assert_eq!(depths(&cache, "abcd"), (2, 4));
    end(cache);
}
