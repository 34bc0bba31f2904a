//! The online loop: publish a policy, collect audited groups, update, and again.

use std::{
    net::SocketAddr,
    ops::Range,
    path::{Path, PathBuf},
    time::Instant,
};

use policy::{
    device::DeviceChoice,
    model::{Adapter, Checkpoint, Decoder},
    score::Optimizer,
};
use protocol::{
    AdapterManifest, Admission, Digest, Join, ModelDigests, PolicyDigest, Sampling, Welcome,
};
use terminal::{Failure, Interrupt, Progress};

use super::{
    collect::{CollectCounts, Collector, CollectorParts},
    follow::{share_end, share_start},
    record::{Evaluated, evaluated, line},
    update::{Critic, adamw},
    watcher::Watcher,
};
use crate::{
    audit::{
        AuditPool, Auditor,
        sampling::{SamplingEvidence, SamplingJudge, device_kind, examine},
    },
    curriculum::{TaskOrder, episode_seed, evaluation_group},
    files::{EpisodeContext, PolicyFiles, RunDirectory},
    keys::Keys,
    leases::{GroupOrder, LeaseBook},
    local_actors::{LocalActorConfig, LocalActors},
    plan::Plan,
    ranks::Ranks,
    recipe::{Recipe, TaskRow},
    serve::Server,
    sft::load_dtype,
};

/// How often a lease is granted before its group is given up.
const MAX_ATTEMPTS: u32 = 8;

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
    /// Milliseconds that an actor has for an episode.
    pub lease_ms: u64,
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
    pub(super) policy: PolicyDigest,
    pub(super) adapter_digest: Digest,
    pub(super) rounds: u32,
}

impl Learner {
    /// Loads the model, listens, and starts the local actors.
    ///
    /// # Errors
    /// A mistake in recipe or options, or something that cannot be started.
    pub fn start(
        plan: Plan,
        options: TrainOptions,
        adapter: Option<&Path>,
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
        let adapter = match adapter {
            Some(dir) => Adapter::load_peft(dir, &decoder),
            None => Adapter::init(&recipe.lora.to_config(), &decoder, recipe.seed),
        }
        .map_err(Failure::mistake)?;
        let reference = reference(recipe, &decoder)?;
        let auditor = Auditor::new(plan.audit_terms()).map_err(Failure::mistake)?;
        let keys = Keys::open(options.identity.as_deref()).map_err(Failure::mistake)?;
        let (listen, host) = (options.listen, &options.host);
        let server = Server::start(runtime, listen, host, keys, admission(&plan))
            .map_err(Failure::mistake)?;
        let join = server.join().reveal();
        if options.local_actors == 0 || !options.listen.ip().is_loopback() {
            progress.note(&format!("join with: actor join '{join}' --model DIR"));
            progress.record("listening", &serde_json::json!({"join": join}));
        }
        let local = start_local_actors(&plan, &options, join)?;
        let book = LeaseBook::new(plan.run, MAX_ATTEMPTS);
        let failure_policy = recipe.training.failure_policy;
        let collector = Collector::new(CollectorParts {
            server,
            audits: AuditPool::new(auditor).map_err(Failure::fault)?,
            book,
            local,
            interrupt,
            failure_policy,
            quarantine_after: recipe.audit.quarantine_after,
        });
        let optimizer = adamw(&recipe.training.optimizer);
        let critic = Critic::of(&recipe.training, &decoder);
        let mut learner = Self {
            options,
            decoder,
            adapter,
            optimizer,
            critic,
            reference,
            ranks,
            collector,
            judge,
            step: 0,
            policy: PolicyDigest::new(&plan.model.weights, &Digest::of(b"")),
            adapter_digest: Digest::of(b""),
            rounds: 0,
            plan,
        };
        learner.publish(None)?;
        let Self { ranks, adapter, optimizer, critic, .. } = &mut learner;
        share_start(ranks, adapter, optimizer, critic.as_ref())?;
        Ok(learner)
    }

    /// The policy's adapter and its digest.
    pub fn adapter(&self) -> (&Adapter, Digest) {
        (&self.adapter, self.adapter_digest)
    }

    /// What is written of the policy, for a base model of this name.
    pub fn policy_files<'a>(&'a self, base: &'a str) -> PolicyFiles<'a> {
        let value_head = self.critic.as_ref().map(|critic| &critic.head);
        PolicyFiles { adapter: &self.adapter, digest: self.adapter_digest, base, value_head }
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

    /// Announces the adapter as it is now, and keeps it before anyone can play it.
    pub(super) fn publish(&mut self, files: Option<&mut RunDirectory>) -> Result<(), Failure> {
        let (manifest, bytes) = self.broadcast()?;
        self.policy = manifest.policy;
        self.adapter_digest = manifest.adapter;
        if let Some(files) = files {
            files.policy(&manifest, &bytes).map_err(Failure::fault)?;
        }
        self.collector.publish(manifest, bytes);
        Ok(())
    }

    fn broadcast(&self) -> Result<(AdapterManifest, Vec<u8>), Failure> {
        let bytes = self.adapter.to_safetensors().map_err(Failure::fault)?;
        let step = u64::from(self.step);
        let manifest = AdapterManifest::build(step, &self.plan.model.weights, &bytes);
        Ok((manifest.map_err(Failure::fault)?, bytes))
    }

    /// Keeps the adapter that the run starts from, where it is computed, and by which bounds it judges.
    ///
    /// # Errors
    /// The run's directory cannot be written.
    pub fn keep_first(&self, files: &mut RunDirectory) -> Result<(), Failure> {
        let (manifest, bytes) = self.broadcast()?;
        self.collector.log_joins(files.path());
        files.judged_by(&self.judge);
        files.computed_on(&self.options.device.resolve().to_string());
        files.policy(&manifest, &bytes).map_err(Failure::fault)
    }

    fn order(&self, row: &TaskRow, group: u64, sampling: Sampling, generations: u32) -> GroupOrder {
        GroupOrder {
            task: row.task.clone(),
            seed: episode_seed(self.plan.run, row, group),
            policy: self.policy,
            sampling,
            generations,
            deadline_ms: self.options.lease_ms,
        }
    }

    /// Success on the held-out tasks; nothing where the recipe has none.
    ///
    /// # Errors
    /// As [`Collector::collect`].
    pub fn evaluate(
        &mut self,
        mut files: Option<&mut RunDirectory>,
        progress: &Progress,
    ) -> Result<Option<Evaluated>, Failure> {
        let Some(evaluation) = self.plan.recipe.evaluation.clone() else { return Ok(None) };
        let round = self.rounds;
        self.rounds += 1;
        let (sampling, generations) =
            (evaluation.sampling.to_sampling(), evaluation.num_generations);
        let orders = (0..)
            .zip(&self.plan.eval)
            .map(|(index, row)| {
                let group = evaluation_group(round, index);
                (group, self.order(row, group, sampling, generations))
            })
            .collect();
        let mut watcher = Watcher {
            files: files.as_deref_mut(),
            progress,
            position: u64::from(self.step),
            what: "evaluating".into(),
        };
        let groups = self.collector.collect(orders, &mut watcher)?;
        self.collector.confirm(&groups);
        let context = EpisodeContext { step: self.step, advantages: None, sampling: &[] };
        for group in &groups {
            if let Some(files) = files.as_deref_mut() {
                files.episodes(&group.rollouts, &context).map_err(Failure::fault)?;
            }
        }
        let evaluated = evaluated(&groups);
        if let Some(files) = files {
            let record = serde_json::json!({"evaluation": evaluated, "step": self.step});
            files.metrics(&record).map_err(Failure::fault)?;
            let base = self.base_model();
            files
                .keep_best(self.step, self.policy_files(&base), &evaluated)
                .map_err(Failure::fault)?;
        }
        let milestones = evaluated
            .milestone_reward
            .map_or_else(String::new, |it| format!(", milestone reward {it:.3}"));
        progress.note(&format!(
            "step {}: success {:.3}, reward {:.3}{milestones} on {} held-out episodes",
            self.step, evaluated.success, evaluated.reward, evaluated.episodes
        ));
        progress.record("evaluation", &evaluated);
        Ok(Some(evaluated))
    }

    /// Plays the training groups of these numbers as the policy is now, trains on none of them, and
    /// examines how their ids were sampled: evidence and the actor's kind of device, by episode.
    ///
    /// # Errors
    /// As [`Collector::collect`]; a failing device.
    pub fn examine(
        &mut self,
        groups: Range<u64>,
        order: &mut TaskOrder,
        progress: &Progress,
    ) -> Result<Vec<(String, SamplingEvidence)>, Failure> {
        let settings = self.plan.recipe.training;
        let position = groups.start * u64::from(settings.num_generations);
        let orders = self.training_orders(groups, order);
        let mut watcher = Watcher { files: None, progress, position, what: "calibrating".into() };
        let groups = self.collector.collect(orders, &mut watcher)?;
        self.collector.confirm(&groups);
        let mut found = Vec::new();
        for group in &groups {
            let episodes: Vec<_> = group.rollouts.iter().map(|it| &it.episode).collect();
            let (adapter, images) = (Some(&self.adapter), self.plan.images.as_ref());
            let ids = examine(&self.decoder, adapter, images, settings.sampling(), &episodes)
                .map_err(Failure::fault)?;
            for (source, ids) in group.sources.iter().zip(&ids) {
                found.push((device_kind(&source.device).to_owned(), SamplingEvidence::of(ids)));
            }
        }
        Ok(found)
    }

    pub(super) fn training_orders(
        &self,
        groups: Range<u64>,
        order: &mut TaskOrder,
    ) -> Vec<(u64, GroupOrder)> {
        let settings = self.plan.recipe.training;
        groups
            .filter_map(|group| {
                let row = &self.plan.train[order.row(group)?];
                let generations = settings.num_generations;
                Some((group, self.order(row, group, settings.sampling(), generations)))
            })
            .collect()
    }

    /// Trains to the last step of the recipe.
    ///
    /// # Errors
    /// As [`Collector::collect`]; a failing device; a run directory that cannot be written.
    pub fn train(
        &mut self,
        files: &mut RunDirectory,
        progress: &mut Progress,
    ) -> Result<f64, Failure> {
        let settings = self.plan.recipe.training;
        let every = self.plan.recipe.evaluation.as_ref().map_or(0, |it| it.every);
        let mut order = TaskOrder::new(self.plan.run, &self.plan.train);
        let mut seconds = 0.0;
        progress.start("train", u64::from(settings.max_steps));
        while self.step < settings.max_steps {
            let started = Instant::now();
            let record = self.one_step(&mut order, files, progress)?;
            seconds += started.elapsed().as_secs_f64();
            files.step(&record, record.update.grad_norm).map_err(Failure::fault)?;
            progress.at(
                u64::from(record.step),
                &line(&record, settings.max_steps),
                "step",
                &record,
            );
            if every > 0 && self.step.is_multiple_of(every) && self.step < settings.max_steps {
                self.evaluate(Some(&mut *files), progress)?;
            }
        }
        progress.end();
        Ok(seconds)
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
        arguments: Vec::new(),
    };
    LocalActors::start(config, options.local_actors).map(Some).map_err(Failure::mistake)
}
