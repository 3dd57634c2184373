# SPDX-License-Identifier: Apache-2.0
"""The reference model is checked before anything is checked against it."""

import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.interpreter import run_interpreted
from tests.models.kimi_k3 import reference
from vllm.checkpoint.tiny import TinyShape, make_tiny

HERE = Path(__file__).parent
SMALL = TinyShape(
    hidden=128,
    heads=2,
    head_dim=32,
    q_lora=64,
    dense_width=128,
    experts=4,
    expert_width=64,
    latent=64,
    vocab=288,
)
PROMPT = [(7 * i * i + 3 * i) % SMALL.vocab for i in range(40)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "tiny"
    make_tiny(path, shape=SMALL, seed=1)
    return path


@pytest.fixture(scope="module")
def model(tiny) -> reference.Model:
    return reference.load(tiny)


# --- element formats ------------------------------------------------------------------


@pytest.mark.parametrize(
    "table, dtype",
    [
        (reference.E4M3, torch.float8_e4m3fn),
        (reference.E8M0, torch.float8_e8m0fnu),
    ],
)
def test_eight_bit_tables_agree_with_torch(table, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(dtype).float()
    assert torch.equal(table.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))


def test_e2m1_is_sign_two_exponent_bits_and_one_mantissa_bit():
    for code, value in enumerate(reference.E2M1.tolist()):
        exponent, mantissa = (code >> 1) & 3, code & 1
        magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
        assert value == math.copysign(magnitude, -1 if code & 8 else 1)


def test_low_nibble_is_the_even_column():
    # 0x2 is 1.0, 0x7 is 6.0.
    assert reference.unpack_e2m1(torch.tensor([[0x72]], dtype=torch.uint8)).tolist() == [[1.0, 6.0]]


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({k.replace("__", "."): v for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def random_nvfp4(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=gen, dtype=torch.uint8)
    scale = torch.exp2(torch.randint(-3, 4, (rows, columns // 16), generator=gen).float())
    return packed, scale


def test_nvfp4_multiplier_and_divisor_give_the_same_weight(tmp_path):
    packed, scale = random_nvfp4(3, 64)
    fp8 = scale.to(torch.float8_e4m3fn)
    modelopt = write(
        tmp_path / "a",
        x__weight=packed,
        x__weight_scale=fp8,
        x__weight_scale_2=torch.tensor(0.25),
        x__input_scale=torch.tensor(1.0),
    )
    compressed = write(
        tmp_path / "b",
        x__weight_packed=packed,
        x__weight_scale=fp8,
        x__weight_global_scale=torch.tensor([4.0]),
    )
    a, b = reference.dequantise(modelopt), reference.dequantise(compressed)
    assert set(a) == set(b) == {"x.weight"}
    assert torch.equal(a["x.weight"], b["x.weight"])
    # One element by hand: row 2, column 37 = high nibble of byte 18, block 2.
    code = int(packed[2, 18]) >> 4
    assert a["x.weight"][2, 37] == reference.E2M1[code] * scale[2, 2] * 0.25


def test_mxfp4_scales_are_powers_of_two_per_32_columns(tmp_path):
    packed, _ = random_nvfp4(2, 64)
    scale = torch.tensor([[127, 130], [120, 126]], dtype=torch.uint8)
    path = write(tmp_path / "c", x__weight_packed=packed, x__weight_scale=scale)
    got = reference.dequantise(path)["x.weight"]
    plain = reference.unpack_e2m1(packed)
    assert torch.equal(got[0, :32], plain[0, :32])
    assert torch.equal(got[0, 32:], plain[0, 32:] * 8)
    assert torch.equal(got[1, :32], plain[1, :32] / 128)
    assert torch.equal(got[1, 32:], plain[1, 32:] / 2)


@pytest.mark.parametrize("rows, columns", [(4, 128), (576, 256), (130, 100)])
def test_both_fp8_dialects_scale_row_r_by_block_r_over_128(tmp_path, rows, columns):
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=gen).to(torch.float8_e4m3fn)
    blocks = math.ceil(rows / 128), math.ceil(columns / 128)
    scale = torch.exp2(torch.arange(blocks[0] * blocks[1]).float() - 3).view(blocks)
    rank4 = write(tmp_path / "d", x__weight=weight, x__weight_scale=scale[:, None, :, None].contiguous())
    rank2 = write(tmp_path / "e", x__weight=weight, x__weight_scale_inv=scale)
    got = reference.dequantise(rank4)["x.weight"]
    assert torch.equal(got, reference.dequantise(rank2)["x.weight"])
    for row in {0, rows // 2, rows - 1}:
        for column in {0, columns - 1}:
            want = weight[row, column].float() * scale[row // 128, column // 128]
            assert got[row, column] == want


@pytest.mark.parametrize(
    "tensors, message",
    [
        (
            {
                "x__weight": torch.zeros(576, 128, dtype=torch.float8_e4m3fn),
                "x__weight_scale": torch.ones(4, 1, 1, 1),
            },
            r"x.weight_scale is F32 \[4, 1, 1, 1\], expected F32 \[5, 1, 1, 1\]",
        ),
        ({"x__weight": torch.zeros(2, 8, dtype=torch.float8_e4m3fn)}, "neither weight_scale nor"),
        ({"x__weight": torch.zeros(2, 8, dtype=torch.uint8)}, "x.weight_scale is missing"),
        (
            {
                "x__weight": torch.zeros(2, 8, dtype=torch.uint8),
                "x__weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
            },
            "x.weight_scale_2: missing",
        ),
        (
            {
                "x__weight": torch.zeros(2, 8, dtype=torch.uint8),
                "x__weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
                "x__weight_scale_2": torch.tensor(0.0),
            },
            "x.weight_scale_2 is 0.0, not a scale",
        ),
        (
            {"x__weight": torch.zeros(2, 8), "x__weight_scale": torch.ones(1, 1, 1, 1)},
            "x.weight is F32 but has a weight_scale",
        ),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(tmp_path, tensors, message):
    with pytest.raises(reference.CheckpointError, match=message):
        reference.dequantise(write(tmp_path / "f", **tensors))


# --- parts ----------------------------------------------------------------------------


def test_situ_worked_value():
    got = reference.situ(torch.tensor(6.0), torch.tensor(30.0), 4.0, 25.0)
    assert got.item() == pytest.approx(75.27, abs=0.005)


def test_short_conv_sees_the_present_and_three_past_tokens():
    weight = torch.tensor([[[1000.0, 100.0, 10.0, 1.0]]])
    got = reference.short_conv(torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]]), weight)
    want = torch.tensor([1.0, 12.0, 123.0, 1234.0, 2345.0])
    assert torch.allclose(got[:, 0], torch.nn.functional.silu(want))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_real_triton_kernels_agree():
    """KDA recurrent and packed decode, short conv and AttnRes under the interpreter."""
    worst = run_interpreted(HERE / "triton_oracle.py")
    # Measured with triton 3.7.1: 2.4e-7, 1.8e-7, 1.2e-7 and 9.5e-7.
    assert worst["kda recurrent"] < 2e-6
    assert worst["kda packed decode"] < 2e-6
    assert worst["short conv"] < 2e-6
    assert worst["attn_res"] < 1e-5


# --- model ----------------------------------------------------------------------------


def test_logprobs_are_normalised_and_far_from_uniform(model):
    logprobs = model.logprobs(PROMPT)
    assert logprobs.shape == (len(PROMPT), SMALL.vocab)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(len(PROMPT)), atol=1e-5)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    assert 1.0 < entropy < math.log(SMALL.vocab) - 0.5


def test_later_tokens_do_not_change_earlier_positions(model):
    whole = model.logprobs(PROMPT)
    for length in (1, 3, 17):
        part = model.logprobs(PROMPT[:length])
        assert torch.allclose(part, whole[:length], atol=2e-4)


def test_every_weight_matters(model):
    """No tensor is read under a wrong name, skipped, or without effect.

    Except where the model says so: the first mix of layer 0 has one source, whose
    softmax is one, and an expert may get no token of the prompt.
    """
    before = model.logprobs(PROMPT)
    idle = set()
    for name, values in model.weights.items():
        model.weights[name] = values * 1.5 + 0.1 * values.std(unbiased=False)
        if name.endswith("A_log"):
            model.weights[name][SMALL.heads :] = 0
        changed = (model.logprobs(PROMPT) - before).abs().max()
        model.weights[name] = values
        if changed < 1e-5:
            idle.add(name)
    idle_experts = {name for name in idle if ".experts." in name}
    assert idle - idle_experts == {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert len(idle_experts) <= 3  # one expert of the twelve


def test_float64_differs_by_rounding_only(tiny, model):
    exact = reference.load(tiny, dtype=torch.float64).logprobs(PROMPT)
    assert (model.logprobs(PROMPT) - exact).abs().max() < 2e-4


def test_greedy_follows_the_argmax(model):
    tokens = model.greedy(PROMPT[:5], 3)
    whole = model.logprobs(PROMPT[:5] + tokens)
    assert tokens == whole[4:-1].argmax(-1).tolist()


def test_a_log_beyond_the_heads_must_be_zero(tiny):
    model = reference.load(tiny)
    name = "model.layers.0.self_attn.A_log"
    assert model.weights[name].numel() > SMALL.heads
    before = model.logprobs(PROMPT[:4])
    model.weights[name] = model.weights[name][: SMALL.heads].clone()
    assert torch.equal(model.logprobs(PROMPT[:4]), before)
    model.weights[name] = torch.cat((model.weights[name], torch.tensor([0.5])))
    with pytest.raises(reference.CheckpointError, match="beyond the 2 heads"):
        model.logprobs(PROMPT[:4])


def test_a_config_that_is_no_kimi_k3_is_refused(tiny):
    config = json.loads((tiny / "config.json").read_text())
    config["hidden_act"] = "silu"
    with pytest.raises(reference.CheckpointError, match="situ"):
        reference.Model(config, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_plain_checkpoint_is_the_same_model(tiny, model, tmp_path, dtype):
    # The source is BF16, so both dtypes hold it exactly.
    reference.write_dequantised(tiny, tmp_path / "plain", dtype)
    again = reference.load(tmp_path / "plain")
    assert torch.equal(again.logprobs(PROMPT), model.logprobs(PROMPT))
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert (tmp_path / "plain" / "tokenizer.json").is_file()


def test_fp8_activations_round_per_token_and_128_columns():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(3, 200, generator=gen) * torch.tensor([[1.0], [100.0], [0.01]])
    got = reference.fp8_per_group(x)
    assert not torch.equal(got, x)
    for start, end in ((0, 128), (128, 200)):
        # Half of e4m3's step at amax: 2^-4 relative.
        amax = x[:, start:end].abs().amax(-1, keepdim=True)
        assert ((got - x)[:, start:end].abs() <= amax * 2**-4).all()
        peak = x[:, start:end].abs().argmax(-1)
        rows = torch.arange(3)
        assert torch.allclose(got[rows, start + peak], x[rows, start + peak])
