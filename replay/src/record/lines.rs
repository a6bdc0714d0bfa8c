//! Lines that a thread of its own writes, so that whoever has something to note never waits for a disk.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// Lines that may wait for a slow disk.
const WAITING_MAX: usize = 4096;
/// What was noted is in the file after so long, or earlier.
const FLUSHED_AFTER: Duration = Duration::from_millis(200);
/// How long the end waits for what still has to be written.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A file to which lines are added.
pub(super) struct Lines {
    path: PathBuf,
    waiting: Option<SyncSender<Vec<u8>>>,
    written: Receiver<()>,
}

impl Lines {
    /// Makes a new file; one that is there already is not overwritten.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = File::create_new(path)?;
        let (waiting, lines) = sync_channel(WAITING_MAX);
        let (done, written) = channel();
        let name = path.to_owned();
        thread::Builder::new().name("terrace-record".to_owned()).spawn(move || {
            if let Err(error) = write(file, &lines) {
                tracing::error!("{}: {error}; nothing more is recorded", name.display());
            }
            // Whoever waited has gone if nobody hears it.
            let _ = done.send(());
        })?;
        Ok(Self { path: path.to_owned(), waiting: Some(waiting), written })
    }

    /// Adds a line, unless the disk does not keep up: then the recording ends with a word about it,
    /// because one with holes would mislead.
    pub(super) fn add(&mut self, line: &impl serde::Serialize) {
        let Some(waiting) = &self.waiting else { return };
        let mut bytes = serde_json::to_vec(line).expect("what is recorded can be written as JSON");
        bytes.push(b'\n');
        if waiting.try_send(bytes).is_err() {
            tracing::error!(
                "{}: writing is too slow; nothing more is recorded",
                self.path.display()
            );
            self.waiting = None;
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.waiting = None;
        // A disk that hangs must not keep the program from ending.
        let _ = self.written.recv_timeout(LAST_WORDS);
    }
}

fn write(file: File, lines: &Receiver<Vec<u8>>) -> io::Result<()> {
    let mut file = BufWriter::new(file);
    loop {
        match lines.recv_timeout(FLUSHED_AFTER) {
            Ok(line) => file.write_all(&line)?,
            Err(RecvTimeoutError::Timeout) => file.flush()?,
            Err(RecvTimeoutError::Disconnected) => return file.flush(),
        }
    }
}
