//! A checkpoint's chat template, rendered as transformers renders it.

use std::{collections::BTreeSet, fmt};

use minijinja::{Environment, Value as TemplateValue};
use serde_json::{Map, Value};

use super::{ChatError, TemplateDate, filters, source};

const NAME: &str = "chat_template";
/// Steps of the template engine for one rendering: a hundred times what a conversation of a thousand
/// messages takes, and a second or two of work.
const FUEL: u64 = 20_000_000;

/// A compiled chat template.
pub struct Template {
    env: Environment<'static>,
    source: String,
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Template({} bytes)", self.source.len())
    }
}

impl Template {
    /// Compiles `source`, which was read from `origin` (for messages). `today` is what `strftime_now`
    /// prints; without it the function is not defined and templates take their own fallback.
    pub fn new(source: &str, origin: &str, today: Option<TemplateDate>) -> Result<Self, ChatError> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_fuel(Some(FUEL));
        filters::install(&mut env);
        if let Some(date) = today {
            env.add_function("strftime_now", move |format: &str| date.strftime(format));
        }
        env.add_template_owned(NAME, source::rewrite(source)).map_err(|error| {
            ChatError::Syntax { origin: origin.to_owned(), detail: one_line(&error) }
        })?;
        Ok(Self { env, source: source.to_owned() })
    }

    /// The template's text, as it was read.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The variables that it reads, but those that it sets itself and the engine's functions.
    pub fn variables(&self) -> BTreeSet<String> {
        let Ok(template) = self.env.get_template(NAME) else { return BTreeSet::new() };
        let mut variables: BTreeSet<String> =
            template.undeclared_variables(false).into_iter().collect();
        for (function, _) in self.env.globals() {
            variables.remove(function);
        }
        variables
    }

    /// Renders with the variables of `context` (`messages`, `tools`, `add_generation_prompt`, …).
    ///
    /// # Errors
    /// [`ChatError::Render`] where Python raises.
    pub fn render(&self, context: &Map<String, Value>) -> Result<String, ChatError> {
        let refused = |error: minijinja::Error| ChatError::Render { detail: one_line(&error) };
        let template = self.env.get_template(NAME).map_err(refused)?;
        template.render(TemplateValue::from_serialize(context)).map_err(refused)
    }
}

/// An engine error as one line: its kind and detail, and the line of the template.
fn one_line(error: &minijinja::Error) -> String {
    let text = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    let text: String =
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    match error.line() {
        Some(line) => format!("{text} (line {line})"),
        None => text,
    }
}
