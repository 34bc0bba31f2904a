//! The trusted trace of tool calls and answers, and its hash chain.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Digest, LeaseId, RunId};

/// What became of one tool call, or that a row is no call but an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CallKind {
    /// The tool ran and returned.
    Ok,
    /// The tool ran and raised; its message is the observation.
    Raised,
    /// The arguments do not fit the tool's schema; nothing ran.
    BadArgs,
    /// No such tool; nothing ran.
    UnknownTool,
    /// The call could not be parsed; nothing ran.
    Malformed,
    /// The episode had ended before this call; nothing ran.
    AfterDone,
    /// A limit (turns, calls, token budget) forbade it; nothing ran.
    OverLimit,
    /// No call: the text of the last turn, which the environment takes as the policy's answer.
    Answer,
}

impl fmt::Display for CallKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Whether whoever plays an episode lets a call run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallPermit {
    /// It may.
    Run,
    /// A limit of the episode forbids it: recorded, not run.
    OverLimit,
}

/// One call as the parser read it from sampled ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ParsedCall {
    /// A well-formed call.
    Call {
        /// Tool name, as written.
        name: String,
        /// A JSON object as compact text, keys in the order written.
        arguments: String,
    },
    /// A tool-call block that is not a call.
    Malformed {
        /// The block's text.
        raw: String,
        /// Why it is not a call: shown to the policy when malformed calls are observed.
        reason: String,
    },
}

/// One row of the trace, written by the recorder: neither the environment nor the model can write here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRow {
    /// Index of the sampled span that made the call.
    pub turn: u32,
    /// Index of the call inside its turn.
    pub call: u32,
    /// Tool name as called; empty for a malformed call and for an answer.
    pub tool: String,
    /// Arguments after parsing, compact JSON; the raw block for a malformed call, the text for an answer.
    pub arguments: String,
    /// What became of it.
    pub kind: CallKind,
    /// Milestones that this call reached for the first time, set by the environment.
    pub milestones: Vec<String>,
    /// The text that the policy was shown; an answer is answered by nothing.
    pub observation: String,
    /// Whether the environment's episode has ended after this call.
    pub done: bool,
    /// Chain value: the hash of the previous value and of this row.
    pub chain: Digest,
}

/// The rolling hash over an episode's reset and rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceChain(Digest);

impl TraceChain {
    /// Starts a chain at the reset that it belongs to. Images are named by their addresses; a reset
    /// without images has the chain that it had before there were any.
    pub fn start(
        run: &RunId,
        lease: LeaseId,
        task: &str,
        seed: u64,
        reset_text: &str,
        reset_images: &[Digest],
    ) -> Self {
        let (group, generation) = (lease.group.to_le_bytes(), lease.generation.to_le_bytes());
        let seed = seed.to_le_bytes();
        let mut parts: Vec<&[u8]> =
            vec![&run.0.0, &group, &generation, task.as_bytes(), &seed, reset_text.as_bytes()];
        parts.extend(reset_images.iter().map(|address| address.0.as_slice()));
        let domain =
            if reset_images.is_empty() { "rollcall-trace-v1" } else { "rollcall-trace-images-v1" };
        Self(Digest::of_parts(domain, &parts))
    }

    /// Adds a row (its own `chain` field is not read) and returns the new chain value.
    pub fn push(&mut self, row: &TraceRow) -> Digest {
        let milestones = row.milestones.len() as u64;
        let mut parts: Vec<Vec<u8>> = vec![
            self.0.0.to_vec(),
            row.turn.to_le_bytes().to_vec(),
            row.call.to_le_bytes().to_vec(),
            row.tool.clone().into_bytes(),
            row.arguments.clone().into_bytes(),
            row.kind.to_string().into_bytes(),
            milestones.to_le_bytes().to_vec(),
        ];
        parts.extend(row.milestones.iter().map(|m| m.clone().into_bytes()));
        parts.push(row.observation.clone().into_bytes());
        parts.push(vec![u8::from(row.done)]);
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        self.0 = Digest::of_parts("rollcall-trace-row-v1", &parts);
        self.0
    }

    /// The current value: the head after the last row.
    pub fn head(&self) -> Digest {
        self.0
    }
}
