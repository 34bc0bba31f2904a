//! Bounds from honest episodes: what `learner calibrate` measures and writes.
//!
//! One half of the episodes sets the bounds, the other measures how often an honest episode breaks
//! them. A bound is twice the value that at most a quarter of the wanted rate of the first half
//! exceeds (the largest one, where there are too few episodes to tell), and no less than a floor under
//! the rounding of f32.

use std::{fs, io::Read as _, path::Path};

use protocol::{ComputeDtype, Digest, Sampling};
use serde::{Deserialize, Serialize};

use super::{SamplingBounds, SamplingEvidence, SamplingTest};

/// No bound is above this: beyond it nothing would ever be refused.
const LARGEST: f64 = 100.0;
/// Largest calibration file, in bytes.
const MAX_FILE: u64 = 1 << 20;
/// How far above the honest values a bound lies.
const HEADROOM: f64 = 2.0;
/// No bound is below this: honest f32 computations of one sum in two orders differ by up to about
/// 1e-5 at logits of a few tens.
const FLOOR: f64 = 1e-4;

/// What was calibrated: each pair of devices has bounds of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PairId {
    /// SHA-256 of configuration and weights of the checkpoint.
    pub model_weights_sha256: Digest,
    /// Number format of the forward passes.
    pub compute_dtype: ComputeDtype,
    /// The learner's kind of device, as `cpu`.
    pub learner_device: String,
    /// The actor's.
    pub actor_device: String,
    /// How the episodes were sampled; deficits are in units of logit / T.
    pub sampling: Sampling,
}

/// How often honest episodes break the bounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FalsePositives {
    /// Episodes that did not set the bounds.
    pub episodes: usize,
    /// Of these, the ones that break a bound.
    pub flagged: usize,
    /// Their share.
    pub rate: f64,
    /// The largest rate at which so few would be flagged with a probability of 5 %
    /// (Clopper and Pearson, one-sided).
    pub upper_95: f64,
}

/// Bounds of one pair, and where they come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// What was calibrated.
    #[serde(flatten)]
    pub id: PairId,
    /// Episodes that set the bounds.
    pub episodes: usize,
    /// Their sampled ids.
    pub tokens: usize,
    /// The largest values among them.
    pub honest_most: SamplingBounds,
    /// The bounds.
    pub bounds: SamplingBounds,
    /// How good they are.
    pub false_positives: FalsePositives,
}

/// A calibration file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Of this format: 1.
    pub schema_version: u32,
    /// One entry a pair of devices.
    pub pairs: Vec<Pair>,
}

/// Why a calibration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CalibrationError {
    /// The file cannot be read.
    #[error("{path}: {problem}; make one with learner calibrate")]
    File {
        /// The file.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// There is nothing to calibrate from.
    #[error("{episodes} episodes cannot calibrate anything; play at least {least}")]
    TooFew {
        /// Episodes there are.
        episodes: usize,
        /// Episodes there must be.
        least: usize,
    },
}

/// `cpu` of `cpu`, `cuda` of `cuda:1`.
pub fn device_kind(device: &str) -> &str {
    device.split(':').next().unwrap_or_default()
}

impl Pair {
    /// Fewest episodes that make a pair.
    pub const LEAST: usize = 20;

    /// Sets bounds for a wanted rate of false positives per episode. Episodes at even places set the
    /// bounds, those at odd places measure them.
    ///
    /// # Errors
    /// Fewer than [`Pair::LEAST`] episodes.
    pub fn calibrate(
        id: PairId,
        honest: &[SamplingEvidence],
        wanted_rate: f64,
    ) -> Result<Self, CalibrationError> {
        if honest.len() < Self::LEAST {
            return Err(CalibrationError::TooFew { episodes: honest.len(), least: Self::LEAST });
        }
        let half = |odd: usize| honest.iter().enumerate().filter(move |(i, _)| i % 2 == odd);
        let (set, measure): (Vec<_>, Vec<_>) =
            (half(0).map(|(_, it)| *it).collect(), half(1).map(|(_, it)| *it).collect());
        let above = |rate: f64| by_test(|test| quantile(&set, test, rate));
        let spread = above(wanted_rate / SamplingTest::ALL.len() as f64);
        let bounds = by_test(|test| (HEADROOM * spread.of(test)).max(FLOOR));
        let flagged = measure.iter().filter(|it| bounds.check(it).is_err()).count();
        let episodes = measure.len();
        Ok(Self {
            id,
            episodes: set.len(),
            tokens: set.iter().map(|it| it.tokens).sum(),
            honest_most: above(0.0),
            bounds,
            false_positives: FalsePositives {
                episodes,
                flagged,
                rate: flagged as f64 / episodes as f64,
                upper_95: upper_95(flagged, episodes),
            },
        })
    }
}

impl Pair {
    /// Whether it can be what [`Pair::calibrate`] gives.
    fn check(&self) -> Result<(), String> {
        for device in [&self.id.learner_device, &self.id.actor_device] {
            if !["cpu", "cuda"].contains(&device.as_str()) {
                return Err(format!("{device:?} is no kind of device; there are cpu and cuda"));
            }
        }
        for test in SamplingTest::ALL {
            let (bound, most) = (self.bounds.of(test), self.honest_most.of(test));
            if !(FLOOR..=LARGEST).contains(&bound) {
                return Err(format!("bound {bound} is not between {FLOOR} and {LARGEST}"));
            }
            if !(most.is_finite() && most >= 0.0) {
                return Err(format!("honest_most {most} is no deviation"));
            }
        }
        let FalsePositives { episodes, flagged, rate, upper_95 } = self.false_positives;
        let share = 0.0..=1.0;
        if flagged > episodes || !share.contains(&rate) || !share.contains(&upper_95) {
            return Err(format!("false_positives of {flagged} in {episodes} cannot be"));
        }
        Ok(())
    }
}

fn by_test(value: impl Fn(SamplingTest) -> f64) -> SamplingBounds {
    SamplingBounds {
        deficit_max: value(SamplingTest::DeficitMax),
        deficit_mean: value(SamplingTest::DeficitMean),
        logp_gap_max: value(SamplingTest::LogpGapMax),
        logp_gap_mean: value(SamplingTest::LogpGapMean),
    }
}

/// The value that at most the share `rate` of the episodes exceeds.
fn quantile(episodes: &[SamplingEvidence], test: SamplingTest, rate: f64) -> f64 {
    let mut values: Vec<f64> = episodes.iter().map(|it| test.value(it)).collect();
    values.sort_by(|a, b| b.total_cmp(a));
    let beyond = (rate * values.len() as f64).floor() as usize;
    values.get(beyond).copied().unwrap_or_default()
}

/// The rate at which `flagged` or fewer of `episodes` happen with probability 5 %.
fn upper_95(flagged: usize, episodes: usize) -> f64 {
    if flagged >= episodes {
        return 1.0;
    }
    let tail = |rate: f64| -> f64 {
        // Σ C(n, k) r^k (1 − r)^(n − k) for k ≤ flagged, each term from the one before.
        let n = episodes as f64;
        let mut term = (n * (-rate).ln_1p()).exp();
        let mut sum = term;
        for k in 0..flagged {
            term *= (n - k as f64) / (k as f64 + 1.0) * rate / (1.0 - rate);
            sum += term;
        }
        sum
    };
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if tail(middle) > 0.05 { low = middle } else { high = middle }
    }
    high
}

impl Default for Calibration {
    /// A file without pairs.
    fn default() -> Self {
        Self { schema_version: 1, pairs: Vec::new() }
    }
}

impl Calibration {
    /// Reads a file; also the SHA-256 of its bytes.
    ///
    /// # Errors
    /// It cannot be read, is too large, or is no calibration.
    pub fn read(path: &Path) -> Result<(Self, Digest), CalibrationError> {
        let wrong =
            |problem: String| CalibrationError::File { path: path.display().to_string(), problem };
        let file = fs::File::open(path).map_err(|error| wrong(error.to_string()))?;
        let mut text = Vec::new();
        file.take(MAX_FILE + 1).read_to_end(&mut text).map_err(|error| wrong(error.to_string()))?;
        if text.len() as u64 > MAX_FILE {
            return Err(wrong(format!("larger than {MAX_FILE} bytes")));
        }
        let read: Self = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        if read.schema_version != 1 {
            return Err(wrong(format!("schema_version is {}, not 1", read.schema_version)));
        }
        for (at, pair) in read.pairs.iter().enumerate() {
            pair.check().map_err(|problem| wrong(format!("pairs[{at}]: {problem}")))?;
            if read.pairs[..at].iter().any(|other| other.id == pair.id) {
                return Err(wrong(format!("pairs[{at}] is there twice")));
            }
        }
        Ok((read, Digest::of(&text)))
    }

    /// Adds a pair, in place of an earlier one of the same devices and settings.
    pub fn put(&mut self, pair: Pair) {
        self.pairs.retain(|it| it.id != pair.id);
        self.pairs.push(pair);
    }

    /// The pairs of a model, number format, learner's device and sampling: bounds by actors' device.
    pub fn bounds(&self, wanted: &PairId) -> Vec<(String, SamplingBounds)> {
        let fits = |pair: &&Pair| {
            let id = PairId { actor_device: pair.id.actor_device.clone(), ..wanted.clone() };
            pair.id == id
        };
        let pairs = self.pairs.iter().filter(fits);
        pairs.map(|pair| (pair.id.actor_device.clone(), pair.bounds)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Deviation, *};

    fn honest(count: usize) -> Vec<SamplingEvidence> {
        (0..count)
            .map(|i| {
                let x = i as f64 / count as f64;
                let id = |deficit, logp_gap| Deviation { at: 0, deficit, logp_gap };
                SamplingEvidence::of(&[id(0.125 * x * x, 0.0625 * x), id(0.0, 0.25 * x)])
            })
            .collect()
    }

    fn id() -> PairId {
        PairId {
            model_weights_sha256: Digest::of(b"weights"),
            compute_dtype: ComputeDtype::F32,
            learner_device: "cpu".into(),
            actor_device: "cpu".into(),
            sampling: Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 },
        }
    }

    #[test]
    fn bounds_lie_above_the_honest_and_are_measured_on_others() {
        let pair = Pair::calibrate(id(), &honest(2000), 1e-3).expect("enough");
        assert!(pair.bounds.deficit_max > 0.24 && pair.bounds.deficit_max < 0.26);
        assert_eq!((pair.episodes, pair.false_positives.episodes), (1000, 1000));
        assert_eq!(pair.false_positives.flagged, 0);
        // The rule of three: 3 / n.
        assert!((pair.false_positives.upper_95 - 0.002_991).abs() < 1e-5);
        let exact =
            Pair::calibrate(id(), &[SamplingEvidence::of(&[Deviation::default()]); 20], 1e-3);
        assert_eq!(exact.expect("enough").bounds.deficit_max, FLOOR);
        assert!(Pair::calibrate(id(), &honest(19), 1e-3).is_err());
    }

    /// Of Clopper and Pearson's tables: 1 of 100 has the one-sided upper limit 4.656 %.
    #[test]
    fn the_upper_limit_is_that_of_clopper_and_pearson() {
        assert!((upper_95(1, 100) - 0.046_56).abs() < 1e-4, "{}", upper_95(1, 100));
        assert!((upper_95(0, 2000) - 0.001_497).abs() < 1e-5);
        assert_eq!(upper_95(5, 5), 1.0);
    }

    #[test]
    fn a_pair_replaces_its_predecessor_and_serves_its_own_settings_only() {
        let mut file = Calibration::default();
        for count in [40, 60] {
            file.put(Pair::calibrate(id(), &honest(count), 1e-3).expect("enough"));
        }
        let cuda = PairId { actor_device: "cuda".into(), ..id() };
        file.put(Pair::calibrate(cuda, &honest(64), 1e-3).expect("enough"));
        assert_eq!(file.pairs.len(), 2);
        let kinds: Vec<String> = file.bounds(&id()).into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds, ["cpu", "cuda"]);
        let hotter = Sampling { temperature: 1.2, ..id().sampling };
        assert!(file.bounds(&PairId { sampling: hotter, ..id() }).is_empty());
    }

    #[test]
    fn damaged_files_are_refused_in_one_line() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let mut good = Calibration::default();
        good.put(Pair::calibrate(id(), &honest(64), 1e-3).expect("enough"));
        let text = serde_json::to_string(&good).expect("JSON");
        fs::write(file.path(), &text).expect("written");
        assert_eq!(
            Calibration::read(file.path()).expect("good"),
            (good, Digest::of(text.as_bytes()))
        );
        for (from, to) in [
            ("\"schema_version\":1", "\"schema_version\":2"),
            ("\"deficit_max\":", "\"deficit_mox\":"),
            ("\"pairs\"", "\"peers\""),
        ] {
            fs::write(file.path(), text.replacen(from, to, 1)).expect("written");
            let error = Calibration::read(file.path()).expect_err(from).to_string();
            assert!(!error.contains('\n') && error.contains("learner calibrate"), "{error}");
        }
    }
}
