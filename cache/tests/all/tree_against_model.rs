//! Random steps against the whole cache, each checked by a world that remembers which bytes lie
//! where: no wrong page is ever handed out, none is lost, and events tell the truth.

mod mirror;
mod world;

use proptest::prelude::*;
use terrace_cache::{CacheConfig, EvictionKind, KvEvents, Namespace, Sequence, WritePolicy};

use world::{Op, Sound, World};

/// Sequences by the choice that each page makes; two that begin with the same choices share pages.
type Choices = Vec<Vec<u32>>;

fn config() -> impl Strategy<Value = CacheConfig> {
    let write_policy = prop_oneof![
        Just(WritePolicy::WriteThrough),
        (1u32..3).prop_map(|hits| WritePolicy::SelectiveWriteThrough { hits }),
        Just(WritePolicy::WriteBack),
    ];
    let eviction = proptest::sample::select(EvictionKind::ALL.to_vec());
    let page_size = proptest::sample::select(vec![1u32, 2, 4]);
    // A log so small that it overflows tells little, but never too much.
    let kv_event_keys_max = prop_oneof![3 => Just(1u32 << 20), 1 => 1u32..8];
    (page_size, 4u32..16, 0u32..16, eviction, write_policy, kv_event_keys_max).prop_map(
        |(page_size, device_pages, host_pages, eviction, write_policy, kv_event_keys_max)| {
            CacheConfig {
                page_size,
                device_pages,
                host_pages,
                eviction,
                write_policy,
                kv_event_keys_max,
            }
        },
    )
}

fn choices() -> impl Strategy<Value = Choices> {
    let choice = prop_oneof![3 => Just(0u32), 1 => Just(1)];
    proptest::collection::vec(proptest::collection::vec(choice, 1..8), 2..6)
}

/// The same tokens in two namespaces. Pages differ in their last token only, and look the same at
/// every depth; a last, incomplete page must not matter.
fn sequences(choices: &Choices, page_size: u32) -> Vec<Sequence> {
    let plain = Namespace::new("model", page_size);
    let roots = [plain.digest(), plain.with("", "tenant").digest()];
    let tokens = |choices: &Vec<u32>| {
        let pages = choices.iter().flat_map(|choice| (1..page_size).chain([1000 + choice]));
        pages.chain(1..page_size).collect::<Vec<_>>()
    };
    // As requests do, some produce a part of their tokens.
    let sequence = |root, choices: &Vec<u32>| {
        let mut prompt = tokens(choices);
        let produced = prompt.split_off(prompt.len() * (choices.len() % 3 + 1) / 3);
        let mut sequence = Sequence::new(root, page_size, prompt);
        sequence.extend(&produced);
        sequence
    };
    let of = |root| choices.iter().map(move |choices| sequence(root, choices));
    roots.into_iter().flat_map(of).collect()
}

fn op() -> impl Strategy<Value = Op> {
    let which = || 0usize..64;
    let sound = prop_oneof![
        3 => Just(Sound::All),
        2 => which().prop_map(Sound::Part),
        1 => Just(Sound::Nothing)
    ];
    let whole = || prop_oneof![2 => Just(usize::MAX), 1 => 1usize..5];
    let depth = || prop_oneof![2 => Just(u32::MAX), 1 => 0u32..6];
    prop_oneof![
        5 => (which(), depth()).prop_map(|(sequence, pages_max)| Op::Start { sequence, pages_max }),
        6 => (which(), 1usize..6).prop_map(|(request, pages)| Op::Compute { request, pages }),
        7 => (which(), 1usize..6).prop_map(|(request, pages)| Op::Publish { request, pages }),
        2 => (which(), any::<bool>(), -2i32..3)
            .prop_map(|(request, found, priority)| Op::Touch { request, found, priority }),
        1 => (which(), any::<bool>(), -2i32..3)
            .prop_map(|(anchor, found, priority)| Op::TouchHost { anchor, found, priority }),
        5 => which().prop_map(|request| Op::Finish { request }),
        1 => which().prop_map(|request| Op::PinHostAlong { request }),
        1 => which().prop_map(|anchor| Op::PinDeviceAlong { anchor }),
        1 => which().prop_map(|anchor| Op::PinHostAgain { anchor }),
        4 => (which(), any::<bool>(), whole()).prop_map(|(sequence, at_end, pages_max)| {
            Op::WriteBack { sequence, at_end, pages_max }
        }),
        2 => Just(Op::WriteBackVictim),
        5 => (which(), depth())
            .prop_map(|(sequence, pages_max)| Op::LoadBack { sequence, pages_max }),
        2 => (which(), whole()).prop_map(|(sequence, pages_max)| Op::Backup { sequence, pages_max }),
        4 => (which(), 1usize..6).prop_map(|(sequence, pages)| Op::Prefetch { sequence, pages }),
        9 => (which(), sound).prop_map(|(transfer, sound)| Op::Settle { transfer, sound }),
        6 => which().prop_map(|anchor| Op::Release { anchor }),
        1 => (which(), 0u32..8, any::<bool>()).prop_map(|(sequence, start_page, keep_pin)| {
            Op::Distrust { sequence, start_page, keep_pin }
        }),
        3 => (1usize..8).prop_map(|pages| Op::EvictDevice { pages }),
        2 => (1usize..8).prop_map(|pages| Op::EvictHost { pages }),
        1 => prop_oneof![
            7 => Just(Op::EvictDevice { pages: 1 }),
            1 => Just(Op::Clear),
            1 => Just(Op::ClearDevice),
        ],
    ]
}

/// Cheap cases, so many of them; the usual variable asks for more or fewer.
fn cases(default: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = asked.unwrap_or(default);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn run(config: &CacheConfig, choices: &Choices, ops: &[Op]) -> Vec<KvEvents> {
    let mut world = World::new(config, sequences(choices, config.page_size));
    for op in ops {
        world.apply(op);
    }
    world.end()
}

proptest! {
    #![proptest_config(cases(2048))]

    #[test]
    fn no_wrong_page_is_handed_out_and_none_is_lost(
        config in config(),
        choices in choices(),
        ops in proptest::collection::vec(op(), 1..300),
    ) {
        run(&config, &choices, &ops);
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn the_same_steps_have_the_same_effect(
        config in config(),
        choices in choices(),
        ops in proptest::collection::vec(op(), 1..300),
    ) {
        prop_assert_eq!(run(&config, &choices, &ops), run(&config, &choices, &ops));
    }
}
