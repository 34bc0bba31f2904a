//! The online loop: publish a policy, collect audited groups, update, and again.
//!
//! With a staleness of k the groups of a step are ordered k updates before their turn, under the policy of
//! that time, and played while the learner updates. Which groups a step learns from, and which policy
//! played them, follows from the recipe alone: what finishes first does not come first.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, Decoder, ModelError},
    score::Optimizer,
};
use protocol::{
    AdapterManifest, Admission, Digest, Join, ModelDigests, PolicyDigest, Sampling, Welcome,
};
use terminal::{Failure, Interrupt, Progress, serve_metrics};

use super::{
    collect::{Collector, CollectorParts},
    earlier::Earlier,
    follow::{share_end, share_start},
    intake::{CollectCounts, Intake, Rules},
    record::Evaluated,
    replay::MAX_ATTEMPTS,
    update::{Critic, adamw},
};
use crate::{
    audit::{
        AuditPool, Auditor,
        sampling::{SamplingJudge, device_kind},
    },
    curriculum::{TaskOrder, episode_seed},
    files::{PolicyFiles, RunDirectory},
    keys::Keys,
    leases::{Balance, GroupOrder, LeaseBook},
    local_actors::{LocalActorConfig, LocalActors},
    metrics::{self, Metrics},
    plan::Plan,
    ranks::Ranks,
    recipe::{Recipe, TaskRow},
    serve::{Listen, Server},
    sft::load_dtype,
};

/// Where in the identity directory the local actors keep their episodes.
const LOCAL_ACTORS: &str = "actors";

/// What the command line adds to the recipe.
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Where to compute.
    pub device: DeviceChoice,
    /// Where to listen for actors.
    pub listen: SocketAddr,
    /// The host name in the join string.
    pub host: String,
    /// Actors to start on this host.
    pub local_actors: usize,
    /// Their devices, round robin; those of the learner where empty.
    pub actor_devices: Vec<String>,
    /// Episodes in flight at each of them.
    pub actor_slots: u32,
    /// The actor program; the one beside this program otherwise.
    pub actor_program: Option<PathBuf>,
    /// Directory of the learner's certificate and secret; fresh ones otherwise.
    pub identity: Option<PathBuf>,
    /// Actors that the learner sends adapters to itself, and that a relaying actor passes them on to.
    pub relay_fanout: usize,
    /// Milliseconds that an actor has for an episode.
    pub lease_ms: u64,
    /// Go on with the run that lies where this one is to be written.
    pub resume: bool,
    /// Write TensorBoard's event files.
    pub tensorboard: bool,
    /// Where to serve metrics, if anywhere.
    pub metrics_listen: Option<SocketAddr>,
}

impl TrainOptions {
    /// The same with an actor of this host, where no other can know the port: somebody must play.
    #[must_use]
    pub fn with_a_player(mut self) -> Self {
        if self.listen.port() == 0 {
            self.local_actors = self.local_actors.max(1);
        }
        self
    }
}

/// A learner with everything loaded and actors on their way.
pub struct Learner {
    pub(super) plan: Plan,
    pub(super) options: TrainOptions,
    pub(super) decoder: Decoder,
    pub(super) adapter: Adapter,
    pub(super) optimizer: Optimizer,
    pub(super) critic: Option<Critic>,
    pub(super) reference: Option<Adapter>,
    pub(super) ranks: Ranks,
    pub(super) collector: Collector,
    pub(super) judge: SamplingJudge,
    pub(super) step: u32,
    /// The policies that groups may have been played by: the newest and as many before it as the
    /// staleness says, oldest first.
    pub(super) recent: VecDeque<Recent>,
    pub(super) rounds: u32,
    /// The adapter that the run starts from.
    pub(super) first: Adapter,
    pub(super) before: Option<Evaluated>,
    pub(super) after: Option<Evaluated>,
    pub(super) seconds: f64,
    /// How long the audit's threads had worked when the last step was made.
    pub(super) audited: Duration,
}

/// What a learner starts from.
#[derive(Debug)]
pub enum Start<'a> {
    /// The recipe's adapter, or else one that changes nothing yet.
    Fresh,
    /// A PEFT directory, whatever the recipe says.
    Adapter(&'a Path),
    /// Where an earlier learner stopped.
    Earlier(Box<Earlier>),
}

impl<'a> Start<'a> {
    /// From this directory, where there is one.
    pub fn from_adapter(dir: Option<&'a Path>) -> Self {
        dir.map_or(Self::Fresh, Self::Adapter)
    }
}

/// A policy that was announced.
pub(super) struct Recent {
    pub(super) manifest: AdapterManifest,
    pub(super) bytes: Vec<u8>,
    pub(super) adapter: Adapter,
}

impl Learner {
    /// Loads the model, listens, and starts the local actors.
    ///
    /// # Errors
    /// A mistake in recipe or options, or something that cannot be started.
    pub fn start(
        plan: Plan,
        options: TrainOptions,
        from: Start<'_>,
        ranks: Ranks,
        runtime: &tokio::runtime::Runtime,
        interrupt: Interrupt,
        progress: &Progress,
    ) -> Result<Self, Failure> {
        let recipe = &plan.recipe;
        let choice = options.device.resolve();
        let judge =
            plan.sampling_judge(device_kind(&choice.to_string())).map_err(Failure::mistake)?;
        let device = choice.open().map_err(Failure::mistake)?;
        let checkpoint = Checkpoint::open(&recipe.model.path).map_err(Failure::mistake)?;
        let dtype = load_dtype(recipe.training.compute_dtype);
        let decoder = checkpoint.load(&device, dtype).map_err(Failure::mistake)?;
        let adapter = match from {
            Start::Adapter(dir) => Adapter::load_peft(dir, &decoder),
            Start::Fresh | Start::Earlier(_) => first_adapter(recipe, &decoder),
        }
        .map_err(Failure::mistake)?;
        let reference = reference(recipe, &decoder)?;
        let auditor = Auditor::new(plan.audit_terms()).map_err(Failure::mistake)?;
        let rules = Rules {
            failure_policy: recipe.training.failure_policy,
            quarantine_after: recipe.audit.quarantine_after,
            staleness: u64::from(recipe.training.staleness),
        };
        let (intake, weights) = match from {
            Start::Fresh | Start::Adapter(_) => {
                let book = LeaseBook::new(plan.run, MAX_ATTEMPTS);
                (Intake::new(book, rules, HashMap::new()), None)
            }
            Start::Earlier(earlier) => {
                let (intake, weights) = earlier.go_on(plan.run, rules, &auditor)?;
                (intake, Some(weights))
            }
        };
        let keys = Keys::open(options.identity.as_deref()).map_err(Failure::mistake)?;
        let listen = Listen {
            addr: options.listen,
            host: &options.host,
            relay_fanout: options.relay_fanout,
        };
        let metrics = Metrics::default();
        if let Some(addr) = options.metrics_listen {
            let shown = metrics.clone();
            let serving = serve_metrics(addr, metrics::CONTENT_TYPE, move || shown.render());
            let bound = runtime.block_on(serving).map_err(Failure::Mistake)?;
            progress.note(&format!("metrics: http://{bound}/metrics"));
            progress.record("metrics", &serde_json::json!({"address": bound}));
        }
        let server = Server::start(runtime, &listen, keys, admission(&plan), metrics)
            .map_err(Failure::mistake)?;
        let join = server.join().reveal();
        if options.local_actors == 0 || !options.listen.ip().is_loopback() {
            progress.note(&format!("join with: actor join '{join}' --model DIR"));
            progress.record("listening", &serde_json::json!({"join": join}));
        }
        let local = start_local_actors(&plan, &options, join)?;
        let collector = Collector::new(CollectorParts {
            server,
            audits: AuditPool::new(auditor).map_err(Failure::fault)?,
            intake,
            local,
            interrupt,
        });
        let optimizer = adamw(&recipe.training.optimizer);
        let critic = Critic::of(&recipe.training, &decoder);
        let mut learner = Self {
            options,
            decoder,
            first: adapter.clone(),
            adapter,
            optimizer,
            critic,
            reference,
            ranks,
            collector,
            judge,
            step: 0,
            recent: VecDeque::new(),
            rounds: 0,
            before: None,
            after: None,
            seconds: 0.0,
            audited: Duration::ZERO,
            plan,
        };
        match weights {
            None => {
                let newest = learner.broadcast()?;
                learner.publish(newest);
            }
            Some(weights) => weights.put_back(&mut learner)?,
        }
        let Self { ranks, adapter, optimizer, critic, recent, .. } = &mut learner;
        share_start(ranks, adapter, optimizer, critic.as_ref(), recent)?;
        Ok(learner)
    }

    /// The policy's adapter and its digest.
    pub fn adapter(&self) -> (&Adapter, Digest) {
        let digest = self.recent.back().map(|it| it.manifest.adapter);
        (&self.adapter, digest.unwrap_or(Digest([0; 32])))
    }

    /// The adapter that the run started from.
    pub fn first_adapter(&self) -> &Adapter {
        &self.first
    }

    /// The policy that plays.
    pub(super) fn policy(&self) -> PolicyDigest {
        let newest = self.recent.back().map(|it| it.manifest.policy);
        newest.unwrap_or(PolicyDigest(Digest([0; 32])))
    }

    /// What is written of the policy, for a base model of this name.
    pub fn policy_files<'a>(&'a self, base: &'a str) -> PolicyFiles<'a> {
        let value_head = self.critic.as_ref().map(|critic| &critic.head);
        let (adapter, digest) = self.adapter();
        PolicyFiles { adapter, digest, base, value_head }
    }

    /// The adapter's files are written for the base model under this name.
    pub fn base_model(&self) -> String {
        self.plan.recipe.model.path.to_string_lossy().into_owned()
    }

    /// Optimizer steps made.
    pub fn steps(&self) -> u32 {
        self.step
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What happened to leases so far.
    pub fn counts(&self) -> CollectCounts {
        self.collector.counts()
    }

    /// Where every answer is.
    pub fn balance(&self) -> Balance {
        self.collector.balance()
    }

    /// Seconds of training, evaluations left out.
    pub fn seconds(&self) -> f64 {
        self.seconds
    }

    /// The first and the last evaluation.
    pub fn evaluations(&self) -> (Option<Evaluated>, Option<Evaluated>) {
        (self.before, self.after)
    }

    /// Announces a policy. It is kept before anyone can play it: see [`RunDirectory::policy`].
    pub(super) fn publish(&mut self, newest: Recent) {
        self.collector.publish(newest.manifest.clone(), newest.bytes.clone());
        self.recent.push_back(newest);
        while self.recent.len() > self.plan.recipe.training.staleness as usize + 1 {
            self.recent.pop_front();
        }
    }

    /// The adapter as it is now, ready to be announced.
    pub(super) fn broadcast(&self) -> Result<Recent, Failure> {
        let bytes = self.adapter.to_safetensors().map_err(Failure::fault)?;
        let step = u64::from(self.step);
        let manifest = AdapterManifest::build(step, &self.plan.model.weights, &bytes);
        let manifest = manifest.map_err(Failure::fault)?;
        Ok(Recent { manifest, bytes, adapter: self.adapter.clone() })
    }

    /// Says where the run is computed, and by which bounds it judges.
    ///
    /// # Errors
    /// Event files cannot be written.
    pub fn describe(&self, files: &mut RunDirectory) -> Result<(), Failure> {
        self.collector.log_joins(files.path());
        files.judged_by(&self.judge);
        files.computed_on(&self.options.device.resolve().to_string());
        match self.options.tensorboard {
            true => files.write_events().map_err(Failure::fault),
            false => Ok(()),
        }
    }

    /// Keeps the adapter that the run starts from, and commits that nothing was done yet.
    ///
    /// # Errors
    /// The run's directory cannot be written.
    pub fn keep_first(&mut self, files: &mut RunDirectory) -> Result<(), Failure> {
        let Recent { manifest, bytes, .. } = self.broadcast()?;
        files.policy(&manifest, &bytes).map_err(Failure::fault)?;
        self.commit(files)
    }

    pub(super) fn order(
        &self,
        row: &TaskRow,
        group: u64,
        sampling: Sampling,
        generations: u32,
    ) -> GroupOrder {
        GroupOrder {
            task: row.task.clone(),
            seed: episode_seed(self.plan.run, row, group),
            policy: self.policy(),
            sampling,
            generations,
            deadline_ms: self.options.lease_ms,
        }
    }

    pub(super) fn training_orders(
        &self,
        groups: Range<u64>,
        order: &mut TaskOrder,
    ) -> Vec<(u64, GroupOrder)> {
        let settings = self.plan.recipe.training;
        groups
            .filter(|group| !self.collector.knows(*group))
            .filter_map(|group| {
                let row = &self.plan.train[order.row(group)?];
                let generations = settings.num_generations;
                Some((group, self.order(row, group, settings.sampling(), generations)))
            })
            .collect()
    }

    /// Ends the run for every actor.
    pub fn finish(&mut self, reason: &str) {
        self.collector.finish(reason);
    }

    /// Ends the run for every rank: well, or because of what `result` says.
    ///
    /// # Errors
    /// That of `result`, or a rank that fails.
    pub fn part<T>(mut self, result: Result<T, Failure>) -> Result<T, Failure> {
        let result = result.and_then(|value| share_end(&mut self.ranks).map(|()| value));
        self.ranks.finish(result)
    }
}

/// The adapter that a run starts from.
pub(super) fn first_adapter(recipe: &Recipe, decoder: &Decoder) -> Result<Adapter, ModelError> {
    match &recipe.adapter {
        Some(frozen) => Adapter::load_peft(&frozen.path, decoder),
        None => Adapter::init(&recipe.lora.to_config(), decoder, recipe.seed),
    }
}

/// The policy that the KL term holds to, where the recipe names one.
pub(super) fn reference(recipe: &Recipe, decoder: &Decoder) -> Result<Option<Adapter>, Failure> {
    let reference = recipe.reference.as_ref();
    reference
        .map(|frozen| Adapter::load_peft(&frozen.path, decoder))
        .transpose()
        .map_err(|error| Failure::Mistake(format!("reference.path: {error}")))
}

fn admission(plan: &Plan) -> Admission {
    let model = &plan.model;
    Admission {
        model: ModelDigests {
            weights: model.weights,
            tokenizer: model.tokenizer,
            template: model.template,
        },
        welcome: Welcome { run: plan.run, settings: plan.run_settings() },
    }
}

fn start_local_actors(
    plan: &Plan,
    options: &TrainOptions,
    join: String,
) -> Result<Option<LocalActors>, Failure> {
    if options.local_actors == 0 {
        return Ok(None);
    }
    let devices = if options.actor_devices.is_empty() {
        vec![options.device.to_string()]
    } else {
        options.actor_devices.clone()
    };
    let config = LocalActorConfig {
        program: options.actor_program.clone().unwrap_or_else(LocalActors::sibling_program),
        join,
        // Its string changes with the secret, and an actor that is started again must know.
        join_file: options.identity.as_ref().map(|dir| dir.join(Join::FILE)),
        model: plan.recipe.model.path.clone(),
        devices,
        slots: options.actor_slots,
        variables: plan.recipe.environment.variables(),
        spools: options.identity.as_ref().map(|dir| dir.join(LOCAL_ACTORS)),
        arguments: Vec::new(),
    };
    LocalActors::start(config, options.local_actors).map(Some).map_err(Failure::mistake)
}
