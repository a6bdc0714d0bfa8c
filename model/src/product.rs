//! Products of matrices.
//!
//! The library computes every number of a product as chains of multiplications and additions in the
//! order of the operands, cut at fixed lengths. How many rows and columns are computed together changes
//! none of them, which is what makes a model's results the same to the bit whatever else is in a batch.

#![allow(unsafe_code)]

use std::marker::PhantomData;

/// A matrix in a slice of numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand<'a> {
    numbers: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Operand<'a> {
    /// Rows that begin `stride` numbers after one another.
    pub(crate) fn new(numbers: &'a [f32], rows: usize, columns: usize, stride: usize) -> Self {
        assert!(fits(numbers.len(), rows, columns, stride), "a matrix lies in its numbers");
        Self { numbers, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// The same numbers with rows as columns.
    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// The destination of a product: rows of numbers, or exclusively borrowed columns of them.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    stride: usize,
    lent: PhantomData<&'a mut [f32]>,
}

// SAFETY: it is a mutable borrow of its own numbers, and of no others.
unsafe impl Send for Output<'_> {}

impl<'a> Output<'a> {
    /// Rows that begin `stride` numbers after one another.
    pub(crate) fn new(numbers: &'a mut [f32], rows: usize, columns: usize, stride: usize) -> Self {
        assert!(fits(numbers.len(), rows, columns, stride), "a matrix lies in its numbers");
        Self { start: numbers.as_mut_ptr(), rows, columns, stride, lent: PhantomData }
    }

    /// Cuts it into pieces of this number of columns; the last may have fewer.
    pub(crate) fn pieces(self, columns: usize) -> impl Iterator<Item = Self> {
        (0..self.columns).step_by(columns).map(move |first| Self {
            // Without rows there may be nothing to point at.
            start: self.start.wrapping_add(first),
            columns: columns.min(self.columns - first),
            ..self
        })
    }
}

fn fits(numbers: usize, rows: usize, columns: usize, stride: usize) -> bool {
    columns <= stride && (rows == 0 || (rows - 1) * stride + columns <= numbers)
}

/// Treatment of the numbers that a product is written over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    /// They are replaced, and not looked at.
    Replaced,
    /// The product is added to them.
    Added,
}

/// Multiplies two matrices, in the current thread.
pub(crate) fn multiply(a: Operand<'_>, b: Operand<'_>, before: Before, out: Output<'_>) {
    assert_eq!(a.columns, b.rows, "inputs of a product");
    assert_eq!((a.rows, b.columns), (out.rows, out.columns), "outputs of a product");
    let beta = match before {
        Before::Replaced => 0.0,
        Before::Added => 1.0,
    };
    // Any factor but one would be rounded differently at the edges of a matrix.
    let alpha = 1.0;
    // SAFETY: operands and output lie in their numbers, as was asserted when they were made, and the
    // output is borrowed exclusively.
    unsafe {
        matrixmultiply::sgemm(
            a.rows,
            a.columns,
            b.columns,
            alpha,
            a.numbers.as_ptr(),
            a.row_stride as isize,
            a.column_stride as isize,
            b.numbers.as_ptr(),
            b.row_stride as isize,
            b.column_stride as isize,
            beta,
            out.start,
            out.stride as isize,
            1,
        );
    }
}

/// What decides the bits of products on this processor: whether the library rounds once after a
/// multiplication and an addition, or after each.
pub(crate) fn arithmetic() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        return "fma";
    }
    std::env::consts::ARCH
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * step + 13) % 1000) as f32 / 500.0 - 1.0).collect()
    }

    /// Sizes around those that the library computes together.
    const INPUTS: [usize; 7] = [1, 3, 32, 255, 256, 257, 600];

    #[test]
    fn products_are_right_and_neither_rows_nor_columns_change_another() {
        const ROWS: usize = 70;
        const COLUMNS: usize = 37;
        for inputs in INPUTS {
            let (x, weights) = (numbers(ROWS * inputs, 7919), numbers(COLUMNS * inputs, 6271));
            let product = |rows: usize, columns: usize| {
                let mut out = vec![0.5; ROWS * COLUMNS];
                let x = Operand::new(&x, rows, inputs, inputs);
                let weights = Operand::new(&weights, columns, inputs, inputs).transposed();
                multiply(x, weights, Before::Added, Output::new(&mut out, rows, columns, COLUMNS));
                out
            };
            let all = product(ROWS, COLUMNS);
            for (index, found) in all.iter().enumerate() {
                let (row, column) = (index / COLUMNS, index % COLUMNS);
                let x = x[row * inputs..][..inputs].iter().map(|x| f64::from(*x));
                let weights = weights[column * inputs..].iter().map(|x| f64::from(*x));
                let expected: f64 = 0.5 + x.zip(weights).map(|(a, b)| a * b).sum::<f64>();
                assert!((f64::from(*found) - expected).abs() < 1e-3, "{found}, not {expected}");
            }
            for (rows, columns) in (1..ROWS).zip((1..=COLUMNS).cycle()) {
                let some = product(rows, columns);
                for (index, (some, all)) in some.iter().zip(&all).enumerate() {
                    let computed = index / COLUMNS < rows && index % COLUMNS < columns;
                    let expected = if computed { *all } else { 0.5 };
                    assert_eq!(some.to_bits(), expected.to_bits(), "{rows} x {inputs} x {columns}");
                }
            }
        }
    }

    #[test]
    fn inputs_that_are_zero_at_the_end_change_nothing() {
        for inputs in INPUTS {
            let (x, weights) = (numbers(5 * 640, 7919), numbers(640 * 9, 6271));
            let product = |x: &[f32], inputs: usize| {
                let mut out = vec![f32::NAN; 5 * 9];
                let (x, weights) =
                    (Operand::new(x, 5, inputs, 640), Operand::new(&weights, inputs, 9, 9));
                multiply(x, weights, Before::Replaced, Output::new(&mut out, 5, 9, 9));
                out
            };
            let mut masked = x.clone();
            masked.chunks_mut(640).for_each(|row| row[inputs..].fill(0.0));
            assert_eq!(product(&masked, 640), product(&x, inputs));
        }
    }

    #[test]
    fn pieces_have_all_columns_once() {
        let mut out = vec![0.0; 3 * 8];
        for (piece, output) in (1_u8..).zip(Output::new(&mut out, 3, 7, 8).pieces(3)) {
            let (ones, value) = ([1.0; 3], vec![f32::from(piece); output.columns]);
            let (ones, values) =
                (Operand::new(&ones, 3, 1, 1), Operand::new(&value, 1, value.len(), value.len()));
            multiply(ones, values, Before::Added, output);
        }
        assert_eq!(out, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 0.0].repeat(3));
    }

    #[test]
    #[should_panic(expected = "a matrix lies in its numbers")]
    fn a_matrix_larger_than_its_numbers_is_refused() {
        Operand::new(&[0.0; 11], 3, 4, 4);
    }
}
