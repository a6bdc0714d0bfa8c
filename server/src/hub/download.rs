//! Downloads the files of one model into the cache.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use ureq::config::RedirectAuthHeaders;
use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};

use super::{CachedModel, Downloaded, Hub, HubError, HubModel, Listing, Needed};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// A connection that sends nothing for this time is closed, and the download continues on another.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Attempts at one file without a single new byte.
const ATTEMPTS_MAX: u32 = 5;
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const REDIRECTS_MAX: u32 = 5;
const BUFFER_BYTES: usize = 1 << 20;
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Downloads the files of one model.
pub(super) struct Downloader<'a> {
    agent: Agent,
    hub: &'a Hub,
    model: &'a HubModel,
    files: &'a CachedModel,
}

/// A file that is needed, as the hub describes it.
struct RemoteFile {
    name: String,
    etag: String,
    bytes: u64,
}

/// The part of an index of weights that names the files.
#[derive(Deserialize)]
struct Index {
    weight_map: std::collections::BTreeMap<String, String>,
}

impl<'a> Downloader<'a> {
    pub(super) fn new(hub: &'a Hub, model: &'a HubModel, files: &'a CachedModel) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(RESPONSE_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .user_agent(concat!("terrace/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.new_agent(), hub, model, files }
    }

    /// Asks the hub for the commit of the revision and its files.
    pub(super) fn listing(&self) -> Result<Listing, HubError> {
        let (endpoint, HubModel { repository, revision }) = (self.endpoint(), self.model);
        let revision = revision.replace('/', "%2F");
        let url = format!("{endpoint}/api/models/{repository}/revision/{revision}");
        let mut response = self.get(&url, 0).map_err(|error| self.unreachable(error))?;
        let status = response.status();
        if status.is_server_error() {
            return Err(self.unreachable(format!("it answers with status {status}")));
        }
        self.check(&response, "the list of files")?;
        let text = response.body_mut().read_to_string();
        let text = text.map_err(|error| self.unreachable(error))?;
        let listing: Listing = serde_json::from_str(&text).map_err(|error| {
            self.problem("the list of files", format!("it is not what a hub sends: {error}"))
        })?;
        // The commit becomes the name of a folder.
        match !listing.commit.is_empty()
            && listing.commit.bytes().all(|byte| byte.is_ascii_hexdigit())
        {
            true => Ok(listing),
            false => {
                Err(self.problem("the list of files", "its commit is not a hexadecimal number"))
            }
        }
    }

    /// Downloads the files that the cache lacks.
    pub(super) fn fetch(
        &self,
        listing: &Listing,
        needed: Needed,
        progress: &mut dyn FnMut(Downloaded),
    ) -> Result<(), HubError> {
        let mut names: BTreeSet<String> = listing.texts().into_iter().map(str::to_owned).collect();
        match needed {
            Needed::Tokenizer => {}
            Needed::Model if listing.has(SINGLE) => drop(names.insert(SINGLE.to_owned())),
            Needed::Model if listing.has(INDEX) => {
                names.insert(INDEX.to_owned());
                names.extend(self.shards(listing)?);
            }
            Needed::Model => return Err(HubError::NoWeights(self.model.to_string())),
        }
        let folder = self.files.snapshot(&listing.commit);
        let missing = names.iter().filter(|name| !folder.join(name).exists());
        let described = missing.map(|name| self.describe(&listing.commit, name));
        let missing = described.collect::<Result<Vec<_>, _>>()?;
        let total_bytes = missing.iter().map(|file| file.bytes).sum();
        let mut before = 0;
        for file in &missing {
            let mut progress = |bytes| progress(Downloaded { bytes: before + bytes, total_bytes });
            self.file(&listing.commit, file, &mut progress)?;
            before += file.bytes;
        }
        Ok(())
    }

    /// Reads which files have the weights, after downloading the index that says so.
    fn shards(&self, listing: &Listing) -> Result<BTreeSet<String>, HubError> {
        let path = self.files.snapshot(&listing.commit).join(INDEX);
        if !path.exists() {
            let index = self.describe(&listing.commit, INDEX)?;
            self.file(&listing.commit, &index, &mut |_| {})?;
        }
        let text = fs::read(&path).map_err(|error| HubError::cache(&path, &error))?;
        let index: Index = serde_json::from_slice(&text)
            .map_err(|error| self.problem(INDEX, format!("it cannot be read: {error}")))?;
        index.weight_map.into_values().map(|name| self.checked(name)).collect()
    }

    /// Checks that a name from an index stays in the model's folder.
    fn checked(&self, name: String) -> Result<String, HubError> {
        let mut parts = Path::new(&name).components();
        match parts.all(|part| matches!(part, Component::Normal(_))) && !name.is_empty() {
            true => Ok(name),
            false => {
                Err(self
                    .problem(INDEX, format!("it names {name:?}, which is outside of the model")))
            }
        }
    }

    /// Asks for the hash and the size of a file.
    fn describe(&self, commit: &str, name: &str) -> Result<RemoteFile, HubError> {
        let mut url = self.url(commit, name);
        for _ in 0..=REDIRECTS_MAX {
            let request = self.agent.head(&url).config().max_redirects(0).build();
            let request = match &self.hub.token {
                Some(token) => request.header(header::AUTHORIZATION, format!("Bearer {token}")),
                None => request,
            };
            let response = request.call().map_err(|error| self.unreachable(error))?;
            let text =
                |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            // Another host has the bytes of large files, but the hub describes them; a renamed model is elsewhere on
            // the hub.
            let location = text("location").filter(|_| response.status().is_redirection());
            if let Some(path) = location.filter(|location| location.starts_with('/'))
                && text("x-linked-etag").is_none()
            {
                url = format!("{}{path}", self.endpoint());
                continue;
            }
            if location.is_none() {
                self.check(&response, name)?;
            }
            let etag = text("x-linked-etag").or_else(|| text("etag"));
            let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"'));
            let is_name = |etag: &&str| {
                !etag.is_empty()
                    && etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            };
            let bytes = text("x-linked-size").or_else(|| text("content-length"));
            let bytes = bytes.and_then(|bytes| bytes.parse().ok());
            let (Some(etag), Some(bytes)) = (etag.filter(is_name), bytes) else {
                return Err(self.problem(name, "the hub does not say its hash and size"));
            };
            return Ok(RemoteFile { name: name.to_owned(), etag: etag.to_owned(), bytes });
        }
        Err(self.problem(name, "the hub redirects without end"))
    }

    /// Downloads one file and links it into the snapshot.
    fn file(
        &self,
        commit: &str,
        file: &RemoteFile,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), HubError> {
        let blob = self.files.blob(&file.etag);
        let link = self.files.snapshot(commit).join(&file.name);
        for path in [&blob, &link] {
            let folder = path.parent().unwrap_or(path);
            fs::create_dir_all(folder).map_err(|error| HubError::cache(folder, &error))?;
        }
        if !blob.exists() {
            self.download(commit, file, &blob, progress)?;
        }
        progress(file.bytes);
        match link_to(&blob, &link, file.name.split('/').count()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(HubError::cache(&link, &error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Downloads the bytes of a file, after those that an interrupted download has left.
    fn download(
        &self,
        commit: &str,
        file: &RemoteFile,
        blob: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), HubError> {
        let mut path = blob.as_os_str().to_owned();
        path.push(".incomplete");
        let path = PathBuf::from(path);
        let unusable = |error| HubError::cache(&path, &error);
        let part = File::options().read(true).append(true).create(true).open(&path);
        let mut part = part.map_err(unusable)?;
        // Another process may download the same file: the second waits for the first.
        part.lock().map_err(unusable)?;
        if blob.exists() {
            return Ok(());
        }
        let mut attempts = 0;
        loop {
            let has = part.metadata().map_err(unusable)?.len();
            if has == file.bytes {
                break;
            }
            if has > file.bytes {
                part.set_len(0).map_err(unusable)?;
                continue;
            }
            let error = match self.append(commit, file, &mut part, has, progress)? {
                None => continue,
                Some(error) => error,
            };
            let is_stuck = part.metadata().map_err(unusable)?.len() <= has;
            attempts = if is_stuck { attempts + 1 } else { 0 };
            if attempts >= ATTEMPTS_MAX {
                return Err(self.problem(&file.name, format!("{error}; start again to continue")));
            }
            tracing::warn!("the download of {} was interrupted and continues: {error}", file.name);
            std::thread::sleep(RETRY_INTERVAL);
        }
        part.sync_all().map_err(unusable)?;
        if !has_hash(&mut part, &file.etag).map_err(unusable)? {
            fs::remove_file(&path).map_err(unusable)?;
            return Err(self.problem(
                &file.name,
                "its bytes do not have the hash that the hub names: start again",
            ));
        }
        fs::rename(&path, blob).map_err(|error| HubError::cache(blob, &error))
    }

    /// Appends bytes from a position on. Returns what interrupted the download, if something did.
    fn append(
        &self,
        commit: &str,
        file: &RemoteFile,
        part: &mut File,
        has: u64,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Option<String>, HubError> {
        let response = match self.get(&self.url(commit, &file.name), has) {
            Ok(response) => response,
            Err(error) => return Ok(Some(error.to_string())),
        };
        let status = response.status();
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            return Ok(Some(format!("the hub answers with status {status}")));
        }
        self.check(&response, &file.name)?;
        let mut has = has;
        let unusable = |error| HubError::cache(&self.files.blob(&file.etag), &error);
        if status != StatusCode::PARTIAL_CONTENT {
            part.set_len(0).map_err(unusable)?;
            has = 0;
        }
        let mut body = response.into_body().into_reader().take(file.bytes - has + 1);
        let mut buffer = vec![0; BUFFER_BYTES];
        while has < file.bytes {
            let read = match body.read(&mut buffer) {
                Ok(0) => return Ok(Some("the connection was closed early".to_owned())),
                Ok(read) => read,
                Err(error) => return Ok(Some(error.to_string())),
            };
            part.write_all(&buffer[..read]).map_err(unusable)?;
            has += read as u64;
            progress(has.min(file.bytes));
        }
        Ok(None)
    }

    fn get(&self, url: &str, from: u64) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.hub.token {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        if from > 0 {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        request.call()
    }

    /// Checks that a response has what was asked for.
    fn check(&self, response: &Response<Body>, file: &str) -> Result<(), HubError> {
        let status = response.status();
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::NOT_FOUND => {
                Err(HubError::Refused {
                    endpoint: self.endpoint().to_owned(),
                    model: self.model.to_string(),
                    status: status.as_u16(),
                })
            }
            status if status.is_success() => Ok(()),
            status => Err(self.problem(file, format!("the hub answers with status {status}"))),
        }
    }

    fn endpoint(&self) -> &str {
        self.hub.endpoint.trim_end_matches('/')
    }

    fn url(&self, commit: &str, name: &str) -> String {
        format!("{}/{}/resolve/{commit}/{name}", self.endpoint(), self.model.repository)
    }

    fn unreachable(&self, error: impl ToString) -> HubError {
        HubError::Unreachable { endpoint: self.endpoint().to_owned(), error: error.to_string() }
    }

    fn problem(&self, file: &str, problem: impl Into<String>) -> HubError {
        HubError::Download {
            model: self.model.to_string(),
            file: file.to_owned(),
            problem: problem.into(),
        }
    }
}

/// Whether a file has the hash that its ETag is, where the ETag is a SHA-256 hash. Small files have other ETags.
fn has_hash(file: &mut File, etag: &str) -> io::Result<bool> {
    const HEX_DIGITS: usize = 64;
    if etag.len() != HEX_DIGITS {
        return Ok(true);
    }
    file.seek(SeekFrom::Start(0))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; BUFFER_BYTES]);
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => hash.update(&buffer[..read]),
        }
    }
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(found == etag.to_ascii_lowercase())
}

/// Links a file of a snapshot, so many folders below it, to its bytes.
#[cfg(unix)]
fn link_to(blob: &Path, link: &Path, depth: usize) -> io::Result<()> {
    let name = blob.file_name().unwrap_or_default();
    // Out of the folders in the snapshot, the snapshot and `snapshots`.
    let target = PathBuf::from("../".repeat(depth + 1)).join("blobs").join(name);
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn link_to(blob: &Path, link: &Path, _depth: usize) -> io::Result<()> {
    fs::copy(blob, link).map(|_| ())
}
