//! The pages with everything in them that there can be, against what docs/metrics.md says.

use std::collections::{BTreeMap, BTreeSet};

use terrace_engine::{StepFigures, TimeHistogram};
use terrace_l3::{GuardStats, StoreStats, TierStats};
use terrace_l3_disk::{PromotionStats, WriteBehindStats};
use terrace_l3_mooncake::{MooncakeStats, OutcomeCount};
use terrace_l3_nodes::{NodeStats, PeerStats};
use terrace_scheduler::Stats;

use super::*;
use crate::gpu::LinkFigures;
use crate::route::Worker;

/// A store that is everything at once, so that each of its figures is told.
fn store() -> StoreStats {
    let outcome = |call| OutcomeCount { call, outcome: "done", count: 1 };
    let odd_name = "a \"quoted\"\\ name\nof two lines";
    let promotion = PromotionStats::default();
    let mooncake = MooncakeStats {
        outcomes: ["put", "get", "exists", "remove"].map(outcome).to_vec(),
        ..MooncakeStats::default()
    };
    let node = PeerStats { name: odd_name.to_owned(), ..PeerStats::default() };
    StoreStats {
        memory: Some(TierStats { objects: 5, ..TierStats::default() }),
        disk: Some(TierStats::default()),
        remote: Some(TierStats::default()),
        figures: [
            promotion.figures(),
            WriteBehindStats::default().figures(),
            mooncake.figures(),
            PeerStats::figures(&[node]),
        ]
        .concat(),
        guard: Some(GuardStats::default()),
    }
}

fn figures(scheduler: Stats) -> Figures {
    Figures {
        scheduler,
        store: Some(store()),
        steps: StepFigures::default(),
        queue: TimeHistogram::default(),
        page_size: 16,
        page_bytes: 4096,
    }
}

fn server_page(vllm_names: bool, scheduler: Stats) -> String {
    let moment = Moment {
        figures: figures(scheduler),
        gpu: None,
        kv_events: Some(PublisherStats::default()),
    };
    Metrics::new("the model", vllm_names).render(moment)
}

fn page_with_gpu(steps: StepFigures) -> String {
    let to_device = LinkFigures {
        bytes: 3 << 30,
        busy_us: 1_500_000,
        by_kernel: 4,
        by_batch: 1,
        failed: 0,
        pages_compared: 9,
        pages_corrupt: 1,
    };
    let gpu = GpuFigures {
        name: "A GPU".to_owned(),
        memory_bytes: 140 << 30,
        memory_used_bytes: 100 << 30,
        to_device,
        to_host: LinkFigures { by_kernel: 3, failed: 2, ..LinkFigures::default() },
    };
    let figures = Figures { steps, ..figures(Stats::default()) };
    Metrics::new("the model", false).render(Moment { figures, gpu: Some(gpu), kv_events: None })
}

#[derive(Debug)]
struct Node(NodeStats);

impl Collector for Node {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        node::write(&mut Exposition::new(encoder), &self.0, &store())
    }
}

fn node_page(stats: NodeStats) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Node(stats)));
    page(&registry)
}

/// What pages say about their metrics, as rows of a table.
fn rows(pages: &[String]) -> BTreeSet<String> {
    let mut helps = BTreeMap::new();
    let mut kinds = BTreeMap::new();
    let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in pages.iter().flat_map(|page| page.lines()) {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|it| it.split_once(' ')) {
            helps.insert(name, help);
        } else if let Some(kind) = line.strip_prefix("# TYPE ").and_then(|it| it.split_once(' ')) {
            kinds.insert(kind.0, kind.1);
        } else if let Some((name, rest)) = line.split_once('{') {
            let endings = ["_total", "_bucket", "_sum", "_count"];
            let family = endings.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
            let found = rest.split("=\"").filter_map(|part| part.split(['{', ',']).next_back());
            labels.entry(family).or_default().extend(found.filter(|label| *label != "le"));
        }
    }
    let row = |(name, help): (&&str, &&str)| {
        let kind = kinds[name];
        let ending = if kind == "counter" { "_total" } else { "" };
        let is_label =
            |label: &&&str| label.bytes().all(|it| it == b'_' || it.is_ascii_lowercase());
        let labels = labels.get(name).into_iter().flatten().filter(is_label);
        let labels: Vec<_> = labels.map(|label| format!("`{label}`")).collect();
        format!("| `{name}{ending}` | {kind} | {} | {help} |", labels.join(", "))
    };
    helps.iter().map(row).collect()
}

#[test]
fn the_documentation_lists_just_what_exists() {
    let server = server_page(true, Stats::default());
    let worker = Worker::new("http://a:1".parse().unwrap(), 0);
    let router = RouteMetrics::new([Arc::new(worker)].into()).render();
    let gpu = page_with_gpu(StepFigures::default());
    let pages = [server, gpu, node_page(NodeStats::default()), router];
    let exist = rows(&pages);
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    let text = std::fs::read_to_string(file).unwrap();
    let listed: BTreeSet<String> =
        text.lines().filter(|line| line.starts_with("| `")).map(str::to_owned).collect();
    let lines = |rows: Vec<&String>| rows.into_iter().map(|row| format!("{row}\n")).collect();
    let missing: String = lines(exist.difference(&listed).collect());
    let unknown: String = lines(listed.difference(&exist).collect());
    assert!(
        missing.is_empty() && unknown.is_empty(),
        "add to docs/metrics.md:\n{missing}\nremove from it:\n{unknown}"
    );
}

fn assert_lines(page: &str, lines: &[&str]) {
    for line in lines {
        assert!(page.lines().any(|it| it == *line), "{line} is missing:\n{page}");
    }
}

#[test]
fn a_page_is_whole_and_names_are_written_so_that_they_can_be_read() {
    let page = server_page(false, Stats { submitted: 7, ..Stats::default() });
    assert!(page.ends_with("\n# EOF\n"));
    assert_lines(
        &page,
        &[
            "# TYPE terrace_requests_submitted counter",
            "terrace_requests_submitted_total 7",
            r#"terrace_node_up{node="a \"quoted\"\\ name\nof two lines"} 0"#,
            "terrace_queue_seconds_bucket{le=\"+Inf\"} 0",
        ],
    );
}

#[test]
fn a_gpu_is_told_of_only_where_there_is_one() {
    assert!(!server_page(true, Stats::default()).contains("gpu_memory"));
    let steps = StepFigures { busy_us: 5_000_000, model_us: 4_750_000, ..StepFigures::default() };
    assert_lines(
        &page_with_gpu(steps),
        &[
            "terrace_gpu_memory_bytes 150323855360",
            "terrace_gpu_memory_used_bytes 107374182400",
            "terrace_gpu_waiting_seconds_total 0.25",
            "terrace_gpu_copies_total{way=\"kernel\"} 7",
            "terrace_gpu_copies_total{way=\"batch\"} 1",
            "terrace_gpu_link_bytes_total{direction=\"to_device\"} 3221225472",
            "terrace_gpu_link_busy_seconds_total{direction=\"to_device\"} 1.5",
            "terrace_gpu_copies_failed_total{direction=\"to_host\"} 2",
            "terrace_gpu_pages_compared_total{direction=\"to_device\"} 9",
            "terrace_gpu_pages_corrupt_total{direction=\"to_device\"} 1",
        ],
    );
}

#[test]
fn vllm_s_names_say_the_same_and_only_where_they_are_wanted() {
    let mut stats = Stats {
        running: 3,
        waiting: 2,
        prompt_tokens: 100,
        device_hit_tokens: 10,
        host_hit_tokens: 20,
        l3_hit_tokens: 30,
        generated_tokens: 9,
        retractions: 1,
        ..Stats::default()
    };
    stats.cache.device.total_pages = 8;
    stats.cache.device.free_pages = 4;
    stats.cache.device.evictable_pages = 2;
    assert!(!server_page(false, stats).contains("vllm:"));
    assert_lines(
        &server_page(true, stats),
        &[
            "vllm:num_requests_running{model_name=\"the model\"} 3",
            "vllm:num_requests_waiting{model_name=\"the model\"} 2",
            "vllm:kv_cache_usage_perc{model_name=\"the model\"} 0.25",
            "vllm:gpu_cache_usage_perc{model_name=\"the model\"} 0.25",
            "vllm:prefix_cache_queries_total{model_name=\"the model\"} 100",
            "vllm:prefix_cache_hits_total{model_name=\"the model\"} 60",
            "vllm:prompt_tokens_total{model_name=\"the model\"} 100",
            "vllm:generation_tokens_total{model_name=\"the model\"} 9",
            "vllm:num_preemptions_total{model_name=\"the model\"} 1",
            "vllm:request_success_total{model_name=\"the model\",finished_reason=\"stop\"} 0",
            "vllm:inter_token_latency_seconds_count{model_name=\"the model\"} 0",
            "vllm:time_per_output_token_seconds_count{model_name=\"the model\"} 0",
            "vllm:e2e_request_latency_seconds_count{model_name=\"the model\"} 0",
            "vllm:time_to_first_token_seconds_bucket{model_name=\"the model\",le=\"+Inf\"} 0",
        ],
    );
}

#[test]
fn a_node_tells_what_it_holds_and_whom_it_refused() {
    let page = node_page(NodeStats { refused: 3, sent_bytes: 77, ..NodeStats::default() });
    assert_lines(
        &page,
        &[
            "terrace_node_refused_total 3",
            "terrace_node_payload_bytes_total{direction=\"sent\"} 77",
            "terrace_l3_objects{place=\"memory\"} 5",
        ],
    );
}
