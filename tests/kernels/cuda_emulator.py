# SPDX-License-Identifier: Apache-2.0
"""Runs kernels for SM90 on a CPU: ``cuda_emulator.h`` in place of the file that holds their PTX.

It shows wrong results, addresses, barriers and waits, in orders drawn from a seed. It
does not show what only the card has: see the header's first lines.
"""

import contextlib
import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

_HEADER = Path(__file__).with_suffix(".h")
_GUARD = 1 << 18  # bytes in front of each tensor, and behind
_PROCESSORS = 3  # few, so that a block has several tiles in turn


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cuda_emulator_")


class Kernel:
    """One kernel, built by g++; called like :class:`vllm.utils.nvrtc.Kernel`, with tensors on the CPU.

    Args:
        code: Its text, see :func:`vllm.utils.nvrtc.source`.
        entry: Name of the kernel.
        shared: Dynamic shared memory in bytes at most.
    """

    seed = 0  # of the last launch

    def __init__(self, code: bytes, entry: str, shared: int) -> None:
        self.entry, self.shared = entry, shared
        text = re.sub(
            r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
            r"\1* const \2 = (\1*)dynamic_shared();",
            code.decode(),
        )
        path = Path(_folder().name) / hashlib.sha256(code).hexdigest()[:16]
        path.with_suffix(".cpp").write_text(f"{text}\nEMULATE({entry})\n")
        flags = "-O2 -std=c++17 -w -fno-strict-aliasing -fvisibility=hidden -fno-gnu-unique -U_FORTIFY_SOURCE"
        built = subprocess.run(
            ["g++", *flags.split(), "-shared", "-fPIC", "-o", f"{path}.so", f"{path}.cpp"],
            capture_output=True,
            text=True,
        )
        if built.returncode:
            raise RuntimeError(f"g++ refuses {entry}: {built.stderr[:3000]}")
        self._emulate = ctypes.CDLL(f"{path}.so").emulate
        self._emulate.restype = ctypes.c_char_p

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        *arguments: torch.Tensor | int | float | None,
        early: bool = False,
        cluster: int = 1,
    ) -> None:
        """See :meth:`vllm.utils.nvrtc.Kernel.__call__`.

        Raises:
            RuntimeError: What the kernel did wrong, and where.
        """
        assert shared <= self.shared and threads % 32 == 0 == grid[1] % cluster
        tensors = {x.untyped_storage().data_ptr(): x for x in arguments if isinstance(x, torch.Tensor)}
        stored = {at: torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for at, x in tensors.items()}
        # The kernel has copies of them, amid bytes that make NaN and must stay as they are.
        copies = {at: torch.full((len(x) + 2 * _GUARD,), 255, dtype=torch.uint8) for at, x in stored.items()}
        moved = {at: copy.data_ptr() + _GUARD for at, copy in copies.items()}
        for at, x in stored.items():
            copies[at][_GUARD:-_GUARD] = x
        values: list[ctypes._SimpleCData] = []
        for x in arguments:
            if isinstance(x, torch.Tensor):
                at = x.untyped_storage().data_ptr()
                values.append(ctypes.c_void_p(moved[at] + x.data_ptr() - at))
            else:
                values.append({int: ctypes.c_int, float: ctypes.c_float}.get(type(x), ctypes.c_void_p)(x))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
        ranges = [number for at in moved for number in (moved[at], len(stored[at]))]
        shape = (ctypes.c_int * 5)(*grid, threads, shared, cluster)
        Kernel.seed += 1
        result = self._emulate(shape, Kernel.seed, (ctypes.c_ulonglong * len(ranges))(*ranges), len(moved), pointers)
        error = result.decode() if result else ""
        for at, copy in copies.items():
            if not ((copy[:_GUARD] == 255).all() and (copy[-_GUARD:] == 255).all()):
                error = error or f"a plain store went past the ends of a tensor of {len(stored[at])} bytes"
            stored[at].copy_(copy[_GUARD:-_GUARD])
        if error:
            raise RuntimeError(f"{self.entry}, seed {Kernel.seed}: {error}")


def card_or_emulator(names: str, card: list[tuple], emulator: list[tuple]):
    """Parametrise a test that has the fixture ``device``: its cases on a card, and those emulated."""
    cases = [pytest.param("cuda", *case, marks=pytest.mark.sm90) for case in card]
    cases += [pytest.param("cpu", *case) for case in emulator]
    return pytest.mark.parametrize(f"device,{names}", cases, indirect=["device"], ids=str)


@pytest.fixture
def device(request):
    """Where tensors lie. If it is the CPU, kernels run there too, as on a card of three multiprocessors."""
    if request.param == "cuda":
        yield request.param
        return
    if shutil.which("g++") is None:
        pytest.skip("needs g++, to build CUDA kernels for the CPU")
    # Here, since tests of this folder are also run on a vLLM without these modules.
    from vllm.model_executor.layers.fused_moe.experts import nvfp4_situ_sm90_kernels
    from vllm.utils import nvrtc

    Kernel.seed = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "_SHARED", _HEADER)
        patch.setattr(nvrtc, "_wgmma", lambda widths: "")
        patch.setattr(nvrtc, "machine_code", lambda text, name: text.encode())
        for module in (nvrtc, nvfp4_situ_sm90_kernels):
            patch.setattr(module, "Kernel", Kernel)
        # A device of its own: kernels are kept for each.
        patch.setattr(torch.cuda, "current_device", lambda: "emulator")
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        properties = SimpleNamespace(multi_processor_count=_PROCESSORS)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        yield request.param
