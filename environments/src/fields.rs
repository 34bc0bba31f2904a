//! Reads settings out of JSON objects, so that every mistake names its field and a remedy.

use std::{collections::BTreeSet, ops::RangeInclusive};

use protocol::Task;
use serde_json::{Map, Value};

/// A setting that cannot be: one line with the field and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A value of the wrong type or out of bounds.
    #[error("{field} must be {expected}, not {found}")]
    Value {
        /// Path of the field, as `environment.n`.
        field: String,
        /// What it must be.
        expected: String,
        /// What it is, clipped.
        found: String,
    },
    /// A required field is absent.
    #[error("{field} is missing: set it to {expected}")]
    Missing {
        /// Path of the field.
        field: String,
        /// What it must be.
        expected: String,
    },
    /// A field that nobody reads.
    #[error("{field} is unknown: remove it or use one of {known}")]
    UnknownField {
        /// Path of the field, clipped.
        field: String,
        /// The fields that there are, joined by commas.
        known: String,
    },
    /// A command line's environment that is neither a name nor JSON nor a file that can be read.
    #[error("{argument}: {reason}; give one of {names}, a section as JSON, or a recipe")]
    Argument {
        /// What was given, clipped.
        argument: String,
        /// What is wrong with it.
        reason: String,
        /// The names that there are, joined by commas.
        names: String,
    },
    /// A Python module that cannot be used.
    #[error("environment.python: module {module}: {reason}")]
    Module {
        /// The module.
        module: String,
        /// What is wrong with it, with a remedy.
        reason: String,
    },
    /// A server or a command that the owner of this machine has not allowed.
    #[error(
        "{field}: this machine's owner has not allowed it: set {}='{named}' (a JSON list) where this \
         program is started",
        crate::allow::ALLOW_VARIABLE
    )]
    NotAllowed {
        /// Path of the field.
        field: String,
        /// A list that would allow it.
        named: String,
    },
    /// The task's fields are not a JSON object.
    #[error("the task object cannot be read: {reason}; make it a JSON object")]
    NotAnObject {
        /// What the JSON reader said.
        reason: String,
    },
}

/// A JSON value for a message: at most 60 characters.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 {
        return text;
    }
    text.chars().take(57).chain("...".chars()).collect()
}

/// Reads the fields of one object and remembers which are known.
pub(crate) struct Fields<'a> {
    path: &'a str,
    object: &'a Map<String, Value>,
    known: BTreeSet<&'static str>,
}

impl<'a> Fields<'a> {
    /// The fields of `object`, which is found at `path` in the recipe or row.
    pub(crate) fn new(path: &'a str, object: &'a Map<String, Value>) -> Self {
        Self { path, object, known: BTreeSet::new() }
    }

    fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.known.insert(key);
        self.object.get(key)
    }

    fn wrong(&self, key: &str, expected: String, found: &Value) -> SpecError {
        SpecError::Value { field: format!("{}.{key}", self.path), expected, found: shown(found) }
    }

    /// An integer within bounds; `default` where the field is absent.
    pub(crate) fn integer(
        &mut self,
        key: &'static str,
        default: u64,
        bounds: RangeInclusive<u64>,
    ) -> Result<u64, SpecError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_u64().filter(|n| bounds.contains(n)).ok_or_else(|| {
                let expected = format!("an integer from {} to {}", bounds.start(), bounds.end());
                self.wrong(key, expected, value)
            }),
        }
    }

    /// An integer within bounds; nothing where the field is absent.
    pub(crate) fn optional_integer(
        &mut self,
        key: &'static str,
        bounds: RangeInclusive<u64>,
    ) -> Result<Option<u64>, SpecError> {
        if self.get(key).is_none() { Ok(None) } else { self.integer(key, 0, bounds).map(Some) }
    }

    /// One of the texts in `options`, given by its index; `default` where the field is absent.
    pub(crate) fn choice<T: Copy>(
        &mut self,
        key: &'static str,
        default: T,
        options: &[(&str, T)],
    ) -> Result<T, SpecError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        options.iter().find(|(name, _)| value == name).map(|(_, option)| *option).ok_or_else(|| {
            let names: Vec<String> = options.iter().map(|(n, _)| format!("{n:?}")).collect();
            self.wrong(key, format!("one of {}", names.join(", ")), value)
        })
    }

    /// A multiple of `step` within bounds; `default` where the field is absent.
    pub(crate) fn multiple(
        &mut self,
        key: &'static str,
        default: u64,
        step: u64,
        bounds: RangeInclusive<u64>,
    ) -> Result<u64, SpecError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let fits = |number: &u64| bounds.contains(number) && number.is_multiple_of(step);
        value.as_u64().filter(fits).ok_or_else(|| {
            let (low, high) = (bounds.start(), bounds.end());
            self.wrong(key, format!("a multiple of {step} from {low} to {high}"), value)
        })
    }

    /// Exactly `count` different integers within bounds.
    pub(crate) fn distinct_integers(
        &mut self,
        key: &'static str,
        count: usize,
        bounds: RangeInclusive<u64>,
    ) -> Result<Vec<u64>, SpecError> {
        let (low, high) = (bounds.start(), bounds.end());
        let expected = match count {
            1 => format!("a list of one integer from {low} to {high}"),
            _ => format!("a list of {count} different integers from {low} to {high}"),
        };
        let Some(value) = self.get(key) else {
            return Err(SpecError::Missing { field: format!("{}.{key}", self.path), expected });
        };
        let items = value.as_array().map(Vec::as_slice).unwrap_or_default();
        let mut found: Vec<u64> = Vec::with_capacity(count);
        for number in items.iter().take(count).filter_map(Value::as_u64) {
            if bounds.contains(&number) && !found.contains(&number) {
                found.push(number);
            }
        }
        if items.len() == count && found.len() == count {
            Ok(found)
        } else {
            Err(self.wrong(key, expected, value))
        }
    }

    /// A non-empty text.
    pub(crate) fn text(&mut self, key: &'static str, expected: &str) -> Result<&'a str, SpecError> {
        match self.get(key) {
            None => Err(SpecError::Missing {
                field: format!("{}.{key}", self.path),
                expected: expected.into(),
            }),
            Some(Value::String(text)) if !text.is_empty() => Ok(text),
            Some(value) => Err(self.wrong(key, expected.into(), value)),
        }
    }

    /// A non-empty text; nothing where the field is absent.
    pub(crate) fn optional_text(
        &mut self,
        key: &'static str,
        expected: &str,
    ) -> Result<Option<&'a str>, SpecError> {
        if self.get(key).is_none() { Ok(None) } else { self.text(key, expected).map(Some) }
    }

    /// At most `most` non-empty texts; none where the field is absent.
    pub(crate) fn texts(
        &mut self,
        key: &'static str,
        most: usize,
    ) -> Result<Vec<String>, SpecError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let items = value.as_array().filter(|items| items.len() <= most);
        let text = |item: &Value| item.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        items
            .and_then(|items| items.iter().map(text).collect())
            .ok_or_else(|| self.wrong(key, format!("a list of at most {most} texts"), value))
    }

    /// Two finite numbers, the first below the second; `default` where the field is absent.
    pub(crate) fn range(
        &mut self,
        key: &'static str,
        default: (f64, f64),
    ) -> Result<(f64, f64), SpecError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let ends = value.as_array().map(Vec::as_slice).unwrap_or_default();
        match ends.iter().map(Value::as_f64).collect::<Vec<_>>().as_slice() {
            [Some(low), Some(high)] if low < high => Ok((*low, *high)),
            _ => Err(self.wrong(key, "two numbers, the lower one first".into(), value)),
        }
    }

    /// A number within bounds; `default` where the field is absent.
    pub(crate) fn number(
        &mut self,
        key: &'static str,
        default: f64,
        (low, high): (f64, f64),
    ) -> Result<f64, SpecError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value
            .as_f64()
            .filter(|number| (low..=high).contains(number))
            .ok_or_else(|| self.wrong(key, format!("a number from {low} to {high}"), value))
    }

    /// A nested object; nothing where the field is absent.
    pub(crate) fn object(
        &mut self,
        key: &'static str,
    ) -> Result<Option<&'a Map<String, Value>>, SpecError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(value) => Err(self.wrong(key, "an object".into(), value)),
        }
    }

    /// Refuses fields that were not asked for.
    pub(crate) fn refuse_others(self) -> Result<(), SpecError> {
        match self.object.keys().find(|key| !self.known.contains(key.as_str())) {
            None => Ok(()),
            Some(key) => Err(SpecError::UnknownField {
                field: format!("{}.{}", self.path, key.chars().take(60).collect::<String>()),
                known: self.known.into_iter().collect::<Vec<_>>().join(", "),
            }),
        }
    }
}

/// The task object of a row.
pub(crate) fn task_fields(task: &Task) -> Result<Map<String, Value>, SpecError> {
    serde_json::from_str(&task.fields)
        .map_err(|error| SpecError::NotAnObject { reason: error.to_string() })
}
