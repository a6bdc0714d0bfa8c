//! L3 on disk: where it is, how large it can really be, and what there is to say about that.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use terrace_l3::{MemoryConfig, MemoryStore, Store};
use terrace_l3_disk::{
    DiskStore, OpenError, OpenedInFolder, Opening, OtherStore, StoreFolder, TieredConfig,
    TieredStore, usual_reserve_bytes,
};
use terrace_replay::human::whole;

use crate::config::Config;
use crate::launch::LaunchError;
use terrace_replay::Size;

/// A store on disk, with what is to be said about it.
pub(crate) struct DiskTier {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) place: String,
    /// The secret of its folder, unless another is configured.
    pub(crate) secret: Option<String>,
    /// A line each.
    pub(crate) notes: Vec<String>,
}

impl DiskTier {
    /// Opens the store for pages of `page_bytes` in the folder, or in the user's own for what can be lost.
    pub(crate) fn open(
        folder: Option<&Path>,
        config: &Config,
        page_bytes: usize,
    ) -> Result<Self, LaunchError> {
        let path = match folder {
            Some(folder) => folder.to_owned(),
            None => cache_folder("l3").ok_or(LaunchError::NoCacheFolder)?,
        };
        let reserve = match config.l3_reserve {
            Some(reserve) => reserve,
            // Where the system does not tell how large it is, it does not tell what is free either.
            None => Size(usual_reserve_bytes(&path).unwrap_or(0)),
        };
        let folder = StoreFolder {
            path,
            limit_bytes: config.l3_capacity.as_u64(),
            reserve_bytes: reserve.as_u64(),
        };
        let opened = folder.open(page_bytes).map_err(refusal)?;
        let secret = config.l3_secret.is_none().then(|| folder.secret()).transpose()?;
        let notes = notes(&opened, opened.store.opening(), config.l3_capacity, SystemTime::now());
        let mut place = opened.path.display().to_string();
        let store: Arc<dyn Store> = if config.l3_memory == Size(0) {
            Arc::new(opened.store)
        } else {
            let behind = if config.l3_write_behind { " that writes behind" } else { "" };
            place = format!("{place}, with {} of memory on top{behind}", config.l3_memory);
            Arc::new(under_memory(opened.store, config, page_bytes)?)
        };
        Ok(Self { store, place, secret, notes })
    }
}

fn under_memory(
    disk: DiskStore,
    config: &Config,
    page_bytes: usize,
) -> Result<TieredStore, LaunchError> {
    let memory = MemoryConfig::new(config.l3_memory.as_u64(), page_bytes);
    let memory = MemoryStore::new(memory).map_err(LaunchError::L3Memory)?;
    let tiers = TieredConfig { write_behind: config.l3_write_behind, ..TieredConfig::default() };
    Ok(TieredStore::new(memory, disk, tiers).expect("they are new"))
}

fn refusal(error: OpenError) -> LaunchError {
    match error {
        OpenError::InUse { path, owner } => LaunchError::L3InUse { path, owner },
        OpenError::LittleFree { path, free_bytes, reserve_bytes, needed_bytes } => {
            LaunchError::L3NoRoom {
                path,
                free: Size(free_bytes),
                reserve: Size(reserve_bytes),
                needed: Size(needed_bytes),
            }
        }
        OpenError::FolderFull { path, limit_bytes, taken_bytes, owners } => {
            let (limit, taken) = (Size(limit_bytes), Size(taken_bytes));
            LaunchError::L3FolderFull { path, limit, taken, owners }
        }
        other => LaunchError::L3Disk(other),
    }
}

/// Notes on the store that was opened and on the other stores in its folder.
fn notes(opened: &OpenedInFolder, opening: Opening, limit: Size, now: SystemTime) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(shortage) = opening.shortage {
        let (free, reserve) = (Size(shortage.free_bytes), Size(shortage.reserve_bytes));
        let has_idle = opened.others.iter().any(|other| other.owner.is_none());
        let where_free = if has_idle { "free or in pages of unused stores" } else { "free" };
        notes.push(format!(
            "warning: the store cannot grow to --l3-capacity {limit}: the file system has {free} \
             {where_free}, and {reserve} must stay free (--l3-reserve)"
        ));
    }
    if opening.dropped.objects > 0 {
        let (pages, bytes) = (whole(opening.dropped.objects), Size(opening.dropped.bytes));
        notes.push(format!(
            "warning: the store was larger; the {pages} oldest pages, {bytes}, were dropped to \
             keep to --l3-capacity {limit}"
        ));
    }
    for other in &opened.removed {
        let what = describe(other, now);
        notes.push(format!("warning: {what}, were removed to free space"));
    }
    for other in &opened.others {
        let what = describe(other, now);
        notes.push(match &other.owner {
            Some(owner) => format!("also there: {what}, in use by {owner}"),
            None => format!("also there: {what}, removed when their space is needed"),
        });
    }
    notes
}

fn describe(other: &OtherStore, now: SystemTime) -> String {
    let OtherStore { path, object_bytes_max, bytes, last_used, .. } = other;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!(
        "pages of {} in {name}, {}, last used {}",
        Size(*object_bytes_max as u64),
        Size(*bytes),
        ago(now.duration_since(*last_used).unwrap_or_default())
    )
}

/// A time that has passed, as people say it.
fn ago(passed: Duration) -> String {
    const MINUTE: u64 = 60;
    const HOUR: u64 = 60 * MINUTE;
    const DAY: u64 = 24 * HOUR;
    let (count, unit) = match passed.as_secs() {
        0..MINUTE => return "just now".to_owned(),
        seconds @ MINUTE..HOUR => (seconds / MINUTE, "minute"),
        seconds @ HOUR..DAY => (seconds / HOUR, "hour"),
        seconds @ DAY.. => (seconds / DAY, "day"),
    };
    format!("{count} {unit}{} ago", if count == 1 { "" } else { "s" })
}

/// A folder of this program in the user's folder for what can be lost.
pub(crate) fn cache_folder(name: &str) -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let caches = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(caches.join("terrace").join(name))
}

#[cfg(test)]
mod tests {
    use terrace_l3_disk::{Dropped, Shortage};

    use super::*;

    #[test]
    fn times_are_told_in_the_unit_that_fits() {
        let told = [0, 59, 60, 3599, 7200, 86_399, 86_400, 10 * 86_400];
        let told = told.map(|seconds| ago(Duration::from_secs(seconds)));
        let expected = ["just now", "just now", "1 minute ago", "59 minutes ago", "2 hours ago"];
        assert_eq!(told[..5], expected);
        assert_eq!(told[5..], ["23 hours ago", "1 day ago", "10 days ago"]);
    }

    #[test]
    fn everything_that_was_not_as_asked_for_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        let store = StoreFolder { path, limit_bytes: 1 << 20, reserve_bytes: 0 };
        let now = SystemTime::now();
        let other = |object_bytes_max, hours: u64, owner: Option<&str>| OtherStore {
            path: folder.path().join(format!("pages-of-{object_bytes_max}-bytes")),
            object_bytes_max,
            bytes: 3 << 20,
            last_used: now - Duration::from_secs(3600 * hours),
            owner: owner.map(str::to_owned),
        };
        let mut opened = store.open(4096).unwrap();
        assert_eq!(notes(&opened, Opening::default(), Size::mib(1), now), [""; 0]);
        opened.others = vec![other(8192, 1, Some("process 7")), other(16384, 30, None)];
        opened.removed = vec![other(32768, 72, None)];
        let opening = Opening {
            dropped: Dropped { objects: 1234, bytes: 5 << 20 },
            shortage: Some(Shortage { free_bytes: 12 << 20, reserve_bytes: 3 << 20 }),
        };
        let told = notes(&opened, opening, Size::mib(64), now);
        let expected = [
            "warning: the store cannot grow to --l3-capacity 64.0 MiB: the file system has 12.0 MiB free \
             or in pages of unused stores, and 3.0 MiB must stay free (--l3-reserve)",
            "warning: the store was larger; the 1,234 oldest pages, 5.0 MiB, were dropped to keep to \
             --l3-capacity 64.0 MiB",
            "warning: pages of 32.0 KiB in pages-of-32768-bytes, 3.0 MiB, last used 3 days ago, were \
             removed to free space",
            "also there: pages of 8.0 KiB in pages-of-8192-bytes, 3.0 MiB, last used 1 hour ago, in use \
             by process 7",
            "also there: pages of 16.0 KiB in pages-of-16384-bytes, 3.0 MiB, last used 1 day ago, \
             removed when their space is needed",
        ];
        assert_eq!(told, expected);
    }
}
