//! What a server tells of its GPU.

use terrace_server::{Config, GpuFigures, GpuWatch, LinkFigures};

use crate::client::first_view;
use crate::scrape::Scrape;
use crate::world::World;

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_page_have_the_figures_of_the_moment() {
    let moment = std::sync::atomic::AtomicU64::new(0);
    let watch = GpuWatch::new(move || {
        let bytes = moment.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let to_host = LinkFigures { bytes, ..LinkFigures::default() };
        Some(GpuFigures { name: "A GPU".to_owned(), to_host, ..GpuFigures::default() })
    });
    let world = World::with_gpu(Config::default(), watch).await;
    for expected in [0.0, 1.0] {
        let scrape = Scrape::of(world.address).await;
        let copied = scrape.samples[r#"terrace_gpu_link_bytes_total{direction="to_host"}"#];
        assert_eq!(copied, expected, "it is asked each time");
    }
    let view = first_view(world.address, "").await;
    assert_eq!(
        (&view["gpu"]["name"], &view["gpu"]["to_host"]["bytes"]),
        (&"A GPU".into(), &2.into())
    );
    assert!(view["figures"]["steps"]["busy_us"].is_u64(), "and all the rest: {view}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_told_of_a_gpu_that_is_not_there() {
    let gone = World::with_gpu(Config::default(), GpuWatch::new(|| None)).await;
    for world in [World::quick().await, gone] {
        let scrape = Scrape::of(world.address).await;
        assert!(!scrape.samples.keys().any(|name| name.starts_with("terrace_gpu")));
        assert!(first_view(world.address, "").await.get("gpu").is_none());
    }
}
