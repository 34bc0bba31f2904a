//! `learner train` and `learner eval`: from a plan to the last table.

use std::path::{Path, PathBuf};

use protocol::Digest;
use serde::Serialize;
use terminal::{Failure, Interrupt, Progress};
use tokio::runtime::Runtime;

use super::{
    earlier::Earlier,
    follow::share_end,
    intake::CollectCounts,
    online::{Learner, Start, TrainOptions},
    record::{Evaluated, line},
};
use crate::{
    curriculum::TaskOrder,
    files::{Begun, BestAdapter, Manifest, Resumed, RunDirectory, RunLock, Status, begun},
    leases::Balance,
    plan::Plan,
    ranks::Ranks,
};

/// How a run ended.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// `completed`.
    pub status: &'static str,
    /// Success on held-out tasks before training, where the recipe has some.
    pub success_before: Option<f64>,
    /// The same after.
    pub success_after: Option<f64>,
    /// The whole evaluation before training.
    pub before: Option<Evaluated>,
    /// The same after.
    pub after: Option<Evaluated>,
    /// Optimizer steps made.
    pub steps: u32,
    /// Seconds of training, without evaluations and start-up.
    pub seconds: f64,
    /// The run's directory.
    pub run: PathBuf,
    /// The last adapter's directory.
    pub adapter: PathBuf,
    /// SHA-256 of its `adapter_model.safetensors`.
    pub adapter_sha256: Digest,
    /// The adapter that did best on held-out tasks, where the recipe has some; its path lies in the
    /// run's directory.
    pub best_adapter: Option<BestAdapter>,
    /// What became of leases.
    pub counts: CollectCounts,
    /// Where every answer is.
    pub balance: Balance,
    /// How often the run went on after its learner had ended.
    pub resumes: u64,
}

/// How an evaluation ended.
#[derive(Clone, Debug, Serialize)]
pub struct EvalSummary {
    /// `completed`.
    pub status: &'static str,
    /// The result.
    #[serde(flatten)]
    pub evaluated: Evaluated,
    /// SHA-256 of the adapter; of a fresh one, which changes nothing, where none was given.
    pub adapter_sha256: Digest,
}

/// Trains by a plan. Where the options say so, it goes on with the run that lies at the plan's output.
///
/// # Errors
/// Whatever ends the run before its last step; the manifest then says so.
pub fn train(
    plan: Plan,
    options: TrainOptions,
    mut ranks: Ranks,
    runtime: &Runtime,
    interrupt: Interrupt,
    progress: &mut Progress,
) -> Result<Summary, Failure> {
    let lock = match options.resume {
        true => RunLock::of(&plan.output).map_err(Failure::mistake)?,
        false => None,
    };
    let begun = match options.resume {
        true => begun(&plan).map_err(Failure::mistake)?,
        false => Begun::Nothing,
    };
    match begun {
        Begun::Complete(manifest) => {
            let result = share_end(&mut ranks);
            let result = result.and_then(|()| complete(&plan, &manifest, progress));
            ranks.finish(result)
        }
        Begun::Nothing => {
            let mut learner =
                Learner::start(plan, options, Start::Fresh, ranks, runtime, interrupt, progress)?;
            let files = RunDirectory::create(learner.plan()).map_err(Failure::mistake);
            let begun = files.and_then(|mut files| {
                learner.describe(&mut files)?;
                learner.keep_first(&mut files)?;
                Ok(files)
            });
            let result = begun.and_then(|mut files| train_all(&mut learner, &mut files, progress));
            learner.part(result)
        }
        Begun::Going => {
            let resumed = RunDirectory::resume(&plan).map_err(Failure::mistake)?;
            let Resumed { mut files, checkpoint, replayed } = resumed;
            let (steps, kept) = (checkpoint.state.steps, replayed.accepted.len());
            progress.note(&format!(
                "resumes {} after step {steps}, with {kept} episodes that wait for their step",
                files.path().display()
            ));
            progress.record(
                "resumed",
                &serde_json::json!({"run": files.path(), "steps": steps, "episodes": kept}),
            );
            let journal = files.path().join("journal");
            let earlier = Start::Earlier(Box::new(Earlier { checkpoint, replayed, journal }));
            let mut learner =
                Learner::start(plan, options, earlier, ranks, runtime, interrupt, progress)?;
            let described = learner.describe(&mut files);
            let result = described.and_then(|()| train_all(&mut learner, &mut files, progress));
            drop(lock);
            learner.part(result)
        }
    }
}

fn train_all(
    learner: &mut Learner,
    files: &mut RunDirectory,
    progress: &mut Progress,
) -> Result<Summary, Failure> {
    let resumed = files.progress().resumes > 0;
    let result = train_in(learner, files, progress);
    progress.end();
    let (status, reason) = match &result {
        Ok(_) => (Status::Completed, "the run is complete".to_owned()),
        Err(Failure::Interrupted(text)) => (Status::Interrupted, text.clone()),
        Err(failure) => (Status::Failed, failure.to_string()),
    };
    // What was learned until here is not thrown away with the run.
    let saved = match &result {
        Ok(_) => Ok(()),
        Err(_) => save_adapter(learner, files).map(drop),
    };
    learner.finish(&reason);
    if let Err(Failure::Mistake(_)) = &result
        && !resumed
        && learner.counts().leases.received == 0
    {
        // Nothing was played: the mended command shall not find the directory in its way.
        std::fs::remove_dir_all(files.path()).map_err(Failure::fault)?;
        return result;
    }
    let closed = files
        .close(status, &reason, &learner.counts(), Some(learner.balance()))
        .map_err(Failure::fault);
    let summary = match result {
        Err(Failure::Interrupted(_)) => {
            let path = files.path().display();
            progress.record(
                "end",
                &serde_json::json!({
                    "status": Status::Interrupted, "steps": learner.steps(), "run": files.path(),
                }),
            );
            return Err(Failure::Interrupted(format!(
                "interrupted after step {}; the run so far is in {path}, and --resume goes on with it",
                learner.steps()
            )));
        }
        other => other?,
    };
    saved?;
    closed?;
    let balance = learner.balance();
    if !balance.holds() {
        return Err(Failure::Fault(format!("answers are unaccounted for: {balance}")));
    }
    Ok(Summary { counts: learner.counts(), balance, ..summary })
}

/// What is said of a run that did all of its steps before.
fn complete(plan: &Plan, manifest: &Manifest, progress: &Progress) -> Result<Summary, Failure> {
    let path = &plan.output;
    let damaged = || Failure::Mistake(format!("{}: manifest.json is damaged", path.display()));
    let written = manifest.progress.as_ref().ok_or_else(damaged)?;
    progress.note(&format!(
        "{}: the run is complete since {}; nothing is left to do",
        path.display(),
        written.ended_at.as_deref().unwrap_or("some time")
    ));
    let evaluation = |key: &str| -> Option<Evaluated> {
        serde_json::from_value(written.evaluation.get(key)?.clone()).ok()
    };
    let (before, after) = (evaluation("before"), evaluation("after"));
    let last = written.last_adapter.as_ref().ok_or_else(damaged)?;
    Ok(Summary {
        status: "completed",
        success_before: before.map(|it| it.success),
        success_after: after.map(|it| it.success),
        before,
        after,
        steps: u32::try_from(written.steps).unwrap_or(u32::MAX),
        seconds: 0.0,
        run: path.clone(),
        adapter: path.join(&last.path),
        adapter_sha256: last.sha256,
        best_adapter: written.best_adapter.clone(),
        counts: serde_json::from_value(written.leases.clone()).unwrap_or_default(),
        balance: written.balance.unwrap_or_default(),
        resumes: written.resumes,
    })
}

fn train_in(
    learner: &mut Learner,
    files: &mut RunDirectory,
    progress: &mut Progress,
) -> Result<Summary, Failure> {
    let steps = learner.plan().recipe.training.max_steps;
    let mut order = TaskOrder::new(learner.plan().run, &learner.plan().train);
    let mut adapter = None;
    let mut training = false;
    loop {
        let ended = learner.steps() == steps;
        if ended && adapter.is_none() {
            progress.end();
            adapter = Some(save_adapter(learner, files)?);
            files
                .update_evidence(learner.first_adapter(), learner.adapter().0)
                .map_err(Failure::fault)?;
        }
        if learner.evaluation_due() {
            match ended || learner.steps() == 0 {
                true => drop(evaluate(learner, Some(&mut *files), progress)?),
                false => drop(learner.evaluate(Some(&mut *files), progress)?),
            }
            continue;
        }
        if ended {
            break;
        }
        if !std::mem::replace(&mut training, true) {
            progress.start("train", u64::from(steps));
        }
        let record = learner.one_step(&mut order, files, progress)?;
        progress.at(u64::from(record.step), &line(&record, steps), "step", &record);
    }
    let (before, after) = learner.evaluations();
    files.evaluations(before.as_ref(), after.as_ref());
    Ok(Summary {
        status: "completed",
        success_before: before.map(|it| it.success),
        success_after: after.map(|it| it.success),
        before,
        after,
        steps: learner.steps(),
        seconds: learner.seconds(),
        run: files.path().to_owned(),
        adapter: adapter.unwrap_or_default(),
        adapter_sha256: learner.adapter().1,
        best_adapter: files.progress().best_adapter.clone(),
        counts: learner.counts(),
        balance: learner.balance(),
        resumes: files.progress().resumes,
    })
}

fn save_adapter(learner: &Learner, files: &mut RunDirectory) -> Result<PathBuf, Failure> {
    let base = learner.base_model();
    files.adapter(learner.steps(), learner.policy_files(&base)).map_err(Failure::fault)
}

fn evaluate(
    learner: &mut Learner,
    files: Option<&mut RunDirectory>,
    progress: &mut Progress,
) -> Result<Option<Evaluated>, Failure> {
    progress.start("evaluate", 1);
    let evaluated = learner.evaluate(files, progress);
    progress.end();
    evaluated
}

/// Measures a policy on the recipe's held-out tasks. `adapter` is a PEFT directory; without it the
/// base model plays.
///
/// # Errors
/// The recipe has no held-out tasks, or whatever ends the evaluation early.
pub fn eval(
    plan: Plan,
    options: TrainOptions,
    adapter: Option<&Path>,
    runtime: &Runtime,
    interrupt: Interrupt,
    progress: &mut Progress,
) -> Result<EvalSummary, Failure> {
    if plan.recipe.evaluation.is_none() {
        return Err(Failure::Mistake(
            "evaluation is missing: name held-out tasks in the recipe".into(),
        ));
    }
    let (alone, from) = (Ranks::alone(), Start::from_adapter(adapter));
    let mut learner = Learner::start(plan, options, from, alone, runtime, interrupt, progress)?;
    let result = evaluate(&mut learner, None, progress);
    learner.finish("the evaluation is complete");
    let evaluated =
        result?.ok_or_else(|| Failure::Fault("no held-out episode was played".into()))?;
    Ok(EvalSummary { status: "completed", evaluated, adapter_sha256: learner.adapter().1 })
}
