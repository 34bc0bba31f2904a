//! Bounds that the recorder holds an environment and a policy to.

use serde_json::{Map, Value, json};

use crate::{SpecError, fields::Fields};

/// Characters that the observations of one turn can have together: 4 MiB at four bytes each.
const TURN_CHARS: u64 = 1 << 20;

/// Bounds on one episode's calls and texts, in the recipe under `environment.limits`.
///
/// Characters are Unicode scalar values. The upper bounds keep every row, and a turn's rows together,
/// inside what an episode's frame may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Calls of one turn that may run; later ones are recorded as over the limit. 1 to 64.
    pub calls_per_turn: u32,
    /// Characters of one observation, the mark of a cut included. 64 to 65,536, and for all calls of
    /// a turn together at most 1,048,576.
    pub observation_chars: usize,
    /// Characters of the reset text, the mark of a cut included. 64 to 65,536.
    pub reset_chars: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { calls_per_turn: 8, observation_chars: 8192, reset_chars: 16_384 }
    }
}

impl Limits {
    /// Reads `environment.limits`; absent fields keep their default.
    ///
    /// # Errors
    /// A field that is unknown, of the wrong type or out of bounds.
    pub fn parse(object: &Map<String, Value>) -> Result<Self, SpecError> {
        let default = Self::default();
        let mut fields = Fields::new("environment.limits", object);
        let calls = fields.integer("calls_per_turn", default.calls_per_turn.into(), 1..=64)?;
        let most = (TURN_CHARS / calls).min(65_536);
        let observation =
            fields.integer("observation_chars", default.observation_chars as u64, 64..=most)?;
        let reset = fields.integer("reset_chars", default.reset_chars as u64, 64..=65_536)?;
        fields.refuse_others()?;
        Ok(Self {
            calls_per_turn: u32::try_from(calls).unwrap_or(default.calls_per_turn),
            observation_chars: usize::try_from(observation).unwrap_or(default.observation_chars),
            reset_chars: usize::try_from(reset).unwrap_or(default.reset_chars),
        })
    }

    /// All fields as JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "calls_per_turn": self.calls_per_turn,
            "observation_chars": self.observation_chars,
            "reset_chars": self.reset_chars,
        })
    }
}

#[cfg(test)]
mod tests {
    use protocol::wire;

    use super::*;

    fn parse(limits: Value) -> Result<Limits, String> {
        let Value::Object(object) = limits else { return Err("no object".into()) };
        Limits::parse(&object).map_err(|error| error.to_string())
    }

    #[test]
    fn the_largest_limits_fit_the_wire() {
        let limits = parse(
            json!({"calls_per_turn": 16, "observation_chars": 65_536, "reset_chars": 65_536}),
        )
        .expect("within bounds");
        assert!(limits.observation_chars * 4 <= wire::MAX_OBSERVATION_BYTES);
        assert!(limits.reset_chars * 4 <= wire::MAX_OBSERVATION_BYTES);
    }

    #[test]
    fn a_turn_s_observations_are_bounded_together() {
        let error = parse(json!({"calls_per_turn": 64, "observation_chars": 65_536}));
        let message =
            "environment.limits.observation_chars must be an integer from 64 to 16384, not 65536";
        assert_eq!(error, Err(message.into()));
    }
}
