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
    /// Ids that one observation may become, the mark of a cut included. 16 to 65,536; nothing is no
    /// bound. There are no ids here: who shows observations to a policy holds to it.
    pub observation_tokens: Option<usize>,
    /// Seconds that an episode may take, from its reset to its end, by the clock of who plays it. 1 to
    /// 86,400; nothing is no bound. An episode over it is void.
    pub episode_seconds: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            calls_per_turn: 8,
            observation_chars: 8192,
            reset_chars: 16_384,
            observation_tokens: None,
            episode_seconds: None,
        }
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
        let tokens = fields.optional_integer("observation_tokens", 16..=65_536)?;
        let episode_seconds = fields.optional_integer("episode_seconds", 1..=86_400)?;
        fields.refuse_others()?;
        Ok(Self {
            calls_per_turn: u32::try_from(calls).unwrap_or(default.calls_per_turn),
            observation_chars: usize::try_from(observation).unwrap_or(default.observation_chars),
            reset_chars: usize::try_from(reset).unwrap_or(default.reset_chars),
            observation_tokens: tokens.and_then(|tokens| usize::try_from(tokens).ok()),
            episode_seconds,
        })
    }

    /// All fields that are set as JSON.
    pub fn to_json(&self) -> Value {
        let mut all = json!({
            "calls_per_turn": self.calls_per_turn,
            "observation_chars": self.observation_chars,
            "reset_chars": self.reset_chars,
        });
        if let Some(tokens) = self.observation_tokens {
            all["observation_tokens"] = tokens.into();
        }
        if let Some(seconds) = self.episode_seconds {
            all["episode_seconds"] = seconds.into();
        }
        all
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
    fn what_is_no_bound_unless_it_is_set_is_read_back_as_it_was() {
        assert_eq!(parse(json!({})), Ok(Limits::default()));
        for set in [json!({"observation_tokens": 16}), json!({"episode_seconds": 600})] {
            let limits = parse(set.clone()).expect("within bounds");
            assert_ne!(limits, Limits::default(), "{set}");
            assert_eq!(parse(limits.to_json()), Ok(limits));
        }
        for (wrong, message) in [
            (
                json!({"observation_tokens": 15}),
                "observation_tokens must be an integer from 16 to 65536, not 15",
            ),
            (
                json!({"episode_seconds": 0}),
                "episode_seconds must be an integer from 1 to 86400, not 0",
            ),
        ] {
            assert_eq!(parse(wrong), Err(format!("environment.limits.{message}")));
        }
    }

    #[test]
    fn a_turn_s_observations_are_bounded_together() {
        let error = parse(json!({"calls_per_turn": 64, "observation_chars": 65_536}));
        let message =
            "environment.limits.observation_chars must be an integer from 64 to 16384, not 65536";
        assert_eq!(error, Err(message.into()));
    }
}
