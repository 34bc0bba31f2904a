//! A run's directory is enough to verify the run, and whoever changes it is found out by name.

#[path = "support/bench.rs"]
mod bench;
mod support;

use std::{
    fs,
    path::{Path, PathBuf},
};

use bench::Bench;
use learner::{
    advantage::group_advantages,
    audit::{Audited, Presented},
    curriculum::{TaskOrder, episode_seed, evaluation_group},
    files::{Answer, EpisodeContext, RunDirectory, Status, read_manifest},
    journal::{Entry, Journal, JournalReader, Record},
    leases::{GroupOrder, LeaseBook, Submission},
    plan::Plan,
    train::{
        collect::CollectedGroup,
        record::{StepRecord, evaluated},
        update::UpdateReport,
    },
    verify::{Archive, CheckName, Report, verify},
};
use policy::model::{Adapter, Checkpoint, LoadDtype};
use protocol::{
    ActorId, AdapterManifest, Digest, Episode, EpisodeId, PolicyDigest, RunId, Sampling,
};
use serde_json::{Value, json};
use support::{Say, World, text};

/// A run that is played without actors and without learning: what is written is what counts.
struct Player {
    plan: Plan,
    world: World,
    files: RunDirectory,
    book: LeaseBook,
    policy: PolicyDigest,
    adapters: Vec<Adapter>,
    rounds: u32,
}

const STEPS: u32 = 2;

fn actor() -> ActorId {
    ActorId(Digest::of(b"actor"))
}

impl Player {
    fn new(bench: &mut Bench) -> Self {
        bench.recipe["training"] = json!({
            "num_generations": 2, "max_steps": STEPS, "per_device_train_batch_size": 4,
            "max_completion_length": 400, "failure_policy": "drop",
        });
        let plan = bench.plan().expect("valid");
        let checkpoint = Checkpoint::open(&plan.recipe.model.path).expect("a checkpoint");
        let device = "cpu".parse::<policy::device::DeviceChoice>().expect("a device");
        let device = device.resolve().open().expect("opens");
        let decoder = checkpoint.load(&device, LoadDtype::F32).expect("loads");
        let config = plan.recipe.lora.to_config();
        let adapters = (0..u64::from(STEPS) + 1)
            .map(|seed| Adapter::init(&config, &decoder, seed).expect("an adapter"));
        Self {
            world: World::of(plan.audit_terms()),
            files: RunDirectory::create(&plan).expect("created"),
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

    /// Plays a group; where `forge` says so an actor tries with a false reward first.
    fn group(
        &mut self,
        group: u64,
        sampling: Sampling,
        generations: u32,
        forge: bool,
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
        let mut forge = forge;
        let mut rollouts = Vec::new();
        while let Some(lease) = self.book.grant(actor(), 0, 1).pop() {
            let turns = match lease.id.generation {
                0 => self.world.bisection(&lease),
                _ => vec![Say::Guess(9), text("I stop.")],
            };
            let mut episode = self.world.play(&lease, &turns);
            if std::mem::take(&mut forge) {
                episode.reward = 0.75;
            }
            rollouts.extend(self.answer(&episode));
        }
        while let Some(complete) = self.book.take_complete() {
            self.book.confirm(complete.group);
        }
        rollouts.sort_by_key(|it: &Audited| it.episode.lease);
        CollectedGroup { group, rollouts, sources: Vec::new() }
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
            let context = EpisodeContext { step, advantages: None, sampling: &[] };
            self.files.episodes(&group.rollouts, &context).expect("written");
        }
        let measured = evaluated(&groups);
        let evaluated = json!(measured);
        self.files.metrics(&json!({"evaluation": evaluated, "step": step})).expect("written");
        let adapter = &self.adapters[step as usize];
        let digest = Digest::of(&adapter.to_safetensors().expect("bytes"));
        self.files.keep_best(step, adapter, digest, "model", &measured).expect("written");
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
        let advantages: Vec<_> = groups
            .iter()
            .map(|it| group_advantages(&rewards(it), settings.scale_rewards).expect("finite"))
            .collect();
        self.publish(step + 1);
        for (group, advantages) in groups.iter().zip(&advantages) {
            let advantages = Some(advantages.advantages.as_slice());
            let context = EpisodeContext { step, advantages, sampling: &[] };
            self.files.episodes(&group.rollouts, &context).expect("written");
        }
        let all = evaluated(&groups);
        let rollouts = || groups.iter().flat_map(|group| &group.rollouts);
        let sampled: usize = rollouts().map(|it| it.policy_audit.assistant_tokens).sum();
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
            completion_tokens: sampled as f64 / all.episodes as f64,
            malformed: all.malformed,
            seconds: 1.0,
            rollout_seconds: 0.5,
            update_seconds: 0.5,
            rollout_tokens_per_second: 1.0,
            update_tokens_per_second: 1.0,
            policy: played,
            sampling: None,
        };
        self.files.step(&record, 0.5).expect("written");
    }

    /// Everything up to the last step, nothing closed.
    fn play(bench: &mut Bench) -> Self {
        let mut this = Self::new(bench);
        this.publish(0);
        this.evaluate(0);
        (0..STEPS).for_each(|step| this.step(step));
        this.files.keep().expect("synced");
        this
    }

    fn finish(bench: &mut Bench) -> PathBuf {
        let mut this = Self::play(bench);
        let (first, last) = (this.adapters[0].clone(), this.adapters[STEPS as usize].clone());
        let digest = Digest::of(&last.to_safetensors().expect("bytes"));
        this.files.adapter(STEPS, &last, digest, "model").expect("written");
        this.files.update_evidence(&first, &last).expect("comparable");
        let after = this.evaluate(STEPS);
        this.files.evaluations(None, Some(&after));
        this.files.close(Status::Completed, "", &this.book.counts()).expect("closed");
        this.files.path().to_owned()
    }
}

fn audit(run: &Path) -> Report {
    verify(run, None).expect("a run")
}

fn reasons(report: &Report) -> Vec<&'static str> {
    report.findings().map(|finding| finding.reason).collect()
}

#[test]
fn an_untouched_run_holds_with_and_without_its_data_and_model() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let report = verify(&run, Some(&bench.path("model"))).expect("a run");
    assert!(report.holds, "{report}");
    assert_eq!(report.checks.len(), CheckName::ALL.len());
    assert!(report.summary().ends_with("holds: 13 of 13 checks"), "{}", report.summary());
    let text = report.to_string();
    assert!(text.contains("14 episodes accepted, 1 refused"), "{text}");
    assert!(text.contains("tasks by the data sets"), "{text}");
    // Elsewhere, long after: only the directory is there.
    let elsewhere = tempfile::tempdir().expect("a directory");
    let copy = elsewhere.path().join("copy");
    copy_tree(&run, &copy);
    drop(bench);
    let report = audit(&copy);
    assert!(report.holds, "{report}");
    assert!(report.to_string().contains("order of tasks only"), "{report}");
}

#[test]
fn a_run_that_was_killed_holds_as_far_as_it_came() {
    let mut bench = Bench::new();
    let player = Player::play(&mut bench);
    let run = player.files.path().to_owned();
    drop(player);
    let segment = run.join("journal/00000000.segment");
    let mut bytes = fs::read(&segment).expect("read");
    bytes.extend_from_slice(&[7; 5]);
    fs::write(&segment, &bytes).expect("written");
    let mut evidence = fs::read(run.join("evidence.jsonl")).expect("read");
    evidence.extend_from_slice(b"{\"previous\":\"to");
    fs::write(run.join("evidence.jsonl"), evidence).expect("written");
    assert_eq!(read_manifest(&run).expect("there").status, Status::Running);
    let report = audit(&run);
    assert!(report.holds, "{report}");
    assert!(report.to_string().contains("torn record"), "{report}");
}

#[test]
fn episodes_and_adapters_can_be_taken_out_again() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let archive = Archive::open(&run).expect("a run");
    let chosen = archive.choose(5, 7);
    assert_eq!((archive.episodes().len(), chosen.len()), (14, 5));
    assert_eq!(chosen, archive.choose(5, 7));
    assert_ne!(chosen, archive.choose(5, 8));
    assert_eq!(archive.choose(99, 0).len(), 14);
    for id in chosen {
        let taken = archive.episode(&id).expect("there");
        let episode = Episode::decode(&taken.body).expect("an episode");
        assert_eq!((episode.lease, episode.policy), (taken.lease.id, taken.lease.policy));
        assert_eq!(archive.lease_of(&id), Some(episode.lease));
        let bytes = archive.adapter_bytes(&taken.lease.policy).expect("archived");
        let base = archive.manifest().model.weights_sha256;
        assert_eq!(PolicyDigest::new(&base, &Digest::of(&bytes)), episode.policy);
    }
    let unknown = EpisodeId(Digest::of(b"unknown"));
    assert!(archive.episode(&unknown).is_err());
}

#[test]
fn without_room_in_the_archive_the_audit_says_what_it_lacks() {
    let mut bench = Bench::new();
    bench.recipe["evidence"] = json!({"archive_mib": 0});
    let run = Player::finish(&mut bench);
    let report = audit(&run);
    assert!(report.holds, "{report}");
    assert!(report.to_string().contains("3 policies that played are not archived"), "{report}");
    let policies = read_manifest(&run).expect("there").progress.expect("it ran").policies;
    assert_eq!((policies.announced, policies.archived, policies.bytes), (3, 0, 0));
    let archive = Archive::open(&run).expect("a run");
    let lease = archive.episode(&archive.choose(1, 0)[0]).expect("there").lease;
    // The last adapter is saved in any case.
    if let Err(error) = archive.adapter_bytes(&lease.policy) {
        assert!(error.to_string().contains("evidence.archive_mib"), "{error}");
    }
}

#[test]
fn what_is_no_run_is_a_mistake() {
    let dir = tempfile::tempdir().expect("a directory");
    let error = verify(dir.path(), None).expect_err("refused").to_string();
    assert!(error.contains("is no run: manifest.json cannot be read"), "{error}");
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let error = verify(&run, Some(dir.path())).expect_err("refused").to_string();
    assert!(error.starts_with("--model "), "{error}");
}

fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir(to).expect("created");
    for entry in fs::read_dir(from).expect("listed") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("copied");
        }
    }
}

/// Edits the manifest as JSON.
fn manifest(run: &Path, edit: impl FnOnce(&mut Value)) {
    let path = run.join("manifest.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
    edit(&mut value);
    fs::write(path, value.to_string()).expect("written");
}

fn replace(run: &Path, name: &str, from: &str, to: &str) {
    let path = run.join(name);
    let text = fs::read_to_string(&path).expect("read");
    let edited = text.replacen(from, to, 1);
    assert_ne!(text, edited, "{name} has no {from}");
    fs::write(path, edited).expect("written");
}

fn lines(run: &Path) -> Vec<String> {
    let text = fs::read_to_string(run.join("evidence.jsonl")).expect("read");
    text.lines().map(str::to_owned).collect()
}

fn write_lines(run: &Path, lines: &[String]) {
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(run.join("evidence.jsonl"), text).expect("written");
}

/// Writes lines with their chain rebuilt and the manifest's head set to it, as a careful forger would.
fn reseal(run: &Path, lines: &[String]) {
    let id = read_manifest(run).expect("there").run;
    let mut head = Digest::of_parts("rollcall-evidence-v1", &[&id.0.0]);
    let mut sealed = Vec::new();
    for line in lines {
        // {"previous":"<64>"
        let line = format!("{{\"previous\":\"{head}\"{}", &line[13 + 64 + 1..]);
        head = Digest::of(line.as_bytes());
        sealed.push(line);
    }
    write_lines(run, &sealed);
    manifest(run, |it| {
        it["evidence"]["head"] = json!(head);
        it["evidence"]["rows"] = json!(sealed.len());
    });
}

/// Edits the one line that has `mark` and reseals the log.
fn reline(run: &Path, mark: &str, from: &str, to: &str) {
    let mut all = lines(run);
    let line = all.iter_mut().find(|line| line.contains(mark)).expect("a line");
    let edited = line.replacen(from, to, 1);
    assert_ne!(*line, edited, "{line} has no {from}");
    *line = edited;
    reseal(run, &all);
}

fn entries(run: &Path) -> (RunId, Vec<Entry>) {
    let id = read_manifest(run).expect("there").run;
    let mut reader = JournalReader::open(run.join("journal"), id).expect("a journal");
    let mut all = Vec::new();
    while let Some(entry) = reader.read().expect("whole") {
        all.push(entry);
    }
    (id, all)
}

/// Writes the journal anew, with its chain, after `edit`; the manifest's account of it too.
fn rejournal(run: &Path, edit: impl FnOnce(&mut Vec<Record<'_>>)) {
    let (id, entries) = entries(run);
    let mut records: Vec<Record<'_>> =
        entries.iter().map(|entry| entry.record().expect("a record")).collect();
    edit(&mut records);
    fs::remove_dir_all(run.join("journal")).expect("removed");
    let mut journal = Journal::create(run.join("journal"), id).expect("created");
    for record in &records {
        journal.append(record).expect("appended");
    }
    journal.sync().expect("synced");
    manifest(run, |it| it["journal"] = json!(journal.so_far()));
}

/// The bytes that answer a lease, and their id.
fn answer(run: &Path, group: u64, generation: u32) -> (EpisodeId, Episode, Vec<u8>) {
    let (_, entries) = entries(run);
    entries
        .iter()
        .find_map(|entry| match entry.record().expect("a record") {
            Record::Accepted { body, .. } => {
                let episode = Episode::decode(body).expect("an episode");
                let found = (episode.lease.group, episode.lease.generation) == (group, generation);
                found.then(|| (EpisodeId::of_body(body), episode, body.to_vec()))
            }
            _ => None,
        })
        .expect("an answer")
}

/// Puts other bytes in the place of an accepted episode, everywhere.
fn substitute(run: &Path, old: EpisodeId, body: &[u8]) {
    rejournal(run, |records| {
        for record in records {
            if let Record::Accepted { body: there, .. } = record
                && EpisodeId::of_body(there) == old
            {
                // The records live as long as this closure's caller; the bytes as long as the test.
                *there = Box::leak(body.to_vec().into_boxed_slice());
            }
        }
    });
    let new = EpisodeId::of_body(body).to_string();
    reline(run, &old.to_string(), &old.to_string(), &new);
}

fn swap_bytes(run: &Path, name: &str, find: impl Fn(&[u8]) -> usize) {
    let path = run.join(name);
    let mut bytes = fs::read(&path).expect("read");
    let at = find(&bytes);
    bytes[at] ^= 1;
    fs::write(path, bytes).expect("written");
}

fn middle(bytes: &[u8]) -> usize {
    bytes.len() / 2
}

fn first_of(run: &Path, folder: &str) -> String {
    let mut names: Vec<String> = fs::read_dir(run.join(folder))
        .expect("listed")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    format!("{folder}/{}", names[0])
}

/// A line of a training episode that won.
const WON: &str = "\"training_reward\":1.0";

type Tampering = (&'static str, fn(&Path), &'static str);

/// What is done to the directory, and the name under which it must be found.
const TAMPERINGS: [Tampering; 36] = [
    (
        "an evidence line edited",
        |run| {
            replace(run, "evidence.jsonl", "I stop.", "I won!!");
        },
        "evidence_chain",
    ),
    (
        "an evidence line dropped",
        |run| {
            let mut all = lines(run);
            all.remove(4);
            write_lines(run, &all);
        },
        "evidence_chain",
    ),
    (
        "evidence lines reordered",
        |run| {
            let mut all = lines(run);
            all.swap(4, 5);
            write_lines(run, &all);
        },
        "evidence_chain",
    ),
    (
        "the evidence cut short",
        |run| {
            let mut all = lines(run);
            all.pop();
            write_lines(run, &all);
        },
        "evidence_length",
    ),
    (
        "the evidence cut in a line",
        |run| {
            let mut text = fs::read(run.join("evidence.jsonl")).expect("read");
            text.truncate(text.len() - 9);
            fs::write(run.join("evidence.jsonl"), text).expect("written");
        },
        "evidence_line",
    ),
    (
        "the manifest's head changed",
        |run| {
            manifest(run, |it| it["evidence"]["head"] = json!(Digest::of(b"other")));
        },
        "evidence_head",
    ),
    (
        "a reward edited, all hashes mended",
        |run| {
            reline(run, WON, WON, "\"training_reward\":0.9");
        },
        "reward",
    ),
    (
        "an advantage edited, all hashes mended",
        |run| {
            let (id, ..) = answer(run, 0, 0);
            let advantage = lines(run)
                .into_iter()
                .find(|line| line.contains(&id.to_string()))
                .and_then(|line| {
                    let tail = line.split("\"advantage\":").nth(1)?.to_owned();
                    tail.split(',').next().map(str::to_owned)
                })
                .expect("an advantage");
            let from = format!("\"advantage\":{advantage}");
            reline(run, &id.to_string(), &from, "\"advantage\":3.5");
        },
        "advantage",
    ),
    (
        "a message edited, all hashes mended",
        |run| {
            reline(run, "I stop.", "I stop.", "I won!!");
        },
        "evidence_row",
    ),
    (
        "a verified flag cleared, all hashes mended",
        |run| {
            reline(run, WON, "\"replay_verified\":true", "\"replay_verified\":false");
        },
        "evidence_row",
    ),
    (
        "a step renumbered, all hashes mended",
        |run| {
            let (id, ..) = answer(run, 3, 1);
            reline(run, &id.to_string(), "\"optimizer_step\":1", "\"optimizer_step\":9");
        },
        "evidence_row",
    ),
    (
        "an episode's line left out, all hashes mended",
        |run| {
            let mut all = lines(run);
            all.remove(4);
            reseal(run, &all);
        },
        "group_size",
    ),
    (
        "a group's lines left out, all hashes mended",
        |run| {
            let mut all = lines(run);
            all.drain(3..5);
            reseal(run, &all);
        },
        "group_missing",
    ),
    (
        "an evidence line of no episode, all hashes mended",
        |run| {
            let (id, ..) = answer(run, 0, 1);
            let other = Digest::of(b"other").to_string();
            reline(run, &id.to_string(), &id.to_string(), &other);
        },
        "episode_missing",
    ),
    (
        "a byte of the journal flipped",
        |run| {
            swap_bytes(run, "journal/00000000.segment", middle);
        },
        "journal_damaged",
    ),
    (
        "the journal cut short",
        |run| {
            let path = run.join("journal/00000000.segment");
            let mut bytes = fs::read(&path).expect("read");
            bytes.truncate(bytes.len() - 1);
            fs::write(path, bytes).expect("written");
        },
        "journal_torn",
    ),
    (
        "a journal segment deleted",
        |run| {
            fs::remove_file(run.join("journal/00000000.segment")).expect("removed");
        },
        "segment_missing",
    ),
    (
        "the last journal record left out",
        |run| {
            let head = read_manifest(run).expect("there").progress.expect("it ran").journal;
            rejournal(run, |records| drop(records.pop()));
            manifest(run, |it| it["journal"] = json!(head));
        },
        "journal_length",
    ),
    (
        "an episode moved under another lease",
        |run| {
            let (old, loser, _) = answer(run, 0, 1);
            let (_, winner, _) = answer(run, 0, 0);
            let moved = Episode { lease: loser.lease, ..winner };
            substitute(run, old, &moved.encode().expect("encodes"));
        },
        "trace_chain",
    ),
    (
        "an episode of another group in its place",
        |run| {
            let (old, loser, _) = answer(run, 0, 1);
            let (_, mut other, _) = answer(run, 1, 0);
            other.lease = loser.lease;
            support::rechain(&mut other);
            substitute(run, old, &other.encode().expect("encodes"));
        },
        "task_mismatch",
    ),
    (
        "an episode's tokens changed",
        |run| {
            let (old, mut episode, _) = answer(run, 0, 1);
            let last = episode.tokens.len() - 2;
            episode.tokens[last] = 65;
            substitute(run, old, &episode.encode().expect("encodes"));
        },
        "span_ids",
    ),
    (
        "an episode whose reward was raised",
        |run| {
            let (old, mut episode, _) = answer(run, 0, 1);
            episode.reward = 1.0;
            substitute(run, old, &episode.encode().expect("encodes"));
        },
        "reward_mismatch",
    ),
    (
        "a refused episode slipped in as accepted",
        |run| {
            let (_, all) = entries(run);
            let refused = all
                .iter()
                .find_map(|entry| match entry.record().expect("a record") {
                    Record::Rejected { body, .. } => body.map(<[u8]>::to_vec),
                    _ => None,
                })
                .expect("one was refused");
            let lease = Episode::decode(&refused).expect("an episode").lease;
            let (old, ..) = answer(run, lease.group, lease.generation);
            substitute(run, old, &refused);
        },
        "reward_mismatch",
    ),
    (
        "a lease answered twice",
        |run| {
            let (.., body) = answer(run, 0, 0);
            rejournal(run, |records| {
                let body = Box::leak(body.into_boxed_slice());
                records.push(Record::Accepted {
                    actor: actor(),
                    attempt: 0,
                    behind: 0,
                    device: "cpu",
                    body,
                });
            });
        },
        "lease_spent",
    ),
    (
        "a seed of somebody's choosing",
        |run| {
            rejournal(run, |records| {
                for record in records {
                    if let Record::Group { group: 2, order } = record {
                        order.seed ^= 1;
                    }
                }
            });
        },
        "lease_seed",
    ),
    (
        "another temperature in the leases",
        |run| {
            rejournal(run, |records| {
                for record in records {
                    if let Record::Group { group: 2, order } = record {
                        order.sampling.temperature = 0.7;
                    }
                }
            });
        },
        "lease_sampling",
    ),
    (
        "a task out of its turn",
        |run| {
            rejournal(run, |records| {
                let task = |records: &[Record<'_>], wanted: u64| {
                    records.iter().find_map(|record| match record {
                        Record::Group { group, order } if *group == wanted => {
                            Some(order.task.clone())
                        }
                        _ => None,
                    })
                };
                let other = task(records, 3).expect("ordered");
                for record in records {
                    if let Record::Group { group: 2, order } = record {
                        order.task = other.clone();
                    }
                }
            });
        },
        "lease_task",
    ),
    (
        "an archived adapter changed",
        |run| {
            swap_bytes(run, &first_of(run, "policies"), |bytes| bytes.len() - 1);
        },
        "adapter_digest",
    ),
    (
        "an archived adapter deleted",
        |run| {
            let report = audit(run);
            assert!(report.holds);
            let policy = answer(run, 0, 0).1.policy;
            fs::remove_file(run.join(format!("policies/{policy}.safetensors"))).expect("removed");
        },
        "adapter_missing",
    ),
    (
        "the saved adapter changed",
        |run| {
            let dir = first_of(run, "adapters");
            swap_bytes(run, &format!("{dir}/adapter_model.safetensors"), |bytes| bytes.len() - 1);
        },
        "adapter_digest",
    ),
    (
        "a metric edited",
        |run| {
            replace(run, "metrics.jsonl", "\"loss\":0.0", "\"loss\":0.1");
        },
        "metrics_digest",
    ),
    (
        "a metric edited, its hash mended",
        |run| {
            replace(run, "metrics.jsonl", "\"success\":0.5", "\"success\":0.9");
            let digest = Digest::of(&fs::read(run.join("metrics.jsonl")).expect("read"));
            manifest(run, |it| it["metrics"]["sha256"] = json!(digest));
        },
        "metrics_step",
    ),
    (
        "the saved tokenizer changed",
        |run| {
            replace(run, "tokenizer/tokenizer_config.json", "<|endoftext|>", "<|im_start|>");
        },
        "tokenizer_file",
    ),
    (
        "the saved template changed",
        |run| {
            replace(run, "tokenizer/chat_template.jinja", "Tools:", "TOOLS:");
        },
        "template_digest",
    ),
    (
        "a setting changed",
        |run| {
            manifest(run, |it| it["settings"]["training"]["beta"] = json!(0.5));
        },
        "run_id",
    ),
    (
        "a refusal's file deleted",
        |run| {
            fs::remove_file(run.join(first_of(run, "rejected"))).expect("removed");
        },
        "rejection_file",
    ),
];

#[test]
fn every_tampering_is_found_under_its_own_name() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    let mut wrong = Vec::new();
    for (index, (what, tamper, reason)) in TAMPERINGS.iter().enumerate() {
        let copy = bench.path(&format!("tampered-{index}"));
        copy_tree(&run, &copy);
        tamper(&copy);
        let report = audit(&copy);
        let found = reasons(&report);
        if report.holds || !found.contains(reason) {
            wrong.push(format!("{what}: {found:?}, not {reason}\n{report}"));
        }
        for finding in report.findings() {
            let line = format!("{}: {}", finding.place, finding.problem);
            assert!(!line.contains('\n') && line.len() < 600, "{what}: {line}");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn totals_that_were_edited_are_found_by_field() {
    let mut bench = Bench::new();
    let run = Player::finish(&mut bench);
    for (index, (pointer, value)) in [
        ("/task_coverage/total_rollouts", json!(99)),
        ("/task_coverage/rejected_rollouts", json!(0)),
        ("/task_coverage/consumed_unique_task_ids", json!(["task"])),
        ("/update_evidence/changed_trainable_tensors", json!(0)),
        ("/update_evidence/max_abs_parameter_delta", json!(0.0)),
        ("/update_evidence/nonzero_gradient_steps", json!(1)),
        ("/reward_groups/0/rewards/1", json!(1.0)),
        ("/rejections", json!({})),
        ("/leases/accepted", json!(13)),
        ("/evaluation/after/success", json!(0.99)),
        ("/steps", json!(3)),
        ("/best_adapter/success", json!(0.99)),
        ("/last_adapter/step", json!(1)),
        ("/policies/archived", json!(2)),
        ("/policy_format/stop_ids", json!([1])),
        ("/environment/version", json!("9")),
        ("/model/sha256", json!(Digest::of(b"other"))),
        ("/reward_protocol/formula", json!("1")),
    ]
    .into_iter()
    .enumerate()
    {
        let copy = bench.path(&format!("edited-{index}"));
        copy_tree(&run, &copy);
        manifest(&copy, |it| *it.pointer_mut(pointer).expect("a field") = value);
        let report = audit(&copy);
        let field = pointer.trim_start_matches('/').split('/').next().expect("a field");
        let named = report.findings().any(|it| it.place.contains(field) || it.place == field);
        assert!(!report.holds && named, "{pointer}: {report}");
    }
}
