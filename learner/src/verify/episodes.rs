//! Audits every episode again from its bytes and compares the evidence with what it gives.

use std::collections::HashSet;

use protocol::{CallKind, EpisodeId, Split};
use rayon::prelude::*;
use serde_json::Value;

use super::{
    CheckName, Report,
    ledger::{Accepted, Ledger, Refused},
    recorded::{judge, problem},
    tally::Tallies,
    terms::Terms,
};
use crate::{
    audit::{
        Audited, Presented, check_group,
        sampling::{SamplingJudge, SamplingMode},
    },
    curriculum::evaluation_round,
    files::{
        EVIDENCE, EvidenceLine, EvidenceReader, EvidenceRow, JOURNAL, PolicyVersion, REJECTED,
        evidence_line,
    },
    journal::{Record, read_at},
    leases::Standing,
};

/// Lines that are audited in parallel; a group is never split.
const BATCH: usize = 256;

/// Why an episode does not stand: name and text.
type Problem = (&'static str, String);

/// Goes through the evidence and the journal.
pub(super) struct Episodes<'a> {
    terms: &'a Terms,
    ledger: &'a Ledger,
    seen: HashSet<EpisodeId>,
    groups: HashSet<u64>,
    step: u64,
    audited: u64,
    tallies: Tallies,
    judge: SamplingJudge,
}

impl<'a> Episodes<'a> {
    /// Checks everything; returns what the evidence amounts to.
    pub(super) fn check(terms: &'a Terms, ledger: &'a Ledger, report: &mut Report) -> Tallies {
        let mut this = Self {
            terms,
            ledger,
            seen: HashSet::new(),
            groups: HashSet::new(),
            step: 0,
            audited: 0,
            tallies: Tallies::default(),
            judge: judge(terms),
        };
        this.evidence(report);
        this.left_over(report);
        this.refusals(report);
        let (audited, environment) = (this.audited, &terms.recipe.environment);
        let replayed = match terms.manifest.environment.determinism {
            environments::Determinism::Deterministic => "played again",
            environments::Determinism::Recorded => "recorded, and not played again",
        };
        report.looked_at(
            CheckName::Episodes,
            format!("{audited} audited from their bytes, {} {replayed}", environment.name()),
        );
        let groups = this.groups.len();
        report.looked_at(CheckName::Groups, format!("{groups} groups"));
        this.tallies
    }

    fn evidence(&mut self, report: &mut Report) {
        use CheckName::EvidenceChain as Name;
        let path = self.terms.directory.join(EVIDENCE);
        let mut reader = match EvidenceReader::open(path, &self.terms.manifest.run) {
            Ok(reader) => reader,
            Err(error) => return report.fail(Name, "evidence_missing", EVIDENCE, error),
        };
        let written = self.terms.progress.evidence.as_ref();
        let mut batch: Vec<EvidenceLine> = Vec::new();
        loop {
            if let Some(written) = written.filter(|it| it.rows == reader.rows()) {
                let (place, head) = ("evidence.head", reader.head());
                report.equal(Name, "evidence_head", place, &written.head, &head);
            }
            let line = match reader.read() {
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) if !self.terms.closed() => {
                    report.note(Name, format!("{error}; the run did not end in order"));
                    break;
                }
                Err(error) => {
                    report.fail(Name, "evidence_line", EVIDENCE, error);
                    break;
                }
            };
            if let Some(problem) = &line.broken {
                report.fail(Name, "evidence_chain", place(&line), problem);
            }
            let other = batch.last().is_some_and(|it| it.row.lease.group != line.row.lease.group);
            if other && batch.len() >= BATCH {
                self.batch(&batch, report);
                batch.clear();
            }
            batch.push(line);
        }
        self.batch(&batch, report);
        let rows = reader.rows();
        report.looked_at(Name, format!("{rows} lines, head {}", reader.head().short()));
        report.looked_at(CheckName::EvidenceRows, format!("{rows} lines rebuilt and compared"));
        let known = written.map_or(0, |it| it.rows);
        if known > rows || (self.terms.closed() && known != rows) {
            report.equal(Name, "evidence_length", "evidence.rows", &known, &rows);
        }
    }

    /// Checks whole groups of lines.
    fn batch(&mut self, lines: &[EvidenceLine], report: &mut Report) {
        let audits: Vec<Result<Audited, Problem>> =
            lines.par_iter().map(|line| self.audit_line(line)).collect();
        let mut audits = audits.into_iter();
        for group in lines.chunk_by(|a, b| a.row.lease.group == b.row.lease.group) {
            let audits: Vec<_> = audits.by_ref().take(group.len()).collect();
            self.group(group, audits, report);
        }
    }

    fn audit_line(&self, line: &EvidenceLine) -> Result<Audited, Problem> {
        let id = line.row.episode;
        match self.ledger.accepted.get(&id) {
            Some(accepted) => self.audit(id, accepted),
            None => Err(match self.ledger.refused.iter().find(|it| it.id == id) {
                Some(Refused { reason, .. }) => (
                    "episode_refused",
                    format!("episode {id} was refused ({reason}) when it came in"),
                ),
                None => ("episode_missing", format!("episode {id} is not in the journal")),
            }),
        }
    }

    /// The audit ladder, on the journal's bytes.
    fn audit(&self, id: EpisodeId, accepted: &Accepted) -> Result<Audited, Problem> {
        let journal = self.terms.directory.join(JOURNAL);
        let unreadable = |error: String| ("journal_unreadable", error);
        let entry = read_at(&journal, self.ledger.run, accepted.position)
            .map_err(|error| unreadable(error.to_string()))?;
        match entry.record().map_err(|error| unreadable(error.to_string()))? {
            Record::Accepted { attempt, behind, body, .. } => {
                self.climb(id, accepted.lease, attempt, behind, body)
            }
            _ => Err(unreadable(format!("episode {id} is not where it was"))),
        }
    }

    fn climb(
        &self,
        id: EpisodeId,
        lease: protocol::LeaseId,
        attempt: u32,
        behind: u64,
        body: &[u8],
    ) -> Result<Audited, Problem> {
        let standing = match self.ledger.lease(lease, attempt) {
            Some(lease) => Standing::Open(Box::new(lease)),
            None => Standing::Unknown,
        };
        self.terms
            .auditor
            .audit(Presented { id, body, standing: &standing, behind })
            .map_err(|it| (it.reason.code(), format!("episode {id}, lease {lease}: {}", it.reason)))
    }

    /// Checks the lines of one group.
    fn group(
        &mut self,
        lines: &[EvidenceLine],
        audits: Vec<Result<Audited, Problem>>,
        report: &mut Report,
    ) {
        let Some(first) = lines.first() else { return };
        let group = first.row.lease.group;
        if !self.groups.insert(group) {
            let problem = format!("group {group} stands in the evidence before");
            report.fail(CheckName::Groups, "group_repeated", place(first), problem);
        }
        let (mut rollouts, mut failed) = (Vec::new(), false);
        for (line, audit) in lines.iter().zip(audits) {
            self.audited += 1;
            if !self.seen.insert(line.row.episode) {
                let problem = format!("episode {} stands there before", line.row.episode);
                report.fail(CheckName::EvidenceRows, "episode_repeated", place(line), problem);
            }
            match audit {
                Ok(audited) => rollouts.push((line, audited)),
                Err((reason, problem)) => {
                    failed = true;
                    report.fail(CheckName::Episodes, reason, place(line), problem);
                }
            }
        }
        let ordered = self.ledger.groups.get(&group);
        if ordered.is_some_and(|it| it.dropped) {
            let problem = format!("group {group} was dropped");
            report.fail(CheckName::Groups, "group_dropped", place(first), problem);
        }
        let generations = ordered.map_or(0, |it| it.order.generations);
        let all: Vec<&Audited> = rollouts.iter().map(|(_, audited)| audited).collect();
        let whole = check_group(group, generations, &all);
        match &whole {
            // A group that lacks an episode that failed is told by that.
            Err(reason) if !failed => {
                report.fail(CheckName::Groups, reason.code(), place(first), reason);
            }
            Err(_) | Ok(()) => {}
        }
        let training = all.iter().all(|it| it.task.split == Split::Train);
        let rewards: Vec<f64> = all.iter().map(|it| it.reward.training_reward).collect();
        let advantages =
            (training && whole.is_ok()).then(|| self.terms.recipe.training.advantages(&rewards));
        let advantages = match advantages.transpose() {
            Ok(advantages) => advantages,
            Err(error) => {
                report.fail(CheckName::Groups, "advantage", place(first), error);
                None
            }
        };
        let examined = match (&advantages, self.judge.mode) {
            (_, SamplingMode::Off) => Some(false),
            // A group without gradient is not scored.
            (Some(it), _) => {
                Some(self.terms.recipe.training.algorithm.has_gradient(&it.advantages))
            }
            (None, _) => (!training).then_some(false),
        };
        for (index, (line, audited)) in rollouts.iter().enumerate() {
            let step = self.step_of(line, report);
            let advantage = match &advantages {
                Some(it) => it.advantages.get(index).copied(),
                // Without its whole group there is nothing to compare with.
                None if training => line.row.advantage,
                None => None,
            };
            self.compare(line, audited, step, advantage, report);
            let device = self.ledger.accepted.get(&audited.id).map_or("", |it| &it.device);
            let record = line.row.sampling.as_ref();
            if let Some(problem) = problem(&self.judge, record, audited, device, examined) {
                report.fail(CheckName::EvidenceRows, "sampling_record", place(line), problem);
            }
        }
        let step = first.row.optimizer_step;
        let rollouts: Vec<&Audited> = rollouts.iter().map(|(_, audited)| audited).collect();
        self.tallies.add(group, step, &rollouts, whole.is_ok());
    }

    /// The step that a line must name.
    fn step_of(&mut self, line: &EvidenceLine, report: &mut Report) -> u64 {
        let row = &line.row;
        let per_step = u64::from(self.terms.recipe.training.groups_per_step().max(1));
        let steps = self.ledger.steps(row.policy_version.policy);
        let expected = match row.split {
            Split::Train => row.lease.group / per_step,
            // Of a policy that several steps announced, the line says which.
            Split::Eval if steps.contains(&row.optimizer_step) => row.optimizer_step,
            Split::Eval => steps.first().copied().unwrap_or_default(),
        };
        if row.optimizer_step < self.step {
            let problem = format!("step {} after step {}", row.optimizer_step, self.step);
            report.fail(CheckName::EvidenceRows, "evidence_order", place(line), problem);
        }
        self.step = self.step.max(row.optimizer_step);
        expected
    }

    /// Compares a line with what its episode gives.
    fn compare(
        &self,
        line: &EvidenceLine,
        audited: &Audited,
        step: u64,
        advantage: Option<f64>,
        report: &mut Report,
    ) {
        use CheckName::EvidenceRows as Name;
        let global_step = match line.row.split {
            Split::Train => self.terms.recipe.training.played_at(step),
            Split::Eval => step,
        };
        let version = PolicyVersion {
            global_step,
            base_model_sha256: self.terms.manifest.model.sha256,
            policy: audited.episode.policy,
        };
        let format = &self.terms.auditor.terms().format;
        let row = EvidenceRow::new(audited, step, version, advantage, format);
        let expected = match evidence_line(line.previous, &row) {
            Ok(expected) => expected,
            Err(error) => return report.fail(Name, "evidence_row", place(line), error),
        };
        if without_sampling(line) == expected {
            return;
        }
        let differing = differences(&line.text, &expected);
        if differing.is_empty() {
            let problem = "the line is not written as this release writes it";
            report.fail(Name, "evidence_spelling", place(line), problem);
        }
        for (key, written, found) in differing {
            let reason = match key.as_str() {
                "advantage" => "advantage",
                "training_reward" | "reward_components" | "score" => "reward",
                _ => "evidence_row",
            };
            let problem = format!("{key} is {written}; the episode gives {found}");
            report.fail(Name, reason, place(line), problem);
        }
    }

    /// Accepted episodes that stand in no line: of dropped groups, or of a run that was stopped.
    fn left_over(&mut self, report: &mut Report) {
        let mut left: Vec<(EpisodeId, Accepted)> = self
            .ledger
            .accepted
            .iter()
            .filter(|(id, _)| !self.seen.contains(id))
            .map(|(id, accepted)| (*id, accepted.clone()))
            .collect();
        left.sort_unstable_by_key(|(_, accepted)| accepted.position);
        for chunk in left.chunks(BATCH) {
            let problems: Vec<_> =
                chunk.par_iter().map(|(id, accepted)| self.audit(*id, accepted).err()).collect();
            self.audited += chunk.len() as u64;
            for ((id, accepted), problem) in chunk.iter().zip(problems) {
                let lease = accepted.lease;
                let place = format!("{JOURNAL}, lease {lease}");
                if let Some((reason, problem)) = problem {
                    report.fail(CheckName::Episodes, reason, &place, problem);
                }
                let dropped = self.ledger.groups.get(&lease.group).is_some_and(|it| it.dropped);
                if self.terms.completed() && !dropped {
                    let problem =
                        format!("the accepted episode {id} stands in no line of evidence");
                    report.fail(CheckName::EvidenceRows, "episode_unused", place, problem);
                }
            }
        }
        if !left.is_empty() {
            let note = format!("{} accepted episodes were not used", left.len());
            report.note(CheckName::Episodes, note);
        }
        // What is complete counts: to drop it would be to choose among results.
        for (group, _) in self.ledger.groups.iter().filter(|(_, it)| it.dropped && it.complete()) {
            let problem = "it was dropped, and every answer of it was accepted";
            let place = format!("group {group}");
            report.fail(CheckName::Groups, "group_dropped_complete", place, problem);
        }
        let missing = self.ledger.groups.iter().filter(|(group, it)| {
            self.terms.completed() && !it.dropped && !self.groups.contains(group)
        });
        for (group, _) in missing {
            let problem = "it was ordered, and stands neither in the evidence nor as dropped";
            report.fail(CheckName::Groups, "group_missing", format!("group {group}"), problem);
        }
    }

    /// Refused episodes must be refused again, and have their files.
    fn refusals(&mut self, report: &mut Report) {
        use CheckName::Rejections as Name;
        let refused = &self.ledger.refused;
        let statistical = refused.iter().filter(|it| it.taken_back).count();
        if statistical > 0 {
            let note = format!("{statistical} passed rungs 1 to 8 and were refused by the ninth");
            report.note(Name, note);
        }
        let kept = refused.iter().filter(|it| it.kept.is_some()).count();
        report.looked_at(Name, format!("{} refused, {kept} audited again", refused.len()));
        for it in refused {
            let place = format!("{REJECTED}/{}.json", it.id);
            if let Err(problem) = self.refused_file(it) {
                report.fail(Name, "rejection_file", &place, problem);
            }
            let by_evidence = of_sampling(&it.reason)
                && evaluation_round(it.lease.group).is_none()
                && self.judge.mode == SamplingMode::Enforce;
            if it.taken_back && !by_evidence {
                let problem = format!(
                    "it was accepted, and taken back for {}; only enforced sampling evidence about a \
                     training group does that",
                    it.reason
                );
                report.fail(Name, "rejection_reason", &place, problem);
            }
            if it.kept.is_none() {
                continue;
            }
            match self.refuse_again(it) {
                Ok(code) if code == it.reason => {}
                Ok(code) => {
                    let problem = format!("it was refused as {}, and is {code} now", it.reason);
                    report.fail(Name, "rejection_reason", &place, problem);
                }
                Err(problem) => report.fail(Name, "rejection_reason", &place, problem),
            }
        }
    }

    fn refuse_again(&self, it: &Refused) -> Result<&'static str, String> {
        let journal = self.terms.directory.join(JOURNAL);
        let entry =
            read_at(&journal, self.ledger.run, it.position).map_err(|error| error.to_string())?;
        match entry.record().map_err(|error| error.to_string())? {
            Record::Rejected { attempt, behind, body: Some(body), .. } => {
                match self.climb(it.id, it.lease, attempt, behind, body) {
                    Ok(_) => Err("it passes the audit".into()),
                    Err((code, _)) => Ok(code),
                }
            }
            _ => Err("it is not where it was".into()),
        }
    }

    fn refused_file(&self, it: &Refused) -> Result<(), String> {
        let path = self.terms.directory.join(REJECTED).join(format!("{}.json", it.id));
        let text = std::fs::read(path).map_err(|error| error.to_string())?;
        let value: Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
        let reason = value.get("reason").and_then(Value::as_str).unwrap_or_default();
        if reason == it.reason {
            Ok(())
        } else {
            Err(format!("it says {reason}; the journal says {}", it.reason))
        }
    }
}

/// A line without the sampling evidence at its end, which only the weights can give again.
fn without_sampling(line: &EvidenceLine) -> Vec<u8> {
    const FIELD: &[u8] = b",\"sampling\":{";
    let text = &line.text;
    let field = text.windows(FIELD.len()).rposition(|window| window == FIELD);
    match (field, &line.row.sampling) {
        (Some(at), Some(_)) => [text.get(..at).unwrap_or_default(), b"}"].concat(),
        _ => text.clone(),
    }
}

/// Whether a reason is one of the statistical rung's.
fn of_sampling(reason: &str) -> bool {
    ["unlikely_token", "log_probability_gap", "uncalibrated_device"]
        .iter()
        .any(|it| reason.starts_with(it))
}

fn place(line: &EvidenceLine) -> String {
    format!("{EVIDENCE} line {}", line.number)
}

/// The keys in which two JSON objects differ, with both values, shortened.
fn differences(written: &[u8], found: &[u8]) -> Vec<(String, String, String)> {
    let object = |text: &[u8]| match serde_json::from_slice(text) {
        Ok(Value::Object(object)) => object,
        _ => serde_json::Map::new(),
    };
    let (written, found) = (object(written), object(found));
    let keys = written.keys().chain(found.keys().filter(|key| !written.contains_key(*key)));
    let shown =
        |value: Option<&Value>| value.map_or_else(|| "absent".into(), crate::recipe::json::shown);
    keys.filter(|key| *key != "sampling" && written.get(*key) != found.get(*key))
        .map(|key| (key.clone(), shown(written.get(key)), shown(found.get(key))))
        .collect()
}

/// Malformed calls and all calls of an episode.
pub(super) fn calls(audited: &Audited) -> (u64, u64) {
    let calls = audited.episode.trace.iter().filter(|row| row.kind != CallKind::Answer);
    let malformed = calls.clone().filter(|row| row.kind == CallKind::Malformed).count();
    (malformed as u64, calls.count() as u64)
}
