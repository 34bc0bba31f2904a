"""Checks that adapters written by this project load in PEFT and give there the logits that they give here.

    pip install torch transformers peft safetensors
    python scripts/check_peft.py [MODEL_DIR ...]

For each checkpoint (default: the small ones under policy/tests/golden/model) the example `write_adapter` writes
adapters and our logits; PEFT loads the directory as it is. Exit status 1 where logits differ by more than
1e-4 of max |logit|, a key is left over or missing, or a field that vLLM reads is absent.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

ROOT = Path(__file__).resolve().parent.parent
# What vLLM's PEFTHelper reads or checks.
VLLM = ["r", "lora_alpha", "target_modules", "bias", "modules_to_save", "use_rslora", "use_dora"]


def check(model_dir, targets, *flags):
    with tempfile.TemporaryDirectory() as out:
        command = ["cargo", "run", "-q", "-p", "policy", "--example", "write_adapter", "--", str(model_dir), out, targets, *flags]
        subprocess.run(command, check=True, cwd=ROOT)
        settings = json.loads((Path(out) / "adapter_config.json").read_text())
        missing = [field for field in VLLM if field not in settings]
        expected = load_file(Path(out) / "expected.safetensors")
        config = AutoConfig.from_pretrained(model_dir)
        seeing = hasattr(config, "vision_config")
        kind = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
        base = kind.from_pretrained(model_dir, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, out).eval()
        ours = set(load_file(Path(out) / "adapter_model.safetensors"))
        theirs = {n.replace(".default", "") for n, _ in model.named_parameters() if "lora_" in n}
        with torch.no_grad():
            found = {"logits": model(expected["input_ids"]).logits}
            if seeing:
                ids = expected["mm_input_ids"]
                found["mm_logits"] = model(
                    ids, pixel_values=expected["mm_pixel_values"], image_grid_thw=expected["mm_image_grid_thw"],
                    mm_token_type_ids=(ids == config.image_token_id).long(),
                ).logits
        off = max(float((found[k] - expected[k]).abs().max() / expected[k].abs().max()) for k in found)
        good = off <= 1e-4 and ours == theirs and not missing
        what = " and ".join(["text"] + ["images"] * seeing)
        print(f"{'ok  ' if good else 'FAIL'} {Path(model_dir).name} {targets} {' '.join(flags)}: {len(ours)} tensors, logits over {what} off by {off:.1e} of max")
        return good


folders = [Path(a).resolve() for a in sys.argv[1:]]
if not folders:
    folders = [f for f in sorted((ROOT / "policy/tests/golden/model/checkpoints").iterdir()) if "16" not in f.name]
results = []
for folder in folders:
    results.append(check(folder, "all-linear"))
    results.append(check(folder, r".*\.(q_proj|o_proj|down_proj)", "--rslora"))
    if "vision_config" in json.loads((folder / "config.json").read_text()):
        results.append(check(folder, r"model\.visual\.(blocks\.\d+\.(attn\.proj|mlp\.linear_fc2)|merger\.linear_fc\d)"))
sys.exit(not all(results))
