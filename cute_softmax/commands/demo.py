"""The demo: one softmax, forward and backward, checked against float64, explained, timed and drawn.

Without a GPU the same kernels are compiled for sm_90a, the result comes from the CPU, and nothing is timed.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ..api.explain import plan_softmax
from ..api.softmax import softmax, softmax_backward
from ..draw import write
from ..plan import RowPlan
from ..plan.problem import canonical_dims, check_float
from ..runtime import launch
from ..runtime.resources import resources
from .compare import agrees, errors

ARCHITECTURE = "sm_90a"  # compiled for where there is no GPU
TEMPERATURE = (
    0.5  # of normal logits: the largest probability of a row is a few percent, as in a language model
)
WARM, CALLS = 3, 15
FLUSH_BYTES = 256 << 20
# Of memory for each element: inputs, results and gradients, ours and torch's (27 in fp32 on a CPU).
BYTES = 32
# Under this an event pair also times the queue.
SHORT_US = 50.0


def run(
    shape: tuple[int, int] = (4096, 8192), dtype: str = "bf16", out: Path = Path("out"), dim: int = -1
) -> int:
    """Run the demo on [M, N] logits and print what it finds; 1 if a result is wrong.

    out: the folder that the Plans' diagrams are written to; dim: the dimension to reduce.
    Raises TypeError for a dtype without kernels, IndexError for a dimension out of range, and ValueError for more
    elements than there is memory for.
    """
    check_float(dtype)
    canonical_dims(dim, len(shape))
    on_gpu = torch.cuda.is_available()
    needed, room = math.prod(shape) * BYTES, memory(on_gpu)
    if needed > room:
        raise ValueError(
            f"the demo of {'x'.join(map(str, shape))} takes {needed / 1e9:,.1f} GB of memory, and there are "
            f"{room / 1e9:,.1f}"
        )
    if on_gpu:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    else:
        print(
            f"No GPU here: kernels are compiled for {ARCHITECTURE}, results come from the CPU, "
            "nothing is timed.\n"
        )
    torch_dtype = launch.TORCH_DTYPES[dtype]
    generator = torch.Generator("cuda" if on_gpu else "cpu").manual_seed(0)
    x = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    x = (x / TEMPERATURE).to(torch_dtype).requires_grad_()
    dy = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(torch_dtype)

    y = softmax(x, dim)
    y.backward(dy)
    right = check(*(t.detach().movedim(dim, -1) for t in (x, dy, y, x.grad)))

    plans = [plan_softmax(x, dim, backward=backward) for backward in (False, True)]
    for plan in plans:
        print(plan.explain(), end="\n\n")
    if on_gpu:
        time_all(x.detach(), dy, y.detach(), dim)
    else:
        compile_all(plans)
    draw(plans, out)
    return 0 if right else 1


def memory(on_gpu: bool) -> int:
    """The bytes that are free on the GPU, or that this machine has."""
    if on_gpu:
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check(x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor) -> bool:
    """Print the errors of rows and of torch's, against float64. Whether ours are no larger."""
    found = errors(x, dy, y, dx)
    table = new_table("", "ours", "torch")
    for name, label in (("y", "forward"), ("dx", "backward")):
        table.add_row(label, *(f"{error:.2e}" for error in found[name]))
    show("Largest error against float64, as a share of the row's largest value", table)
    right = agrees(found, x.dtype)
    print("Right: no larger than torch's." if right else "WRONG: larger than torch's.", end="\n\n")
    return right


def compile_all(plans: list[RowPlan]) -> None:
    """Compile the classes of some plans and print what they take of an SM."""
    table = new_table("kernel", "class", "registers a thread", "spilled", "shared memory a CTA")
    for plan in plans:
        c, took = plan.kernel, resources(plan.kernel)
        table.add_row(c.math, c.name, f"{took.registers}", f"{took.stack} B", f"{took.shared_memory} B")
    show(f"Compiled for {plans[0].kernel.architecture}", table)


def time_all(x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dim: int = -1) -> None:
    """Time forward and backward next to torch and a device copy of the same bytes, and print the table."""
    result = torch.empty_like(x)
    table = new_table("", "ours", "torch", "device copy", "ours / torch", "ours / copy")
    shortest = float("inf")
    for label, streams, calls in (
        (
            "forward",
            2,
            (lambda: softmax(x, dim), lambda: torch.softmax(x, dim), lambda: result.copy_(x)),
        ),
        (
            "backward",
            3,
            (
                lambda: softmax_backward(dy, y, dim),
                lambda: torch._softmax_backward_data(dy, y, dim, x.dtype),
                lambda: torch.add(y, dy, out=result),  # as many bytes in as the backward reads
            ),
        ),
    ):
        ours, theirs, copy = medians(calls)
        moved = streams * x.numel() * x.element_size()
        shortest = min(shortest, ours, copy)
        speeds = (f"{moved / us / 1e3:.0f} GB/s, {us:.1f} µs" for us in (ours, theirs, copy))
        table.add_row(label, *speeds, f"{theirs / ours:.2f}", f"{copy / ours:.3f}")
    show(f"Median of {CALLS} calls, cold L2; GB/s counts every tensor once", table)
    if shortest < SHORT_US:
        print("Below about 50 µs CUDA events also time the queue: see the graphs of `cute-softmax bench`.\n")


def medians(calls: tuple[Callable[[], object], ...]) -> list[float]:
    """The median time of each call in microseconds: in turns, by CUDA events, with a cold L2."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: list[list[float]] = [[] for _ in calls]
    for i in range(WARM + CALLS):
        for call, found in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            if i >= WARM:
                found.append(start.elapsed_time(end) * 1e3)
    return [statistics.median(found) for found in times]


def draw(plans: list[RowPlan], out: Path) -> None:
    """Write the diagrams of some plans, each into a folder of its own, and print their paths."""
    for plan in plans:
        folder = out / plan.kernel.math
        names = [path.relative_to(folder).as_posix() for path in write(plan, folder)]
        print(f"{folder}: {', '.join(names)}")


def new_table(*columns: str) -> Table:
    """An empty table: the first column to the left, the others to the right."""
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def show(title: str, table: Table) -> None:
    """Print a table under its title."""
    print(title)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
