"""Tells a systematic difference of log-probs from the noise of bfloat16.

Rounding differs from position to position and averages out. A wrong scale or a part that is too strong pulls all
positions along what a small change of some weight does to them. The projection on these directions therefore keeps
faults and loses most of the noise.

Where two experts are nearly tied, rounding alone decides who is asked, and log-probs jump; such positions say nothing
and are left out (`Watched`). A jump also moves what later positions read, so the largest differences go too.
"""

import math

import torch
from torch import Tensor

from tests.models.kimi_k3 import reference

__all__ = ["Watched", "directions", "systematic"]

TRIMMED = 0.01  # share of the positions
STEP = 2e-3  # relative change of a weight; float32 noise of 3e-6 then stays below 2e-3 in a direction


class Watched(reference.Model):
    """The reference; beside, how clearly routers chose.

    Attributes:
        margins: Per pass through a router and per token, the score of the last expert chosen less that of the next
            one, over the slope of the sigmoid at both: how far logits must move to change the choice, [tokens].
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.margins: list[Tensor] = []

    def route(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(self._linear(f"{name}.gate", x))
        biased = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        best = biased.topk(self.config["num_experts_per_token"] + 1, dim=-1)
        slopes = (scores * (1 - scores)).gather(1, best.indices[:, -2:]).sum(-1)
        self.margins.append((best.values[:, -2] - best.values[:, -1]) / slopes.clamp(min=1e-9))
        return super().route(name, x)

    def watched(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probs [tokens, vocab] and the smallest margin of all routers, [tokens]."""
        self.margins = []
        found = self.logprobs(ids)
        return found, torch.stack(self.margins).amin(0)


def parts(weights: dict[str, Tensor], heads: int) -> list[dict[str, Tensor]]:
    """Weights that are changed together, as changed: matrices, an expert's with its layer's, A_log by head."""
    groups: dict[str, dict[str, Tensor]] = {}
    for name, values in weights.items():
        if name.endswith("A_log"):
            for head in range(heads):
                more = values.clone()
                more.view(-1)[head] += STEP
                groups[f"{name} {head}"] = {name: more}
        elif "norm" not in name and not name.endswith("bias"):
            layer, _, expert = name.partition(".experts.")
            key = layer + expert.partition(".")[2] if expert else name
            groups.setdefault(key, {})[name] = values * (1 + STEP)
    return list(groups.values())


def directions(model: reference.Model, texts: list[list[int]]) -> Tensor:
    """What a small change of each part does to the log-probs, [parts, tokens of all texts, vocab], each of norm 1.

    Parts that change nothing are left out.
    """

    def run(weights: dict[str, Tensor]) -> Tensor:
        changed = reference.Model(model.config, weights)
        return torch.cat([changed.logprobs(ids) for ids in texts])

    whole = run(model.weights)
    heads = model.config["num_attention_heads"]
    found = [(run(model.weights | part) - whole) / STEP for part in parts(model.weights, heads)]
    return torch.stack([d / d.norm() for d in found if d.square().mean().sqrt() > 0.01])


def systematic(delta: Tensor, along: Tensor) -> float:
    """Root mean square of the part of `delta` that lies along `along`, in nats.

    Args:
        delta: Differences of log-probs, [tokens, vocab].
        along: `directions` at the same tokens.
    """
    order = delta.square().sum(-1).argsort()
    kept = order[: len(order) - math.ceil(TRIMMED * len(order))]
    delta, along = delta[kept], along[:, kept].flatten(1).double()
    along = along / along.norm(dim=1, keepdim=True).clamp(min=1e-30)
    strength, mixes = torch.linalg.eigh(along @ along.T)
    clear = strength > 1e-2  # nearly the same directions would fit noise
    found = (mixes[:, clear] / strength[clear].sqrt()).T @ (along @ delta.double().flatten())
    return (found.norm() / delta.numel() ** 0.5).item()
