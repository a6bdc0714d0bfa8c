//! How fast pages go between host and device: that depends on how large their pieces are, and on the way
//! in which they are copied.

use serde::{Deserialize, Serialize};

/// The way in which scattered pieces are copied between host and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyWay {
    /// A kernel reads and writes pinned memory: the size of pieces hardly matters.
    #[default]
    Kernel,
    /// One call for all pieces of a transfer, carried out by the copy engines.
    Batch,
    /// One call for each piece.
    Single,
}

/// Bytes of a piece and what was reached with such pieces.
type Measured = (f64, f64);

/// One large copy where the figures below were measured: an H200 on PCIe 5.
const PEAK: f64 = 55.3e9;
const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;

const KERNEL_TO_DEVICE: &[Measured] = &[(4.0 * KIB, 51.2e9), (2.0 * MIB, 51.3e9)];
const KERNEL_TO_HOST: &[Measured] = &[(4.0 * KIB, 51.8e9), (2.0 * MIB, 52.6e9)];
const BATCH_TO_DEVICE: &[Measured] = &[
    (4.0 * KIB, 2.0e9),
    (16.0 * KIB, 4.0e9),
    (64.0 * KIB, 40.3e9),
    (256.0 * KIB, 50.1e9),
    (2.0 * MIB, 54.2e9),
];
const BATCH_TO_HOST: &[Measured] = &[
    (4.0 * KIB, 4.6e9),
    (16.0 * KIB, 21.3e9),
    (64.0 * KIB, 43.8e9),
    (256.0 * KIB, 50.8e9),
    (2.0 * MIB, 54.1e9),
];
const SINGLE: &[Measured] =
    &[(16.0 * KIB, 5.1e9), (64.0 * KIB, 15.1e9), (256.0 * KIB, 33.9e9), (2.0 * MIB, 51.2e9)];

impl CopyWay {
    /// What pieces of this size reach to the device, on a link that carries `peak` bytes a second in one
    /// large copy.
    #[must_use]
    pub fn to_device(self, piece_bytes: u64, peak: f64) -> f64 {
        match self {
            Self::Kernel => KERNEL_TO_DEVICE.last().map_or(peak, |&(_, rate)| peak * rate / PEAK),
            Self::Batch => reached(BATCH_TO_DEVICE, piece_bytes, peak),
            Self::Single => reached(SINGLE, piece_bytes, peak),
        }
    }

    /// The same to the host.
    #[must_use]
    pub fn to_host(self, piece_bytes: u64, peak: f64) -> f64 {
        match self {
            Self::Kernel => KERNEL_TO_HOST.last().map_or(peak, |&(_, rate)| peak * rate / PEAK),
            Self::Batch => reached(BATCH_TO_HOST, piece_bytes, peak),
            Self::Single => reached(SINGLE, piece_bytes, peak),
        }
    }
}

/// What is reached on another link: a piece takes its bytes' time there, and what it took beyond them
/// where it was measured.
fn reached(table: &[Measured], piece_bytes: u64, peak: f64) -> f64 {
    let bytes = piece_bytes.max(1) as f64;
    let beyond_s = piece_s(table, bytes) - bytes / PEAK;
    bytes / (bytes / peak + beyond_s.max(0.0))
}

/// How long a piece took. Between measured sizes the rate goes evenly with the logarithm of the size;
/// smaller ones take as long as the smallest, and larger ones lose no more than the largest.
fn piece_s(table: &[Measured], bytes: f64) -> f64 {
    let (Some(&first), Some(&last)) = (table.first(), table.last()) else { return bytes / PEAK };
    if bytes <= first.0 {
        return first.0 / first.1;
    }
    if bytes >= last.0 {
        return bytes / PEAK + last.0 / last.1 - last.0 / PEAK;
    }
    let above = table.iter().position(|&(size, _)| size > bytes).unwrap_or(table.len() - 1);
    let ((small, slow), (large, fast)) = (table[above - 1], table[above]);
    let part = libm::log2(bytes / small) / libm::log2(large / small);
    bytes / (slow + (fast - slow) * part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} for {expected}");
    }

    #[test]
    fn measured_sizes_reach_what_was_measured() {
        near(CopyWay::Batch.to_device(16 << 10, PEAK), 4.0e9);
        near(CopyWay::Batch.to_host(256 << 10, PEAK), 50.8e9);
        near(CopyWay::Single.to_device(64 << 10, PEAK), 15.1e9);
        near(CopyWay::Kernel.to_host(512, PEAK), 52.6e9);
    }

    #[test]
    fn larger_pieces_are_never_slower_and_none_beats_the_link() {
        for way in [CopyWay::Kernel, CopyWay::Batch, CopyWay::Single] {
            for peak in [25e9, PEAK] {
                let rates = (9..24).map(|power| way.to_device(1 << power, peak));
                let rates: Vec<f64> = rates.collect();
                assert!(rates.is_sorted(), "{way:?}: {rates:?}");
                assert!(rates.iter().all(|&rate| rate > 0.0 && rate <= peak), "{way:?}: {rates:?}");
            }
        }
    }

    #[test]
    fn very_small_pieces_cost_a_call_each() {
        let [small, half] = [8 << 10, 4 << 10].map(|bytes| CopyWay::Single.to_device(bytes, PEAK));
        assert!((1.9..2.1).contains(&(small / half)), "{small} {half}");
    }
}
