//! `learner sft`: supervised fine-tuning on conversations, of an adapter or of every weight.

pub mod conversation;
pub mod train;

use std::{
    collections::HashMap,
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    time::Instant,
};

use policy::{
    chat::{ChatFormat, ChatOptions},
    device::DeviceChoice,
    model::{Adapter, Checkpoint, Decoder, LoadDtype, ModelError},
    score::ScoreRow,
};
use protocol::ComputeDtype;
use serde::Serialize;
use serde_json::json;
use terminal::{Failure, Interrupt, Progress};

use self::{
    conversation::supervised_row,
    train::{Student, epoch_order, supervised_loss, supervised_update},
};
use crate::{
    recipe::{Conversation, Frozen, SftRecipe, Trainable, check_output, read_conversations},
    train::update::adamw,
};

/// What the command line adds to the recipe.
#[derive(Clone, Debug)]
pub struct SftOptions {
    /// Where to write; the recipe's `output_dir` otherwise.
    pub output: Option<PathBuf>,
    /// Where to compute.
    pub device: DeviceChoice,
}

/// How a supervised run ended.
#[derive(Clone, Debug, Serialize)]
pub struct SftSummary {
    /// `completed` or `interrupted`.
    pub status: &'static str,
    /// Updates made.
    pub updates: u64,
    /// Rows learned from, each epoch counted.
    pub rows: u64,
    /// Mean loss of the last updates, nats a token.
    pub loss: f64,
    /// Loss on the validation rows before and after, where there are any.
    pub valid: Option<[f64; 2]>,
    /// Seconds of training.
    pub seconds: f64,
    /// The directory that was written.
    pub output: PathBuf,
    /// The checkpoint or adapter in it.
    pub checkpoint: PathBuf,
    /// SHA-256 of the checkpoint directory as recipes freeze it; of the adapter's file for adapters.
    pub sha256: protocol::Digest,
}

#[derive(Serialize)]
struct Update {
    update: u64,
    loss: f64,
    grad_norm: f64,
    learning_rate: f64,
    tokens_per_second: f64,
}

/// Trains by a recipe.
///
/// # Errors
/// A mistake in recipe, data or paths; a failing device.
pub fn run(
    path: &Path,
    options: &SftOptions,
    interrupt: &Interrupt,
    progress: &mut Progress,
) -> Result<SftSummary, Failure> {
    let recipe = SftRecipe::read(path).map_err(Failure::mistake)?;
    recipe.model.verify_model().map_err(Failure::mistake)?;
    let output = options.output.as_ref().or(recipe.output_dir.as_ref()).ok_or_else(|| {
        Failure::Mistake("output_dir is missing: set it in the recipe or with --output DIR".into())
    })?;
    let inputs: Vec<&Frozen> =
        [&recipe.model, &recipe.dataset].into_iter().chain(&recipe.valid).collect();
    let output = check_output(output, &inputs).map_err(Failure::mistake)?;
    let mut formats = Formats::new(&recipe);
    let rows = formats.rows(&recipe, &recipe.dataset)?;
    let valid = match &recipe.valid {
        Some(file) => Some(formats.rows(&recipe, file)?),
        None => None,
    };
    let device = options.device.resolve().open().map_err(Failure::mistake)?;
    let dtype = match recipe.training.compute_dtype {
        ComputeDtype::F32 => LoadDtype::F32,
        ComputeDtype::Bf16 | ComputeDtype::F16 => LoadDtype::File,
    };
    let checkpoint = Checkpoint::open(&recipe.model.path).map_err(Failure::mistake)?;
    let mut decoder = checkpoint.load(&device, dtype).map_err(Failure::mistake)?;
    let mut student = match recipe.trainable {
        Trainable::All => Student::Base,
        Trainable::Lora => {
            let adapter = Adapter::init(&recipe.lora.to_config(), &decoder, recipe.seed);
            Student::Adapter(Box::new(adapter.map_err(Failure::mistake)?))
        }
    };
    fs::create_dir_all(&output)
        .map_err(|e| Failure::Mistake(format!("output_dir {}: {e}", output.display())))?;
    let batch = recipe.training.per_device_train_batch_size as usize;
    let measure = |decoder: &Decoder, student: &Student| -> Result<Option<f64>, Failure> {
        let loss = valid.as_ref().map(|rows| supervised_loss(decoder, student, rows, batch));
        loss.transpose().map_err(Failure::fault)
    };
    let before = measure(&decoder, &student)?;
    let started = Instant::now();
    let trained = train(&recipe, &rows, &mut decoder, &mut student, &output, interrupt, progress)?;
    let seconds = started.elapsed().as_secs_f64();
    let after = measure(&decoder, &student)?;
    let (checkpoint, sha256) =
        save(&recipe, &decoder, &student, &output).map_err(Failure::fault)?;
    let summary = SftSummary {
        status: if trained.interrupted { "interrupted" } else { "completed" },
        updates: trained.updates,
        rows: trained.rows,
        loss: trained.loss,
        valid: before.zip(after).map(|(before, after)| [before, after]),
        seconds,
        checkpoint,
        sha256,
        output: output.clone(),
    };
    let manifest = json!({
        "schema_version": 1,
        "recipe_sha256": recipe.sha256,
        "settings": recipe.settings(),
        "result": {
            "status": summary.status, "updates": summary.updates, "rows": summary.rows,
            "loss": summary.loss, "valid": summary.valid, "sha256": summary.sha256,
            "seconds": summary.seconds,
        },
        "version": env!("CARGO_PKG_VERSION"),
    });
    write(&output.join("manifest.json"), format!("{manifest:#}\n").as_bytes())?;
    if let Some([before, after]) = summary.valid {
        let valid = json!({"loss_before": before, "loss_after": after});
        write(&output.join("valid.json"), format!("{valid:#}\n").as_bytes())?;
    }
    Ok(summary)
}

struct Trained {
    updates: u64,
    rows: u64,
    loss: f64,
    interrupted: bool,
}

fn train(
    recipe: &SftRecipe,
    rows: &[ScoreRow],
    decoder: &mut Decoder,
    student: &mut Student,
    output: &Path,
    interrupt: &Interrupt,
    progress: &mut Progress,
) -> Result<Trained, Failure> {
    let settings = &recipe.training;
    let total = settings.updates(rows.len());
    let micro = settings.per_device_train_batch_size as usize;
    let batch = micro.saturating_mul(settings.gradient_accumulation_steps as usize);
    let mut optimizer = adamw(&settings.optimizer);
    let path = output.join("metrics.jsonl");
    let mut metrics = fs::File::create(&path).map_err(|e| io_fault(&path, &e))?;
    let mut trained = Trained { updates: 0, rows: 0, loss: 0.0, interrupted: false };
    progress.start("sft", total);
    'training: for epoch in 0..u64::from(settings.num_train_epochs) {
        let order = epoch_order(recipe.seed, epoch, rows.len());
        for chosen in order.chunks(batch) {
            if trained.updates >= total {
                break 'training;
            }
            if interrupt.raised() {
                trained.interrupted = true;
                break 'training;
            }
            let micro_batches: Vec<Vec<&ScoreRow>> = chosen
                .chunks(micro)
                .map(|chosen| chosen.iter().map(|row| &rows[*row]).collect())
                .collect();
            let learning_rate = settings.optimizer.learning_rate_at(trained.updates, total);
            let started = Instant::now();
            let report = supervised_update(
                decoder,
                student,
                &mut optimizer,
                learning_rate,
                &micro_batches,
                settings.gradient_checkpointing,
            )
            .map_err(Failure::fault)?;
            trained.updates += 1;
            trained.rows += chosen.len() as u64;
            // The losses of about the last ten updates.
            let share = 1.0 / trained.updates.min(10) as f64;
            trained.loss += share * (report.loss - trained.loss);
            let record = Update {
                update: trained.updates,
                loss: report.loss,
                grad_norm: report.grad_norm,
                learning_rate,
                tokens_per_second: report.tokens as f64 / started.elapsed().as_secs_f64(),
            };
            let line = serde_json::to_string(&record).map_err(Failure::fault)?;
            writeln!(metrics, "{line}").map_err(|e| io_fault(&path, &e))?;
            let text = format!(
                "update {}/{total}  loss {:.4}  grad {:.3}  {:.0} tok/s",
                trained.updates, report.loss, report.grad_norm, record.tokens_per_second
            );
            progress.at(trained.updates, &text, "update", &record);
        }
    }
    progress.end();
    Ok(trained)
}

/// One chat format a set of tools, as rows bring their own.
struct Formats {
    model: PathBuf,
    options: ChatOptions,
    by_tools: HashMap<String, ChatFormat>,
}

impl Formats {
    fn new(recipe: &SftRecipe) -> Self {
        let options =
            ChatOptions { kwargs: recipe.chat_template_kwargs.clone(), ..ChatOptions::default() };
        Self { model: recipe.model.path.clone(), options, by_tools: HashMap::new() }
    }

    fn rows(&mut self, recipe: &SftRecipe, file: &Frozen) -> Result<Vec<ScoreRow>, Failure> {
        let conversations = read_conversations(file).map_err(Failure::mistake)?;
        let longest = recipe.training.max_length as usize;
        let mut rows = Vec::with_capacity(conversations.len());
        for (index, conversation) in conversations.iter().enumerate() {
            let at = |problem: String| {
                let name = conversation.id.as_deref().unwrap_or("without id");
                let path = file.path.display();
                Failure::Mistake(format!("{path}, row {} ({name}): {problem}", index + 1))
            };
            let format = self.format(conversation).map_err(at)?;
            let row =
                supervised_row(format, &conversation.messages).map_err(|e| at(e.to_string()))?;
            if row.ids.len() > longest {
                return Err(at(format!(
                    "{} ids are more than training.max_length ({longest}); raise it or shorten the row",
                    row.ids.len()
                )));
            }
            rows.push(row);
        }
        Ok(rows)
    }

    fn format(&mut self, conversation: &Conversation) -> Result<&ChatFormat, String> {
        let key = serde_json::Value::from(conversation.tools.clone()).to_string();
        if !self.by_tools.contains_key(&key) {
            let options = ChatOptions { tools: conversation.tools.clone(), ..self.options.clone() };
            let format = ChatFormat::load(&self.model, options).map_err(|e| e.to_string())?;
            self.by_tools.insert(key.clone(), format);
        }
        self.by_tools.get(&key).ok_or_else(|| "no chat format".into())
    }
}

/// Writes the adapter, or a whole checkpoint: the weights anew, everything else as it was.
fn save(
    recipe: &SftRecipe,
    decoder: &Decoder,
    student: &Student,
    output: &Path,
) -> Result<(PathBuf, protocol::Digest), SaveError> {
    if let Student::Adapter(adapter) = student {
        let dir = output.join("adapter");
        adapter.save_peft(&dir, &recipe.model.path.to_string_lossy())?;
        return Ok((dir, protocol::Digest::of(&adapter.to_safetensors()?)));
    }
    let dir = output.join("checkpoint");
    fs::create_dir_all(&dir)?;
    for entry in fs::read_dir(&recipe.model.path)? {
        let entry = entry?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        // Old weights must not stand beside the new ones.
        let weights = text.ends_with(".safetensors") || text.ends_with(".safetensors.index.json");
        if entry.file_type()?.is_file() && !weights && !text.starts_with('.') {
            fs::copy(entry.path(), dir.join(name))?;
        }
    }
    decoder.save_weights(&dir.join("model.safetensors"))?;
    let digest = policy::model::checkpoint_digests(&dir)?.all;
    Ok((dir, digest))
}

/// What was trained could not be saved.
#[derive(Debug, thiserror::Error)]
enum SaveError {
    #[error("the checkpoint cannot be written: {0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Model(#[from] ModelError),
}

fn io_fault(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Fault(format!("{}: {error}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    fs::write(path, bytes).map_err(|e| io_fault(path, &e))
}
