"""What suites and slices of the map share: kernels compiled first, and runs that go on where an earlier one stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import console, results
from .cases import CAUSAL, DEPTH, GROUP_BIAS, GROUP_MASK, INVARIANT, REDUCTIONS, Case, Suite

if TYPE_CHECKING:
    from .run import Options

PLANNED = ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward", "masked_softmax")


def classes_of(cases: Sequence[Case], device: object) -> Iterator[object]:
    """The Plan classes that cases of softmaxes, reductions, plain heads and plain products need; others have theirs
    built when first called."""
    import torch

    from cute_softmax import NotPlanned, batch_invariant, plan_reduction, plan_softmax
    from cute_softmax.api.explain import HEADS, plan_call_of
    from cute_softmax.plan.describe import plan_matmul_shape

    from . import masked
    from .operations import DTYPES

    for case in cases:
        x = torch.empty(case.shape, dtype=DTYPES[case.dtype], device="meta")
        how = {"log": case.op.startswith("log_"), "backward": case.op.endswith("_backward")}
        if case.op == "masked_softmax":
            held, bias = masked.held(case), case.mode == GROUP_BIAS
            if held is not None:
                dtype = torch.bfloat16 if bias else torch.bool
                tensor = torch.empty(held, dtype=dtype, device="meta").expand(case.shape)
                how["bias" if bias else "mask"] = tensor
            if case.mode not in (GROUP_MASK, GROUP_BIAS):
                how |= {"scale": masked.SCALE, "causal": case.mode == CAUSAL}
        try:
            with batch_invariant() if case.mode == INVARIANT else nullcontext():
                if case.op in REDUCTIONS:
                    found = plan_reduction(case.op, x, case.dim, device=device)
                elif case.op in PLANNED:
                    found = plan_softmax(x, case.dim, DTYPES[case.result], device=device, **how)
                elif case.op in HEADS and not case.mode:  # the gradient of a cross entropy is one with it
                    found = plan_call_of(case.op, x, device=device, backward=case.op == "cross_entropy")
                elif case.op == "softmax_matmul" and case.mode == f"{DEPTH}{case.depth}":
                    found = plan_matmul_shape(case.shape, case.depth, case.dtype, device=device)
                else:
                    continue
        except NotPlanned:  # torch's operations come first, and what they leave is planned then
            continue
        yield found.kernel


def earlier(path: Path, commit: str | None) -> list[results.Row]:
    """The rows of the same commit that a file holds."""
    if commit is None or not path.exists():
        return []
    found = results.load(path)
    return found.rows if found.header["commit"] == commit else []


def remaining(suite: Suite, rows: Sequence[results.Row]) -> tuple[Case, ...]:
    """The cases of a suite that no row is of."""
    there = {results.key_of(row).case for row in rows}
    return tuple(case for case in suite.cases if case not in there)


def go_on(
    suite: Suite, rows: list[results.Row], providers: Sequence[str], options: Options, end: float
) -> tuple[list[results.Row], bool]:
    """(these rows, and those of the suite's other cases as far as it gets until `end`; whether the GPU was lost, which
    it tells)."""
    from .run import DeviceLost

    cases = remaining(suite, rows)
    if not cases or time.monotonic() >= end:
        return rows, False
    try:
        return [*rows, *measure(suite, cases, providers, options, end)], False
    except DeviceLost as error:
        print(f"{suite.name}: the GPU is lost {error}", file=sys.stderr)
        return [*rows, *error.rows], True


def measure(
    suite: Suite, cases: tuple[Case, ...], providers: Sequence[str], options: Options, end: float
) -> list[results.Row]:
    """Rows of these cases of a suite, as far as it gets until `end`; what they need is compiled first, on all cores.

    Raises DeviceLost.
    """
    import torch

    from cute_softmax.runtime.launch import device_facts
    from cute_softmax.runtime.precompile import precompile

    from .run import run_suite

    if "cute_softmax" in providers:
        for _ in precompile(
            list(dict.fromkeys(classes_of(cases, device_facts(torch.cuda.current_device()))))
        ):
            pass
    with console.progress(suite.name, len(cases)) as progress:
        return run_suite(
            replace(suite, cases=cases), providers, options, progress, lambda: time.monotonic() > end
        )
