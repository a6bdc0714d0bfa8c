//! Computations for each token separately.

use crate::library::{Arguments, Block, Kernels};
use crate::numbers::{Noise, assert_near, narrow, rounded, wide};
use crate::{with_all_sizes, with_some_sizes};

/// A token of a step, as kernels read it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
struct Token {
    token: u32,
    position: u32,
    place: u32,
    unused: u32,
}

const NOWHERE: u32 = u32::MAX;

/// Distance of two adjacent bf16 numbers near one.
const NEIGHBOURS: f32 = 1.0 / 128.0;

fn token(token: u32) -> Token {
    Token { token, position: 0, place: NOWHERE, unused: 0 }
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn embeds_tokens() {
    with_all_sizes(|kernels| {
        let (dim, vocabulary) = (kernels.sizes.dim, 7);
        let embeddings = Noise::new(1).narrow(vocabulary * dim, 1.0);
        let tokens = [3, 0, 6, 3, 1];
        let mut x = vec![0; tokens.len() * dim];
        let arguments = Arguments::default().list(&embeddings);
        let listed = tokens.map(token);
        kernels.launch("embed", tokens.len(), Block::of(128), arguments.list(&listed).out(&mut x));
        for (row, token) in x.chunks(dim).zip(tokens) {
            assert!(row == &embeddings[token as usize * dim..][..dim], "token {token}");
        }
    });
}

/// Computes the norm of some numbers, times weights.
fn norm(numbers: &[f32], weights: &[u16], epsilon: f32) -> Vec<f32> {
    let squares: f64 = numbers.iter().map(|&it| f64::from(it).powi(2)).sum();
    let factor = (squares / numbers.len() as f64 + f64::from(epsilon)).sqrt().recip() as f32;
    numbers.iter().zip(weights).map(|(&it, &weight)| rounded(it * factor) * wide(weight)).collect()
}

fn check_norm(kernels: &Kernels<'_>, has_added: bool, rows: Option<&[u32]>) {
    const TOKENS: usize = 5;
    let dim = kernels.sizes.dim;
    let mut noise = Noise::new(dim as u64);
    let before = noise.narrow(TOKENS * dim, 3.0);
    let added = has_added.then(|| noise.narrow(TOKENS * dim, 2.0));
    let weights = noise.narrow(dim, 1.5);
    let (mut x, out_rows) = (before.clone(), rows.map_or(TOKENS, <[u32]>::len));
    let (mut out, epsilon) = (vec![0; out_rows * dim], 0.01);
    let arguments =
        Arguments::default().out(&mut x).list_if(added.as_deref()).list(&weights).out(&mut out);
    kernels.launch("add_norm", out_rows, Block::of(256), arguments.list_if(rows).float(epsilon));

    let all: Vec<u32> = (0..TOKENS as u32).collect();
    let rows = rows.unwrap_or(&all);
    for token in 0..TOKENS {
        let of = |list: &[u16]| list[token * dim..][..dim].to_vec();
        let sums = |(a, b): (&u16, &u16)| narrow(wide(*a) + wide(*b));
        let expected = match &added {
            Some(added) if rows.contains(&(token as u32)) => {
                of(&before).iter().zip(&of(added)).map(sums).collect()
            }
            Some(_) | None => of(&before),
        };
        assert!(of(&x) == expected, "the sum of token {token}");
    }
    for (row, &token) in rows.iter().enumerate() {
        let numbers: Vec<f32> =
            x[token as usize * dim..][..dim].iter().map(|it| wide(*it)).collect();
        let expected = norm(&numbers, &weights, epsilon);
        assert_near(&out[row * dim..][..dim], &expected, NEIGHBOURS, "a norm");
    }
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn normalises_after_adding() {
    with_all_sizes(|kernels| {
        for has_added in [false, true] {
            check_norm(kernels, has_added, None);
            check_norm(kernels, has_added, Some(&[4, 0, 2]));
        }
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn applies_gates() {
    with_some_sizes(|kernels| {
        let (tokens, hidden) = (3, 8 * 100);
        let gate_up = Noise::new(4).narrow(tokens * 2 * hidden, 6.0);
        let mut gated = vec![0; tokens * hidden];
        let count = tokens * hidden / 8;
        let arguments =
            Arguments::default().list(&gate_up).out(&mut gated).number(hidden).number(count);
        kernels.launch("gate", count.div_ceil(256), Block::of(256), arguments);
        for token in 0..tokens {
            let (gates, values) = gate_up[token * 2 * hidden..][..2 * hidden].split_at(hidden);
            let through = |(gate, value): (&u16, &u16)| {
                let gate = f64::from(wide(*gate));
                rounded((gate / (1.0 + (-gate).exp())) as f32) * wide(*value)
            };
            let expected: Vec<f32> = gates.iter().zip(values).map(through).collect();
            assert_near(&gated[token * hidden..][..hidden], &expected, NEIGHBOURS, "what is gated");
        }
    });
}

/// Rotates the pairs of a head: element i with the one half a head further on.
fn turn(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let half = head.len() / 2;
    for at in 0..half {
        let (a, b) = (head[at], head[at + half]);
        head[at] = a * cosines[at] - b * sines[at];
        head[at + half] = b * cosines[at] + a * sines[at];
    }
}

fn check_turning(kernels: &Kernels<'_>, has_bias: bool) {
    const PAGES: usize = 9;
    const POSITIONS: usize = 50;
    const LAYERS: usize = 3;
    const LAYER: usize = 1;
    /// Content of places that must not be written.
    const UNTOUCHED: u16 = 0x1234;
    let sizes = kernels.sizes;
    let (dim, half, page_size) = (sizes.head_dim, sizes.head_dim / 2, sizes.page_size);
    let mut noise = Noise::new(dim as u64);
    let places = noise.shuffled(PAGES * page_size);
    let tokens: Vec<Token> = (0..7)
        .map(|at| Token {
            token: 0,
            position: noise.below(POSITIONS) as u32,
            place: if at == 2 { NOWHERE } else { places[at] },
            unused: 0,
        })
        .collect();
    let before = noise.narrow(tokens.len() * sizes.qkv(), 2.0);
    let bias = has_bias.then(|| noise.narrow(sizes.qkv(), 1.0));
    let (cosines, sines): (Vec<f32>, Vec<f32>) = (0..POSITIONS * half)
        .map(|at| {
            let angle = (at / half) as f32 * 0.7_f32.powi((at % half) as i32 + 1);
            (angle.cos(), angle.sin())
        })
        .unzip();
    let page_bytes = LAYERS * sizes.layer() * 2;
    let mut kv = vec![UNTOUCHED; PAGES * page_bytes / 2];
    let mut qkv = before.clone();
    let arguments = Arguments::default()
        .out(&mut qkv)
        .list_if(bias.as_deref())
        .list(&tokens)
        .list(&cosines)
        .list(&sines)
        .out(&mut kv)
        .number(page_bytes)
        .number(LAYER * sizes.layer() * 2)
        .number(tokens.len());
    let threads = tokens.len() * sizes.qkv() / 4;
    kernels.launch("turn_and_keep", threads.div_ceil(256), Block::of(256), arguments);

    let mut written = 0;
    for (token, at) in tokens.iter().zip(0..) {
        for head in 0..sizes.kv_heads * (sizes.group + 2) {
            let from = at * sizes.qkv() + head * dim;
            let bias =
                |element: usize| bias.as_ref().map_or(0.0, |bias| wide(bias[head * dim + element]));
            let mut expected: Vec<f32> = (0..dim)
                .map(|element| rounded(wide(before[from + element]) + bias(element)))
                .collect();
            let angles = token.position as usize * half..(token.position as usize + 1) * half;
            let (kind, kv_head) = match head.checked_sub(sizes.kv_heads * sizes.group) {
                None => (0, 0),
                Some(head) => (1 + head / sizes.kv_heads, head % sizes.kv_heads),
            };
            if kind < 2 {
                turn(&mut expected, &cosines[angles.clone()], &sines[angles]);
            }
            let found = match (kind, token.place) {
                (0, _) => &qkv[from..][..dim],
                (_, NOWHERE) => continue,
                (_, place) => {
                    written += dim;
                    let (page, within) = (place as usize / page_size, place as usize % page_size);
                    let layer = (page * LAYERS + LAYER) * sizes.layer();
                    &kv[layer + sizes.place(kv_head, kind == 2, within)..][..dim]
                }
            };
            assert_near(found, &expected, NEIGHBOURS, "a query, key or value");
        }
    }
    let touched = kv.iter().filter(|it| **it != UNTOUCHED).count();
    assert!(touched <= written, "{touched} numbers in pages were written, and {written} should be");
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn rotates_and_stores_keys_in_pages() {
    with_all_sizes(|kernels| {
        check_turning(kernels, false);
        check_turning(kernels, true);
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn applies_table_changes_and_awaited_tokens() {
    with_some_sizes(|kernels| {
        const WIDTH: usize = 400;
        let mut table: Vec<u32> = vec![7; 3 * WIDTH];
        let pages: Vec<u32> = (1_000..1_500).collect();
        // Row, first entry, start of its pages, and their number.
        let changes: [[u32; 4]; 4] =
            [[2, 0, 0, 400], [0, 5, 400, 1], [0, 6, 402, 90], [1, 399, 499, 1]];
        let mut tokens: Vec<Token> = (0..600).map(token).collect();
        // Place of the token, and the output that has chosen it.
        let awaited: Vec<[u32; 2]> = (0..290).map(|at| [at * 2 + 1, 299 - at]).collect();
        let chosen: Vec<u32> = (0..300).map(|output| 90_000 + output).collect();
        let (mut expected_table, mut expected_tokens) = (table.clone(), tokens.clone());
        for [row, first, from, count] in changes {
            for page in 0..count {
                expected_table[row as usize * WIDTH + (first + page) as usize] =
                    1_000 + from + page;
            }
        }
        for [token, output] in &awaited {
            expected_tokens[*token as usize].token = 90_000 + output;
        }
        let arguments = Arguments::default()
            .out(&mut table)
            .number(WIDTH)
            .list(&changes)
            .number(changes.len())
            .list(&pages)
            .out(&mut tokens)
            .list(&awaited)
            .number(awaited.len())
            .list(&chosen);
        kernels.launch("take_in", 3, Block::of(64), arguments);
        assert!(table == expected_table, "the table");
        assert!(tokens == expected_tokens, "the tokens");
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn random_weights_have_the_requested_scale() {
    with_some_sizes(|kernels| {
        let mut numbers = vec![narrow(9.0); 10_001];
        let (filled, last) = numbers.split_at_mut(10_000);
        let arguments = Arguments::default().out(filled).number(10_000).number(5).float(0.5);
        kernels.launch("fill", 4, Block::of(256), arguments);
        let mean = filled.iter().map(|it| wide(*it)).sum::<f32>() / 10_000.0;
        let spread = (filled.iter().map(|it| wide(*it).powi(2)).sum::<f32>() / 10_000.0).sqrt();
        assert!(mean.abs() < 0.02 && (spread - 0.5).abs() < 0.02, "mean {mean}, spread {spread}");
        assert_eq!(last, [narrow(9.0)]);
        let arguments = Arguments::default().out(filled).number(9_999).float(1.0);
        kernels.launch("fill_with", 4, Block::of(256), arguments);
        assert!(filled[..9_999].iter().all(|it| *it == narrow(1.0)));
        assert_ne!(filled[9_999], narrow(1.0));
    });
}
