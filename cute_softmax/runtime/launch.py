"""Tensors -> Plan -> compiled function -> launch."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from ..plan import (
    NO_PROLOGUE,
    NotPlanned,
    Plan,
    Prologue,
    RowClass,
    RowPlan,
    facts_of,
    hardware,
    plan_call,
)
from ..plan.choose import kernel_order
from ..plan.problem import ALIGNMENT, Operand
from ..plan.prologue import WHOLE
from . import private
from .cache import Store
from .clusters import clusters_at_once
from .record import note
from .tables import table_for

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FLOAT32 = struct.Struct("<f")
_OPERANDS = DTYPE_NAMES | {torch.bool: "bool", torch.int64: "int64"}

_store = Store()
_functions: dict[RowClass, object] = {}
_loading = threading.Lock()


class Work(NamedTuple):
    """One launch on tensors, whether it is to be made or only planned: see `run`."""

    math: str
    tensors: tuple[torch.Tensor, ...]
    dims: tuple[int, ...]
    online: bool = True
    prologue: Prologue = NO_PROLOGUE
    numbers: Sequence[float] = ()
    query: int | None = None
    invariant: bool = False

    def plan(self, device: hardware.Device, in_place: bool = False) -> RowPlan:
        """The plan of the launch on a GPU; of the tensors only shapes, strides, dtypes and addresses count."""
        operands = [operand(t) for t in self.tensors]
        return plan_call(
            self.math,
            self.tensors[0].shape,
            self.dims,
            operands,
            device,
            online=self.online,
            prologue=self.prologue,
            query=self.query,
            in_place=in_place,
            invariant=self.invariant,
        )

    def call(self, aligned: bool = False) -> Call:
        """The launch without its tensors and numbers: see `call_of`."""
        return call_of(
            self.math,
            self.tensors,
            self.dims,
            self.online,
            aligned=aligned,
            prologue=self.prologue,
            query=self.query,
            invariant=self.invariant,
        )


# {fixed}: names for the template's ints; {given}: what a launch is given; {ints}: all that the function gets, of both.
# {scratch}: a statement that allocates scratch memory where the plan has some.
_LAUNCH = """
def make(call):
    {fixed}, = call.template
    def launch(stream, {given}):
        try:
            call.function(stream, {ints})
        except Exception as error:
            raise launch_error(call.plan, error) from error
    return launch
"""


class Call:
    """A Plan bound to its compiled function.

    Calling it needs only what changes between calls of one form: the stream (an int), the operands' addresses and the
    prologue's numbers. order: which of the addresses is each operand of the plan's; None for their own order.

    launch(stream, *addresses, *scratch, *numbers): the same of ints alone: numbers as the kernel takes them, and the
        address of the scratch memory, if the plan has some.
    """

    __slots__ = ("arguments", "function", "launch", "numbers", "places", "plan", "scratch", "template")

    def __init__(self, plan: Plan, function: object, order: tuple[int, ...] | None = None):
        self.plan = plan
        self.function = function
        self.arguments = plan.arguments
        # All ints after the stream, with zeros for those of a call, and where these go: the address of the scratch
        # memory, the prologue's numbers, and each of the addresses.
        template = [*plan.arguments]
        self.scratch = len(template)
        template += [0] * bool(plan.scratch)
        names = getattr(plan.kernel, "prologue", NO_PROLOGUE).numbers
        self.numbers = [
            (len(template) + i, int if name in WHOLE else float_bits) for i, name in enumerate(names)
        ]
        template += [0] * len(names)
        places = []
        for strides in plan.operand_strides:
            places.append(len(template))
            template += 0, *strides
        self.places = places if order is None else [places[order.index(i)] for i in range(len(places))]
        self.template = template
        count = len(places) + bool(plan.scratch) + len(names)
        self.launch = self.written_out(_LAUNCH, [f"given{i}" for i in range(count)])(self)

    def __call__(self, stream: int, *addresses: int, numbers: Sequence[float] = ()) -> None:
        """Launch on `stream`, the current one of the current device.

        numbers: of the prologue (see `Prologue.numbers`): floats, and an int for the causal offset.
        Raises RuntimeError with the Plan's class if CUDA refuses the launch.
        """
        ints = [as_int(number) for (_, as_int), number in zip(self.numbers, numbers, strict=True)]
        if self.plan.scratch:
            scratch = self.allocated()
            ints.insert(0, scratch.data_ptr())
        self.launch(stream, *addresses, *ints)

    def allocated(self) -> torch.Tensor:
        """The scratch memory of one launch: freed behind it, it goes to what comes later on this stream."""
        make = torch.zeros if self.plan.zeroed else torch.empty
        return make(self.plan.scratch, dtype=torch.uint8, device="cuda")

    def written_out(self, source: str, given: Sequence[str]) -> Callable:
        """The function `make` that a source like `_LAUNCH` defines; given: expressions for what `launch` is given.

        Generated, as an argument list that is written out takes half a microsecond less than one that is put together.
        """
        places = [*self.places, *[self.scratch] * bool(self.plan.scratch)]
        places += [place for place, _ in self.numbers]
        scratch = "scratch = call.allocated()" if self.plan.scratch else ""
        return _maker(source, len(self.template), tuple(zip(places, given, strict=True)), scratch)

    def on_device(self, index: int, *addresses: int, numbers: Sequence[float] = ()) -> None:
        """Launch on the current stream of device `index`, whichever is the current device."""
        if private.current_device() == index:
            self(private.current_stream(index), *addresses, numbers=numbers)
            return
        with torch.cuda.device(index):
            self(private.current_stream(index), *addresses, numbers=numbers)


@cache
def _maker(source: str, size: int, given: tuple[tuple[int, str], ...], scratch: str) -> Callable:
    """See `Call.written_out`: for launches of `size` ints, with those that are given and their places."""
    expressions, fixed = dict(given), [f"fixed{i}" for i in range(size)]
    ints = [expressions.get(i, name) for i, name in enumerate(fixed)]
    fields = {"fixed": fixed, "given": expressions.values(), "ints": ints, "scratch": [scratch]}
    names = {"launch_error": launch_error}
    exec(source.format(**{name: ", ".join(words) for name, words in fields.items()}), names)
    return names["make"]


def float_bits(number: float) -> int:
    """The bits of a number rounded to float32, as an int; infinity for what is larger than any."""
    try:
        return int.from_bytes(_FLOAT32.pack(number), "little")
    except OverflowError:
        return float_bits(math.copysign(math.inf, number))


def launch_error(failed: Plan, error: Exception) -> RuntimeError:
    """One kind of error, whether or not cutlass is imported (which turns its own into another class)."""
    return RuntimeError(f"launching {failed.kernel.math} ({failed.kernel.name}) failed: {error}")


def function_of(kernel: RowClass) -> object:
    """The compiled function of a Plan class: from memory, from the store on disk, or built."""
    function = _functions.get(kernel)
    if function is None:
        with _loading:
            function = _functions.get(kernel)
            if function is None:
                name = f"{kernel.movement}_{kernel.math}"
                function = _functions[kernel] = _store.load(name, kernel.fields, lambda: _build(kernel))
                note(kernel)
    return function


def _build(kernel: RowClass) -> object:
    from .compile import compile_class

    return compile_class(kernel)


@cache
def device_facts(index: int, shipped_only: bool = False) -> hardware.Device:
    """What plans must know of CUDA device `index`; shipped_only: with no table but those of this package. Raises
    ValueError for an unsupported GPU."""
    facts = torch.cuda.get_device_properties(index)
    return hardware.Device(
        hardware.architecture_of((facts.major, facts.minor)),
        facts.multi_processor_count,
        facts.L2_cache_size,
        table_for(facts.name, shipped_only),
    )


def facts_for(index: int, invariant: bool, on_ranks: bool = False) -> hardware.Device:
    """What plans must know of a device; of batch-invariant ones no table of the user's own decides. on_ranks: of rows
    that go on on other ranks, whose clusters must all run at once: the driver is asked, which no other call waits for.
    """
    facts = device_facts(index, True) if invariant else device_facts(index)
    if on_ranks and facts.architecture.cluster_limit > 1:
        return replace(facts, eights=clusters_at_once(index, facts.architecture.shared_memory))
    return facts


def operand(tensor: torch.Tensor) -> Operand:
    """What a plan must know of a tensor."""
    return Operand(_OPERANDS[tensor.dtype], tensor.stride(), tensor.data_ptr() % ALIGNMENT)


def call_of(
    name: str,
    tensors: Sequence[torch.Tensor],
    dims: tuple[int, ...],
    online: bool = True,
    aligned: bool = False,
    prologue: Prologue = NO_PROLOGUE,
    query: int | None = None,
    invariant: bool = False,
    copies: bool = False,
) -> Call:
    """The Call for a row math on tensors of this form, planned and loaded once.

    tensors: its inputs, the prologue's bias, mask, scale and alpha (those that are tensors), its outputs and its group
    outputs, all expanded to the shape of the first; the Call takes their addresses in this order.
    aligned: for tensors like these whose addresses are multiples of 16 bytes, whatever theirs are.
    prologue: what happens to the scores before and to the results after.
    query: for a causal prologue the dimension whose index is a row's position.
    invariant: see `plan_call`. copies: whether the caller copies what the plan has `laid_out`.
    Raises NotPlanned where a prologue is not served, and for operands to be copied by a caller that does not.
    """
    operands = tuple(operand(t) for t in tensors)
    if aligned:
        operands = tuple(o._replace(address=0) for o in operands)
    # Inputs that are one tensor count as well: nothing is lost but speed.
    in_place = len({t.data_ptr() for t in tensors}) < len(tensors)
    found = _call(
        name,
        tensors[0].get_device(),
        tensors[0].shape,
        dims,
        operands,
        online,
        prologue,
        query,
        in_place,
        invariant,
    )
    if type(found) is str:
        raise NotPlanned(found)
    if found.plan.laid_out and not copies:
        raise NotPlanned("operands that do not lie as the plan takes them, which calls copy first")
    return found


@lru_cache(maxsize=4096)
def _call(
    name: str,
    device: int,
    shape: torch.Size,
    dims: tuple[int, ...],
    operands: tuple[Operand, ...],
    online: bool,
    prologue: Prologue,
    query: int | None,
    in_place: bool,
    invariant: bool,
) -> Call | str:
    """The Call, or why there is none: that is remembered, too."""
    try:
        made = plan_call(
            name,
            shape,
            dims,
            operands,
            facts_for(device, invariant, bool(prologue.ranks)),
            online=online,
            prologue=prologue,
            query=query,
            in_place=in_place,
            invariant=invariant,
        )
    except NotPlanned as reason:
        return str(reason)
    return _bound(made, name, prologue)


def call_for(work: Work, plan: RowPlan) -> Call:
    """The Call of a plan that was made for such tensors, whatever plan they would get: how plans are compared."""
    return _bound(plan, work.math, work.prologue)


def _bound(plan: RowPlan, name: str, prologue: Prologue) -> Call:
    order = kernel_order(name, prologue.of(name))
    return Call(plan, function_of(plan.kernel), order if list(order) != sorted(order) else None)


def run(
    name: str,
    tensors: Sequence[torch.Tensor],
    dims: tuple[int, ...],
    online: bool = True,
    prologue: Prologue = NO_PROLOGUE,
    numbers: Sequence[float] = (),
    query: int | None = None,
    invariant: bool = False,
) -> None:
    """Launch a row math on non-empty CUDA tensors, on their device and its current stream.

    numbers: the values of the prologue's numbers; other values compile nothing. Else as `call_of`, but that operands of
    which a plan takes copies are copied.
    """
    call = call_of(
        name, tensors, dims, online, prologue=prologue, query=query, invariant=invariant, copies=True
    )
    given = tensors
    if call.plan.laid_out:
        written = outputs_of(name, online, prologue)
        tensors = list(given)
        for i, strides in zip(call.plan.laid_out, call.plan.laid_strides, strict=True):
            tensors[i] = laid_out(given[i], strides, filled=i not in written)
    call.on_device(tensors[0].get_device(), *[t.data_ptr() for t in tensors], numbers=numbers)
    for i in call.plan.laid_out:
        if i in written:
            given[i].copy_(tensors[i])


def outputs_of(name: str, online: bool, prologue: Prologue) -> range:
    """Which of a call's tensors are full outputs of a math."""
    facts = facts_of(name, online, prologue.of(name))
    first = len(facts.inputs) + len(facts.group_inputs)
    return range(first, first + len(facts.outputs))


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...], filled: bool = True) -> torch.Tensor:
    """A tensor like this in other strides, 0 where it is broadcast; filled: with its elements."""
    once = [slice(1) if n > 1 and not s else slice(None) for n, s in zip(tensor.shape, strides, strict=True)]
    base = tensor[tuple(once)]
    rows = torch.empty_strided(base.shape, strides, dtype=tensor.dtype, device=tensor.device)
    if filled:
        rows.copy_(base)
    return rows.expand(tensor.shape)
