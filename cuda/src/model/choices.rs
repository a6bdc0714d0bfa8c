//! Matrix-product algorithms that were selected by timing, stored in a file so that a restart uses
//! the same ones.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::products::Size;

/// First line of a file: its type and format version.
const TITLE: &str = "terrace: algorithms of matrix products, format 1";
/// Prefix of the last line.
const CHECKSUM: &str = "checksum ";

/// An algorithm as an opaque cuBLASLt value, valid for one library version and one kind of GPU.
pub(super) type Algorithm = [u64; 8];

/// The algorithms selected on a machine.
#[derive(Debug, Default)]
pub(super) struct Choices {
    /// File of the algorithms, if they are stored.
    file: Option<PathBuf>,
    /// The GPU and the library versions for which they are valid, in one line.
    machine: String,
    algorithms: BTreeMap<Size, Algorithm>,
    is_saved: bool,
}

impl Choices {
    /// Reads the stored algorithms of a machine from a folder. A damaged file or one of another
    /// machine is ignored and rewritten. Without a folder nothing is stored.
    pub(super) fn open(folder: Option<&Path>, machine: String) -> Self {
        let name = format!("products-{:016x}.txt", xxh3_64(machine.as_bytes()));
        let file = folder.map(|folder| folder.join(name));
        let mut choices = Self { file, machine, ..Self::default() };
        let Some(file) = &choices.file else { return choices };
        let read = std::fs::read_to_string(file);
        let parsed = match &read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return choices,
            Err(error) => Err(error.to_string()),
            Ok(text) => parse(text, &choices.machine).map_err(str::to_owned),
        };
        match parsed {
            Ok(algorithms) => (choices.algorithms, choices.is_saved) = (algorithms, true),
            Err(reason) => tracing::warn!(
                "the algorithms of matrix products in {} cannot be used and are chosen again: {reason}",
                file.display()
            ),
        }
        choices
    }

    /// Returns the algorithm of a size.
    pub(super) fn get(&self, size: Size) -> Option<Algorithm> {
        self.algorithms.get(&size).copied()
    }

    /// Sets the algorithm of a size.
    pub(super) fn set(&mut self, size: Size, algorithm: Algorithm) {
        self.is_saved = false;
        self.algorithms.insert(size, algorithm);
    }

    /// Writes the file if an algorithm was added.
    pub(super) fn save(&mut self) {
        let Some(file) = self.file.as_ref().filter(|_| !self.is_saved) else { return };
        match write_whole(file, &text_of(&self.algorithms, &self.machine)) {
            Ok(()) => self.is_saved = true,
            Err(error) => tracing::warn!(
                "the algorithms of matrix products cannot be kept in {}: {error}; the next start chooses them again",
                file.display()
            ),
        }
    }
}

fn text_of(algorithms: &BTreeMap<Size, Algorithm>, machine: &str) -> String {
    let mut text = format!("{TITLE}\n{machine}\n");
    for (Size { rows, outputs, inputs, is_wide }, algorithm) in algorithms {
        let wide = u8::from(*is_wide);
        let _ = write!(text, "{rows} {outputs} {inputs} {wide}");
        algorithm.iter().for_each(|word| {
            let _ = write!(text, " {word:016x}");
        });
        text.push('\n');
    }
    let checksum = xxh3_64(text.as_bytes());
    let _ = writeln!(text, "{CHECKSUM}{checksum:016x}");
    text
}

/// # Errors
/// Returns the reason for which a file is ignored.
fn parse(text: &str, machine: &str) -> Result<BTreeMap<Size, Algorithm>, &'static str> {
    let body = text.rfind(CHECKSUM).map(|end| text.split_at(end));
    let (body, last) = body.ok_or("it has no checksum")?;
    if last != format!("{CHECKSUM}{:016x}\n", xxh3_64(body.as_bytes())) {
        return Err("its checksum is wrong: it was damaged or edited");
    }
    let mut lines = body.lines();
    if lines.next() != Some(TITLE) {
        return Err("it has another format");
    }
    if lines.next() != Some(machine) {
        return Err("it is of another GPU, or of other versions of driver and libraries");
    }
    lines.map(|line| entry(line).ok_or("it has a line that cannot be read")).collect()
}

fn entry(line: &str) -> Option<(Size, Algorithm)> {
    let mut words = line.split(' ');
    let mut number = || words.next()?.parse().ok();
    let (rows, outputs, inputs) = (number()?, number()?, number()?);
    let is_wide = number()? == 1;
    let mut algorithm = Algorithm::default();
    for word in &mut algorithm {
        *word = u64::from_str_radix(words.next()?, 16).ok()?;
    }
    words.next().is_none().then_some((Size { rows, outputs, inputs, is_wide }, algorithm))
}

/// Writes a file atomically.
fn write_whole(file: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let draft = file.with_extension(format!("{}.new", std::process::id()));
    std::fs::write(&draft, text)?;
    std::fs::rename(&draft, file).inspect_err(|_| drop(std::fs::remove_file(&draft)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: &str = "A GPU, driver 13000, cuBLASLt 130100";

    fn size(rows: usize) -> Size {
        Size { rows, outputs: 4096, inputs: 1024, is_wide: rows == 2 }
    }

    fn algorithm(seed: u64) -> Algorithm {
        [seed, 0, u64::MAX, 3, 4, 5, 6, seed << 40]
    }

    fn saved(folder: &Path) -> PathBuf {
        let mut choices = Choices::open(Some(folder), MACHINE.to_owned());
        (1..4).for_each(|rows| choices.set(size(rows), algorithm(rows as u64)));
        choices.save();
        choices.file.unwrap()
    }

    fn count(folder: &Path, machine: &str) -> usize {
        Choices::open(Some(folder), machine.to_owned()).algorithms.len()
    }

    #[test]
    fn restart_uses_stored_algorithms() {
        let folder = tempfile::tempdir().unwrap();
        let folder = &folder.path().join("made/on/demand");
        saved(folder);
        let mut again = Choices::open(Some(folder), MACHINE.to_owned());
        for rows in 1..4 {
            assert_eq!(again.get(size(rows)), Some(algorithm(rows as u64)));
        }
        assert_eq!(again.get(size(4)), None);
        again.set(size(4), algorithm(4));
        again.save();
        assert_eq!(count(folder, MACHINE), 4, "what is new is added");
        let other = "another GPU, driver 13000, cuBLASLt 130100";
        assert_eq!(count(folder, other), 0, "each machine has its file");
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 1, "no drafts are left");
    }

    #[test]
    fn damaged_or_foreign_file_is_ignored_and_rewritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = saved(folder.path());
        let text = std::fs::read_to_string(&file).unwrap();
        let of_another = text_of(&BTreeMap::from([(size(1), algorithm(1))]), "another GPU");
        let of_later = text.replace("format 1", "format 2");
        let short = &text[..text.len() / 2];
        let edited = text.replacen("4096", "4098", 1);
        for wrong in ["", "?", short, &edited, &of_later, &of_another] {
            assert!(parse(wrong, MACHINE).is_err(), "{wrong}");
        }
        for wrong in [edited.as_bytes(), of_another.as_bytes(), &[0xff, 0xfe]] {
            std::fs::write(&file, wrong).unwrap();
            assert_eq!(count(folder.path(), MACHINE), 0);
        }
        saved(folder.path());
        assert_eq!(count(folder.path(), MACHINE), 3);
    }

    #[test]
    fn stores_nothing_without_a_folder() {
        let mut choices = Choices::open(None, MACHINE.to_owned());
        choices.set(size(1), algorithm(1));
        choices.save();
        assert_eq!(choices.get(size(1)), Some(algorithm(1)));
    }
}
