//! How a row is written: the user's turn of image and prompt, the generation prompt, the code, and the
//! end of the turn, with the ids of the whole as one text.

use std::path::Path;

use policy::chat::{ChatFormat, ChatOptions};
use serde_json::{Map, Value};

use super::{Example, Images};
use crate::recipe::{CodeRow, PromptTemplate, RecipeError};

/// Which ids of a row are learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scored {
    /// The code and the end of the turn, as in supervised training.
    CodeAndEnd,
    /// The code alone, as in rounds; the row ends with it.
    Code,
}

/// Writes rows under a checkpoint's chat template.
#[derive(Debug)]
pub struct RowFormat {
    chat: ChatFormat,
    template: PromptTemplate,
    max_length: usize,
    /// The ids of the ten digits.
    digits: [u32; 10],
}

impl RowFormat {
    /// The format of the checkpoint in `model`.
    ///
    /// # Errors
    /// The checkpoint's chat files, the template, or digits that are not one id each.
    pub fn load(
        model: &Path,
        kwargs: &Map<String, Value>,
        prompt: &str,
        max_length: usize,
    ) -> Result<Self, RecipeError> {
        let wrong = |problem: String| RecipeError::Model { path: model.to_owned(), problem };
        let options = ChatOptions { kwargs: kwargs.clone(), ..ChatOptions::default() };
        let chat = ChatFormat::load(model, options).map_err(|error| wrong(error.to_string()))?;
        let mut digits = [0; 10];
        for (id, digit) in digits.iter_mut().zip('0'..='9') {
            *id = chat.tokenizer().id(&digit.to_string()).ok_or_else(|| {
                wrong(format!("its tokenizer has no id for the digit {digit}, and codes need one"))
            })?;
        }
        let template = PromptTemplate::new(prompt)?;
        Ok(Self { chat, template, max_length, digits })
    }

    /// The id that ends the policy's turn.
    pub fn turn_end(&self) -> u32 {
        self.chat.turn_end()
    }

    /// The digits that these ids spell, where all of them are digits.
    pub fn code(&self, ids: &[u32]) -> Option<String> {
        let digit = |id: &u32| Some(char::from(b'0' + self.digit(*id)?));
        ids.iter().map(digit).collect()
    }

    fn digit(&self, id: u32) -> Option<u8> {
        self.digits.iter().position(|digit| *digit == id).and_then(|it| u8::try_from(it).ok())
    }

    /// The token stream of a row; its image is added to `images`.
    ///
    /// # Errors
    /// What is wrong with the row: its image, a code whose digits are not one id each, too many ids.
    pub fn example(
        &self,
        row: &CodeRow,
        images: &mut Images,
        scored: Scored,
    ) -> Result<Example, String> {
        let image = match (&row.image, images.sees()) {
            (Some(path), true) => Some(images.add(path)?),
            (None, false) => None,
            (None, true) => {
                return Err("image is missing: add the path of a PNG or JPEG file".into());
            }
            (Some(_), false) => {
                return Err("image: the model has no vision tower; train one that has".into());
            }
        };
        let text = self.template.render(&row.name, row.memory.as_deref())?;
        let shown = usize::from(image.is_some());
        let prompt =
            self.chat.prompt_with_images(&text, "", shown).map_err(|error| error.to_string())?;
        let whole = self
            .chat
            .answered_with_images(&text, shown, &row.code)
            .map_err(|error| error.to_string())?;
        let answer = whole.strip_prefix(prompt.as_slice()).and_then(<[u32]>::split_last);
        let code = match answer {
            Some((end, code)) if *end == self.turn_end() => code,
            _ => &[],
        };
        if self.code(code).as_ref() != Some(&row.code) {
            return Err(format!(
                "the tokenizer does not write code {:?} as one id a digit after the prompt",
                row.code
            ));
        }
        let ids = match scored {
            Scored::CodeAndEnd => &whole[..],
            Scored::Code => &whole[..whole.len() - 1],
        };
        let flags: Vec<bool> = (0..ids.len()).map(|at| at >= prompt.len()).collect();
        let example =
            Example::placing(ids, &flags, self.chat.image_pad(), image.as_slice(), images)?;
        if example.ids.len() > self.max_length {
            return Err(format!(
                "{} ids are more than training.max_length and the model allow ({}); raise it, shorten \
                 the prompt or shrink the image",
                example.ids.len(),
                self.max_length
            ));
        }
        Ok(example)
    }
}
