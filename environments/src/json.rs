//! JSON as servers write it. Python's writer gives lone halves of surrogate pairs as escapes, which no text
//! here can hold: they are read as U+FFFD, as what a Python class says is.

use serde_json::Value;

/// Reads a message.
///
/// # Errors
/// It is no JSON.
pub(crate) fn read(message: &[u8]) -> serde_json::Result<Value> {
    serde_json::from_slice(message).or_else(|error| {
        whole(message).map_or(Err(error), |mended| serde_json::from_slice(&mended))
    })
}

/// The same with U+FFFD for every half of a pair that stands alone; nothing where there is none.
fn whole(message: &[u8]) -> Option<Vec<u8>> {
    let half = |at: usize| -> Option<u16> {
        let digits = message.get(at..at + 6)?.strip_prefix(b"\\u")?;
        let value = u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        (0xd800..0xe000).contains(&value).then_some(value)
    };
    let (mut mended, mut at, mut found) = (Vec::with_capacity(message.len()), 0, false);
    while let Some(first) = message.get(at) {
        let length = match (half(at), half(at + 6)) {
            (Some(0xd800..0xdc00), Some(0xdc00..)) => 12,
            (Some(_), _) => {
                mended.extend_from_slice(b"\\ufffd");
                (at, found) = (at + 6, true);
                continue;
            }
            // An escape is taken whole, so that what an escaped backslash escapes is not read as one.
            _ => 1 + usize::from(*first == b'\\'),
        };
        mended.extend_from_slice(message.get(at..at + length).unwrap_or_default());
        at += length;
    }
    found.then_some(mended)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lone_halves_of_pairs_are_replaced_and_nothing_else() {
        for (text, expected) in [
            (r#""a\ud800b""#, json!("a\u{fffd}b")),
            (r#"{"\udc00":"\ud83d\ude00\uD83D"}"#, json!({"\u{fffd}": "😀\u{fffd}"})),
            (r#""\ud800\ud83d\ude00""#, json!("\u{fffd}😀")),
            (r#""\\ud800""#, json!("\\ud800")),
            (r#"["\\\ud800"]"#, json!(["\\\u{fffd}"])),
        ] {
            assert_eq!(read(text.as_bytes()).expect("JSON"), expected, "{text}");
        }
        for text in ["", "{", r#""\ud8"#, r#""\ud800"#, r#""\u+123""#, "\"\\"] {
            assert!(read(text.as_bytes()).is_err(), "{text}");
        }
    }
}
