//! What each command does with its arguments.

use std::path::Path;

use clap::CommandFactory as _;
use protocol::Digest;
use terminal::{Audience, Failure, Interrupt, Progress, print_line};

use super::{Cli, Command, table::table};
use crate::{
    dataset::{self, DatasetOptions},
    init,
    plan::{describe, plan_at, plan_inputs},
    ppo::{self, PpoOptions},
    report::{ReportOptions, report},
    score::{self, ScoreOptions},
    sft::{self, SftOptions},
    token,
    train::{
        calibrate::{CalibrateOptions, calibrate},
        follow::follow,
        online::TrainOptions,
        run,
    },
    verify::{SamplingCheck, check_sampling, verify},
    watch::{WatchOptions, watch},
};

/// Does what a command says.
pub(super) fn carry_out(command: Command) -> Result<(), Failure> {
    match command {
        Command::Init(options) => init::run(&options),
        Command::Sft { recipe, output, resume, device, no_tensorboard, json, ranks } => {
            let (_runtime, interrupt) = runtime()?;
            let Some(rank) = ranks.rank(&interrupt, device)? else { return Ok(()) };
            let mut progress = Progress::new(rank.audience(json));
            let tensorboard = !no_tensorboard;
            let options = SftOptions { output, resume, device: rank.device, tensorboard };
            let summary =
                sft::run(&recipe, &options, &interrupt, &mut progress, |run| rank.meet(run))?;
            progress.record("end", &summary);
            if progress.for_person() {
                progress.note(&format!(
                    "{}: {} updates in {:.1} s, loss {:.4}; {} (sha256 {})",
                    summary.status,
                    summary.updates,
                    summary.seconds,
                    summary.loss,
                    summary.checkpoint.display(),
                    summary.sha256
                ));
            }
            Ok(())
        }
        Command::Ppo { recipe, options, json, ranks } => {
            let (_runtime, interrupt) = runtime()?;
            let Some(rank) = ranks.rank(&interrupt, options.device)? else { return Ok(()) };
            let mut progress = Progress::new(rank.audience(json));
            let options = PpoOptions { device: rank.device, ..options };
            let meet = |run| rank.meet(run);
            let summary = ppo::run(&recipe, &options, &interrupt, &mut progress, meet)?;
            progress.record("end", &summary);
            if progress.for_person() {
                progress.note(&format!(
                    "{}: {:.1} s; {} (sha256 {})",
                    summary.status,
                    summary.seconds,
                    summary.adapter.display(),
                    summary.sha256
                ));
            }
            Ok(())
        }
        Command::Train { recipe, output, resume, no_tensorboard, json, network, ranks } => {
            let (runtime, interrupt) = runtime()?;
            let Some(rank) = ranks.rank(&interrupt, network.device)? else { return Ok(()) };
            let plan = plan_at(&recipe, output.as_deref(), resume).map_err(Failure::mistake)?;
            let mut progress = Progress::new(rank.audience(json));
            let meeting = rank.meet(plan.run.0)?;
            if !meeting.leads() {
                return follow(&plan, rank.device, meeting);
            }
            let (device, tensorboard) = (rank.device, !no_tensorboard);
            let options = TrainOptions { device, resume, tensorboard, ..network.options() };
            let summary = run::train(plan, options, meeting, &runtime, interrupt, &mut progress)?;
            progress.record("end", &summary);
            if progress.for_person() {
                progress.note(&table(&summary, &recipe));
            }
            Ok(())
        }
        Command::Eval { recipe, adapter, json, network } => {
            let plan = plan_inputs(&recipe).map_err(Failure::mistake)?;
            let (runtime, interrupt) = runtime()?;
            let mut progress = Progress::new(audience(json));
            let options = network.options().with_a_player();
            let adapter = adapter.as_deref();
            let summary = run::eval(plan, options, adapter, &runtime, interrupt, &mut progress)?;
            progress.record("end", &summary);
            Ok(())
        }
        Command::Calibrate {
            recipe,
            output,
            episodes,
            false_positive_rate,
            adapter,
            json,
            network,
        } => {
            let plan = plan_inputs(&recipe).map_err(Failure::mistake)?;
            let (runtime, interrupt) = runtime()?;
            let mut progress = Progress::new(audience(json));
            let network = network.options().with_a_player();
            let options = CalibrateOptions { episodes, false_positive_rate, file: output, adapter };
            let pairs = calibrate(plan, network, &options, &runtime, interrupt, &mut progress)?;
            progress.record("end", &serde_json::json!({"status": "completed", "pairs": pairs}));
            for pair in pairs.iter().filter(|_| progress.for_person()) {
                progress.note(&pair.to_string());
            }
            Ok(())
        }
        Command::Plan { recipe, output, explain, inputs } => {
            let (plan, estimate) =
                describe(&recipe, output.as_deref(), &inputs).map_err(Failure::mistake)?;
            if explain {
                print_line(estimate.to_string().trim_end());
                return Ok(());
            }
            let text = serde_json::to_string_pretty(&plan).map_err(Failure::fault)?;
            print_line(&text);
            Ok(())
        }
        Command::Audit { run, model, sampling, seed, device, json } => {
            let sampling = sampling.zip(model.clone());
            let sampling = sampling.map(|(episodes, model)| SamplingCheck {
                model,
                device,
                episodes: episodes as usize,
                seed,
            });
            audit(&run, model.as_deref(), sampling.as_ref(), json)
        }
        Command::Report { run, compare, output, format, episodes, max_mib } => {
            let (episodes, bytes) = (episodes as usize, (max_mib as usize) << 20);
            let options = ReportOptions { run, compare, output, format, episodes, bytes };
            let written = report(&options)?;
            print_line(&written.display().to_string());
            Ok(())
        }
        Command::Watch { run, json } => {
            let (_runtime, interrupt) = runtime()?;
            watch(&WatchOptions { run, json }, &interrupt)
        }
        Command::Score { model, adapter, data, device, temperature, chat_template_kwargs } => {
            let kwargs = serde_json::from_str(&chat_template_kwargs).map_err(|e| {
                Failure::Mistake(format!("--chat-template-kwargs: {e}; give an object"))
            })?;
            score::run(&ScoreOptions { model, adapter, data, device, temperature, kwargs })
        }
        Command::Dataset { environment, rows, split, seed, expert, output } => {
            let rows = rows as usize;
            dataset::run(&DatasetOptions { environment, rows, split, seed, expert, output })
        }
        Command::Token(command) => token::run(&command),
        Command::Digest { path } => {
            print_line(&digest(&path)?.to_string());
            Ok(())
        }
        Command::Completions { shell } => {
            terminal::print_completions(Cli::command(), "learner", shell);
            Ok(())
        }
        Command::Man { folder } => terminal::write_manual(Cli::command(), "learner", &folder),
    }
}

fn audit(
    run: &Path,
    model: Option<&Path>,
    sampling: Option<&SamplingCheck>,
    json: bool,
) -> Result<(), Failure> {
    let mut report = verify(run, model).map_err(Failure::mistake)?;
    if let Some(sampling) = sampling {
        check_sampling(run, sampling, &mut report).map_err(Failure::mistake)?;
    }
    let summary = report.summary();
    if json {
        print_line(&serde_json::to_string(&report).map_err(Failure::fault)?);
    } else {
        print_line(report.to_string().trim_end());
    }
    match (report.holds, json) {
        (false, _) => Err(Failure::Fault(summary)),
        (true, false) => {
            print_line(&summary);
            Ok(())
        }
        (true, true) => Ok(()),
    }
}

fn digest(path: &Path) -> Result<Digest, Failure> {
    if path.is_dir() {
        let digests = policy::model::checkpoint_digests(path).map_err(Failure::mistake)?;
        return Ok(digests.all);
    }
    let bytes = std::fs::read(path).map_err(|e| {
        Failure::Mistake(format!("{}: {e}; name a file or a model directory", path.display()))
    })?;
    Ok(Digest::of(&bytes))
}

pub(super) fn audience(json: bool) -> Audience {
    if json { Audience::Machine } else { Audience::Person }
}

/// A runtime for sockets and signals, and the flag that signals raise.
fn runtime() -> Result<(tokio::runtime::Runtime, Interrupt), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(Failure::fault)?;
    let interrupt = Interrupt::listen(&runtime).map_err(Failure::fault)?;
    Ok((runtime, interrupt))
}
