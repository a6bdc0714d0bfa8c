//! The settings of a replay as flags. Their values are read where sweeps read theirs, so that both
//! mean the same.

use terrace_replay::{Options, Setting};

macro_rules! flags {
    ($($heading:literal { $($(#[doc = $doc:literal])+ $field:ident: $flag:literal $(/ $alias:literal)? $value:literal => $setting:ident;)* })*) => {
        /// The settings that can be given.
        #[derive(clap::Args)]
        pub(super) struct Settings {
            $($(
                $(#[doc = $doc])+
                #[arg(
                    long = $flag,
                    $(visible_alias = $alias,)?
                    value_name = $value,
                    help_heading = $heading,
                    allow_hyphen_values = true
                )]
                $field: Option<String>,
            )*)*
            /// Seed of synthetic requests and failures
            #[arg(long, default_value_t = 0)]
            seed: u64,
        }

        impl Settings {
            /// What was given.
            pub(super) fn options(&self) -> Options {
                let mut options = Options::default();
                $($(
                    if let Some(value) = &self.$field {
                        options.set(Setting::$setting, value);
                    }
                )*)*
                options.set(Setting::Seed, &self.seed.to_string());
                options
            }

            /// What the dice start from.
            pub(super) fn seed(&self) -> u64 {
                self.seed
            }
        }
    };
}

flags! {
    "Machine" {
        /// The model: llama-3.1-8b, llama-3.1-70b, qwen2.5-7b, qwen2.5-32b, qwen2.5-72b, mistral-7b or
        /// deepseek-v3 [default: llama-3.1-8b]
        model: "model" "NAME" => Model;
        /// The GPU: a100, h100, h200, b200 or l40s [default: h100]
        gpu: "gpu" "NAME" => Gpu;
        /// GPUs per worker (tensor parallelism) [default: 1]
        gpus: "gpus" "NUMBER" => Gpus;
        /// Number of workers, each with its own device and host tier; they share L3 [default: 1]
        workers: "workers" "NUMBER" => Workers;
        /// Additional workers of other kinds, like 2xh100:1+1xl40s:4: COUNTxGPU:GPUS_PER_WORKER
        also: "also" "KINDS" => Also;
        /// Prefill/decode disaggregation: this many workers only prefill, the others only decode. KV moves
        /// between them through host memory and L3 [default: 0, all workers do both]
        prefill_workers: "prefill-workers" "NUMBER" => PrefillWorkers;
        /// Worker outages as WORKER:FROM-TO, like 1:600s-900s; join several with +
        outages: "outages" "TIMES" => Outages;
        /// Routing policy: round-robin, least-loaded, session-affine, or, by KV events, prefix-aware or
        /// prefix-aware:LOAD_WEIGHT [default: round-robin]
        routing: "routing" "RULE" => Routing;
        /// Load of a context token of a running request, relative to a token to prefill [default: 0.25]
        decode_weight: "decode-weight" "WEIGHT" => DecodeWeight;
        /// Delay of KV events to the router [default: 5ms]
        event_delay: "event-delay" "TIME" => EventDelay;
        /// Bandwidth between host and device, per direction [default: what the GPU's link reaches at the size of
        /// the copied pieces]
        host_bandwidth: "host-bandwidth" "BANDWIDTH" => HostBandwidth;
        /// How pages are copied between host and device: by a kernel (kernel), in a batched copy (batch), or with
        /// one call per piece (single) [default: kernel]
        copy_way: "copy-way" "WAY" => CopyWay;
        /// Contiguous bytes of a page in GPU memory [default: the keys or values of one layer]
        copy_piece: "copy-piece" "BYTES" => CopyPiece;
    }
    "Cache" {
        /// Tokens per page: a power of two up to 256 [default: 16]
        page_size: "page-size" "TOKENS" => Page;
        /// Size of the device tier [default: GPU memory minus weights]
        device: "device-tokens" / "device" "SIZE" => Device;
        /// Size of the host tier; 0 for none [default: four times the device tier]
        host: "host-tokens" / "host" "SIZE" => Host;
        /// Size of L3; 0 for none, or unlimited [default: unlimited]
        l3: "l3-tokens" / "l3" "SIZE" => L3;
        /// Eviction policy: lru, lfu, slru, fifo, priority or s3-fifo [default: lru]
        policy: "policy" "NAME" => Policy;
        /// Write policy of the host tier: write-through, write-back or selective-write-through:HITS
        /// [default: write-through]
        write_policy: "write-policy" "POLICY" => WritePolicy;
        /// Minimum number of pages to load from host; fewer are recomputed [default: 1]
        load_threshold: "load-threshold" "PAGES" => LoadThreshold;
    }
    "L3" {
        /// Minimum number of pages to prefetch from L3; fewer are recomputed [default: 1]
        fetch_threshold: "fetch-threshold" "PAGES" => FetchThreshold;
        /// Prefetch timeout of a request: best-effort, or a time like 500ms [default: 60s]
        fetch_wait: "fetch-wait" "TIME" => FetchWait;
        /// Latency of each probe and transfer, in addition to its bytes [default: 200us and 300us]
        l3_latency: "l3-latency" "TIME" => L3Latency;
        /// Bandwidth between L3 and one worker, per direction [default: the network of the GPUs]
        l3_bandwidth: "l3-bandwidth" "BANDWIDTH" => L3Bandwidth;
        /// Bandwidth between L3 and all workers, per direction [default: 200GB/s]
        store_bandwidth: "store-bandwidth" "BANDWIDTH" => StoreBandwidth;
        /// Fraction of L3 operations that fail, from 0 to 1 [default: 0]
        l3_failures: "l3-failures" "SHARE" => L3Failures;
    }
    "Load" {
        /// Speed up arrivals by this factor [default: 1]
        speed_up: "speed-up" "FACTOR" => SpeedUp;
        /// Arrival of the turns of a session: wait (after the previous response and the user's think time) or
        /// by-the-clock (at the times of the trace) [default: wait]
        sessions: "sessions" "RULE" => Sessions;
        /// Keep this many requests in the system at once and ignore the times of the trace
        concurrency: "concurrency" "NUMBER" => Concurrency;
        /// Warm-up: the first requests are not measured. A share like 10%, or a time like 300s [default: 10%]
        warm_up: "warm-up" "SHARE" => WarmUp;
        /// Admission order: arrival, priority or longest-prefix [default: arrival]
        order: "order" "NAME" => Order;
        /// Maximum number of tokens in one step [default: 8192]
        step_tokens: "step-tokens" "TOKENS" => StepTokens;
        /// Maximum number of requests in a batch [default: 256]
        running_max: "running-max" "NUMBER" => RunningMax;
        /// Queued requests that a worker's scheduler sees; the others queue in front of it [default: 8]
        waiting_max: "waiting-max" "NUMBER" => WaitingMax;
    }
    "SLO and prices" {
        /// SLO: maximum TTFT
        slo_ttft: "slo-ttft" "TIME" => SloTtft;
        /// SLO: maximum TPOT (mean time per output token of a request)
        slo_tpot: "slo-tpot" "TIME" => SloTpot;
        /// SLO: share of requests that must meet it [default: 90%]
        slo_share: "slo-share" "SHARE" => SloShare;
        /// Price of a GPU per hour, in US dollars [default: 1 to 5, by GPU]
        gpu_price: "gpu-price" "PRICE" => GpuPrice;
        /// Price of a gigabyte of host memory per month, in US dollars [default: 2.5]
        host_price: "host-price" "PRICE" => HostPrice;
        /// Price of a gigabyte of L3 per month, in US dollars [default: 0.1]
        l3_price: "l3-price" "PRICE" => L3Price;
    }
}
