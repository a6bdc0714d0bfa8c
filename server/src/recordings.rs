//! What is recorded of the scheduler, and into which files.

use std::io;
use std::path::{Path, PathBuf};

use terrace_replay::{DecisionRecorder, TrafficRecorder};
use terrace_scheduler::Witness;

use crate::config::Config;
use crate::launch::LaunchError;

/// Those who record, and their files.
#[derive(Default)]
pub(crate) struct Recordings {
    pub(crate) witnesses: Vec<Box<dyn Witness>>,
    pub(crate) files: Vec<Recording>,
}

/// A file that is being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recording {
    pub(crate) what: &'static str,
    pub(crate) file: PathBuf,
    /// The file has another name than it was given, because there was one of that name.
    pub(crate) is_renamed: bool,
}

impl Recordings {
    /// Makes the files that are asked for.
    pub(crate) fn begin(config: &Config) -> Result<Self, LaunchError> {
        let mut recordings = Self::default();
        if let Some(file) = &config.record {
            recordings.add("traffic", file, TrafficRecorder::create)?;
        }
        if let Some(file) = &config.decision_log {
            recordings.add("decisions", file, DecisionRecorder::create)?;
        }
        Ok(recordings)
    }

    fn add<W: Witness + 'static>(
        &mut self,
        what: &'static str,
        wanted: &Path,
        create: impl Fn(&Path) -> io::Result<W>,
    ) -> Result<(), LaunchError> {
        let cannot = |error| LaunchError::Record { file: wanted.to_owned(), error };
        let (file, witness) = create_beside(wanted, create).map_err(cannot)?;
        let is_renamed = file != wanted;
        self.files.push(Recording { what, file, is_renamed });
        self.witnesses.push(Box::new(witness));
        Ok(())
    }
}

/// Makes a new file of that name or, so that a service can be started again and nothing is overwritten,
/// of the first free one that has a number: `traffic.jsonl`, `traffic.2.jsonl`, `traffic.3.jsonl`.
fn create_beside<T>(
    wanted: &Path,
    create: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<(PathBuf, T)> {
    const NUMBERS: std::ops::Range<u32> = 2..100_000;
    let exists = |error: &io::Error| error.kind() == io::ErrorKind::AlreadyExists;
    match create(wanted) {
        Ok(made) => return Ok((wanted.to_owned(), made)),
        // A number is added to the names of files, not of folders, pipes and devices.
        Err(error) if exists(&error) && wanted.is_file() => {}
        Err(error) => return Err(error),
    }
    for number in NUMBERS {
        let mut name = wanted.file_stem().unwrap_or_default().to_owned();
        name.push(format!(".{number}"));
        if let Some(extension) = wanted.extension() {
            name.push(".");
            name.push(extension);
        }
        let file = wanted.with_file_name(name);
        match create(&file) {
            Err(error) if exists(&error) => {}
            made => return made.map(|made| (file, made)),
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "too many files of that name exist"))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    #[test]
    fn a_file_that_is_there_is_not_overwritten_but_gets_company() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["traffic.jsonl", "traffic", ".hidden"] {
            let wanted = folder.path().join(name);
            let made: Vec<String> = (0..3)
                .map(|_| {
                    let (file, _) = create_beside(&wanted, |path| File::create_new(path)).unwrap();
                    fs::write(&file, "precious").unwrap();
                    file.file_name().unwrap().to_str().unwrap().to_owned()
                })
                .collect();
            let expected = match name.split_once(".j") {
                Some((stem, rest)) => [format!("{stem}.2.j{rest}"), format!("{stem}.3.j{rest}")],
                None => [format!("{name}.2"), format!("{name}.3")],
            };
            assert_eq!(made[0], name);
            assert_eq!(made[1..], expected);
            assert_eq!(fs::read_to_string(&wanted).unwrap(), "precious");
        }
    }

    #[test]
    fn what_is_no_file_gets_no_company() {
        let folder = tempfile::tempdir().unwrap();
        let within = folder.path().join("records");
        fs::create_dir(&within).unwrap();
        assert!(create_beside(&within, |path| File::create_new(path)).is_err());
        assert!(
            create_beside(&within.join("no/such/folder"), |path| File::create_new(path)).is_err()
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
