"""torch's softmax modules by our functions: its arguments and state, and our options beside them.

They are torch's classes, too (``isinstance`` says so): what was pickled, copied or replaced as one of torch's works as
one of these. They have no parameters and no buffers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from .family import log_softmax
from .functional import softmax


class _Options:
    """Our options of a module, defaults first: of a module whose state was torch's, they are what the class says."""

    dtype: torch.dtype | None = None
    scale: float = 1.0
    causal: bool | int = False
    alpha: float = 1.0
    empty_rows: str = "nan"
    _names: tuple[str, ...] = ("dtype", "scale", "causal", "empty_rows")
    _function: Callable[..., torch.Tensor]

    def _changed(self) -> dict[str, object]:
        """The options that are not at their defaults."""
        options = ((name, getattr(self, name)) for name in self._names)
        return {name: value for name, value in options if value != getattr(_Options, name)}

    def forward(
        self, input: torch.Tensor, *, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        function, given = self._function, {"mask": mask, "bias": bias}
        dim = _implicit(function.__name__, input) if self.dim is None else self.dim
        return function(
            input, dim, **self._changed(), **{name: t for name, t in given.items() if t is not None}
        )

    def extra_repr(self) -> str:
        shown = [super().extra_repr(), *(f"{name}={value!r}" for name, value in self._changed().items())]
        return ", ".join(filter(None, shown))


def _implicit(name: str, input: torch.Tensor) -> int:
    """The dimension that torch takes where none is given, with its warning."""
    warnings.warn(
        f"Implicit dimension choice for {name} has been deprecated. "
        "Change the call to include dim=X as an argument.",
        stacklevel=5,  # the line that calls the module
    )
    return 0 if input.dim() in (0, 1, 3) else 1


class Softmax(_Options, torch.nn.Softmax):
    """`cute_softmax.softmax` as a module, in the place of `torch.nn.Softmax`.

    dim: the dimension or dimensions to reduce; None is torch's old rule (0 for tensors of 0, 1 or 3 dimensions, else
        1) with its warning.
    dtype, scale, causal, alpha, empty_rows: as of `softmax`.

    ``forward(input, *, mask=None, bias=None)``: `mask` and `bias` as of `softmax`, of this call. Raises as `softmax`.

    >>> attention = Softmax(-1, scale=0.125, causal=True)
    >>> probabilities = attention(scores)
    """

    _names = ("dtype", "scale", "causal", "alpha", "empty_rows")
    _function = staticmethod(softmax)

    def __init__(
        self,
        dim: int | tuple[int, ...] | None = None,
        *,
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
        causal: bool | int = False,
        alpha: float = 1.0,
        empty_rows: str = "nan",
    ) -> None:
        super().__init__(dim)
        self.dtype, self.scale, self.causal = dtype, scale, causal
        self.alpha, self.empty_rows = alpha, empty_rows


class LogSoftmax(_Options, torch.nn.LogSoftmax):
    """`cute_softmax.log_softmax` as a module, in the place of `torch.nn.LogSoftmax`.

    Arguments as of `Softmax`, without alpha. Raises as `log_softmax`.
    """

    _function = staticmethod(log_softmax)

    def __init__(
        self,
        dim: int | tuple[int, ...] | None = None,
        *,
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
        causal: bool | int = False,
        empty_rows: str = "nan",
    ) -> None:
        super().__init__(dim)
        self.dtype, self.scale, self.causal, self.empty_rows = dtype, scale, causal, empty_rows


class Softmax2d(torch.nn.Softmax2d):
    """Softmax over the channels of an image, (C, H, W) or (N, C, H, W), in the place of `torch.nn.Softmax2d`.

    Raises ValueError for tensors of other ranks, else as `softmax`.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dim() not in (3, 4):
            raise ValueError(f"Softmax2d: expected input to be 3D or 4D, got {input.dim()}D instead")
        return softmax(input, -3)
