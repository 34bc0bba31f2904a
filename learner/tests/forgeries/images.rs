//! The forgeries of episodes that show an image and take an answer: what is done to an honest one, and
//! the name of the refusal.

use environments::Recorder;
use protocol::{CallKind, Digest, Episode, Image, Lease};

use super::{
    support::{IMAGE_PAD, World, rechain, restream},
    table::{Forge, other, rebuild},
};

/// The frame that another seed shows.
fn other_frame(world: &World, lease: &Lease) -> Image {
    let lease = Lease { seed: lease.seed + 1, ..lease.clone() };
    let opened = world.environment.open().expect("opens");
    let recorder = Recorder::reset(opened, &lease, world.environment.limits()).expect("resets");
    recorder.images().first().expect("a frame").clone()
}

/// The episode shows these images, and all that follows from that.
fn show(world: &World, lease: &Lease, episode: &mut Episode, images: Vec<Image>) {
    episode.reset_images = images.iter().map(Image::digest).collect();
    episode.images = images;
    rebuild(world, lease, episode);
}

/// The same, but the stream stays as it was.
fn claim(episode: &mut Episode, images: Vec<Image>) {
    episode.reset_images = images.iter().map(Image::digest).collect();
    episode.images = images;
    rechain(episode);
}

fn black(width: u32, height: u32) -> Image {
    Image::new(width, height, vec![0; (3 * width * height) as usize]).expect("an image")
}

fn flipped(image: &Image) -> Image {
    let mut pixels = image.pixels().to_vec();
    pixels[100] ^= 1;
    Image::new(image.width(), image.height(), pixels).expect("an image")
}

/// Rebuilds the stream with another prompt.
fn reprompt(episode: &mut Episode, change: impl FnOnce(&mut Vec<u32>)) {
    let start = usize::try_from(episode.spans[0].offset).expect("short");
    let mut prompt = episode.tokens[..start].to_vec();
    change(&mut prompt);
    restream(episode, &prompt, &[]);
}

fn first_pad(ids: &[u32]) -> usize {
    ids.iter().position(|id| *id == IMAGE_PAD).expect("an image")
}

pub(crate) const FORGERIES: &[(&str, Forge, &str)] = &[
    ("swapped image bytes", |_, _, e| e.images[0] = flipped(&e.images[0]), "image_missing"),
    (
        "swapped image bytes, all rebuilt",
        |w, l, e| show(w, l, e, vec![flipped(&e.images[0])]),
        "replay_image",
    ),
    ("the frame of another seed", |w, l, e| e.images[0] = other_frame(w, l), "image_missing"),
    (
        "the frame of another seed, all rebuilt",
        |w, l, e| show(w, l, e, vec![other_frame(w, l)]),
        "replay_image",
    ),
    (
        "the digest of another frame",
        |w, l, e| e.reset_images[0] = other_frame(w, l).digest(),
        "image_missing",
    ),
    (
        "the digest of another frame, chain rebuilt",
        |w, l, e| {
            e.reset_images[0] = other_frame(w, l).digest();
            rechain(e)
        },
        "image_missing",
    ),
    ("an image that nothing shows", |w, l, e| e.images.push(other_frame(w, l)), "image_unshown"),
    (
        "an image that is there twice",
        |_, _, e| e.images.push(e.images[0].clone()),
        "image_repeated",
    ),
    (
        "images in another order",
        |w, l, e| {
            let images = vec![e.images[0].clone(), other_frame(w, l)];
            show(w, l, e, images);
            e.images.swap(0, 1)
        },
        "image_order",
    ),
    (
        "an image too many, all rebuilt",
        |w, l, e| show(w, l, e, vec![e.images[0].clone(), other_frame(w, l)]),
        "replay_images",
    ),
    (
        "an image shown twice, all rebuilt",
        |w, l, e| {
            e.reset_images.push(e.reset_images[0]);
            rechain(e);
            let shown = [&e.images[0], &e.images[0]];
            let prompt = w.prompt(l, &e.reset_text, &shown);
            restream(e, &prompt, &[]);
        },
        "replay_images",
    ),
    (
        "an image too many in the stream alone",
        |w, l, e| {
            let images = [&e.images[0], &e.images[0]];
            let prompt = w.prompt(l, &e.reset_text, &images);
            restream(e, &prompt, &[]);
        },
        "prompt_mismatch",
    ),
    ("an image too few", |_, _, e| e.images.clear(), "image_missing"),
    ("no image, the stream as it was", |_, _, e| claim(e, vec![]), "prompt_mismatch"),
    ("no image, all rebuilt", |w, l, e| show(w, l, e, vec![]), "replay_images"),
    (
        "an image-pad id more",
        |_, _, e| reprompt(e, |ids| ids.insert(first_pad(ids), IMAGE_PAD)),
        "prompt_mismatch",
    ),
    (
        "an image-pad id fewer",
        |_, _, e| {
            reprompt(e, |ids| {
                ids.remove(first_pad(ids));
            })
        },
        "prompt_mismatch",
    ),
    (
        "an image of another grid, the stream as it was",
        |_, _, e| claim(e, vec![black(128, 64)]),
        "prompt_mismatch",
    ),
    (
        "an image of another grid, all rebuilt",
        |w, l, e| show(w, l, e, vec![black(128, 64)]),
        "replay_image",
    ),
    (
        "an image of another shape and as many ids",
        |_, _, e| claim(e, vec![black(128, 32)]),
        "replay_image",
    ),
    ("an image that no processor takes", |_, _, e| claim(e, vec![black(4096, 16)]), "unrenderable"),
    (
        "an oversized image, the stream as it was",
        |_, _, e| claim(e, vec![black(2048, 2048)]),
        "prompt_mismatch",
    ),
    (
        "the answer reworded",
        |_, _, e| {
            e.trace[0].arguments = "99".into();
            rechain(e)
        },
        "answer_mismatch",
    ),
    (
        "another answer sampled, contexts rebuilt",
        |w, l, e| {
            let ids = w.format.turn("99").expect("encodes");
            let span = &mut e.spans[0];
            span.logp_raw.resize(ids.len(), -0.5);
            span.logp_sampling.resize(ids.len(), -0.5);
            span.ids = ids;
            rebuild(w, l, e)
        },
        "answer_mismatch",
    ),
    (
        "no row of the answer",
        |_, _, e| {
            e.trace.clear();
            rechain(e)
        },
        "answer_missing",
    ),
    (
        "two rows of the answer",
        |_, _, e| {
            let mut row = e.trace[0].clone();
            row.call = 1;
            e.trace.push(row);
            rechain(e)
        },
        "call_count",
    ),
    (
        "an answer called a call",
        |_, _, e| {
            e.trace[0].kind = CallKind::Ok;
            rechain(e)
        },
        "call_count",
    ),
    (
        "an answer of another turn",
        |_, _, e| {
            e.trace[0].turn = 3;
            rechain(e)
        },
        "answer_missing",
    ),
    (
        "an answer that is not its turn's first row",
        |_, _, e| {
            e.trace[0].call = 2;
            rechain(e)
        },
        "trace_call_order",
    ),
    (
        "an answer that names a tool",
        |_, _, e| {
            e.trace[0].tool = "answer".into();
            rechain(e)
        },
        "trace_answer_shape",
    ),
    (
        "an answer that is answered",
        |_, _, e| {
            e.trace[0].observation = "right".into();
            rechain(e)
        },
        "trace_answer_shape",
    ),
    (
        "an answer that ends nothing",
        |_, _, e| {
            e.trace[0].done = false;
            rechain(e)
        },
        "trace_answer_shape",
    ),
    ("a claimed digit", |_, _, e| e.trace[0].milestones.push("digit_2".into()), "trace_chain"),
    (
        "a claimed digit, chain rebuilt",
        |_, _, e| {
            e.trace[0].milestones.push("digit_2".into());
            rechain(e)
        },
        "replay_milestones",
    ),
    (
        "a digit denied",
        |_, _, e| {
            e.trace[0].milestones.clear();
            rechain(e)
        },
        "replay_milestones",
    ),
    (
        "another target named by the reset, all rebuilt",
        |w, l, e| {
            e.reset_text = "The target is the white ring.".into();
            rebuild(w, l, e)
        },
        "replay_reset_text",
    ),
    ("a chain without the image", chain_without_image, "trace_chain"),
    ("a claimed reward", |_, _, e| e.reward = 1.0, "reward_mismatch"),
];

fn chain_without_image(_: &World, _: &Lease, episode: &mut Episode) {
    let images: Vec<Digest> = std::mem::take(&mut episode.reset_images);
    rechain(episode);
    episode.reset_images = images;
    assert_ne!(episode.trace_head, other());
}
