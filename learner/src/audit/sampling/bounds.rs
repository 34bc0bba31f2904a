//! How far an honest episode may be from the learner's own computation.

use serde::{Deserialize, Serialize};

use super::SamplingEvidence;
use crate::audit::Reason;

/// The largest values that pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingBounds {
    /// For [`SamplingEvidence::deficit_max`].
    pub deficit_max: f64,
    /// For [`SamplingEvidence::deficit_mean`].
    pub deficit_mean: f64,
    /// For [`SamplingEvidence::logp_gap_max`].
    pub logp_gap_max: f64,
    /// For [`SamplingEvidence::logp_gap_mean`].
    pub logp_gap_mean: f64,
}

/// One of the four tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SamplingTest {
    /// The largest deficit.
    DeficitMax,
    /// The mean deficit.
    DeficitMean,
    /// The largest log-probability gap.
    LogpGapMax,
    /// The mean log-probability gap.
    LogpGapMean,
}

impl SamplingTest {
    /// All of them, in the order in which they are tried.
    pub const ALL: [Self; 4] =
        [Self::DeficitMax, Self::DeficitMean, Self::LogpGapMax, Self::LogpGapMean];

    /// What it looks at.
    pub fn value(self, evidence: &SamplingEvidence) -> f64 {
        match self {
            Self::DeficitMax => evidence.deficit_max,
            Self::DeficitMean => evidence.deficit_mean,
            Self::LogpGapMax => evidence.logp_gap_max,
            Self::LogpGapMean => evidence.logp_gap_mean,
        }
    }
}

impl SamplingBounds {
    /// For actors and learners that both compute in f32 on a processor, where sums in another order
    /// are all that differs. About a hundred times what honest episodes of models of up to a billion
    /// parameters show, and a hundredth of what sampling from anything else does.
    pub const F32_CPU: Self =
        Self { deficit_max: 0.01, deficit_mean: 0.001, logp_gap_max: 0.01, logp_gap_mean: 0.001 };

    /// The bound of one test.
    pub fn of(&self, test: SamplingTest) -> f64 {
        match test {
            SamplingTest::DeficitMax => self.deficit_max,
            SamplingTest::DeficitMean => self.deficit_mean,
            SamplingTest::LogpGapMax => self.logp_gap_max,
            SamplingTest::LogpGapMean => self.logp_gap_mean,
        }
    }

    /// Checks an episode's evidence.
    ///
    /// # Errors
    /// The first test that fails.
    pub fn check(&self, evidence: &SamplingEvidence) -> Result<(), Reason> {
        let fails = |test: &SamplingTest| test.value(evidence) > self.of(*test);
        let Some(test) = SamplingTest::ALL.into_iter().find(fails) else { return Ok(()) };
        let (found, bound) = (test.value(evidence), self.of(test));
        let count = evidence.tokens;
        Err(match test {
            SamplingTest::DeficitMax => {
                Reason::UnlikelyToken { at: evidence.deficit_at, found, bound }
            }
            SamplingTest::DeficitMean => Reason::UnlikelyTokens { count, found, bound },
            SamplingTest::LogpGapMax => {
                Reason::LogProbabilityGap { at: evidence.logp_gap_at, found, bound }
            }
            SamplingTest::LogpGapMean => Reason::LogProbabilityGaps { count, found, bound },
        })
    }
}
