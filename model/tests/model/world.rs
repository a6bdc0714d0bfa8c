//! Pages for a model, and steps over them.

use std::ops::Range;

use terrace_cache::{Cache, CacheConfig, DevicePage};
use terrace_engine::{CpuMemory, Forward, Logits, ModelError, PageTable, Span, Step};
use terrace_model::Llama;
use terrace_scheduler::{Slot, Token};

/// Sequences with pages of their own. What has not been computed is not a number.
pub(crate) struct World {
    memory: CpuMemory,
    table: PageTable,
    sequences: Vec<Vec<Token>>,
}

impl World {
    /// A row for each sequence, whose pages lie where `shuffle` puts them.
    pub(crate) fn new(
        model: &Llama,
        page_size: u32,
        sequences: Vec<Vec<Token>>,
        shuffle: impl FnOnce(&mut [DevicePage]),
    ) -> Self {
        let row_pages = |tokens: &Vec<Token>| tokens.len().div_ceil(page_size as usize);
        let count: usize = sequences.iter().map(row_pages).sum();
        let config =
            CacheConfig { page_size, device_pages: count as u32, ..CacheConfig::default() };
        let pages = Cache::new(&config).take_device_pages(count).expect("all pages are free");
        let mut pages = pages.as_slice().to_vec();
        shuffle(&mut pages);
        let mut table = PageTable::new(sequences.len() as u32, page_size);
        let memory = CpuMemory::new(count as u32, model.kv_shape().page_bytes(page_size)).unwrap();
        let mut rest = &pages[..];
        for (slot, tokens) in (0..).zip(&sequences) {
            let (row, others) = rest.split_at(row_pages(tokens));
            table.set(Slot(slot), 0, row);
            rest = others;
        }
        let mut world = Self { memory, table, sequences };
        world.spoil();
        world
    }

    fn spoil(&mut self) {
        for slot in 0..self.sequences.len() {
            let whole = 0..self.sequences[slot].len();
            let (spans, tokens) = self.spans(&[(slot, whole)], 0);
            let step = Step { spans: &spans, tokens: &tokens, table: &self.table, arriving: &[] };
            let mut pages = self.memory.lend(&step).unwrap();
            for page in self.table.row(Slot(slot as u32)) {
                pages.write(*page).fill(f32::NAN);
            }
        }
    }

    /// Says which token is at a position.
    pub(crate) fn append(&mut self, slot: usize, position: usize, token: Token) {
        self.sequences[slot][position] = token;
    }

    /// Computes some positions of some sequences in one step, and returns the logits after each.
    pub(crate) fn step(
        &mut self,
        model: &mut Llama,
        parts: &[(usize, Range<usize>)],
    ) -> Vec<Vec<f32>> {
        self.try_step(model, parts).expect("a step")
    }

    pub(crate) fn try_step(
        &mut self,
        model: &mut Llama,
        parts: &[(usize, Range<usize>)],
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let (spans, tokens) = self.spans(parts, 1);
        self.try_forward(model, &spans, &tokens)
    }

    /// Computes positions of one sequence, and returns the logits after each of them.
    pub(crate) fn step_by_token(
        &mut self,
        model: &mut Llama,
        slot: usize,
        positions: Range<usize>,
    ) -> Vec<Vec<f32>> {
        let logits = positions.len();
        let (spans, tokens) = self.spans(&[(slot, positions)], logits);
        self.try_forward(model, &spans, &tokens).expect("a step")
    }

    fn try_forward(
        &mut self,
        model: &mut Llama,
        spans: &[Span],
        tokens: &[Token],
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let step = Step { spans, tokens, table: &self.table, arriving: &[] };
        let (mut logits, mut rows) = (Vec::new(), Vec::new());
        let vocabulary = model.vocabulary();
        let mut take = |rows: &[f32]| {
            logits.extend(rows.chunks_exact(vocabulary).map(<[f32]>::to_vec));
        };
        let mut taken = Logits::new(vocabulary, &mut rows, &mut take);
        model.forward(&self.memory, &step, &mut taken)?;
        Ok(logits)
    }

    fn spans(&self, parts: &[(usize, Range<usize>)], logits: usize) -> (Vec<Span>, Vec<Token>) {
        let (mut spans, mut tokens) = (Vec::new(), Vec::new());
        for (slot, positions) in parts {
            let first = tokens.len();
            tokens.extend_from_slice(&self.sequences[*slot][positions.clone()]);
            spans.push(Span {
                slot: Slot(*slot as u32),
                start: positions.start as u32,
                tokens: first..tokens.len(),
                logits,
            });
        }
        (spans, tokens)
    }

    /// The bits of all keys and values of a sequence, position by position.
    pub(crate) fn kv(&self, model: &Llama, slot: usize) -> Vec<Vec<u32>> {
        let (shape, page_size) = (model.kv_shape(), self.table.page_size());
        let len = self.sequences[slot].len();
        let (spans, tokens) = self.spans(&[(slot, 0..len)], 0);
        let step = Step { spans: &spans, tokens: &tokens, table: &self.table, arriving: &[] };
        let pages = self.memory.lend(&step).unwrap();
        let row = self.table.row(Slot(slot as u32));
        let at = |position: usize| {
            let page = pages.read(row[position / page_size as usize]);
            let within = position % page_size as usize * shape.head_elements;
            let mut bits = Vec::new();
            for (layer, head) in
                (0..shape.layers).flat_map(|l| (0..shape.heads).map(move |h| (l, h)))
            {
                let keys_at = shape.keys_at(layer, head, page_size) + within;
                let values_at = keys_at + page_size as usize * shape.head_elements;
                for start in [keys_at, values_at] {
                    bits.extend(page[start..][..shape.head_elements].iter().map(|x| x.to_bits()));
                }
            }
            bits
        };
        (0..len).map(at).collect()
    }
}

/// Numbers as bits, so that even the sign of a zero counts.
pub(crate) fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}
