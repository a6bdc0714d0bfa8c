//! Limits on the sizes and shares of a store.

use super::{NO_SLOT, Slot};

/// Slot numbers that are reserved for the anchors of rows.
const ANCHORS_MAX: Slot = 1 << 24;

/// Number of slots of `slot_bytes` in `capacity_bytes`.
pub fn slots_of(capacity_bytes: u64, slot_bytes: u64) -> Result<Slot, String> {
    if slot_bytes > u64::from(u32::MAX) {
        return Err("objects may have at most 4 GiB".to_owned());
    }
    let slots = capacity_bytes.checked_div(slot_bytes).unwrap_or(0);
    if slots == 0 || slots >= u64::from(NO_SLOT - ANCHORS_MAX) {
        return Err(format!(
            "a store of {capacity_bytes} bytes cannot be divided into slots of {slot_bytes} bytes: \
             it needs at least one and fewer than 4 billion"
        ));
    }
    Ok(slots as Slot)
}

/// Checks the configured shares of slots.
pub fn check_shares(low: f64, high: f64, leased: f64) -> Result<(), String> {
    if [low, high, leased].iter().all(|share| (0.0..=1.0).contains(share)) && low <= high {
        return Ok(());
    }
    Err("watermark_low, watermark_high and leased_share_max must be between 0 and 1, with \
         watermark_low at most watermark_high"
        .to_owned())
}

/// Number of objects that may be leased at a time in a store of `slots` slots.
pub fn leases_max(slots: Slot, share: f64) -> usize {
    (f64::from(slots) * share) as usize
}
