//! A server on a file system with little room.

use std::path::Path;
use std::process::Command;

use crate::process::{Server, ask, figure, terrace, wait_for_backups};

/// A command in a process that may mount, but only within itself, if this system has that: it finds a new
/// file system of so many MiB at the folder.
fn on_a_small_disk(folder: &Path, mebibytes: u32) -> Option<Command> {
    let unshare = |script: String| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--mount", "sh", "-ec"]).arg(script);
        command.arg("sh").arg(folder);
        command
    };
    let mount = format!("mount -t tmpfs -o size={mebibytes}m tmpfs \"$1\"");
    if !unshare(mount.clone()).output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: this system does not let us mount a file system of our own");
        return None;
    }
    let mut command = unshare(format!("{mount}; shift; exec \"$@\""));
    command.arg(terrace().get_program()).env("NO_COLOR", "1");
    Some(command)
}

/// What all files in a folder have.
fn bytes_in(folder: &Path) -> u64 {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let file = entry.metadata().unwrap();
            if file.is_dir() { bytes_in(&entry.path()) } else { file.len() }
        })
        .sum()
}

#[test]
fn a_small_disk_is_told_and_not_filled() {
    const MIB: f64 = 1024.0 * 1024.0;
    let folder = tempfile::tempdir().unwrap();
    let Some(mut command) = on_a_small_disk(folder.path(), 24) else { return };
    let store = format!("disk:{}", folder.path().display());
    command.args(["serve", "--listen", "127.0.0.1:0", "--l3-capacity", "192MiB", "--l3", &store]);
    command.args(["--device-memory", "24MiB", "--host-memory", "16MiB"]);
    let server = Server::spawn(command);
    let summary = &server.summary;
    for told in
        ["warning: the store cannot grow to --l3-capacity 192.0 MiB", "6.0 MiB must stay free"]
    {
        assert!(summary.contains(told), "{told} is missing:\n{summary}");
    }
    let said = summary.lines().find_map(|line| line.strip_prefix("l3 ")).unwrap();
    let said: f64 = said.trim().split_once(" MiB").unwrap().0.parse().unwrap();
    assert!((12.0..18.0).contains(&said), "{summary}");
    let same_as_said = || {
        let capacity = figure(&server.address, "terrace_l3_capacity_bytes") / MIB;
        assert!((capacity - said).abs() < 0.1, "{capacity} MiB, and the summary says {said}");
    };
    same_as_said();
    for number in 0..6 {
        ask(&server.address, &format!("Document {number}. ").repeat(45), "").unwrap();
    }
    wait_for_backups(&server.address, "terrace_l3_objects");
    same_as_said();
    let there = Path::new("/proc").join(server.id().to_string()).join("root");
    let taken = bytes_in(&there.join(folder.path().strip_prefix("/").unwrap())) as f64 / MIB;
    assert!((10.0..=18.0).contains(&taken), "{taken} MiB of 24 are taken");
    server.stop();
}
