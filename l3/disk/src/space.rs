//! Free space on a file system.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{fstatvfs, statvfs};

/// Default reserve for a store in `folder`: a twentieth of the file system, at least 1 GiB and at
/// most 16 GiB, but never more than a quarter.
///
/// # Errors
/// If the size of the file system is unknown.
pub fn usual_reserve_bytes(folder: &Path) -> io::Result<u64> {
    // The folder may not exist before the store is opened; the file system does.
    let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    let system = statvfs(there)?;
    Ok(usual_reserve_of(system.f_blocks.saturating_mul(system.f_frsize)))
}

fn usual_reserve_of(total_bytes: u64) -> u64 {
    (total_bytes / 20).clamp(1 << 30, 16 << 30).min(total_bytes / 4)
}

/// Free bytes for this user on the file system of `file`, minus those reserved for the file but not
/// yet allocated.
pub(super) fn available(file: &File) -> Option<u64> {
    let system = fstatvfs(file).ok()?;
    let file = file.metadata().ok()?;
    let promised = file.len().saturating_sub(file.blocks() * 512);
    Some(system.f_bavail.saturating_mul(system.f_frsize).saturating_sub(promised))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_fits_the_file_system() {
        const MIB: u64 = 1 << 20;
        const GIB: u64 = 1 << 30;
        let cases = [
            (0, 0),
            (64 * MIB, 16 * MIB),
            (10 * GIB, GIB),
            (100 * GIB, 5 * GIB),
            (10_000 * GIB, 16 * GIB),
        ];
        for (total, reserve) in cases {
            assert_eq!(usual_reserve_of(total), reserve, "of {total}");
        }
        let folder = tempfile::tempdir().unwrap();
        let reserve = usual_reserve_bytes(&folder.path().join("not/there/yet")).unwrap();
        assert!(reserve > 0 && reserve <= 16 * GIB, "{reserve}");
    }

    #[test]
    fn reserved_space_is_not_free() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("sparse")).unwrap();
        let free = available(&file).unwrap();
        let promised = free / 2;
        file.set_len(promised).unwrap();
        // Other processes write and delete on the same disk meanwhile.
        assert!(available(&file).unwrap() < free - promised / 2);
    }
}
