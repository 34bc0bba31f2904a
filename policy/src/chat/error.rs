//! What can go wrong between text and token ids, each in one line that names the file or field.

use std::path::PathBuf;

/// A checkpoint's chat files, or a conversation, cannot be turned into a token stream.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A file of the checkpoint cannot be read or does not hold what it should.
    #[error("{path}: {detail}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        detail: String,
    },
    /// The chat template is not a template.
    #[error("{origin}: the chat template does not compile: {detail}")]
    Syntax {
        /// Where the template was read.
        origin: String,
        /// What the template engine says, with the line.
        detail: String,
    },
    /// The chat template refused the conversation, or used something that a value does not have.
    #[error("the chat template refused the conversation: {detail}")]
    Render {
        /// The template's own message where it raised one.
        detail: String,
    },
    /// The template reshapes untrusted text, so that it cannot be told from the scaffold.
    #[error(
        "the chat template changes untrusted text ({detail}), so control tokens in it cannot be kept \
         apart; use a template that prints messages and tools as they are"
    )]
    Reshaped {
        /// How the rendering with marks differed.
        detail: String,
    },
    /// Untrusted text contains every character that could mark it.
    #[error("the text uses all of the characters that mark untrusted text: shorten it")]
    NoMark,
    /// The tokenizer failed on a text.
    #[error("tokenizer.json: {detail}")]
    Tokenizer {
        /// What it said.
        detail: String,
    },
    /// Text without added tokens gave a control id: the tokenizer cannot keep them apart.
    #[error("tokenizer.json: plain text gives the control token {token:?}, so text could forge it")]
    Spellable {
        /// The control token.
        token: String,
    },
    /// No end-of-turn id is named by the checkpoint.
    #[error(
        "no stop id: generation_config.json, config.json and tokenizer_config.json name no eos token \
         that tokenizer.json has"
    )]
    NoStopId,
    /// The template does not close an assistant turn with a stop id.
    #[error(
        "the chat template does not end an assistant turn with a stop token ({stops}): set \
         `eos_token_id` in generation_config.json"
    )]
    NoEndOfTurn {
        /// The known stop tokens.
        stops: String,
    },
    /// Tools were given, and neither the template nor the system text shows them to the policy.
    #[error(
        "the chat template has no place for tools: describe them in `system` (`{{tools}}` there stands \
         for their JSON)"
    )]
    ToolsNotShown,
    /// The template shows observations neither as tool messages nor as user messages.
    #[error(
        "the chat template prints neither tool nor user messages after an assistant turn: {detail}"
    )]
    NoObservations {
        /// What the last attempt met.
        detail: String,
    },
    /// A suffix was asked for without an observation.
    #[error("a suffix needs at least one observation")]
    EmptySuffix,
    /// Images were given, and the checkpoint names no id for them.
    #[error(
        "the checkpoint knows no images: config.json has no `image_token_id` and \
         tokenizer_config.json no `image_token`"
    )]
    NoImages,
    /// The template does not write one image-pad id for each image.
    #[error(
        "the chat template writes {written} image pads for {images} images; use the model's own"
    )]
    ImagesNotShown {
        /// Image parts of the message.
        images: usize,
        /// Image-pad ids in the rendering.
        written: usize,
    },
    /// A tool is not a JSON schema of a function.
    #[error("tools[{index}]: {detail}")]
    Tool {
        /// Its place in the list.
        index: usize,
        /// What is wrong with it.
        detail: &'static str,
    },
}
