//! Why an episode is refused: one name for each way to be wrong.

use environments::{ReplayMismatch, TraceError};
use protocol::{AddressError, CallKind, Digest, EpisodeEnd, LeaseId, PolicyDigest};
use serde::{Deserialize, Serialize};

use crate::reward::RewardError;

/// The rungs of the ladder, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RungName {
    /// Limits, schema, hash of the bytes.
    Frame,
    /// Known, unspent, same task, seed and policy, not too stale.
    Lease,
    /// Prompt, spans, contexts, external ids, mask.
    Tokens,
    /// The trace's calls are those that the sampled ids say, and the episode ends where it must.
    Calls,
    /// The trace is consistent in itself and its chain holds.
    Trace,
    /// The environment, played again, gives the same trace.
    Replay,
    /// The reward, recomputed.
    Reward,
    /// The rollouts of a group belong together.
    Group,
    /// The sampled ids are those of honest sampling: evidence, where the others are exact.
    Sampling,
}

impl RungName {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Frame => "frame",
            Self::Lease => "lease",
            Self::Tokens => "tokens",
            Self::Calls => "calls",
            Self::Trace => "trace",
            Self::Replay => "replay",
            Self::Reward => "reward",
            Self::Group => "group",
            Self::Sampling => "sampling",
        }
    }

    /// The rung that refuses for a reason of this stable name; none where there is no such reason.
    pub fn of(code: &str) -> Option<Self> {
        Some(match code {
            "id_mismatch" | "bad_frame" | "image_missing" | "image_unshown" | "image_repeated"
            | "image_order" => Self::Frame,
            "run_mismatch" | "lease_unknown" | "lease_spent" | "lease_mismatch"
            | "task_mismatch" | "seed_mismatch" | "policy_mismatch" | "stale_policy"
            | "group_given_up" => Self::Lease,
            "no_spans" | "out_of_vocabulary" | "unrenderable" | "prompt_mismatch"
            | "span_offset" | "span_ids" | "span_policy" | "context_mismatch"
            | "log_probability" | "over_budget" | "stop_ignored" | "stop_missing"
            | "length_mismatch" | "nothing_to_answer" | "suffix_mismatch" | "trailing_ids"
            | "mask_mismatch" => Self::Tokens,
            "call_count" | "call_mismatch" | "answer_missing" | "answer_mismatch"
            | "permit_mismatch" | "row_without_turn" | "turn_after_end" | "ended_early"
            | "end_mismatch" => Self::Calls,
            "recorded_not_allowed" => Self::Replay,
            "no_score" | "reward_mismatch" | "reward_invalid" => Self::Reward,
            "group_size" | "group_generations" | "group_tasks" | "group_seeds"
            | "group_policies" => Self::Group,
            "unlikely_token"
            | "unlikely_tokens"
            | "log_probability_gap"
            | "log_probability_gaps"
            | "uncalibrated_device" => Self::Sampling,
            _ if code.starts_with("trace_") => Self::Trace,
            _ if code.starts_with("replay_") => Self::Replay,
            _ => return None,
        })
    }
}

/// Why an episode (or, for the last rung, a group) is refused. Positions, spans, turns and rows count
/// from 0.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Reason {
    #[error("the bytes hash to {found}, not to the announced id")]
    IdMismatch { found: Digest },
    #[error("the bytes are no episode: {problem}")]
    BadFrame { problem: String },
    #[error("{0}")]
    Images(AddressError),

    #[error("it is an episode of another run")]
    RunMismatch,
    #[error("lease {lease} was never issued")]
    LeaseUnknown { lease: LeaseId },
    #[error("lease {lease} has its answer already")]
    LeaseSpent { lease: LeaseId },
    #[error("it answers lease {found}, and was presented for {expected}")]
    LeaseMismatch { expected: LeaseId, found: LeaseId },
    #[error("it plays task {found:?}; the lease says {expected:?}")]
    TaskMismatch { expected: String, found: String },
    #[error("it was reset with seed {found}; the lease says {expected}")]
    SeedMismatch { expected: u64, found: u64 },
    #[error("it was played by policy {found}; the lease says {expected}")]
    PolicyMismatch { expected: PolicyDigest, found: PolicyDigest },
    #[error("its policy is {behind} updates behind; the bound is {bound}")]
    StalePolicy { behind: u64, bound: u64 },

    #[error("its group was given up before its verdict")]
    GroupGivenUp,

    #[error("it has no sampled span")]
    NoSpans,
    #[error("id {id} at position {at} is outside of the model's vocabulary of {vocabulary}")]
    OutOfVocabulary { at: usize, id: u32, vocabulary: u32 },
    #[error("it cannot be rendered: {problem}")]
    Unrenderable { problem: String },
    #[error("the prompt differs from the learner's own rendering at position {at}")]
    PromptMismatch { at: usize },
    #[error("span {span} starts at {found}; the stream up to it has {expected} ids")]
    SpanOffset { span: usize, expected: usize, found: usize },
    #[error("span {span}: its ids differ from the stream's at position {at}")]
    SpanIds { span: usize, at: usize },
    #[error("span {span} was sampled by policy {found}; the lease says {expected}")]
    SpanPolicy { span: usize, expected: PolicyDigest, found: PolicyDigest },
    #[error("span {span}: its context digest is not that of the stream before it")]
    ContextMismatch { span: usize },
    #[error("span {span}: the log-probability of its id {token} is above 0")]
    LogProbability { span: usize, token: usize },
    #[error("span {span} samples {found} ids; {budget} were left of the completion length")]
    OverBudget { span: usize, found: usize, budget: usize },
    #[error("span {span}: a stop id at its id {token} did not end it")]
    StopIgnored { span: usize, token: usize },
    #[error("span {span} says that it stopped, and its last id is no stop id")]
    StopMissing { span: usize },
    #[error("span {span} says that the budget ended it, with {left} ids left")]
    LengthMismatch { span: usize, left: usize },
    #[error("turn {turn} made no call, and external ids follow it")]
    NothingToAnswer { turn: usize },
    #[error(
        "the external ids after turn {turn} differ from the learner's own encoding of the framing and \
         the observations at position {at}"
    )]
    SuffixMismatch { turn: usize, at: usize },
    #[error("{count} ids follow the last span")]
    TrailingIds { count: usize },
    #[error("the loss mask differs from the union of the spans at position {at}")]
    MaskMismatch { at: usize },

    #[error("turn {turn} makes {parsed} calls; the trace has {rows} rows of it")]
    CallCount { turn: usize, parsed: usize, rows: usize },
    #[error("row {row} is not the call that turn {turn} makes")]
    CallMismatch { turn: usize, row: usize },
    #[error("turn {turn} is an answer, and the trace has no row of it")]
    AnswerMissing { turn: usize },
    #[error("row {row} is not the answer that turn {turn} gives")]
    AnswerMismatch { turn: usize, row: usize },
    #[error("row {row} is {found}; the episode's limits {rule} this call")]
    PermitMismatch { row: usize, found: CallKind, rule: &'static str },
    #[error("row {row} belongs to turn {turn}; there are {spans} turns")]
    RowWithoutTurn { row: usize, turn: u32, spans: usize },
    #[error("the episode ends ({end}) after turn {turn}, and more turns follow")]
    TurnAfterEnd { turn: usize, end: EpisodeEnd },
    #[error("the episode stops after turn {turn}, which does not end it")]
    EndedEarly { turn: usize },
    #[error("it says that it ended by {found}; it ended by {expected}")]
    EndMismatch { expected: EpisodeEnd, found: EpisodeEnd },

    #[error("the trace is inconsistent: {0}")]
    Trace(TraceError),

    #[error("its environment is recorded, not deterministic, and the run does not allow that")]
    RecordedNotAllowed,
    #[error("the environment failed in replay: {problem}")]
    ReplayFault { problem: String },
    #[error("replay: {0}")]
    Replay(ReplayMismatch),
    #[error("the environment's score cannot be had without replay")]
    NoScore,

    #[error("it claims reward {claimed}; the learner computes {computed}")]
    RewardMismatch { claimed: f64, computed: f64 },
    #[error("{0}")]
    RewardInvalid(RewardError),

    #[error("the group has {found} episodes, not {expected}")]
    GroupSize { expected: usize, found: usize },
    #[error("{lease} is not generation {expected} of group {group}")]
    GroupGenerations { group: u64, expected: u32, lease: LeaseId },
    #[error("the episodes of group {group} play different tasks")]
    GroupTasks { group: u64 },
    #[error("the episodes of group {group} have different seeds")]
    GroupSeeds { group: u64 },
    #[error("the episodes of group {group} were played by different policies")]
    GroupPolicies { group: u64 },

    #[error(
        "the id at position {at} is not what honest sampling gives: its logit lacks {found:.4}; \
         {bound:.4} are within rounding"
    )]
    UnlikelyToken { at: usize, found: f64, bound: f64 },
    #[error(
        "its {count} sampled ids are not what honest sampling gives: their logits lack {found:.5} on \
         average; {bound:.5} are within rounding"
    )]
    UnlikelyTokens { count: usize, found: f64, bound: f64 },
    #[error(
        "the log-probabilities of the id at position {at} are {found:.4} off the learner's own; \
         {bound:.4} are within rounding"
    )]
    LogProbabilityGap { at: usize, found: f64, bound: f64 },
    #[error(
        "the log-probabilities of its {count} sampled ids are {found:.5} off the learner's own on \
         average; {bound:.5} are within rounding"
    )]
    LogProbabilityGaps { count: usize, found: f64, bound: f64 },
    #[error(
        "it was sampled on {device:?}, and there are no bounds for that device; measure them with \
         learner calibrate and name them in audit.calibration"
    )]
    UncalibratedDevice { device: String },
}

impl Reason {
    /// The rung that refused, and the stable name of the reason.
    pub fn name(&self) -> (RungName, &'static str) {
        use RungName::*;
        match self {
            Self::IdMismatch { .. } => (Frame, "id_mismatch"),
            Self::BadFrame { .. } => (Frame, "bad_frame"),
            Self::Images(error) => (Frame, address_name(error)),
            Self::RunMismatch => (Lease, "run_mismatch"),
            Self::LeaseUnknown { .. } => (Lease, "lease_unknown"),
            Self::LeaseSpent { .. } => (Lease, "lease_spent"),
            Self::LeaseMismatch { .. } => (Lease, "lease_mismatch"),
            Self::TaskMismatch { .. } => (Lease, "task_mismatch"),
            Self::SeedMismatch { .. } => (Lease, "seed_mismatch"),
            Self::PolicyMismatch { .. } => (Lease, "policy_mismatch"),
            Self::StalePolicy { .. } => (Lease, "stale_policy"),
            Self::GroupGivenUp => (Lease, "group_given_up"),
            Self::NoSpans => (Tokens, "no_spans"),
            Self::OutOfVocabulary { .. } => (Tokens, "out_of_vocabulary"),
            Self::Unrenderable { .. } => (Tokens, "unrenderable"),
            Self::PromptMismatch { .. } => (Tokens, "prompt_mismatch"),
            Self::SpanOffset { .. } => (Tokens, "span_offset"),
            Self::SpanIds { .. } => (Tokens, "span_ids"),
            Self::SpanPolicy { .. } => (Tokens, "span_policy"),
            Self::ContextMismatch { .. } => (Tokens, "context_mismatch"),
            Self::LogProbability { .. } => (Tokens, "log_probability"),
            Self::OverBudget { .. } => (Tokens, "over_budget"),
            Self::StopIgnored { .. } => (Tokens, "stop_ignored"),
            Self::StopMissing { .. } => (Tokens, "stop_missing"),
            Self::LengthMismatch { .. } => (Tokens, "length_mismatch"),
            Self::NothingToAnswer { .. } => (Tokens, "nothing_to_answer"),
            Self::SuffixMismatch { .. } => (Tokens, "suffix_mismatch"),
            Self::TrailingIds { .. } => (Tokens, "trailing_ids"),
            Self::MaskMismatch { .. } => (Tokens, "mask_mismatch"),
            Self::CallCount { .. } => (Calls, "call_count"),
            Self::CallMismatch { .. } => (Calls, "call_mismatch"),
            Self::AnswerMissing { .. } => (Calls, "answer_missing"),
            Self::AnswerMismatch { .. } => (Calls, "answer_mismatch"),
            Self::PermitMismatch { .. } => (Calls, "permit_mismatch"),
            Self::RowWithoutTurn { .. } => (Calls, "row_without_turn"),
            Self::TurnAfterEnd { .. } => (Calls, "turn_after_end"),
            Self::EndedEarly { .. } => (Calls, "ended_early"),
            Self::EndMismatch { .. } => (Calls, "end_mismatch"),
            Self::Trace(error) => (Trace, trace_name(error)),
            Self::RecordedNotAllowed => (Replay, "recorded_not_allowed"),
            Self::ReplayFault { .. } => (Replay, "replay_fault"),
            Self::Replay(error) => (Replay, replay_name(error)),
            Self::NoScore => (Reward, "no_score"),
            Self::RewardMismatch { .. } => (Reward, "reward_mismatch"),
            Self::RewardInvalid(_) => (Reward, "reward_invalid"),
            Self::GroupSize { .. } => (Group, "group_size"),
            Self::GroupGenerations { .. } => (Group, "group_generations"),
            Self::GroupTasks { .. } => (Group, "group_tasks"),
            Self::GroupSeeds { .. } => (Group, "group_seeds"),
            Self::GroupPolicies { .. } => (Group, "group_policies"),
            Self::UnlikelyToken { .. } => (Sampling, "unlikely_token"),
            Self::UnlikelyTokens { .. } => (Sampling, "unlikely_tokens"),
            Self::LogProbabilityGap { .. } => (Sampling, "log_probability_gap"),
            Self::LogProbabilityGaps { .. } => (Sampling, "log_probability_gaps"),
            Self::UncalibratedDevice { .. } => (Sampling, "uncalibrated_device"),
        }
    }

    /// The rung that refused.
    pub fn rung(&self) -> RungName {
        self.name().0
    }

    /// The stable name of the reason.
    pub fn code(&self) -> &'static str {
        self.name().1
    }
}

fn address_name(error: &AddressError) -> &'static str {
    match error {
        AddressError::Missing(_) => "image_missing",
        AddressError::Unshown(_) => "image_unshown",
        AddressError::Repeated(_) => "image_repeated",
        AddressError::Order(_) => "image_order",
    }
}

fn trace_name(error: &TraceError) -> &'static str {
    match error {
        TraceError::ResetTooLong { .. } => "trace_reset_too_long",
        TraceError::TurnOrder { .. } => "trace_turn_order",
        TraceError::CallOrder { .. } => "trace_call_order",
        TraceError::MalformedTool { .. } => "trace_malformed_tool",
        TraceError::Kind { .. } => "trace_kind",
        TraceError::RefusalText { .. } => "trace_refusal_text",
        TraceError::NotAnError { .. } => "trace_not_an_error",
        TraceError::ObservationTooLong { .. } => "trace_observation_too_long",
        TraceError::AnswerNotTaken { .. } => "trace_answer_not_taken",
        TraceError::AnswerShape { .. } => "trace_answer_shape",
        TraceError::MilestoneNotRun { .. } => "trace_milestone_not_run",
        TraceError::MilestoneUnknown { .. } => "trace_milestone_unknown",
        TraceError::MilestoneRepeated { .. } => "trace_milestone_repeated",
        TraceError::MilestoneOrder { .. } => "trace_milestone_order",
        TraceError::DoneNotRun { .. } => "trace_done_not_run",
        TraceError::DoneTakenBack { .. } => "trace_done_taken_back",
        TraceError::Chain { .. } => "trace_chain",
        TraceError::Head => "trace_head",
    }
}

fn replay_name(error: &ReplayMismatch) -> &'static str {
    match error {
        ReplayMismatch::ResetText => "replay_reset_text",
        ReplayMismatch::Images { .. } => "replay_images",
        ReplayMismatch::Image(_) => "replay_image",
        ReplayMismatch::Rows { .. } => "replay_rows",
        ReplayMismatch::Turn(_) => "replay_turn",
        ReplayMismatch::Call(_) => "replay_call",
        ReplayMismatch::Tool(_) => "replay_tool",
        ReplayMismatch::Arguments(_) => "replay_arguments",
        ReplayMismatch::Kind(_) => "replay_kind",
        ReplayMismatch::Milestones(_) => "replay_milestones",
        ReplayMismatch::Observation(_) => "replay_observation",
        ReplayMismatch::Done(_) => "replay_done",
        ReplayMismatch::Chain(_) => "replay_chain",
        ReplayMismatch::Head => "replay_head",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rung_of_every_reason_is_known_by_its_name() {
        let mut names = 0;
        for line in include_str!("reason.rs").lines() {
            let named = line.split_once("=> (").and_then(|(_, it)| it.split_once(", \""));
            let Some((rung, code)) = named.filter(|_| line.trim_start().starts_with("Self::"))
            else {
                continue;
            };
            let code = code.split('"').next().unwrap_or_default();
            assert_eq!(RungName::of(code).map(|it| format!("{it:?}")), Some(rung.to_owned()));
            names += 1;
        }
        assert!(names > 45, "{names}");
        assert_eq!(RungName::of("replay_rows"), Some(RungName::Replay));
        assert_eq!(RungName::of("trace_head"), Some(RungName::Trace));
        assert_eq!(RungName::of("image_order"), Some(RungName::Frame));
        assert_eq!(RungName::of("other"), None);
    }
}
