"""Each form of the short movement on a small grid, for compute-sanitizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from math import prod

import checking
import classes
import short_heads
import short_scores
import torch
from checking import Guarded
from families import Case
from sanitizing import Job, received, sent, timed

from cute_softmax.plan import MATHS, table_of
from cute_softmax.plan.short import ShortClass
from cute_softmax.plan.short_plan import ShortPlan
from cute_softmax.runtime import launch

MATHS_OF_SHORT = ("softmax", "softmax_backward", "logsumexp", "sum")
# Rows before vectors, of single elements, words, half vectors and vectors, even and odd numbers of them, in each class.
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 19, 20, 24, 31, 32, 38, 40, 47, 48, 57, 60, 62, 64)
OFFSETS = (0, 1, 2)


@classes.however_few()
def planned(
    math: str, pair: tuple[str, str], rows: int, columns: int, offset: int
) -> tuple[ShortPlan, list[Guarded]]:
    """The device's plan for guarded tensors of the host, and these."""
    dtypes, facts = classes.operands(math, pair), MATHS[math, True]
    buffers = [
        Guarded((rows, columns) if i < facts.full else (rows, 1), checking.DTYPES[d], offset=offset)
        for i, d in enumerate(dtypes)
    ]
    views = [b.tensor if b.tensor.shape[1] == columns else b.tensor.expand(rows, columns) for b in buffers]
    plan = launch.Work(math, tuple(views), (1,)).plan(launch.device_facts(0))
    return plan, buffers


def check(math: str, pair: tuple[str, str], rows: int, columns: int, offset: int) -> float:
    """Launch and compare; the seconds from the launch to its end. Raises AssertionError on a wrong result."""
    plan, buffers = planned(math, pair, rows, columns, offset)
    buffers[0].tensor.copy_(torch.randn(rows, columns))
    if math == "softmax_backward":
        buffers[1].tensor.copy_(torch.softmax(torch.randn(rows, columns), -1))
    elif math != "sum":
        buffers[0].tensor[-1, columns // 2 :] = float("-inf")
    copies = [sent(b.tensor) for b in buffers]
    call = launch.Call(plan, launch.function_of(plan.kernel))
    stream = torch.cuda.current_stream().cuda_stream
    seconds = timed(lambda: call(stream, *[t.data_ptr() for t in copies]))
    result = received(buffers[-1], copies[-1])
    if MATHS[math, True].group_outputs:
        checking.check_reduction(math, result.view(-1), buffers[0].tensor)
    elif math == "softmax":
        checking.check_softmax(result, buffers[0].tensor)
    else:
        checking.check_backward(result, buffers[0].tensor, buffers[1].tensor)
    return seconds


def jobs(maths: list[str], names: list[str]) -> Iterator[Job]:
    """Each class once, and lengths that move rows in other pieces: two stretches and a row, so that the last one ends
    within a vector; of mixed dtypes and tensors off a boundary those whose rows share words."""
    seen: set[tuple[ShortClass, int]] = set()
    longest = table_of().short[-1].capacity
    for math in (m for m in MATHS_OF_SHORT if m in maths):
        for pair, columns, offset in product(classes.PAIRS_OF[math], LENGTHS, OFFSETS):
            usual = pair in classes.SAME and not offset
            if not {*pair} <= {*names} or columns > longest or not (usual or columns in (2, 7, 24, 57)):
                continue
            plan, _ = planned(math, pair, 3, columns, offset)
            pieces = columns & -columns if columns < 8 else (columns & -columns) % 16
            if (plan.kernel, pieces) in seen:
                continue
            seen.add((plan.kernel, pieces))
            rows = 2 * plan.kernel.elements // columns + 1
            what = f"{math} {'/'.join(plan.kernel.dtypes)} {plan.kernel.name}, {rows} x {columns} at {offset}"
            yield Job((plan.kernel,), rows * columns, what, partial(check, math, pair, rows, columns, offset))
    yield from scored_jobs(maths, names)
    yield from chosen_jobs(maths, names)


@classes.however_few()
def check_scores(case: Case) -> float:
    """The same of a call on scores."""
    tensors, outputs = case.placed()
    work = work_of(case, tensors)
    plan = work.plan(launch.device_facts(0))
    copies = [sent(t) for t in tensors]
    call, stream = launch.call_for(work, plan), torch.cuda.current_stream().cuda_stream
    seconds = timed(lambda: call(stream, *(t.data_ptr() for t in copies), numbers=case.numbers))
    case.check(case.shown([received(o, t) for o, t in zip(outputs, copies[-len(outputs) :], strict=True)]))
    return seconds


def work_of(case: Case, tensors: list[torch.Tensor]) -> launch.Work:
    return launch.Work(
        case.math, tuple(tensors), (case.x.dim() - 1,), prologue=case.prologue, query=case.query
    )


def scored_jobs(maths: list[str], names: list[str]) -> Iterator[Job]:
    """Every form of what is beside the elements, each class once."""
    found = [
        (case.x.numel(), partial(check_scores, case), partial(plan_of, case))
        for name, columns in product((n for n in names if n != "fp16"), (3, 8, 12, 49, 64))
        for case in short_scores.cases(columns, checking.DTYPES[name])
    ]
    yield from each_class_once(maths, found)


def plan_of(case: Case) -> ShortPlan:
    return work_of(case, case.placed()[0]).plan(launch.device_facts(0))


def each_class_once(
    maths: list[str], found: Iterable[tuple[int, Callable[[], float], Callable[[], ShortPlan]]]
) -> Iterator[Job]:
    """Of some (elements, check, plan)."""
    seen: set[ShortClass] = set()
    for elements, check, plan in found:
        with classes.however_few():
            kernel = plan().kernel
        if kernel.math in maths and kernel not in seen and kernel.movement == "short":
            seen.add(kernel)
            what = f"{kernel.math} {'/'.join(kernel.dtypes)} {kernel.name}"
            yield Job((kernel,), elements, what, check)


@classes.however_few()
def check_losses(case: short_heads.LossCase) -> float:
    """The same of losses, or of a visit."""
    work, numbers = case.work()
    call, stream = launch.call_for(work, case.plan()), torch.cuda.current_stream().cuda_stream
    copies = [sent(t) for t in work.tensors]
    seconds = timed(lambda: call(stream, *(t.data_ptr() for t in copies), numbers=numbers))
    losses, *gradient = case.results
    case.check([received(losses, copies[-1]), *(received(g, copies[-2]) for g in gradient)])
    return seconds


def chosen_jobs(maths: list[str], names: list[str]) -> Iterator[Job]:
    """What an index chooses: in losses with every option, and alone, each class once."""
    found = []
    for name, columns in product((n for n in names if n != "fp16"), (3, 4, 8, 12, 49, 64, 77, 128)):
        dtype, elements = checking.DTYPES[name], prod(short_heads.ROWS) * columns
        for case in [*short_heads.loss_cases(columns, dtype)][columns % 4 :: 4]:
            found.append((elements, partial(check_losses, case), case.plan))
        for case in short_heads.cases(columns, dtype):
            found.append((elements, partial(check_scores, case), partial(plan_of, case)))
    yield from each_class_once(maths, found)
