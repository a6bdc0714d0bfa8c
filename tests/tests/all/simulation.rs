//! A small run of the simulator: a few worlds, a few planted bugs, and all saved lists of actions.
//! Long runs are separate commands; see `simulate --help`.

use std::path::{Path, PathBuf};

use terrace_cache::planted::{Bug, plant};
use terrace_tests::sim::{
    FaultCounts, FaultKind, RunOptions, decode, read_story, replay_actions, run_world, shrink,
    write_story,
};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            files.extend(self::files(&path));
        } else {
            files.push(path);
        }
    }
    files.sort();
    files
}

#[test]
fn worlds_have_no_violation_and_all_faults_occur() {
    let mut faults = FaultCounts::default();
    for seed in 0..300 {
        let life = run_world(RunOptions::of(seed, 400));
        assert_eq!(life.violation, None, "seed {seed}");
        faults.add(&life.faults);
    }
    for kind in FaultKind::ALL {
        assert!(faults.of(kind) > 0, "{kind} never happened");
    }
}

/// Seeds that once caused a violation and could not be minimised.
#[test]
fn seeds_that_once_failed_pass() {
    let lives = [
        // L3 was queried for a retracted request.
        (2_000_436, 1_000),
        (2_001_777, 1_200),
        // Only a decode could run, it was preempted, and nothing was computed.
        (2_002_760, 10_000),
        // The last computing request was preempted for waiting ones.
        (2_010_337, 10_000),
        (2_013_214, 10_000),
        // A write-back of no pages.
        (2_013_683, 10_000),
        // L3 had a long prompt, and a burst of others had taken the host's whole share when that
        // was reported.
        (2_015_584, 400),
        (2_019_212, 400),
        // The host lost a prompt page by page, more often than L3 was queried again.
        (2_033_516, 400),
        // L3 had nothing when it was queried, and all of it when the request was scheduled.
        (2_016_156, 4_000),
        (3_036_508, 4_000),
        // Steps read load-backs whose host pages were invalid.
        (6_003_930, 4_000),
        (6_005_165, 4_000),
        // A step was planned behind one whose report was delayed, and which had failed.
        (6_005_038, 4_000),
        // A request that reads no tier was retracted, and its saved pages blocked it.
        (8_016_028, 4_000),
        // A prompt ended within a passage, and its last page was lost on the way to the host.
        (6_002_207, 4_000),
        // A request failed in a step whose report was delayed, and a result of the step behind it
        // was expected.
        (6_027_674, 4_000),
    ];
    for (seed, steps) in lives {
        assert_eq!(run_world(RunOptions::of(seed, steps)).violation, None, "seed {seed}");
    }
}

#[test]
fn same_seed_gives_the_same_run() {
    for seed in 1000..1010 {
        let (first, second) =
            (run_world(RunOptions::of(seed, 300)), run_world(RunOptions::of(seed, 300)));
        assert_eq!(first.fingerprint, second.fingerprint, "seed {seed}");
        assert_eq!(first.actions, second.actions, "seed {seed}");
    }
    assert_ne!(
        run_world(RunOptions::of(1, 300)).fingerprint,
        run_world(RunOptions::of(2, 300)).fingerprint
    );
}

#[test]
fn planted_bugs_are_detected_and_minimised() {
    for bug in [Bug::SkipTokenCompare, Bug::PublishFailedTransfer, Bug::LosePagesOnCompletion] {
        // Benign worlds, which one seed in four also runs, have no list of actions.
        let caught = (0..100_u64)
            .filter(|seed| !seed.is_multiple_of(4))
            .map(|seed| run_world(RunOptions { bug: Some(bug), ..RunOptions::of(seed, 1000) }))
            .find(|life| life.violation.is_some());
        let life = caught.unwrap_or_else(|| panic!("{bug} was not caught"));
        let config = &life.swarm.config;
        plant(Some(bug));
        let short = shrink(config, &life.actions).expect("it shows in the actions");
        assert!(replay_actions(config, &short).is_some(), "{bug}: the short story is harmless");
        plant(None);
        assert!(short.len() * 2 < life.actions.len() || short.len() < 20, "{bug} did not shrink");
        assert_eq!(replay_actions(config, &short), None, "{bug}: it was not the bug");
    }
}

#[test]
fn action_lists_round_trip() {
    let life = run_world(RunOptions::of(7, 100));
    let text = write_story(&life.swarm.config, &life.actions);
    let (config, actions) = read_story(&text).expect("what was written");
    assert_eq!((config, actions), (life.swarm.config, life.actions));
}

#[test]
fn saved_action_lists_pass() {
    let stories = files(&folder("regressions"));
    assert!(stories.len() >= 30, "{} stories", stories.len());
    for path in stories {
        let text = std::fs::read_to_string(&path).expect("readable");
        let (config, actions) = read_story(&text).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        assert_eq!(replay_actions(&config, &actions), None, "{path:?}");
    }
}

#[test]
fn fuzzer_findings_pass() {
    let corpus = files(&folder("../fuzz/corpus/scheduler"));
    assert!(corpus.len() >= 50, "{} inputs", corpus.len());
    for path in corpus {
        let (config, actions) = decode(&std::fs::read(&path).expect("readable"));
        assert_eq!(replay_actions(&config, &actions), None, "{path:?}");
    }
}
