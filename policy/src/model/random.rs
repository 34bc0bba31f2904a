//! Reproducible draws for fresh weights: SHA-256 in counter mode, keyed by purpose, seed and name,
//! so that no weight depends on the order in which weights are made.

use sha2::{Digest, Sha256};

/// A stream of draws.
pub(crate) struct Uniform {
    key: Sha256,
    block: u64,
    words: Vec<u32>,
}

impl Uniform {
    pub(crate) fn new(purpose: &str, seed: u64, name: &str) -> Self {
        let mut key = Sha256::new();
        key.update(purpose);
        key.update(seed.to_le_bytes());
        key.update((name.len() as u64).to_le_bytes());
        key.update(name);
        Self { key, block: 0, words: Vec::new() }
    }

    /// The next draw, in (0, 1), from 24 bits.
    fn next(&mut self) -> f64 {
        let word = self.words.pop().unwrap_or_else(|| {
            let mut hash = self.key.clone();
            hash.update(self.block.to_le_bytes());
            self.block += 1;
            let bytes = hash.finalize();
            let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            self.words = words.rev().collect();
            self.words.pop().unwrap_or(0)
        });
        (f64::from(word >> 8) + 0.5) / f64::from(1u32 << 24)
    }

    /// Draws in ±`bound`.
    pub(crate) fn within(&mut self, count: usize, bound: f64) -> Vec<f32> {
        (0..count).map(|_| ((2.0 * self.next() - 1.0) * bound) as f32).collect()
    }

    /// Normal draws of deviation `spread` (Box and Muller).
    pub(crate) fn normals(&mut self, count: usize, spread: f64) -> Vec<f32> {
        let mut values = Vec::with_capacity(count + 1);
        while values.len() < count {
            let radius = spread * (-2.0 * self.next().ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * self.next()).sin_cos();
            values.extend([(radius * cos) as f32, (radius * sin) as f32]);
        }
        values.truncate(count);
        values
    }
}

#[cfg(test)]
mod tests {
    use super::Uniform;

    #[test]
    fn draws_are_reproducible_and_spread_as_they_should() {
        let normals = Uniform::new("p", 7, "n").normals(20_001, 0.5);
        assert_eq!(normals, Uniform::new("p", 7, "n").normals(20_001, 0.5));
        assert_ne!(normals, Uniform::new("p", 8, "n").normals(20_001, 0.5));
        let deviation = (normals.iter().map(|v| v * v).sum::<f32>() / 20_001.0).sqrt();
        assert!((deviation - 0.5).abs() < 0.01, "{deviation}");
        let uniform = Uniform::new("p", 7, "n").within(20_000, 2.0);
        assert!(uniform.iter().all(|v| v.abs() < 2.0));
        assert!((uniform.iter().map(|v| v.abs()).sum::<f32>() / 20_000.0 - 1.0).abs() < 0.02);
    }
}
