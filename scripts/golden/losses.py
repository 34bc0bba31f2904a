"""Makes learner/tests/golden/losses.json: losses, gradients and statistics in PyTorch's float64 autograd.

    pip install torch trl
    python scripts/golden/losses.py > learner/tests/golden/losses.json

Every surrogate, ratio, aggregation, clip, KL estimator, entropy bonus and mask, written here as the papers
write them and differentiated by autograd; value losses, GAE, whitening, and group and leave-one-out
advantages beside them. Where the installed TRL has the same formula, its own code (`_compute_loss` of
GRPOTrainer and RLOOTrainer) is run on the same tensors and must give the same loss and gradient to 1e-12:
that is checked here, and counted on stderr.
"""
import itertools
import json
import sys
from collections import defaultdict
from types import SimpleNamespace

import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(11)

MAX_COMPLETION = 7


def tensors(lengths, masked, spread):
    """A padded batch: logp, old, ref [B, T], entropy, token advantages, a mask of what counts, and row advantages."""
    shape = (len(lengths), max(lengths))
    logp = -3.0 * torch.rand(shape)
    old = logp + spread * (torch.rand(shape) - 0.5)
    ref = logp + 0.8 * (torch.rand(shape) - 0.5)
    valid = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    mask = valid & (torch.rand(shape) < 0.7) if masked else valid
    # Each row with a length keeps a token: rows without any are a case of their own in the tests.
    mask[:, 0] |= valid[:, 0]
    advantages = torch.randn(len(lengths))
    advantages[0] = 0.0
    return {"lengths": lengths, "logp": logp, "old": old, "ref": ref, "entropy": 0.2 + torch.rand(shape),
            "mask": mask, "advantages": advantages, "token_advantages": torch.randn(shape)}


def kl_of(name, logp, ref):
    d = logp - ref
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[name]


def aggregate(name, x, mask):
    """verl's loss_agg_mode on terms [B, T]."""
    sums, counts = (x * mask).sum(1), mask.sum(1)
    if name == "seq-mean-token-mean":
        return (sums / counts).mean()
    if name == "seq-mean-token-sum-norm":
        return sums.sum() / (len(x) * MAX_COMPLETION)
    if name == "token-mean":
        return sums.sum() / counts.sum()
    return sums.mean()


def reference(data, config):
    logp = data["logp"].clone().requires_grad_()
    entropy = data["entropy"].clone().requires_grad_()
    mask = data["mask"].double()
    adv = data["token_advantages"] if config["token_advantages"] else data["advantages"][:, None].expand_as(logp)
    q = (logp - data["old"]) * mask
    if config["ratio"] == "token":
        ratio = q.exp()
    elif config["ratio"] == "sequence_mean":
        ratio = (q.sum(1) / mask.sum(1)).exp()[:, None]
    else:
        ratio = q.sum(1).exp()[:, None]
    low, high, delta = config["epsilon"], config["epsilon_high"], config["delta"]
    if config["surrogate"] == "cispo":
        term = -ratio.clamp(max=high).detach() * adv * logp
        policy = aggregate(config["aggregation"], term, mask)
        clipped = [0, int(((ratio > high) & (adv[:, : ratio.shape[1]] > 0) & (mask[:, : ratio.shape[1]] > 0)).sum()), 0]
    else:
        cut = ratio if delta is None else ratio.clamp(max=delta)
        term = -torch.min(cut * adv, ratio.clamp(1 - low, 1 + high) * adv)
        if config["ratio"] == "token":
            policy = aggregate(config["aggregation"], term, mask)
        elif config["aggregation"] == "seq-mean-token-sum":
            policy = term[:, 0].mean()  # a sequence's term counts once
        else:
            policy = aggregate(config["aggregation"], term, mask)
        a, on = adv[:, : ratio.shape[1]], mask[:, : ratio.shape[1]] > 0
        clipped = [int(((ratio < 1 - low) & (a < 0) & on).sum()), int(((ratio > 1 + high) & (a > 0) & on).sum()),
                   0 if delta is None else int(((ratio > delta) & (a < 0) & on).sum())]
    estimator = config["kl_estimator"]
    kl = kl_of(estimator, logp, data["ref"])
    kl_loss = config["beta"] * aggregate(config["aggregation"], kl, mask)
    bonus = -config["entropy_coef"] * (entropy * mask).sum() / mask.sum()
    loss = policy + kl_loss + bonus
    loss.backward()
    grad = logp.grad * mask
    dentropy = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    with torch.no_grad():
        r = q.exp()
        return {
            "loss": loss.item(), "policy": policy.item(), "kl": kl_loss.item(), "entropy": bonus.item(),
            "gradient": rows(grad, data), "entropy_gradient": rows(dentropy, data) if config["entropy_coef"] else None,
            "clipped": clipped, "ratios": int(mask[:, : ratio.shape[1]].sum()) if ratio.shape[1] > 1 else len(ratio),
            "mean_kl": ((kl * mask).sum() / mask.sum()).item(),
            "mean_approx_kl": (((r - 1 - q) * mask).sum() / mask.sum()).item(),
        }, loss.item(), grad


def rows(x, data):
    return [row[:n].tolist() for row, n in zip(x, data["lengths"])]


def trl_case(config):
    """What TRL calls this configuration, if it has it: loss_type, importance_sampling_level."""
    if config["token_advantages"] or config["entropy_coef"] or (config["beta"] and config["kl_estimator"] != "k3"):
        return None
    level = {"token": "token", "sequence_mean": "sequence"}.get(config["ratio"])
    if config["surrogate"] == "cispo":
        return ("cispo", level) if level and config["aggregation"] == "token-mean" else None
    kind = {"seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo", "token-mean": "dapo"}
    if config["aggregation"] == "seq-mean-token-sum":
        product = config["ratio"] == "sequence_product" and not config["beta"] and config["delta"] is None
        return ("rloo", None) if product else None
    return (kind[config["aggregation"]], level) if level else None


def with_trl(data, config, loss_type, level):
    """TRL's own code on these tensors: its loss, and its gradient by the log-probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    logp = data["logp"].clone().requires_grad_()
    mask = data["mask"].double()
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    trainer = SimpleNamespace(
        loss_type=loss_type, importance_sampling_level=level, beta=config["beta"], epsilon_low=config["epsilon"],
        epsilon_high=config["epsilon_high"], max_completion_length=MAX_COMPLETION, accelerator=accelerator,
        args=SimpleNamespace(delta=config["delta"], use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
        vllm_importance_sampling_correction=False, _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, data["entropy"], None),
    )
    ids = torch.zeros(logp.shape, dtype=torch.long)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
              "advantages": data["advantages"], "old_per_token_logps": data["old"], "ref_per_token_logps": data["ref"],
              "old_logps": (data["old"] * mask).sum(1), "num_items_in_batch": mask.sum()}
    kind = RLOOTrainer if loss_type == "rloo" else GRPOTrainer
    loss = kind._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logp.grad * mask


def configs():
    aggregations = ["seq-mean-token-mean", "seq-mean-token-sum-norm", "token-mean", "seq-mean-token-sum"]
    ratios = ["token", "sequence_mean", "sequence_product"]
    kls = [(0.0, "k3"), (0.04, "k1"), (0.04, "k2"), (0.04, "k3")]
    for aggregation, ratio, (beta, kl), bonus in itertools.product(aggregations, ratios, kls, [0.0, 0.01]):
        if bonus and kl != "k3":
            continue
        for surrogate, clip in [("clipped", (0.2, 0.2, None)), ("clipped", (0.2, 0.28, 1.4)), ("cispo", (0.2, 1.2, None))]:
            for tokens in [False, True] if ratio == "token" else [False]:
                yield {"surrogate": surrogate, "ratio": ratio, "aggregation": aggregation, "epsilon": clip[0],
                       "epsilon_high": clip[1], "delta": clip[2], "beta": beta, "kl_estimator": kl,
                       "entropy_coef": bonus, "token_advantages": tokens}


def policy_cases():
    batches = [tensors([4, 1, 6], False, 1.0), tensors([3, 6, 5], True, 1.6)]
    compared, cases = defaultdict(int), []
    for number, config in enumerate(configs()):
        for at, data in enumerate(batches):
            # The full grid on the first batch; the second, masked, on every third configuration of it.
            if at == 1 and number % 3:
                continue
            result, loss, grad = reference(data, config)
            case = trl_case(config)
            if case:
                theirs, their_grad = with_trl(data, config, *case)
                assert abs(theirs - loss) < 1e-12 and (their_grad - grad).abs().max() < 1e-12, (case, config)
                compared[case] += 1
            cases.append({"batch": at, **config, **result})
    print("equal to TRL's own code:", dict(compared), file=sys.stderr)
    inputs = [{
        "logp": rows(d["logp"], d), "old": rows(d["old"], d), "ref": rows(d["ref"], d), "entropy": rows(d["entropy"], d),
        "mask": rows(d["mask"], d), "advantages": d["advantages"].tolist(),
        "token_advantages": rows(d["token_advantages"], d),
    } for d in batches]
    return inputs, cases


def value_cases():
    """TRL's PPO: GAE from the last token, whitened advantages, and the clipped value loss."""
    lengths, cases = [5, 1, 3], []
    for gamma, lam, vf_coef, cliprange in [(1.0, 0.95, 0.1, 0.2), (0.99, 0.9, 0.5, None), (1.0, 1.0, 1.0, 0.05)]:
        old = [torch.randn(n) for n in lengths]
        values = [(o + 0.5 * torch.randn(len(o))).requires_grad_() for o in old]
        rewards = torch.rand(len(lengths))
        advantages, returns = [], []
        for o, reward in zip(old, rewards):
            last, reverse = torch.tensor(0.0), []
            for t in reversed(range(len(o))):
                after = o[t + 1] if t + 1 < len(o) else 0.0
                delta = (reward if t + 1 == len(o) else 0.0) + gamma * after - o[t]
                last = delta + gamma * lam * last
                reverse.append(last)
            advantages.append(torch.stack(reverse[::-1]))
            returns.append(advantages[-1] + o)
        flat = torch.cat(advantages)
        white = (flat - flat.mean()) * torch.rsqrt(flat.var() + 1e-8)
        loss, count = 0.0, sum(lengths)
        for v, o, target in zip(values, old, returns):
            free = (v - target) ** 2
            bound = free if cliprange is None else (torch.max(torch.min(v, o + cliprange), o - cliprange) - target) ** 2
            loss = loss + vf_coef * 0.5 * torch.max(free, bound).sum() / count
        loss.backward()
        all_returns, all_old = torch.cat(returns), torch.cat(old)
        explained = 1 - (all_returns - all_old).var(correction=0) / all_returns.var(correction=0)
        cases.append({
            "gamma": gamma, "lam": lam, "vf_coef": vf_coef, "cliprange_value": cliprange, "rewards": rewards.tolist(),
            "old": [o.tolist() for o in old], "values": [v.tolist() for v in values],
            "advantages": [a.tolist() for a in advantages], "returns": [r.tolist() for r in returns],
            "whitened": white.tolist(), "loss": loss.item(), "gradient": [v.grad.tolist() for v in values],
            "explained_variance": explained.item(),
        })
    return cases


def advantage_cases():
    """Baselines by group mean and leave-one-out, scaled by the group's population deviation or not."""
    cases = []
    for groups in [[[1.0, 0.0, 0.0, 1.0], [0.5, 0.25, 1.0, 0.0]], [[0.3, 0.9], [0.1, 0.7], [1.0, 1.0]]]:
        r = torch.tensor(groups)
        n = r.shape[1]
        for baseline in ["mean", "leave_one_out"]:
            base = r.mean(1, keepdim=True) if baseline == "mean" else (r.sum(1, keepdim=True) - r) / (n - 1)
            for scale in ["group", "none"]:
                a = r - base
                if scale == "group":
                    a = a / (r.std(1, keepdim=True, correction=0) + 1e-4)
                cases.append({"rewards": groups, "baseline": baseline, "scale": scale, "advantages": a.tolist()})
    return cases


def write():
    inputs, cases = policy_cases()
    print(f"{len(cases)} policy losses", file=sys.stderr)
    lines = [f'{{"max_completion_length": {MAX_COMPLETION},', f'"batches": {json.dumps(inputs)},', '"policy": [']
    lines += [",\n".join(json.dumps(case) for case in cases), "],"]
    lines += ['"value": [', ",\n".join(json.dumps(case) for case in value_cases()), "],"]
    lines += ['"advantages": [', ",\n".join(json.dumps(case) for case in advantage_cases()), "]}"]
    print("\n".join(lines))


write()
