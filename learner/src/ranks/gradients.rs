//! Gradients summed over ranks.

use std::collections::BTreeMap;

use policy::score::{Gradients, Parameters};
use terminal::Failure;

use super::Ranks;

/// The sum over ranks of each rank's gradients of `parameters`; nothing where no rank has any. A rank
/// may have none at all, or not those of every parameter (no row of its showed an image).
///
/// # Errors
/// A rank that fails, or a failing device.
pub fn summed(
    ranks: &mut Ranks,
    gradients: Option<Gradients>,
    parameters: &mut impl Parameters,
) -> Result<Option<Gradients>, Failure> {
    if ranks.world() == 1 {
        return Ok(gradients);
    }
    let mut gradients = gradients.unwrap_or_default();
    let mut names = BTreeMap::new();
    parameters.update(&mut |name, value| {
        names.insert(name.to_owned(), (value.dims()[0], value.device()));
        value
    });
    let have: BTreeMap<&str, ()> = gradients.iter().map(|(name, _)| (name, ())).collect();
    let mine: Vec<u8> =
        names.keys().map(|name| u8::from(have.contains_key(name.as_str()))).collect();
    let all = ranks.all_gather(&mine)?;
    for (at, (name, (len, device))) in names.iter().enumerate() {
        if all.iter().any(|rank| rank.get(at) == Some(&1)) {
            gradients.fill(name, *len, device);
        }
    }
    let mut flat = gradients.flatten().map_err(Failure::fault)?;
    if flat.is_empty() {
        return Ok(None);
    }
    ranks.all_reduce(&mut flat)?;
    gradients.unflatten(&flat).map_err(Failure::fault)?;
    Ok(Some(gradients))
}
