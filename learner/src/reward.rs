//! Reward protocols: how the learner turns a checked episode into the number that it trains on.
//!
//! Both read the score of the learner's own replay and the checked trace, never an actor's claim and
//! never the policy's text. The environment's strict success is reported unchanged beside whatever
//! the training reward is.

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
    /// The environment has no such milestone.
    #[error(
        "reward.protocol {protocol} needs the milestone {name}, which the environment does not \
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
}
