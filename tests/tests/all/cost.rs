//! The cost of a step depends on its work, not on the size of the cache.

use terrace_scheduler::{Config, EvictionKind, Outcome, Request, Stats, Token};
use terrace_tests::World;

/// Fills the cache with `prompts` unrelated prompts.
fn world_with(prompts: u32, eviction: EvictionKind, device_pages: u32) -> World {
    let config = Config::builder().page_size(4).device_pages(device_pages).eviction(eviction);
    let mut world = World::new(config.build().expect("it can work")).expect("it can work");
    for prompt in 0..prompts {
        run(&mut world, Request::new(u64::from(prompt), tokens(1_000 + 100 * prompt, 40), 1));
    }
    world
}

fn tokens(first: Token, count: u32) -> Vec<Token> {
    (first..first + count).collect()
}

fn run(world: &mut World, request: Request) {
    world.submit(request).expect("it fits");
    while !world.plan().is_idle() {
        if world.in_step() {
            world.finish_step().expect("no wrong page");
        }
    }
}

/// Returns the visited nodes for the same new requests: misses, hits of each other, long decodes.
fn cost_of_the_same_work(mut world: World) -> u64 {
    let visits = |stats: Stats| stats.node_visits;
    let before = visits(world.scheduler.stats());
    for id in 0..20 {
        let prompt = [tokens(1, 24), tokens(500 + id, 8)].concat();
        run(&mut world, Request::new(1_000_000 + u64::from(id), prompt, 30));
    }
    visits(world.scheduler.stats()) - before
}

#[test]
fn step_cost_does_not_grow_with_the_tree() {
    for eviction in EvictionKind::ALL {
        let small = cost_of_the_same_work(world_with(10, eviction, 60_000));
        let large = cost_of_the_same_work(world_with(4_000, eviction, 60_000));
        assert!(small > 0);
        assert_eq!(large, small, "{eviction:?}");
    }
}

#[test]
fn eviction_cost_is_proportional_to_evicted_pages() {
    for eviction in EvictionKind::ALL {
        // Both pools are full, so that every new page evicts one.
        let small = cost_of_the_same_work(world_with(40, eviction, 300));
        let large = cost_of_the_same_work(world_with(4_000, eviction, 30_000));
        assert!(large <= small + small / 4, "{eviction:?}: {large} nodes instead of {small}");
    }
}

#[test]
fn large_write_back_is_split_over_plans() {
    let config = Config::builder().page_size(1).device_pages(20_000).host_pages(20_000);
    let mut world = World::new(config.build().expect("it can work")).expect("it can work");
    world.submit(Request::new(1, tokens(1, 10_000), 1)).expect("it fits");
    let mut copied = Vec::new();
    while world.scheduler.stats().finished == 0 {
        let plan = world.plan();
        copied.push(plan.copies.iter().map(|copy| plan.device_pages(copy).len()).sum::<usize>());
        let ops: Vec<_> = plan.copies.iter().map(|copy| copy.op).collect();
        if world.in_step() {
            world.finish_step().expect("no wrong page");
        }
        for op in ops {
            world.report(op, 0, Outcome::Done).expect("it was planned");
        }
    }
    assert_eq!(copied.iter().sum::<usize>(), 10_000);
    // A plan must be ready within a step.
    assert!(copied.iter().all(|&pages| pages <= 2_048), "{copied:?}");
}
