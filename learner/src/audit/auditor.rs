//! Climbs the ladder.

use std::{collections::BTreeSet, sync::Arc};

use environments::{Description, EnvironmentSpec, Fault, RecordedAnswer, RecordedCall, Score};
use policy::{
    chat::ChatFormat,
    episode_script::EpisodeLimits,
    vision::{PromptImages, episode_prompt},
};
use protocol::{Episode, EpisodeId, FinishReason, Image, Lease, LeaseId, RunId, Task};

use super::{PolicyAudit, Reason, calls, frame, lease, memo::Memo, replay, reward, tokens, trace};
use crate::{
    leases::Standing,
    reward::{Reward, Rewards},
};

/// What a run's episodes must keep to.
#[derive(Clone, Debug)]
pub struct AuditTerms {
    /// The run.
    pub run: RunId,
    /// The checkpoint's way of writing conversations, under the recipe.
    pub format: Arc<ChatFormat>,
    /// What the checkpoint makes of images, where the environment shows some.
    pub images: Option<PromptImages>,
    /// Ids that the model has: every id of a stream is below it.
    pub vocabulary: u32,
    /// What is played.
    pub environment: EnvironmentSpec,
    /// The limits of an episode.
    pub limits: EpisodeLimits,
    /// How episodes are rewarded.
    pub reward: Rewards,
    /// How many updates a policy may be behind.
    pub max_staleness: u64,
    /// Whether episodes of environments that cannot be replayed are taken on their trace alone.
    pub allow_recorded: bool,
}

/// An episode as it came in.
#[derive(Clone, Copy, Debug)]
pub struct Presented<'a> {
    /// The id that was announced.
    pub id: EpisodeId,
    /// The bytes.
    pub body: &'a [u8],
    /// What the lease book says about the lease that the bytes name
    /// ([`protocol::wire::peek_lease`]).
    pub standing: &'a Standing,
    /// How many updates newer than its policy there are.
    pub behind: u64,
}

/// An episode that passed every rung, and what the learner knows about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Audited {
    /// Its id.
    pub id: EpisodeId,
    /// The task of its lease.
    pub task: Task,
    /// The episode.
    pub episode: Episode,
    /// The score of the learner's own replay, or of the checked trace.
    pub score: Score,
    /// What it earned.
    pub reward: Reward,
    /// What was checked, for the evidence.
    pub policy_audit: PolicyAudit,
}

/// An episode that was refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Rejected {
    /// Its announced id.
    pub id: EpisodeId,
    /// The lease that it says it answers, where that could be read.
    pub lease: Option<LeaseId>,
    /// Why.
    pub reason: Reason,
    /// What it says, where that could be read.
    pub episode: Option<Box<Episode>>,
}

/// A decoded episode beside the lease that it answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case<'a> {
    pub(super) episode: &'a Episode,
    pub(super) lease: &'a Lease,
}

/// What the rungs found out on the way up.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) prompt_tokens: usize,
    /// The calls as parsed, with their permits.
    pub(super) calls: Vec<RecordedCall>,
    /// The answer as parsed, where the environment takes one.
    pub(super) answer: Option<RecordedAnswer>,
    pub(super) replayed: bool,
    pub(super) score: Option<Score>,
    pub(super) reward: Option<Reward>,
}

/// One rung above the lease.
pub(super) trait Rung: Sync {
    fn check(
        &self,
        auditor: &Auditor,
        case: Case<'_>,
        findings: &mut Findings,
    ) -> Result<(), Reason>;
}

/// The rungs that look at an episode beside its lease, in order.
const LADDER: [&dyn Rung; 5] =
    [&tokens::Tokens, &calls::Calls, &trace::Trace, &replay::Replay, &reward::Recompute];

/// Audits the episodes of one run. Holds no state that a verdict depends on.
#[derive(Debug)]
pub struct Auditor {
    pub(super) terms: AuditTerms,
    pub(super) description: Description,
    pub(super) stop_ids: BTreeSet<u32>,
    encoded: Memo,
}

impl Auditor {
    /// An auditor of these terms.
    ///
    /// # Errors
    /// The environment cannot be opened to be asked what it is.
    pub fn new(terms: AuditTerms) -> Result<Self, Fault> {
        let description = terms.environment.describe()?;
        let stop_ids = terms.format.stop_ids().iter().copied().collect();
        Ok(Self { terms, description, stop_ids, encoded: Memo::default() })
    }

    /// The terms.
    pub fn terms(&self) -> &AuditTerms {
        &self.terms
    }

    /// Audits one episode.
    ///
    /// # Errors
    /// The first rung that fails, with its reason.
    pub fn audit(&self, presented: Presented<'_>) -> Result<Audited, Box<Rejected>> {
        let Presented { id, body, standing, behind } = presented;
        let episode = match frame::check(id, body) {
            Ok(episode) => episode,
            Err(reason) => {
                let lease = protocol::wire::peek_lease(body).map(|(_, lease)| lease);
                return Err(Box::new(Rejected { id, lease, reason, episode: None }));
            }
        };
        match self.climb(&episode, standing, behind) {
            Ok((task, findings)) => audited(id, task, episode, findings),
            Err(reason) => Err(refused(id, episode, reason)),
        }
    }

    fn climb(
        &self,
        episode: &Episode,
        standing: &Standing,
        behind: u64,
    ) -> Result<(Task, Findings), Reason> {
        frame::check_images(episode)?;
        let lease = lease::check(&self.terms, episode, standing, behind)?;
        let mut findings = Findings::default();
        for rung in LADDER {
            rung.check(self, Case { episode, lease }, &mut findings)?;
        }
        Ok((lease.task.clone(), findings))
    }

    /// The learner's own rendering of an episode's start. Of images it depends on their sizes alone.
    pub(super) fn prompt(
        &self,
        prompt: &str,
        reset_text: &str,
        shown: &[&Image],
    ) -> Result<Arc<[u32]>, Reason> {
        let sizes: Vec<String> =
            shown.iter().map(|image| format!("{}x{}", image.width(), image.height())).collect();
        let texts: Vec<&str> =
            [prompt, reset_text].into_iter().chain(sizes.iter().map(String::as_str)).collect();
        let (format, images) = (&self.terms.format, self.terms.images.as_ref());
        self.encoded
            .get("prompt", &texts, || episode_prompt(format, images, prompt, reset_text, shown))
            .map_err(|error| Reason::Unrenderable { problem: error.to_string() })
    }

    /// The template's suffix with these observations.
    pub(super) fn suffix(
        &self,
        finish: FinishReason,
        observations: &[&str],
    ) -> Result<Arc<[u32]>, Reason> {
        let kind = match finish {
            FinishReason::Stop => "suffix",
            FinishReason::Length => "suffix of a cut turn",
        };
        self.encoded
            .get(kind, observations, || self.terms.format.suffix(finish, observations))
            .map_err(|error| Reason::Unrenderable { problem: error.to_string() })
    }

    /// Length of the template's suffix with `calls` empty observations.
    pub(super) fn framing(&self, finish: FinishReason, calls: usize) -> Result<usize, Reason> {
        if calls == 0 {
            return Ok(0);
        }
        Ok(self.suffix(finish, &vec![""; calls])?.len())
    }
}

fn audited(
    id: EpisodeId,
    task: Task,
    episode: Episode,
    findings: Findings,
) -> Result<Audited, Box<Rejected>> {
    let policy_audit = PolicyAudit::of(&episode, findings.prompt_tokens, findings.replayed);
    match (findings.score, findings.reward) {
        (Some(score), Some(reward)) => {
            Ok(Audited { id, task, episode, score, reward, policy_audit })
        }
        _ => Err(refused(id, episode, Reason::NoScore)),
    }
}

fn refused(id: EpisodeId, episode: Episode, reason: Reason) -> Box<Rejected> {
    Box::new(Rejected { id, lease: Some(episode.lease), reason, episode: Some(Box::new(episode)) })
}
