//! The pure crates use no clock, thread, randomness, IO or hash order, and depend on no crate that
//! does.

use std::path::{Path, PathBuf};

/// The pure crates, and all crates that they may depend on.
const PURE: [(&str, &[&str]); 3] = [
    ("cache", &["blake3", "serde", "smallvec"]),
    ("fsm", &["serde", "statig", "terrace-cache"]),
    ("scheduler", &["serde", "terrace-cache", "terrace-fsm", "thiserror"]),
];

/// Names that give access to the outside world.
const FORBIDDEN: [&str; 22] = [
    "Instant",
    "SystemTime",
    "std::thread",
    "std::sync",
    "std::fs",
    "std::io",
    "std::net",
    "std::env",
    "std::process",
    "async fn",
    ".await",
    "tokio",
    "rand::",
    "RandomState",
    "thread_local",
    "static mut",
    "unsafe {",
    "unsafe impl",
    "println!",
    "eprintln!",
    "dbg!",
    "Rc<",
];

/// Operations that expose the order of a hash map.
const ITERATION: [&str; 9] = [
    ".iter()",
    ".iter_mut()",
    ".keys()",
    ".values()",
    ".values_mut()",
    ".drain(",
    ".retain(",
    ".into_iter()",
    ".extract_if(",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources(folder: &Path) -> Vec<(String, String)> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = std::fs::read_to_string(&path).expect("readable");
            files.push((path.display().to_string(), text));
        }
    }
    files.sort();
    files
}

/// Returns the code of a file without tests, comments and documentation.
fn code(text: &str) -> String {
    let without_tests = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = without_tests.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn pure_crates_depend_only_on_pure_crates() {
    for (name, allowed) in PURE {
        let manifest = std::fs::read_to_string(root().join(name).join("Cargo.toml"));
        let manifest: toml::Table = manifest.expect("readable").parse().expect("valid TOML");
        let table = manifest.get("dependencies").and_then(toml::Value::as_table);
        for dependency in table.expect("dependencies").keys() {
            assert!(allowed.contains(&dependency.as_str()), "{name} depends on {dependency}");
        }
        for other in ["build-dependencies", "target"] {
            assert!(!manifest.contains_key(other), "{name} has {other}");
        }
    }
}

#[test]
fn pure_crates_use_no_io_time_or_threads() {
    for (name, _) in PURE {
        let files = sources(&root().join(name).join("src"));
        let lib = files.iter().find(|(path, _)| path.ends_with("src/lib.rs"));
        let (_, lib) = lib.expect("every crate has a lib.rs");
        assert!(lib.contains("#![forbid(unsafe_code)]"), "{name} may contain unsafe code");
        // Planted bugs, which only tests compile in, are selected by a thread-local variable.
        for (path, text) in files.iter().filter(|(path, _)| !path.ends_with("planted.rs")) {
            // Sharing immutable data is pure; locks and atomics are not.
            let code = code(text).replace("use std::sync::Arc;", "");
            for word in FORBIDDEN {
                assert!(!code.contains(word), "{path} names {word}");
            }
        }
    }
}

#[test]
fn no_hash_map_is_iterated() {
    for (name, _) in PURE {
        for (path, text) in sources(&root().join(name).join("src")) {
            if path.ends_with("cache/src/hash.rs") {
                continue;
            }
            let code = code(&text);
            for word in ["HashMap<", "HashSet<", "HashMap::", "HashSet::"] {
                assert!(!code.contains(word), "{path} names {word} and not the lookup-only ones");
            }
            for field in hashed_names(&code) {
                for iteration in ITERATION {
                    let used = format!("{field}{iteration}");
                    assert!(!code.contains(&used), "{path} lets the order of {field} out");
                }
            }
        }
    }
}

/// Returns the names of fields and variables whose type is a hash map or set.
fn hashed_names(code: &str) -> Vec<&str> {
    let declared = code.lines().filter_map(|line| line.split_once(": Hashed"));
    declared.filter_map(|(before, _)| before.rsplit([' ', '(']).next()).collect()
}

#[test]
fn purity_check_finds_violations() {
    let sample = "struct S {\n    pub(crate) by_key: HashedMap<u64, u32>,\n}\n// Instant\n";
    assert_eq!(hashed_names(&code(sample)), ["by_key"]);
    assert!(!code(sample).contains("Instant"));
}
