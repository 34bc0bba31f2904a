//! What a rollout teaches: the algorithm of an online recipe and what each one leaves open.

use serde::{Serialize, Serializer, ser::SerializeMap as _};

use super::{
    RecipeError,
    section::{Bounds, Section},
};
use crate::{
    advantage::{Baseline, ScaleRewards},
    loss::{Aggregation, KlEstimator, LossConfig, Ratio, Surrogate, ValueConfig},
};

/// Which algorithm: a surrogate, a ratio, an aggregation and a kind of advantages under one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Token ratios; the mean over rollouts of the mean over each rollout's tokens.
    Grpo,
    /// Token ratios; the sum over tokens, divided by rollouts times `max_completion_length`.
    DrGrpo,
    /// Token ratios; the mean over all tokens of the step.
    Dapo,
    /// One ratio a rollout, of the mean log-ratio; the mean over rollouts.
    Gspo,
    /// Bounded token ratios as constant weights; the mean over all tokens of the step.
    Cispo,
    /// One ratio a rollout, of the whole sequence's probabilities; the mean over rollouts; rewards
    /// compared with those of the others of the group.
    Rloo,
    /// Token ratios; the mean over all tokens of the step; advantages by a value head where there is
    /// one.
    Ppo,
}

impl Algorithm {
    const NAMES: [(&'static str, Self); 7] = [
        ("grpo", Self::Grpo),
        ("dr_grpo", Self::DrGrpo),
        ("dapo", Self::Dapo),
        ("gspo", Self::Gspo),
        ("cispo", Self::Cispo),
        ("rloo", Self::Rloo),
        ("ppo", Self::Ppo),
    ];
    /// Of these, the ones that TRL's `loss_type` knows by this name.
    const LOSS_TYPES: [(&'static str, Self); 4] =
        [Self::NAMES[0], Self::NAMES[1], Self::NAMES[2], Self::NAMES[4]];

    /// Its name in recipes.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, it)| *it == self).map_or("grpo", |(name, _)| name)
    }

    /// Its denominators.
    pub fn aggregation(self) -> Aggregation {
        match self {
            Self::Grpo | Self::Gspo => Aggregation::SeqMeanTokenMean,
            Self::DrGrpo => Aggregation::SeqMeanTokenSumNorm,
            Self::Dapo | Self::Cispo | Self::Ppo => Aggregation::TokenMean,
            Self::Rloo => Aggregation::SeqMeanTokenSum,
        }
    }

    fn surrogate(self) -> Surrogate {
        if self == Self::Cispo { Surrogate::Cispo } else { Surrogate::Clipped }
    }

    fn baseline(self) -> Baseline {
        if self == Self::Rloo { Baseline::LeaveOneOut } else { Baseline::Mean }
    }

    fn ratio(self) -> Ratio {
        match self {
            Self::Gspo => Ratio::SequenceMean,
            Self::Rloo => Ratio::SequenceProduct,
            _ => Ratio::Token,
        }
    }

    /// The ratio of a sequence where the recipe only says that it is one.
    fn sequence_ratio(self) -> Ratio {
        match self {
            Self::Rloo | Self::Ppo => Ratio::SequenceProduct,
            _ => Ratio::SequenceMean,
        }
    }
}

/// A value head. Names are those of TRL's PPO.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ValueSettings {
    /// Discount of later rewards, 0 to 1. Default 1.
    pub gamma: f64,
    /// GAE's trade of bias for variance, 0 to 1. Default 0.95.
    pub lam: f64,
    /// Weight of the value loss, above 0 to 100. Default 0.1.
    pub vf_coef: f64,
    /// How far a value may move in a step and be counted better for it, 0 (any) to 1e6. Default 0.2.
    pub cliprange_value: f64,
    /// Peak learning rate of the head, 0 to 1; it follows the policy's schedule. Default 1e-3.
    pub learning_rate: f64,
}

impl ValueSettings {
    pub(super) const KEYS: &'static [&'static str] =
        &["gamma", "lam", "vf_coef", "cliprange_value", "learning_rate"];

    fn read(section: &Section<'_>) -> Result<Self, RecipeError> {
        Ok(Self {
            gamma: section.f64("gamma", 1.0, Bounds::closed(0.0, 1.0))?,
            lam: section.f64("lam", 0.95, Bounds::closed(0.0, 1.0))?,
            vf_coef: section.f64("vf_coef", 0.1, Bounds::above(0.0, 100.0))?,
            cliprange_value: section.f64("cliprange_value", 0.2, Bounds::closed(0.0, 1e6))?,
            learning_rate: section.f64("learning_rate", 1e-3, Bounds::closed(0.0, 1.0))?,
        })
    }

    /// What its loss needs to know.
    pub fn loss(&self) -> ValueConfig {
        ValueConfig {
            vf_coef: self.vf_coef,
            cliprange_value: (self.cliprange_value > 0.0).then_some(self.cliprange_value),
        }
    }
}

/// An algorithm with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AlgorithmSettings {
    /// Which. Default `grpo`.
    pub algorithm: Algorithm,
    /// What new and old policy are compared by. Default: the algorithm's.
    pub ratio: Ratio,
    /// Lower clip of the ratio, above 0, below 1. Default 0.2. Not for `cispo`.
    pub epsilon: f64,
    /// Upper clip of the ratio, above 0 to 100. Default `epsilon`; for `cispo` the bound itself, 5.
    pub epsilon_high: f64,
    /// Dual clip, above `1 + epsilon_high` to 1e6. Not for `cispo`.
    pub delta: Option<f64>,
    /// Weight of the KL term, 0 to 100. Default 0.02.
    pub beta: f64,
    /// Its estimator. Default `k3`.
    pub kl_estimator: KlEstimator,
    /// Weight of the entropy bonus, 0 to 100. Default 0.
    pub entropy_coef: f64,
    /// How advantages are scaled. Default `group`; for `rloo` `none`.
    pub scale_rewards: ScaleRewards,
    /// Passes over a step's rollouts, 1 to 1,000. Default 1.
    pub num_iterations: u32,
    /// Parts of a pass with an update each, 1 to 65,536. Default 1.
    pub num_mini_batches: u32,
    /// The value head of `ppo`, if it has one.
    pub value: Option<ValueSettings>,
}

impl AlgorithmSettings {
    /// The keys it reads of the section that it stands in.
    pub(super) const KEYS: [&'static str; 14] = [
        "algorithm",
        "loss_type",
        "importance_sampling_level",
        "sequence_ratio",
        "epsilon",
        "epsilon_high",
        "delta",
        "beta",
        "kl_estimator",
        "entropy_coef",
        "scale_rewards",
        "num_iterations",
        "num_mini_batches",
        "value",
    ];

    pub(super) fn read(section: &Section<'_>) -> Result<Self, RecipeError> {
        let algorithm = algorithm(section)?;
        let (epsilon, epsilon_high, delta) = clips(section, algorithm)?;
        let ratio = ratio(section, algorithm)?;
        let scale = match algorithm {
            Algorithm::Rloo => ScaleRewards::None,
            _ => ScaleRewards::Group,
        };
        let settings = Self {
            algorithm,
            ratio,
            epsilon,
            epsilon_high,
            delta,
            beta: section.f64("beta", 0.02, Bounds::closed(0.0, 100.0))?,
            kl_estimator: section.choice(
                "kl_estimator",
                KlEstimator::K3,
                &[("k1", KlEstimator::K1), ("k2", KlEstimator::K2), ("k3", KlEstimator::K3)],
            )?,
            entropy_coef: section.f64("entropy_coef", 0.0, Bounds::closed(0.0, 100.0))?,
            scale_rewards: section.choice(
                "scale_rewards",
                scale,
                &[("group", ScaleRewards::Group), ("none", ScaleRewards::None)],
            )?,
            num_iterations: section.u32("num_iterations", Some(1), 1..=1000)?,
            num_mini_batches: section.u32("num_mini_batches", Some(1), 1..=65_536)?,
            value: section
                .section("value", ValueSettings::KEYS)?
                .map(|section| ValueSettings::read(&section))
                .transpose()?,
        };
        if settings.value.is_some() {
            let conflict = |key: &str, problem: &str, remedy: &str| {
                Err(RecipeError::conflict(&section.at(key), problem, remedy))
            };
            if algorithm != Algorithm::Ppo {
                return conflict("value", "only ppo has a value head", "set algorithm to ppo");
            }
            if ratio.is_sequence() {
                let problem = "a value head gives each token its advantage, a sequence has one";
                return conflict("importance_sampling_level", problem, "set it to token");
            }
            if section.value("scale_rewards").is_some() {
                let problem = "a value head's advantages are scaled over all tokens of the step";
                return conflict("scale_rewards", problem, "remove it");
            }
        }
        Ok(settings)
    }

    /// What its loss needs to know.
    pub fn loss(&self) -> LossConfig {
        LossConfig {
            surrogate: self.algorithm.surrogate(),
            ratio: self.ratio,
            epsilon: self.epsilon,
            epsilon_high: self.epsilon_high,
            delta: self.delta,
            beta: self.beta,
            kl_estimator: self.kl_estimator,
            entropy_coef: self.entropy_coef,
        }
    }

    /// Its denominators.
    pub fn aggregation(&self) -> Aggregation {
        self.algorithm.aggregation()
    }

    /// What a group's rewards are compared with.
    pub fn baseline(&self) -> Baseline {
        self.algorithm.baseline()
    }

    /// Whether a group with these advantages moves anything: others are neither scored nor examined.
    pub fn has_gradient(&self, advantages: &[f64]) -> bool {
        self.beta != 0.0
            || self.entropy_coef != 0.0
            || self.value.is_some()
            || advantages.iter().any(|advantage| *advantage != 0.0)
    }
}

/// `algorithm`, or TRL's `loss_type` where the recipe has that instead.
fn algorithm(section: &Section<'_>) -> Result<Algorithm, RecipeError> {
    if section.value("loss_type").is_none() {
        return section.choice("algorithm", Algorithm::Grpo, &Algorithm::NAMES);
    }
    if section.value("algorithm").is_some() {
        return Err(RecipeError::conflict(
            &section.at("loss_type"),
            "algorithm says it too",
            "remove one of them",
        ));
    }
    section.choice("loss_type", Algorithm::Grpo, &Algorithm::LOSS_TYPES)
}

fn clips(
    section: &Section<'_>,
    algorithm: Algorithm,
) -> Result<(f64, f64, Option<f64>), RecipeError> {
    let cispo = algorithm == Algorithm::Cispo;
    for key in ["epsilon", "delta"] {
        if cispo && section.value(key).is_some() {
            let problem = "cispo bounds ratios from above alone, by epsilon_high itself";
            return Err(RecipeError::conflict(&section.at(key), problem, "remove it"));
        }
    }
    let epsilon = section.f64("epsilon", 0.2, Bounds::above(0.0, 0.999_999))?;
    let high = if cispo { 5.0 } else { epsilon };
    let epsilon_high = section.f64("epsilon_high", high, Bounds::above(0.0, 100.0))?;
    let delta = section.optional_f64("delta", Bounds::above(1.0, 1e6))?;
    if let Some(delta) = delta.filter(|delta| *delta <= 1.0 + epsilon_high) {
        return Err(RecipeError::conflict(
            &section.at("delta"),
            format!("{delta} is within the clip, which ends at 1 + epsilon_high"),
            format!("set it above {}", 1.0 + epsilon_high),
        ));
    }
    Ok((epsilon, epsilon_high, delta))
}

fn ratio(section: &Section<'_>, algorithm: Algorithm) -> Result<Ratio, RecipeError> {
    let sequence = section.choice(
        "sequence_ratio",
        algorithm.sequence_ratio(),
        &[("mean", Ratio::SequenceMean), ("product", Ratio::SequenceProduct)],
    )?;
    let is_sequence = section.choice(
        "importance_sampling_level",
        algorithm.ratio().is_sequence(),
        &[("token", false), ("sequence", true)],
    )?;
    let conflict = |key: &str, problem: &str, remedy: &str| {
        Err(RecipeError::conflict(&section.at(key), problem, remedy))
    };
    if is_sequence && algorithm == Algorithm::Gspo && sequence != Ratio::SequenceMean {
        return conflict("sequence_ratio", "gspo's is the mean", "remove it or choose rloo");
    }
    match is_sequence {
        true => Ok(sequence),
        false if algorithm == Algorithm::Gspo => {
            conflict("importance_sampling_level", "gspo has one ratio a sequence", "choose grpo")
        }
        false if section.value("sequence_ratio").is_some() => {
            let remedy = "set importance_sampling_level to sequence or remove it";
            conflict("sequence_ratio", "each token has its own ratio", remedy)
        }
        false => Ok(Ratio::Token),
    }
}

/// Reads back to the same settings. What is younger than the first recipes is left out where it says
/// what was so before it, so that they are the same runs.
impl Serialize for AlgorithmSettings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self.algorithm {
            Algorithm::Grpo | Algorithm::DrGrpo | Algorithm::Dapo => {
                map.serialize_entry("loss_type", self.algorithm.name())?;
            }
            _ => map.serialize_entry("algorithm", self.algorithm.name())?,
        }
        if self.ratio != self.algorithm.ratio() {
            let level = if self.ratio.is_sequence() { "sequence" } else { "token" };
            map.serialize_entry("importance_sampling_level", level)?;
        }
        if self.ratio.is_sequence() && self.ratio != self.algorithm.sequence_ratio() {
            let mean = self.ratio == Ratio::SequenceMean;
            map.serialize_entry("sequence_ratio", if mean { "mean" } else { "product" })?;
        }
        if self.algorithm != Algorithm::Cispo {
            map.serialize_entry("epsilon", &self.epsilon)?;
        }
        map.serialize_entry("epsilon_high", &self.epsilon_high)?;
        if let Some(delta) = self.delta {
            map.serialize_entry("delta", &delta)?;
        }
        map.serialize_entry("beta", &self.beta)?;
        if self.kl_estimator != KlEstimator::K3 {
            map.serialize_entry("kl_estimator", &self.kl_estimator)?;
        }
        if self.entropy_coef != 0.0 {
            map.serialize_entry("entropy_coef", &self.entropy_coef)?;
        }
        if self.value.is_none() {
            map.serialize_entry("scale_rewards", &self.scale_rewards)?;
        }
        map.serialize_entry("num_iterations", &self.num_iterations)?;
        if self.num_mini_batches != 1 {
            map.serialize_entry("num_mini_batches", &self.num_mini_batches)?;
        }
        if let Some(value) = &self.value {
            map.serialize_entry("value", value)?;
        }
        map.end()
    }
}
