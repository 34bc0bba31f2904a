//! Comments in recipes and environment sections: from `//` to the end of the line. Data sets have none.

/// `text` with spaces in place of its comments, so that the lines and columns of what is left are those of
/// the file.
pub fn without_comments(text: &[u8]) -> Vec<u8> {
    let mut plain = text.to_vec();
    let (mut string, mut escaped, mut comment) = (false, false, false);
    for (at, byte) in text.iter().enumerate() {
        match byte {
            b'\n' => comment = false,
            b'\r' if comment => {}
            _ if comment => blank(&mut plain, at),
            _ if escaped => escaped = false,
            b'\\' if string => escaped = true,
            b'"' => string = !string,
            b'/' if !string && text.get(at + 1) == Some(&b'/') => {
                comment = true;
                blank(&mut plain, at);
            }
            _ => {}
        }
    }
    plain
}

fn blank(text: &mut [u8], at: usize) {
    if let Some(byte) = text.get_mut(at) {
        *byte = b' ';
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(text: &str) -> Result<Value, String> {
        serde_json::from_slice(&without_comments(text.as_bytes())).map_err(|e| e.to_string())
    }

    #[test]
    fn comments_go_and_what_looks_like_one_in_a_text_stays() {
        let text = "// first \u{fc}\n{\"a\": 1, // \"b\": 2,\r\n \"url\": \"ws://host\", \"q\": \"\\\"//\" }// end";
        assert_eq!(read(text), Ok(json!({"a": 1, "url": "ws://host", "q": "\"//"})));
        assert!(read("{\"a\": 1 / 2}").is_err());
        assert!(read("{\"a\": /* none of these */ 1}").is_err());
    }

    #[test]
    fn places_of_mistakes_are_those_of_the_file() {
        let text = "{ // \u{fc}\u{fc}\n  \"a\": 1 // one\n  \"b\": 2\n}";
        let plain = "{\n  \"a\": 1\n  \"b\": 2\n}";
        let place = |error: String| error.split(" at ").last().map(str::to_owned);
        let expected = serde_json::from_str::<Value>(plain).map_err(|e| e.to_string());
        assert_eq!(read(text).map_err(place), expected.map_err(place));
    }

    #[test]
    fn a_text_without_comments_stays_as_it_is() {
        for text in ["", "/", "\"", "\"\\", "{\"a\": \"/\"}\n\n", "\"\\\\\" "] {
            assert_eq!(without_comments(text.as_bytes()), text.as_bytes(), "{text}");
        }
    }
}
