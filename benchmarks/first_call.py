"""The fresh process behind suite "first-call": `python -m benchmarks.first_call PROVIDER SHAPE DTYPE NEW_N`.

Prints, as one line of JSON and in microseconds, the time of the first softmax after torch was imported and a
CUDA context existed (the import of the provider's package included), of the second call, and of a new number
of columns.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from . import providers
from .cases import Case, parse_shape
from .operations import OPERATIONS


def main(argv: list[str]) -> None:
    """Measures, checks the results, prints."""
    provider, shape, dtype, columns = argv
    case = Case("softmax", parse_shape(shape), dtype)
    other = Case("softmax", (*case.shape[:-1], int(columns)), dtype)
    device = torch.device("cuda", 0)
    (x,) = OPERATIONS["softmax"].inputs(case, device)
    (x_new,) = OPERATIONS["softmax"].inputs(other, device)
    times, results = [], []
    torch.cuda.synchronize()
    last = time.perf_counter_ns()
    function = None
    for tensor in (x, x, x_new):
        if function is None:
            function = providers.build(provider, "entry", case)
        results.append(function(tensor))
        torch.cuda.synchronize()
        now = time.perf_counter_ns()
        times.append((now - last) / 1e3)
        last = time.perf_counter_ns()
    OPERATIONS["softmax"].check(case, (x,), results[1])
    OPERATIONS["softmax"].check(other, (x_new,), results[2])
    print(json.dumps({"first_us": times[0], "second_us": times[1], "new_us": times[2]}))


if __name__ == "__main__":
    main(sys.argv[1:])
