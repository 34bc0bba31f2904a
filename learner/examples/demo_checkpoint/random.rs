//! SplitMix64: small, seeded, the same everywhere.

/// The generator.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Uniform in lo..=hi.
    pub(crate) fn between(&mut self, lo: i64, hi: i64) -> i64 {
        lo + ((self.unit() * (hi - lo + 1) as f64) as i64).min(hi - lo)
    }

    pub(crate) fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// One of `items` by its share in percent; the last where the shares fall short of 100.
    pub(crate) fn pick<T: Copy>(&mut self, items: &[(T, i64)]) -> Option<T> {
        let mut draw = self.between(1, 100);
        let chosen = items.iter().find(|(_, share)| {
            draw -= share;
            draw <= 0
        });
        chosen.or(items.last()).map(|(item, _)| *item)
    }
}
