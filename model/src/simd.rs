//! The inner loops, compiled for what the processor can do.
//!
//! Every number that comes out of here is one chain of operations whose order is fixed by positions in
//! the operands, never by how many rows are computed together. That is what makes a model's results
//! the same to the bit whatever else is in a batch.

#![allow(unsafe_code)]

use std::marker::PhantomData;

/// How many numbers the loops handle side by side.
pub(crate) const LANES: usize = 16;

/// Inputs that are summed up before the sum is added to the output: a panel's part of that height
/// stays in the nearest cache while all rows pass by.
const BLOCK: usize = 256;

/// Numbers side by side, aligned to a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Lanes(pub(crate) [f32; LANES]);

impl Lanes {
    pub(crate) const ZERO: Self = Self([0.0; LANES]);
}

/// What the processor can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Simd {
    /// What every processor of the target can do.
    Portable,
    /// Eight lanes and fused multiplication and addition.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Sixteen lanes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Simd {
    /// The best that this processor has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") {
                return Self::Avx512;
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// All that this processor has.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Self> {
        match Self::detect() {
            Self::Portable => vec![Self::Portable],
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => vec![Self::Portable, Self::Avx2],
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => vec![Self::Portable, Self::Avx2, Self::Avx512],
        }
    }
}

/// Compiles a function once for each [`Simd`]. Its body is a generic function that is told whether
/// multiplication and addition can be fused, and how many rows of sums fit into the registers.
macro_rules! vectorised {
    ($(#[$doc:meta])* $vis:vis fn $name:ident = $body:ident($($arg:ident: $type:ty),* $(,)?)) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name(simd: Simd, $($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f")]
            fn avx512($($arg: $type),*) {
                $body::<true, 12>($($arg),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) {
                $body::<true, 6>($($arg),*);
            }
            match simd {
                Simd::Portable => $body::<{ cfg!(target_arch = "aarch64") }, 4>($($arg),*),
                // SAFETY: `Simd::detect`, where these come from, has found the features.
                #[cfg(target_arch = "x86_64")]
                Simd::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Simd::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    };
}
pub(crate) use vectorised;

/// `a * b + c`.
#[inline(always)]
pub(crate) fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Rows of numbers that several threads write to, each to its own columns or rows.
#[derive(Clone, Copy)]
pub(crate) struct SharedRows<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    lent: PhantomData<&'a mut [f32]>,
}

// SAFETY: writing is unsafe, and whoever does it promises that no other thread touches the place.
unsafe impl Send for SharedRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedRows<'_> {}

impl<'a> SharedRows<'a> {
    /// All of `numbers`, as rows of so many columns.
    pub(crate) fn new(numbers: &'a mut [f32], columns: usize) -> Self {
        assert!(columns > 0 && numbers.len().is_multiple_of(columns));
        let rows = numbers.len() / columns;
        Self { start: numbers.as_mut_ptr(), rows, columns, lent: PhantomData }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// A part of a row.
    ///
    /// # Safety
    /// Nobody else uses that part while the returned slice lives.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, row: usize, column: usize, len: usize) -> &'a mut [f32] {
        assert!(row < self.rows && column + len <= self.columns);
        // SAFETY: the part lies in what `new` was given, and is the caller's alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.columns + column), len) }
    }
}

/// What becomes of the numbers that a product is written over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Before {
    /// They are replaced.
    Replaced,
    /// The product is added to them.
    Added,
}

/// Multiplies rows of `x`, `x_stride` apart, with a panel: `panel[i]` has the weights of input `i` for
/// up to [`LANES`] outputs. Writes `columns` of them at `column` of each row of `out`.
///
/// # Safety
/// Nobody else uses these columns of `out` meanwhile.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn multiply_panel(
    simd: Simd,
    x: &[f32],
    x_stride: usize,
    panel: &[Lanes],
    out: SharedRows<'_>,
    column: usize,
    columns: usize,
    before: Before,
) {
    multiply_panel_for(simd, x, x_stride, panel, out, column, columns, before);
}

vectorised! {
    /// [`multiply_panel`], whose promise its callers here have.
    fn multiply_panel_for = multiply_panel_body(
        x: &[f32],
        x_stride: usize,
        panel: &[Lanes],
        out: SharedRows<'_>,
        column: usize,
        columns: usize,
        before: Before,
    )
}

/// Multiplies rows of `x` with panels of the same height and replaces `out`, whose rows have
/// [`LANES`] columns for each panel.
pub(crate) fn multiply_panels(
    simd: Simd,
    x: &[f32],
    x_stride: usize,
    panels: &[Lanes],
    height: usize,
    out: &mut [f32],
) {
    let out = SharedRows::new(out, panels.len() / height * LANES);
    for (index, panel) in panels.chunks_exact(height).enumerate() {
        // `out` is borrowed from a caller that is waiting for it.
        let column = index * LANES;
        multiply_panel_for(simd, x, x_stride, panel, out, column, LANES, Before::Replaced);
    }
}

#[inline(always)]
fn multiply_panel_body<const FUSED: bool, const ROWS: usize>(
    x: &[f32],
    x_stride: usize,
    panel: &[Lanes],
    out: SharedRows<'_>,
    column: usize,
    columns: usize,
    before: Before,
) {
    let rows = out.rows();
    assert!(panel.len() <= x_stride && x.len() >= rows * x_stride && columns <= LANES);
    let mut before = before;
    for (block, weights) in panel.chunks(BLOCK).enumerate() {
        let x = &x[block * BLOCK..];
        let mut row = 0;
        while row + ROWS <= rows {
            let sums = tile::<FUSED, ROWS>(&x[row * x_stride..], x_stride, weights);
            write(&sums, out, row, column, columns, before);
            row += ROWS;
        }
        for left in [8, 4, 2, 1] {
            while row + left <= rows {
                let x = &x[row * x_stride..];
                match left {
                    8 => write(
                        &tile::<FUSED, 8>(x, x_stride, weights),
                        out,
                        row,
                        column,
                        columns,
                        before,
                    ),
                    4 => write(
                        &tile::<FUSED, 4>(x, x_stride, weights),
                        out,
                        row,
                        column,
                        columns,
                        before,
                    ),
                    2 => write(
                        &tile::<FUSED, 2>(x, x_stride, weights),
                        out,
                        row,
                        column,
                        columns,
                        before,
                    ),
                    _ => write(
                        &tile::<FUSED, 1>(x, x_stride, weights),
                        out,
                        row,
                        column,
                        columns,
                        before,
                    ),
                }
                row += left;
            }
        }
        before = Before::Added;
    }
}

/// The sums of `ROWS` rows of `x`. Each is one chain over the inputs in order.
#[inline(always)]
fn tile<const FUSED: bool, const ROWS: usize>(
    x: &[f32],
    x_stride: usize,
    weights: &[Lanes],
) -> [[f32; LANES]; ROWS] {
    assert!(x.len() >= (ROWS - 1) * x_stride + weights.len());
    let mut sums = [[0.0; LANES]; ROWS];
    for (input, weights) in weights.iter().enumerate() {
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: within the length that was asserted above.
            let value = unsafe { *x.get_unchecked(row * x_stride + input) };
            for (sum, weight) in sums.iter_mut().zip(&weights.0) {
                *sum = multiply_add::<FUSED>(value, *weight, *sum);
            }
        }
    }
    sums
}

#[inline(always)]
fn write<const ROWS: usize>(
    sums: &[[f32; LANES]; ROWS],
    out: SharedRows<'_>,
    row: usize,
    column: usize,
    columns: usize,
    before: Before,
) {
    for (i, sums) in sums.iter().enumerate() {
        // SAFETY: the caller of `multiply_panel` has these columns to itself.
        let out = unsafe { out.part(row + i, column, columns) };
        match <&mut [f32; LANES]>::try_from(&mut *out) {
            Ok(out) => add(out, sums, before),
            Err(_) => add(out, sums, before),
        }
    }
}

/// Adding to zero makes a negative zero positive: whether zeros were added to a sum cannot be seen.
#[inline(always)]
fn add(out: &mut [f32], sums: &[f32; LANES], before: Before) {
    match before {
        Before::Replaced => out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum + 0.0),
        Before::Added => out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(index: usize) -> f32 {
        ((index * 7919 + 13) % 1000) as f32 / 500.0 - 1.0
    }

    #[test]
    fn products_are_right_and_no_row_changes_another() {
        const ROWS: usize = 29;
        for simd in Simd::available() {
            for inputs in [1, 3, 255, 256, 257, 600] {
                let x: Vec<f32> = (0..ROWS * inputs).map(number).collect();
                let panel: Vec<Lanes> = (0..inputs)
                    .map(|input| Lanes(std::array::from_fn(|lane| number(input * 31 + lane * 17))))
                    .collect();
                let mut all = vec![f32::NAN; ROWS * LANES];
                multiply_panels(simd, &x, inputs, &panel, inputs, &mut all);
                for rows in 1..ROWS {
                    let mut some = vec![f32::NAN; rows * LANES];
                    multiply_panels(simd, &x[..rows * inputs], inputs, &panel, inputs, &mut some);
                    assert_eq!(some, all[..rows * LANES], "{simd:?}, {rows} rows");
                }
                for (index, found) in all.iter().enumerate() {
                    let (row, lane) = (index / LANES, index % LANES);
                    let product = |input: usize| {
                        f64::from(x[row * inputs + input]) * f64::from(panel[input].0[lane])
                    };
                    let expected: f64 = (0..inputs).map(product).sum();
                    assert!((f64::from(*found) - expected).abs() < 1e-3, "{simd:?} {inputs}");
                }
            }
        }
    }

    #[test]
    fn a_product_can_be_added_and_leaves_other_columns_alone() {
        for simd in Simd::available() {
            let mut out = vec![1.0; 2 * 5];
            let panel = [Lanes([2.0; LANES]), Lanes([3.0; LANES])];
            let rows = SharedRows::new(&mut out, 5);
            // SAFETY: nobody else is there.
            unsafe {
                let x = [1.0, 10.0, 2.0, 20.0];
                multiply_panel(simd, &x, 2, &panel, rows, 1, 3, Before::Added);
            }
            assert_eq!(out, [1.0, 33.0, 33.0, 33.0, 1.0, 1.0, 65.0, 65.0, 65.0, 1.0]);
        }
    }
}
