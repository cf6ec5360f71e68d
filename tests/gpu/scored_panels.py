"""Calls on scores in every movement of panels: for the tests on a GPU, and as jobs for `sanitize.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random

import panels
import torch
from checking import DTYPES, random
from families import Case
from sanitize_family import sinks_of
from sanitizing import Job, received, sent, timed

from cute_softmax.plan import PanelPlan, Prologue, plan_panel
from cute_softmax.plan.choose import kernel_order
from cute_softmax.plan.hardware import Device
from cute_softmax.plan.problem import canonical
from cute_softmax.runtime import launch

FORWARD = (
    Prologue(mask=True),
    Prologue(scale="number", alpha="number"),
    Prologue(scale="groups", mask=True, zero=True),
    Prologue(bias=True, mask=True),
    Prologue(scale="groups", bias=True, alpha="groups", zero=True),
    Prologue(causal=True),
    Prologue(mask=True, causal=True, zero=True),
    Prologue(scale="number", causal=True, zero=True),
    Prologue(scale="groups", bias=True, mask=True, causal=True),
    Prologue(sink=True),
    Prologue(scale="number", mask=True, sink=True),
)
GRADIENTS = (
    Prologue(scale="number", alpha="number"),
    Prologue(scale="groups", causal=True),
    Prologue(scale="groups", mask=True),
    Prologue(sink=True),
    Prologue(scale="number", mask=True, sink=True),
)
MATHS = ("softmax", "softmax_backward", "log_softmax", "logsumexp", "log_softmax_backward", "entropy")
# Where tensors lie, and of what shape a bias and a mask are: one for all rows, one for each, or whole.
PLACES = ((0, 0), (3, 5), (0, 1))
BESIDE = ("columns", "rows", "whole")
LENGTHS = {"row": 4003, "column": 331}


@dataclass(frozen=True)
class Form:
    """A call over the last dimension of a matrix that lies row by row or column by column, and its movement, a name in
    `panels.SMALL`. beside: see `BESIDE`; odd: elements that it lies past a boundary; patient: whether CTAs wait for the
    others, or leave their part to the last."""

    math: str
    prologue: Prologue
    dtype: str
    orientation: str
    movement: str
    place: tuple[int, int]
    beside: str
    odd: int = 0
    patient: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        columns = LENGTHS[self.orientation] - (3 if self.place == (0, 0) else 0)
        return (75 if self.place[1] else 72) if self.orientation == "column" else 5, columns

    @property
    def words(self) -> str:
        how = f"{self.orientation} {self.movement}, at {self.place}, {self.beside} beside"
        how += "" if self.patient else ", impatient"
        return f"{self.math} {self.dtype} {self.prologue.name}, {how}"


def supported(math: str, prologue: Prologue) -> Prologue:
    """What of a prologue a math has."""
    if not math.startswith("softmax"):
        prologue = replace(prologue, alpha="")
    if math == "entropy":
        prologue = replace(prologue, sink=False)
    return replace(prologue, mask=False) if math == "softmax_backward" else prologue


def forms(
    maths: tuple[str, ...] = MATHS, dtypes: tuple[str, ...] = ("bf16", "fp32", "fp16")
) -> Iterator[Form]:
    """Each prologue of each math in both orientations, twice, and rows a row ahead; all else at random."""
    rng = Random(3)
    for math_name, orientation, odd in product(maths, ("row", "column"), range(2)):
        for prologue in GRADIENTS if math_name.endswith("_backward") else FORWARD:
            movements = [name for name in panels.SMALL if "ahead" not in name]
            ahead = not (prologue.bias or prologue.mask or odd) and math_name in ("softmax", "log_softmax")
            movement = rng.choice(movements)
            if ahead and orientation == "row":
                movement = rng.choice([name for name in panels.SMALL if name not in movements])
            how = rng.choice(dtypes), orientation, movement, rng.choice(PLACES), rng.choice(BESIDE)
            yield Form(math_name, supported(math_name, prologue), *how, odd)
    # What is beside such rows is the same for all of them.
    for math_name, prologue in product((m for m in maths if m in ("softmax", "log_softmax")), FORWARD):
        if prologue.bias or prologue.mask:
            for patient in (True, False):
                how = rng.choice(dtypes), "row", "a row ahead", (0, 0), "columns"
                yield Form(math_name, supported(math_name, prologue), *how, patient=patient)


def beside(form: Form, tensor: torch.Tensor) -> torch.Tensor:
    """A matrix broadcast as a form says, that lies as the elements do, `odd` elements past a boundary."""
    rows, columns = form.shape
    kept = {"columns": (1, columns), "rows": (rows, 1), "whole": (rows, columns)}[form.beside]
    tensor = tensor[: kept[0], : kept[1]]
    lying = tensor.mT if form.orientation == "column" else tensor
    memory = torch.empty(tensor.numel() + form.odd, dtype=tensor.dtype, device=tensor.device)
    memory[form.odd :].copy_(lying.flatten())
    found = memory[form.odd :].view(lying.shape)
    return found.mT if form.orientation == "column" else found


def case_of(form: Form) -> Case:
    """Random tensors with -inf among them."""
    math_name, prologue, shape, dtype = form.math, form.prologue, form.shape, DTYPES[form.dtype]
    x, fields = random(shape, dtype, 1, 2.0), {"place": form.place, "turned": form.orientation == "column"}
    for name, number in (("scale", -0.5), ("alpha", 2.5)):
        if how := getattr(prologue, name):
            groups = random((shape[0], 1), torch.float32, 2).abs() + 0.25
            fields[name] = number if how == "number" else groups
    if prologue.sink:
        fields["sink"] = sinks_of(math_name, shape)
    if prologue.causal:
        fields["offset"] = shape[1] // 2 - 2
    if math_name.endswith("_backward"):
        forward = Case(
            math_name.removesuffix("_backward"), x.roll(1, -1), offset=fields.get("offset"), zero=True
        )
        y = forward.expected(torch.float32)[0] * fields.get("alpha", 1.0)
        if prologue.mask:  # it names no tensor; -inf in y does
            fields["mask"] = torch.ones(1, dtype=torch.bool, device=x.device)
            y[:, ::3] = -math.inf
        return Case(math_name, x, y=y.to(dtype), **fields)
    if prologue.bias:
        fields["bias"] = beside(form, random(shape, dtype, 3))
    if prologue.mask:
        kept = random(shape, torch.float32, 4) < 0.5
        kept[1] = False  # nothing of a row
        fields["mask"] = beside(form, kept)
    if prologue.scale != "number":  # which is negative
        x[-1, shape[1] // 2 :] = -math.inf
    return Case(math_name, x, zero=prologue.zero and math_name != "logsumexp", **fields)


def planned(form: Form, case: Case, tensors: list[torch.Tensor], device: Device) -> PanelPlan | None:
    """The plan in the form's movement; None where there is no such."""
    prologue, dims = case.prologue.of(form.math), (case.x.dim() - 1,)
    operands = [launch.operand(tensors[i]) for i in kernel_order(form.math, prologue)]
    problem = canonical(case.x.shape, dims, operands, case.query if prologue.causal else None)
    made = plan_panel(form.math, problem, device, False, prologue=prologue)
    assert made.kernel.orientation == form.orientation, made.kernel.name
    found = dict(panels.movements(made, device.architecture.cluster_limit)).get(form.movement)
    room = found is not None and found.kernel.shared_memory <= device.architecture.shared_memory
    return replace(found, patience=found.patience if form.patient else 0) if room else None


def work_of(form: Form, case: Case, tensors: list[torch.Tensor]) -> launch.Work:
    return launch.Work(form.math, tuple(tensors), (1,), prologue=case.prologue, query=case.query)


def check(form: Form, device: Device) -> float:
    """Launch what lies on the host and compare; the seconds from the launch to its end. Raises AssertionError on a
    wrong result."""
    case = case_of(form)
    tensors, outputs = case.placed()
    call = launch.call_for(work_of(form, case, tensors), planned(form, case, tensors, device))
    copies = [sent(t) for t in tensors]
    stream = torch.cuda.current_stream().cuda_stream
    seconds = timed(lambda: call(stream, *(t.data_ptr() for t in copies), numbers=case.numbers))
    results = [received(o, t) for o, t in zip(outputs, copies[-len(outputs) :], strict=True)]
    case.check(case.shown(results))
    return seconds


def jobs(device: Device, maths: list[str], names: list[str]) -> Iterator[Job]:
    """Every form that there is a plan of."""
    for form in forms(tuple(m for m in MATHS if m in maths), tuple(names)):
        case = case_of(form)
        if made := planned(form, case, case.placed()[0], device):
            size = case.x.numel()
            yield Job((made.kernel,), size, f"{form.words}: {made.kernel.name}", partial(check, form, device))
