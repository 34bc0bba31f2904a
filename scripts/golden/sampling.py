"""Makes policy/src/sampling/golden.json: what transformers' logits processors leave of small rows.

    pip install torch transformers
    python scripts/golden/sampling.py > policy/src/sampling/golden.json

Logits are multiples of 1/4 in half of the cases, so that ties at the borders are common. torch.sort
leaves the order of equal logits open (it differs between its vector paths), so it is asked for the
stable order here: that is the rule that we keep.
"""
import json
import random

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

rng = random.Random(7)
unstable_sort = torch.sort
torch.sort = lambda x, descending=False: unstable_sort(x, descending=descending, stable=True)


def processors(temperature, top_k, top_p, min_p):
    """The list that generate() builds from these settings, in its order."""
    out = LogitsProcessorList()
    if temperature != 1.0:
        out.append(TemperatureLogitsWarper(temperature))
    if top_k:
        out.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        out.append(TopPLogitsWarper(top_p))
    if min_p:
        out.append(MinPLogitsWarper(min_p))
    return out


def row(n, grid):
    values = [rng.gauss(0, 2.5) for _ in range(n)]
    return [round(v * 4) / 4 if grid else round(v, 3) for v in values]


def case(logits, temperature, top_k, top_p, min_p):
    scores = torch.tensor([logits], dtype=torch.float32)
    left = processors(temperature, top_k, top_p, min_p)(None, scores)[0]
    kept = torch.isfinite(left).nonzero().flatten().tolist()
    logp = torch.log_softmax(left.double(), -1)[kept]
    return {
        "logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "kept": kept, "logp": [round(v, 6) for v in logp.tolist()],
    }


cases = [
    case([1.0] * 10, 1.0, 0, p, 0.0) for p in (0.0, 0.05, 0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.9, 0.95, 0.999)
]
cases += [case([2.0, 1.0, 0.0], t, k, 1.0, 0.0) for t, k in ((0.5, 0), (1.0, 2), (1.0, 1), (1.0, 9))]
cases += [case([3.0, 1.0, 3.0, 2.0, 1.0, 3.0], 1.0, k, 1.0, 0.0) for k in range(7)]
cases += [case([0.0, 0.0, 0.0, -1.0], 1.0, 0, 1.0, m) for m in (0.3, 0.4, 1.0)]
for i in range(120):
    logits = row(rng.choice([3, 8, 20, 40]), i % 2 == 0)
    cases.append(
        case(
            logits,
            rng.choice([0.3, 0.6, 0.7, 1.0, 1.0, 1.5]),
            rng.choice([0, 0, 1, 3, 10, 50]),
            rng.choice([1.0, 0.3, 0.5, 0.8, 0.9, 0.95, 0.99]),
            rng.choice([0.0, 0.0, 0.05, 0.1, 0.25, 0.5]),
        )
    )
print("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]")
