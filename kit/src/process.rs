//! Statistics of a process from Linux's `/proc`. On other systems all are none.

/// A process to query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    /// The calling process.
    Own,
    /// The process with this id.
    Number(u32),
}

impl Process {
    /// Returns the resident memory.
    #[must_use]
    pub fn resident_bytes(self) -> Option<u64> {
        self.status("VmRSS").as_deref().and_then(bytes)
    }

    /// Returns the peak resident memory.
    #[must_use]
    pub fn peak_resident_bytes(self) -> Option<u64> {
        self.status("VmHWM").as_deref().and_then(bytes)
    }

    /// Returns the text of a field of `status`.
    #[must_use]
    pub fn status(self, field: &str) -> Option<String> {
        let path = match self {
            Self::Own => "/proc/self/status".to_owned(),
            Self::Number(number) => format!("/proc/{number}/status"),
        };
        value(&std::fs::read_to_string(path).ok()?, field).map(str::to_owned)
    }
}

/// Returns the memory available to programs.
#[must_use]
pub fn available_bytes() -> Option<u64> {
    bytes(value(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")?)
}

/// Returns the value of a field in a list with one field per line.
fn value<'t>(text: &'t str, field: &str) -> Option<&'t str> {
    let of_field = |line: &'t str| line.strip_prefix(field)?.strip_prefix(':');
    text.lines().find_map(of_field).map(str::trim)
}

/// Parses an amount in KiB, which the kernel writes as kB.
fn bytes(amount: &str) -> Option<u64> {
    let kib: u64 = amount.strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tterrace\nVmHWM:\t   20480 kB\nVmRSS:\t   10240 kB\nSigIgn:\t1\n";

    #[test]
    fn finds_a_field_by_its_whole_name() {
        assert_eq!(value(STATUS, "SigIgn"), Some("1"));
        assert_eq!(value(STATUS, "Vm"), None);
        assert_eq!(value(STATUS, "VmRSS").and_then(bytes), Some(10 << 20));
        assert_eq!(bytes("10 MB"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn reports_memory_and_peak() {
        let (now, peak) = (Process::Own.resident_bytes(), Process::Own.peak_resident_bytes());
        assert!(now > Some(1 << 16) && peak >= now, "{now:?}, {peak:?}");
        let again = Process::Number(std::process::id());
        assert!(again.resident_bytes() > Some(1 << 16));
        assert!(available_bytes() > Some(0));
        assert_eq!(Process::Number(u32::MAX).resident_bytes(), None);
    }
}
