//! The rows of a supervised run: conversations or codes, as token streams.

use std::collections::HashMap;

use policy::{
    chat::{ChatFormat, ChatOptions},
    model::ModelConfig,
};
use serde_json::Value;

use super::conversation::supervised_row;
use crate::{
    recipe::{
        CodeRow, Columns, Conversation, Frozen, RecipeError, SftRecipe, read_code_rows,
        read_conversations,
    },
    rows::{Example, Images, RowFormat, Scored},
};

/// What a run learns from and is measured on.
#[derive(Debug)]
pub struct Data {
    /// Rows to learn.
    pub train: Vec<Example>,
    /// Rows to measure on, if any.
    pub valid: Option<Vec<Example>>,
    /// The images that they show.
    pub images: Images,
    /// Digits of a code, where the rows are codes.
    pub digits: Option<usize>,
}

impl Data {
    /// Reads and checks the files of a recipe for a checkpoint of this shape.
    ///
    /// # Errors
    /// The first mistake, by file and line.
    pub fn read(recipe: &SftRecipe, config: &ModelConfig) -> Result<Self, RecipeError> {
        let mut images = Images::of_model(&recipe.model.path, config);
        let longest = (recipe.training.max_length as usize).min(config.max_positions);
        let files = std::iter::once(&recipe.dataset).chain(&recipe.valid);
        let mut digits = None;
        let mut sets = match &recipe.prompt {
            None => {
                let mut formats = Formats::new(recipe, longest);
                files
                    .map(|file| formats.examples(file, &mut images))
                    .collect::<Result<Vec<_>, _>>()?
            }
            Some(prompt) => {
                let format = RowFormat::load(
                    &recipe.model.path,
                    &recipe.chat_template_kwargs,
                    prompt,
                    longest,
                )?;
                let mut sets = Vec::new();
                for file in files {
                    let rows = read_code_rows(file, Columns::Codes)?;
                    check_digits(file, &rows, &mut digits)?;
                    sets.push(examples(file, &rows, &format, &mut images, Scored::CodeAndEnd)?);
                }
                sets
            }
        };
        let valid = if sets.len() > 1 { sets.pop() } else { None };
        Ok(Self { train: sets.pop().unwrap_or_default(), valid, images, digits })
    }
}

/// Codes are equally long in every file of a run.
pub(crate) fn check_digits(
    file: &Frozen,
    rows: &[CodeRow],
    digits: &mut Option<usize>,
) -> Result<(), RecipeError> {
    let Some(row) = rows.first() else { return Ok(()) };
    let (found, expected) = (row.code.len(), *digits.get_or_insert(row.code.len()));
    if found == expected {
        return Ok(());
    }
    let problem = format!(
        "code {:?} has {found} digits, those of the other file have {expected}: they must be equally long",
        row.code
    );
    Err(RecipeError::Row { path: file.path.clone(), line: row.line, problem })
}

/// The token streams of a file's rows.
pub(crate) fn examples(
    file: &Frozen,
    rows: &[CodeRow],
    format: &RowFormat,
    images: &mut Images,
    scored: Scored,
) -> Result<Vec<Example>, RecipeError> {
    if images.sees() {
        images.prepare(rows.iter().filter_map(|row| row.image.as_deref()));
    }
    let mut example = |row: &CodeRow| {
        format.example(row, images, scored).map_err(|problem| RecipeError::Row {
            path: file.path.clone(),
            line: row.line,
            problem,
        })
    };
    rows.iter().map(&mut example).collect()
}

/// One chat format a set of tools, as conversations bring their own.
struct Formats<'a> {
    recipe: &'a SftRecipe,
    /// The most ids that a row may have.
    longest: usize,
    by_tools: HashMap<String, ChatFormat>,
}

impl<'a> Formats<'a> {
    fn new(recipe: &'a SftRecipe, longest: usize) -> Self {
        Self { recipe, longest, by_tools: HashMap::new() }
    }

    fn examples(
        &mut self,
        file: &Frozen,
        images: &mut Images,
    ) -> Result<Vec<Example>, RecipeError> {
        let conversations = read_conversations(file)?;
        let wrong = |conversation: &Conversation, problem: String| RecipeError::Row {
            path: file.path.clone(),
            line: conversation.line,
            problem,
        };
        let example =
            |it: &Conversation| self.example(it, images).map_err(|problem| wrong(it, problem));
        conversations.iter().map(example).collect()
    }

    fn example(
        &mut self,
        conversation: &Conversation,
        images: &mut Images,
    ) -> Result<Example, String> {
        let shown: Vec<_> =
            conversation.images.iter().map(|path| images.add(path)).collect::<Result<_, _>>()?;
        let format = self.format(conversation)?;
        let row = supervised_row(format, &conversation.messages).map_err(|e| e.to_string())?;
        // Without images a pad is an id like any other.
        let pad = format.image_pad().filter(|_| images.sees());
        let example = Example::placing(&row.ids, &row.scored, pad, &shown, images)?;
        if example.ids.len() > self.longest {
            return Err(format!(
                "{} ids are more than training.max_length and the model allow ({}); raise it or shorten \
                 the row",
                example.ids.len(),
                self.longest
            ));
        }
        Ok(example)
    }

    fn format(&mut self, conversation: &Conversation) -> Result<&ChatFormat, String> {
        let key = Value::from(conversation.tools.clone()).to_string();
        if !self.by_tools.contains_key(&key) {
            let options = ChatOptions {
                tools: conversation.tools.clone(),
                kwargs: self.recipe.chat_template_kwargs.clone(),
                ..ChatOptions::default()
            };
            let model = &self.recipe.model.path;
            let format = ChatFormat::load(model, options).map_err(|error| error.to_string())?;
            self.by_tools.insert(key.clone(), format);
        }
        self.by_tools.get(&key).ok_or_else(|| "no chat format".into())
    }
}
