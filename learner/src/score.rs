//! `learner score`: log-probabilities of given ids or conversations, as JSON lines.

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
};

use policy::{
    chat::{ChatFormat, ChatOptions},
    device::DeviceChoice,
    model::{Adapter, Checkpoint, Decoder, LoadDtype},
    score::{ScoreBatch, ScoreConfig, ScoreRow, log_probs},
};
use serde_json::{Map, Value, json};
use terminal::Failure;

use crate::sft::conversation::supervised_row;

/// What to score.
#[derive(Clone, Debug)]
pub struct ScoreOptions {
    /// The model directory.
    pub model: PathBuf,
    /// A PEFT adapter directory.
    pub adapter: Option<PathBuf>,
    /// JSON lines: `{"ids": [...]}` scores every id after the first, `{"ids": [...], "from": n}` those
    /// from index n on, `{"messages": [...], "tools": [...]}` the assistant turns.
    pub data: PathBuf,
    /// Where to compute.
    pub device: DeviceChoice,
    /// Divides the logits.
    pub temperature: f32,
    /// Variables for the chat template.
    pub kwargs: Map<String, Value>,
}

/// Scores each row and prints `{"row", "id"?, "ids", "positions", "log_probs", "sum"}`.
///
/// # Errors
/// A mistake in the arguments or in a row, by line.
pub fn run(options: &ScoreOptions) -> Result<(), Failure> {
    let device = options.device.resolve().open().map_err(Failure::mistake)?;
    let checkpoint = Checkpoint::open(&options.model).map_err(Failure::mistake)?;
    let decoder = checkpoint.load(&device, LoadDtype::F32).map_err(Failure::mistake)?;
    let adapter = match &options.adapter {
        Some(dir) => Some(Adapter::load_peft(dir, &decoder).map_err(Failure::mistake)?),
        None => None,
    };
    let config = ScoreConfig { temperature: options.temperature, ..ScoreConfig::default() };
    let path = &options.data;
    let file = std::fs::File::open(path).map_err(|e| {
        Failure::Mistake(format!("--data {}: {e}; name a file of JSON lines", path.display()))
    })?;
    let mut formats = HashMap::new();
    let mut stdout = std::io::stdout().lock();
    for (number, line) in BufReader::new(file).lines().enumerate() {
        let at = |problem: String| at(path, number, &problem);
        let line = line.map_err(|e| at(e.to_string()))?;
        if line.trim().is_empty() {
            continue;
        }
        let value: Value = serde_json::from_str(&line)
            .map_err(|e| at(format!("{e}; write one JSON object a line")))?;
        let row = row(&value, options, &mut formats).map_err(at)?;
        let scored = score(&decoder, adapter.as_ref(), &row, &config).map_err(at)?;
        let positions: Vec<usize> =
            row.scored.iter().enumerate().filter(|(_, it)| **it).map(|(at, _)| at).collect();
        let sum: f64 = scored.iter().map(|logp| f64::from(*logp)).sum();
        let mut record = json!({
            "row": number + 1, "ids": row.ids, "positions": positions, "log_probs": scored,
            "sum": sum,
        });
        if let Some(id) = value.get("id") {
            record["id"] = id.clone();
        }
        // A reader that has seen enough is no fault.
        if writeln!(stdout, "{record}").is_err() {
            return Ok(());
        }
    }
    Ok(())
}

fn at(path: &Path, number: usize, problem: &str) -> Failure {
    Failure::Mistake(format!("{}, line {}: {problem}", path.display(), number + 1))
}

fn row(
    value: &Value,
    options: &ScoreOptions,
    formats: &mut HashMap<String, ChatFormat>,
) -> Result<ScoreRow, String> {
    const KEYS: [&str; 5] = ["id", "ids", "from", "messages", "tools"];
    let object = value.as_object().ok_or("a row is an object")?;
    if let Some(key) = object.keys().find(|key| !KEYS.contains(&key.as_str())) {
        return Err(format!("unknown key {key:?}; a row has {}", KEYS.join(", ")));
    }
    if object.contains_key("messages")
        && (object.contains_key("ids") || object.contains_key("from"))
    {
        return Err("give `ids` (and `from`) or `messages` (and `tools`), not both".into());
    }
    if let Some(Value::Array(messages)) = value.get("messages") {
        let tools = match value.get("tools") {
            None => Vec::new(),
            Some(Value::Array(tools)) => tools.clone(),
            Some(_) => return Err("`tools` must be a list".into()),
        };
        let key = Value::from(tools.clone()).to_string();
        if !formats.contains_key(&key) {
            let kwargs = options.kwargs.clone();
            let chat = ChatOptions { tools, kwargs, ..ChatOptions::default() };
            let format = ChatFormat::load(&options.model, chat).map_err(|e| e.to_string())?;
            formats.insert(key.clone(), format);
        }
        let format = formats.get(&key).ok_or("no chat format")?;
        return supervised_row(format, messages).map_err(|e| e.to_string());
    }
    let Some(Value::Array(ids)) = value.get("ids") else {
        return Err("needs a list `ids` or a list `messages`".into());
    };
    let ids: Option<Vec<u32>> =
        ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect();
    let ids = ids.ok_or("`ids` must be a list of token ids")?;
    let from = match value.get("from") {
        None => 1,
        Some(from) => from.as_u64().and_then(|it| usize::try_from(it).ok()).unwrap_or(0),
    };
    if ids.len() < 2 || from == 0 || from >= ids.len() {
        return Err(
            "nothing to score: `from` must be at least 1 and below the number of ids".into()
        );
    }
    let scored = (0..ids.len()).map(|position| position >= from).collect();
    Ok(ScoreRow { ids, scored, ..ScoreRow::default() })
}

fn score(
    decoder: &Decoder,
    adapter: Option<&Adapter>,
    row: &ScoreRow,
    config: &ScoreConfig,
) -> Result<Vec<f32>, String> {
    let batch = ScoreBatch { rows: vec![row.clone()], ..ScoreBatch::default() };
    let scores = log_probs(decoder, adapter, &batch, config).map_err(|e| e.to_string())?;
    scores.log_probs.into_iter().next().ok_or_else(|| "no scores".into())
}
