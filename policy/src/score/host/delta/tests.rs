//! Chunks give what the recurrence gives row by row in f64, and its gradients.
#![allow(clippy::unwrap_used)]

use super::{Backward, Forward, Head, chunk::CHUNK};
use crate::simd::vectorized;

const KEY: usize = 5;
const VALUE: usize = 70;

/// What all rows of a case look like.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Random keys, decays and gates.
    Random,
    /// One key throughout, written whole and hardly forgotten: powers of the overlaps explode.
    Repeated,
    /// Decays so strong that products of them are zero.
    Forgetful,
}

const CASES: [(Kind, usize, bool); 12] = [
    (Kind::Random, 1, false),
    (Kind::Random, 1, true),
    (Kind::Random, 2, true),
    (Kind::Random, 37, false),
    (Kind::Random, CHUNK, true),
    (Kind::Random, CHUNK + 1, false),
    (Kind::Random, 2 * CHUNK + 1, true),
    (Kind::Random, 3 * CHUNK + 7, true),
    (Kind::Repeated, CHUNK, true),
    (Kind::Repeated, 2 * CHUNK + 9, true),
    (Kind::Forgetful, CHUNK, true),
    (Kind::Forgetful, 2 * CHUNK + 9, true),
];

/// One head's rows, the memory before them, and the gradients of what comes out.
struct Case {
    rows: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    beta: Vec<f32>,
    g: Vec<f32>,
    memory: Option<Vec<f32>>,
    dout: Vec<f32>,
    dmemory: Option<Vec<f32>>,
}

fn case(kind: Kind, rows: usize, memory: bool) -> Case {
    let draw = |salt: usize, count: usize| -> Vec<f32> {
        let word = |i: usize| (i as u32 + 1).wrapping_mul(0x9E37_79B9 ^ (salt as u32 * 7919));
        (0..count)
            .map(|i| (word(i).wrapping_mul(747_796_405) >> 8) as f32 / (1 << 23) as f32 - 1.0)
            .collect()
    };
    let mut k = draw(2, rows * KEY);
    let mut beta: Vec<f32> = draw(4, rows).iter().map(|x| 0.5 + 0.49 * x).collect();
    let mut g: Vec<f32> = draw(5, rows).iter().map(|x| -0.3 * (x + 1.0)).collect();
    match kind {
        Kind::Random => {}
        Kind::Repeated => {
            k = k[..KEY].repeat(rows);
            beta.fill(0.999);
            g.fill(-1e-4);
        }
        Kind::Forgetful => g.iter_mut().for_each(|g| *g *= 60.0),
    }
    Case {
        rows,
        q: draw(1, rows * KEY),
        k,
        v: draw(3, rows * VALUE),
        beta,
        g,
        memory: memory.then(|| draw(6, KEY * VALUE)),
        dout: draw(7, rows * VALUE),
        dmemory: memory.then(|| draw(8, KEY * VALUE)),
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Outputs, the memory after them, and the gradients of q, k, v, beta, g, memory.
fn reference(case: &Case) -> (Vec<f64>, Vec<f64>, [Vec<f64>; 6]) {
    let zero = vec![0.0; KEY * VALUE];
    let normal = |x: &[f32], scale: f64| -> (Vec<f64>, Vec<f64>) {
        let x = wide(x);
        let inverse: Vec<f64> = x.chunks(KEY).map(|x| 1.0 / (dot(x, x) + 1e-6).sqrt()).collect();
        let y = x.iter().enumerate().map(|(i, x)| x * inverse[i / KEY] * scale).collect();
        (y, inverse)
    };
    let scale = 1.0 / (KEY as f64).sqrt();
    let ((q, q_inverse), (k, k_inverse)) = (normal(&case.q, scale), normal(&case.k, 1.0));
    let (v, beta, g) = (wide(&case.v), wide(&case.beta), wide(&case.g));
    let mut memory = case.memory.as_deref().map_or(zero.clone(), wide);
    let (mut out, mut decayed, mut after, mut changes) = (vec![], vec![], vec![], vec![]);
    let column = |memory: &[f64], c: usize, by: &[f64]| -> f64 {
        (0..KEY).map(|i| memory[i * VALUE + c] * by[i]).sum()
    };
    for t in 0..case.rows {
        memory.iter_mut().for_each(|m| *m *= g[t].exp());
        decayed.push(memory.clone());
        let (q, k) = (&q[t * KEY..][..KEY], &k[t * KEY..][..KEY]);
        let change: Vec<f64> =
            (0..VALUE).map(|c| beta[t] * (v[t * VALUE + c] - column(&memory, c, k))).collect();
        for (i, m) in memory.iter_mut().enumerate() {
            *m += k[i / VALUE] * change[i % VALUE];
        }
        out.extend((0..VALUE).map(|c| column(&memory, c, q)));
        after.push(memory.clone());
        changes.push(change);
    }
    let mut dmemory = case.dmemory.as_deref().map_or(zero, wide);
    let dout = wide(&case.dout);
    let (mut dq, mut dk) = (vec![0.0; q.len()], vec![0.0; k.len()]);
    let (mut dv, mut dbeta, mut dg) =
        (vec![0.0; v.len()], vec![0.0; case.rows], vec![0.0; case.rows]);
    for t in (0..case.rows).rev() {
        let (q, k, dout) =
            (&q[t * KEY..][..KEY], &k[t * KEY..][..KEY], &dout[t * VALUE..][..VALUE]);
        for i in 0..KEY {
            dq[t * KEY + i] = dot(&after[t][i * VALUE..][..VALUE], dout);
            (0..VALUE).for_each(|c| dmemory[i * VALUE + c] += q[i] * dout[c]);
        }
        let dchange: Vec<f64> = (0..VALUE).map(|c| column(&dmemory, c, k)).collect();
        for i in 0..KEY {
            dk[t * KEY + i] = dot(&dmemory[i * VALUE..][..VALUE], &changes[t])
                - beta[t] * dot(&decayed[t][i * VALUE..][..VALUE], &dchange);
        }
        for c in 0..VALUE {
            dv[t * VALUE + c] = beta[t] * dchange[c];
            dbeta[t] += dchange[c] * (v[t * VALUE + c] - column(&decayed[t], c, k));
            (0..KEY).for_each(|i| dmemory[i * VALUE + c] -= beta[t] * k[i] * dchange[c]);
        }
        dg[t] = dot(&dmemory, &decayed[t]);
        dmemory.iter_mut().for_each(|d| *d *= g[t].exp());
    }
    let back = |dy: &[f64], x: &[f32], inverse: &[f64], scale: f64| -> Vec<f64> {
        let x = wide(x);
        (0..x.len())
            .map(|i| {
                let (row, inverse) = (i / KEY * KEY, inverse[i / KEY]);
                let share = dot(&x[row..][..KEY], &dy[row..][..KEY]);
                scale * inverse * (dy[i] - x[i] * inverse * inverse * share)
            })
            .collect()
    };
    let (dq, dk) = (back(&dq, &case.q, &q_inverse, scale), back(&dk, &case.k, &k_inverse, 1.0));
    (out, memory, [dq, dk, dv, dbeta, dg, dmemory])
}

fn near(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
    for (f, e) in found.iter().zip(expected) {
        let off = (f64::from(*f) - e).abs() / scale;
        assert!(off <= tolerance, "{what}: {f} and {e}, of {scale}");
    }
}

#[test]
fn chunks_equal_the_recurrence_in_f64_forward_and_backward() {
    for (kind, rows, memory) in CASES {
        let case = case(kind, rows, memory);
        let (out, after, gradients) = reference(&case);
        // Rows as they lie in a wider matrix, q, k and v beside each other.
        let stride = 2 * KEY + VALUE;
        let parts = case.q.chunks(KEY).zip(case.k.chunks(KEY)).zip(case.v.chunks(VALUE));
        let packed: Vec<f32> = parts.flat_map(|((q, k), v)| [q, k, v].concat()).collect();
        let head = Head {
            q: &packed,
            k: &packed[KEY..],
            v: &packed[2 * KEY..],
            stride,
            rows,
            beta: &case.beta,
            g: &case.g,
            key_dim: KEY,
            value_dim: VALUE,
        };
        let what = format!("{kind:?} {rows}");
        let memory = case.memory.as_deref();
        let (found, kept) = vectorized(Forward { head, memory });
        near(&format!("{what} out"), &found, &out, 1e-5);
        near(&format!("{what} memory"), &kept, &after, 1e-5);
        let (dout, dmemory) = (case.dout.as_slice(), case.dmemory.as_deref());
        let found = vectorized(Backward { head, memory, dout, dout_stride: VALUE, dmemory });
        let found = [found.dq, found.dk, found.dv, found.dbeta, found.dg, found.dmemory];
        let names = ["dq", "dk", "dv", "dbeta", "dg", "dmemory"];
        for ((found, expected), name) in found.iter().zip(&gradients).zip(names) {
            near(&format!("{what} {name}"), found, expected, 1e-4);
        }
    }
}
