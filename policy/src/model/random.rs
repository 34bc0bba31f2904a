//! Reproducible draws for fresh weights: SHA-256 in counter mode, keyed by purpose, seed and name,
//! so that no weight depends on the order in which weights are made.

use rayon::prelude::*;
use sha2::{Digest, Sha256};

/// Draws of one block.
const BLOCK: usize = 8;
/// Blocks that one task makes.
const TASK: usize = 1024;

/// Draws that can be made from any place on.
pub(crate) struct Draws(Sha256);

impl Draws {
    pub(crate) fn new(purpose: &str, seed: u64, name: &str) -> Self {
        let mut key = Sha256::new();
        key.update(purpose);
        key.update(seed.to_le_bytes());
        key.update((name.len() as u64).to_le_bytes());
        key.update(name);
        Self(key)
    }

    /// The draws of block `index`, in (0, 1), from 24 bits each.
    fn block(&self, index: u64) -> [f64; BLOCK] {
        let mut hash = self.0.clone();
        hash.update(index.to_le_bytes());
        let bytes: [u8; 32] = hash.finalize().into();
        let (words, _) = bytes.as_chunks::<4>();
        let unit = |i: usize| {
            let word = words.get(i).copied().unwrap_or_default();
            (f64::from(u32::from_le_bytes(word) >> 8) + 0.5) / f64::from(1u32 << 24)
        };
        std::array::from_fn(unit)
    }

    fn fill(&self, count: usize, f: impl Fn([f64; BLOCK]) -> [f64; BLOCK] + Sync) -> Vec<f32> {
        let mut values = vec![0.0; count];
        values.par_chunks_mut(TASK * BLOCK).enumerate().for_each(|(task, values)| {
            for (i, values) in values.chunks_mut(BLOCK).enumerate() {
                let draws = f(self.block((task * TASK + i) as u64));
                values.iter_mut().zip(draws).for_each(|(value, draw)| *value = draw as f32);
            }
        });
        values
    }

    /// Uniform draws in ±`bound`.
    pub(crate) fn within(&self, count: usize, bound: f64) -> Vec<f32> {
        self.fill(count, |draws| draws.map(|u| (2.0 * u - 1.0) * bound))
    }

    /// Normal draws of deviation `spread` (Box and Muller).
    pub(crate) fn normals(&self, count: usize, spread: f64) -> Vec<f32> {
        self.fill(count, |draws| {
            std::array::from_fn(|i| {
                let radius = spread * (-2.0 * draws[i / 2 * 2].ln()).sqrt();
                let angle = std::f64::consts::TAU * draws[i / 2 * 2 + 1];
                radius * if i % 2 == 0 { angle.cos() } else { angle.sin() }
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Draws;

    #[test]
    fn draws_are_reproducible_and_spread_as_they_should() {
        let normals = Draws::new("p", 7, "n").normals(20_001, 0.5);
        assert_eq!(normals, Draws::new("p", 7, "n").normals(20_001, 0.5));
        assert_ne!(normals, Draws::new("p", 8, "n").normals(20_001, 0.5));
        let deviation = (normals.iter().map(|v| v * v).sum::<f32>() / 20_001.0).sqrt();
        assert!((deviation - 0.5).abs() < 0.01, "{deviation}");
        let uniform = Draws::new("p", 7, "n").within(20_000, 2.0);
        assert!(uniform.iter().all(|v| v.abs() < 2.0));
        assert!((uniform.iter().map(|v| v.abs()).sum::<f32>() / 20_000.0 - 1.0).abs() < 0.02);
    }
}
