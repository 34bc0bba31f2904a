//! Seeded draws for simulations: a counter-based hash, so that a game depends on nothing but its seed.
//!
//! Draw `i` of a stream is the first 8 bytes (little-endian) of the length-prefixed SHA-256 over the
//! stream's domain, seed and `i`. No state of the process, no library's generator: the same on every
//! machine and in every version.

use protocol::Digest;

/// A stream of draws.
#[derive(Clone, Debug)]
pub struct Draws {
    domain: &'static str,
    seed: u64,
    counter: u64,
}

impl Draws {
    /// The stream of `seed` in a domain; streams of different domains are unrelated.
    pub fn new(domain: &'static str, seed: u64) -> Self {
        Self { domain, seed, counter: 0 }
    }

    /// 64 uniform bits.
    pub fn bits(&mut self) -> u64 {
        let digest =
            Digest::of_parts(self.domain, &[&self.seed.to_le_bytes(), &self.counter.to_le_bytes()]);
        self.counter = self.counter.wrapping_add(1);
        digest.0.iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    /// Uniform over `0..bound` without modulo bias: draws of the incomplete last block are taken
    /// again. 0 for a bound of 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        // 2^64 mod bound values at the top belong to the incomplete block.
        let excess = (u64::MAX % bound + 1) % bound;
        loop {
            let bits = self.bits();
            if bits <= u64::MAX - excess {
                return bits % bound;
            }
        }
    }

    /// Uniform over `low..=high`; `low` where the range is empty.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        match high.checked_sub(low).map(|span| span.checked_add(1)) {
            None => low,
            Some(Some(count)) => low + self.below(count),
            Some(None) => self.bits(),
        }
    }

    /// True with probability `per_mille / 1000`.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// One of `items`; nothing where there are none.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        let index = self.below(items.len() as u64);
        items.get(usize::try_from(index).ok()?)
    }

    /// Fisher–Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let other = usize::try_from(self.below(last as u64 + 1)).unwrap_or(last);
            items.swap(last, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_depends_on_domain_and_seed_only() {
        let take = |domain, seed| {
            let mut draws = Draws::new(domain, seed);
            [draws.bits(), draws.bits(), draws.bits()]
        };
        assert_eq!(take("a", 1), take("a", 1));
        assert_ne!(take("a", 1), take("b", 1));
        assert_ne!(take("a", 1), take("a", 2));
    }

    #[test]
    fn the_stream_is_pinned() {
        // From a second implementation of the same definition, in Python.
        let mut draws = Draws::new("pin", 7);
        assert_eq!(
            [draws.bits(), draws.below(1000), draws.within(5, 9)],
            [4_730_979_424_896_605_713, 216, 6]
        );
    }

    #[test]
    fn bounds_hold_at_the_edges() {
        let mut draws = Draws::new("edges", 0);
        assert_eq!(draws.below(0), 0);
        assert_eq!(draws.below(1), 0);
        assert_eq!(draws.within(3, 3), 3);
        assert_eq!(draws.within(3, 2), 3);
        assert_eq!(draws.pick::<u8>(&[]), None);
        draws.within(0, u64::MAX);
        assert!((0..1000).all(|_| draws.below(u64::MAX) < u64::MAX));
        assert!((0..1000).all(|_| (2..=4).contains(&draws.within(2, 4))));
        assert!((0..100).all(|_| !draws.chance(0) && draws.chance(1000)));
    }

    #[test]
    fn no_value_is_likelier_for_a_bound_that_does_not_divide_the_range() {
        // Three quarters of the range: taking the rest modulo the bound would give the first third
        // half of all draws.
        let mut draws = Draws::new("bias", 1);
        let low = (0..3000).filter(|_| draws.below(3 << 62) < 1 << 62).count();
        assert!((900..1100).contains(&low), "{low} of 3000");
    }

    #[test]
    fn a_shuffle_keeps_the_items() {
        let mut items: Vec<u32> = (0..50).collect();
        Draws::new("shuffle", 3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
