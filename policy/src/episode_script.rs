//! The rules of a multi-turn episode, once, for the actor that plays it and the audit that checks it.
//!
//! [`EpisodeScript`] does no I/O: it is told what was sampled and how long the external text is, and
//! answers which calls may run and whether the episode goes on. The rules are those of TRL's tool
//! loop, with its silent cases made explicit:
//!
//! 1. `max_tool_rounds = N` allows N tool rounds and N + 1 generations. The calls of generation N + 1
//!    are recorded as over the limit and the episode ends with [`EpisodeEnd::Turns`].
//! 2. `max_completion` bounds every id after the prompt, sampled and external together.
//! 3. A generation that the budget cut makes no calls, whole blocks before the cut included:
//!    [`EpisodeEnd::Length`].
//! 4. Calls run only if the template's framing of their observations (with empty texts) and one more
//!    sampled id still fit. Otherwise they are over the limit and the episode ends with
//!    [`EpisodeEnd::Length`]. If they ran and the real observations do not fit, the rows stay (the
//!    tools did run), nothing is appended, and the episode ends with [`EpisodeEnd::Length`].
//! 5. Under [`OnMalformed::End`] one malformed block makes the turn run nothing:
//!    [`EpisodeEnd::Malformed`]. Under [`OnMalformed::Observe`] it is a call like another, whose
//!    observation says what is wrong with it.
//! 6. When the environment is done after a turn's calls, the episode ends with [`EpisodeEnd::Done`].
//!    The trace keeps the last observations; the stream does not, as nothing is conditioned on them.
//! 7. A turn that was not cut and makes no call ends the episode with [`EpisodeEnd::NoCall`]. Its text,
//!    without reasoning and trimmed ([`Turn::content`](crate::chat::Turn)), is the policy's answer,
//!    where the environment takes one.
//!
//! Where several apply, the order is: cut generation, no call, malformed, rounds, budget, done.

use protocol::{CallPermit, EpisodeEnd, FinishReason, OnMalformed, ParsedCall};
use serde::{Deserialize, Serialize};

/// The limits of every episode of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EpisodeLimits {
    /// Tool rounds; one more generation than rounds is allowed.
    pub max_tool_rounds: u32,
    /// Ids after the prompt, sampled and external. At least 1.
    pub max_completion: u32,
    /// What a malformed block does.
    pub on_malformed: OnMalformed,
}

/// What follows from one generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnPlan {
    /// One permit a call, in order. Empty where the turn makes no calls.
    pub permits: Vec<CallPermit>,
    /// Set when the episode ends with this turn, whatever its calls answer.
    pub end: Option<EpisodeEnd>,
}

impl TurnPlan {
    /// Whether the turn's text is the policy's answer, where the environment takes one.
    pub fn answers(&self) -> bool {
        self.end == Some(EpisodeEnd::NoCall)
    }
}

/// Follows one episode, turn by turn: [`budget`](Self::budget), generate, [`turn`](Self::turn), run
/// the permitted calls, [`observe`](Self::observe), and again until an end is given.
#[derive(Clone, Debug)]
pub struct EpisodeScript {
    limits: EpisodeLimits,
    turns: u32,
    used: u32,
}

impl EpisodeScript {
    /// Starts after the prompt.
    pub fn new(limits: EpisodeLimits) -> Self {
        Self { limits, turns: 0, used: 0 }
    }

    /// The most ids that the next generation may sample. At least 1 until an end was given.
    pub fn budget(&self) -> u32 {
        self.limits.max_completion.saturating_sub(self.used)
    }

    /// Index of the next generation, from 0.
    pub fn next_turn(&self) -> u32 {
        self.turns
    }

    /// Takes one generation: why it ended, how many ids it sampled, the calls parsed from them, and
    /// `framing`, the length of the template's suffix with an empty observation for each call (not
    /// read where there are no calls).
    pub fn turn(
        &mut self,
        finish: FinishReason,
        sampled: usize,
        calls: &[ParsedCall],
        framing: usize,
    ) -> TurnPlan {
        let turn = self.turns;
        self.turns = turn.saturating_add(1);
        self.spend(sampled);
        if finish == FinishReason::Length {
            return TurnPlan { permits: Vec::new(), end: Some(EpisodeEnd::Length) };
        }
        if calls.is_empty() {
            return TurnPlan { permits: Vec::new(), end: Some(EpisodeEnd::NoCall) };
        }
        let malformed = calls.iter().any(|call| matches!(call, ParsedCall::Malformed { .. }));
        let end = if malformed && self.limits.on_malformed == OnMalformed::End {
            Some(EpisodeEnd::Malformed)
        } else if turn >= self.limits.max_tool_rounds {
            Some(EpisodeEnd::Turns)
        } else if !self.leaves_room(framing) {
            Some(EpisodeEnd::Length)
        } else {
            None
        };
        let permit = if end.is_some() { CallPermit::OverLimit } else { CallPermit::Run };
        TurnPlan { permits: vec![permit; calls.len()], end }
    }

    /// Takes what the permitted calls led to: whether the environment is done, and the length of the
    /// template's suffix with their observations. Where no end is given, that suffix is to be
    /// appended and the next generation follows.
    pub fn observe(&mut self, done: bool, suffix: usize) -> Option<EpisodeEnd> {
        if done {
            return Some(EpisodeEnd::Done);
        }
        if !self.leaves_room(suffix) {
            return Some(EpisodeEnd::Length);
        }
        self.spend(suffix);
        None
    }

    fn leaves_room(&self, external: usize) -> bool {
        external < self.budget() as usize
    }

    fn spend(&mut self, ids: usize) {
        self.used = self.used.saturating_add(u32::try_from(ids).unwrap_or(u32::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(rounds: u32, completion: u32) -> EpisodeLimits {
        EpisodeLimits {
            max_tool_rounds: rounds,
            max_completion: completion,
            on_malformed: OnMalformed::Observe,
        }
    }

    fn call() -> ParsedCall {
        ParsedCall::Call { name: "guess".into(), arguments: "{}".into() }
    }

    fn malformed() -> ParsedCall {
        ParsedCall::Malformed { raw: "{".into(), reason: "not JSON".into() }
    }

    fn plan(permits: &[CallPermit], end: Option<EpisodeEnd>) -> TurnPlan {
        TurnPlan { permits: permits.to_vec(), end }
    }

    #[test]
    fn n_rounds_allow_n_plus_one_generations_and_the_last_calls_do_not_run() {
        let mut script = EpisodeScript::new(limits(2, 1000));
        for turn in 0..2 {
            assert_eq!(script.next_turn(), turn);
            let got = script.turn(FinishReason::Stop, 5, &[call()], 4);
            assert_eq!(got, plan(&[CallPermit::Run], None));
            assert_eq!(script.observe(false, 6), None);
        }
        let got = script.turn(FinishReason::Stop, 5, &[call(), call()], 4);
        assert_eq!(got, plan(&[CallPermit::OverLimit; 2], Some(EpisodeEnd::Turns)));
    }

    #[test]
    fn a_cut_generation_runs_nothing_even_with_whole_calls_before_the_cut() {
        let mut script = EpisodeScript::new(limits(2, 5));
        let got = script.turn(FinishReason::Length, 5, &[call()], 0);
        assert_eq!(got, plan(&[], Some(EpisodeEnd::Length)));
    }

    #[test]
    fn calls_run_only_while_their_framing_and_one_more_id_fit() {
        let turn = |framing| {
            let mut script = EpisodeScript::new(limits(2, 10));
            script.turn(FinishReason::Stop, 5, &[call()], framing)
        };
        assert_eq!(turn(4), plan(&[CallPermit::Run], None));
        assert_eq!(turn(5), plan(&[CallPermit::OverLimit], Some(EpisodeEnd::Length)));
        assert_eq!(turn(usize::MAX), plan(&[CallPermit::OverLimit], Some(EpisodeEnd::Length)));
    }

    #[test]
    fn observations_that_do_not_fit_end_the_episode_after_the_calls_ran() {
        let mut script = EpisodeScript::new(limits(2, 10));
        script.turn(FinishReason::Stop, 5, &[call()], 2);
        assert_eq!(script.clone().observe(false, 5), Some(EpisodeEnd::Length));
        assert_eq!(script.observe(false, 4), None);
        assert_eq!(script.budget(), 1);
    }

    #[test]
    fn a_stop_on_the_last_id_of_the_budget_is_a_turn_whose_calls_do_not_run() {
        let mut script = EpisodeScript::new(limits(2, 5));
        let got = script.turn(FinishReason::Stop, 5, &[call()], 0);
        assert_eq!(got, plan(&[CallPermit::OverLimit], Some(EpisodeEnd::Length)));
        let mut script = EpisodeScript::new(limits(2, 5));
        assert_eq!(script.turn(FinishReason::Stop, 5, &[], 0), plan(&[], Some(EpisodeEnd::NoCall)));
    }

    #[test]
    fn a_malformed_block_is_observed_or_ends_the_turn_as_configured() {
        let mut script = EpisodeScript::new(limits(2, 100));
        let calls = [call(), malformed()];
        assert_eq!(
            script.turn(FinishReason::Stop, 5, &calls, 4),
            plan(&[CallPermit::Run, CallPermit::Run], None)
        );
        let ending = EpisodeLimits { on_malformed: OnMalformed::End, ..limits(2, 100) };
        let mut script = EpisodeScript::new(ending);
        assert_eq!(
            script.turn(FinishReason::Stop, 5, &calls, 4),
            plan(&[CallPermit::OverLimit; 2], Some(EpisodeEnd::Malformed))
        );
    }

    #[test]
    fn done_ends_before_the_budget_does() {
        let mut script = EpisodeScript::new(limits(2, 10));
        script.turn(FinishReason::Stop, 5, &[call()], 2);
        assert_eq!(script.observe(true, 500), Some(EpisodeEnd::Done));
    }
}
