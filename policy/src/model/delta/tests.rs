//! Chunks and single steps give what the recurrence gives in f64, and each other's gradients.
#![allow(clippy::unwrap_used)]

use burn::tensor::{Device, Tensor, TensorData};

use super::{CHUNK, Heads};
use crate::model::random::Draws;

const KEY: usize = 5;
const VALUE: usize = 3;

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

/// One head's rows: `q`, `k`, `v`, `beta`, `g`, and the memory before them.
struct Case {
    len: usize,
    parts: [Vec<f32>; 5],
    memory: Vec<f32>,
}

fn normalised(mut rows: Vec<f32>) -> Vec<f32> {
    for row in rows.chunks_mut(KEY) {
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        row.iter_mut().for_each(|x| *x /= norm);
    }
    rows
}

fn case(kind: Kind, len: usize, seed: u64) -> Case {
    let draw = |name: &str, count| Draws::new("delta-test", seed, name).within(count, 1.0);
    let mut keys = normalised(draw("k", len * KEY));
    let mut beta: Vec<f32> = draw("beta", len).iter().map(|x| 0.5 + 0.49 * x).collect();
    let mut g: Vec<f32> = draw("g", len).iter().map(|x| -0.3 * (x + 1.0)).collect();
    match kind {
        Kind::Random => {}
        Kind::Repeated => {
            keys = keys[..KEY].repeat(len);
            beta.fill(0.999);
            g.fill(-1e-4);
        }
        Kind::Forgetful => g.iter_mut().for_each(|g| *g *= 60.0),
    }
    let parts = [normalised(draw("q", len * KEY)), keys, draw("v", len * VALUE), beta, g];
    Case { len, parts, memory: draw("memory", KEY * VALUE) }
}

fn heads(case: &Case, device: &Device) -> (Heads, Tensor<3>) {
    let tensor = |values: &[f32], width: usize| {
        let data = TensorData::new(values.to_vec(), [1, values.len() / width, width]);
        Tensor::<3>::from_data(data, device)
    };
    let [q, k, v, beta, g] = &case.parts;
    let (q, k, v) = (tensor(q, KEY), tensor(k, KEY), tensor(v, VALUE));
    let heads = Heads { q, k, v, beta: tensor(beta, 1), g: tensor(g, 1) };
    (heads, tensor(&case.memory, VALUE))
}

/// Row by row in f64: the outputs and the memory after them.
fn reference(case: &Case) -> (Vec<f64>, Vec<f64>) {
    let wide = |part: &Vec<f32>| part.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let [q, k, v, beta, g] = case.parts.each_ref().map(wide);
    let mut memory = wide(&case.memory);
    let mut out = Vec::new();
    for row in 0..case.len {
        memory.iter_mut().for_each(|m| *m *= g[row].exp());
        let (q, k) = (&q[row * KEY..][..KEY], &k[row * KEY..][..KEY]);
        for column in 0..VALUE {
            let held: f64 = (0..KEY).map(|i| memory[i * VALUE + column] * k[i]).sum();
            let change = beta[row] * (v[row * VALUE + column] - held);
            for (i, k) in k.iter().enumerate() {
                memory[i * VALUE + column] += k * change;
            }
        }
        let read = |column: usize| (0..KEY).map(|i| memory[i * VALUE + column] * q[i]).sum::<f64>();
        out.extend((0..VALUE).map(read));
    }
    (out, memory)
}

fn step_by_step(heads: &Heads, mut memory: Tensor<3>) -> (Tensor<3>, Tensor<3>) {
    let mut out = Vec::new();
    for row in 0..heads.q.dims()[1] {
        let at = |x: &Tensor<3>| x.clone().narrow(1, row, 1);
        let Heads { q, k, v, beta, g } = heads;
        let one = Heads { q: at(q), k: at(k), v: at(v), beta: at(beta), g: at(g) };
        let (read, after) = one.step(Some(memory));
        out.push(read);
        memory = after;
    }
    (Tensor::cat(out, 1), memory)
}

fn values(tensor: Tensor<3>) -> Vec<f32> {
    tensor.into_data().try_into_vec().unwrap()
}

fn near(what: &str, found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-3f64, |m, v| m.max(v.abs()));
    for (f, e) in found.iter().zip(expected) {
        let off = (f64::from(*f) - e).abs() / scale;
        assert!(off <= tolerance, "{what}: {f} and {e}, of {scale}");
    }
}

const CASES: [(Kind, usize); 10] = [
    (Kind::Random, 1),
    (Kind::Random, 2),
    (Kind::Random, 37),
    (Kind::Random, CHUNK),
    (Kind::Random, CHUNK + 1),
    (Kind::Random, 3 * CHUNK + 7),
    (Kind::Repeated, CHUNK),
    (Kind::Repeated, 2 * CHUNK + 9),
    (Kind::Forgetful, CHUNK),
    (Kind::Forgetful, 2 * CHUNK + 9),
];

#[test]
fn chunks_and_steps_equal_the_recurrence_in_f64() {
    for (i, (kind, len)) in CASES.into_iter().enumerate() {
        let case = case(kind, len, i as u64);
        let (heads, memory) = heads(&case, &Device::flex());
        let (expected, after) = reference(&case);
        let what = format!("{kind:?} {len}");
        let (out, kept) = heads.clone().chunks(Some(memory.clone()));
        near(&format!("{what} chunks"), &values(out), &expected, 1e-5);
        near(&format!("{what} memory of chunks"), &values(kept), &after, 1e-5);
        let (out, kept) = step_by_step(&heads, memory);
        near(&format!("{what} steps"), &values(out), &expected, 1e-5);
        near(&format!("{what} memory of steps"), &values(kept), &after, 1e-5);
    }
}

#[test]
fn chunks_have_the_gradients_of_the_steps() {
    let device = Device::flex().autodiff();
    for (i, (kind, len)) in CASES.into_iter().enumerate() {
        let case = case(kind, len, i as u64);
        let run = |chunked: bool| {
            let (heads, memory) = heads(&case, &device);
            let Heads { q, k, v, beta, g } = heads;
            let leaves = [q, k, v, beta, g, memory].map(Tensor::require_grad);
            let [q, k, v, beta, g, memory] = leaves.clone();
            let heads = Heads { q, k, v, beta, g };
            let (out, kept) = match chunked {
                true => heads.chunks(Some(memory)),
                false => step_by_step(&heads, memory),
            };
            // Any smooth function of all that comes out.
            let loss = out.sin().sum().add(kept.sin().sum());
            let mut graph = loss.backward();
            leaves.map(|leaf| values(leaf.grad_remove(&mut graph).unwrap()))
        };
        let names = ["q", "k", "v", "beta", "g", "memory"];
        for ((found, expected), name) in run(true).iter().zip(run(false)).zip(names) {
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            near(&format!("{kind:?} {len} d{name}"), found, &expected, 1e-4);
        }
    }
}
