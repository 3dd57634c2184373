# SPDX-License-Identifier: Apache-2.0
"""Linear layers with e4m3 weights and one float32 scale per 128×128 block.

Public files hold the scale as ``weight_scale`` ``[⌈out/128⌉, 1, ⌈in/128⌉, 1]`` or as
``weight_scale_inv`` ``[⌈out/128⌉, ⌈in/128⌉]``; both are multipliers.

Loading is in two steps. While the file is read, the weight has its logical rows and
the scale has one row *per weight row*, so that sharding, fusing and replication are
those of the weight, and no partial block can go to the wrong rows. Afterwards both
are laid out in blocks (``utils/block_scale_layout.py``), with zero padding that
never leaves this class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import vllm.envs as envs
from vllm.checkpoint.strictness import refuse
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import (
    _get_linear_backend,
    init_fp8_linear_kernel,
)
from vllm.model_executor.kernels.linear.scaled_mm import (
    Fp8BlockScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu_dequant import (
    CPUFp8BlockDequantKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.hopper_block_fp8 import (
    HopperFp8BlockScaledMMKernel,
)
from vllm.model_executor.layers.linear import LinearMethodBase, ReplicatedLinear
from vllm.model_executor.layers.quantization.utils.block_fp8_dequant import (
    dequantize_block_fp8,
)
from vllm.model_executor.layers.quantization.utils.block_scale_layout import (
    Partition,
    Placement,
    place_parameter,
    place_span,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    create_fp8_quant_key,
)
from vllm.model_executor.layers.quantization.utils.unloaded import mark_unloaded
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import current_platform

__all__ = ["BLOCK", "BlockFp8LinearMethod", "choose_block_fp8_kernel"]

logger = init_logger(__name__)

BLOCK = 128

_SCALE_NAMES = ("weight_scale", "weight_scale_inv")


@dataclass
class BlockFp8State:
    """What a layer's weight looks like between loading and use.

    Attributes:
        columns: Placement of the rank's input columns in blocks.
        rows: Where each partition lies among the padded rows, set after loading.
        scale_name: The name under which the file holds the scale.
        widening: Partitions that no tensor fills; they only widen the output.
        packed: Whether the kernel has replaced the weight by a form of its own.
        unpacked: Weight and scale in blocks as they were before the kernel packed
            them, kept where somebody needs the dequantised weight.
    """

    columns: Placement
    scale_name: str | None = None
    rows: list[range] | None = None
    widening: frozenset[int] = frozenset()
    packed: bool = True
    unpacked: tuple[torch.Tensor, torch.Tensor] | None = None


class _RowScaleParameter(ModelWeightParameter):
    """Scale with one row per weight row; last column: the source's block number."""

    def __init__(self, columns: Placement, **kwargs: Any) -> None:
        self.columns = columns
        super().__init__(**kwargs)

    def load_row_parallel_weight(self, loaded_weight: torch.Tensor) -> None:
        first = self.columns.copies[0].source_scale_row
        mine = loaded_weight[: self.data.shape[0], first:]
        self.data[:, :-1].copy_(mine[:, : len(self.columns.copies)])
        self.data[:, -1].copy_(mine[:, -1])


def choose_block_fp8_kernel(
    weight_shape: tuple[int, int], dtype: torch.dtype, module_name: str
) -> Fp8BlockScaledMMLinearKernel:
    """Choose the GEMM for a weight of ``weight_shape``, padding included.

    On CPU: the AMX kernel for BF16 on hosts that have AMX, else plain torch. On
    Hopper: a kernel of our own for few tokens, with CUTLASS for more, unless
    ``--linear-backend`` names another or batch invariance is asked for.

    Raises:
        ValueError: No kernel fits, or the one that fits has no use for whole blocks.
    """
    activation_key = create_fp8_quant_key(
        static=False, group_shape=GroupShape(1, BLOCK)
    )
    weight_key = create_fp8_quant_key(
        static=True, group_shape=GroupShape(BLOCK, BLOCK)
    )
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=weight_key,
        activation_quant_key=activation_key,
        weight_shape=weight_shape,
        input_dtype=dtype,
        out_dtype=dtype,
    )
    if current_platform.is_cpu():
        amx, _ = CPUFp8BlockScaledMMKernel.is_supported()
        if not amx or dtype != torch.bfloat16:
            return CPUFp8BlockDequantKernel(config)
    if _get_linear_backend() == "auto" and not envs.VLLM_BATCH_INVARIANT:
        hopper = HopperFp8BlockScaledMMKernel
        if hopper.is_supported()[0] and hopper.can_implement(config)[0]:
            logger.info_once("Selected %s for %s", hopper.__name__, module_name)
            return hopper(config)
    kernel = init_fp8_linear_kernel(
        activation_quant_key=activation_key,
        weight_quant_key=weight_key,
        weight_shape=weight_shape,
        input_dtype=dtype,
        out_dtype=dtype,
        module_name=module_name,
    )
    if isinstance(kernel, Fp8BlockScaledMMLinearKernel):
        return kernel
    way_out = "Use --linear-backend auto, cutlass or triton."
    if _get_linear_backend() == "auto":
        way_out = (
            "This device has no other: convert these linears with "
            "`vllm checkpoint convert … --attention bf16`."
        )
    raise ValueError(
        f"{type(kernel).__name__} was chosen for FP8 weights {weight_shape} with one "
        f"scale per {BLOCK}x{BLOCK} block, which needs a kernel that takes rows padded "
        "to whole blocks and scales in float32, an Fp8BlockScaledMMLinearKernel. "
        f"Others, such as Marlin, round the scales to BF16. {way_out}"
    )


class BlockFp8LinearMethod(LinearMethodBase):
    """Weight-only block-scaled FP8, exact for any row and column count."""

    # The layer's input is never FP8: the kernel quantises by itself, if at all.
    accepts_fp8_input = False

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config
        self.kernel: Fp8BlockScaledMMLinearKernel | None = None
        self.kernel_shape: tuple[int, int] | None = None

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = extra_weight_attrs["weight_loader"]
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = columns
        layer.output_size_per_partition = rows
        layer.weight_block_size = [BLOCK, BLOCK]

        sharded_input = columns != input_size
        start = layer.tp_rank * columns if sharded_input else 0
        state = BlockFp8State(columns=place_span(start, columns, BLOCK))
        layer.block_fp8 = state
        self.dtype = params_dtype

        # Choose now, so that a host without a kernel is told before weights load.
        planned = _planned_rows(layer, output_partition_sizes, sharded_input)
        self._choose_kernel(planned, state.columns.padded_rows)

        weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        layer.register_parameter(
            "weight",
            ModelWeightParameter(
                data=weight,
                input_dim=1,
                output_dim=0,
                weight_loader=_weight_loader(layer, loader),
            ),
        )
        mark_unloaded(layer.weight)
        scale = torch.empty(rows, len(state.columns.copies) + 1, dtype=torch.float32)
        for name in _SCALE_NAMES:
            # Two names for one storage: the file has one or the other.
            layer.register_parameter(
                name,
                _RowScaleParameter(
                    columns=state.columns,
                    data=scale,
                    input_dim=1,
                    output_dim=0,
                    weight_loader=_scale_loader(layer, name, loader),
                ),
            )
            mark_unloaded(getattr(layer, name))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Check that everything was loaded, lay it out in blocks, pack.

        Raises:
            ValueError: Naming the layer and the partition that is missing or NaN.
        """
        state = layer.block_fp8
        weight, scale = _lay_out(layer, state)
        self._choose_kernel(weight.shape[0], weight.shape[1])
        assert self.kernel is not None and state.rows is not None
        if hasattr(layer, "weight_scale_inv"):
            del layer.weight_scale_inv
        state.scale_name = None  # a reload may come from a file of the other dialect
        replace_parameter(layer, "weight", weight)
        replace_parameter(layer, "weight_scale", scale)
        on_cpu, kept = current_platform.is_cpu(), layer.prefix.endswith("kv_b_proj")
        unpacked = (weight, scale)
        if kept and not on_cpu:
            # Some GPU kernels rescale in place.
            unpacked = (weight.clone(), scale.clone())
        self.kernel.process_weights_after_loading(layer)
        # A kernel that leaves the weight alone needs no second copy of it.
        state.packed = not on_cpu or layer.weight.data_ptr() != weight.data_ptr()
        state.unpacked = unpacked if kept and state.packed else None

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        state = layer.block_fp8
        columns = state.columns
        if columns.padded_rows != columns.rows:
            tail = columns.padded_rows - columns.lead - columns.rows
            x = F.pad(x, (columns.lead, tail))
        assert self.kernel is not None
        y = self.kernel.apply_weights(layer, x, None)
        y = _crop(y, state.rows, dim=-1)
        if not getattr(layer, "output_is_split", False):
            y = y.contiguous()
        return y if bias is None else y + bias

    def dequantized_weight(
        self, layer: torch.nn.Module, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the layer's weight ``[out, in]``, without padding, bit-exact.

        It does not depend on how the kernel packs its weights.

        Raises:
            ValueError: The kernel has packed the weight and nothing else was kept.
        """
        state = layer.block_fp8
        unpacked = state.unpacked
        if not state.packed:
            unpacked = (layer.weight.data, layer.weight_scale.data)
        if unpacked is None:
            raise ValueError(
                f"{layer.prefix}: the weight was packed by "
                f"{type(self.kernel).__name__} and no copy kept; only kv_b_proj keeps "
                "one."
            )
        weight, scale = unpacked
        dense = dequantize_block_fp8(weight, scale, BLOCK, out_dtype)
        columns = state.columns
        dense = dense[:, columns.lead : columns.lead + columns.rows]
        return _crop(dense, state.rows, dim=0)

    def _choose_kernel(self, rows: int, columns: int) -> None:
        shape = (rows, columns)
        if self.kernel_shape != shape:
            self.kernel_shape = shape
            self.kernel = choose_block_fp8_kernel(
                shape, self.dtype, type(self).__name__
            )


def _planned_rows(
    layer: torch.nn.Module, widths: list[int], sharded_input: bool
) -> int:
    """Rows of the padded weight, if the file holds each shard as its own tensor."""
    whole = sharded_input or isinstance(layer, ReplicatedLinear)
    replicated = getattr(layer, "replicated_shard_id", None)
    size = 1 if whole else layer.tp_size
    partitions = [
        Partition(width if whole or i == replicated else width * size, i == replicated)
        for i, width in enumerate(widths)
    ]
    placed = place_parameter(partitions, 0 if whole else layer.tp_rank, size, BLOCK)
    return sum(p.padded_rows for p in placed)


def _crop(y: torch.Tensor, rows: list[range], dim: int) -> torch.Tensor:
    """Drop padding from a tensor whose ``dim`` runs over the padded rows.

    The result is a view where nothing lies between the partitions.
    """
    runs: list[range] = []
    for span in rows:
        if runs and runs[-1].stop == span.start:
            runs[-1] = range(runs[-1].start, span.stop)
        else:
            runs.append(span)
    parts = [y.narrow(dim, run.start, len(run)) for run in runs]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def _source_rows(layer: torch.nn.Module, shard_id: Any) -> int | None:
    """Rows of the file's tensor for a shard, or None where the layer does not say."""
    if isinstance(shard_id, str):
        heads = layer.total_num_heads if shard_id == "q" else layer.total_num_kv_heads
        head_size = layer.head_size
        if shard_id == "v":
            head_size = getattr(layer, "v_head_size", head_size)
        return heads * head_size
    sizes = getattr(layer, "output_sizes", None)
    if sizes is None or isinstance(layer, ReplicatedLinear):
        return layer.output_size if shard_id is None else None
    if shard_id is None:
        return sum(sizes)
    ids = (shard_id,) if isinstance(shard_id, int) else shard_id
    replicated = getattr(layer, "replicated_shard_id", None)
    return sum(sizes[i] // (layer.tp_size if i == replicated else 1) for i in ids)


def _label(layer: torch.nn.Module, tensor: str, shard_id: Any) -> str:
    shard = "" if shard_id is None else f" (shard {shard_id})"
    return f"{layer.prefix}.{tensor}{shard}"


def _weight_loader(layer: torch.nn.Module, upstream: Callable) -> Callable:
    """Wrap a layer's loader: FP8 codes of the right shape, or an error."""

    def load(param: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        shard_id = args[0] if args else kwargs.get("loaded_shard_id")
        if loaded.dtype == torch.uint8:
            loaded = loaded.view(torch.float8_e4m3fn)
        rows = _source_rows(layer, shard_id)
        expected = (loaded.shape[0] if rows is None else rows, layer.input_size)
        problem = (
            f"{_label(layer, 'weight', shard_id)}: expected float8_e4m3fn "
            f"{expected}, found {loaded.dtype} {tuple(loaded.shape)}. The "
            "quantisation config lists this layer as FP8_PB_WO; exclude it there "
            "if the file holds it unquantised."
        )
        if tuple(loaded.shape) != expected:
            raise ValueError(problem)
        if loaded.dtype != torch.float8_e4m3fn:
            refuse(problem)
            loaded = loaded.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        upstream(param, loaded, *args, **kwargs)

    return load


def _scale_loader(layer: torch.nn.Module, name: str, upstream: Callable) -> Callable:
    """Wrap a layer's loader: one scale row per weight row, then as for the weight."""

    def load(param: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        shard_id = args[0] if args else kwargs.get("loaded_shard_id")
        found = tuple(loaded.shape)
        blocks = loaded
        if loaded.dim() == 4 and found[1] == found[3] == 1:
            blocks = loaded[:, 0, :, 0]
        rows = _source_rows(layer, shard_id)
        height = blocks.shape[0] if rows is None else -(-rows // BLOCK)
        expected = (height, -(-layer.input_size // BLOCK))
        problem = (
            f"{_label(layer, name, shard_id)}: expected float32 with "
            f"{expected[0]}x{expected[1]} blocks of {BLOCK} (rank 2, or rank 4 with "
            f"ones between), found {loaded.dtype} {found}. Re-export the checkpoint."
        )
        if tuple(blocks.shape) != expected or not loaded.is_floating_point():
            raise ValueError(problem)  # bits are never taken for a number
        if loaded.dtype != torch.float32:
            refuse(problem)
            blocks = blocks.float()
        number = torch.arange(expected[0], dtype=torch.float32, device=blocks.device)
        staged = torch.cat((blocks, number[:, None]), dim=1)
        staged = staged.repeat_interleave(BLOCK, dim=0)
        if rows is not None:
            staged = staged[:rows]
        state = layer.block_fp8
        if state.scale_name not in (None, name):
            refuse(
                f"{layer.prefix}: the checkpoint holds both {state.scale_name} and "
                f"{name}; expected one of them. Re-export the checkpoint."
            )
        state.scale_name = name
        upstream(param, staged, *args, **kwargs)

    return load


def _lay_out(
    layer: torch.nn.Module, state: BlockFp8State
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrange loaded weight and per-row scales in blocks.

    Returns:
        Weight e4m3 ``[padded rows, padded columns]`` and scale float32
        ``[padded rows / 128, padded columns / 128]``; sets ``state.rows``.
    """
    weight = layer.weight.data
    staged = getattr(layer, state.scale_name or _SCALE_NAMES[0]).data
    columns = state.columns
    state.rows = []
    scales = []
    first = offset = 0
    for index, width in enumerate(layer.logical_widths):
        rows = slice(first, first + width)
        first += width
        number, values = staged[rows, -1], staged[rows, :-1]
        zeroed = not weight[rows].view(torch.uint8).any()
        if index in state.widening or (bool(number.isnan().all()) and zeroed):
            # Only widens the output: the model zeroes it, before the first load.
            state.widening |= {index}
            weight[rows].view(torch.uint8).zero_()
            number, values = torch.zeros_like(number), torch.zeros_like(values)
            end = state.rows[-1].stop if state.rows else 0
            if end + width <= offset:  # its zeros fit behind the last partition
                state.rows.append(range(end, end + width))
                continue
        _check_loaded(layer, index, weight[rows], number, values)
        # Where the span starts in its source: in block `number[0]`, and if it runs
        # beyond that block, as far in front of the block's end as rows lie in it.
        here = int((number == number[0]).sum())
        start = int(number[0]) * BLOCK + (BLOCK - here if here < width else 0)
        placement = place_span(start, width, BLOCK, offset)
        begin = offset + placement.lead
        state.rows.append(range(begin, begin + width))
        scales += [values[copy.first - start] for copy in placement.copies]
        offset += placement.padded_rows
    if (offset, columns.padded_rows) != tuple(weight.shape):
        padded = weight.new_zeros(offset, columns.padded_rows)
        inner = padded[:, columns.lead : columns.lead + columns.rows]
        first = 0
        for span in state.rows:
            inner[span.start : span.stop] = weight[first : first + len(span)]
            first += len(span)
        weight = padded
    return weight, torch.stack(scales).contiguous()


def _check_loaded(
    layer: torch.nn.Module,
    index: int,
    weight: torch.Tensor,
    number: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Refuse what is missing or NaN; if the user lets it through, a scale is 1 and a weight 0."""
    shard = None if len(layer.logical_widths) == 1 else index
    codes = weight.view(torch.uint8)
    if bool(number.isnan().any()):
        _refuse_unloaded(_label(layer, "weight_scale", shard) + ": not in the checkpoint")
        number.copy_(torch.arange(len(number)) // BLOCK)
        values.fill_(1.0)
    if not bool(values.isfinite().all()):
        _refuse_unloaded(_label(layer, "weight_scale", shard) + ": holds NaN or infinity")
        values[~values.isfinite()] = 1.0
    if bool(((codes & 0x7F) == 0x7F).any()):
        _refuse_unloaded(_label(layer, "weight", shard) + ": not in the checkpoint, or holds NaN")
        codes[(codes & 0x7F) == 0x7F] = 0


def _refuse_unloaded(what: str) -> None:
    refuse(
        f"{what}; expected float8_e4m3fn weights with one finite float32 scale per "
        f"{BLOCK}x{BLOCK} block. Check the checkpoint's index, or re-export it."
    )
