//! The ids that end an assistant turn.

use std::path::Path;

use serde_json::{Map, Value};

use super::{ChatError, ChatTokenizer, source::read_json, tokenizer::special_tokens};

/// Every end-of-sequence id that the checkpoint names: generation_config.json's and config.json's (its
/// `text_config`'s too) `eos_token_id`, an id or a list, and the tokenizer's eos token. In that order,
/// each once.
pub(super) fn stop_ids(
    dir: &Path,
    tokenizer_config: &Map<String, Value>,
    tokenizer: &ChatTokenizer,
) -> Result<Vec<u32>, ChatError> {
    let mut stops = Vec::new();
    for name in ["generation_config.json", "config.json"] {
        let path = dir.join(name);
        let Some(config) = read_json(&path)? else { continue };
        let nested = config.get("text_config").and_then(|text| text.get("eos_token_id"));
        for value in config.get("eos_token_id").into_iter().chain(nested) {
            let ids = match value {
                Value::Array(ids) => ids.iter().collect(),
                Value::Null => Vec::new(),
                id => vec![id],
            };
            for id in ids {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                    ChatError::File {
                        path: path.clone(),
                        detail: "`eos_token_id` is neither an id nor a list of ids".into(),
                    }
                })?;
                stops.push(id);
            }
        }
    }
    let named = special_tokens(tokenizer_config);
    let eos = named.iter().find(|(name, _)| name == "eos_token");
    stops.extend(eos.and_then(|(_, token)| tokenizer.id(token)));
    // A configuration may speak of a larger vocabulary than the tokenizer has: such ids cannot be told
    // from padding rows.
    stops.retain(|id| tokenizer.token(*id).is_some());
    let mut seen = Vec::new();
    stops.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    if stops.is_empty() { Err(ChatError::NoStopId) } else { Ok(stops) }
}
