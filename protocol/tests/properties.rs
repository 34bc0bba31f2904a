//! Arbitrary values survive the wire; arbitrary bytes are refused without a panic, and what is
//! accepted has one encoding only.

mod support;

use std::net::{IpAddr, SocketAddr};

use proptest::{
    collection::{btree_set, vec},
    prelude::*,
};
use protocol::{
    AckOutcome, ActorId, AdapterManifest, CallKind, DeltaChunk, DeltaManifest, Digest, Episode,
    EpisodeEnd, EpisodeId, Fetch, FinishReason, FromActor, FromLearner, Hello, Image, Lease,
    LeaseAttempt, LeaseId, ModelDigests, NoiseKey, Parent, PolicyDigest, RunId, Sampling, Span,
    Split, Task, TraceRow,
    frame::{CHUNK_LEN, Decoded, Decoder, Frame, Kind, MAGIC, PROTOCOL_VERSION},
    wire::bounds::MAX_RELAY_LEVEL,
};
use support::{Message, episode, frame, samples};

fn digests() -> impl Strategy<Value = Digest> {
    any::<[u8; 32]>().prop_map(Digest)
}

fn policies() -> impl Strategy<Value = PolicyDigest> {
    digests().prop_map(PolicyDigest)
}

fn actors() -> impl Strategy<Value = ActorId> {
    digests().prop_map(ActorId)
}

fn addresses() -> impl Strategy<Value = SocketAddr> {
    let ips = prop_oneof![
        any::<[u8; 4]>().prop_map(IpAddr::from),
        any::<[u16; 8]>().prop_map(IpAddr::from),
        Just(IpAddr::from([0; 4])),
        Just(IpAddr::from([0_u16; 8])),
    ];
    let machines = ips.prop_filter("of many", |ip| !ip.is_multicast());
    (machines, 1_u16..).prop_map(|(ip, port)| SocketAddr::new(ip, port))
}

fn texts() -> impl Strategy<Value = String> {
    "\\PC{0,12}|[\\x00-\\x7f]{0,12}"
}

fn lines() -> impl Strategy<Value = String> {
    "[^\\p{Cc}]{0,20}"
}

fn ids() -> impl Strategy<Value = LeaseId> {
    (any::<u64>(), any::<u32>()).prop_map(|(group, generation)| LeaseId { group, generation })
}

fn attempts() -> impl Strategy<Value = LeaseAttempt> {
    (ids(), any::<u32>()).prop_map(|(id, attempt)| LeaseAttempt { id, attempt })
}

fn finite() -> impl Strategy<Value = f32> {
    prop_oneof![Just(0.0), Just(-0.0), Just(f32::MIN_POSITIVE / 2.0), -1e30_f32..1e30]
}

prop_compose! {
    fn tasks()(
        id in "\\PC{1,8}", prompt in texts(), fields in texts(), train in any::<bool>(),
    ) -> Task {
        Task { id, prompt, fields, split: if train { Split::Train } else { Split::Eval } }
    }
}

prop_compose! {
    fn leases()(
        run in digests(), id in ids(), attempt in any::<u32>(), task in tasks(), seed in any::<u64>(),
        key in digests(), policy in policies(), temperature in 0.0_f32..10.0, top_k in any::<u32>(),
        top_p in 0.001_f32..=1.0, min_p in 0.0_f32..=1.0, deadline_ms in 0_u64..1_000_000,
    ) -> Lease {
        Lease {
            run: RunId(run), id, attempt, task, seed, noise_key: NoiseKey(key), policy,
            sampling: Sampling { temperature, top_k, top_p, min_p }, deadline_ms,
        }
    }
}

prop_compose! {
    fn rows()(
        turn in any::<u32>(), call in any::<u32>(), tool in texts(), arguments in texts(),
        kind in prop::sample::select(vec![
            CallKind::Ok, CallKind::Raised, CallKind::BadArgs, CallKind::UnknownTool,
            CallKind::Malformed, CallKind::AfterDone, CallKind::OverLimit, CallKind::Answer,
        ]),
        milestones in vec(texts(), 0..3), observation in texts(), done in any::<bool>(),
        chain in digests(),
    ) -> TraceRow {
        TraceRow { turn, call, tool, arguments, kind, milestones, observation, done, chain }
    }
}

fn images() -> impl Strategy<Value = Image> {
    (1_u32..4, 1_u32..4, any::<u8>()).prop_map(|(width, height, byte)| {
        let bytes = (width * height * 3) as usize;
        Image::new(width, height, vec![byte; bytes]).expect("an image")
    })
}

/// Pieces of a stream: external ids, then one sampled span.
type Piece = (Vec<u32>, Vec<(u32, f32, f32)>, bool, PolicyDigest, Digest);

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let sampled = vec((any::<u32>(), finite(), finite()), 1..6);
    vec((vec(any::<u32>(), 0..6), sampled, any::<bool>(), policies(), digests()), 0..5)
}

prop_compose! {
    fn episodes()(
        run in digests(), lease in ids(), task in "\\PC{1,8}", seed in any::<u64>(),
        policy in policies(), reset_text in texts(), pieces in pieces(),
        trace in vec(rows(), 0..4), trace_head in digests(),
        end in prop::sample::select(vec![
            EpisodeEnd::Done, EpisodeEnd::NoCall, EpisodeEnd::Turns, EpisodeEnd::Length,
            EpisodeEnd::Malformed,
        ]),
        reward in -1e9_f64..1e9, reset_images in vec(digests(), 0..3), images in vec(images(), 0..3),
    ) -> Episode {
        let (mut tokens, mut loss_mask, mut spans) = (Vec::new(), Vec::new(), Vec::new());
        for (external, sampled, stop, policy, context) in pieces {
            tokens.extend_from_slice(&external);
            loss_mask.extend(external.iter().map(|_| 0_u8));
            spans.push(Span {
                offset: u32::try_from(tokens.len()).expect("short"),
                ids: sampled.iter().map(|(id, _, _)| *id).collect(),
                logp_raw: sampled.iter().map(|(_, raw, _)| *raw).collect(),
                logp_sampling: sampled.iter().map(|(_, _, logp)| *logp).collect(),
                finish: if stop { FinishReason::Stop } else { FinishReason::Length },
                policy,
                context,
            });
            tokens.extend(sampled.iter().map(|(id, _, _)| *id));
            loss_mask.extend(sampled.iter().map(|_| 1_u8));
        }
        Episode {
            images: if reset_images.is_empty() { Vec::new() } else { images },
            run: RunId(run), lease, task, seed, policy, reset_text, reset_images, tokens, loss_mask,
            spans, trace, trace_head, end, reward,
        }
    }
}

fn manifests() -> impl Strategy<Value = AdapterManifest> {
    let deltas = vec(prop::option::of((digests(), 1..CHUNK_LEN as u32)), 3);
    let head = (any::<u64>(), policies(), digests(), vec(digests(), 1..4), 1..=CHUNK_LEN);
    (head, prop::option::of((policies(), deltas))).prop_map(
        |((step, policy, adapter, chunks, last), delta)| {
            let bytes = ((chunks.len() - 1) * CHUNK_LEN + last) as u64;
            let delta = delta.map(|(base, deltas)| DeltaManifest {
                base,
                chunks: deltas
                    .into_iter()
                    .take(chunks.len())
                    .map(|it| it.map(|(digest, bytes)| DeltaChunk { digest, bytes }))
                    .collect(),
            });
            let mut manifest = AdapterManifest { step, policy, adapter, bytes, chunks, delta };
            // No delta at all, or one that is too long for the last chunk.
            if manifest.check().is_err() {
                manifest.delta = None;
            }
            manifest
        },
    )
}

fn messages() -> impl Strategy<Value = Message> {
    let hello = (any::<u16>(), any::<[[u8; 32]; 3]>(), lines(), lines(), 1_u32..=65_536);
    let hello = (hello, vec(policies(), 0..4)).prop_map(
        |((protocol, [weights, tokenizer, template], program, device, slots), held)| {
            let model = ModelDigests {
                weights: Digest(weights),
                tokenizer: Digest(tokenizer),
                template: Digest(template),
            };
            (protocol, model, program, device, slots, held)
        },
    );
    let hello = (hello, prop::option::of(addresses())).prop_map(
        |((protocol, model, program, device, slots, held), relay)| {
            Message::Hello(Hello { protocol, model, program, device, slots, held, relay })
        },
    );
    let parents = (actors(), addresses(), 1..=MAX_RELAY_LEVEL)
        .prop_filter("not of zeros", |(_, address, _)| !address.ip().is_unspecified())
        .prop_map(|(actor, address, level)| Parent { actor, address, level });
    let outcome = prop_oneof![
        Just(AckOutcome::Stored),
        Just(AckOutcome::Duplicate),
        lines().prop_map(|reason| AckOutcome::Rejected { reason }),
    ];
    prop_oneof![
        hello,
        (0_u32..=65_536, any::<u64>()).prop_map(|(free, received)| {
            Message::FromActor(FromActor::Ready { free, received })
        }),
        (attempts(), lines()).prop_map(|(lease, reason)| {
            Message::FromActor(FromActor::LeaseFailed { lease, reason })
        }),
        (actors(), lines()).prop_map(|(parent, reason)| {
            Message::FromActor(FromActor::ParentFailed { parent, reason })
        }),
        prop::option::of(parents)
            .prop_map(|parent| Message::FromLearner(FromLearner::Parent(parent))),
        btree_set(actors(), 0..5)
            .prop_map(|children| Message::FromLearner(FromLearner::Children(children))),
        vec(attempts(), 0..5)
            .prop_map(|returned| Message::FromActor(FromActor::Leave { returned })),
        vec(leases(), 1..5).prop_map(|leases| Message::FromLearner(FromLearner::Grant(leases))),
        manifests().prop_map(|manifest| Message::FromLearner(FromLearner::Announce(manifest))),
        (digests(), outcome).prop_map(|(id, outcome)| {
            Message::FromLearner(FromLearner::Ack { episode: EpisodeId(id), outcome })
        }),
        vec(attempts(), 0..5).prop_map(|leases| Message::FromLearner(FromLearner::Revoke(leases))),
        (policies(), any::<u32>(), any::<bool>())
            .prop_map(|(policy, chunk, delta)| Message::Fetch(Fetch { policy, chunk, delta })),
    ]
}

/// What is accepted has exactly the bytes that it would be sent with.
fn one_encoding(frame: Frame) -> Result<(), TestCaseError> {
    let (kind, body) = (frame.kind, frame.body.clone());
    if kind == Kind::Episode
        && let Ok(episode) = Episode::decode(&body)
    {
        prop_assert_eq!(episode.encode().expect("it was validated"), body.clone());
    }
    if let Ok(message) = Message::decode(frame) {
        let again = message.encode().expect("it was validated");
        if kind != Kind::Chunk {
            // A refusal's texts are the only ones that encoding may cut, and decoding has bounded
            // them; a grant may repeat a task that encoding shares.
            prop_assert!(kind == Kind::Grant || again == (kind, body));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn episodes_survive_the_wire(episode in episodes()) {
        let body = episode.encode().expect("sound");
        let peeked = protocol::wire::peek_lease(&body);
        prop_assert_eq!(peeked, Some((episode.run, episode.lease)));
        prop_assert_eq!(Episode::decode(&body), Ok(episode));
    }

    #[test]
    fn messages_survive_the_wire(message in messages()) {
        let (kind, body) = message.encode().expect("sound");
        prop_assert_eq!(Message::decode(frame(kind, &body)), Ok(message));
    }

    #[test]
    fn random_bodies_are_refused_without_a_panic(
        kind in prop::sample::select(Kind::ALL.to_vec()), body in vec(any::<u8>(), 0..600),
    ) {
        one_encoding(frame(kind, &body))?;
    }

    #[test]
    fn mutated_bodies_are_refused_or_read_as_what_they_are(
        which in any::<prop::sample::Index>(),
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let samples = samples();
        let (kind, mut body) = which.get(&samples).1.encode().expect("sound");
        for (at, byte) in &edits {
            if !body.is_empty() {
                let at = at.index(body.len());
                body[at] = *byte;
            }
        }
        if let Some(cut) = cut {
            body.truncate(cut.index(body.len() + 1));
        }
        one_encoding(frame(kind, &body))?;
    }

    #[test]
    fn random_streams_never_panic_the_frame_decoder(
        kind in prop::sample::select(Kind::ALL.to_vec()),
        prefix in any::<bool>(),
        bytes in vec(any::<u8>(), 0..300),
        step in 1_usize..100,
    ) {
        let mut stream = Vec::new();
        if prefix {
            stream.extend_from_slice(&MAGIC);
            stream.extend_from_slice(&PROTOCOL_VERSION.to_le_bytes());
            stream.push(kind.byte());
        }
        stream.extend_from_slice(&bytes);
        let mut decoder = Decoder::new(kind.channel());
        let mut rest = stream.as_slice();
        while !rest.is_empty() {
            match decoder.feed(&rest[..step.min(rest.len())]) {
                Ok(Decoded::Incomplete { missing }) => {
                    prop_assert!(missing > 0);
                    rest = &rest[step.min(rest.len())..];
                }
                Ok(Decoded::Complete { consumed, .. }) => rest = &rest[consumed..],
                Err(error) => {
                    prop_assert!(error.to_string().len() < 400);
                    break;
                }
            }
        }
    }
}

/// Changes one thing of a sound episode and returns why it is refused, on both ways.
fn refused(change: impl FnOnce(&mut Episode)) -> String {
    let mut episode = episode();
    change(&mut episode);
    let error = episode.encode().expect_err("refused at the sender").to_string();
    assert!(!error.contains('\n') && error.len() < 300, "{error}");
    error
}

#[test]
fn each_shape_rule_of_an_episode_names_its_field() {
    let cases: Vec<(&str, String)> = vec![
        ("task", refused(|e| e.task.clear())),
        ("task", refused(|e| e.task = "x".repeat(600))),
        ("reset_text", refused(|e| e.reset_text = "x".repeat(300_000))),
        ("loss_mask", refused(|e| e.loss_mask[2] = 2)),
        ("loss_mask", refused(|e| e.loss_mask.truncate(3))),
        ("reward", refused(|e| e.reward = f64::NAN)),
        ("spans", refused(|e| e.spans[0].ids.clear())),
        ("spans.offset", refused(|e| e.spans[1].offset = 3)),
        ("spans.offset", refused(|e| e.spans[1].offset = 7)),
        ("spans.offset", refused(|e| e.spans[1].offset = u32::MAX)),
        ("spans.logp_raw", refused(|e| e.spans[0].logp_raw[0] = f32::NEG_INFINITY)),
        ("spans.logp_raw", refused(|e| e.spans[0].logp_raw.truncate(1))),
        ("spans.logp_sampling", refused(|e| e.spans[1].logp_sampling[0] = f32::NAN)),
        ("trace.tool", refused(|e| e.trace[0].tool = "x".repeat(70_000))),
        ("trace.arguments", refused(|e| e.trace[0].arguments = "x".repeat(2 << 20))),
        ("trace.observation", refused(|e| e.trace[1].observation = "x".repeat(300_000))),
        ("trace.milestones", refused(|e| e.trace[1].milestones = vec!["m".to_owned(); 300])),
        ("trace", refused(|e| e.trace = vec![e.trace[0].clone(); 20_000])),
        (
            "tokens",
            refused(|e| {
                e.tokens = vec![0; 600_000];
                e.loss_mask = vec![0; 600_000];
            }),
        ),
    ];
    for (field, error) in cases {
        assert!(error.starts_with(&format!("episode: {field}: ")), "{field}: {error}");
    }
}

#[test]
fn an_episode_whose_texts_overflow_the_frame_is_refused_at_the_sender() {
    let error = refused(|e| {
        let row = TraceRow { observation: "x".repeat(200_000), ..e.trace[0].clone() };
        e.trace = vec![row; 100];
    });
    assert!(error.contains("body: ") && error.contains("limit is 16777216"), "{error}");
}

#[test]
fn deep_nesting_is_text_and_costs_no_stack() {
    let mut deep = episode();
    deep.trace[0].arguments = "[".repeat(1 << 20);
    let body = deep.encode().expect("sound");
    assert_eq!(Episode::decode(&body), Ok(deep));
    // Every body of opening brackets, or of counts of one, nests nothing either.
    for kind in Kind::ALL {
        for word in [b"[".repeat(60_000), 1_u64.to_le_bytes().repeat(7500), vec![1; 60_000]] {
            one_encoding(frame(kind, &word)).expect("refused or read");
        }
    }
}
