//! `learner calibrate`: how far honest episodes are from the learner's own computation, on this pair of
//! devices.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
};

use serde::Serialize;
use terminal::{Failure, Interrupt, Progress};
use tokio::runtime::Runtime;

use super::online::{Learner, Start, TrainOptions};
use crate::{
    audit::sampling::{
        Calibration, FalsePositives, Pair, SamplingBounds, SamplingEvidence, SamplingTest,
        device_kind,
    },
    curriculum::TaskOrder,
    files::write_atomic,
    plan::Plan,
    ranks::Ranks,
};

/// Groups that are in play at a time.
const GROUPS: u64 = 16;

/// What is calibrated.
#[derive(Clone, Debug)]
pub struct CalibrateOptions {
    /// Episodes to play.
    pub episodes: u64,
    /// The wanted rate of honest episodes that break a bound.
    pub false_positive_rate: f64,
    /// The calibration file: made, or added to.
    pub file: PathBuf,
    /// A PEFT adapter that plays; the base model otherwise.
    pub adapter: Option<PathBuf>,
}

/// What came out for one kind of actor's device.
#[derive(Clone, Debug, Serialize)]
pub struct Calibrated {
    /// The kind of device.
    pub actor_device: String,
    /// The largest values of the honest episodes that set the bounds.
    pub honest_most: SamplingBounds,
    /// The bounds.
    pub bounds: SamplingBounds,
    /// How often other honest episodes break them.
    pub false_positives: FalsePositives,
}

impl fmt::Display for Calibrated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FalsePositives { episodes, flagged, upper_95, .. } = self.false_positives;
        write!(f, "{}:", self.actor_device)?;
        for (name, test) in [
            ("largest deficit", SamplingTest::DeficitMax),
            ("mean deficit", SamplingTest::DeficitMean),
            ("largest log-probability gap", SamplingTest::LogpGapMax),
            ("mean log-probability gap", SamplingTest::LogpGapMean),
        ] {
            let (bound, honest) = (self.bounds.of(test), self.honest_most.of(test));
            write!(f, " {name} {honest:.1e}, bound {bound:.1e};")?;
        }
        write!(
            f,
            " {flagged} of {episodes} other honest episodes break a bound (a rate below {upper_95:.1e}, \
             95 % confidence)"
        )
    }
}

/// Plays honest episodes of the recipe, sets bounds and writes them.
///
/// # Errors
/// As a run; too few episodes came back; the file cannot be read or written.
pub fn calibrate(
    plan: Plan,
    network: TrainOptions,
    options: &CalibrateOptions,
    runtime: &Runtime,
    interrupt: Interrupt,
    progress: &mut Progress,
) -> Result<Vec<Calibrated>, Failure> {
    let mut file = existing(&options.file)?;
    // Before thousands of episodes are played for it.
    write(&options.file, &file)?;
    let learner_device = network.device.resolve().to_string();
    let generations = u64::from(plan.recipe.training.num_generations);
    let from = Start::from_adapter(options.adapter.as_deref());
    let alone = Ranks::alone();
    let mut learner = Learner::start(plan, network, from, alone, runtime, interrupt, progress)?;
    let mut order = TaskOrder::new(learner.plan().run, &learner.plan().train);
    let groups = options.episodes.div_ceil(generations);
    let mut found: BTreeMap<String, Vec<SamplingEvidence>> = BTreeMap::new();
    progress.start("calibrate", groups * generations);
    let mut first = 0;
    while first < groups {
        let last = groups.min(first + GROUPS);
        for (device, evidence) in learner.examine(first..last, &mut order, progress)? {
            found.entry(device).or_default().push(evidence);
        }
        first = last;
    }
    progress.end();
    learner.finish("the calibration is complete");
    let mut calibrated = Vec::new();
    for (actor_device, honest) in found {
        let id = learner.plan().pair(device_kind(&learner_device), &actor_device);
        let pair =
            Pair::calibrate(id, &honest, options.false_positive_rate).map_err(Failure::mistake)?;
        calibrated.push(Calibrated {
            actor_device,
            honest_most: pair.honest_most,
            bounds: pair.bounds,
            false_positives: pair.false_positives,
        });
        file.put(pair);
    }
    write(&options.file, &file)?;
    Ok(calibrated)
}

fn write(path: &Path, file: &Calibration) -> Result<(), Failure> {
    let mut text = serde_json::to_vec_pretty(file).map_err(Failure::fault)?;
    text.push(b'\n');
    write_atomic(path, &text, true).map_err(Failure::mistake)
}

/// The file as it is, to be added to; a new one where there is none.
fn existing(path: &Path) -> Result<Calibration, Failure> {
    if !path.exists() {
        return Ok(Calibration::default());
    }
    Calibration::read(path).map(|(file, _)| file).map_err(Failure::mistake)
}
