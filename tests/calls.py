"""Calls on guarded tensors, over any dimensions: checked against the oracle, surroundings and inputs included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from checking import Guarded, check_backward, check_reduction, check_softmax, equal_bits

from cute_softmax import amax, logsumexp, softmax
from cute_softmax import sum as sum_
from cute_softmax.plan import PanelPlan, plan_panel
from cute_softmax.plan.problem import canonical
from cute_softmax.runtime import launch

REDUCTIONS = {"logsumexp": logsumexp, "amax": amax, "sum": sum_}
Place = dict  # how `Guarded` places a tensor: strides, offset


def _untouched(guarded: Guarded, values: torch.Tensor):
    guarded.check(written=False)
    assert equal_bits(guarded.tensor, values), "an input was changed"


def forward(
    x: torch.Tensor,
    dims: int | Sequence[int],
    *,
    source: Place | None = None,
    result: Place | None = None,
    dtype: torch.dtype | None = None,
    online: bool = True,
) -> torch.Tensor:
    """Softmax of a copy of `x` into a guarded tensor, both placed as asked; right and nothing else written."""
    given, out = Guarded.of(x, **source or {}), Guarded(x.shape, dtype or x.dtype, **result or {})
    assert softmax(given.tensor, dims, out=out.tensor, online=online) is out.tensor
    out.check()
    _untouched(given, x)
    check_softmax(out.tensor, x, dims)
    return out.tensor


def backward(
    dy: torch.Tensor,
    y: torch.Tensor,
    dims: int | Sequence[int],
    *,
    places: Sequence[Place] = ({}, {}, {}),
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The gradient into a guarded tensor. places: of `dy`, `y` and the result."""
    grad, output = Guarded.of(dy, **places[0]), Guarded.of(y, **places[1])
    out = Guarded(y.shape, dtype or y.dtype, **places[2])
    axes = tuple(sorted(d % y.dim() for d in ((dims,) if isinstance(dims, int) else dims)))
    launch.run("softmax_backward", (grad.tensor, output.tensor, out.tensor), axes)
    out.check()
    _untouched(grad, dy)
    _untouched(output, y)
    check_backward(out.tensor, dy, y, dims)
    return out.tensor


def reduction(name: str, x: torch.Tensor, dims: int | Sequence[int], place: Place | None = None):
    """A reduction with and without `keepdim`: shape and strides as torch's, the same bits each time."""
    given = Guarded.of(x, **place or {})
    for keepdim in (False, True):
        y, torchs = (f(given.tensor, dims, keepdim) for f in (REDUCTIONS[name], getattr(torch, name)))
        assert (y.shape, y.stride(), y.dtype) == (torchs.shape, torchs.stride(), torchs.dtype)
        check_reduction(name, y, x, dims)
        assert equal_bits(y, REDUCTIONS[name](given.tensor, dims, keepdim)), "a second call gave other bits"
    _untouched(given, x)


def planned(math: str, tensors: Sequence[torch.Tensor], dims: Sequence[int]) -> PanelPlan:
    """The plan of panels for tensors on a CUDA device, be they rows or not."""
    problem = canonical(tensors[0].shape, dims, [launch.operand(t) for t in tensors])
    return plan_panel(math, problem, launch.device_facts(tensors[0].get_device()), False)


def launched(made: PanelPlan, tensors: Sequence[torch.Tensor]):
    """Run a plan on the current stream."""
    call = launch.Call(made, launch.function_of(made.kernel))
    call(torch.cuda.current_stream().cuda_stream, *(t.data_ptr() for t in tensors))
