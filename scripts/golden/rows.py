"""Makes learner/tests/golden/rows: SFT and PPO on rows of an image, a name and a code, by transformers and PEFT.

    pip install torch transformers peft pillow safetensors
    python scripts/golden/rows.py learner/tests/golden/rows

A tiny random Qwen3.5 checkpoint of the vision-language class, images, rows, and what the row trainer's arithmetic makes
of them in f32: mean cross entropy of code and end of turn with clipped AdamW on the warm-up times cosine; then sequence
ratios, clip and k3 against a reference adapter with accumulation. Losses and the adapter after 1 and 5 updates. Fresh
adapters and the order of rows are ours, from SHA-256, so they are written down here a second time.
"""
import hashlib
import json
import math
import random
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3VLProcessor,
)

OUT = Path(sys.argv[1])
SEED, SFT_LR, PPO_LR, CLIP, BETA = 42, 1e-1, 3e-3, 0.2, 0.02
MODULES = (r"model.language_model.*\.(q_proj|k_proj|v_proj|o_proj|in_proj_qkv|in_proj_z|in_proj_b|in_proj_a|out_proj"
           r"|gate_proj|up_proj|down_proj)$")
END = "<|im_end|>"
PROMPT = "Where is the {{ name }}?{% if memory %} Before: {{ memory[0] }} {{ memory[1] }}.{% endif %}"


def prompt(row):
    """What the template above makes of a row."""
    memory = row.get("memory")
    return f"Where is the {row['name']}?" + (f" Before: {memory[0]} {memory[1]}." if memory else "")


# What the learner draws from SHA-256.

def of_parts(domain, *parts):
    digest = hashlib.sha256()
    for part in (domain.encode(), *parts):
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.digest()


def order(seed, epoch, count):
    """The rows of an epoch, shuffled."""
    seed ^= ((epoch << 32) | (epoch >> 32)) & (2**64 - 1)
    rows, counter = list(range(count)), 0
    for last in range(count - 1, 0, -1):
        bound = last + 1
        while True:
            bits = int.from_bytes(of_parts("rollcall-sft-order-v1", struct.pack("<Q", seed), struct.pack("<Q", counter))[:8], "little")
            counter += 1
            if bits <= 2**64 - 1 - 2**64 % bound:
                break
        other = bits % bound
        rows[last], rows[other] = rows[other], rows[last]
    return rows


def lora_a(path, shape):
    """A fresh A: uniform in +-1/sqrt(in)."""
    key = b"rollcall-lora-init-v1" + struct.pack("<QQ", SEED, len(path)) + path.encode()
    count = shape[0] * shape[1]
    words = b"".join(hashlib.sha256(key + struct.pack("<Q", block)).digest() for block in range(-(-count // 8)))
    unit = ((np.frombuffer(words, "<u4")[:count] >> 8) + 0.5) / 2**24
    return torch.tensor(((2 * unit - 1) / math.sqrt(shape[1])).astype(np.float32)).reshape(shape)


def tokenizer():
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(["Where is the tower? user assistant Before: <think> "] * 4, trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    special = ["<|endoftext|>", "<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tok


TEMPLATE = r"""{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}{%- for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is false else '') }}{% endif %}"""


def make_model():
    tok = tokenizer()
    ids = {t: tok.token_to_id(t) for t in (END, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|endoftext|>")}
    config = Qwen3_5Config(
        text_config=dict(
            vocab_size=304, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=1, linear_num_value_heads=2,
            linear_key_head_dim=8, linear_value_head_dim=6, max_position_embeddings=512, eos_token_id=ids[END], tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75, mrope_section=[1, 1, 1], mrope_interleaved=True)),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=16, num_position_embeddings=16),
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=True)
    torch.manual_seed(3)
    model = Qwen3_5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        with torch.no_grad():
            if "norm" in name or parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                # bf16 values, so that the file compresses; the patch projection sees 1,536 inputs.
                parameter.copy_(noise * 1.2 / parameter[0].numel() ** 0.5)
            parameter.copy_(parameter.bfloat16().float())
    folder = OUT / "model"
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    special = {"eos_token": END, "pad_token": "<|endoftext|>", "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
               "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(special | {"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    images = dict(patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
                  size={"shortest_edge": 1024, "longest_edge": 8192})
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": images | {"image_processor_type": "Qwen2VLImageProcessor"}}) + "\n")


class Unused:
    """A processor wants one for videos."""
    temporal_patch_size = merge_size = 2


def processor():
    folder = OUT / "model"
    special = json.loads((folder / "tokenizer_config.json").read_text())
    tok = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **{k: v for k, v in special.items() if k != "tokenizer_class"})
    settings = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    settings.pop("image_processor_type")
    Qwen3VLProcessor.check_argument_for_proper_class = lambda *_: None
    return Qwen3VLProcessor(image_processor=Qwen2VLImageProcessor(**settings), tokenizer=tok, video_processor=Unused(), chat_template=TEMPLATE)


def make_rows():
    rng = random.Random(5)
    (OUT / "images").mkdir()
    # Whole blocks within the budget: no resizing, whose bit-for-bit equality has goldens of its own.
    for index, (width, height) in enumerate([(64, 32), (32, 32), (64, 64), (32, 64), (96, 32)]):
        pixels = np.random.default_rng(index).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        Image.fromarray(pixels.repeat(8, 0).repeat(8, 1)).save(OUT / f"images/{index}.png")

    def row(index):
        row = {"image": f"images/{index % 5}.png", "name": rng.choice(["tower", "blue door", "Brücke <b>", "x"]),
               "code": "".join(rng.choice("0000012") for _ in range(3))}
        if index % 3 == 0:
            row["memory"] = [rng.choice(["01", "10"]), rng.choice(["0", "1"])]
        return row

    sampled = [row(i) | {"adv": round(rng.uniform(-1.5, 1.5), 3), "vllm_logp": round(rng.uniform(-20, -5), 3)} for i in range(10)]
    for name, rows in (("sft", [row(i) for i in range(10)]), ("valid", [row(i) for i in range(6)]), ("ppo", sampled)):
        (OUT / f"{name}.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))


def collate(process, rows):
    texts = [process.apply_chat_template([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompt(r)}]}], tokenize=False,
                                         add_generation_prompt=True, enable_thinking=False) + r["code"] + END for r in rows]
    inputs = process(text=texts, images=[Image.open(OUT / r["image"]).convert("RGB") for r in rows], padding=True,
                     padding_side="right", return_tensors="pt")
    n = len(rows[0]["code"])
    ends = inputs["attention_mask"].sum(1)
    targets = torch.stack([inputs["input_ids"][i, e - n - 1:e] for i, e in enumerate(ends)])
    return dict(inputs), ends, targets


def token_logprobs(model, process, rows):
    inputs, ends, targets = collate(process, rows)
    logits = model(**inputs, use_cache=False).logits
    k = targets.shape[1]
    logits = torch.stack([logits[i, e - k - 1:e - 1] for i, e in enumerate(ends.tolist())]).float()
    lp = logits.log_softmax(-1)
    return lp.gather(-1, targets[..., None])[..., 0], logits.argmax(-1) == targets


@torch.no_grad()
def accuracy(model, process, rows):
    right = token_logprobs(model, process, rows)[1][:, :-1]
    return {"digit_acc": round(right.float().mean().item(), 4), "code_acc": round(right.all(1).float().mean().item(), 4), "rows": len(rows)}


def base():
    model = Qwen3_5ForConditionalGeneration.from_pretrained(OUT / "model", dtype=torch.float32, attn_implementation="eager")
    return model.requires_grad_(False)


def adapter_of(model):
    return {k.replace(".default.", "."): p.detach().clone() for k, p in model.named_parameters() if "lora_" in k and ".ref." not in k}


def step(opt, model, lr):
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    for group in opt.param_groups:
        group["lr"] = lr
    opt.step()
    opt.zero_grad(set_to_none=True)
    return norm.item()


def sft(process, rows, valid, epochs, batch, max_updates):
    model = get_peft_model(base(), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=MODULES))
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight")
            parameter.data.copy_(lora_a(path, parameter.shape))
    opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=SFT_LR)
    each = math.ceil(len(rows) / batch)
    total = min(max_updates, each * epochs)
    result = {"before": accuracy(model, process, valid), "updates": []}
    for epoch in range(epochs):
        shuffled = order(SEED, epoch, len(rows))
        for at in range(0, len(rows), batch):
            if len(result["updates"]) >= total:
                break
            lp, _ = token_logprobs(model, process, [rows[i] for i in shuffled[at:at + batch]])
            loss = -lp.mean()
            loss.backward()
            update = len(result["updates"])
            lr = SFT_LR * min(1, (update + 1) / 10) * 0.5 * (1 + math.cos(math.pi * update / total))
            result["updates"].append({"loss": loss.item(), "learning_rate": lr, "grad_norm": step(opt, model, lr)})
    result["after"] = accuracy(model, process, valid)
    return model, result


def ppo(process, rows, epochs, batch, accumulation, max_updates):
    model = PeftModel.from_pretrained(base(), OUT / "start", is_trainable=True)
    model.load_adapter(OUT / "reference", adapter_name="ref")
    n, lp_of = len(rows[0]["code"]), {}
    for name in ("ref", "default"):
        model.set_adapter(name)
        with torch.no_grad():
            lp_of[name] = token_logprobs(model, process, rows)[0][:, :n]
    model.set_adapter("default")
    for name, p in model.named_parameters():
        p.requires_grad = "lora_" in name and ".default." in name
    old, ref = lp_of["default"], lp_of["ref"]
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=PPO_LR)
    gap = old.sum(1) - torch.tensor([r["vllm_logp"] for r in rows])
    updates, stats, norms = 0, [], []
    for epoch in range(epochs):
        if updates >= max_updates:
            break
        stats = []
        shuffled = order(SEED, epoch, len(rows))
        micro = [shuffled[at:at + batch] for at in range(0, len(rows), batch)]
        for number, idx in enumerate(micro):
            lp = token_logprobs(model, process, [rows[i] for i in idx])[0][:, :n]
            adv = torch.tensor([rows[i]["adv"] for i in idx])
            ratio = (lp.sum(1) - old[idx].sum(1)).exp()
            pg = -torch.min(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv)
            d = ref[idx] - lp
            kl = (d.exp() - d - 1).sum(1)
            ((pg + BETA * kl).mean() / accumulation).backward()
            stats.append([pg.mean().item(), kl.mean().item(), ((ratio - 1).abs() > CLIP).float().mean().item()])
            if (number + 1) % accumulation == 0 or number + 1 == len(micro):
                norms.append(step(opt, model, PPO_LR))
                updates += 1
                if updates >= max_updates:
                    break
    means = np.array(stats).mean(0)
    return model, {"pg_loss": means[0], "kl": means[1], "clip_frac": means[2], "logp_gap": gap.mean().item(),
                   "logp_gap_abs": gap.abs().mean().item(), "rows": len(rows), "grad_norms": norms}


def main():
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    make_model()
    make_rows()
    process = processor()
    read = lambda name: [json.loads(line) for line in (OUT / f"{name}.jsonl").read_text().splitlines()]
    golden = {"seed": SEED, "sft_learning_rate": SFT_LR, "ppo_learning_rate": PPO_LR, "modules": MODULES, "prompt": PROMPT, "sft": {}, "ppo": {}}
    for updates in (1, 5):
        model, golden["sft"][str(updates)] = sft(process, read("sft"), read("valid"), epochs=2, batch=4, max_updates=updates)
        save_file(adapter_of(model), OUT / f"sft-{updates}.safetensors")
    model.save_pretrained(OUT / "reference")
    # Off the reference, so that the KL term and its gradient are there from the first update.
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(OUT / "start")
    for folder in ("reference", "start"):
        (OUT / folder / "README.md").unlink(missing_ok=True)
        config = json.loads((OUT / folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "model"
        (OUT / folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    for updates in (1, 5):
        model, golden["ppo"][str(updates)] = ppo(process, read("ppo"), epochs=3, batch=4, accumulation=2, max_updates=updates)
        save_file(adapter_of(model), OUT / f"ppo-{updates}.safetensors")
    (OUT / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


main()
