//! Decoding of events of vLLM, SGLang and Terrace, including older versions.

use rmpv::ValueRef;

use super::{Batch, Event, Medium, Stored};

/// Bytes that are not a valid batch.
#[derive(Debug, thiserror::Error)]
#[error("not a batch of KV events: {0}")]
pub struct WireError(String);

/// Decodes a batch.
///
/// # Errors
/// Fails if the bytes are not a valid batch.
pub fn decode(bytes: &[u8]) -> Result<Batch, WireError> {
    let mut rest = bytes;
    let value = rmpv::decode::read_value_ref(&mut rest);
    let value = value.map_err(|error| WireError(error.to_string()))?;
    let wrong = |what: &str| WireError(what.to_owned());
    let ValueRef::Array(parts) = value else { return Err(wrong("a batch must be an array")) };
    let [at, ValueRef::Array(events), more @ ..] = &parts[..] else {
        return Err(wrong("a batch must be a time and a list of events"));
    };
    Ok(Batch {
        at: number(at).ok_or_else(|| wrong("the time is not a number"))?,
        events: events.iter().map(event).collect::<Result<_, _>>()?,
        rank: more.first().and_then(integer).map(u64::cast_signed),
    })
}

/// The fields of an event, by name or, in old versions, by position.
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

    /// Returns a field that is present and not nil.
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

    /// Returns a field that only the map format has.
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

/// Returns whether an event is about full attention. Groups of sliding windows and recurrent states
/// hold parts of a prompt, which says nothing about its prefix.
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
    // SGLang sets the salt for a whole event; others set it for a prompt's first block.
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

/// Returns the name of an adapter, or its number if the event has only that.
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

/// Returns the further dependencies of a block; values other than text in their written form.
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

/// Returns 64 bits of a block's name: signed, unsigned, or the last bytes of a longer one.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rejects_invalid_batches() {
        let nothing: &[u8] = &[];
        for wrong in [nothing, b"\xc0", b"\x93\xc0\x90\xc0", b"\x92\x01\x02", b"\x92\x01\x91\x05"] {
            assert!(decode(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(decode(b"\x92\x01\x90").unwrap(), Batch { at: 1.0, ..Batch::default() });
    }

    proptest! {
        #[test]
        fn decodes_or_rejects_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
        }

        /// A declared length must not be trusted before its bytes arrive.
        #[test]
        fn declared_lengths_allocate_nothing(length in 0_u32.., kind in 0..3_usize) {
            let kind = [0xdd, 0xdf, 0xc6][kind];
            let bytes = [&[0x93, 0x01, kind][..], &length.to_be_bytes(), &[0x01; 8]].concat();
            let _ = decode(&bytes);
        }
    }
}
