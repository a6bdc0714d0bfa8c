//! Faults of a simulated disk.

use std::io;

use terrace_l3_disk::DiskFile;

/// Operation that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A transfer from the disk.
    Read,
    /// A transfer to the disk.
    Write,
    /// A sync.
    Sync,
    /// Making a file longer.
    Grow,
}

/// Kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// With an error of the system's; a write has then written half, and a read has read rubbish.
    Error(Errno),
    /// It transfers at most this number of bytes, and reports that.
    Short(usize),
    /// A write that leaves the disk as it was, and does not say so.
    Lost,
}

/// Errors of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errno {
    /// The device failed.
    Io,
    /// There is no room.
    NoSpace,
}

/// An operation that is to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Operation that fails.
    pub operation: Operation,
    /// On which file.
    pub file: DiskFile,
    /// Number of these operations that succeed before.
    pub after: u64,
    /// Kind of failure.
    pub failure: Failure,
    /// True if all later ones fail like it.
    pub lasting: bool,
}

/// The faults that are still to come.
#[derive(Debug, Default)]
pub(super) struct Faults(Vec<Fault>);

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    /// Forgets all, and says how many there were.
    pub(super) fn clear(&mut self) -> usize {
        std::mem::take(&mut self.0).len()
    }

    /// Returns the failure of an operation, if it fails.
    pub(super) fn strike(&mut self, operation: Operation, file: DiskFile) -> Option<Failure> {
        let mut struck = None;
        self.0.retain_mut(|fault| {
            if fault.operation != operation || fault.file != file {
                return true;
            }
            if fault.after > 0 {
                fault.after -= 1;
                return true;
            }
            struck = struck.or(Some(fault.failure));
            fault.lasting
        });
        struck
    }
}

impl Failure {
    pub(super) fn error(self) -> io::Error {
        match self {
            Failure::Error(errno) => errno.error(),
            Failure::Short(_) | Failure::Lost => panic!("only transfers fail like this"),
        }
    }
}

impl Errno {
    pub(super) fn error(self) -> io::Error {
        io::Error::from_raw_os_error(match self {
            Errno::Io => 5,
            Errno::NoSpace => 28,
        })
    }
}
