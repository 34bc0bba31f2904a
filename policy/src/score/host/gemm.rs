//! Matrix products in f32 with the widest instructions at hand. The right-hand side is packed in
//! panels of 32 columns; the left-hand side is read where it lies. Each element of a result is one
//! chain of multiply-adds over the inner dimension in order, so its bits depend neither on the other
//! rows nor on how the work is cut among threads.

use std::ops::Range;

use burn::tensor::Tensor;
use rayon::prelude::*;

use super::linear::host;
use crate::{
    model::ModelError,
    simd::{MulAdd, Vectorized, vectorized},
};

/// Elements of a register of the widest kind.
const LANES: usize = 16;
/// Columns of a panel.
pub(super) const WIDTH: usize = 2 * LANES;
/// Inner elements that are multiplied at a time: a panel's part stays in the nearest cache.
const DEPTH: usize = 256;

/// 32 neighbouring columns of one row.
type Line = [[f32; LANES]; 2];

/// A right-hand side `[depth, columns]` in panels of [`WIDTH`] columns, padded with zeros.
#[derive(Debug, Default)]
pub(super) struct Packed {
    lines: Vec<Line>,
    depth: usize,
    columns: usize,
}

/// Rows of a left-hand side.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) values: &'a [f32],
    /// Elements from one row to the next.
    pub(super) stride: usize,
    pub(super) rows: usize,
}

impl Packed {
    pub(super) fn columns(&self) -> usize {
        self.columns
    }

    /// Packs row-major `[depth, columns]` values, `stride` elements from row to row.
    pub(super) fn plain(values: &[f32], stride: usize, depth: usize, columns: usize) -> Self {
        let mut packed = Self::zeros(depth, columns);
        for (panel, lines) in packed.panels() {
            fill_plain(lines, values, stride, columns_of(panel, columns));
        }
        packed
    }

    /// Packs the transpose of row-major `[columns, depth]` values.
    pub(super) fn transposed(values: &[f32], stride: usize, depth: usize, columns: usize) -> Self {
        let mut packed = Self::zeros(depth, columns);
        for (panel, lines) in packed.panels() {
            fill_transposed(lines, values, stride, columns_of(panel, columns));
        }
        packed
    }

    fn zeros(depth: usize, columns: usize) -> Self {
        let lines = vec![Line::default(); columns.div_ceil(WIDTH) * depth];
        Self { lines, depth, columns }
    }

    fn panels(&mut self) -> impl Iterator<Item = (usize, &mut [Line])> {
        self.lines.chunks_exact_mut(self.depth.max(1)).enumerate()
    }
}

fn columns_of(panel: usize, columns: usize) -> Range<usize> {
    panel * WIDTH..columns.min((panel + 1) * WIDTH)
}

/// Elements of a weight that are packed at one time.
const BLOCK: usize = 1 << 20;
/// Rows of the left-hand side that a task multiplies at most.
const TASK_ROWS: usize = 96;

/// Rows of a weight of `columns` columns that are packed at one time.
pub(super) fn block(columns: usize) -> usize {
    (BLOCK / columns.max(1)).next_multiple_of(DEPTH).max(DEPTH)
}

/// Some rows `[count, columns]` of a weight as they are, packed by all threads.
pub(super) fn packed_plain(values: &[f32], columns: usize) -> Packed {
    let depth = values.len() / columns.max(1);
    let mut packed = Packed::zeros(depth, columns);
    (packed.lines.par_chunks_exact_mut(depth.max(1)).enumerate()).for_each(|(panel, lines)| {
        fill_plain(lines, values, columns, columns_of(panel, columns));
    });
    packed
}

/// Some rows `[count, depth]` of a weight as `count` columns, packed by all threads.
pub(super) fn packed_transposed(values: &[f32], depth: usize) -> Packed {
    let columns = values.len() / depth.max(1);
    let mut packed = Packed::zeros(depth, columns);
    (packed.lines.par_chunks_exact_mut(depth.max(1)).enumerate()).for_each(|(panel, lines)| {
        fill_transposed(lines, values, depth, columns_of(panel, columns));
    });
    packed
}

/// `a · b` for `a` `[rows, b.depth]`.
pub(super) fn multiply(a: &[f32], b: &Packed) -> Vec<f32> {
    let mut y = vec![0.0; a.len() / b.depth.max(1) * b.columns];
    add_multiply(a, b, &mut y);
    y
}

/// `y += a · b`.
pub(super) fn add_multiply(a: &[f32], b: &Packed, y: &mut [f32]) {
    each_task(a, b.depth, y, b.columns, |a, y| add_product(a, b, y, b.columns));
}

/// `a · wᵀ` for `a` `[rows, inner]` and `w` `[columns, inner]`.
pub(super) fn times_transposed(a: &[f32], w: &Tensor<2>) -> Result<Vec<f32>, ModelError> {
    let [columns, inner] = w.dims();
    let mut y = vec![0.0; a.len() / inner.max(1) * columns];
    for first in (0..columns).step_by(block(inner)) {
        let until = columns.min(first + block(inner));
        let part = host(w.clone().slice([first..until, 0..inner]))?;
        let packed = packed_transposed(&part, inner);
        drop(part);
        each_task(a, inner, &mut y, columns, |a, y| {
            add_product(a, &packed, &mut y[first..], columns);
        });
    }
    Ok(y)
}

/// `a · w` for `a` `[rows, inner]` and `w` `[inner, columns]`.
pub(super) fn times(a: &[f32], w: &Tensor<2>) -> Result<Vec<f32>, ModelError> {
    let [inner, columns] = w.dims();
    let mut y = vec![0.0; a.len() / inner.max(1) * columns];
    for first in (0..inner).step_by(block(columns)) {
        let until = inner.min(first + block(columns));
        let part = host(w.clone().slice([first..until, 0..columns]))?;
        let packed = packed_plain(&part, columns);
        drop(part);
        each_task(a, inner, &mut y, columns, |a, y| {
            add_product(Rows { values: &a.values[first..], ..a }, &packed, y, columns);
        });
    }
    Ok(y)
}

/// Some rows of `a` and `y` at a time, spread over threads.
fn each_task(
    a: &[f32],
    inner: usize,
    y: &mut [f32],
    columns: usize,
    f: impl Fn(Rows<'_>, &mut [f32]) + Sync,
) {
    let rows = a.len() / inner.max(1);
    let share = rows.div_ceil(4 * rayon::current_num_threads()).next_multiple_of(6);
    let share = share.clamp(6, TASK_ROWS);
    (y.par_chunks_mut(share * columns.max(1)).zip(a.par_chunks(share * inner.max(1))))
        .for_each(|(y, a)| f(Rows { values: a, stride: inner, rows: a.len() / inner.max(1) }, y));
}

/// `aᵀ · b` for `a` `[rows, left]` and `b` `[rows, right]`.
pub(super) fn transposed_times(a: &[f32], left: usize, b: &[f32], right: usize) -> Vec<f32> {
    if right < left {
        return transpose(&transposed_times(b, right, a, left), right);
    }
    let rows = b.len() / right.max(1);
    let a = transpose(a, rows);
    let panels: Vec<Vec<f32>> = (0..right.div_ceil(WIDTH))
        .into_par_iter()
        .map(|panel| {
            let columns = columns_of(panel, right);
            let count = columns.len();
            let packed = Packed::plain(&b[columns.start..], right, rows, count);
            let mut y = vec![0.0; left * count];
            add_product(Rows { values: &a, stride: rows, rows: left }, &packed, &mut y, count);
            y
        })
        .collect();
    let mut y = vec![0.0; left * right];
    y.par_chunks_mut(right.max(1)).enumerate().for_each(|(row, y)| {
        for (y, panel) in y.chunks_mut(WIDTH).zip(&panels) {
            y.copy_from_slice(&panel[row * y.len()..][..y.len()]);
        }
    });
    y
}

/// The transpose of a matrix of `rows` rows.
pub(super) fn transpose(x: &[f32], rows: usize) -> Vec<f32> {
    const SIDE: usize = 16;
    let columns = x.len() / rows.max(1);
    let mut y = vec![0.0; x.len()];
    (y.par_chunks_mut((SIDE * rows).max(1)).enumerate()).for_each(|(block, y)| {
        let first = block * SIDE;
        for from in (0..rows).step_by(SIDE) {
            for (column, y) in y.chunks_exact_mut(rows).enumerate() {
                let to = y[from..].iter_mut().take(SIDE).enumerate();
                to.for_each(|(row, y)| *y = x[(from + row) * columns + first + column]);
            }
        }
    });
    y
}

fn fill_plain(lines: &mut [Line], values: &[f32], stride: usize, columns: Range<usize>) {
    for (d, line) in lines.iter_mut().enumerate() {
        let from = &values[d * stride..][columns.clone()];
        line.as_flattened_mut()[..from.len()].copy_from_slice(from);
    }
}

fn fill_transposed(lines: &mut [Line], values: &[f32], stride: usize, columns: Range<usize>) {
    // 16 inner elements at a time, so that what is written stays near.
    for (block, lines) in lines.chunks_mut(LANES).enumerate() {
        for (lane, column) in columns.clone().enumerate() {
            let from = &values[column * stride + block * LANES..];
            for (line, value) in lines.iter_mut().zip(from) {
                line[lane / LANES][lane % LANES] = *value;
            }
        }
    }
}

/// `y += a · b` for `y` of `a.rows` rows of `stride` elements, of which the first `b.columns` are
/// added to.
pub(super) fn add_product(a: Rows<'_>, b: &Packed, y: &mut [f32], stride: usize) {
    vectorized(Product { a, b, y, stride });
}

struct Product<'a> {
    a: Rows<'a>,
    b: &'a Packed,
    y: &'a mut [f32],
    stride: usize,
}

impl Vectorized for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let Self { a, b, y, stride } = self;
        // What fits in the registers beside a panel's line.
        let height = if M::WIDE { 6 } else { 3 };
        for from in (0..b.depth).step_by(DEPTH) {
            let depth = DEPTH.min(b.depth - from);
            for (panel, lines) in b.lines.chunks_exact(b.depth.max(1)).enumerate() {
                let lines = &lines[from..from + depth];
                let first = panel * WIDTH;
                let columns = WIDTH.min(b.columns - first);
                for row in (0..a.rows).step_by(height) {
                    let tile = Tile {
                        a: &a.values[row * a.stride + from..],
                        a_stride: a.stride,
                        lines,
                        y: &mut y[row * stride + first..],
                        stride,
                        columns,
                    };
                    match height.min(a.rows - row) {
                        1 => tile.add::<M, 1>(),
                        2 => tile.add::<M, 2>(),
                        3 => tile.add::<M, 3>(),
                        4 if M::WIDE => tile.add::<M, 4>(),
                        5 if M::WIDE => tile.add::<M, 5>(),
                        _ if M::WIDE => tile.add::<M, 6>(),
                        _ => {}
                    }
                }
            }
        }
    }
}

/// A few rows times one panel.
struct Tile<'a> {
    a: &'a [f32],
    a_stride: usize,
    lines: &'a [Line],
    y: &'a mut [f32],
    stride: usize,
    columns: usize,
}

impl Tile<'_> {
    #[inline(always)]
    fn add<M: MulAdd, const R: usize>(self) {
        let mut sums = [Line::default(); R];
        let depth = self.lines.len();
        let a: [&[f32]; R] = std::array::from_fn(|r| &self.a[r * self.a_stride..][..depth]);
        let (blocks, rest) = self.lines.as_chunks::<LANES>();
        for (block, lines) in blocks.iter().enumerate() {
            let a: [&[f32; LANES]; R] =
                std::array::from_fn(|r| &a[r].as_chunks::<LANES>().0[block]);
            for i in 0..LANES {
                multiply_add::<M, R>(&mut sums, a.map(|a| a[i]), &lines[i]);
            }
        }
        for (i, line) in rest.iter().enumerate() {
            let at = blocks.len() * LANES + i;
            multiply_add::<M, R>(&mut sums, a.map(|a| a[at]), line);
        }
        // Sums are only reached at places known beforehand, so that they stay in registers.
        for (r, sums) in sums.iter().enumerate() {
            let y = &mut self.y[r * self.stride..];
            let mut line = [0.0; WIDTH];
            for c in 0..2 {
                for j in 0..LANES {
                    line[c * LANES + j] = sums[c][j];
                }
            }
            match y.first_chunk_mut::<WIDTH>() {
                Some(y) if self.columns == WIDTH => {
                    for j in 0..WIDTH {
                        y[j] += line[j];
                    }
                }
                _ => y[..self.columns].iter_mut().zip(line).for_each(|(y, sum)| *y += sum),
            }
        }
    }
}

#[inline(always)]
fn multiply_add<M: MulAdd, const R: usize>(sums: &mut [Line; R], a: [f32; R], line: &Line) {
    for r in 0..R {
        for c in 0..2 {
            for j in 0..LANES {
                sums[r][c][j] = M::mul_add(a[r], line[c][j], sums[r][c][j]);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 37 + seed * 101 + i * i) % 64) as f32 / 32.0 - 1.0).collect()
    }

    #[test]
    fn a_product_is_right_for_every_shape() {
        for rows in (1..=13).chain([40]) {
            for (depth, columns) in [(1, 1), (7, 33), (16, 32), (40, 70), (300, 31), (530, 64)] {
                let (a_stride, b_stride, stride) = (depth + 3, columns + 2, columns + 1);
                let (a, b) = (values(rows * a_stride, 1), values(depth * b_stride, 2));
                let mut b_transposed = vec![0.0; columns * a_stride];
                for (d, row) in b.chunks(b_stride).enumerate() {
                    (0..columns).for_each(|c| b_transposed[c * a_stride + d] = row[c]);
                }
                let packed = [
                    Packed::plain(&b, b_stride, depth, columns),
                    Packed::transposed(&b_transposed, a_stride, depth, columns),
                ];
                for packed in &packed {
                    let mut y = vec![1.0; rows * stride];
                    let a_rows = Rows { values: &a, stride: a_stride, rows };
                    add_product(a_rows, packed, &mut y, stride);
                    for (r, row) in y.chunks(stride).enumerate() {
                        for (c, found) in row[..columns].iter().enumerate() {
                            let exact: f64 = (0..depth)
                                .map(|d| {
                                    f64::from(a[r * a_stride + d]) * f64::from(b[d * b_stride + c])
                                })
                                .sum();
                            assert!((f64::from(*found) - 1.0 - exact).abs() < 1e-3);
                        }
                        assert_eq!(row[columns], 1.0);
                    }
                }
            }
        }
    }

    #[test]
    fn products_with_tensors_are_those_of_the_tensors() {
        for (rows, inner, columns) in [(1, 5, 3), (40, 33, 70), (301, 600, 2100), (7, 2100, 600)] {
            let a = values(rows * inner, 1);
            let tensor = |values: &[f32], shape| {
                let data = TensorData::new(values.to_vec(), shape);
                Tensor::<2>::from_data(data, &Device::flex())
            };
            let near = |found: &[f32], expected: Tensor<2>| {
                let expected = host(expected).unwrap();
                assert_eq!(found.len(), expected.len());
                for (f, e) in found.iter().zip(&expected) {
                    assert!((f - e).abs() < 1e-3, "{f} and {e}");
                }
            };
            let left = tensor(&a, [rows, inner]);
            let w = tensor(&values(inner * columns, 2), [inner, columns]);
            near(&times(&a, &w).unwrap(), left.clone().matmul(w.clone()));
            let w = w.transpose();
            let turned = tensor(&host(w.clone()).unwrap(), [columns, inner]);
            for w in [w, turned] {
                let expected = left.clone().matmul(w.clone().transpose());
                near(&times_transposed(&a, &w).unwrap(), expected);
            }
            let b = values(rows * columns, 3);
            let expected = left.transpose().matmul(tensor(&b, [rows, columns]));
            near(&transposed_times(&a, inner, &b, columns), expected);
        }
    }
}
