//! Text to tokens and back: chat template, tokenizer, and the reader of tool calls.
//!
//! The token stream of an episode only grows: [`ChatFormat::prompt`], then ids as they were sampled, then
//! [`ChatFormat::suffix`] with what the tools answered, and so on. Nothing is ever decoded and encoded
//! again. The actor and the learner both derive the external ids with this module, and must agree id for
//! id, so everything here is a pure function of the checkpoint's files, the recipe and the texts.
//!
//! Untrusted text (prompt, reset text, observations, tool schemas) cannot become a control token: see
//! [`Rendered`] for how it is told apart, [`ChatTokenizer`] for how it is encoded. What becomes of odd tool
//! calls is tabled in [`parse`].

mod bound;
mod clock;
mod error;
mod filters;
mod format;
mod images;
mod json;
mod marks;
mod methods;
pub mod parse;
mod python;
mod source;
mod stops;
mod template;
mod tokenizer;
mod turns;
mod untrusted;

pub use bound::ObservationBound;
pub use clock::{NotADate, TemplateDate};
pub use error::ChatError;
pub use format::{ChatFormat, ChatOptions};
pub use images::shown_content;
pub use json::MAX_DEPTH;
pub use marks::Rendered;
pub use parse::{
    Dialect, MAX_CHARS, MAX_IDS, MAX_NAME, MAX_RAW, ParseRules, Turn, parse_turn, read_calls,
};
pub use template::Template;
pub use tokenizer::ChatTokenizer;
pub use turns::ObservationRole;
