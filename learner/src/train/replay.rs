//! What a learner that was started again knows from its journal, without I/O: records go in one after the
//! other, and out comes the lease book as it was, the accepted episodes that were not used yet, and the
//! last commit.

use std::collections::BTreeMap;

use protocol::{
    ActorId, Digest, EpisodeId, LeaseAttempt, LeaseId, PolicyDigest, RunId, wire::peek_lease,
};

use super::intake::Flaws;
use crate::{
    curriculum::evaluation_round,
    journal::{Commit, Position, Record},
    leases::{LeaseBook, LeaseCounts},
};

/// How often a lease is granted before its group is given up.
pub const MAX_ATTEMPTS: u32 = 8;

/// An accepted episode that was not used yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptEpisode {
    /// The lease that it answers.
    pub lease: LeaseId,
    /// Who sent it.
    pub actor: ActorId,
    /// What it was sampled on, in the actor's own words.
    pub device: String,
    /// Where its bytes are.
    pub position: Position,
}

/// An episode that was refused since the last commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateRefusal {
    /// Its id.
    pub id: EpisodeId,
    /// The lease.
    pub lease: LeaseId,
    /// The stable name of the reason.
    pub reason: String,
    /// How long its bytes are, where the record keeps them.
    pub kept: Option<u64>,
}

/// A policy that was announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownPolicy {
    /// Optimizer steps behind it.
    pub step: u64,
    /// Its digest.
    pub policy: PolicyDigest,
    /// SHA-256 of its adapter.
    pub adapter: Digest,
}

/// Reads a journal.
#[derive(Debug)]
pub struct Replay {
    groups_per_step: u64,
    book: LeaseBook,
    accepted: BTreeMap<EpisodeId, KeptEpisode>,
    rejections: BTreeMap<ActorId, u32>,
    policies: Vec<KnownPolicy>,
    /// How many of them were there at the last commit.
    committed_policies: usize,
    commit: Option<Commit>,
    resumes: u64,
    answers_since: u64,
    refused_since: Vec<LateRefusal>,
    flaws: Flaws,
}

/// What a journal amounts to.
#[derive(Debug)]
pub struct Replayed {
    /// Every lease, its grants and its answers.
    pub book: LeaseBook,
    /// Accepted episodes of groups that are not over.
    pub accepted: BTreeMap<EpisodeId, KeptEpisode>,
    /// Refused episodes by actor.
    pub rejections: BTreeMap<ActorId, u32>,
    /// The policies of committed steps, oldest first.
    pub policies: Vec<KnownPolicy>,
    /// The last commit.
    pub commit: Commit,
    /// What was refused since then.
    pub refused_since: Vec<LateRefusal>,
    /// How often the run was gone on with.
    pub resumes: u64,
    answers_since: u64,
}

impl Replay {
    /// A replay of a run's journal from its start.
    pub fn new(run: RunId, groups_per_step: u32) -> Self {
        Self {
            groups_per_step: u64::from(groups_per_step).max(1),
            book: LeaseBook::new(run, MAX_ATTEMPTS),
            accepted: BTreeMap::new(),
            rejections: BTreeMap::new(),
            policies: Vec::new(),
            committed_policies: 0,
            commit: None,
            resumes: 0,
            answers_since: 0,
            refused_since: Vec::new(),
            flaws: Flaws::default(),
        }
    }

    /// Plants mistakes.
    #[doc(hidden)]
    #[must_use]
    pub fn with_flaws(mut self, flaws: Flaws) -> Self {
        self.flaws = flaws;
        self
    }

    /// Takes the next record.
    ///
    /// # Errors
    /// It does not follow from those before.
    pub fn take(&mut self, record: Record<'_>, position: Position) -> Result<(), String> {
        match record {
            Record::Group { group, order } => {
                self.book.open(group, order).map_err(|error| error.to_string())?;
            }
            Record::Granted { actor, leases } => {
                for lease in leases {
                    self.book.replay_grant(actor, lease);
                }
            }
            Record::Accepted { actor, attempt, device, body, .. } => {
                let id = EpisodeId::of_body(body);
                let Some((_, lease)) = peek_lease(body) else {
                    return Err(format!("episode {id} names no lease"));
                };
                self.book.replay_grant(actor, LeaseAttempt { id: lease, attempt });
                if !self.book.replay_verdict(actor, lease, id, true) {
                    return Err(format!("episode {id} answers lease {lease}, which is not open"));
                }
                let device = device.to_owned();
                self.accepted.insert(id, KeptEpisode { lease, actor, device, position });
                self.answers_since += 1;
            }
            Record::Rejected { actor, lease, id, reason, body, .. } => {
                let taken_back = self.accepted.remove(&id).is_some();
                if !self.book.replay_verdict(actor, lease, id, false) {
                    return Err(format!("episode {id} answers lease {lease}, which is not open"));
                }
                self.answers_since += u64::from(!taken_back);
                *self.rejections.entry(actor).or_default() += 1;
                let (reason, kept) = (reason.to_owned(), body.map(|body| body.len() as u64));
                self.refused_since.push(LateRefusal { id, lease, reason, kept });
            }
            Record::Dropped { group } => self.dropped(group)?,
            Record::Policy { step, policy, adapter, .. } => {
                self.policies.push(KnownPolicy { step, policy, adapter });
            }
            Record::Committed(commit) => self.committed(commit)?,
            Record::Resumed { commit } => {
                if self.commit.map(|it| it.number) != Some(commit) {
                    return Err(format!(
                        "the run went on from commit {commit}, which is not the last"
                    ));
                }
                self.resumes += 1;
                self.policies.truncate(self.committed_policies);
            }
        }
        Ok(())
    }

    fn dropped(&mut self, group: u64) -> Result<(), String> {
        let complete = self.book.take(group).is_some();
        if complete {
            self.book.drop_stale(group);
        } else if self.book.drop_group(group).is_none() {
            return Err(format!("group {group} was given up, and is not open"));
        }
        self.accepted.retain(|_, it| it.lease.group != group);
        Ok(())
    }

    fn committed(&mut self, commit: Commit) -> Result<(), String> {
        let expected = self.commit.map_or(0, |it| it.number + 1);
        if commit.number != expected {
            return Err(format!("commit {} where {expected} should be", commit.number));
        }
        let trained = u64::from(commit.steps) * self.groups_per_step;
        let over = |group: u64| match evaluation_round(group) {
            Some(round) => round < commit.rounds,
            None => group < trained,
        };
        for group in self.book.open_numbers().into_iter().filter(|group| over(*group)) {
            if self.flaws.forget_watermark {
                continue;
            }
            if !self.book.replay_consumed(group) {
                return Err(format!("group {group} was used, and is not complete"));
            }
            self.accepted.retain(|_, it| it.lease.group != group);
        }
        self.commit = Some(commit);
        self.committed_policies = self.policies.len();
        self.answers_since = 0;
        self.refused_since.clear();
        Ok(())
    }

    /// What it all amounts to; nothing where nothing was committed.
    pub fn end(mut self) -> Option<Replayed> {
        let mut commit = self.commit?;
        if self.flaws.forget_watermark {
            (commit.steps, commit.rounds) = (0, 0);
        }
        self.policies.truncate(self.committed_policies);
        Some(Replayed {
            book: self.book,
            accepted: self.accepted,
            rejections: self.rejections,
            policies: self.policies,
            commit,
            refused_since: self.refused_since,
            resumes: self.resumes,
            answers_since: self.answers_since,
        })
    }
}

impl Replayed {
    /// Goes on counting from the counts of the last commit.
    pub fn count_from(&mut self, committed: &LeaseCounts) {
        self.book.replay_counts(committed, self.answers_since);
    }

    /// The policies that leases may still name, and the newest: the last of each step, oldest first.
    pub fn latest_policies(&self, kept: usize) -> &[KnownPolicy] {
        let from = self.policies.len().saturating_sub(kept);
        self.policies.get(from..).unwrap_or_default()
    }
}
