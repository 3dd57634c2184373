# SPDX-License-Identifier: Apache-2.0
"""An independent Kimi K3 text model: plain torch, float32, no vLLM.

It exists to be compared with, so it follows the published equations one by one and
shares no code with what it checks: it parses safetensors files itself, decodes every
element format from its bits, and runs MLA without absorption and KDA as a recurrence.

    model = load("path/to/checkpoint")
    model.logprobs([1, 2, 3])       # [3, vocab], position t predicts token t + 1
    model.greedy([1, 2, 3], n=8)    # 8 token ids

`dequantise` gives the weights alone, `write_dequantised` a plain checkpoint of them.
"""

import json
import math
import mmap
import shutil
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Model",
    "attn_res",
    "dequantise",
    "kda_recurrence",
    "load",
    "read_tensors",
    "situ",
    "write_dequantised",
]


class CheckpointError(ValueError):
    """The checkpoint is not what its names promise; the message names the tensor."""


# --- element formats ------------------------------------------------------------------


def _e2m1_table() -> Tensor:
    """Values of the 16 e2m1 codes: sign, two exponent bits (bias 1), one mantissa."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    return torch.tensor(magnitudes + [-m for m in magnitudes])


def _e4m3_table() -> Tensor:
    """Values of the 256 e4m3 codes ("fn": no infinities, S.1111.111 is NaN)."""
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code >> 3) & 0xF, code & 0x7
        if exponent == 0xF and mantissa == 0x7:
            values.append(math.nan)
        elif exponent == 0:
            values.append(sign * mantissa / 8 * 2.0**-6)
        else:
            values.append(sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return torch.tensor(values)


def _e8m0_table() -> Tensor:
    """Values of the 256 e8m0 codes: 2^(code - 127), 255 is NaN."""
    powers = [2.0 ** (code - 127) for code in range(255)]
    return torch.tensor(powers + [math.nan], dtype=torch.float64).float()


E2M1, E4M3, E8M0 = _e2m1_table(), _e4m3_table(), _e8m0_table()

# Storage type per safetensors dtype; 8-bit floats stay bytes until their table is used.
_STORAGE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.uint8,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_PLAIN = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Stored:
    """One tensor as the file holds it: safetensors dtype, file name and raw data."""

    dtype: str
    file: str
    data: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)


def _read_file(path: Path) -> dict[str, Stored]:
    """Parse one safetensors file: u64 header length, JSON header, data."""
    tensors = {}
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype, shape = entry["dtype"], entry["shape"]
        if dtype not in _STORAGE:
            raise CheckpointError(f"{path.name}: {name} has dtype {dtype}, which has no decoder.")
        storage = _STORAGE[dtype]
        if math.prod(shape) * storage.itemsize != end - begin:
            raise CheckpointError(f"{path.name}: {name} is {dtype} {shape} but has {end - begin} bytes.")
        if begin == end:
            data = torch.empty(shape, dtype=storage)
        else:
            with warnings.catch_warnings():  # the map is read-only on purpose
                warnings.simplefilter("ignore", UserWarning)
                data = torch.frombuffer(
                    view,
                    dtype=torch.uint8,
                    count=end - begin,
                    offset=8 + length + begin,
                )
            if (8 + length + begin) % storage.itemsize:
                data = data.clone()
            data = data.view(storage).reshape(shape)
        tensors[name] = Stored(dtype, path.name, data)
    return tensors


def read_tensors(path: str | Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint folder, undecoded, through its index if it has one.

    Raises:
        CheckpointError: No safetensors files, or index and files disagree.
    """
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: holds no .safetensors file.")
        return {k: v for file in files for k, v in _read_file(file).items()}
    weight_map = json.loads(index.read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(weight_map.values())):
        tensors.update(_read_file(folder / file))
    if set(weight_map) != set(tensors):
        odd = sorted(set(weight_map) ^ set(tensors))
        raise CheckpointError(f"{index.name}: index and shards differ in {len(odd)} tensors, first {odd[0]}.")
    return tensors


# --- dequantisation -------------------------------------------------------------------

# Suffixes that only make sense beside a weight and vanish with it.
_SCALES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "weight_shape",
)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Two values per byte, the low nibble first: uint8 [out, n] to f32 [out, 2n]."""
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    return E2M1[codes.flatten(-2).long()]


def spread(scale: Tensor, shape: tuple[int, ...], rows: int, columns: int) -> Tensor:
    """Block scales [R, C] spread over a weight of `shape`, last blocks cropped."""
    full = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return full[: shape[0], : shape[1]]


def _expect(found: Stored, dtype: str, shape: tuple[int, ...], name: str) -> None:
    if found.dtype != dtype or found.shape != shape:
        raise CheckpointError(
            f"{found.file}: {name} is {found.dtype} {list(found.shape)}, expected {dtype} {list(shape)}."
        )


def _scalar(stored: Mapping[str, Stored], name: str) -> float:
    if name not in stored:
        raise CheckpointError(f"{name}: missing; its weight is stored in 4 bits.")
    found = stored[name]
    if found.dtype != "F32" or found.data.numel() != 1:
        raise CheckpointError(f"{found.file}: {name} is {found.dtype} {list(found.shape)}, expected one F32 value.")
    value = found.data.reshape(()).item()
    if not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{found.file}: {name} is {value}, not a scale.")
    return value


def _nvfp4(stored: Mapping[str, Stored], prefix: str, weight: str, divisor: bool) -> Tensor:
    """element · block scale, exact in float32, then the tensor scale rounds once."""
    packed = stored[weight].data
    values = unpack_e2m1(packed)
    scale = stored[prefix + "weight_scale"]
    out, columns = values.shape
    _expect(scale, "F8_E4M3", (out, columns // 16), prefix + "weight_scale")
    values = values * E4M3[scale.data.long()].repeat_interleave(16, 1)
    if divisor:
        return values / _scalar(stored, prefix + "weight_global_scale")
    return values * _scalar(stored, prefix + "weight_scale_2")


def _mxfp4(stored: Mapping[str, Stored], prefix: str) -> Tensor:
    values = unpack_e2m1(stored[prefix + "weight_packed"].data)
    scale = stored[prefix + "weight_scale"].data
    if tuple(scale.shape) != (values.shape[0], values.shape[1] // 32):
        raise CheckpointError(
            f"{prefix}weight_scale: shape {list(scale.shape)}, expected {[values.shape[0], values.shape[1] // 32]}."
        )
    return values * E8M0[scale.long()].repeat_interleave(32, 1)


def _fp8_blocks(stored: Mapping[str, Stored], prefix: str) -> Tensor:
    """One multiplier per 128x128 block, in three dialects.

    FP8_PB_WO: rank-4 `weight_scale` or rank-2 `weight_scale_inv`, F32;
    compressed-tensors: rank-2 `weight_scale`, F32 or BF16.
    """
    codes = stored[prefix + "weight"]
    rows, columns = (math.ceil(n / 128) for n in codes.shape)
    found = [name for name in (prefix + "weight_scale", prefix + "weight_scale_inv") if name in stored]
    if not found:
        raise CheckpointError(
            f"{codes.file}: {prefix}weight is F8_E4M3 but has neither weight_scale nor weight_scale_inv."
        )
    entry = stored[found[0]]
    rank_2 = entry.data.ndim == 2
    dtype = "BF16" if rank_2 and entry.dtype == "BF16" else "F32"
    _expect(entry, dtype, (rows, columns) if rank_2 else (rows, 1, columns, 1), found[0])
    scale = entry.data.float().reshape(rows, columns)
    return E4M3[codes.data.long()] * spread(scale, codes.shape, 128, 128)


def _decode(stored: Mapping[str, Stored], name: str) -> tuple[str, Tensor] | None:
    """The plain name and float32 values of a stored weight; None for its scales."""
    prefix, _, suffix = name.rpartition(".")
    prefix += "."
    if suffix in _SCALES:
        return None
    entry = stored[name]
    if suffix == "weight_packed":
        if prefix + "weight_scale" not in stored:
            raise CheckpointError(f"{entry.file}: {prefix}weight_scale is missing.")
        if prefix + "weight_global_scale" in stored:
            return prefix + "weight", _nvfp4(stored, prefix, name, divisor=True)
        return prefix + "weight", _mxfp4(stored, prefix)
    if entry.dtype in _PLAIN:
        if prefix + "weight_scale" in stored and suffix == "weight":
            raise CheckpointError(f"{entry.file}: {name} is {entry.dtype} but has a weight_scale.")
        return name, entry.data.float()
    if suffix == "weight" and entry.dtype == "U8":
        if prefix + "weight_scale" not in stored:
            raise CheckpointError(f"{entry.file}: {prefix}weight_scale is missing.")
        return name, _nvfp4(stored, prefix, name, divisor=False)
    if suffix == "weight" and entry.dtype == "F8_E4M3":
        return name, _fp8_blocks(stored, prefix)
    raise CheckpointError(f"{entry.file}: {name} has dtype {entry.dtype}, unknown here.")


def _dequantise(stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    decoded = (_decode(stored, name) for name in stored)
    return dict(item for item in decoded if item is not None)


def dequantise(path: str | Path) -> dict[str, Tensor]:
    """Float32 values of every weight of a checkpoint, under plain names.

    Scales disappear and ``weight_packed`` becomes ``weight``. Reads plain BF16, F16,
    F32; NVFP4 of ModelOpt (``weight_scale_2`` multiplies) and of compressed-tensors
    (``weight_global_scale`` divides); MXFP4; FP8 in 128x128 blocks, three dialects.

    Raises:
        CheckpointError: Names, dtypes and shapes do not fit together.
    """
    return _dequantise(read_tensors(path))


def write_dequantised(src: str | Path, dst: str | Path, dtype: torch.dtype = torch.float32) -> None:
    """Write `src` as a plain checkpoint of its dequantised weights.

    Tokenizer and other files are copied, quantisation settings removed.

    Args:
        src: Checkpoint of any format that `dequantise` reads.
        dst: Folder to create.
        dtype: float32 is exact. bfloat16 is exact for NVFP4 with power-of-two tensor
            scales (six significant bits) and rounds FP8 blocks, whose scales are
            arbitrary float32; tensors stored as F32 stay float32 either way.
    """
    from safetensors.torch import save_file

    src, dst = Path(src), Path(dst)
    stored = read_tensors(src)
    dst.mkdir(parents=True)
    for file in src.iterdir():
        if file.suffix != ".safetensors" and file.name not in (
            "hf_quant_config.json",
            "model.safetensors.index.json",
        ):
            shutil.copy(file, dst)
    config = json.loads((src / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
        if part:
            part["dtype"] = str(dtype).removeprefix("torch.")
    (dst / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {}
    for name, values in _dequantise(stored).items():
        keep = name in stored and stored[name].dtype == "F32"
        tensors[name] = values.to(torch.float32 if keep else dtype).contiguous()
    save_file(tensors, dst / "model.safetensors", metadata={"format": "pt"})


# --- the model's parts ----------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """β·tanh(g/β)·σ(g) · λ·tanh(u/λ); without λ the up half is linear."""
    gate = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return gate * up


def short_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU: x [T, C], weight [C, 1, taps]."""
    taps = weight.shape[-1]
    padded = torch.cat((x.new_zeros(taps - 1, x.shape[1]), x))
    windows = padded.unfold(0, taps, 1)  # [T, C, taps], the last tap is the present
    return torch.nn.functional.silu((windows * weight[:, 0]).sum(-1))


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def kda_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, one token after the other.

    Args:
        q, k: [T, H, K] before normalisation.
        v: [T, H, V].
        log_decay: [T, H, K], ≤ 0.
        beta: [T, H] in (0, 1).
        state: [H, V, K] before the first token; zero if None.

    Returns:
        Outputs [T, H, V] and the state after the last token [H, V, K].
    """
    tokens, heads, key = q.shape
    q, k = l2_norm(q) * key**-0.5, l2_norm(k)
    state = q.new_zeros(heads, v.shape[-1], key) if state is None else state
    decay = log_decay.exp()
    outputs = []
    for t in range(tokens):
        state = state * decay[t, :, None, :]
        correction = (v[t] - (state * k[t, :, None, :]).sum(-1)) * beta[t, :, None]
        state = state + correction[:, :, None] * k[t, :, None, :]
        outputs.append((state * q[t, :, None, :]).sum(-1))
    return torch.stack(outputs), state


def attn_res(sources: list[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Mix sources per token by softmax(s), s_i = (w_norm ⊙ w_proj)·x_i / rms(x_i).

    Args:
        sources: Finished block states, then the running prefix, each [T, hidden].
        norm_weight, proj_weight: [hidden].
    """
    x = torch.stack(sources)
    rms = (x.square().mean(-1) + eps).sqrt()
    scores = (x * (norm_weight * proj_weight)).sum(-1) / rms
    return (torch.softmax(scores, dim=0)[..., None] * x).sum(0)


def fp8_per_group(x: Tensor, group: int = 128) -> Tensor:
    """x rounded to e4m3 with one dynamic scale amax/448 per token and 128 columns."""
    tokens, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % group))
    groups = padded.reshape(tokens, -1, group)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448.0
    rounded = (groups / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
    return rounded.reshape(tokens, -1)[:, :columns]


# --- the model ------------------------------------------------------------------------


@dataclass
class Model:
    """A Kimi K3 text model with dequantised weights.

    Attributes:
        config: Text config as a plain dict.
        weights: Plain name without the multimodal prefix to values in the compute
            dtype; tests may change them.
        quantised: Names whose weight the file holds as FP8 blocks.
        fp8_activations: Round the input of those linears to e4m3 per token and 128
            columns, as W8A8 kernels for this format do. Off by default.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]
    quantised: set[str] = field(default_factory=set)
    fp8_activations: bool = False

    def __post_init__(self) -> None:
        c = self.config
        linear = c.get("linear_attn_config") or {}
        for what, ok in {
            "linear_attn_config.use_full_rank_gate": linear.get("use_full_rank_gate"),
            "linear_attn_config.gate_lower_bound": linear.get("gate_lower_bound"),
            "mla_use_nope": c.get("mla_use_nope"),
            "attn_res_block_size": c.get("attn_res_block_size"),
            "q_lora_rank": c.get("q_lora_rank"),
            "hidden_act 'situ'": c.get("hidden_act") == "situ",
        }.items():
            if not ok:
                raise CheckpointError(f"config: no {what}; this is not a Kimi K3.")
        groups = c.get("num_expert_group", 1), c.get("topk_group", 1)
        if groups != (1, 1) or c.get("moe_router_activation_func") != "sigmoid":
            raise CheckpointError("config: only one-group sigmoid routing is known.")
        self.eps: float = c["rms_norm_eps"]

    # Linears and norms by name.

    def _linear(self, name: str, x: Tensor) -> Tensor:
        name += ".weight"
        if self.fp8_activations and name in self.quantised:
            x = fp8_per_group(x)
        return x @ self.weights[name].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[name + ".weight"], self.eps)

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        return situ(
            gate,
            up,
            self.config["activation_situ_beta"],
            self.config.get("activation_situ_linear_beta"),
        )

    # What looks at more than one token; a batch of sequences would do these its own way.

    def _short_conv(self, x: Tensor, weight: Tensor) -> Tensor:
        return short_conv(x, weight)

    def _recurrence(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return kda_recurrence(q, k, v, log_decay, beta)[0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention: q, k [T, H, K], v [T, H, V] to [T, H, V]."""
        tokens = q.shape[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        probs = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        return torch.einsum("hqk,khd->qhd", probs, v)

    # Attention.

    def _kda(self, name: str, x: Tensor) -> Tensor:
        linear = self.config["linear_attn_config"]
        heads, dim = linear["num_heads"], linear["head_dim"]
        tokens = x.shape[0]
        q, k, v = (
            self._short_conv(
                self._linear(f"{name}.{p}_proj", x),
                self.weights[f"{name}.{p}_conv1d.weight"],
            ).view(tokens, heads, dim)
            for p in "qkv"
        )
        a_log = self.weights[f"{name}.A_log"].flatten()
        if a_log[heads:].any():
            raise CheckpointError(f"{name}.A_log: values beyond the {heads} heads must be zero.")
        a = self._linear(f"{name}.f_b_proj", self._linear(f"{name}.f_a_proj", x))
        a = (a + self.weights[f"{name}.dt_bias"]).view(tokens, heads, dim)
        log_decay = linear["gate_lower_bound"] * torch.sigmoid(a_log[:heads, None].exp() * a)
        beta = torch.sigmoid(self._linear(f"{name}.b_proj", x))
        out = self._recurrence(q, k, v, log_decay, beta)
        gate = torch.sigmoid(self._linear(f"{name}.g_proj", x)).view_as(out)
        out = self._norm(f"{name}.o_norm", out) * gate
        return self._linear(f"{name}.o_proj", out.reshape(tokens, -1))

    def _mla(self, name: str, x: Tensor) -> Tensor:
        c = self.config
        heads, rank = c["num_attention_heads"], c["kv_lora_rank"]
        nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        tokens = x.shape[0]
        c_q = self._norm(f"{name}.q_a_layernorm", self._linear(f"{name}.q_a_proj", x))
        kv_a = self._linear(f"{name}.kv_a_proj_with_mqa", x)
        c_kv = self._norm(f"{name}.kv_a_layernorm", kv_a[:, :rank])
        q = self._linear(f"{name}.q_b_proj", c_q).view(tokens, heads, nope + rope)
        kv = self._linear(f"{name}.kv_b_proj", c_kv).view(tokens, heads, nope + value)
        k_pe = kv_a[:, None, rank:].expand(tokens, heads, rope)  # shared, not rotated
        k = torch.cat((kv[..., :nope], k_pe), dim=-1)
        out = self._attend(q, k, kv[..., nope:]).reshape(tokens, -1)
        if c.get("mla_use_output_gate"):
            out = out * torch.sigmoid(self._linear(f"{name}.g_proj", x))
        return self._linear(f"{name}.o_proj", out)

    # Feed-forward.

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate = self._linear(f"{name}.gate_proj", x)
        up = self._linear(f"{name}.up_proj", x)
        return self._linear(f"{name}.down_proj", self._situ(gate, up))

    def route(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """noaux_tc: the bias takes part in the choice, not in the weights.

        Args:
            name: MoE module, such as ``model.layers.1.block_sparse_moe``.
            x: [T, hidden].

        Returns:
            Weights float32 and expert ids int64, both [T, top_k].
        """
        c = self.config
        scores = torch.sigmoid(self._linear(f"{name}.gate", x))
        biased = scores + self.weights[f"{name}.gate.e_score_correction_bias"]
        ids = biased.topk(c["num_experts_per_token"], dim=-1).indices
        weights = scores.gather(1, ids)
        if c.get("moe_renormalize", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * c.get("routed_scaling_factor", 1.0), ids

    def _moe(self, name: str, x: Tensor) -> Tensor:
        c = self.config
        latent = c.get("routed_expert_hidden_size") is not None
        z = self._linear(f"{name}.routed_expert_down_proj", x) if latent else x
        weights, ids = self.route(name, x)
        mixed = torch.zeros_like(z)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            part = f"{name}.experts.{expert}"
            hidden = self._situ(
                self._linear(f"{part}.w1", z[token]),
                self._linear(f"{part}.w3", z[token]),
            )
            out = self._linear(f"{part}.w2", hidden) * weights[token, slot, None]
            mixed.index_add_(0, token, out)
        if latent:
            if c.get("latent_moe_use_norm"):
                mixed = self._norm(f"{name}.routed_expert_norm", mixed)
            mixed = self._linear(f"{name}.routed_expert_up_proj", mixed)
        if c.get("num_shared_experts"):
            mixed = mixed + self._mlp(f"{name}.shared_experts", x)
        return mixed

    # Layers.

    def _mix(self, name: str, sources: list[Tensor]) -> Tensor:
        return attn_res(
            sources,
            self.weights[f"{name}_norm.weight"],
            self.weights[f"{name}_proj.weight"].flatten(),
            self.eps,
        )

    def hidden_states(self, token_ids: list[int]) -> Tensor:
        """Final hidden states [T, hidden], before the last norm."""
        c = self.config
        prefix = self.weights["model.embed_tokens.weight"][torch.as_tensor(token_ids)]
        blocks: list[Tensor] = []
        for index in range(c["num_hidden_layers"]):
            name = f"model.layers.{index}"
            x = self._mix(f"{name}.self_attention_res", [*blocks, prefix])
            x = self._norm(f"{name}.input_layernorm", x)
            kda = index + 1 in c["linear_attn_config"]["kda_layers"]
            x = (self._kda if kda else self._mla)(f"{name}.self_attn", x)
            if index % c["attn_res_block_size"] == 0:
                # A block starts: what came before is finished and becomes a source.
                blocks.append(prefix)
                prefix = x
            else:
                prefix = prefix + x
            x = self._mix(f"{name}.mlp_res", [*blocks, prefix])
            x = self._norm(f"{name}.post_attention_layernorm", x)
            moe = index >= c.get("first_k_dense_replace", 0) and index % c.get("moe_layer_freq", 1) == 0
            x = self._moe(f"{name}.block_sparse_moe", x) if moe else self._mlp(f"{name}.mlp", x)
            prefix = prefix + x
        return self._mix("model.output_attn_res", [*blocks, prefix])

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int]) -> Tensor:
        """Log-probabilities [T, vocab]; row t predicts the token after `token_ids[t]`.

        Raises:
            ValueError: `token_ids` is empty.
        """
        if not token_ids:
            raise ValueError("logprobs needs at least one token.")
        hidden = self._norm("model.norm", self.hidden_states(token_ids))
        return torch.log_softmax(self._linear("lm_head", hidden), dim=-1)

    def greedy(self, prompt_ids: list[int], n: int) -> list[int]:
        """`n` most likely tokens after `prompt_ids`, each from a full forward pass."""
        ids = list(prompt_ids)
        for _ in range(n):
            ids.append(int(self.logprobs(ids)[-1].argmax()))
        return ids[len(prompt_ids) :]


def load(
    path: str | Path,
    *,
    fp8_activations: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Read a checkpoint of either class into a `Model`.

    Args:
        path: Checkpoint folder.
        fp8_activations: See `Model`.
        dtype: Compute dtype; float64 shows how far float32 rounding alone carries.

    Raises:
        CheckpointError: Not a Kimi K3, or tensors that do not fit together.
    """
    config = json.loads((Path(path) / "config.json").read_text())
    config = config.get("text_config", config)
    stored = read_tensors(path)

    def strip(name: str) -> str:
        return name.removeprefix("language_model.")

    weights = {
        strip(name): values.to(dtype)
        for name, values in _dequantise(stored).items()
        if not name.startswith(("vision_tower.", "mm_projector."))
    }
    quantised = {strip(name) for name, entry in stored.items() if entry.dtype == "F8_E4M3" and name.endswith(".weight")}
    return Model(config, weights, quantised, fp8_activations)
