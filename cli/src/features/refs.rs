//! A folder of refs that wait to be consumed.

use std::error::Error;
use std::path::{Path, PathBuf};

use terrace_l3_features::FeatureRef;

type Failure = Box<dyn Error>;

/// A queue in a folder, one file a ref. A file is there whole or not at all.
pub(super) struct Refs {
    folder: PathBuf,
}

impl Refs {
    pub(super) fn open(folder: &Path) -> Result<Self, Failure> {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Self { folder: folder.to_owned() })
    }

    pub(super) fn push(&self, reference: &FeatureRef) -> Result<(), Failure> {
        let name = format!("{:020}", reference.generation());
        let unfinished = self.folder.join(format!("{name}.part"));
        std::fs::write(&unfinished, serde_json::to_string(reference)?)?;
        std::fs::rename(unfinished, self.folder.join(format!("{name}.json")))?;
        Ok(())
    }

    /// The refs that are there, the oldest first. What is no ref is left alone.
    pub(super) fn waiting(&self) -> Result<Vec<(PathBuf, FeatureRef)>, Failure> {
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                paths.push(path);
            }
        }
        paths.sort();
        let mut refs = Vec::new();
        for path in paths {
            // Another consumer may have finished it just now.
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            if let Ok(reference) = serde_json::from_str(&text) {
                refs.push((path, reference));
            }
        }
        Ok(refs)
    }

    pub(super) fn done(&self, path: &Path) -> Result<(), Failure> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}
