//! Attention over pages.
//!
//! Keys are visited in tiles that begin at multiples of [`TILE`] positions, from the first position on.
//! The sum of a query is therefore the same wherever its span begins or ends.

use std::mem;

use parking_lot::Mutex;
use rayon::prelude::*;
use terrace_engine::{Span, Step, StepPages};

use crate::math::{LANES, Running, soften};
use crate::product::{Before, Operand, Output, multiply};
use crate::shape::Shape;

/// Keys that are handled together.
const TILE: usize = 256;
/// Queries of one job, so that their scores stay in the second-level cache.
const JOB_QUERIES: usize = 256;

/// Computes attention. Keeps its buffers from step to step.
#[derive(Debug)]
pub(crate) struct Attention {
    jobs: Vec<Job>,
    /// Results of the jobs: `[job][token][element]`.
    found: Vec<f32>,
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
    pub(crate) fn new(shape: &Shape, threads: usize) -> Self {
        let scratch = (0..threads).map(|_| Mutex::new(Scratch::new(shape))).collect();
        Self { jobs: Vec::new(), found: Vec::new(), scratch }
    }

    /// Cuts a step into jobs, which every layer repeats.
    pub(crate) fn prepare(&mut self, shape: &Shape, step: &Step<'_>) {
        self.jobs.clear();
        let tokens_max = job_tokens(shape);
        for (index, span) in step.spans.iter().enumerate() {
            // The last tokens have the longest way back, so they go first.
            for first in (0..span.tokens.len()).step_by(tokens_max).rev() {
                let tokens = tokens_max.min(span.tokens.len() - first);
                let jobs =
                    (0..shape.kv_heads).map(|kv_head| Job { span: index, kv_head, first, tokens });
                self.jobs.extend(jobs);
            }
        }
        self.found.resize(step.tokens.len() * shape.queries(), 0.0);
    }

    /// Computes a layer, in the current pool: `qkv` has the queries of all tokens, and `out` gets what
    /// their heads found. Keys and values come from the pages.
    pub(crate) fn layer(
        &mut self,
        shape: &Shape,
        layer: usize,
        step: &Step<'_>,
        pages: &StepPages<'_>,
        qkv: &[f32],
        out: &mut [f32],
    ) {
        let width = shape.group() * shape.head_dim;
        let mut rest = &mut self.found[..];
        let jobs: Vec<(&Job, &mut [f32])> = self
            .jobs
            .iter()
            .map(|job| {
                let (found, others) = mem::take(&mut rest).split_at_mut(job.tokens * width);
                rest = others;
                (job, found)
            })
            .collect();
        jobs.into_par_iter().with_max_len(1).for_each(|(job, found)| {
            let thread = rayon::current_thread_index().expect("attention runs in the model's pool");
            let scratch = &mut *self.scratch[thread].lock();
            let span = &step.spans[job.span];
            scratch.attend(&View { shape, layer, step, pages, span }, job, qkv, found);
        });

        let mut found = self.found.chunks_exact(width);
        for job in &self.jobs {
            let first = step.spans[job.span].tokens.start + job.first;
            for (row, found) in (first..first + job.tokens).zip(&mut found) {
                out[row * shape.queries() + job.kv_head * width..][..width].copy_from_slice(found);
            }
        }
    }
}

/// The data that a job reads.
struct View<'a> {
    shape: &'a Shape,
    layer: usize,
    step: &'a Step<'a>,
    pages: &'a StepPages<'a>,
    span: &'a Span,
}

/// The memory of one thread. Queries are in the order of tokens, and of heads for each token.
#[derive(Debug)]
struct Scratch {
    /// `[query][element]`, scaled.
    queries: Vec<f32>,
    /// `[key][element]`.
    keys: Vec<f32>,
    /// `[key][element]`.
    values: Vec<f32>,
    /// `[query][key]`.
    scores: Vec<f32>,
    running: Vec<Running>,
}

impl Scratch {
    fn new(shape: &Shape) -> Self {
        let queries = job_tokens(shape) * shape.group();
        Self {
            queries: vec![0.0; queries * shape.head_dim],
            keys: vec![0.0; TILE * shape.head_dim],
            values: vec![0.0; TILE * shape.head_dim],
            scores: vec![0.0; queries * TILE],
            running: vec![Running::START; queries],
        }
    }

    fn attend(&mut self, view: &View<'_>, job: &Job, qkv: &[f32], found: &mut [f32]) {
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
        found.fill(0.0);
        self.running[..queries].fill(Running::START);

        let start = view.span.start as usize + job.first;
        let end = start + job.tokens;
        for tile_start in (0..end).step_by(TILE) {
            let keys = TILE.min(end - tile_start);
            self.gather(view, job.kv_head, tile_start, keys);
            // Queries before the tile see nothing of it.
            let first = tile_start.saturating_sub(start) * group;
            self.visit(first..queries, head_dim, keys, found, |query| {
                (start + query / group + 1 - tile_start).min(keys)
            });
        }
        for (found, running) in found.chunks_exact_mut(head_dim).zip(&self.running) {
            let share = 1.0 / running.sum;
            found.iter_mut().for_each(|element| *element *= share);
        }
    }

    /// Copies the keys and values of a tile from their pages. What lies behind the last key has never
    /// been written and is not looked at.
    fn gather(&mut self, view: &View<'_>, kv_head: usize, tile_start: usize, keys: usize) {
        let page_size = view.step.table.page_size() as usize;
        let head_dim = view.shape.head_dim;
        let keys_at = ((view.layer * view.shape.kv_heads) + kv_head) * 2 * page_size * head_dim;
        let row = view.step.pages_of(view.span);
        let mut key = 0;
        while key < keys {
            let (page, within) = ((tile_start + key) / page_size, (tile_start + key) % page_size);
            let count = (page_size - within).min(keys - key);
            let part = keys_at..keys_at + 2 * page_size * head_dim;
            let page = view.pages.read_part(row[page], part);
            let (page_keys, page_values) = page.split_at(page_size * head_dim);
            let from = within * head_dim..(within + count) * head_dim;
            let to = key * head_dim..(key + count) * head_dim;
            self.keys[to.clone()].copy_from_slice(&page_keys[from.clone()]);
            self.values[to].copy_from_slice(&page_values[from]);
            key += count;
        }
    }

    /// Applies the gathered tile to some queries.
    fn visit(
        &mut self,
        queries: std::ops::Range<usize>,
        head_dim: usize,
        keys: usize,
        found: &mut [f32],
        visible: impl Fn(usize) -> usize,
    ) {
        let count = queries.len();
        let from = &self.queries[queries.start * head_dim..queries.end * head_dim];
        let from = Operand::new(from, count, head_dim, head_dim);
        let tile_keys = Operand::new(&self.keys, keys, head_dim, head_dim).transposed();
        let scores = Output::new(&mut self.scores, count, keys, TILE);
        multiply(from, tile_keys, Before::Replaced, scores);

        let found = &mut found[queries.start * head_dim..queries.end * head_dim];
        let scores = self.scores.chunks_exact_mut(TILE);
        let rows = scores.zip(&mut self.running[queries.clone()]).zip(queries);
        for (((scores, running), query), found) in rows.zip(found.chunks_exact_mut(head_dim)) {
            soften(&mut scores[..keys.next_multiple_of(LANES)], visible(query), running);
            // Adding zero makes negative zeros positive: whether zeros are added to them after that
            // cannot be seen.
            found.iter_mut().for_each(|sum| *sum = *sum * running.correction + 0.0);
        }

        let weights = Operand::new(&self.scores, count, keys, TILE);
        let tile_values = Operand::new(&self.values, keys, head_dim, head_dim);
        multiply(
            weights,
            tile_values,
            Before::Added,
            Output::new(found, count, head_dim, head_dim),
        );
    }
}

fn job_tokens(shape: &Shape) -> usize {
    (JOB_QUERIES / shape.group()).max(1)
}
