//! A bound on how many ids an observation becomes: what is shown of one that would become more.

use std::borrow::Cow;

use super::{ChatError, ChatFormat};

/// How many ids an observation may become, counted by itself, and what ends one that is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservationBound {
    /// Most ids, the mark's included.
    pub tokens: usize,
    /// Ends an observation that was cut.
    pub mark: &'static str,
}

impl ChatFormat {
    /// What the policy is shown of an observation: all of it, or, where it is over the bound, as many of
    /// its first ids as fit before the mark, without the part of a character that they may end in.
    ///
    /// What is shown is within the bound, and what is within the bound is never changed.
    ///
    /// # Errors
    /// The tokenizer cannot read it.
    pub fn shown<'a>(&self, observation: &'a str) -> Result<Cow<'a, str>, ChatError> {
        let Some(ObservationBound { tokens, mark }) = self.bound else {
            return Ok(Cow::Borrowed(observation));
        };
        let starts = self.tokenizer.starts(observation)?;
        if starts.len() <= tokens {
            return Ok(Cow::Borrowed(observation));
        }
        let mut keep = tokens.saturating_sub(self.tokenizer.starts(mark)?.len());
        loop {
            // Where the first id that is left out starts: of a character in several ids, at its own start.
            let mut end = if keep == 0 { 0 } else { starts.get(keep).copied().unwrap_or(0) };
            while !observation.is_char_boundary(end) {
                end -= 1;
            }
            let cut = format!("{}{mark}", observation.get(..end).unwrap_or_default());
            // A text and a mark may join to other ids than they have apart.
            let over = self.tokenizer.starts(&cut)?.len().saturating_sub(tokens);
            if over == 0 || keep == 0 {
                return Ok(Cow::Owned(cut));
            }
            keep = keep.saturating_sub(over);
        }
    }
}
