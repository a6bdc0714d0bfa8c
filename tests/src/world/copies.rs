//! Movement of bytes by operations: when they are reported or, for copies between device and host,
//! at any earlier time, layer by layer.

use terrace_cache::Page;
use terrace_scheduler::{Event, EventError, OpId, Outcome, PageKey, PrefixDigest, Reach};

use super::memory::{Arena, Kv, LAYERS};
use super::{Damage, Member, Object, Transfer, World};

/// Progress of an unreported copy on one rank.
#[derive(Debug)]
pub(super) struct Arrival {
    /// Outcome to report.
    outcome: Outcome,
    /// The layers that have arrived.
    layers: [bool; LAYERS],
}

impl World {
    /// Reports the outcome of an operation on one rank, and moves the bytes that it covers.
    ///
    /// # Errors
    /// Returns the error of the scheduler.
    pub fn report(&mut self, op: OpId, rank: u32, outcome: Outcome) -> Result<(), EventError> {
        let outcome = match self.arrivals.get(&(op, rank)) {
            Some(arrival) if outcome != Outcome::TimedOut => arrival.outcome,
            Some(_) | None => outcome,
        };
        let outcome = self.perform(op, rank, outcome, None);
        let advanced = self.scheduler.advance(self.now, Event::Operation { op, rank, outcome });
        self.learn_late_tokens();
        advanced
    }

    /// Moves all layers of a copy on one rank. See [`arrive_layer`](Self::arrive_layer).
    pub fn arrive(&mut self, op: OpId, rank: u32, outcome: Outcome) {
        (0..LAYERS).for_each(|layer| self.arrive_layer(op, rank, layer, outcome));
    }

    /// Moves a layer of a copy between device and host on one rank and fixes its outcome. The pages
    /// of a load-back are written again at the report: until then they belong to it.
    pub fn arrive_layer(&mut self, op: OpId, rank: u32, layer: usize, outcome: Outcome) {
        let transfer = self.transfers.get(&op);
        let Some(transfer @ (Transfer::LoadBack(..) | Transfer::WriteBack(..))) = transfer else {
            return;
        };
        let Some(_) = sound_pages(outcome, transfer.pages()) else { return };
        let layers = [false; LAYERS];
        let arrival = self.arrivals.entry((op, rank)).or_insert(Arrival { outcome, layers });
        if std::mem::replace(&mut arrival.layers[layer], true) {
            return;
        }
        let sound = sound_pages(arrival.outcome, transfer.pages()).unwrap_or_default();
        match transfer {
            Transfer::LoadBack(from, to) => {
                if self.host.is_any_bad(from) {
                    self.misread.insert(op);
                }
                copy_layer(&self.host, from, &mut self.device, to, sound, layer);
            }
            Transfer::WriteBack(from, to) => {
                copy_layer(&self.device, from, &mut self.host, to, sound, layer);
            }
            _ => {}
        }
    }

    /// Moves the missing parts of a load-back's layer.
    pub(super) fn load(&mut self, op: OpId, layer: usize) {
        for rank in 0..self.scheduler.config().model.ranks {
            if let Some(Transfer::LoadBack(..)) = self.transfers.get(&op) {
                self.arrive_layer(op, rank, layer, Outcome::Done);
            }
        }
    }

    /// Returns whether a load-back that a member waits for has failed, so that its results are
    /// invalid.
    pub(super) fn is_misled(&self, member: &Member) -> bool {
        member.waits_for.is_some_and(|op| {
            let mut arrivals = self.arrivals.range((op, 0)..=(op, u32::MAX));
            self.misread.contains(&op)
                || arrivals.any(|(_, arrival)| arrival.outcome != Outcome::Done)
        })
    }

    /// Reports a transfer on one rank. If it is a prefetch, one of its pages is damaged. The driver
    /// verifies pages, so it reports those before the damaged one.
    ///
    /// # Errors
    /// Returns the error of the scheduler.
    pub fn report_damaged(
        &mut self,
        op: OpId,
        rank: u32,
        page: usize,
        damage: Damage,
    ) -> Result<(), EventError> {
        let outcome = self.perform(op, rank, Outcome::Done, Some((page, damage)));
        self.scheduler.advance(self.now, Event::Operation { op, rank, outcome })
    }

    /// Reads an object as a driver does: any deviation counts as missing.
    fn read(
        &self,
        key: PageKey,
        prefix: Option<PrefixDigest>,
        damage: Option<Damage>,
    ) -> Option<Kv> {
        let mut object = self.l3.get(&key)?.clone();
        match damage {
            None => {}
            Some(Damage::ShortRead) => drop(object.kv.0.pop()),
            Some(Damage::FlippedBit) => object.kv.0[0] ^= 1 << 17,
            Some(Damage::WrongPage) => object.key = PageKey(key.0 ^ 1),
            Some(Damage::StaleGeneration) => object.generation = object.generation.wrapping_sub(1),
        }
        let sound = object.key == key
            && object.generation == self.generation
            && object.prefix == prefix
            && object.kv.0.len() == LAYERS * self.page_size
            && object.checksum == object.kv.checksum();
        sound.then_some(object.kv)
    }

    /// Wipes L3. With `leftovers` its objects remain with an old generation.
    pub fn restart_l3(&mut self, leftovers: bool) {
        self.generation += 1;
        if !leftovers {
            self.l3.clear();
        }
    }

    /// Moves the bytes of an outcome. A probe is answered truthfully if the outcome is `Done`.
    fn perform(
        &mut self,
        op: OpId,
        rank: u32,
        outcome: Outcome,
        damaged: Option<(usize, Damage)>,
    ) -> Outcome {
        let pages = self.transfers.get(&op).map_or(0, Transfer::pages);
        let Some(sound) = sound_pages(outcome, pages) else { return outcome };
        // Bytes move once; a repeated report moves nothing.
        if !self.moved.insert((op, rank)) {
            return outcome;
        }
        let rubbish = Kv::rubbish(self.page_size);
        let mut written = Vec::new();
        let outcome = match self.transfers.get(&op) {
            Some(Transfer::LoadBack(from, to)) => {
                let arrival = Arrival { outcome, layers: [true; LAYERS] };
                self.arrivals.insert((op, rank), arrival);
                if self.host.is_any_bad(from) {
                    self.misread.insert(op);
                }
                for layer in 0..LAYERS {
                    copy_layer(&self.host, from, &mut self.device, to, sound, layer);
                }
                if let Outcome::Corrupt | Outcome::CorruptAfter(_) = outcome {
                    // The host pages are invalid.
                    self.host.invalidate(&from[sound..]);
                }
                outcome
            }
            Some(Transfer::WriteBack(from, to)) => {
                // Layers that have arrived are not moved again.
                let arrived = self.arrivals.remove(&(op, rank)).map(|arrival| arrival.layers);
                let is_owed = |layer: &usize| !arrived.is_some_and(|layers| layers[*layer]);
                for layer in (0..LAYERS).filter(is_owed) {
                    copy_layer(&self.device, from, &mut self.host, to, sound, layer);
                }
                written
                    .extend(to.iter().take(sound).map(|&to| (self.host[to].clone(), Reach::Host)));
                outcome
            }
            Some(Transfer::Probe(keys)) => match outcome {
                Outcome::Done => {
                    let found = keys.iter().take_while(|key| self.l3.contains_key(key)).count();
                    if found == keys.len() { Outcome::Done } else { Outcome::Partial(found as u32) }
                }
                _ => outcome,
            },
            Some(Transfer::Prefetch(keys, to)) => {
                let prefixes = self.prefixes.get(&op).map_or(&[][..], Vec::as_slice);
                let mut arrived = 0;
                for (place, (&key, &to)) in keys.iter().zip(to).enumerate() {
                    let damage = damaged.filter(|(page, _)| *page == place).map(|(_, how)| how);
                    let wanted = place < sound && arrived == place;
                    let source =
                        wanted.then(|| self.read(key, prefixes.get(place).copied(), damage));
                    let source = source.flatten();
                    arrived += usize::from(source.is_some());
                    self.host[to] = source.unwrap_or_else(|| rubbish.clone());
                }
                match outcome {
                    Outcome::Done
                    | Outcome::Partial(_)
                    | Outcome::CorruptAfter(_)
                    | Outcome::CalledOff(_)
                        if arrived < sound =>
                    {
                        Outcome::Partial(arrived as u32)
                    }
                    _ => outcome,
                }
            }
            Some(Transfer::Backup(keys, from)) => {
                for (stored, (&key, &from)) in keys.iter().zip(from).take(sound).enumerate() {
                    let kv = self.host[from].clone();
                    // A driver that verifies its source does not store invalid pages.
                    if kv == rubbish {
                        return Outcome::Partial(stored as u32);
                    }
                    written.push((kv.clone(), Reach::L3));
                    let prefix = self.prefixes.get(&op).and_then(|all| all.get(stored)).copied();
                    let (generation, checksum) = (self.generation, kv.checksum());
                    self.l3.insert(key, Object { key, generation, prefix, checksum, kv });
                }
                if let Outcome::Corrupt | Outcome::CorruptAfter(_) = outcome {
                    self.host.invalidate(&from[sound..]);
                }
                outcome
            }
            None => outcome,
        };
        for (kv, tier) in written {
            self.check_written(&kv, tier);
        }
        outcome
    }
}

/// Returns the number of moved pages, if the outcome is final and states it.
fn sound_pages(outcome: Outcome, pages: usize) -> Option<usize> {
    match outcome {
        Outcome::Done => Some(pages),
        Outcome::Partial(moved) | Outcome::CorruptAfter(moved) | Outcome::CalledOff(moved) => {
            Some(moved as usize).filter(|moved| *moved <= pages)
        }
        Outcome::Missing | Outcome::Failed | Outcome::Corrupt => Some(0),
        Outcome::TimedOut => None,
    }
}

/// Copies a layer of the valid pages; the others become invalid.
fn copy_layer<F: Copy, T: Copy>(
    source: &Arena<F>,
    from: &[Page<F>],
    target: &mut Arena<T>,
    to: &[Page<T>],
    sound: usize,
    layer: usize,
) {
    for (place, (&from, &to)) in from.iter().zip(to).enumerate() {
        target[to].write_layer(layer, (place < sound).then(|| &source[from]));
    }
}
