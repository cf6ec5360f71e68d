"""One rung on a tensor: checked against float64, and timed beside a copy, torch and the package's own kernel.

Without a GPU it is compiled for sm_90a instead.
"""

from __future__ import annotations

from functools import partial

import torch

from ..api import softmax as api
from ..ladder import compile_form, form_of, over_rows, rung_of, softmax
from ..runtime import launch
from ..runtime.resources import registers_of
from . import demo


def run(rung: int, shape: tuple[int, int], dtype: str, dim: int = -1) -> int:
    """Print what the kernel of a rung does with a random matrix (M, N); 1 if its result is wrong."""
    step, rows = rung_of(rung), over_rows(dim)
    form = form_of(rung, dtype, shape[dim], demo.ARCHITECTURE, rows=rows)
    size = torch.empty(0, dtype=launch.TORCH_DTYPES[dtype]).element_size()
    print(f"Rung {rung}, {step.title}: cute_softmax/ladder/{step.module}.py")
    print(f"{step.reads} reads and {step.writes} writes of {shape[0] * shape[1] * size / 1e6:.1f} MB\n")
    if not torch.cuda.is_available():
        registers, stack = registers_of(partial(compile_form, form))
        print(
            f"No GPU here: compiled for {form.architecture}, {registers} registers a thread, {stack} B spilled."
        )
        return 0
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda").to(launch.TORCH_DTYPES[dtype])
    y, result = softmax(x, rung, dim), torch.empty_like(x)
    right = torch.softmax(x.double(), dim)
    scale = right.amax(dim, keepdim=True)
    ours, theirs = (((t.double() - right) / scale).abs().max().item() for t in (y, torch.softmax(x, dim)))
    print(
        f"Largest error against float64, as a share of its row's largest value: {ours:.2e} (torch {theirs:.2e})\n"
    )
    calls = {
        f"rung {rung}": lambda: softmax(x, rung, dim),
        "device copy": lambda: result.copy_(x),
        "torch": lambda: torch.softmax(x, dim),
        "cute_softmax": lambda: api.softmax(x, dim),
    }
    times = demo.medians(tuple(calls.values()))
    table = demo.new_table("", "time", "GB/s", "ratio to copy")
    for name, us in zip(calls, times, strict=True):
        table.add_row(
            name, f"{us:.1f} µs", f"{2 * x.numel() * x.element_size() / us / 1e3:.0f}", f"{times[1] / us:.3f}"
        )
    demo.show("Median of 15 calls, cold L2; one read and one write are counted", table)
    # Two roundings of the result, as the naive form has them, and an approximate exponential.
    return 0 if ours <= theirs + 2 * torch.finfo(x.dtype).eps else 1
