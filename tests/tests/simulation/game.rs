//! What is played in simulations: episodes that follow from their leases, a judge, and a policy that is a
//! digest of everything that it was trained on.

use std::collections::BTreeMap;

use environments::Score;
use learner::{
    audit::{Audited, Judged, PolicyAudit, Reason, Rejected, Submitted},
    leases::{GroupOrder, Standing},
    reward::RewardProtocol,
};
use protocol::{
    AdapterManifest, Digest, Episode, EpisodeEnd, EpisodeId, Lease, LeaseId, PolicyDigest, RunId,
    Sampling, Split, Task,
};

pub(crate) const GROUPS: u32 = 2;
pub(crate) const GENERATIONS: u32 = 3;
/// Milliseconds of a lease.
pub(crate) const DEADLINE: u64 = 60_000;

pub(crate) fn run() -> RunId {
    RunId(Digest::of(b"run"))
}

pub(crate) fn weights() -> Digest {
    Digest::of(b"weights")
}

pub(crate) fn sampling() -> Sampling {
    Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 }
}

pub(crate) fn order(group: u64, policy: PolicyDigest) -> GroupOrder {
    GroupOrder {
        task: Task {
            id: format!("task {}", group % 5),
            prompt: "p".into(),
            fields: "{}".into(),
            split: Split::Train,
        },
        seed: group,
        policy,
        sampling: sampling(),
        generations: GENERATIONS,
        deadline_ms: DEADLINE,
    }
}

/// The one episode that honestly answers a lease; `variant` stands for rounding on another device.
pub(crate) fn episode(lease: &Lease, variant: u32, forged: bool) -> Vec<u8> {
    let episode = Episode {
        run: lease.run,
        lease: lease.id,
        task: lease.task.id.clone(),
        seed: lease.seed ^ u64::from(forged),
        policy: lease.policy,
        reset_text: String::new(),
        reset_images: Vec::new(),
        tokens: vec![variant],
        loss_mask: vec![0],
        spans: Vec::new(),
        trace: Vec::new(),
        trace_head: Digest::of(b""),
        end: EpisodeEnd::NoCall,
        reward: 0.0,
        images: Vec::new(),
    };
    episode.encode().expect("sound")
}

pub(crate) fn manifest(step: u64, bytes: &[u8]) -> AdapterManifest {
    AdapterManifest::build(step, &weights(), bytes).expect("an adapter")
}

/// The policy that these episodes make of a policy.
pub(crate) fn trained(before: &[u8], episodes: &[EpisodeId]) -> Vec<u8> {
    let ids: Vec<u8> = episodes.iter().flat_map(|id| id.0.0).collect();
    Digest::of_parts("trained", &[before, &ids]).0.to_vec()
}

/// The last policy of a run that nothing disturbs.
pub(crate) fn undisturbed(steps: u32, staleness: u32) -> Vec<u8> {
    let mut policies = vec![b"first".to_vec()];
    for step in 0..steps {
        let played = &policies[step.saturating_sub(staleness) as usize];
        let policy = manifest(u64::from(step.saturating_sub(staleness)), played).policy;
        let mut ids = Vec::new();
        for group in 0..u64::from(GROUPS) {
            let group = u64::from(step * GROUPS) + group;
            for generation in 0..GENERATIONS {
                let id = LeaseId { group, generation };
                let lease = order(group, policy).lease(run(), id, 0);
                ids.push(EpisodeId::of_body(&episode(&lease, 0, false)));
            }
        }
        let before = policies.last().expect("one").clone();
        policies.push(trained(&before, &ids));
    }
    policies.pop().expect("one")
}

/// What the audit says of an answer.
pub(crate) fn judge(answer: Submitted) -> Judged {
    let verdict = verdict(&answer);
    Judged { answer, verdict }
}

fn verdict(answer: &Submitted) -> Result<Audited, Box<Rejected>> {
    let (id, lease) = (answer.id, Some(answer.lease));
    let refuse = |reason| Box::new(Rejected { id, lease, reason, episode: None });
    let episode = Episode::decode(&answer.body)
        .map_err(|error| refuse(Reason::BadFrame { problem: error.to_string() }))?;
    let Standing::Open(lease) = &answer.standing else {
        return Err(refuse(Reason::LeaseSpent { lease: answer.lease }));
    };
    if episode.seed != lease.seed {
        let (expected, found) = (lease.seed, episode.seed);
        return Err(refuse(Reason::SeedMismatch { expected, found }));
    }
    if episode.policy != lease.policy {
        let (expected, found) = (lease.policy, episode.policy);
        return Err(refuse(Reason::PolicyMismatch { expected, found }));
    }
    Ok(audited(id, lease, episode))
}

pub(crate) fn audited(id: EpisodeId, lease: &Lease, episode: Episode) -> Audited {
    let score = Score { reward: 0.0, success: false, milestones: BTreeMap::new() };
    let reward = RewardProtocol::Environment.reward(&(0.0..=1.0), &score, &[]).expect("a reward");
    let policy_audit = PolicyAudit {
        prompt_tokens: 1,
        assistant_tokens: 0,
        external_tokens: 0,
        sampled_spans: Vec::new(),
        sampled_token_equality_verified: true,
        calls_verified: true,
        chain_verified: true,
        replay_verified: true,
        reward_verified: true,
    };
    Audited { id, task: lease.task.clone(), episode, score, reward, policy_audit }
}
