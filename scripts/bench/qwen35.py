#!/usr/bin/env python3
"""Qwen3.5 LoRA training passes (forward + backward) beside transformers + PEFT, in one run.

Makes random checkpoints of Qwen3.5's shape (text decoder with both kinds of layers, vision tower)
and PEFT adapters over them in --out, the same bytes each time, and runs the same batch of ids through
both sides in turn, each in a process of its own. Prints medians over the pairs: tokens/s, CPU-seconds,
peak resident memory, and whether loss and gradient norm are equal.

    cargo build --release -p policy --example score
    scripts/bench/qwen35.py --python PYTHON --out DIR [--pairs 3] [--models tiny 100m]

PYTHON has torch, transformers and peft. `all` scores every id of a row (supervised training on whole
texts), `last 9` the last ids of each row only, with the peer computing no other logits (a code of
digits after a prompt). A shape may name the side of an image ahead of each row's text. `+ckpt` keeps only the layers' inputs on both sides (the peer's
gradient_checkpointing_enable with use_reentrant False).
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODULES = (
    r"model.language_model.*\.(q_proj|k_proj|v_proj|o_proj|in_proj_qkv|in_proj_z|in_proj_b|in_proj_a|out_proj"
    r"|gate_proj|up_proj|down_proj)$"
)
TEXT = {
    "tiny": dict(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, sections=[3, 3, 2],
    ),
    "100m": dict(
        vocab_size=32768, hidden_size=768, intermediate_size=2304, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=4, linear_num_value_heads=8,
        linear_key_head_dim=128, linear_value_head_dim=128, sections=[11, 11, 10],
    ),
}
VISION = {
    "tiny": dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4, num_position_embeddings=256),
    "100m": dict(depth=6, hidden_size=256, intermediate_size=1024, num_heads=4, num_position_embeddings=2304),
}


def make(name, out):
    """Writes the checkpoint and the adapter, unless they are there."""
    base, adapter = out / name, out / f"{name}-adapter"
    if (adapter / "adapter_model.safetensors").is_file():
        return
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    torch.manual_seed(0)
    text = dict(TEXT[name])
    vocab = text["vocab_size"]
    text["rope_parameters"] = {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": text.pop("sections"), "mrope_interleaved": True,
    }
    vision = dict(VISION[name], patch_size=16, temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=text["hidden_size"])
    config = Qwen3_5Config(
        text_config={**text, "tie_word_embeddings": True, "max_position_embeddings": 8192}, vision_config=vision,
        tie_word_embeddings=True, image_token_id=vocab - 1, video_token_id=vocab - 2, vision_start_token_id=vocab - 3,
        vision_end_token_id=vocab - 4,
    )
    model = Qwen3_5ForConditionalGeneration(config)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{name}: {parameters / 1e6:.1f} M parameters", flush=True)
    model.save_pretrained(base)
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, task_type="CAUSAL_LM", target_modules=MODULES))
    for key, value in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(value, std=0.02)
    model.save_pretrained(adapter)


def status(line):
    text = Path("/proc/self/status").read_text().split(line)[1].split()[0]
    return int(text) >> 10


def peer(settings):
    """Runs the peer in this process; prints as the example does."""
    import torch
    from peft import PeftModel
    from transformers import Qwen3_5ForConditionalGeneration

    torch.set_num_threads(settings["threads"])
    model = Qwen3_5ForConditionalGeneration.from_pretrained(settings["base"], dtype=torch.float32)
    model.requires_grad_(False)
    model = PeftModel.from_pretrained(model, settings["adapter"], is_trainable=True)
    model.train()
    if settings["checkpointing"]:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    model.config.text_config.use_cache = False
    rows, length, last = settings["rows"], settings["length"], settings["scored"]
    vocab = model.config.text_config.vocab_size
    ids = [
        [(place * 7919 + row * 104729 + place * place * 31) % (vocab - 64) for place in range(length)]
        for row in range(rows)
    ]
    ids = torch.tensor(ids)
    labels, images, across, shown = ids.clone(), {}, settings["image"] // 16, 0
    if across:
        shown = across * across // 4 + 2
        ids[:, :shown] = vocab - 1
        ids[:, 0], ids[:, shown - 1] = vocab - 3, vocab - 4
        count = across * across * 1536
        values = [(torch.arange(count) * 7919 + row * 104729) % 2001 / 1000 - 1 for row in range(rows)]
        images = {
            "pixel_values": torch.stack(values).reshape(-1, 1536).float(),
            "image_grid_thw": torch.tensor([[1, across, across]] * rows),
            "mm_token_type_ids": (ids == vocab - 1).int(),
        }
        labels = ids.clone()
        labels[:, : shown + 1] = -100
    parameters = [p for p in model.parameters() if p.requires_grad]
    loaded = status("VmRSS:")
    for _ in range(settings["runs"]):
        for p in parameters:
            p.grad = None
        start, cpu = time.perf_counter(), time.process_time()
        if last >= length:
            loss = model(input_ids=ids, labels=labels, use_cache=False, **images).loss
        else:
            keep = torch.arange(length - last - 1, length - 1)
            logits = model(input_ids=ids, logits_to_keep=keep, use_cache=False, **images).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, length - last :].flatten())
        forward = time.perf_counter() - start
        loss.backward()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        norm = sum(p.grad.double().square().sum() for p in parameters).sqrt().item()
        print(json.dumps({
            "wall": wall, "forward": forward, "cpu": cpu, "loss": loss.item(), "norm": norm, "loaded": loaded,
            "peak": status("VmHWM:"),
        }), flush=True)


def best(command, env):
    """The fastest of a process's runs after the first, and its peak."""
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr.strip().splitlines()[-1:]}")
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    later = runs[1:] or runs
    return {
        "wall": min(run["wall"] for run in later), "cpu": min(run["cpu"] for run in later),
        "forward": min(run["forward"] for run in later), "loss": runs[-1]["loss"], "norm": runs[-1]["norm"],
        "peak": max(run["peak"] for run in runs), "loaded": runs[0]["loaded"],
    }


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--python", default=sys.executable)
    ap.add_argument("--out", type=Path, required=True, help="directory for checkpoints, outside of the repository")
    ap.add_argument("--models", nargs="+", default=["tiny", "100m"], choices=list(TEXT))
    ap.add_argument("--shapes", nargs="+", default=["8x256", "4x1024"], help="rows x ids, or rows x ids x image side")
    ap.add_argument("--scored", type=int, nargs="+", default=[0, 9], help="last ids of each row; 0: all")
    ap.add_argument("--modes", nargs="+", default=["plain", "ckpt"])
    ap.add_argument("--pairs", type=int, default=3)
    ap.add_argument("--runs", type=int, default=3, help="in each process; the first is not counted")
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--ours", default=str(Path(__file__).resolve().parents[2] / "target/release/examples/score"))
    ap.add_argument("--part", choices=["make", "peer"], help=argparse.SUPPRESS)
    ap.add_argument("--settings", help=argparse.SUPPRESS)
    a = ap.parse_args()
    out = a.out.resolve()
    if a.part == "peer":
        return peer(json.loads(a.settings))
    if a.part == "make":
        return [make(name, out) for name in a.models]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "RAYON_NUM_THREADS": str(a.threads)}
    own = [a.python, __file__, "--out", str(out)]
    subprocess.run([*own, "--part", "make", "--models", *a.models], env=env, check=True)
    print(f"{a.threads} threads, medians of {a.pairs} pairs, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':34}{'peer':>9}{'ours':>9}{'speed':>7}{'cpu s':>14}{'cpu':>6}{'peak MiB':>15}{'mem':>7}  |loss| |norm|")
    for name in a.models:
        for shape in a.shapes:
            rows, length, image = map(int, (shape + "x0").split("x")[:3])
            for scored in a.scored:
                for mode in a.modes:
                    checkpointing = mode == "ckpt"
                    settings = {
                        "base": str(out / name), "adapter": str(out / f"{name}-adapter"), "rows": rows,
                        "length": length, "scored": scored or length, "checkpointing": checkpointing, "image": image,
                        "threads": a.threads, "runs": a.runs,
                    }
                    mine = [a.ours, settings["base"], settings["adapter"], "--rows", rows, "--length", length, "--image", image]
                    mine += ["--scored", settings["scored"], "--runs", a.runs]
                    mine += ["--checkpointing"] * checkpointing
                    pairs = []
                    for _ in range(a.pairs):
                        theirs = best([*own, "--part", "peer", "--settings", json.dumps(settings)], env)
                        pairs.append((theirs, best(list(map(str, mine)), env)))
                    middle = lambda side, key: statistics.median(pair[side][key] for pair in pairs)
                    ratio = lambda key: statistics.median(pair[0][key] / pair[1][key] for pair in pairs)
                    off = lambda key: max(abs(pair[1][key] / pair[0][key] - 1) for pair in pairs)
                    what = f"{name} {shape} {f'last {scored}' if scored else 'all'}{' +ckpt' if checkpointing else ''}"
                    print(
                        f"{what:28}tok/s {rows * length / middle(0, 'wall'):9.0f}{rows * length / middle(1, 'wall'):9.0f}"
                        f"{ratio('wall'):6.2f}x{middle(0, 'cpu'):7.2f}{middle(1, 'cpu'):7.2f}{ratio('cpu'):5.2f}x"
                        f"{middle(0, 'peak'):8.0f}{middle(1, 'peak'):7.0f}{ratio('peak'):6.2f}x"
                        f"  {off('loss'):.0e} {off('norm'):.0e}"
                        f"  (above loaded: {middle(0, 'peak') - middle(0, 'loaded'):.0f}, "
                        f"{middle(1, 'peak') - middle(1, 'loaded'):.0f} MiB)",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
