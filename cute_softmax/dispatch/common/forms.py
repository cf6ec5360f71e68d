"""What the forms of eager calls share. A form holds what its first call decided; later calls find it again.

An operator's way through the dispatcher costs more host time than the launch. An eager call that repeats looks its form
up, allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .state import TENSORS

try:  # what code compiled by inductor allocates with: 0.6 us less than torch.empty_strided
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided
except ImportError:

    def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


MOST_SHAPES = 4096  # a program with ever new ones starts over, at some 50 us each
# They differ in strides, dtypes, arguments, and in what of torch's state the dispatcher looks at (autograd, autocast).
MOST_OF_A_SHAPE = 8


class Forms(dict[torch.Size, tuple]):
    """The forms of one function by the shape of its input. Each has a method `fits(input, ...)`, and is given a
    `follower`: the form that came after it last time, which is looked at first, as a model repeats its calls in their
    order.

    latest: the form of the last call; whoever calls a form sets it.
    """

    __slots__ = ("latest",)

    def __init__(self):
        self.latest = _Beginning()

    def repeated(self, input: torch.Tensor, *call: object) -> object | None:
        """The form of an eager call that repeats; None for the first, and where torch traces or has duals."""
        if is_dynamo_compiling():  # of other tracers a guard finds the mode, or the subclass of tensors
            return None
        form = self.latest.follower
        if form is None or not form.fits(input, *call):
            form = self.find(input, *call)
        if form is None or forward_ad._current_level >= 0:
            return None
        self.latest = form
        return form

    def find(self, input: torch.Tensor, *call: object) -> object | None:
        """The form of an eager call, if it has been made before."""
        return self.look_up(input, *call) if type(input) in TENSORS else None

    def look_up(self, input: torch.Tensor, *call: object) -> object | None:
        """`find` for what is known to be a tensor that has memory."""
        for form in self.get(input.shape, ()):
            if form.fits(input, *call):
                self.latest.follower = form
                return form
        return None

    def remember(self, input: torch.Tensor, form: object) -> None:
        """Add a new form, which is called now."""
        if len(self) >= MOST_SHAPES:
            self.clear()
        alike = (*self.get(input.shape, ()), form)
        for forgotten in alike[:-MOST_OF_A_SHAPE]:
            forgotten.follower = forgotten  # which else would keep alive what came after it
        self[input.shape] = alike[-MOST_OF_A_SHAPE:]  # anew: another thread may be looking through them
        self.latest.follower = form
        self.latest = form.follower = form

    def clear(self) -> None:
        """Forget all forms."""
        super().clear()
        self.latest = _Beginning()


class _Beginning:
    """Stands for a form before the first call."""

    follower = None


def guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    """Whether as many others are like these (type, device, dtype, shape, strides, whether they require a gradient), and
    torch in the same state (autocast, functorch, dispatch modes); one call into C++ that keeps no tensor."""
    shapes, strides = [[*t.shape] for t in tensors], [[*t.stride()] for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


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
        return self.alone or torch._C._cuda_getDevice() == self.device

    def stream(self) -> int:
        """The device's current stream."""
        return torch._C._cuda_getCurrentRawStream(self.device)
