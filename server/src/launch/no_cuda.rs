//! What stands for GPUs in a program that was built without them.

use std::time::Duration;

use super::{LaunchError, Launched};
use crate::config::Config;

pub(super) fn launch(
    _: &Config,
    _: u32,
    _: &mut dyn FnMut(u64, u64),
) -> Result<Launched, LaunchError> {
    let advice = "this build supports only the CPU: build it with `--features cuda`, or leave out \
                  --device";
    Err(LaunchError::Gpu(advice.to_owned()))
}

pub(super) fn wait_until_closed(_: Duration) -> bool {
    true
}
