//! A file writer on a separate thread, so that callers never wait for a disk.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Largest number of buffered bytes.
const BUFFERED_BYTES_MAX: usize = 64 << 20;
/// Interval of flushes.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);
/// Longest wait for unwritten lines when the file is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// An append-only file of lines.
pub(super) struct Lines {
    path: PathBuf,
    waiting: Option<Sender<Vec<u8>>>,
    waiting_bytes: Arc<AtomicUsize>,
    written: Receiver<()>,
}

impl Lines {
    /// Creates a file; fails if it exists.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = File::create_new(path)?;
        let (waiting, lines) = channel();
        let (done, written) = channel();
        let (name, waiting_bytes) = (path.to_owned(), Arc::<AtomicUsize>::default());
        let unwritten = waiting_bytes.clone();
        thread::Builder::new().name("terrace-record".to_owned()).spawn(move || {
            if let Err(error) = write(file, &lines, &unwritten) {
                tracing::error!("{}: {error}; nothing more is recorded", name.display());
            }
            // The receiver may have given up waiting.
            let _ = done.send(());
        })?;
        Ok(Self { path: path.to_owned(), waiting: Some(waiting), waiting_bytes, written })
    }

    /// Appends a line. If the disk cannot keep up, the recording ends with a warning, because a log
    /// with gaps would mislead.
    pub(super) fn add(&mut self, line: &impl serde::Serialize) {
        let Some(waiting) = &self.waiting else { return };
        let mut bytes = serde_json::to_vec(line).expect("what is recorded can be written as JSON");
        bytes.push(b'\n');
        let before = self.waiting_bytes.fetch_add(bytes.len(), Ordering::Relaxed);
        if before > BUFFERED_BYTES_MAX {
            let path = self.path.display();
            tracing::error!("{path}: writing is too slow; nothing more is recorded");
            self.waiting = None;
        } else if waiting.send(bytes).is_err() {
            // The writer has logged the reason of its end.
            self.waiting = None;
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.waiting = None;
        // A hanging disk must not keep the program from ending.
        let _ = self.written.recv_timeout(CLOSE_TIMEOUT);
    }
}

fn write(file: File, lines: &Receiver<Vec<u8>>, unwritten: &AtomicUsize) -> io::Result<()> {
    let mut file = BufWriter::new(file);
    let mut flush_at = Instant::now() + FLUSH_INTERVAL;
    loop {
        match lines.recv_timeout(flush_at.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                file.write_all(&line)?;
                unwritten.fetch_sub(line.len(), Ordering::Relaxed);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return file.flush(),
        }
        if flush_at <= Instant::now() {
            file.flush()?;
            flush_at = Instant::now() + FLUSH_INTERVAL;
        }
    }
}
