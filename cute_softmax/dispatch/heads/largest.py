"""The largest log-probabilities of rows of any length, and a chosen element's with its rank, in every state of torch.

All come from one read of the rows. To derivatives they are log-probabilities at an index like others, so that their
gradient is the one of `calls`. Eager calls that repeat have a form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...plan.problem import Operand
from ...plan.topk_long import plan_topk_long
from ...runtime import launch
from ...runtime.invariance import inside
from ..common.forms import Forms, Place, guard
from ..common.operators import Function, operator_of, ways_of
from ..common.state import jvp_rule, recorder, transformed, unseen
from ..topk.kernels import as_planned, matrix, ranked
from .calls import gradient_of, on_kernel
from .kernels import Rows, statistics_formula

Tensor = torch.Tensor


def stored(input: Tensor, result: torch.dtype) -> torch.dtype:
    """The dtype in which the kernel stores the logarithms of an eager call for results of a dtype: float32, which
    derivatives need, if it may be recorded."""
    return torch.float32 if input.requires_grad or result not in launch.DTYPE_NAMES else result


@dataclass(frozen=True)
class Largest:
    """What is asked of rows: the k largest along the last dimension, `dims`, of logits times a positive scale.
    invariant: whether the call is batch-invariant."""

    dims: tuple[int, ...]
    k: int
    scale: float = 1.0
    invariant: bool = False

    @property
    def rows(self) -> Rows:
        """The rows of these scores."""
        return Rows(self.dims, self.scale, invariant=self.invariant)


def find(
    input: Tensor,
    index: Tensor | None,
    spec: Largest,
    result: torch.dtype = torch.float32,
    call: launch.Call | None = None,
) -> tuple[Tensor, ...]:
    """`formula` by our kernel. result: the dtype of the logarithms; call: for tensors of this form, if it is known.
    Raises NotPlanned for a k that is more than it selects."""
    rows = matrix(input)
    index = None if index is None else index.reshape(-1)
    call = call or call_of(rows, index, spec, result)
    rows = as_planned(rows, call)

    def new(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((*input.shape[:-1], size), dtype=dtype, device=input.device)

    values, indices = new(spec.k, result), new(spec.k, torch.int64)
    found, ranks = (new(1, result), new(1, torch.int64)) if index is not None else _nothing(values)
    top, log = new(1), new(1)
    operands = [rows, *([] if index is None else [index]), *[values, indices] * bool(spec.k), top, log]
    operands += [] if index is None else [found, ranks]
    numbers = (spec.scale,) if spec.scale != 1 else ()
    call.on_device(input.get_device(), *[t.data_ptr() for t in operands], numbers=numbers)
    return values, indices, found, ranks, top, log


def call_of(rows: Tensor, index: Tensor | None, spec: Largest, result: torch.dtype) -> launch.Call:
    """The Call for a matrix as `matrix` gives it, and an index of its rows."""
    return _call(
        rows.get_device(),
        *rows.shape,
        spec.k,
        launch.operand(rows),
        launch.DTYPE_NAMES[result],
        None if index is None else index.stride(0),
        spec.scale != 1,
        spec.invariant,
    )


def _nothing(like: Tensor) -> tuple[Tensor, Tensor]:
    """What stands for the log-probabilities and ranks of elements that nobody has chosen."""
    return like.new_empty(0), like.new_empty(0, dtype=torch.int64)


@lru_cache(maxsize=4096)
def _call(
    device: int,
    rows: int,
    columns: int,
    k: int,
    operand: Operand,
    result: str,
    index_stride: int | None,
    scaled: bool,
    invariant: bool,
) -> launch.Call:
    facts = launch.facts_for(device, invariant)
    options = {"result": result, "index_stride": index_stride, "scaled": scaled, "invariant": invariant}
    made = plan_topk_long(rows, columns, k, operand, facts, **options)
    return launch.Call(made, launch.function_of(made.kernel))


def formula(input: Tensor, index: Tensor | None, spec: Largest) -> tuple[Tensor, ...]:
    """(the k largest log-probabilities, their indices; the log-probability at the index and how many elements are
    larger, or empty tensors; the maximum and the logarithm of the sum) in torch's operations, differentiable."""
    top, log = statistics_formula(input, spec.rows)
    log_p = torch.log_softmax(spec.rows.scores(input), -1)
    order = ranked(input.detach())[..., : spec.k]
    values = log_p.gather(-1, order)
    if index is None:
        return values, order, *_nothing(values), top, log
    ranks = (input > input.gather(-1, index)).sum(-1, keepdim=True)
    return values, order, log_p.gather(-1, index), ranks, top, log


class Largests(Function):
    """(input, index or None, spec) -> what `formula` gives. Keeps the input, and all but the ranks."""

    full = 2

    @staticmethod
    def forward(input, index, spec):
        return (find if on_kernel(input) else formula)(input, index, spec)

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, index, ctx.spec = inputs
        values, indices, found, ranks, top, log = output
        ctx.mark_non_differentiable(indices, ranks, top, log)
        ctx.set_materialize_grads(False)
        kept = input, index, values, indices, found, top, log
        ctx.save_for_backward(*kept)
        if transformed():
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx, of_values, _, of_found, *others):
        input, index, values, indices, found, top, log = ctx.saved_tensors
        given = [(indices, values, of_values)] * (of_values is not None and ctx.spec.k > 0)
        given += [(index, found, of_found)] * (of_found is not None and index is not None)
        if not given:
            return None, None, None
        at, numbers, grads = (
            tensors[0] if len(tensors) == 1 else torch.cat(tensors, -1)
            for tensors in zip(*given, strict=True)
        )
        nothing = log.new_empty(0)
        return (
            gradient_of(input, at, numbers, top, log, nothing, grads, None, None, ctx.spec.rows),
            None,
            None,
        )

    @staticmethod
    @jvp_rule
    def jvp(ctx, saved, tangent, *_):
        input, index, _, indices, _, _, log = saved
        t = tangent.to(log.dtype) * ctx.spec.scale
        p = torch.softmax(ctx.spec.rows.scores(input), -1)
        of_lse = (p * t).sum(-1, keepdim=True)
        of_found = log.new_empty(0) if index is None else t.gather(-1, index) - of_lse
        return t.gather(-1, indices) - of_lse, None, of_found, None, None, None


def _fake(input, index, spec):
    dtype = torch.promote_types(input.dtype, torch.float32)

    def new(size, dtype=dtype):
        return input.new_empty((*input.shape[:-1], size), dtype=dtype)

    values, indices = new(spec.k), new(spec.k, torch.int64)
    chosen = _nothing(values) if index is None else (new(1), new(1, torch.int64))
    return values, indices, *chosen, new(1), new(1)


_WAYS = ways_of(
    Largests,
    Largests.forward,
    operator_of(
        "topk_log_softmax",
        "(Tensor input, Tensor? index, SymInt[] dim, SymInt k, float scale, bool invariant=False) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        Largests,
        Largest,
        _fake,
    ),
)


def serve(input: Tensor, index: Tensor | None, spec: Largest) -> tuple[Tensor, ...]:
    """`formula` on any device and in any state of torch."""
    if not on_kernel(input):
        return formula(input, index, spec)
    return _WAYS.serve((input, index, spec), (input, index), (input,))


# -- Calls that repeat -------------------------------------------------------------------------------------------------

known = Forms()


class Form:
    """All eager calls on tensors of one device, shapes, strides and dtypes whose other arguments are equal: decided
    once. options: the arguments that are no tensors, as the caller gave them; result: the dtype of the numbers."""

    __slots__ = (
        *("_call", "_chosen", "_matches", "_options", "_place", "_records", "_stored", "_types"),
        *("follower", "result", "spec"),
    )

    def __init__(
        self, input: Tensor, index: Tensor | None, spec: Largest, options: tuple, result: torch.dtype
    ):
        self._matches = guard(input) if index is None else guard(input, index)
        self._options, self._types, self._chosen = options, [*map(type, options)], index is not None
        self._place, self._records, self.spec, self.result = Place(input), input.requires_grad, spec, result
        self._stored = stored(input, result)
        rows = matrix(input)
        # Of others a copy is read: those are planned call by call.
        usual = rows.data_ptr() == input.data_ptr() and not rows.data_ptr() & 15
        column = None if index is None else index.long().reshape(-1)  # which may lie otherwise, as in calls
        self._call = call_of(rows, column, spec, self._stored) if usual else None

    def fits(self, input: Tensor, index: Tensor | None, options: tuple) -> bool:
        """Whether a call is of this form."""
        return (
            [*map(type, options)] == self._types
            and options == self._options
            and self.spec.invariant is inside()
            and (index is not None) is self._chosen
            and (self._matches(input, index) if self._chosen else self._matches(input))
        )

    def __call__(self, input: Tensor, index: Tensor | None) -> tuple[Tensor, ...]:
        """The results of a call of this form, recorded by autograd where it records."""
        column = None if index is None else index.long().unsqueeze(-1)
        if self._records and torch.is_grad_enabled():
            return record(input, column, self)
        return self.run(input, column)

    def run(self, input: Tensor, column: Tensor | None) -> tuple[Tensor, ...]:
        """`find` for tensors of this form."""
        call = None if input.data_ptr() & 15 or not self._place.current() else self._call
        return find(input, column, self.spec, self._stored, call)


class Recorded(torch.autograd.Function):
    """(input, index or None, form) -> the results of the form; kept and differentiated as by `Largests`."""

    @staticmethod
    def forward(ctx, input, index, form):
        output = form.run(input, index)
        Largests.setup_context(ctx, (input, index, form.spec), output)
        return output

    @staticmethod
    def backward(ctx, *grads):
        return Largests.backward(ctx, *grads)


record = recorder(Recorded)


def first(
    input: Tensor, index: Tensor | None, spec: Largest, options: tuple, result: torch.dtype
) -> tuple[Tensor, ...]:
    """The results of a call that is the first of its form, or has none. index: (...)."""
    if unseen(input, index) and on_kernel(input):
        form = Form(input, index, spec, options, result)
        known.remember(input, form)
        return form(input, index)
    return serve(input, None if index is None else index.long().unsqueeze(-1), spec)
