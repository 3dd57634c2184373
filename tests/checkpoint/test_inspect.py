# SPDX-License-Identifier: Apache-2.0
"""`vllm checkpoint inspect`: counts, bytes and verdicts against naive ones; faults found; the page; exit codes."""

import copy
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.checkpoint import synthetic
from tests.checkpoint.test_preflight import edit_config, edit_tensors
from vllm.checkpoint import gpus, tiny
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.gpus import GPUS
from vllm.checkpoint.headers import read_headers
from vllm.checkpoint.model import read_model
from vllm.checkpoint.page import page
from vllm.checkpoint.ranks import Deployment, landings, stages
from vllm.checkpoint.report import build
from vllm.checkpoint.scan import scan_scales

pytest.importorskip("modelopt", reason="writes a quantised checkpoint: pip install 'vllm[quantize]'")

FORMATS = {
    "bf16": {},
    "nvfp4-modelopt": dict(format="nvfp4-modelopt"),
    "nvfp4-ct-fp8": dict(format="nvfp4-ct", attention="fp8"),
    "mxfp4": dict(format="mxfp4", arch="multimodal"),
    "fp8-block-ct": dict(format="fp8-block-ct"),
}
KDA, MLA = "model.layers.0.self_attn", "model.layers.2.self_attn"
EXPERTS = "model.layers.1.block_sparse_moe.experts"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name, options in FORMATS.items():
        tiny.make_tiny(folder / name, seed=1, **options)
    return folder


@pytest.fixture
def folder(files, tmp_path):
    return shutil.copytree(files / "nvfp4-modelopt", tmp_path / "bad")


def inspect(folder, *deployment, gpu=None):
    return build(read_model(folder), read_headers(folder), Deployment(*deployment), gpu)


def tensors_of(folder):
    return {k: v for shard in sorted(folder.glob("*.safetensors")) for k, v in load_file(shard).items()}


# --- what there is --------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_counts_and_bytes_are_those_of_the_files(files, name):
    tensors = tensors_of(files / name)
    report = inspect(files / name)
    assert (report.exit_code, report.problems) == (0, [])
    assert report.tensors == len(tensors) == sum(kind.tensors for kind in report.kinds.values())
    assert report.bytes == sum(t.nbytes for t in tensors.values()) == sum(k.bytes for k in report.kinds.values())
    for kind, pattern in {
        "expert.w2": r"experts\.\d+\.w2\.",
        "kda.b_proj": r"\.b_proj\.",
        "mla.kv_a_proj_with_mqa": r"kv_a_proj_with_mqa\.",
        "shared.down_proj": r"shared_experts\.down_proj",
    }.items():
        found = {n: t for n, t in tensors.items() if re.search(pattern, n)}
        assert report.kinds[kind].tensors == len(found) > 0
        assert report.kinds[kind].bytes == sum(t.nbytes for t in found.values())
    # Two values per byte of codes; whatever names a scale is none.
    scale = re.compile(r"_scale(_2|_inv)?$")
    values = sum(
        t.numel() * (2 if t.dtype == torch.uint8 else 1) for n, t in tensors.items() if not scale.search(n)
    )
    surplus = sum(t.numel() // 2 for n, t in tensors.items() if n.endswith("A_log"))  # 8 for 4 heads
    assert report.parameters == values - surplus


@pytest.mark.parametrize(
    "name, experts, attention, dialect",
    [
        ("bf16", "BF16", "BF16", {}),
        ("nvfp4-modelopt", "NVFP4", "FP8_PB_WO", {"rank-4 weight_scale": 3}),
        ("nvfp4-ct-fp8", "NVFP4", "FP8_BLOCK", {"compressed-tensors": 3}),
        ("mxfp4", "MXFP4", "BF16", {}),
        ("fp8-block-ct", "BF16", "FP8_BLOCK", {"compressed-tensors": 3}),
    ],
)
def test_formats_and_dialects_by_kind(files, name, experts, attention, dialect):
    report = inspect(files / name)
    assert report.kinds["expert.w1"].formats == {experts: 24}
    assert report.kinds["kda.q_proj"].formats == {attention: 3}
    assert report.kinds["kda.q_proj"].dialects == dialect
    assert report.kinds["lm_head"].formats == {"BF16": 1} and report.kinds["kda.conv1d"].formats == {"F32": 9}
    assert set(report.fused) == {"in_proj_qkvgfab", "fused_qkv_a_proj", "gate_up_proj"}
    assert all(row.mixed == 0 for row in report.fused.values())
    assert report.fused["in_proj_qkvgfab"].formats == {attention: 18}
    assert report.grid["1"]["block_sparse_moe.experts.w1"] == experts
    assert report.grid["2"]["self_attn.q_a_proj"] == attention and "self_attn.q_a_proj" not in report.grid["1"]


def test_names_in_the_config_are_counted_by_spelling(files):
    config = json.loads((files / "nvfp4-modelopt" / "config.json").read_text())
    keys = config["quantization_config"]["quantized_layers"]
    aliases = inspect(files / "nvfp4-modelopt").aliases
    assert aliases["mlp"] == sum(".mlp." in key or key.startswith("mlp.") for key in keys) > 0
    assert aliases["block_sparse_moe"] == sum("block_sparse_moe" in key for key in keys) > 0
    assert aliases["no root"] == sum(key.startswith("layers.") for key in keys) > 0
    assert aliases["fused name"] == sum(key.endswith(("in_proj_qkvgfab", "fused_qkv_a_proj")) for key in keys) == 4


# --- what is wrong --------------------------------------------------------------------


def test_a_fused_module_whose_shards_are_stored_unalike(folder):
    """PUBLIC_CASES 5: b_proj is BF16 on disk, whatever the config says."""

    def change(tensors):
        for layer in (0, 1):
            del tensors[f"model.layers.{layer}.self_attn.b_proj.weight_scale"]
            tensors[f"model.layers.{layer}.self_attn.b_proj.weight"] = torch.zeros(4, 512, dtype=torch.bfloat16)

    edit_tensors(folder, change)
    report = inspect(folder)
    assert (report.fused["in_proj_qkvgfab"].alike, report.fused["in_proj_qkvgfab"].mixed) == (1, 2)
    assert report.kinds["kda.b_proj"].formats == {"BF16?": 2, "FP8_PB_WO": 1}
    assert report.kinds["kda.b_proj"].config == {"FP8_PB_WO": 3}
    assert report.counts == {"dtype": 2, "missing": 2} and report.exit_code == 2
    assert report.grid["0"]["self_attn.b_proj"] == "BF16?"


def test_a_fused_module_that_the_config_lists_in_part(folder):
    """PUBLIC_CASES 11, of ModelOpt: found before loading, for every layer that has it."""
    (folder / "hf_quant_config.json").unlink()

    def change(config):
        layers = config["quantization_config"]["quantized_layers"]
        for name in [n for n in layers if n.endswith(("q_a_proj", "fused_qkv_a_proj"))]:
            del layers[name]

    edit_config(folder, change)
    report = inspect(folder)
    assert any("fused_qkv_a_proj: quantized_layers lists" in error for error in report.errors)


def test_an_expert_stored_in_another_format_than_its_bank(folder):
    def change(tensors):
        for part in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{EXPERTS}.5.w1.{part}"]
        tensors[f"{EXPERTS}.5.w1.weight"] = torch.zeros(128, 256, dtype=torch.bfloat16)

    edit_tensors(folder, change)
    report = inspect(folder)
    assert report.kinds["expert.w1"].formats == {"NVFP4": 23, "BF16?": 1}
    assert report.grid["1"]["block_sparse_moe.experts.w1"] == "mixed"


def test_draft_layers_are_counted_and_no_fault(folder):
    """PUBLIC_CASES 39."""
    edit_tensors(folder, lambda t: t.update({"model.layers.4.self_attn.q_proj.weight": torch.zeros(2)}))
    report = inspect(folder)
    assert report.draft_tensors == 1 and report.exit_code == 0


def test_a_method_that_is_not_described_is_a_warning(files, tmp_path):
    folder = shutil.copytree(files / "bf16", tmp_path / "awq")
    edit_config(folder, lambda c: c.update(quantization_config={"quant_method": "awq"}))
    report = inspect(folder)
    assert report.exit_code == 1 and "quant_method awq is not described here" in report.problems[0].text


def test_many_faults_are_counted_and_few_are_kept(folder):
    edit_config(folder, lambda c: c.update(num_experts=20_000))
    report = inspect(folder)
    assert report.counts["missing"] > 200_000 and len(report.problems) < 1000
    with pytest.raises(CheckpointError, match="'num_experts' is 20001; expected a number up to 20000"):
        edit_config(folder, lambda c: c.update(num_experts=20_001))
        inspect(folder)


# --- ranks ----------------------------------------------------------------------------

# By name, how a rank's share of a tensor is cut; everything else is whole.
ROWS = r"self_attn\.(q|k|v|g|b|f_b|q_b|kv_b)_proj|[qkv]_conv1d|A_log|dt_bias|(gate|up)_proj|embed_tokens|lm_head"
COLUMNS = r"self_attn\.o_proj|\.down_proj"


def naive_bytes(folder, tp, ep, heads=4, absorbed=True):
    """What the fullest rank holds of a BF16 checkpoint, tensor by tensor."""
    most = 0
    for rank in range(tp):
        total = 0
        for name, tensor in tensors_of(folder).items():
            if name.endswith("A_log"):
                tensor = tensor[:heads]
            expert = re.search(r"experts\.(\d+)\.(w\d)", name)
            if expert and ep:
                part = tensor if int(expert[1]) % tp == rank else tensor[:0]
            elif expert:
                part = tensor.chunk(tp, 1 if expert[2] == "w2" else 0)[rank]
            elif re.search(ROWS, name) and "routed_expert" not in name:
                part = tensor.chunk(tp, 0)[rank]
            elif re.search(COLUMNS, name) and "routed_expert" not in name:
                part = tensor.chunk(tp, 1)[rank]
            else:
                part = tensor
            total += part.numel() * part.element_size()
            if absorbed and "kv_b_proj" in name:
                total += part.numel() * 2
        most = max(most, total)
    return most


@pytest.mark.parametrize("tp, ep", [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_bytes_per_rank_are_those_of_its_slices(files, tp, ep):
    (stage,) = inspect(files / "bf16", tp, 1, ep).stages
    assert stage.total == naive_bytes(files / "bf16", tp, ep)


def test_pipeline_stages_share_the_layers(files):
    """MLA's cache lies where its layers are; embedding first, head last."""
    first, second = inspect(files / "bf16", 1, 2).stages
    assert (first.layers, second.layers) == ((0, 2), (2, 4))
    assert first.total + second.total == naive_bytes(files / "bf16", 1, False)
    assert first.bytes["embedding"] and not first.bytes["lm_head"] and second.bytes["lm_head"]
    assert (first.cache_per_token, second.cache_per_token) == (0, 2 * 576)
    # Three taps of q, k and v in BF16, and heads of 128 x 128 in float32.
    state = 2 * 3 * 3 * 512 + 4 * 4 * 128 * 128
    assert (first.state_per_request, second.state_per_request) == (2 * state, state)


def k3_model(tmp_path_factory, format="nvfp4-modelopt"):
    folder = tmp_path_factory.mktemp("k3")
    config = tiny.model_config(synthetic.K3, "text")
    specs = synthetic.checkpoint_tensors(config, experts=1)
    config["quantization_config"] = synthetic.modelopt.quantization_config(specs)
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder)


@pytest.fixture(scope="module")
def k3(tmp_path_factory):
    return k3_model(tmp_path_factory)


@pytest.mark.parametrize("tp, rows", [(1, 49376), (2, 24752), (4, 12440), (8, 6284), (16, 3206), (32, 1667)])
def test_k3_rows_per_rank_and_their_padding(k3, tp, rows):
    """The published sizes: b_proj has a block to itself, and kv_a ends half-way through one."""
    found = {landing.module: landing for landing in landings(k3, Deployment(tp))}
    kda, mla = found["kda.in_proj_qkvgfab"], found["mla.fused_qkv_a_proj"]
    assert (kda.shape[0], kda.modules, mla.shape[0], mla.modules) == (rows, 69, 2112, 24)
    wide = 12288 // tp
    assert kda.padding[0] == (128 - 96 // tp) + 4 * (-wide % 128) and kda.verdict == "padded"
    assert mla.padding == (64, 0)
    # 576 rows of 4.5 blocks: every second rank starts inside one.
    q_b = found["mla.q_b_proj"]
    assert (q_b.verdict, q_b.padding[0]) == (("padded", 64) if tp == 32 else ("exact", 0))


def test_k3_has_the_published_sizes(k3):
    (stage,) = stages(k3, Deployment(8, 1, True))
    experts = 92 * 112 * 3 * (3072 * 3584 // 2 + 3072 * 3584 // 16 + 8)
    assert stage.bytes["expert"] == experts
    assert stage.cache_per_token == 24 * 576 * 2
    assert stage.state_per_request == 69 * (2 * 3 * 3 * 1536 + 4 * 1536 * 128)


def test_columns_that_ranks_cannot_share_are_refused(k3):
    found = {landing.module: landing for landing in landings(k3, Deployment(7))}
    assert found["kda.o_proj"].verdict == "refused" and "7 ranks cannot share 12288 columns" in found["kda.o_proj"].why
    assert found["kda.in_proj_qkvgfab"].verdict == "refused"
    assert "tensor-parallel sizes that work" in found["kda.in_proj_qkvgfab"].why


@pytest.mark.parametrize(
    "deployment, message, code",
    [
        ((3, 1, False), "size 3 does not divide num_attention_heads = 4; sizes that do: [1, 2, 4]", 2),
        ((1, 5, False), "pipeline parallel size 5 exceeds num_hidden_layers = 4", 2),
        ((2, 1, True), None, 0),
    ],
)
def test_deployments_that_cannot_be(files, deployment, message, code):
    report = inspect(files / "nvfp4-modelopt", *deployment)
    assert report.exit_code == code
    assert message is None or any(message in error for error in report.errors)
    assert not [error for error in report.errors if "cannot share" in error]  # that would follow, layer by layer


@pytest.mark.parametrize("tp, ep, width", [(8, False, 384), (16, False, 256), (16, True, 3072), (32, False, 256)])
def test_padded_expert_width_is_a_warning(tmp_path, tp, ep, width):
    """PUBLIC_CASES 21: at width 3072, 16 ranks hold 192 each, which the model pads to 256."""
    shape = tiny.TinyShape(**{**synthetic.K3.__dict__, "layers": "KM", "experts": 32, "dense_width": 512, "vocab": 512})
    synthetic.write(tmp_path / "k3", "nvfp4-modelopt", 2, shape)
    report = inspect(tmp_path / "k3", tp, 1, ep)
    per_weight = width * 3584 // 2 + width * 3584 // 16 + 8
    assert report.stages[0].bytes["expert"] == (32 // tp if ep else 32) * 3 * per_weight
    padded = 3072 // tp < 256 and not ep
    assert report.exit_code == padded
    if padded:
        assert f"{3072 // tp} of 3072 columns per rank are padded to 256" in report.problems[0].text


def test_room_on_a_gpu(files, monkeypatch):
    report = inspect(files / "nvfp4-modelopt", 2, gpu="h200")
    (room,), (stage,) = report.rooms, report.stages
    assert room.usable == int(143771 * 0.92) << 20 and room.left == room.usable - stage.total
    assert room.tokens == room.left // stage.cache_per_token
    monkeypatch.setitem(gpus.GPUS, "b200", gpus.Gpu(5, 100))
    report = inspect(files / "nvfp4-modelopt", 2, gpu="b200")
    assert report.exit_code == 2 and "weights take 0.0 GiB per rank" in report.errors[0]


# --- kernels --------------------------------------------------------------------------


def test_kernels_are_the_first_that_the_engine_would_try(monkeypatch):
    """Its own priority lists, asked for one GPU after the other, with what the wheel brings installed."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.hopper_block_fp8 import HopperFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4, nvfp4
    from vllm.platforms import PlatformEnum
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(mxfp4.current_platform, "is_cpu", lambda: False)
    orders = {
        "NVFP4": [nvfp4.NvFp4MoeBackend[n] for n in ("FLASHINFER_TRTLLM", "VLLM_CUTLASS", "SITU_SM90", "MARLIN")],
        "MXFP4": mxfp4._get_priority_backends(),
    }
    oracles = {"NVFP4": nvfp4, "MXFP4": mxfp4}

    class Cuda:
        def __init__(self, capability):
            self.capability = DeviceCapability(capability // 10, capability % 10)

        def is_cuda(self):
            return True

        def is_cpu(self):
            return False

        def is_rocm(self):
            return False

        def is_xpu(self):
            return False

        def is_device_capability(self, capability):
            return self.capability.to_int() == capability

        def has_device_capability(self, least):
            least = least[0] * 10 + least[1] if isinstance(least, tuple) else least
            return self.capability.to_int() >= least

        def is_device_capability_family(self, family):
            return self.capability.to_int() // 10 == family // 10

    def patch(kernel, platform):
        module = sys.modules[kernel.__module__]
        if hasattr(module, "current_platform"):
            monkeypatch.setattr(module, "current_platform", platform)
        for name in ("has_flashinfer", "has_flashinfer_situ_activation", "has_flashinfer_trtllm_fused_moe"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: True)
        if hasattr(module, "is_deep_gemm_supported"):
            deep = platform.capability.major in (9, 10)
            monkeypatch.setattr(module, "is_deep_gemm_supported", lambda: deep)

    for gpu in GPUS.values():
        platform = Cuda(gpu.capability)
        for layout, order in orders.items():
            monkeypatch.setattr(oracles[layout], "current_platform", platform)
            chosen = None
            for backend in order:
                for kernel in oracles[layout].backend_to_kernel_cls(backend):
                    patch(kernel, platform)
                    if kernel._supports_current_device() and kernel._supports_activation(MoEActivation.SITU):
                        chosen = chosen or backend.name
            assert gpus.kernel(layout, gpu) == chosen, (layout, gpu)
        names = [kernel.__name__ for kernel in linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CUDA]]
        names += [HopperFp8BlockScaledMMKernel.__name__] * (gpu.capability == 90)
        # Before Hopper there is Marlin alone, which the layer refuses: it would round the scales.
        assert gpus.kernel("FP8_PB_WO", gpu) in (names if gpu.capability >= 90 else ["none"])
    assert gpus.kernel("some layout", GPUS["h200"]) == "unknown" and gpus.kernel(None, GPUS["h200"]) == "torch"


# --- scales ---------------------------------------------------------------------------


def scanned(folder, monkeypatch=None):
    model, entries = read_model(folder), read_headers(folder)
    report = build(model, entries)
    scan_scales(model, entries, report, progress=False)
    return report


E4M3 = torch.float8_e4m3fn


def plant(name, at, value):
    def change(tensors):
        tensor = tensors[name]
        flat = tensor.view(torch.uint8).view(-1) if tensor.dtype in (E4M3, torch.uint8) else tensor.view(-1)
        flat[at] = value

    return change


SCALE, SCALE_2, BLOCK = f"{EXPERTS}.3.w2.weight_scale", f"{EXPERTS}.3.w2.weight_scale_2", f"{KDA}.q_proj.weight_scale"
INPUT = f"{EXPERTS}.6.w1.input_scale"
PLANTED = {
    "e4m3 NaN": (plant(SCALE, 17, 0x7F), f"{SCALE} in .*: 1 of 2048 scales are NaN"),
    "e4m3 negative NaN": (plant(SCALE, 2047, 0xFF), f"{SCALE} in .*: 1 of 2048 scales are NaN"),
    "e4m3 negative": (plant(SCALE, slice(3, 6), 0xB8), f"{SCALE} in .*: 3 of 2048 scales are negative"),
    "e4m3 zero": (plant(SCALE, 5, 0), None),
    "e4m3 negative zero": (plant(SCALE, 5, 0x80), None),
    "block scale NaN": (plant(BLOCK, 2, math.nan), f"{BLOCK} in .*: 1 of 16 scales are NaN"),
    "block scale infinite": (plant(BLOCK, 2, math.inf), f"{BLOCK} in .*: 1 of 16 scales are infinite"),
    "block scale negative": (plant(BLOCK, 2, -1.0), f"{BLOCK} in .*: 1 of 16 scales are negative"),
    "block scale zero": (plant(BLOCK, 2, 0.0), None),
    "tensor scale zero": (plant(SCALE_2, 0, 0.0), f"{SCALE_2} in .*: 1 of 1 scales are zero"),
    "tensor scale NaN": (plant(SCALE_2, 0, math.nan), f"{SCALE_2} in .*: 1 of 1 scales are NaN"),
    "input scale infinite": (plant(INPUT, 0, math.inf), f"{INPUT} in .*: 1 of 1 scales are infinite"),
    "A_log with a tail": (plant(f"{KDA}.A_log", 6, 1.0), f"{KDA}.A_log in .*: 8 values for 4 heads.*not zero"),
}


@pytest.mark.parametrize("chunk", [4 << 20, 5])
@pytest.mark.parametrize("case", PLANTED)
def test_impossible_scales_are_found(folder, monkeypatch, case, chunk):
    """PUBLIC_CASES 22 and 30. Pieces of 5 bytes would cut a float32 in two, so those are read by fours."""
    monkeypatch.setattr("vllm.checkpoint.scan.CHUNK", max(4, chunk // 4 * 4))
    change, message = PLANTED[case]
    edit_tensors(folder, change)
    report = scanned(folder)
    if message is None:
        assert report.exit_code == 0 and report.scales["weight_scale"].zero == 1
    else:
        assert report.exit_code == 2 and len(report.errors) == 1
        assert re.search(message, report.errors[0]), report.errors


@pytest.mark.parametrize("name", ["nvfp4-modelopt", "nvfp4-ct-fp8", "mxfp4"])
def test_scale_counts_and_exponents_against_naive_ones(files, name):
    report = scanned(files / name)
    assert report.exit_code == 0
    found = {}
    for key, tensor in tensors_of(files / name).items():
        leaf = key.rpartition(".")[2]
        if leaf.endswith(("scale", "scale_2")):
            values = torch.exp2(tensor.double() - 127) if tensor.dtype == torch.uint8 else tensor.double()
            found.setdefault(leaf, []).append(values.flatten())
    assert set(found) == set(report.scales)
    for leaf, parts in found.items():
        values = torch.cat(parts)
        scales = report.scales[leaf]
        assert (scales.tensors, scales.values) == (len(parts), values.numel())
        assert scales.zero == int((values == 0).sum())
        exponents = torch.frexp(values[values != 0])[1] - 1
        assert scales.exponents == (int(exponents.min()), int(exponents.max()))


@pytest.mark.parametrize("format", ["nvfp4-modelopt", "nvfp4-ct"])
@pytest.mark.parametrize("ratio, code", [(1.0, 0), (4.0, 0), (0.25, 0), (1.25, 1)])
def test_ratios_of_tensor_scales(tmp_path, shape, format, ratio, code):
    """PUBLIC_CASES 29: a power of two is exact, others are rounded and reported."""
    tiny.make_tiny(tmp_path / "c", format=format, shape=shape, w3_scale_ratio=ratio)
    report = scanned(tmp_path / "c")
    assert {float(key): count for key, count in report.w3_over_w1.items()} == {ratio: 4 * 3}
    assert report.exit_code == code
    if code:
        assert "12 experts: the tensor scales of w1 and w3 differ by no power of two" in report.problems[0].text


def test_scanning_reads_scales_alone_and_in_small_pieces(files, monkeypatch):
    import os

    read, pread = [], os.pread
    monkeypatch.setattr("vllm.checkpoint.scan.CHUNK", 1000)
    monkeypatch.setattr(os, "pread", lambda fd, n, at: read.append(n) or pread(fd, n, at))
    scanned(files / "nvfp4-modelopt")
    wanted = [t.nbytes for n, t in tensors_of(files / "nvfp4-modelopt").items() if "_scale" in n or "A_log" in n]
    assert max(read) == 1000 and sum(read) == sum(wanted)


# --- the page and the command ---------------------------------------------------------


class Parsed(HTMLParser):
    VOID = ("meta",)

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], [], []
        self.feed(text)
        assert self.open == [] or self.open == ["html"], self.open

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_needs_nothing_else(folder):
    evil = "<script>alert(1)</script>"
    edit_tensors(folder, lambda t: t.update({evil: torch.zeros(1)}))
    report = inspect(folder, 2, 2, gpu="h200")
    text = page(report)
    parsed = Parsed(text)
    assert not any(tag in ("script", "link", "img", "iframe") for tag, _ in parsed.seen)
    assert not re.search(r"https?:|url\(|@import|src=|href=", text)
    assert evil in "".join(parsed.text) and evil not in text
    assert text.index("the model has no such tensor") < text.index("What each layer is made of")
    cells = sum(len(modules) for modules in report.grid.values())
    bars = sum(1 for _ in report.stages) * len({f for s in report.stages for f in s.bytes})
    assert sum(tag == "rect" for tag, _ in parsed.seen) == cells + bars
    assert "will not load" in text and "layers 0–1" in text and "92 % of one h200" in text


def run(*arguments):
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "checkpoint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_prints_the_table_and_exits_by_the_worst(files, folder, tmp_path):
    done = run("inspect", files / "nvfp4-modelopt", "--tp", 2, "--gpu", "b200", "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    for text in ("clean", "expert.w2", "rank-4 weight_scale", "kda.in_proj_qkvgfab", "126 rows", "FLASHINFER_TRTLLM"):
        assert text in done.stdout, text
    assert "clean" in (tmp_path / "page.html").read_text()
    edit_tensors(folder, lambda t: t.pop(f"{EXPERTS}.3.w2.weight_scale"))
    done = run("inspect", folder, "--json", "--scan-scales")
    report = json.loads(done.stdout)
    assert done.returncode == 2 == report["exit_code"]
    assert report["kinds"]["expert.w2"]["formats"] == {"NVFP4": 23, "U8?": 1} and report["counts"] == {"missing": 1}
    assert report["stages"][0]["total"] > 0 and report["scales"]["weight_scale_2"]["tensors"] == 72
    (problem,) = report["problems"]
    assert problem["sort"] == "missing" and f"{EXPERTS}.3.w2.weight_scale" in problem["text"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("inspect", "nowhere"), "nowhere/config.json: cannot be opened"),
        (("convert", "nowhere", "out", "--to", "bf16"), "nowhere/config.json: cannot be opened"),
        (("inspect", "x", "--tp", "0"), "argument --tp: 0 is not between 1 and 4096"),
    ],
)
def test_the_command_refuses_in_one_message(tmp_path, arguments, message):
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_the_command_starts_without_a_compiler():
    """Nobody else does: the engine's patch of Inductor is in place in this process."""
    command = ["-X", "importtime", "-m", "vllm.entrypoints.cli.main", "checkpoint", "inspect", "nowhere"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert "vllm.checkpoint.headers" in done.stderr and "torch._inductor.lowering" not in done.stderr
    assert getattr(sys.modules["torch._inductor.lowering"].FALLBACK_ALLOW_LIST, "_vllm_patched", False)


# --- hostile configs ------------------------------------------------------------------

VALUES = st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=4) | st.lists(
    st.integers(-1, 9), max_size=3) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(list(FORMATS)))
def test_any_config_is_read_or_refused(files, tmp_path, data, name):
    """One or two values of a real config replaced by anything."""
    config = copy.deepcopy(json.loads((files / name / "config.json").read_text()))
    for _ in range(data.draw(st.integers(1, 2))):
        part = config
        while True:
            key = data.draw(st.sampled_from(sorted(part)))
            if isinstance(part[key], dict) and part[key] and data.draw(st.booleans()):
                part = part[key]
            else:
                part[key] = data.draw(VALUES)
                break
    (tmp_path / "config.json").write_text(json.dumps(config))
    entries = read_headers(files / name)
    try:
        build(read_model(tmp_path), entries, Deployment(2, 2), "h200").as_json()
    except CheckpointError:
        pass


def test_the_library_opens_what_the_generator_writes(tmp_path):
    """So that the speed figure is about real headers."""
    shape = tiny.TinyShape(hidden=256, heads=2, experts=4, vocab=320)
    for format in ("mxfp4", "nvfp4-modelopt"):
        written = synthetic.write(tmp_path / format, format, 5, shape)
        names = set()
        for shard in (tmp_path / format).glob("*.safetensors"):
            with safe_open(shard, "pt") as file:
                names |= set(file.keys())
        assert written["tensors"] == len(names) and inspect(tmp_path / format).exit_code == 0
