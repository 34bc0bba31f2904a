//! Prompts that show images. A template writes one image-pad id for each image part of a message, as
//! transformers' processors have it before they repeat the id as often as the image takes; so does
//! [`crate::vision::expand`] here. Texts beside the images are as untrusted as any: a name that spells
//! an image pad is ordinary text.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{
    ChatError, ChatFormat, ChatTokenizer, Rendered, source::read_json, tokenizer::special_tokens,
};

/// The id that stands for an image: config.json's `image_token_id`, else the tokenizer's `image_token`.
pub(super) fn image_pad(
    dir: &Path,
    tokenizer_config: &Map<String, Value>,
    tokenizer: &ChatTokenizer,
) -> Result<Option<u32>, ChatError> {
    let path = dir.join("config.json");
    let configured = read_json(&path)?.and_then(|mut config| config.remove("image_token_id"));
    if let Some(value) = configured.filter(|value| !value.is_null()) {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        let known = id.filter(|id| tokenizer.token(*id).is_some());
        return known.map(Some).ok_or_else(|| ChatError::File {
            path,
            detail: format!("`image_token_id` {value} is no id of tokenizer.json"),
        });
    }
    let named = special_tokens(tokenizer_config);
    let image = named.iter().find(|(name, _)| name == "image_token");
    Ok(image.and_then(|(_, token)| tokenizer.id(token)))
}

/// The content of a user message: so many images, then the text.
pub fn shown_content(images: usize, text: &str) -> Value {
    let shown = std::iter::repeat_n(json!({"type": "image"}), images);
    shown.chain([json!({"type": "text", "text": text})]).collect()
}

impl ChatFormat {
    /// The id that the template writes for an image, where the checkpoint knows images.
    pub fn image_pad(&self) -> Option<u32> {
        self.image_pad
    }

    /// [`ChatFormat::prompt`] with images before the text: the user message is so many image parts
    /// and one text part. The ids hold one [`ChatFormat::image_pad`] for each image, in order.
    ///
    /// # Errors
    /// The checkpoint knows no images, or its template does not show them one by one.
    pub fn prompt_with_images(
        &self,
        task_prompt: &str,
        reset_text: &str,
        images: usize,
    ) -> Result<Vec<u32>, ChatError> {
        let rendered = self.showing(&format!("{task_prompt}{reset_text}"), images)?;
        self.encode_shown(&rendered, images)
    }

    /// The ids of a prompt with images before `text`, of the turn that answers it with `answer`, and of
    /// that turn's end: encoded as one text, as reference scripts do that append the answer to a
    /// rendered prompt. Control tokens in `answer` count.
    ///
    /// # Errors
    /// As [`ChatFormat::prompt_with_images`].
    pub fn answered_with_images(
        &self,
        text: &str,
        images: usize,
        answer: &str,
    ) -> Result<Vec<u32>, ChatError> {
        let mut rendered = self.showing(text, images)?;
        rendered.text.push_str(answer);
        rendered.text.push_str(&self.tokenizer.token(self.turn_end()).unwrap_or_default());
        self.encode_shown(&rendered, images)
    }

    fn showing(&self, text: &str, images: usize) -> Result<Rendered, ChatError> {
        let mut messages = self.opening(text);
        if let Some(user) = messages.last_mut().filter(|_| images > 0) {
            user["content"] = shown_content(images, text);
        }
        self.render(messages, true)
    }

    fn encode_shown(&self, rendered: &Rendered, images: usize) -> Result<Vec<u32>, ChatError> {
        let ids = self.tokenizer.encode(&rendered.text, &rendered.untrusted)?;
        if images == 0 {
            return Ok(ids);
        }
        let pad = self.image_pad.ok_or(ChatError::NoImages)?;
        let written = ids.iter().filter(|id| **id == pad).count();
        if written == images { Ok(ids) } else { Err(ChatError::ImagesNotShown { images, written }) }
    }
}
