//! The checksums of a batch.

use std::num::NonZero;
use std::sync::OnceLock;
use std::thread;

use crate::object::payload_checksum;

/// A thread's share has at least so many bytes, or starting the thread takes longer than it saves.
const SHARE_BYTES_MIN: usize = 4 << 20;

/// More threads than this read no faster than memory gives, and others want to use it too.
const THREADS_MAX: usize = 4;

/// The checksums of payloads, in their order. They take as long as reading the memory does, and one
/// core alone does not read as fast as the memory gives: a large batch is shared out among some.
pub(super) fn checksums(payloads: &[&[u8]]) -> Vec<u64> {
    let bytes: usize = payloads.iter().map(|payload| payload.len()).sum();
    let threads = (bytes / SHARE_BYTES_MIN).clamp(1, cores().min(THREADS_MAX));
    let in_turn = |share: &[&[u8]]| -> Vec<u64> {
        share.iter().map(|payload| payload_checksum(payload)).collect()
    };
    if threads == 1 {
        return in_turn(payloads);
    }
    let mut shares = payloads.chunks(payloads.len().div_ceil(threads));
    let own = shares.next().unwrap_or_default();
    thread::scope(|scope| {
        let start = |share| {
            let started = thread::Builder::new().spawn_scoped(scope, move || in_turn(share));
            (share, started)
        };
        let others: Vec<_> = shares.map(start).collect();
        let mut sums = in_turn(own);
        for (share, started) in others {
            // Where there can be no thread, or it has died, there is still this one.
            let sums_of_share = started.ok().and_then(|thread| thread.join().ok());
            sums.extend(sums_of_share.unwrap_or_else(|| in_turn(share)));
        }
        sums
    })
}

/// How many threads can run at once. The system takes a while to say.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, NonZero::get))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_payload_has_its_own_checksum_however_the_batch_is_shared_out() {
        let bytes: Vec<u8> =
            (0..9 << 20).map(|at: u32| (at.wrapping_mul(40_503) >> 8) as u8).collect();
        for payload_bytes in [1 << 10, 100_001, 1 << 20, 5 << 20, 9 << 20] {
            let payloads: Vec<&[u8]> = bytes.chunks(payload_bytes).collect();
            let expected: Vec<u64> = payloads.iter().map(|it| payload_checksum(it)).collect();
            assert_eq!(checksums(&payloads), expected, "payloads of {payload_bytes} bytes");
        }
        assert_eq!(checksums(&[]), []);
    }
}
