//! `learner train` and `learner eval`: from a plan to the last table.

use std::path::{Path, PathBuf};

use protocol::Digest;
use serde::Serialize;
use terminal::{Failure, Interrupt, Progress};
use tokio::runtime::Runtime;

use super::{
    collect::CollectCounts,
    online::{Learner, TrainOptions},
    record::Evaluated,
};
use crate::{
    files::{BestAdapter, RunDirectory, Status},
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

/// Trains by a plan.
///
/// # Errors
/// Whatever ends the run before its last step; the manifest then says so.
pub fn train(
    plan: Plan,
    options: TrainOptions,
    ranks: Ranks,
    runtime: &Runtime,
    interrupt: Interrupt,
    progress: &mut Progress,
) -> Result<Summary, Failure> {
    let mut learner = Learner::start(plan, options, None, ranks, runtime, interrupt, progress)?;
    let result = train_all(&mut learner, progress);
    learner.part(result)
}

fn train_all(learner: &mut Learner, progress: &mut Progress) -> Result<Summary, Failure> {
    let mut files = RunDirectory::create(learner.plan()).map_err(Failure::mistake)?;
    learner.keep_first(&mut files)?;
    let result = train_in(learner, &mut files, progress);
    progress.end();
    let (status, reason) = match &result {
        Ok(_) => (Status::Completed, "the run is complete".to_owned()),
        Err(Failure::Interrupted(text)) => (Status::Interrupted, text.clone()),
        Err(failure) => (Status::Failed, failure.to_string()),
    };
    // What was learned until here is not thrown away with the run.
    let saved = match &result {
        Ok(_) => Ok(()),
        Err(_) => save_adapter(learner, &mut files).map(drop),
    };
    learner.finish(&reason);
    if let Err(Failure::Mistake(_)) = &result
        && learner.counts().leases.received == 0
    {
        // Nothing was played: the mended command shall not find the directory in its way.
        std::fs::remove_dir_all(files.path()).map_err(Failure::fault)?;
        return result;
    }
    let closed = files.close(status, &reason, &learner.counts()).map_err(Failure::fault);
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
                "interrupted after step {}; the run so far is in {path}",
                learner.steps()
            )));
        }
        other => other?,
    };
    saved?;
    closed?;
    Ok(Summary { counts: learner.counts(), ..summary })
}

fn train_in(
    learner: &mut Learner,
    files: &mut RunDirectory,
    progress: &mut Progress,
) -> Result<Summary, Failure> {
    let before = evaluate(learner, Some(&mut *files), progress)?;
    let first = learner.adapter().0.clone();
    let seconds = learner.train(files, progress)?;
    let adapter = save_adapter(learner, files)?;
    files.update_evidence(&first, learner.adapter().0).map_err(Failure::fault)?;
    let after = evaluate(learner, Some(&mut *files), progress)?;
    files.evaluations(before.as_ref(), after.as_ref());
    Ok(Summary {
        status: "completed",
        success_before: before.map(|it| it.success),
        success_after: after.map(|it| it.success),
        before,
        after,
        steps: learner.steps(),
        seconds,
        run: files.path().to_owned(),
        adapter,
        adapter_sha256: learner.adapter().1,
        best_adapter: files.progress().best_adapter.clone(),
        counts: learner.counts(),
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
    let alone = Ranks::alone();
    let mut learner = Learner::start(plan, options, adapter, alone, runtime, interrupt, progress)?;
    let result = evaluate(&mut learner, None, progress);
    learner.finish("the evaluation is complete");
    let evaluated =
        result?.ok_or_else(|| Failure::Fault("no held-out episode was played".into()))?;
    Ok(EvalSummary { status: "completed", evaluated, adapter_sha256: learner.adapter().1 })
}
