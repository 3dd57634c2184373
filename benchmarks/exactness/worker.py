# SPDX-License-Identifier: Apache-2.0
"""Run the matrix on the vLLM that this interpreter imports; one JSON object per line on standard output."""

import argparse
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

ROOT = Path(__file__).resolve().parents[2]
TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# One class of each kind stands for a format that all of them take from the same place.
COMPRESSED = ("KimiK3DeltaAttention", "MultiHeadLatentAttention")
EXPERTS = {
    "K3 experts, NVFP4": "modelopt",
    "K3 experts, NVFP4, compressed-tensors": "compressed-tensors",
    "K3 experts, MXFP4": "mxfp4",
}


def say(**message: Any) -> None:
    print(json.dumps(message), file=sys.__stdout__, flush=True)


def some(size: int) -> list[int]:
    """Ranks that stand for all: first, second, middle, last."""
    return sorted({0, min(1, size - 1), size // 2, size - 1})


def cases(x: Any, k3_only: bool) -> Iterator[tuple[str, str, int, Callable]]:
    """Group, name, size, and the check, which takes the rank state and keywords."""
    narrow = x.Shape(q_lora=256, kv_lora=128)

    def attention(cls: str, shape: Any, size: int, **kwargs: Any) -> Callable:
        return lambda state, algo: x.check_attention(state, cls, shape, size, **({"algo": algo} | kwargs))

    def experts(size: int, layout: str) -> Callable:
        return lambda state, algo: x.check_experts(
            size, layout=layout, ranks=some(size), finish=False, emulate=algo == "EMULATE"
        )

    def linear(case: Any, size: int) -> Callable:
        return lambda state, algo: x.check_linear(state, case, size, algo=algo, ranks=some(size))

    for size in x.K3_TP_SIZES:
        other = dict.fromkeys(("algo", "dialect"), "compressed-tensors") | {"ranks": some(size)}
        asked = [(cls, f"K3 {cls}", {}) for cls in x.ATTENTION]
        asked += [(cls, f"K3 {cls}, compressed-tensors", other) for cls in COMPRESSED]
        for cls, group, kwargs in asked:
            if x.ATTENTION[cls][0] == "kda":
                yield group, "", size, attention(cls, x.Shape(), size, **kwargs)
                continue
            for shape, only in (
                (x.Shape(), ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")),
                (narrow, ("q_b_proj", "kv_b_proj", "o_proj")),
            ):
                yield group, "", size, attention(cls, shape, size, only=only, **kwargs)
        for group, layout in EXPERTS.items():
            yield group, "", size, experts(size, layout)
    if k3_only:
        return
    yield (
        "scales as rank-2 weight_scale_inv", "KDA, TP8", 8,
        attention("KimiK3DeltaAttention", narrow, 8, dialect="weight_scale_inv", ranks=some(8)),
    )  # fmt: skip
    for cls in ("KimiK3DeltaAttention", "KimiGatedDeltaNetAttention"):
        for dim in (64, 128):
            for heads in (8, 16, 24, 64, 96, 192):
                for size in TP_SIZES:
                    if heads % size == 0 and (heads, dim) != (96, 128):
                        yield (
                            f"{cls}, other head counts", f"{heads} heads of {dim}", size,
                            attention(cls, x.Shape(heads=heads, head_dim=dim), size, ranks=some(size)),
                        )  # fmt: skip
    for case in (
        x.Linear("192 + 192 rows", (192, 192)),
        x.Linear("64 + 64 + 64 + 64 rows", (64, 64, 64, 64)),
        x.Linear("320 + 320 rows", (320, 320)),
        x.Linear("33 blocks, twice", (33 * 128, 33 * 128)),
        x.Linear("576 + 1536 rows", (576, 1536)),
        x.Linear("256 + 192 rows on every rank", (256, 192), replicated=True),
        x.Linear("576 + 1536 rows on every rank", (576, 1536), replicated=True),
        x.Linear("2 x 192 rows, 3 scale rows", (192, 192), fused_on_disk=True),
        x.Linear("576 rows on every rank", (576,), cls="ReplicatedLinear", replicated=True),
        x.Linear("18432 rows", (18432,), cls="ColumnParallelLinear"),
        x.Linear("33 blocks of columns", (128,), cols=33 * 128, cls="RowParallelLinear"),
        x.Linear("32 x 64 columns", (130,), cols=32 * 64, cls="RowParallelLinear"),
    ):
        for size in TP_SIZES:
            split = (case.cols,) if case.cls == "RowParallelLinear" else case.rows
            if case.replicated and size == 1 or not case.replicated and all(n % size == 0 for n in split):
                yield "other partitions", case.name, size, linear(case, size)


@contextlib.contextmanager
def one_rank(x: Any) -> Iterator[None]:
    """A process group of one, which expert layers ask for."""
    import torch

    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with set_current_vllm_config(x.shared_config()):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", required=True, help="folder from which vllm must be imported")
    parser.add_argument("--algo", default="MIXED_PRECISION", choices=["MIXED_PRECISION", "FP8_PB_WO"])
    parser.add_argument("--k3-only", action="store_true")
    parser.add_argument("--linears-only", action="store_true", help="what the one algorithm of --algo is about")
    arguments = parser.parse_args()
    sys.stdout = sys.stderr  # what libraries print is no result
    sys.path.append(str(ROOT))
    from tests.quantization import exactness as x

    x.quiet()
    import torch

    import vllm

    torch.set_num_threads(1)
    found = Path(vllm.__file__).resolve()
    if not found.is_relative_to(Path(arguments.tree).resolve()):
        say(fatal=f"vllm comes from {found.parent}, expected {arguments.tree}")
        return
    todo = list(cases(x, arguments.k3_only))
    if arguments.linears_only:
        todo = [c for c in todo if "experts" not in c[0] and "compressed-tensors" not in c[0]]
    say(total=len(todo), version=vllm.__version__, torch=torch.__version__, python=sys.version.split()[0])
    with one_rank(x), x.release() as state:
        from vllm.model_executor.layers.fused_moe.oracle import nvfp4
        from vllm.platforms import current_platform

        # A release without CPU experts takes its emulation, so that its loader can be asked.
        own = hasattr(nvfp4.NvFp4MoeBackend, "CPU")
        say(platform=type(current_platform).__name__)
        for group, name, size, check in todo:
            algo = arguments.algo
            if "experts" in group and not own:
                algo = "EMULATE"
            try:
                verdicts = check(state, algo)
            except Exception as error:  # noqa: BLE001
                say(group=group, name=name, tp=size, error=f"could not be asked: {x.one_line(error)}")
                continue
            say(
                group=group,
                name=name,
                tp=size,
                tensors={
                    tensor: {"rows": v.rows, "wrong": v.rows_wrong, "error": v.error} for tensor, v in verdicts.items()
                },
            )
    say(done=True)


if __name__ == "__main__":
    main()
