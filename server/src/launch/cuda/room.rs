//! What has to fit into a GPU's memory.

use std::fmt;

use terrace_replay::Size;

use crate::launch::LaunchError;

/// A GPU's memory before anything was loaded, and what is to go there, in bytes.
#[derive(Clone, Debug)]
pub(super) struct Room {
    pub(super) gpu: String,
    pub(super) free: u64,
    pub(super) total: u64,
    pub(super) weights: u64,
    /// What steps compute in.
    pub(super) steps: u64,
    /// How large steps may be.
    pub(super) step_tokens: u32,
    /// The least KV that is useful.
    pub(super) kv_min: u64,
}

impl Room {
    /// Percent of what is free that are used where nobody says how much. The rest is for what is not known before:
    /// kernels, lists of copies, and others who use the GPU.
    const USED_PERCENT: u64 = 92;
    /// Percent that may be used where somebody does.
    const USED_PERCENT_MAX: u64 = 98;

    /// The memory for KV: what was asked for, or all that is left.
    ///
    /// # Errors
    /// When that does not fit.
    pub(super) fn device_memory(&self, asked: Option<Size>) -> Result<Size, LaunchError> {
        let percent = if asked.is_some() { Self::USED_PERCENT_MAX } else { Self::USED_PERCENT };
        let usable = self.free / 100 * percent;
        let needed = self.weights.saturating_add(self.steps);
        let left = usable.saturating_sub(needed);
        if left < self.kv_min {
            let advice = match self.weights.saturating_add(self.kv_min) >= usable {
                true => "use a smaller model, or a larger GPU".to_owned(),
                false => "lower --step-tokens or --running-max".to_owned(),
            };
            return Err(self.too_small(asked.unwrap_or(Size(self.kv_min)), advice));
        }
        match asked {
            Some(asked) if asked.as_u64() > left => {
                // In whole MiB, so that it can be written as it is told.
                let most = Size::mib(left >> 20).written();
                Err(self.too_small(asked, format!("lower --device-memory to {most} or less")))
            }
            Some(asked) => Ok(asked),
            None => Ok(Size(left)),
        }
    }

    fn too_small(&self, kv: Size, advice: String) -> LaunchError {
        LaunchError::GpuMemory {
            gpu: self.gpu.clone(),
            free: Size(self.free),
            total: Size(self.total),
            weights: Size(self.weights),
            steps: Size(self.steps),
            step_tokens: self.step_tokens,
            kv,
            advice,
        }
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (total, free) = (Size(self.total), Size(self.free));
        let (weights, steps) = (Size(self.weights), Size(self.steps));
        let gpu = &self.gpu;
        write!(f, "{gpu}, {free} of {total} were free: {weights} of weights, {steps} for steps")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn room() -> Room {
        Room {
            gpu: "A GPU".to_owned(),
            free: 100 * GIB,
            total: 140 * GIB,
            weights: 15 * GIB,
            steps: 2 * GIB,
            step_tokens: 8192,
            kv_min: 16 << 20,
        }
    }

    fn refused(room: &Room, asked: Option<Size>) -> String {
        room.device_memory(asked).unwrap_err().to_string()
    }

    #[test]
    fn kv_gets_what_is_left_but_for_a_reserve() {
        assert_eq!(room().device_memory(None).unwrap(), Size(100 * GIB / 100 * 92 - 17 * GIB));
        assert_eq!(room().device_memory(Some(Size::gib(80))).unwrap(), Size::gib(80));
    }

    #[test]
    fn what_does_not_fit_is_told_with_what_to_lower() {
        let kv = refused(&room(), Some(Size::gib(82)));
        assert_eq!(
            kv,
            "A GPU has 100.0 GiB of 140.0 GiB free, too little for 15.0 GiB of weights, 2.0 GiB for steps \
             of 8192 tokens and 82.0 GiB of KV: lower --device-memory to 81GiB or less, or stop other \
             processes that use it"
        );
        let most = Size(room().free / 100 * 98 - 17 * GIB);
        assert!(room().device_memory(Some(most)).is_ok(), "what it advises works");
        let steps = refused(&Room { steps: 80 * GIB, ..room() }, None);
        assert!(steps.contains("lower --step-tokens or --running-max"), "{steps}");
        let weights = refused(&Room { weights: 140 * GIB, ..room() }, None);
        assert!(weights.contains("use a smaller model"), "{weights}");
        let unlikely = refused(&Room { weights: u64::MAX, ..room() }, Some(Size::gib(1)));
        assert!(unlikely.contains("use a smaller model"), "{unlikely}");
    }
}
