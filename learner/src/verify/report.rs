//! What an audit of a run found: one verdict a check, each failure with a name, a place and a reason.

use std::{fmt, path::PathBuf};

use protocol::{Digest, RunId};
use serde::Serialize;

use crate::files::Status;

/// Findings of a check that are kept one by one.
const KEPT: usize = 8;

/// Characters of a problem that are shown.
const LONGEST: usize = 400;

/// One line of at most so many characters.
fn line(text: &str, longest: usize) -> String {
    let mut all = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut line: String = all.by_ref().take(longest).collect();
    if all.next().is_some() {
        line.push('…');
    }
    line
}

/// What is checked, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckName {
    /// The manifest follows from itself: the run's id from settings and environment, and so on.
    Manifest,
    /// The saved tokenizer and template are those that the manifest names.
    Tokenizer,
    /// The checkpoint that was given is the run's.
    Model,
    /// The journal is whole, and the manifest's.
    Journal,
    /// Tasks, seeds, sampling and policies of all leases are those that the recipe decides.
    Leases,
    /// The evidence is a chain with the manifest's head.
    EvidenceChain,
    /// Every accepted episode passes rungs 1 to 7 of the ladder again.
    Episodes,
    /// Every line of evidence says what its episode gives: score, reward, messages, trace, audit.
    EvidenceRows,
    /// The rollouts of every group belong together, and their advantages follow from their rewards.
    Groups,
    /// Every refused episode is refused again for the same reason.
    Rejections,
    /// The archived adapters are the policies that played.
    Adapters,
    /// The metrics are those of the evidence.
    Metrics,
    /// The manifest's totals are those of the evidence.
    Totals,
    /// Episodes that were scored again were sampled as their leases say.
    Sampling,
}

impl CheckName {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::Manifest,
        Self::Tokenizer,
        Self::Model,
        Self::Journal,
        Self::Leases,
        Self::EvidenceChain,
        Self::Episodes,
        Self::EvidenceRows,
        Self::Groups,
        Self::Rejections,
        Self::Adapters,
        Self::Metrics,
        Self::Totals,
        Self::Sampling,
    ];

    fn text(self) -> &'static str {
        match self {
            Self::Manifest => "manifest",
            Self::Tokenizer => "tokenizer",
            Self::Model => "model",
            Self::Journal => "journal",
            Self::Leases => "leases",
            Self::EvidenceChain => "evidence chain",
            Self::Episodes => "episodes",
            Self::EvidenceRows => "evidence rows",
            Self::Groups => "groups",
            Self::Rejections => "rejections",
            Self::Adapters => "adapters",
            Self::Metrics => "metrics",
            Self::Totals => "totals",
            Self::Sampling => "sampling",
        }
    }
}

impl fmt::Display for CheckName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// One thing that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its stable name.
    pub reason: &'static str,
    /// File and line, episode, group or field.
    pub place: String,
    /// What is wrong, one line.
    pub problem: String,
}

/// The verdict of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Which.
    pub name: CheckName,
    /// Whether everything held.
    pub holds: bool,
    /// What was looked at, for people.
    pub looked_at: String,
    /// How many things did not hold.
    pub failures: u64,
    /// The first of them.
    pub findings: Vec<Finding>,
    /// What could not be looked at, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The verdict on a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The run's directory.
    pub directory: PathBuf,
    /// The run.
    pub run: Option<RunId>,
    /// How it ended.
    pub status: Option<Status>,
    /// SHA-256 of its manifest: whoever knows it knows the whole directory.
    pub manifest_sha256: Digest,
    /// Whether every check holds.
    pub holds: bool,
    /// The checks that were made.
    pub checks: Vec<Check>,
}

impl Report {
    pub(super) fn new(directory: PathBuf, manifest_sha256: Digest) -> Self {
        Self {
            directory,
            run: None,
            status: None,
            manifest_sha256,
            holds: true,
            checks: Vec::new(),
        }
    }

    /// The check of this name, begun where it was not.
    fn check(&mut self, name: CheckName) -> &mut Check {
        let at = self.checks.iter().position(|check| check.name == name).unwrap_or_else(|| {
            self.checks.push(Check {
                name,
                holds: true,
                looked_at: String::new(),
                failures: 0,
                findings: Vec::new(),
                notes: Vec::new(),
            });
            self.checks.len() - 1
        });
        &mut self.checks[at]
    }

    /// Whether a check has failed already.
    pub(super) fn fails(&self, name: CheckName) -> bool {
        self.checks.iter().any(|check| check.name == name && !check.holds)
    }

    /// Notes what a check looked at.
    pub(super) fn looked_at(&mut self, name: CheckName, what: impl Into<String>) {
        self.check(name).looked_at = what.into();
    }

    /// Notes what could not be looked at; no failure.
    pub(super) fn note(&mut self, name: CheckName, note: impl Into<String>) {
        self.check(name).notes.push(note.into());
    }

    /// Notes a failure.
    pub(super) fn fail(
        &mut self,
        name: CheckName,
        reason: &'static str,
        place: impl Into<String>,
        problem: impl fmt::Display,
    ) {
        self.holds = false;
        let check = self.check(name);
        check.holds = false;
        check.failures += 1;
        if check.findings.len() < KEPT {
            let problem = line(&problem.to_string(), LONGEST);
            check.findings.push(Finding { reason, place: place.into(), problem });
        }
    }

    /// Notes a failure where two values differ.
    pub(super) fn equal<T: PartialEq + fmt::Debug>(
        &mut self,
        name: CheckName,
        reason: &'static str,
        place: impl Into<String>,
        written: &T,
        found: &T,
    ) {
        if written != found {
            self.fail(name, reason, place, format_args!("{written:?} is written, {found:?} found"));
        }
    }

    pub(super) fn sort(&mut self) {
        self.checks.sort_by_key(|check| check.name);
    }

    /// The findings of all checks.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.checks.iter().flat_map(|check| &check.findings)
    }

    /// One line.
    pub fn summary(&self) -> String {
        let failing: Vec<String> =
            self.checks.iter().filter(|it| !it.holds).map(|it| it.name.to_string()).collect();
        let (run, count) = (self.directory.display(), self.checks.len());
        if failing.is_empty() {
            format!("{run} holds: {count} of {count} checks")
        } else {
            format!(
                "{run} does not hold: {} of {count} checks fail ({})",
                failing.len(),
                failing.join(", ")
            )
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            let verdict = if check.holds { "holds" } else { "FAILS" };
            writeln!(f, "{:<15} {verdict}  {}", check.name.to_string(), check.looked_at)?;
            for finding in &check.findings {
                let Finding { reason, place, problem } = finding;
                writeln!(f, "    {reason}: {place}: {problem}")?;
            }
            let more = check.failures.saturating_sub(check.findings.len() as u64);
            if more > 0 {
                writeln!(f, "    and {more} more")?;
            }
            for note in &check.notes {
                writeln!(f, "    note: {note}")?;
            }
        }
        writeln!(f, "manifest        sha256 {}", self.manifest_sha256)
    }
}
