//! What steps compute on, and what follows from that where nobody says otherwise.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use terrace_replay::Size;

use super::{Config, ConfigError};

/// The memory for KV on a CPU. A GPU's is what is left of it.
pub(crate) const DEVICE_MEMORY_ON_CPU: Size = Size::mib(256);

/// What steps compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// The CPU.
    Cpu,
    /// The NVIDIA GPU of this number.
    Cuda(u32),
}

/// How steps go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepSettings {
    pub(crate) step_tokens: u32,
    pub(crate) running_max: u32,
    pub(crate) steps_in_flight: u32,
    pub(crate) load_back_overlaps: bool,
}

impl StepSettings {
    /// What suits a device.
    const fn of(device: DeviceChoice) -> Self {
        match device {
            DeviceChoice::Cpu => Self {
                step_tokens: 512,
                running_max: 64,
                steps_in_flight: 1,
                load_back_overlaps: false,
            },
            DeviceChoice::Cuda(_) => Self {
                step_tokens: 8192,
                running_max: 256,
                steps_in_flight: 2,
                load_back_overlaps: true,
            },
        }
    }
}

impl Config {
    /// How steps go: as was said, or as suits the device.
    pub(crate) fn steps(&self) -> StepSettings {
        let usual = StepSettings::of(self.device);
        StepSettings {
            step_tokens: self.step_tokens.unwrap_or(usual.step_tokens),
            running_max: self.running_max.unwrap_or(usual.running_max),
            steps_in_flight: self.steps_in_flight.unwrap_or(usual.steps_in_flight),
            load_back_overlaps: self.load_back_overlaps.unwrap_or(usual.load_back_overlaps),
        }
    }

    /// Whether the device can compare pages, and some are.
    pub(super) fn check_canary(&self) -> Result<(), ConfigError> {
        let advice = match (self.canary, self.device) {
            (Some(0), _) => "use at least 1, or leave it out to verify no pages",
            (Some(_), DeviceChoice::Cpu) => {
                "pages are verified on GPUs only: set device (--device) to cuda, or leave it out"
            }
            (Some(_), DeviceChoice::Cuda(_)) | (None, _) => return Ok(()),
        };
        Err(ConfigError::new("canary", self.canary.unwrap_or_default(), advice))
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write it as cpu, cuda or cuda:NUMBER; the first GPU is 0".to_owned();
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", number)) => number.parse().map(Self::Cuda).map_err(|_| wrong()),
            Some(_) | None => Err(wrong()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        choice.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Configuration;

    #[test]
    fn devices_are_written_as_they_are_read() {
        for (text, device) in [
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(0)),
            ("cuda:3", DeviceChoice::Cuda(3)),
        ] {
            assert_eq!((text.parse(), device.to_string()), (Ok(device), text.to_owned()));
        }
        assert_eq!("cuda:0".parse(), Ok(DeviceChoice::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0"] {
            assert!(wrong.parse::<DeviceChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn descriptions_say_what_is_usual_on_each_device() {
        let (cpu, gpu) =
            (StepSettings::of(DeviceChoice::Cpu), StepSettings::of(DeviceChoice::Cuda(0)));
        for (setting, on_cpu, on_gpu) in [
            ("step_tokens", cpu.step_tokens, gpu.step_tokens),
            ("running_max", cpu.running_max, gpu.running_max),
            ("steps_in_flight", cpu.steps_in_flight, gpu.steps_in_flight),
        ] {
            let told = Config::setting(setting).unwrap().default().unwrap();
            assert_eq!(told, format!("{on_cpu} on a CPU, {on_gpu} on a GPU"));
        }
        let told = Config::setting("device_memory").unwrap().default().unwrap();
        assert!(told.starts_with(&DEVICE_MEMORY_ON_CPU.written()), "{told}");
    }
}
