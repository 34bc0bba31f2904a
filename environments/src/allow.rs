//! What code outside this program a section may reach. A recipe on this machine is its owner's word; a
//! section that came over the network, or out of a run's directory, may only name servers and commands
//! that the owner has listed in [`ALLOW_VARIABLE`].

use std::{env, path::Path};

use serde_json::Value;

use crate::SpecError;

/// A JSON list of what sections may name: a server's URL as a text, a command as a list of texts.
pub const ALLOW_VARIABLE: &str = "ROLLCALL_ALLOW";

/// Checks that `named`, found in `field`, may be used. `recipe` is the folder of the recipe that names
/// it, where a recipe of this machine does.
pub(crate) fn check(field: &str, named: &Value, recipe: Option<&Path>) -> Result<(), SpecError> {
    if recipe.is_some() {
        return Ok(());
    }
    let text = env::var(ALLOW_VARIABLE).unwrap_or_default();
    let listed: Vec<Value> = if text.trim().is_empty() {
        Vec::new()
    } else {
        serde_json::from_str(&text).map_err(|error| SpecError::Value {
            field: ALLOW_VARIABLE.into(),
            expected: format!("a JSON list of URLs and commands ({error})"),
            found: crate::fields::shown(&text.into()),
        })?
    };
    if listed.contains(named) {
        return Ok(());
    }
    Err(SpecError::NotAllowed {
        field: field.into(),
        named: Value::from(vec![named.clone()]).to_string(),
    })
}
