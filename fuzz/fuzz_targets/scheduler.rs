//! Any bytes are a story for the scheduler; none may end badly.

#![no_main]

use libfuzzer_sys::fuzz_target;
use terrace_tests::sim::{decode, replay_actions};

fuzz_target!(|bytes: &[u8]| {
    let (config, actions) = decode(bytes);
    if let Some((violation, place)) = replay_actions(&config, &actions) {
        panic!("action {place}: {violation}");
    }
});
