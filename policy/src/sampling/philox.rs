//! Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11) and the Gumbel noise drawn from it.
//!
//! **Layout.** The key is the first 8 bytes of the lease's noise key as two little-endian words. The
//! counter is `[id, position, 0, 0]`: one block for each token id at each stream position, whatever
//! else is sampled. Of the block `[x0, x1, _, _]` the 52 bits `k = x0 · 2²⁰ + ⌊x1 / 2¹²⌋` give
//! `u = (k + ½) · 2⁻⁵²`, which is exact in f64 and lies strictly inside (0, 1).

use protocol::NoiseKey;

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

/// How many blocks [`high_low`] makes at a time.
pub(super) const LANES: usize = 16;

/// `a · b` as (high, low) words.
#[inline(always)]
fn wide(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// One Philox-4x32-10 block.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut c0, mut c1, mut c2, mut c3], [mut k0, mut k1]) = (counter, key);
    for _ in 0..10 {
        let ((h0, l0), (h1, l1)) = (wide(M0, c0), wide(M1, c2));
        (c0, c1, c2, c3) = (h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0);
        (k0, k1) = (k0.wrapping_add(W0), k1.wrapping_add(W1));
    }
    [c0, c1, c2, c3]
}

/// Words 0 and 1 of the blocks of `ids` at `position`: [`philox4x32`], a vector at a time.
#[inline(always)]
pub(super) fn high_low(
    key: [u32; 2],
    position: u32,
    ids: &[u32; LANES],
) -> ([u32; LANES], [u32; LANES]) {
    let [mut k0, mut k1] = key;
    let (mut c0, mut c1, mut c2, mut c3) = (*ids, [position; LANES], [0; LANES], [0; LANES]);
    for _ in 0..10 {
        for i in 0..LANES {
            let ((h0, l0), (h1, l1)) = (wide(M0, c0[i]), wide(M1, c2[i]));
            (c0[i], c1[i], c2[i], c3[i]) = (h1 ^ c1[i] ^ k0, l1, h0 ^ c3[i] ^ k1, l0);
        }
        (k0, k1) = (k0.wrapping_add(W0), k1.wrapping_add(W1));
    }
    (c0, c1)
}

/// `g = −ln(−ln u)` for the block words `high`, `low`, in f64. Lies in (−3.7, 36.8).
pub(super) fn gumbel(high: u32, low: u32) -> f64 {
    let bits = (u64::from(high) << 20) | u64::from(low >> 12);
    let u = (bits as f64 + 0.5) * (0.5f64).powi(52);
    -(-u.ln()).ln()
}

/// The Gumbel noise of token `id` at stream position `position` under `key`. Pure.
pub fn noise(key: &NoiseKey, position: u32, id: u32) -> f64 {
    let [high, low, ..] = philox4x32([id, position, 0, 0], key.philox());
    gumbel(high, low)
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::Digest;

    /// The vectors for `philox4x32 10` of Random123's `tests/kat_vectors`.
    #[test]
    fn philox_gives_the_known_answers_of_random123() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, answer) in cases {
            assert_eq!(philox4x32(counter, key), answer);
        }
    }

    #[test]
    fn vector_blocks_equal_single_blocks() {
        let ids: [u32; LANES] = std::array::from_fn(|i| (i as u32).wrapping_mul(0x9E37_79B9));
        for (key, position) in [([0, 0], 0), ([7, u32::MAX], 123), ([u32::MAX, 1], u32::MAX)] {
            let (high, low) = high_low(key, position, &ids);
            for (i, &id) in ids.iter().enumerate() {
                let [x0, x1, ..] = philox4x32([id, position, 0, 0], key);
                assert_eq!((high[i], low[i]), (x0, x1));
            }
        }
    }

    #[test]
    fn the_uniform_never_touches_zero_or_one() {
        let (least, most) = (gumbel(0, 0), gumbel(u32::MAX, u32::MAX));
        assert!(least.is_finite() && most.is_finite());
        assert!((least + 3.603).abs() < 1e-2, "{least}");
        assert!((most - 36.737).abs() < 1e-2, "{most}");
    }

    /// Mean γ and variance π²/6 within five standard errors.
    #[test]
    fn noise_has_the_moments_of_a_gumbel() {
        let key = NoiseKey(Digest::of(b"moments"));
        let n = 200_000u32;
        let draws: Vec<f64> = (0..n).map(|i| noise(&key, i / 500, i % 500)).collect();
        let mean = draws.iter().sum::<f64>() / f64::from(n);
        let variance = draws.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / f64::from(n);
        assert!((mean - 0.577_215_66).abs() < 5.0 * 1.2826 / f64::from(n).sqrt(), "{mean}");
        assert!((variance - 1.644_934).abs() < 0.05, "{variance}");
    }

    #[test]
    fn noise_changes_with_key_position_and_id() {
        let key = NoiseKey(Digest::of(b"a"));
        let all = [
            noise(&key, 1, 2),
            noise(&key, 2, 1),
            noise(&key, 1, 3),
            noise(&NoiseKey(Digest::of(b"b")), 1, 2),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all.iter().skip(i + 1).all(|b| a != b));
        }
        assert_eq!(noise(&key, 1, 2), all[0]);
    }
}
