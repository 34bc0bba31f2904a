//! Control messages on the wire: small, and each read in one way only.

use serde::{Deserialize, Serialize};

use super::{
    Checker, WireError,
    bounds::*,
    broadcast::{decode_manifest, encode_manifest},
    check_line, codes, decode_body, encode_body, grant, line, relay,
};
use crate::{
    Digest, EpisodeId, LeaseId, PolicyDigest, RunId,
    frame::{Frame, Kind},
    message::{
        AckOutcome, ComputeDtype, FromActor, FromLearner, Hello, LeaseAttempt, ModelDigests,
        OnMalformed, RefusalCode, Refused, RunSettings, Welcome,
    },
};

codes!(OnMalformed, malformed_code, malformed_from, { Observe = 0, End = 1 });
codes!(ComputeDtype, dtype_code, dtype_from, { F32 = 0, Bf16 = 1, F16 = 2 });
codes!(RefusalCode, refusal_code, refusal_from, {
    ProtocolVersion = 0, Weights = 1, Tokenizer = 2, Template = 3, Full = 4, Revoked = 5,
    RunOver = 6,
});

#[derive(Serialize, Deserialize)]
struct HelloWire<'a> {
    protocol: u16,
    weights: Digest,
    tokenizer: Digest,
    template: Digest,
    program: &'a str,
    device: &'a str,
    slots: u32,
    held: Vec<Digest>,
    /// Empty, or an address and a port.
    relay: &'a str,
}

#[derive(Serialize, Deserialize)]
struct WelcomeWire<'a> {
    run: Digest,
    environment: &'a str,
    #[serde(borrow)]
    system: Option<&'a str>,
    chat_template_kwargs: &'a str,
    max_completion_length: u32,
    max_tool_calling_iterations: u32,
    on_malformed: u8,
    lora: &'a str,
    compute_dtype: u8,
}

#[derive(Serialize, Deserialize)]
struct RefusedWire<'a> {
    code: u8,
    message: &'a str,
    expected: &'a str,
    got: &'a str,
}

#[derive(Serialize, Deserialize)]
struct ReadyWire {
    free: u32,
    received: u64,
}

#[derive(Serialize, Deserialize)]
struct LeaseFailedWire<'a> {
    group: u64,
    generation: u32,
    attempt: u32,
    reason: &'a str,
}

/// Leases by id: `Leave` and `Revoke`.
#[derive(Serialize, Deserialize)]
struct LeaseListWire {
    group: Vec<u64>,
    generation: Vec<u32>,
    attempt: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
struct AckWire<'a> {
    episode: Digest,
    outcome: u8,
    reason: &'a str,
}

/// Encodes a [`Hello`].
///
/// # Errors
/// A text or list is over its bound, or there are no slots.
pub fn encode_hello(hello: &Hello) -> Result<Vec<u8>, WireError> {
    validate_hello(hello)?;
    let relay = relay::address_text(hello.relay);
    let wire = HelloWire {
        protocol: hello.protocol,
        weights: hello.model.weights,
        tokenizer: hello.model.tokenizer,
        template: hello.model.template,
        program: &hello.program,
        device: &hello.device,
        slots: hello.slots,
        held: hello.held.iter().map(|policy| policy.0).collect(),
        relay: &relay,
    };
    encode_body("hello", &wire)
}

/// Decodes a [`Hello`].
///
/// # Errors
/// The body is none.
pub fn decode_hello(body: &[u8]) -> Result<Hello, WireError> {
    let wire: HelloWire<'_> = decode_body("hello", body)?;
    let hello = Hello {
        protocol: wire.protocol,
        model: ModelDigests {
            weights: wire.weights,
            tokenizer: wire.tokenizer,
            template: wire.template,
        },
        program: wire.program.to_owned(),
        device: wire.device.to_owned(),
        slots: wire.slots,
        held: wire.held.into_iter().map(PolicyDigest).collect(),
        relay: relay::address(Checker("hello"), "relay", wire.relay)?,
    };
    validate_hello(&hello)?;
    Ok(hello)
}

fn validate_hello(hello: &Hello) -> Result<(), WireError> {
    let check = Checker("hello");
    check_line(check, "program", &hello.program)?;
    check_line(check, "device", &hello.device)?;
    check.count("held", hello.held.len(), MAX_HELD)?;
    hello.relay.map_or(Ok(()), |relay| relay::check_address(check, "relay", &relay))?;
    check.ensure((1..=MAX_SLOTS).contains(&hello.slots), "slots", || {
        format!("{} is outside 1 to {MAX_SLOTS}", hello.slots)
    })
}

/// Encodes a [`Welcome`].
///
/// # Errors
/// A text is over its bound.
pub fn encode_welcome(welcome: &Welcome) -> Result<Vec<u8>, WireError> {
    validate_settings(&welcome.settings)?;
    let settings = &welcome.settings;
    let wire = WelcomeWire {
        run: welcome.run.0,
        environment: &settings.environment,
        system: settings.system.as_deref(),
        chat_template_kwargs: &settings.chat_template_kwargs,
        max_completion_length: settings.max_completion_length,
        max_tool_calling_iterations: settings.max_tool_calling_iterations,
        on_malformed: malformed_code(settings.on_malformed),
        lora: &settings.lora,
        compute_dtype: dtype_code(settings.compute_dtype),
    };
    encode_body("welcome", &wire)
}

/// Decodes a [`Welcome`].
///
/// # Errors
/// The body is none.
pub fn decode_welcome(body: &[u8]) -> Result<Welcome, WireError> {
    let check = Checker("welcome");
    let wire: WelcomeWire<'_> = decode_body("welcome", body)?;
    let on_malformed = malformed_from(wire.on_malformed);
    let compute_dtype = dtype_from(wire.compute_dtype);
    let settings = RunSettings {
        environment: wire.environment.to_owned(),
        system: wire.system.map(str::to_owned),
        chat_template_kwargs: wire.chat_template_kwargs.to_owned(),
        max_completion_length: wire.max_completion_length,
        max_tool_calling_iterations: wire.max_tool_calling_iterations,
        on_malformed: check.code("on_malformed", wire.on_malformed, on_malformed)?,
        lora: wire.lora.to_owned(),
        compute_dtype: check.code("compute_dtype", wire.compute_dtype, compute_dtype)?,
    };
    validate_settings(&settings)?;
    Ok(Welcome { run: RunId(wire.run), settings })
}

fn validate_settings(settings: &RunSettings) -> Result<(), WireError> {
    let check = Checker("welcome");
    check.text("environment", &settings.environment, MAX_SETTING_BYTES)?;
    check.text("system", settings.system.as_deref().unwrap_or_default(), MAX_SETTING_BYTES)?;
    check.text("chat_template_kwargs", &settings.chat_template_kwargs, MAX_SETTING_BYTES)?;
    check.text("lora", &settings.lora, MAX_SETTING_BYTES)?;
    let completion = usize::try_from(settings.max_completion_length).unwrap_or(usize::MAX);
    check.ensure((1..=MAX_TOKENS).contains(&completion), "max_completion_length", || {
        format!("{completion} is outside 1 to {MAX_TOKENS}")
    })
}

/// Encodes a [`Refused`]; over-long texts are cut, a refusal always gets through.
///
/// # Errors
/// None in practice.
pub fn encode_refused(refused: &Refused) -> Result<Vec<u8>, WireError> {
    let (message, expected, got) =
        (line(&refused.message), line(&refused.expected), line(&refused.got));
    let wire = RefusedWire {
        code: refusal_code(refused.code),
        message: &message,
        expected: &expected,
        got: &got,
    };
    encode_body("refused", &wire)
}

/// Decodes a [`Refused`].
///
/// # Errors
/// The body is none.
pub fn decode_refused(body: &[u8]) -> Result<Refused, WireError> {
    let check = Checker("refused");
    let wire: RefusedWire<'_> = decode_body("refused", body)?;
    check_line(check, "message", wire.message)?;
    check_line(check, "expected", wire.expected)?;
    check_line(check, "got", wire.got)?;
    Ok(Refused {
        code: check.code("code", wire.code, refusal_from(wire.code))?,
        message: wire.message.to_owned(),
        expected: wire.expected.to_owned(),
        got: wire.got.to_owned(),
    })
}

/// Encodes what an actor says, the episode's body as it is. Reasons are cut to one line.
///
/// # Errors
/// A list is over its bound.
pub fn encode_from_actor(message: &FromActor) -> Result<(Kind, Vec<u8>), WireError> {
    Ok(match message {
        FromActor::Ready { free, received } => {
            check_free(*free)?;
            (Kind::Ready, encode_body("ready", &ReadyWire { free: *free, received: *received })?)
        }
        FromActor::Episode { body, .. } => (Kind::Episode, body.clone()),
        FromActor::LeaseFailed { lease, reason } => {
            let wire = LeaseFailedWire {
                group: lease.id.group,
                generation: lease.id.generation,
                attempt: lease.attempt,
                reason: &line(reason),
            };
            (Kind::LeaseFailed, encode_body("lease failed", &wire)?)
        }
        FromActor::Holding { policy } => (Kind::Holding, encode_body("holding", &policy.0)?),
        FromActor::ParentFailed { parent, reason } => {
            (Kind::ParentFailed, relay::encode_failed(parent, reason)?)
        }
        FromActor::Drain => (Kind::Drain, Vec::new()),
        FromActor::Leave { returned } => (Kind::Leave, encode_list("leave", returned)?),
    })
}

/// Decodes what an admitted actor says.
///
/// # Errors
/// The body is not what its kind says, or the kind is none of an admitted actor's.
pub fn decode_from_actor(frame: Frame) -> Result<FromActor, WireError> {
    let body = frame.body.as_slice();
    Ok(match frame.kind {
        Kind::Ready => {
            let wire: ReadyWire = decode_body("ready", body)?;
            check_free(wire.free)?;
            FromActor::Ready { free: wire.free, received: wire.received }
        }
        Kind::Episode => FromActor::Episode { id: EpisodeId(frame.digest), body: frame.body },
        Kind::LeaseFailed => {
            let wire: LeaseFailedWire<'_> = decode_body("lease failed", body)?;
            check_line(Checker("lease failed"), "reason", wire.reason)?;
            let id = LeaseId { group: wire.group, generation: wire.generation };
            let lease = LeaseAttempt { id, attempt: wire.attempt };
            FromActor::LeaseFailed { lease, reason: wire.reason.to_owned() }
        }
        Kind::Holding => FromActor::Holding { policy: PolicyDigest(decode_body("holding", body)?) },
        Kind::ParentFailed => {
            let (parent, reason) = relay::decode_failed(body)?;
            FromActor::ParentFailed { parent, reason }
        }
        Kind::Drain => {
            Checker("drain").ensure(body.is_empty(), "body", || "it has none".to_owned())?;
            FromActor::Drain
        }
        Kind::Leave => FromActor::Leave { returned: decode_list("leave", body)? },
        other => return misplaced(other),
    })
}

/// Encodes what a learner says. Reasons are cut to one line.
///
/// # Errors
/// A value is over its bound; for a grant that means: grant fewer leases at a time.
pub fn encode_from_learner(message: &FromLearner) -> Result<(Kind, Vec<u8>), WireError> {
    Ok(match message {
        FromLearner::Grant(leases) => (Kind::Grant, grant::encode(leases)?),
        FromLearner::Announce(manifest) => (Kind::Announce, encode_manifest(manifest)?),
        FromLearner::Ack { episode, outcome } => {
            let (outcome, reason) = match outcome {
                AckOutcome::Stored => (0, String::new()),
                AckOutcome::Duplicate => (1, String::new()),
                AckOutcome::Rejected { reason } => (2, line(reason)),
            };
            let wire = AckWire { episode: episode.0, outcome, reason: &reason };
            (Kind::Ack, encode_body("ack", &wire)?)
        }
        FromLearner::Revoke(leases) => (Kind::Revoke, encode_list("revoke", leases)?),
        FromLearner::Parent(parent) => (Kind::Parent, relay::encode_parent(parent.as_ref())?),
        FromLearner::Children(children) => (Kind::Children, relay::encode_children(children)?),
        FromLearner::Finish { reason } => {
            (Kind::Finish, encode_body("finish", &line(reason).as_str())?)
        }
    })
}

/// Decodes what a learner says to an admitted actor.
///
/// # Errors
/// The body is not what its kind says, or the kind is none of those.
pub fn decode_from_learner(frame: Frame) -> Result<FromLearner, WireError> {
    let body = frame.body.as_slice();
    Ok(match frame.kind {
        Kind::Grant => FromLearner::Grant(grant::decode(body)?),
        Kind::Announce => FromLearner::Announce(decode_manifest(body)?),
        Kind::Ack => {
            let check = Checker("ack");
            let wire: AckWire<'_> = decode_body("ack", body)?;
            check_line(check, "reason", wire.reason)?;
            let outcome = match wire.outcome {
                0 => AckOutcome::Stored,
                1 => AckOutcome::Duplicate,
                2 => AckOutcome::Rejected { reason: wire.reason.to_owned() },
                other => return check.fail("outcome", format!("unknown code {other}")),
            };
            check.ensure(wire.outcome == 2 || wire.reason.is_empty(), "reason", || {
                "only a rejection has one".to_owned()
            })?;
            FromLearner::Ack { episode: EpisodeId(wire.episode), outcome }
        }
        Kind::Revoke => FromLearner::Revoke(decode_list("revoke", body)?),
        Kind::Parent => FromLearner::Parent(relay::decode_parent(body)?),
        Kind::Children => FromLearner::Children(relay::decode_children(body)?),
        Kind::Finish => {
            let reason: &str = decode_body("finish", body)?;
            check_line(Checker("finish"), "reason", reason)?;
            FromLearner::Finish { reason: reason.to_owned() }
        }
        other => return misplaced(other),
    })
}

fn check_free(free: u32) -> Result<(), WireError> {
    let check = Checker("ready");
    check.ensure(free <= MAX_SLOTS, "free", || format!("{free}, the limit is {MAX_SLOTS}"))
}

fn misplaced<T>(kind: Kind) -> Result<T, WireError> {
    Checker("message").fail("kind", format!("{kind:?} is not allowed here"))
}

fn encode_list(message: &'static str, leases: &[LeaseAttempt]) -> Result<Vec<u8>, WireError> {
    Checker(message).count("leases", leases.len(), MAX_LEASE_LIST)?;
    let wire = LeaseListWire {
        group: leases.iter().map(|l| l.id.group).collect(),
        generation: leases.iter().map(|l| l.id.generation).collect(),
        attempt: leases.iter().map(|l| l.attempt).collect(),
    };
    encode_body(message, &wire)
}

fn decode_list(message: &'static str, body: &[u8]) -> Result<Vec<LeaseAttempt>, WireError> {
    let check = Checker(message);
    let wire: LeaseListWire = decode_body(message, body)?;
    let count = wire.group.len();
    check.count("leases", count, MAX_LEASE_LIST)?;
    check.column("generation", wire.generation.len(), count)?;
    check.column("attempt", wire.attempt.len(), count)?;
    let rows = wire.group.into_iter().zip(wire.generation).zip(wire.attempt);
    Ok(rows
        .map(|((group, generation), attempt)| LeaseAttempt {
            id: LeaseId { group, generation },
            attempt,
        })
        .collect())
}
