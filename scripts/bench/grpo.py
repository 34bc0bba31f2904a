#!/usr/bin/env python3
"""One GRPO step beside TRL's: seconds a step, rollout and update tokens a second, in one run.

The peer is a TRL GRPOTrainer script that trains a tiny Qwen3 (hidden 256, 4 layers, LoRA r 16
all-linear, 8 generations, one tool `add`) on the CPU and prints a line `SUMMARY {json}`; it leaves
its checkpoint in OUT/ck_mini_256_4, which ours then trains on, with the same prompts, tool, settings
and number of threads. The two take turns; medians over the pairs are printed.

    cargo build --release
    scripts/bench/grpo.py --peer PATH/trl_grpo.py --python PYTHON --out DIR [--pairs 3] [--steps 8]

Ours is run with a KL weight of 1e-6, so that every step makes a full update (without it, groups with
equal rewards cost nothing); it therefore pays for a reference pass that the peer does not make.
"""
import argparse
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--peer", required=True, help="the TRL script")
arguments.add_argument("--python", default="python3", help="a Python with torch, transformers, trl, peft")
arguments.add_argument("--out", type=Path, required=True, help="directory for checkpoint and runs")
arguments.add_argument("--pairs", type=int, default=3)
arguments.add_argument("--steps", type=int, default=8)
arguments.add_argument("--programs", type=Path, default=Path(__file__).parents[2] / "target/release")
options = arguments.parse_args()
out = options.out.resolve()
out.mkdir(parents=True, exist_ok=True)


def peer():
    command = [options.python, str(Path(options.peer).resolve()), "--tok", "mini", "--gens", "8"]
    command += ["--max-comp", "96", "--steps", str(options.steps), "--sft-steps", "300", "--out", str(out)]
    printed = subprocess.run(command, cwd=out, capture_output=True, text=True, check=True).stdout
    line = next(line for line in printed.splitlines() if line.startswith("SUMMARY "))
    found = json.loads(line.removeprefix("SUMMARY "))
    return {
        "seconds": found["sec_per_step"],
        "cpu_seconds": found["cpu_s_per_step"],
        "rollout tok/s": found["rollout_tok_s"],
        "update tok/s": found["update_tok_s"],
        "stream ids a step": found["all_tok_per_step"],
    }


def digest(path):
    command = [str(options.programs / "learner"), "digest", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def recipe():
    data = out / "add.jsonl"
    rows = [
        {"id": f"{x}+{y}", "prompt": f"{x}+{y}=?", "task": {"split": "train", "want": x + y}}
        for x in range(1, 10)
        for y in range(1, 10)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = out / "ck_mini_256_4"
    path = out / "recipe.json"
    training = {
        "max_steps": options.steps, "num_generations": 8, "max_completion_length": 96,
        "max_tool_calling_iterations": 2, "learning_rate": 1e-4, "beta": 1e-6, "temperature": 1.0,
        "top_k": 0, "top_p": 1.0, "gradient_checkpointing": False,
    }
    path.write_text(json.dumps({
        "schema_version": 1,
        "model": {"path": str(model), "sha256": digest(model)},
        "dataset": {"path": str(data), "sha256": digest(data)},
        "seed": 0, "chat_template_kwargs": {"enable_thinking": False},
        "training": training, "lora": {"r": 16, "alpha": 32}, "environment": {"name": "add"},
    }, indent=2))
    return path


def ours(path, index):
    run = out / f"run-{os.getpid()}-{index}"
    command = [str(options.programs / "learner"), "train", str(path), "--output", str(run)]
    command += ["--local-actors", "1", "--device", "cpu", "--json"]
    started = os.times()
    subprocess.run(command, capture_output=True, text=True, check=True)
    ended = os.times()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    mean = lambda key: statistics.mean(step[key] for step in steps)
    cpu = ended.children_user + ended.children_system - started.children_user - started.children_system
    # The peer's rate counts every id that it pads and scores, prompts once a rollout; so does this
    # one, beside the rate of ids that really went through the model (prompts once a group).
    return {
        "seconds": mean("step_time"),
        "cpu_seconds": cpu / options.steps,
        "rollout tok/s": mean("rollout_tokens_per_second"),
        "update tok/s": mean("update_tokens_per_second"),
        "stream ids a step": mean("stream_tokens"),
    }


pairs = []
for index in range(options.pairs):
    theirs = peer()
    mine = ours(recipe(), index)
    pairs.append((theirs, mine))
    print(f"pair {index + 1}: TRL {theirs['seconds']:.2f} s, Rollcall {mine['seconds']:.2f} s a step", flush=True)

print(f"\n{'median of ' + str(len(pairs)) + ' pairs':28} {'TRL':>10} {'Rollcall':>10} {'ratio':>8}")
for key in pairs[0][0]:
    theirs, mine = (statistics.median(pair[side][key] for pair in pairs) for side in (0, 1))
    better = theirs / mine if "seconds" in key else mine / theirs
    print(f"{key:28} {theirs:10.2f} {mine:10.2f} {better:7.2f}x")
print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
