//! Hopper's products of few rows.

use crate::library::{Arguments, Block, Kernels, TILES};
use crate::numbers::{Noise, narrow, wide};
use crate::{Statement, assert_missed, with_some_hopper_sizes};

/// Must match the kernels and the model's launches.
const SHARERS: usize = 2;
const ROWS_MAX: usize = 64;
const BLOCK: Block = Block { threads: 192, shared_bytes: 216 << 10, cluster: SHARERS };
/// NaN in bf16.
const SPOILT: u16 = 0x7fc0;

/// The form in which sums are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Narrow,
    Wide,
    Gated,
}

/// A matrix and rows; unused rows are NaN.
#[derive(Debug)]
struct Product {
    inputs: usize,
    /// Outputs of the kernel.
    outputs: usize,
    rows: usize,
    outcome: Outcome,
    matrix: Vec<u16>,
    numbers: Vec<u16>,
}

impl Product {
    fn new(inputs: usize, outputs: usize, rows: usize, outcome: Outcome) -> Self {
        let mut noise = Noise::new((inputs + outputs + rows) as u64);
        let of_matrix = if outcome == Outcome::Gated { 2 * outputs } else { outputs };
        let matrix = noise.narrow(of_matrix * inputs, 1.0);
        let mut numbers = noise.narrow(rows * inputs, 1.0);
        numbers.resize(ROWS_MAX * inputs, SPOILT);
        Self { inputs, outputs, rows, outcome, matrix, numbers }
    }

    /// Runs a kernel; returns f32 or bf16, with unwritten places unchanged.
    fn multiply(
        &self,
        kernels: &Kernels<'_>,
        (name, tile): (&str, usize),
        blocks: usize,
    ) -> Result<Vec<f32>, String> {
        let rows_each = [8, 16, 32].into_iter().find(|each| each * SHARERS >= self.rows).unwrap();
        let inputs = self.inputs as u64;
        let count = ROWS_MAX * self.outputs;
        let (mut narrow_out, mut wide_out) = (vec![SPOILT; count], vec![f32::NAN; count]);
        let of_matrix = self.matrix.len() / self.inputs;
        let [of_weights, of_rows] = [of_matrix, ROWS_MAX].map(|rows| [inputs, rows as u64]);
        let [weights_boxed, rows_boxed] = [tile, rows_each].map(|rows| [64, rows as u64]);
        let stride = [inputs * 2];
        let arguments =
            Arguments::default().map(&self.matrix, &of_weights, &stride, &weights_boxed);
        let arguments = arguments.map(&self.numbers, &of_rows, &stride, &rows_boxed);
        let arguments = match self.outcome {
            Outcome::Wide => arguments.out(&mut wide_out),
            Outcome::Narrow | Outcome::Gated => arguments.out(&mut narrow_out),
        };
        let arguments = arguments.number(self.inputs).number(self.outputs);
        let arguments = arguments.number(rows_each).number(self.rows);
        kernels.try_launch(name, blocks, BLOCK, arguments)?;
        let all = match self.outcome {
            Outcome::Wide => wide_out,
            Outcome::Narrow | Outcome::Gated => narrow_out.into_iter().map(wide).collect(),
        };
        let (rows, others) = all.split_at(self.rows * self.outputs);
        assert!(others.iter().all(|it| it.is_nan()), "a row is written that there is not");
        Ok(rows.to_vec())
    }

    /// Computes the expected result: sums in the order of inputs.
    fn expected(&self, kernels: &Kernels<'_>) -> Vec<f32> {
        let of_matrix = self.matrix.len() / self.inputs;
        let mut sums = Vec::new();
        for row in self.numbers.chunks(self.inputs).take(self.rows) {
            for output in self.matrix.chunks(self.inputs) {
                let pairs = row.iter().zip(output);
                sums.push(pairs.fold(0.0, |sum, (a, b)| sum + wide(*a) * wide(*b)));
            }
        }
        let narrow: Vec<u16> = sums.iter().map(|sum| narrow(*sum)).collect();
        match self.outcome {
            Outcome::Wide => sums,
            Outcome::Narrow => narrow.into_iter().map(wide).collect(),
            Outcome::Gated => {
                let mut gated = vec![SPOILT; self.rows * self.outputs];
                let count = gated.len() / 8;
                let arguments = Arguments::default().list(&narrow).out(&mut gated);
                let arguments = arguments.number(of_matrix / 2).number(count);
                kernels.launch("gate", count.div_ceil(256), Block::of(256), arguments);
                gated.into_iter().map(wide).collect()
            }
        }
    }
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn few_row_products_sum_in_input_order() {
    with_some_hopper_sizes(|kernels| {
        let [qkv, out, gated, down, logits] = TILES.map(|(_, tile)| tile);
        let cases = [
            ("few_rows_to_qkv", qkv, 200, Outcome::Narrow),
            ("few_rows_to_out", out, 64, Outcome::Narrow),
            ("few_rows_to_gated", gated, 152, Outcome::Gated),
            ("few_rows_to_down", down, 230, Outcome::Narrow),
            ("few_rows_to_logits", logits, 290, Outcome::Wide),
        ];
        for (name, tile, outputs, outcome) in cases {
            // More parts than buffers, and the smallest number.
            for (inputs, rows) in [(1_152, 5), (128, 64), (256, 17)] {
                let product = Product::new(inputs, outputs, rows, outcome);
                let found = product.multiply(kernels, (name, tile), 2).unwrap();
                let is_same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                let expected = product.expected(kernels);
                let same = found.iter().zip(&expected).filter(|it| is_same(*it)).count();
                assert_eq!(same, found.len(), "{name}, {rows} rows of {inputs}");
            }
        }
    });
}

#[test]
#[ignore = "needs g++: scripts/test-cuda installs it"]
fn few_row_products_need_their_barriers_and_fences() {
    const STATEMENTS: [Statement; 9] = [
        ("", "publish_barriers();"),
        ("", "wait_for_sharers();"),
        ("", "wait_for_place(next);"),
        ("", "arrive_and_expect(barrier, bytes);"),
        ("", "wait(full + place * 8, taken / PLACE_COUNT % 2);"),
        ("", "begin_products();"),
        ("back-to-back products.\n                ", "wait_for_products<0>();"),
        ("", "release(place);"),
        ("", "wait(empty + place * 8, (uses - 1) % 2);"),
    ];
    assert_missed(&STATEMENTS, |kernels| {
        let product = Product::new(1_152, 200, 5, Outcome::Narrow);
        let found = product.multiply(kernels, ("few_rows_to_qkv", TILES[0].1), 2);
        found.is_ok_and(|found| found == product.expected(kernels))
    });
}
