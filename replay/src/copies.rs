//! Copy rates between host and device, by piece size and copy method.

use serde::{Deserialize, Serialize};

/// Method of copying scattered pieces between host and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyWay {
    /// A kernel accesses pinned memory; piece size hardly matters.
    #[default]
    Kernel,
    /// One call per transfer, executed by the copy engines.
    Batch,
    /// One call per piece.
    Single,
}

/// Bytes of a piece, and the measured rate.
type Measured = (f64, f64);

/// Peak rate of the machine where the figures below were measured: an H200 on PCIe 5.
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
    /// Returns the rate of pieces of a size to the device, on a link whose large copies reach
    /// `peak` bytes per second.
    #[must_use]
    pub fn to_device(self, piece_bytes: u64, peak: f64) -> f64 {
        match self {
            Self::Kernel => KERNEL_TO_DEVICE.last().map_or(peak, |&(_, rate)| peak * rate / PEAK),
            Self::Batch => reached(BATCH_TO_DEVICE, piece_bytes, peak),
            Self::Single => reached(SINGLE, piece_bytes, peak),
        }
    }

    /// Returns the same rate to the host.
    #[must_use]
    pub fn to_host(self, piece_bytes: u64, peak: f64) -> f64 {
        match self {
            Self::Kernel => KERNEL_TO_HOST.last().map_or(peak, |&(_, rate)| peak * rate / PEAK),
            Self::Batch => reached(BATCH_TO_HOST, piece_bytes, peak),
            Self::Single => reached(SINGLE, piece_bytes, peak),
        }
    }
}

/// Converts a measured rate to another link: the bytes of a piece take that link's time, and the
/// measured overhead stays.
fn reached(table: &[Measured], piece_bytes: u64, peak: f64) -> f64 {
    let bytes = piece_bytes.max(1) as f64;
    let beyond_s = piece_s(table, bytes) - bytes / PEAK;
    bytes / (bytes / peak + beyond_s.max(0.0))
}

/// Returns the measured time of a piece. Rates are interpolated over the logarithm of the size.
/// Smaller pieces take as long as the smallest measured one; larger pieces have the overhead of the
/// largest.
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
    fn measured_sizes_have_measured_rates() {
        near(CopyWay::Batch.to_device(16 << 10, PEAK), 4.0e9);
        near(CopyWay::Batch.to_host(256 << 10, PEAK), 50.8e9);
        near(CopyWay::Single.to_device(64 << 10, PEAK), 15.1e9);
        near(CopyWay::Kernel.to_host(512, PEAK), 52.6e9);
    }

    #[test]
    fn rates_grow_with_size_up_to_the_peak() {
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
    fn tiny_pieces_cost_a_call_each() {
        let [small, half] = [8 << 10, 4 << 10].map(|bytes| CopyWay::Single.to_device(bytes, PEAK));
        assert!((1.9..2.1).contains(&(small / half)), "{small} {half}");
    }
}
