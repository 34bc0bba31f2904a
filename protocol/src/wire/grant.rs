//! Grants on the wire: a group's leases share their task, so the task travels once.

use serde::{Deserialize, Serialize};

use super::{Checker, WireError, bounds::*, codes, decode_body, encode_body};
use crate::{Digest, Lease, LeaseId, NoiseKey, PolicyDigest, RunId, Sampling, Split, Task};

const CHECK: Checker = Checker("grant");

codes!(Split, split_code, split_from, { Train = 0, Eval = 1 });

#[derive(Serialize, Deserialize)]
struct GrantWire<'a> {
    // One entry a distinct task.
    #[serde(borrow)]
    task_id: Vec<&'a str>,
    #[serde(borrow)]
    task_prompt: Vec<&'a str>,
    #[serde(borrow)]
    task_fields: Vec<&'a str>,
    task_split: Vec<u8>,
    // One entry a lease.
    run: Vec<Digest>,
    group: Vec<u64>,
    generation: Vec<u32>,
    attempt: Vec<u32>,
    task: Vec<u32>,
    seed: Vec<u64>,
    noise_key: Vec<Digest>,
    policy: Vec<Digest>,
    temperature: Vec<f32>,
    top_k: Vec<u32>,
    top_p: Vec<f32>,
    min_p: Vec<f32>,
    deadline_ms: Vec<u64>,
}

/// One lease as the bytes of a grant, for those who keep it.
///
/// # Errors
/// A value is over its bound.
pub fn encode_lease(lease: &Lease) -> Result<Vec<u8>, WireError> {
    encode(std::slice::from_ref(lease))
}

/// Reads [`encode_lease`]'s bytes back.
///
/// # Errors
/// The bytes are no grant of one lease.
pub fn decode_lease(bytes: &[u8]) -> Result<Lease, WireError> {
    let mut leases = decode(bytes)?;
    match (leases.pop(), leases.is_empty()) {
        (Some(lease), true) => Ok(lease),
        _ => CHECK.fail("leases", "more than one lease"),
    }
}

pub(super) fn encode(leases: &[Lease]) -> Result<Vec<u8>, WireError> {
    validate(leases)?;
    let mut tasks: Vec<&Task> = Vec::new();
    let mut index = Vec::with_capacity(leases.len());
    for lease in leases {
        let at = tasks.iter().position(|task| **task == lease.task).unwrap_or_else(|| {
            tasks.push(&lease.task);
            tasks.len() - 1
        });
        index.push(u32::try_from(at).unwrap_or(u32::MAX)); // at most MAX_GRANT
    }
    encode_body(
        "grant",
        &GrantWire {
            task_id: tasks.iter().map(|t| t.id.as_str()).collect(),
            task_prompt: tasks.iter().map(|t| t.prompt.as_str()).collect(),
            task_fields: tasks.iter().map(|t| t.fields.as_str()).collect(),
            task_split: tasks.iter().map(|t| split_code(t.split)).collect(),
            run: leases.iter().map(|l| l.run.0).collect(),
            group: leases.iter().map(|l| l.id.group).collect(),
            generation: leases.iter().map(|l| l.id.generation).collect(),
            attempt: leases.iter().map(|l| l.attempt).collect(),
            task: index,
            seed: leases.iter().map(|l| l.seed).collect(),
            noise_key: leases.iter().map(|l| l.noise_key.0).collect(),
            policy: leases.iter().map(|l| l.policy.0).collect(),
            temperature: leases.iter().map(|l| l.sampling.temperature).collect(),
            top_k: leases.iter().map(|l| l.sampling.top_k).collect(),
            top_p: leases.iter().map(|l| l.sampling.top_p).collect(),
            min_p: leases.iter().map(|l| l.sampling.min_p).collect(),
            deadline_ms: leases.iter().map(|l| l.deadline_ms).collect(),
        },
    )
}

pub(super) fn decode(body: &[u8]) -> Result<Vec<Lease>, WireError> {
    let wire: GrantWire<'_> = decode_body("grant", body)?;
    let tasks = wire.task_id.len();
    CHECK.count("tasks", tasks, MAX_GRANT)?;
    CHECK.column("task.prompt", wire.task_prompt.len(), tasks)?;
    CHECK.column("task.fields", wire.task_fields.len(), tasks)?;
    CHECK.column("task.split", wire.task_split.len(), tasks)?;
    let count = wire.group.len();
    CHECK.count("leases", count, MAX_GRANT)?;
    let columns = [
        ("run", wire.run.len()),
        ("generation", wire.generation.len()),
        ("attempt", wire.attempt.len()),
        ("task", wire.task.len()),
        ("seed", wire.seed.len()),
        ("noise_key", wire.noise_key.len()),
        ("policy", wire.policy.len()),
        ("temperature", wire.temperature.len()),
        ("top_k", wire.top_k.len()),
        ("top_p", wire.top_p.len()),
        ("min_p", wire.min_p.len()),
        ("deadline_ms", wire.deadline_ms.len()),
    ];
    columns.into_iter().try_for_each(|(field, len)| CHECK.column(field, len, count))?;
    let mut room = MAX_GRANT_BYTES;
    let mut leases = Vec::with_capacity(count);
    for index in 0..count {
        // All columns of a table are equally long, so every index exists.
        let at = usize::try_from(wire.task[index]).unwrap_or(usize::MAX);
        CHECK.ensure(at < tasks, "task", || format!("task {at} of {tasks}"))?;
        let copy = wire.task_id[at].len() + wire.task_prompt[at].len() + wire.task_fields[at].len();
        let Some(left) = room.checked_sub(copy) else {
            return CHECK.fail("leases", format!("tasks of more than {MAX_GRANT_BYTES} bytes"));
        };
        room = left;
        let split = wire.task_split[at];
        leases.push(Lease {
            run: RunId(wire.run[index]),
            id: LeaseId { group: wire.group[index], generation: wire.generation[index] },
            attempt: wire.attempt[index],
            task: Task {
                id: wire.task_id[at].to_owned(),
                prompt: wire.task_prompt[at].to_owned(),
                fields: wire.task_fields[at].to_owned(),
                split: CHECK.code("task.split", split, split_from(split))?,
            },
            seed: wire.seed[index],
            noise_key: NoiseKey(wire.noise_key[index]),
            policy: PolicyDigest(wire.policy[index]),
            sampling: Sampling {
                temperature: wire.temperature[index],
                top_k: wire.top_k[index],
                top_p: wire.top_p[index],
                min_p: wire.min_p[index],
            },
            deadline_ms: wire.deadline_ms[index],
        });
    }
    validate(&leases)?;
    Ok(leases)
}

fn validate(leases: &[Lease]) -> Result<(), WireError> {
    CHECK.ensure(!leases.is_empty(), "leases", || "a grant of nothing".to_owned())?;
    CHECK.count("leases", leases.len(), MAX_GRANT)?;
    let mut total = 0_usize;
    for lease in leases {
        let task = &lease.task;
        CHECK.text("task.id", &task.id, MAX_NAME_BYTES)?;
        CHECK.ensure(!task.id.is_empty(), "task.id", || "an empty id".to_owned())?;
        CHECK.text("task.prompt", &task.prompt, MAX_PROMPT_BYTES)?;
        CHECK.text("task.fields", &task.fields, MAX_PROMPT_BYTES)?;
        total += task.id.len() + task.prompt.len() + task.fields.len();
        let Sampling { temperature, top_p, min_p, .. } = lease.sampling;
        CHECK.ensure((0.0..=1e4).contains(&temperature), "temperature", || {
            format!("{temperature} is outside 0 to 10000")
        })?;
        CHECK.ensure(top_p > 0.0 && top_p <= 1.0, "top_p", || {
            format!("{top_p} is outside 0 (exclusive) to 1")
        })?;
        CHECK.ensure((0.0..=1.0).contains(&min_p), "min_p", || {
            format!("{min_p} is outside 0 to 1")
        })?;
        CHECK.ensure(lease.deadline_ms <= MAX_DEADLINE_MS, "deadline_ms", || {
            format!("{}, the limit is {MAX_DEADLINE_MS}", lease.deadline_ms)
        })?;
    }
    CHECK.ensure(total <= MAX_GRANT_BYTES, "leases", || {
        format!("tasks of {total} bytes, the limit is {MAX_GRANT_BYTES}: grant fewer at a time")
    })
}
