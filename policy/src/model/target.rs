//! Which linears an adapter targets, read as PEFT reads `target_modules`: `all-linear`, a list of
//! module names (a whole path or its end), or one regex that matches a whole path. What names a
//! module that PEFT would adapt and that is no linear is refused.

use regex::Regex;

use super::{error::ModelError, tower, weights::LinearInfo};

/// PEFT's `target_modules`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TargetModules {
    /// Every linear but the output head.
    AllLinear,
    /// Module names: `up_proj` matches every path that ends in `.up_proj`.
    Names(Vec<String>),
    /// A regex that must match the whole path inside of the base model.
    Pattern(String),
}

impl TargetModules {
    /// For each linear, whether it is targeted.
    ///
    /// # Errors
    /// A pattern that is no regex, a listed name without a linear, or nothing targeted.
    pub fn select(&self, linears: &[LinearInfo]) -> Result<Vec<bool>, ModelError> {
        let seeing = linears.iter().any(|linear| linear.path.starts_with(tower::PREFIX));
        let patches = [LinearInfo { path: tower::PATCHES.into(), inputs: 0, outputs: 0 }];
        if seeing && *self != Self::AllLinear && self.matches(&patches)? == [true] {
            return Err(ModelError::Adapter(format!(
                "target_modules: {self:?} matches {} too, a convolution, which is not supported; \
                 name linears alone",
                tower::PATCHES
            )));
        }
        if let Self::Names(names) = self {
            for name in names {
                if !linears.iter().any(|linear| ends_with_name(&linear.path, name)) {
                    let reason = format!("target_modules: no linear is called {name:?}");
                    return Err(ModelError::Adapter(reason));
                }
            }
        }
        let hits = self.matches(linears)?;
        if hits.contains(&true) {
            return Ok(hits);
        }
        Err(ModelError::Adapter(format!("target_modules: {self:?} matches no linear of the model")))
    }

    fn matches(&self, linears: &[LinearInfo]) -> Result<Vec<bool>, ModelError> {
        Ok(match self {
            Self::AllLinear => vec![true; linears.len()],
            Self::Names(names) => {
                let hit = |l: &LinearInfo| names.iter().any(|name| ends_with_name(&l.path, name));
                linears.iter().map(hit).collect()
            }
            Self::Pattern(pattern) => {
                let whole = Regex::new(&format!(r"\A(?:{pattern})\z")).map_err(|e| {
                    let cause = e.to_string();
                    let cause = cause.lines().last().unwrap_or_default();
                    ModelError::Adapter(format!("target_modules: not a regex: {cause}"))
                })?;
                linears.iter().map(|linear| whole.is_match(&linear.path)).collect()
            }
        })
    }
}

fn ends_with_name(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}
