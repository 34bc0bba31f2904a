//! Text to ids and back, with control tokens only where the scaffold put them.
//!
//! Encoding follows Hugging Face's pipeline step by step: split at added tokens, normalise, split at
//! added tokens that match normalised text, pre-tokenise, apply the model. The one difference is that an
//! added token counts only where it stands wholly in trusted text. The model alone never makes an added
//! token: that is checked for every control token at load, and again for every id. So benign text gets
//! the ids that ordinary tokenization gives it, and no untrusted text can become a control token.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashSet},
    fmt, fs,
    ops::Range,
    path::Path,
};

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::{Map, Value};
use tokenizers::{
    AddedToken, Model, NormalizedString, Normalizer, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer, Token, Tokenizer, normalizer::Range as TokenizerRange,
};

use super::ChatError;

/// A tokenizer.json larger than this is refused.
const MAX_FILE: u64 = 256 << 20;

/// A tokenizer that keeps trusted and untrusted text apart.
pub struct ChatTokenizer {
    inner: Tokenizer,
    /// Added tokens that match the text as it is, and those that match normalised text.
    raw: Matcher,
    normalized: Matcher,
    control: HashSet<u32>,
    contents: Vec<String>,
    /// The characters of control tokens that are no letters, digits or spaces.
    signs: HashSet<char>,
}

/// A control token in a text: its id and its byte range, stripped whitespace included.
pub(super) type Span = (u32, Range<usize>);

struct Added {
    token: AddedToken,
    id: u32,
    /// Tokens of whitespace or of one plain word are spelling, not control: any text may have them.
    is_spelling: bool,
}

struct Matcher {
    search: AhoCorasick,
    tokens: Vec<Added>,
}

impl fmt::Debug for ChatTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTokenizer({} ids)", self.inner.get_vocab_size(true))
    }
}

impl ChatTokenizer {
    /// Loads `dir/tokenizer.json` with the added and special tokens that `tokenizer_config.json`
    /// (`config`) names besides.
    pub fn load(dir: &Path, config: &Map<String, Value>) -> Result<Self, ChatError> {
        let path = dir.join("tokenizer.json");
        let bad = |detail: String| ChatError::File { path: path.clone(), detail };
        let size = fs::metadata(&path)
            .map_err(|error| bad(format!("{error}; copy it from the model's own repository")))?
            .len();
        if size > MAX_FILE {
            return Err(bad(format!("{size} bytes are more than the {MAX_FILE} allowed")));
        }
        let bytes = fs::read(&path).map_err(|error| bad(error.to_string()))?;
        let mut inner = Tokenizer::from_bytes(&bytes)
            .map_err(|error| bad(format!("not a tokenizer: {}", clip(&error.to_string()))))?;
        add_configured(&mut inner, config);
        Self::new(inner)
    }

    fn new(inner: Tokenizer) -> Result<Self, ChatError> {
        let unknown = unknown_id(&inner);
        let mut added: Vec<Added> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| !token.content.is_empty())
            .map(|(id, token)| Added { is_spelling: is_spelling(&token), token, id })
            .collect();
        added.sort_by_key(|added| added.id);
        let control: HashSet<u32> = added
            .iter()
            .filter(|added| !added.is_spelling && Some(added.id) != unknown)
            .map(|added| added.id)
            .collect();
        let contents: Vec<String> = added
            .iter()
            .filter(|a| !a.is_spelling)
            .map(|added| added.token.content.clone())
            .collect();
        let (normalized, raw): (Vec<_>, Vec<_>) =
            added.into_iter().partition(|added| added.token.normalized);
        let patterns = normalized
            .iter()
            .map(|added| {
                let mut content = NormalizedString::from(added.token.content.as_str());
                if let Some(normalizer) = inner.get_normalizer() {
                    normalizer.normalize(&mut content).map_err(|e| tokenizer_error(&e))?;
                }
                Ok(content.get().to_owned())
            })
            .collect::<Result<Vec<_>, ChatError>>()?;
        let raw_patterns: Vec<String> = raw.iter().map(|a| a.token.content.clone()).collect();
        let raw = Matcher::new(raw, &raw_patterns)?;
        let normalized = Matcher::new(normalized, &patterns)?;
        let signs = contents.iter().flat_map(|token| token.chars());
        let signs = signs.filter(|c| !c.is_alphanumeric() && !c.is_whitespace()).collect();
        let tokenizer = Self { inner, raw, normalized, control, contents, signs };
        for content in &tokenizer.contents {
            tokenizer.encode(content, std::slice::from_ref(&(0..content.len())))?;
        }
        Ok(tokenizer)
    }

    /// Encodes `text`, in which only added tokens outside `untrusted` (sorted byte ranges) count. No
    /// special tokens are added around it.
    pub fn encode(&self, text: &str, untrusted: &[Range<usize>]) -> Result<Vec<u32>, ChatError> {
        Ok(self
            .tokenized(text, untrusted)?
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .flat_map(|(_, _, tokens)| tokens.iter().flatten().map(|token| token.id))
            .collect())
    }

    /// For each id of an untrusted text the byte at which what it stands for starts.
    pub(super) fn starts(&self, text: &str) -> Result<Vec<usize>, ChatError> {
        let pre = self.tokenized(text, std::slice::from_ref(&(0..text.len())))?;
        let encoding = pre.into_encoding(None, 0, OffsetType::Byte);
        let encoding = encoding.map_err(|error| tokenizer_error(&error))?;
        Ok(encoding.get_offsets().iter().map(|(start, _)| *start).collect())
    }

    fn tokenized(
        &self,
        text: &str,
        untrusted: &[Range<usize>],
    ) -> Result<PreTokenizedString, ChatError> {
        let mut pre = self.split(text, untrusted)?;
        if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut pre).map_err(|e| tokenizer_error(&e))?;
        }
        let forged = RefCell::new(None);
        let model = self.inner.get_model();
        let tokenized = pre.tokenize(|piece| {
            let tokens = model.tokenize(piece.get())?;
            match tokens.iter().find(|token| self.control.contains(&token.id)) {
                Some(token) => {
                    *forged.borrow_mut() = Some(token.value.clone());
                    Err("plain text gave a control token".into())
                }
                None => Ok(tokens),
            }
        });
        if let Some(token) = forged.into_inner() {
            return Err(ChatError::Spellable { token });
        }
        tokenized.map_err(|e| tokenizer_error(&e))?;
        Ok(pre)
    }

    /// The control tokens of `text` that stand outside `untrusted`.
    pub(super) fn spans(
        &self,
        text: &str,
        untrusted: &[Range<usize>],
    ) -> Result<Vec<Span>, ChatError> {
        let pre = self.split(text, untrusted)?;
        Ok(pre
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .filter_map(|(_, (start, end), tokens)| {
                tokens.as_ref().and_then(|t| t.first()).map(|token| (token.id, start..end))
            })
            .collect())
    }

    fn split(
        &self,
        text: &str,
        untrusted: &[Range<usize>],
    ) -> Result<PreTokenizedString, ChatError> {
        let mut pre = PreTokenizedString::from(text);
        pre.split(|_, piece| Ok(self.raw.split(piece, untrusted)))
            .map_err(|e| tokenizer_error(&e))?;
        pre.split(|_, mut piece| {
            if let Some(normalizer) = self.inner.get_normalizer() {
                normalizer.normalize(&mut piece)?;
            }
            Ok(self.normalized.split(piece, untrusted))
        })
        .map_err(|e| tokenizer_error(&e))?;
        Ok(pre)
    }

    /// The text of `ids`, control tokens included. Bytes that are not UTF-8 and ids that the tokenizer
    /// does not have show as U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut out = String::new();
        for run in ids.chunk_by(|a, b| self.is_known(*a) == self.is_known(*b)) {
            if run.first().is_some_and(|id| self.is_known(*id)) {
                out.push_str(&self.inner.decode(run, false).unwrap_or_else(|_| "\u{fffd}".into()));
            } else {
                out.extend(run.iter().map(|_| '\u{fffd}'));
            }
        }
        out
    }

    fn is_known(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_some()
    }

    /// The id of a token, added or not.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of one id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The ids that only the scaffold and the policy may write.
    pub fn control_ids(&self) -> BTreeSet<u32> {
        self.control.iter().copied().collect()
    }

    /// Whether `text` could become a control token, or a piece of one, under what templates do with text
    /// (change its case, cut it, escape it, put it between literals): it has one of the signs that
    /// control tokens are made of, or is itself a piece of one.
    pub(super) fn touches_control(&self, text: &str) -> bool {
        text.contains(|c: char| self.signs.contains(&c)) || {
            let text = text.to_lowercase();
            self.contents.iter().any(|token| token.to_lowercase().contains(&text))
        }
    }
}

impl Matcher {
    fn new(tokens: Vec<Added>, patterns: &[String]) -> Result<Self, ChatError> {
        let search = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .build(patterns)
            .map_err(|error| ChatError::Tokenizer { detail: error.to_string() })?;
        Ok(Self { search, tokens })
    }

    /// Cuts `piece` at the added tokens that count, as Hugging Face does.
    fn split(
        &self,
        piece: NormalizedString,
        untrusted: &[Range<usize>],
    ) -> Vec<(NormalizedString, Option<Vec<Token>>)> {
        if self.tokens.is_empty() || piece.is_empty() {
            return vec![(piece, None)];
        }
        let cuts = self.find(&piece, untrusted);
        if cuts.is_empty() {
            return vec![(piece, None)];
        }
        let slice = |range: Range<usize>| piece.slice(TokenizerRange::Normalized(range));
        let mut out = Vec::with_capacity(2 * cuts.len() + 1);
        let mut cursor = 0;
        for (id, range) in cuts {
            if cursor < range.start {
                out.extend(slice(cursor..range.start).map(|text| (text, None)));
            }
            cursor = range.end;
            out.extend(slice(range).map(|text| {
                let value = text.get().to_owned();
                let length = value.len();
                (text, Some(vec![Token::new(id, value, (0, length))]))
            }));
        }
        if cursor < piece.len() {
            out.extend(slice(cursor..piece.len()).map(|text| (text, None)));
        }
        out
    }

    /// Leftmost-longest, non-overlapping matches that count, in bytes of the normalised text.
    fn find(&self, piece: &NormalizedString, untrusted: &[Range<usize>]) -> Vec<Span> {
        let text = piece.get();
        let base = piece.offsets_original().0;
        let is_trusted = |range: Range<usize>| {
            let Some(original) = piece.convert_offsets(TokenizerRange::Normalized(range)) else {
                return false;
            };
            let (start, end) = (base + original.start, base + original.end);
            let next = untrusted.partition_point(|u| u.end <= start);
            untrusted.get(next).is_none_or(|u| u.start >= end)
        };
        let mut matches: Vec<(usize, usize, &Added)> = self
            .search
            .find_overlapping_iter(text)
            .filter_map(|m| {
                let added = self.tokens.get(m.pattern().as_usize())?;
                (added.is_spelling || is_trusted(m.range())).then_some((m.start(), m.end(), added))
            })
            .collect();
        matches.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
        let mut out: Vec<Span> = Vec::new();
        let (mut searched, mut cursor) = (0, 0);
        for (match_start, match_end, added) in matches {
            if match_start < searched {
                continue;
            }
            searched = match_end;
            let (before, after) = (&text[..match_start], &text[match_end..]);
            let (mut start, mut end) = (match_start, match_end);
            if added.token.single_word
                && (before.chars().next_back().is_some_and(is_word)
                    || after.chars().next().is_some_and(is_word))
            {
                continue;
            }
            if added.token.lstrip {
                start = before.trim_end().len().max(cursor);
            }
            if added.token.rstrip {
                end += after.len() - after.trim_start().len();
            }
            // As in Hugging Face's loop, a match inside whitespace that the one before it took counts.
            out.push((added.id, start..end));
            cursor = end;
        }
        out
    }
}

/// Whether an added token only gives a piece of ordinary text an id of its own.
fn is_spelling(token: &AddedToken) -> bool {
    let mut chars = token.content.chars();
    token.content.trim().is_empty() || (!token.special && chars.all(char::is_alphanumeric))
}

/// `\w` as the tokenizers crate tests it at the ends of single-word tokens.
fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn clip(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

fn tokenizer_error(error: &tokenizers::Error) -> ChatError {
    ChatError::Tokenizer { detail: clip(&error.to_string()) }
}

/// The id that the model gives to text that it cannot spell: no control token, whatever it is called.
fn unknown_id(inner: &Tokenizer) -> Option<u32> {
    use tokenizers::ModelWrapper;
    let model = inner.get_model();
    match model {
        ModelWrapper::BPE(bpe) => {
            bpe.get_unk_token().as_ref().and_then(|token| model.token_to_id(token))
        }
        ModelWrapper::WordPiece(wordpiece) => model.token_to_id(&wordpiece.unk_token),
        ModelWrapper::WordLevel(words) => model.token_to_id(&words.unk_token),
        ModelWrapper::Unigram(_) => {
            model.tokenize("\u{10fffe}").ok()?.first().map(|token| token.id)
        }
    }
}

/// Adds what tokenizer_config.json names and tokenizer.json lacks, as transformers does.
fn add_configured(inner: &mut Tokenizer, config: &Map<String, Value>) {
    let known = |inner: &Tokenizer, content: &str| {
        inner.get_added_tokens_decoder().values().any(|token| token.content == content)
    };
    if let Some(Value::Object(decoder)) = config.get("added_tokens_decoder") {
        let mut entries: Vec<(u64, &Value)> =
            decoder.iter().filter_map(|(id, entry)| Some((id.parse().ok()?, entry))).collect();
        entries.sort_by_key(|(id, _)| *id);
        for (_, entry) in entries {
            if let Some(token) = added_token(entry)
                && !known(inner, &token.content)
            {
                add(inner, token);
            }
        }
    }
    for (_, token) in special_tokens(config) {
        if !known(inner, &token) {
            add(inner, AddedToken::from(token, true));
        }
    }
}

fn add(inner: &mut Tokenizer, token: AddedToken) {
    if token.special {
        inner.add_special_tokens(&[token]);
    } else {
        inner.add_tokens(&[token]);
    }
}

fn added_token(entry: &Value) -> Option<AddedToken> {
    let flag =
        |name: &str, default: bool| entry.get(name).and_then(Value::as_bool).unwrap_or(default);
    let special = flag("special", false);
    let token = AddedToken::from(entry.get("content")?.as_str()?, special);
    Some(
        token
            .lstrip(flag("lstrip", false))
            .rstrip(flag("rstrip", false))
            .single_word(flag("single_word", false))
            .normalized(flag("normalized", !special)),
    )
}

/// The named special tokens of tokenizer_config.json (`bos_token`, `eos_token`, …): name and text.
pub(super) fn special_tokens(config: &Map<String, Value>) -> Vec<(String, String)> {
    let named =
        config.iter().filter(|(name, _)| name.ends_with("_token") && !name.starts_with("add_"));
    let model_specific = config
        .get("model_specific_special_tokens")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(|map| map.iter());
    named
        .chain(model_specific)
        .filter_map(|(name, value)| {
            let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str))?;
            (!text.is_empty()).then(|| (name.clone(), text.to_owned()))
        })
        .collect()
}
