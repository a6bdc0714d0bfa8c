//! Secret of a folder of stores. Page keys that are made with it cannot be computed without it.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::folder::{FolderLock, StoreFolder};

/// Name of the file in the folder.
const FILE: &str = "secret";
const SECRET_BYTES: usize = 32;
/// Mode bits that give access to users other than the owner.
const OTHERS: u32 = 0o077;

/// Reason why the secret of a folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecretError {
    /// The file cannot be created or read.
    #[error("cannot use {}: {error}; the folder must be writable, and the file readable", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Message of the system.
        error: io::Error,
    },
    /// Other users could know the secret.
    #[error("other users may read or write {} (mode {mode:04o}): use `chmod 600` on it", path.display())]
    OpenToOthers {
        /// The file.
        path: PathBuf,
        /// Mode of the file.
        mode: u32,
    },
    /// The file does not have the format of a secret.
    #[error(
        "{} is damaged, it must have {} hexadecimal digits: restore it, or delete it to begin with a new secret and \
         without the pages that are stored",
        path.display(),
        2 * SECRET_BYTES
    )]
    Damaged {
        /// The file.
        path: PathBuf,
    },
}

impl StoreFolder {
    /// Returns the secret of the folder: random, created on first use, and constant from then on.
    /// Only the file's owner may read it.
    ///
    /// # Errors
    /// If the file cannot be created or read, is accessible to others, or is damaged.
    pub fn secret(&self) -> Result<String, SecretError> {
        let path = self.path.join(FILE);
        let secret = match read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => create(&self.path, &path),
            read => read,
        };
        let (mode, text) =
            secret.map_err(|error| SecretError::File { path: path.clone(), error })?;
        if mode & OTHERS != 0 {
            return Err(SecretError::OpenToOthers { path, mode: mode & 0o7777 });
        }
        let is_whole =
            text.len() == 2 * SECRET_BYTES && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        if is_whole { Ok(text) } else { Err(SecretError::Damaged { path }) }
    }
}

/// Mode and content of the file.
fn read(path: &Path) -> io::Result<(u32, String)> {
    let file = File::open(path)?;
    let mode = file.metadata()?.mode();
    let mut bytes = Vec::new();
    // One byte more than valid, so that a longer file is detected.
    file.take(2 * SECRET_BYTES as u64 + 2).read_to_end(&mut bytes)?;
    Ok((mode, String::from_utf8_lossy(&bytes).trim_end().to_owned()))
}

/// Creates the file atomically, then reads it: another process may have been faster.
fn create(folder: &Path, path: &Path) -> io::Result<(u32, String)> {
    fs::create_dir_all(folder)?;
    let _turn = FolderLock::wait(folder);
    if fs::exists(path)? {
        return read(path);
    }
    let unfinished = folder.join(format!("{FILE}.{}", std::process::id()));
    // Left by a killed process. The mode of a file is set only when it is created.
    match fs::remove_file(&unfinished) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(&unfinished)?;
    let mut text = String::new();
    let mut secret = [0; SECRET_BYTES];
    getrandom::fill(&mut secret)?;
    for byte in secret {
        write!(text, "{byte:02x}").expect("a string takes everything");
    }
    text.push('\n');
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    File::open(folder)?.sync_all()?;
    read(path)
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn folder(path: &Path) -> StoreFolder {
        StoreFolder { path: path.join("l3"), limit_bytes: 1 << 20, reserve_bytes: 0 }
    }

    #[test]
    fn each_folder_has_its_own_constant_secret() {
        let place = tempfile::tempdir().unwrap();
        let folder = folder(place.path());
        let secret = folder.secret().unwrap();
        assert_eq!((secret.len(), folder.secret().unwrap()), (64, secret.clone()));
        let mode = fs::metadata(folder.path.join(FILE)).unwrap().mode();
        assert_eq!(mode & 0o7777, 0o600);
        let names = fs::read_dir(&folder.path).unwrap().count();
        assert_eq!(names, 1, "nothing unfinished is left");
        fs::remove_file(folder.path.join(FILE)).unwrap();
        assert_ne!(folder.secret().unwrap(), secret);
    }

    #[test]
    fn concurrent_first_uses_get_the_same_secret() {
        let place = tempfile::tempdir().unwrap();
        let folder = folder(place.path());
        let ask = || {
            std::thread::scope(|scope| {
                let asked: Vec<_> =
                    (0..8).map(|_| scope.spawn(|| folder.secret().unwrap())).collect();
                asked.into_iter().map(|it| it.join().unwrap()).collect::<Vec<_>>()
            })
        };
        let secrets = ask();
        assert!(secrets.iter().all(|secret| *secret == secrets[0]), "{secrets:?}");
    }

    #[test]
    fn an_accessible_or_damaged_secret_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let folder = folder(place.path());
        folder.secret().unwrap();
        let path = folder.path.join(FILE);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let refused = folder.secret().unwrap_err().to_string();
        assert!(refused.contains("(mode 0644): use `chmod 600`"), "{refused}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        for damaged in ["", "too short", &"0".repeat(65), &"x".repeat(64), &"ä".repeat(32)] {
            fs::write(&path, damaged).unwrap();
            let refused = folder.secret().unwrap_err().to_string();
            assert!(refused.contains("must have 64 hexadecimal digits"), "{refused}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let refused = folder.secret().unwrap_err();
        assert!(matches!(refused, SecretError::File { .. }), "{refused}");
    }
}
