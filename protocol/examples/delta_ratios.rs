//! What a delta takes of an adapter, on adapters that a run broadcast one after the other.
//!
//! `cargo run -p protocol --example delta_ratios -- RUN/policies` takes the files of a directory in the
//! order of their writing; with files as arguments, those in that order. Prints the quartiles of the
//! ratio of bytes to fetch, with the adapter before and without, and the time to pack and to unpack a
//! gigabyte.

use std::{
    error::Error,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use protocol::{AdapterManifest, Assembly, Digest, PolicyDigest};

fn files(arguments: &[PathBuf]) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let [dir] = arguments else { return Ok(arguments.to_vec()) };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|it| it == "safetensors") {
            found.push((std::fs::metadata(&path)?.modified()?, path));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Packs and unpacks one step; bytes with the base, bytes without, and how long each took.
fn step(base: &[u8], new: &[u8]) -> Result<(u64, u64, Duration, Duration), Box<dyn Error>> {
    let weights = Digest::of(b"weights");
    let earlier = PolicyDigest::new(&weights, &Digest::of(base));
    let manifest = AdapterManifest::build(1, &weights, new)?;
    let began = Instant::now();
    let (manifest, deltas) = manifest.with_delta(new, earlier, base);
    let packing = began.elapsed();
    let (with, without) = manifest.transfer_bytes();
    let mut assembly = Assembly::new(manifest.clone())?.with_base(&earlier, base.to_vec().into());
    let began = Instant::now();
    for index in 0..manifest.chunks.len() {
        match deltas.get(index).and_then(Option::as_ref) {
            Some(delta) => assembly.put_delta(index, delta)?,
            None => {
                let range = manifest.range(index).ok_or("no chunk")?;
                assembly.put(index, new.get(range).ok_or("no chunk")?)?;
            }
        }
    }
    let unpacking = began.elapsed();
    if assembly.finish()? != new {
        return Err("the delta does not give the adapter back".into());
    }
    Ok((with, without, packing, unpacking))
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let files = files(&arguments)?;
    let (mut ratios, mut same) = (Vec::new(), 0);
    let (mut bytes, mut packing, mut unpacking) = (0, Duration::ZERO, Duration::ZERO);
    for pair in files.windows(2) {
        let [base, new] = pair else { continue };
        let read = |path: &Path| std::fs::read(path);
        let (base, new) = (read(base)?, read(new)?);
        if base == new {
            same += 1;
            continue;
        }
        let (with, without, pack, unpack) = step(&base, &new)?;
        ratios.push(with as f64 / without as f64);
        bytes += without;
        packing += pack;
        unpacking += unpack;
    }
    ratios.sort_by(f64::total_cmp);
    let last = ratios.len().saturating_sub(1);
    let quartile = |at: usize| ratios.get((ratios.len() * at / 4).min(last)).copied();
    let (Some(low), Some(median), Some(high)) = (quartile(1), quartile(2), quartile(3)) else {
        return Err("name a run's policies directory, or at least two adapters".into());
    };
    let speed = |took: Duration| bytes as f64 / 1e9 / took.as_secs_f64();
    println!(
        "{} steps of {} KiB ({same} without change): ratio {median:.3} ({low:.3} to {high:.3}), \
         packing {:.2} GB/s, unpacking {:.2} GB/s",
        ratios.len(),
        bytes / ratios.len() as u64 / 1024,
        speed(packing),
        speed(unpacking),
    );
    Ok(())
}
