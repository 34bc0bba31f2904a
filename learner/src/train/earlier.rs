//! Puts a learner back to where an earlier one stopped: leases and accepted episodes from the journal,
//! weights from the last checkpoint.

use std::{collections::HashMap, path::PathBuf};

use policy::{model::Adapter, score::ValueHead};
use protocol::{AdapterManifest, EpisodeId, RunId};
use rayon::prelude::*;
use terminal::Failure;

use super::{
    intake::{CollectCounts, Intake, Rules, Source},
    online::{Learner, Recent},
    replay::{KeptEpisode, KnownPolicy, Replayed},
};
use crate::{
    audit::{Audited, Auditor, Presented},
    files::{Checkpoint, Part, RunDirectory, RunState},
    journal::{Record, read_at},
    leases::Standing,
};

const ADAPTER: &str = "adapter";
const OPTIMIZER: &str = "optimizer";
const VALUE_HEAD: &str = "value_head";
const VALUE_OPTIMIZER: &str = "value_optimizer";

/// What an earlier learner left.
#[derive(Debug)]
pub struct Earlier {
    /// Its last checkpoint.
    pub checkpoint: Checkpoint<RunState>,
    /// Its leases.
    pub replayed: Replayed,
    /// Its journal.
    pub journal: PathBuf,
}

/// The weights of an earlier learner.
#[derive(Debug)]
pub(super) struct Weights {
    checkpoint: Checkpoint<RunState>,
    /// The policies that leases may name, oldest first.
    policies: Vec<KnownPolicy>,
}

impl Earlier {
    /// What its leases go on with. Accepted episodes that were not used yet pass the audit again.
    pub(super) fn go_on(
        self,
        run: RunId,
        rules: Rules,
        auditor: &Auditor,
    ) -> Result<(Intake, Weights), Failure> {
        let Self { checkpoint, replayed, journal } = self;
        let audit = |id: &EpisodeId, kept: &KeptEpisode| -> Result<Audited, String> {
            let entry = read_at(&journal, run, kept.position).map_err(|it| it.to_string())?;
            let lease = replayed.book.lease(kept.lease).ok_or("its lease is not open")?;
            match entry.record().map_err(|it| it.to_string())? {
                Record::Accepted { body, behind, .. } => {
                    let standing = Standing::Open(Box::new(lease));
                    let presented = Presented { id: *id, body, standing: &standing, behind };
                    auditor.audit(presented).map_err(|it| it.reason.to_string())
                }
                _ => Err("it is not where it was".into()),
            }
        };
        let kept: Vec<(&EpisodeId, &KeptEpisode)> = replayed.accepted.iter().collect();
        let audited = kept.par_iter().map(|(id, kept)| {
            let audited = audit(id, kept).map_err(|problem| {
                Failure::Fault(format!(
                    "{}: the accepted episode {id} does not pass the audit any more: {problem}",
                    journal.display()
                ))
            })?;
            let source = Source { actor: kept.actor, device: kept.device.clone() };
            Ok((**id, (audited, source)))
        });
        let accepted: HashMap<EpisodeId, (Audited, Source)> =
            audited.collect::<Result<_, Failure>>()?;
        let policies = replayed.latest_policies(rules_kept(rules)).to_vec();
        let mut intake = Intake::new(replayed.book, rules, accepted);
        let counts = CollectCounts { leases: Default::default(), ..checkpoint.state.counts };
        intake.go_on(counts, replayed.rejections);
        Ok((intake, Weights { checkpoint, policies }))
    }
}

fn rules_kept(rules: Rules) -> usize {
    usize::try_from(rules.staleness).unwrap_or(usize::MAX).saturating_add(1)
}

impl Weights {
    /// Gives a learner the weights and counters, and announces the policies that leases may name.
    pub(super) fn put_back(self, learner: &mut Learner) -> Result<(), Failure> {
        let Self { checkpoint, policies } = self;
        let part = |name: &str| {
            checkpoint
                .part(name)
                .ok_or_else(|| Failure::Fault(format!("the checkpoint has no {name}")))
        };
        let decoder = learner.decoder.clone();
        let read = |bytes: &[u8]| -> Result<Adapter, Failure> {
            Adapter::from_safetensors(bytes, &decoder).map_err(Failure::fault)
        };
        learner.adapter = read(part(ADAPTER)?)?;
        let device = decoder.device();
        learner
            .optimizer
            .load_for(part(OPTIMIZER)?, &mut learner.adapter, device)
            .map_err(Failure::fault)?;
        if let Some(critic) = &mut learner.critic {
            critic.head =
                ValueHead::from_safetensors(part(VALUE_HEAD)?, &decoder).map_err(Failure::fault)?;
            critic
                .optimizer
                .load_for(part(VALUE_OPTIMIZER)?, &mut critic.head, device)
                .map_err(Failure::fault)?;
        }
        let state = &checkpoint.state;
        (learner.step, learner.rounds) = (state.steps, state.rounds);
        (learner.before, learner.after) = (state.before, state.after);
        learner.seconds = state.seconds;
        let newest = learner.broadcast()?;
        for policy in policies.iter().filter(|it| it.step < newest.manifest.step) {
            let bytes = part(&policy_part(policy.step))?.to_vec();
            let manifest = AdapterManifest::build(policy.step, &learner.plan.model.weights, &bytes);
            let manifest = manifest.map_err(Failure::fault)?;
            let adapter = read(&bytes)?;
            learner.publish(Recent { manifest, bytes, adapter });
        }
        learner.publish(newest);
        Ok(())
    }
}

fn policy_part(step: u64) -> String {
    format!("policy of step {step}")
}

impl Learner {
    /// Makes everything until now survive a crash.
    pub(super) fn commit(&mut self, files: &mut RunDirectory) -> Result<(), Failure> {
        let balance = self.collector.balance();
        if !balance.holds() {
            return Err(Failure::Fault(format!("answers are unaccounted for: {balance}")));
        }
        let state = RunState {
            steps: self.step,
            rounds: self.rounds,
            seconds: self.seconds,
            before: self.before,
            after: self.after,
            counts: self.collector.settled_counts(),
            progress: files.progress().clone(),
        };
        let newest = self.adapter.to_safetensors().map_err(Failure::fault)?;
        let optimizer = self.optimizer.to_bytes().map_err(Failure::fault)?;
        let critic = self
            .critic
            .as_ref()
            .map(|critic| Ok((critic.head.to_safetensors()?, critic.optimizer.to_bytes()?)));
        let critic: Option<(Vec<u8>, Vec<u8>)> =
            critic.transpose().map_err(|error: policy::model::ModelError| Failure::fault(error))?;
        let older: Vec<(String, &[u8])> = self
            .recent
            .iter()
            .filter(|it| it.manifest.step < u64::from(self.step))
            .map(|it| (policy_part(it.manifest.step), it.bytes.as_slice()))
            .collect();
        let mut parts: Vec<Part<'_>> = vec![(ADAPTER, &newest), (OPTIMIZER, &optimizer)];
        if let Some((head, optimizer)) = &critic {
            parts.extend([(VALUE_HEAD, head.as_slice()), (VALUE_OPTIMIZER, optimizer)]);
        }
        parts.extend(older.iter().map(|(name, bytes)| (name.as_str(), *bytes)));
        files.commit(state, &parts).map_err(Failure::fault)
    }
}
