//! The `lora` section: PEFT's names, as far as an on-policy run can use them.

use policy::model::{LoraConfig, TargetModules};
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::{
    RecipeError,
    json::shown,
    section::{Bounds, Section},
};

/// The adapter that is trained.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoraSettings {
    /// Rank, 1 to 4,096. Default 16.
    pub r: u32,
    /// Numerator of the scale, above 0 to 1e6. Default 32.
    pub alpha: f64,
    /// Always 0: with dropout the sampled and the trained policy differ.
    pub dropout: f64,
    /// `all-linear`, module names, or one regex over whole module paths. Default `all-linear`.
    #[serde(serialize_with = "write_targets")]
    pub target_modules: TargetModules,
    /// Scale by `alpha / sqrt(r)` instead of `alpha / r`. Default false.
    pub use_rslora: bool,
}

impl LoraSettings {
    /// The section's keys.
    pub(super) const KEYS: &'static [&'static str] =
        &["r", "alpha", "dropout", "target_modules", "use_rslora"];

    pub(super) fn read(section: &Section<'_>) -> Result<Self, RecipeError> {
        let dropout = section.f64("dropout", 0.0, Bounds::closed(0.0, 1.0))?;
        if dropout != 0.0 {
            return Err(RecipeError::conflict(
                &section.at("dropout"),
                format!("with dropout {dropout} the trained policy is not the sampled one"),
                "set it to 0",
            ));
        }
        Ok(Self {
            r: section.u32("r", Some(16), 1..=4096)?,
            alpha: section.f64("alpha", 32.0, Bounds::above(0.0, 1e6))?,
            dropout,
            target_modules: targets(section)?,
            use_rslora: section.bool("use_rslora", false)?,
        })
    }

    /// Those of an adapter that is there.
    pub fn of(config: LoraConfig) -> Self {
        let LoraConfig { r, alpha, target_modules, use_rslora } = config;
        let r = u32::try_from(r).unwrap_or(u32::MAX);
        Self { r, alpha, dropout: 0.0, target_modules, use_rslora }
    }

    /// As models take it.
    pub fn to_config(&self) -> LoraConfig {
        LoraConfig {
            r: self.r as usize,
            alpha: self.alpha,
            target_modules: self.target_modules.clone(),
            use_rslora: self.use_rslora,
        }
    }

    /// Reads a section that travelled as JSON text, as actors are sent it.
    ///
    /// # Errors
    /// The section is not one.
    pub fn parse(value: &Value) -> Result<Self, RecipeError> {
        Self::read(&Section::new("lora", value, Self::KEYS)?)
    }
}

fn targets(section: &Section<'_>) -> Result<TargetModules, RecipeError> {
    const EXPECTED: &str = "\"all-linear\", a list of module names, or a regex over module paths";
    let wrong = |value: &Value| RecipeError::Value {
        field: section.at("target_modules"),
        expected: EXPECTED.into(),
        found: shown(value),
    };
    match section.value("target_modules") {
        None => Ok(TargetModules::AllLinear),
        Some(Value::String(text)) if text == "all-linear" => Ok(TargetModules::AllLinear),
        Some(Value::String(text)) if !text.is_empty() && text.len() <= 4096 => {
            Ok(TargetModules::Pattern(text.clone()))
        }
        Some(value @ Value::Array(names)) if !names.is_empty() && names.len() <= 1024 => names
            .iter()
            .map(|name| name.as_str().filter(|name| !name.is_empty()).map(str::to_owned))
            .collect::<Option<_>>()
            .map(TargetModules::Names)
            .ok_or_else(|| wrong(value)),
        Some(value) => Err(wrong(value)),
    }
}

fn write_targets<S: Serializer>(targets: &TargetModules, out: S) -> Result<S::Ok, S::Error> {
    match targets {
        TargetModules::AllLinear => out.serialize_str("all-linear"),
        TargetModules::Names(names) => names.serialize(out),
        TargetModules::Pattern(pattern) => out.serialize_str(pattern),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_form_of_target_modules_is_read_and_written_back() {
        for targets in [json!("all-linear"), json!(["q_proj", "v_proj"]), json!(r".*\.q_proj$")] {
            let section = json!({"target_modules": targets, "r": 4, "use_rslora": true});
            let settings = LoraSettings::parse(&section).expect("valid");
            let json = serde_json::to_value(&settings).expect("JSON");
            assert_eq!(json["target_modules"], targets);
            assert_eq!(LoraSettings::parse(&json).expect("reads back"), settings);
        }
        for bad in [json!([]), json!([1]), json!(7), json!("")] {
            let error = LoraSettings::parse(&json!({"target_modules": bad})).expect_err("refused");
            assert!(error.to_string().starts_with("lora.target_modules must be "), "{error}");
        }
    }

    #[test]
    fn dropout_is_refused_with_its_reason() {
        let error = LoraSettings::parse(&json!({"dropout": 0.1})).expect_err("refused");
        let want =
            "lora.dropout: with dropout 0.1 the trained policy is not the sampled one; set it to 0";
        assert_eq!(error.to_string(), want);
    }
}
