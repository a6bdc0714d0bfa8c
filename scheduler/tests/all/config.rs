//! Configurations that cannot work are refused with advice; those that can survive a round trip.

use terrace_scheduler::{
    AdmissionOrder, Config, EvictionKind, L3Config, PrefetchPolicy, Scheduler, WritePolicy,
};

fn refused(change: impl FnOnce(&mut Config)) -> String {
    let mut config = Config::default();
    change(&mut config);
    let error = config.check().expect_err("it cannot work");
    let same = Scheduler::new(config).expect_err("it cannot work");
    assert_eq!(error, same);
    error.to_string()
}

#[test]
fn invalid_settings_are_rejected_with_advice() {
    for page_size in [0, 3, 48, 512] {
        assert_eq!(
            refused(|config| config.cache.page_size = page_size),
            format!("cache.page_size = {page_size}: use a power of two from 1 to 256")
        );
    }
    assert_eq!(
        refused(|config| config.cache.device_pages = 0),
        "cache.device_pages = 0: use at least 1"
    );
    assert_eq!(
        refused(|config| config.batch.running_max = 0),
        "batch.running_max = 0: use at least 1"
    );
    assert_eq!(refused(|config| config.model.ranks = 65), "model.ranks = 65: use 1 to 64");
    assert_eq!(
        refused(|config| config.batch.step_tokens_max = 100),
        "batch.step_tokens_max = 100: raise it to at least batch.running_max x batch.decode_tokens, so \
         that all decodes fit into a step"
    );
    assert_eq!(
        refused(|config| {
            config.cache.write_policy = WritePolicy::SelectiveWriteThrough { hits: 0 };
        }),
        "cache.write_policy.selective-write-through.hits = 0: use at least 1, or write-through"
    );
}

#[test]
fn contradictory_settings_are_rejected() {
    assert_eq!(
        refused(|config| {
            config.batch.decode_tokens = 2;
            config.batch.step_tokens_max = 512;
            config.batch.repeats_max = 1;
        }),
        "batch.repeats_max = 1: use 0 with batch.decode_tokens above 1: how many draft tokens are \
         accepted is known only after the step"
    );
    let two_steps = |change: fn(&mut Config)| {
        refused(|config| {
            config.batch.steps_in_flight_max = 2;
            config.batch.step_tokens_max = 512;
            change(config);
        })
    };
    assert_eq!(
        two_steps(|config| config.batch.decode_tokens = 2),
        "batch.steps_in_flight_max = 2: use 1 with batch.decode_tokens above 1: where the next step \
         begins is known only after the draft was verified"
    );
    assert_eq!(
        two_steps(|config| config.batch.repeats_max = 1),
        "batch.steps_in_flight_max = 2: use 1 with batch.repeats_max: repetition and steps in flight \
         exclude each other"
    );
    for steps in [0, 3] {
        assert_eq!(
            refused(|config| config.batch.steps_in_flight_max = steps),
            format!("batch.steps_in_flight_max = {steps}: use 1 or 2")
        );
    }
    assert_eq!(
        refused(|config| {
            config.copies.load_back_threshold_pages = 9;
            config.copies.load_back_pages_max = 8;
        }),
        "copies.load_back_threshold_pages = 9: it exceeds copies.load_back_pages_max, so nothing \
         would ever be loaded: lower it"
    );
    assert_eq!(
        refused(|config| config.l3 = Some(L3Config::default())),
        "cache.host_pages = 0: L3 needs host pages for its transfers: raise it, or leave out [l3]"
    );
    let l3 = |change: fn(&mut L3Config)| {
        refused(|config| {
            config.cache.host_pages = 100;
            change(config.l3.insert(L3Config::default()));
        })
    };
    assert!(l3(|l3| l3.prefetch_threshold_pages = 101).contains("exceeds cache.host_pages"));
    assert!(l3(|l3| l3.prefetch_pages_max = 3).contains("exceeds l3.prefetch_pages_max"));
    assert!(l3(|l3| l3.backoff_max_ms = 1).contains("exceeds l3.backoff_max_ms"));
    assert!(l3(|l3| l3.prefetch_threshold_pages = 0).contains("use at least 1"));
    assert_eq!(
        l3(|l3| l3.probe_timeout_ms = 0),
        "l3.probe_timeout_ms = 0: use at least 1, or leave out [l3]: with 0 every L3 call would time out"
    );
}

#[test]
fn a_configuration_round_trips_through_toml_and_json() {
    let config = Config::builder()
        .page_size(64)
        .device_pages(1000)
        .host_pages(2000)
        .eviction(EvictionKind::S3Fifo)
        .write_policy(WritePolicy::SelectiveWriteThrough { hits: 2 })
        .l3(L3Config { prefetch: PrefetchPolicy::Wait { max_ms: 9 }, ..L3Config::default() })
        .build()
        .expect("it can work");
    let toml = toml::to_string(&config).expect("plain data");
    assert_eq!(toml::from_str::<Config>(&toml).expect("what was written"), config);
    let json = serde_json::to_string(&config).expect("plain data");
    assert_eq!(serde_json::from_str::<Config>(&json).expect("what was written"), config);
}

#[test]
fn a_file_contains_only_differences_from_the_default() {
    let config: Config = toml::from_str(
        "
        [cache]
        host_pages = 64
        write_policy = { selective_write_through = { hits = 3 } }
        [queue]
        order = \"longest-prefix\"
        [l3]
        prefetch = { deadline = { base_ms = 20, per_page_us = 100 } }
        ",
    )
    .expect("sound TOML");
    config.check().expect("it can work");
    assert_eq!(config.queue.order, AdmissionOrder::LongestPrefix);
    assert_eq!(config.cache.device_pages, Config::default().cache.device_pages);
}

#[test]
fn unknown_settings_are_rejected() {
    for text in ["page_size = 16", "[cache]\npages = 1", "[l3]\nspeed = 1", "[batch]\nmixd = true"]
    {
        let error = toml::from_str::<Config>(text).expect_err("no such setting").to_string();
        assert!(error.contains("unknown field"), "{error}");
    }
}
