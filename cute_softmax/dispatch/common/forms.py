"""What the forms of eager calls share. A form holds what its first call decided; later calls find it again.

An operator's way through the dispatcher costs more host time than the launch. An eager call that repeats looks its form
up, allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...runtime import private
from ...runtime.private import forward_ad
from .state import TENSORS


def _empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


# What code compiled by inductor allocates with: 0.6 us less than torch.empty_strided.
empty_strided = private.look_up("_C._dynamo.guards._empty_strided_cuda") or _empty_strided
_TensorGuards = private.look_up("_C._dynamo.guards.TensorGuards")

MOST_SHAPES = 4096  # a program with ever new ones starts over, at some 50 us each
# They differ in strides, dtypes, arguments, and in what of torch's state the dispatcher looks at (autograd, autocast).
MOST_OF_A_SHAPE = 8


class Forms(dict[torch.Size, tuple]):
    """The forms of one function by the shape of its input. Each has a method `fits(input, ...)`.

    latest: that of the last call found, to be looked at first: a model tends to repeat it.
    """

    latest = None

    def find(self, input: torch.Tensor, *call: object) -> object | None:
        """The form of an eager call, if it has been made before."""
        if type(input) not in TENSORS:
            return None
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


def repeated(known: Forms, input: torch.Tensor, *call: object) -> object | None:
    """The form of an eager call that repeats; None for the first of its form, and where torch traces or has duals."""
    if torch.compiler.is_compiling():
        return None
    form = known.latest
    if form is None or not form.fits(input, *call):
        form = known.find(input, *call)
    return None if form is None or forward_ad._current_level >= 0 else form


def guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Whether as many others are like these (type, device, dtype, shape, strides, whether they require a gradient), and
    torch in the same state (autocast, functorch, dispatch modes); one call into C++ that keeps no tensor. Where torch
    has none, nothing is like another: every call is decided anew."""
    if _TensorGuards is None:
        return lambda *_: False
    shapes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    return _TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


class Place:
    """The device of a tensor, for calls that are planned once for whole vectors."""

    __slots__ = ("alone", "device")

    def __init__(self, tensor: torch.Tensor):
        self.device, self.alone = tensor.get_device(), torch.cuda.device_count() == 1

    def suits(self, addresses: Sequence[int]) -> bool:
        """Whether operands at these addresses begin with whole vectors, and lie on the current device."""
        return not any([address & 15 for address in addresses]) and self.current()

    def current(self) -> bool:
        """Whether the device is the current one."""
        return self.alone or private.current_device() == self.device

    def stream(self) -> int:
        """The device's current stream."""
        return private.current_stream(self.device)
