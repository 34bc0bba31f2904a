//! `learner ppo`: rounds of PPO on rows of sampled codes, from a file or sampled here.

pub mod plan;
pub mod rollouts;
pub mod round;
pub mod sampling;
pub mod state;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args;
use policy::{
    device::DeviceChoice,
    model::{Adapter, Decoder, checkpoint_digests},
    score::Optimizer,
};
use protocol::Digest;
use serde::Serialize;
use serde_json::{Value, json};
use terminal::{Failure, Interrupt, Progress};

use self::{
    plan::PpoPlan,
    rollouts::{RolloutRecord, SampledRound, sample_codes, sample_round},
    round::{Anchors, Place, Policy, PpoUpdate, Round, RoundRows, RoundStats},
    sampling::CodeSampler,
    state::{ADAPTER, PpoState, load_policy, save_policy},
};
use crate::{
    checkpoint::{Tables, TrainingCheckpoint},
    files::RunLock,
    ranks::Ranks,
    recipe::{PpoInputs, PpoSettings, RolloutSettings, Sampled},
    rows::{Accuracy, Example, Images, MetricsLog, peak_memory_gib},
    sft::{load_dtype, plan::images_record, write},
};

/// What the command line adds to the recipe.
#[derive(Clone, Debug, Args)]
pub struct PpoOptions {
    #[allow(missing_docs, reason = "clap would take it for the command's own")]
    #[command(flatten)]
    pub inputs: PpoInputs,
    /// Where to write, instead of the recipe's output_dir.
    #[arg(long)]
    pub output: Option<PathBuf>,
    /// Go on with the run that stopped in the output directory, or start it where there is none.
    #[arg(long)]
    pub resume: bool,
    /// auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Do not write the metrics for TensorBoard too.
    #[arg(long)]
    pub no_tensorboard: bool,
}

/// How a run ended.
#[derive(Clone, Debug, Serialize)]
pub struct PpoSummary {
    /// `completed` or `interrupted`.
    pub status: &'static str,
    /// Updates made, in the last round of several.
    pub updates: u64,
    /// What its last epoch did.
    pub stats: Option<RoundStats>,
    /// Rounds that were sampled here.
    pub rounds: Vec<RolloutRecord>,
    /// Greedy accuracy on the validation rows before and after, where there are any.
    pub accuracy: Option<[Accuracy; 2]>,
    /// Seconds of sampling and training.
    pub seconds: f64,
    /// Most memory of the process, GiB.
    pub peak_memory_gib: Option<f64>,
    /// The directory that was written.
    pub output: PathBuf,
    /// The adapter in it, with the optimizer's state.
    pub adapter: PathBuf,
    /// SHA-256 of that directory as recipes freeze it.
    pub sha256: Digest,
}

/// Trains by a recipe, with the ranks that `meet` finds for a run of this digest.
///
/// # Errors
/// A mistake in recipe, data or paths; a failing device or rank.
pub fn run(
    path: &Path,
    options: &PpoOptions,
    interrupt: &Interrupt,
    progress: &mut Progress,
    meet: impl FnOnce(Digest) -> Result<Ranks, Failure>,
) -> Result<PpoSummary, Failure> {
    let plan = PpoPlan::read(path, &options.inputs, options.output.as_deref(), options.resume)
        .map_err(Failure::mistake)?;
    let mut ranks = meet(plan.identity)?;
    let result = train(plan, options, interrupt, progress, &mut ranks);
    ranks.finish(result)
}

fn train(
    mut plan: PpoPlan,
    options: &PpoOptions,
    interrupt: &Interrupt,
    progress: &mut Progress,
    ranks: &mut Ranks,
) -> Result<PpoSummary, Failure> {
    let images = std::mem::replace(&mut plan.images, Images::none());
    let mut lock = match ranks.leads() {
        true => RunLock::of(&plan.output).map_err(Failure::mistake)?,
        false => None,
    };
    let stopped = match options.resume {
        true => TrainingCheckpoint::read(&plan.output, ranks)?,
        false => None,
    };
    let state = match &stopped {
        None => PpoState {
            settings: plan.identity,
            ranks: ranks.world(),
            rounds: Vec::new(),
            stats: None,
            updates: 0,
            before: None,
            metrics: 0,
        },
        Some(stopped) => {
            let state: PpoState = stopped.record(&plan.output)?;
            state.check(&plan.output, plan.identity, ranks.world())?;
            state
        }
    };
    let device = options.device.resolve().open().map_err(Failure::mistake)?;
    let training = &plan.recipe.training;
    let decoder = (plan.checkpoint.load(&device, load_dtype(training.compute_dtype)))
        .map_err(Failure::mistake)?;
    let (mut adapter, mut optimizer) =
        load_policy(&plan.recipe.adapter.path, &decoder, &training.optimizer)?;
    if let Some(stopped) = &stopped {
        stopped.restore(&mut adapter, &mut optimizer, decoder.device())?;
    }
    let reference =
        Adapter::load_peft(&plan.recipe.reference.path, &decoder).map_err(Failure::mistake)?;
    let mut metrics = None;
    if ranks.leads() {
        fs::create_dir_all(&plan.output)
            .map_err(|e| Failure::Mistake(format!("output_dir {}: {e}", plan.output.display())))?;
        if lock.is_none() {
            lock = RunLock::of(&plan.output).map_err(Failure::mistake)?;
        }
        metrics = Some(MetricsLog::open(&plan.output, state.metrics, !options.no_tensorboard)?);
    }
    let mut run =
        Run { plan: &plan, images, decoder, adapter, optimizer, reference, metrics, state, ranks };
    if stopped.is_none() {
        run.state.before = run.greedy()?;
        if let Some(accuracy) = run.state.before {
            progress.note(&format!("before: greedy {accuracy}"));
            run.evaluated(accuracy)?;
        }
    } else if run.ranks.leads() {
        let PpoState { rounds, updates, .. } = &run.state;
        progress.note(&format!("goes on after {} rounds, {updates} updates", rounds.len()));
    }
    let started = Instant::now();
    let ended = match plan.recipe.rollouts {
        None => run.rows(stopped.as_ref(), interrupt, progress)?,
        Some(rollouts) => run.rounds(rollouts, interrupt, progress)?,
    };
    let seconds = started.elapsed().as_secs_f64();
    let after = run.greedy()?;
    if let Some(accuracy) = after {
        progress.note(&format!("after: greedy {accuracy}"));
        run.evaluated(accuracy)?;
    }
    let here = plan.output.join(ADAPTER);
    // Rank 0 alone has written it.
    let sha256 = match run.ranks.leads() {
        true => checkpoint_digests(&here).map_err(Failure::fault)?.all,
        false => Digest::of(&[]),
    };
    let summary = PpoSummary {
        status: if ended.interrupted { "interrupted" } else { "completed" },
        updates: ended.updates,
        stats: ended.stats,
        rounds: std::mem::take(&mut run.state.rounds),
        accuracy: run.state.before.zip(after).map(|(before, after)| [before, after]),
        seconds,
        peak_memory_gib: peak_memory_gib(),
        output: plan.output.clone(),
        adapter: here,
        sha256,
    };
    if run.ranks.leads() {
        run.write_manifest(&summary)?;
    }
    drop(lock);
    Ok(summary)
}

/// A run in progress.
struct Run<'a> {
    plan: &'a PpoPlan,
    images: Images,
    decoder: Decoder,
    adapter: Adapter,
    optimizer: Optimizer,
    reference: Adapter,
    /// At rank 0.
    metrics: Option<MetricsLog>,
    state: PpoState,
    ranks: &'a mut Ranks,
}

#[derive(Default)]
struct Ended {
    interrupted: bool,
    updates: u64,
    stats: Option<RoundStats>,
}

impl<'a> Run<'a> {
    /// The round of the recipe's rows.
    fn rows(
        &mut self,
        stopped: Option<&TrainingCheckpoint>,
        interrupt: &Interrupt,
        progress: &mut Progress,
    ) -> Result<Ended, Failure> {
        let plan = self.plan;
        let sampled = plan.sampled();
        let (anchors, mut place) = match stopped {
            Some(stopped) => {
                let updates = self.state.updates;
                let place = Place::from_table(updates, &stopped.table("epoch"));
                (Anchors::from_tables(&stopped.table("old"), &stopped.table("reference")), place)
            }
            None => (self.anchors(&plan.examples, &sampled)?, Place::default()),
        };
        let total = self.settings().updates(plan.rows.len());
        progress.start("ppo", total);
        let started = Instant::now();
        self.round(&plan.examples, &sampled, &anchors, &mut place, interrupt, progress, None)?;
        progress.end();
        self.keep(&place, &anchors)?;
        self.save()?;
        let rows = RoundRows { examples: &plan.examples, sampled: &sampled, images: &self.images };
        let stats = RoundStats::new(&place, &anchors, &rows, started.elapsed().as_secs_f64());
        self.write_stats(&plan.output, &stats)?;
        Ok(Ended { interrupted: place.updates < total, updates: place.updates, stats: Some(stats) })
    }

    /// Rounds that are sampled here. One that is interrupted is begun again when the run goes on.
    fn rounds(
        &mut self,
        rollouts: RolloutSettings,
        interrupt: &Interrupt,
        progress: &mut Progress,
    ) -> Result<Ended, Failure> {
        let plan = self.plan;
        let mut sampler = self.sampler()?;
        let mut ended = Ended { stats: self.state.stats, ..Ended::default() };
        let first = self.state.rounds.len() as u64;
        if first == 0 {
            self.keep_round()?;
        }
        progress.start("ppo", u64::from(rollouts.rounds));
        for round in first..u64::from(rollouts.rounds) {
            let started = Instant::now();
            let (adapter, optimizer) = (self.adapter.clone(), self.optimizer.clone());
            sampler.set_policy(&self.adapter)?;
            let (tasks, codes) = sample_codes(plan, &mut sampler, &self.images, round, self.ranks)?;
            let dir = plan.output.join("rounds").join((round + 1).to_string());
            let SampledRound { examples, sampled, record } =
                sample_round(plan, &mut self.images, &codes, &tasks, round, &dir, self.ranks)?;
            let rollout_seconds = started.elapsed().as_secs_f64();
            let anchors = self.anchors(&examples, &sampled)?;
            let mut place = Place::default();
            let what = format!("round {}/{}  ", round + 1, rollouts.rounds);
            let training = Instant::now();
            let round_of = Some((round + 1, what.as_str()));
            self.round(&examples, &sampled, &anchors, &mut place, interrupt, progress, round_of)?;
            if place.updates < self.settings().updates(examples.len()) {
                ended.interrupted = true;
                // What an unfinished round did to the policy is not kept.
                (self.adapter, self.optimizer) = (adapter, optimizer);
                break;
            }
            let rows = RoundRows { examples: &examples, sampled: &sampled, images: &self.images };
            let stats = RoundStats::new(&place, &anchors, &rows, training.elapsed().as_secs_f64());
            self.write_stats(&dir, &stats)?;
            let line = format!(
                "{what}reward {:.4}  malformed {}  pg {:+.4}  kl {:.4}  {:.0} s",
                record.reward,
                record.malformed,
                stats.pg_loss,
                stats.kl,
                started.elapsed().as_secs_f64()
            );
            progress.at(round + 1, &line, "round", &record);
            let step_time = started.elapsed().as_secs_f64();
            let step = self.metrics.as_ref().map_or(0, MetricsLog::updates);
            self.metric(&json!({
                "event": "round", "step": step, "rollouts": record, "stats": stats,
                "step_time": step_time, "rollout_seconds": rollout_seconds,
                "update_seconds": step_time - rollout_seconds,
            }))?;
            ended.updates = place.updates;
            ended.stats = Some(stats);
            self.state.stats = Some(stats);
            self.state.rounds.push(record);
            self.keep_round()?;
            if self.ranks.decided(interrupt.raised())? {
                ended.interrupted = round + 1 < u64::from(rollouts.rounds);
                break;
            }
        }
        progress.end();
        self.save()?;
        if let Some(stats) = &ended.stats {
            self.write_stats(&plan.output, stats)?;
        }
        Ok(ended)
    }

    fn anchors(&mut self, examples: &[Example], sampled: &[Sampled]) -> Result<Anchors, Failure> {
        let rows = RoundRows { examples, sampled, images: &self.images };
        // No gradients: twice the rows fit.
        let batch = 2 * self.plan.recipe.training.per_device_train_batch_size as usize;
        let (adapter, reference) = (&self.adapter, &self.reference);
        Anchors::compute(&self.decoder, adapter, reference, &rows, batch, self.ranks)
    }

    #[allow(clippy::too_many_arguments, reason = "a round's parts, used once each")]
    fn round(
        &mut self,
        examples: &[Example],
        sampled: &[Sampled],
        anchors: &Anchors,
        place: &mut Place,
        interrupt: &Interrupt,
        progress: &Progress,
        round_of: Option<(u64, &str)>,
    ) -> Result<(), Failure> {
        let settings = &self.settings();
        let what = round_of.map_or("", |(_, what)| what);
        let round = Round {
            decoder: &self.decoder,
            rows: RoundRows { examples, sampled, images: &self.images },
            anchors,
            settings,
            seed: self.plan.recipe.seed,
        };
        let (total, begun) = (settings.updates(examples.len()), Instant::now());
        let first = place.updates;
        let earlier = self.metrics.as_ref().map_or(0, |it| it.updates().saturating_sub(first));
        let metrics = &mut self.metrics;
        let per_epoch = settings.updates_per_epoch(examples.len()).max(1);
        let save_steps = u64::from(settings.save_steps);
        let (output, leads) = (&self.plan.output, self.ranks.leads());
        let state = &mut self.state;
        let mut report = |update: &PpoUpdate, policy: Policy<'_>| {
            let each = begun.elapsed().as_secs_f64() / (update.update - first) as f64;
            let eta = each * total.saturating_sub(update.update) as f64;
            let peak = peak_memory_gib();
            let mut record = serde_json::to_value(update).map_err(Failure::fault)?;
            record["seconds_per_update"] = json!(each);
            record["eta_seconds"] = json!(eta);
            record["peak_memory_gib"] = json!(peak);
            if let Some((round, _)) = round_of {
                record["round"] = json!(round);
            }
            if let Some(metrics) = metrics {
                // Updates are counted anew in every round.
                record["step"] = json!(earlier + update.update);
                metrics.append(&record)?;
            }
            let peak = peak.map_or_else(String::new, |it| format!("  peak {it:.1} GiB"));
            let line = format!(
                "{what}update {}/{total}  pg {:+.4}  kl {:.4}  clipped {:.3}  grad {:.3}  \
                 {each:.2} s/update  eta {:.0} min{peak}",
                update.update,
                update.pg_loss,
                update.kl,
                update.clip_frac,
                update.grad_norm,
                eta / 60.0
            );
            if what.is_empty() {
                progress.at(update.update, &line, "update", &record);
            } else {
                progress.record("update", &record);
            }
            let due = update.update.is_multiple_of(per_epoch)
                || (save_steps > 0 && update.update.is_multiple_of(save_steps));
            if round_of.is_none() && due && leads {
                // The end of the round writes its own.
                if update.update < total {
                    keep(output, state, metrics.as_ref(), policy, anchors)?;
                }
            }
            Ok(())
        };
        let (adapter, optimizer) = (&mut self.adapter, &mut self.optimizer);
        round.train(adapter, optimizer, place, interrupt, self.ranks, &mut report)
    }

    /// Greedy accuracy on the validation rows, where there are any.
    fn greedy(&mut self) -> Result<Option<Accuracy>, Failure> {
        let Some((rows, examples)) = &self.plan.valid else { return Ok(None) };
        let mut sampler = self.sampler()?;
        sampler.set_policy(&self.adapter)?;
        let codes: Vec<&str> = rows.iter().map(|row| row.code.as_str()).collect();
        sampler.greedy_accuracy(examples, &self.images, &codes, self.ranks).map(Some)
    }

    fn sampler(&self) -> Result<CodeSampler<'a>, Failure> {
        let plan = self.plan;
        let valid = plan.valid.iter().flat_map(|(_, examples)| examples);
        let longest = plan.examples.iter().chain(valid).map(|it| it.prompt().len()).max();
        CodeSampler::new(&self.decoder, &plan.format, plan.digits, longest.unwrap_or_default())
    }

    /// Writes the adapter for others to use.
    fn save(&self) -> Result<(), Failure> {
        if !self.ranks.leads() {
            return Ok(());
        }
        let base = self.plan.recipe.model.path.to_string_lossy();
        save_policy(&self.plan.output.join(ADAPTER), &self.adapter, &self.optimizer, &base)
    }

    /// Writes what the run goes on from.
    fn keep(&mut self, place: &Place, anchors: &Anchors) -> Result<(), Failure> {
        if !self.ranks.leads() {
            return Ok(());
        }
        let (adapter, optimizer) = (&mut self.adapter, &self.optimizer);
        let policy = Policy { adapter, optimizer, place };
        keep(&self.plan.output, &mut self.state, self.metrics.as_ref(), policy, anchors)
    }

    fn keep_round(&mut self) -> Result<(), Failure> {
        let anchors = Anchors { old: Vec::new(), reference: Vec::new() };
        self.keep(&Place::default(), &anchors)?;
        self.save()
    }

    fn metric(&mut self, record: &Value) -> Result<(), Failure> {
        self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.append(record))
    }

    /// Greedy accuracy on the validation rows was measured.
    fn evaluated(&mut self, accuracy: Accuracy) -> Result<(), Failure> {
        let Some(metrics) = &mut self.metrics else { return Ok(()) };
        metrics.evaluation(&accuracy, metrics.updates())
    }

    /// How a round is trained, with the micro-batches of all ranks as one.
    fn settings(&self) -> PpoSettings {
        self.plan.recipe.training.over_ranks(self.ranks.world())
    }

    fn write_stats(&self, dir: &Path, stats: &RoundStats) -> Result<(), Failure> {
        if !self.ranks.leads() {
            return Ok(());
        }
        let line = serde_json::to_string(stats).map_err(Failure::fault)?;
        write(&dir.join("stats.json"), format!("{line}\n").as_bytes())
    }

    fn write_manifest(&self, summary: &PpoSummary) -> Result<(), Failure> {
        let recipe = &self.plan.recipe;
        let manifest = json!({
            "schema_version": 1,
            "recipe_sha256": recipe.sha256,
            "settings": recipe.settings(),
            "images": images_record(&self.images),
            "result": {
                "status": summary.status, "updates": summary.updates, "stats": summary.stats,
                "rounds": summary.rounds, "accuracy": summary.accuracy, "sha256": summary.sha256,
                "seconds": summary.seconds, "peak_memory_gib": summary.peak_memory_gib,
            },
            "version": env!("CARGO_PKG_VERSION"),
        });
        write(&self.plan.output.join("manifest.json"), format!("{manifest:#}\n").as_bytes())
    }
}

/// Writes what a run goes on from: with the anchors of its round, where it stops inside of one.
fn keep(
    output: &Path,
    state: &mut PpoState,
    metrics: Option<&MetricsLog>,
    Policy { adapter, optimizer, place }: Policy<'_>,
    anchors: &Anchors,
) -> Result<(), Failure> {
    state.updates = place.updates;
    state.metrics = metrics.map_or(Ok(0), MetricsLog::bytes)?;
    let wide = |rows: &[Vec<f32>]| {
        rows.iter().map(|row| row.iter().copied().map(f64::from).collect()).collect()
    };
    let tables = Tables::from([
        ("epoch", place.epoch.iter().map(|micro| micro.to_vec()).collect()),
        ("old", wide(&anchors.old)),
        ("reference", wide(&anchors.reference)),
    ]);
    TrainingCheckpoint::of(state, adapter, optimizer, tables)?.write(output)
}
