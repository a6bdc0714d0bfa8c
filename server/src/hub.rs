//! Models of the Hugging Face Hub: their names, the cache that holds their files, and the files that serving needs.
//!
//! The cache has the layout that Hugging Face's own programs use, so files that one of them downloaded are used as
//! they are: `blobs/ETAG` holds the bytes, `snapshots/COMMIT/FILE` links to them, and `refs/REVISION` names the commit
//! of a branch.

mod download;
mod error;

use std::collections::BTreeSet;
use std::env::{self, VarError};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;

use self::download::Downloader;
pub use self::error::HubError;

/// The revision of a model without one in its name.
const DEFAULT_REVISION: &str = "main";
const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// The name of a model on the hub: `org/name`, or `org/name@revision`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    /// `org/name`.
    pub repository: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

/// Where models are downloaded from, and where they are kept.
#[derive(Clone)]
pub struct Hub {
    /// Address of the hub, without a path.
    pub endpoint: String,
    /// Folder of the cache.
    pub cache: PathBuf,
    /// Access token, for models that need one.
    pub token: Option<String>,
    /// Whether only the cache is used.
    pub is_offline: bool,
}

/// The files of a model that are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needed {
    /// All that serving needs.
    Model,
    /// Configuration, tokenizer and chat template, without weights.
    Tokenizer,
}

/// How much of a model's files is there.
#[derive(Clone, Copy, Debug)]
pub struct Downloaded {
    /// Bytes that are in the cache.
    pub bytes: u64,
    /// Bytes of all files that are needed.
    pub total_bytes: u64,
}

impl FromStr for HubModel {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let is_segment = |text: &str| {
            let mut bytes = text.bytes();
            bytes.next().is_some_and(|first| first.is_ascii_alphanumeric() || first == b'_')
                && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        };
        let (repository, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let is_repository = repository
            .split_once('/')
            .is_some_and(|(owner, name)| is_segment(owner) && is_segment(name));
        if !is_repository || !revision.split('/').all(is_segment) {
            return Err(HubError::Name(text.to_owned()));
        }
        Ok(Self { repository: repository.to_owned(), revision: revision.to_owned() })
    }
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        match self.revision == DEFAULT_REVISION {
            true => Ok(()),
            false => write!(f, "@{}", self.revision),
        }
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("has_token", &self.token.is_some())
            .field("is_offline", &self.is_offline)
            .finish()
    }
}

impl Hub {
    /// Reads the environment variables that Hugging Face's programs read: `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HOME`,
    /// `HF_TOKEN`, `HF_TOKEN_PATH` and `HF_HUB_OFFLINE`.
    ///
    /// # Errors
    /// If no variable names a folder for the cache, or the file of the token cannot be read.
    pub fn from_environment() -> Result<Self, HubError> {
        let folder = |name: &str| env::var_os(name).filter(|path| !path.is_empty());
        let under = |path: OsString, rest: &str| PathBuf::from(path).join(rest);
        let home = folder("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| folder("XDG_CACHE_HOME").map(|path| under(path, "huggingface")))
            .or_else(|| folder("HOME").map(|path| under(path, ".cache/huggingface")));
        let cache = folder("HF_HUB_CACHE").map(PathBuf::from);
        let cache = cache.or_else(|| home.as_ref().map(|home| home.join("hub")));
        let text = |name: &str| match env::var(name) {
            Ok(text) => Some(text.trim().to_owned()).filter(|text| !text.is_empty()),
            Err(VarError::NotPresent | VarError::NotUnicode(_)) => None,
        };
        let token = match text("HF_TOKEN") {
            Some(token) => Some(token),
            None => {
                let file = folder("HF_TOKEN_PATH").map(PathBuf::from);
                let file = file.or_else(|| home.as_ref().map(|home| home.join("token")));
                file.map(|file| read_token(&file)).transpose()?.flatten()
            }
        };
        let is_offline = text("HF_HUB_OFFLINE").is_some_and(|flag| {
            ["1", "true", "yes", "on"].iter().any(|yes| flag.eq_ignore_ascii_case(yes))
        });
        Ok(Self {
            endpoint: text("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned()),
            cache: cache.ok_or(HubError::NoCacheFolder)?,
            token,
            is_offline,
        })
    }

    /// Returns the folder with the files of a model, after downloading those that the cache lacks. If the hub cannot be
    /// reached, the files of an earlier download are used.
    ///
    /// # Errors
    /// If the model does not exist or needs a token, a file cannot be downloaded, or the cache cannot be written.
    pub fn folder(
        &self,
        model: &HubModel,
        needed: Needed,
        progress: &mut dyn FnMut(Downloaded),
    ) -> Result<PathBuf, HubError> {
        let files = CachedModel { folder: self.cache.join(folder_name(&model.repository)) };
        if self.is_offline {
            let cached = files.snapshot_of(&model.revision);
            return cached.ok_or_else(|| HubError::NotInCache {
                model: model.to_string(),
                cache: self.cache.clone(),
            });
        }
        let downloader = Downloader::new(self, model, &files);
        let listing = match downloader.listing() {
            Ok(listing) => listing,
            Err(error @ HubError::Unreachable { .. }) => {
                let cached = files.snapshot_of(&model.revision).ok_or_else(|| error.clone())?;
                tracing::warn!("{error}; using the files of {model} in the cache");
                return Ok(cached);
            }
            Err(error) => return Err(error),
        };
        let folder = files.snapshot(&listing.commit);
        downloader.fetch(&listing, needed, progress)?;
        files.write_ref(&model.revision, &listing.commit)?;
        Ok(folder)
    }
}

/// The folder of a model, and its name if it is one of the hub.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    pub(crate) path: PathBuf,
    pub(crate) name: Option<String>,
}

/// Finds the folder of a model: the one that is named if it exists, and otherwise that of a model of the hub, after
/// downloading what is missing.
///
/// # Errors
/// If the text names neither, or the model cannot be downloaded.
pub(crate) fn find_folder(
    model: &Path,
    needed: Needed,
    progress: &mut dyn FnMut(&str, Downloaded),
) -> Result<ModelFolder, HubError> {
    if model.exists() {
        return Ok(ModelFolder { path: model.to_owned(), name: None });
    }
    let model: HubModel = model.to_string_lossy().parse()?;
    let name = model.to_string();
    let path = Hub::from_environment()?
        .folder(&model, needed, &mut |downloaded| progress(&name, downloaded))?;
    Ok(ModelFolder { path, name: Some(model.repository) })
}

/// What the hub says about a revision of a model.
#[derive(Debug, Deserialize)]
struct Listing {
    #[serde(rename = "sha")]
    commit: String,
    siblings: Vec<Sibling>,
}

#[derive(Debug, Deserialize)]
struct Sibling {
    #[serde(rename = "rfilename")]
    name: String,
}

impl Listing {
    fn has(&self, name: &str) -> bool {
        self.siblings.iter().any(|sibling| sibling.name == name)
    }

    /// Returns the names of the files besides weights that are needed. Files in folders are not.
    fn texts(&self) -> BTreeSet<&str> {
        let names = self.siblings.iter().map(|sibling| sibling.name.as_str());
        names.filter(|name| is_text(name)).collect()
    }
}

/// Whether a file is the configuration, a tokenizer or a chat template.
fn is_text(name: &str) -> bool {
    let is_named = ["config.json", "generation_config.json", "special_tokens_map.json"];
    let is_tokenizer = name.starts_with("tokenizer") && name.ends_with(".json");
    let is_template = name.starts_with("chat_template") && !name.contains('/');
    is_named.contains(&name) || (is_tokenizer && !name.contains('/')) || is_template
}

/// The folder of a model in the cache.
#[derive(Debug)]
struct CachedModel {
    folder: PathBuf,
}

impl CachedModel {
    fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Returns the folder of a revision that was downloaded before.
    fn snapshot_of(&self, revision: &str) -> Option<PathBuf> {
        let named = fs::read_to_string(self.folder.join("refs").join(revision)).ok();
        let folder = self.snapshot(named.as_deref().map_or(revision, str::trim));
        folder.join("config.json").exists().then_some(folder)
    }

    /// Remembers the commit of a branch. A revision that is a commit needs no memory.
    fn write_ref(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        let written = path
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(&path, commit));
        written.map_err(|error| HubError::cache(&path, &error))
    }
}

/// The name of a model's folder in the cache.
fn folder_name(repository: &str) -> String {
    format!("models--{}", repository.replace('/', "--"))
}

/// Reads the token that another program has left in a file, if there is one.
fn read_token(file: &Path) -> Result<Option<String>, HubError> {
    match fs::read_to_string(file) {
        Ok(token) => Ok(Some(token.trim().to_owned()).filter(|token| !token.is_empty())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(HubError::cache(file, &error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_an_owner_a_name_and_a_revision() {
        let parsed =
            |text: &str| text.parse::<HubModel>().map(|model| (model.repository, model.revision));
        let is =
            |repository: &str, revision: &str| Some((repository.to_owned(), revision.to_owned()));
        assert_eq!(parsed("org/a-model.v1_2").ok(), is("org/a-model.v1_2", "main"));
        assert_eq!(parsed("org/name@refs/pr/1").ok(), is("org/name", "refs/pr/1"));
        for wrong in [
            "name",
            "org/",
            "/name",
            "./name",
            "../name",
            "org/../x",
            "a/b/c",
            "org/name@",
            "org/name@../x",
            "org/na me",
            "",
            "https://host/x",
        ] {
            let error = parsed(wrong).unwrap_err().to_string();
            assert!(error.contains("org/name") && error.contains(wrong), "{error}");
        }
        assert_eq!("org/name@v1".parse::<HubModel>().unwrap().to_string(), "org/name@v1");
        assert_eq!("org/name".parse::<HubModel>().unwrap().to_string(), "org/name");
    }

    #[test]
    fn only_files_that_serving_reads_are_needed() {
        for needed in [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "chat_template.json",
        ] {
            assert!(is_text(needed), "{needed}");
        }
        for other in [
            "README.md",
            "onnx/config.json",
            "onnx/tokenizer.json",
            "tokenizer.model",
            "pytorch_model.bin",
            "model.safetensors",
            "../config.json",
            "chat_templates/x/y",
        ] {
            assert!(!is_text(other), "{other}");
        }
    }
}
