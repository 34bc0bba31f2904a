//! What is fuzzed: each body takes any bytes and panics where a promise of the protocol is broken. The
//! fuzzer's targets call them (`scripts/fuzz`), and so does an ordinary test (`tests/fuzz.rs`), over
//! the corpora and mutations of them.
#![allow(dead_code)] // each target uses its own

use protocol::{
    AdapterManifest, Episode, Join,
    delta::{self, Layout},
    frame::{self, Channel, Decoded, Decoder, Frame, Kind},
    wire,
};

/// Longest error text: it may travel and be logged.
const MAX_ERROR: usize = 2048;

fn small(error: impl std::fmt::Display) {
    let text = error.to_string();
    assert!(text.len() <= MAX_ERROR && !text.contains('\n'), "{text:?}");
}

/// The first byte chooses a kind, and whether the rest is a stream of that kind's channel or a body
/// that gets a sound header. The second says in which pieces it arrives.
pub(crate) fn frame(bytes: &[u8]) {
    let Some((&[choice, step], rest)) = bytes.split_first_chunk::<2>() else { return };
    let kind = Kind::ALL[usize::from(choice & 0x7f) % Kind::ALL.len()];
    let framed;
    let mut stream = rest;
    if choice & 0x80 != 0 {
        match frame::encode(kind, rest) {
            Ok(bytes) => framed = bytes,
            Err(error) => return small(error),
        }
        stream = &framed;
    }
    let step = usize::from(step).max(1);
    let mut decoder = Decoder::new(kind.channel());
    while !stream.is_empty() {
        let piece = &stream[..step.min(stream.len())];
        match decoder.feed(piece) {
            Ok(Decoded::Incomplete { missing }) => {
                assert!(missing > 0);
                stream = &stream[piece.len()..];
            }
            Ok(Decoded::Complete { frame, consumed }) => {
                assert!(consumed > 0 && consumed <= piece.len());
                message(frame);
                stream = &stream[consumed..];
            }
            Err(error) => return small(error),
        }
    }
}

/// Reads a frame as whatever it is; what is accepted has one spelling.
fn message(frame: Frame) {
    let (kind, body) = (frame.kind, frame.body.clone());
    let again = match kind {
        Kind::Hello => wire::decode_hello(&body).and_then(|it| wire::encode_hello(&it)),
        Kind::Welcome => wire::decode_welcome(&body).and_then(|it| wire::encode_welcome(&it)),
        Kind::Refused => wire::decode_refused(&body).and_then(|it| wire::encode_refused(&it)),
        Kind::Fetch => wire::decode_fetch(&body).and_then(|it| wire::encode_fetch(&it)),
        Kind::Episode => Episode::decode(&body).and_then(|it| it.encode()),
        Kind::Chunk => return,
        kind if kind.channel() == Channel::LearnerControl => wire::decode_from_learner(frame)
            .and_then(|it| wire::encode_from_learner(&it))
            .map(|(_, body)| body),
        _ => wire::decode_from_actor(frame)
            .and_then(|it| wire::encode_from_actor(&it))
            .map(|(_, body)| body),
    };
    match again {
        // A grant may repeat a task that encoding shares.
        Ok(again) => assert!(again == body || kind == Kind::Grant, "{kind:?} has two spellings"),
        Err(error) => small(error),
    }
}

/// A join string.
pub(crate) fn join(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match text.parse::<Join>() {
        Ok(join) => {
            let shown = join.reveal();
            let again: Join = shown.parse().expect("our own");
            assert_eq!(again.reveal(), shown);
            let secret = &shown[shown.len() - 20..];
            let shown = format!("{join:?}").replacen(&join.host, "", 1);
            assert!(!shown.contains(secret), "a secret is shown");
        }
        Err(error) => small(error),
    }
}

/// The body of an announcement.
pub(crate) fn manifest(bytes: &[u8]) {
    match wire::decode_manifest(bytes) {
        Ok(manifest) => {
            assert_eq!(wire::encode_manifest(&manifest).expect("it was accepted"), bytes);
            let (with, without) = manifest.transfer_bytes();
            assert!(with <= without);
            let last = manifest.chunks.len() - 1;
            let end = manifest.range(last).expect("the last chunk").end;
            assert_eq!(end as u64, manifest.bytes);
            assert_eq!(manifest.range(last + 1), None);
        }
        Err(error) => small(error),
    }
}

/// A delta, and a chunk of 0 to 65,535 bytes that it is said to start from. The same bytes are also
/// packed and unpacked again.
pub(crate) fn delta(bytes: &[u8]) {
    let Some((&[low, high], rest)) = bytes.split_first_chunk::<2>() else { return };
    let len = u16::from_le_bytes([low, high]);
    let base: Vec<u8> = (0..len).map(|at| (at ^ (at >> 5)) as u8).collect();
    match delta::decode(rest, &base) {
        Ok(chunk) => assert_eq!(chunk.len(), base.len()),
        Err(error) => small(error),
    }
    let same: Vec<u8> = rest.iter().rev().copied().collect();
    let layout = Layout::of(rest);
    let packed = delta::encode(&layout, 0..rest.len(), &same, rest).expect("of one length");
    assert_eq!(delta::decode(&packed, &same).expect("our own"), rest);
    let manifest = AdapterManifest::build(1, &protocol::Digest::of(b""), rest);
    assert_eq!(manifest.is_err(), rest.is_empty());
}
