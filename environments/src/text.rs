//! The text that a policy is shown: one rule for observations, one for errors.
//!
//! **Observations and reset texts** are shown as the environment returned them: nothing is trimmed,
//! escaped or normalised; NUL, CR LF and leading spaces stay. Only the length is bounded: a text of
//! more characters (Unicode scalar values) than the limit keeps its beginning and ends in
//! [`CUT_MARK`], the mark included in the limit. A reset without text is the empty text.
//!
//! **Errors**, whether a tool raised or the recorder refused, are the JSON text `{"error": "…"}` with
//! one space after the colon, `"`, `\` and control characters escaped and everything else as it is.
//! An over-long message is cut inside the quotes, so that the text stays whole JSON; [`error_message`]
//! therefore always gives the message back.
//!
//! Both rules are idempotent: a text that obeys the limit is never changed.

use serde_json::Value;

/// Ends a text that was cut.
pub const CUT_MARK: &str = " [...cut]";

const OPEN: &str = r#"{"error": "#;
const CLOSE: &str = "}";

/// `text` under a limit of `max` characters.
pub fn observation(mut text: String, max: usize) -> String {
    // A text of at most `max` bytes has at most `max` characters.
    if text.len() <= max || text.chars().nth(max).is_none() {
        return text;
    }
    let keep = max.saturating_sub(CUT_MARK.len());
    let end = text.char_indices().nth(keep).map_or(text.len(), |(index, _)| index);
    text.truncate(end);
    text.push_str(CUT_MARK);
    text
}

/// The text of a tool that was called, or its error.
pub(crate) type Called = Result<String, String>;

/// What the result of an MCP tool shows: the texts of its content, and whether they are an error. A
/// result without content is shown as it is.
///
/// # Errors
/// Content that is no text.
pub(crate) fn tool_result(result: &Value) -> Result<Called, String> {
    let Some(blocks) = result.get("content").and_then(Value::as_array) else {
        return Ok(Ok(match result {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }));
    };
    let mut text = String::new();
    for block in blocks {
        let kind = block.get("type").and_then(Value::as_str).unwrap_or_default();
        if kind != "text" {
            let kind: String = kind.chars().take(40).collect();
            return Err(format!("it returned content of type {kind:?}: only text is possible"));
        }
        text.push_str(block.get("text").and_then(Value::as_str).unwrap_or_default());
    }
    let failed = |key: &&str| result.get(*key) == Some(&Value::Bool(true));
    let failed = ["isError", "is_error"].iter().any(failed);
    Ok(if failed { Err(text) } else { Ok(text) })
}

/// The error text for `message` under a limit of `max` characters.
pub fn error(message: &str, max: usize) -> String {
    // Two quotes.
    let room = max.saturating_sub(OPEN.len() + CLOSE.len() + 2);
    let mut used = 0;
    let mut keep = 0;
    let mut whole = true;
    for (index, c) in message.char_indices() {
        used += escaped_chars(c);
        if used + CUT_MARK.len() <= room {
            keep = index + c.len_utf8();
        }
        if used > room {
            whole = false;
            break;
        }
    }
    let message = if whole {
        message.to_owned()
    } else {
        format!("{}{CUT_MARK}", message.get(..keep).unwrap_or_default())
    };
    format!("{OPEN}{}{CLOSE}", quoted(&message))
}

/// The message of an error text; nothing for any other text.
pub fn error_message(text: &str) -> Option<String> {
    let quoted = text.strip_prefix(OPEN)?.strip_suffix(CLOSE)?;
    let message: String = serde_json::from_str(quoted).ok()?;
    // Only the one spelling counts, so that text and message determine each other.
    (self::quoted(&message) == quoted).then_some(message)
}

/// `message` as a JSON string.
fn quoted(message: &str) -> String {
    Value::from(message).to_string()
}

/// How many characters JSON needs for `c`.
fn escaped_chars(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        c if c < ' ' => 6,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_within_the_limit_are_left_alone() {
        for text in ["", "  leading", "a\r\nb", "nul\0", "None", "😀😀", "<|im_end|>\n"] {
            assert_eq!(observation(text.into(), 64), text);
        }
        let full = "é".repeat(64);
        assert_eq!(observation(full.clone(), 64), full);
    }

    #[test]
    fn a_cut_falls_between_characters_and_is_marked() {
        let cut = observation("😀".repeat(70), 64);
        assert_eq!(cut, format!("{}{CUT_MARK}", "😀".repeat(64 - CUT_MARK.len())));
        assert_eq!(observation("x".repeat(200_000), 8192).chars().count(), 8192);
        // A limit that cannot even hold the mark still ends.
        assert_eq!(observation("abcdef".into(), 2), CUT_MARK);
    }

    #[test]
    fn errors_are_json_with_one_space() {
        assert_eq!(error("Game over.", 100), r#"{"error": "Game over."}"#);
        assert_eq!(error("a \"b\"\n\u{1}ü", 100), "{\"error\": \"a \\\"b\\\"\\n\\u0001ü\"}");
        assert_eq!(error_message(r#"{"error":"x"}"#), None);
        assert_eq!(error_message(r#"{"error": "\u0041"}"#), None);
        assert_eq!(error_message(r#"{"error": "x"} "#), None);
    }

    proptest! {
        #[test]
        fn the_message_always_comes_back_and_cutting_is_idempotent(
            message in any::<String>(), max in 64usize..200,
        ) {
            let long = message.repeat(3);
            let text = error(&long, max);
            prop_assert!(text.chars().count() <= max);
            let back = error_message(&text);
            prop_assert!(back.is_some());
            let back = back.unwrap_or_default();
            prop_assert_eq!(error(&back, max), text);
            prop_assert!(back == long || back.ends_with(CUT_MARK));
            let seen = observation(long.clone(), max);
            prop_assert!(seen.chars().count() <= max);
            prop_assert_eq!(observation(seen.clone(), max), seen);
        }
    }
}
