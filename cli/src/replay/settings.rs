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
            /// What made-up requests and failures start from
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
        /// GPUs that share the model [default: 1]
        gpus: "gpus" "NUMBER" => Gpus;
        /// Workers, each with a device and a host tier of its own; they share L3 [default: 1]
        workers: "workers" "NUMBER" => Workers;
        /// Further workers of other kinds, like 2xh100:1+1xl40s:4: how many, which GPU, and how many of those each
        also: "also" "KINDS" => Also;
        /// So many workers compute prompts only, and the others only decode; KV goes between them through host
        /// memory and L3 [default: 0, all do both]
        prefill_workers: "prefill-workers" "NUMBER" => PrefillWorkers;
        /// When workers die and are back, like 1:600s-900s; several joined by +
        outages: "outages" "TIMES" => Outages;
        /// Which worker a request goes to: round-robin, least-loaded, session-affine, or by KV events
        /// prefix-aware or prefix-aware:LOAD_WEIGHT [default: round-robin]
        routing: "routing" "RULE" => Routing;
        /// What a token of context of a request that is alive counts for as load, beside one that has yet to be
        /// computed [default: 0.25]
        decode_weight: "decode-weight" "WEIGHT" => DecodeWeight;
        /// How long KV events take to reach the router [default: 5ms]
        event_delay: "event-delay" "TIME" => EventDelay;
        /// What goes between host and device in a second, each way [default: what the GPU's link reaches with the
        /// pieces that pages are copied in]
        host_bandwidth: "host-bandwidth" "BANDWIDTH" => HostBandwidth;
        /// How pages are copied between host and device: by a kernel, in a batch, or each piece in a call of its
        /// own (single) [default: kernel]
        copy_way: "copy-way" "WAY" => CopyWay;
        /// Consecutive bytes of a page in a GPU's memory [default: the keys or values of one layer]
        copy_piece: "copy-piece" "BYTES" => CopyPiece;
    }
    "Cache" {
        /// Tokens in a page: a power of two up to 256 [default: 16]
        page_size: "page-size" "TOKENS" => Page;
        /// The device tier [default: what the weights leave]
        device: "device-tokens" / "device" "SIZE" => Device;
        /// The host tier; 0 for none [default: four times the device]
        host: "host-tokens" / "host" "SIZE" => Host;
        /// L3; 0 for none, or unlimited [default: unlimited]
        l3: "l3-tokens" / "l3" "SIZE" => L3;
        /// Which pages go first: lru, lfu, slru, fifo, priority or s3-fifo [default: lru]
        policy: "policy" "NAME" => Policy;
        /// When pages are copied to host: write-through, write-back or selective-write-through:HITS
        /// [default: write-through]
        write_policy: "write-policy" "POLICY" => WritePolicy;
        /// Fewer pages than this are computed again rather than loaded from host [default: 1]
        load_threshold: "load-threshold" "PAGES" => LoadThreshold;
    }
    "L3" {
        /// Fewer pages than this are computed again rather than fetched from L3 [default: 1]
        fetch_threshold: "fetch-threshold" "PAGES" => FetchThreshold;
        /// How long a request waits for L3: best-effort, or a time like 500ms [default: 60s]
        fetch_wait: "fetch-wait" "TIME" => FetchWait;
        /// What every probe and transfer takes besides its bytes [default: 200us and 300us]
        l3_latency: "l3-latency" "TIME" => L3Latency;
        /// What goes between L3 and one worker in a second, each way [default: what the GPUs' network has]
        l3_bandwidth: "l3-bandwidth" "BANDWIDTH" => L3Bandwidth;
        /// What goes between L3 and all workers in a second, each way [default: 200GB/s]
        store_bandwidth: "store-bandwidth" "BANDWIDTH" => StoreBandwidth;
        /// The share of L3 operations that fail, from 0 to 1 [default: 0]
        l3_failures: "l3-failures" "SHARE" => L3Failures;
    }
    "Load" {
        /// How much faster requests come than the trace says [default: 1]
        speed_up: "speed-up" "FACTOR" => SpeedUp;
        /// Whether turns of a session wait for the answers before them and for their users, or come at the times of
        /// the trace: wait or by-the-clock [default: wait]
        sessions: "sessions" "RULE" => Sessions;
        /// So many requests are alive at once, whatever the times of the trace
        concurrency: "concurrency" "NUMBER" => Concurrency;
        /// Requests that come first are not measured: a share like 10%, or those of a time like 300s [default: 10%]
        warm_up: "warm-up" "SHARE" => WarmUp;
        /// Who is admitted first: arrival, priority, longest-prefix or tree-order [default: arrival]
        order: "order" "NAME" => Order;
        /// Tokens that one step computes at the most [default: 8192]
        step_tokens: "step-tokens" "TOKENS" => StepTokens;
        /// Requests that run at once [default: 256]
        running_max: "running-max" "NUMBER" => RunningMax;
        /// Requests that a worker's scheduler sees waiting; the others wait before it [default: 8]
        waiting_max: "waiting-max" "NUMBER" => WaitingMax;
    }
    "Promises and prices" {
        /// The longest time to the first token that is promised
        slo_ttft: "slo-ttft" "TIME" => SloTtft;
        /// The longest time between tokens that is promised, on average over an answer
        slo_tpot: "slo-tpot" "TIME" => SloTpot;
        /// The share of requests for which promises must be kept [default: 90%]
        slo_share: "slo-share" "SHARE" => SloShare;
        /// What an hour of a GPU costs [default: 1 to 5, by GPU]
        gpu_price: "gpu-price" "PRICE" => GpuPrice;
        /// What a gigabyte of host memory costs a month [default: 2.5]
        host_price: "host-price" "PRICE" => HostPrice;
        /// What a gigabyte of L3 costs a month [default: 0.1]
        l3_price: "l3-price" "PRICE" => L3Price;
    }
}
