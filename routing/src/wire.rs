//! The bytes of KV events: MessagePack, as vLLM and SGLang write it.
//!
//! A batch is an array `[time, [events], rank]`. An event is a map with a `type`; before mid-2026 both engines wrote an
//! array that begins with it, which is read too. What is unknown is passed over: engines add fields with every
//! version.

use rmp::encode as put;
use rmpv::ValueRef;
use terrace_cache::{KvEvent, KvEvents, KvTier, PageKey};

/// Events that an engine told at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// When, in seconds since 1970.
    pub at: f64,
    /// What has changed, in this order.
    pub events: Vec<Event>,
    /// Which of the engine's data-parallel ranks tells it.
    pub rank: Option<i64>,
}

/// One change of what a worker holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Blocks became available.
    Stored(Stored),
    /// Blocks are gone.
    Removed {
        /// Which.
        hashes: Vec<u64>,
        /// From where.
        medium: Medium,
    },
    /// The worker holds nothing any more.
    Cleared,
    /// Nothing that tells of attention over the whole prompt, or a kind that is not known here.
    Other,
}

/// Consecutive blocks of one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    /// What the engine calls them: 64 bits, whatever it made them of.
    pub hashes: Vec<u64>,
    /// The block before the first; none at the beginning of a prompt.
    pub parent: Option<u64>,
    /// Their tokens, `block_size` for each; none where an engine tells only where blocks are.
    pub tokens: Vec<u32>,
    /// Tokens in a block.
    pub block_size: u32,
    /// Where they are.
    pub medium: Medium,
    /// What besides tokens the blocks depend on, for each of them; shorter if nothing follows.
    pub extras: Vec<Vec<String>>,
    /// The adapter that they were computed with.
    pub adapter: Option<String>,
}

/// Where blocks are, as far as a router cares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Medium {
    /// Memory that the worker computes with.
    #[default]
    Device,
    /// Memory of the worker's machine.
    Host,
    /// A disk that only this worker reads.
    Disk,
    /// A store that others may share, or a place that is not known here: no merit of this worker.
    Shared,
}

/// Bytes that are no batch of events.
#[derive(Debug, thiserror::Error)]
#[error("these bytes are no batch of KV events: {0}")]
pub struct WireError(String);

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manner {
    /// Tokens in a page.
    pub page_size: u32,
    /// Whether what is in L3 is told, and, if so, whether others share it.
    pub l3: Option<L3Sharing>,
}

/// Who uses a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L3Sharing {
    /// This server alone.
    Own,
    /// Other servers too.
    Shared,
}

/// Writes events; nothing if there is nothing to tell. `extra_key` says what tells the pages of a namespace from those
/// of the usual one.
pub fn encode(
    events: &KvEvents,
    at: f64,
    manner: Manner,
    mut extra_key: impl FnMut(PageKey) -> Option<String>,
) -> Option<Vec<u8>> {
    let is_told = |event: &KvEvent<'_>| match event {
        KvEvent::Stored { tier, .. } | KvEvent::Removed { tier, .. } => {
            *tier != KvTier::L3 || manner.l3.is_some()
        }
        KvEvent::Cleared => true,
    };
    let count = events.iter().filter(is_told).count() + usize::from(events.is_snapshot);
    if count == 0 {
        return None;
    }
    let mut out = Vec::new();
    let written: Result<(), put::ValueWriteError> = (|| {
        put::write_array_len(&mut out, 3)?;
        put::write_f64(&mut out, at)?;
        put::write_array_len(&mut out, count as u32)?;
        if events.is_snapshot {
            write_cleared(&mut out)?;
        }
        for event in events.iter().filter(is_told) {
            write_event(&mut out, &event, manner, &mut extra_key)?;
        }
        put::write_uint(&mut out, 0).map(drop)
    })();
    written.expect("memory takes whatever is written to it");
    Some(out)
}

type Written = Result<(), put::ValueWriteError>;

fn write_event(
    out: &mut Vec<u8>,
    event: &KvEvent<'_>,
    manner: Manner,
    extra_key: &mut impl FnMut(PageKey) -> Option<String>,
) -> Written {
    match event {
        KvEvent::Stored { tier, namespace, parent, keys, tokens, contents } => {
            let is_first = parent == namespace;
            let salt = is_first.then(|| extra_key(*namespace)).flatten();
            let has_extras = salt.is_some() || !contents.is_empty();
            let locality = locality(*tier, manner);
            let fields = 8 + u32::from(has_extras) + u32::from(locality.is_some());
            put::write_map_len(out, fields)?;
            write_text(out, "type", "BlockStored")?;
            write_hashes(out, keys)?;
            put::write_str(out, "parent_block_hash")?;
            match is_first {
                true => nil(out)?,
                false => put::write_uint(out, hash(*parent)).map(drop)?,
            }
            put::write_str(out, "token_ids")?;
            put::write_array_len(out, tokens.len() as u32)?;
            for &token in tokens.iter() {
                put::write_uint(out, u64::from(token))?;
            }
            put::write_str(out, "block_size")?;
            put::write_uint(out, u64::from(manner.page_size))?;
            put::write_str(out, "lora_id")?;
            nil(out)?;
            write_text(out, "medium", medium(*tier))?;
            put::write_str(out, "lora_name")?;
            nil(out)?;
            if has_extras {
                put::write_str(out, "extra_keys")?;
                put::write_array_len(out, keys.len() as u32)?;
                for page in 0..keys.len() as u32 {
                    let salt = salt.as_deref().filter(|_| page == 0);
                    let content = contents.iter().find(|content| content.page == page);
                    let content = content.map(|content| format!("{:032x}", content.digest.0));
                    match salt.is_none() && content.is_none() {
                        true => nil(out)?,
                        false => {
                            let extras: Vec<_> =
                                content.as_deref().into_iter().chain(salt).collect();
                            put::write_array_len(out, extras.len() as u32)?;
                            for extra in extras {
                                put::write_str(out, extra)?;
                            }
                        }
                    }
                }
            }
            write_locality(out, locality)
        }
        KvEvent::Removed { tier, keys, namespace: _ } => {
            let locality = locality(*tier, manner);
            put::write_map_len(out, 3 + u32::from(locality.is_some()))?;
            write_text(out, "type", "BlockRemoved")?;
            write_hashes(out, keys)?;
            write_text(out, "medium", medium(*tier))?;
            write_locality(out, locality)
        }
        KvEvent::Cleared => write_cleared(out),
    }
}

fn write_cleared(out: &mut Vec<u8>) -> Written {
    put::write_map_len(out, 1)?;
    write_text(out, "type", "AllBlocksCleared")
}

fn write_hashes(out: &mut Vec<u8>, keys: &[PageKey]) -> Written {
    put::write_str(out, "block_hashes")?;
    put::write_array_len(out, keys.len() as u32)?;
    for &key in keys {
        put::write_uint(out, hash(key))?;
    }
    Ok(())
}

fn write_text(out: &mut Vec<u8>, name: &str, value: &str) -> Written {
    put::write_str(out, name)?;
    put::write_str(out, value)
}

fn write_locality(out: &mut Vec<u8>, locality: Option<&str>) -> Written {
    locality.map_or(Ok(()), |locality| write_text(out, "locality", locality))
}

fn nil(out: &mut Vec<u8>) -> Written {
    put::write_nil(out).map_err(put::ValueWriteError::InvalidMarkerWrite)
}

/// Consumers keep 64 bits, so these are the ones.
fn hash(key: PageKey) -> u64 {
    key.0 as u64
}

fn medium(tier: KvTier) -> &'static str {
    match tier {
        KvTier::Device => "GPU",
        KvTier::Host => "CPU",
        KvTier::L3 => "STORAGE",
    }
}

/// Device and host are the server's own, which needs no word.
fn locality(tier: KvTier, manner: Manner) -> Option<&'static str> {
    match (tier, manner.l3) {
        (KvTier::Device | KvTier::Host, _) | (KvTier::L3, None) => None,
        (KvTier::L3, Some(L3Sharing::Own)) => Some("LOCAL"),
        (KvTier::L3, Some(L3Sharing::Shared)) => Some("REMOTE"),
    }
}

/// Reads a batch.
///
/// # Errors
/// When these bytes are something else.
pub fn decode(bytes: &[u8]) -> Result<Batch, WireError> {
    let mut rest = bytes;
    let value = rmpv::decode::read_value_ref(&mut rest);
    let value = value.map_err(|error| WireError(error.to_string()))?;
    let wrong = |what: &str| WireError(what.to_owned());
    let ValueRef::Array(parts) = value else { return Err(wrong("a batch is an array")) };
    let [at, ValueRef::Array(events), more @ ..] = &parts[..] else {
        return Err(wrong("a batch is a time and a list of events"));
    };
    Ok(Batch {
        at: number(at).ok_or_else(|| wrong("the time is no number"))?,
        events: events.iter().map(event).collect::<Result<_, _>>()?,
        rank: more.first().and_then(integer).map(u64::cast_signed),
    })
}

/// The fields of an event, by name or, of old versions, by place.
struct Fields<'a> {
    kind: &'a str,
    named: Option<&'a [(ValueRef<'a>, ValueRef<'a>)]>,
    placed: &'a [ValueRef<'a>],
}

impl<'a> Fields<'a> {
    fn of(value: &'a ValueRef<'a>) -> Option<Self> {
        match value {
            ValueRef::Map(named) => {
                let mut fields = Self { kind: "", named: Some(named), placed: &[] };
                fields.kind = fields.text("type", 0)?;
                Some(fields)
            }
            ValueRef::Array(placed) => {
                let (kind, placed) = placed.split_first()?;
                Some(Self { kind: text(kind)?, named: None, placed })
            }
            _ => None,
        }
    }

    /// A field that is there and not nil.
    fn get(&self, name: &str, place: usize) -> Option<&'a ValueRef<'a>> {
        let value = match self.named {
            Some(named) => {
                let found = named.iter().find(|(key, _)| text(key) == Some(name));
                found.map(|(_, value)| value)
            }
            None => self.placed.get(place),
        };
        value.filter(|value| !matches!(value, ValueRef::Nil))
    }

    /// A field that only maps have.
    fn named(&self, name: &str) -> Option<&'a ValueRef<'a>> {
        self.get(name, usize::MAX)
    }

    fn text(&self, name: &str, place: usize) -> Option<&'a str> {
        self.get(name, place).and_then(text)
    }
}

fn event(value: &ValueRef<'_>) -> Result<Event, WireError> {
    let wrong = |what: &str| WireError(what.to_owned());
    let fields = Fields::of(value).ok_or_else(|| wrong("an event has no type"))?;
    if !tells_of_whole_prompts(&fields) {
        return Ok(Event::Other);
    }
    match fields.kind {
        "BlockStored" => stored(&fields).map(Event::Stored),
        "BlockRemoved" => {
            let hashes = fields.get("block_hashes", 0).and_then(hashes);
            let hashes = hashes.ok_or_else(|| wrong("removed blocks have no hashes"))?;
            Ok(Event::Removed { hashes, medium: medium_of(&fields, 1) })
        }
        "AllBlocksCleared" => Ok(Event::Cleared),
        _ => Ok(Event::Other),
    }
}

/// Groups of sliding windows and recurrent states hold parts of a prompt: that they have something says nothing
/// about its beginning.
fn tells_of_whole_prompts(fields: &Fields<'_>) -> bool {
    let kind = fields.named("kv_cache_spec_kind").and_then(text);
    let kind_is_whole = kind.is_none_or(|kind| {
        matches!(kind, "full_attention" | "mla_attention" | "sink_full_attention")
    });
    let group = fields.named("group_idx").and_then(integer);
    kind_is_whole && group.is_none_or(|group| group == 0 || kind.is_some())
}

fn stored(fields: &Fields<'_>) -> Result<Stored, WireError> {
    let wrong = |what: &str| WireError(format!("stored blocks have no {what}"));
    let hashes = fields.get("block_hashes", 0).and_then(hashes).ok_or_else(|| wrong("hashes"))?;
    let parent = fields.get("parent_block_hash", 1);
    let parent = parent.map(|parent| hash_of(parent).ok_or_else(|| wrong("right parent")));
    let tokens = match fields.get("token_ids", 2) {
        Some(ValueRef::Array(tokens)) => {
            let token = |value| integer(value).and_then(|token| u32::try_from(token).ok());
            tokens.iter().map(token).collect::<Option<_>>().ok_or_else(|| wrong("right tokens"))?
        }
        Some(_) => return Err(wrong("tokens")),
        None => Vec::new(),
    };
    let block_size = fields.get("block_size", 3).and_then(integer).unwrap_or(0);
    let mut extras = match fields.get("extra_keys", 7) {
        Some(ValueRef::Array(blocks)) => blocks.iter().map(extras_of).collect(),
        Some(_) | None => Vec::new(),
    };
    // SGLang tells the salt of a whole event; others tell it of a prompt's first block.
    if let Some(salt) = fields.named("cache_salt").and_then(text)
        && parent.is_none()
    {
        extras.resize_with(hashes.len().max(1), Vec::new);
        extras[0].push(salt.to_owned());
    }
    Ok(Stored {
        parent: parent.transpose()?,
        tokens,
        block_size: u32::try_from(block_size).map_err(|_| wrong("right block size"))?,
        medium: medium_of(fields, 5),
        extras,
        adapter: adapter_of(fields),
        hashes,
    })
}

/// The name of an adapter, or its number where an engine tells only that.
fn adapter_of(fields: &Fields<'_>) -> Option<String> {
    let number = || fields.get("lora_id", 4).and_then(integer).map(|id| id.to_string());
    fields.text("lora_name", 6).map(str::to_owned).or_else(number)
}

fn medium_of(fields: &Fields<'_>, place: usize) -> Medium {
    let is_own = fields.named("locality").and_then(text).is_none_or(|place| place == "LOCAL");
    let says_own = is_own && fields.named("locality").is_some();
    let Some(medium) = fields.text("medium", place) else { return Medium::Device };
    match medium {
        _ if !is_own => Medium::Shared,
        "GPU" | "DEVICE" => Medium::Device,
        "CPU" | "CPU_PINNED" | "CPU_TIER1" => Medium::Host,
        "DISK" | "NVME" | "CPU_TIER2" => Medium::Disk,
        "STORAGE" if says_own => Medium::Disk,
        _ => Medium::Shared,
    }
}

/// What one block depends on besides its tokens; things that are no text by how they are written.
fn extras_of(value: &ValueRef<'_>) -> Vec<String> {
    let ValueRef::Array(extras) = value else { return Vec::new() };
    extras
        .iter()
        .map(|extra| text(extra).map_or_else(|| extra.to_string(), str::to_owned))
        .collect()
}

fn hashes(value: &ValueRef<'_>) -> Option<Vec<u64>> {
    let ValueRef::Array(hashes) = value else { return None };
    hashes.iter().map(hash_of).collect()
}

/// 64 bits of a block's name: signed, unsigned, or the last of longer ones in bytes.
fn hash_of(value: &ValueRef<'_>) -> Option<u64> {
    match value {
        ValueRef::Binary(bytes) => bytes.last_chunk().copied().map(u64::from_be_bytes),
        other => integer(other),
    }
}

fn integer(value: &ValueRef<'_>) -> Option<u64> {
    let ValueRef::Integer(integer) = value else { return None };
    integer.as_u64().or_else(|| integer.as_i64().map(i64::cast_unsigned))
}

fn number(value: &ValueRef<'_>) -> Option<f64> {
    match value {
        ValueRef::F64(number) => Some(*number),
        ValueRef::F32(number) => Some(f64::from(*number)),
        other => integer(other).map(|number| number as f64),
    }
}

fn text<'a>(value: &ValueRef<'a>) -> Option<&'a str> {
    match value {
        ValueRef::String(text) => text.into_str(),
        _ => None,
    }
}
