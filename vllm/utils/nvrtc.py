# SPDX-License-Identifier: Apache-2.0
"""CUDA source compiled at run time by NVRTC, and launched through the driver.

NVRTC comes with every CUDA build of PyTorch and needs neither ``nvcc`` nor a host
compiler nor CUDA's headers; a kernel takes about a second and its machine code is
kept on disk. Launches are plain driver calls on the current stream, so CUDA graphs
capture them.
"""

import ctypes
import functools
import glob
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

__all__ = ["SHARED_LIMIT", "Kernel", "machine_code", "per_device", "source"]

_T = TypeVar("_T")

SHARED_LIMIT = 232448  # bytes a block may ask for on SM90

_SHARED = Path(__file__).with_name("sm90.cu")
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_…
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    site = Path(torch.__file__).parent.parent
    found = glob.glob(str(site / "nvidia" / "*" / "lib" / name))
    for candidate in [*found, name]:
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise RuntimeError(
        f"{name} not found: it belongs to the CUDA build of PyTorch (package "
        "nvidia-cuda-nvrtc). Install it, or choose other kernels: "
        "--moe-backend marlin --linear-backend cutlass."
    )


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(
            f"{what}: CUDA error {result} ({(text.value or b'').decode()})"
        )


def source(path: Path, widths: set[int], macros: dict[str, int | str]) -> str:
    """The text of a kernel: its macros, what kernels share, products, the file.

    Args:
        path: The file; it includes nothing.
        widths: See :func:`_wgmma`.
        macros: Defined at the top.
    """
    parts = [f"#define {k} {v}\n" for k, v in macros.items()]
    parts.append(_SHARED.read_text())
    if widths:
        parts.append(_wgmma(widths))
    return "".join([*parts, path.read_text()])


def _wgmma(widths: set[int]) -> str:
    """Source of the warpgroup products 64 x N x 16 for N in ``widths``.

    They add bf16 x bf16 to float32; the first operand is in registers.
    """
    text = """
template <int N> __device__ __forceinline__ void wgmma(
    float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate);
"""
    for tokens in sorted(widths):
        count = tokens // 2
        sums = ",".join(f"%{i}" for i in range(count))
        weights = ",".join(f"%{count + i}" for i in range(4))
        outputs = ",".join(f'"+f"(d[{i}])' for i in range(count))
        text += f"""
template <> __device__ __forceinline__ void wgmma<{tokens}>(
    float (&d)[{count}], const u32 (&a)[4], u64 b, int accumulate) {{
  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0; "
    "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.bf16.bf16 "
    "{{{sums}}}, {{{weights}}}, %{count + 4}, p, 1, 1, 0;}}"
    : {outputs} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}}
"""
    return text


def _compile(text: str, name: str) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), name.encode(), 0, None, None
    ):
        raise RuntimeError("NVRTC could not be started")
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17", b"-default-device"]
    result = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    size = ctypes.c_size_t()
    if result:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def machine_code(text: str, name: str) -> bytes:
    """Compiled code of a source, from disk when the same text was compiled before."""
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.expanduser("~/.cache/vllm")
    key = hashlib.sha256(f"{torch.version.cuda}\n{text}".encode()).hexdigest()[:32]
    path = Path(root) / "nvrtc" / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = _compile(text, name)
    try:  # another process may write the same file: replace it whole
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass
    return code


class _LaunchAttribute(ctypes.Structure):
    # The value is a union of 64 bytes, of which at most three ints are used.
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    ]

    def __init__(self, kind: int, *value: int) -> None:
        super().__init__(id=kind, value=(ctypes.c_uint * 3)(*value))


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        *((x, ctypes.c_uint) for x in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


class Kernel:
    """One compiled kernel.

    Args:
        code: See :func:`machine_code`.
        entry: Name of the kernel.
        shared: Dynamic shared memory in bytes at most.
    """

    def __init__(self, code: bytes, entry: str, shared: int) -> None:
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        torch.zeros(1, device="cuda")  # a context exists from here on
        _check(
            _driver().cuModuleLoadData(ctypes.byref(module), code), "loading a kernel"
        )
        _check(
            _driver().cuModuleGetFunction(
                ctypes.byref(self._function), module, entry.encode()
            ),
            "finding a kernel",
        )
        _check(
            _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, shared),
            f"asking for {shared} bytes of shared memory",
        )

    def attribute(self, number: int) -> int:
        """A CUfunction_attribute: 3 is local bytes per thread, 4 is registers."""
        value = ctypes.c_int()
        _check(
            _driver().cuFuncGetAttribute(ctypes.byref(value), number, self._function),
            "reading a kernel attribute",
        )
        return value.value

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        shared: int,
        *arguments: torch.Tensor | int | float | None,
        early: bool = False,
        cluster: int = 1,
    ) -> None:
        """Launch on the current stream.

        Args:
            grid: Blocks in x and y.
            threads: Threads per block.
            shared: Dynamic shared memory per block, bytes.
            arguments: The kernel's; None is a null pointer.
            early: Start before the kernel in front has ended; the kernel itself
                waits for that one's results (programmatic dependent launch).
            cluster: Blocks of a cluster, along y; divides ``grid[1]``.
        """
        values: list[ctypes._SimpleCData] = []
        for x in arguments:
            if x is None or isinstance(x, torch.Tensor):
                values.append(ctypes.c_void_p(None if x is None else x.data_ptr()))
            elif isinstance(x, int):
                values.append(ctypes.c_int(x))
            else:
                values.append(ctypes.c_float(x))
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.addressof(x) for x in values)
        )
        config = _config(grid, threads, shared, early, cluster)
        _check(
            _driver().cuLaunchKernelEx(
                ctypes.byref(config), self._function, pointers, None
            ),
            "launching a kernel",
        )

    def clusters(self, threads: int, shared: int, cluster: int) -> int:
        """How many clusters of ``cluster`` blocks, two at least, the current device runs at a time."""
        config = _config((1, cluster), threads, shared, False, cluster)
        count = ctypes.c_int()
        _check(
            _driver().cuOccupancyMaxActiveClusters(
                ctypes.byref(count), self._function, ctypes.byref(config)
            ),
            f"asking for room for clusters of {cluster} blocks",
        )
        return count.value


def _config(
    grid: tuple[int, int], threads: int, shared: int, early: bool, cluster: int
) -> _LaunchConfig:
    """On the current stream; what it points to, it keeps."""
    attributes = (_LaunchAttribute * 2)(
        _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, int(early)),
        _LaunchAttribute(_CLUSTER_DIMENSION, 1, cluster, 1),
    )
    stream = torch.cuda.current_stream().cuda_stream
    return _LaunchConfig(
        *grid, 1, threads, 1, 1, shared, stream, attributes, 2 if cluster > 1 else 1
    )


def per_device(build: Callable[..., _T]) -> Callable[..., _T]:
    """Keep what ``build`` returns for equal arguments, for each device apart."""

    @functools.cache
    def cached(device: int, *args: int, **macros: int | str) -> _T:
        with torch.cuda.device(device):
            return build(*args, **macros)

    @functools.wraps(build)
    def current(*args: int, **macros: int | str) -> _T:
        return cached(torch.cuda.current_device(), *args, **macros)

    return current
