"""Forms of eager calls: each holds what its first call decided, and later calls of the form find it again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C._dynamo.guards import TensorGuards

MOST_SHAPES = 4096  # a program with ever new ones starts over, at some 50 us each
# They differ in strides, dtypes, arguments, and in what of torch's state the dispatcher looks at (autograd, autocast).
MOST_OF_A_SHAPE = 8


class Forms(dict[torch.Size, tuple]):
    """The forms of one function by the shape of its input. Each has a method `fits(input, ...)`.

    latest: that of the last call found, to be looked at first: a model tends to repeat it.
    """

    latest = None

    def find(self, input: torch.Tensor, *call: object) -> object | None:
        """The form of a call, if it has been made before."""
        for form in self.get(input.shape, ()):
            if form.fits(input, *call):
                self.latest = form
                return form
        return None

    def remember(self, input: torch.Tensor, form: object) -> None:
        """Add a new form."""
        if len(self) >= MOST_SHAPES:
            self.clear()
        # Anew: another thread may be looking through them.
        self[input.shape] = (*self.get(input.shape, ()), form)[-MOST_OF_A_SHAPE:]

    def clear(self) -> None:
        """Forget all forms."""
        super().clear()
        self.latest = None


def guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Whether as many others are like these (type, device, dtype, shape, strides, whether they require a gradient), and
    torch in the same state (autocast, functorch, dispatch modes); one call into C++ that keeps no tensor."""
    shapes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
