//! The commands for traces: made up, looked at, replayed and compared, as a user would.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn terrace(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .expect("it starts")
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// What a failing command says.
fn refusal(arguments: &[&str]) -> String {
    let output = terrace(arguments);
    assert!(!output.status.success());
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&text(&terrace(arguments))).unwrap()
}

/// Without what depends on the machine.
fn reproducible(arguments: &[&str]) -> String {
    let mut value = json(arguments);
    let run = value.as_object_mut().unwrap().remove("run").expect("what depends on the machine");
    assert!(run["wall_s"].as_f64().unwrap() > 0.0 && run["threads"].as_u64().unwrap() > 0);
    value.to_string()
}

const SMALL: [&str; 8] =
    ["--device-tokens", "200k", "--host", "400k", "--l3", "2M", "--page-size", "32"];

#[test]
fn a_trace_goes_from_generate_through_describe_to_replay() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (plain, packed) = (path("chat.jsonl"), path("chat.jsonl.gz"));
    for file in [&plain, &packed] {
        let generate = ["trace", "generate", "--kind", "chat", "--requests", "300", "--seed", "5"];
        text(&terrace(&[&generate[..], &["-o", file]].concat()));
    }
    assert!(
        std::fs::metadata(&packed).unwrap().len() * 2 < std::fs::metadata(&plain).unwrap().len()
    );

    let described = json(&["trace", "describe", &plain, "--json"]);
    assert_eq!(described, json(&["trace", "describe", &packed, "--json"]));
    assert_eq!(described["requests"], 300);
    let drawn = text(&terrace(&["trace", "describe", &plain]));
    assert!(drawn.contains("chat.jsonl: 300 requests") && drawn.contains("Working set"), "{drawn}");

    let replay = |trace: &str| reproducible(&[&["replay", trace, "--json"], &SMALL[..]].concat());
    let report = replay(&plain);
    assert_eq!(report, replay(&packed));
    let made_up = ["replay", "--synthetic", "chat", "--requests", "300", "--seed", "5", "--json"];
    // The seed is part of the configuration that is printed, and nothing else differs.
    let made_up = reproducible(&[&made_up[..], &SMALL[..]].concat());
    assert_eq!(report, made_up.replace("\"seed\":5", "\"seed\":0"));

    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["finished"], 300);
    for figure in ["device", "host", "l3", "total", "ceiling"] {
        assert!(report["reuse"][figure].is_f64(), "reuse.{figure}");
    }
    for figure in ["mean", "p50", "p90", "p99", "max"] {
        assert!(report["ttft_ms"][figure].is_f64() && report["itl_ms"][figure].is_f64());
    }
    assert!(report["bytes_moved"]["l3_to_host"].is_u64());
    assert!(report["reuse"]["total"].as_f64() <= report["reuse"]["ceiling"].as_f64());
}

#[test]
fn made_up_requests_are_not_swept_by_seed() {
    let output = terrace(&["replay", "--synthetic", "chat", "--sweep", "seed=1,2"]);
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("run it once for each --seed"), "{error}");
}

#[test]
fn standard_input_is_a_trace_too() {
    let line = r#"{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}"#;
    let mut process = Command::new(env!("CARGO_BIN_EXE_terrace"))
        .args(["replay", "-", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    process.stdin.take().unwrap().write_all(line.as_bytes()).unwrap();
    let report: Value = serde_json::from_str(&text(&process.wait_with_output().unwrap())).unwrap();
    assert_eq!(report["finished"], 1);
    assert_eq!(report["run"]["trace"], "standard input");
}

#[test]
fn bad_lines_are_named_and_refused_or_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.jsonl");
    let line = r#"{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}"#;
    std::fs::write(&file, format!("{line}\n{}\n{line}\n", &line[..30])).unwrap();
    let file = file.to_str().unwrap();
    let refused = refusal(&["replay", file]);
    assert!(refused.contains("trace.jsonl, line 2: the line is incomplete"), "{refused}");
    assert!(refused.contains("--bad-lines skip"), "{refused}");
    let skipped = terrace(&["replay", file, "--bad-lines", "skip", "--json"]);
    let said = String::from_utf8_lossy(&skipped.stderr).into_owned();
    assert!(said.contains("line 2") && said.contains("lines skipped: 1"), "{said}");
    assert!(text(&skipped).contains("\"finished\": 2"));
}

#[test]
fn other_formats_are_found_out_and_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let azure = file(
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens,Zone\n2023-11-16 18:15:46.68,374,44,x\n\
         2023-11-16 18:15:50.99,396,109,x\n",
    );
    let output = terrace(&["replay", &azure, "--json"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("ignored columns: Zone"));
    let report: Value = serde_json::from_str(&text(&output)).unwrap();
    assert_eq!(
        (report["finished"].as_u64(), report["prompt_tokens"].as_u64()),
        (Some(2), Some(770))
    );
    let chats = file(
        "chats.json",
        r#"[{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hello!"},
            {"from": "human", "value": "Bye"}, {"from": "gpt", "value": "Bye!"}]}]"#,
    );
    assert_eq!(json(&["replay", &chats, "--json"])["finished"], 2);
    assert!(
        refusal(&["replay", &chats, "--format", "morse"]).contains("use one of mooncake, azure")
    );
    let refused = refusal(&["replay", &chats, "--format", "azure"]);
    assert!(refused.contains("there is no column \"TIMESTAMP\""), "{refused}");
}

#[test]
fn a_rate_is_found_and_days_are_compared() {
    let made_up =
        ["replay", "--synthetic", "chat", "--requests", "200", "--device", "200k", "--json"];
    let with = |more: &[&str]| json(&[&made_up[..], more].concat());
    let search = with(&["--find-rate", "--slo-ttft", "1s", "--gpus", "1"]);
    assert!(search["best"]["goodput"]["is_kept"].as_bool().unwrap());
    let sweep = with(&["--seeds", "3", "--sweep", "host=0,400k"]);
    assert_eq!(sweep["points"][1]["confidence"]["seeds"], 3);
    assert!(
        refusal(&["replay", "--synthetic", "chat", "--find-rate"]).contains("set an SLO first")
    );
}

#[test]
fn a_rate_is_found_for_arrival_times_that_are_rounded_to_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rounded.jsonl");
    let lines = (0..60).map(|number| {
        let at_ms = number / 10 * 3000;
        format!(
            "{{\"timestamp\": {at_ms}, \"input_length\": 6000, \"output_length\": 10, \"block_size\": 8192, \"hash_ids\": [{number}]}}\n"
        )
    });
    std::fs::write(&file, lines.collect::<String>()).unwrap();
    let file = file.to_str().unwrap();
    let find =
        ["replay", file, "--device", "200k", "--gpus", "1", "--find-rate", "--slo-ttft", "1s"];
    let found = json(&[&find[..], &["--json"]].concat());
    assert_eq!(found["arrivals_spread_over_s"], 3.0);
    assert!(found["best"]["requests_per_s"].as_f64().unwrap() > 0.1, "{found}");
    let drawn = text(&terrace(&[&find[..], &["--seeds", "2"]].concat()));
    assert!(drawn.contains("spread evenly over 3 s") && drawn.contains("on 2 days"), "{drawn}");
}

#[test]
fn nonsense_is_refused_with_what_would_do() {
    let cases: [(&[&str], &str); 8] = [
        (&["--host", "lots"], "host lots: write tokens like 1000000"),
        (&["--host", "99999999TiB"], "use 0 to 4294967296 tokens"),
        (&["--page-size", "48"], "use a power of two from 1 to 256"),
        (&["--device-tokens", "0"], "at least one page"),
        (&["--gpu", "abacus"], "use one of a100"),
        (&["--speed-up", "0"], "speed-up 0: use a number from 0.000001"),
        (&["--sweep", "hots=1"], "there is no setting \"hots\""),
        (&["--requests", "0"], "0 requests: use 1 to 1000000"),
    ];
    for (arguments, expected) in cases {
        let refused = refusal(&[&["replay", "--synthetic", "chat"], arguments].concat());
        assert!(refused.contains(expected), "{refused}");
    }
    assert!(refusal(&["replay"]).contains("TRACE"));
    assert!(refusal(&["replay", "/absent.jsonl"]).contains("/absent.jsonl: No such file"));
}

#[test]
fn a_sweep_is_the_same_on_any_number_of_threads_and_draws_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("sweep.html").display().to_string();
    let sweep = |threads: &str| {
        reproducible(&[
            "replay",
            "--synthetic",
            "mix",
            "--requests",
            "120",
            "--device",
            "200k",
            "--json",
            "--sweep",
            "host=0,64GiB",
            "--sweep",
            "policy=lru,s3fifo",
            "--threads",
            threads,
            "--report",
            &page,
        ])
    };
    let alone = sweep("1");
    assert_eq!(alone, sweep("2"));
    assert_eq!(alone, sweep("3"));
    let result: Value = serde_json::from_str(&alone).unwrap();
    assert_eq!(result["points"].as_array().unwrap().len(), 4);
    assert!(result["answer"].as_str().unwrap().starts_with("Take host "));
    let page = std::fs::read_to_string(Path::new(&page)).unwrap();
    assert!(page.contains("<svg") && page.contains("policy s3fifo"));
}

#[test]
fn measured_steps_take_the_place_of_model_and_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("steps.csv");
    let mut steps =
        String::from("prefill_tokens,prefill_pairs,decode_rows,decode_context,step_us\n");
    for rows in 1..20u64 {
        for tokens in [0u64, 512, 2048] {
            let pairs = tokens * (tokens + 1) / 2;
            let us = 5000 + rows * 100 + tokens * 40;
            steps += &format!("{tokens},{pairs},{rows},{},{us}\n", rows * 1000);
        }
    }
    std::fs::write(&file, steps).unwrap();
    let file = file.to_str().unwrap();
    let replay = ["replay", "--synthetic", "chat", "--requests", "50", "--json", "--costs", file];
    let report = json(&replay);
    let token_ns = report["config"]["cost"]["prefill_token_ns"].as_f64().unwrap();
    assert!((39_000.0..41_000.0).contains(&token_ns), "{token_ns}");

    let calibration = json(&["replay", "--calibrate", file, "--gpu", "h200", "--json"]);
    assert_eq!(calibration["steps"].as_array().unwrap().len(), 57);
    assert_eq!(calibration["preset"][1]["kind"], "mixed");
    assert!(calibration["fitted"][2]["error_mean"].as_f64().unwrap() < 0.01);
    let drawn = text(&terrace(&["replay", "--calibrate", file, "--gpu", "h200"]));
    assert!(drawn.contains("57 measured steps") && drawn.contains("llama-3.1-8b on 1 x H200"));
}
