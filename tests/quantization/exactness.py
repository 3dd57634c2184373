# SPDX-License-Identifier: Apache-2.0
"""What a tensor-parallel rank holds, against plain arithmetic on the file's bytes.

The question is one: dequantising what a rank holds, is it bit for bit the slice of
the dequantised checkpoint that the rank should hold?

Nothing here imports our own loading or dequantisation, so that the same code puts
the question to any vLLM release (``benchmarks/exactness``). Layers are made by the
release's classes, from the K3 attention constructors where there is one, and filled
by its ``load_weights``. Only the GEMM is ours, :class:`HeldWeight`: it hands out the
columns of the weight as every block-scaled kernel reads it, row ``d`` with scale row
``d // 128`` of the parameter. Tensor-parallel rank and
size are plain numbers; there are no process groups.
"""

import contextlib
import importlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BLOCK = 128
K3_TP_SIZES = (1, 2, 4, 8, 16, 32)
DIALECTS = ("weight_scale", "weight_scale_inv")


# ---- the file ------------------------------------------------------------------


def _e4m3() -> torch.Tensor:
    """The value of each of the 256 codes of e4m3: 1 sign, 4 exponent, 3 mantissa bits."""
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            value = math.nan
        elif exponent:
            value = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        else:
            value = mantissa / 8 * 2.0**-6
        values.append(-value if code & 128 else value)
    return torch.tensor(values, dtype=torch.float32)


E4M3 = _e4m3()


def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``codes`` uint8 ``[rows, cols]``, ``scale`` ``[blocks of rows, of columns]`` → float32."""
    rows, cols = codes.shape
    out = E4M3[codes.flatten().int()].view(rows, cols)
    by_row = scale[torch.arange(rows) // BLOCK]
    return out.mul_(by_row[:, torch.arange(cols) // BLOCK])


class Fp8Tensor:
    """One FP8_PB_WO tensor of a file; neighbouring blocks have different powers of two."""

    def __init__(self, rows: int, cols: int, seed: int = 0):
        generator = torch.Generator().manual_seed(1000 * rows + 10 * cols + seed)
        codes = torch.randint(1, 126, (rows, cols), generator=generator, dtype=torch.uint8)
        signs = torch.randint(0, 2, (rows, cols), generator=generator, dtype=torch.uint8)
        self.rows, self.cols = rows, cols
        self.codes = codes + 128 * signs
        row, col = torch.arange(-(-rows // BLOCK)), torch.arange(-(-cols // BLOCK))
        # 199 is prime: no two of 199 blocks in a row or column agree.
        exponents = (37 * row[:, None] + 101 * col + 53 * seed) % 199 - 99
        self.scale = torch.ldexp(torch.ones(exponents.shape), exponents)
        self.dense = dequantised(self.codes, self.scale)

    def file(self, dialect: str = "weight_scale") -> dict[str, torch.Tensor]:
        """Codes and scales: rank 4, rank 2 under the other name, or rank 2 as compressed-tensors has it."""
        codes = self.codes.view(torch.float8_e4m3fn)
        if dialect == "compressed-tensors":
            return {"weight": codes, "weight_scale": self.scale}
        return {"weight": codes, dialect: self.scale if dialect == "weight_scale_inv" else self.scale[:, None, :, None]}


@cache
def fp8_tensor(rows: int, cols: int, seed: int = 0) -> Fp8Tensor:
    return Fp8Tensor(rows, cols, seed)


# ---- the release under test ----------------------------------------------------


class HeldWeight:
    """In place of a GEMM kernel: hands out the weight's columns, as kernels read it.

    A unit vector per column would do, and be large. Instead ``x`` is one row that holds
    the number of each logical column, counted from 1, wherever the layer puts its input.
    """

    def __init__(self, *_: Any, **__: Any):
        pass

    def input_quant_key(self) -> None:
        """Nobody in front of the layer quantises its input."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        scale = getattr(layer, "weight_scale", None)
        scale = layer.weight_scale_inv if scale is None else scale
        if scale.dim() == 4:
            scale = scale[:, 0, :, 0]
        weight = dequantised(layer.weight.detach().view(torch.uint8), scale.detach().float())
        if len(x) > 1:  # unit vectors after all: absorption in older releases
            return weight[:, x.argmax(dim=1)].T
        numbers = x.flatten()
        column = numbers.nonzero().flatten()
        if not torch.equal(numbers[column], torch.arange(1.0, len(column) + 1)):
            raise AssertionError("the layer changed its input")
        return weight[:, column].T


@dataclass
class Release:
    """Rank and size that every patched module of a release sees."""

    rank: int = 0
    size: int = 1
    undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self.undo:
            setattr(*self.undo.pop())


_KERNEL_FACTORIES = ("init_fp8_linear_kernel", "choose_block_fp8_kernel")


@contextlib.contextmanager
def release() -> Iterator[Release]:
    """Patch rank, size and the GEMM into every module of the imported vLLM, and take them out again."""
    for name in (
        "model_executor.layers.linear",
        "model_executor.layers.quantization.modelopt",
        "model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
        "models.kimi_k3.nvidia.model",
        "models.kimi_k3.nvidia.kda",
        "models.kimi_k3.nvidia.mla",
        "models.kimi_k3.amd.linear",
    ):
        importlib.import_module(f"vllm.{name}")
    with contextlib.suppress(ModuleNotFoundError):  # not every release has one
        importlib.import_module("vllm.models.kimi_k3.amd.kda")
    state = Release()
    # Constructors of other platforms load these; a second library of a CPU wheel ends the process.
    placed = [name for name in ("vllm._C", "vllm._rocm_C") if name not in sys.modules]
    sys.modules.update((name, ModuleType(name)) for name in placed)
    patches: dict[str, Any] = {
        "get_tensor_model_parallel_rank": lambda: state.rank,
        "get_tensor_model_parallel_world_size": lambda: state.size,
        **dict.fromkeys(_KERNEL_FACTORIES, HeldWeight),
        # Asked by a constructor of the ROCm platform, whose library is not here.
        "is_fused_kda_decode_supported": lambda *_, **__: False,
    }
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm"):
            for name, value in patches.items():
                if name in vars(module):
                    state.set(module, name, value)
    try:
        yield state
    finally:
        state.restore()
        for name in placed:
            del sys.modules[name]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Every buffer made inside starts as NaN, or as e4m3's code for it."""
    empty, dtype = torch.empty, torch.get_default_dtype()

    def nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        if made.device.type != "cpu":
            return made
        if made.element_size() == 1:
            made.view(torch.uint8).fill_(0x7F)
        elif made.is_floating_point():
            made.fill_(math.nan)
        return made

    torch.empty = nan
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.empty = empty
        torch.set_default_dtype(dtype)


# ---- Kimi K3's attention, as a release's model makes it ---------------------------


@dataclass(frozen=True)
class Shape:
    """K3's head counts, with input widths that keep the block structure and cost little."""

    heads: int = 96
    head_dim: int = 128
    hidden: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v_dim: int = 128

    def tensors(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Kind of layer → tensor → ``(rows, columns)`` in the file."""
        wide = self.heads * self.head_dim
        q_head, kv_head = self.nope + self.rope, self.nope + self.v_dim
        return {
            "kda": {
                **{f"{n}_proj": (wide, self.hidden) for n in "qkvg"},
                "f_a_proj": (self.head_dim, self.hidden),
                "b_proj": (self.heads, self.hidden),
                "f_b_proj": (wide, self.head_dim),
                "o_proj": (self.hidden, wide),
            },
            "mla": {
                "q_a_proj": (self.q_lora, self.hidden),
                "kv_a_proj_with_mqa": (self.kv_lora + self.rope, self.hidden),
                "g_proj": (self.heads * self.v_dim, self.hidden),
                "q_b_proj": (self.heads * q_head, self.q_lora),
                "kv_b_proj": (self.heads * kv_head, self.kv_lora),
                "o_proj": (self.hidden, self.heads * self.v_dim),
            },
        }


REPLICATED = {"f_a_proj", "q_a_proj", "kv_a_proj_with_mqa"}

# Shards in the order in which each fused layer computes them.
FUSED = {
    "in_proj_qkvgfab": ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_g_proj": ("q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
}

# Attention class, after a dot where its name is taken → (kind, layer number, module of the class, module of the model).
ATTENTION = {
    "KimiK3DeltaAttention": ("kda", 0, "models.kimi_k3.nvidia.kda", "models.kimi_k3.nvidia.model"),
    "KimiGatedDeltaNetAttention": (
        "kda", 0, "model_executor.layers.mamba.gdn.kimi_gdn_linear_attn", "models.kimi_k3.amd.linear",
    ),
    "MultiHeadLatentAttention": ("mla", 2, "models.kimi_k3.nvidia.mla", "models.kimi_k3.nvidia.model"),
    "KimiMLAAttention": ("mla", 2, "models.kimi_k3.amd.linear", "models.kimi_k3.amd.linear"),
    "amd.KimiK3DeltaAttention": ("kda", 0, "models.kimi_k3.amd.kda", "models.kimi_k3.amd.linear"),
}  # fmt: skip


def k3_config(shape: Shape) -> Any:
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    return KimiLinearConfig(
        vocab_size=512,
        hidden_size=shape.hidden,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        hidden_act="silu",
        q_lora_rank=shape.q_lora,
        kv_lora_rank=shape.kv_lora,
        qk_nope_head_dim=shape.nope,
        qk_rope_head_dim=shape.rope,
        v_head_dim=shape.v_dim,
        mla_use_nope=True,
        mla_use_output_gate=True,
        linear_attn_config={
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "num_heads": shape.heads,
            "head_dim": shape.head_dim,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        num_experts=None,
    )


def quant_config(model: type | None = None, algo: str = "MIXED_PRECISION") -> Any:
    """The config of a K3 file, or of one in which every linear is block-scaled FP8, of either producer."""
    if algo == "compressed-tensors":
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
            CompressedTensorsConfig,
        )

        weights = {
            "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "block",
            "block_structure": [BLOCK, BLOCK],
        }  # fmt: skip
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "group"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs | {"group_size": BLOCK}}
        config = {"format": "float-quantized", "ignore": ["re:.*conv1d"], "config_groups": {"group_0": group}}
        made = CompressedTensorsConfig.from_config(config)
        made.packed_modules_mapping = getattr(model, "packed_modules_mapping", {})
        return made
    from vllm.model_executor.layers.quantization import modelopt

    if algo == "FP8_PB_WO":
        return modelopt.ModelOptFp8Config("FP8_PB_WO", True, None, [])
    names = {n for tensors in Shape().tensors().values() for n in tensors} | set(FUSED) | {"fused", "plain"}
    made = modelopt.ModelOptMixedPrecisionConfig.from_config(
        {
            "quant_method": "modelopt_mixed",
            "quant_algo": "MIXED_PRECISION",
            "group_size": 16,
            "exclude_modules": [],
            "quantized_layers": {
                f"model.layers.{i}.self_attn.{n}": {"quant_algo": "FP8_PB_WO"} for n in names for i in range(4)
            },
        }
    )
    made.packed_modules_mapping = getattr(model, "packed_modules_mapping", {})
    return made


@cache
def shared_config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


@contextlib.contextmanager
def _configured(hf_config: Any, quant: Any) -> Iterator[Any]:
    from vllm.config import set_current_vllm_config

    config = shared_config()
    fake = SimpleNamespace(
        dtype=torch.bfloat16, hf_config=hf_config, hf_text_config=hf_config, is_moe=False, enforce_eager=True
    )
    before = config.model_config, config.quant_config
    object.__setattr__(config, "model_config", fake)
    object.__setattr__(config, "quant_config", quant)
    config.compilation_config.static_forward_context.clear()
    try:
        with set_current_vllm_config(config):
            yield config
    finally:
        object.__setattr__(config, "model_config", before[0])
        object.__setattr__(config, "quant_config", before[1])


@contextlib.contextmanager
def _recorded() -> Iterator[list[torch.nn.Module]]:
    """Collect the linears made inside; a linear's own error is kept on the list's last item."""
    from vllm.model_executor.layers import linear

    made: list[torch.nn.Module] = []
    classes = (linear.ColumnParallelLinear, linear.RowParallelLinear, linear.ReplicatedLinear)
    before = [c.__init__ for c in classes]

    def recording(init: Callable) -> Callable:
        def wrapped(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            made.append(self)

        wrapped.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
        return wrapped

    for c, init in zip(classes, before, strict=True):
        c.__init__ = recording(init)
    try:
        yield made
    finally:
        for c, init in zip(classes, before, strict=True):
            c.__init__ = init


@dataclass
class Attention:
    """The quantised linears of one K3 attention layer on one rank."""

    kind: str
    model: torch.nn.Module
    linears: dict[str, torch.nn.Module]  # last part of the prefix → layer
    prefix: str
    module: torch.nn.Module | None  # what the constructor made, if it came to its end


def make_attention(cls_name: str, shape: Shape, algo: str = "MIXED_PRECISION") -> Attention:
    """Construct an attention layer on the rank that :func:`release` is set to.

    What a constructor does after its linears may fail (no attention kernel on this
    host) and does not matter here.

    Raises:
        Exception: Whatever stopped a linear.
    """
    kind, index, module, model_module = ATTENTION[cls_name]
    cls = getattr(importlib.import_module(f"vllm.{module}"), cls_name.rpartition(".")[2])
    model_cls = importlib.import_module(f"vllm.{model_module}").KimiLinearModel
    config = k3_config(shape)
    prefix = f"model.layers.{index}.self_attn"
    quant = quant_config(model_cls, algo)
    needed = {"kda": {"f_b_proj", "o_proj"}, "mla": {"q_b_proj", "kv_b_proj", "o_proj"}}[kind]
    stopped: Exception | None = None
    module_made: torch.nn.Module | None = None
    with _configured(config, quant) as vllm_config, poisoned(), _recorded() as made:
        try:
            if kind == "kda":
                module_made = cls(config, vllm_config, prefix=prefix)
            else:
                asked = inspect.signature(cls.__init__).parameters
                gate = {"use_output_gate": True} if "use_output_gate" in asked else {"use_nope": True}
                module_made = cls(
                    config, shape.hidden, shape.heads, shape.nope, shape.rope, shape.v_dim, shape.q_lora,
                    shape.kv_lora, quant_config=quant, prefix=prefix, **gate,
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001  (any release's)
            stopped = error
    linears = {m.prefix.removeprefix(prefix + "."): m for m in made if m.prefix.startswith(prefix + ".")}
    linears.pop("conv1d", None)
    if stopped is not None and (missing := needed - set(linears)):
        raise type(stopped)(f"{', '.join(sorted(missing))} not made: {stopped}") from stopped
    model = model_cls.__new__(model_cls)
    torch.nn.Module.__init__(model)
    model.config = config
    for name, layer in linears.items():
        _attach(model, f"layers.{index}.self_attn.{name}", layer)
    return Attention(kind, model, linears, f"layers.{index}.self_attn", module_made)


def _attach(root: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, torch.nn.Module())
        root = getattr(root, parent)
    root.add_module(last, layer)


def shards_of(name: str, layer: torch.nn.Module) -> tuple[str, ...]:
    """The file's tensors in a layer, in the order in which it computes them."""
    shards = FUSED.get(name, (name,))
    if shards == FUSED["fused_qkv_a_proj"] and len(layer.output_sizes) == 3:
        return FUSED["fused_qkv_a_g_proj"]
    return shards


def held(layer: torch.nn.Module) -> torch.Tensor:
    """The weight ``[rows, columns]`` that a rank's layer multiplies by, float32."""
    columns = getattr(layer, "input_size_per_partition", layer.input_size)
    numbers = torch.arange(1, columns + 1, dtype=torch.float32)
    return layer.quant_method.apply(layer, numbers[None], None).T.float()


def absorbed(layer: torch.nn.Module) -> torch.Tensor:
    """The weight ``[rows, columns]`` that MLA folds into queries and outputs."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    return get_and_maybe_dequant_weights(layer, torch.bfloat16).float()


def differing(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Row by row, whether any bit differs."""
    if got.shape != want.shape:
        raise AssertionError(f"expected {tuple(want.shape)}, found {tuple(got.shape)}")
    return (got.contiguous().view(torch.int32) != want.contiguous().view(torch.int32)).any(1)


def span(rows: int, rank: int, size: int, replicated: bool = False) -> slice:
    """The rows (or columns) of a tensor that a rank should hold."""
    if replicated:
        return slice(0, rows)
    return slice(rank * (rows // size), (rank + 1) * (rows // size))


@dataclass
class Verdict:
    """What became of one tensor of the file, over all ranks of one tensor-parallel size."""

    rows: int
    wrong: torch.Tensor  # bool per source row: wrong on some rank
    error: str | None = None

    @property
    def rows_wrong(self) -> int:
        return int(self.wrong.sum())


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def check_attention(
    state: Release,
    cls_name: str,
    shape: Shape,
    size: int,
    *,
    algo: str = "MIXED_PRECISION",
    dialect: str = "weight_scale",
    only: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    loads: int = 1,
) -> dict[str, Verdict]:
    """Load one attention layer on every rank and compare it with the file.

    Args:
        state: From :func:`release`.
        cls_name: Key of ``ATTENTION``.
        shape: Sizes of the file.
        size: Tensor-parallel size.
        algo: See :func:`quant_config`.
        dialect: Name and rank of the scales.
        only: Tensors to check; all if empty.
        ranks: Ranks to check; all if None.
        loads: How often the weights are loaded before and after post-processing.

    Returns:
        Tensor → verdict; ``kv_b_proj absorbed`` is what MLA folds.
    """
    kind, _, _, _ = ATTENTION[cls_name]
    sizes = shape.tensors()[kind]
    wanted = [n for n in sizes if not only or n in only]
    files = {n: fp8_tensor(*sizes[n], seed) for seed, n in enumerate(sizes) if n in wanted}
    verdicts = {n: Verdict(sizes[n][0], torch.zeros(sizes[n][0], dtype=torch.bool)) for n in wanted}
    if "kv_b_proj" in wanted:
        rows = sizes["kv_b_proj"][0]
        verdicts["kv_b_proj absorbed"] = Verdict(rows, torch.zeros(rows, dtype=torch.bool))
    for rank in range(size) if ranks is None else ranks:
        state.rank, state.size = rank, size
        try:
            attention = make_attention(cls_name, shape, algo)
        except Exception as error:  # noqa: BLE001
            for v in verdicts.values():
                v.error = v.error or one_line(error)
            break
        for name, layer in attention.linears.items():
            shards = shards_of(name, layer)
            if not set(shards) <= set(wanted):
                continue
            mine = {n: verdicts[n] for n in shards}
            if name == "kv_b_proj":
                mine["kv_b_proj absorbed"] = verdicts["kv_b_proj absorbed"]
            try:
                _check_layer(attention, layer, shards, files, mine, rank, size, dialect)
            except Exception as error:  # noqa: BLE001
                for v in mine.values():
                    v.error = v.error or one_line(error)
    return verdicts


def _check_layer(
    attention: Attention,
    layer: torch.nn.Module,
    shards: Sequence[str],
    files: Mapping[str, Fp8Tensor],
    verdicts: Mapping[str, Verdict],
    rank: int,
    size: int,
    dialect: str,
) -> None:
    state = {
        f"{attention.prefix}.{shard}.{name}": value
        for shard in shards
        for name, value in files[shard].file(dialect).items()
    }
    attention.model.load_weights(state.items())
    layer.quant_method.process_weights_after_loading(layer)
    compare(held(layer), shards, files, verdicts, rank, size)
    if "kv_b_proj absorbed" in verdicts:
        folded = {"kv_b_proj": verdicts["kv_b_proj absorbed"]}
        compare(absorbed(layer), shards, files, folded, rank, size)


def compare(
    got: torch.Tensor,
    shards: Sequence[str],
    files: Mapping[str, Fp8Tensor],
    verdicts: Mapping[str, Verdict],
    rank: int,
    size: int,
) -> None:
    """Mark the source rows that a rank holds wrongly; rows behind the last shard are padding, and zero."""
    first = 0
    for name in shards:
        t = files[name]
        by_columns = name == "o_proj"
        rows = slice(0, t.rows) if by_columns else span(t.rows, rank, size, name in REPLICATED)
        columns = span(t.cols, rank, size) if by_columns else slice(None)
        want = t.dense[rows, columns]
        verdicts[name].wrong[rows] |= differing(got[first : first + len(want)], want)
        first += len(want)
    if bool((got[first:] != 0).any()):
        raise AssertionError(f"{len(got) - first} padding rows are not zero")


# ---- single layers ----------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """A linear layer of any row counts.

    Attributes:
        name: For reports.
        rows: Rows of each shard in the file.
        cols: Input columns.
        cls: ``MergedColumnParallelLinear``, ``ColumnParallelLinear``, ….
        fused_on_disk: The file has all shards as one tensor, with one grid of scales.
    """

    name: str
    rows: tuple[int, ...]
    cols: int = 128
    cls: str = "MergedColumnParallelLinear"
    fused_on_disk: bool = False
    replicated: bool = False


def check_linear(
    state: Release,
    case: Linear,
    size: int,
    *,
    algo: str = "MIXED_PRECISION",
    dialect: str = "weight_scale",
    ranks: Sequence[int] | None = None,
) -> dict[str, Verdict]:
    """As :func:`check_attention`, for one layer."""
    if case.fused_on_disk:
        file = [fp8_tensor(sum(case.rows), case.cols)]
    else:
        file = [fp8_tensor(rows, case.cols, seed) for seed, rows in enumerate(case.rows)]
    dense = torch.cat([t.dense for t in file])
    verdict = Verdict(len(dense), torch.zeros(len(dense), dtype=torch.bool))
    for rank in range(size) if ranks is None else ranks:
        state.rank, state.size = rank, size
        try:
            layer = make_linear(case, algo)
            params = dict(layer.named_parameters())
            for shard, t in enumerate(file):
                args = (shard,) if len(file) > 1 else ()
                for name, value in t.file(dialect).items():
                    params[name].weight_loader(params[name], value, *args)
            layer.quant_method.process_weights_after_loading(layer)
            _compare_linear(held(layer), case, dense, verdict, rank, size)
        except Exception as error:  # noqa: BLE001
            verdict.error = verdict.error or one_line(error)
    return {case.name: verdict}


def _compare_linear(
    got: torch.Tensor, case: Linear, dense: torch.Tensor, verdict: Verdict, rank: int, size: int
) -> None:
    if case.cls == "RowParallelLinear":
        verdict.wrong |= differing(got, dense[:, span(case.cols, rank, size)])
        return
    mine, first = [], 0
    for rows in case.rows:
        part = span(rows, rank, size, case.replicated)
        mine.append(torch.arange(first + part.start, first + part.stop))
        first += rows
    index = torch.cat(mine)
    verdict.wrong[index] |= differing(got, dense[index])


def make_linear(case: Linear, algo: str = "MIXED_PRECISION") -> torch.nn.Module:
    from vllm.model_executor.layers import linear

    merged = case.cls == "MergedColumnParallelLinear"
    kwargs: dict[str, Any] = {"disable_tp": True} if case.replicated and merged else {}
    with _configured(None, quant_config(algo=algo)), poisoned():
        return getattr(linear, case.cls)(
            case.cols, list(case.rows) if merged else case.rows[0], bias=False,
            quant_config=quant_config(algo=algo),
            prefix=f"model.layers.0.self_attn.{'fused' if merged else 'plain'}", **kwargs,
        )  # fmt: skip


# ---- four-bit experts ------------------------------------------------------------------

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
E8M0 = torch.ldexp(torch.ones(256), torch.arange(256) - 127)

EXPERT_FORMATS = ("modelopt", "compressed-tensors", "mxfp4")


def fp4_dequantised(packed: torch.Tensor, scale: torch.Tensor, tensor_scale: float) -> torch.Tensor:
    """``packed`` uint8 ``[rows, cols / 2]``, ``scale`` float32 ``[rows, blocks]`` → float32."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    out = E2M1[codes.flatten().int()].view(codes.shape)
    per_block = codes.shape[1] // scale.shape[1]
    return out * scale[:, torch.arange(codes.shape[1]) // per_block] * tensor_scale


class Fp4Tensor:
    """One tensor of an expert: a power of two for each block, and for NVFP4 one for all of them."""

    def __init__(self, rows: int, cols: int, seed: int, layout: str):
        generator = torch.Generator().manual_seed(1000 * rows + 10 * cols + seed)
        self.packed = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
        self.layout = layout
        if layout == "mxfp4":
            self.scale = torch.randint(90, 160, (rows, cols // 32), generator=generator, dtype=torch.uint8)
            self.tensor_scale = 1.0
            self.dense = fp4_dequantised(self.packed, E8M0[self.scale.int()], 1.0)
        else:
            self.scale = torch.randint(1, 15, (rows, cols // 16), generator=generator, dtype=torch.uint8) << 3
            self.tensor_scale = 2.0 ** -(seed % 17)
            self.dense = fp4_dequantised(self.packed, E4M3[self.scale.int()], self.tensor_scale)

    def file(self) -> dict[str, torch.Tensor]:
        if self.layout == "mxfp4":
            return {"weight": self.packed, "weight_scale": self.scale}
        scale = self.scale.view(torch.float8_e4m3fn)
        if self.layout == "compressed-tensors":
            return {
                "weight_packed": self.packed,
                "weight_scale": scale,
                "weight_global_scale": torch.tensor([1 / self.tensor_scale]),
                "input_global_scale": torch.tensor([1.0]),
            }
        return {
            "weight": self.packed,
            "weight_scale": scale,
            "weight_scale_2": torch.tensor(self.tensor_scale),
            "input_scale": torch.tensor(1.0),
        }


@cache
def fp4_tensor(rows: int, cols: int, seed: int, layout: str) -> Fp4Tensor:
    return Fp4Tensor(rows, cols, seed, layout)


def _expert_config(layout: str) -> Any:
    if layout == "mxfp4":
        from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config

        return Mxfp4Config()
    if layout == "compressed-tensors":
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
            CompressedTensorsConfig,
        )

        weights = {
            "num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor_group",
            "group_size": 16,
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"dynamic": "local"}}
        return CompressedTensorsConfig.from_config(
            {"format": "nvfp4-pack-quantized", "ignore": [], "config_groups": {"group_0": group}}
        )
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    return ModelOptNvFp4Config("NVFP4", True, None, [], 16)


@contextlib.contextmanager
def _emulated(layout: str) -> Iterator[None]:
    """Let experts choose the release's emulating backend."""
    module, select, oracle, backends = _SELECTION[layout]
    owner = importlib.import_module(f"vllm.model_executor.layers.quantization.{module}")
    chosen = importlib.import_module(f"vllm.model_executor.layers.fused_moe.oracle.{oracle}")
    backend = getattr(chosen, backends).EMULATION
    before = getattr(owner, select)
    setattr(owner, select, lambda *_, **__: (backend, chosen.backend_to_kernel_cls(backend)[0]))
    try:
        yield
    finally:
        setattr(owner, select, before)


# Layout → who selects a backend, by what name, and where the backends are.
_SELECTION = {
    "modelopt": ("modelopt", "select_nvfp4_moe_backend", "nvfp4", "NvFp4MoeBackend"),
    "compressed-tensors": (
        "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
        "select_nvfp4_moe_backend", "nvfp4", "NvFp4MoeBackend",
    ),
    "mxfp4": ("mxfp4", "select_deepseek_v4_mxfp4_moe_backend", "mxfp4", "Mxfp4MoeBackend"),
}  # fmt: skip


def check_experts(
    size: int,
    *,
    layout: str = "modelopt",
    width: int = 3072,
    latent: int = 128,
    experts: int = 2,
    padded: int | None = None,
    ranks: Sequence[int] | None = None,
    finish: bool = True,
    emulate: bool = False,
) -> dict[str, Verdict]:
    """Load a bank of four-bit experts through the release's FusedMoE, and compare what each rank holds.

    Needs a process group of one rank, which the layer asks for; the rank and size that it shards by are set here.

    Args:
        size: Tensor-parallel size, without expert parallelism.
        layout: One of ``EXPERT_FORMATS``.
        width: Expert width in the file.
        latent: Input width of w1 and w3.
        experts: How many; each NVFP4 tensor of each expert has its own tensor scale.
        padded: Width of a rank's part, if the model widens it.
        ranks: Ranks to check; all if None.
        finish: Run post-processing, as far as the CPU platform has it.
        emulate: Choose the emulating backend, where the release finds none for a CPU.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    names = {"w1": (width, latent), "w3": (width, latent), "w2": (latent, width)}
    files = {
        (e, n): fp4_tensor(*shape, 3 * e + i, layout)
        for e in range(experts)
        for i, (n, shape) in enumerate(names.items())
    }
    verdicts = {n: Verdict(r, torch.zeros(r, dtype=torch.bool)) for n, (r, _) in names.items()}
    part = width // size
    try:
        for rank in range(size) if ranks is None else ranks:
            shared_config().compilation_config.static_forward_context.clear()
            emulated = _emulated(layout) if emulate else contextlib.nullcontext()
            with set_current_vllm_config(shared_config()), poisoned(), emulated:
                layer = FusedMoEFactory(
                    num_experts=experts, top_k=2, hidden_size=latent, intermediate_size=(padded or part) * size,
                    scoring_func="sigmoid", ckpt_names=("w1", "w2", "w3"), activation="situ",
                    activation_situ_beta=4.0, activation_situ_linear_beta=25.0, tp_size=size,
                    quant_config=_expert_config(layout), prefix="model.layers.1.block_sparse_moe.experts",
                ).routed_experts  # fmt: skip
                layer.moe_config.moe_parallel_config.tp_rank = rank
                if padded:
                    layer.moe_config.intermediate_size_per_partition_unpadded = part
                state = {f"{e}.{n}.{k}": v for (e, n), t in files.items() for k, v in t.file().items()}
                for _ in layer.load_weights(state.items()):
                    pass
                if finish:
                    layer.quant_method.process_weights_after_loading(layer)
            _compare_experts(layer, files, verdicts, experts, span(width, rank, size), padded or part)
    except Exception as error:  # noqa: BLE001
        for v in verdicts.values():
            v.error = v.error or one_line(error)
    return verdicts


def _held_expert(layer: torch.nn.Module, bank: str, e: int, half: int) -> torch.Tensor:
    """One expert's ``w13`` or ``w2`` as a rank holds it, with the tensor scale of w1 (0) or w3 (1)."""

    def has(name: str) -> torch.Tensor | None:
        return getattr(layer, f"{bank}_{name}", None)

    codes = has("weight")
    codes = has("weight_packed") if codes is None else codes
    scale = has("weight_scale")[e].view(torch.uint8)
    tensor_scale = 1.0
    if (factor := has("weight_scale_2")) is not None:
        tensor_scale = float(factor[e].flatten()[half])
    elif (divisor := has("weight_global_scale")) is not None:
        tensor_scale = 1 / float(divisor[e].flatten()[half])
    per_block = 2 * codes.shape[-1] // scale.shape[-1]
    return fp4_dequantised(codes[e], (E4M3 if per_block == 16 else E8M0)[scale.int()], tensor_scale)


def _compare_experts(
    layer: torch.nn.Module,
    files: Mapping[tuple[int, str], Fp4Tensor],
    verdicts: Mapping[str, Verdict],
    experts: int,
    mine: slice,
    held_width: int,
) -> None:
    part = mine.stop - mine.start
    for e in range(experts):
        for name, bank, half in (("w1", "w13", 0), ("w3", "w13", 1), ("w2", "w2", 0)):
            got = _held_expert(layer, bank, e, half)
            want = files[e, name].dense
            if bank == "w13":
                got = got[half * held_width : (half + 1) * held_width]
                verdicts[name].wrong[mine] |= differing(got[:part], want[mine])
                rest = got[part:]
            else:
                verdicts[name].wrong |= differing(got[:, :part], want[:, mine])
                rest = got[:, part:]
            if bool((rest != 0).any()):
                raise AssertionError(f"{name} of expert {e}: the padding is not zero")


def quiet() -> None:
    """Log errors only: a matrix makes thousands of layers."""
    logging.disable(logging.WARNING)
