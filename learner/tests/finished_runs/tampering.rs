//! What somebody might do to a run's directory afterwards, and what it must be found as.

use std::{fs, path::Path};

use learner::{curriculum::evaluation_group, files::read_manifest, journal::Record};
use protocol::{Digest, Episode, EpisodeId};
use serde_json::json;

use crate::{
    player::actor,
    support,
    tools::{
        answer, entries, first_of, lines, manifest, middle, rejournal, reline, replace, reseal,
        substitute, swap_bytes, write_lines,
    },
};

/// A line of a training episode that won.
const WON: &str = "\"training_reward\":1.0";

/// Where a line's sampling evidence starts.
const SAMPLING: &str = ",\"sampling\":{";

/// A file that no run wrote.
fn slip(run: &Path, folder: &str) {
    fs::write(run.join(folder).join(".slipped"), "in").expect("written");
}

fn first_file(run: &Path, folder: &str) -> std::path::PathBuf {
    let mut listed = fs::read_dir(run.join(folder)).expect("listed");
    listed.next().expect("one").expect("an entry").path()
}

/// Edits the metrics' lines and mends their hash.
fn remetric(run: &Path, edit: impl FnOnce(&mut Vec<&str>)) {
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).expect("read");
    let mut lines: Vec<&str> = text.lines().collect();
    edit(&mut lines);
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(path, &text).expect("written");
    manifest(run, |it| it["metrics"]["sha256"] = json!(Digest::of(text.as_bytes())));
}

pub(crate) type Tampering = (&'static str, fn(&Path), &'static str);

/// What is done to the directory, and the name under which it must be found.
pub(crate) const TAMPERINGS: [Tampering; 62] = [
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
    (
        "sampling evidence of another length, all hashes mended",
        |run| {
            let tokens = "\"sampling\":{\"tokens\":";
            reline(run, tokens, tokens, "\"sampling\":{\"tokens\":9");
        },
        "sampling_record",
    ),
    (
        "an episode taken back for a reason that it does not have",
        |run| {
            let (id, episode, _) = answer(run, 0, 0);
            rejournal(run, |records| {
                records.push(Record::Rejected {
                    actor: actor(),
                    lease: episode.lease,
                    attempt: 0,
                    behind: 0,
                    id,
                    reason: "trace_chain",
                    body: None,
                });
            });
        },
        "rejection_reason",
    ),
    (
        "a complete evaluation task given up, all hashes mended",
        |run| {
            let group = evaluation_group(0, 1);
            let (id, ..) = answer(run, group, 0);
            rejournal(run, |records| records.push(Record::Dropped { group }));
            let mut all = lines(run);
            all.retain(|line| !line.contains(&id.to_string()));
            reseal(run, &all);
        },
        "group_dropped_complete",
    ),
    (
        "an evaluation task that was never ordered, all hashes mended",
        |run| {
            let group = evaluation_group(0, 1);
            let (id, ..) = answer(run, group, 0);
            rejournal(run, |records| {
                records.retain(|record| match record {
                    Record::Group { group: found, .. } => *found != group,
                    Record::Accepted { body, .. } => EpisodeId::of_body(body) != id,
                    _ => true,
                });
            });
            let mut all = lines(run);
            all.retain(|line| !line.contains(&id.to_string()));
            reseal(run, &all);
        },
        "group_unordered",
    ),
    (
        "wider bounds in the manifest",
        |run| {
            manifest(run, |it| it["sampling_bounds"][0]["bounds"]["deficit_max"] = json!(900.0));
        },
        "sampling_bounds",
    ),
    (
        "a mean deficit above the largest, all hashes mended",
        |run| {
            reline(run, SAMPLING, "\"deficit_mean\":", "\"deficit_mean\":9");
        },
        "sampling_record",
    ),
    (
        "a flag that the bounds do not give, all hashes mended",
        |run| {
            reline(run, SAMPLING, "\"flag\":null", "\"flag\":\"unlikely_token\"");
        },
        "sampling_record",
    ),
    (
        "a broken bound without its flag, all hashes mended",
        |run| {
            reline(run, SAMPLING, "\"logp_gap_max\":0.002", "\"logp_gap_max\":0.02");
        },
        "sampling_record",
    ),
    (
        "sampling evidence left out, all hashes mended",
        |run| {
            let line = lines(run).into_iter().find(|it| it.contains(SAMPLING)).expect("a line");
            let at = line.rfind(SAMPLING).expect("a field");
            reline(run, SAMPLING, &line[at..], "}");
        },
        "sampling_record",
    ),
    (
        "another rank in the saved adapter",
        |run| {
            let config = format!("{}/adapter_config.json", first_of(run, "adapters"));
            replace(run, &config, "\"r\": 16", "\"r\": 8");
        },
        "adapter_config",
    ),
    ("a file among the adapters", |run| slip(run, &first_of(run, "adapters")), "unexpected_file"),
    ("a folder of adapters slipped in", |run| slip(run, "adapters"), "unexpected_file"),
    ("a file among the policies", |run| slip(run, "policies"), "unexpected_file"),
    ("a hidden file among the refusals", |run| slip(run, "rejected"), "unexpected_file"),
    ("a file in the journal", |run| slip(run, "journal"), "unexpected_file"),
    ("a file among the checkpoints", |run| slip(run, "checkpoint"), "unexpected_file"),
    (
        "another checkpoint",
        |run| {
            let path = first_file(run, "checkpoint");
            let mut bytes = fs::read(&path).expect("read");
            bytes.reverse();
            fs::write(path, bytes).expect("written");
        },
        "checkpoint",
    ),
    (
        "the last adapter not named",
        |run| manifest(run, |it| it["last_adapter"] = json!(null)),
        "last_adapter",
    ),
    (
        "the best adapter not named",
        |run| manifest(run, |it| it["best_adapter"] = json!(null)),
        "best_adapter",
    ),
    (
        "the first evaluation left out of the manifest",
        |run| manifest(run, |it| it["evaluation"]["before"] = json!(null)),
        "evaluation",
    ),
    (
        "an evaluation left out of the metrics, their hash mended",
        |run| {
            remetric(run, |lines| lines.retain(|line| !line.contains("\"evaluation\"")));
        },
        "metrics_evaluation",
    ),
    (
        "evaluations in another order, the metrics' hash mended",
        |run| remetric(run, |lines| lines.reverse()),
        "metrics_evaluation",
    ),
    (
        "a progress field of the wrong type",
        |run| manifest(run, |it| it["policies"]["bytes"] = json!("many")),
        "manifest_unreadable",
    ),
    (
        "an adapter that lies outside of the run",
        |run| manifest(run, |it| it["adapters"][0]["path"] = json!("../other")),
        "adapter_path",
    ),
    (
        "a device in the place of the metrics",
        |run| {
            fs::remove_file(run.join("metrics.jsonl")).expect("removed");
            std::os::unix::fs::symlink("/dev/zero", run.join("metrics.jsonl")).expect("linked");
        },
        "special_file",
    ),
    (
        "metrics without end",
        |run| {
            let file = fs::OpenOptions::new().write(true).open(run.join("metrics.jsonl"));
            file.and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
        },
        "file_too_large",
    ),
];
