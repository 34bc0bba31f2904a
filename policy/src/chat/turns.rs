//! How a template goes on after an assistant turn, found out with dummy conversations.
//!
//! History is never rendered again, so a template need not print earlier turns the same once more turns
//! follow (Qwen3's does not). What follows a turn is taken from a rendering of [user, assistant, tool …]
//! with dummy texts, cut after the stop token that closes the assistant turn.

use serde_json::{Value, json};

use super::{ChatError, ChatFormat, Rendered, tokenizer::Span};

/// How observations are shown to the policy, decided once at load.
///
/// A template that raises on the role `tool`, drops such messages, or treats them like any unknown role
/// (so that the model never saw it in training) gets them as one user message, joined by a newline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObservationRole {
    /// One tool message for each observation.
    Tool,
    /// One user message for all observations of a turn.
    User,
}

/// How the dummy assistant turn before the observations is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DummyCalls {
    /// With a call whose arguments are an object.
    Object,
    /// With a call whose arguments are JSON text.
    Text,
    /// Without a call.
    None,
}

/// What the dummy conversations showed.
#[derive(Clone, Copy, Debug)]
pub(super) struct TurnShape {
    pub(super) observations: ObservationRole,
    dummy_calls: DummyCalls,
    /// The stop id with which the template closes an assistant turn.
    pub(super) turn_end: u32,
    /// How many stop tokens the turn itself holds before that one.
    inner_stops: usize,
}

impl TurnShape {
    /// The first shape to try.
    pub(super) fn first(stop_ids: &[u32]) -> Result<Self, ChatError> {
        Ok(Self {
            observations: ObservationRole::Tool,
            dummy_calls: DummyCalls::Object,
            turn_end: stop_ids.first().copied().ok_or(ChatError::NoStopId)?,
            inner_stops: 0,
        })
    }
}

/// Dummy texts that stand where the policy's and the environment's will.
pub(super) const DUMMY_USER: &str = "rollcall-user";
const DUMMY_ASSISTANT: &str = "rollcall-assistant";
/// Templates that print a tool's name before its result print this one: a stream has no other names.
const DUMMY_TOOL: &str = "rollcall_tool";
const DUMMY_OBSERVATION: &str = "rollcall-observation";
const DUMMY_ROLE: &str = "rollcall-role";
/// Templates that ask for call ids (Mistral's) want nine letters or digits.
const DUMMY_CALL_ID: &str = "000000000";

impl ChatFormat {
    /// Tries the shapes in the order of preference and keeps the first under which the template prints
    /// the observation after a stop token.
    pub(super) fn choose_shape(&mut self) -> Result<(), ChatError> {
        let mut problem = None;
        for (observations, dummy_calls) in [
            (ObservationRole::Tool, DummyCalls::Object),
            (ObservationRole::Tool, DummyCalls::Text),
            (ObservationRole::Tool, DummyCalls::None),
            (ObservationRole::User, DummyCalls::None),
            (ObservationRole::User, DummyCalls::Object),
        ] {
            self.shape = TurnShape { observations, dummy_calls, ..self.shape };
            match self.try_shape() {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error @ ChatError::Reshaped { .. }) => return Err(error),
                // That a turn has no end says more than that a role is refused.
                Err(error @ ChatError::NoEndOfTurn { .. }) => problem = Some(error),
                Err(error) => drop(problem.get_or_insert(error)),
            }
        }
        Err(match problem {
            Some(error @ ChatError::NoEndOfTurn { .. }) => error,
            Some(error) => ChatError::NoObservations { detail: error.to_string() },
            None => {
                ChatError::NoObservations { detail: "no such message is in the rendering".into() }
            }
        })
    }

    fn try_shape(&mut self) -> Result<bool, ChatError> {
        let rendered = self.render(self.dummy_turns(&[DUMMY_OBSERVATION]), true)?;
        let Some(shown) = rendered.text.rfind(DUMMY_OBSERVATION) else { return Ok(false) };
        let stops = self.stops_after_assistant(&rendered)?;
        let inside = stops.iter().take_while(|(_, range)| range.end <= shown).count();
        let Some(last) = inside.checked_sub(1).and_then(|last| stops.get(last)) else {
            return Err(ChatError::NoEndOfTurn { stops: self.stop_texts() });
        };
        (self.shape.turn_end, self.shape.inner_stops) = (last.0, inside - 1);
        let made_up = self.shape.observations == ObservationRole::Tool
            && self.treats_tool_as_any_role(&rendered.text);
        Ok(!made_up)
    }

    /// Whether the template prints a message of a made-up role just as it printed the tool message.
    fn treats_tool_as_any_role(&self, with_tool: &str) -> bool {
        let mut messages = self.dummy_turns(&[DUMMY_OBSERVATION]);
        for message in &mut messages {
            if message.get("role").and_then(Value::as_str) == Some("tool") {
                message["role"] = DUMMY_ROLE.into();
            }
        }
        match self.template.render(&self.context(messages, true)) {
            Ok(text) => {
                text.contains(DUMMY_OBSERVATION) && text.replace(DUMMY_ROLE, "tool") == with_tool
            }
            Err(_) => false,
        }
    }

    /// An opening, a dummy assistant turn, and the observations after it.
    fn dummy_turns(&self, observations: &[&str]) -> Vec<Value> {
        let mut messages = self.opening(DUMMY_USER);
        let mut assistant = json!({"role": "assistant", "content": DUMMY_ASSISTANT});
        let arguments = match self.shape.dummy_calls {
            DummyCalls::Object => Some(json!({})),
            DummyCalls::Text => Some(json!("{}")),
            DummyCalls::None => None,
        };
        if let Some(arguments) = arguments {
            assistant["tool_calls"] = json!([{
                "id": DUMMY_CALL_ID,
                "type": "function",
                "function": {"name": DUMMY_TOOL, "arguments": arguments},
            }]);
        }
        messages.push(assistant);
        match self.shape.observations {
            ObservationRole::Tool => messages.extend(observations.iter().map(|text| {
                json!({"role": "tool", "name": DUMMY_TOOL, "tool_call_id": DUMMY_CALL_ID, "content": text})
            })),
            ObservationRole::User => {
                messages.push(json!({"role": "user", "content": observations.join("\n")}));
            }
        }
        messages
    }

    /// The stop tokens of a dummy rendering from the assistant turn on.
    fn stops_after_assistant(&self, rendered: &Rendered) -> Result<Vec<Span>, ChatError> {
        let outside = |at: &usize| {
            let next = rendered.untrusted.partition_point(|range| range.end <= *at);
            rendered.untrusted.get(next).is_none_or(|range| range.start > *at)
        };
        let mentions = |dummy: &'static str| {
            rendered.text.match_indices(dummy).map(|(at, _)| at).filter(outside)
        };
        // Some templates leave the content out where there is a call; a tool message may repeat the name.
        let at =
            mentions(DUMMY_ASSISTANT).last().or_else(|| mentions(DUMMY_TOOL).next()).unwrap_or(0);
        let spans = self.tokenizer.spans(&rendered.text, &rendered.untrusted)?;
        let is_stop = |(id, range): &Span| range.start > at && self.stop_ids.contains(id);
        Ok(spans.into_iter().filter(is_stop).collect())
    }

    /// The rendering of a dummy turn and `observations`, with the stop token that closes the turn.
    pub(super) fn after_assistant(
        &self,
        observations: &[&str],
    ) -> Result<(Rendered, Span), ChatError> {
        let rendered = self.render(self.dummy_turns(observations), true)?;
        match self.stops_after_assistant(&rendered)?.into_iter().nth(self.shape.inner_stops) {
            Some(end) => Ok((rendered, end)),
            None => Err(ChatError::NoEndOfTurn { stops: self.stop_texts() }),
        }
    }
}
