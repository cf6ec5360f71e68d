"""The jobs of scores with a scale, a bias, a mask or a diagonal for `sanitize.py`: rows of every kind of
configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil, log

import classes
import torch
from checking import DTYPES, random
from families import Case
from prologues import plan_of
from sanitizing import Job, received, sent, timed

from cute_softmax.plan import MATHS, NO_PROLOGUE, NotPlanned, Plan, Prologue, RowClass, vector_of
from cute_softmax.plan.choose import kernel_order
from cute_softmax.plan.hardware import Device
from cute_softmax.runtime import launch

PROLOGUES = (
    Prologue(scale="number"),
    Prologue(mask=True, zero=True),
    Prologue(causal=True, zero=True),
    Prologue(scale="groups", alpha="groups"),
    Prologue(scale="number", bias=True),
    Prologue(scale="number", mask=True, causal=True, alpha="number", zero=True),
    Prologue(scale="groups", bias=True, mask=True, causal=True, zero=True),
    Prologue(sink=True),
    Prologue(scale="number", mask=True, sink=True),
)
GRADIENTS = (
    Prologue(scale="number"),
    Prologue(causal=True),
    Prologue(scale="groups", alpha="groups"),
    Prologue(scale="number", mask=True, causal=True),
    Prologue(sink=True),
    Prologue(scale="number", mask=True, sink=True),
)
# Maths that have every prologue on every kind of configuration, and those that have every so many of these pairs.
WHOLE = ("softmax", "softmax_backward")
TURNS = ("log_softmax", "log_softmax_backward", "logsumexp", "entropy")
EVERY = 4


@dataclass(frozen=True)
class Form:
    """A call and the plan that it must have. ragged: whether rows begin and end within vectors; one: whether a bias and
    a mask are the same for all rows."""

    math: str
    prologue: Prologue
    dtype: str
    ragged: bool
    shape: tuple[int, ...]
    made: Plan
    one: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Elements past a boundary, and between rows (see `Case`)."""
        return place(self.shape[-1], self.ragged)


def place(columns: int, ragged: bool) -> tuple[int, int]:
    return (1, 1 + columns % 2) if ragged else (0, 0)


def kind(c: RowClass) -> tuple:
    """What of a configuration makes another code than numbers do."""
    apart = min(c.threads_per_row, 32), c.rows_per_thread > 1, c.warps_per_row > 1
    how = c.staging[:1], "resident" in c.staging, c.staged > 0
    return *apart, min(c.cluster_n, 2), c.cluster_n > 8, *how, c.persistent, c.keep


def planned(
    math: str, prologue: Prologue, dtype: str, ragged: bool, shape: tuple[int, ...], one: bool = False
) -> Plan | None:
    """The plan of a call as `case_of` places its tensors; None if it is not one of rows. one: see `Form`."""
    offset, pad = place(shape[-1], ragged)
    names = ("x", "dy", "y", "dx")
    pitch = shape[-1] + pad
    strides = {name: (shape[1] * pitch, pitch, 1) for name in names}
    strides |= dict.fromkeys(("bias", "mask"), (0, 0, 1)) if one else {}
    with classes.given(1):  # as if there were many rows
        made = plan_of(
            math,
            prologue,
            shape,
            (dtype, dtype),
            shared=True,
            strides=strides,
            offsets=dict.fromkeys(names, offset),
            others=dict.fromkeys(MATHS[math, True].group_outputs, dtype),  # as the call's results
        )
    return made if isinstance(made, Plan) else None


def kinds(math: str, prologue: Prologue, dtype: str, ragged: bool) -> Iterator[Form]:
    """The first class of each kind of configuration, on rows a few vectors longer than its shortest.

    Of more than one tile, the last one ragged; a persistent kernel's only cluster takes three.
    """
    seen, columns = set(), 1 + ragged
    while True:
        unit = 1 if ragged else vector_of((dtype,), columns)
        columns = ceil(columns / unit) * unit
        try:
            made = planned(math, prologue, dtype, ragged, (2, 40, columns))
        except NotPlanned:
            return
        if made is None:
            return
        c = made.row_class
        longer = columns + min((c.capacity - columns) // 8, 64) // c.vector * c.vector
        if kind(c) not in seen:
            seen.add(kind(c))
            rows = 3 if c.persistent else 2 if c.tiler[0] == 1 else c.tiler[0] + 1
            shape = (1 if c.persistent or rows > 9 else 2, rows, longer)
            made = planned(math, prologue, dtype, ragged, shape)
            assert kind(made.row_class) == kind(c), f"{made.row_class.name} instead of {c.name}"
            assert made.share * (c.cluster_n - 1) < longer, "a CTA of the cluster has no columns"
            yield Form(math, prologue, dtype, ragged, shape, made)
        shape = (1, 3, longer)
        made = planned(math, prologue, dtype, ragged, shape, one=True)
        if made and "resident" in made.row_class.staging and kind(made.row_class) not in seen:
            seen.add(kind(made.row_class))
            yield Form(math, prologue, dtype, ragged, shape, made, one=True)
        columns = c.capacity + 1


def supported(math: str, prologue: Prologue) -> Prologue:
    """What of a prologue a math has."""
    if math not in ("softmax", "softmax_backward"):
        prologue = replace(prologue, alpha="")
    if math == "softmax_backward":
        prologue = replace(prologue, mask=False)
    if math == "logsumexp" or math.endswith("_backward"):
        prologue = replace(prologue, zero=False)
    return replace(prologue, sink=False) if math == "entropy" else prologue


def forms(maths: list[str], names: list[str]) -> Iterator[Form]:
    """Of those maths and dtypes: each prologue on each kind of configuration, with dtypes and edges in turns."""
    for math in maths:
        prologues = GRADIENTS if math.endswith("_backward") else PROLOGUES
        for i, prologue in enumerate(prologues if math in WHOLE else (*prologues, NO_PROLOGUE)):
            found: dict[tuple, list[Form]] = {}
            for dtype, ragged in product(names, (False, True)):
                for form in kinds(math, supported(math, prologue), dtype, ragged):
                    found.setdefault(kind(form.made.row_class), []).append(form)
            for n, of_kind in enumerate(found.values()):
                if math in WHOLE or (i + n) % EVERY == 0:
                    yield of_kind[(i + n) % len(of_kind)]


def case_of(form: Form) -> Case:
    """Random tensors, on the host."""
    math, prologue, shape, dtype = form.math, form.prologue, form.shape, DTYPES[form.dtype]
    x, fields = random(shape, dtype, 1, 2.0), {"place": form.place}
    for name, number in (("scale", 0.5), ("alpha", 2.5)):
        if how := getattr(prologue, name):
            groups = random((*shape[:-1], 1), torch.float32, 2).abs() + 0.25
            fields[name] = number if how == "number" else groups
    if prologue.sink:
        fields["sink"] = sinks_of(math, shape)
    beside = shape[2 if form.one else 1 :]
    if prologue.bias:
        fields["bias"] = random(beside, dtype, 3)
    if prologue.mask:
        fields["mask"] = random(beside, torch.float32, 4) < 0.5
    if prologue.causal:
        fields["offset"] = (shape[2] - shape[1]) // 2
    if not math.endswith("_backward"):
        x[..., -1, shape[2] // 2 :] = float("-inf")
        return Case(math, x, zero=prologue.zero, **fields)
    forward = Case(math.removesuffix("_backward"), x.roll(1, -1), offset=fields.get("offset"), zero=True)
    y = forward.expected(torch.float32)[0] * fields.get("alpha", 1.0)
    if prologue.mask:  # it names no tensor; -inf in y does
        fields["mask"] = torch.ones(1, dtype=torch.bool)
    return Case(math, x, y=y.to(dtype), **fields)


def sinks_of(math: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Sinks of a call over the last dimension as large as a row's sum, one of them nothing; of gradients their
    logarithms in the softmax."""
    found = random((*shape[:-1], 1), torch.float32, 5, 2.0)
    found = -found.abs() if math.endswith("_backward") else found + log(shape[-1])
    found.view(-1)[-1] = float("-inf")
    return found


def work_of(form: Form, case: Case, tensors: list[torch.Tensor]) -> launch.Work:
    """The call of a form on its case's tensors."""
    dims = (case.x.dim() - 1,)
    return launch.Work(form.math, tuple(tensors), dims, prologue=form.prologue, query=case.query)


def check(form: Form, device: Device) -> float:
    """Launch and compare; the seconds from the launch to its end. Raises AssertionError on a wrong result."""
    case = case_of(form)
    tensors, outputs = case.placed()
    order = kernel_order(form.math, form.prologue)
    work = work_of(form, case, tensors)
    with classes.given(1):
        made = work.plan(device)
    assert made.kernel == form.made.kernel, f"planned as {made.kernel.name}"
    copies = [sent(t) for t in tensors]
    if made.kernel.persistent:  # one cluster takes all tiles
        made = replace(made, ctas=1)
    call = launch.Call(made, launch.function_of(made.kernel), order)
    stream = torch.cuda.current_stream().cuda_stream
    seconds = timed(lambda: call(stream, *(t.data_ptr() for t in copies), numbers=case.numbers))
    results = [received(o, t) for o, t in zip(outputs, copies[-len(outputs) :], strict=True)]
    case.check(case.shown(results))
    return seconds


def jobs(device: Device, maths: list[str], names: list[str]) -> Iterator[Job]:
    """Rows of the maths that have prologues, each class once."""
    names = [name for name in names if name in ("bf16", "fp32")]
    found = {}
    for form in forms([m for m in (*WHOLE, *TURNS) if m in maths], names):
        found.setdefault(form.made.kernel, form)
    for c, form in found.items():
        what = f"{c.math} {'/'.join(c.dtypes)} {c.name}, {' x '.join(map(str, form.shape))}"
        yield Job((c,), torch.Size(form.shape).numel(), what, partial(check, form, device))
