//! A scheduler with a toy engine around it: the loop that every engine has, in one file.
//!
//! ```text
//! cargo run --release --example embed
//! ```
//!
//! Three requests about one long document arrive one after the other. The first computes its KV, the
//! second finds it on device, the third, after the cache was emptied, fetches it from L3.

use std::collections::BTreeMap;

use terrace_scheduler::{
    Config, CopyDirection, DevicePage, Event, L3Config, L3Kind, Outcome, PageKey, Plan, Prefill,
    RateConfig, Request, Scheduler, StepResult, Time, Token,
};

/// Memory of three tiers. A real engine has megabytes where this one has a number a page: the
/// request that computed it.
struct Engine {
    device: Vec<u64>,
    host: Vec<u64>,
    l3: BTreeMap<PageKey, u64>,
    /// The page table: for each slot the device pages of its request.
    rows: Vec<Vec<DevicePage>>,
}

impl Engine {
    /// Performs a plan: moves what it says, computes what it says, and reports what came of it.
    fn perform(&mut self, plan: &Plan, scheduler: &mut Scheduler, now: Time) {
        for copy in &plan.copies {
            for (device, host) in plan.device_pages(copy).iter().zip(plan.host_pages(copy)) {
                let (device, host) = (device.slot() as usize, host.slot() as usize);
                match copy.direction {
                    CopyDirection::LoadBack => self.device[device] = self.host[host],
                    CopyDirection::WriteBack => self.host[host] = self.device[device],
                }
            }
            report(
                scheduler,
                now,
                Event::Operation { op: copy.op, rank: 0, outcome: Outcome::Done },
            );
        }
        for op in &plan.l3 {
            let (keys, pages) = (plan.l3_keys(op), plan.l3_host_pages(op));
            let present = keys.iter().take_while(|key| self.l3.contains_key(key)).count();
            for (key, page) in keys.iter().zip(pages) {
                match op.kind {
                    L3Kind::Probe => {}
                    L3Kind::Prefetch => self.host[page.slot() as usize] = self.l3[key],
                    L3Kind::Backup => drop(self.l3.insert(*key, self.host[page.slot() as usize])),
                }
            }
            let outcome = match op.kind {
                L3Kind::Probe | L3Kind::Prefetch => Outcome::Partial(present as u32),
                L3Kind::Backup => Outcome::Done,
            };
            report(scheduler, now, Event::Operation { op: op.op, rank: 0, outcome });
        }
        if let Some(step) = plan.step {
            self.update_rows(plan);
            for prefill in &plan.prefills {
                self.compute(prefill);
            }
            let last_chunks = plan.prefills.iter().filter(|prefill| prefill.produces_token);
            let producers =
                last_chunks.map(|p| p.request).chain(plan.decodes.iter().map(|d| d.request));
            let tokens: [Token; 1] = [7];
            let results: Vec<StepResult<'_>> = producers
                .map(|request| StepResult { request, tokens: &tokens, finished: false })
                .collect();
            report(scheduler, now, Event::StepDone { step, results: &results, failed: &[] });
        }
    }

    /// A plan tells which entries of which rows change; whole rows are never sent again.
    fn update_rows(&mut self, plan: &Plan) {
        for change in &plan.rows {
            let row = &mut self.rows[change.slot.0 as usize];
            row.truncate(change.first_entry as usize);
            row.extend_from_slice(plan.row_pages(change));
        }
    }

    fn compute(&mut self, prefill: &Prefill) {
        let row = &self.rows[prefill.slot.0 as usize];
        let (read, written) = row.split_at(prefill.start as usize / PAGE_SIZE);
        for page in written {
            self.device[page.slot() as usize] = prefill.request.0;
        }
        let by_first = read.iter().filter(|page| self.device[page.slot() as usize] == 1).count();
        if by_first > 0 {
            println!("  {} reads {by_first} pages that r1 computed", prefill.request);
        }
    }
}

const PAGE_SIZE: usize = 16;
const DEVICE_PAGES: usize = 64;
const HOST_PAGES: usize = 128;

fn report(scheduler: &mut Scheduler, now: Time, event: Event<'_>) {
    scheduler.advance(now, event).expect("the engine reports only what was planned");
}

fn narrate(plan: &Plan) {
    for prefill in &plan.prefills {
        let end = prefill.start + prefill.tokens;
        println!("  {} computes tokens {}..{end}", prefill.request, prefill.start);
    }
    for copy in &plan.copies {
        println!("  {:?} of pages: {}", copy.direction, plan.device_pages(copy).len());
    }
    for op in &plan.l3 {
        println!("  {:?} of pages: {}", op.kind, plan.l3_keys(op).len());
    }
    for ended in &plan.ended {
        println!("  {} is {:?}", ended.request, ended.state);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::builder()
        .page_size(PAGE_SIZE as u32)
        .device_pages(DEVICE_PAGES as u32)
        .host_pages(HOST_PAGES as u32)
        .l3(L3Config::default())
        // This engine is quick: without a price for computing it would never load anything.
        .rates(RateConfig { prefill_ns_per_token: 1_000_000, ..RateConfig::default() })
        .build()?;
    let mut engine = Engine {
        device: vec![0; DEVICE_PAGES],
        host: vec![0; HOST_PAGES],
        l3: BTreeMap::new(),
        rows: vec![Vec::new(); config.batch.running_max as usize],
    };
    let mut scheduler = Scheduler::new(config)?;
    let mut plan = Plan::default();
    let mut now = Time(0);
    let document: Vec<Token> = (0..500).collect();

    for (id, news) in [
        (1, "The first request computes everything."),
        (2, "The second finds the document on device."),
        (3, "The cache is emptied: the third fetches the document from L3."),
    ] {
        println!("{news}");
        if id == 3 {
            scheduler.clear_cache();
        }
        let question = [document.as_slice(), &[1000 + id as Token; 20]].concat();
        scheduler.submit(now, Request::new(id, question, 4))?;
        loop {
            scheduler.plan_into(now, &mut plan);
            if plan.is_idle() {
                break;
            }
            narrate(&plan);
            now = Time(now.0 + 10_000);
            engine.perform(&plan, &mut scheduler, now);
        }
    }

    scheduler.audit();
    let stats = scheduler.stats();
    println!(
        "Of {} prompt tokens, {} were found on device and {} in L3; {} were computed.",
        stats.prompt_tokens, stats.device_hit_tokens, stats.l3_hit_tokens, stats.prefilled_tokens
    );
    Ok(())
}
