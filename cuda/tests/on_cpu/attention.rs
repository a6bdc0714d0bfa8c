//! Attention over pages.

mod hopper;

use crate::library::{Arguments, Block, Kernels, LAYERS, Sizes};
use crate::numbers::{Noise, narrow, wide};
use crate::{with_all_sizes, with_sizes, with_some_sizes};

// Must match the kernels and the model's launches.
const TILE: usize = 64;
const JOIN_THREADS: usize = 256;
const ROWS: usize = 128;
const FEW_ROWS: usize = 16;
const STAGES: usize = 2;
const FEW_STAGES: usize = 3;
const WHOLE: u32 = u32::MAX;
const LAYER: usize = 1;
/// NaN in bf16, which spreads to every result that reads it.
const SPOILT: u16 = 0x7fc0;

/// Consecutive tokens of a sequence; each sequence has its own row.
#[derive(Clone, Copy, Debug)]
struct Span {
    row: usize,
    /// Index of the first token in the batch.
    first_token: usize,
    /// Position of the first token.
    position: usize,
    tokens: usize,
}

impl Span {
    fn end(&self) -> usize {
        self.position + self.tokens
    }

    /// Returns the span's last tokens.
    fn last(&self, tokens: usize) -> Self {
        let before = self.tokens - tokens.min(self.tokens);
        let (first_token, position) = (self.first_token + before, self.position + before);
        Self { first_token, position, tokens: self.tokens - before, ..*self }
    }

    /// Returns row, first token, tokens, position, keys and partial, as kernels read them.
    fn item(&self, keys: std::ops::Range<usize>, partial: u32) -> [u32; 8] {
        let numbers =
            [self.row, self.first_token, self.tokens, self.position, keys.start, keys.end];
        let [row, first_token, tokens, position, from, end] = numbers.map(|number| number as u32);
        [row, first_token, tokens, position, from, end, partial, 0]
    }
}

/// Sequences in scattered pages, and the queries of some of their tokens.
struct Scene<'a> {
    kernels: &'a Kernels<'a>,
    sizes: Sizes,
    spans: Vec<Span>,
    kv: Vec<u16>,
    table: Vec<u32>,
    table_width: usize,
    qkv: Vec<u16>,
}

impl<'a> Scene<'a> {
    /// Creates sequences, each with the position of its first token and the number of tokens.
    fn new(kernels: &'a Kernels<'a>, spans: &[(usize, usize)]) -> Self {
        let sizes = kernels.sizes;
        let mut first_token = 0;
        let spans: Vec<Span> = (0..)
            .zip(spans)
            .map(|(row, &(position, tokens))| {
                first_token += tokens;
                Span { row, first_token: first_token - tokens, position, tokens }
            })
            .collect();
        let pages = |span: &Span| span.end().div_ceil(sizes.page_size);
        let table_width = spans.iter().map(pages).max().unwrap() + 1;
        let page_count = spans.iter().map(pages).sum::<usize>() + 3;
        let mut noise = Noise::new(page_count as u64);
        let mut free = noise.shuffled(page_count);
        let mut table = vec![u32::MAX; spans.len() * table_width];
        let kv = vec![SPOILT; page_count * LAYERS * sizes.layer()];
        for span in &spans {
            let own = free.split_off(free.len() - pages(span));
            table[span.row * table_width..][..own.len()].copy_from_slice(&own);
        }
        let qkv = noise.narrow(first_token * sizes.qkv(), 1.0);
        let mut scene = Self { kernels, sizes, spans, kv, table, table_width, qkv };
        for span in scene.spans.clone() {
            for key in 0..span.end() {
                for kv_head in 0..sizes.kv_heads {
                    for (is_value, scale) in [(false, 2.0), (true, 1.0)] {
                        let place = scene.place(span.row, key, kv_head, is_value);
                        let numbers = noise.narrow(sizes.head_dim, scale);
                        scene.kv[place..][..sizes.head_dim].copy_from_slice(&numbers);
                    }
                }
            }
        }
        scene.look_for_borders();
        scene
    }

    /// Makes queries attend to keys at the borders of tiles and segments, to their own key, and to
    /// the key behind it, which must be masked.
    fn look_for_borders(&mut self) {
        let heads = self.sizes.kv_heads * self.sizes.group;
        for span in self.spans.clone() {
            for token in 0..span.tokens {
                let own = span.position + token;
                let sought = [own, own + 1, 0, 15, 16, 63, 64, own / 2, 1023, 1024, 2047, 2048];
                let sought = sought.map(|key| key.min(span.end() - 1));
                for head in 0..heads {
                    let key = sought[(token + head) % sought.len()];
                    let place = self.place(span.row, key, head / self.sizes.group, false);
                    let from = self.query_place(span.first_token + token, head);
                    for element in 0..self.sizes.head_dim {
                        let query = &mut self.qkv[from + element];
                        *query = narrow(wide(*query) + wide(self.kv[place + element]));
                    }
                }
            }
        }
    }

    fn query_place(&self, token: usize, head: usize) -> usize {
        token * self.sizes.qkv() + head * self.sizes.head_dim
    }

    /// Returns the place of a key or value.
    fn place(&self, row: usize, position: usize, kv_head: usize, is_value: bool) -> usize {
        let (entry, within) = (position / self.sizes.page_size, position % self.sizes.page_size);
        let page = self.table[row * self.table_width + entry] as usize;
        (page * LAYERS + LAYER) * self.sizes.layer() + self.sizes.place(kv_head, is_value, within)
    }

    fn arguments<'b>(&'b self, found: &'b mut [u16]) -> Arguments<'b> {
        let layer_bytes = self.sizes.layer() * 2;
        let (page_bytes, offset) = (LAYERS * layer_bytes, LAYER * layer_bytes);
        let arguments = Arguments::default().list(&self.qkv).out(found);
        arguments.pages(&self.kv, page_bytes, offset, &self.table, self.table_width)
    }

    fn nothing_found(&self) -> Vec<u16> {
        vec![SPOILT; self.qkv.len() / self.sizes.qkv() * self.sizes.queries()]
    }

    fn depth(&self) -> usize {
        self.sizes.head_dim.next_multiple_of(16)
    }

    /// Runs `attend` on items of at most `tokens_max` tokens.
    fn attend(&self, spans: &[Span], tokens_max: usize) -> Vec<u16> {
        let parts = parts_of(spans, tokens_max);
        let items: Vec<_> = parts.iter().map(|part| part.item(0..part.end(), WHOLE)).collect();
        let (mut found, mut nothing) = (self.nothing_found(), []);
        self.launch_attend(&items, &mut found, &mut nothing);
        found
    }

    /// Runs `attend` on separate segments, and `join`.
    fn attend_apart(&self, spans: &[Span], tokens_max: usize) -> Vec<u16> {
        let apart = Apart::new(&parts_of(spans, tokens_max), (ROWS / FEW_ROWS) as u32, self.sizes);
        let (mut found, mut partials) = (self.nothing_found(), self.room_for(&apart));
        self.launch_attend(&apart.items, &mut found, &mut partials);
        self.join(&apart, &partials, &mut found, 7);
        found
    }

    /// Runs `attend_few` and `join`.
    fn attend_few(&self, spans: &[Span], blocks: usize) -> Vec<u16> {
        let apart = Apart::new(spans, 1, self.sizes);
        let (mut found, mut partials) = (self.nothing_found(), self.room_for(&apart));
        let depth = self.depth();
        let shared_bytes =
            FEW_STAGES * 2 * TILE * depth * 2 + FEW_ROWS * depth * 2 + FEW_ROWS * TILE * 2;
        let item_count = [apart.items.len() as u32];
        let arguments = self.arguments(&mut found).list(&apart.items).list(&item_count);
        let block = Block::new(128, shared_bytes);
        self.kernels.launch("attend_few", blocks, block, arguments.out(&mut partials));
        self.join(&apart, &partials, &mut found, blocks);
        found
    }

    fn launch_attend(&self, items: &[[u32; 8]], found: &mut [u16], partials: &mut [f32]) {
        let depth = self.depth();
        let shared_bytes = STAGES * 2 * TILE * depth * 2 + ROWS * depth * 2 + ROWS * depth * 4;
        let arguments = self.arguments(found).list(items).out(partials);
        let block = Block::new(256, shared_bytes);
        self.kernels.launch("attend", items.len() * self.sizes.kv_heads, block, arguments);
    }

    fn room_for(&self, apart: &Apart) -> Vec<f32> {
        let rows = apart.units as usize * self.sizes.kv_heads * FEW_ROWS;
        vec![f32::NAN; rows * (self.depth() + 2)]
    }

    fn join(&self, apart: &Apart, partials: &[f32], found: &mut [u16], blocks: usize) {
        let arguments = Arguments::default().list(partials).list(&apart.segments);
        let arguments = arguments.list(&apart.counts).out(found);
        self.kernels.launch("join", blocks, Block::of(JOIN_THREADS), arguments);
    }

    /// Computes the expected result of a query.
    fn expected(&self, span: &Span, token: usize, head: usize) -> Vec<f64> {
        let (dim, kv_head) = (self.sizes.head_dim, head / self.sizes.group);
        let numbers =
            |from: &[u16]| -> Vec<f32> { from[..dim].iter().map(|it| wide(*it)).collect() };
        let query = numbers(&self.qkv[self.query_place(span.first_token + token, head)..]);
        let kv = |key, is_value| numbers(&self.kv[self.place(span.row, key, kv_head, is_value)..]);
        let scores: Vec<f64> = (0..=span.position + token)
            .map(|key| {
                let products: f32 = query.iter().zip(kv(key, false)).map(|(a, b)| a * b).sum();
                f64::from(products) / (dim as f64).sqrt()
            })
            .collect();
        let highest = scores.iter().copied().fold(f64::MIN, f64::max);
        let total: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
        let mut found = vec![0.0; dim];
        for (key, score) in scores.iter().enumerate() {
            let weight = (score - highest).exp() / total;
            // The total of smaller weights is below the tolerance.
            if weight > 1e-8 {
                found
                    .iter_mut()
                    .zip(kv(key, true))
                    .for_each(|(sum, value)| *sum += weight * f64::from(value));
            }
        }
        found
    }

    /// Checks the results of some tokens of a span, for all heads.
    fn check(&self, found: &[u16], span: &Span, tokens: impl Iterator<Item = usize>) {
        let dim = self.sizes.head_dim;
        for token in tokens {
            for head in 0..self.sizes.kv_heads * self.sizes.group {
                let at = (span.first_token + token) * self.sizes.queries() + head * dim;
                let expected = self.expected(span, token, head);
                for (&found, expected) in found[at..][..dim].iter().zip(expected) {
                    let found = f64::from(wide(found));
                    let sizes = self.sizes;
                    // Weights and results are rounded to eight bits.
                    assert!(
                        (found - expected).abs() < 0.006,
                        "{found}, not {expected}: head {head} of token {token} of {span:?}, {sizes:?}"
                    );
                }
            }
        }
    }

    /// Asserts that results are equal to the bit, and lists the tokens that differ.
    fn assert_same(&self, one: &[u16], other: &[u16], spans: &[Span]) {
        let width = self.sizes.queries();
        for span in spans {
            for token in span.first_token..span.first_token + span.tokens {
                let of = |found: &[u16]| found[token * width..][..width].to_vec();
                assert!(
                    of(one) == of(other),
                    "token {token} of the batch, of {span:?}, {:?}",
                    self.sizes
                );
            }
        }
    }
}

/// Divides spans into parts of at most `tokens_max` tokens.
fn parts_of(spans: &[Span], tokens_max: usize) -> Vec<Span> {
    let mut parts = Vec::new();
    for span in spans {
        for first in (0..span.tokens).step_by(tokens_max) {
            let end = span.tokens.min(first + tokens_max);
            parts.push(Span { tokens: end, ..*span }.last(end - first));
        }
    }
    parts
}

/// Items of one segment each, and the inputs of `join`.
struct Apart {
    items: Vec<[u32; 8]>,
    segments: Vec<[u32; 8]>,
    counts: [u32; 2],
    /// Units of space that they take.
    units: u32,
}

impl Apart {
    /// Creates items with `units_each` units of space for each segment.
    fn new(spans: &[Span], units_each: u32, sizes: Sizes) -> Self {
        let (group, keys_each) = (sizes.group, sizes.segment);
        let (mut items, mut segments, mut units) = (Vec::new(), Vec::new(), 0);
        for span in spans {
            let count = span.end().div_ceil(keys_each);
            for segment in 0..count {
                let keys = segment * keys_each..span.end().min((segment + 1) * keys_each);
                let partial = units + segment as u32 * units_each;
                items.push(span.item(keys, if count > 1 { partial } else { WHOLE }));
            }
            if count > 1 {
                let [first_token, tokens, count] =
                    [span.first_token, span.tokens, count].map(|number| number as u32);
                segments.push([first_token, tokens, units, count, units_each, 0, 0, 0]);
                units += count * units_each;
            }
        }
        // The order of computation must not matter.
        items.reverse();
        let tokens_most = segments.iter().map(|it| it[1]).max().unwrap_or(0);
        let counts = [segments.len() as u32, tokens_most * group as u32];
        Self { items, segments, counts, units }
    }
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn attention_over_chunks_matches_the_definition() {
    with_all_sizes(|kernels| {
        // From the beginning, and behind prefixes that end within a tile; more tokens than an item
        // has.
        let spans = [(0, 1), (0, 3), (0, 150), (7, 1), (63, 2), (64, 70), (130, 60)];
        let scene = Scene::new(kernels, &spans);
        let most = ROWS / kernels.sizes.group;
        let found = scene.attend(&scene.spans, most);
        for span in &scene.spans {
            let is_looked_at = |token: &usize| token.is_multiple_of(7) || token + 2 > span.tokens;
            scene.check(&found, span, (0..span.tokens).filter(is_looked_at));
        }
        // The rest of an item must not matter.
        let others = scene.attend(&scene.spans, most.div_ceil(3));
        scene.assert_same(&found, &others, &scene.spans);
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn separate_segments_give_the_same_bits() {
    with_all_sizes(|kernels| {
        let most = ROWS / kernels.sizes.group;
        let scene = Scene::new(kernels, &[(0, 20), (1_010, 40), (2_030, most + 3), (2_500, 9)]);
        let found = scene.attend(&scene.spans, most);
        scene.assert_same(&scene.attend_apart(&scene.spans, most), &found, &scene.spans);
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn attend_few_equals_attend_to_the_bit() {
    with_all_sizes(|kernels| {
        let few = FEW_ROWS / kernels.sizes.group;
        let ends = [
            (0, 1),
            (0, 2),
            (1, 1),
            (14, 3),
            (62, 4),
            (64, 1),
            (127, 2),
            (128, 16),
            (500, 1),
            (1_020, 5),
            (1_022, 1),
            (1_023, 1),
            (1_024, 1),
            (1_087, 2),
            (2_046, 4),
            (2_599, 1),
        ];
        let ends = ends.map(|(position, tokens)| (position, few.min(tokens)));
        let scene = Scene::new(kernels, &ends);
        let (few, many) = (scene.attend_few(&scene.spans, 5), scene.attend(&scene.spans, 16));
        scene.assert_same(&few, &many, &scene.spans);
        for span in &scene.spans {
            scene.check(&few, span, span.tokens - 1..span.tokens);
        }
    });
}

/// `join` keeps the results of eight segments in flight.
#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn many_segments_give_the_same_bits() {
    with_some_sizes(|kernels| {
        let keys = kernels.sizes.segment;
        let scene = Scene::new(kernels, &[(8 * keys - 1, 1), (8 * keys, 1), (17 * keys, 2)]);
        let (few, many) = (scene.attend_few(&scene.spans, 5), scene.attend(&scene.spans, 16));
        scene.assert_same(&few, &many, &scene.spans);
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn last_queries_of_a_chunk_give_the_same_bits_alone() {
    with_all_sizes(|kernels| {
        let group = kernels.sizes.group;
        let scene = Scene::new(kernels, &[(1_000, ROWS / group), (2_040, ROWS / group - 1)]);
        let many = scene.attend(&scene.spans, ROWS / group);
        for last in [1, FEW_ROWS / group] {
            let spans: Vec<Span> = scene.spans.iter().map(|span| span.last(last)).collect();
            scene.assert_same(&scene.attend_few(&spans, 3), &many, &spans);
        }
    });
}

/// A difference in the last bit of a sum shows in about one of ten thousand numbers, so there are
/// many.
#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn many_queries_give_the_same_bits_alone() {
    with_sizes(1..3, |kernels| {
        let (most, few) = (ROWS / kernels.sizes.group, FEW_ROWS / kernels.sizes.group);
        let scene = Scene::new(kernels, &[(20, 12 * most), (1_040, 6 * most)]);
        let apart: Vec<Span> = scene
            .spans
            .iter()
            .flat_map(|span| {
                let ends = (few..=span.tokens).step_by(few);
                ends.map(|end| Span { tokens: end, ..*span }.last(few))
            })
            .collect();
        let many = scene.attend(&scene.spans, most);
        scene.assert_same(&scene.attend_few(&apart, 7), &many, &apart);
    });
}
