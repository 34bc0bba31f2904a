//! The bytes of every message, as committed: what was sent or journalled once stays readable.
//!
//! After a deliberate change of the wire (with a new version) write them anew by
//! `ROLLCALL_WRITE_GOLDEN=1 cargo test -p protocol --test golden`.

mod support;

use std::path::PathBuf;

use protocol::{Episode, EpisodeId, frame};
use support::{Message, episode, samples, unframe};

#[test]
fn every_message_has_the_committed_bytes_and_is_read_back_from_them() {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for (name, message) in samples() {
        let path = dir.join(format!("{name}.bin"));
        let (kind, body) = message.encode().expect("sound");
        let bytes = frame::encode(kind, &body).expect("short");
        if std::env::var_os("ROLLCALL_WRITE_GOLDEN").is_some() {
            std::fs::write(&path, &bytes).expect("written");
        }
        let golden = std::fs::read(&path).expect("a committed fixture");
        assert!(golden == bytes, "{name}: the bytes differ from {}", path.display());
        assert_eq!(Message::decode(unframe(kind, &golden)), Ok(message), "{name}");
    }
}

#[test]
fn every_kind_but_the_chunk_has_a_fixture() {
    let kinds: std::collections::HashSet<_> =
        samples().iter().map(|(_, message)| message.encode().expect("sound").0).collect();
    let without: Vec<_> = frame::Kind::ALL.iter().filter(|kind| !kinds.contains(kind)).collect();
    assert_eq!(without, [&frame::Kind::Chunk]);
}

#[test]
fn an_episode_keeps_its_id() {
    let body = episode().encode().expect("sound");
    assert_eq!(
        EpisodeId::of_body(&body).to_string(),
        "4c2dc35142cf7f8b11ea1cc908684d17bf3be4118f8fecd3134af3983ba913c8"
    );
    assert_eq!(Episode::decode(&body).expect("sound"), episode());
}
