"""Makes policy/tests/golden/model: tiny random checkpoints and adapters with the reference stack's numbers.

    pip install torch transformers peft safetensors
    python scripts/golden/model.py [NAME...]   # these alone, else all

Each folder is a Hugging Face checkpoint or PEFT adapter with a golden.safetensors beside it: input_ids,
logits, hidden_N, a left-padded batch, greedy ids, the mean next-token loss and gradients. The variants
cover what the shared data does not: yarn and llama3 rotary scaling, biases, untied heads, shards,
bf16 and f16 files, rank-stabilised adapters, targets by regex and by list, Qwen3.5's text-only class with
an untied head, gradients over more than one chunk of its recurrent layers; a vision-language checkpoint of odd sizes
with every gradient of its tower, and adapters in it. Its own goldens are text_* and mm_*.
"""

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, Qwen3_5Config, Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parents[2] / "policy/tests/golden/model"
VOCAB, LENGTH = 48, 14
SIZES = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
)


def spread(model, generator):
    """Weights that make every part of the computation matter: norms and biases away from 1 and 0."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.4) / parameter.shape[-1] ** 0.5)


def ids(rows, generator, length=LENGTH):
    return torch.randint(0, VOCAB - 1, (rows, length), generator=generator)


def loss_of(logits, input_ids):
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), input_ids[0, 1:])


def greedy(model, input_ids):
    """Greedy ids and the smallest lead of a chosen logit over the next best."""
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=10, min_new_tokens=10, do_sample=False,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )
    leads = [row.float().topk(2).values[0] for row in output.logits]
    return output.sequences, min(float(lead[0] - lead[1]) for lead in leads)


def wanted(name):
    return not sys.argv[1:] or name in sys.argv[1:]


def checkpoint(name, make, dtype, seed, shard=None, gradients=True, length=LENGTH):
    while wanted(name) and not attempt(name, make(), dtype, seed, shard, gradients, length):
        seed += 100


def attempt(name, model, dtype, seed, shard, gradients, length):
    generator = torch.Generator().manual_seed(seed)
    spread(model, generator)
    folder = ROOT / "checkpoints" / name
    shutil.rmtree(folder, ignore_errors=True)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    input_ids = ids(1, generator, length)
    output = model(input_ids, output_hidden_states=True)
    golden = {"input_ids": input_ids, "logits": output.logits.float()}
    golden |= {f"hidden_{i}": hidden.float() for i, hidden in enumerate(output.hidden_states)}
    batch, mask = ids(2, generator, length), torch.ones(2, length, dtype=torch.long)
    mask[1, :5] = 0
    batch[1, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(batch, attention_mask=mask, position_ids=positions).logits
    golden |= {"batch_input_ids": batch, "batch_mask": mask, "batch_logits": logits.float()}
    golden["greedy"], lead = greedy(model, input_ids)
    if lead < (0.01 if dtype == torch.float32 else 0.12):
        return False  # rounding could choose otherwise
    if gradients:
        loss = loss_of(output.logits, input_ids)
        loss.backward()
        golden["loss"] = loss.detach().reshape(1)
        parts = ("embed", "lm_head", "norm", "bias", "layers.0.self_attn.v", "layers.1.mlp.down", "layers.0.linear_attn", "q_proj")
        if "qwen3_5" not in name:
            parts = parts[:-1]
        golden |= {f"grad.{n}": p.grad for n, p in model.named_parameters() if any(part in n for part in parts)}
    save(golden, folder)
    return True


def adapter(name, base, seed, length=LENGTH, **settings):
    if not wanted(name):
        return
    generator = torch.Generator().manual_seed(seed)
    folder = ROOT / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints" / base, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            with torch.no_grad():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"checkpoints/{base}"
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    input_ids = ids(1, generator, length)
    logits = model(input_ids).logits
    loss = loss_of(logits, input_ids)
    loss.backward()
    golden = {"input_ids": input_ids, "logits": logits.detach(), "loss": loss.detach().reshape(1)}
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            golden["grad." + key.replace(".default", "")] = parameter.grad
    with torch.no_grad():
        golden["merged_logits"] = model.merge_and_unload()(input_ids).logits
    save(golden, folder)
    base_model = AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints" / base, dtype=torch.float32, attn_implementation="eager")
    again = PeftModel.from_pretrained(base_model, folder).eval()
    assert torch.equal(again(input_ids).logits, golden["logits"]), "the saved adapter is the measured one"


def picture(config, generator):
    """Inputs with two images, and image-pad ids at their places alone."""
    vision, pad, grids = config.vision_config, config.image_token_id, [[1, 4, 6], [1, 2, 2]]
    text = iter(torch.randint(0, 40, (60,), generator=generator).tolist())
    row, kinds = [], []
    for before, grid in zip((5, 3, 6), grids + [None]):
        tokens = 0 if grid is None else grid[1] * grid[2] // 4
        row += [next(text) for _ in range(before)] + [pad] * tokens
        kinds += [0] * before + [1] * tokens
    patches = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(patches, 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)
    return {
        "input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([kinds]), "pixel_values": pixels, "image_grid_thw": torch.tensor(grids),
    }


def sighted(name, config, seed):
    while wanted(name) and not attempt_sighted(name, config, seed):
        seed += 100


def attempt_sighted(name, config, seed):
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3_5ForConditionalGeneration(config)
    spread(model, generator)
    folder = ROOT / "checkpoints" / name
    shutil.rmtree(folder, ignore_errors=True)
    model.eval().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    inputs = picture(config, generator)
    golden = {f"mm_{key}": value for key, value in inputs.items()}
    text = torch.randint(0, 40, (1, LENGTH), generator=generator)
    output = model(text, output_hidden_states=True)
    golden |= {"text_input_ids": text, "text_logits": output.logits}
    golden |= {f"text_hidden_{i}": hidden for i, hidden in enumerate(output.hidden_states)}
    grids = inputs["image_grid_thw"]
    positions, deltas = model.model.get_rope_index(inputs["input_ids"], inputs["mm_token_type_ids"], grids)
    seen = model.model.visual(inputs["pixel_values"], grid_thw=grids)
    golden |= {"mm_position_ids": positions, "mm_rope_deltas": deltas}
    golden |= {"mm_vision_last_hidden": seen.last_hidden_state, "mm_vision_merged": seen.pooler_output}
    output = model.generate(
        **inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )
    leads = [row.topk(2).values[0] for row in output.logits]
    if min(float(lead[0] - lead[1]) for lead in leads) < 0.01:
        return False  # rounding could choose otherwise
    golden["mm_greedy"] = output.sequences
    model.model.rope_deltas = None
    logits = model(**inputs).logits
    loss = loss_of(logits, inputs["input_ids"])
    loss.backward()
    golden |= {"mm_logits": logits, "mm_loss": loss.reshape(1)}
    golden |= {f"grad.{n}": p.grad for n, p in model.named_parameters() if "visual" in n or "embed" in n or "lm_head" in n}
    save(golden, folder)
    return True


def sighted_adapter(name, base, seed, **settings):
    if not wanted(name):
        return
    generator = torch.Generator().manual_seed(seed)
    folder = ROOT / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    model = AutoModelForImageTextToText.from_pretrained(ROOT / "checkpoints" / base, dtype=torch.float32, attn_implementation="eager")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    loras = {key: parameter for key, parameter in model.named_parameters() if "lora_" in key}
    for parameter in loras.values():
        with torch.no_grad():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"checkpoints/{base}"
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    inputs = load_file(ROOT / "checkpoints" / base / "golden.safetensors")
    keys = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
    logits = model(**{key: inputs[f"mm_{key}"] for key in keys}).logits
    loss = loss_of(logits, inputs["mm_input_ids"])
    loss.backward()
    golden = {"mm_logits": logits, "mm_loss": loss.reshape(1)}
    golden |= {"grad." + key.replace(".default", ""): parameter.grad for key, parameter in loras.items()}
    golden["text_logits"] = model(inputs["text_input_ids"]).logits
    save(golden, folder)


def save(golden, folder):
    save_file({k: v.detach().contiguous() for k, v in sorted(golden.items())}, folder / "golden.safetensors")
    load_file(folder / "golden.safetensors")


yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
llama3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
default = {"rope_type": "default", "rope_theta": 1e4}
plain = Qwen3Config(**SIZES, rope_parameters=default, tie_word_embeddings=True)
checkpoint("qwen3-plain", lambda: Qwen3ForCausalLM(plain), torch.float32, 1)
checkpoint("qwen3-bf16", lambda: Qwen3ForCausalLM(plain), torch.bfloat16, 2, gradients=False)
checkpoint(
    "qwen3-yarn-bias-shards",
    lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=yarn, tie_word_embeddings=False, attention_bias=True)),
    torch.float32, 3, shard="12KB",
)
checkpoint(
    "llama-llama3-bias",
    lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=llama3, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)),
    torch.float32, 4,
)
checkpoint("llama-f16", lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=default, tie_word_embeddings=False)), torch.float16, 5, gradients=False)
adapter("qwen3-plain-rslora-regex", "qwen3-plain", 6, r=3, lora_alpha=5, use_rslora=True, target_modules=r".*\.1\.(self_attn|mlp)\.(q_proj|o_proj|down_proj)")
adapter("llama-list", "llama-llama3-bias", 7, r=2, lora_alpha=3, target_modules=["v_proj", "layers.0.mlp.up_proj"])
hybrid = dict(
    SIZES, num_hidden_layers=3, max_position_embeddings=128, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=10, layer_types=["linear_attention", "full_attention", "linear_attention"],
    rope_parameters={**default, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
)
checkpoint(
    "qwen3_5-text", lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**hybrid, tie_word_embeddings=False)), torch.float32, 8, length=70,
)
adapter(
    "qwen3_5-text-regex", "qwen3_5-text", 9, length=70, r=2, lora_alpha=4,
    target_modules=r".*\.(q_proj|k_proj|v_proj|o_proj|in_proj_qkv|in_proj_z|in_proj_b|in_proj_a|out_proj|gate_proj|up_proj|down_proj)",
)
seeing = Qwen3_5Config(
    text_config=dict(
        SIZES, head_dim=16, num_attention_heads=3, num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=6,
        linear_key_head_dim=6, linear_value_head_dim=4, layer_types=["linear_attention", "full_attention"],
        rope_parameters={**default, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    ),
    vision_config=dict(
        depth=3, hidden_size=12, intermediate_size=20, num_heads=3, patch_size=2, out_hidden_size=16, num_position_embeddings=10,
    ),
    image_token_id=40, video_token_id=41, vision_start_token_id=42, vision_end_token_id=43, tie_word_embeddings=False,
)
sighted("qwen3_5-sighted", seeing, 10)
sighted_adapter("qwen3_5-sighted-all-linear", "qwen3_5-sighted", 11, r=2, lora_alpha=4, target_modules="all-linear")
sighted_adapter(
    "qwen3_5-sighted-tower", "qwen3_5-sighted", 12, r=3, lora_alpha=3,
    target_modules=r"model\.visual\.(blocks\.[02]\.(attn\.qkv|attn\.proj|mlp\.linear_fc1)|merger\.linear_fc2)",
)
print(sum(f.stat().st_size for f in ROOT.rglob("*") if f.is_file()), "bytes")
