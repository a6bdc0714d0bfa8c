//! Values of settings: how they are read and written, the same in flags, variables and files.

use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use terrace_cache::{EvictionKind, WritePolicy};
use terrace_l3_nodes::RdmaChoice;
use terrace_replay::Size;
use terrace_routing::{Door, Endpoint};
use terrace_scheduler::AdmissionOrder;

use super::device_choice::DeviceChoice;
use super::key::{Key, Secret};
use super::l3_choice::L3Choice;
use super::setting::Form;
use crate::tool_calls::ToolFormat;

/// What a setting can be set to.
pub(crate) trait Value: Serialize + DeserializeOwned {
    /// How it is written.
    const FORM: Form;

    /// Reads a flag or a variable.
    ///
    /// # Errors
    /// How to write it.
    fn read(text: &str) -> Result<Self, String>;

    /// What [`read`](Self::read) would make the same value of; nothing, if there is none.
    fn written(&self) -> Option<String>;

    /// Writes it into a file.
    fn to_file<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.serialize(serializer)
    }

    /// Reads it from a file.
    fn from_file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer)
    }
}

/// For fields of a configuration: `#[serde(with = "value")]`.
pub(crate) fn serialize<T: Value, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value.to_file(serializer)
}

/// For fields of a configuration: `#[serde(with = "value")]`.
pub(crate) fn deserialize<'de, T: Value, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    T::from_file(deserializer)
}

/// A value as files have it.
struct InFile<T>(T);

impl<T: Value> Serialize for InFile<&T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.to_file(serializer)
    }
}

impl<'de, T: Value> Deserialize<'de> for InFile<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::from_file(deserializer).map(Self)
    }
}

impl<T: Value> Value for Option<T> {
    const FORM: Form = T::FORM;

    fn read(text: &str) -> Result<Self, String> {
        T::read(text).map(Some)
    }

    fn written(&self) -> Option<String> {
        self.as_ref().and_then(T::written)
    }

    fn to_file<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.as_ref().map(InFile).serialize(serializer)
    }

    fn from_file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Option::<InFile<T>>::deserialize(deserializer)?.map(|InFile(value)| value))
    }
}

/// What reads and displays itself.
macro_rules! texts {
    ($($type:ty)*) => {$(
        impl Value for $type {
            const FORM: Form = Form::Text;

            fn read(text: &str) -> Result<Self, String> {
                text.parse()
            }

            fn written(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )*};
}

/// What reads itself with an error of its own, and displays itself.
macro_rules! parsed {
    ($($type:ty)*) => {$(
        impl Value for $type {
            const FORM: Form = Form::Text;

            fn read(text: &str) -> Result<Self, String> {
                text.parse::<Self>().map_err(|error| error.to_string())
            }

            fn written(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )*};
}

parsed! { Door Endpoint }

texts! { AdmissionOrder DeviceChoice EvictionKind L3Choice ToolFormat WritePolicy }

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl Value for $type {
            const FORM: Form = Form::Number;

            fn read(text: &str) -> Result<Self, String> {
                let range = || format!("write a whole number from {} to {}", Self::MIN, Self::MAX);
                text.trim().parse().map_err(|_| range())
            }

            fn written(&self) -> Option<String> {
                Some(self.to_string())
            }
        }
    )*};
}

numbers! { u32 usize }

impl Value for f64 {
    const FORM: Form = Form::Number;

    fn read(text: &str) -> Result<Self, String> {
        text.trim().parse().map_err(|_| "write a number".to_owned())
    }

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Value for bool {
    const FORM: Form = Form::Switch;

    fn read(text: &str) -> Result<Self, String> {
        text.trim().parse().map_err(|_| "write true or false".to_owned())
    }

    fn written(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Value for String {
    const FORM: Form = Form::Text;

    fn read(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn written(&self) -> Option<String> {
        Some(self.clone())
    }
}

impl Value for PathBuf {
    const FORM: Form = Form::Text;

    fn read(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }

    fn written(&self) -> Option<String> {
        Some(self.display().to_string())
    }
}

impl Value for Size {
    const FORM: Form = Form::Text;

    fn read(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn written(&self) -> Option<String> {
        Some(Size::written(*self))
    }
}

impl Value for Duration {
    const FORM: Form = Form::Text;

    fn read(text: &str) -> Result<Self, String> {
        humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 10s"))
    }

    fn written(&self) -> Option<String> {
        Some(humantime::format_duration(*self).to_string())
    }

    fn to_file<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_duration(*self))
    }

    fn from_file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::read(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl Value for RdmaChoice {
    const FORM: Form = Form::Text;

    fn read(text: &str) -> Result<Self, String> {
        Ok(text.to_owned().into())
    }

    fn written(&self) -> Option<String> {
        Some(self.clone().into())
    }
}

impl Value for Secret {
    const FORM: Form = Form::Text;

    fn read(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }

    /// Nobody is told.
    fn written(&self) -> Option<String> {
        Some(String::new())
    }
}

impl Value for Vec<Key> {
    const FORM: Form = Form::List;

    fn read(text: &str) -> Result<Self, String> {
        text.split(',').map(str::parse).collect()
    }

    /// Nobody is told.
    fn written(&self) -> Option<String> {
        (!self.is_empty()).then(String::new)
    }
}
