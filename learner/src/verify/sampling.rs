//! Rung 9 on a finished run: episodes are scored again under the adapters that played them.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, LoadDtype},
};
use protocol::{ComputeDtype, Episode, EpisodeId, PolicyDigest};

use super::{Archive, ArchivedEpisode, CheckName, Report, VerifyError};
use crate::{
    audit::{
        Reason,
        sampling::{SamplingBounds, SamplingEvidence, device_kind, examine},
    },
    files::Manifest,
};

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
            match judge(&decoder, &adapter, &archived, &bounds) {
                Ok(evidence) => {
                    looked_at += 1;
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
    report.looked_at(
        Name,
        format!(
            "{looked_at} episodes scored again, {} of {} ids unexplained, largest deficit {:.1e}, \
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

enum Judgement {
    Refused(Reason),
    Impossible(String),
}

fn judge(
    decoder: &policy::model::Decoder,
    adapter: &Adapter,
    archived: &ArchivedEpisode,
    bounds: &SamplingBounds,
) -> Result<SamplingEvidence, Judgement> {
    let impossible = |error: String| Judgement::Impossible(error);
    let episode = Episode::decode(&archived.body).map_err(|error| impossible(error.to_string()))?;
    let found = examine(decoder, Some(adapter), archived.lease.sampling, &[&episode])
        .map_err(|error| impossible(error.to_string()))?;
    let evidence = SamplingEvidence::of(found.iter().flatten());
    bounds.check(&evidence).map_err(Judgement::Refused)?;
    Ok(evidence)
}
