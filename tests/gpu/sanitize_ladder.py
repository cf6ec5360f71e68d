"""The rungs of the ladder for `sanitize.py`: a ragged block or more of each, in rows of odd and even lengths."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import rungs
from checking import DTYPES, Guarded, check_softmax
from sanitizing import Job, received, sent, timed

from cute_softmax.ladder import RUNGS, Form, form_of, function_of

ROWS, LENGTHS = 133, (3, 1000, 1023, 4096)


def jobs(architecture: str, dtypes: list[str]) -> Iterator[Job]:
    """Every rung on every length, the naive one over columns, too."""
    for step in RUNGS:
        for dtype in dtypes:
            for columns in LENGTHS:
                for rows in (True, False)[: 1 if step.number else 2]:
                    form = form_of(step.number, dtype, columns, architecture, rows=rows)
                    what = f"ladder {step.number} {dtype} {ROWS} x {columns}" + (
                        "" if rows else " in columns"
                    )
                    yield Job((form,), ROWS * columns, what, partial(check, form))


def check(form: Form) -> float:
    """Launch the form and compare; the seconds that it took. Raises AssertionError on a wrong result."""
    values = rungs.ugly(ROWS, form.columns, DTYPES[form.dtype], "cpu")
    values = values if form.rows else values.t().contiguous()
    x, y = Guarded.of(values), Guarded(values.shape, values.dtype)
    source, result = sent(x.tensor), sent(y.tensor)
    operands = [t if form.rows else t.t() for t in (source, result)]
    seconds = timed(lambda: function_of(form)(*operands))
    received(x, source, written=False)
    check_softmax(
        received(y, result),
        values,
        1 if form.rows else 0,
        rungs.factor(form.rung, values.dtype, values.shape[-1]),
    )
    return seconds
