//! Insertion, splits and merges: what the tree looks like.

use terrace_cache::{Cursor, HostPage, Namespace, PageRun, Sequence};

use super::*;

#[test]
fn a_split_leaves_pins_with_the_lower_part() {
    let mut cache = cache(16, 0);
    let pin = publish_and_pin(&mut cache, "abcdef");
    let before = pages_of(&cache, &pin);
    publish(&mut cache, "abcxyz");
    assert_eq!(nodes(&cache, 1), 3);
    assert_eq!(pin.depth(), 6);
    assert_eq!(pages_of(&cache, &pin), before);
    audit(&cache, &[&pin], &[]);
    // The whole path stays, the upper part included.
    assert!(!cache.free_device_pages(16));
    assert_eq!((depths(&cache, "abcdef"), depths(&cache, "abcxyz")), ((6, 6), (3, 3)));
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn a_pin_inside_a_run_pins_only_its_beginning() {
    let mut cache = cache(16, 0);
    publish(&mut cache, "abcdef");
    let found = cache.lookup(&word("abcdef"), 2);
    let pin = cache.pin_device(root(), found.device);
    assert_eq!(pages_of(&cache, &pin).len(), 2);
    assert_eq!(cache.usage().device.evictable_pages, 4);
    cache.free_device_pages(16);
    assert_eq!(depths(&cache, "abcdef"), (2, 2));
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn a_split_node_is_merged_when_its_branch_is_gone() {
    let mut cache = cache(8, 0);
    publish(&mut cache, "abcdef");
    assert_eq!(nodes(&cache, 1), 1);
    publish(&mut cache, "abxy");
    assert_eq!(nodes(&cache, 1), 3);
    let pin = pin_device(&mut cache, "abcdef");
    cache.touch(&pin, true, 0);
    cache.unpin_device(pin);
    evict_device(&mut cache, 2);
    assert_eq!((depths(&cache, "abcdef"), depths(&cache, "abxy")), ((6, 6), (2, 2)));
    assert_eq!(nodes(&cache, 1), 1);
    audit(&cache, &[], &[]);
    end(cache);
}

#[test]
fn a_pin_at_the_joint_keeps_two_nodes_apart() {
    let mut cache = cache(8, 0);
    publish(&mut cache, "abcdef");
    let pin = pin_device(&mut cache, "abcdef");
    let branch = publish_and_pin(&mut cache, "abxy");
    let joint = pin_device(&mut cache, "ab");
    cache.unpin_device(branch);
    evict_device(&mut cache, 2);
    assert_eq!(nodes(&cache, 1), 2);
    audit(&cache, &[&pin, &joint], &[]);
    cache.unpin_device(joint);
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn a_node_grows_in_place_while_its_maker_alone_has_pinned_it() {
    let mut cache = cache(16, 0);
    let mut pin = publish_and_pin(&mut cache, "ab");
    for text in ["abc", "abcd", "abcde"] {
        assert_eq!(lengthen(&mut cache, &mut pin, text).published_pages, 1);
    }
    assert_eq!((nodes(&cache, 1), pin.depth()), (1, 5));
    // A second reader: from here on others would notice.
    let reader = pin_device(&mut cache, "abcde");
    lengthen(&mut cache, &mut pin, "abcdef");
    assert_eq!((nodes(&cache, 1), pin.depth(), reader.depth()), (2, 6, 5));
    assert_eq!(pages_of(&cache, &reader).len(), 5);
    audit(&cache, &[&pin, &reader], &[]);
    cache.unpin_device(reader);
    let reader = pin_host(&mut cache, "abcdef");
    lengthen(&mut cache, &mut pin, "abcdefg");
    assert_eq!((nodes(&cache, 1), pin.depth(), reader.depth()), (3, 7, 6));
    audit(&cache, &[&pin], &[&reader]);
    cache.unpin_host(reader);
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn a_node_pinned_by_others_does_not_grow() {
    let mut cache = cache(16, 0);
    let mut late = cache.pin_device(root(), Cursor::START);
    let first = publish_and_pin(&mut cache, "ab");
    // The late one computed the same pages and one more; only `first` is pinned at "ab".
    let published = lengthen(&mut cache, &mut late, "abc");
    assert_eq!(published, Published { published_pages: 3, first_duplicate: Some(0) });
    assert_eq!((first.depth(), pages_of(&cache, &first).len()), (2, 2));
    audit(&cache, &[&first, &late], &[]);
    cache.unpin_device(first);
    cache.unpin_device(late);
    end(cache);
}

/// A word whose maker could not lengthen its node, since another had it pinned each time.
fn letter_by_letter(cache: &mut Cache, text: &str) -> DevicePin {
    let mut pin = publish_and_pin(cache, &text[..1]);
    for end in 1..text.len() {
        let other = pin_device(cache, &text[..end]);
        lengthen(cache, &mut pin, &text[..=end]);
        cache.unpin_device(other);
    }
    assert_eq!(nodes(cache, 1), text.len());
    pin
}

#[test]
fn nodes_that_grew_in_steps_are_merged_when_they_stop() {
    let mut cache = cache(8, 8);
    let pin = letter_by_letter(&mut cache, "abcdef");
    cache.touch(&pin, false, 0);
    let pages = pages_of(&cache, &pin);
    cache.tidy(&pin);
    assert_eq!((nodes(&cache, 1), pages_of(&cache, &pin)), (1, pages));
    audit(&cache, &[&pin], &[]);
    cache.unpin_device(pin);
    assert_eq!(depths(&cache, "abcdef"), (6, 6));
    end(cache);
}

#[test]
fn nodes_with_other_pins_or_use_are_not_merged() {
    let mut cache = cache(8, 8);
    let pin = letter_by_letter(&mut cache, "abcdef");
    cache.touch(&pin, false, 0);
    let beginning = pin_device(&mut cache, "ab");
    cache.touch(&beginning, true, 0);
    cache.unpin_device(beginning);
    let held = pin_device(&mut cache, "abcd");
    cache.tidy(&pin);
    assert_eq!(nodes(&cache, 1), 3, "ab, cd, ef");
    audit(&cache, &[&pin, &held], &[]);
    cache.unpin_device(pin);
    cache.unpin_device(held);
    end(cache);
}

#[test]
#[should_panic(expected = "a pin or cursor outlived its node")]
fn a_place_in_a_node_that_is_gone_is_no_place() {
    let mut cache = cache(2, 0);
    publish(&mut cache, "ab");
    let found = cache.lookup(&word("ab"), 2);
    evict_device(&mut cache, 2);
    publish(&mut cache, "cd");
    let pin = cache.pin_device(root(), found.device);
    cache.unpin_device(pin);
}

#[test]
fn duplicates_return_to_the_pool_and_their_place_is_returned() {
    let mut cache = cache(16, 0);
    let mut late = cache.pin_device(root(), Cursor::START);
    publish(&mut cache, "abcd");
    let published = lengthen(&mut cache, &mut late, "abxy");
    assert_eq!(published, Published { published_pages: 4, first_duplicate: Some(0) });
    assert_eq!(cache.usage().device.free_pages, 16 - 6);
    let mut later = cache.pin_device(root(), Cursor::START);
    let published = lengthen(&mut cache, &mut later, "abcd");
    assert_eq!(published, Published { published_pages: 4, first_duplicate: Some(0) });
    assert_eq!(cache.usage().device.free_pages, 16 - 6);
    cache.unpin_device(later);

    let mut late_at_two = pin_device(&mut cache, "ab");
    publish(&mut cache, "abpq");
    let published = lengthen(&mut cache, &mut late_at_two, "abpq");
    assert_eq!(published, Published { published_pages: 2, first_duplicate: Some(2) });

    let fresh = lengthen(&mut cache, &mut late_at_two, "abpqrs");
    assert_eq!(fresh, Published { published_pages: 2, first_duplicate: None });
    cache.unpin_device(late);
    cache.unpin_device(late_at_two);
    end(cache);
}

#[test]
fn keys_alone_give_the_depths_of_a_match() {
    let mut cache = cache(32, 0);
    publish(&mut cache, "abcdefgh");
    publish(&mut cache, "abcdexyz");
    for other in
        ["", "b", "abc", "abcdefgh", "abcdefghi", "abcdefxx", "abcdexyz", "abcdexyy", "abx"]
    {
        for pages_max in 0..10 {
            let other = word(other);
            let found = cache.lookup(&other, pages_max);
            assert_eq!(cache.depths(&other, pages_max), found.depths());
        }
    }
    end(cache);
}

#[test]
fn a_key_alone_does_not_make_a_match() {
    let mut cache = cache(8, 0);
    let (honest, other) = (word("ab"), word("xy"));
    // The keys of one word with the tokens of another, as if they had collided.
    let (keys, tokens) = (honest.keys().to_vec(), other.run(0, 2).tokens().to_vec());
    let forged = PageRun::apart(0, (tokens.len() / keys.len()) as u32, &keys, &tokens);
    let mut pin = cache.pin_device(root(), Cursor::START);
    let mut pages = cache.take_device_pages(2).unwrap();
    cache.publish_device(&mut pin, forged, &mut pages, 0);
    assert_eq!(depths(&cache, "ab"), (0, 0));
    assert_eq!(cache.depths(&honest, 2).device, 2, "nothing is read by that");
    cache.unpin_device(pin);

    let mut pin = cache.pin_device(root(), Cursor::START);
    let mut pages = cache.take_device_pages(2).unwrap();
    let published = cache.publish_device(&mut pin, honest.run(0, 2), &mut pages, 0);
    assert_eq!(published, Published { published_pages: 0, first_duplicate: None });
    assert_eq!((pages.len(), pin.depth()), (2, 0), "what has no place stays the caller's");
    cache.give_device_pages(pages);
    cache.unpin_device(pin);
    cache.clear();
    assert_eq!(cache.usage().device.free_pages, 8);
}

#[test]
fn namespaces_with_the_same_tokens_share_nothing() {
    let mut cache = cache(8, 0);
    let tokens: Vec<u32> = "abc".chars().map(u32::from).collect();
    let tenant = Namespace::new("model", 1).with("", "tenant").digest();
    let theirs = Sequence::new(tenant, 1, tokens);
    let ours = publish_and_pin(&mut cache, "abc");
    assert_eq!(cache.lookup(&theirs, 3).host.depth, 0);

    let mut pin = cache.pin_device(tenant, Cursor::START);
    let mut pages = cache.take_device_pages(3).unwrap();
    let published = cache.publish_device(&mut pin, theirs.run(0, 3), &mut pages, 0);
    assert_eq!(published, Published { published_pages: 3, first_duplicate: None });
    let (ours_at, theirs_at) = (pages_of(&cache, &ours), pages_of(&cache, &pin));
    assert!(ours_at.iter().all(|page| !theirs_at.contains(page)));
    assert_eq!(nodes(&cache, 2), 2);
    cache.unpin_device(ours);
    cache.unpin_device(pin);
    end(cache);
}

#[test]
fn an_empty_namespace_is_forgotten() {
    let mut cache = cache(4, 4);
    let pin = cache.pin_device(root(), Cursor::START);
    assert_eq!(cache.memory().nodes, 1);
    cache.unpin_device(pin);
    assert_eq!(cache.memory().nodes, 0, "nothing was ever published");

    publish(&mut cache, "ab");
    let anchor = cache.pin_host(root(), Cursor::START);
    evict_device(&mut cache, 2);
    assert_eq!(cache.memory().nodes, 1, "the root is pinned");
    cache.unpin_host(anchor);
    assert_eq!(cache.memory().nodes, 0);
    end(cache);
}

const ALPHABET: &str = "abcdefghijklmnopqrstuvwxyz";

/// A cache with the alphabet on device and host, and the last of it off the device.
fn cache_that_has_begun_to_evict() -> Cache {
    let mut cache = cache(26, 26);
    publish(&mut cache, ALPHABET);
    write_back(&mut cache, ALPHABET);
    evict_device(&mut cache, 1);
    assert_eq!((nodes(&cache, 1), depths(&cache, ALPHABET)), (2, (23, 26)));
    cache
}

/// The host pages of the alphabet, in order.
fn host_pages(cache: &mut Cache) -> Vec<HostPage> {
    let pin = pin_host(cache, ALPHABET);
    let (mut keys, mut pages) = (Vec::new(), Vec::new());
    let arrival = cache.begin_backup(&pin, cache.l3_round(), usize::MAX, &mut keys, &mut pages);
    cache.end_backup(&pin, &arrival, 0);
    cache.unpin_host(pin);
    assert_eq!(keys, word(ALPHABET).keys().to_vec());
    pages
}

#[test]
fn a_prompt_evicted_in_steps_is_one_node_on_host() {
    let mut cache = cache_that_has_begun_to_evict();
    let pages = host_pages(&mut cache);
    let mut on_device = 23;
    while on_device > 0 {
        evict_device(&mut cache, 1);
        let (device, host) = depths(&cache, ALPHABET);
        assert!(device < on_device && host == 26, "{device} of {on_device}, {host}");
        assert_eq!((nodes(&cache, 1), cache.usage().device.free_pages), (2, 26 - device as usize));
        assert_eq!(host_pages(&mut cache), pages);
        audit(&cache, &[], &[]);
        on_device = device;
    }
    evict_host(&mut cache, 10);
    assert_eq!(depths(&cache, ALPHABET), (0, 16));
    end(cache);
}

#[test]
fn pages_are_not_passed_down_across_a_pin() {
    let mut cache = cache_that_has_begun_to_evict();
    let joint = pin_host(&mut cache, &ALPHABET[..23]);
    evict_device(&mut cache, 1);
    assert_eq!((nodes(&cache, 1), depths(&cache, ALPHABET)), (3, (21, 26)));
    audit(&cache, &[], &[&joint]);
    cache.unpin_host(joint);
    // A pin of the whole path goes with the lower part, wherever that begins.
    let whole = pin_host(&mut cache, ALPHABET);
    evict_device(&mut cache, 1);
    assert_eq!((nodes(&cache, 1), depths(&cache, ALPHABET)), (3, (19, 26)));
    audit(&cache, &[], &[&whole]);
    cache.unpin_host(whole);
    end(cache);
}

#[test]
fn pages_are_not_passed_down_to_a_child_of_other_use() {
    let mut cache = cache_that_has_begun_to_evict();
    let pin = pin_device(&mut cache, &ALPHABET[..23]);
    cache.touch(&pin, true, 0);
    cache.unpin_device(pin);
    evict_device(&mut cache, 1);
    assert_eq!((nodes(&cache, 1), depths(&cache, ALPHABET)), (3, (21, 26)));
    // What was used less goes first, on host too.
    evict_host(&mut cache, 3);
    assert_eq!(depths(&cache, ALPHABET), (21, 23));
    end(cache);
}

#[test]
fn spare_capacity_of_a_prompt_changes_no_decision() {
    let nodes_with = |spare: usize| {
        let mut cache = cache(8_000, 0);
        let mut tokens: Vec<u32> = Vec::with_capacity(2_000 + spare);
        tokens.extend(0..2_000);
        let mut longer = tokens.clone();
        longer.push(7);
        let mut pin = cache.pin_device(root(), Cursor::START);
        let mut pages = cache.take_device_pages(2_001).expect("room on device");
        // The node alone has the prompt, once it is published.
        cache.publish_device(
            &mut pin,
            Sequence::new(root(), 1, tokens).run(0, 2_000),
            &mut pages,
            0,
        );
        cache.publish_device(
            &mut pin,
            Sequence::new(root(), 1, longer).run(2_000, 2_001),
            &mut pages,
            0,
        );
        cache.unpin_device(pin);
        cache.memory().nodes
    };
    assert_eq!(nodes_with(0), nodes_with(1_000));
}
