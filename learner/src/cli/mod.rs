//! The learner's command line.

mod arguments;
mod carry_out;
mod examples;
mod table;

use std::{path::PathBuf, sync::LazyLock};

use clap::{Parser, Subcommand};
use policy::device::DeviceChoice;
use protocol::Split;
use terminal::{Failure, Shell};

use self::arguments::{NetworkArguments, RankArguments};
use crate::{
    init::InitOptions, ppo::PpoOptions, ranks::in_turn, recipe::PpoInputs, report::ReportFormat,
    token::TokenCommand,
};

/// What `--version` says after the name.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    terminal::version(&[("cuda", cfg!(feature = "cuda")), ("nccl", cfg!(feature = "nccl"))])
});

/// Trains tool-using language policies, and learns from no token that has not answered for itself.
#[derive(Debug, Parser)]
#[command(
    name = "learner",
    display_name = "rollcall",
    version = VERSION.as_str(),
    after_help = examples::LEARNER
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write a commented recipe to start from.
    #[command(after_help = examples::INIT)]
    Init(InitOptions),
    /// Supervised fine-tuning on conversations, or on rows of an image, a name and a code.
    #[command(after_help = examples::SFT)]
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
        /// Do not write the metrics for TensorBoard too.
        #[arg(long)]
        no_tensorboard: bool,
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
    #[command(after_help = examples::PPO)]
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
    #[command(after_help = examples::TRAIN)]
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
        /// Do not write the metrics for TensorBoard too.
        #[arg(long)]
        no_tensorboard: bool,
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
    #[command(after_help = examples::EVAL)]
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
    #[command(after_help = examples::CALIBRATE)]
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
    #[command(after_help = examples::PLAN)]
    Plan {
        /// The recipe.
        recipe: PathBuf,
        /// Where the run would be written, instead of the recipe's output_dir.
        #[arg(long)]
        output: Option<PathBuf>,
        /// Say in words what it takes, memory and time, part by part.
        #[arg(long)]
        explain: bool,
        #[command(flatten)]
        inputs: PpoInputs,
    },
    /// Verify a finished or interrupted run from its directory alone; exit status 1 if anything fails.
    ///
    /// Every episode is audited again from the journal's bytes, and everything that the run wrote is
    /// computed again and compared: leases, verdicts, rewards, advantages, evidence, adapters, metrics,
    /// totals.
    #[command(after_help = examples::AUDIT)]
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
    #[command(after_help = examples::REPORT)]
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
        /// Episodes of each run that can be read in the page, spread over the run.
        #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(0..=100_000))]
        episodes: u32,
        /// MiB that they may take, pictures included; where they would take more, fewer are shown.
        #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=1024))]
        max_mib: u32,
    },
    /// Watch a run: a screen of curves, actors, the last episode and refusals; lines where there is no
    /// terminal. The run may not be there yet, or be over. q or Ctrl-C leaves; NO_COLOR is honoured.
    #[command(after_help = examples::WATCH)]
    Watch {
        /// The run's directory: of train, sft or ppo.
        run: PathBuf,
        /// Print one JSON object a line, until the run ends.
        #[arg(long)]
        json: bool,
    },
    /// Print log-probabilities of given ids or conversations as JSON lines.
    #[command(after_help = examples::SCORE)]
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
    #[command(after_help = examples::DATASET)]
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
    #[command(subcommand, after_help = examples::TOKEN)]
    Token(TokenCommand),
    /// The SHA-256 of a file or model directory as recipes freeze it.
    #[command(after_help = examples::DIGEST)]
    Digest {
        /// The file or directory.
        path: PathBuf,
    },
    /// Print a shell's completions of this program.
    #[command(after_help = examples::COMPLETIONS)]
    Completions {
        /// Which shell.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write this program's manual pages into a folder.
    #[command(after_help = examples::MAN)]
    Man {
        /// The folder, made where it is not there.
        folder: PathBuf,
    },
}

/// Runs the program.
///
/// # Errors
/// Whatever ends it before its work is done.
pub fn run(cli: Cli) -> Result<(), Failure> {
    in_turn(carry_out::carry_out(cli.command))
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
