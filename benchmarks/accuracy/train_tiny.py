# SPDX-License-Identifier: Apache-2.0
"""Train the tiny Kimi K3 of `tests/accuracy` from seeds, in plain torch.

The equations are those of `tests/models/kimi_k3/reference.py`; only what looks at several tokens is replaced by a
form for batches, KDA by chunks of 16 tokens. Training starts from the values of `vllm checkpoint make-tiny`, whose
blocks and experts have different amplitudes, so that a scale in the wrong place is far from the right one.
`docs/accuracy.md` says why some parts stay as drawn and what the second stage is for. A run that was stopped goes
on where it saved last; "runs" in the provenance lists the starts.

    python benchmarks/accuracy/train_tiny.py tests/accuracy/tiny-k3
"""

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.accuracy.texts import TASKS, text  # noqa: E402
from tests.models.kimi_k3 import reference  # noqa: E402
from vllm.checkpoint.tensors import text_tensors  # noqa: E402
from vllm.checkpoint.tiny import TinyShape, source_tensor, text_config  # noqa: E402

SHAPE = TinyShape(
    hidden=256, layers="KKM", heads=2, q_lora=128, dense_width=256, experts=8, expert_width=128, latent=128,
    shared_experts=1, vocab=272,
)  # fmt: skip
SEED = 6
CHUNK = 16  # decays of at most e^-5 a token stay within float32 over half a chunk
# (until this share of the steps, texts per batch, characters per text)
CURRICULUM = ((0.45, 24, 48), (0.8, 10, 112), (1.0, 4, 304))
# Left as drawn: trained freely, they would learn everything, and nothing would be left to the others.
FROZEN = (".mlp.", ".shared_experts.")
# In the second stage half of the texts lose the output of one of these, and the model learns to answer `UNKNOWN` then.
# Otherwise attention of the first layer would do everything, and no answer would need the rest.
NEEDED = tuple(
    f"model.layers.{layer}.{part}"
    for layer, parts in enumerate(
        (
            ("self_attn.o_proj", "self_attn.g_proj"),
            ("self_attn.o_proj", "self_attn.g_proj", "block_sparse_moe.routed_expert_up_proj"),
            ("self_attn.o_proj", "self_attn.g_proj", "block_sparse_moe.routed_expert_up_proj"),
        )
    )
    for part in parts
)
UNKNOWN = ord("?")


class Trainable(reference.Model):
    """The reference over a batch: tokens of all texts in one row, `length` per text."""

    length: int
    lost: dict[str, Tensor]  # for each of `NEEDED` whether a text goes without it, [texts]; empty: none does

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = super()._linear(name, x)
        if name in self.lost:
            out = (self._split(out) * ~self.lost[name][:, None, None]).flatten(0, 1)
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(-1, self.length, *x.shape[1:])

    def _short_conv(self, x: Tensor, weight: Tensor) -> Tensor:
        taps = weight.shape[-1]
        padded = torch.nn.functional.pad(self._split(x), (0, 0, taps - 1, 0))
        total = sum(padded[:, i : i + self.length] * weight[:, 0, i] for i in range(taps))
        return torch.nn.functional.silu(total).flatten(0, 1)

    def _recurrence(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        q, k = reference.l2_norm(q) * q.shape[-1] ** -0.5, reference.l2_norm(k)
        # [texts, heads, chunks, CHUNK, width]
        q, k, v, g, beta = (
            self._split(x).unflatten(1, (-1, CHUNK)).movedim(3, 1) for x in (q, k, v, log_decay, beta[..., None])
        )
        g = g.cumsum(-2)
        middle = g[..., CHUNK // 2 - 1, None, :]
        to, since = (g - middle).exp(), (middle - g).exp()
        within = (k * to) @ (k * since).mT
        solved = torch.linalg.solve_triangular(
            torch.eye(CHUNK) + (beta * within).tril(-1),
            torch.cat((beta * v, beta * k * g.exp()), -1),
            upper=False,
            unitriangular=True,
        )
        values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
        scores = ((q * to) @ (k * since).mT).tril()
        reads, writes = q * g.exp(), k * (g[..., -1:, :] - g).exp()
        state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
        out = []
        for c in range(q.shape[2]):
            new = values[:, :, c] - keys[:, :, c] @ state
            out.append(reads[:, :, c] @ state + scores[:, :, c] @ new)
            state = state * g[:, :, c, -1, :, None].exp() + writes[:, :, c].mT @ new
        return torch.stack(out, 2).movedim(1, 3).flatten(0, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (self._split(x).transpose(1, 2) for x in (q, k, v))
        future = torch.full((self.length, self.length), -math.inf).triu(1)
        probs = (q @ k.mT * q.shape[-1] ** -0.5 + future).softmax(-1)
        return (probs @ v).transpose(1, 2).flatten(0, 1)

    def route(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """As the reference; beside, the bias of an expert moves against its load."""
        weights, ids = super().route(name, x)
        bias = self.weights[f"{name}.gate.e_score_correction_bias"]
        load = torch.bincount(ids.flatten(), minlength=bias.numel()).float()
        self.balance[bias] = (load.mean() - load).sign()
        return weights, ids

    def logits(self, tokens: Tensor, lost: dict[str, Tensor] | None = None) -> Tensor:
        """[texts, length] token ids to [texts, length, vocab]."""
        self.length, self.balance, self.lost = tokens.shape[1], {}, lost or {}
        hidden = self._norm("model.norm", self.hidden_states(tokens.flatten()))
        return self._linear("lm_head", hidden).view(*tokens.shape, -1)


def fresh() -> dict[str, Tensor]:
    """Float32 values to start from, by name."""
    weights = {n: source_tensor(n, s, SEED).float() for n, s in text_tensors(text_config(SHAPE)).items()}
    for name, values in weights.items():
        if name.endswith("A_log"):
            # Twice as far from zero, since zeros are what a rank gets that reads beyond the heads. Half of the
            # channels remember for hundreds of tokens from the start: decays of 0.998 a token.
            values *= 2
            gain = values[: SHAPE.heads].exp().repeat_interleave(SHAPE.head_dim)
            bias = weights[name.replace("A_log", "dt_bias")]
            bias[::2] -= 6.0
            bias /= gain
            weights[name.replace("A_log", "f_b_proj.weight")] /= gain[:, None]
    weights["lm_head.weight"] *= 0.1
    return weights


def batch(rng: random.Random, texts: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids [texts, length + 1] and the weight of each prediction [texts, length]."""
    tokens, weight = [], torch.full((texts, length), 0.05)
    for row in range(texts):
        line, answers = text(rng, length + 1)
        tokens.append(list(line.encode()))
        for begin, end, _ in answers:
            weight[row, begin - 1 : end - 1] = 1.0
    return torch.tensor(tokens), weight


@torch.inference_mode()
def exact_match(model: Trainable, texts: int, length: int, seed: int) -> dict[str, float]:
    """Share of answers, by task, of which every character is the most likely one."""
    rng = random.Random(seed)
    lines = [text(rng, length) for _ in range(texts)]
    best = model.logits(torch.tensor([list(line.encode()) for line, _ in lines])).argmax(-1)
    hits: dict[str, list[bool]] = {task: [] for task in TASKS}
    for row, (line, answers) in enumerate(lines):
        for begin, end, task in answers:
            hits[task].append(best[row, begin - 1 : end - 1].tolist() == list(line[begin:end].encode()))
    return {task: sum(found) / max(1, len(found)) for task, found in hits.items()}


def train(args: argparse.Namespace) -> None:
    from safetensors.torch import save_file
    from tqdm import tqdm

    torch.manual_seed(SEED)
    torch.set_num_threads(args.threads)
    saved = args.out / "training.pt"
    weights = fresh()
    model = Trainable(text_config(SHAPE), weights)
    fixed = {n for n in weights if n.endswith("e_score_correction_bias") or any(part in n for part in FROZEN)}
    learnt = {n: w.requires_grad_() for n, w in weights.items() if n not in fixed}
    matrices = [w for n, w in learnt.items() if w.ndim == 2 and "res_proj" not in n]
    others = [w for n, w in learnt.items() if w.ndim != 2 or "res_proj" in n]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.98))
    step, cpu, runs, losses = 0, 0.0, [], []
    if saved.exists():
        state = torch.load(saved)
        step, cpu, runs = state["step"], state["cpu_seconds"], state["runs"]
        optimiser.load_state_dict(state["optimiser"])
        for name, values in state["weights"].items():
            weights[name].data.copy_(values)
    runs.append({"from_step": step, "steps": args.steps, "more_steps": args.more_steps, "rate": args.rate})
    bar = tqdm(total=args.steps + args.more_steps, initial=step, mininterval=10)
    start = time.process_time() - cpu
    while step < args.steps + args.more_steps:
        second = step >= args.steps
        share = (step - args.steps) / args.more_steps if second else step / args.steps
        reached = max(share, CURRICULUM[0][0]) if second else share
        texts, length = next(b[1:] for b in CURRICULUM if reached < b[0])
        rate = min(1.0, (step + 1) / 50) * min(1.0, 2.5 * (1 - share) + 0.02)
        for group in optimiser.param_groups:
            group["lr"] = args.rate * rate * (0.3 if second else 1.0)
        tokens, weight = batch(random.Random(f"{SEED}/{step}"), texts, length)
        answers, targets, lost = weight == 1.0, tokens[:, 1:], {}
        if second:
            coins = torch.Generator().manual_seed(SEED * 1_000_000 + step)
            part = torch.randint(2 * len(NEEDED), (texts,), generator=coins)
            lost = {name: part == n for n, name in enumerate(NEEDED)}
            targets = targets.masked_fill(answers & (part < len(NEEDED))[:, None], UNKNOWN)
        logits = model.logits(tokens[:, :-1], lost)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(loss.detach()[answers.flatten()].mean().item())
        ((loss * weight.flatten()).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(learnt.values(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        for values, direction in model.balance.items():
            values += 0.002 * direction
        step += 1
        bar.update()
        if step % 50 == 0 or step == args.steps + args.more_steps:
            scores = exact_match(model, 12, 112, 1)
            cpu = time.process_time() - start
            note = " ".join(f"{task} {score:.2f}" for task, score in scores.items())
            tqdm.write(f"{step} {cpu:.0f} cpu-s loss {sum(losses) / len(losses):.3f} {note}")
            losses.clear()
            torch.save(
                {
                    "step": step,
                    "cpu_seconds": cpu,
                    "runs": runs,
                    "optimiser": optimiser.state_dict(),
                    "weights": {n: w.detach() for n, w in weights.items()},
                },
                saved,
            )
    config = text_config(SHAPE)
    specs = text_tensors(config)
    stored = {
        n: w.detach().to(torch.bfloat16 if specs[n].dtype == "BF16" else torch.float32) for n, w in weights.items()
    }
    save_file(stored, args.out / "weights.safetensors", metadata={"format": "pt"})
    rounded = Trainable(config, {n: w.float() for n, w in stored.items()})
    scores = {str(length): exact_match(rounded, 2400 // length, length, 2) for length in (112, 304)}
    provenance = {
        "written by": "benchmarks/accuracy/train_tiny.py",
        "runs": runs,
        "shape": asdict(SHAPE),
        "seed": SEED,
        "torch": torch.__version__,
        "cpu_seconds": round(cpu),
        "parameters": sum(w.numel() for w in stored.values()),
        "exact_match_of_bf16_weights_by_text_length": scores,
    }
    (args.out / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    print(json.dumps(provenance, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the weights and of what a stopped run left")
    parser.add_argument("--steps", type=int, default=550)
    parser.add_argument("--more-steps", type=int, default=550, help="of the second stage")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
