//! Audit: every page, pin, slot and share of a budget is accounted for.

use terrace_cache::{Claims, Fault};
use terrace_fsm::{OpId, StateName};

use super::Scheduler;
use crate::l3_reads::L3Reads;
use crate::operations::Counts;
use crate::stats::OperationStats;

impl Scheduler {
    /// Checks that no page is lost or owned twice, that every pin is counted, and that slots and budgets add up.
    /// Takes time proportional to the whole cache.
    ///
    /// # Errors
    /// A description of the first fault.
    pub fn try_audit(&self) -> Result<(), Fault> {
        let mut claims = Claims::default();
        for entry in self.requests.iter() {
            entry.life.state().claim(&mut claims);
        }
        for (_, operation) in self.operations.iter() {
            operation.work.claim(&mut claims);
        }
        self.backups.claim(&mut claims);
        self.pending_write_backs.claim(&mut claims);
        self.steps.claim(&mut claims);
        self.cache.audit(&claims)?;
        self.audit_budgets()?;
        self.audit_requests()
    }

    /// Runs [`try_audit`](Self::try_audit).
    ///
    /// # Panics
    /// If there is a fault.
    pub fn audit(&self) {
        if let Err(fault) = self.try_audit() {
            panic!("audit: {fault}");
        }
    }

    fn audit_budgets(&self) -> Result<(), Fault> {
        let mut counted = Counts::default();
        for (_, operation) in self.operations.iter() {
            let counts = operation.work.counts(&mut counted);
            counts.in_flight += 1;
            counts.in_flight_pages += operation.pages;
            if operation.quarantined {
                counts.quarantined_pages += operation.pages;
            }
        }
        let in_flight = |counts: &Counts| {
            let of = |counts: OperationStats| {
                (counts.in_flight, counts.in_flight_pages, counts.quarantined_pages)
            };
            [
                counts.probes,
                counts.prefetches,
                counts.load_backs,
                counts.write_backs,
                counts.backups,
            ]
            .map(of)
        };
        let budgets = in_flight(self.operations.counts());
        ensure(in_flight(&counted) == budgets, || {
            format!("budgets {budgets:?}, in flight {:?}", in_flight(&counted))
        })?;
        let room: usize = self.operations.iter().map(|(_, operation)| operation.room).sum();
        let counted = self.operations.pages_making_room();
        ensure(room == counted, || format!("{room} pages make room and {counted} are counted"))
    }

    fn audit_requests(&self) -> Result<(), Fault> {
        let (mut slots, mut draining, mut in_line, mut sharing) = (Vec::new(), 0, 0, 0);
        let (mut fetched_pages, mut prefilling, mut parked) = (0, 0, 0);
        for entry in self.requests.iter() {
            let state = entry.state();
            ensure(!state.is_end(), || format!("{} has ended and is alive", entry.id))?;
            slots.extend(entry.life.state().computing().map(|computing| computing.slot));
            draining += u32::from(matches!(state, StateName::Draining | StateName::WritingBack));
            prefilling += usize::from(state == StateName::Prefilling);
            in_line += usize::from(entry.wait().is_queued());
            ensure(entry.wait().fits(state), || {
                format!("{} is {state:?} and waits: {:?}", entry.id, entry.wait())
            })?;
            fetched_pages += entry.l3.held_pages();
            parked += usize::from(entry.wait().wake().is_some());
            sharing += usize::from(entry.computing_key.is_some());
            if let Some(op) = entry.life.state().operation() {
                let owner = self.operations.owner(op);
                ensure(owner == Some(entry.handle), || foreign_operation(entry.id, op))?;
            }
            if entry.life.state().computing().is_some() {
                let pages = entry.device_pages() * self.config.cache.page_size;
                ensure(entry.planned_tokens() - entry.loading_tokens <= pages, || {
                    format!("{} computes more tokens than it has pages for", entry.id)
                })?;
            }
            let loading = entry.life.state().computing().map_or(0, |computing| {
                self.operations.loading(computing).len() as u32 * self.config.cache.page_size
            });
            ensure(entry.loading_tokens == loading, || {
                format!("{} loads {loading} tokens, not {}", entry.id, entry.loading_tokens)
            })?;
        }
        slots.extend(self.batch.free_slots());
        slots.sort_unstable();
        slots.dedup();
        ensure(slots.len() == self.config.batch.running_max as usize, || {
            "a slot is lost or owned twice".to_owned()
        })?;
        let waiting_pages = self.l3_reads.as_ref().map_or(0, L3Reads::held_pages);
        ensure(fetched_pages == waiting_pages, || format!("{fetched_pages} fetched pages wait"))?;
        ensure(draining == self.pending_write_backs.draining(), || {
            format!("{draining} requests drain")
        })?;
        ensure(prefilling == self.batch.prefilling().len(), || {
            format!("{prefilling} requests prefill")
        })?;
        ensure(in_line == self.requests.queue().len(), || {
            format!("{in_line} requests are in line")
        })?;
        ensure(parked == self.requests.deferred().len(), || {
            format!("{parked} requests are deferred")
        })?;
        ensure(sharing == self.producers.len(), || format!("{sharing} requests share"))?;
        self.audit_adapters()?;
        ensure(self.requests.timers() <= self.requests.len(), || "a timer outlived".to_owned())
    }

    fn audit_adapters(&self) -> Result<(), Fault> {
        let mut different = 0;
        for (adapter, live, running) in self.adapters.counts() {
            let using = || self.requests.iter().filter(move |entry| entry.adapter == adapter);
            let computing = using().filter(|entry| entry.life.state().computing().is_some());
            let counted = (using().count() as u32, computing.count() as u32);
            ensure(counted == (live, running), || {
                format!("{adapter:?} is used by {counted:?} and counted for {live}, {running}")
            })?;
            different += u32::from(running > 0);
        }
        ensure(different == self.adapters.running(), || format!("{different} adapters run"))
    }
}

fn foreign_operation(request: terrace_fsm::RequestId, op: OpId) -> String {
    format!("{request} waits for {op}, which is not its own")
}

fn ensure(holds: bool, fault: impl FnOnce() -> String) -> Result<(), Fault> {
    if holds { Ok(()) } else { Err(Fault::new(fault())) }
}
