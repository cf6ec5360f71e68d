"""Thousands of random calls: shape, dtype, offset, stride, values and way of calling drawn together."""

import random as pyrandom

import classes
import pytest
import torch
from checking import DTYPES, Guarded, check_backward, check_softmax, equal_bits, random

from cute_softmax import launch, softmax

CASES = 2500


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
        "places": [same, same if r.random() < 0.5 else place(), place()]
        if pair in classes.SAME
        else [same] * 3,
        "scale": r.choice([0.1, 1.0, 4.0, 30.0]),
        "fraction of -inf": r.choice([0.0, 0.0, 0.3, 0.97]),
        "nan": r.random() < 0.1,
        "online": (pair in classes.SAME and r.random() < 0.8) or pair not in classes.SAME,
        "backward": r.random() < 0.4,
    }


def run(case: dict):
    (source, result), shape, places = (DTYPES[d] for d in case["pair"]), case["shape"], case["places"]
    x = random(shape, source, seed=case["seed"], scale=case["scale"])
    if case["fraction of -inf"]:
        x[torch.rand(shape, device=x.device) < case["fraction of -inf"]] = float("-inf")
    if case["nan"]:
        x[shape[0] // 2, (7 * case["seed"]) % shape[1]] = float("nan")
    if case["backward"]:
        y = torch.softmax(x, -1, torch.float32).to(result)
        dy = random(shape, result, seed=case["seed"] + 1)
        inputs = [Guarded.of(dy, **places[2]), Guarded.of(y, **places[1])]
        out = Guarded(shape, source, **places[1])
        launch.run("softmax_backward", (inputs[0].tensor, inputs[1].tensor, out.tensor), (1,))
        check_backward(out.tensor, dy, y)
    else:
        inputs = [Guarded.of(x, **places[0])]
        out = Guarded(shape, result, **places[1])
        softmax(inputs[0].tensor, out=out.tensor, online=case["online"])
        check_softmax(out.tensor, x)
        assert equal_bits(inputs[0].tensor, x), "the input was changed"
    out.check()
    for guarded in inputs:
        guarded.check(written=False)


@pytest.mark.parametrize("part", range(5))
def test_random_calls(part, arch):
    """Two-pass classes are built for full accesses only, so that nothing is compiled here."""
    longest = min(
        classes.longest(math, arch, classes.operands(math, pair))
        for math in ("softmax", "softmax_backward")
        for pair in classes.PAIRS
    )
    for seed in range(part, CASES, 5):
        case = draw(seed, longest)
        if not case["online"]:
            case["places"][0] = case["places"][1]
        try:
            run(case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
