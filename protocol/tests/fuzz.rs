//! The fuzzer's bodies over their corpora and over mutations of them, the same ones each time.
//!
//! After a change of the wire `ROLLCALL_WRITE_GOLDEN=1 cargo test -p protocol --test fuzz` writes the
//! corpora anew.

#[path = "../fuzz/bodies.rs"]
mod bodies;
mod support;

use std::{fs, path::PathBuf};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use protocol::{
    Digest, Join,
    delta::{self, Layout},
    frame::Kind,
};
use support::{manifest_with_delta, samples};

/// Mutations of each corpus.
const MUTATIONS: u64 = 10_000;

/// splitmix64.
struct Draws(u64);

impl Draws {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % below.max(1) as u64) as usize
    }

    fn mutate(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = corpus[self.next(corpus.len())].clone();
        for _ in 0..=self.next(4) {
            let at = self.next(bytes.len());
            match self.next(8) {
                0 if !bytes.is_empty() => bytes[at] ^= 1 << self.next(8),
                1 if !bytes.is_empty() => bytes[at] = self.next(256) as u8,
                2 => bytes.truncate(at),
                3 => bytes.insert(at, self.next(256) as u8),
                // Lengths that overflow something.
                4 if bytes.len() >= at + 8 => {
                    let claims = [u64::MAX, 1 << 62, 1 << 32, 1 << 24, 0x7fff_ffff, 0];
                    bytes[at..at + 8].copy_from_slice(&claims[self.next(6)].to_le_bytes());
                }
                5 if bytes.len() >= at + 4 => {
                    let claims = [u32::MAX, 1 << 24, 1 << 16, 0];
                    bytes[at..at + 4].copy_from_slice(&claims[self.next(4)].to_le_bytes());
                }
                // A piece of another one.
                6 => {
                    let other = &corpus[self.next(corpus.len())];
                    let from = self.next(other.len());
                    let piece = &other[from..from + self.next(other.len() - from).min(4096)];
                    bytes.splice(at..at, piece.iter().copied());
                }
                _ => bytes.extend((0..self.next(64)).map(|it| (it * 37) as u8)),
            }
        }
        bytes
    }
}

/// The committed corpus of a target; written from `seeds` on demand.
fn corpus(target: &str, seeds: Vec<(String, Vec<u8>)>) -> Vec<Vec<u8>> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    if std::env::var_os("ROLLCALL_WRITE_GOLDEN").is_some() {
        fs::create_dir_all(&dir).expect("made");
        for (name, bytes) in &seeds {
            fs::write(dir.join(name), bytes).expect("written");
        }
    }
    let mut files: Vec<PathBuf> = fs::read_dir(&dir)
        .expect("a committed corpus")
        .map(|it| it.expect("read").path())
        .collect();
    files.sort();
    assert!(files.len() >= seeds.len(), "{} has {} files", dir.display(), files.len());
    files.iter().map(|file| fs::read(file).expect("read")).collect()
}

fn run(target: &str, seeds: Vec<(String, Vec<u8>)>, body: fn(&[u8])) {
    let corpus = corpus(target, seeds);
    corpus.iter().for_each(|bytes| body(bytes));
    for seed in 0..MUTATIONS {
        body(&Draws(seed).mutate(&corpus));
    }
    for seed in 0..MUTATIONS {
        let mut draws = Draws(!seed);
        let random: Vec<u8> = (0..draws.next(300)).map(|_| draws.next(256) as u8).collect();
        body(&random);
    }
}

#[test]
fn frames() {
    let mut seeds = Vec::new();
    for (name, message) in samples() {
        let (kind, body) = message.encode().expect("sound");
        let at = Kind::ALL.iter().position(|it| *it == kind).expect("a kind") as u8;
        let stream = protocol::frame::encode(kind, &body).expect("short");
        seeds.push((format!("{name}.stream"), [&[at, 50], stream.as_slice()].concat()));
        seeds.push((format!("{name}.body"), [&[at | 0x80, 255], body.as_slice()].concat()));
    }
    run("frame", seeds, bodies::frame);
}

#[test]
fn join_strings() {
    let token = [[1].as_slice(), &Digest::of(b"certificate").0, &[7; 16]].concat();
    let token = URL_SAFE_NO_PAD.encode(token);
    let hosts = ["127.0.0.1:7171", "learner.example:443", "[2001:db8::1]:65535"];
    let mut seeds = vec![("no-token".to_owned(), b"127.0.0.1:7171".to_vec())];
    for (at, host) in hosts.iter().enumerate() {
        let text = format!("{host}#{token}");
        assert!(text.parse::<Join>().is_ok(), "{text}");
        seeds.push((format!("sound-{at}"), text.into_bytes()));
    }
    for (at, host) in ["::1:5", ":", "h:0", "a b:1"].iter().enumerate() {
        seeds.push((format!("host-{at}"), format!("{host}#{token}").into_bytes()));
    }
    run("join", seeds, bodies::join);
}

#[test]
fn manifests() {
    let plain = |bytes: &[u8]| {
        protocol::AdapterManifest::build(3, &Digest::of(b"weights"), bytes).expect("an adapter")
    };
    let encode = |manifest| protocol::wire::encode_manifest(&manifest).expect("sound");
    let large = vec![1; 2 * protocol::frame::CHUNK_LEN + 1];
    let seeds = vec![
        ("small".into(), encode(plain(b"safetensors"))),
        ("three-chunks".into(), encode(plain(&large))),
        ("delta".into(), encode(manifest_with_delta())),
    ];
    run("manifest", seeds, bodies::manifest);
}

#[test]
fn deltas() {
    let view = |dtype, data| safetensors::tensor::TensorView::new(dtype, vec![64], data);
    let (wide, narrow) = (vec![3; 256], vec![7; 128]);
    let views = [
        ("a", view(safetensors::Dtype::F32, &wide).expect("sound")),
        ("b", view(safetensors::Dtype::BF16, &narrow).expect("sound")),
    ];
    let file = safetensors::serialize(views, None).expect("sound");
    let len = u16::try_from(file.len()).expect("short");
    // As the body makes it.
    let base: Vec<u8> = (0..len).map(|at| (at ^ (at >> 5)) as u8).collect();
    let head = len.to_le_bytes();
    let mut seeds = vec![("file".to_owned(), [&head, file.as_slice()].concat())];
    for (name, layout) in [("numbers", Layout::of(&file)), ("bytes", Layout::of(b"none"))] {
        let range = match name {
            "numbers" => 0..file.len(),
            _ => 0..4,
        };
        let packed =
            delta::encode(&layout, range.clone(), &base[range.clone()], &file[range.clone()]);
        let head = u16::try_from(range.len()).expect("short").to_le_bytes();
        seeds.push((name.to_owned(), [&head, packed.expect("packed").as_slice()].concat()));
    }
    let bomb = zstd::bulk::compress(&vec![0; 1 << 26], 19).expect("packed");
    let described = [1, 1, 0, 0, 4, 0, 0, 4];
    seeds.push(("bomb".into(), [[0, 4].as_slice(), &described, &bomb].concat()));
    run("delta", seeds, bodies::delta);
}
