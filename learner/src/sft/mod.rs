//! `learner sft`: supervised fine-tuning on conversations or on rows of codes, of an adapter or of
//! every weight.

pub mod conversation;
pub mod data;
pub mod plan;
mod save;
pub mod train;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use policy::{
    device::DeviceChoice,
    model::{Adapter, Decoder, LoadDtype},
    score::Optimizer,
};
use protocol::{ComputeDtype, Digest};
use serde::{Deserialize, Serialize};
use serde_json::json;
use terminal::{Failure, Interrupt, Progress};

use self::{
    data::Data,
    plan::{SftPlan, images_record},
    save::save,
    train::{
        Computation, Student, epoch_order, supervised_gradients, supervised_loss, supervised_step,
    },
};
use crate::{
    checkpoint::{Tables, TrainingCheckpoint, check_ranks, check_settings},
    files::RunLock,
    ranks::Ranks,
    recipe::{SftRecipe, Trainable},
    rows::{Accuracy, Example, MetricsLog, peak_memory_gib, teacher_forced_accuracy},
    train::update::adamw,
};

/// What the command line adds to the recipe.
#[derive(Clone, Debug)]
pub struct SftOptions {
    /// Where to write; the recipe's `output_dir` otherwise.
    pub output: Option<PathBuf>,
    /// Go on with the run that stopped there, or start it where there is none.
    pub resume: bool,
    /// Where to compute.
    pub device: DeviceChoice,
    /// Write the metrics for TensorBoard too.
    pub tensorboard: bool,
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
    /// Loss on the validation conversations before and after, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid: Option<[f64; 2]>,
    /// Accuracy on the validation rows before and after, where there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<[Accuracy; 2]>,
    /// Seconds of training.
    pub seconds: f64,
    /// Most memory of the process, GiB.
    pub peak_memory_gib: Option<f64>,
    /// The directory that was written.
    pub output: PathBuf,
    /// The checkpoint or adapter in it.
    pub checkpoint: PathBuf,
    /// SHA-256 of that directory as recipes freeze it.
    pub sha256: Digest,
}

#[derive(Serialize)]
struct Update {
    update: u64,
    loss: f64,
    grad_norm: f64,
    learning_rate: f64,
    tokens_per_second: f64,
    seconds_per_update: f64,
    eta_seconds: f64,
    peak_memory_gib: Option<f64>,
}

/// `valid.json` of rows.
#[derive(Serialize)]
struct Valid {
    epoch: u64,
    updates: u64,
    #[serde(flatten)]
    accuracy: Accuracy,
}

/// Trains by a recipe, with the ranks that `meet` finds for a run of this digest.
///
/// # Errors
/// A mistake in recipe, data or paths; a failing device or rank.
pub fn run(
    path: &Path,
    options: &SftOptions,
    interrupt: &Interrupt,
    progress: &mut Progress,
    meet: impl FnOnce(Digest) -> Result<Ranks, Failure>,
) -> Result<SftSummary, Failure> {
    let plan =
        SftPlan::read(path, options.output.as_deref(), options.resume).map_err(Failure::mistake)?;
    let mut ranks = meet(plan.identity())?;
    let result = train(&plan, options, interrupt, progress, &mut ranks);
    ranks.finish(result)
}

fn train(
    plan: &SftPlan,
    options: &SftOptions,
    interrupt: &Interrupt,
    progress: &mut Progress,
    ranks: &mut Ranks,
) -> Result<SftSummary, Failure> {
    let SftPlan { recipe, output, checkpoint, data, .. } = plan;
    let device = options.device.resolve().open().map_err(Failure::mistake)?;
    let dtype = load_dtype(recipe.training.compute_dtype);
    let decoder = checkpoint.load(&device, dtype).map_err(Failure::mistake)?;
    let student = match recipe.trainable {
        Trainable::All => Student::Base,
        Trainable::Lora => {
            let adapter = Adapter::init(&recipe.lora.to_config(), &decoder, recipe.seed);
            Student::Adapter(Box::new(adapter.map_err(Failure::mistake)?))
        }
    };
    let mut _lock = None;
    if ranks.leads() {
        fs::create_dir_all(output)
            .map_err(|e| Failure::Mistake(format!("output_dir {}: {e}", output.display())))?;
        _lock = RunLock::of(output).map_err(Failure::mistake)?;
    }
    let stopped = match options.resume {
        true => TrainingCheckpoint::read(output, ranks)?,
        false => None,
    };
    let state = match &stopped {
        None => SftState::new(plan.identity(), ranks.world()),
        Some(stopped) => {
            let state: SftState = stopped.record(output)?;
            state.check(output, plan.identity(), ranks.world())?;
            state
        }
    };
    let optimizer = adamw(&recipe.training.optimizer);
    let metrics = match ranks.leads() {
        true => Some(MetricsLog::open(output, state.metrics, options.tensorboard)?),
        false => None,
    };
    let mut run = Run { recipe, data, output, decoder, student, optimizer, state, metrics, ranks };
    match &stopped {
        Some(stopped) => run.restore(stopped, progress)?,
        None => {
            run.state.before = run.measure()?;
            run.evaluated(run.state.before)?;
        }
    }
    let before = run.state.before;
    if let (Measured::Accuracy(accuracy), None) = (before, &stopped) {
        progress.note(&format!("before: {accuracy}"));
    }
    let started = Instant::now();
    let trained = run.train(interrupt, progress)?;
    let seconds = started.elapsed().as_secs_f64();
    let after = match trained.measured {
        Some(measured) => measured,
        None => {
            let measured = run.measure()?;
            run.evaluated(measured)?;
            measured
        }
    };
    let leads = run.ranks.leads();
    let (checkpoint, sha256) = match leads {
        true => run.save()?,
        false => (output.clone(), Digest::of(&[])),
    };
    let summary = SftSummary {
        status: if trained.interrupted { "interrupted" } else { "completed" },
        updates: run.state.updates,
        rows: run.state.rows,
        loss: run.state.loss,
        valid: before.loss().zip(after.loss()).map(|(before, after)| [before, after]),
        accuracy: before.accuracy().zip(after.accuracy()).map(|(before, after)| [before, after]),
        seconds,
        peak_memory_gib: peak_memory_gib(),
        checkpoint,
        sha256,
        output: output.clone(),
    };
    if !leads {
        return Ok(summary);
    }
    let manifest = json!({
        "schema_version": 1,
        "recipe_sha256": recipe.sha256,
        "settings": recipe.settings(),
        "images": images_record(&data.images),
        "result": {
            "status": summary.status, "updates": summary.updates, "rows": summary.rows,
            "loss": summary.loss, "valid": summary.valid, "accuracy": summary.accuracy,
            "sha256": summary.sha256, "seconds": summary.seconds,
            "peak_memory_gib": summary.peak_memory_gib,
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

/// The type in which a checkpoint's weights are loaded.
pub(crate) fn load_dtype(dtype: ComputeDtype) -> LoadDtype {
    match dtype {
        ComputeDtype::F32 => LoadDtype::F32,
        ComputeDtype::Bf16 | ComputeDtype::F16 => LoadDtype::File,
    }
}

/// What the validation rows say.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Measured {
    Nothing,
    Loss(f64),
    Accuracy(Accuracy),
}

impl Measured {
    fn loss(self) -> Option<f64> {
        if let Self::Loss(loss) = self { Some(loss) } else { None }
    }

    fn accuracy(self) -> Option<Accuracy> {
        if let Self::Accuracy(accuracy) = self { Some(accuracy) } else { None }
    }
}

/// A run in progress.
struct Run<'a> {
    recipe: &'a SftRecipe,
    data: &'a Data,
    output: &'a Path,
    decoder: Decoder,
    student: Student,
    optimizer: Optimizer,
    state: SftState,
    /// At rank 0.
    metrics: Option<MetricsLog>,
    ranks: &'a mut Ranks,
}

/// The counters of a run's checkpoint.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SftState {
    /// The digest of what decides the run.
    settings: Digest,
    /// Ranks, which decide what a micro-batch is.
    ranks: usize,
    /// Updates made.
    updates: u64,
    /// Rows learned from, each epoch counted.
    rows: u64,
    /// Mean loss of about the last ten updates.
    loss: f64,
    /// What the validation rows said before the run.
    before: Measured,
    /// Bytes of `metrics.jsonl`.
    metrics: u64,
}

impl SftState {
    fn new(settings: Digest, ranks: usize) -> Self {
        let before = Measured::Nothing;
        Self { settings, ranks, updates: 0, rows: 0, loss: 0.0, before, metrics: 0 }
    }

    /// Refuses to go on with another recipe, or on other ranks.
    fn check(&self, output: &Path, settings: Digest, ranks: usize) -> Result<(), Failure> {
        check_settings(output, self.settings == settings)?;
        check_ranks(output, self.ranks, ranks)
    }
}

struct Trained {
    interrupted: bool,
    /// After the last update, where the epoch was measured.
    measured: Option<Measured>,
}

impl Run<'_> {
    fn measure(&mut self) -> Result<Measured, Failure> {
        let Some(valid) = &self.data.valid else { return Ok(Measured::Nothing) };
        let batch = self.recipe.training.per_device_train_batch_size as usize;
        let (decoder, images, ranks) = (&self.decoder, &self.data.images, &mut *self.ranks);
        match self.data.digits {
            None => supervised_loss(decoder, &self.student, valid, images, batch, ranks)
                .map(Measured::Loss),
            Some(digits) => {
                let adapter = self.student.adapter();
                teacher_forced_accuracy(decoder, adapter, valid, images, digits, batch, ranks)
                    .map(Measured::Accuracy)
            }
        }
    }

    fn restore(
        &mut self,
        stopped: &TrainingCheckpoint,
        progress: &Progress,
    ) -> Result<(), Failure> {
        let device = self.decoder.device().clone();
        match &mut self.student {
            Student::Adapter(adapter) => {
                stopped.restore(&mut **adapter, &mut self.optimizer, &device)?;
            }
            Student::Base => stopped.restore(&mut self.decoder, &mut self.optimizer, &device)?,
        }
        progress.note(&format!("goes on after {} updates", self.state.updates));
        Ok(())
    }

    /// Writes what the validation rows say into the metrics.
    fn evaluated(&mut self, measured: Measured) -> Result<(), Failure> {
        let evaluation = match measured {
            Measured::Nothing => return Ok(()),
            Measured::Loss(loss) => json!({"loss": loss}),
            Measured::Accuracy(accuracy) => json!(accuracy),
        };
        let updates = self.state.updates;
        self.metrics.as_mut().map_or(Ok(()), |it| it.evaluation(&evaluation, updates))
    }

    /// Writes what the run goes on from.
    fn keep(&mut self) -> Result<(), Failure> {
        let Some(metrics) = &self.metrics else { return Ok(()) };
        self.state.metrics = metrics.bytes()?;
        let (optimizer, tables) = (&self.optimizer, Tables::new());
        let checkpoint = match &mut self.student {
            Student::Adapter(adapter) => {
                TrainingCheckpoint::of(&self.state, &mut **adapter, optimizer, tables)
            }
            Student::Base => {
                TrainingCheckpoint::of(&self.state, &mut self.decoder, optimizer, tables)
            }
        };
        checkpoint?.write(self.output)
    }

    fn save(&self) -> Result<(PathBuf, Digest), Failure> {
        save(self.recipe, &self.decoder, &self.student, self.output).map_err(Failure::fault)
    }

    fn train(
        &mut self,
        interrupt: &Interrupt,
        progress: &mut Progress,
    ) -> Result<Trained, Failure> {
        let settings = &self.recipe.training;
        let data = self.data;
        let over_ranks = settings.over_ranks(self.ranks.world());
        let total = over_ranks.updates(data.train.len());
        let how = Computation {
            micro_batch: settings.per_device_train_batch_size as usize,
            checkpointing: settings.gradient_checkpointing,
        };
        let batch = (over_ranks.per_device_train_batch_size as usize)
            .saturating_mul(settings.gradient_accumulation_steps as usize);
        let mut trained = Trained { interrupted: false, measured: None };
        progress.start("sft", total);
        let (begun, first) = (Instant::now(), self.state.updates);
        let per_epoch = over_ranks.updates_per_epoch(data.train.len()).max(1);
        let (first_epoch, mut done) = (first / per_epoch, first % per_epoch);
        for epoch in first_epoch..u64::from(settings.num_train_epochs) {
            if self.state.updates >= total {
                break;
            }
            let order = epoch_order(self.recipe.seed, epoch, data.train.len());
            for chosen in order.chunks(batch).skip(std::mem::take(&mut done) as usize) {
                trained.interrupted = self.ranks.decided(interrupt.raised())?;
                if self.state.updates >= total || trained.interrupted {
                    break;
                }
                let chosen: Vec<&Example> = chosen.iter().map(|row| &data.train[*row]).collect();
                let made = self.state.updates;
                let learning_rate = settings.optimizer.learning_rate_at(made, total);
                let started = Instant::now();
                let (decoder, student) = (&mut self.decoder, &mut self.student);
                let slope =
                    supervised_gradients(decoder, student, &chosen, &data.images, how, self.ranks)?;
                let report =
                    supervised_step(decoder, student, &mut self.optimizer, learning_rate, slope)?;
                if self.ranks.world() > 1 {
                    self.ranks.agree("adapter", self.student.digest(&report)?)?;
                }
                let state = &mut self.state;
                state.updates += 1;
                state.rows += chosen.len() as u64;
                trained.measured = None;
                // The losses of about the last ten updates.
                let share = 1.0 / state.updates.min(10) as f64;
                state.loss += share * (report.loss - state.loss);
                let updates = state.updates;
                let each = begun.elapsed().as_secs_f64() / (updates - first) as f64;
                let record = Update {
                    update: updates,
                    loss: report.loss,
                    grad_norm: report.grad_norm,
                    learning_rate,
                    tokens_per_second: report.tokens as f64 / started.elapsed().as_secs_f64(),
                    seconds_per_update: each,
                    eta_seconds: each * (total - updates) as f64,
                    peak_memory_gib: peak_memory_gib(),
                };
                if let Some(metrics) = &mut self.metrics {
                    metrics.append(&record)?;
                }
                progress.at(updates, &record.line(total), "update", &record);
                let save_steps = u64::from(settings.save_steps);
                if save_steps > 0 && updates.is_multiple_of(save_steps) {
                    self.keep()?;
                }
            }
            // The cut-off epoch of a run that is bounded by updates counts as one.
            let ended = self.state.updates >= total || trained.interrupted;
            if data.digits.is_some() && trained.measured.is_none() {
                trained.measured = Some(self.end_epoch(epoch + 1, progress)?);
            }
            self.keep()?;
            if ended {
                break;
            }
        }
        progress.end();
        Ok(trained)
    }

    /// Rows are measured, and the policy is kept, after every epoch.
    fn end_epoch(&mut self, epoch: u64, progress: &Progress) -> Result<Measured, Failure> {
        let measured = self.measure()?;
        if !self.ranks.leads() {
            return Ok(measured);
        }
        self.evaluated(measured)?;
        self.save()?;
        if let Measured::Accuracy(accuracy) = measured {
            let valid = Valid { epoch, updates: self.state.updates, accuracy };
            progress.note(&format!("epoch {epoch}: {accuracy}"));
            progress.record("valid", &valid);
            let line = serde_json::to_string(&valid).map_err(Failure::fault)?;
            write(&self.output.join("valid.json"), format!("{line}\n").as_bytes())?;
        }
        Ok(measured)
    }
}

impl Update {
    fn line(&self, total: u64) -> String {
        let peak =
            self.peak_memory_gib.map_or_else(String::new, |it| format!("  peak {it:.1} GiB"));
        format!(
            "update {}/{total}  loss {:.4}  grad {:.3}  {:.0} tok/s  {:.2} s/update  eta {:.0} min{peak}",
            self.update,
            self.loss,
            self.grad_norm,
            self.tokens_per_second,
            self.seconds_per_update,
            self.eta_seconds / 60.0,
        )
    }
}

fn io_fault(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Fault(format!("{}: {error}", path.display()))
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    fs::write(path, bytes).map_err(|e| io_fault(path, &e))
}
