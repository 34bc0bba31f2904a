//! Group-relative advantages: what a rollout was worth beside the others of its task.
//!
//! A group is the N rollouts of one task and seed under one policy. Its advantages are
//! `r - baseline`, where the baseline is the mean of the group's rewards, or of all but the rollout's
//! own ([`Baseline::LeaveOneOut`]). Under [`ScaleRewards::Group`] they are divided by `std(r) + 1e-4`
//! with the population standard deviation. Equal rewards give exactly 0, so such a group moves the policy only through
//! the KL term, which does still apply to it where `beta` is not 0 (as in TRL).

mod gae;

pub use gae::{TokenAdvantages, gae, whiten};

use serde::{Deserialize, Serialize};

/// Added to the standard deviation, in reward units.
pub const STD_EPSILON: f64 = 1e-4;

/// The largest size of a reward, so that nothing here can overflow.
pub const LARGEST: f64 = 1e100;

/// How centred rewards are scaled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleRewards {
    /// By the group's population standard deviation plus [`STD_EPSILON`].
    #[default]
    Group,
    /// Not at all (Dr. GRPO).
    None,
}

/// What rewards are compared with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Baseline {
    /// The mean of the group.
    #[default]
    Mean,
    /// RLOO: the mean of the others in the group.
    LeaveOneOut,
}

/// What the rewards of one group amount to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupAdvantages {
    /// One a rollout, in the order of the rewards.
    pub advantages: Vec<f64>,
    /// Mean reward.
    pub mean: f64,
    /// Population standard deviation of the rewards; exactly 0 where all are equal.
    pub std: f64,
}

impl GroupAdvantages {
    /// Whether the rewards differ: only then does the group carry a policy gradient.
    pub fn mixed(&self) -> bool {
        self.std > 0.0
    }
}

/// A group that has no advantages.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum AdvantageError {
    /// Nothing to compare with.
    #[error("a group needs at least 2 rewards, not {0}")]
    TooFew(usize),
    /// NaN, infinite or absurdly large.
    #[error(
        "reward {index} of the group is {value}; rewards are numbers of size at most {LARGEST:e}"
    )]
    NotANumber {
        /// Which.
        index: usize,
        /// Its value.
        value: f64,
    },
}

/// The advantages of one group by its mean.
///
/// # Errors
/// As [`relative_advantages`].
pub fn group_advantages(
    rewards: &[f64],
    scale: ScaleRewards,
) -> Result<GroupAdvantages, AdvantageError> {
    relative_advantages(rewards, Baseline::Mean, scale)
}

/// The advantages of one group.
///
/// # Errors
/// Fewer than two rewards, or one that is not a number of size at most [`LARGEST`].
pub fn relative_advantages(
    rewards: &[f64],
    baseline: Baseline,
    scale: ScaleRewards,
) -> Result<GroupAdvantages, AdvantageError> {
    let mut group = centred(rewards)?;
    let others = rewards.len() as f64 / (rewards.len() as f64 - 1.0);
    for it in &mut group.advantages {
        if baseline == Baseline::LeaveOneOut {
            *it *= others;
        }
        if scale == ScaleRewards::Group {
            *it /= group.std + STD_EPSILON;
        }
    }
    Ok(group)
}

/// Rewards less their mean.
fn centred(rewards: &[f64]) -> Result<GroupAdvantages, AdvantageError> {
    if rewards.len() < 2 {
        return Err(AdvantageError::TooFew(rewards.len()));
    }
    let usable = |reward: &f64| reward.abs() <= LARGEST;
    if let Some((index, &value)) = rewards.iter().enumerate().find(|(_, r)| !usable(r)) {
        return Err(AdvantageError::NotANumber { index, value });
    }
    let first = rewards.first().copied().unwrap_or_default();
    // The mean of equal numbers need not round back to them: 0 is decided here, not computed.
    if rewards.iter().all(|reward| *reward == first) {
        return Ok(GroupAdvantages { advantages: vec![0.0; rewards.len()], mean: first, std: 0.0 });
    }
    let count = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / count;
    let centred: Vec<f64> = rewards.iter().map(|reward| reward - mean).collect();
    let std = (centred.iter().map(|c| c * c).sum::<f64>() / count).sqrt();
    Ok(GroupAdvantages { advantages: centred, mean, std })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advantages(rewards: &[f64], scale: ScaleRewards) -> Vec<f64> {
        group_advantages(rewards, scale).expect("finite rewards").advantages
    }

    #[test]
    fn rewards_are_centred_then_scaled_by_the_population_deviation() {
        let rewards = [1.0, 0.0, 0.0, 1.0];
        assert_eq!(advantages(&rewards, ScaleRewards::None), [0.5, -0.5, -0.5, 0.5]);
        let scaled = advantages(&rewards, ScaleRewards::Group);
        let one = 0.5 / (0.5 + 1e-4);
        assert_eq!(scaled, [one, -one, -one, one]);
    }

    #[test]
    fn equal_rewards_give_exactly_zero_and_no_nan() {
        for reward in [0.37, 0.1, 1.0 / 3.0, -7.3, 0.0, 1e99, -1e100, 5e-324] {
            for n in [2, 3, 4, 7] {
                for scale in [ScaleRewards::Group, ScaleRewards::None] {
                    let got = group_advantages(&vec![reward; n], scale).expect("finite");
                    assert_eq!(got.advantages, vec![0.0; n]);
                    assert!(!got.mixed() && got.std == 0.0 && got.mean == reward);
                }
            }
        }
    }

    #[test]
    fn extreme_rewards_stay_finite() {
        for rewards in [[1e100, -1e100, -1e100], [1e-320, 0.0, 0.0], [1.0, 1.0 + 3e-16, 0.9]] {
            for scale in [ScaleRewards::Group, ScaleRewards::None] {
                let got = group_advantages(&rewards, scale).expect("finite");
                assert!(got.advantages.iter().all(|a| a.is_finite()), "{rewards:?} {got:?}");
            }
        }
    }

    #[test]
    fn a_group_of_one_and_rewards_that_are_no_numbers_are_refused() {
        assert_eq!(group_advantages(&[1.0], ScaleRewards::Group), Err(AdvantageError::TooFew(1)));
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX] {
            assert!(matches!(
                group_advantages(&[0.0, bad], ScaleRewards::None),
                Err(AdvantageError::NotANumber { index: 1, .. })
            ));
        }
    }
}
