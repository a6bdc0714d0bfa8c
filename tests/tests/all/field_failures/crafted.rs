//! Prompts with deliberate key collisions.

use terrace_cache::{Namespace, PageKey, PrefixDigest, Sequence};
use terrace_scheduler::Token;

use super::{Stage, three_tiers};

/// Returns the two words by which a namespace without a secret hashes the first four tokens of a
/// page, computed as in `cache/src/chain.rs`. They follow from the namespace.
fn words(root: PageKey) -> [u64; 2] {
    let fold = |bits: u128| bits ^ bits >> 64;
    let mix = |bits: u128| {
        let spread = bits.wrapping_mul(0xBE54_66CF_34E9_0C6D);
        fold(fold(spread).wrapping_mul(0xC0AC_29B7_C97C_50DD))
    };
    [0, 1].map(|index| {
        let mixed = mix(mix(root.0 ^ index).wrapping_add(root.0)) as u64;
        mixed & (u64::MAX >> 2) | 1 << 62
    })
}

/// Returns two pages of four tokens with equal keys: the factors of a product are exchanged.
fn crafted_pages(root: PageKey) -> [Vec<Token>; 2] {
    let [first, second] = words(root);
    let page = |pairs: [u64; 2]| {
        let tokens = pairs.into_iter().flat_map(|pair| [pair as Token, (pair >> 32) as Token]);
        tokens.collect::<Vec<Token>>()
    };
    let moved = |pair: u64, from: u64, to: u64| pair.wrapping_add(from).wrapping_sub(to);
    [page([5, 6]), page([moved(6, second, first), moved(5, first, second)])]
}

/// Returns the prompts of an attacker and a victim. Their pages have equal keys, and only their
/// first page differs.
fn crafted_prompts(root: PageKey) -> [Vec<Token>; 2] {
    crafted_pages(root).map(|page| page.into_iter().chain(100..109).collect())
}

/// Failure: a client stored pages whose tokens it had chosen to collide with another's keys, and
/// the other was served their KV. Here pages in L3 carry a digest of their prefix, and a page of
/// another prefix counts as missing.
#[test]
fn f84_a_crafted_prompt_is_not_served_for_another() {
    let mut stage = Stage::new(three_tiers(12, 12));
    let [attack, victim] = crafted_prompts(stage.world.scheduler.namespace_of("", ""));
    assert_eq!(stage.keys(attack.clone()), stage.keys(victim.clone()), "the attack is a real one");
    assert_ne!(attack, victim);
    stage.run(1, attack.clone());
    assert_eq!(stage.world.l3.len(), 3);
    stage.clear();
    // A step that reads a wrong page fails the test.
    stage.run(2, victim.clone());
    let stats = stage.stats();
    assert_eq!((stats.probes.sound_pages, stats.prefetches.sound_pages), (3, 0));
    // The pages of the prompt stored last are hits for it, and the other's are not.
    stage.clear();
    stage.run(3, victim);
    assert_eq!(stage.stats().prefetches.sound_pages, 3);
    stage.clear();
    stage.run(4, attack);
    assert_eq!(stage.stats().prefetches.sound_pages, 3);
    stage.finish();
}

/// The pages behind the crafted page are equal in both prompts. They are not served either if the
/// first pages are found in the cache.
#[test]
fn f84_pages_behind_a_crafted_one_are_not_served_for_another() {
    let mut stage = Stage::new(three_tiers(12, 12));
    let [attack, victim] = crafted_prompts(stage.world.scheduler.namespace_of("", ""));
    stage.run(1, attack);
    stage.clear();
    stage.run(2, victim[..5].to_vec());
    assert_eq!(stage.cached(victim.clone()).0, 1);
    stage.run(3, victim);
    assert_eq!(stage.stats().prefetches.sound_pages, 0);
    stage.finish();
}

#[test]
fn f84_prefixes_of_crafted_prompts_differ_from_the_crafted_page_on() {
    let root = Namespace::new("tiny-llama", 4).digest();
    let digests = crafted_prompts(root).map(|prompt| {
        let sequence = Sequence::new(root, 4, prompt);
        let mut digests = Vec::new();
        PrefixDigest::of_namespace(root).extend_along(sequence.run(0, 3), &mut digests);
        (sequence.keys().to_vec(), digests)
    });
    let [(keys, digests), (other_keys, others)] = digests;
    assert_eq!(keys, other_keys);
    assert!(digests.iter().zip(&others).all(|(one, other)| one != other));
}
