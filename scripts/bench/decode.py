"""Decode tokens per second beside transformers' generate, in one run: medians of pairs.

    cargo build --release -p policy --example decode
    OMP_WAIT_POLICY=PASSIVE python scripts/bench/decode.py CHECKPOINT [--batch 1 8 32] [--pairs 3]

Needs torch and transformers for the peer. Each pair runs one after the other on the same machine;
of each program the best of its runs after the first counts. Passes no judgement.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ap = argparse.ArgumentParser()
ap.add_argument("checkpoint")
ap.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
ap.add_argument("--pairs", type=int, default=3)
ap.add_argument("--prompt", type=int, default=128)
ap.add_argument("--new", type=int, default=128)
ap.add_argument("--threads", type=int, default=os.cpu_count())
ap.add_argument("--ours", default=str(ROOT / "target/release/examples/decode"))
ap.add_argument("--peer", default=str(ROOT.parent / "shared/baselines/generate.py"))
a = ap.parse_args()


def best(command):
    """The fastest run after the first, as (tokens/s, tokens per CPU-second)."""
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "RAYON_NUM_THREADS": str(a.threads)}
    out = subprocess.run(command, capture_output=True, text=True, env=env)
    runs = re.findall(r"run \d+: ([\d.]+) tok/s wall, ([\d.]+) tok per CPU-second", out.stdout)
    if out.returncode or not runs:
        sys.exit(f"error: {' '.join(command)}: {out.stderr.strip().splitlines()[-1:]}")
    return max((float(wall), float(cpu)) for wall, cpu in runs[1:] or runs)


print(f"{a.checkpoint}: prompt {a.prompt}, {a.new} new ids, {a.threads} threads, {a.pairs} pairs")
for batch in a.batch:
    shape = ["--batch", str(batch), "--prompt", str(a.prompt), "--new", str(a.new), "--runs", "3"]
    pairs = []
    for _ in range(a.pairs):
        peer = best([sys.executable, a.peer, a.checkpoint, *shape, "--threads", str(a.threads)])
        pairs.append((best([a.ours, a.checkpoint, *shape]), peer))
    ours, theirs = [statistics.median(pair[side][0] for pair in pairs) for side in (0, 1)]
    ratio = statistics.median(pair[0][0] / pair[1][0] for pair in pairs)
    cpu = statistics.median(pair[0][1] / pair[1][1] for pair in pairs)
    spread = ", ".join(f"{pair[0][0] / pair[1][0]:.2f}" for pair in pairs)
    print(
        f"batch {batch:3}: {ours:9.1f} tok/s, transformers {theirs:8.1f}: ratio {ratio:.2f} "
        f"({spread}); per CPU-second {cpu:.2f}"
    )
