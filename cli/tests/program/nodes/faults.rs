//! Nodes that are cut off, frozen and killed, and links that lose, delay and change what they carry.

use std::time::{Duration, Instant};

use terrace_l3::{ObjectId, PutOptions, StoreError};

use super::client::{Client, all_ok, is_a_miss, owners, part};
use super::farm::Farm;
use super::proxy::{Mischief, Proxy};
use super::{MEMORY, pages};

/// The node whose trouble it is.
const VICTIM: usize = 1;

/// What has to hold while the victim is away, from the first call that does not reach it on.
async fn others_go_on(client: &Client, ids: &[ObjectId], owners: &[usize]) {
    let (lost, kept) = (part(ids, owners, |it| it == VICTIM), part(ids, owners, |it| it != VICTIM));
    assert!(lost.len() > 50, "the victim has {} of {} objects", lost.len(), ids.len());
    let began = Instant::now();
    for (served, owner) in client.get(ids).await.iter().zip(owners) {
        match served {
            Ok(()) => assert_ne!(*owner, VICTIM, "it is away"),
            Err(error) => assert!(*owner == VICTIM && is_a_miss(error), "{owner}: {error}"),
        }
    }
    let first = began.elapsed();
    assert!(!client.is_up(VICTIM));
    // From now on nobody waits.
    const ROUNDS: u32 = 25;
    let (mut longest, mut all) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        assert!(client.get(&lost[..20]).await.iter().all(|it| it.as_ref().is_err_and(is_a_miss)));
        assert!(client.put(&lost[..20]).await.iter().all(|it| it.as_ref().is_err_and(is_a_miss)));
        assert!(
            client.exists(&lost[..20]).await.iter().all(|it| it.as_ref().is_err_and(is_a_miss))
        );
        let took = began.elapsed();
        (longest, all) = (longest.max(took), all + took);
    }
    let usual = all / (3 * ROUNDS);
    println!("first call {first:?}, later ones {usual:?}, three of them at most {longest:?}");
    let waited =
        Duration::from_millis(client.config.connect_timeout_ms.min(client.config.stall_timeout_ms));
    assert!(usual < waited / 4, "a call about the lost share takes {usual:?}");
    for _ in 0..5 {
        assert!(all_ok(&client.get(&kept).await), "the others' share hits");
        assert!(client.exists(&kept).await.iter().all(|it| *it == Ok(true)));
    }
}

/// Three nodes with memory, a client, and what it has stored where.
async fn three() -> (Farm, Client, Vec<ObjectId>, Vec<usize>) {
    let farm = Farm::start(&[MEMORY; 3]);
    let client = Client::new(farm.config());
    let ids = pages(0, 300);
    assert!(all_ok(&client.put(&ids).await));
    let owners = owners(&farm, &ids).await;
    assert!(all_ok(&client.get(&ids).await));
    (farm, client, ids, owners)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_node_that_is_cut_off_costs_its_share_until_the_link_heals() {
    let (farm, client, ids, owners) = three().await;
    for _ in 0..2 {
        farm.cut(VICTIM);
        others_go_on(&client, &ids, &owners).await;
        farm.join(VICTIM);
        println!("all hits are back after {:?}", client.hits_come_back(&ids).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_node_that_is_frozen_costs_its_share_until_it_thaws() {
    let (farm, client, ids, owners) = three().await;
    for _ in 0..2 {
        farm.freeze(VICTIM);
        others_go_on(&client, &ids, &owners).await;
        farm.thaw(VICTIM);
        println!("all hits are back after {:?}", client.hits_come_back(&ids).await);
    }
}

/// With two copies not even that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_second_copy_keeps_all_hits() {
    let farm = Farm::start(&[MEMORY; 3]);
    let client = Client::new(terrace_l3_nodes::NodesConfig { copies: 2, ..farm.config() });
    let ids = pages(0, 200);
    assert!(all_ok(&client.put(&ids).await));
    farm.freeze(VICTIM);
    for _ in 0..3 {
        assert!(all_ok(&client.get(&ids).await));
    }
    assert!(!client.is_up(VICTIM));
    farm.thaw(VICTIM);
    farm.cut(0);
    client.hits_come_back(&ids).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_node_without_a_disk_that_is_killed_takes_its_share_again_when_it_returns() {
    let (mut farm, client, ids, owners) = three().await;
    let (lost, kept) =
        (part(&ids, &owners, |it| it == VICTIM), part(&ids, &owners, |it| it != VICTIM));
    farm.kill(VICTIM);
    others_go_on(&client, &ids, &owners).await;
    farm.start_node(VICTIM);
    let until = Instant::now() + Duration::from_secs(20);
    while !client.is_up(VICTIM) {
        assert!(Instant::now() < until, "nobody notices that the node is back");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(client.get(&lost).await.iter().all(|it| *it == Err(StoreError::Missing)));
    assert!(all_ok(&client.put(&lost).await));
    assert!(all_ok(&client.get(&lost).await));
    assert!(all_ok(&client.get(&kept).await));
    let on_node = client.store.peers()[VICTIM].objects;
    assert_eq!(on_node, lost.len() as u64, "figures are those of the node that runs now");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_node_with_a_disk_has_its_pages_again_after_it_was_killed_or_stopped() {
    let disks = ["0", "1", "2"].map(|number| format!("{{folder}}/disk-{number}"));
    let arguments = disks
        .each_ref()
        .map(|disk| [MEMORY, &["--disk", disk.as_str(), "--disk-capacity", "64MiB"]].concat());
    let mut farm = Farm::start(&arguments.each_ref().map(Vec::as_slice));
    let client = Client::new(farm.config());
    let ids = pages(0, 300);
    let durable = PutOptions { durable: true, ..PutOptions::default() };
    assert!(all_ok(&client.put_with(&ids, durable).await));
    let owners = owners(&farm, &ids).await;
    farm.kill(VICTIM);
    others_go_on(&client, &ids, &owners).await;
    farm.start_node(VICTIM);
    println!("all hits are back after {:?}", client.hits_come_back(&ids).await);
    farm.stop(VICTIM);
    others_go_on(&client, &ids, &owners).await;
    farm.start_node(VICTIM);
    client.hits_come_back(&ids).await;
    // All at the same time, without anybody to ask in between.
    (0..3).for_each(|node| farm.kill(node));
    let nothing = client.get(&ids).await;
    assert!(nothing.iter().all(|it| it.as_ref().is_err_and(is_a_miss)), "{nothing:?}");
    (0..3).for_each(|node| farm.start_node(node));
    client.hits_come_back(&ids).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn links_that_lose_and_delay_cost_time_and_hits_but_no_byte() {
    let (farm, client, ids, _) = three().await;
    (0..3).for_each(|node| farm.spoil(node));
    let (mut hits, mut misses) = (0, 0);
    let until = Instant::now() + Duration::from_secs(4);
    let more = pages(1_000, 200);
    while Instant::now() < until {
        for served in client.get(&ids).await {
            *(if served.is_ok() { &mut hits } else { &mut misses }) += 1;
        }
        client.put(&more).await;
    }
    println!("{hits} hits and {misses} misses over links that lose and delay");
    assert!(hits > 0, "it is slow, not gone");
    (0..3).for_each(|node| farm.mend(node));
    client.hits_come_back(&ids).await;
}

/// A client whose way to the victim leads through a proxy.
async fn through_a_proxy(farm: &Farm) -> (Client, Proxy) {
    let proxy = Proxy::start(&farm.address(VICTIM)).await;
    let mut config = farm.config();
    config.nodes[VICTIM].address = proxy.address.clone();
    (Client::new(config), proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn bytes_that_are_changed_on_the_way_are_noticed() {
    let (farm, _, ids, owners) = three().await;
    let (client, proxy) = through_a_proxy(&farm).await;
    let lost = part(&ids, &owners, |it| it == VICTIM);
    assert!(all_ok(&client.get(&lost).await));
    proxy.play(Mischief::Change { every_bytes: 200_000 });
    let (mut right, mut damaged, mut away) = (0, 0, 0);
    let until = Instant::now() + Duration::from_secs(3);
    let mut written = 0;
    while Instant::now() < until {
        for served in client.get(&lost).await {
            match served {
                Ok(()) => right += 1,
                Err(StoreError::Corrupt(_)) => damaged += 1,
                Err(error) if is_a_miss(&error) => away += 1,
                Err(error) => panic!("{error}"),
            }
        }
        // Not so many that others have to go.
        if written < 1_000 {
            client.put(&pages(10_000 + written, 50)).await;
            written += 50;
        }
    }
    println!("{right} right, {damaged} damaged on the way, {away} not to be had");
    assert!(right > 0 && damaged > 0);
    proxy.play(Mischief::None);
    client.hits_come_back(&lost).await;
    // What was stored meanwhile is right, wherever it is read.
    let straight = Client::new(farm.config());
    straight.get(&pages(10_000, written)).await;
    assert!(all_ok(&straight.get(&ids).await), "damage on the way costs no object");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn connections_that_break_at_any_byte_cost_a_call_at_the_most() {
    let (farm, _, ids, owners) = three().await;
    let (client, proxy) = through_a_proxy(&farm).await;
    let lost = part(&ids, &owners, |it| it == VICTIM);
    for bytes in [0, 1, 60, 130, 300, 700, 5_000, 70_000, 400_000] {
        proxy.play(Mischief::CutAfter { bytes });
        for round in 0..3 {
            client.get(&lost).await;
            client.put(&pages(20_000 + bytes + 50 * round, 50)).await;
            client.exists(&lost).await;
        }
        proxy.play(Mischief::None);
        client.hits_come_back(&lost).await;
    }
}

/// A node that sends a byte now and then is as bad as one that sends none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs network namespaces: run scripts/test-nodes"]
async fn a_link_that_only_drips_is_given_up() {
    let (farm, _, ids, owners) = three().await;
    let (client, proxy) = through_a_proxy(&farm).await;
    client.hits_come_back(&ids).await;
    proxy.play(Mischief::Drip);
    others_go_on(&client, &ids, &owners).await;
    proxy.play(Mischief::None);
    println!("all hits are back after {:?}", client.hits_come_back(&ids).await);
    proxy.play(Mischief::Drip);
    let puts = client.put(&pages(30_000, 60)).await;
    assert!(puts.iter().any(|it| it.is_ok()) && puts.iter().any(|it| it.is_err()), "{puts:?}");
    proxy.play(Mischief::None);
    client.hits_come_back(&ids).await;
}
