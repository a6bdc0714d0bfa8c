//! A plan as bytes: a head, then flat arrays, each beginning at a multiple of 8. All of it is little-endian, so
//! that a plan can be sent to other ranks as it is. `terrace_kv/plan.py` reads it.

use std::iter::zip;
use std::mem::take;

use terrace_scheduler::{
    CopyDirection, Decode, Ended, FailReason, L3Kind, Plan, Prefill, Scheduler, StateName,
};

/// Bytes of the header: the format, three words of the step, then the number of entries and the
/// start of each array, 32 bits each.
pub(crate) const HEAD_BYTES: usize = 32 + 8 * ARRAYS;
const ARRAYS: usize = 16;

/// Magic number with the format version.
const FORMAT: u64 = u64::from_le_bytes(*b"TERPLAN2");

/// A missing value.
const NONE: u64 = u64::MAX;

/// 32-bit words of an entry of each array.
const ENTRY_WORDS: [usize; ARRAYS] = [10, 8, 2, 1, 1, 4, 1, 6, 1, 1, 8, 4, 1, 2, 2, 4];

/// A plan to be written, with the layout of its arrays.
pub(crate) struct PlanBytes<'a> {
    plan: &'a Plan,
    /// Number of entries of each array, and its first byte.
    arrays: [(usize, usize); ARRAYS],
    bytes: usize,
}

impl<'a> PlanBytes<'a> {
    pub(crate) fn new(plan: &'a Plan) -> Self {
        let prefilled: usize = plan.prefills.iter().map(|prefill| prefill.tokens as usize).sum();
        let produce = plan.prefills.iter().filter(|prefill| prefill.produces_token).count();
        let tokens = prefilled + plan.decodes.len();
        let row_pages = plan.rows.iter().map(|row| plan.row_pages(row).len()).sum();
        let copied = plan.copies.iter().map(|copy| plan.device_pages(copy).len()).sum();
        let counts = [
            plan.prefills.len(),
            plan.decodes.len(),
            produce + plan.decodes.len(),
            tokens,
            tokens,
            plan.rows.len(),
            row_pages,
            plan.copies.len(),
            copied,
            copied,
            plan.l3.len(),
            plan.l3.iter().map(|op| plan.l3_keys(op).len()).sum(),
            plan.l3.iter().map(|op| plan.l3_host_pages(op).len()).sum(),
            plan.cancelled.len(),
            plan.completed.len(),
            plan.ended.len(),
        ];
        let mut bytes = HEAD_BYTES;
        let arrays = std::array::from_fn(|array| {
            let start = bytes;
            bytes += (4 * counts[array] * ENTRY_WORDS[array]).next_multiple_of(8);
            (counts[array], start)
        });
        Self { plan, arrays, bytes }
    }

    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Writes the plan to zeroed memory. The tokens to compute come from the scheduler.
    pub(crate) fn write(&self, scheduler: &Scheduler, into: &mut [u8]) {
        let plan = self.plan;
        let mut out = Writer { rest: into.as_chunks_mut().0 };
        let step = plan.step.map_or(NONE, |step| step.0);
        let behind = plan.behind.map_or(NONE, |step| step.0);
        out.entries([FORMAT, step, behind, plan.repeats_max.into()].into_iter().map(halves));
        out.entries(self.arrays.iter().map(|&(count, start)| [count as u32, start as u32]));
        out.entries(plan.prefills.iter().map(prefill));
        out.entries(plan.decodes.iter().map(decode));
        let last = plan.prefills.iter().filter(|prefill| prefill.produces_token);
        out.entries(last.map(|prefill| halves(prefill.request.0)));
        out.entries(plan.decodes.iter().map(|decode| halves(decode.request.0)));
        self.write_tokens(scheduler, &mut out);
        self.write_positions(&mut out);
        let mut first = 0;
        out.entries(plan.rows.iter().map(|row| {
            let pages = plan.row_pages(row).len() as u32;
            first += pages;
            [row.slot.0, row.first_entry, first - pages, pages]
        }));
        plan.rows
            .iter()
            .for_each(|row| out.entries(plan.row_pages(row).iter().map(|page| [page.slot()])));
        out.pad();
        self.write_copies(&mut out);
        self.write_l3(&mut out);
        out.entries(plan.cancelled.iter().map(|op| halves(op.0)));
        out.entries(plan.completed.iter().map(|request| halves(request.0)));
        out.entries(plan.ended.iter().map(ended));
        debug_assert!(out.rest.is_empty(), "all that there is room for");
    }

    /// Writes the tokens that the step computes, row by row; 0 where the previous step has not
    /// produced it yet.
    fn write_tokens(&self, scheduler: &Scheduler, out: &mut Writer<'_>) {
        for prefill in &self.plan.prefills {
            let tokens = scheduler.tokens(prefill.request).expect("a computing request is live");
            let places = prefill.start as usize..(prefill.start + prefill.tokens) as usize;
            for part in tokens.range(places) {
                out.entries(part.iter().map(|&token| [token]));
            }
        }
        out.entries(scheduler.inputs(self.plan).map(|token| [token.unwrap_or_default()]));
        out.pad();
    }

    /// Writes their positions.
    fn write_positions(&self, out: &mut Writer<'_>) {
        for prefill in &self.plan.prefills {
            out.entries((prefill.start..prefill.start + prefill.tokens).map(|place| [place]));
        }
        out.entries(self.plan.decodes.iter().map(|decode| [decode.start]));
        out.pad();
    }

    fn write_copies(&self, out: &mut Writer<'_>) {
        let plan = self.plan;
        let mut first = 0;
        out.entries(plan.copies.iter().map(|copy| {
            let direction = match copy.direction {
                CopyDirection::LoadBack => 0,
                CopyDirection::WriteBack => 1,
            };
            let [low, high] = halves(copy.op.0);
            let pages = plan.device_pages(copy).len() as u32;
            first += pages;
            [low, high, direction, first - pages, pages, 0]
        }));
        for copy in &plan.copies {
            out.entries(plan.device_pages(copy).iter().map(|page| [page.slot()]));
        }
        out.pad();
        for copy in &plan.copies {
            out.entries(plan.host_pages(copy).iter().map(|page| [page.slot()]));
        }
        out.pad();
    }

    fn write_l3(&self, out: &mut Writer<'_>) {
        let plan = self.plan;
        let (mut first_key, mut first_page) = (0, 0);
        out.entries(plan.l3.iter().map(|op| {
            let kind = match op.kind {
                L3Kind::Probe => 0,
                L3Kind::Prefetch => 1,
                L3Kind::Backup => 2,
            };
            let [low, high] = halves(op.op.0);
            let keys = plan.l3_keys(op).len() as u32;
            let pages = plan.l3_host_pages(op).len() as u32;
            (first_key, first_page) = (first_key + keys, first_page + pages);
            [low, high, kind, first_key - keys, keys, first_page - pages, pages, 0]
        }));
        for op in &plan.l3 {
            out.entries(
                plan.l3_keys(op).iter().map(|key| [0, 32, 64, 96].map(|bit| (key.0 >> bit) as u32)),
            );
        }
        for op in &plan.l3 {
            out.entries(plan.l3_host_pages(op).iter().map(|page| [page.slot()]));
        }
        out.pad();
    }
}

/// The rest of the output, in 32-bit words.
struct Writer<'a> {
    rest: &'a mut [[u8; 4]],
}

impl Writer<'_> {
    /// Writes entries of `N` words.
    #[inline]
    fn entries<const N: usize>(&mut self, entries: impl Iterator<Item = [u32; N]>) {
        let mut written = 0;
        for (place, entry) in zip(self.rest.as_chunks_mut::<N>().0, entries) {
            *place = entry.map(u32::to_le_bytes);
            written += N;
        }
        self.rest = &mut take(&mut self.rest)[written..];
    }

    /// Pads to a multiple of 8 bytes.
    fn pad(&mut self) {
        let is_odd = self.rest.len() % 2;
        self.rest = &mut take(&mut self.rest)[is_odd..];
    }
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

fn prefill(prefill: &Prefill) -> [u32; 10] {
    let Prefill { request, slot, start, tokens, produces_token, waits_for, adapter } = *prefill;
    let [low, high] = halves(request.0);
    let [op_low, op_high] = halves(waits_for.map_or(NONE, |op| op.0));
    [low, high, op_low, op_high, slot.0, start, tokens, adapter.0, produces_token.into(), 0]
}

fn decode(decode: &Decode) -> [u32; 8] {
    let Decode { request, slot, start, tokens, input, adapter } = *decode;
    let [low, high] = halves(request.0);
    [low, high, slot.0, start, tokens, input.unwrap_or(u32::MAX), adapter.0, 0]
}

fn ended(ended: &Ended) -> [u32; 4] {
    let state = match ended.state {
        StateName::Finished => 0,
        StateName::Aborted => 1,
        _ => 2,
    };
    let reason = match ended.reason {
        None => 0,
        Some(FailReason::TimedOut) => 1,
        Some(FailReason::StepFailed) => 2,
    };
    let [low, high] = halves(ended.request.0);
    [low, high, state, reason]
}
