//! Episodes to read: every token of them with its mask and log-probability, what the tools answered, and
//! what it was worth. Of rounds on rows, the codes that were sampled and their pictures.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use policy::{chat::ChatTokenizer, vision::Rgb};
use protocol::{Digest, Episode, EpisodeId, RunId};
use serde::Serialize;
use serde_json::{Map, Value};
use terminal::Failure;

use super::run::RunData;
use crate::{
    files::{EVIDENCE, JOURNAL, TOKENIZER},
    journal::{JournalReader, Record},
};

/// Longest picture file that is read, in bytes.
const MAX_PICTURE: u64 = 64 << 20;
/// Longest line that is read, in bytes.
const MAX_LINE: u64 = 512 << 20;
/// What of an evidence row is shown.
const SHOWN: [&str; 14] = [
    "optimizer_step",
    "lease",
    "episode",
    "split",
    "task_id",
    "episode_seed",
    "policy_version",
    "score",
    "training_reward",
    "reward_components",
    "advantage",
    "end",
    "trace",
    "sampling",
];

/// Episodes that a page shows.
#[derive(Debug, Default, Serialize)]
pub(super) struct Browser {
    /// In the order of the evidence.
    pub(super) episodes: Vec<Shown>,
    /// Accepted episodes, or sampled codes, of the run.
    pub(super) of: usize,
    /// Images by digest, as data URLs.
    pub(super) images: BTreeMap<String, String>,
}

/// One episode, or one sampled code.
#[derive(Debug, Serialize)]
pub(super) struct Shown {
    /// The run's name.
    run: String,
    /// What the evidence says of an episode, or the row of a code.
    row: Value,
    /// Its tokens by turn; empty where the journal has them not.
    turns: Vec<Turn>,
    images: Vec<String>,
}

/// What the policy was shown and what it then sampled.
#[derive(Debug, Default, Serialize)]
struct Turn {
    /// The external ids' text.
    shown: String,
    /// How many they are.
    ids: usize,
    tokens: Vec<Token>,
}

/// Text, id, and log-probability at temperature 1, nats.
#[derive(Debug, Serialize)]
struct Token(String, u32, f32);

/// What a line of a file is found by.
#[derive(Clone, Debug)]
struct Place {
    file: PathBuf,
    offset: u64,
    round: Option<u64>,
}

impl Browser {
    /// At most `most` episodes of a run, spread over its steps, that make at most `bytes` bytes of page.
    ///
    /// # Errors
    /// A file that cannot be read, or is damaged: one line.
    pub(super) fn read(run: &RunData, most: usize, bytes: usize) -> Result<Self, Failure> {
        let places = places(run)?;
        let of = places.len();
        let mut most = most.min(of);
        loop {
            let chosen = spread(of, most).into_iter().filter_map(|at| places.get(at));
            let this = Self::of_places(run, &chosen.collect::<Vec<_>>(), of)?;
            let size = serde_json::to_vec(&this).map_err(Failure::fault)?.len();
            if size <= bytes || most == 0 {
                return Ok(this);
            }
            // In proportion, and fewer at any rate.
            most = (most * bytes / size).min(most - 1);
        }
    }

    fn of_places(run: &RunData, places: &[&Place], of: usize) -> Result<Self, Failure> {
        let rows = places.iter().map(|it| it.read()).collect::<Result<Vec<Value>, _>>()?;
        let ids = rows.iter().filter_map(|row| row["episode"].as_str());
        let mut wanted: HashMap<String, Option<Episode>> =
            ids.map(|id| (id.to_owned(), None)).collect();
        if !wanted.is_empty() {
            find(run, &mut wanted);
        }
        let tokenizer = tokenizer(&run.path.join(TOKENIZER));
        let mut this = Self { of, ..Self::default() };
        for (place, row) in places.iter().zip(rows) {
            let shown = match place.round {
                Some(round) => this.code(run, row, round, &place.file),
                None => this.episode(run, row, &wanted, tokenizer.as_ref()),
            };
            this.episodes.push(shown);
        }
        Ok(this)
    }

    fn episode(
        &mut self,
        run: &RunData,
        evidence: Value,
        wanted: &HashMap<String, Option<Episode>>,
        tokenizer: Option<&ChatTokenizer>,
    ) -> Shown {
        let id = evidence["episode"].as_str().unwrap_or_default();
        let episode = wanted.get(id).and_then(Option::as_ref);
        let turns = episode.zip(tokenizer).map(|(episode, tokenizer)| turns(episode, tokenizer));
        let turns = turns.unwrap_or_default();
        let mut images = Vec::new();
        for image in episode.map(|it| it.images.as_slice()).unwrap_or_default() {
            let digest = image.digest().to_string();
            images.extend(self.picture(digest, || Rgb::from(image).to_png().ok()));
        }
        let Value::Object(mut fields) = evidence else {
            return Shown { run: run.name(), row: Value::Object(Map::new()), turns, images };
        };
        let messages = fields.remove("messages");
        fields.retain(|name, _| SHOWN.contains(&name.as_str()));
        if turns.is_empty() {
            fields.extend(messages.map(|it| ("messages".to_owned(), it)));
        }
        Shown { run: run.name(), row: Value::Object(fields), turns, images }
    }

    fn code(&mut self, run: &RunData, mut row: Value, round: u64, file: &Path) -> Shown {
        let folder = file.parent().unwrap_or(Path::new(""));
        let path = row["image"].as_str().map(|name| folder.join(name));
        let mut images = Vec::new();
        if let Some(path) = path {
            let digest = Digest::of(path.as_os_str().as_encoded_bytes()).to_string();
            // A picture that is not there any more is not shown.
            images.extend(self.picture(digest, || {
                let found = fs::metadata(&path).ok()?;
                let bytes =
                    (found.is_file() && found.len() <= MAX_PICTURE).then(|| fs::read(&path));
                Rgb::decode(&bytes?.ok()?).ok()?.to_png().ok()
            }));
        }
        if let Some(fields) = row.as_object_mut() {
            fields.remove("image");
            fields.insert("round".into(), round.into());
        }
        Shown { run: run.name(), row, turns: Vec::new(), images }
    }

    /// Keeps a picture once, and gives its name.
    fn picture(&mut self, name: String, png: impl FnOnce() -> Option<Vec<u8>>) -> Option<String> {
        if !self.images.contains_key(&name) {
            let url = format!("data:image/png;base64,{}", STANDARD.encode(png()?));
            self.images.insert(name.clone(), url);
        }
        Some(name)
    }
}

/// Where the run's episodes stand; those of rounds on rows, where it has none.
fn places(run: &RunData) -> Result<Vec<Place>, Failure> {
    let mut found = lines(&run.path.join(EVIDENCE), None)?;
    for round in 1.. {
        let file = run.path.join("rounds").join(round.to_string()).join("train.jsonl");
        if !file.is_file() {
            return Ok(found);
        }
        found.extend(lines(&file, Some(round))?);
    }
    Ok(found)
}

fn lines(file: &Path, round: Option<u64>) -> Result<Vec<Place>, Failure> {
    let Ok(true) = fs::metadata(file).map(|it| it.is_file()) else { return Ok(Vec::new()) };
    let failed = |e| Failure::Mistake(format!("{}: {e}; restore the file", file.display()));
    let mut reader = BufReader::new(fs::File::open(file).map_err(failed)?);
    let (mut found, mut offset) = (Vec::new(), 0);
    let mut text = Vec::new();
    loop {
        text.clear();
        let read = std::io::Read::by_ref(&mut reader).take(MAX_LINE).read_until(b'\n', &mut text);
        let read = read.map_err(failed)? as u64;
        // The last line may be on its way.
        if text.last() != Some(&b'\n') {
            return Ok(found);
        }
        found.push(Place { file: file.to_owned(), offset, round });
        offset += read;
    }
}

impl Place {
    fn read(&self) -> Result<Value, Failure> {
        let wrong = |problem: String| {
            let (file, offset) = (self.file.display(), self.offset);
            Failure::Mistake(format!(
                "{file}: the line at byte {offset}: {problem}; restore it, or use --episodes 0"
            ))
        };
        let mut text = Vec::new();
        let read = fs::File::open(&self.file).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.offset))?;
            BufReader::new(file.take(MAX_LINE)).read_until(b'\n', &mut text)
        });
        read.map_err(|error| wrong(error.to_string()))?;
        serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))
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
    let Ok(mut reader) = JournalReader::open(run.path.join(JOURNAL), RunId(id)) else { return };
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

fn turns(episode: &Episode, tokenizer: &ChatTokenizer) -> Vec<Turn> {
    let mut turns = Vec::with_capacity(episode.spans.len() + 1);
    let mut at = 0;
    for span in &episode.spans {
        let start = span.offset as usize;
        let external = episode.tokens.get(at..start).unwrap_or_default();
        let shown = tokenizer.decode(external);
        let mut turn = Turn { shown, ids: external.len(), tokens: Vec::new() };
        let mut pending = Vec::new();
        for (place, (&id, &logp)) in span.ids.iter().zip(&span.logp_raw).enumerate() {
            pending.push(id);
            let text = tokenizer.decode(&pending);
            // A character of several tokens stands at its last one.
            let whole = !text.ends_with('\u{fffd}') || pending.len() == 4;
            let text = if whole || place + 1 == span.ids.len() { text } else { String::new() };
            if whole {
                pending.clear();
            }
            turn.tokens.push(Token(text, id, logp));
        }
        turns.push(turn);
        at = start + span.ids.len();
    }
    let rest = episode.tokens.get(at..).unwrap_or_default();
    if !rest.is_empty() {
        let shown = tokenizer.decode(rest);
        turns.push(Turn { shown, ids: rest.len(), tokens: Vec::new() });
    }
    turns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn episodes_are_spread_over_the_run() {
        assert_eq!(spread(3, 5), [0, 1, 2]);
        assert_eq!(spread(101, 5), [0, 25, 50, 75, 100]);
        assert_eq!(spread(7, 1), [0]);
        assert_eq!(spread(7, 0), [0; 0]);
    }

    #[test]
    fn lines_are_found_and_a_damaged_one_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("evidence.jsonl");
        fs::write(&file, "{\"a\":1}\nno\n{\"on its\"").expect("written");
        let found = lines(&file, None).expect("lines");
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].read().expect("a row")["a"], 1);
        let error = found[1].read().expect_err("damaged").to_string();
        assert!(error.contains("evidence.jsonl: the line at byte 8: expected"), "{error}");
        assert!(lines(&dir.path().join("none"), None).expect("nothing").is_empty());
    }
}
