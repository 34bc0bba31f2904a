//! Reads the fields of one JSON object, so that every mistake names its dotted field, what was found
//! and what is allowed.

use std::{fmt, ops::RangeInclusive, path::Path};

use protocol::Digest;
use serde_json::{Map, Value};

use super::{
    RecipeError,
    json::{clipped, shown},
};

/// The bounds of a number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    low: f64,
    high: f64,
    open: bool,
}

impl Bounds {
    /// `low` to `high`, both included.
    pub(crate) const fn closed(low: f64, high: f64) -> Self {
        Self { low, high, open: false }
    }

    /// Above `low`, up to `high`.
    pub(crate) const fn above(low: f64, high: f64) -> Self {
        Self { low, high, open: true }
    }

    fn contain(self, value: f64) -> bool {
        value <= self.high && if self.open { value > self.low } else { value >= self.low }
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = (self.low, self.high);
        if self.open {
            write!(f, "a number above {low} and at most {high}")
        } else {
            write!(f, "a number from {low} to {high}")
        }
    }
}

/// One object of a recipe and where it stands.
pub(crate) struct Section<'a> {
    path: String,
    object: &'a Map<String, Value>,
    known: &'static [&'static str],
}

impl<'a> Section<'a> {
    /// The object at `path` (empty for the whole recipe), which may have the keys `known` only.
    pub(crate) fn new(
        path: &str,
        value: &'a Value,
        known: &'static [&'static str],
    ) -> Result<Self, RecipeError> {
        let Value::Object(object) = value else {
            return Err(RecipeError::Value {
                field: if path.is_empty() { "the recipe".into() } else { path.into() },
                expected: "a JSON object".into(),
                found: shown(value),
            });
        };
        let section = Self { path: path.into(), object, known };
        match object.keys().find(|key| !known.contains(&key.as_str())) {
            None => Ok(section),
            Some(key) => Err(RecipeError::Unknown {
                field: section.at(&clipped(key)),
                remedy: section.remedy(key),
            }),
        }
    }

    fn remedy(&self, key: &str) -> String {
        let near = self.known.iter().map(|known| (distance(key, known), *known)).min();
        match near {
            Some((distance, known)) if distance <= 2 + known.len() / 4 => {
                format!("did you mean {}?", self.at(known))
            }
            _ => format!("remove it or use one of {}", self.known.join(", ")),
        }
    }

    /// The dotted path of a field.
    pub(crate) fn at(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of a field; `null` counts as absent.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        debug_assert!(self.known.contains(&key), "{key} is read and not known");
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, expected: impl Into<String>, found: &Value) -> RecipeError {
        RecipeError::Value { field: self.at(key), expected: expected.into(), found: shown(found) }
    }

    fn missing(&self, key: &str, expected: impl Into<String>) -> RecipeError {
        RecipeError::Missing { field: self.at(key), expected: expected.into() }
    }

    /// An integer; required where there is no default.
    pub(crate) fn u64(
        &self,
        key: &str,
        default: Option<u64>,
        bounds: RangeInclusive<u64>,
    ) -> Result<u64, RecipeError> {
        let expected = || format!("an integer from {} to {}", bounds.start(), bounds.end());
        match self.value(key) {
            None => default.ok_or_else(|| self.missing(key, expected())),
            Some(value) => value
                .as_u64()
                .filter(|number| bounds.contains(number))
                .ok_or_else(|| self.wrong(key, expected(), value)),
        }
    }

    /// [`Section::u64`] for bounds that fit 32 bits.
    pub(crate) fn u32(
        &self,
        key: &str,
        default: Option<u32>,
        bounds: RangeInclusive<u32>,
    ) -> Result<u32, RecipeError> {
        let wide = u64::from(*bounds.start())..=u64::from(*bounds.end());
        let value = self.u64(key, default.map(u64::from), wide)?;
        Ok(u32::try_from(value).unwrap_or(*bounds.end()))
    }

    /// A number, where it is given.
    pub(crate) fn optional_f64(
        &self,
        key: &str,
        bounds: Bounds,
    ) -> Result<Option<f64>, RecipeError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64().filter(|number| bounds.contain(*number)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(key, bounds.to_string(), value)),
        }
    }

    /// A number.
    pub(crate) fn f64(&self, key: &str, default: f64, bounds: Bounds) -> Result<f64, RecipeError> {
        Ok(self.optional_f64(key, bounds)?.unwrap_or(default))
    }

    /// True or false.
    pub(crate) fn bool(&self, key: &str, default: bool) -> Result<bool, RecipeError> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(value) => Err(self.wrong(key, "true or false", value)),
        }
    }

    /// A non-empty text of at most `limit` bytes, where it is given.
    pub(crate) fn optional_text(
        &self,
        key: &str,
        limit: usize,
    ) -> Result<Option<&'a str>, RecipeError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) if !text.is_empty() && text.len() <= limit => Ok(Some(text)),
            Some(value) => {
                Err(self.wrong(key, format!("a non-empty text of at most {limit} bytes"), value))
            }
        }
    }

    /// A path, where it is given.
    pub(crate) fn optional_path(&self, key: &str) -> Result<Option<&'a Path>, RecipeError> {
        Ok(self.optional_text(key, 4096)?.map(Path::new))
    }

    /// A path.
    pub(crate) fn path(&self, key: &str) -> Result<&'a Path, RecipeError> {
        self.optional_path(key)?
            .ok_or_else(|| self.missing(key, "a path, relative to the recipe's directory"))
    }

    /// A digest.
    pub(crate) fn sha256(&self, key: &str) -> Result<Digest, RecipeError> {
        const EXPECTED: &str = "a SHA-256 of 64 hex digits";
        match self.value(key) {
            None => Err(self.missing(key, EXPECTED)),
            Some(value) => value
                .as_str()
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| self.wrong(key, EXPECTED, value)),
        }
    }

    /// One of the named options.
    pub(crate) fn choice<T: Copy>(
        &self,
        key: &str,
        default: T,
        options: &[(&str, T)],
    ) -> Result<T, RecipeError> {
        let Some(value) = self.value(key) else { return Ok(default) };
        options.iter().find(|(name, _)| value == name).map(|(_, option)| *option).ok_or_else(|| {
            let names: Vec<String> = options.iter().map(|(name, _)| format!("{name:?}")).collect();
            self.wrong(key, format!("one of {}", names.join(", ")), value)
        })
    }

    /// An object of any content; empty where it is absent.
    pub(crate) fn map(&self, key: &str) -> Result<Map<String, Value>, RecipeError> {
        match self.value(key) {
            None => Ok(Map::new()),
            Some(Value::Object(object)) => Ok(object.clone()),
            Some(value) => Err(self.wrong(key, "a JSON object", value)),
        }
    }

    /// A required value of any kind.
    pub(crate) fn required(&self, key: &str, expected: &str) -> Result<&'a Value, RecipeError> {
        self.value(key).ok_or_else(|| self.missing(key, expected))
    }

    /// A nested section; none where it is absent.
    pub(crate) fn section(
        &self,
        key: &str,
        known: &'static [&'static str],
    ) -> Result<Option<Section<'a>>, RecipeError> {
        self.value(key).map(|value| Section::new(&self.at(key), value, known)).transpose()
    }
}

/// Levenshtein distance in characters; of long texts, of their first 64.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut corner = i;
        let mut left = i + 1;
        for (y, cell) in b.iter().zip(row.iter_mut().skip(1)) {
            let replaced = corner + usize::from(x != *y);
            corner = *cell;
            left = replaced.min(left + 1).min(*cell + 1);
            *cell = left;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn distances_count_edits() {
        for (a, b, d) in [
            ("", "", 0),
            ("abc", "", 3),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("beta", "bata", 1),
        ] {
            assert_eq!(distance(a, b), d, "{a} {b}");
        }
    }

    #[test]
    fn unknown_keys_name_the_nearest_known_one_or_all() {
        let known = &["max_steps", "beta"];
        let error = |value: Value| match Section::new("training", &value, known) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        assert_eq!(
            error(json!({"max_step": 1})),
            "training.max_step is unknown: did you mean training.max_steps?"
        );
        assert_eq!(
            error(json!({"zzzzzzzzzzzz": 1})),
            "training.zzzzzzzzzzzz is unknown: remove it or use one of max_steps, beta"
        );
        assert_eq!(error(json!([1])), "training must be a JSON object, not [1]");
    }

    #[test]
    fn values_of_the_wrong_kind_name_field_bounds_and_what_was_found() {
        let value = json!({"a": "8", "b": 1.5, "c": true, "d": 9, "e": null});
        let section = Section::new("s", &value, &["a", "b", "c", "d", "e"]).expect("known keys");
        let text = |error: RecipeError| error.to_string();
        assert_eq!(
            section.u64("a", None, 1..=4).map_err(text).expect_err("a text"),
            "s.a must be an integer from 1 to 4, not \"8\""
        );
        assert_eq!(
            section.f64("b", 0.0, Bounds::above(0.0, 1.0)).map_err(text).expect_err("over"),
            "s.b must be a number above 0 and at most 1, not 1.5"
        );
        assert!(section.u64("c", None, 0..=1).is_err(), "true is no 1");
        assert_eq!(
            section.u32("d", Some(1), 1..=8).map_err(text).expect_err("over"),
            "s.d must be an integer from 1 to 8, not 9"
        );
        assert_eq!(section.u64("e", Some(3), 0..=9).map_err(text), Ok(3), "null counts as absent");
    }
}
