//! One fixed value of each message, and how any body is read.
#![allow(dead_code)] // each test program uses its own part

use protocol::{
    AckOutcome, ActorId, AdapterManifest, CallKind, ComputeDtype, DeltaChunk, DeltaManifest,
    Digest, Episode, EpisodeEnd, Fetch, FinishReason, FromActor, FromLearner, Hello, Image, Lease,
    LeaseAttempt, LeaseId, ModelDigests, NoiseKey, OnMalformed, Parent, PolicyDigest, RefusalCode,
    Refused, RunId, RunSettings, Sampling, Span, Split, Task, TraceChain, TraceRow, Welcome,
    WireError,
    frame::{CHUNK_LEN, Channel, Decoded, Decoder, Frame, Kind},
    wire,
};

/// Any message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Message {
    Hello(Hello),
    Welcome(Welcome),
    Refused(Refused),
    FromActor(FromActor),
    FromLearner(FromLearner),
    Fetch(Fetch),
}

impl Message {
    pub(crate) fn encode(&self) -> Result<(Kind, Vec<u8>), WireError> {
        Ok(match self {
            Self::Hello(hello) => (Kind::Hello, wire::encode_hello(hello)?),
            Self::Welcome(welcome) => (Kind::Welcome, wire::encode_welcome(welcome)?),
            Self::Refused(refused) => (Kind::Refused, wire::encode_refused(refused)?),
            Self::FromActor(message) => wire::encode_from_actor(message)?,
            Self::FromLearner(message) => wire::encode_from_learner(message)?,
            Self::Fetch(fetch) => (Kind::Fetch, wire::encode_fetch(fetch)?),
        })
    }

    /// Reads any body but a chunk's, which has no inside.
    pub(crate) fn decode(frame: Frame) -> Result<Self, WireError> {
        Ok(match frame.kind {
            Kind::Hello => Self::Hello(wire::decode_hello(&frame.body)?),
            Kind::Welcome => Self::Welcome(wire::decode_welcome(&frame.body)?),
            Kind::Refused => Self::Refused(wire::decode_refused(&frame.body)?),
            Kind::Fetch | Kind::Chunk => Self::Fetch(wire::decode_fetch(&frame.body)?),
            kind if kind.channel() == Channel::LearnerControl => {
                Self::FromLearner(wire::decode_from_learner(frame)?)
            }
            _ => Self::FromActor(wire::decode_from_actor(frame)?),
        })
    }
}

pub(crate) fn frame(kind: Kind, body: &[u8]) -> Frame {
    Frame { kind, digest: Digest::of(body), body: body.to_vec() }
}

pub(crate) fn unframe(kind: Kind, bytes: &[u8]) -> Frame {
    match Decoder::new(kind.channel()).feed(bytes).expect("a frame") {
        Decoded::Complete { frame, consumed } if consumed == bytes.len() => frame,
        other => panic!("not exactly one frame: {other:?}"),
    }
}

pub(crate) fn digest(byte: u8) -> Digest {
    Digest([byte; 32])
}

pub(crate) fn lease(generation: u32) -> Lease {
    let run = RunId(digest(1));
    let id = LeaseId { group: 0x0102_0304_0506_0708, generation };
    Lease {
        run,
        id,
        attempt: 2,
        task: Task {
            id: "task-é".to_owned(),
            prompt: "Guess a number from 1 to 8.\n".to_owned(),
            fields: r#"{"n":8}"#.to_owned(),
            split: Split::Train,
        },
        seed: u64::MAX - 1,
        noise_key: NoiseKey::derive(&run, id),
        policy: PolicyDigest(digest(2)),
        sampling: Sampling { temperature: 0.75, top_k: 20, top_p: 0.95, min_p: 0.0625 },
        deadline_ms: 300_000,
    }
}

pub(crate) fn episode() -> Episode {
    let lease = lease(3);
    let reset_text = "I think of a number.".to_owned();
    let mut chain =
        TraceChain::start(&lease.run, lease.id, &lease.task.id, lease.seed, &reset_text, &[]);
    let mut row = |call: u32, kind, milestones: &[&str], observation: &str, done| {
        let mut row = TraceRow {
            turn: call,
            call: 0,
            tool: "guess".to_owned(),
            arguments: format!(r#"{{"n":{call}}}"#),
            kind,
            milestones: milestones.iter().map(|name| (*name).to_owned()).collect(),
            observation: observation.to_owned(),
            done,
            chain: Digest([0; 32]),
        };
        row.chain = chain.push(&row);
        row
    };
    let trace = vec![
        row(0, CallKind::Ok, &[], "higher", false),
        row(1, CallKind::Raised, &["started", "solved"], "{'error': '…'}", true),
    ];
    let span = |offset: u32, ids: &[u32], finish| Span {
        offset,
        ids: ids.to_vec(),
        logp_raw: ids.iter().map(|id| -0.5 * (*id as f32)).collect(),
        logp_sampling: ids.iter().map(|id| -0.25 * (*id as f32)).collect(),
        finish,
        policy: lease.policy,
        context: digest(3),
    };
    Episode {
        run: lease.run,
        lease: lease.id,
        task: lease.task.id.clone(),
        seed: lease.seed,
        policy: lease.policy,
        reset_text,
        reset_images: Vec::new(),
        tokens: vec![10, 11, 1, 2, 12, 3, 13],
        loss_mask: vec![0, 0, 1, 1, 0, 1, 0],
        spans: vec![span(2, &[1, 2], FinishReason::Stop), span(5, &[3], FinishReason::Length)],
        trace,
        trace_head: chain.head(),
        end: EpisodeEnd::Done,
        reward: 0.625,
        images: Vec::new(),
    }
}

/// An episode of one turn that was shown three images, two of them alike, and answered.
pub(crate) fn episode_with_images() -> Episode {
    let image = |width, height, first: u8| {
        let bytes = (0..width * height * 3).map(|at| u8::try_from(at % 251).expect("a byte"));
        let pixels = bytes.map(|byte| byte.wrapping_add(first)).collect();
        Image::new(width, height, pixels).expect("an image")
    };
    let images = vec![image(3, 2, 0), image(2, 2, 9)];
    let [a, b] = [images[0].digest(), images[1].digest()];
    let base = episode();
    let reset_images = vec![a, b, a];
    let Episode { run, lease, task, seed, reset_text, .. } = &base;
    let mut chain = TraceChain::start(run, *lease, task, *seed, reset_text, &reset_images);
    let mut row = TraceRow {
        turn: 0,
        call: 0,
        tool: String::new(),
        arguments: "03".to_owned(),
        kind: CallKind::Answer,
        milestones: vec!["digit_1".to_owned()],
        observation: String::new(),
        done: true,
        chain: digest(0),
    };
    row.chain = chain.push(&row);
    Episode {
        reset_images,
        images,
        tokens: vec![10, 11, 1, 2],
        loss_mask: vec![0, 0, 1, 1],
        spans: base.spans[..1].to_vec(),
        trace: vec![row],
        trace_head: chain.head(),
        end: EpisodeEnd::NoCall,
        ..base
    }
}

/// Two chunks, the first with a delta.
pub(crate) fn manifest_with_delta() -> AdapterManifest {
    AdapterManifest {
        step: 9,
        policy: PolicyDigest(digest(2)),
        adapter: digest(9),
        bytes: (CHUNK_LEN + 100) as u64,
        chunks: vec![digest(10), digest(11)],
        delta: Some(DeltaManifest {
            base: PolicyDigest(digest(1)),
            chunks: vec![Some(DeltaChunk { digest: digest(12), bytes: 7000 }), None],
        }),
    }
}

/// One value of each message, with the name of its fixture.
pub(crate) fn samples() -> Vec<(&'static str, Message)> {
    let model = ModelDigests { weights: digest(4), tokenizer: digest(5), template: digest(6) };
    let attempt = |generation| LeaseAttempt::from(&lease(generation));
    let body = episode().encode().expect("sound");
    let id = protocol::EpisodeId::of_body(&body);
    let with_images = episode_with_images().encode().expect("sound");
    let with_images =
        FromActor::Episode { id: protocol::EpisodeId::of_body(&with_images), body: with_images };
    let ack = |outcome| FromLearner::Ack { episode: id, outcome };
    vec![
        (
            "hello",
            Message::Hello(Hello {
                protocol: 1,
                model,
                program: "rollcall 0.1.0".to_owned(),
                device: "cuda:0".to_owned(),
                slots: 16,
                held: vec![PolicyDigest(digest(2)), PolicyDigest(digest(7))],
                relay: Some("10.0.0.2:7272".parse().expect("an address")),
            }),
        ),
        (
            "welcome",
            Message::Welcome(Welcome {
                run: RunId(digest(1)),
                settings: RunSettings {
                    environment: r#"{"name":"guess","n":8,"max_turns":3}"#.to_owned(),
                    system: Some("You play.".to_owned()),
                    chat_template_kwargs: r#"{"enable_thinking":false}"#.to_owned(),
                    max_completion_length: 512,
                    max_tool_calling_iterations: 3,
                    on_malformed: OnMalformed::End,
                    lora: r#"{"r":16}"#.to_owned(),
                    compute_dtype: ComputeDtype::Bf16,
                },
            }),
        ),
        (
            "refused",
            Message::Refused(Refused {
                code: RefusalCode::Tokenizer,
                message: "model: another tokenizer".to_owned(),
                expected: digest(5).to_string(),
                got: digest(8).to_string(),
            }),
        ),
        ("ready", Message::FromActor(FromActor::Ready { free: 5, received: 40 })),
        ("episode", Message::FromActor(FromActor::Episode { id, body })),
        ("episode_images", Message::FromActor(with_images)),
        (
            "lease_failed",
            Message::FromActor(FromActor::LeaseFailed {
                lease: attempt(1),
                reason: "environment: the process died".to_owned(),
            }),
        ),
        ("holding", Message::FromActor(FromActor::Holding { policy: PolicyDigest(digest(2)) })),
        (
            "parent_failed",
            Message::FromActor(FromActor::ParentFailed {
                parent: ActorId(digest(13)),
                reason: "a chunk did not come within 20 s".to_owned(),
            }),
        ),
        ("drain", Message::FromActor(FromActor::Drain)),
        ("leave", Message::FromActor(FromActor::Leave { returned: vec![attempt(0), attempt(9)] })),
        ("grant", Message::FromLearner(FromLearner::Grant(vec![lease(0), lease(1)]))),
        (
            "announce",
            Message::FromLearner(FromLearner::Announce(
                AdapterManifest::build(9, &digest(4), b"safetensors").expect("an adapter"),
            )),
        ),
        ("announce_delta", Message::FromLearner(FromLearner::Announce(manifest_with_delta()))),
        ("ack_stored", Message::FromLearner(ack(AckOutcome::Stored))),
        ("ack_duplicate", Message::FromLearner(ack(AckOutcome::Duplicate))),
        (
            "ack_rejected",
            Message::FromLearner(ack(AckOutcome::Rejected { reason: "lease: spent".to_owned() })),
        ),
        ("revoke", Message::FromLearner(FromLearner::Revoke(vec![attempt(4)]))),
        (
            "parent",
            Message::FromLearner(FromLearner::Parent(Some(Parent {
                actor: ActorId(digest(13)),
                address: "[2001:db8::1]:7272".parse().expect("an address"),
                level: 2,
            }))),
        ),
        ("parent_none", Message::FromLearner(FromLearner::Parent(None))),
        (
            "children",
            Message::FromLearner(FromLearner::Children(
                [14, 15].map(|byte| ActorId(digest(byte))).into(),
            )),
        ),
        (
            "finish",
            Message::FromLearner(FromLearner::Finish { reason: "200 steps made".to_owned() }),
        ),
        ("fetch", Message::Fetch(Fetch { policy: PolicyDigest(digest(2)), chunk: 3, delta: true })),
    ]
}
