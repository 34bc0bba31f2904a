//! A small run, played and written without actors and without learning.

use std::path::PathBuf;

use learner::{
    audit::{
        Audited, Presented, Reason, Rejected,
        sampling::{Flagged, SamplingEvidence, SamplingJudge},
    },
    curriculum::{TaskOrder, episode_seed, evaluation_group},
    files::{Answer, EpisodeContext, PolicyFiles, RunDirectory, RunState, Status},
    leases::{GroupOrder, LeaseBook, Submission},
    plan::Plan,
    train::{
        intake::{CollectCounts, CollectedGroup},
        record::{Completions, StepRecord, Traffic, evaluated},
        update::UpdateReport,
    },
};
use policy::model::{Adapter, Checkpoint, LoadDtype};
use protocol::{
    ActorId, AdapterManifest, Digest, Episode, EpisodeId, Lease, PolicyDigest, Sampling,
};
use serde_json::{Value, json};

use crate::{
    bench::Bench,
    support::{Say, World, text},
};

/// A run that is played without actors and without learning: what is written is what counts.
pub(crate) struct Player {
    plan: Plan,
    world: World,
    pub(crate) files: RunDirectory,
    book: LeaseBook,
    policy: PolicyDigest,
    adapters: Vec<Adapter>,
    rounds: u32,
    judge: SamplingJudge,
    before: Value,
}

pub(crate) const STEPS: u32 = 2;

pub(crate) fn actor() -> ActorId {
    ActorId(Digest::of(b"actor"))
}

/// Sampling evidence with numbers that decimal text does not give back exactly.
fn examined(judge: &SamplingJudge, audited: &Audited) -> Option<Flagged> {
    let tokens = audited.policy_audit.assistant_tokens;
    let deficit_max = (0.1 + 0.2) * 1e-3;
    let at = audited.episode.spans[0].offset as usize;
    let evidence = SamplingEvidence {
        tokens,
        unexplained: 1,
        deficit_max,
        deficit_at: at,
        deficit_mean: deficit_max / tokens as f64,
        logp_gap_max: 2e-3,
        logp_gap_at: at,
        logp_gap_mean: 9e-4 * (1.0 / 49.0 * 49.0),
    };
    Some(judge.judge("cpu", evidence))
}

impl Player {
    fn new(bench: &mut Bench) -> Self {
        bench.recipe["training"] = json!({
            "num_generations": 2, "max_steps": STEPS, "per_device_train_batch_size": 4,
            "max_completion_length": 400, "failure_policy": "drop",
        });
        // Only what is enforced takes an accepted episode back.
        bench.recipe["audit"] = json!({"sampling": "enforce"});
        let plan = bench.plan().expect("valid");
        let judge = plan.sampling_judge("cpu").expect("built-in bounds");
        let mut files = RunDirectory::create(&plan).expect("created");
        files.judged_by(&judge);
        files.computed_on("cpu");
        let checkpoint = Checkpoint::open(&plan.recipe.model.path).expect("a checkpoint");
        let device = "cpu".parse::<policy::device::DeviceChoice>().expect("a device");
        let device = device.resolve().open().expect("opens");
        let decoder = checkpoint.load(&device, LoadDtype::F32).expect("loads");
        let config = plan.recipe.lora.to_config();
        let adapters = (0..u64::from(STEPS) + 1)
            .map(|seed| Adapter::init(&config, &decoder, seed).expect("an adapter"));
        Self {
            world: World::of(plan.audit_terms()),
            files,
            judge,
            before: Value::Null,
            book: LeaseBook::new(plan.run, 8),
            policy: PolicyDigest(Digest::of(b"")),
            adapters: adapters.collect(),
            rounds: 0,
            plan,
        }
    }

    fn publish(&mut self, step: u32) {
        let bytes = self.adapters[step as usize].to_safetensors().expect("bytes");
        let base = &self.plan.model.weights;
        let manifest = AdapterManifest::build(step.into(), base, &bytes).expect("a manifest");
        self.files.policy(&manifest, &bytes).expect("written");
        self.policy = manifest.policy;
    }

    /// Plays a group. Where `tried` says so, an actor tries with a false reward first, and an accepted
    /// episode is taken back later.
    fn group(
        &mut self,
        group: u64,
        sampling: Sampling,
        generations: u32,
        tried: bool,
    ) -> CollectedGroup {
        let rows = if group < 1 << 63 { &self.plan.train } else { &self.plan.eval };
        let row = if group < 1 << 63 {
            TaskOrder::new(self.plan.run, rows).row(group).expect("a row")
        } else {
            (group & 0xffff_ffff) as usize
        };
        let row = &rows[row];
        let order = GroupOrder {
            task: row.task.clone(),
            seed: episode_seed(self.plan.run, row, group),
            policy: self.policy,
            sampling,
            generations,
            deadline_ms: 1000,
        };
        self.files.ordered(group, &order).expect("written");
        self.book.open(group, order).expect("fresh");
        let (mut forge, mut take_back) = (tried, tried);
        let mut rollouts = Vec::new();
        loop {
            while let Some(lease) = self.book.grant(actor(), 0, 1).pop() {
                let turns = match lease.id.generation {
                    0 => self.well(&lease),
                    _ if tried && !take_back => vec![text("no")],
                    _ if self.plan.environment.answers => vec![text("I stop.")],
                    _ => vec![Say::Guess(9), text("I stop.")],
                };
                let mut episode = self.world.play(&lease, &turns);
                if std::mem::take(&mut forge) {
                    episode.reward = 0.75;
                }
                rollouts.extend(self.answer(&episode));
            }
            let complete = self.book.take_complete().expect("complete").group;
            if !std::mem::take(&mut take_back) {
                self.book.confirm(complete);
                break;
            }
            self.book.reopen(group, &[1]);
            let at = rollouts.iter().position(|it: &Audited| it.episode.lease.generation == 1);
            let audited = rollouts.remove(at.expect("it was played"));
            let rejected = Rejected {
                id: audited.id,
                lease: Some(audited.episode.lease),
                reason: Reason::UnlikelyToken { at: 3, found: 2.0, bound: 0.1 },
                episode: Some(Box::new(audited.episode)),
            };
            self.files.take_back(actor(), &rejected).expect("written");
        }
        rollouts.sort_by_key(|it: &Audited| it.episode.lease);
        CollectedGroup { group, rollouts, sources: Vec::new() }
    }

    /// The turns of who knows how to play.
    fn well(&self, lease: &Lease) -> Vec<Say> {
        let solution = self.world.environment.solution(&lease.task, lease.seed).expect("fits");
        match solution {
            Some(solution) => vec![text(&solution.answer)],
            None => self.world.bisection(lease),
        }
    }

    fn answer(&mut self, episode: &Episode) -> Option<Audited> {
        let body = episode.encode().expect("encodes");
        let (id, lease) = (EpisodeId::of_body(&body), episode.lease);
        let standing = self.book.standing(lease);
        assert_eq!(self.book.submit(actor(), lease, id), Submission::First);
        let answer =
            Answer { actor: actor(), lease, attempt: 0, behind: 0, device: "cpu", body: &body };
        match self.world.auditor.audit(Presented {
            id,
            body: &body,
            standing: &standing,
            behind: 0,
        }) {
            Ok(audited) => {
                self.files.accept(&answer).expect("written");
                self.book.accept(lease);
                Some(audited)
            }
            Err(rejected) => {
                self.files.reject(&answer, &rejected).expect("written");
                self.book.reject(lease);
                None
            }
        }
    }

    fn evaluate(&mut self, step: u32) -> Value {
        let sampling = self.plan.recipe.evaluation.as_ref().expect("one").sampling.to_sampling();
        let round = self.rounds;
        self.rounds += 1;
        let tasks = self.plan.eval.len() as u32;
        let groups: Vec<_> = (0..tasks)
            .map(|row| self.group(evaluation_group(round, row), sampling, 1, false))
            .collect();
        for group in &groups {
            let context =
                EpisodeContext { step, policy_step: step, advantages: None, sampling: &[] };
            self.files.episodes(&group.rollouts, &context).expect("written");
        }
        let measured = evaluated(&groups);
        let evaluated = json!(measured);
        self.files.metrics(&json!({"evaluation": evaluated, "step": step})).expect("written");
        let adapter = &self.adapters[step as usize];
        let digest = Digest::of(&adapter.to_safetensors().expect("bytes"));
        let policy = PolicyFiles { adapter, digest, base: "model", value_head: None };
        self.files.keep_best(step, policy, &measured).expect("written");
        evaluated
    }

    fn step(&mut self, step: u32) {
        let settings = self.plan.recipe.training;
        let played = self.policy;
        let groups: Vec<_> = (0..2)
            .map(|at| {
                let group = u64::from(step) * 2 + at;
                self.group(group, settings.sampling(), 2, group == 1)
            })
            .collect();
        let rewards = |group: &CollectedGroup| -> Vec<f64> {
            group.rollouts.iter().map(|it| it.reward.training_reward).collect()
        };
        let advantages: Vec<_> =
            groups.iter().map(|it| settings.advantages(&rewards(it)).expect("finite")).collect();
        self.publish(step + 1);
        for (group, advantages) in groups.iter().zip(&advantages) {
            let advantages = Some(advantages.advantages.as_slice());
            let sampling: Vec<_> =
                group.rollouts.iter().map(|it| examined(&self.judge, it)).collect();
            let context =
                EpisodeContext { step, policy_step: step, advantages, sampling: &sampling };
            self.files.episodes(&group.rollouts, &context).expect("written");
        }
        let all = evaluated(&groups);
        let rollouts = || groups.iter().flat_map(|group| &group.rollouts);
        let record = StepRecord {
            step: step + 1,
            reward: all.reward,
            milestone_reward: all.milestone_reward,
            reward_std: advantages.iter().map(|it| it.std).sum::<f64>() / 2.0,
            success: all.success,
            mixed_groups: advantages.iter().filter(|it| it.mixed()).count() as f64 / 2.0,
            update: UpdateReport { grad_norm: 0.5, ..UpdateReport::default() },
            learning_rate: settings.optimizer.learning_rate_at(step.into(), STEPS.into()),
            staleness: 0,
            episodes: all.episodes,
            stream_tokens: rollouts().map(|it| it.episode.tokens.len() as u64).sum(),
            completions: Completions::of(&groups),
            malformed: all.malformed,
            seconds: 1.0,
            rollout_seconds: 0.5,
            update_seconds: 0.5,
            broadcast_seconds: 0.1,
            audit_seconds: 0.1,
            rollout_tokens_per_second: 1.0,
            update_tokens_per_second: 1.0,
            policy: played,
            sampling: None,
            traffic: Traffic::default(),
        };
        self.files.step(&record, 0.5).expect("written");
    }

    /// Everything up to the last step, nothing closed.
    pub(crate) fn play(bench: &mut Bench) -> Self {
        let mut this = Self::new(bench);
        this.publish(0);
        this.commit(0);
        this.before = this.evaluate(0);
        this.commit(0);
        for step in 0..STEPS {
            this.step(step);
            this.commit(step + 1);
        }
        this.files.keep().expect("synced");
        this
    }

    /// The first step, and a group of the second, whose learner then ends.
    pub(crate) fn stop_in_the_middle(bench: &mut Bench) -> (Plan, PathBuf) {
        let mut this = Self::new(bench);
        this.publish(0);
        this.commit(0);
        this.before = this.evaluate(0);
        this.commit(0);
        this.step(0);
        this.commit(1);
        let sampling = this.plan.recipe.training.sampling();
        this.group(2, sampling, 2, true);
        this.files.keep().expect("synced");
        (this.plan, this.files.path().to_owned())
    }

    fn commit(&mut self, steps: u32) {
        let counts = CollectCounts { leases: self.book.settled_counts(), ..Default::default() };
        let progress = self.files.progress().clone();
        let (rounds, before, after) = (self.rounds, None, None);
        let state = RunState { steps, rounds, seconds: 1.5, before, after, counts, progress };
        self.files.commit(state, &[("adapter", b"weights")]).expect("committed");
    }

    pub(crate) fn finish(bench: &mut Bench) -> PathBuf {
        let mut this = Self::play(bench);
        let (first, last) = (this.adapters[0].clone(), this.adapters[STEPS as usize].clone());
        let digest = Digest::of(&last.to_safetensors().expect("bytes"));
        let policy = PolicyFiles { adapter: &last, digest, base: "model", value_head: None };
        this.files.adapter(STEPS, policy).expect("written");
        this.files.update_evidence(&first, &last).expect("comparable");
        let after = this.evaluate(STEPS);
        this.files.evaluations(Some(&this.before), Some(&after));
        let balance = Some(this.book.balance());
        this.files.close(Status::Completed, "", &this.book.counts(), balance).expect("closed");
        this.files.path().to_owned()
    }
}
