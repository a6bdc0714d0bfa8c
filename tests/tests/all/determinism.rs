//! Equal inputs give equal outputs, to the byte.

use std::path::Path;

fn scripts() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let mut scripts: Vec<_> = std::fs::read_dir(folder)
        .expect("the scenarios are there")
        .map(|entry| entry.expect("a readable entry").path())
        .map(|path| (path.display().to_string(), std::fs::read_to_string(&path).expect("readable")))
        .collect();
    scripts.sort();
    scripts
}

#[test]
fn repeated_script_gives_the_same_trace() {
    let scripts = scripts();
    assert!(scripts.len() >= 30, "{} scenarios", scripts.len());
    for (path, script) in scripts {
        let first = terrace_tests::run(&script).expect("a sound script");
        let second = terrace_tests::run(&script).expect("a sound script");
        assert_eq!(first, second, "{path}");
    }
}
