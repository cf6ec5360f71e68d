"""ATen's operators of the softmax family by our kernels: for each its result, or the reason why it is not served.

They are called below autograd, autocast and functorch, with plain CUDA tensors, and keep ATen's promises: a new
result is contiguous, whatever the strides of the input. Nothing is raised for what ATen would refuse: ATen gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from ..dispatch.common.arguments import overlap, overlaps_itself
from ..dispatch.common.forms import Forms, guard
from ..dispatch.heads.reductions import group_strides, shape_of
from ..dispatch.softmax.forms import launcher as new_launcher
from ..dispatch.softmax.kernels import lie_apart
from ..plan import NotPlanned
from ..plan.problem import canonical_dims
from ..plan.prologue import NO_PROLOGUE, Prologue
from ..runtime import launch
from ..runtime.invariance import anywhere

MOST_DIMENSIONS = 64  # of a tensor that ATen reduces over several


@dataclass(frozen=True)
class Work:
    """One call as the kernels see it: a math over `dims` of `inputs` of one shape, with a result of `dtype`.

    keepdim: None where the result has the inputs' shape; else whether a reduction keeps its dimensions. given: the
    operands that kernels read, made of the operator's tensors; None where they are these. invariant: whether the call
    is batch-invariant.
    """

    math: str
    inputs: tuple[torch.Tensor, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype
    keepdim: bool | None = None
    prologue: Prologue = NO_PROLOGUE
    given: Callable[..., tuple[torch.Tensor, ...]] | None = None
    invariant: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        shape = tuple(self.inputs[0].shape)
        return shape if self.keepdim is None else shape_of(shape, self.dims, self.keepdim)


class Refused(Exception):
    """Why a call is not served."""


class Form:
    """All calls of an operator on tensors of one device, shapes, strides and dtypes whose other arguments are equal.

    run: the launcher that serves them, or the reason why they are not served.
    """

    __slots__ = ("_count", "_invariant", "_matches", "_others", "follower", "run")

    def __init__(
        self, tensors: tuple[torch.Tensor, ...], others: tuple, invariant: bool, run: Callable | str
    ):
        self._count, self._others, self._invariant = len(tensors), others, invariant
        self._matches, self.run = guard(*tensors), run

    def fits(self, *arguments: object) -> bool:
        """Whether a call is of this form."""
        return (
            self._invariant is anywhere()
            and arguments[self._count :] == self._others
            and self._matches(*arguments[: self._count])
        )


@dataclass(frozen=True)
class Operator:
    """An operator of ATen: `work` gives what there is to do for its arguments, or raises Refused."""

    name: str
    work: Callable[..., Work]
    tensors: int = 1  # its first arguments
    has_out: bool = True
    known: Forms = field(default_factory=Forms)

    def serve(self, *arguments: object) -> torch.Tensor | str:
        """The result in a new contiguous tensor, or the reason why not."""
        form = self.known.latest.follower
        if form is None or not form.fits(*arguments):
            form = self.known.look_up(*arguments) or self._first(arguments)
        self.known.latest = form
        run = form.run
        return run if type(run) is str else run(*arguments[: self.tensors])

    def _first(self, arguments: tuple) -> Form:
        """A new form."""
        # Gradients come from threads of autograd's own, which are in no block: as elsewhere here, one state for all.
        invariant = anywhere()
        try:
            run = launcher(replace(self.work(*arguments), invariant=invariant))
        except (Refused, NotPlanned) as reason:
            run = _told(reason)
        form = Form(arguments[: self.tensors], arguments[self.tensors :], invariant, run)
        self.known.remember(arguments[0], form)
        return form

    def serve_out(self, *arguments: object, **named: torch.Tensor) -> torch.Tensor | str:
        """The result in the operator's one output (which goes by several names), or the reason why not."""
        (out,) = named.values()
        try:
            work = replace(self.work(*arguments), invariant=anywhere())
            if not (tuple(out.shape) == work.shape and out.dtype == work.dtype):
                raise Refused("out of another shape or dtype")
            if out.device != work.inputs[0].device or overlaps_itself(out):
                raise Refused("out on another device or with shared elements")
            in_place = len(work.inputs) == 1 and _same(*work.inputs, out)
            if not in_place and any(overlap(t, out) for t in work.inputs):
                raise Refused("out overlaps an input")
            _fill(work, work.inputs, out)
        except (Refused, NotPlanned) as reason:
            return _told(reason)
        return out


def _told(reason: Refused | NotPlanned) -> str:
    return str(reason) if isinstance(reason, Refused) else "no plan"


def launcher(work: Work) -> Callable[..., torch.Tensor]:
    """A function of inputs of this form. Raises NotPlanned."""
    shape, dtype, device = work.shape, work.dtype, work.inputs[0].device
    any_work = replace(work, inputs=())  # what is kept must not keep the tensors of the first call

    def elsewhere(*inputs: torch.Tensor) -> torch.Tensor:
        result = torch.empty(shape, dtype=dtype, device=device)
        _fill(any_work, inputs, result)
        return result

    result = torch.empty(shape, dtype=dtype, device=device)
    if work.keepdim is None and not work.prologue and all(t.is_contiguous() for t in work.inputs):
        try:
            return new_launcher(work.math, work.inputs, result, work.dims, True, elsewhere, work.invariant)
        except NotPlanned:
            if not work.invariant:
                raise
            return elsewhere  # which copies what does not lie in rows
    if result.numel():
        tensors = _operands(work, work.inputs, result)
        launch.call_of(
            work.math,
            tensors,
            work.dims,
            aligned=True,
            prologue=work.prologue,
            invariant=work.invariant,
            copies=True,
        )
    return elsewhere


def _fill(work: Work, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
    if result.numel():
        tensors = _operands(work, inputs, result)
        launch.run(work.math, tensors, work.dims, prologue=work.prologue, invariant=work.invariant)


def _operands(work: Work, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands as the kernel addresses them. Inputs that lie apart from the result are copied, as ATen always
    does."""
    if work.given is not None:
        inputs = work.given(*inputs)
    if work.keepdim is None:
        return (*(t.contiguous() if lie_apart(t, result, work.dims) else t for t in inputs), result)
    if not result.is_contiguous():
        raise NotPlanned("a reduction into strides of its own")
    strides = group_strides(result.stride(), inputs[0].dim(), work.dims, work.keepdim)
    return (*inputs, result.as_strided(inputs[0].shape, strides))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype


@cache
def _has_kernels(device: int) -> bool:
    try:
        launch.device_facts(device)
    except ValueError:
        return False
    return True


def _dims(dim: int | list[int], *tensors: torch.Tensor) -> tuple[int, ...]:
    """The reduced dimensions. Raises Refused where our kernels serve no call of these inputs, whatever is asked for."""
    first = tensors[0]
    if not _has_kernels(first.get_device()):
        raise Refused("no kernels for this GPU")
    for t in tensors:
        _check_dtype(t.dtype)
        if t.shape != first.shape or t.device != first.device:
            raise Refused("arguments that do not fit each other")
    try:
        return canonical_dims(dim, first.dim())
    except (IndexError, ValueError):
        raise Refused("a dim out of range, repeated or empty") from None


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in launch.DTYPE_NAMES:
        raise Refused(f"dtype {str(dtype).removeprefix('torch.')}")


def _forward(math: str) -> Callable[..., Work]:
    def work(input: torch.Tensor, dim: int, half_to_float: bool) -> Work:
        dims = _dims(dim, input)
        if half_to_float and input.dtype is torch.float32:
            raise Refused("half_to_float of float32")
        return Work(math, (input,), dims, torch.float32 if half_to_float else input.dtype)

    return work


def _backward(math: str) -> Callable[..., Work]:
    def work(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Work:
        dims = _dims(dim, grad, output)
        fits = grad.dtype is output.dtype and grad.dtype in (input_dtype, torch.float32)
        if not (fits and input_dtype in launch.DTYPE_NAMES):
            raise Refused("a gradient of dtypes that ATen does not give")
        return Work(math, (grad, output), dims, input_dtype)

    return work


def _logsumexp(input: torch.Tensor, dim: list[int], keepdim: bool = False) -> Work:
    dims = _dims(dim, input)
    if not input.numel():
        raise Refused("an empty tensor")
    if input.dim() > MOST_DIMENSIONS:
        raise Refused(f"more than {MOST_DIMENSIONS} dimensions, which torch refuses")
    return Work("logsumexp", (input,), dims, input.dtype, keepdim)


def _safe_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Work:
    """Where nothing but -inf is in a row, its softmax is zero."""
    dims, result = _dims(dim, input), dtype or input.dtype
    _check_dtype(result)
    return Work("softmax", (input,), dims, result, prologue=Prologue(zero=True))


def _masked_softmax(
    input: torch.Tensor, mask: torch.Tensor, dim: int | None = None, mask_type: int | None = None
) -> Work:
    """ATen's mask is True where an element does not count; the layers of torch.nn.Transformer call this."""
    dims = _dims(-1 if dim is None else dim, input)
    if mask.dtype is not torch.bool or mask.device != input.device or mask_type not in (0, 1, 2):
        raise Refused("a mask that ATen refuses")
    if not input.is_contiguous():  # ATen's result has the strides of the scores
        raise Refused("scores with strides of their own")
    if mask.shape == input.shape and input.dim():
        shape = tuple(mask.shape)
    elif (
        mask_type == 0
        and input.dim() == 4
        and mask.shape == input.shape[2:]
        and mask.shape[0] == mask.shape[1]
    ):
        shape = 1, 1, *mask.shape  # of queries and keys
    elif (
        mask_type == 1
        and input.dim() == 4
        and tuple(input.shape) == (len(mask), input.shape[1], *mask.shape[1:] * 2)
    ):
        shape = len(mask), 1, 1, *mask.shape[1:]  # of keys
    else:
        raise Refused("a mask that ATen refuses")

    def given(input: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return input, mask.logical_not().view(shape).expand(input.shape)

    return Work("softmax", (input, mask), dims, input.dtype, prologue=Prologue(mask=True), given=given)


OPERATORS = (
    Operator("_softmax", _forward("softmax")),
    Operator("_softmax_backward_data", _backward("softmax_backward"), tensors=2),
    Operator("_log_softmax", _forward("log_softmax")),
    Operator("_log_softmax_backward_data", _backward("log_softmax_backward"), tensors=2),
    Operator("_safe_softmax", _safe_softmax, has_out=False),
    Operator("_masked_softmax", _masked_softmax, tensors=2, has_out=False),
    Operator("logsumexp", _logsumexp),
)
