//! Episodes to read: every token of them with its mask and log-probability, what the tools answered, and
//! what it was worth.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use policy::{chat::ChatTokenizer, vision::Rgb};
use protocol::{Digest, Episode, EpisodeId, RunId};
use serde::Serialize;
use serde_json::{Map, Value};
use terminal::Failure;

use super::run::RunData;
use crate::journal::{JournalReader, Record};

/// Bytes of images in a page, base64 not counted.
const MOST_IMAGE_BYTES: usize = 8 << 20;

/// Episodes that a page shows.
#[derive(Debug, Default, Serialize)]
pub(super) struct Browser {
    /// In the order of the evidence.
    pub(super) episodes: Vec<Shown>,
    /// Accepted episodes of the run.
    pub(super) of: usize,
    /// Images by digest, as data URLs.
    pub(super) images: BTreeMap<String, String>,
}

/// One episode.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    /// Its evidence row.
    evidence: Value,
    /// Text, sampled id or not, and log-probability of each token; empty where the journal has it not.
    tokens: Vec<Token>,
    images: Vec<String>,
}

/// Text, id, and where the id was sampled its log-probability (at temperature 1, nats) and the turn.
#[derive(Debug, Serialize)]
struct Token(String, u32, Option<f32>, u32);

impl Browser {
    /// At most `most` episodes of a run, spread over its steps.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub(super) fn read(run: &RunData, most: usize) -> Result<Self, Failure> {
        let path = run.path.join("evidence.jsonl");
        let Ok(file) = fs::File::open(&path) else { return Ok(Self::default()) };
        let mut rows = Vec::new();
        for line in BufReader::new(file).lines() {
            let line = line.map_err(|e| Failure::Fault(format!("{}: {e}", path.display())))?;
            // The last line may be on its way.
            if let Ok(row) = serde_json::from_str::<Value>(&line) {
                rows.push(row);
            }
        }
        let of = rows.len();
        let chosen = spread(of, most);
        let rows: Vec<Value> = chosen.into_iter().filter_map(|at| rows.get(at).cloned()).collect();
        let mut wanted: HashMap<String, Option<Episode>> = rows
            .iter()
            .filter_map(|row| Some((row["episode"].as_str()?.to_owned(), None)))
            .collect();
        find(run, &mut wanted);
        let tokenizer = tokenizer(&run.path.join("tokenizer"));
        let mut browser = Self { of, ..Self::default() };
        let mut image_bytes = 0;
        for evidence in rows {
            let id = evidence["episode"].as_str().unwrap_or_default();
            let episode = wanted.get(id).and_then(Option::as_ref);
            let tokens = match (episode, &tokenizer) {
                (Some(episode), Some(tokenizer)) => tokens(episode, tokenizer),
                _ => Vec::new(),
            };
            let mut images = Vec::new();
            for image in episode.map(|it| it.images.as_slice()).unwrap_or_default() {
                let digest = image.digest().to_string();
                if !browser.images.contains_key(&digest) {
                    let Some(png) = Rgb::from(image).to_png().ok() else { continue };
                    image_bytes += png.len();
                    if image_bytes > MOST_IMAGE_BYTES {
                        continue;
                    }
                    let url = format!("data:image/png;base64,{}", STANDARD.encode(&png));
                    browser.images.insert(digest.clone(), url);
                }
                images.push(digest);
            }
            browser.episodes.push(Shown { evidence, tokens, images });
        }
        Ok(browser)
    }
}

/// At most `most` of `0..len`, evenly spread, first and last among them.
fn spread(len: usize, most: usize) -> Vec<usize> {
    if len <= most {
        return (0..len).collect();
    }
    let step = |at: usize| at * (len - 1) / most.saturating_sub(1).max(1);
    (0..most).map(step).collect()
}

/// Takes the wanted episodes out of the run's journal, as far as it can be read.
fn find(run: &RunData, wanted: &mut HashMap<String, Option<Episode>>) {
    let Some(id) = run.manifest["run"].as_str().and_then(|text| text.parse::<Digest>().ok()) else {
        return;
    };
    let Ok(mut reader) = JournalReader::open(run.path.join("journal"), RunId(id)) else { return };
    // A torn tail is where an unfinished run is being written; damage is `learner audit`'s to name.
    while let Ok(Some(entry)) = reader.read() {
        let Ok(Record::Accepted { body, .. }) = entry.record() else { continue };
        let id = EpisodeId::of_body(body).to_string();
        if let Some(place) = wanted.get_mut(&id) {
            *place = Episode::decode(body).ok();
        }
    }
}

fn tokenizer(dir: &Path) -> Option<ChatTokenizer> {
    let config = fs::read(dir.join("tokenizer_config.json")).ok();
    let config: Map<String, Value> =
        config.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    ChatTokenizer::load(dir, &config).ok()
}

fn tokens(episode: &Episode, tokenizer: &ChatTokenizer) -> Vec<Token> {
    let mut sampled = HashMap::new();
    for (turn, span) in (0u32..).zip(&episode.spans) {
        for (at, logp) in (span.offset as usize..).zip(&span.logp_raw) {
            sampled.insert(at, (*logp, turn));
        }
    }
    let mut shown = Vec::with_capacity(episode.tokens.len());
    let mut pending = Vec::new();
    for (at, id) in episode.tokens.iter().enumerate() {
        pending.push(*id);
        let text = tokenizer.decode(&pending);
        // A character of several tokens stands at its last one.
        let whole = !text.ends_with('\u{fffd}') || pending.len() == 4;
        let text = if whole { text } else { String::new() };
        if whole {
            pending.clear();
        }
        let known = sampled.get(&at);
        shown.push(Token(text, *id, known.map(|it| it.0), known.map_or(0, |it| it.1)));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn episodes_are_spread_over_the_run() {
        assert_eq!(spread(3, 5), [0, 1, 2]);
        assert_eq!(spread(101, 5), [0, 25, 50, 75, 100]);
        assert_eq!(spread(7, 1), [0]);
    }
}
