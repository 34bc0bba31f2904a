//! The actor's command line: arguments, and what each does with them.

use std::{
    fs::{File, TryLockError},
    io::Read as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use clap::{Args, CommandFactory as _, Parser, Subcommand};
use environments::{EnvironmentSpec, Limits, text::CUT_MARK};
use policy::{
    chat::{ChatFormat, ChatOptions, ObservationBound},
    device::DeviceChoice,
    engine::{Engine, EngineConfig},
    episode_script::EpisodeLimits,
    model::{Checkpoint, Decoder, LoadDtype, checkpoint_digests},
    vision::PromptImages,
};
use protocol::{
    ActorEndpoint, ComputeDtype, Hello, Identity, Join, LinkConfig, ModelDigests, Relay, Welcome,
    folder::Disk,
};
use terminal::{Failure, Shell, metrics_address, serve_metrics};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::{
    check, examples,
    metrics::{self, Metrics},
    player::Player,
    sample::{self, SampleArguments},
    session::{self, SessionOptions, Stay},
    spool::Spool,
};

/// How long an actor that was asked to leave may take to let go of its spool.
const LOCK: Duration = Duration::from_secs(15);
/// Where a join string is looked for that is neither an argument nor in a file.
const JOIN_VARIABLE: &str = "ROLLCALL_JOIN";

/// What `--version` says after the name.
static VERSION: LazyLock<String> =
    LazyLock::new(|| terminal::version(&[("cuda", cfg!(feature = "cuda"))]));

/// Plays tool episodes for a Rollcall learner.
#[derive(Debug, Parser)]
#[command(
    name = "actor",
    display_name = "rollcall",
    version = VERSION.as_str(),
    after_help = examples::ACTOR
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Play episodes for a learner until its run is over.
    #[command(after_help = examples::JOIN)]
    Join(JoinArguments),
    /// Try a policy on prompts, without a learner.
    #[command(after_help = examples::SAMPLE)]
    Sample(SampleArguments),
    /// Examine an environment: schema, determinism, limits.
    #[command(after_help = examples::CHECK)]
    Check {
        /// A built-in environment's name, its section as JSON, or a recipe that holds one.
        environment: String,
        /// A dataset row's `task` object, as JSON.
        #[arg(long, default_value = "{}")]
        task: String,
        /// A folder to write the images to that an episode shows, as PNG files.
        #[arg(long)]
        images: Option<PathBuf>,
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

#[derive(Debug, Args)]
struct JoinArguments {
    /// The join string that the learner printed. An argument shows in `ps`: rather use a file, or the
    /// environment variable ROLLCALL_JOIN, which is read where neither is given.
    join: Option<String>,
    /// A file that holds the join string, such as `join` in the learner's identity directory; `-` reads
    /// standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "join")]
    join_file: Option<PathBuf>,
    /// The model directory: a copy of the learner's.
    #[arg(long)]
    model: PathBuf,
    /// auto, cpu or cuda:N.
    #[arg(long, default_value = "auto")]
    device: DeviceChoice,
    /// Episodes in flight.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    slots: u32,
    /// Ids whose keys and values are kept at a time, over all episodes.
    #[arg(long, default_value_t = 1 << 20)]
    kv_tokens: usize,
    /// Directory of this actor's identity; without it, that of --spool; without both each start is a new
    /// actor.
    #[arg(long)]
    identity: Option<PathBuf>,
    /// Directory that keeps episodes until the learner has acknowledged them: what was played outlives this
    /// process, and is sent when it is started again. One actor each. Without it they are kept in memory.
    #[arg(long)]
    spool: Option<PathBuf>,
    /// MiB of unacknowledged episodes above which no more leases are taken.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    spool_mib: u64,
    /// Seconds to finish what is in hand after SIGTERM or SIGINT; what is not finished then goes back. A
    /// second signal ends it at once.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    grace: u64,
    /// Seconds to wait for a learner that does not answer.
    #[arg(long, default_value_t = 60)]
    patience: u64,
    /// Pass adapters on to other actors, which the learner chooses: listen for them at this IP address and
    /// UDP port, which must be open for the other actors' machines; port 0 takes any free one. They are told
    /// this address, or for 0.0.0.0 and :: the one at which the learner sees this actor.
    #[arg(long, value_name = "ADDR:PORT", value_parser = relay_address)]
    relay: Option<SocketAddr>,
    /// Serve metrics in the text format of OpenMetrics at http://ADDR/metrics: a port of 127.0.0.1, or
    /// ADDRESS:PORT.
    #[arg(long, value_name = "ADDR", value_parser = metrics_address)]
    metrics_listen: Option<SocketAddr>,
    /// Leave when standard input closes: for actors that a learner started.
    #[arg(long, hide = true)]
    leave_with_stdin: bool,
}

/// Runs the program.
///
/// # Errors
/// Whatever ends it before its work is done.
pub fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Join(arguments) => join(&arguments),
        Command::Sample(arguments) => sample::run(&arguments),
        Command::Check { environment, task, images } => {
            check::run(&environment, &task, images.as_deref())
        }
        Command::Completions { shell } => {
            terminal::print_completions(Cli::command(), "actor", shell);
            Ok(())
        }
        Command::Man { folder } => terminal::write_manual(Cli::command(), "actor", &folder),
    }
}

/// Where to listen for other actors.
fn relay_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "give an IP address of this machine and a UDP port, such as 0.0.0.0:7272".to_owned()
    })
}

/// A join string is far shorter.
const MAX_JOIN_BYTES: u64 = 64 << 10;

fn join_string(arguments: &JoinArguments) -> Result<Join, Failure> {
    let text = match (&arguments.join, &arguments.join_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => read_join(path)
            .map_err(|e| {
                let remedy = "name the file `join` of the learner's identity directory";
                Failure::Mistake(format!("--join-file {}: {e}; {remedy}", path.display()))
            })?,
        (None, None) => std::env::var(JOIN_VARIABLE).map_err(|_| {
            Failure::Mistake(format!(
                "no join string: give the one that the learner printed as argument, in {JOIN_VARIABLE}, or in --join-file"
            ))
        })?,
    };
    text.trim().parse().map_err(Failure::mistake)
}

fn read_join(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let source: &mut dyn std::io::Read = match path.to_str() {
        Some("-") => &mut std::io::stdin(),
        _ => &mut File::open(path)?,
    };
    source.take(MAX_JOIN_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

fn join(arguments: &JoinArguments) -> Result<(), Failure> {
    let join = join_string(arguments)?;
    let device = arguments.device.resolve();
    let burn_device = device.open().map_err(Failure::mistake)?;
    let digests = checkpoint_digests(&arguments.model).map_err(Failure::mistake)?;
    let checkpoint = Checkpoint::open(&arguments.model).map_err(Failure::mistake)?;
    let (spool, _lock) = open_spool(arguments.spool.as_deref())?;
    let identity = match arguments.identity.as_ref().or(arguments.spool.as_ref()) {
        Some(dir) => Identity::load_or_create(dir),
        None => Identity::generate(),
    }
    .map_err(Failure::mistake)?;
    let model = ModelDigests {
        weights: digests.weights,
        tokenizer: digests.tokenizer,
        template: digests.template,
    };
    let options = SessionOptions {
        hello: Hello::new(model, device.to_string(), arguments.slots),
        patience: Duration::from_secs(arguments.patience),
        base: digests.weights,
        cap: arguments.spool_mib << 20,
        grace: Duration::from_secs(arguments.grace),
        metrics: Metrics::default(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .map_err(Failure::fault)?;
    let reason = runtime.block_on(async {
        if let Some(addr) = arguments.metrics_listen {
            let shown = options.metrics.clone();
            let serving = serve_metrics(addr, metrics::CONTENT_TYPE, move || shown.render());
            let bound = serving.await.map_err(Failure::Mistake)?;
            tracing::info!("metrics: http://{bound}/metrics");
        }
        let leave = leave_signal(arguments.leave_with_stdin).map_err(Failure::fault)?;
        let mut endpoint = ActorEndpoint::new(join, identity, LinkConfig::default());
        if let Some(addr) = arguments.relay {
            let wrong = |error| Failure::Mistake(format!("--relay: {error}"));
            endpoint = endpoint.with_relay(addr).map_err(wrong)?;
        }
        if let Some(relay) = endpoint.relay() {
            tracing::info!("passes adapters on to other actors at {} (UDP)", relay.local_addr());
        }
        let reason = session::serve(&endpoint, options, spool, leave, |welcome| {
            player(arguments, &checkpoint, &burn_device, welcome)
        })
        .await?;
        if let Some(served) = endpoint.relay().map(Relay::served) {
            let bytes = served.delta() + served.whole();
            tracing::info!("passed {bytes} bytes of adapters on to other actors");
        }
        Ok(reason)
    })?;
    tracing::info!("done: {reason}");
    Ok(())
}

/// Opens a spool and locks it: two actors would send each other's episodes.
fn open_spool(dir: Option<&Path>) -> Result<(Option<Spool>, Option<File>), Failure> {
    let Some(dir) = dir else { return Ok((None, None)) };
    let wrong =
        |error: std::io::Error| Failure::Mistake(format!("--spool {}: {error}", dir.display()));
    std::fs::create_dir_all(dir).map_err(wrong)?;
    let lock = File::create(dir.join("lock")).map_err(wrong)?;
    let deadline = Instant::now() + LOCK;
    loop {
        match lock.try_lock() {
            Ok(()) => break,
            Err(TryLockError::Error(error)) => return Err(wrong(error)),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::Mistake(format!(
                    "--spool {}: another actor uses it; give each a directory of its own",
                    dir.display()
                )));
            }
        }
    }
    let (spool, notes) = Spool::open(Disk::at(dir)).map_err(Failure::mistake)?;
    for note in notes {
        tracing::warn!("--spool {}: {note}", dir.display());
    }
    Ok((Some(spool), Some(lock)))
}

/// Says when the actor should leave: at SIGINT or SIGTERM when it has finished what is in hand, and when a
/// parent's pipe closes at once.
fn leave_signal(with_stdin: bool) -> std::io::Result<watch::Receiver<Stay>> {
    let (leave, left) = watch::channel(Stay::Yes);
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let leave_stdin = leave.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        leave.send_if_modified(|stay| {
            let first = *stay == Stay::Yes;
            if first {
                *stay = Stay::Finishing;
            }
            first
        });
        // A second signal does not wait for anything.
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        std::process::exit(130);
    });
    if with_stdin {
        std::thread::spawn(move || {
            let mut byte = [0];
            while matches!(std::io::stdin().read(&mut byte), Ok(1..)) {}
            leave_stdin.send_replace(Stay::No);
            // A parent that died answers no more; do not outlive it by much.
            std::thread::sleep(Duration::from_secs(10));
            std::process::exit(1);
        });
    }
    Ok(left)
}

/// Builds the player that a welcome asks for.
fn player(
    arguments: &JoinArguments,
    checkpoint: &Checkpoint,
    device: &policy::device::Device,
    welcome: &Welcome,
) -> Result<(Player, Decoder), Failure> {
    let settings = &welcome.settings;
    let parse = |what: &str, text: &str| {
        serde_json::from_str::<serde_json::Value>(text)
            .map_err(|e| Failure::Fault(format!("the learner's {what} is no JSON: {e}")))
    };
    let environment = EnvironmentSpec::parse(&parse("environment", &settings.environment)?)
        .map_err(|e| Failure::Mistake(format!("the learner's run: {e}")))?;
    let tools = environment.tools().map_err(Failure::fault)?;
    let kwargs = match parse("chat_template_kwargs", &settings.chat_template_kwargs)? {
        serde_json::Value::Object(kwargs) => kwargs,
        _ => return Err(Failure::Fault("the learner's chat_template_kwargs is no object".into())),
    };
    let system = settings.system.clone();
    let format = chat_format(&arguments.model, (&tools, environment.limits()), system, kwargs)?;
    let dtype = match settings.compute_dtype {
        ComputeDtype::F32 => LoadDtype::F32,
        ComputeDtype::Bf16 | ComputeDtype::F16 => LoadDtype::File,
    };
    let decoder: Decoder = checkpoint.load(device, dtype).map_err(Failure::mistake)?;
    let config = EngineConfig {
        max_batch: arguments.slots as usize,
        max_tokens: arguments.kv_tokens,
        ..EngineConfig::default()
    };
    let limits = EpisodeLimits {
        max_tool_rounds: settings.max_tool_calling_iterations,
        max_completion: settings.max_completion_length,
        on_malformed: settings.on_malformed,
    };
    let images = match environment.describe().map_err(Failure::fault)?.images {
        true => Some(PromptImages::load(&arguments.model, &format).map_err(Failure::mistake)?),
        false => None,
    };
    let engine = Engine::new(decoder.clone(), config).map_err(Failure::mistake)?;
    let player = Player::new(engine, Arc::new(format), environment, limits).with_images(images);
    Ok((player, decoder))
}

fn chat_format(
    model: &Path,
    (tools, limits): (&[environments::ToolSpec], Limits),
    system: Option<String>,
    kwargs: serde_json::Map<String, serde_json::Value>,
) -> Result<ChatFormat, Failure> {
    let tools = tools.iter().map(environments::ToolSpec::to_json).collect();
    let bound = limits.observation_tokens;
    let bound = bound.map(|tokens| ObservationBound { tokens, mark: CUT_MARK });
    let options = ChatOptions { tools, system, kwargs, bound, ..ChatOptions::default() };
    ChatFormat::load(model, options).map_err(Failure::mistake)
}
