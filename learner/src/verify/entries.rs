//! What lies in a run's directory: only files that a run writes, of their kinds and sizes, so that
//! nothing can be slipped in, and reading ends.

use std::{collections::BTreeSet, fs, path::Path};

use policy::score::ValueHead;
use protocol::folder::Disk;
use serde_json::Value;

use super::{CheckName, Report, ledger::Ledger, terms::Terms};
use crate::files::{CHECKPOINT, Checkpoints, JOURNAL, METRICS, REJECTED, TOKENIZER};

/// Largest files that are read at once, in bytes. Evidence and journal are read in pieces that have
/// bounds of their own.
const MOST: [(&str, u64); 7] = [
    ("manifest.json", 1 << 30),
    (METRICS, 1 << 30),
    (TOKENIZER, 256 << 20),
    (ADAPTERS, 4 << 30),
    (POLICIES, 4 << 30),
    (CHECKPOINT, 64 << 30),
    (REJECTED, 1 << 30),
];
/// Folders inside of a run: `adapters/<one>/` is the deepest.
const DEEPEST: usize = 3;

const ADAPTERS: &str = "adapters";
const POLICIES: &str = "policies";

/// The manifest's bytes.
pub(super) fn manifest(directory: &Path) -> Result<Vec<u8>, String> {
    let name = Path::new("manifest.json");
    let path = directory.join(name);
    let found = path.symlink_metadata().map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("it is no regular file".into());
    }
    match too_large(name, found.len()) {
        Some(problem) => Err(problem),
        None => fs::read(path).map_err(|error| error.to_string()),
    }
}

/// Whether everything in the directory is a folder or a regular file that can be read. Where not, the
/// run is looked at no further: a pipe or a device would never end.
pub(super) fn readable(directory: &Path, report: &mut Report) -> bool {
    let mut fine = true;
    walk(directory, Path::new(""), &mut |place, problem| {
        fine = false;
        let (reason, problem) = problem;
        report.fail(CheckName::Manifest, reason, place.display().to_string(), problem);
    });
    fine
}

type Bad<'a> = dyn FnMut(&Path, (&'static str, String)) + 'a;

fn walk(run: &Path, folder: &Path, bad: &mut Bad<'_>) {
    let listed = match fs::read_dir(run.join(folder)) {
        Ok(listed) => listed,
        Err(error) => return bad(folder, ("unreadable", error.to_string())),
    };
    for entry in listed {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => return bad(folder, ("unreadable", error.to_string())),
        };
        let place = folder.join(entry.file_name());
        // Not followed: a run writes no links.
        match entry.metadata() {
            Err(error) => bad(&place, ("unreadable", error.to_string())),
            Ok(it) if it.is_dir() && place.components().count() < DEEPEST => {
                walk(run, &place, bad);
            }
            Ok(it) if it.is_file() => {
                if let Some(problem) = too_large(&place, it.len()) {
                    bad(&place, ("file_too_large", problem));
                }
            }
            Ok(_) => {
                let problem = "no regular file or folder of a run; put it elsewhere";
                bad(&place, ("special_file", problem.into()));
            }
        }
    }
}

fn too_large(place: &Path, found: u64) -> Option<String> {
    let (_, most) = MOST.iter().find(|(name, _)| place.starts_with(name))?;
    (found > *most).then(|| format!("{found} bytes; at most {most} are read"))
}

/// Checks that nothing lies beside what the run wrote.
pub(super) fn unexpected(terms: &Terms, ledger: &Ledger, report: &mut Report) {
    use CheckName::{Adapters, Journal, Rejections, Tokenizer};
    let mut check = |name: CheckName, folder: &Path, known: &BTreeSet<String>| {
        let listed = fs::read_dir(terms.directory.join(folder));
        for entry in listed.into_iter().flatten().flatten() {
            let found = entry.file_name().to_string_lossy().into_owned();
            if known.contains(&found) {
                continue;
            }
            let place = folder.join(&found).display().to_string();
            if terms.closed() {
                report.fail(name, "unexpected_file", place, "the run wrote no such file");
            } else {
                // It may have been killed between writing a file and speaking of it.
                report.note(name, format!("{place} is of no record of the run"));
            }
        }
    };
    let progress = &terms.progress;
    let saved = progress.adapters.iter().filter_map(|it| it.path.file_name());
    let saved = saved.map(|name| name.to_string_lossy().into_owned()).collect();
    check(Adapters, Path::new(ADAPTERS), &saved);
    for adapter in &progress.adapters {
        let head = adapter.value_head_sha256.map(|_| ValueHead::FILE);
        let parts = ["adapter_config.json", "adapter_model.safetensors"].into_iter().chain(head);
        let parts = parts.map(str::to_owned).collect();
        check(Adapters, &adapter.path, &parts);
    }
    let archived = ledger.policies.iter().filter(|it| it.archived);
    let archived = archived.map(|it| format!("{}.safetensors", it.policy)).collect();
    check(Adapters, Path::new(POLICIES), &archived);
    let refused = ledger.refused.iter().map(|it| format!("{}.json", it.id)).collect();
    check(Rejections, Path::new(REJECTED), &refused);
    let segments = progress.journal.map_or(0, |it| it.segments);
    let segments = (0..segments).map(|it| format!("{it:08}.segment")).collect();
    check(Journal, Path::new(JOURNAL), &segments);
    let checkpoint = ledger.commit.map(|it| Checkpoints::file(it.number)).into_iter().collect();
    check(Journal, Path::new(CHECKPOINT), &checkpoint);
    let tokenizer = terms.manifest.policy_format.files.keys().cloned().collect();
    check(Tokenizer, Path::new(TOKENIZER), &tokenizer);
    if let Some(commit) = ledger.commit {
        let checkpoints = Checkpoints::new(Disk::at(terms.directory.join(CHECKPOINT)));
        if let Err(error) = checkpoints.read::<Value>(commit.number, commit.checkpoint) {
            report.fail(Journal, "checkpoint", CHECKPOINT, error);
        }
    }
}
