//! Conversations as supervised token streams.
//!
//! A row becomes the stream that a rollout would have had: prompt, turn, suffix, turn, and so on, each
//! written by the template once and never re-rendered with the turns before it. So a model that was
//! supervised on these rows meets the same ids when it plays, also under templates that rewrite
//! earlier turns.

use policy::{
    chat::{ChatError, ChatFormat},
    score::ScoreRow,
};
use serde_json::{Value, json};

/// A conversation that cannot be learned from.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The template refuses it.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// No assistant message.
    #[error("messages: no message has the role assistant, so there is nothing to learn; add one")]
    NoAssistant,
    /// The first message is the assistant's.
    #[error("messages: an assistant message needs a message before it")]
    NothingBefore,
    /// The template writes an assistant message in no way that could be cut out.
    #[error(
        "messages[{index}]: the chat template does not write this assistant message as a turn after its own generation prompt; use a training template"
    )]
    NotATurn {
        /// Index of the message.
        index: usize,
    },
}

/// The ids of a conversation up to its last assistant turn; what an assistant would have sampled is
/// scored, its stop ids included.
///
/// # Errors
/// When the conversation has no turn to learn, or the template does not write it as turns.
pub fn supervised_row(
    format: &ChatFormat,
    messages: &[Value],
) -> Result<ScoreRow, ConversationError> {
    let turns: Vec<usize> = messages
        .iter()
        .enumerate()
        .filter(|(_, message)| message["role"] == "assistant")
        .map(|(index, _)| index)
        .collect();
    let Some(&first) = turns.first() else {
        return Err(ConversationError::NoAssistant);
    };
    if first == 0 {
        return Err(ConversationError::NothingBefore);
    }
    let mut ids = format.conversation(&messages[..first], true)?;
    let mut scored = vec![false; ids.len()];
    for (position, &index) in turns.iter().enumerate() {
        let turn = assistant_turn(format, messages, index)?;
        ids.extend_from_slice(&turn);
        scored.resize(ids.len(), true);
        if let Some(&next) = turns.get(position + 1) {
            ids.extend(between(format, messages, index, next)?);
            scored.resize(ids.len(), false);
        }
    }
    Ok(ScoreRow { ids, scored, ..ScoreRow::default() })
}

fn question() -> Value {
    json!({"role": "user", "content": "?"})
}

/// What the template writes for one assistant message after its generation prompt, its stop id last.
fn assistant_turn(
    format: &ChatFormat,
    messages: &[Value],
    index: usize,
) -> Result<Vec<u32>, ConversationError> {
    let before = format.conversation(&[question()], true)?;
    let after = format.conversation(&[question(), messages[index].clone()], false)?;
    let rest = after.strip_prefix(before.as_slice());
    let end = rest.and_then(|rest| rest.iter().position(|id| format.stop_ids().contains(id)));
    match (rest, end) {
        (Some(rest), Some(end)) => Ok(rest[..=end].to_vec()),
        _ => Err(ConversationError::NotATurn { index }),
    }
}

/// What stands between the stop id of one assistant turn and the start of the next.
fn between(
    format: &ChatFormat,
    messages: &[Value],
    index: usize,
    next: usize,
) -> Result<Vec<u32>, ConversationError> {
    let tools = &messages[index + 1..next];
    let texts: Option<Vec<&str>> = tools
        .iter()
        .map(|message| message["content"].as_str().filter(|_| message["role"] == "tool"))
        .collect();
    if let Some(texts) = texts.filter(|texts| !texts.is_empty()) {
        return Ok(format.suffix(protocol::FinishReason::Stop, &texts)?);
    }
    let stops = |ids: &[u32]| ids.iter().filter(|id| format.stop_ids().contains(id)).count();
    let before = stops(&format.conversation(&[question()], false)?);
    let mut dummy = vec![question(), messages[index].clone()];
    dummy.extend_from_slice(tools);
    let whole = format.conversation(&dummy, true)?;
    let mut seen = 0;
    let end = whole.iter().position(|id| {
        seen += usize::from(format.stop_ids().contains(id));
        seen == before + 1
    });
    match end {
        Some(end) => Ok(whole[end + 1..].to_vec()),
        None => Err(ConversationError::NotATurn { index }),
    }
}
