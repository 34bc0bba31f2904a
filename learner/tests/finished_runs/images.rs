//! A run whose episodes show images: it holds from its directory, and neither the images nor what makes
//! ids of them can be changed.

use std::{fs, path::Path};

use protocol::{Episode, Image};

use crate::{
    audit,
    bench::Bench,
    image_model::write_image_model,
    player::Player,
    reasons,
    support::rechain,
    tampering::Tampering,
    tools::{answer, copy_tree, lines, reline, substitute},
};

/// The image with one pixel changed.
fn retouched(image: &Image) -> Image {
    let mut pixels = image.pixels().to_vec();
    pixels[9] ^= 4;
    Image::new(image.width(), image.height(), pixels).expect("an image")
}

/// Puts a changed episode in the place of the first one, everywhere.
fn forge(run: &Path, change: impl FnOnce(&mut Episode)) {
    let (id, mut episode, _) = answer(run, 0, 0);
    change(&mut episode);
    substitute(run, id, &episode.encode().expect("encodes"));
}

const TAMPERINGS: [Tampering; 6] = [
    (
        "another image named by the evidence, all hashes mended",
        |run| {
            let named = "\"images\":[\"";
            let line = lines(run).into_iter().find(|line| line.contains(named)).expect("a line");
            let digest = &line[line.find(named).expect("there") + named.len()..][..64];
            let other =
                format!("{}{}", if digest.starts_with('0') { '1' } else { '0' }, &digest[1..]);
            reline(run, digest, digest, &other);
        },
        "evidence_row",
    ),
    (
        "no image named by the evidence, all hashes mended",
        |run| {
            let named = ",\"images\":[\"";
            let line = lines(run).into_iter().find(|line| line.contains(named)).expect("a line");
            let from = &line[line.find(named).expect("there")..][..named.len() + 64 + 2];
            reline(run, from, from, "");
        },
        "evidence_row",
    ),
    (
        "the pixels of an episode changed, everywhere",
        |run| forge(run, |episode| episode.images[0] = retouched(&episode.images[0])),
        "image_missing",
    ),
    (
        "the pixels of an episode changed and their address with them, everywhere",
        |run| {
            forge(run, |episode| {
                episode.images[0] = retouched(&episode.images[0]);
                episode.reset_images[0] = episode.images[0].digest();
                rechain(episode);
            });
        },
        "replay_image",
    ),
    (
        "another image processor",
        |run| {
            let path = run.join("tokenizer/preprocessor_config.json");
            let text = fs::read_to_string(&path).expect("read");
            fs::write(path, text.replace("1024", "4096")).expect("written");
        },
        "tokenizer_file",
    ),
    (
        "no image processor",
        |run| {
            fs::remove_file(run.join("tokenizer/preprocessor_config.json")).expect("removed");
        },
        "tokenizer_file",
    ),
];

#[test]
fn a_run_that_shows_images_holds_and_every_change_of_them_is_found_by_name() {
    let mut bench = Bench::frames(write_image_model);
    let run = Player::finish(&mut bench);
    let report = audit(&run);
    assert!(report.holds, "{report}");
    let named = lines(&run).iter().filter(|line| line.contains("\"images\":[\"")).count();
    assert_eq!(named, lines(&run).len(), "every line names its image");
    let elsewhere = tempfile::tempdir().expect("a directory");
    for (index, (name, tamper, reason)) in TAMPERINGS.into_iter().enumerate() {
        let copy = elsewhere.path().join(index.to_string());
        copy_tree(&run, &copy);
        tamper(&copy);
        let report = audit(&copy);
        let found = reasons(&report);
        assert!(!report.holds && found.contains(&reason), "{name}: {found:?}");
    }
}
