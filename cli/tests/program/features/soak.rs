//! Producers and consumers killed in the middle of whatever they do, beside some that never are.
//!
//! 15 seconds; `TERRACE_SOAK_SECONDS=120`, or `scripts/soak-features`, for a long run.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use terrace_kit::Process;

use super::ground::{Ground, MAX_RESIDENT, TENSOR_BYTES, run};

const MAX_HOLD: &str = "3s";
/// The producer that is killed, and the one that is not.
const VICTIM: u16 = 0;
const STEADY: u16 = 1;

/// How long a killed process has lived, at the most: long enough to do something.
#[derive(Clone, Copy)]
struct Pace {
    life_ms_max: u64,
    /// How long after the last kill the store may take to give up what a dead process was writing.
    patience: Duration,
}

#[test]
fn killed_processes_leave_nothing_wrong_and_nothing_behind() {
    soak(&Ground::disk(), Pace { life_ms_max: 450, patience: Duration::from_secs(5) });
}

#[test]
fn killed_processes_leave_nothing_on_nodes() {
    soak(&Ground::nodes(2), Pace { life_ms_max: 450, patience: Duration::from_secs(5) });
}

#[test]
#[ignore = "needs a Mooncake cluster: run scripts/test-mooncake"]
fn killed_processes_leave_nothing_in_a_cluster() {
    soak(&Ground::mooncake(), Pace { life_ms_max: 2_500, patience: Duration::from_secs(60) });
}

fn soak(ground: &Ground, pace: Pace) {
    let seconds = std::env::var("TERRACE_SOAK_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok()).unwrap_or(15);
    let mut processes = Processes::new(ground);
    let mut steady = [
        Memory::of(&processes.steady[0], "the producer"),
        Memory::of(&processes.steady[1], "the consumer"),
    ];
    let (mut lives, mut dice) = (0, 0x9E37_79B9_7F4A_7C15_u64);
    let (began, length) = (Instant::now(), Duration::from_secs(seconds));
    let (mut used_most, mut looked) = ((0, 0), Instant::now());
    // However slow the machine is, there is something to compare.
    while began.elapsed() < length || steady[0].looks.len() < LOOKS_MIN {
        dice = dice.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        std::thread::sleep(Duration::from_millis(50 + (dice >> 33) % (pace.life_ms_max - 50)));
        processes.replace((dice >> 60) as usize % 2, lives);
        lives += 1;
        if looked.elapsed() >= Duration::from_secs(1) {
            looked = Instant::now();
            let (objects, bytes) = ground.used();
            used_most = (objects.max(used_most.0), bytes.max(used_most.1));
            steady.iter_mut().for_each(Memory::look);
        }
    }
    // Nothing that one of both may not have, with two notes a sample of two tensors.
    let objects_max = 2 * 2 * (MAX_RESIDENT / TENSOR_BYTES + 8);
    assert!(used_most.0 <= objects_max, "{used_most:?}, at most {objects_max} objects");
    steady.iter().for_each(Memory::assert_flat);
    processes.end();
    let consumed = run(ground.terrace("consume", &["--patience", "500ms"]));
    assert_eq!((&consumed["wrong"], &consumed["damaged"]), (&0.into(), &0.into()));
    let took = nothing_is_left(ground, pace.patience);
    eprintln!(
        "{lives} kills in {seconds} s; at most {} objects, {} bytes; nothing left after {took:?}",
        used_most.0, used_most.1
    );
    for memory in steady {
        eprintln!("{} had at most {:?} MiB, by thirds", memory.whose, memory.thirds().map(mib));
    }
}

/// Waits until samples that nobody consumed have been held long enough, and everything is free.
fn nothing_is_left(ground: &Ground, patience: Duration) -> Duration {
    let began = Instant::now();
    let max_hold = humantime(MAX_HOLD);
    loop {
        // Before it is looked for: looking takes a while.
        let held_long_enough = began.elapsed() > max_hold;
        let left = [VICTIM, STEADY].map(|owner| ground.gc(owner, MAX_HOLD));
        let used = ground.used();
        let live = |there: &serde_json::Value| there["features"]["live"].as_u64().unwrap();
        let lives: u64 = left.iter().map(live).sum();
        if held_long_enough {
            assert_eq!(lives, 0, "held for too long: {left:#?}");
        }
        if (lives, used) == (0, (0, 0)) {
            return began.elapsed();
        }
        assert!(began.elapsed() < max_hold + patience, "{used:?} is left: {left:#?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn humantime(text: &str) -> Duration {
    Duration::from_secs(text.trim_end_matches('s').parse().unwrap())
}

/// A producer and a consumer that live on, and a pair that is killed.
struct Processes<'a> {
    ground: &'a Ground,
    steady: [Child; 2],
    victims: [Child; 2],
}

impl<'a> Processes<'a> {
    fn new(ground: &'a Ground) -> Self {
        let steady = [produce(ground, STEADY, "steady"), consume(ground)];
        let victims = [produce(ground, VICTIM, "life"), consume(ground)];
        Self { ground, steady, victims }
    }

    fn replace(&mut self, which: usize, lives: u64) {
        kill(&mut self.victims[which]);
        self.victims[which] = match which {
            // Some names come again, and what was left under them is superseded.
            0 => produce(self.ground, VICTIM, &format!("life-{}", lives % 5)),
            _ => consume(self.ground),
        };
    }

    fn end(&mut self) {
        self.steady.iter_mut().chain(&mut self.victims).for_each(kill);
    }
}

impl Drop for Processes<'_> {
    fn drop(&mut self) {
        for process in self.steady.iter_mut().chain(&mut self.victims) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

fn produce(ground: &Ground, owner: u16, prefix: &str) -> Child {
    let owner = owner.to_string();
    let produce = ["--owner", &owner, "--prefix", prefix, "--max-hold", MAX_HOLD];
    spawn(ground.produce(&[&produce[..], &["--samples", "100000000"]].concat()))
}

fn consume(ground: &Ground) -> Child {
    spawn(ground.terrace("consume", &["--patience", "1h"]))
}

fn spawn(mut command: Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Kills a process, which must not have ended or complained before.
fn kill(process: &mut Child) {
    let ended = process.try_wait().unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
    let mut errors = String::new();
    if let Some(mut stderr) = process.stderr.take() {
        stderr.read_to_string(&mut errors).unwrap();
    }
    assert!(ended.is_none(), "it ended by itself: {ended:?}, {errors}");
    assert!(!errors.contains("terrace:"), "{errors}");
}

/// What a process has in memory, as often as it was looked at.
struct Memory {
    process: u32,
    whose: &'static str,
    looks: Vec<u64>,
}

const LOOKS_MIN: usize = 9;

impl Memory {
    fn of(process: &Child, whose: &'static str) -> Self {
        Self { process: process.id(), whose, looks: Vec::new() }
    }

    fn look(&mut self) {
        self.looks.push(Process::Number(self.process).resident_bytes().unwrap());
    }

    /// The most of each third.
    fn thirds(&self) -> [u64; 3] {
        let mut thirds = self.looks.chunks(self.looks.len().div_ceil(3));
        [(); 3].map(|()| thirds.next().into_iter().flatten().copied().max().unwrap_or_default())
    }

    /// The first third is for everything that is made once.
    fn assert_flat(&self) {
        let [_, before, after] = self.thirds();
        let (whose, most) = (self.whose, self.thirds().map(mib));
        assert!(after <= before + before / 10 + (2 << 20), "{whose} grows: {most:?} MiB");
    }
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}
