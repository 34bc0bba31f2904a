//! Rows of the vision policy: an image, a name, and the code of digits that answers them.

use std::path::{Path, PathBuf};

use policy::chat::Template;
use serde_json::{Map, Value, json};

use super::{
    Frozen, RecipeError,
    dataset::{parse_rows, read_rows, text},
    json::shown,
    section::Section,
};

/// Longest code, in digits.
const MAX_CODE: usize = 64;
/// Longest name, path or text of the memory, in bytes.
const MAX_NAME: usize = 4096;
/// Most texts of a memory.
const MAX_MEMORY: usize = 64;
/// Longest template and longest prompt, in bytes.
const MAX_PROMPT: usize = 64 << 10;
/// Largest size of an advantage or a log-probability.
const MAX_NUMBER: f64 = 1e6;

/// What to do about a `prompt` that cannot serve.
const REMEDY: &str = "write a Jinja template over name and memory";

/// One row.
#[derive(Clone, Debug, PartialEq)]
pub struct CodeRow {
    /// Its line in the file, from 1.
    pub line: u64,
    /// The image's file; none in rows for a model without a vision tower.
    pub image: Option<PathBuf>,
    /// What to find.
    pub name: String,
    /// The answer, digits.
    pub code: String,
    /// What the policy is told of earlier decisions, if it is.
    pub memory: Option<Vec<String>>,
    /// What a sampled code was worth, in rows of a round.
    pub scored: Option<Sampled>,
}

/// What a row of a round says about its code as a sampled one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampled {
    /// The advantage.
    pub adv: f64,
    /// Sum of the sampler's log-probabilities of the code's digits, nats.
    pub vllm_logp: f64,
}

/// What a file of rows must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Columns {
    /// image, name, code and memory.
    Codes,
    /// Those, `adv` and `vllm_logp`.
    Round,
}

/// The rows of a frozen file. Image paths are relative to it. Other columns are ignored.
///
/// # Errors
/// The file cannot be read or is not the frozen one; a row that is none, by line; codes of unequal
/// length.
pub fn read_code_rows(file: &Frozen, columns: Columns) -> Result<Vec<CodeRow>, RecipeError> {
    let mut one = one_row(&file.path, columns);
    read_rows(file, &mut one)
}

/// The rows of a file that holds, or will hold, `bytes`.
///
/// # Errors
/// As [`read_code_rows`].
pub fn parse_code_rows(
    bytes: &[u8],
    path: &Path,
    columns: Columns,
) -> Result<Vec<CodeRow>, RecipeError> {
    parse_rows(bytes, path, one_row(path, columns))
}

/// Reads one row after another of a file.
fn one_row(
    path: &Path,
    columns: Columns,
) -> impl FnMut(u64, &Map<String, Value>) -> Result<CodeRow, String> {
    let base = path.parent().unwrap_or(Path::new("")).to_owned();
    let mut digits = None;
    move |line, row| {
        let row = code_row(line, row, &base, columns)?;
        let (first, expected) = *digits.get_or_insert((line, row.code.len()));
        if row.code.len() != expected {
            return Err(format!(
                "code {:?} has {} digits, that of line {first} has {expected}: all codes of a file are \
                 equally long",
                row.code,
                row.code.len()
            ));
        }
        Ok(row)
    }
}

fn code_row(
    line: u64,
    row: &Map<String, Value>,
    base: &Path,
    columns: Columns,
) -> Result<CodeRow, String> {
    let image = match row.get("image") {
        None | Some(Value::Null) => None,
        Some(_) => {
            let path = base.join(text(row, "image", MAX_NAME)?);
            Some(std::path::absolute(&path).map_err(|error| format!("image: {error}"))?)
        }
    };
    let code = text(row, "code", MAX_CODE)?;
    if !code.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("code must be digits, as \"407\", not {}", shown(&code.into())));
    }
    let number = |key: &str| match row.get(key) {
        None | Some(Value::Null) => Err(format!("{key} is missing: add a number")),
        Some(value) => {
            value.as_f64().filter(|number| number.abs() <= MAX_NUMBER).ok_or_else(|| {
                format!("{key} must be a number of size at most 1e6, not {}", shown(value))
            })
        }
    };
    let scored = match columns {
        Columns::Codes => None,
        Columns::Round => {
            let (adv, vllm_logp) = (number("adv")?, number("vllm_logp")?);
            if vllm_logp > 1e-3 {
                return Err(format!(
                    "vllm_logp must be a log-probability, at most 0, not {vllm_logp}: the sum over the \
                     code's digits"
                ));
            }
            Some(Sampled { adv, vllm_logp })
        }
    };
    Ok(CodeRow {
        line,
        image,
        name: text(row, "name", MAX_NAME)?.to_owned(),
        code: code.to_owned(),
        memory: memory(row)?,
        scored,
    })
}

fn memory(row: &Map<String, Value>) -> Result<Option<Vec<String>>, String> {
    let texts = match row.get("memory") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(items)) if items.len() <= MAX_MEMORY => items
            .iter()
            .map(|item| item.as_str().filter(|it| it.len() <= MAX_NAME).map(str::to_owned))
            .collect::<Option<Vec<String>>>(),
        Some(_) => None,
    };
    texts.map(Some).ok_or_else(|| {
        format!(
            "memory must be a list of at most {MAX_MEMORY} texts, not {}",
            row.get("memory").map_or_else(String::new, shown)
        )
    })
}

/// The recipe's `prompt`: what the policy is asked about a row, as a Jinja template over `name` and
/// `memory`.
#[derive(Debug)]
pub struct PromptTemplate {
    template: Template,
}

impl PromptTemplate {
    /// The section's template, where there is one.
    pub(super) fn read(recipe: &Section<'_>) -> Result<Option<String>, RecipeError> {
        let Some(source) = recipe.optional_text("prompt", MAX_PROMPT)? else { return Ok(None) };
        let template = Self::new(source)?;
        // Fails here rather than at the first row.
        for memory in [None, Some(vec!["0".to_owned(), "1".to_owned()])] {
            template
                .render("name", memory.as_deref())
                .map_err(|problem| RecipeError::conflict("prompt", problem, REMEDY))?;
        }
        Ok(Some(source.to_owned()))
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// It is none, or reads other variables than `name` and `memory`.
    pub fn new(source: &str) -> Result<Self, RecipeError> {
        let template = Template::new(source, "prompt", None)
            .map_err(|error| RecipeError::conflict("prompt", error.to_string(), REMEDY))?;
        let variables = template.variables();
        if let Some(other) = variables.iter().find(|it| !["name", "memory"].contains(&it.as_str()))
        {
            let problem = format!("it reads {other:?}, which no row has");
            return Err(RecipeError::conflict("prompt", problem, REMEDY));
        }
        Ok(Self { template })
    }

    /// The prompt of a row.
    ///
    /// # Errors
    /// The template refuses the row, or its text is too long.
    pub fn render(&self, name: &str, memory: Option<&[String]>) -> Result<String, String> {
        let context = json!({"name": name, "memory": memory});
        let Value::Object(context) = context else { return Err("no context".into()) };
        let text = self.template.render(&context).map_err(|error| error.to_string())?;
        if text.len() > MAX_PROMPT {
            return Err(format!("its prompt has {} bytes, more than {MAX_PROMPT}", text.len()));
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use protocol::Digest;

    use super::*;

    fn read(lines: &[Value], columns: Columns) -> Result<Vec<CodeRow>, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("rows.jsonl");
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(&path, &text).expect("written");
        let sha256 = Digest::of(text.as_bytes());
        let file = Frozen { field: "dataset".into(), path: path.clone(), sha256 };
        read_code_rows(&file, columns)
            .map_err(|error| error.to_string().replace(&*path.to_string_lossy(), "FILE"))
    }

    fn good() -> Value {
        json!({"image": "a/0.png", "name": "tower", "code": "407", "memory": ["01", "1"], "adv": -1,
               "vllm_logp": -0.5, "other": [1]})
    }

    fn with(key: &str, value: Value) -> Value {
        let mut row = good();
        row[key] = value;
        row
    }

    #[test]
    fn rows_keep_their_columns_and_images_lie_beside_their_file() {
        let rows = read(&[good(), with("memory", Value::Null)], Columns::Round).expect("valid");
        let image = rows[0].image.as_ref().expect("an image");
        assert!(image.is_absolute() && image.ends_with("a/0.png"), "{}", image.display());
        assert_eq!(rows[0].memory, Some(vec!["01".into(), "1".into()]));
        assert_eq!(rows[1].memory, None);
        assert_eq!(rows[1].line, 2);
        assert_eq!(rows[0].scored, Some(Sampled { adv: -1.0, vllm_logp: -0.5 }));
        assert_eq!(read(&[good()], Columns::Codes).expect("valid")[0].scored, None);
    }

    #[test]
    fn malformed_rows_name_file_line_and_column() {
        for (key, value, message) in [
            ("image", json!(3), "image must be a non-empty text of at most 4096 bytes, not 3"),
            ("name", Value::Null, "name is missing: add a non-empty text"),
            (
                "name",
                json!(["x"]),
                "name must be a non-empty text of at most 4096 bytes, not [\"x\"]",
            ),
            ("code", Value::Null, "code is missing: add a non-empty text"),
            ("code", json!(""), "code must be a non-empty text of at most 64 bytes, not \"\""),
            ("code", json!(407), "code must be a non-empty text of at most 64 bytes, not 407"),
            ("code", json!("4o7"), "code must be digits, as \"407\", not \"4o7\""),
            ("code", json!("٤٠٧"), "code must be digits, as \"407\", not \"٤٠٧\""),
            (
                "code",
                json!("40"),
                "code \"40\" has 2 digits, that of line 1 has 3: all codes of a file are equally long",
            ),
            ("memory", json!("01"), "memory must be a list of at most 64 texts, not \"01\""),
            ("memory", json!([0, 1]), "memory must be a list of at most 64 texts, not [0,1]"),
            ("adv", Value::Null, "adv is missing: add a number"),
            ("adv", json!("1"), "adv must be a number of size at most 1e6, not \"1\""),
            ("adv", json!(true), "adv must be a number of size at most 1e6, not true"),
            ("adv", json!(1e9), "adv must be a number of size at most 1e6, not 1000000000.0"),
            ("vllm_logp", Value::Null, "vllm_logp is missing: add a number"),
            (
                "vllm_logp",
                json!(0.5),
                "vllm_logp must be a log-probability, at most 0, not 0.5: the sum over the code's digits",
            ),
        ] {
            let error = read(&[good(), with(key, value)], Columns::Round).expect_err(message);
            assert_eq!(error, format!("FILE line 2: {message}"));
        }
        assert!(read(&[with("adv", Value::Null)], Columns::Codes).is_ok());
    }

    #[test]
    fn prompts_are_templates_over_name_and_memory() {
        let source = "Find the {{ name }}.{% if memory %} Before: {{ memory[0] }}, {{ memory[1] }}.{% endif %}";
        let template = PromptTemplate::new(source).expect("a template");
        assert_eq!(template.render("{{ x }} <b>", None).expect("renders"), "Find the {{ x }} <b>.");
        let memory = ["01".to_owned(), "10".to_owned()];
        let text = template.render("tower", Some(&memory)).expect("renders");
        assert_eq!(text, "Find the tower. Before: 01, 10.");
        let long = "x".repeat(MAX_PROMPT);
        assert!(template.render(&long, None).expect_err("long").contains("more than 65536"));
    }

    #[test]
    fn templates_that_cannot_serve_rows_are_refused_at_once() {
        for (source, message) in [
            (
                "{{ nmae }}",
                "prompt: it reads \"nmae\", which no row has; write a Jinja template over name and memory",
            ),
            ("{{ name", "prompt: prompt: the chat template does not compile"),
            (
                "{{ raise_exception('no') }}",
                "prompt: the chat template refused the conversation: no",
            ),
            ("{{ name.x.y }}", "prompt: "),
            ("", "prompt must be a non-empty text"),
        ] {
            let value = json!({"prompt": source});
            let section = Section::new("", &value, &["prompt"]).expect("a section");
            let error = PromptTemplate::read(&section).expect_err(source).to_string();
            assert!(error.starts_with(message), "{source}: {error}");
        }
    }
}
