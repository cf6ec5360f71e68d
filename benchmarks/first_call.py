"""The fresh process behind suite "first-call": `python -m benchmarks.first_call PROVIDER SHAPE DTYPE NEW_N`.

Prints, as one line of JSON and in microseconds, the time of the first softmax after torch was imported and a
CUDA context existed (the import of the provider's package included), of the second call, and of a new number
of columns: the median of five, for what runs a second time Python specialises at some cost, once in a process.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch

from . import providers
from .cases import Case, parse_shape
from .operations import OPERATIONS

NEW_LENGTHS = 5


def main(argv: list[str]) -> None:
    """Measures, checks the results, prints."""
    provider, shape, dtype, columns = argv
    case = Case("softmax", parse_shape(shape), dtype)
    lengths = [int(columns) - 16 * i - 8 for i in range(NEW_LENGTHS)]  # of no other process's first call
    others = [Case("softmax", (*case.shape[:-1], n), dtype) for n in lengths]
    device = torch.device("cuda", 0)
    (x,) = OPERATIONS["softmax"].inputs(case, device)
    new = [OPERATIONS["softmax"].inputs(other, device)[0] for other in others]
    times, results = [], []
    torch.cuda.synchronize()
    last = time.perf_counter_ns()
    function = None
    for tensor in (x, x, *new):
        if function is None:
            function = providers.build(provider, "entry", case)
        results.append(function(tensor))
        torch.cuda.synchronize()
        now = time.perf_counter_ns()
        times.append((now - last) / 1e3)
        last = time.perf_counter_ns()
    OPERATIONS["softmax"].check(case, (x,), results[1])
    for other, tensor, result in zip(others, new, results[2:], strict=True):
        OPERATIONS["softmax"].check(other, (tensor,), result)
    taken = {"first_us": times[0], "second_us": times[1], "new_us": statistics.median(times[2:])}
    print(json.dumps(taken))


if __name__ == "__main__":
    main(sys.argv[1:])
