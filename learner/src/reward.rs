//! Reward protocols: how the learner turns a checked episode into the number that it trains on.
//!
//! All read the score of the learner's own replay and the checked trace, never an actor's claim and
//! never the policy's text. The environment's strict success is reported unchanged beside whatever
//! the training reward is. A recipe may weigh several: the training reward is then the weighted sum,
//! as with TRL's `reward_weights`.

use std::{fmt, ops::RangeInclusive, str::FromStr};

use environments::{Description, Score};
use protocol::{CallKind, TraceRow};
use serde::{Deserialize, Serialize};

/// Milestone that [`RewardProtocol::TrustedMilestonesV1`] reads: the right record was looked up.
pub const LOOKUP: &str = "lookup_success";
/// Milestone that [`RewardProtocol::TrustedMilestonesV1`] reads: the right result was calculated.
pub const CALCULATION: &str = "calculation_success";

const LOOKUP_BONUS: f64 = 0.15;
const CALCULATION_BONUS: f64 = 0.25;
const SUCCESS_BONUS: f64 = 0.60;
const ERROR_PENALTY: f64 = 0.05;

/// How rewards are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RewardProtocol {
    /// The environment's own score, finite and within its declared range.
    #[default]
    #[serde(rename = "environment")]
    Environment,
    /// `clip(0.15 lookup + 0.25 calculation + 0.60 success - 0.05 errors, 0, 1)` over milestones that
    /// the environment sets once each; errors are the calls that ran and raised. A partial solution
    /// earns up to 0.40, so a mean reward is no success rate.
    #[serde(rename = "trusted-milestones-v1")]
    TrustedMilestonesV1,
}

impl RewardProtocol {
    /// All of them, as recipes name them.
    pub const NAMES: [(&str, Self); 2] =
        [("environment", Self::Environment), ("trusted-milestones-v1", Self::TrustedMilestonesV1)];

    /// Whether it can score this environment.
    ///
    /// # Errors
    /// The environment lacks what the protocol reads.
    pub fn check(self, environment: &Description) -> Result<(), RewardError> {
        if self == Self::Environment {
            return Ok(());
        }
        for name in [LOOKUP, CALCULATION] {
            if !environment.milestones.iter().any(|known| known == name) {
                return Err(RewardError::NoMilestone { protocol: self, name });
            }
        }
        Ok(())
    }

    /// The reward of an episode with this score and trace; `range` is what the environment declares.
    ///
    /// # Errors
    /// A score that breaks the protocol's rules.
    pub fn reward(
        self,
        range: &RangeInclusive<f64>,
        score: &Score,
        rows: &[TraceRow],
    ) -> Result<Reward, RewardError> {
        if !score.reward.is_finite() || !range.contains(&score.reward) {
            return Err(RewardError::OutOfRange {
                reward: score.reward,
                low: *range.start(),
                high: *range.end(),
            });
        }
        match self {
            Self::Environment => Ok(Reward {
                training_reward: score.reward,
                strict_success: score.success,
                strict_reward: score.reward,
                components: Components::Environment { version: self },
            }),
            Self::TrustedMilestonesV1 => milestones(score, rows),
        }
    }
}

/// The protocols of a recipe, with their weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Rewards(Vec<(RewardProtocol, f64)>);

impl Default for Rewards {
    fn default() -> Self {
        RewardProtocol::Environment.into()
    }
}

impl From<RewardProtocol> for Rewards {
    fn from(protocol: RewardProtocol) -> Self {
        Self(vec![(protocol, 1.0)])
    }
}

impl Rewards {
    /// The weighted sum of protocols. A weight of 0 records a protocol that is not trained on. None
    /// where no weight is above 0, or one is not finite and at least 0.
    pub fn weighted(weights: Vec<(RewardProtocol, f64)>) -> Option<Self> {
        let valid = weights.iter().all(|(_, weight)| weight.is_finite() && *weight >= 0.0);
        (valid && weights.iter().any(|(_, weight)| *weight > 0.0)).then_some(Self(weights))
    }

    /// The protocols with their weights.
    pub fn weights(&self) -> &[(RewardProtocol, f64)] {
        &self.0
    }

    /// The only protocol, where there is one and its weight is 1.
    pub fn only(&self) -> Option<RewardProtocol> {
        match self.0.as_slice() {
            [(protocol, 1.0)] => Some(*protocol),
            _ => None,
        }
    }

    /// Whether they can score this environment.
    ///
    /// # Errors
    /// The environment lacks what a protocol reads.
    pub fn check(&self, environment: &Description) -> Result<(), RewardError> {
        self.0.iter().try_for_each(|(protocol, _)| protocol.check(environment))
    }

    /// The reward of an episode, as [`RewardProtocol::reward`] gives it.
    ///
    /// # Errors
    /// A score that breaks a protocol's rules, or a sum that is not finite.
    pub fn reward(
        &self,
        range: &RangeInclusive<f64>,
        score: &Score,
        rows: &[TraceRow],
    ) -> Result<Reward, RewardError> {
        if let Some(protocol) = self.only() {
            return protocol.reward(range, score, rows);
        }
        let parts = self
            .0
            .iter()
            .map(|(protocol, weight)| {
                let reward = protocol.reward(range, score, rows)?;
                Ok(WeightedPart {
                    weight: *weight,
                    reward: reward.training_reward,
                    components: reward.components,
                })
            })
            .collect::<Result<Vec<_>, RewardError>>()?;
        let training_reward: f64 = parts.iter().map(|part| part.weight * part.reward).sum();
        if !training_reward.is_finite() {
            return Err(RewardError::NotFinite { reward: training_reward });
        }
        Ok(Reward {
            training_reward,
            strict_success: score.success,
            strict_reward: score.reward,
            components: Components::Weighted { parts },
        })
    }
}

impl fmt::Display for RewardProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, protocol)| protocol == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl FromStr for RewardProtocol {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::NAMES.iter().find(|(name, _)| *name == text).map(|(_, it)| *it).ok_or(())
    }
}

/// What one episode earned, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reward {
    /// What is trained on.
    pub training_reward: f64,
    /// The environment's strict success.
    pub strict_success: bool,
    /// The environment's own reward, unchanged.
    pub strict_reward: f64,
    /// How the training reward came about.
    #[serde(flatten)]
    pub components: Components,
}

impl Reward {
    /// What [`RewardProtocol::TrustedMilestonesV1`] alone gives the episode, where the recipe names it.
    pub fn milestone_reward(&self) -> Option<f64> {
        match &self.components {
            Components::Milestones { .. } => Some(self.training_reward),
            Components::Weighted { parts } => parts
                .iter()
                .find(|part| matches!(part.components, Components::Milestones { .. }))
                .map(|part| part.reward),
            Components::Environment { .. } => None,
        }
    }
}

/// One protocol's share of a training reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightedPart {
    /// The recipe's weight.
    pub weight: f64,
    /// The protocol's reward, before it is weighed.
    pub reward: f64,
    /// How that came about.
    #[serde(flatten)]
    pub components: Components,
}

/// The parts of a training reward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Components {
    /// Of [`RewardProtocol::TrustedMilestonesV1`].
    Milestones {
        /// Which protocol.
        version: RewardProtocol,
        /// For the lookup.
        lookup_bonus: f64,
        /// For the calculation.
        calculation_bonus: f64,
        /// For strict success.
        strict_success_bonus: f64,
        /// Calls that ran and raised.
        trusted_tool_errors: u64,
        /// What those cost.
        tool_error_penalty: f64,
    },
    /// Of several protocols.
    Weighted {
        /// In the recipe's order.
        parts: Vec<WeightedPart>,
    },
    /// Of [`RewardProtocol::Environment`]: there are none.
    Environment {
        /// Which protocol.
        version: RewardProtocol,
    },
}

/// A score that a protocol does not accept.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RewardError {
    /// NaN, infinite or outside of the declared range.
    #[error("the environment's reward is {reward}, outside of its declared range {low} to {high}")]
    OutOfRange {
        /// The reward.
        reward: f64,
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
    /// Weights that make a reward larger than a number can be.
    #[error("the weighted reward is {reward}; use smaller weights")]
    NotFinite {
        /// The sum.
        reward: f64,
    },
    /// The environment has no such milestone.
    #[error(
        "the reward protocol {protocol} needs the milestone {name}, which the environment does not \
         declare; use \"environment\""
    )]
    NoMilestone {
        /// Which protocol.
        protocol: RewardProtocol,
        /// The milestone.
        name: &'static str,
    },
    /// A calculation without a lookup.
    #[error("a verified calculation must follow a verified lookup")]
    CalculationWithoutLookup,
    /// Success without its milestones, or with tool errors.
    #[error("strict success excludes missing milestones and tool errors ({errors} here)")]
    SuccessWithErrors {
        /// Calls that ran and raised.
        errors: u64,
    },
    /// The environment's reward is not its binary success.
    #[error("the environment's reward is {reward}; it must be the binary success, {success}")]
    NotBinary {
        /// The reward.
        reward: f64,
        /// The success as a number.
        success: f64,
    },
}

fn milestones(score: &Score, rows: &[TraceRow]) -> Result<Reward, RewardError> {
    let protocol = RewardProtocol::TrustedMilestonesV1;
    let flag = |name: &'static str| {
        score.milestones.get(name).copied().ok_or(RewardError::NoMilestone { protocol, name })
    };
    let (lookup, calculation) = (flag(LOOKUP)?, flag(CALCULATION)?);
    // A call that never ran (bad arguments, unknown tool, over a limit) is no failed execution: the
    // environment cannot know of it, so its strict success does not exclude it either.
    let errors = rows.iter().filter(|row| row.kind == CallKind::Raised).count() as u64;
    if calculation && !lookup {
        return Err(RewardError::CalculationWithoutLookup);
    }
    if score.success && (!calculation || errors > 0) {
        return Err(RewardError::SuccessWithErrors { errors });
    }
    let number = |flag: bool| f64::from(u8::from(flag));
    if score.reward != number(score.success) {
        return Err(RewardError::NotBinary {
            reward: score.reward,
            success: number(score.success),
        });
    }
    let lookup_bonus = LOOKUP_BONUS * number(lookup);
    let calculation_bonus = CALCULATION_BONUS * number(calculation);
    let strict_success_bonus = SUCCESS_BONUS * number(score.success);
    let tool_error_penalty = ERROR_PENALTY * errors as f64;
    let sum = lookup_bonus + calculation_bonus + strict_success_bonus - tool_error_penalty;
    Ok(Reward {
        training_reward: sum.clamp(0.0, 1.0),
        strict_success: score.success,
        strict_reward: score.reward,
        components: Components::Milestones {
            version: protocol,
            lookup_bonus,
            calculation_bonus,
            strict_success_bonus,
            trusted_tool_errors: errors,
            tool_error_penalty,
        },
    })
}

#[cfg(test)]
mod tests {
    use protocol::Digest;

    use super::*;

    const RANGE: RangeInclusive<f64> = 0.0..=1.0;

    fn score(lookup: bool, calculation: bool, success: bool) -> Score {
        let reached = |name: &str| if name == LOOKUP { lookup } else { calculation };
        Score::new(f64::from(u8::from(success)), success, [LOOKUP, CALCULATION], reached)
    }

    fn rows(kinds: &[CallKind]) -> Vec<TraceRow> {
        kinds
            .iter()
            .map(|&kind| TraceRow {
                turn: 0,
                call: 0,
                tool: "t".into(),
                arguments: "{}".into(),
                kind,
                milestones: Vec::new(),
                observation: String::new(),
                done: false,
                chain: Digest::of(b""),
            })
            .collect()
    }

    fn milestone_reward(score: &Score, kinds: &[CallKind]) -> Result<f64, RewardError> {
        RewardProtocol::TrustedMilestonesV1
            .reward(&RANGE, score, &rows(kinds))
            .map(|reward| reward.training_reward)
    }

    #[test]
    fn the_milestone_formula_has_the_pilots_values() {
        use CallKind::*;
        let cases: [(Score, &[CallKind], f64); 6] = [
            (score(false, false, false), &[], 0.0),
            (score(true, false, false), &[Ok], 0.15),
            (score(true, true, false), &[Ok, Ok], 0.15 + 0.25),
            (score(true, true, true), &[Ok, Ok, Ok], 1.0),
            (score(true, true, false), &[Raised, Ok, Ok], 0.15 + 0.25 - 0.05),
            (score(false, false, false), &[Raised; 7], 0.0),
        ];
        for (score, kinds, want) in cases {
            let got = milestone_reward(&score, kinds).expect("valid");
            assert!((got - want).abs() < 1e-12, "{score:?}: {got} {want}");
        }
    }

    #[test]
    fn only_calls_that_ran_and_raised_are_penalised() {
        use CallKind::*;
        let kinds = [BadArgs, UnknownTool, Malformed, AfterDone, OverLimit];
        assert_eq!(milestone_reward(&score(true, false, false), &kinds), Result::Ok(0.15));
    }

    #[test]
    fn inconsistent_scores_are_refused_by_name() {
        use CallKind::*;
        let cases: [(Score, &[CallKind], RewardError); 5] = [
            (score(false, true, false), &[], RewardError::CalculationWithoutLookup),
            (score(true, false, true), &[], RewardError::SuccessWithErrors { errors: 0 }),
            (score(true, true, true), &[Raised], RewardError::SuccessWithErrors { errors: 1 }),
            (
                Score { reward: 0.5, ..score(true, true, false) },
                &[],
                RewardError::NotBinary { reward: 0.5, success: 0.0 },
            ),
            (
                Score::new(0.0, false, [LOOKUP], |_| false),
                &[],
                RewardError::NoMilestone {
                    protocol: RewardProtocol::TrustedMilestonesV1,
                    name: CALCULATION,
                },
            ),
        ];
        for (score, kinds, want) in cases {
            assert_eq!(milestone_reward(&score, kinds), Err(want));
        }
    }

    #[test]
    fn rewards_outside_of_the_declared_range_are_refused() {
        for bad in [f64::NAN, f64::INFINITY, 1.5, -0.1] {
            for (_, protocol) in RewardProtocol::NAMES {
                let score = Score { reward: bad, ..score(true, true, false) };
                let error = protocol.reward(&RANGE, &score, &[]).expect_err("refused");
                assert!(matches!(error, RewardError::OutOfRange { .. }), "{bad}: {error}");
            }
        }
    }

    #[test]
    fn components_are_written_flat_and_read_back() {
        for (name, protocol) in RewardProtocol::NAMES {
            let reward = protocol.reward(&RANGE, &score(true, true, true), &[]).expect("valid");
            let json = serde_json::to_value(&reward).expect("JSON");
            assert_eq!(json["version"], name);
            assert_eq!(json["strict_success"], true);
            assert_eq!(serde_json::from_value::<Reward>(json).expect("reads back"), reward);
        }
    }

    #[test]
    fn weighted_protocols_add_up_and_each_is_recorded() {
        use CallKind::*;
        let (environment, milestones) =
            (RewardProtocol::Environment, RewardProtocol::TrustedMilestonesV1);
        let rewards =
            Rewards::weighted(vec![(environment, 2.0), (milestones, 0.5)]).expect("valid");
        for (score, kinds, want, milestone) in [
            (score(true, true, true), &[Ok, Ok][..], 2.5, 1.0),
            (score(true, true, false), &[Ok, Ok], 0.2, 0.4),
            (score(true, false, false), &[Raised], 0.05, 0.1),
        ] {
            let reward = rewards.reward(&RANGE, &score, &rows(kinds)).expect("valid");
            assert!((reward.training_reward - want).abs() < 1e-12, "{reward:?}");
            assert!((reward.milestone_reward().expect("named") - milestone).abs() < 1e-12);
            assert_eq!(
                (reward.strict_success, reward.strict_reward),
                (score.success, score.reward)
            );
            let json = serde_json::to_value(&reward).expect("JSON");
            assert_eq!(json["parts"][0]["version"], "environment");
            assert_eq!(json["parts"][1]["weight"], 0.5);
            assert!(json["parts"][1]["lookup_bonus"].is_number());
            assert_eq!(serde_json::from_value::<Reward>(json).expect("reads back"), reward);
        }
        let recorded =
            Rewards::weighted(vec![(environment, 1.0), (milestones, 0.0)]).expect("valid");
        let reward = recorded.reward(&RANGE, &score(true, false, false), &[]).expect("valid");
        assert_eq!((reward.training_reward, reward.milestone_reward()), (0.0, Some(0.15)));
        let broken = rewards.reward(&RANGE, &score(false, true, false), &[]);
        assert_eq!(broken, Err(RewardError::CalculationWithoutLookup));
        let huge = Score { reward: f64::MAX, ..score(true, true, true) };
        let sum = Rewards::weighted(vec![(environment, 2.0)]).expect("valid");
        let error = sum.reward(&(0.0..=f64::MAX), &huge, &[]).expect_err("infinite");
        assert!(matches!(error, RewardError::NotFinite { .. }));
        for weights in [vec![], vec![(environment, 0.0)], vec![(environment, -1.0)]] {
            assert_eq!(Rewards::weighted(weights), None);
        }
    }
}
