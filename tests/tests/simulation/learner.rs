//! A learner in the simulation: the real intake, lease book, journal, replay, checkpoints and sessions; what
//! is simulated is the model.

use std::collections::{HashMap, VecDeque};

use learner::{
    audit::{Judged, Rejected},
    files::{Answer, Checkpoints, Part, seal, unseal},
    journal::{Commit, Journal, JournalReader, Record, SEGMENT_BYTES, read_over},
    leases::{GroupOrder, LeaseBook},
    recipe::FailurePolicy,
    train::{
        intake::{CollectCounts, CollectedGroup, Effect, Flaws, Intake, Rules, Source},
        replay::{MAX_ATTEMPTS, Replay},
        watcher::Witness,
    },
};
use protocol::{
    ActorId, AdapterManifest, Digest, Episode, EpisodeId, FromActor, FromLearner, LeaseAttempt,
    folder::Folder,
};
use terminal::Failure;

use crate::{
    disk::{Dice, SimDisk},
    game::{self, GROUPS},
};

/// The learner's disks, which outlive it.
#[derive(Debug)]
pub(crate) struct Disks {
    pub(crate) journal: SimDisk,
    pub(crate) checkpoints: SimDisk,
}

impl Disks {
    pub(crate) fn new() -> Self {
        Self { journal: SimDisk::new("journal"), checkpoints: SimDisk::new("checkpoint") }
    }

    pub(crate) fn crash(&self, dice: &mut Dice) {
        self.journal.crash(dice);
        self.checkpoints.crash(dice);
    }

    /// Every episode that the journal knows.
    pub(crate) fn known(&self) -> Result<Vec<EpisodeId>, String> {
        let folder: std::sync::Arc<dyn Folder> = std::sync::Arc::new(self.journal.clone());
        let mut reader = JournalReader::over(folder, game::run()).map_err(|e| e.to_string())?;
        let mut known = Vec::new();
        while let Ok(Some(entry)) = reader.read() {
            match entry.record().map_err(|e| e.to_string())? {
                Record::Accepted { body, .. } => known.push(EpisodeId::of_body(body)),
                Record::Rejected { id, .. } => known.push(id),
                _ => {}
            }
        }
        Ok(known)
    }
}

/// Writes what the intake decides on.
struct Writer(Journal);

fn write(journal: &mut Journal, record: &Record<'_>) -> Result<(), Failure> {
    journal.append(record).map_err(Failure::fault)
}

impl Witness for Writer {
    fn ordered(&mut self, group: u64, order: &GroupOrder) -> Result<(), Failure> {
        write(&mut self.0, &Record::Group { group, order: order.clone() })
    }

    fn granted(&mut self, actor: ActorId, leases: &[LeaseAttempt]) -> Result<(), Failure> {
        write(&mut self.0, &Record::Granted { actor, leases: leases.to_vec() })
    }

    fn accepted(&mut self, answer: &Answer<'_>) -> Result<(), Failure> {
        let &Answer { actor, attempt, behind, device, body, .. } = answer;
        write(&mut self.0, &Record::Accepted { actor, attempt, behind, device, body })
    }

    fn rejected(&mut self, answer: &Answer<'_>, rejected: &Rejected) -> Result<(), Failure> {
        let &Answer { actor, lease, attempt, behind, body, .. } = answer;
        let (id, reason, body) = (rejected.id, rejected.reason.code(), Some(body));
        let record = Record::Rejected { actor, lease, attempt, behind, id, reason, body };
        write(&mut self.0, &record)
    }

    fn taken_back(&mut self, actor: ActorId, rejected: &Rejected) -> Result<(), Failure> {
        let Some(lease) = rejected.lease else { return Ok(()) };
        let (id, reason) = (rejected.id, rejected.reason.code());
        let (attempt, behind, body) = (0, 0, None);
        let record = Record::Rejected { actor, lease, attempt, behind, id, reason, body };
        write(&mut self.0, &record)
    }

    fn dropped(&mut self, group: u64) -> Result<(), Failure> {
        write(&mut self.0, &Record::Dropped { group })
    }

    fn keep(&mut self) -> Result<(), Failure> {
        self.0.sync().map_err(Failure::fault)
    }

    fn progress(&mut self, _: usize) {}
}

/// Steps and counts, as a checkpoint keeps them.
type State = (u32, CollectCounts);

/// A learner while it lives.
pub(crate) struct SimLearner {
    pub(crate) intake: Intake,
    writer: Writer,
    checkpoints: Checkpoints,
    pub(crate) step: u32,
    steps: u32,
    staleness: u32,
    /// The policies that groups may have been played by, oldest first.
    recent: VecDeque<(AdapterManifest, Vec<u8>)>,
    /// Complete groups of the step that is due.
    taken: Vec<CollectedGroup>,
    updating: Option<Vec<CollectedGroup>>,
    next_commit: u64,
}

impl SimLearner {
    /// Starts or goes on: whatever is on the disks.
    pub(crate) fn start(
        disks: &Disks,
        steps: u32,
        staleness: u32,
        flaws: Flaws,
    ) -> Result<Self, String> {
        let rules = Rules {
            failure_policy: FailurePolicy::Drop,
            quarantine_after: 1,
            staleness: u64::from(staleness),
        };
        let checkpoints = Checkpoints::new(std::sync::Arc::new(disks.checkpoints.clone()));
        let folder: std::sync::Arc<dyn Folder> = std::sync::Arc::new(disks.journal.clone());
        let begun = !folder.list().map_err(|e| e.to_string())?.is_empty();
        let replay = Replay::new(game::run(), GROUPS).with_flaws(flaws);
        let unsealed = match begun {
            true => unseal::<State>(folder.clone(), &checkpoints, game::run(), replay),
            false => Ok(None),
        };
        let Some((mut journal, mut replayed, checkpoint)) = unsealed.map_err(|e| e.to_string())?
        else {
            // A learner that ended before its first commit has asked nobody for anything.
            for name in folder.list().map_err(|e| e.to_string())? {
                folder.remove(&name).map_err(|e| e.to_string())?;
            }
            let journal = Journal::create_over(folder, game::run(), SEGMENT_BYTES);
            let mut this = Self {
                intake: Intake::new(
                    LeaseBook::new(game::run(), MAX_ATTEMPTS),
                    rules,
                    HashMap::new(),
                )
                .with_flaws(flaws),
                writer: Writer(journal.map_err(|e| e.to_string())?),
                checkpoints,
                step: 0,
                steps,
                staleness,
                recent: VecDeque::new(),
                taken: Vec::new(),
                updating: None,
                next_commit: 0,
            };
            this.commit(b"first".to_vec()).map_err(|e| e.to_string())?;
            return Ok(this);
        };
        replayed.count_from(&checkpoint.state.1.leases);
        let mut accepted = HashMap::new();
        for (id, kept) in &replayed.accepted {
            let entry = read_over(folder.as_ref(), game::run(), kept.position);
            let entry = entry.map_err(|e| e.to_string())?;
            let Ok(Record::Accepted { body, .. }) = entry.record() else {
                return Err(format!("episode {id} is not where it was"));
            };
            let lease = replayed.book.lease(kept.lease).ok_or("its lease is not open")?;
            let episode = Episode::decode(body).map_err(|e| e.to_string())?;
            let source = Source { actor: kept.actor, device: kept.device.clone() };
            accepted.insert(*id, (game::audited(*id, &lease, episode), source));
        }
        let commit = replayed.commit;
        let kept = replayed.latest_policies(staleness as usize + 1).to_vec();
        let mut intake = Intake::new(replayed.book, rules, accepted).with_flaws(flaws);
        intake.go_on(checkpoint.state.1, replayed.rejections);
        let record = Record::Resumed { commit: commit.number };
        write(&mut journal, &record).map_err(|e| e.to_string())?;
        let mut this = Self {
            intake,
            writer: Writer(journal),
            checkpoints,
            step: if flaws.forget_watermark { commit.steps } else { checkpoint.state.0 },
            steps,
            staleness,
            recent: VecDeque::new(),
            taken: Vec::new(),
            updating: None,
            next_commit: commit.number + 1,
        };
        this.writer.keep().map_err(|e| e.to_string())?;
        for policy in kept {
            let bytes = checkpoint.part(&policy.step.to_string()).ok_or("a policy is missing")?;
            this.publish(game::manifest(policy.step, bytes), bytes.to_vec());
        }
        Ok(this)
    }

    fn publish(&mut self, manifest: AdapterManifest, bytes: Vec<u8>) {
        self.intake.publish(manifest.clone());
        self.recent.push_back((manifest, bytes));
        while self.recent.len() > self.staleness as usize + 1 {
            self.recent.pop_front();
        }
    }

    /// Makes the step count, then announces its policy.
    fn commit(&mut self, bytes: Vec<u8>) -> Result<(), Failure> {
        let manifest = game::manifest(u64::from(self.step), &bytes);
        let record = Record::Policy {
            step: manifest.step,
            policy: manifest.policy,
            adapter: manifest.adapter,
            bytes: manifest.bytes,
            archived: true,
        };
        write(&mut self.writer.0, &record)?;
        let balance = self.intake.balance();
        if !balance.holds() {
            return Err(Failure::Fault(format!("answers are unaccounted for: {balance}")));
        }
        let zero = Digest([0; 32]);
        let commit = Commit {
            number: self.next_commit,
            steps: self.step,
            rounds: 0,
            checkpoint: zero,
            evidence_rows: 0,
            evidence_bytes: 0,
            evidence_head: zero,
            metrics_bytes: 0,
            metrics_sha256: zero,
        };
        let state: State = (self.step, self.intake.settled_counts());
        let named: Vec<(String, &[u8])> = self
            .recent
            .iter()
            .map(|(manifest, bytes)| (manifest.step.to_string(), bytes.as_slice()))
            .chain([(self.step.to_string(), bytes.as_slice())])
            .collect();
        let parts: Vec<Part<'_>> = named.iter().map(|(name, it)| (name.as_str(), *it)).collect();
        seal(&mut self.writer.0, &self.checkpoints, commit, &state, &parts)
            .map_err(Failure::fault)?;
        self.next_commit += 1;
        self.publish(manifest, bytes);
        Ok(())
    }

    pub(crate) fn is_done(&self) -> bool {
        self.step == self.steps
    }

    pub(crate) fn policy(&self) -> &[u8] {
        self.recent.back().map_or(&[], |(_, bytes)| bytes)
    }

    /// What an actor said; an answer that is to be audited, if it was one.
    pub(crate) fn said(
        &mut self,
        actor: ActorId,
        message: FromActor,
    ) -> Option<learner::audit::Submitted> {
        self.intake.said(actor, message)
    }

    pub(crate) fn judged(&mut self, judged: Judged) -> Result<(), String> {
        self.intake.judged(judged, &mut self.writer).map_err(|e| e.to_string())
    }

    /// What the coordinator's thread does again and again. Returns what is to be said, and whether an
    /// update begins.
    pub(crate) fn attend(
        &mut self,
        now: u64,
    ) -> Result<(Vec<(ActorId, FromLearner)>, bool), String> {
        self.turn(now).map_err(|e| e.to_string())
    }

    fn turn(&mut self, now: u64) -> Result<(Vec<(ActorId, FromLearner)>, bool), Failure> {
        self.intake.expire(now);
        self.intake.drop_lost(&mut self.writer)?;
        let begins = self.updating.is_none() && !self.is_done() && self.begin()?;
        self.intake.grant(now, &mut self.writer)?;
        let mut said = Vec::new();
        for effect in self.intake.due(&mut self.writer)? {
            if let Effect::Say(actor, message) = effect {
                said.push((actor, message));
            }
        }
        Ok((said, begins))
    }

    /// Orders what is due, and begins the update where its groups are complete.
    fn begin(&mut self) -> Result<bool, Failure> {
        let first = self.step * GROUPS;
        let ahead = (self.step + self.staleness + 1).min(self.steps) * GROUPS;
        let policy = self.recent.back().map(|(manifest, _)| manifest.policy);
        for group in (first..ahead).map(u64::from) {
            if !self.intake.book().knows(group)
                && let Some(policy) = policy
            {
                self.intake.order(group, game::order(group, policy), &mut self.writer)?;
            }
        }
        let groups: Vec<u64> = (first..first + GROUPS).map(u64::from).collect();
        for &group in &groups {
            self.taken.extend(self.intake.take(group)?);
        }
        if groups.iter().any(|group| self.intake.book().is_open(*group)) {
            return Ok(false);
        }
        let taken = std::mem::take(&mut self.taken);
        self.updating = Some(self.intake.drop_stale(taken, &mut self.writer)?);
        Ok(true)
    }

    /// The update is computed: it counts.
    pub(crate) fn updated(&mut self) -> Result<(), String> {
        let Some(mut groups) = self.updating.take() else { return Ok(()) };
        groups.sort_by_key(|group| group.group);
        let ids: Vec<EpisodeId> =
            groups.iter().flat_map(|group| &group.rollouts).map(|it| it.id).collect();
        self.intake.confirm(&groups);
        self.step += 1;
        let bytes = game::trained(self.policy(), &ids);
        self.commit(bytes).map_err(|e| e.to_string())
    }
}
