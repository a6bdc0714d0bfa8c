//! Any bytes may come over the network; none may end badly.

#![no_main]

use libfuzzer_sys::fuzz_target;
use terrace_tests::l3::frames::read;

fuzz_target!(|bytes: &[u8]| read(bytes));
