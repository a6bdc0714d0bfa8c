//! Encoding of events exactly as vLLM does: the same fields in the same order.

use rmp::encode as put;
use terrace_cache::{KvEvent, KvEvents, KvTier, PageContent, PageKey};

/// Options of the encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manner {
    /// Tokens in a page.
    pub page_size: u32,
    /// Sharing of L3; none omits its events.
    pub l3: Option<L3Sharing>,
}

/// Users of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum L3Sharing {
    /// This server only.
    Own,
    /// Several servers.
    Shared,
}

/// Encodes events; none if there is nothing to report. `extra_key` returns the dependency that
/// separates a namespace's pages from those of the default one.
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
                write_extras(out, keys.len() as u32, salt.as_deref(), contents)?;
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

/// Writes the further dependencies of pages: a list for each, or nil.
fn write_extras(
    out: &mut Vec<u8>,
    pages: u32,
    salt: Option<&str>,
    contents: &[PageContent],
) -> Written {
    put::write_str(out, "extra_keys")?;
    put::write_array_len(out, pages)?;
    for page in 0..pages {
        let content = contents.iter().find(|content| content.page == page);
        let content = content.map(|content| format!("{:032x}", content.digest.0));
        let salt = salt.filter(|_| page == 0);
        let extras: Vec<_> = content.as_deref().into_iter().chain(salt).collect();
        if extras.is_empty() {
            nil(out)?;
            continue;
        }
        put::write_array_len(out, extras.len() as u32)?;
        extras.into_iter().try_for_each(|extra| put::write_str(out, extra))?;
    }
    Ok(())
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

/// Returns the 64 bits of a key that consumers keep.
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

/// Returns the locality of a tier; none for device and host, which are local by default.
fn locality(tier: KvTier, manner: Manner) -> Option<&'static str> {
    match (tier, manner.l3) {
        (KvTier::Device | KvTier::Host, _) | (KvTier::L3, None) => None,
        (KvTier::L3, Some(L3Sharing::Own)) => Some("LOCAL"),
        (KvTier::L3, Some(L3Sharing::Shared)) => Some("REMOTE"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Event, Medium, Stored, decode};

    const EVENTS: &str = r#"{"snapshot": true, "next": 9, "events": [
        {"event": "stored", "tier": "device", "namespace": "00000000000000000000000000000009",
         "parent": "00000000000000000000000000000009", "tokens": [1, 2, 70000, 4],
         "keys": ["0000000000000005ffffffffffffffff", "00000000000000000000000000000002"]},
        {"event": "stored", "tier": "host", "namespace": "00000000000000000000000000000009",
         "parent": "00000000000000000000000000000002", "tokens": [5, 6],
         "keys": ["00000000000000000000000000000003"],
         "contents": [{"page": 0, "digest": "000000000000000000000000000000ab"}]},
        {"event": "stored", "tier": "l3", "namespace": "00000000000000000000000000000009",
         "parent": "00000000000000000000000000000002", "tokens": [5, 6],
         "keys": ["00000000000000000000000000000003"]},
        {"event": "removed", "tier": "host", "namespace": "00000000000000000000000000000009",
         "keys": ["00000000000000000000000000000003"]},
        {"event": "cleared"}]}"#;

    fn encoded_events(l3: Option<L3Sharing>) -> Vec<Event> {
        let events: KvEvents = serde_json::from_str(EVENTS).unwrap();
        let manner = Manner { page_size: 2, l3 };
        let salt = |namespace| (namespace == PageKey(9)).then(|| "salt".to_owned());
        let batch = decode(&encode(&events, 1.5, manner, salt).unwrap()).unwrap();
        assert_eq!((batch.at, batch.rank), (1.5, Some(0)));
        batch.events
    }

    #[test]
    fn encoded_events_decode() {
        let on_device = Stored {
            hashes: vec![u64::MAX, 2],
            tokens: vec![1, 2, 70_000, 4],
            block_size: 2,
            extras: vec![vec!["salt".to_owned()], vec![]],
            ..Stored::default()
        };
        let on_host = Stored {
            hashes: vec![3],
            parent: Some(2),
            tokens: vec![5, 6],
            block_size: 2,
            medium: Medium::Host,
            extras: vec![vec![format!("{:032x}", 0xab)]],
            adapter: None,
        };
        let removed = Event::Removed { hashes: vec![3], medium: Medium::Host };
        let (on_device, on_host) = (Event::Stored(on_device), Event::Stored(on_host));
        assert_eq!(
            encoded_events(None),
            [Event::Cleared, on_device, on_host, removed, Event::Cleared]
        );
    }

    #[test]
    fn encodes_l3_on_request_and_marks_shared_stores() {
        let media = |l3| {
            let media = encoded_events(l3).into_iter().filter_map(|event| match event {
                Event::Stored(stored) => Some(stored.medium),
                Event::Removed { .. } | Event::Cleared | Event::Other => None,
            });
            media.collect::<Vec<_>>()
        };
        assert_eq!(media(None), [Medium::Device, Medium::Host]);
        let own = [Medium::Device, Medium::Host, Medium::Disk];
        assert_eq!(media(Some(L3Sharing::Own)), own);
        let shared = [Medium::Device, Medium::Host, Medium::Shared];
        assert_eq!(media(Some(L3Sharing::Shared)), shared);
    }

    #[test]
    fn encodes_no_empty_batch() {
        let events = r#"{"snapshot": false, "next": 9, "events": [{"event": "removed", "tier": "l3",
            "namespace": "00000000000000000000000000000009", "keys": []}]}"#;
        let events: KvEvents = serde_json::from_str(events).unwrap();
        assert_eq!(encode(&events, 0.0, Manner { page_size: 2, l3: None }, |_| None), None);
    }
}
