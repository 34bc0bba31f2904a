//! Matrices cut into panels of 16 columns, and the one kernel that multiplies them.
//!
//! A panel of weights ([`super::packed`]) holds, for each input, 16 outputs side by side; a panel of
//! activations holds, for each row, 16 elements side by side. So a product streams both and needs no packing at the
//! call. Each output is one chain of multiply-adds over the inputs in order: its bits depend neither
//! on how many other rows there are nor on how the work is cut among threads.

use rayon::prelude::*;

use super::packed::{Half, Matrix, Packed, Stored, Weight};
use crate::simd::{MulAdd, Vectorized, prefetch, vectorized};

/// Width of a panel.
pub(super) const W: usize = 16;

/// One row of a panel.
pub(super) type Chunk = [f32; W];

/// Rows that fit in the registers beside one panel.
pub(super) const TILE: usize = 6;

/// Rows from which computing with an f32 weight takes longer than reading it from memory, so that it
/// is worth reading ahead.
const READ_AHEAD: usize = 12;

/// Bytes that are fetched at a time.
const LINE: usize = 64;

/// Cost (see [`Job::cost`]) from which a product is worth a second thread.
const PARALLEL: usize = 1 << 21;

/// Activations `[panels][rows]` of [`Chunk`]s; columns beyond `width` are 0.
#[derive(Clone, Debug, Default)]
pub(super) struct Panels {
    pub rows: usize,
    pub chunks: Vec<Chunk>,
}

impl Panels {
    /// Makes room for `rows` rows of `width` elements. What was there before is not cleared.
    pub(super) fn reshape(&mut self, width: usize, rows: usize) {
        self.rows = rows;
        self.chunks.resize(width.div_ceil(W) * rows, [0.0; W]);
    }

    /// Copies row `row` to `to`, a multiple of [`W`] elements.
    pub(super) fn read_row(&self, row: usize, to: &mut [f32]) {
        let panels = self.chunks.chunks_exact(self.rows.max(1));
        for (to, panel) in to.chunks_mut(W).zip(panels) {
            if let Some(chunk) = panel.get(row) {
                to.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            }
        }
    }

    /// Sets row `row` from `from`.
    pub(super) fn write_row(&mut self, row: usize, from: &[f32]) {
        let rows = self.rows.max(1);
        for (panel, from) in self.chunks.chunks_exact_mut(rows).zip(from.chunks(W)) {
            if let Some(chunk) = panel.get_mut(row) {
                *chunk = [0.0; W];
                chunk.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            }
        }
    }

    /// As input of a product.
    pub(super) fn view(&self) -> View<'_> {
        View { chunks: &self.chunks, row: 1, panel: self.rows, rows: self.rows }
    }
}

/// Input rows of a product: chunk `p` of row `r` is `chunks[r * row + p * panel]`.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub chunks: &'a [Chunk],
    pub row: usize,
    pub panel: usize,
    pub rows: usize,
}

/// A product `y = x Wᵀ + b + t Bᵀ`, or `y += …`, where `t Bᵀ` is an adapter's low-rank part.
pub(super) struct Job<'a> {
    pub x: View<'a>,
    pub weight: &'a Packed,
    pub low: Option<(View<'a>, &'a Matrix<Chunk>)>,
    pub y: &'a mut Panels,
    /// Whether to add to what `y` holds.
    pub add: bool,
}

impl Job<'_> {
    /// Multiply-adds, and reading the weight as if it were four more rows.
    fn cost(&self) -> usize {
        (self.x.rows + 4) * self.weight.elements()
    }
}

/// Runs products that do not depend on each other.
pub(super) fn multiply(jobs: Vec<Job<'_>>) {
    let cost: usize = jobs.iter().map(Job::cost).sum();
    let parts = if cost < PARALLEL { 1 } else { (2 * rayon::current_num_threads()).max(1) };
    let mut tasks = Vec::new();
    for Job { x, weight, low, y, add } in jobs {
        let share = weight.outputs().div_ceil(W).div_ceil(parts).next_multiple_of(4);
        let size = share * x.rows.max(1);
        let bias = weight.bias.as_deref();
        for (i, y) in y.chunks.chunks_mut(size).enumerate() {
            let first = i * share;
            tasks.push(match &weight.weight {
                Weight::Full(weight) => {
                    AnyTask::Full(Task { product: Product { x, weight, bias, low, add }, first, y })
                }
                Weight::Half(weight) => {
                    AnyTask::Half(Task { product: Product { x, weight, bias, low, add }, first, y })
                }
            });
        }
    }
    if parts == 1 {
        tasks.into_iter().for_each(AnyTask::run);
    } else {
        tasks.into_par_iter().for_each(AnyTask::run);
    }
}

/// A product but for its output.
struct Product<'a, S> {
    x: View<'a>,
    weight: &'a Matrix<S>,
    bias: Option<&'a [Chunk]>,
    low: Option<(View<'a>, &'a Matrix<Chunk>)>,
    add: bool,
}

/// Some neighbouring panels of a product.
struct Task<'a, S> {
    product: Product<'a, S>,
    /// Index of the first panel.
    first: usize,
    y: &'a mut [Chunk],
}

enum AnyTask<'a> {
    Full(Task<'a, Chunk>),
    Half(Task<'a, Half>),
}

impl AnyTask<'_> {
    fn run(self) {
        match self {
            Self::Full(task) => vectorized(task),
            Self::Half(task) => vectorized(task),
        }
    }
}

impl<S: Stored> Vectorized for Task<'_, S> {
    type Output = ();

    #[inline(always)]
    fn run<M: MulAdd>(self) {
        let Task { product, first, y } = self;
        let rows = product.x.rows;
        // Tiles of nearly equal height: a short last one would run at latency.
        let tiles = rows.div_ceil(TILE).max(1);
        let wide = columns::<M>(rows.div_ceil(tiles));
        let early = rows * LINE >= READ_AHEAD * size_of::<S>();
        let mut panel = first;
        for y in y.chunks_mut(rows.max(1) * wide) {
            let mut rest = y;
            while !rest.is_empty() {
                let most = wide.min(rest.len() / rows.max(1)).max(1);
                // The next power of two below.
                let count = 1 << most.ilog2();
                let (y, tail) = rest.split_at_mut((count * rows).min(rest.len()));
                // Each tile fetches its share of the next panels.
                let mut next = product.weight.ahead(panel + count, if early { count } else { 0 });
                let share = next.len().div_ceil(tiles);
                let mut row = 0;
                for tile in 0..tiles {
                    let height = rows / tiles + usize::from(tile < rows % tiles);
                    let (ahead, others) = next.split_at(share.min(next.len()));
                    product.dispatch::<M>(height, count, Place { panel, row, rows }, ahead, y);
                    (next, row) = (others, row + height);
                }
                rest = tail;
                panel += count;
            }
        }
    }
}

/// How many panels beside each other suit a tile of so many rows: few rows leave registers for
/// several, and need them to hide latencies.
#[inline(always)]
pub(super) fn columns<M: MulAdd>(rows: usize) -> usize {
    match rows {
        0 | 1 => 4,
        2..=5 if M::WIDE => 4,
        2 => 2,
        _ if M::WIDE => 2,
        _ => 1,
    }
}

/// Where a tile of outputs lies.
#[derive(Clone, Copy)]
struct Place {
    panel: usize,
    row: usize,
    rows: usize,
}

impl<S: Stored> Product<'_, S> {
    #[inline(always)]
    fn dispatch<M: MulAdd>(
        &self,
        height: usize,
        count: usize,
        at: Place,
        ahead: &[S],
        y: &mut [Chunk],
    ) {
        macro_rules! tile {
            ($($rows:literal x $columns:literal $(if $guard:expr)?),* $(,)?) => {
                match (height, count) {
                    $(($rows, $columns) $(if $guard)? => self.tile::<M, $rows, $columns>(at, ahead, y),)*
                    (height, count) => {
                        debug_assert!(height == 0, "no tile of {height} by {count}");
                    }
                }
            };
        }
        tile!(
            1 x 1, 1 x 2, 1 x 4, 2 x 1, 2 x 2, 3 x 1, 4 x 1, 5 x 1, 6 x 1,
            2 x 4 if M::WIDE, 3 x 2 if M::WIDE, 3 x 4 if M::WIDE, 4 x 2 if M::WIDE,
            4 x 4 if M::WIDE, 5 x 2 if M::WIDE, 5 x 4 if M::WIDE, 6 x 2 if M::WIDE,
        );
    }

    /// `R` rows by `C` panels of outputs. `y` starts at the first of the panels; `ahead` will be
    /// needed soon.
    #[inline(always)]
    fn tile<M: MulAdd, const R: usize, const C: usize>(
        &self,
        at: Place,
        ahead: &[S],
        y: &mut [Chunk],
    ) {
        let mut acc = [[[0.0; W]; R]; C];
        if let Some(bias) = self.bias {
            for (c, acc) in acc.iter_mut().enumerate() {
                *acc = [bias[at.panel + c]; R];
            }
        }
        accumulate::<M, S, R, C>(&mut acc, self.x, at.row, self.weight, at.panel, ahead);
        if let Some((t, b)) = self.low {
            accumulate::<M, Chunk, R, C>(&mut acc, t, at.row, b, at.panel, &[]);
        }
        for (c, acc) in acc.iter().enumerate() {
            let y = &mut y[c * at.rows + at.row..][..R];
            for (y, acc) in y.iter_mut().zip(acc) {
                if self.add {
                    y.iter_mut().zip(acc).for_each(|(y, a)| *y += a);
                } else {
                    *y = *acc;
                }
            }
        }
    }
}

#[inline(always)]
fn accumulate<M: MulAdd, S: Stored, const R: usize, const C: usize>(
    acc: &mut [[Chunk; R]; C],
    x: View<'_>,
    row: usize,
    weight: &Matrix<S>,
    panel: usize,
    ahead: &[S],
) {
    let panels: [&[[S; W]]; C] = std::array::from_fn(|c| weight.panel(panel + c));
    let share = ahead.len().div_ceil(weight.depth.max(1));
    // Indexed: zipping C panels costs more than it clears.
    #[allow(clippy::needless_range_loop)]
    for d in 0..weight.depth {
        if let Some(ahead) = ahead.get(d * share..(d + 1) * share) {
            ahead.iter().step_by(LINE / size_of::<S>()).for_each(prefetch);
        }
        let x: [&Chunk; R] = std::array::from_fn(|r| &x.chunks[(row + r) * x.row + d * x.panel]);
        let w: [&[S; W]; C] = std::array::from_fn(|c| &panels[c][d]);
        multiply_add::<M, S, R, C>(acc, x, w);
    }
}

/// `acc[c][r] += Σ_i x[r][i] · w[c][i]`, one `i` after the other.
#[inline(always)]
pub(super) fn multiply_add<M: MulAdd, S: Stored, const R: usize, const C: usize>(
    acc: &mut [[Chunk; R]; C],
    x: [&Chunk; R],
    w: [&[S; W]; C],
) {
    for i in 0..W {
        for c in 0..C {
            let w = w[c][i].widen();
            for r in 0..R {
                for j in 0..W {
                    acc[c][r][j] = M::mul_add(x[r][i], w[j], acc[c][r][j]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Fused, fused};

    fn values(n: usize, seed: u32) -> Vec<f32> {
        let word =
            |i: usize| (i as u32 + 1).wrapping_mul(0x9E37_79B9 ^ seed).wrapping_mul(747_796_405);
        (0..n).map(|i| (word(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    fn panels(values: &[f32], width: usize) -> Panels {
        let mut panels = Panels::default();
        panels.reshape(width, values.len() / width);
        values.chunks(width).enumerate().for_each(|(i, row)| panels.write_row(i, row));
        panels
    }

    /// Values that are bf16.
    fn halves(n: usize, seed: u32) -> Vec<f32> {
        values(n, seed).into_iter().map(|v| f32::from_bits(v.to_bits() & 0xFFFF_0000)).collect()
    }

    /// Every count of rows and odd widths, with bias, adapter part and adding.
    #[test]
    fn a_product_is_right_for_every_shape() {
        for rows in (1usize..=14).chain([33]) {
            for (i, (inputs, outputs)) in
                [(16, 16), (5, 3), (40, 70), (64, 48), (33, 129), (40, 70), (33, 129)]
                    .into_iter()
                    .enumerate()
            {
                let x = values(rows * inputs, 1);
                let w = if i < 5 { values } else { halves }(outputs * inputs, 2);
                let (bias, t, b) =
                    (values(outputs, 3), values(rows * 4, 4), values(outputs * 4, 5));
                let weight = Packed::new(&w, outputs, inputs).with_bias(Some(&bias));
                assert_eq!(matches!(weight.weight, Weight::Half(_)), i >= 5);
                let low = Matrix::pack(&b, outputs, 4, |b| 0.5 * b);
                let (x, t) = (panels(&x, inputs), panels(&t, 4));
                let mut y = panels(&vec![1.0; rows * outputs], outputs);
                let low = Some((t.view(), &low));
                multiply(vec![Job { x: x.view(), weight: &weight, low, y: &mut y, add: true }]);
                let mut found = vec![0.0; outputs.next_multiple_of(W)];
                let (mut xr, mut tr) = (vec![0.0; inputs.next_multiple_of(W)], vec![0.0; W]);
                for r in 0..rows {
                    y.read_row(r, &mut found);
                    x.read_row(r, &mut xr);
                    t.read_row(r, &mut tr);
                    for o in 0..outputs {
                        let dot = |a: &[f32], b: &[f32]| -> f64 {
                            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                        };
                        let exact = 1.0
                            + f64::from(bias[o])
                            + dot(&xr, &w[o * inputs..][..inputs])
                            + 0.5 * dot(&tr, &b[o * 4..][..4]);
                        assert!(
                            (f64::from(found[o]) - exact).abs() < 1e-5,
                            "{rows} {inputs} {outputs}"
                        );
                    }
                    assert!(found[outputs..].iter().all(|&pad| pad == 1.0 || pad == 0.0));
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_company() {
        let (inputs, outputs) = (200, 600);
        let weight = Packed::new(&values(outputs * inputs, 2), outputs, inputs);
        let x = values(40 * inputs, 1);
        let product = |rows: &[f32]| {
            let (x, mut y) = (panels(rows, inputs), Panels::default());
            y.reshape(outputs, x.rows);
            let job = Job { x: x.view(), weight: &weight, low: None, y: &mut y, add: false };
            multiply(vec![job]);
            y
        };
        let all = product(&x);
        let (mut alone, mut among) = (vec![0.0; 608], vec![0.0; 608]);
        for r in 0..40 {
            all.read_row(r, &mut among);
            for count in 1..=14.min(40 - r) {
                product(&x[r * inputs..][..count * inputs]).read_row(0, &mut alone);
                assert_eq!(alone, among, "row {r} of {count}");
            }
        }
    }

    /// The widest instructions and no vector instructions; bf16 weights and the same as f32.
    #[test]
    fn a_product_has_the_same_bits_with_any_fused_instructions_and_in_any_form() {
        let (inputs, outputs) = (72, 80);
        let weight = halves(outputs * inputs, 2);
        let half = Matrix::pack(&weight, outputs, inputs, |v| (v.to_bits() >> 16) as u16);
        let full = Matrix::pack(&weight, outputs, inputs, |v| v);
        for rows in 1..=26 {
            let x = panels(&values(rows * inputs, 1), inputs);
            let x = x.view();
            let mut y = [(); 3].map(|()| Panels::default());
            y.iter_mut().for_each(|y| y.reshape(outputs, rows));
            let [wide, short, plain] = y.each_mut().map(|y| &mut y.chunks[..]);
            let product = Product { x, weight: &full, bias: None, low: None, add: false };
            vectorized(Task { product, first: 0, y: wide });
            let product = Product { x, weight: &half, bias: None, low: None, add: false };
            vectorized(Task { product, first: 0, y: short });
            let product = Product { x, weight: &full, bias: None, low: None, add: false };
            Task { product, first: 0, y: plain }.run::<Fused>();
            assert_eq!(y[0].chunks, y[1].chunks, "{rows} rows");
            if fused() {
                assert_eq!(y[0].chunks, y[2].chunks, "{rows} rows");
            }
        }
    }
}
