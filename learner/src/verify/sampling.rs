//! Rung 9 on a finished run: episodes are scored again under the adapters that played them.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::{Path, PathBuf},
};

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, LoadDtype},
    vision::PromptImages,
};
use protocol::{ComputeDtype, Episode, EpisodeId, PolicyDigest};

use super::{Archive, ArchivedEpisode, CheckName, Report, VerifyError};
use crate::{
    audit::{
        Reason,
        sampling::{SamplingBounds, SamplingEvidence, SamplingTest, device_kind, examine},
    },
    files::{EVIDENCE, EvidenceReader, Manifest},
};

/// Deficits up to this are rounding of f32: the borders of top-p and min-p have as much.
const TIE: f64 = 1e-4;

/// Which episodes are scored again, and on what.
#[derive(Clone, Debug)]
pub struct SamplingCheck {
    /// The checkpoint that was trained.
    pub model: PathBuf,
    /// Where to compute.
    pub device: DeviceChoice,
    /// How many accepted episodes.
    pub episodes: usize,
    /// Decides which.
    pub seed: u64,
}

/// Scores episodes again and adds what was found to the report.
///
/// # Errors
/// The device is not there, or the model cannot be loaded.
pub fn check_sampling(
    directory: &Path,
    check: &SamplingCheck,
    report: &mut Report,
) -> Result<(), VerifyError> {
    use CheckName::Sampling as Name;
    let wrong = |problem: String| VerifyError::Model { path: check.model.clone(), problem };
    let archive = match Archive::open(directory) {
        Ok(archive) => archive,
        Err(error) => {
            report.fail(Name, "archive_unreadable", "journal", error);
            return Ok(());
        }
    };
    let choice = check.device.resolve();
    let device = choice.open().map_err(|error| VerifyError::Device(error.to_string()))?;
    let dtype = match archive.recipe().training.compute_dtype {
        ComputeDtype::F32 => LoadDtype::F32,
        ComputeDtype::Bf16 | ComputeDtype::F16 => LoadDtype::File,
    };
    let checkpoint = Checkpoint::open(&check.model).map_err(|error| wrong(error.to_string()))?;
    let decoder = checkpoint.load(&device, dtype).map_err(|error| wrong(error.to_string()))?;

    let mut by_policy: BTreeMap<PolicyDigest, Vec<EpisodeId>> = BTreeMap::new();
    let mut looked_at = 0;
    for id in archive.choose(check.episodes, check.seed) {
        match archive.episode(&id) {
            Ok(episode) => by_policy.entry(episode.lease.policy).or_default().push(id),
            Err(error) => report.fail(Name, "episode_unreadable", id.to_string(), error),
        }
    }
    let written = written(directory, archive.manifest(), &by_policy);
    let mut compared = 0_u64;
    let mut sum = SamplingEvidence::default();
    for (policy, ids) in by_policy {
        let bytes = match archive.adapter_bytes(&policy) {
            Ok(bytes) => bytes,
            Err(error) => {
                let note = format!("{} episodes of policy {policy}: {error}", ids.len());
                report.note(Name, note);
                continue;
            }
        };
        let adapter = match Adapter::from_safetensors(&bytes, &decoder) {
            Ok(adapter) => adapter,
            Err(error) => {
                report.fail(Name, "adapter_unreadable", policy.to_string(), error);
                continue;
            }
        };
        for id in ids {
            let Ok(archived) = archive.episode(&id) else { continue };
            let Some(bounds) = bounds(archive.manifest(), choice, &archived) else {
                let device = &archived.device;
                let problem = format!("no bounds for an actor's device {device:?} in this run");
                report.note(Name, format!("episode {id}: {problem}"));
                continue;
            };
            match judge(&decoder, &adapter, archive.images(), &archived, &bounds) {
                Ok(evidence) => {
                    looked_at += 1;
                    if let Some(written) = written.get(&id) {
                        compared += 1;
                        let exact =
                            choice == DeviceChoice::Cpu && on_cpu(archive.manifest(), &archived);
                        if let Some(problem) = differs(written, &evidence, &bounds, exact) {
                            let place = format!("episode {id}, lease {}", archived.lease.id);
                            report.fail(Name, "sampling_record", place, problem);
                        }
                    }
                    sum.tokens += evidence.tokens;
                    sum.unexplained += evidence.unexplained;
                    sum.deficit_max = sum.deficit_max.max(evidence.deficit_max);
                    sum.logp_gap_max = sum.logp_gap_max.max(evidence.logp_gap_max);
                }
                Err(Judgement::Refused(reason)) => {
                    let place = format!("episode {id}, lease {}", archived.lease.id);
                    report.fail(Name, reason.code(), place, reason);
                }
                Err(Judgement::Impossible(problem)) => {
                    report.fail(Name, "episode_unreadable", format!("episode {id}"), problem);
                }
            }
        }
    }
    if looked_at == 0 && check.episodes > 0 {
        let problem = "no episode could be scored again; the notes say why";
        report.fail(Name, "nothing_scored", "--sampling", problem);
    }
    report.looked_at(
        Name,
        format!(
            "{looked_at} episodes scored again, {compared} compared with their evidence, {} of {} ids unexplained, largest deficit {:.1e}, \
             largest log-probability gap {:.1e}",
            sum.unexplained, sum.tokens, sum.deficit_max, sum.logp_gap_max
        ),
    );
    report.sort();
    Ok(())
}

/// The bounds that the run was judged by; on processors in f32, where it was judged by none, the
/// built-in ones.
fn bounds(
    manifest: &Manifest,
    own: DeviceChoice,
    episode: &ArchivedEpisode,
) -> Option<SamplingBounds> {
    let kind = device_kind(&episode.device);
    let written = manifest.progress.as_ref().into_iter().flat_map(|it| &it.sampling_bounds);
    let written = written.filter(|it| it.actor_device == kind).map(|it| it.bounds).next();
    let dtype = manifest.settings.pointer("/training/compute_dtype");
    let plain = own == DeviceChoice::Cpu && kind == "cpu" && dtype.is_some_and(|it| it == "f32");
    written.or_else(|| plain.then_some(SamplingBounds::F32_CPU))
}

/// The evidence that was written down about these episodes. Lines that cannot be read have none; the
/// audit of the evidence finds them.
fn written(
    directory: &Path,
    manifest: &Manifest,
    wanted: &BTreeMap<PolicyDigest, Vec<EpisodeId>>,
) -> HashMap<EpisodeId, SamplingEvidence> {
    let wanted: HashSet<&EpisodeId> = wanted.values().flatten().collect();
    let mut found = HashMap::new();
    let Ok(mut lines) = EvidenceReader::open(directory.join(EVIDENCE), &manifest.run) else {
        return found;
    };
    while let Ok(Some(line)) = lines.read() {
        if let Some(record) = line.row.sampling.filter(|_| wanted.contains(&line.row.episode)) {
            found.insert(line.row.episode, record.evidence);
        }
    }
    found
}

/// Whether learner and actor computed in f32 on processors.
fn on_cpu(manifest: &Manifest, episode: &ArchivedEpisode) -> bool {
    let host = manifest.progress.as_ref().and_then(|it| it.host.as_ref());
    let dtype = manifest.settings.pointer("/training/compute_dtype");
    host.is_some_and(|it| device_kind(&it.device) == "cpu")
        && device_kind(&episode.device) == "cpu"
        && dtype.is_some_and(|it| it == "f32")
}

/// How written evidence differs from what was found now, if by more than rounding explains. With
/// `exact`, both were computed alike.
fn differs(
    written: &SamplingEvidence,
    found: &SamplingEvidence,
    bounds: &SamplingBounds,
    exact: bool,
) -> Option<String> {
    for (name, test) in
        [("deficit_max", SamplingTest::DeficitMax), ("logp_gap_max", SamplingTest::LogpGapMax)]
    {
        let (written, found) = (test.value(written), test.value(found));
        if (written - found).abs() > bounds.of(test) {
            return Some(format!("{name} {written} is written, {found} found"));
        }
    }
    // Two orders of one sum may disagree about a race that was all but a tie.
    let ties = written.deficit_max.max(found.deficit_max) <= TIE;
    let (written, found) = (written.unexplained, found.unexplained);
    (exact && !ties && written != found)
        .then(|| format!("{written} unexplained ids are written, {found} found"))
}

enum Judgement {
    Refused(Reason),
    Impossible(String),
}

fn judge(
    decoder: &policy::model::Decoder,
    adapter: &Adapter,
    images: Option<&PromptImages>,
    archived: &ArchivedEpisode,
    bounds: &SamplingBounds,
) -> Result<SamplingEvidence, Judgement> {
    let impossible = |error: String| Judgement::Impossible(error);
    let episode = Episode::decode(&archived.body).map_err(|error| impossible(error.to_string()))?;
    let found = examine(decoder, Some(adapter), images, archived.lease.sampling, &[&episode])
        .map_err(|error| impossible(error.to_string()))?;
    let evidence = SamplingEvidence::of(found.iter().flatten());
    bounds.check(&evidence).map_err(Judgement::Refused)?;
    Ok(evidence)
}
