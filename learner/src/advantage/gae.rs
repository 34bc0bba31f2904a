//! Advantages of tokens by a value head: generalized advantage estimation (arXiv 1506.02438).

/// Added to the variance that whitening divides by.
const WHITEN_EPSILON: f64 = 1e-8;

/// What a value head's rollout amounts to, one value a scored token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenAdvantages {
    /// `A(t) = delta(t) + gamma lam A(t + 1)`, `delta(t) = r(t) + gamma V(t + 1) - V(t)`.
    pub advantages: Vec<f64>,
    /// What the values should have been: `A + V`.
    pub returns: Vec<f64>,
}

/// The advantages of one rollout's scored tokens. The whole `reward` comes with the last of them, and
/// nothing after it: an episode that was cut short ended there too. Ids between turns that were not
/// sampled are no steps.
pub fn gae(reward: f64, values: &[f64], gamma: f64, lam: f64) -> TokenAdvantages {
    let mut advantages = vec![0.0; values.len()];
    let (mut next_value, mut next_advantage, mut reward) = (0.0, 0.0, reward);
    for (value, advantage) in values.iter().zip(&mut advantages).rev() {
        let delta = reward + gamma * next_value - value;
        *advantage = delta + gamma * lam * next_advantage;
        (next_value, next_advantage, reward) = (*value, *advantage, 0.0);
    }
    let returns = advantages.iter().zip(values).map(|(a, v)| a + v).collect();
    TokenAdvantages { advantages, returns }
}

/// Shifts and scales the advantages of a step's tokens to mean 0 and variance 1 over all of them, as
/// TRL's PPO does (Bessel's correction, 1e-8 under the root). A single token's becomes 0.
pub fn whiten<'a>(rows: impl Iterator<Item = &'a mut TokenAdvantages>) {
    let mut all: Vec<&mut f64> = rows.flat_map(|row| &mut row.advantages).collect();
    let count = all.len() as f64;
    let mean = all.iter().map(|it| **it).sum::<f64>() / count.max(1.0);
    let squares: f64 = all.iter().map(|it| (**it - mean).powi(2)).sum();
    let scale = 1.0 / (squares / (count - 1.0).max(1.0) + WHITEN_EPSILON).sqrt();
    all.iter_mut().for_each(|it| **it = (**it - mean) * scale);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Advantages as the paper defines them: the sum of all later deltas, discounted.
    fn by_definition(reward: f64, values: &[f64], gamma: f64, lam: f64) -> Vec<f64> {
        let n = values.len();
        let at = |t: usize| values.get(t).copied().unwrap_or(0.0);
        let delta = |t: usize| f64::from(u8::from(t + 1 == n)) * reward + gamma * at(t + 1) - at(t);
        (0..n)
            .map(|t| (t..n).map(|s| (gamma * lam).powf((s - t) as f64) * delta(s)).sum())
            .collect()
    }

    #[test]
    fn advantages_are_the_discounted_sums_of_later_deltas() {
        let values = [0.3, -0.2, 0.9, 0.4, 0.1];
        for (gamma, lam) in [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0), (0.0, 0.5)] {
            for len in 0..=values.len() {
                let got = gae(0.7, &values[..len], gamma, lam);
                let want = by_definition(0.7, &values[..len], gamma, lam);
                for (g, w) in got.advantages.iter().zip(&want) {
                    assert!((g - w).abs() < 1e-14, "{gamma} {lam} {len}: {g} {w}");
                }
                assert_eq!(got.advantages.len(), len);
            }
        }
    }

    #[test]
    fn without_discount_the_returns_are_the_reward() {
        let got = gae(1.0, &[0.2, 0.5, -0.3], 1.0, 1.0);
        assert!(got.returns.iter().all(|it| (it - 1.0).abs() < 1e-15), "{got:?}");
    }

    #[test]
    fn whitening_spans_all_rows_and_survives_one_token_and_equal_ones() {
        let row = |values: &[f64]| TokenAdvantages { advantages: values.to_vec(), returns: vec![] };
        let mut rows = [row(&[1.0, 2.0]), row(&[]), row(&[6.0])];
        whiten(rows.iter_mut());
        let all: Vec<f64> = rows.iter().flat_map(|it| it.advantages.clone()).collect();
        assert!(all.iter().sum::<f64>().abs() < 1e-12);
        assert!((all.iter().map(|a| a * a).sum::<f64>() / 2.0 - 1.0).abs() < 1e-6);
        for values in [vec![3.0], vec![0.5, 0.5], vec![]] {
            let mut rows = [row(&values)];
            whiten(rows.iter_mut());
            assert_eq!(rows[0].advantages, vec![0.0; values.len()]);
        }
    }
}
