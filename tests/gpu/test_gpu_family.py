"""log_softmax, entropy, and scores with scale, bias, mask and causal masks: against float64, nothing else written."""

import math
from random import Random

import pytest
import torch
from checking import DTYPES, random
from families import Case, mutants

from cute_softmax.plan import MATHS, NotPlanned

FORWARD = ("softmax", "log_softmax", "logsumexp", "entropy")
SELECTIVE = ("selective", "selective_entropy")
BACKWARD = ("softmax_backward", "log_softmax_backward")
LENGTHS = (1, 2, 3, 7, 33, 127, 128, 500, 1023, 4096, 5000, 16384)
SEEDS = range(150)
PARTS = 16
EXPLICIT = 200  # of the first cases mutants are judged


def tensor_of(rng: Random, shape, dtype, scale=1.0) -> torch.Tensor:
    return random(shape, dtype, rng.randrange(1 << 30), scale)


def broadcast(rng: Random, shape) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`; the last dimension seldom has one element."""
    return tuple(
        n if rng.random() < (0.9 if d == len(shape) - 1 else 0.5) else 1 for d, n in enumerate(shape)
    )


def mask_of(rng: Random, shape, keep: float = 0.7) -> torch.Tensor:
    return (
        tensor_of(rng, broadcast(rng, shape), torch.float32) < torch.special.ndtri(torch.tensor(keep)).item()
    )


def number_of(rng: Random, shape, names: tuple[float, ...], positive=False):
    """None, a number, or a tensor with one element per group."""
    how = rng.choice(("none", "number", "groups"))
    if how == "groups":
        groups = tensor_of(rng, (*shape[:-1], 1), rng.choice((torch.float32, torch.bfloat16)))
        return groups.abs() + 0.25 if positive else groups
    return rng.choice(names) if how == "number" else None


def random_case(seed: int) -> Case:
    rng = Random(seed)
    math_name = rng.choice((*FORWARD, *BACKWARD, "selective", "softmax"))
    dtype, columns = DTYPES[rng.choice(sorted(DTYPES))], rng.choice(LENGTHS)
    shape = (rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 5, 33)), columns)
    if columns > 5000:
        shape = (1, 2, 3, columns)
    fields = {
        "scale": number_of(rng, shape, (0.125, -2.0, 0.0, 1.0, 3)),
        "offset": rng.choice((None, None, 0, 0, -2, 7, columns // 2, -40)),
        "place": rng.choice(((0, 0), (0, 0), (1, 0), (0, 1), (3, 5), (4, 8))),
        "dtype": rng.choice((None, None, torch.float32)),
    }
    x = tensor_of(rng, shape, dtype, rng.choice((1.0, 1.0, 20.0)))
    if math_name == "selective":
        return selective_case(rng, rng.choice(SELECTIVE), x, **fields)
    if math_name not in BACKWARD:
        if rng.random() < 0.4:
            wide = torch.float32 if rng.random() < 0.3 else dtype
            fields["bias"] = tensor_of(rng, broadcast(rng, shape), wide)
        if rng.random() < 0.5:
            fields["mask"] = mask_of(rng, shape, rng.choice((0.7, 0.1)))
        if math_name != "logsumexp":
            fields["zero"] = rng.random() < 0.5
        if math_name == "softmax":
            fields["alpha"] = number_of(rng, shape, (2.5, -1.0))
        return Case(math_name, x, **fields)
    if math_name == "softmax_backward":
        fields["alpha"] = number_of(rng, shape, (2.5, 0.5), positive=True)
    elif rng.random() < 0.5:
        fields["mask"] = torch.ones(1, dtype=torch.bool, device=x.device)  # names no tensor; -inf in y does
    forward = Case(
        math_name.removesuffix("_backward"), x * 0.5, offset=fields["offset"], zero=True, alpha=None
    )
    y = forward.expected(torch.float32)[0]
    if "alpha" in fields and fields["alpha"] is not None:
        y = y * fields["alpha"]
    if "mask" in fields:
        y = y.masked_fill(mask_of(rng, shape), -math.inf)
    return Case(math_name, x, y=y.to(dtype), **fields)


def selective_case(rng: Random, math_name: str, x: torch.Tensor, **fields) -> Case:
    """Also of a softmax, less one at the target."""
    generator = torch.Generator(device=x.device).manual_seed(rng.randrange(1 << 30))
    index = torch.randint(x.shape[-1], (*x.shape[:-1], 1), generator=generator, device=x.device)
    alpha = tensor_of(rng, (*x.shape[:-1], 1), torch.float32) if math_name == "softmax" else None
    return Case(math_name, x, **(fields | {"offset": None, "index": index, "alpha": alpha}))


def explicit_cases() -> list[Case]:
    rng, found = Random(7), []
    for dtype in (torch.bfloat16, torch.float32):
        x = tensor_of(rng, (2, 3, 40, 200), dtype)
        every = [(a, b, m, n) for a in (1, 2) for b in (1, 3) for m in (1, 40) for n in (1, 200)]
        for shape in every:  # of a mask, each broadcast form
            mask = tensor_of(rng, shape, torch.float32) < 0.5
            found.append(Case("softmax", x, mask=mask, zero=shape[-1] == 1))
        for offset in (0, 160, -5, 1000, -1000, 39 - 200):
            for zero in (False, True):
                found += [Case(m, x, offset=offset, zero=zero and m != "logsumexp") for m in FORWARD]
        # As long as a cluster's, and longer.
        for columns in (50257, 151936, 200000):
            long = tensor_of(rng, (3, columns), dtype)
            found += [Case(m, long, dtype=torch.float32 if m == "entropy" else None) for m in FORWARD]
            found += [Case(m, long, scale=0.5, mask=long > -1) for m in ("softmax", "log_softmax")]
            found.append(Case("softmax", long, scale=-3.0))
            for m in (*SELECTIVE, "softmax"):
                for fields in ({}, {"scale": 0.7, "place": (3, 5)}):
                    fields = fields if m == "softmax" else fields | {"dtype": torch.float32}
                    found.append(selective_case(rng, m, long, **fields))
            y = Case("softmax", long).expected(torch.float32)[0]
            found.append(Case("softmax_backward", long, y=y.to(dtype), scale=0.5))
            found.append(Case("log_softmax_backward", long, y=y.log().to(dtype)))
        # More rows than clusters at a time: each takes several, and the next one's mask and scale ahead.
        shape = (60, 200000) if dtype is torch.bfloat16 else (20, 300000)
        many, factors = tensor_of(rng, shape, dtype), tensor_of(rng, (shape[0], 1), torch.float32)
        row = tensor_of(rng, (1, shape[1]), torch.float32) > -1
        found += [Case(m, many, scale=factors, mask=row) for m in FORWARD[:2]]
        found += [
            Case("softmax", many, scale=factors, alpha=factors.flip(0)),
            Case("softmax", many, mask=many > -1),
        ]
        found.append(selective_case(rng, "softmax", many, scale=0.7))
        # Temperatures: rows still sum to 1.
        found += [
            Case("softmax", x, scale=1000.0),
            Case("softmax", x, scale=1e-3),
            Case("log_softmax", x, scale=1000.0),
        ]
        hot = torch.full((2, 3, 40, 1), 1000.0, device=x.device)
        found += [Case("softmax", x, scale=hot, bias=x), Case("softmax", x, scale=hot, offset=3, zero=True)]
        # Sinks: of each row, of a matrix, of all, none, and what is no number.
        for sink, how in (
            (tensor_of(rng, (2, 3, 40, 1), torch.float32, 4.0), {}),
            (tensor_of(rng, (2, 3, 40, 1), dtype, 4.0), {"scale": 0.125, "offset": 160, "place": (3, 5)}),
            (torch.full((2, 3, 40, 1), 90.0, device=x.device), {"mask": x > 0.5}),
            (torch.full((2, 3, 40, 1), -90.0, device=x.device), {"mask": x > 2.5, "bias": x}),
            (torch.full((2, 3, 40, 1), -math.inf, device=x.device), {"offset": -5, "zero": True}),
            (torch.full((2, 3, 40, 1), math.inf, device=x.device), {}),
        ):
            sink[0, 1, 3] = math.nan
            for m in FORWARD[:3]:
                fields = how | {"zero": False} if m == "logsumexp" else how
                found.append(Case(m, x, sink=sink, **fields))
        for columns in (1, 7, 33, 1023, 16384, 50257, 151936, 300000):
            long = tensor_of(rng, (3, columns), dtype)
            sink = tensor_of(rng, (3, 1), torch.float32) + math.log(columns)
            found += [Case(m, long, sink=sink) for m in FORWARD[:3]]
            found.append(Case("softmax", long, sink=sink, scale=-0.5, mask=long > -1, alpha=2.5))
            y = torch.log_softmax(torch.cat([long.float(), sink], -1), -1)
            log, y = y[:, -1:], y[:, :-1]
            grad = tensor_of(rng, (3, columns), dtype)
            found.append(Case("softmax_backward", grad, y=y.exp().to(dtype), sink=log, scale=0.5))
            found.append(Case("log_softmax_backward", grad, y=y.to(dtype), sink=log))
        # Numbers that are none.
        for columns in (1, 2, 3, 7, 33, 127, 1023, 4097):
            short = tensor_of(rng, (2, 1, 40, columns), dtype, 3.0)
            for m in (*SELECTIVE, "softmax"):
                found.append(selective_case(rng, m, short, place=(1, 2), scale=rng.choice((None, -0.5))))
        bad = x.clone()
        bad[0, 0, :, 17], bad[0, 1, :, 18], bad[1, 0, 3:9], bad[1, 1, :, 32:64] = (
            math.nan,
            math.inf,
            -math.inf,
            -math.inf,
        )
        found += [Case(m, bad, zero=z and m != "logsumexp") for m in FORWARD for z in (False, True)]
        found += [Case("softmax", bad, offset=16), Case("softmax", bad, mask=~bad.isnan(), scale=2.0)]
        found += [
            Case("softmax", bad, mask=bad.isfinite(), bias=x, zero=True),
            Case("entropy", bad, offset=20),
        ]
    return found


def moved_cases() -> list[Case]:
    """Without a prologue, over columns and over rows that do not fit on chip."""
    rng, found = Random(11), []
    row = torch.ones(1, dtype=torch.bool, device=tensor_of(rng, (1,), torch.float32).device)  # -inf in y says
    for dtype in (torch.bfloat16, torch.float32):
        shapes = [
            ((rows, columns), True) for rows, columns in ((64, 7), (5000, 33), (300, 5000), (64, 70000))
        ]
        for shape, turned in [*shapes, ((8, 300000), True), ((2, 1500000), False)]:
            x = tensor_of(rng, shape, dtype)
            x[0, shape[1] // 2] = -math.inf
            y = torch.log_softmax(x.roll(1, 0).float(), -1).to(dtype)
            found += [
                Case("log_softmax", x, turned=turned),
                Case("entropy", x, turned=turned, dtype=torch.float32),
                Case("log_softmax_backward", x.nan_to_num(neginf=0), y=y, turned=turned, place=(1, 3)),
            ]
            sink = tensor_of(rng, (shape[0], 1), torch.float32) + math.log(shape[1])
            found += [Case(m, x, sink=sink, turned=turned) for m in FORWARD[:3]]
            log = -sink.abs()
            found.append(
                Case("log_softmax_backward", x.nan_to_num(neginf=0), y=y, sink=log, turned=turned, mask=row)
            )
            found.append(Case("softmax_backward", x, y=y.exp(), sink=log, turned=turned, place=(1, 3)))
    return found


def diagonal_cases() -> list[Case]:
    """Rows of several CTAs, some with nothing before the diagonal, and numbers that change what lies beyond it."""
    rng, found = Random(13), []
    for dtype in (torch.bfloat16, torch.float32):
        # In clusters of 2 to 16, in registers and in shared memory; persistent ones; in parts, held and in chunks.
        for columns in (16384, 40000, 65543, 151936, 300000, 700000, 1500000, 5000003):
            rows = min(40, 4_000_000 // columns)
            shape = (2, rows, columns) if columns < 1_000_000 else (rows + 1, columns)
            x = tensor_of(rng, shape, dtype)
            bad = x.clone()
            for row, number in zip(range(0, shape[-2], 2), (math.nan, math.inf, -math.inf), strict=False):
                bad[..., row, : row + 2] = number
            for offset in (0, columns // 2, columns - rows):
                found += [Case(m, x, offset=offset, scale=0.5) for m in FORWARD[:2]]
                found.append(Case("softmax", bad, offset=offset - 2, zero=True))
            factors, sink = (tensor_of(rng, (*shape[:-1], 1), torch.float32) for _ in range(2))
            place = (1, 3)
            found += [
                Case("softmax", bad, offset=0, zero=False, scale=factors),
                Case("softmax", x, offset=1, bias=x, mask=x > -1, alpha=factors, place=place),
                Case("softmax", bad, offset=1, sink=sink),
                Case("log_softmax", bad, offset=1, place=place),
                Case("log_softmax", x, offset=columns // 3, dtype=torch.float32),
                Case("logsumexp", bad, offset=columns // 3),
                Case("softmax", x, offset=-10_000, dtype=torch.float32),
            ]
            y = Case("softmax", x, offset=1).expected(torch.float32)[0].to(dtype)
            found.append(Case("softmax_backward", x, y=y, offset=1, scale=0.5, place=place))
            found.append(Case("log_softmax_backward", x, y=y.log(), offset=1))
    return found


def every_case() -> list[tuple[int, Case]]:
    cases = explicit_cases() + moved_cases() + [random_case(seed) for seed in SEEDS]
    return [*enumerate(cases + diagonal_cases())]


def failures(cases: list[tuple[int, Case]]) -> list[str]:
    """What is wrong with cases; mutants of every third of the first ones must be found."""
    wrong, worst = [], 0.0
    for i, case in cases:
        try:
            results = case.launched()
            worst = max(worst, case.check(results))
            again = case.launched() if i % 20 == 0 else results
            if not all(
                torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(results, again, strict=True)
            ):
                wrong.append(f"{i}: a second call gave other bits")
            right = [r.to(y.dtype) for r, y in zip(case.expected(torch.float64), results, strict=True)]
            for name, mutant in mutants(case) if i % 3 == 0 and i < EXPLICIT else ():
                if all(
                    torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mutant, right, strict=True)
                ):
                    continue  # not wrong here
                try:
                    case.check(mutant)
                    wrong.append(f"{i}: the mutant {name} passes")
                except AssertionError:
                    pass
        except (AssertionError, NotPlanned, RuntimeError) as error:
            wrong.append(f"{i}: {str(error)[:300]}")
    print(f"the largest error is {worst:.3g} of its bound")
    return wrong


@pytest.mark.parametrize("part", range(PARTS))
def test_cases(part):
    """Every so many cases, so that processes share them; each builds the kernels that it needs."""
    wrong = failures(every_case()[part::PARTS])
    assert not wrong, "\n".join(["", *wrong])


def test_every_movement_is_met():
    assert {case.movement for case in moved_cases()} == {"column", "split"}


def test_rows_sum_to_one_at_every_temperature():
    x = random((64, 5000), torch.float32, 3)
    for scale in (1000.0, 30.0, 1e-3):
        for fields in ({}, {"mask": x > -2}, {"bias": x}):
            (y,) = Case("softmax", x, scale=scale, **fields).launched()
            assert (y.double().sum(-1) - 1).abs().max() < 1e-5, (scale, fields.keys())


def test_every_math_with_a_prologue_is_here():
    assert {m for m, _ in MATHS} - {*FORWARD, *BACKWARD, *SELECTIVE} == {"amax", "sum"}
