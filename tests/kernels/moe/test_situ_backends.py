# SPDX-License-Identifier: Apache-2.0
"""SiTU in every expert backend: it arrives with both constants, or the backend is refused by name."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.moe.test_cpu_compressed_experts import MxBank, compressed_mxfp4, compressed_nvfp4, divided
from tests.kernels.moe.test_cpu_experts import BETA, LINEAR_BETA, Bank, decode, load, make_layer, nvfp4, run
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_oracle
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as nvfp4_oracle
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.model_executor.layers.quantization.utils.flashinfer_fp4_moe import reorder_w1w3_to_w3w1
from vllm.platforms import current_platform

ON_CPU = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernels")


# ---- refused ---------------------------------------------------------------------------


@ON_CPU
@pytest.mark.parametrize("name", ["flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_b12x", "flashinfer_trtllm"])
def test_a_backend_without_situ_is_refused_by_name(one_rank, monkeypatch, name):
    """PUBLIC_CASES 25: on a device that could run it, it is the activation that rules it out."""
    backend = nvfp4_oracle.map_nvfp4_backend(name)
    for cls in nvfp4_oracle.backend_to_kernel_cls(backend):
        monkeypatch.setattr(cls, "_supports_current_device", staticmethod(lambda: True))
    with pytest.raises(ValueError, match=rf"'{backend.value}' does not support .*MoEActivation.SITU activation"):
        make_layer(one_rank, 2, 64, 32, quant=nvfp4(), backend=name)


# ---- taken by a common function ----------------------------------------------------------


def classes_that_take_situ():
    """Expert classes that say yes, and leave the activation to vLLM's kernel."""
    found = {}
    for oracle, backends in (
        (nvfp4_oracle, nvfp4_oracle.NvFp4MoeBackend),
        (mxfp4_oracle, mxfp4_oracle.Mxfp4MoeBackend),
    ):
        for backend in backends:
            if backend.value in ("None", "CPU"):
                continue
            for cls in oracle.backend_to_kernel_cls(backend):
                if cls._supports_activation(MoEActivation.SITU) and issubclass(cls, mk.FusedMoEExpertsModular):
                    found[cls.__name__] = cls
    return found


def test_constants_reach_the_activation_kernel(monkeypatch):
    """PUBLIC_CASES 27: beta 4 and linear beta 25 for each class, from the layer's configuration."""
    if current_platform.is_cpu():  # where the oracle offers the CPU's emulation in place of the GPU's
        monkeypatch.setattr(nvfp4_oracle, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    classes = classes_that_take_situ()
    assert {"MarlinExperts", "CutlassExpertsFp4", "HummingGroupedExperts"} <= set(classes)
    moe = SimpleNamespace(
        swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None, activation_situ_beta=BETA,
        activation_situ_linear_beta=LINEAR_BETA,
    )  # fmt: skip
    quant = SimpleNamespace(gemm1_clamp_limit=None, gemm1_alpha=None, gemm1_beta=None)
    calls = []
    monkeypatch.setattr(torch.ops._C, "situ_and_mul", lambda *args: calls.append(args), raising=False)
    output, gate_up = torch.empty(1, 2), torch.tensor([[6.0, 6.0, 30.0, 30.0]])
    for name, cls in classes.items():
        experts = object.__new__(cls)
        experts.activation_config = ApplyMoEActivationConfig.from_configs(moe, quant)
        experts.activation(MoEActivation.SITU, output, gate_up)
        (got_output, got_input, *constants), = calls
        assert got_output is output and got_input is gate_up and constants == [BETA, LINEAR_BETA], name
        calls.clear()


# ---- run on this host ------------------------------------------------------------------------


def worked_tensors(bank):
    """Gate is x[0], up is x[0] + x[1]: codes 2 are 1.0, and so are all scales."""
    for (expert, shard), tensors in bank.tensors.items():
        packed = torch.zeros_like(tensors[0])
        packed[0, 0] = 0x22 if shard == "w3" else 0x02
        if len(tensors) == 2:
            bank.tensors[expert, shard] = packed, torch.full_like(tensors[1], 127)
        else:
            ones = torch.ones(tensors[1].shape).to(torch.float8_e4m3fn)
            bank.tensors[expert, shard] = packed, ones, torch.tensor(1.0)
    return bank


LAYERS = {
    "ModelOpt NVFP4": (Bank, nvfp4, lambda bank: bank.file()),
    "compressed-tensors NVFP4": (Bank, compressed_nvfp4, divided),
    "MXFP4": (MxBank, Mxfp4Config, lambda bank: bank.file("weight")),
    "compressed-tensors MXFP4": (MxBank, compressed_mxfp4, lambda bank: bank.file("weight")),
}


@ON_CPU
@pytest.mark.parametrize("name", LAYERS)
def test_worked_value_in_every_format(one_rank, name):
    """PUBLIC_CASES 25: gate 6 and up 30 give 75.27; SwiGLU would give 179.55."""
    bank, quant, file = LAYERS[name]
    layer = make_layer(one_rank, 1, 64, 32, quant=quant(), top_k=1, dtype=torch.float32)
    load(layer, file(worked_tensors(bank(1, 64, 32))))
    x = torch.zeros(1, 64)
    x[0, :2] = torch.tensor([6.0, 24.0])
    got = run(layer, x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))[0, 0]
    assert got.item() == pytest.approx(75.27, abs=0.01)


# ---- order of the halves ---------------------------------------------------------------------


def test_halves_and_their_scales_change_places_together():
    """PUBLIC_CASES 28: for kernels that want [up; gate], a row keeps its own block scales."""
    bank = Bank(2, 64, 48, scales=lambda e, shard: 1.0)
    codes, scales = (
        torch.stack([torch.cat([bank.tensors[e, s][i].view(torch.uint8) for s in ("w1", "w3")]) for e in range(2)])
        for i in (0, 1)
    )
    got = reorder_w1w3_to_w3w1(codes, scales.view(torch.float8_e4m3fn))
    for e in range(2):
        want = torch.cat([bank.dense("w3")[e], bank.dense("w1")[e]])
        assert torch.equal(decode(got[0][e], got[1][e], 1.0), want)
