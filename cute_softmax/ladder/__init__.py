"""The ladder: softmax over rows in seven small kernels, each a step faster than the one before, and a naive one below.

To be read in order, `rung1_thread.py` first, with `docs/ladder.md` beside them. Each file is a whole kernel with its
launch; this module calls them on torch tensors.

>>> from cute_softmax import ladder
>>> y = ladder.softmax(torch.randn(1024, 1000, device="cuda"), rung=3)
"""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "RUNGS",
    "Form",
    "Rung",
    "compile_form",
    "form_of",
    "function_of",
    "over_rows",
    "rung_of",
    "softmax",
]

# Bytes of a row that the rungs keep in shared memory: what a block has on every GPU without asking for more.
SHARED_BYTES = 48 << 10
# Elements of a tensor: offsets are counted in 32 bits.
ELEMENTS = 1 << 31
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    module: its file; title: what a row gets; reads, writes: trips of a row from and to global memory;
    threads: of a block; keeps: whether the row stays in shared memory; vectors: whether accesses are as wide as the
    alignment allows.
    """

    number: int
    module: str
    title: str
    reads: int
    writes: int
    threads: int
    keeps: bool = False
    vectors: bool = False


RUNGS = (
    Rung(0, "rung0_naive", "the naive form", 3, 2, 128),
    Rung(1, "rung1_thread", "one thread per row", 3, 1, 128),
    Rung(2, "rung2_online", "maximum and sum in one pass", 2, 1, 128),
    Rung(3, "rung3_warp", "one warp per row", 2, 1, 128),
    Rung(4, "rung4_block", "one block per row", 2, 1, 256),
    Rung(5, "rung5_shared", "the row in shared memory", 1, 1, 256, keeps=True),
    Rung(6, "rung6_vectors", "128-bit vectors", 1, 1, 256, keeps=True, vectors=True),
    Rung(7, "rung7_shuffles", "shuffles in the block's reduction", 1, 1, 256, keeps=True, vectors=True),
)


@dataclass(frozen=True)
class Form:
    """What a rung is compiled for: all but the number of groups.

    columns: elements of a group; alignment: bytes that each group begins on a multiple of; rows: whether a group's
    elements lie side by side, or, in columns, those of neighbouring groups.
    """

    rung: int
    dtype: str
    columns: int
    alignment: int
    rows: bool
    architecture: str


def softmax(input: torch.Tensor, rung: int, dim: int = -1) -> torch.Tensor:
    """Softmax over the rows of a matrix, by the kernel of one rung.

    Args:
        input: A contiguous matrix (M, N) in bfloat16, float16 or float32 on a CUDA device. From rung 5 on a row has
            48 KiB at most.
        rung: 0 to 7.
        dim: The last dimension, or, for rung 0, either.

    Returns:
        A new tensor of the input's shape and dtype.

    Raises:
        TypeError: For a tensor of another device or dtype.
        ValueError: For another shape, dimension or rung, and for rows and tensors that are too large.
    """
    import torch

    from ..runtime.launch import DTYPE_NAMES, device_facts

    rung_of(rung)
    if input.dtype not in DTYPE_NAMES or not input.is_cuda:
        raise TypeError(
            f"input is {input.dtype} on {input.device}: the ladder takes floats of 16 and 32 bits on CUDA"
        )
    if input.dim() != 2 or not input.is_contiguous():
        raise ValueError(
            f"input has shape {tuple(input.shape)} and strides {input.stride()}: not a contiguous matrix"
        )
    rows = over_rows(dim)
    if input.numel() >= ELEMENTS:
        raise ValueError(f"input has {input.numel():,} elements: the ladder counts fewer than 2^31")
    output = torch.empty_like(input)
    architecture = device_facts(input.get_device()).architecture.name
    base = math.gcd(VECTOR_BYTES, input.data_ptr(), output.data_ptr())
    form = form_of(rung, DTYPE_NAMES[input.dtype], input.shape[dim], architecture, base, rows)
    if input.numel():
        with torch.cuda.device(input.device):
            function_of(form)(*((t if rows else t.t()) for t in (input, output)))
    return output


def rung_of(number: int) -> Rung:
    """The rung of this number. Raises ValueError where there is none."""
    if number not in range(len(RUNGS)):
        raise ValueError(f"rung is {number}: there are rungs 0 to {len(RUNGS) - 1}")
    return RUNGS[number]


def over_rows(dim: int) -> bool:
    """Whether this dimension of a matrix is the last. Raises ValueError where a matrix has no such dimension."""
    if dim not in (-2, -1, 0, 1):
        raise ValueError(f"dim is {dim}: a matrix has dimensions 0 and 1")
    return dim in (-1, 1)


def form_of(
    rung: int, dtype: str, columns: int, architecture: str, base: int = VECTOR_BYTES, rows: bool = True
) -> Form:
    """The form of a call, for tensors that begin on multiples of `base` bytes. Raises ValueError for what the rung does
    not take."""
    from ..plan.problem import ITEM_SIZE

    step, size = rung_of(rung), ITEM_SIZE[dtype]
    if not rows and rung:
        raise ValueError(f"dim is 0: rung {rung} reduces rows, and only rung 0 columns, too")
    if step.keeps and columns * size > SHARED_BYTES:
        raise ValueError(
            f"a row has {columns * size:,} bytes: rung {rung} keeps {SHARED_BYTES:,} at most on chip"
        )
    alignment = math.gcd(base, columns * size) if step.vectors else size
    return Form(rung, dtype, columns, alignment, rows, architecture)


@functools.cache
def function_of(form: Form) -> Any:
    """The compiled function, from the store on disk or built; it takes input and output as (groups, elements)."""
    from ..runtime.launch import _store

    return _store.load("ladder", asdict(form), lambda: compile_form(form))


def compile_form(form: Form, options: str = "") -> Any:
    """Compile a form; needs no GPU. Returns what `cute.compile` returns."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from ..kernels.common.copy import DTYPES
    from ..runtime.frames import with_room

    groups, pitch = cute.sym_int(), cute.sym_int()
    strides = (form.columns, 1) if form.rows else (1, pitch)
    tensors = [
        make_fake_tensor(DTYPES[form.dtype], (groups, form.columns), strides, assumed_align=form.alignment)
        for _ in range(2)
    ]
    return with_room(
        cute.compile,
        importlib.import_module(f".{rung_of(form.rung).module}", __name__).softmax,
        *tensors,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch={form.architecture} {options}",
    )
