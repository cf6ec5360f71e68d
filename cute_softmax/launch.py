"""Tensors -> Plan -> compiled function -> launch. The only module besides `ops` and `functional` that knows torch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache

import torch

from . import hardware
from .cache import Store
from .plan import Plan, RowClass, plan
from .problem import ALIGNMENT, Operand, canonical

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

_store = Store()
_functions: dict[RowClass, object] = {}
_loading = threading.Lock()


class Call:
    """A Plan bound to its compiled function.

    Calling it needs only what changes between calls of one form: the stream (an int) and the operands' addresses.
    """

    __slots__ = ("arguments", "function", "operand_strides", "plan")

    def __init__(self, plan: Plan, function: object):
        self.plan = plan
        self.function = function
        self.arguments = plan.arguments
        self.operand_strides = plan.operand_strides

    def __call__(self, stream: int, *addresses: int) -> None:
        """Launch on `stream`, the current one of the current device.

        Raises RuntimeError with the Plan's class if CUDA refuses the launch.
        """
        operands = []
        for address, strides in zip(addresses, self.operand_strides, strict=True):
            operands += address, *strides
        if self.plan.scratch:
            # Belongs to this call: freed behind the launch, its memory goes to what comes later on this stream.
            scratch = torch.zeros(self.plan.scratch, dtype=torch.uint8, device="cuda")
            operands.insert(0, scratch.data_ptr())
        try:
            self.function(stream, *self.arguments, *operands)
        except Exception as error:
            raise launch_error(self.plan, error) from error


def launch_error(failed: Plan, error: Exception) -> RuntimeError:
    """One kind of error, whether or not cutlass is imported (which turns its own into another class)."""
    return RuntimeError(f"launching {failed.kernel.math} ({failed.kernel.name}) failed: {error}")


def function_of(kernel: RowClass) -> object:
    """The compiled function of a Plan class: from memory, from the store on disk, or built."""
    function = _functions.get(kernel)
    if function is None:
        with _loading:
            function = _functions.get(kernel)
            if function is None:
                name = f"{kernel.movement}_{kernel.math}"
                function = _functions[kernel] = _store.load(name, kernel.fields, lambda: _build(kernel))
    return function


def _build(kernel: RowClass) -> object:
    from .compile import compile_class

    return compile_class(kernel)


@cache
def device_facts(index: int) -> hardware.Device:
    """What plans must know of CUDA device `index`. Raises ValueError for an unsupported GPU."""
    facts = torch.cuda.get_device_properties(index)
    return hardware.Device(
        hardware.architecture_of((facts.major, facts.minor)), facts.multi_processor_count, facts.L2_cache_size
    )


def operand(tensor: torch.Tensor) -> Operand:
    """What a plan must know of a tensor."""
    return Operand(DTYPE_NAMES[tensor.dtype], tensor.stride(), tensor.data_ptr() % ALIGNMENT)


def call_of(
    math: str,
    tensors: Sequence[torch.Tensor],
    dims: tuple[int, ...],
    online: bool = True,
    aligned: bool = False,
) -> Call:
    """The Call for a math on tensors of this form (its inputs, then its outputs), planned and loaded once.

    aligned: for tensors like these whose addresses are multiples of 16 bytes, whatever theirs are.
    """
    operands = tuple(operand(t) for t in tensors)
    if aligned:
        operands = tuple(replace(o, address=0) for o in operands)
    return _call(math, tensors[0].get_device(), tensors[0].shape, dims, operands, online)


@lru_cache(maxsize=4096)
def _call(
    math: str,
    device: int,
    shape: torch.Size,
    dims: tuple[int, ...],
    operands: tuple[Operand, ...],
    online: bool,
) -> Call:
    made = plan(math, canonical(shape, dims, operands), device_facts(device), online=online)
    return Call(made, function_of(made.kernel))


def run(math: str, tensors: Sequence[torch.Tensor], dims: tuple[int, ...], online: bool = True) -> None:
    """Launch a math on non-empty CUDA tensors, on their device and its current stream."""
    call = call_of(math, tensors, dims, online)
    index = tensors[0].get_device()
    with torch.cuda.device(index):
        call(torch._C._cuda_getCurrentRawStream(index), *(t.data_ptr() for t in tensors))


def result_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of `torch.empty_like` of such a tensor, in elements."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
