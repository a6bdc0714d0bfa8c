//! Attention over pages.
//!
//! Keys are visited in tiles that begin at multiples of [`TILE`] positions, from the first position on.
//! What a query sums up is so always the same, wherever its span begins or ends.

#![allow(unsafe_code)]

use parking_lot::Mutex;
use rayon::prelude::*;
use terrace_engine::{Batch, Span, StepPages};

use crate::math::{Running, rescale_and_add, soften};
use crate::shape::Shape;
use crate::simd::{LANES, Lanes, SharedRows, Simd, multiply_panels};

/// Keys that are handled together.
const TILE: usize = 256;
/// Queries that are handled together, so that their scores stay in the second-level cache.
const QUERIES: usize = 64;
/// Queries of one job.
const JOB_QUERIES: usize = 256;

/// Computes attention. Keeps what it needs for that from step to step.
#[derive(Debug)]
pub(crate) struct Attention {
    simd: Simd,
    jobs: Vec<Job>,
    /// For each thread of the pool.
    scratch: Vec<Mutex<Scratch>>,
}

/// Consecutive tokens of a span, for one KV head.
#[derive(Clone, Debug)]
struct Job {
    span: usize,
    kv_head: usize,
    /// The first token, counted in the span.
    first: usize,
    tokens: usize,
}

impl Attention {
    pub(crate) fn new(simd: Simd, shape: &Shape, threads: usize) -> Self {
        let scratch = (0..threads).map(|_| Mutex::new(Scratch::new(shape))).collect();
        Self { simd, jobs: Vec::new(), scratch }
    }

    /// Cuts a step into jobs, to be done in every layer.
    pub(crate) fn prepare(&mut self, shape: &Shape, batch: &Batch<'_>) {
        self.jobs.clear();
        let tokens_max = job_tokens(shape);
        for (index, span) in batch.spans.iter().enumerate() {
            // The last tokens have the longest way back, so they go first.
            for first in (0..span.tokens.len()).step_by(tokens_max).rev() {
                let tokens = tokens_max.min(span.tokens.len() - first);
                let jobs =
                    (0..shape.kv_heads).map(|kv_head| Job { span: index, kv_head, first, tokens });
                self.jobs.extend(jobs);
            }
        }
    }

    /// Computes a layer, in the current pool: `qkv` has the queries of all tokens, and `out` gets what
    /// their heads found. Keys and values come from the pages.
    pub(crate) fn layer(
        &self,
        shape: &Shape,
        layer: usize,
        batch: &Batch<'_>,
        pages: &StepPages<'_>,
        qkv: &[f32],
        out: &mut [f32],
    ) {
        let out = SharedRows::new(out, shape.queries());
        self.jobs.par_iter().with_max_len(1).for_each(|job| {
            let thread = rayon::current_thread_index().expect("attention runs in the model's pool");
            let scratch = &mut *self.scratch[thread].lock();
            let span = &batch.spans[job.span];
            let view = View { simd: self.simd, shape, layer, batch, pages, span };
            scratch.attend(&view, job, qkv);
            let width = shape.group() * shape.head_dim;
            for (token, sums) in scratch.out.chunks_exact(width).take(job.tokens).enumerate() {
                let row = view.span.tokens.start + job.first + token;
                // SAFETY: each job has its own rows and heads.
                let out = unsafe { out.part(row, job.kv_head * width, width) };
                out.copy_from_slice(sums);
            }
        });
    }
}

/// What a job looks at.
struct View<'a> {
    simd: Simd,
    shape: &'a Shape,
    layer: usize,
    batch: &'a Batch<'a>,
    pages: &'a StepPages<'a>,
    span: &'a Span,
}

/// The memory of one thread. Queries are in the order of tokens, and of heads for each token.
#[derive(Debug)]
struct Scratch {
    /// `[query][element]`, scaled.
    queries: Vec<f32>,
    /// `[key / LANES][element]`.
    keys: Vec<Lanes>,
    /// `[element / LANES][key]`.
    values: Vec<Lanes>,
    /// `[query][key]`.
    scores: Vec<f32>,
    /// `[query][element, filled up]`, of one tile.
    tile: Vec<f32>,
    /// `[query][element]`, of all tiles.
    out: Vec<f32>,
    running: Vec<Running>,
}

impl Scratch {
    fn new(shape: &Shape) -> Self {
        let queries = job_tokens(shape) * shape.group();
        let padded = shape.head_dim.next_multiple_of(LANES);
        Self {
            queries: vec![0.0; queries * shape.head_dim],
            keys: vec![Lanes::ZERO; TILE / LANES * shape.head_dim],
            values: vec![Lanes::ZERO; padded / LANES * TILE],
            scores: vec![0.0; QUERIES * TILE],
            tile: vec![0.0; QUERIES * padded],
            out: vec![0.0; queries * shape.head_dim],
            running: vec![Running::START; queries],
        }
    }

    fn attend(&mut self, view: &View<'_>, job: &Job, qkv: &[f32]) {
        let (group, head_dim) = (view.shape.group(), view.shape.head_dim);
        let (width, queries) = (group * head_dim, job.tokens * group);
        let scale = 1.0 / (head_dim as f32).sqrt();
        for (token, to) in self.queries.chunks_exact_mut(width).take(job.tokens).enumerate() {
            let row = view.span.tokens.start + job.first + token;
            let from = &qkv[row * view.shape.qkv() + job.kv_head * width..][..width];
            for (to, from) in to.iter_mut().zip(from) {
                *to = from * scale;
            }
        }
        self.out[..queries * head_dim].fill(0.0);
        self.running[..queries].fill(Running::START);

        let start = view.span.start as usize + job.first;
        let end = start + job.tokens;
        for tile_start in (0..end).step_by(TILE) {
            let keys = TILE.min(end - tile_start);
            self.gather(view, job.kv_head, tile_start, keys);
            // Queries before the tile see nothing of it.
            let first_query = tile_start.saturating_sub(start) * group;
            for first in (first_query..queries).step_by(QUERIES) {
                let count = QUERIES.min(queries - first);
                self.visit(view, first..first + count, keys, |query| {
                    (start + query / group + 1 - tile_start).min(keys)
                });
            }
        }
        let sums = self.out.chunks_exact_mut(head_dim).zip(&self.running).take(queries);
        for (out, running) in sums {
            let share = 1.0 / running.sum;
            out.iter_mut().for_each(|element| *element *= share);
        }
    }

    /// Copies the keys and values of a tile from their pages, in the order in which they are
    /// multiplied. What lies behind the last key has never been written and is not looked at.
    fn gather(&mut self, view: &View<'_>, kv_head: usize, tile_start: usize, keys: usize) {
        let page_size = view.batch.table.page_size() as usize;
        let head_dim = view.shape.head_dim;
        let keys_at = ((view.layer * view.shape.kv_heads) + kv_head) * 2 * page_size * head_dim;
        let row = view.batch.pages_of(view.span);
        if !keys.is_multiple_of(LANES) {
            self.keys[keys / LANES * head_dim..][..head_dim].fill(Lanes::ZERO);
        }
        let mut key = 0;
        while key < keys {
            let (page, within) = ((tile_start + key) / page_size, (tile_start + key) % page_size);
            let count = (page_size - within).min(keys - key);
            let page = &view.pages.read(row[page])[keys_at..][..2 * page_size * head_dim];
            let (page_keys, page_values) = page.split_at(page_size * head_dim);
            let part = within * head_dim..(within + count) * head_dim;
            let page_keys = page_keys[part.clone()].chunks_exact(head_dim);
            let page_values = page_values[part].chunks_exact(head_dim);
            for (from_key, from_value) in page_keys.zip(page_values) {
                let panel = &mut self.keys[key / LANES * head_dim..][..head_dim];
                for (to, from) in panel.iter_mut().zip(from_key) {
                    to.0[key % LANES] = *from;
                }
                let (whole, rest) = from_value.as_chunks();
                for (panel, from) in whole.iter().enumerate() {
                    self.values[panel * keys + key] = Lanes(*from);
                }
                if !rest.is_empty() {
                    self.values[whole.len() * keys + key].0[..rest.len()].copy_from_slice(rest);
                }
                key += 1;
            }
        }
    }

    /// Lets some queries look at the gathered tile.
    fn visit(
        &mut self,
        view: &View<'_>,
        queries: std::ops::Range<usize>,
        keys: usize,
        visible: impl Fn(usize) -> usize,
    ) {
        let (simd, head_dim) = (view.simd, view.shape.head_dim);
        let (panels, width) = (keys.div_ceil(LANES), keys.next_multiple_of(LANES));
        let padded = head_dim.next_multiple_of(LANES);
        let scores = &mut self.scores[..queries.len() * width];
        let from = &self.queries[queries.start * head_dim..queries.end * head_dim];
        multiply_panels(simd, from, head_dim, &self.keys[..panels * head_dim], head_dim, scores);
        for (query, scores) in queries.clone().zip(scores.chunks_exact_mut(width)) {
            soften(simd, scores, visible(query), &mut self.running[query]);
        }
        let tile = &mut self.tile[..queries.len() * padded];
        let values = &self.values[..padded / LANES * keys];
        multiply_panels(simd, scores, width, values, keys, tile);
        for (query, tile) in queries.zip(tile.chunks_exact(padded)) {
            let out = &mut self.out[query * head_dim..][..head_dim];
            rescale_and_add(simd, out, self.running[query].correction, tile);
        }
    }
}

fn job_tokens(shape: &Shape) -> usize {
    (JOB_QUERIES / shape.group()).max(1)
}
