"""cuDNN's softmax through ctypes, on the very libcudnn that torch has loaded."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

# Values of the C enumerations (cudnn_ops.h, cudnn_graph.h; the same since cuDNN 5, bf16 since 8).
_ACCURATE = 1
MODES = {"instance": 0, "channel": 1}
_NCHW = 0
_DATA_TYPE = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 9}

Shape = tuple[int, int, int, int]

_P = ctypes.c_void_p
_I = ctypes.c_int
_SIGNATURES: dict[str, list] = {
    "cudnnCreate": [ctypes.POINTER(_P)],
    "cudnnSetStream": [_P, _P],
    "cudnnCreateTensorDescriptor": [ctypes.POINTER(_P)],
    "cudnnDestroyTensorDescriptor": [_P],
    "cudnnSetTensor4dDescriptor": [_P, _I, _I, _I, _I, _I, _I],
    "cudnnSoftmaxForward": [_P, _I, _I, _P, _P, _P, _P, _P, _P],
    "cudnnSoftmaxBackward": [_P, _I, _I, _P, _P, _P, _P, _P, _P, _P, _P],
}


class CudnnError(RuntimeError):
    """A cuDNN function returned something else than success."""


def candidates() -> list[str]:
    """Where libcudnn may be, best guess first: as loaded here, as packaged, as the system has it."""
    found: list[str] = []
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith("libcudnn.so"):
                found.append(path)
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        found += [str(p) for p in sorted(Path(folder).glob("cudnn/lib/libcudnn.so*"))]
    found += [str(p) for p in sorted((Path(torch.__file__).parent / "lib").glob("libcudnn.so*"))]
    return [*dict.fromkeys(found), "libcudnn.so.9", "libcudnn.so"]


@functools.cache
def library() -> ctypes.CDLL:
    """libcudnn with the signatures of the functions used here; OSError when there is none."""
    problems = []
    for path in candidates():
        try:
            lib = ctypes.CDLL(path)
            break
        except OSError as error:
            problems.append(str(error))
    else:
        raise OSError(f"no libcudnn found: {problems[-1]}")
    lib.cudnnGetErrorString.restype = ctypes.c_char_p
    lib.cudnnGetErrorString.argtypes = [_I]
    lib.cudnnGetVersion.restype = ctypes.c_size_t
    for name, arguments in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, _I
    return lib


def _ok(status: int) -> None:
    if status:
        raise CudnnError(library().cudnnGetErrorString(status).decode())


@functools.cache
def _handle(device: int) -> _P:
    handle = _P()
    with torch.cuda.device(device):
        _ok(library().cudnnCreate(ctypes.byref(handle)))
    return handle


class _Descriptor:
    """A cuDNN descriptor of a contiguous tensor of four dimensions, N, C, H and W."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.value = _P()
        _ok(library().cudnnCreateTensorDescriptor(ctypes.byref(self.value)))
        _ok(library().cudnnSetTensor4dDescriptor(self.value, _NCHW, _DATA_TYPE[dtype], *shape))

    def __del__(self) -> None:
        if self.value:
            library().cudnnDestroyTensorDescriptor(self.value)


def softmax(shape: Shape, dtype: torch.dtype, mode: str) -> Callable[[Tensor], Tensor]:
    """softmax over C ("channel") or C, H and W ("instance") of contiguous tensors; CudnnError where it refuses.

    shape: N, C, H and W, by which the tensors' own dimensions are merged.
    """
    lib, descriptor = library(), _Descriptor(shape, dtype)
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def call(x: Tensor) -> Tensor:
        handle = _handle(x.device.index)
        y = torch.empty_like(x)
        _ok(lib.cudnnSetStream(handle, torch.cuda.current_stream().cuda_stream))
        _ok(
            lib.cudnnSoftmaxForward(
                handle, _ACCURATE, MODES[mode], ctypes.byref(one), descriptor.value, x.data_ptr(),
                ctypes.byref(zero), descriptor.value, y.data_ptr(),
            )
        )  # fmt: skip
        return y

    return call


def softmax_backward(shape: Shape, dtype: torch.dtype, mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The gradient of `softmax`, from (dy, y); CudnnError where it refuses."""
    lib, descriptor = library(), _Descriptor(shape, dtype)
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def call(dy: Tensor, y: Tensor) -> Tensor:
        handle = _handle(y.device.index)
        dx = torch.empty_like(y)
        _ok(lib.cudnnSetStream(handle, torch.cuda.current_stream().cuda_stream))
        _ok(
            lib.cudnnSoftmaxBackward(
                handle, _ACCURATE, MODES[mode], ctypes.byref(one), descriptor.value, y.data_ptr(),
                descriptor.value, dy.data_ptr(), ctypes.byref(zero), descriptor.value, dx.data_ptr(),
            )
        )  # fmt: skip
        return dx

    return call
