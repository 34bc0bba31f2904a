//! What the journal says: which leases there were, what answered them, and which policies played.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use protocol::{
    Digest, EpisodeId, Lease, LeaseId, PolicyDigest, RunId, Sampling, Split, wire::peek_lease,
};
use serde_json::Value;

use super::{CheckName, Report, evaluations, terms::Terms};
use crate::{
    curriculum::{
        EVALUATION_GROUPS, TaskOrder, episode_seed, evaluation_group, evaluation_round, order_key,
    },
    files::JOURNAL,
    journal::{Commit, JournalError, JournalReader, Position, Record},
    leases::GroupOrder,
    recipe::TaskRow,
};

/// A group as it was ordered.
#[derive(Debug)]
pub(super) struct LedgerGroup {
    pub(super) order: GroupOrder,
    pub(super) dropped: bool,
    answers: BTreeMap<u32, EpisodeId>,
}

impl LedgerGroup {
    /// Whether every lease has an answer that counts.
    pub(super) fn complete(&self) -> bool {
        self.answers.len() as u64 == u64::from(self.order.generations)
    }
}

/// An accepted episode.
#[derive(Clone, Debug)]
pub(super) struct Accepted {
    pub(super) lease: LeaseId,
    /// What it was sampled on, in the actor's own words.
    pub(super) device: Box<str>,
    pub(super) position: Position,
}

/// A refused episode.
#[derive(Clone, Debug)]
pub(super) struct Refused {
    pub(super) id: EpisodeId,
    pub(super) lease: LeaseId,
    pub(super) reason: String,
    pub(super) kept: Option<u64>,
    /// Whether it was accepted before.
    pub(super) taken_back: bool,
    pub(super) position: Position,
}

/// A policy as it was announced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announced {
    pub(super) step: u64,
    pub(super) policy: PolicyDigest,
    pub(super) adapter: Digest,
    pub(super) bytes: u64,
    pub(super) archived: bool,
}

/// The journal, indexed.
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) run: RunId,
    pub(super) groups: BTreeMap<u64, LedgerGroup>,
    pub(super) accepted: HashMap<EpisodeId, Accepted>,
    pub(super) refused: Vec<Refused>,
    pub(super) policies: Vec<Announced>,
    /// How many of them there were at the last commit.
    committed_policies: usize,
    /// The last commit.
    pub(super) commit: Option<Commit>,
    pub(super) resumes: u64,
}

impl Ledger {
    /// Reads the journal to its end, or to where it is damaged.
    pub(super) fn read(terms: &Terms, report: &mut Report) -> Self {
        use CheckName::Journal as Name;
        let mut this = Self {
            run: terms.manifest.run,
            groups: BTreeMap::new(),
            accepted: HashMap::new(),
            refused: Vec::new(),
            policies: Vec::new(),
            committed_policies: 0,
            commit: None,
            resumes: 0,
        };
        let reader = JournalReader::open(terms.directory.join(JOURNAL), this.run);
        let mut reader = match reader {
            Ok(reader) => reader,
            Err(error) => {
                report.fail(Name, reason(&error), JOURNAL, error);
                return this;
            }
        };
        let written = terms.progress.journal;
        let mut met = false;
        loop {
            let so_far = reader.so_far();
            if written.is_some_and(|it| it.records == so_far.records) {
                met = true;
                let head = written.map(|it| it.head);
                report.equal(Name, "journal_head", "journal.head", &head, &Some(so_far.head));
            }
            let entry = match reader.read() {
                Ok(Some(entry)) => entry,
                Ok(None) => break,
                Err(JournalError::Torn { .. }) if !terms.closed() => {
                    report.note(Name, "it ends in a torn record, as a crash leaves it");
                    break;
                }
                Err(error) => {
                    report.fail(Name, reason(&error), JOURNAL, error);
                    break;
                }
            };
            let Position { segment, offset } = entry.position;
            let place = || format!("{JOURNAL}/{segment:08}.segment byte {offset}");
            match entry.record() {
                Ok(record) => this.take(record, entry.position, place, report),
                Err(error) => report.fail(Name, "journal_record", place(), error),
            }
        }
        let so_far = reader.so_far();
        match written {
            None => report.fail(Name, "journal_head", "journal", "the manifest has no journal"),
            Some(written) if terms.closed() => {
                report.equal(Name, "journal_length", "journal", &written, &so_far);
            }
            Some(_) if !met => {
                report.fail(Name, "journal_length", "journal", "records are missing at its end");
            }
            Some(_) => {}
        }
        report.looked_at(
            Name,
            format!(
                "{} records in {} segments, {} bytes; {} episodes accepted, {} refused",
                so_far.records,
                so_far.segments,
                so_far.bytes,
                this.accepted.len(),
                this.refused.len()
            ),
        );
        this
    }

    fn take(
        &mut self,
        record: Record<'_>,
        position: Position,
        place: impl Fn() -> String,
        report: &mut Report,
    ) {
        use CheckName::Leases as Name;
        match record {
            Record::Group { group, order } => {
                let fresh = LedgerGroup { order, dropped: false, answers: BTreeMap::new() };
                if self.groups.insert(group, fresh).is_some() {
                    report.fail(Name, "group_repeated", place(), format!("group {group} again"));
                }
            }
            Record::Policy { step, policy, adapter, bytes, archived } => {
                self.policies.push(Announced { step, policy, adapter, bytes, archived });
            }
            Record::Accepted { body, device, .. } => {
                let id = EpisodeId::of_body(body);
                let Some((_, lease)) = peek_lease(body) else {
                    report.fail(Name, "bad_frame", place(), format!("episode {id} has no lease"));
                    return;
                };
                let slot = self.groups.get_mut(&lease.group);
                let slot = slot.filter(|it| lease.generation < it.order.generations);
                // None: there is no such lease.
                match slot.map(|group| group.answers.insert(lease.generation, id)) {
                    Some(None) => {}
                    Some(Some(_)) => {
                        let problem = format!("episode {id} answers {lease}, which had its answer");
                        report.fail(Name, "lease_spent", place(), problem);
                    }
                    None => {
                        let problem = format!("episode {id} answers {lease}, which nobody issued");
                        report.fail(Name, "lease_unknown", place(), problem);
                    }
                }
                self.accepted.insert(id, Accepted { lease, device: device.into(), position });
            }
            Record::Rejected { lease, id, reason, body, .. } => {
                let taken_back = self.accepted.remove(&id).is_some();
                if taken_back && let Some(group) = self.groups.get_mut(&lease.group) {
                    group.answers.remove(&lease.generation);
                }
                self.refused.push(Refused {
                    id,
                    lease,
                    reason: reason.to_owned(),
                    kept: body.map(|body| body.len() as u64),
                    taken_back,
                    position,
                });
            }
            // That an answer was asked for is the lease book's to decide, when it comes.
            Record::Granted { .. } => {}
            Record::Committed(commit) => {
                self.committed_policies = self.policies.len();
                self.commit = Some(commit);
            }
            Record::Resumed { commit } => {
                self.resumes += 1;
                // What was announced and not committed was made again.
                self.policies.truncate(self.committed_policies);
                if self.commit.map(|it| it.number) != Some(commit) {
                    let problem = format!("it goes on from commit {commit}, which is not the last");
                    report.fail(CheckName::Journal, "journal_record", place(), problem);
                }
            }
            Record::Dropped { group } => match self.groups.get_mut(&group) {
                Some(group) => group.dropped = true,
                None => {
                    let problem = format!("group {group} was dropped and never ordered");
                    report.fail(Name, "group_unknown", place(), problem);
                }
            },
        }
    }

    /// The lease of this id, as it was issued.
    pub(super) fn lease(&self, id: LeaseId, attempt: u32) -> Option<Lease> {
        let group = self.groups.get(&id.group)?;
        (id.generation < group.order.generations).then(|| group.order.lease(self.run, id, attempt))
    }

    /// The steps at which a policy was announced: several, where an update changed nothing.
    pub(super) fn steps(&self, policy: PolicyDigest) -> BTreeSet<u64> {
        self.policies.iter().filter(|it| it.policy == policy).map(|it| it.step).collect()
    }

    /// Checks that every group asks for what the recipe decides.
    pub(super) fn check_orders(&self, terms: &Terms, report: &mut Report) {
        use CheckName::Leases as Name;
        let mut leases = 0_u64;
        let announced: HashMap<PolicyDigest, BTreeSet<u64>> =
            self.policies.iter().fold(HashMap::new(), |mut all, it| {
                all.entry(it.policy).or_insert_with(BTreeSet::new).insert(it.step);
                all
            });
        let mut places = Places::new(terms);
        for (&group, LedgerGroup { order, .. }) in &self.groups {
            leases += u64::from(order.generations);
            let place = || format!("group {group}");
            let Some(expected) = expected(terms, group) else {
                report.fail(Name, "lease_split", place(), "the recipe has no evaluation");
                continue;
            };
            let task = &order.task;
            report.equal(Name, "lease_split", place(), &task.split, &expected.split);
            let found = order.generations;
            report.equal(Name, "lease_generations", place(), &found, &expected.generations);
            report.equal(Name, "lease_sampling", place(), &order.sampling, &expected.sampling);
            let row = TaskRow { task: task.clone(), episode_seed: own_seed(&task.fields) };
            let seed = episode_seed(self.run, &row, group);
            report.equal(Name, "lease_seed", place(), &order.seed, &seed);
            if let Err(error) = terms.recipe.environment.check_task(task) {
                report.fail(Name, "lease_task", place(), error);
            }
            if let Some(problem) = places.wrong(group, order) {
                report.fail(Name, "lease_task", place(), problem);
            }
            match announced.get(&order.policy) {
                None => report.fail(
                    Name,
                    "lease_policy",
                    place(),
                    format!("policy {} was never announced", order.policy),
                ),
                Some(steps) if expected.step.is_some_and(|step| !steps.contains(&step)) => {
                    let step = expected.step.unwrap_or_default();
                    let problem = format!("policy {} is not the one of step {step}", order.policy);
                    report.fail(Name, "lease_policy", place(), problem);
                }
                Some(_) => {}
            }
        }
        if terms.completed() {
            for group in due(terms, &self.groups) {
                let problem = "the recipe decides on it, and it was never ordered";
                report.fail(Name, "group_unordered", format!("group {group}"), problem);
            }
        }
        let by = if terms.tasks.is_some() {
            "tasks by the data sets"
        } else {
            "the data sets are not where they were: order of tasks only"
        };
        let groups = self.groups.len();
        report.looked_at(Name, format!("{leases} leases of {groups} groups; {by}"));
    }
}

/// Groups that a completed run must have ordered, and has not.
fn due<'a>(
    terms: &Terms,
    ordered: &'a BTreeMap<u64, LedgerGroup>,
) -> impl Iterator<Item = u64> + use<'a> {
    let training = &terms.recipe.training;
    let groups = u64::from(training.groups_per_step()) * u64::from(training.max_steps);
    let rounds = (0_u32..).zip(evaluations::due(terms)).map(|(round, _)| round);
    let rows = terms.manifest.evaluation_dataset.as_ref().map_or(0, |it| it.rows);
    let rows = u32::try_from(rows).unwrap_or(u32::MAX);
    let held_out = rounds
        .collect::<Vec<_>>()
        .into_iter()
        .flat_map(move |round| (0..rows).map(move |row| evaluation_group(round, row)));
    (0..groups).chain(held_out).filter(|group| !ordered.contains_key(group))
}

/// What the recipe decides about a group.
struct Expected {
    split: Split,
    generations: u32,
    sampling: Sampling,
    /// The step whose policy plays it, where the group's number says it.
    step: Option<u64>,
}

fn expected(terms: &Terms, group: u64) -> Option<Expected> {
    let training = &terms.recipe.training;
    if evaluation_round(group).is_some() {
        let evaluation = terms.recipe.evaluation.as_ref()?;
        return Some(Expected {
            split: Split::Eval,
            generations: evaluation.num_generations,
            sampling: evaluation.sampling.to_sampling(),
            step: None,
        });
    }
    Some(Expected {
        split: Split::Train,
        generations: training.num_generations,
        sampling: training.sampling(),
        step: Some(training.played_at(group / u64::from(training.groups_per_step().max(1)))),
    })
}

/// The seed that a task's own fields fix.
fn own_seed(fields: &str) -> Option<u64> {
    serde_json::from_str::<Value>(fields).ok()?.get("episode_seed")?.as_u64()
}

/// Which task each group must play.
struct Places<'a> {
    terms: &'a Terms,
    order: Option<TaskOrder>,
    /// Epoch and key of the training group before, where the data set is not there.
    last: Option<(u64, Digest)>,
}

impl<'a> Places<'a> {
    fn new(terms: &'a Terms) -> Self {
        let order = terms.tasks.as_ref().map(|it| TaskOrder::new(terms.manifest.run, &it.train));
        Self { terms, order, last: None }
    }

    /// What is wrong with the task of a group, if anything is. Groups come by number.
    fn wrong(&mut self, group: u64, order: &GroupOrder) -> Option<String> {
        let found = &order.task.id;
        if let (Some(rows), Some(places)) = (&self.terms.tasks, &mut self.order) {
            let row = if group >= EVALUATION_GROUPS {
                rows.eval.get(usize::try_from(group & u64::from(u32::MAX)).ok()?)
            } else {
                places.row(group).and_then(|row| rows.train.get(row))
            };
            return match row {
                Some(row) if row.task == order.task => None,
                Some(row) => Some(format!("it plays task {found:?}, not {:?}", row.task.id)),
                None => Some(format!("it plays task {found:?}, and no row has this number")),
            };
        }
        if group >= EVALUATION_GROUPS {
            return None;
        }
        let epoch = group.checked_div(self.terms.manifest.dataset.rows as u64)?;
        let key = order_key(self.terms.manifest.run, epoch, found);
        let before = self.last.replace((epoch, key));
        let out_of_order = before.is_some_and(|(last, before)| last == epoch && before >= key);
        out_of_order.then(|| format!("task {found:?} is out of the epoch's order"))
    }
}

fn reason(error: &JournalError) -> &'static str {
    match error {
        JournalError::Io { .. } => "journal_unreadable",
        JournalError::Segment { .. } => "segment_missing",
        JournalError::Damaged { .. } | JournalError::Record(_) => "journal_damaged",
        JournalError::Torn { .. } => "journal_torn",
    }
}
