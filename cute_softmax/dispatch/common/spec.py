"""Scores before a softmax: scale, bias, mask and causal as a caller gives them, their checks, and what they mean.

The score of an element is ``x * scale + bias``, and -inf where a mask or the diagonal excludes it. A sink is a score
of a row that no element has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar

import torch

from ...runtime.invariance import in_force

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Function = TypeVar("_Function", bound=Callable)

_FAR = 1 << 62
EMPTY_ROWS = ("nan", "zero")


class ScoreArguments(TypedDict, total=False):
    """The keyword arguments of a call on scores; see `softmax` for their meaning."""

    scale: float | torch.Tensor
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool | int
    alpha: float
    empty_rows: str
    sink: torch.Tensor | None


DEFAULTS = dict(scale=1.0, bias=None, mask=None, causal=False, alpha=1.0, empty_rows="nan", sink=None)


def differs(value: object, default: object) -> bool:
    """Whether an argument is not at its default. An offset of 0 equals False and means another thing; tensors are
    compared with nothing."""
    kinds = isinstance(value, bool) is not isinstance(default, bool) or isinstance(value, torch.Tensor)
    return kinds or value != default


class ShardArguments(TypedDict, total=False):
    """The keyword arguments that say of which rows a tensor is a slice; see `softmax` for their meaning."""

    group: ProcessGroup | None
    vocab_start: int | None
    vocab_size: int | None


class NameArguments(TypedDict, total=False):
    """The other name that torch has for an argument."""

    axis: int | Sequence[int] | None


# Functions that take these beside scores.
_SHARDED = ("softmax", "log_softmax")
_NAMED = (*_SHARDED, "softmax_")


def with_scores(function: _Function) -> _Function:
    """Show the keyword arguments that `function` takes as ``**scores`` one by one, in help and documentation.

    It takes them in a dict, which is empty in the common call: six defaults to fill in and to compare would cost a
    fiftieth of that.
    """
    whole, alpha = inspect.signature(function), function.__name__ != "log_softmax"
    own = [p for p in whole.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    kinds = dict(ScoreArguments.__annotations__)
    if function.__name__ in _SHARDED:
        kinds |= ShardArguments.__annotations__
    if function.__name__ in _NAMED:
        kinds |= NameArguments.__annotations__
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=kind)
        for name, kind in kinds.items()
        if name != "alpha" or alpha
    ]
    function.__signature__ = whole.replace(parameters=own + [p.replace(annotation=_told(p)) for p in added])
    return function


def _told(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    return kind.__forward_arg__ if hasattr(kind, "__forward_arg__") else str(kind)


def check_names(function: str, given: Iterable[str]) -> None:
    """Raise TypeError for a keyword argument that there is not, as Python does."""
    for name in given:
        if name not in DEFAULTS or (name == "alpha" and function == "log_softmax"):
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


@dataclass(frozen=True)
class Spec:
    """Everything about a call but its tensors.

    dims: reduced, ascending. dtype: of the result, or of the input's gradient. log: the logarithm of the softmax.
    factor: the scale where that is a number (a tensor is an operand); alpha: a number. causal: None, or the offset of
    the diagonal: element j of query i counts if ``j <= i + causal``; queries are dimension -2. zero: rows with nothing
    left have probability 0, not NaN. invariant: whether the call is batch-invariant.
    """

    dims: tuple[int, ...]
    dtype: torch.dtype
    log: bool = False
    factor: float = 1.0
    causal: int | None = None
    alpha: float = 1.0
    zero: bool = False
    online: bool = True
    invariant: bool = False

    @property
    def math(self) -> str:
        return "log_softmax" if self.log else "softmax"

    @property
    def plain(self) -> bool:
        """Whether numbers change nothing of scores and results."""
        return self.factor == 1 and self.causal is None and self.alpha == 1 and not self.zero

    @property
    def inverse_alpha(self) -> float:
        return 1 / self.alpha if self.alpha else 0.0

    def changed(self, **fields: object) -> Spec:
        return replace(self, **fields)


class Operands(NamedTuple):
    """The tensors that scores are made of beside the input, None for what is not given."""

    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    sink: torch.Tensor | None = None


def scores_of(
    input: torch.Tensor,
    dims: tuple[int, ...],
    dtype: torch.dtype,
    log: bool = False,
    online: bool = True,
    *,
    scale: float | torch.Tensor = 1.0,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    causal: bool | int = False,
    alpha: float = 1.0,
    empty_rows: str = "nan",
    sink: torch.Tensor | None = None,
) -> tuple[Operands, Spec]:
    """The scores of a call with a result of `dtype`.

    Raises TypeError and ValueError for what does not fit the input, naming the argument.
    """
    groups, factor = None, 1.0
    if isinstance(scale, torch.Tensor):
        groups = of_rows("scale", scale, input, dims)
    else:
        factor = number("scale", scale, "a number or a torch.Tensor")
    if bias is not None:
        _operand("bias", bias, input)
    if mask is not None:
        _operand("mask", mask, input)
    if sink is not None:
        of_rows("sink", sink, input, dims)
    alpha = number("alpha", alpha)
    if empty_rows not in EMPTY_ROWS:
        raise ValueError(f'empty_rows is {empty_rows!r}: it is "nan" or "zero"')
    offset = None if causal is False else _diagonal(causal, input, dims)
    spec = Spec(dims, dtype, log, factor, offset, alpha, empty_rows == "zero", online, in_force())
    return Operands(bias, mask, groups, sink), spec


def of_rows(name: str, tensor: object, input: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """A tensor of one number per row of the input: checked."""
    _operand(name, tensor, input)
    size = (1,) * (input.dim() - tensor.dim()) + tuple(tensor.shape)
    if any(size[d] != 1 for d in dims if d < input.dim()):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: it varies along the reduced dimension(s) "
            f"{', '.join(map(str, dims))} of an input of shape {tuple(input.shape)}; it must have size 1 there"
        )
    return tensor


def number(name: str, value: object, what: str = "a number") -> float:
    """A float argument. Raises TypeError for anything that is no real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is an integer beyond all floats") from None


def integer(name: str, value: object) -> int:
    """An integer argument of 64 bits. Raises TypeError for anything that is none, ValueError for what has more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{name} is {value}: it has more than 64 bits")
    return value


def _operand(name: str, tensor: object, input: torch.Tensor) -> torch.Tensor:
    """A tensor that broadcasts to the input: checked."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}: it must be a dense (strided) tensor")
    if name == "mask" and tensor.dtype is not torch.bool:
        raise TypeError(
            f"mask is {tensor.dtype}: a mask is torch.bool, True where an element counts (what is added to the "
            "scores is `bias`)"
        )
    if name != "mask" and not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} is {tensor.dtype}: it must have a floating-point dtype")
    if tensor.device != input.device:
        raise ValueError(f"{name} is on {tensor.device}, input on {input.device}")
    there, here = tuple(input.shape), tuple(tensor.shape)
    beside = there[len(there) - len(here) :]
    if len(here) > len(there) or any([n not in (1, m) for n, m in zip(here, beside, strict=True)]):
        raise ValueError(f"{name} has shape {here}, which does not broadcast to the input's {there}")
    return tensor


def _diagonal(causal: object, input: torch.Tensor, dims: tuple[int, ...]) -> int:
    if not isinstance(causal, int):
        raise TypeError(f"causal must be False, True or an int offset, not {type(causal).__name__}")
    if input.dim() < 2 or dims != (input.dim() - 1,):
        raise ValueError(
            f"causal needs queries in dimension -2 and the softmax over dimension -1, not over "
            f"{', '.join(map(str, dims))} of an input of shape {tuple(input.shape)}"
        )
    return diagonal(causal)


def diagonal(causal: int) -> int:
    """The offset that a caller asks for: True is 0, and what is far beyond any matrix can still be added to."""
    return 0 if causal is True else max(-_FAR, min(causal, _FAR))
