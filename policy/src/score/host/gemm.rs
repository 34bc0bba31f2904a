//! Matrix products in f32 with the widest instructions at hand. The right-hand side is packed in
//! panels of 32 columns; the left-hand side is read where it lies. Each element of a result is one
//! chain of multiply-adds over the inner dimension in order, so its bits depend neither on the other
//! rows nor on how the work is cut among threads.

use crate::simd::MulAdd;

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
        let mut lines = vec![Line::default(); columns.div_ceil(WIDTH) * depth];
        for (panel, lines) in lines.chunks_exact_mut(depth.max(1)).enumerate() {
            fill_plain(lines, values, stride, panel * WIDTH..columns.min((panel + 1) * WIDTH));
        }
        Self { lines, depth, columns }
    }

    /// Packs the transpose of row-major `[columns, depth]` values.
    pub(super) fn transposed(values: &[f32], stride: usize, depth: usize, columns: usize) -> Self {
        let mut lines = vec![Line::default(); columns.div_ceil(WIDTH) * depth];
        for (panel, lines) in lines.chunks_exact_mut(depth.max(1)).enumerate() {
            fill_transposed(lines, values, stride, panel * WIDTH..columns.min((panel + 1) * WIDTH));
        }
        Self { lines, depth, columns }
    }
}

fn fill_plain(lines: &mut [Line], values: &[f32], stride: usize, columns: std::ops::Range<usize>) {
    for (line, row) in lines.iter_mut().zip(values.chunks(stride.max(1))) {
        let from = &row[columns.clone()];
        line.as_flattened_mut()[..from.len()].copy_from_slice(from);
    }
}

fn fill_transposed(
    lines: &mut [Line],
    values: &[f32],
    stride: usize,
    columns: std::ops::Range<usize>,
) {
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
#[inline(always)]
pub(super) fn add_product<M: MulAdd>(a: Rows<'_>, b: &Packed, y: &mut [f32], stride: usize) {
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
                    4 => tile.add::<M, 4>(),
                    5 => tile.add::<M, 5>(),
                    _ => tile.add::<M, 6>(),
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
        for (r, sums) in sums.iter().enumerate() {
            let y = &mut self.y[r * self.stride..][..self.columns];
            y.iter_mut().zip(sums.as_flattened()).for_each(|(y, sum)| *y += sum);
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
mod tests {
    use super::*;
    use crate::simd::{Vectorized, vectorized};

    struct Product<'a>(Rows<'a>, &'a Packed, &'a mut [f32], usize);

    impl Vectorized for Product<'_> {
        type Output = ();

        #[inline(always)]
        fn run<M: MulAdd>(self) {
            add_product::<M>(self.0, self.1, self.2, self.3);
        }
    }

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
                    vectorized(Product(a_rows, packed, &mut y, stride));
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
}
