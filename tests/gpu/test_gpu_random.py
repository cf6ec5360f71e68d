"""Thousands of random calls: shape, dtype, offset, stride, values and way of calling drawn together.

CUTE_SOFTMAX_TEST_CASES: how many of each kind, such as 20000. A case follows from its seed, which a failure names.
CUTE_SOFTMAX_TEST_COMMON: of those of any rank, and of columns, only the cases of so many classes, the most common ones,
as each must be compiled: 900 are those of 86% of 20000 cases of any rank, all of them 3127. This file as a script
compiles them, with a process a core; then several processes can share a GPU.
"""

import os
import random as pyrandom
from collections import Counter
from collections.abc import Callable
from functools import cache

import calls
import classes
import panels
import pytest
import torch
from building import build
from checking import DTYPES, GUARD, random

from cute_softmax.plan import plan
from cute_softmax.plan.problem import ALIGNMENT, ITEM_SIZE, Operand, canonical
from cute_softmax.runtime import launch

ROWS = int(os.environ.get("CUTE_SOFTMAX_TEST_CASES", "2500"))
ANY = int(os.environ.get("CUTE_SOFTMAX_TEST_CASES", "600"))
COMMON = int(os.environ.get("CUTE_SOFTMAX_TEST_COMMON", "0"))


def draw(seed: int, longest: int) -> dict:
    """One case; everything follows from the seed."""
    r = pyrandom.Random(seed)
    columns = round(2 ** r.uniform(0, 13.5)) if r.random() < 0.9 else round(2 ** r.uniform(13, 19))
    columns = min(columns + r.choice([-1, 0, 0, 1]), longest) or 1
    rows = min(round(2 ** r.uniform(0, 9)), 1 + (1 << 21) // columns)
    pair = r.choice(classes.PAIRS)

    def place() -> dict:
        if r.random() < 0.4:
            return {}
        pad = r.choice([0, 0, 1, 2, 3, 8, 13])
        return {"offset": r.randrange(9), "strides": (columns + pad, 1)}

    same = place()
    return {
        "seed": seed,
        "shape": (rows, columns),
        "pair": pair,
        "places": [same, place(), same if r.random() < 0.5 else place()]
        if pair in classes.SAME
        else [same] * 3,
        "scale": r.choice([0.1, 1.0, 4.0, 30.0]),
        "fraction of -inf": r.choice([0.0, 0.0, 0.3, 0.97]),
        "nan": r.random() < 0.1,
        "online": (pair in classes.SAME and r.random() < 0.8) or pair not in classes.SAME,
        "math": "softmax_backward" if r.random() < 0.4 else "softmax",
        "dims": (1,),
    }


def draw_any(seed: int) -> dict:
    """A case of any rank, dimensions and strides; sizes so that one call takes milliseconds."""
    r = pyrandom.Random(seed)
    shape, left = [], 1 << r.choice([8, 14, 18, 21])
    for _ in range(r.randrange(1, 6)):
        shape.append(min(round(2 ** r.uniform(0, r.choice([2, 6, 12, 17]))), left))
        left = max(left // shape[-1], 1)
    r.shuffle(shape)
    dims = sorted(r.sample(range(len(shape)), r.randint(1, len(shape))))
    pair = r.choice(classes.PAIRS)

    def place(written: bool) -> dict:
        order = [*range(len(shape))][::-1]
        if r.random() < 0.5:
            r.shuffle(order)
        strides, reach = [0] * len(shape), r.choice([1, 1, 1, 1, 2, 3])
        for d in order:
            reach += r.choice([0, 0, 0, 0, 1, 3, 8])
            if not written and r.random() < 0.05:
                continue  # expanded
            strides[d] = reach
            reach *= shape[d]
        return {"strides": tuple(strides), "offset": r.choice([0, 0, 0, 1, 4, 8, 5])}

    what = r.choice(["softmax", "softmax", "softmax_backward", "softmax_backward", *calls.REDUCTIONS])
    same = place(True)
    return {
        "seed": seed,
        "math": what,
        "shape": tuple(shape),
        "dims": tuple(dims),
        "pair": (pair[0],) * 2 if what in calls.REDUCTIONS else pair,
        "places": [same if r.random() < 0.5 else place(False) for _ in range(2)]
        + [same if r.random() < 0.5 else place(True)],
        "scale": r.choice([0.1, 1.0, 4.0, 30.0]),
        "fraction of -inf": r.choice([0.0, 0.0, 0.3, 0.97]),
        "nan": r.random() < 0.1,
        "online": True,
    }


def draw_columns(seed: int) -> dict:
    """A case of columns whose rows of memory begin anywhere."""
    r = pyrandom.Random(seed)
    width = round(2 ** r.uniform(5.6, 10)) | (r.random() < 0.9)
    length = round(2 ** r.uniform(0, 10.5))
    shape = (r.choice([1, 1, 2, 3]), min(length, max((1 << 20) // width, 1)), width)
    pair = r.choice([*classes.SAME, *classes.PAIRS])
    what = r.choice(["softmax", "softmax", "softmax_backward", "softmax_backward", *calls.REDUCTIONS])

    def place() -> dict:
        pitch = width + r.choice([0, 0, 0, 1, 2, 5, 8])
        between = shape[1] * pitch + r.choice([0, 0, 3])
        return {"strides": (between, pitch, 1), "offset": r.choice([0, 0, 1, 2, 3, 5, 8])}

    same = place()
    return {
        "seed": seed,
        "math": what,
        "shape": shape,
        "dims": (1,),
        "pair": (pair[0],) * 2 if what in calls.REDUCTIONS else pair,
        "places": [same, same if r.random() < 0.5 else place(), same if r.random() < 0.5 else place()],
        "scale": r.choice([0.1, 1.0, 4.0, 30.0]),
        "fraction of -inf": r.choice([0.0, 0.0, 0.3, 0.97]),
        "nan": r.random() < 0.1,
        "online": True,
    }


def kernel_of(case: dict, device) -> object:
    """The class that a case is planned for."""
    name, shape, dims = case["math"], case["shape"], case["dims"]
    dtypes = classes.operands(name, case["pair"])
    places = case["places"] if name == "softmax_backward" else case["places"][::2]
    operands = [
        Operand(d, p["strides"], (GUARD + p["offset"]) * ITEM_SIZE[d] % ALIGNMENT)
        for d, p in zip(dtypes, places, strict=True)
    ]
    if name in calls.REDUCTIONS:
        # Its result is allocated, and read as if the reduced dimensions were there.
        kept = [1 if d in dims else n for d, n in enumerate(shape)]
        strides = tuple(0 if d in dims else s for d, s in enumerate(panels.dense(kept)))
        operands[1] = Operand(dtypes[1], strides, 0)
    return plan(name, canonical(shape, dims, operands), device).kernel


def fill(case: dict, dtype: torch.dtype, place: dict) -> torch.Tensor:
    """The values; equal where the input is expanded."""
    strides = place.get("strides") or (1,) * len(case["shape"])
    shape = [n if s else 1 for n, s in zip(case["shape"], strides, strict=True)]
    x = random(shape, dtype, seed=case["seed"], scale=case["scale"])
    if case["fraction of -inf"]:
        other = torch.Generator(x.device).manual_seed(case["seed"] + (1 << 32))  # than that of the values
        drawn = torch.rand(shape, generator=other, device=x.device)
        x[drawn < case["fraction of -inf"]] = float("-inf")
    if case["nan"]:
        x.view(-1)[7 * case["seed"] % x.numel()] = float("nan")
    return x.expand(case["shape"])


def run(case: dict):
    (source, result), shape, places = (DTYPES[d] for d in case["pair"]), case["shape"], case["places"]
    dims, what = case["dims"], case["math"]
    if what == "softmax":
        x = fill(case, source, places[0])
        calls.forward(x, dims, source=places[0], result=places[2], dtype=result, online=case["online"])
    elif what == "softmax_backward":
        dy = fill(case | {"fraction of -inf": 0.0}, result, places[0])
        last = tuple(range(-len(dims), 0))
        x = fill(case, source, {}).float().movedim(dims, last)
        y = torch.softmax(x.flatten(-len(dims)), -1).view(x.shape).movedim(last, dims).to(result)
        expanded = [s == 0 for s in places[1].get("strides", shape)]
        y = y[tuple(slice(0, 1) if e else slice(None) for e in expanded)].expand(shape)
        calls.backward(dy, y, dims, places=places, dtype=source)
    else:
        calls.reduction(what, fill(case, source, places[0]), dims, places[0])


def run_all(cases):
    for case in cases:
        try:
            run(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("part", range(5))
def test_random_rows(part, arch):
    """Two-pass classes are built for full accesses only, so that nothing is compiled here."""
    longest = min(
        classes.longest(math, arch, classes.operands(math, pair))
        for math in ("softmax", "softmax_backward")
        for pair in classes.PAIRS
    )
    cases = [draw(seed, longest) for seed in range(part, ROWS, 5)]
    for case in cases:
        if not case["online"]:
            case["places"][0] = case["places"][2]
    run_all(cases)


@cache
def of_common_classes(drawn: Callable[[int], dict]) -> list[tuple[dict, object]]:
    """(case, class) for all cases that are drawn so, and whose class is common."""
    device = launch.device_facts(torch.cuda.current_device())
    cases = [(case, kernel_of(case, device)) for case in map(drawn, range(ANY))]
    counted = Counter(kernel for _, kernel in cases)
    common = {kernel for kernel, _ in counted.most_common(COMMON or None)}
    return [(case, kernel) for case, kernel in cases if kernel in common]


def run_common(drawn: Callable[[int], dict], part: int):
    cases = of_common_classes(drawn)[part::16]
    if not COMMON:
        build(kernel for _, kernel in cases)
    run_all(case for case, _ in cases)
    print(f"{len(cases)} cases of {ANY} seeds")


@pytest.mark.parametrize("part", range(16))
def test_random_dimensions_and_strides(part):
    run_common(draw_any, part)


@pytest.mark.parametrize("part", range(16))
def test_random_columns_that_begin_anywhere(part):
    run_common(draw_columns, part)


if __name__ == "__main__":
    both = [*of_common_classes(draw_any), *of_common_classes(draw_columns)]
    build(kernel for _, kernel in both)
