//! Puts: room, record, tensors, claim, and freeing of superseded generations.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::config::WhenFull;
use super::error::FeatureError;
use super::keys::{CELLS, first_cell};
use super::ledger::{Cell, GenerationEntry, GenerationStage, SampleRoom};
use super::notes::NoteError;
use super::record::Record;
use super::reference::{FeatureRef, Mac};
use super::tensor::{Tensor, TensorSpec};
use super::{FeatureCore, check_bytes, check_specs, generation, keys};
use terrace_l3::backend::{after, died, one_each};
use terrace_l3::{ObjectId, Pin, Put, PutOptions, StoreError, Stored};

/// An active put that has room.
struct Putting {
    shared: Arc<FeatureCore>,
    sample: Arc<str>,
    generation: u64,
    /// Epoch of the number when the put began.
    epoch: u64,
    /// Cells with claims of other producers when it began.
    taken: Vec<u8>,
    over: bool,
}

impl Drop for Putting {
    fn drop(&mut self) {
        if !self.over {
            self.shared.ledger.lock().fail_put(self.generation, true, Instant::now());
        }
    }
}

/// Objects of a put, in the order of writing.
#[derive(Clone, Copy, Debug)]
enum PutStep {
    Record,
    Tensors,
    Claim,
}

/// Claims on a sample, each with its cell.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Claims of other producers.
    pub(super) others: Vec<(u8, Record)>,
    /// Claims of this producer.
    own: Vec<(u8, Record)>,
}

/// Reserved room that is not used yet.
struct ReservedRoom {
    shared: Arc<FeatureCore>,
    room: Option<SampleRoom>,
}

impl Drop for ReservedRoom {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            self.shared.ledger.lock().give_back(&room);
            self.shared.freed.notify_waiters();
        }
    }
}

impl FeatureCore {
    /// Puts a sample, as the promised generation if there is one.
    pub(super) async fn put(
        self: Arc<Self>,
        sample: &str,
        tensors: Vec<Tensor>,
        promised: Option<u64>,
    ) -> Result<FeatureRef, FeatureError> {
        if self.number().is_none() {
            return Err(FeatureError::NotAProducer);
        }
        keys::check_sample(sample)?;
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        check_specs(&specs)?;
        for tensor in &tensors {
            check_bytes(&tensor.spec, tensor.data.len())?;
        }
        let wait = match self.config.when_full {
            WhenFull::Refuse => Duration::ZERO,
            WhenFull::WaitMs(ms) => Duration::from_millis(ms),
        };
        let until = after(Instant::now(), wait);
        let bytes = self.footprint(tensors.iter().map(|tensor| tensor.data.len() as u64));
        let reserved = self.room(bytes, until).await?;
        let (answer, result) = oneshot::channel();
        let sample: Arc<str> = sample.into();
        let put = tokio::spawn(async move {
            let shared = reserved.shared.clone();
            let put = shared.put_into(reserved, &sample, tensors, specs, promised, until);
            let result = put.await;
            let generation = result.as_ref().ok().map(FeatureRef::generation);
            if answer.send(result).is_err()
                && let Some(generation) = generation
            {
                // The caller has stopped waiting, so this ref will never be given out.
                shared.end(generation, shared.entry(&sample, Vec::new())).await;
            }
        });
        match result.await {
            Ok(result) => result,
            Err(_) => match put.await {
                Err(error) => Err(self.failed(died(error))),
                Ok(()) => unreachable!("a task that ends has answered"),
            },
        }
    }

    async fn put_into(
        self: &Arc<Self>,
        mut reserved: ReservedRoom,
        sample: &Arc<str>,
        tensors: Vec<Tensor>,
        specs: Vec<TensorSpec>,
        promised: Option<u64>,
        until: Instant,
    ) -> Result<FeatureRef, FeatureError> {
        let owner = self.number().ok_or(FeatureError::NotAProducer)?;
        let (epoch, claims) = tokio::join!(self.check_owner(None), self.claims(sample));
        let (epoch, claims) = (epoch?, claims?.others);
        let floor = claims.iter().map(|(_, claim)| claim.generation).max().unwrap_or(0);
        let (contents, tensors) = self.contents_of(tensors).await?;
        let generation =
            promised.unwrap_or_else(|| generation::take(floor, self.clock.now_ms(), owner));
        let id = |spec: &TensorSpec| self.keys.tensor(sample, generation, &spec.name);
        let ids: Vec<ObjectId> = specs.iter().map(id).collect();
        let created_ms = self.clock.now_ms();
        let sizes = tensors.iter().map(|tensor| tensor.data.len() as u64);
        let record = Record {
            sample: sample.to_string(),
            generation,
            owner,
            created_ms,
            contents: self.config.secret.as_ref().map_or([0; 32], |it| it.of_contents(&contents)),
            tensors: ids.iter().map(|id| id.key).zip(sizes).collect(),
        };
        {
            let mut ledger = self.ledger.lock();
            if promised.is_some()
                && (ledger.entry(generation).is_some() || ledger.refuses(generation))
            {
                // It was put before, or a consumer has released its ref.
                let key = self.keys.sample_key(sample, generation);
                return Err(FeatureError::Aborted { key });
            }
            let room = reserved.room.as_ref().expect("the room is used once");
            ledger.begin_put(generation, sample, ids.clone(), room, created_ms, promised.is_some());
        }
        // From here on it belongs to the entry.
        reserved.room = None;
        let mut putting = Putting {
            shared: self.clone(),
            sample: sample.clone(),
            generation,
            epoch,
            taken: claims.into_iter().map(|(cell, _)| cell).collect(),
            over: false,
        };
        let result = self.store_and_claim(&putting, &record, ids, tensors, until).await;
        putting.over = true;
        if let Err(error) = result {
            self.give_up(generation, &error).await;
            return Err(error);
        }
        let reference = FeatureRef {
            store: self.keys.store().to_owned(),
            sample: sample.to_string(),
            generation,
            tensors: specs,
            retain: self.config.retain_on_release,
            promised: promised.is_some(),
            // A promise was given out before the content was known.
            contents: if promised.is_some() { Vec::new() } else { contents },
            mac: None,
        };
        Ok(reference.sign(self.config.secret.as_ref()))
    }

    /// Writes all objects that make a generation readable.
    async fn store_and_claim(
        self: &Arc<Self>,
        putting: &Putting,
        record: &Record,
        ids: Vec<ObjectId>,
        tensors: Vec<Tensor>,
        until: Instant,
    ) -> Result<(), FeatureError> {
        let key = self.keys.sample_key(&putting.sample, putting.generation);
        let failed = |error| match error {
            StoreError::Full => FeatureError::StoreFull { key: key.clone() },
            error => FeatureError::Store { key: key.clone(), error },
        };
        let mut waiting = None;
        // The record precedes the first tensor, so that a crash of this process cannot orphan any.
        for step in [PutStep::Record, PutStep::Tensors, PutStep::Claim] {
            loop {
                let result = match step {
                    PutStep::Record => self.write_record(putting.epoch, record).await,
                    PutStep::Tensors => self.put_tensors(&ids, &tensors).await.map_err(failed),
                    PutStep::Claim => self.claim(putting, record, failed).await,
                };
                match result {
                    Ok(()) => break,
                    Err(full @ FeatureError::StoreFull { .. }) => {
                        if !self.wait_for_room(&mut waiting, until).await? {
                            return Err(full);
                        }
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Waits briefly while the store is full of samples that may be consumed. Returns false after
    /// `until`, but checks at least once whether anything can be freed.
    async fn wait_for_room<'a>(
        self: &'a Arc<Self>,
        waiting: &mut Option<WaitingPut<'a>>,
        until: Instant,
    ) -> Result<bool, FeatureError> {
        if waiting.is_some() && Instant::now() >= until {
            self.ledger.lock().stats.puts_over_budget += 1;
            return Ok(false);
        }
        waiting.get_or_insert_with(|| WaitingPut::new(self));
        let freed = self.freed.notified();
        self.make_room().await?;
        let poll = after(Instant::now(), Duration::from_millis(self.config.poll_ms.max(1)));
        let _ = tokio::time::timeout_at(until.min(poll), freed).await;
        Ok(true)
    }

    async fn put_tensors(&self, ids: &[ObjectId], tensors: &[Tensor]) -> Result<(), StoreError> {
        let puts = ids.iter().zip(tensors).map(|(id, it)| Put::new(*id, it.data.share())).collect();
        let options = PutOptions { pin: Some(Pin::Hard(self.pins)), durable: self.config.durable };
        let mut is_full = false;
        for result in one_each(self.store.put_from(puts, options).await, ids.len()) {
            match result {
                Ok(Stored::New) => {}
                // No other put uses these names, so the origin of the bytes is unknown.
                Ok(Stored::AlreadyThere) => return Err(StoreError::BeingWritten),
                Err(StoreError::Full) => is_full = true,
                Err(error) => return Err(error),
            }
        }
        if !is_full {
            return Ok(());
        }
        // Others can use the room meanwhile. Two puts that keep half a sample each would deadlock.
        for removed in self.remove(ids).await {
            match removed {
                Ok(()) | Err(StoreError::Missing) => {}
                Err(error) => return Err(error),
            }
        }
        Err(StoreError::Full)
    }

    /// Claims the sample for a generation whose tensors are stored, and ends those that it
    /// supersedes.
    async fn claim(
        self: &Arc<Self>,
        putting: &Putting,
        record: &Record,
        failed: impl Fn(StoreError) -> FeatureError + Copy,
    ) -> Result<(), FeatureError> {
        let Putting { sample, generation, .. } = putting;
        let key = self.keys.sample_key(sample, *generation);
        let stripe = self.keys.revocation(sample, 0).key.0 as usize % self.claiming.len();
        let _alone = self.claiming[stripe].lock().await;
        let claimed = async {
            self.check_owner(Some(putting.epoch)).await?;
            self.write_claim(record, &putting.taken).await.map_err(failed)?;
            // A process that has taken the number meanwhile may have scanned before the claim
            // existed.
            self.check_owner(Some(putting.epoch)).await?;
            self.supersede(putting, &key).await?;
            let well = self.ledger.lock().end_put(*generation, record.sizes().sum());
            if well { Ok(()) } else { Err(FeatureError::Aborted { key: key.clone() }) }
        };
        let claimed = claimed.await;
        match &claimed {
            Ok(()) | Err(FeatureError::StoreFull { .. }) => {}
            // Before the next put of this sample searches a cell for its claim.
            Err(error) => self.give_up(*generation, error).await,
        }
        claimed
    }

    /// Writes the record of a put. An earlier run of this producer may have died while it wrote to
    /// a slot, and a store may keep such a place for a while: then another slot is used.
    async fn write_record(&self, epoch: u64, record: &Record) -> Result<(), FeatureError> {
        const SLOTS_TRIED: usize = 64;
        let key = || self.keys.sample_key(&record.sample, record.generation);
        let failed = |error| match error {
            StoreError::Full => FeatureError::StoreFull { key: key() },
            error => FeatureError::Store { key: key(), error },
        };
        let slot = self.ledger.lock().entry(record.generation).and_then(|entry| entry.own);
        let mut slot = slot.ok_or_else(|| failed(StoreError::BeingWritten))?.slot;
        for _ in 0..SLOTS_TRIED {
            let id = self.keys.record(record.owner, slot);
            match self.notes.write_if_free(id, record, self.config.durable).await {
                Ok(Stored::New) => return Ok(()),
                Ok(Stored::AlreadyThere) => {
                    self.check_owner(Some(epoch)).await?;
                    if self.clear(id).await.is_ok() {
                        continue;
                    }
                }
                Err(StoreError::BeingWritten) => {}
                Err(error) => return Err(failed(error)),
            }
            let other = self.ledger.lock().other_slot(record.generation);
            slot = other.ok_or_else(|| failed(StoreError::BeingWritten))?;
        }
        Err(failed(StoreError::BeingWritten))
    }

    /// Removes a record that should not exist, left by a late put or by a process that has lost the
    /// number. Its sample was never complete.
    async fn clear(&self, id: ObjectId) -> Result<(), StoreError> {
        let left = match self.notes.read(&[id]).await.remove(0) {
            Ok(record) => record.tensors,
            Err(NoteError::Store(StoreError::Missing)) => return Ok(()),
            Err(NoteError::Forged | NoteError::Store(StoreError::Corrupt(_))) => Vec::new(),
            Err(NoteError::Store(error)) => return Err(error),
        };
        let mut ids: Vec<ObjectId> =
            left.iter().map(|(key, _)| self.keys.tensor_of(*key)).collect();
        // The record is removed last: the other objects are found by it.
        for ids in [std::mem::take(&mut ids), vec![id]] {
            for removed in self.remove(&ids).await {
                match removed {
                    Ok(()) | Err(StoreError::Missing) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Writes the claim of a complete generation to a free cell. Retries while all cells are taken:
    /// claims of superseded generations are about to be removed.
    async fn write_claim(
        self: &Arc<Self>,
        record: &Record,
        taken: &[u8],
    ) -> Result<(), StoreError> {
        const TRIES: usize = 20;
        for _ in 1..TRIES {
            match self.try_write_claim(record, taken).await {
                Err(StoreError::BeingWritten) => {
                    tokio::time::sleep(Duration::from_millis(self.config.poll_ms.max(1))).await;
                }
                written => return written,
            }
        }
        self.try_write_claim(record, taken).await
    }

    async fn try_write_claim(
        self: &Arc<Self>,
        record: &Record,
        taken: &[u8],
    ) -> Result<(), StoreError> {
        let Record { sample, generation, .. } = record;
        let own = self.cells_in_use(*generation).await?;
        let cells = (0..CELLS).map(|step| (first_cell(*generation) + step) % CELLS);
        let mut cells: Vec<u8> = cells.filter(|cell| !own.contains(cell)).collect();
        // Cells that were taken at the start may be free by now.
        cells.sort_by_key(|cell| taken.contains(cell));
        for number in cells {
            let set = |is_ours| {
                self.ledger.lock().set_cell(*generation, Some(Cell { number, is_ours }));
            };
            // If the result is lost, the claim may exist.
            set(false);
            let id = self.keys.claim(sample, number);
            match self.notes.write_if_free(id, record, self.config.durable).await {
                Ok(Stored::New) => {
                    set(true);
                    return Ok(());
                }
                // Another producer was faster, or died while writing.
                Ok(Stored::AlreadyThere) | Err(StoreError::BeingWritten) => {}
                Err(error) => return Err(error),
            }
        }
        self.ledger.lock().set_cell(*generation, None);
        Err(StoreError::BeingWritten)
    }

    /// Frees the remains of a failed put.
    async fn give_up(self: &Arc<Self>, generation: u64, error: &FeatureError) {
        let unsettled = match error {
            FeatureError::Store { error, .. } => error.may_have_happened(),
            _ => false,
        };
        self.ledger.lock().fail_put(generation, unsettled, Instant::now());
        self.free(vec![generation]).await;
    }

    /// Ends all lower generations of the sample. If there is a higher one, this put is too late.
    async fn supersede(self: &Arc<Self>, putting: &Putting, key: &str) -> Result<(), FeatureError> {
        let Putting { sample, generation, .. } = putting;
        // Of two concurrent claims, one is written before the other producer looks: at least one
        // producer sees both.
        let Claims { others: rivals, own: claimed } = self.claims(sample).await?;
        if !claimed.iter().any(|(_, claim)| claim.generation == *generation) {
            // Another producer's claim is in its cell after all, or a later put has removed it.
            self.ledger.lock().distrust_cell(*generation);
            let key = key.to_owned();
            let is_late = rivals.iter().any(|(_, rival)| rival.generation > *generation);
            return Err(match is_late {
                true => FeatureError::Superseded { key },
                false => FeatureError::Store { key, error: StoreError::BeingWritten },
            });
        }
        self.end_strays(sample, *generation, &claimed).await?;
        let own: Vec<(u64, Option<GenerationStage>)> = {
            let ledger = self.ledger.lock();
            let stage = |own: u64| (own, ledger.stage(own));
            ledger.of_sample(sample).map(stage).collect()
        };
        let later_own = own
            .iter()
            .any(|(own, stage)| own > generation && *stage == Some(GenerationStage::Live));
        if later_own || rivals.iter().any(|(_, rival)| rival.generation > *generation) {
            return Err(FeatureError::Superseded { key: key.to_owned() });
        }
        let complete = |stage: &Option<GenerationStage>| match stage {
            Some(GenerationStage::Live | GenerationStage::Leaving { .. }) => true,
            Some(GenerationStage::Putting { .. }) | None => false,
        };
        let own = own.into_iter().filter(|(own, stage)| own < generation && complete(stage));
        let own = own.map(|(own, _)| (own, self.entry(sample, Vec::new())));
        let rivals = rivals.iter().map(|(_, rival)| (rival.generation, self.entry_of(rival)));
        let ended: Vec<(u64, GenerationEntry)> = own.chain(rivals).collect();
        for (older, entry) in ended {
            let freed = self.end(older, entry).await;
            self.ledger.lock().stats.superseded += u64::from(freed.found);
            self.revoked(sample, older, &freed)?;
        }
        Ok(())
    }

    /// Ends samples claimed under this producer's number by a process that had lost it by then, and
    /// so never gave out their refs.
    async fn end_strays(
        self: &Arc<Self>,
        sample: &str,
        generation: u64,
        claimed: &[(u8, Record)],
    ) -> Result<(), FeatureError> {
        for (cell, claim) in claimed {
            let id = self.keys.claim(sample, *cell);
            let is_known = self.ledger.lock().entry(claim.generation).is_some();
            if claim.generation == generation || is_known {
                continue;
            }
            // A claim that was read before may be removed by now, and replaced by another's.
            match self.notes.read(&[id]).await.remove(0) {
                Ok(there) if there == *claim => {}
                Ok(_) | Err(_) => continue,
            }
            let freed = self.end(claim.generation, self.entry_of(claim)).await;
            self.revoked(sample, claim.generation, &freed)?;
            // If it stays, the next put of the sample finds it.
            drop(self.remove(&[id]).await);
        }
        Ok(())
    }

    /// Cells of this producer's other claims on the sample, once there may be one more.
    async fn cells_in_use(
        self: &Arc<Self>,
        generation: u64,
    ) -> Result<SmallVec<[u8; 2]>, StoreError> {
        let in_use = self.ledger.lock().cells_in_use(generation);
        match in_use {
            Ok(cells) => Ok(cells),
            Err(leaving) => {
                if let Some(leaving) = leaving {
                    // Another task may be freeing it already.
                    self.end(leaving, self.entry("", Vec::new())).await;
                }
                self.ledger.lock().cells_in_use(generation).map_err(|_| StoreError::BeingWritten)
            }
        }
    }

    /// Claims on a sample.
    pub(super) async fn claims(&self, sample: &str) -> Result<Claims, FeatureError> {
        let ids = self.keys.claims(sample);
        let found = self.notes.find(&ids).await;
        let found = found.map_err(|error| self.note_failed("a claim on", sample, error))?;
        let mut claims = Claims::default();
        for (cell, id) in (0..).zip(&ids) {
            let here = found.iter().find(|(found, _)| found == id);
            match here.map(|(_, record)| record).filter(|record| record.sample == sample) {
                Some(record) if Some(record.owner) == self.number() => {
                    claims.own.push((cell, record.clone()));
                }
                Some(record) => claims.others.push((cell, record.clone())),
                None => {}
            }
        }
        Ok(claims)
    }

    /// With a secret, a MAC of each tensor's bytes, which binds a ref to them.
    async fn contents_of(
        &self,
        tensors: Vec<Tensor>,
    ) -> Result<(Vec<Mac>, Vec<Tensor>), FeatureError> {
        let Some(secret) = self.config.secret.clone() else { return Ok((Vec::new(), tensors)) };
        let compute = move || {
            let contents = tensors.iter().map(|tensor| Mac(secret.of_tensor(tensor))).collect();
            (contents, tensors)
        };
        tokio::task::spawn_blocking(compute).await.map_err(|error| self.failed(died(error)))
    }

    /// Entry for a generation that was found by its claim.
    pub(super) fn entry_of(&self, claim: &Record) -> GenerationEntry {
        let tensors = claim.tensors.iter().map(|(key, _)| self.keys.tensor_of(*key)).collect();
        self.entry(&claim.sample, tensors)
    }

    /// Maximum number of bytes for the samples of this producer.
    fn budget_bytes(&self) -> u64 {
        match self.lowest_tier().capacity_bytes {
            // Not known yet.
            0 => self.config.max_resident_bytes,
            capacity_bytes => self.config.max_resident_bytes.min(capacity_bytes),
        }
    }

    /// Returns true if more than three quarters of the budget are in use.
    pub(super) fn is_short_of_room(&self) -> bool {
        let resident = self.ledger.lock().resident_bytes();
        resident > self.budget_bytes() / 4 * 3
    }

    /// Reserves room, waiting for it if so configured.
    async fn room(
        self: &Arc<Self>,
        bytes: u64,
        until: Instant,
    ) -> Result<ReservedRoom, FeatureError> {
        let max = self.budget_bytes();
        if bytes > max {
            return Err(FeatureError::TooLarge { bytes, max });
        }
        let _waiting = WaitingPut::new(self);
        let reserve = || {
            let room = self.ledger.lock().reserve(bytes, max)?;
            Some(ReservedRoom { shared: self.clone(), room: Some(room) })
        };
        let in_turn = async {
            let _turn = self.gate.lock().await;
            loop {
                let mut freed = std::pin::pin!(self.freed.notified());
                freed.as_mut().enable();
                if let Some(reserved) = reserve() {
                    return Ok(reserved);
                }
                self.make_room().await?;
                if let Some(reserved) = reserve() {
                    return Ok(reserved);
                }
                let poll = Duration::from_millis(self.config.poll_ms.max(1));
                let _ = tokio::time::timeout(poll, freed).await;
            }
        };
        let in_time = match self.config.when_full {
            WhenFull::Refuse => {
                let at_once = reserve();
                if at_once.is_none() {
                    self.make_room().await?;
                }
                at_once.or_else(reserve).map(Ok)
            }
            WhenFull::WaitMs(_) => tokio::time::timeout_at(until, in_turn).await.ok(),
        };
        in_time.unwrap_or_else(|| {
            let mut ledger = self.ledger.lock();
            ledger.stats.puts_over_budget += 1;
            let (resident, samples) = (ledger.resident_bytes(), ledger.samples());
            Err(FeatureError::OverBudget { bytes, resident, samples, max })
        })
    }
}

/// Counts a put as waiting.
struct WaitingPut<'a>(&'a FeatureCore);

impl<'a> WaitingPut<'a> {
    fn new(shared: &'a FeatureCore) -> Self {
        shared.waiting.fetch_add(1, Ordering::Relaxed);
        Self(shared)
    }
}

impl Drop for WaitingPut<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
