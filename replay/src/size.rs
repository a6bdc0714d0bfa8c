//! Byte sizes as written in flags, variables and files.

use std::fmt;
use std::str::FromStr;

use bytesize::ByteSize;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes, parsed from text like `512MiB`, `1.5GiB` or `4GB`.
///
/// ```
/// use terrace_replay::Size;
///
/// assert_eq!("1.5GiB".parse(), Ok(Size::mib(1536)));
/// assert_eq!(Size::mib(1536).written(), "1536MiB");
/// assert_eq!(Size::mib(1536).to_string(), "1.5 GiB");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl Size {
    /// Creates a size of `count` times 1024 bytes.
    #[must_use]
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// Creates a size of `count` times 1024 KiB.
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// Creates a size of `count` times 1024 MiB.
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Self(count << 30)
    }

    /// Returns the bytes.
    #[must_use]
    pub const fn as_u64(self) -> u64 {
        self.0
    }

    /// Formats the size exactly, for a file or a flag; [`fmt::Display`] rounds.
    #[must_use]
    pub fn written(self) -> String {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let Self(mut number) = self;
        let mut unit = 0;
        while number > 0 && number.is_multiple_of(1024) && unit + 1 < UNITS.len() {
            number /= 1024;
            unit += 1;
        }
        if number == 0 { "0".to_owned() } else { format!("{number}{}", UNITS[unit]) }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&ByteSize(self.0).display().iec(), f)
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim().parse() {
            // The parser saturates at this value.
            Ok(ByteSize(u64::MAX)) => Err(format!("{text:?} is too large")),
            Ok(ByteSize(bytes)) => Ok(Self(bytes)),
            Err(_) => Err(format!(
                "{text:?} is not a size: write a number and its unit, like 512MiB, 1.5GiB or 4GB"
            )),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.written())
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Written;

        impl Visitor<'_> for Written {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size like \"512MiB\", \"1.5GiB\" or \"4GB\", or a number of bytes")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }

            fn visit_i64<E: Error>(self, bytes: i64) -> Result<Size, E> {
                let negative = |_| E::custom(format!("{bytes} is not a size: use 0 or more"));
                u64::try_from(bytes).map(Size).map_err(negative)
            }
        }

        deserializer.deserialize_any(Written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct File {
        memory: Size,
    }

    #[test]
    fn parses_a_number_and_a_unit() {
        let cases = [
            ("0", Size(0)),
            ("4096", Size::kib(4)),
            ("64MiB", Size::mib(64)),
            ("64 mib", Size::mib(64)),
            ("64Mi", Size::mib(64)),
            (" 1.5GiB ", Size::mib(1536)),
            ("4GB", Size(4_000_000_000)),
            ("4G", Size(4_000_000_000)),
        ];
        for (text, size) in cases {
            assert_eq!(text.parse(), Ok(size), "{text}");
        }
    }

    #[test]
    fn invalid_size_error_shows_an_example() {
        for wrong in ["foo", "", "-1", "GiB", "1.2.3GiB", "64 pages", "64MiB more", "1e3"] {
            let error = wrong.parse::<Size>().unwrap_err();
            assert!(error.starts_with(&format!("{wrong:?} is not a size")), "{error}");
            assert!(error.contains("like 512MiB"), "{error}");
        }
        let error = "99999999999TiB".parse::<Size>().unwrap_err();
        assert_eq!(error, "\"99999999999TiB\" is too large");
    }

    #[test]
    fn files_use_the_same_parser_and_errors() {
        let read = toml::from_str::<File>;
        assert_eq!(read("memory = \"64MiB\"").unwrap().memory, Size::mib(64));
        assert_eq!(read("memory = 4096").unwrap().memory, Size::kib(4));
        for wrong in ["memory = \"foo\"", "memory = -1", "memory = 1.5", "memory = true"] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains("size"), "{error}");
            assert!(!error.contains("parsable"), "{error}");
        }
    }

    #[test]
    fn written_size_round_trips() {
        for size in [0, 1, 1023, 1024, 1_234_567, 3 << 20, 1 << 40, 5 << 50, u64::MAX - 1] {
            let file = File { memory: Size(size) };
            let text = toml::to_string(&file).unwrap();
            assert_eq!(toml::from_str::<File>(&text).unwrap(), file, "{text}");
        }
    }
}
