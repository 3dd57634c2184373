# SPDX-License-Identifier: Apache-2.0
"""What each rank of a deployment holds of a checkpoint, and how partial blocks land there."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm.checkpoint.formats import BLOCK, is_block_fp8, nbytes
from vllm.checkpoint.model import Model
from vllm.model_executor.layers.quantization.utils.block_scale_layout import (
    Partition,
    Placement,
    place_parameter,
    place_span,
)

__all__ = ["Deployment", "Landing", "Stage", "landings", "stages"]

# How tensor parallelism shares a weight by `TensorSpec.kind`; every rank holds the others
# whole. Of the vision tower too: an upper bound, since the engine may share it.
_ROWS = frozenset(
    {f"kda.{n}" for n in ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj", "b_proj", "f_b_proj", "conv1d")}
    | {"kda.A_log", "kda.dt_bias", "mla.q_proj", "mla.q_b_proj", "mla.kv_b_proj", "mla.g_proj"}
    | {f"{family}.{name}" for family in ("dense", "shared") for name in ("gate_proj", "up_proj")}
    | {"embedding", "lm_head"}
)
_COLUMNS = frozenset({"kda.o_proj", "mla.o_proj", "dense.down_proj", "shared.down_proj"})
# The model's default, below which it pads a rank's share of an expert's width.
_MIN_EXPERT_WIDTH = 256


@dataclass(frozen=True)
class Deployment:
    """How a checkpoint is to be served: `tp` and `pp` ranks, experts whole (`ep`) or split."""

    tp: int = 1
    pp: int = 1
    ep: bool = False


@dataclass(frozen=True)
class Landing:
    """A block-scaled parameter on its ranks.

    Attributes:
        module: The family and the engine's name, as in ``kda.in_proj_qkvgfab``.
        kinds: `TensorSpec.kind` of its shards, in order.
        shape: Rows and columns that a rank holds, without padding.
        modules: How many layers have one.
        verdict: ``"exact"``, ``"padded"`` or ``"refused"``. Padding is zero rows and
            columns that the layer drops; values are exact either way.
        padding: Most padding rows and columns of a rank.
        why: Of a refusal.
    """

    module: str
    kinds: tuple[str, ...]
    shape: tuple[int, int]
    modules: int
    verdict: str
    padding: tuple[int, int] = (0, 0)
    why: str = ""


@dataclass
class Stage:
    """What the fullest rank of a pipeline stage holds.

    Attributes:
        layers: First layer and the one after the last.
        bytes: By family of `TensorSpec.kind`.
        cache_per_token: Bytes of MLA's cache per token, BF16; every rank holds it whole.
        state_per_request: Bytes of KDA's convolution and recurrent state.
    """

    layers: tuple[int, int]
    bytes: Counter[str] = field(default_factory=Counter)
    cache_per_token: int = 0
    state_per_request: int = 0

    @property
    def total(self) -> int:
        return self.bytes.total()


def expert_width(model: Model, width: int, deployment: Deployment) -> int:
    """Width of an expert on a rank, the model's padding included."""
    if deployment.ep or deployment.tp == 1:
        return width
    return max(width // deployment.tp, int(model.text.get("min_moe_intermediate_per_partition", _MIN_EXPERT_WIDTH)))


def landings(model: Model, deployment: Deployment) -> list[Landing]:
    """How every kind of block-scaled FP8 parameter lands, by the loader's own placement."""
    found: Counter[Landing] = Counter()
    for module, names in _parameters(model):
        kinds = tuple(model.specs[name].kind for name in names)
        last = f"{kinds[0].partition('.')[0]}.{module.rpartition('.')[2]}"
        found[_land(last, kinds, [model.specs[name].shape for name in names], module, model, deployment.tp)] += 1
    return [Landing(**{**landing.__dict__, "modules": count}) for landing, count in found.items()]


def _parameters(model: Model) -> Iterator[tuple[str, list[str]]]:
    """Block-scaled parameters: the engine's name, and names of the shards' weights."""
    algos = model.algos or {}
    fused_away = set()
    for module, fused in model.fused.items():
        names = [f"{module.rpartition('.')[0]}.{shard}.weight" for shard in fused.shards]
        if all(is_block_fp8(algos.get(name)) for name in names):
            fused_away.update(names)
            yield module, names
    for name in model.specs:
        if name not in fused_away and is_block_fp8(algos.get(name)):
            yield name.removesuffix(".weight"), [name]


def _land(
    last: str, kinds: tuple[str, ...], shapes: list[tuple[int, ...]], module: str, model: Model, tp: int
) -> Landing:
    columns = shapes[0][1]
    try:
        placed = [_place(kinds, shapes, rank, tp) for rank in range(tp)]
    except ValueError as error:
        return Landing(last, kinds, (sum(s[0] for s in shapes), columns), 0, "refused", why=str(error))
    rows = max(sum(p.rows for p in parts) for parts, _ in placed)
    padding = (
        max(sum(p.padded_rows - p.rows for p in parts) for parts, _ in placed),
        max(cols.padded_rows - cols.rows for _, cols in placed),
    )
    return Landing(last, kinds, (rows, placed[0][1].rows), 0, "padded" if any(padding) else "exact", padding)


def _place(
    kinds: tuple[str, ...], shapes: list[tuple[int, ...]], rank: int, tp: int
) -> tuple[list[Placement], Placement]:
    """Rows by partition, and columns, of a parameter on one rank."""
    columns = shapes[0][1]
    first = 0
    if kinds[0] in _COLUMNS:
        if columns % tp:
            raise ValueError(f"{tp} ranks cannot share {columns} columns evenly")
        columns //= tp
        first = rank * columns
    parts = [Partition(shape[0], replicated=kind not in _ROWS) for kind, shape in zip(kinds, shapes, strict=True)]
    return place_parameter(parts, rank, tp, BLOCK), place_span(first, columns, BLOCK)


def stages(model: Model, deployment: Deployment) -> list[Stage]:
    """Weight and cache bytes of every pipeline stage, on its fullest rank.

    What kernels add is not in them: repacked copies, workspace, CUDA graphs. The copies
    of MLA's kv_b that decoding absorbs are.
    """
    layers = model.text["num_hidden_layers"]
    bounds = _split_layers(layers, deployment.pp)
    found = [Stage(bound) for bound in bounds]

    def stage_of(name: str) -> Stage:
        if ".layers." in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            return next(stage for stage in found if stage.layers[0] <= layer < stage.layers[1])
        return found[-1] if "lm_head" in name or ".norm." in name or "output_attn_res" in name else found[0]

    fused_away = set()
    for module, names in _parameters(model):
        fused_away.update(names)
        specs = [model.specs[name] for name in names]
        kinds, shapes = tuple(s.kind for s in specs), [s.shape for s in specs]
        placed = [_place(kinds, shapes, rank, deployment.tp) for rank in range(deployment.tp)]
        stage_of(module).bytes[kinds[0].partition(".")[0]] += max(
            nbytes("FP8_PB_WO", (sum(p.padded_rows for p in rows), columns.padded_rows)) for rows, columns in placed
        )
    for name, spec in model.specs.items():
        family = spec.kind.partition(".")[0]
        stage = stage_of(name)
        if name not in fused_away:
            size = _held(model, name, deployment)
            stage.bytes[family] += size
        if spec.kind == "mla.kv_b_proj":
            stage.bytes["mla, absorbed"] += nbytes(None, (math.ceil(spec.shape[0] / deployment.tp), spec.shape[1]))
            stage.cache_per_token += 2 * (model.text["kv_lora_rank"] + model.text["qk_rope_head_dim"])
        elif spec.kind == "kda.dt_bias":
            linear = model.text["linear_attn_config"]
            width = math.ceil(spec.shape[0] / deployment.tp)
            taps = 3 * width * (linear["short_conv_kernel_size"] - 1)
            stage.state_per_request += 2 * taps + 4 * width * linear["head_dim"]
    return found


def _held(model: Model, name: str, deployment: Deployment) -> int:
    """Bytes of a weight on a rank; of expert 0, those of the whole bank."""
    spec, tp = model.specs[name], deployment.tp
    algo = (model.algos or {}).get(name)
    shape = list(spec.shape)
    if spec.kind.startswith("expert."):
        axis = 1 if spec.kind == "expert.w2" else 0
        shape[axis] = expert_width(model, shape[axis], deployment)
        return nbytes(algo, shape) * math.ceil(model.experts / (tp if deployment.ep else 1))
    if spec.kind in _ROWS or spec.kind in _COLUMNS:
        axis = 0 if spec.kind in _ROWS else 1
        shape[axis] = math.ceil(shape[axis] / tp)
    return nbytes(algo, shape, spec.dtype)


def _split_layers(layers: int, pp: int) -> list[tuple[int, int]]:
    """Layers of each pipeline stage, as the engine splits them."""
    from vllm.distributed.utils import get_pp_indices

    if pp == 1:
        return [(0, layers)]
    return [get_pp_indices(layers, rank, pp) for rank in range(pp)]
