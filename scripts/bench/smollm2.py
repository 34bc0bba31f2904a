"""A real model under `actor sample`, its answer and tokens/s beside transformers' in one run.

    cargo build --release -p actor
    OMP_WAIT_POLICY=PASSIVE python scripts/bench/smollm2.py CHECKPOINT [--gguf FILE] [--pairs 3]

CHECKPOINT is SmolLM2-135M-Instruct as a Hugging Face directory; where it is not there yet,
../shared/tools/smollm2.py writes it from the GGUF file (its head says where to get that). Both sides
sample greedily in f32 with the same threads, prefill included; medians of pairs. Fails where the
first answer does not name Paris; passes no judgement on time.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ap = argparse.ArgumentParser()
ap.add_argument("checkpoint", type=Path)
ap.add_argument("--gguf", help="write CHECKPOINT from this file first")
ap.add_argument("--tool", default=str(ROOT.parent / "shared/tools/smollm2.py"))
ap.add_argument("--actor", default=str(ROOT / "target/release/actor"))
ap.add_argument("--pairs", type=int, default=3)
ap.add_argument("--new", type=int, default=64)
ap.add_argument("--threads", type=int, default=os.cpu_count())
a = ap.parse_args()

PROMPTS = ["What is the capital of France?", "Tell me a story about a lighthouse keeper."]

if not (a.checkpoint / "config.json").is_file():
    if not a.gguf:
        sys.exit(f"error: {a.checkpoint} holds no checkpoint; give --gguf FILE to write it")
    subprocess.run([sys.executable, a.tool, a.gguf, str(a.checkpoint)], check=True)

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(a.threads)
tokenizer = AutoTokenizer.from_pretrained(a.checkpoint, local_files_only=True)
model = AutoModelForCausalLM.from_pretrained(
    a.checkpoint, dtype=torch.float32, local_files_only=True
).eval()


def theirs(prompt):
    """(answer, tokens/s) of transformers."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=a.new, do_sample=False)
    seconds = time.perf_counter() - start
    new = out[0][ids["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), len(new) / seconds


def ours(prompt):
    """(answer, tokens/s) of `actor sample`."""
    command = [a.actor, "sample", "--model", str(a.checkpoint), "--prompt", prompt, "--device"]
    command += ["cpu", "--temperature", "0", "--max-tokens", str(a.new), "--json"]
    env = {**os.environ, "RAYON_NUM_THREADS": str(a.threads)}
    out = subprocess.run(command, capture_output=True, text=True, env=env)
    rate = re.search(r"([\d.]+) tokens/s", out.stderr)
    if out.returncode or not rate:
        sys.exit(f"error: {' '.join(command)}: {out.stderr.strip().splitlines()[-1:]}")
    return json.loads(out.stdout.splitlines()[0])["text"], float(rate[1])


theirs(PROMPTS[0])  # Warms the peer up; ours starts cold each time.
for prompt in PROMPTS:
    pairs = [(ours(prompt), theirs(prompt)) for _ in range(a.pairs)]
    (answer, _), (reference, _) = pairs[0]
    mine, peer = [statistics.median(pair[side][1] for pair in pairs) for side in (0, 1)]
    ratio = statistics.median(pair[0][1] / pair[1][1] for pair in pairs)
    same = "the same text" if answer.strip() == reference.strip() else f"not {reference!r}"
    print(f"{prompt}\n  {answer!r}\n  as transformers: {same}")
    print(f"  {mine:.1f} tok/s, transformers {peer:.1f}: ratio {ratio:.2f}, {a.threads} threads")
    if prompt == PROMPTS[0]:
        assert "Paris" in answer, answer
