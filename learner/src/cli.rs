//! The learner's command line.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, Parser, Subcommand};
use policy::device::DeviceChoice;
use protocol::{Digest, Split};
use terminal::{Audience, Failure, Interrupt, Progress, metrics_address, print_line};

use crate::{
    dataset::{self, DatasetOptions},
    plan::{describe, plan_at, plan_inputs},
    ppo::{self, PpoOptions},
    ranks::{Backend, Place, RankOptions, Ranks, Role, in_turn},
    recipe::PpoInputs,
    report::{ReportFormat, ReportOptions, report},
    score::{self, ScoreOptions},
    sft::{self, SftOptions},
    token::{self, TokenCommand},
    train::{
        calibrate::{CalibrateOptions, calibrate},
        follow::follow,
        online::TrainOptions,
        record::Evaluated,
        run::{self, Summary},
    },
    verify::{SamplingCheck, check_sampling, verify},
};

/// Trains tool-using language policies, and learns from no token that has not answered for itself.
#[derive(Debug, Parser)]
#[command(name = "learner", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Supervised fine-tuning on conversations, or on rows of an image, a name and a code.
    Sft {
        /// The recipe.
        recipe: PathBuf,
        /// Where to write, instead of the recipe's output_dir.
        #[arg(long)]
        output: Option<PathBuf>,
        /// Go on with the run that stopped in the output directory, or start it where there is none.
        #[arg(long)]
        resume: bool,
        /// auto, cpu or cuda:N.
        #[arg(long, default_value = "auto")]
        device: DeviceChoice,
        /// Print one JSON object a line.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        ranks: RankArguments,
    },
    /// Rounds of PPO on rows of sampled codes with advantages, from a file or sampled here.
    ///
    /// Goes on from an adapter, and from its optimizer where its directory has optimizer.safetensors, and
    /// holds to a frozen reference adapter. Writes adapter/ and stats.json.
    Ppo {
        /// The recipe.
        recipe: PathBuf,
        #[command(flatten)]
        options: PpoOptions,
        /// Print one JSON object a line; the last has status, updates, stats, rounds and accuracy.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        ranks: RankArguments,
    },
    /// Train online with GRPO, PPO and their kin, on episodes that actors play.
    Train {
        /// The recipe.
        recipe: PathBuf,
        /// Where to write, instead of the recipe's output_dir.
        #[arg(long)]
        output: Option<PathBuf>,
        /// Go on with the run in the output directory from its last commit: after a crash, a kill or an
        /// interrupt, with the very same command. Starts one where there is none, and says so where it is
        /// complete, so that launchers can restart it blindly. Another recipe's run is refused.
        #[arg(long)]
        resume: bool,
        /// Print one JSON object a line; the last has status, success_before, success_after, steps,
        /// seconds and run.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        network: NetworkArguments,
        #[command(flatten)]
        ranks: RankArguments,
    },
    /// Measure a policy on the recipe's held-out tasks; train nothing.
    Eval {
        /// The recipe.
        recipe: PathBuf,
        /// A PEFT adapter directory, such as a run's; without it the base model plays.
        #[arg(long)]
        adapter: Option<PathBuf>,
        /// Print one JSON object a line.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        network: NetworkArguments,
    },
    /// Measure how far honest episodes are from the learner's own computation, on these devices, and
    /// write bounds for sampling evidence.
    Calibrate {
        /// The recipe.
        recipe: PathBuf,
        /// The calibration file: made, or added to.
        #[arg(long)]
        output: PathBuf,
        /// Honest episodes to play.
        #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u64).range(20..=1_000_000))]
        episodes: u64,
        /// The wanted share of honest episodes that break a bound.
        #[arg(long, default_value_t = 1e-3, value_parser = share)]
        false_positive_rate: f64,
        /// A PEFT adapter directory that plays; without it the base model does.
        #[arg(long)]
        adapter: Option<PathBuf>,
        /// Print one JSON object a line.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        network: NetworkArguments,
    },
    /// Validate a recipe and everything that it names, print the plan as JSON, train nothing.
    Plan {
        /// The recipe.
        recipe: PathBuf,
        /// Where the run would be written, instead of the recipe's output_dir.
        #[arg(long)]
        output: Option<PathBuf>,
        #[command(flatten)]
        inputs: PpoInputs,
    },
    /// Verify a finished or interrupted run from its directory alone; exit status 1 if anything fails.
    ///
    /// Every episode is audited again from the journal's bytes, and everything that the run wrote is
    /// computed again and compared: leases, verdicts, rewards, advantages, evidence, adapters, metrics,
    /// totals.
    Audit {
        /// The run's directory.
        run: PathBuf,
        /// The checkpoint that was trained, to be compared too.
        #[arg(long)]
        model: Option<PathBuf>,
        /// Score so many accepted episodes again under the adapters that played them.
        #[arg(long, value_name = "EPISODES", requires = "model",
              value_parser = clap::value_parser!(u32).range(1..))]
        sampling: Option<u32>,
        /// Decides which episodes are scored again.
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Where to score them: auto, cpu or cuda:N.
        #[arg(long, default_value = "auto")]
        device: DeviceChoice,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Write a run, finished or not, as one page with plots, tables and episodes, or its plots as files.
    Report {
        /// The run's directory: of train, sft or ppo.
        run: PathBuf,
        /// Another run, shown beside it.
        #[arg(long, value_name = "RUN")]
        compare: Option<PathBuf>,
        /// The file to write, for svg the directory; report.html or plots in the run's directory by default.
        #[arg(long)]
        output: Option<PathBuf>,
        /// A page, or plots for papers.
        #[arg(long, value_enum, default_value_t)]
        format: ReportFormat,
        /// Episodes that can be read in the page, spread over the run.
        #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(0..=100_000))]
        episodes: u32,
    },
    /// Print log-probabilities of given ids or conversations as JSON lines.
    Score {
        /// The model directory.
        #[arg(long)]
        model: PathBuf,
        /// A PEFT adapter directory.
        #[arg(long)]
        adapter: Option<PathBuf>,
        /// JSON lines with `ids` (and `from`, the first index to score) or `messages` (and `tools`).
        #[arg(long)]
        data: PathBuf,
        /// auto, cpu or cuda:N.
        #[arg(long, default_value = "auto")]
        device: DeviceChoice,
        /// Divides the logits.
        #[arg(long, default_value_t = 1.0)]
        temperature: f32,
        /// Variables for the chat template, as a JSON object.
        #[arg(long, default_value = "{}")]
        chat_template_kwargs: String,
    },
    /// Write task rows of a built-in environment, or an expert's rows for `learner sft`; prints
    /// the file's path and SHA-256 as recipes freeze it.
    Dataset {
        /// A built-in environment's name, its section as JSON, or a recipe that holds one.
        environment: String,
        /// How many rows.
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
        rows: u32,
        /// train, or eval for held-out tasks.
        #[arg(long, value_parser = split)]
        split: Split,
        /// Decides the rows; other seeds give other rows with other ids.
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// What an expert does instead of tasks: conversations, or images (PNG files in a folder beside the
        /// file) with their codes.
        #[arg(long)]
        expert: bool,
        /// The file to write, which must not exist.
        #[arg(long)]
        output: PathBuf,
    },
    /// The join string of an identity directory, a new secret for it, and actors that are shut out.
    #[command(subcommand)]
    Token(TokenCommand),
    /// The SHA-256 of a file or model directory as recipes freeze it.
    Digest {
        /// The file or directory.
        path: PathBuf,
    },
}

/// Ranks of one run, one for each device. Under torchrun, Slurm, MPI or Kubernetes they are found by
/// themselves.
#[derive(Debug, Args)]
#[command(next_help_heading = "Ranks")]
struct RankArguments {
    /// Start so many ranks on this machine, one for each device.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    nproc_per_node: Option<u16>,
    /// What sums gradients over ranks: auto (NCCL between CUDA devices where it was built in), tcp, nccl.
    #[arg(long, default_value = "auto")]
    collective: Backend,
    /// Seconds that ranks have to find each other.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    rendezvous_seconds: u64,
    /// Seconds that ranks wait for another in one step before they end the run.
    #[arg(long, default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    rank_timeout_seconds: u64,
}

/// This process as one rank of a run.
struct Rank {
    options: RankOptions,
    place: Place,
    device: DeviceChoice,
}

impl RankArguments {
    /// Which rank this is; nothing where it has started the ranks and they have ended well.
    fn rank(self, interrupt: &Interrupt, device: DeviceChoice) -> Result<Option<Rank>, Failure> {
        let options = RankOptions {
            nproc_per_node: self.nproc_per_node.map(usize::from),
            collective: self.collective,
            meeting: Duration::from_secs(self.rendezvous_seconds),
            timeout: Duration::from_secs(self.rank_timeout_seconds),
        };
        Ok(match options.role(interrupt)? {
            Role::Parent => None,
            Role::Rank(place) => {
                let device = device.of_rank(place.local_rank);
                Some(Rank { options, place, device })
            }
        })
    }
}

impl Rank {
    /// Only rank 0 speaks.
    fn audience(&self, json: bool) -> Audience {
        if self.place.rank == 0 { audience(json) } else { Audience::Nobody }
    }

    fn meet(&self, run: Digest) -> Result<Ranks, Failure> {
        self.options.connect(&self.place, run, self.device)
    }
}

/// Where to compute, where to listen, and which actors to start.
#[derive(Debug, Args)]
struct NetworkArguments {
    /// auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Address to listen on for actors; port 0 takes any free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Host name or address in the join string: how actors reach this machine.
    #[arg(long)]
    host: Option<String>,
    /// Actor processes to start on this machine. Where no port is given to listen on, evaluations and
    /// calibrations start one.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=256))]
    local_actors: u16,
    /// Devices of the local actors, round robin; the learner's own by default.
    #[arg(long, value_delimiter = ',')]
    actor_devices: Vec<String>,
    /// Episodes in flight at each local actor.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    actor_slots: u32,
    /// The actor program; the one beside this program by default.
    #[arg(long)]
    actor_program: Option<PathBuf>,
    /// Directory that keeps the learner's certificate, the join secret, the join string (file `join`) and
    /// the ids of actors that are shut out (file `revoked`); see `learner token`. Without it the learner is
    /// another one at each start. With it and a fixed port in --listen, actors find a learner again that was
    /// restarted. It is no part of the run's directory, which is there to be shared.
    #[arg(long)]
    identity: Option<PathBuf>,
    /// Seconds that an actor has for an episode before its lease goes to another.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800))]
    lease_seconds: u64,
    /// Serve metrics in the text format of OpenMetrics at http://ADDR/metrics: a port of 127.0.0.1, or
    /// ADDRESS:PORT.
    #[arg(long, value_name = "ADDR", value_parser = metrics_address)]
    metrics_listen: Option<SocketAddr>,
}

impl NetworkArguments {
    fn options(self) -> TrainOptions {
        let host = self.host.unwrap_or_else(|| self.listen.ip().to_string());
        TrainOptions {
            device: self.device,
            listen: self.listen,
            host,
            local_actors: usize::from(self.local_actors),
            actor_devices: self.actor_devices,
            actor_slots: self.actor_slots,
            actor_program: self.actor_program,
            identity: self.identity,
            lease_ms: self.lease_seconds.saturating_mul(1000),
            resume: false,
            metrics_listen: self.metrics_listen,
        }
    }
}

/// Runs the program.
///
/// # Errors
/// Whatever ends it before its work is done.
pub fn run(cli: Cli) -> Result<(), Failure> {
    in_turn(carry_out(cli.command))
}

fn carry_out(command: Command) -> Result<(), Failure> {
    match command {
        Command::Sft { recipe, output, resume, device, json, ranks } => {
            let (_runtime, interrupt) = runtime()?;
            let Some(rank) = ranks.rank(&interrupt, device)? else { return Ok(()) };
            let mut progress = Progress::new(rank.audience(json));
            let options = SftOptions { output, resume, device: rank.device };
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
        Command::Train { recipe, output, resume, json, network, ranks } => {
            let (runtime, interrupt) = runtime()?;
            let Some(rank) = ranks.rank(&interrupt, network.device)? else { return Ok(()) };
            let plan = plan_at(&recipe, output.as_deref(), resume).map_err(Failure::mistake)?;
            let mut progress = Progress::new(rank.audience(json));
            let meeting = rank.meet(plan.run.0)?;
            if !meeting.leads() {
                return follow(&plan, rank.device, meeting);
            }
            let options = TrainOptions { device: rank.device, resume, ..network.options() };
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
        Command::Plan { recipe, output, inputs } => {
            let plan = describe(&recipe, output.as_deref(), &inputs).map_err(Failure::mistake)?;
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
        Command::Report { run, compare, output, format, episodes } => {
            let episodes = episodes as usize;
            let written = report(&ReportOptions { run, compare, output, format, episodes })?;
            print_line(&written.display().to_string());
            Ok(())
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
    }
}

fn split(text: &str) -> Result<Split, String> {
    match text {
        "train" => Ok(Split::Train),
        "eval" => Ok(Split::Eval),
        _ => Err("use train or eval".into()),
    }
}

/// A share above 0 and below 1.
fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => Err("give a number above 0 and below 1".into()),
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
    let bytes =
        std::fs::read(path).map_err(|e| Failure::Mistake(format!("{}: {e}", path.display())))?;
    Ok(Digest::of(&bytes))
}

/// The table at the end of a run.
fn table(summary: &Summary, recipe: &Path) -> String {
    let held_out = |value: fn(&Evaluated) -> Option<f64>| {
        let shown = |evaluated: Option<&Evaluated>| {
            evaluated.and_then(value).map_or_else(|| "-".into(), |it| format!("{it:.3}"))
        };
        let (before, after) = (shown(summary.before.as_ref()), shown(summary.after.as_ref()));
        format!("{before} before, {after} after")
    };
    let leases = &summary.counts.leases;
    let last = format!("{} (loads in PEFT and vLLM)", summary.adapter.display());
    let best = summary.best_adapter.as_ref().map(|best| {
        let path = summary.run.join(&best.adapter.path);
        let text =
            format!("{} (step {}, success {:.3})", path.display(), best.adapter.step, best.success);
        (path, text)
    });
    let mut rows = vec![
        ("held-out success", held_out(|it| Some(it.success))),
        ("held-out reward", held_out(|it| Some(it.reward))),
    ];
    if summary.after.is_some_and(|after| after.milestone_reward.is_some()) {
        rows.push(("milestone reward", held_out(|it| it.milestone_reward)));
    }
    rows.push(("steps", format!("{} in {:.1} s", summary.steps, summary.seconds)));
    rows.push((
        "episodes",
        format!("{} accepted, {} rejected by the audit", leases.accepted, leases.rejected),
    ));
    rows.push(("accounts", summary.balance.to_string()));
    if summary.resumes > 0 {
        rows.push(("resumed", format!("{} times", summary.resumes)));
    }
    rows.push(("last adapter", last));
    rows.push(("its sha256", summary.adapter_sha256.to_string()));
    let adapter = match best {
        Some((path, text)) => {
            rows.push(("best adapter", text));
            path
        }
        None => summary.adapter.clone(),
    };
    rows.push(("evidence", summary.run.join("evidence.jsonl").display().to_string()));
    rows.push((
        "go on",
        format!("learner eval {} --adapter {}", recipe.display(), adapter.display()),
    ));
    let lines: Vec<String> =
        rows.iter().map(|(name, value)| format!("  {name:<17} {value}")).collect();
    lines.join("\n")
}

fn audience(json: bool) -> Audience {
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
