"""What the forms of eager calls share. A form holds what its first call decided; later calls find it again.

An operator's way through the dispatcher costs more host time than the launch. An eager call that repeats looks its form
up, allocates and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.compiler import is_dynamo_compiling

from ...runtime import private
from ...runtime.launch import Call
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

    def current(self) -> bool:
        """Whether the device is the current one."""
        return self.alone or private.current_device() == self.device


def launching(
    call: Call,
    place: Place,
    anywhere: Callable,
    results: Sequence[tuple[Sequence[int], Sequence[int], torch.dtype]],
    offsets: Sequence[int | None],
    addresses: Sequence[str] = (),
    hidden: int = 0,
) -> Callable:
    """A function of a call's inputs, and of its prologue's numbers, that allocates the results and launches.

    results: shape, strides and dtype of each; the function returns one, or a tuple, but for so many `hidden` ones at
    the end. offsets: how far from a multiple of 16 bytes each input begins, None where that does not matter; what
    begins elsewhere, or lies on another device than the current one, `anywhere` gets, and all that the plan takes
    copies of. addresses: what the call takes, as expressions of the inputs' addresses a0, a1, ... and the results' b0,
    b1, ...; these, if not given.
    """
    if call.plan.laid_out:
        return anywhere
    results = [
        (tuple(shape), tuple(strides), dtype) for shape, strides, dtype in results
    ]  # and no torch.Size
    count, made = range(len(offsets)), range(len(results))
    addresses = addresses or [*[f"a{i}" for i in count], *[f"b{i}" for i in made]]
    numbers = [f"n{i}" if as_int is int else f"as_int{i}(n{i})" for i, (_, as_int) in enumerate(call.numbers)]
    source = _launching(tuple(offsets), len(results), len(results) - hidden, len(numbers))
    scratch = ["data_ptr(scratch)"] * bool(call.plan.scratch)
    return call.written_out(source, [*addresses, *scratch, *numbers])(
        call,
        anywhere,
        results,
        [as_int for _, as_int in call.numbers],
        place.device,
        place.alone,
        empty_strided,
        torch.Tensor.data_ptr,
        private.current_stream,
        private.current_device,
    )


@cache
def _launching(offsets: tuple[int | None, ...], results: int, returned: int, numbers: int) -> str:
    """A source for `Call.written_out`, with what a `Place` asks written out, too."""
    count, made, rest = range(len(offsets)), range(results), range(numbers)
    given = ", ".join([*[f"x{i}" for i in count], *[f"n{i}" for i in rest]])
    vectors = [(i, offset) for i, offset in enumerate(offsets) if offset is not None]
    begins = " | ".join(f"(a{i} - {offset})" if offset else f"a{i}" for i, offset in vectors)
    lines = [f"a{i} = data_ptr(x{i})" for i in count]
    lines += [f"if ({begins}) & 15 or not (alone or current_device() == device): return anywhere({given})"]
    lines += [f"y{i} = empty(shape{i}, strides{i}, dtype{i})" for i in made]
    lines += [f"b{i} = data_ptr(y{i})" for i in made]
    return f"""
def make(
    call, anywhere, results, conversions, device, alone, empty, data_ptr, stream, current_device
):
    {{fixed}}, = call.template
    {"".join(f"(shape{i}, strides{i}, dtype{i}), " for i in made)} = results
    [{"".join(f"as_int{i}, " for i in rest)}] = conversions
    def run({given}):
        {(chr(10) + " " * 8).join(lines)}
        {{scratch}}
        try:
            call.function(stream(device), {{ints}})
        except Exception as error:
            raise launch_error(call.plan, error) from error
        return {", ".join(f"y{i}" for i in made[:returned])}
    return run
"""
