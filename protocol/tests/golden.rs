//! The bytes of every message, as committed: what was sent or journalled once stays readable.
//!
//! After a deliberate change of the wire (with a new version) write them anew by
//! `ROLLCALL_WRITE_GOLDEN=1 cargo test -p protocol --test golden`.

mod support;

use std::path::PathBuf;

use protocol::{AddressError, Episode, EpisodeId, Image, frame};
use support::{Message, episode, episode_with_images, samples, unframe};

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

#[test]
fn images_come_back_and_an_episode_has_one_spelling() {
    let episode = episode_with_images();
    let body = episode.encode().expect("sound");
    assert_eq!(Episode::decode(&body).expect("sound"), episode);
    assert_eq!(protocol::wire::peek_lease(&body), Some((episode.run, episode.lease)));
    // The plain format with images after it, and the format with images without any.
    let mut plain = body.clone();
    plain[0] = 1;
    assert!(Episode::decode(&plain).is_err());
    let plain = Episode { reset_images: Vec::new(), images: Vec::new(), ..episode };
    let mut without = plain.encode().expect("sound");
    without[0] = 2;
    assert!(Episode::decode(&without).is_err());
    without.extend([0; 32]);
    let error = Episode::decode(&without).expect_err("refused").to_string();
    assert_eq!(error, "episode: reset_images: none; an episode without images has format 1");
}

#[test]
fn images_are_bounded_by_name() {
    let refused = |change: fn(&mut Episode)| {
        let mut episode = episode_with_images();
        change(&mut episode);
        episode.encode().expect_err("refused").to_string()
    };
    let image = |side, byte| {
        let bytes = 3 * side as usize * side as usize;
        Image::new(side, side, vec![byte; bytes]).expect("an image")
    };
    assert_eq!(
        refused(|it| it.reset_images = vec![it.reset_images[0]; 17]),
        "episode: reset_images: 17 entries, the limit is 16"
    );
    assert_eq!(
        refused(|it| it.images = vec![it.images[0].clone(); 17]),
        "episode: images: 17 entries, the limit is 16"
    );
    assert_eq!(refused(|it| it.reset_images.clear()), "episode: images: images that nothing shows");
    let mut large = episode_with_images();
    large.images = vec![image(1400, 0), image(1500, 1)];
    assert_eq!(
        large.encode().expect_err("refused").to_string(),
        "episode: images: 12630000 bytes of pixels, the limit is 12582912"
    );
    // A size that its bytes do not bear out: found before anything is allocated for it.
    let episode = episode_with_images();
    let body = episode.encode().expect("sound");
    // The heights are followed by how many columns of pixels there are.
    let heights = [[2, 0, 0, 0], [2, 0, 0, 0], [2, 0, 0, 0]].concat();
    let height = body.windows(12).rposition(|it| it == heights).expect("heights");
    let mut bomb = body;
    bomb[height..height + 4].copy_from_slice(&4096_u32.to_le_bytes());
    assert_eq!(
        Episode::decode(&bomb).expect_err("refused").to_string(),
        "episode: images: 18 bytes of pixels; an image of 3 x 4096 has 36864"
    );
}

#[test]
fn every_image_is_there_once_and_is_what_its_address_says() {
    let checked = |change: fn(&mut Episode)| {
        let mut episode = episode_with_images();
        change(&mut episode);
        episode.shown_images().map(|shown| shown.into_iter().cloned().collect::<Vec<_>>())
    };
    let [a, b] = <[Image; 2]>::try_from(episode_with_images().images).expect("two");
    let digests = [a.digest(), b.digest()];
    assert_eq!(checked(|_| ()), Ok(vec![a.clone(), b, a]));
    assert_eq!(checked(|it| it.images.truncate(1)), Err(AddressError::Missing(digests[1])));
    assert_eq!(checked(|it| it.reset_images.truncate(1)), Err(AddressError::Unshown(digests[1])));
    assert_eq!(checked(|it| it.images.swap(0, 1)), Err(AddressError::Order(digests[1])));
    let twice = checked(|it| it.images.push(it.images[1].clone()));
    assert_eq!(twice, Err(AddressError::Repeated(digests[1])));
    let other = checked(|it| {
        let mut pixels = it.images[1].pixels().to_vec();
        pixels[5] ^= 1;
        it.images[1] = Image::new(2, 2, pixels).expect("an image");
    });
    assert_eq!(other, Err(AddressError::Missing(digests[1])));
}
