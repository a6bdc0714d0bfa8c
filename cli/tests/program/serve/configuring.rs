//! Configurations that one program writes and another takes, and what is said of those that cannot work.

use std::path::Path;
use std::process::Command;

use super::complaint;
use crate::process::{Server, request, terrace};

/// What it prints.
fn printed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Writes a file and has both programs print it again.
fn taken(file: &Path, text: &str) -> [String; 2] {
    std::fs::write(file, text).unwrap();
    let by_serve = printed(terrace().args(["serve", "--print-config", "--config"]).arg(file));
    let by_config = printed(terrace().arg("config").arg(file));
    [by_serve, by_config]
}

#[test]
fn what_one_program_prints_the_other_takes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("terrace.toml");
    let default = printed(terrace().arg("config"));
    assert_eq!(default, printed(terrace().args(["serve", "--print-config"])));
    assert_eq!(taken(&file, &default), [default.clone(), default.clone()]);
    let flags = [
        "--name=\"quoted\" \\ name",
        "--device=cuda:1",
        "--canary=64",
        "--load-back-overlaps=false",
        "--device-memory=12345678",
        "--l3=memory:64MiB",
        "--eviction=s3_fifo",
        "--write-policy=selective_write_through:2",
        "--admission=longest_prefix",
        "--body-max=100MiB",
        "--idle-timeout=1h",
        "--api-key=alice=hush",
        "--operator-key=hush-hush",
    ];
    let chosen = printed(terrace().args(["serve", "--print-config"]).args(flags));
    assert_eq!(chosen, printed(terrace().arg("config").args(flags)));
    assert!(!chosen.contains("hush") && chosen.contains("set but not printed"), "{chosen}");
    for line in [
        "device = \"cuda:1\"",
        "canary = 64",
        "load_back_overlaps = false",
        "device_memory = \"12345678B\"",
        "eviction = \"s3-fifo\"",
        "write_policy = \"selective-write-through:2\"",
        "admission = \"longest-prefix\"",
        "bodies_max = \"100MiB\"",
        "idle_timeout = \"1h\"",
    ] {
        assert!(chosen.contains(line), "{line} is missing:\n{chosen}");
    }
    let without_keys = chosen.replace("# A value is set but not printed: set it again.\n", "");
    assert_eq!(taken(&file, &chosen), [without_keys.clone(), without_keys]);
}

#[test]
fn a_server_starts_with_the_file_that_config_prints() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("terrace.toml");
    let mut settings = terrace();
    settings.args(["config", "--listen=127.0.0.1:0", "--l3=none", "--name=from-config"]);
    std::fs::write(&file, printed(&mut settings)).unwrap();
    let mut command = terrace();
    command.args(["serve", "--config"]).arg(&file);
    let server = Server::spawn(command);
    let (_, models) = request(&server.address, "GET", "/v1/models", "").unwrap();
    assert!(models.contains("from-config"), "{models}");
}

#[test]
fn whoever_set_what_cannot_work_is_told_by_its_own_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("terrace.toml");
    std::fs::write(&file, "# Mine.\n\nstep_tokens = 8\n").unwrap();
    let path = file.to_str().unwrap();
    let cases = [
        (vec!["--step-tokens", "8"], "--step-tokens 8: raise it".to_owned()),
        (vec!["--config", path], format!("{path}, line 3: step_tokens = 8: raise it")),
        (
            vec!["--running-max", "1000"],
            "step_tokens = 512 (--step-tokens, TERRACE_STEP_TOKENS): raise it".to_owned(),
        ),
        (vec!["--canary", "8"], "--canary 8: pages are verified on GPUs only".to_owned()),
        (vec!["--running-max", "0"], "--running-max 0: use at least 1".to_owned()),
        (vec!["--body-max", "0"], "--body-max 0: use at least 1".to_owned()),
        (vec!["--bodies-max", "1MiB"], "--bodies-max 1MiB: use at least".to_owned()),
        (vec!["--eviction", "best"], "--eviction best: use lru".to_owned()),
        (vec!["--write-policy", "x"], "--write-policy x: use write-through".to_owned()),
    ];
    for (arguments, expected) in cases {
        let said = complaint(&arguments);
        assert!(said.contains(&expected), "{arguments:?} said: {said}");
        let output = terrace().arg("serve").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
    }
    for (value, expected) in
        [("8", "TERRACE_STEP_TOKENS=8: raise it"), ("x", "TERRACE_STEP_TOKENS=x: ")]
    {
        let output = terrace().env("TERRACE_STEP_TOKENS", value).arg("serve").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(expected), "{said}");
    }
    std::fs::write(&file, "[limits]\n\nbody_max = \"much\"\n").unwrap();
    let said = complaint(&["--config", path]);
    for part in [path, "line 3", "body_max", "is not a size"] {
        assert!(said.contains(part), "{part} is missing: {said}");
    }
}

#[test]
fn both_spellings_of_a_policy_are_taken_everywhere() {
    for policy in
        ["write-back", "write_back", "selective-write-through:2", "selective_write_through:2"]
    {
        let flag = format!("--write-policy={policy}");
        let by_serve = printed(terrace().args(["serve", "--print-config", &flag]));
        assert!(by_serve.contains(&policy.replace('_', "-")), "{by_serve}");
        let variable = printed(terrace().arg("config").env("TERRACE_WRITE_POLICY", policy));
        assert_eq!(variable, by_serve);
        let replay = [
            "replay",
            "--synthetic=chat",
            "--requests=20",
            "--device=20k",
            "--host=0",
            "--json",
            &flag,
        ];
        assert!(printed(terrace().args(replay)).contains(&policy.replace('_', "-")));
    }
    let scheduler = printed(terrace().args(["config", "--scheduler"]));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("scheduler.toml");
    for policy in ["write-through", "write_through"] {
        std::fs::write(&file, scheduler.replace("write-through", policy)).unwrap();
        let again = printed(terrace().args(["config", "--scheduler"]).arg(&file));
        assert_eq!(again, scheduler);
    }
}

#[test]
fn the_page_about_settings_is_up_to_date() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
    let page = printed(terrace().args(["config", "--markdown"]));
    let kept = std::fs::read_to_string(file).unwrap_or_default();
    assert!(
        kept == page,
        "docs/configuration.md is out of date: run `terrace config --markdown > docs/configuration.md`"
    );
}

/// The flags that a help lists.
fn flags_of(help: &str) -> Vec<&str> {
    let words = help.lines().filter_map(|line| {
        line.trim_start().split("--").nth(1).filter(|_| {
            let line = line.trim_start();
            line.starts_with("--") || line.starts_with("-h, --")
        })
    });
    words.map(|rest| rest.split([' ', '=', '[']).next().unwrap_or_default()).collect()
}

#[test]
fn the_short_help_has_what_most_users_need_and_the_long_one_everything() {
    for (command, common, settings_min) in [
        ("serve", &["listen", "model", "device-memory", "l3-capacity", "api-key"][..], 60),
        ("node", &["listen", "memory", "disk", "secret-file"], 12),
    ] {
        let short = printed(terrace().args([command, "--help"]));
        assert_eq!(short, printed(terrace().args([command, "-h"])));
        let all = printed(terrace().args([command, "--help-all"]));
        let (few, many) = (flags_of(&short), flags_of(&all));
        assert!(common.iter().all(|flag| few.contains(flag)), "{few:?}");
        assert!(few.len() <= 19 && many.len() > settings_min, "{} and {}", few.len(), many.len());
        assert!(few.iter().all(|flag| many.contains(flag)), "{few:?}");
        assert!(short.contains("help-all"), "{short}");
    }
}

#[test]
fn a_model_that_cannot_be_had_is_told_with_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let refused = |model: &str| {
        let mut command = terrace();
        command.args(["serve", "--listen", "127.0.0.1:0", "--l3", "none", "--model", model]);
        command.env("HF_HUB_CACHE", cache.path()).env("HF_HUB_OFFLINE", "1");
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{model}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused("org/name").contains("HF_HUB_OFFLINE is set and org/name is not in the cache"));
    let said = refused("no-such-folder");
    assert!(
        said.contains("there is no folder \"no-such-folder\"") && said.contains("org/name"),
        "{said}"
    );
}

#[test]
fn a_server_for_other_machines_needs_keys_or_a_word_that_it_does_not() {
    // An address that no machine has, so nothing listens on it.
    let refused = |flags: &[&str]| {
        let mut command = terrace();
        command.args(["serve", "--listen", "192.0.2.1:0", "--l3", "none"]).args(flags);
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused(&[]).contains("--allow-anonymous"));
    for flags in [&["--allow-anonymous"][..], &["--api-key", "alice=secret"]] {
        let said = refused(flags);
        assert!(said.contains("cannot listen on 192.0.2.1:0"), "{said}");
    }
}
