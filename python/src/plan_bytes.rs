//! A plan as bytes: a head of 64-bit words, then flat arrays, each beginning at a multiple of 8. All of it is
//! little-endian, so that a plan can be sent to other ranks as it is. `terrace_kv/plan.py` reads it.

use terrace_scheduler::{
    CopyDirection, Decode, Ended, FailReason, L3Kind, Plan, Prefill, Scheduler, StateName,
};

/// Words of the head: the format, three of the step, then how many entries each array has.
pub(crate) const HEADER_WORDS: usize = 4 + ARRAYS;
const ARRAYS: usize = 15;

/// The format, and that it is one.
const FORMAT: u64 = u64::from_le_bytes(*b"TERPLAN1");

/// What is not there.
const NONE: u64 = u64::MAX;

/// What is written of a plan, in its order.
pub(crate) struct PlanBytes<'a> {
    plan: &'a Plan,
    counts: [usize; ARRAYS],
    bytes: usize,
}

/// Bytes of an entry of each array.
const ENTRY_BYTES: [usize; ARRAYS] = [40, 32, 4, 4, 16, 4, 24, 4, 4, 32, 16, 4, 8, 8, 16];

impl<'a> PlanBytes<'a> {
    pub(crate) fn new(plan: &'a Plan) -> Self {
        let prefilled: usize = plan.prefills.iter().map(|prefill| prefill.tokens as usize).sum();
        let tokens = prefilled + plan.decodes.len();
        let row_pages = plan.rows.iter().map(|row| plan.row_pages(row).len()).sum();
        let copied = plan.copies.iter().map(|copy| plan.device_pages(copy).len()).sum();
        let counts = [
            plan.prefills.len(),
            plan.decodes.len(),
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
        let arrays = counts.iter().zip(ENTRY_BYTES).map(|(count, bytes)| padded(count * bytes));
        let bytes = 8 * HEADER_WORDS + arrays.sum::<usize>();
        Self { plan, counts, bytes }
    }

    /// How many bytes it takes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// Writes it. The tokens that are computed are the scheduler's.
    pub(crate) fn write(&self, scheduler: &Scheduler, into: &mut [u8]) {
        let plan = self.plan;
        let mut out = Writer { bytes: into, at: 0 };
        out.word(FORMAT);
        out.word(plan.step.map_or(NONE, |step| step.0));
        out.word(plan.behind.map_or(NONE, |step| step.0));
        out.word(plan.repeats_max.into());
        self.counts.iter().for_each(|&count| out.word(count as u64));
        plan.prefills.iter().for_each(|prefill| out.prefill(prefill));
        plan.decodes.iter().for_each(|decode| out.decode(decode));
        self.write_tokens(scheduler, &mut out);
        self.write_positions(&mut out);
        let mut first = 0;
        for row in &plan.rows {
            let pages = plan.row_pages(row).len() as u32;
            out.halves([row.slot.0, row.first_entry, first, pages]);
            first += pages;
        }
        for row in &plan.rows {
            plan.row_pages(row).iter().for_each(|page| out.half(page.slot()));
        }
        out.pad();
        self.write_copies(&mut out);
        self.write_l3(&mut out);
        plan.cancelled.iter().for_each(|op| out.word(op.0));
        plan.completed.iter().for_each(|request| out.word(request.0));
        plan.ended.iter().for_each(|ended| out.ended(ended));
        debug_assert_eq!(out.at, self.bytes, "all that there is room for");
    }

    /// The tokens that the step computes, row by row; 0 where the step before is yet to produce one.
    fn write_tokens(&self, scheduler: &Scheduler, out: &mut Writer<'_>) {
        for prefill in &self.plan.prefills {
            let tokens = scheduler.tokens(prefill.request).expect("whoever computes is alive");
            let places = prefill.start as usize..(prefill.start + prefill.tokens) as usize;
            for part in tokens.range(places) {
                part.iter().for_each(|&token| out.half(token));
            }
        }
        for decode in &self.plan.decodes {
            let tokens = scheduler.tokens(decode.request).expect("whoever computes is alive");
            out.half(tokens.get(decode.start as usize).unwrap_or_default());
        }
        out.pad();
    }

    /// Where they are.
    fn write_positions(&self, out: &mut Writer<'_>) {
        for prefill in &self.plan.prefills {
            (prefill.start..prefill.start + prefill.tokens).for_each(|place| out.half(place));
        }
        self.plan.decodes.iter().for_each(|decode| out.half(decode.start));
        out.pad();
    }

    fn write_copies(&self, out: &mut Writer<'_>) {
        let plan = self.plan;
        let mut first = 0;
        for copy in &plan.copies {
            let direction = match copy.direction {
                CopyDirection::LoadBack => 0,
                CopyDirection::WriteBack => 1,
            };
            let pages = plan.device_pages(copy).len() as u32;
            out.word(copy.op.0);
            out.halves([direction, first, pages, 0]);
            first += pages;
        }
        for copy in &plan.copies {
            plan.device_pages(copy).iter().for_each(|page| out.half(page.slot()));
        }
        out.pad();
        for copy in &plan.copies {
            plan.host_pages(copy).iter().for_each(|page| out.half(page.slot()));
        }
        out.pad();
    }

    fn write_l3(&self, out: &mut Writer<'_>) {
        let plan = self.plan;
        let (mut first_key, mut first_page) = (0, 0);
        for op in &plan.l3 {
            let kind = match op.kind {
                L3Kind::Probe => 0,
                L3Kind::Prefetch => 1,
                L3Kind::Backup => 2,
            };
            let keys = plan.l3_keys(op).len() as u32;
            let pages = plan.l3_host_pages(op).len() as u32;
            out.word(op.op.0);
            out.halves([kind, first_key, keys, first_page, pages, 0]);
            (first_key, first_page) = (first_key + keys, first_page + pages);
        }
        for op in &plan.l3 {
            plan.l3_keys(op).iter().for_each(|key| out.put(&key.0.to_le_bytes()));
        }
        for op in &plan.l3 {
            plan.l3_host_pages(op).iter().for_each(|page| out.half(page.slot()));
        }
        out.pad();
    }
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(8)
}

struct Writer<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    #[inline]
    fn put<const N: usize>(&mut self, bytes: &[u8; N]) {
        self.bytes[self.at..self.at + N].copy_from_slice(bytes);
        self.at += N;
    }

    #[inline]
    fn word(&mut self, word: u64) {
        self.put(&word.to_le_bytes());
    }

    #[inline]
    fn half(&mut self, half: u32) {
        self.put(&half.to_le_bytes());
    }

    #[inline]
    fn halves<const N: usize>(&mut self, halves: [u32; N]) {
        halves.into_iter().for_each(|half| self.half(half));
    }

    fn pad(&mut self) {
        let padded = padded(self.at);
        self.bytes[self.at..padded].fill(0);
        self.at = padded;
    }

    fn prefill(&mut self, prefill: &Prefill) {
        let Prefill { request, slot, start, tokens, produces_token, waits_for, adapter } = *prefill;
        self.word(request.0);
        self.word(waits_for.map_or(NONE, |op| op.0));
        self.halves([slot.0, start, tokens, adapter.0, produces_token.into(), 0]);
    }

    fn decode(&mut self, decode: &Decode) {
        let Decode { request, slot, start, tokens, input, adapter } = *decode;
        self.word(request.0);
        self.halves([slot.0, start, tokens, input.unwrap_or(u32::MAX), adapter.0, 0]);
    }

    fn ended(&mut self, ended: &Ended) {
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
        self.word(ended.request.0);
        self.halves([state, reason]);
    }
}
