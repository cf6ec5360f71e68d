"""torch's softmax modules and its cross entropy on our kernels, with torch's arguments and state, and with our options.

They are subclasses of torch's classes, and also work with state that was pickled or copied from torch's own modules.
They have no parameters, and no buffers except a loss's weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .api.cross_entropy import cross_entropy
from .api.softmax import log_softmax, softmax
from .dispatch.common.arguments import implicit_dim
from .dispatch.common.spec import differs

__all__ = ["CrossEntropyLoss", "LogSoftmax", "Softmax", "Softmax2d"]


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
        return {name: value for name, value in options if differs(value, getattr(_Options, name))}

    def forward(
        self, input: torch.Tensor, *, mask: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Apply the function with the module's options.

        Args:
            input: A dense real tensor.
            mask: A boolean tensor that broadcasts to the input, True where an element counts in this call.
            bias: A floating-point tensor that broadcasts to the input, added to this call's scores after the scale.

        Returns:
            A tensor of the input's shape.
        """
        function, given = self._function, {"mask": mask, "bias": bias}
        dim = self.dim
        if dim is None:
            dim = implicit_dim(function.__name__, input, stacklevel=5)  # the line that calls the module
        return function(
            input, dim, **self._changed(), **{name: t for name, t in given.items() if t is not None}
        )

    def extra_repr(self) -> str:
        """What `repr` shows in the parentheses: `dim`, and the options that differ from their defaults."""
        shown = [super().extra_repr(), *(f"{name}={value!r}" for name, value in self._changed().items())]
        return ", ".join(filter(None, shown))


class Softmax(_Options, torch.nn.Softmax):
    """`softmax` as a module, a subclass of `torch.nn.Softmax` that can replace it.

    It has no parameters and no buffers. Its errors, and what its bits depend on, are those of `softmax`.

    Args:
        dim: The dimension or dimensions to reduce. None: torch's old rule, with its warning (0 for tensors of 0, 1 or 3
            dimensions, otherwise 1).
        dtype: The dtype of the result. None: the input's, or float32 under autocast.
        scale: A number by which the input is multiplied (1 / temperature).
        causal: True: element j of row i counts if `j <= i`; an int: if `j <= i + causal`. For `dim=-1` only.
        alpha: A number by which the result is multiplied.
        empty_rows: The result of rows in which no element counts: "nan" or "zero".

    Examples:
        >>> import torch
        >>> from cute_softmax import nn
        >>> attention = nn.Softmax(-1, scale=0.125, causal=True)
        >>> attention(torch.zeros(2, 2))
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]])
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
        super().__init__()  # which, from torch 2.15 on, takes no tuple
        self.dim, self.dtype, self.scale, self.causal = dim, dtype, scale, causal
        self.alpha, self.empty_rows = alpha, empty_rows


class LogSoftmax(_Options, torch.nn.LogSoftmax):
    """`log_softmax` as a module, a subclass of `torch.nn.LogSoftmax` that can replace it.

    It has no parameters and no buffers. Its errors, and what its bits depend on, are those of `log_softmax`.

    Args:
        dim: The dimension or dimensions to reduce. None: torch's old rule, with its warning (0 for tensors of 0, 1 or 3
            dimensions, otherwise 1).
        dtype: The dtype of the result. None: the input's, or float32 under autocast.
        scale: A number by which the input is multiplied (1 / temperature).
        causal: True: element j of row i counts if `j <= i`; an int: if `j <= i + causal`. For `dim=-1` only.
        empty_rows: "nan" or "zero": whether a row in which no element counts is NaN or -inf.
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
        super().__init__()
        self.dim, self.dtype, self.scale = dim, dtype, scale
        self.causal, self.empty_rows = causal, empty_rows


class Softmax2d(torch.nn.Softmax2d):
    """`softmax` over the channels of images, a subclass of `torch.nn.Softmax2d` that can replace it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The softmax over the channels.

        Args:
            input: (C, H, W) or (N, C, H, W).

        Returns:
            A tensor of the input's shape.

        Raises:
            ValueError: For tensors with another number of dimensions; other errors are those of `softmax`.
        """
        if input.dim() not in (3, 4):
            raise ValueError(f"Softmax2d: expected input to be 3D or 4D, got {input.dim()}D instead")
        return softmax(input, -3)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`cross_entropy` as a module, a subclass of `torch.nn.CrossEntropyLoss` that can replace it.

    Its errors, and what its bits depend on, are those of `cross_entropy`.

    Args:
        weight: (C), a factor on the loss of each class; a buffer.
        ignore_index: A class index whose rows are ignored.
        reduction: "mean", "sum" or "none".
        label_smoothing: From 0 to 1, the share of a uniform distribution in the targets.
        scale: A number by which the logits are multiplied.
        softcap: As in `cross_entropy`.
        lse_square_scale: A factor on the square of each row's logsumexp, which is added to the row's loss.
        dtype: The dtype of the loss. None: the input's, or float32 under autocast.
        one_visit: As in `cross_entropy`.
        grad_scale: As in `cross_entropy`.
        inplace_backward: As in `cross_entropy`.

    Examples:
        >>> import torch
        >>> from cute_softmax import nn
        >>> nn.CrossEntropyLoss(reduction="none")(torch.zeros(2, 4), torch.tensor([3, 1]))
        tensor([1.3863, 1.3863])
    """

    scale: float = 1.0
    softcap: float | None = None
    lse_square_scale: float = 0.0
    dtype: torch.dtype | None = None
    one_visit: bool | None = None
    grad_scale: float | torch.Tensor = 1.0
    inplace_backward: bool = False

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        scale: float = 1.0,
        softcap: float | None = None,
        lse_square_scale: float = 0.0,
        dtype: torch.dtype | None = None,
        one_visit: bool | None = None,
        grad_scale: float | torch.Tensor = 1.0,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        self.scale, self.softcap, self.dtype = scale, softcap, dtype
        self.lse_square_scale = lse_square_scale
        self.one_visit, self.grad_scale, self.inplace_backward = one_visit, grad_scale, inplace_backward

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of a batch.

        Args:
            input: (C), (N, C) or (N, C, d1, ...): logits.
            target: Class indices or probabilities, as in `cross_entropy`.

        Returns:
            A scalar or, for reduction "none", the loss of each row.
        """
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            scale=self.scale,
            softcap=self.softcap,
            lse_square_scale=self.lse_square_scale,
            dtype=self.dtype,
            one_visit=self.one_visit,
            grad_scale=self.grad_scale,
            inplace_backward=self.inplace_backward,
        )
