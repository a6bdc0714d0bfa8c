//! Putting a sample: room, record, tensors, claim, and the end of what it supersedes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::config::WhenFull;
use super::error::FeatureError;
use super::keys::{CELLS, first_cell};
use super::ledger::{Cell, Entry, Room, Stage};
use super::record::Record;
use super::reference::{FeatureRef, Mac};
use super::tensor::{Tensor, TensorSpec};
use super::{Shared, check_bytes, check_specs, generation, keys};
use terrace_l3::backend::{died, one_each};
use terrace_l3::{ObjectId, Pin, Put, PutOptions, StoreError, Stored};

/// A put that has found room, and is not over.
struct Putting {
    shared: Arc<Shared>,
    sample: Arc<str>,
    generation: u64,
    /// Places that claims of others were in when it began.
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

/// What claims there are on a sample.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Other producers', and where they are.
    pub(super) others: Vec<(u8, Record)>,
    /// The generations of this producer that are claimed.
    own: Vec<u64>,
}

/// Room that is not used yet.
struct Reserved {
    shared: Arc<Shared>,
    room: Option<Room>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            self.shared.ledger.lock().give_back(&room);
            self.shared.freed.notify_waiters();
        }
    }
}

impl Shared {
    /// Puts a sample, as the generation that was promised if there is one.
    pub(super) async fn put(
        self: Arc<Self>,
        sample: &str,
        tensors: Vec<Tensor>,
        promised: Option<u64>,
    ) -> Result<FeatureRef, FeatureError> {
        let owner = self.config.owner.ok_or(FeatureError::NotAProducer)?;
        keys::check_sample(sample)?;
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| tensor.spec.clone()).collect();
        check_specs(&specs)?;
        for tensor in &tensors {
            check_bytes(&tensor.spec, tensor.data.len())?;
        }
        let bytes = tensors.iter().map(|tensor| tensor.data.len() as u64).sum();
        let reserved = self.room(bytes).await?;
        let (answer, result) = oneshot::channel();
        let sample: Arc<str> = sample.into();
        let put = tokio::spawn(async move {
            let shared = reserved.shared.clone();
            let put = shared.put_into(reserved, owner, &sample, tensors, specs, promised);
            let result = put.await;
            let generation = result.as_ref().ok().map(FeatureRef::generation);
            if answer.send(result).is_err()
                && let Some(generation) = generation
            {
                // Nobody waits for it any more, so nobody will ever have this ref.
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
        mut reserved: Reserved,
        owner: u16,
        sample: &Arc<str>,
        tensors: Vec<Tensor>,
        specs: Vec<TensorSpec>,
        promised: Option<u64>,
    ) -> Result<FeatureRef, FeatureError> {
        let claims = self.claims(sample).await?.others;
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
            tensors: ids.iter().map(|id| id.key).zip(sizes).collect(),
        };
        {
            let mut ledger = self.ledger.lock();
            if promised.is_some()
                && (ledger.entry(generation).is_some() || ledger.refuses(generation))
            {
                // It was kept before, or whoever has its ref wants it no more.
                let key = self.keys.sample_key(sample, generation);
                return Err(FeatureError::Aborted { key });
            }
            let room = reserved.room.as_ref().expect("the room is used once");
            ledger.begin_put(generation, sample, ids.clone(), room, created_ms, promised.is_some());
        }
        let room = reserved.room.take().expect("the room is used once");
        let mut putting = Putting {
            shared: self.clone(),
            sample: sample.clone(),
            generation,
            taken: claims.into_iter().map(|(cell, _)| cell).collect(),
            over: false,
        };
        let result = self.store_and_claim(&putting, owner, room.slot, &record, ids, tensors).await;
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
            contents,
            mac: None,
        };
        Ok(reference.sign(self.config.secret.as_ref()))
    }

    /// Everything that makes a generation one that can be read.
    async fn store_and_claim(
        self: &Arc<Self>,
        putting: &Putting,
        owner: u16,
        slot: u32,
        record: &Record,
        ids: Vec<ObjectId>,
        tensors: Vec<Tensor>,
    ) -> Result<(), FeatureError> {
        let Putting { sample, generation, .. } = putting;
        let key = self.keys.sample_key(sample, *generation);
        let failed = |error| FeatureError::Store { key: key.clone(), error };
        let durable = self.config.durable;
        // Before the first tensor, so that whatever becomes of this process, none is forgotten.
        self.write_record(owner, slot, record).await.map_err(failed)?;
        let puts = ids.iter().zip(tensors).map(|(id, tensor)| Put::new(*id, tensor.data));
        let puts: Vec<Put> = puts.collect();
        let options = PutOptions { pin: Some(Pin::Hard(self.pins)), durable };
        let results = one_each(self.store.put_from(puts, options).await, ids.len());
        for result in results {
            match result {
                Ok(Stored::New) => {}
                // No other put has these names, so nobody knows whose bytes those are.
                Ok(Stored::AlreadyThere) => return Err(failed(StoreError::BeingWritten)),
                Err(error) => return Err(failed(error)),
            }
        }
        let stripe = self.keys.revocation(sample, 0).key.0 as usize % self.claiming.len();
        let _alone = self.claiming[stripe].lock().await;
        let claimed = async {
            self.write_claim(record, &putting.taken).await.map_err(failed)?;
            self.supersede(putting, &key).await?;
            let well = self.ledger.lock().end_put(*generation);
            if well { Ok(()) } else { Err(FeatureError::Aborted { key: key.clone() }) }
        };
        let claimed = claimed.await;
        if let Err(error) = &claimed {
            // Before the next put of this sample looks for a place for its claim.
            self.give_up(*generation, error).await;
        }
        claimed
    }

    /// Notes what is about to be put. A former life of this producer may have died while it wrote to a
    /// slot, and a store may keep such a place for a while: then another one does.
    async fn write_record(
        &self,
        owner: u16,
        mut slot: u32,
        record: &Record,
    ) -> Result<(), StoreError> {
        const SLOTS_TRIED: usize = 64;
        for _ in 0..SLOTS_TRIED {
            let id = self.keys.record(owner, slot);
            match self.notes.write(id, record, self.config.durable).await {
                Err(StoreError::BeingWritten) => {}
                written => return written,
            }
            let other = self.ledger.lock().other_slot(record.generation);
            slot = other.ok_or(StoreError::BeingWritten)?;
        }
        Err(StoreError::BeingWritten)
    }

    /// Notes that the generation is complete, at a place that is free and can be written to.
    async fn write_claim(
        self: &Arc<Self>,
        record: &Record,
        taken: &[u8],
    ) -> Result<(), StoreError> {
        const CELLS_TRIED: usize = 16;
        let Record { sample, generation, .. } = record;
        let own = self.cells_in_use(*generation).await?;
        let cells = (0..CELLS).map(|step| (first_cell(*generation) + step) % CELLS);
        let free = cells.filter(|cell| !taken.contains(cell) && !own.contains(cell));
        for number in free.take(CELLS_TRIED) {
            let set = |is_ours| {
                self.ledger.lock().set_cell(*generation, Some(Cell { number, is_ours }));
            };
            // If its answer is lost, it may be there.
            set(false);
            let id = self.keys.claim(sample, number);
            match self.notes.write_if_free(id, record, self.config.durable).await {
                Ok(Stored::New) => {
                    set(true);
                    return Ok(());
                }
                // Somebody else was faster, or died over it.
                Ok(Stored::AlreadyThere) | Err(StoreError::BeingWritten) => {}
                Err(error) => return Err(error),
            }
        }
        self.ledger.lock().set_cell(*generation, None);
        Err(StoreError::BeingWritten)
    }

    /// Frees what there is of a put that has failed.
    async fn give_up(self: &Arc<Self>, generation: u64, error: &FeatureError) {
        let unsettled = match error {
            FeatureError::Store { error, .. } => error.may_have_happened(),
            _ => false,
        };
        self.ledger.lock().fail_put(generation, unsettled, Instant::now());
        self.free(vec![generation]).await;
    }

    /// Ends all lower generations of the sample. There may be a higher one: then this put is too late.
    async fn supersede(self: &Arc<Self>, putting: &Putting, key: &str) -> Result<(), FeatureError> {
        let Putting { sample, generation, .. } = putting;
        // Whoever claims the sample at the same time has claimed before this looks, or looks after this
        // has claimed: one of both sees the other.
        let Claims { others: rivals, own: claimed } = self.claims(sample).await?;
        if !claimed.contains(generation) {
            // Another's is in its place after all, or somebody has removed it.
            self.ledger.lock().doubt_cell(*generation);
            let (key, error) = (key.to_owned(), StoreError::BeingWritten);
            return Err(FeatureError::Store { key, error });
        }
        let own: Vec<(u64, Option<Stage>)> = {
            let ledger = self.ledger.lock();
            let stage = |own: u64| (own, ledger.stage(own));
            ledger.of_sample(sample).map(stage).collect()
        };
        let later_own =
            own.iter().any(|(own, stage)| own > generation && *stage == Some(Stage::Live));
        if later_own || rivals.iter().any(|(_, rival)| rival.generation > *generation) {
            return Err(FeatureError::Superseded { key: key.to_owned() });
        }
        let complete = |stage: &Option<Stage>| match stage {
            Some(Stage::Live | Stage::Leaving { .. }) => true,
            Some(Stage::Putting { .. }) | None => false,
        };
        let own = own.into_iter().filter(|(own, stage)| own < generation && complete(stage));
        let own = own.map(|(own, _)| (own, self.entry(sample, Vec::new())));
        let rivals = rivals.iter().map(|(_, rival)| (rival.generation, self.entry_of(rival)));
        let ended: Vec<(u64, Entry)> = own.chain(rivals).collect();
        for (older, entry) in ended {
            let freed = self.end(older, entry).await;
            self.ledger.lock().stats.superseded += u64::from(freed.found);
            self.revoked(sample, older, &freed)?;
        }
        Ok(())
    }

    /// Where this producer's other claims on the sample are, once there may be one more.
    async fn cells_in_use(
        self: &Arc<Self>,
        generation: u64,
    ) -> Result<SmallVec<[u8; 2]>, StoreError> {
        let in_use = self.ledger.lock().cells_in_use(generation);
        match in_use {
            Ok(cells) => Ok(cells),
            Err(leaving) => {
                if let Some(leaving) = leaving {
                    // Somebody may be at it already.
                    self.end(leaving, self.entry("", Vec::new())).await;
                }
                self.ledger.lock().cells_in_use(generation).map_err(|_| StoreError::BeingWritten)
            }
        }
    }

    /// The claims on a sample.
    pub(super) async fn claims(&self, sample: &str) -> Result<Claims, FeatureError> {
        let ids = self.keys.claims(sample);
        let found = self.notes.find(&ids).await;
        let found = found.map_err(|error| self.note_failed("a claim on", sample, error))?;
        let mut claims = Claims::default();
        for (cell, id) in (0..).zip(&ids) {
            let here = found.iter().find(|(found, _)| found == id);
            match here.map(|(_, record)| record).filter(|record| record.sample == sample) {
                Some(record) if Some(record.owner) == self.config.owner => {
                    claims.own.push(record.generation);
                }
                Some(record) => claims.others.push((cell, record.clone())),
                None => {}
            }
        }
        Ok(claims)
    }

    /// With a secret, a code of each tensor's bytes, by which a ref is bound to them.
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

    /// What is noted of a generation that a claim was found of.
    pub(super) fn entry_of(&self, claim: &Record) -> Entry {
        let tensors = claim.tensors.iter().map(|(key, _)| self.keys.tensor_of(*key)).collect();
        self.entry(&claim.sample, tensors)
    }

    /// Waits for room, or does not.
    async fn room(self: &Arc<Self>, bytes: u64) -> Result<Reserved, FeatureError> {
        let max = self.config.max_resident_bytes;
        if bytes > max {
            return Err(FeatureError::TooLarge { bytes, max });
        }
        let wait = match self.config.when_full {
            WhenFull::Refuse => Duration::ZERO,
            WhenFull::WaitMs(ms) => Duration::from_millis(ms),
        };
        let _waiting = Waiting::new(self);
        let in_turn = async {
            let _turn = self.gate.lock().await;
            loop {
                let mut freed = std::pin::pin!(self.freed.notified());
                freed.as_mut().enable();
                if let Some(room) = self.ledger.lock().reserve(bytes) {
                    return Reserved { shared: self.clone(), room: Some(room) };
                }
                self.make_room().await;
                if let Some(room) = self.ledger.lock().reserve(bytes) {
                    return Reserved { shared: self.clone(), room: Some(room) };
                }
                let poll = Duration::from_millis(self.config.poll_ms.max(1));
                let _ = tokio::time::timeout(poll, freed).await;
            }
        };
        let in_time = match wait {
            Duration::ZERO => {
                let at_once = self.ledger.lock().reserve(bytes);
                let reserved = |room| Reserved { shared: self.clone(), room: Some(room) };
                match at_once {
                    Some(room) => Some(reserved(room)),
                    None => {
                        self.make_room().await;
                        self.ledger.lock().reserve(bytes).map(reserved)
                    }
                }
            }
            wait => tokio::time::timeout(wait, in_turn).await.ok(),
        };
        in_time.ok_or_else(|| {
            let mut ledger = self.ledger.lock();
            ledger.stats.puts_over_budget += 1;
            let (resident, samples) = (ledger.resident_bytes(), ledger.samples());
            FeatureError::OverBudget { bytes, resident, samples, max }
        })
    }
}

/// Counts a put as waiting.
struct Waiting<'a>(&'a Shared);

impl<'a> Waiting<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.waiting.fetch_add(1, Ordering::Relaxed);
        Self(shared)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
