"""Rows that are read tile after tile, forced for any length and number: against float64; nothing else is written."""

from itertools import product

import pytest
import streams
import torch
from building import build
from checking import DTYPES, random
from families import mutants

import cute_softmax
from cute_softmax.plan import Prologue, stream
from cute_softmax.runtime import launch

LENGTHS = {
    72: (0, 0),
    1000: (1, 3),
    4099: (0, 1),
    8192: (0, 0),
    20001: (3, 2),
    151936: (0, 0),
    300001: (5, 1),
}


PAIRS = [(dtype, dtype) for dtype in DTYPES.values()] + [(torch.bfloat16, torch.float32)]


@pytest.fixture(autouse=True)
def all_streamed(monkeypatch):
    streams.forced(monkeypatch)
    if torch.cuda.is_available():
        places = LENGTHS.items()
        wanted = [case.kernel() for (n, place), d in product(places, DTYPES) for case in of(n, d, place)]
        wanted += [p.kernel() for (n, place), d in product(places, PAIRS) for p in streams.pairs(n, d, place)]
        if not built:
            built.append(build(wanted))


built = []


def of(columns, dtype, place):
    """All in bfloat16, a few in the others."""
    return list(streams.cases(columns, DTYPES[dtype], place))[:: 1 if dtype == "bf16" else 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", LENGTHS)
def test_every_form(columns, dtype):
    for case in of(columns, dtype, LENGTHS[columns]):
        assert case.movement == "stream"
        case.check(case.launched())


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("columns", LENGTHS)
def test_divergences(columns, dtypes):
    """And cross entropies of probabilities; of the same rows exactly 0, every time."""
    for pair in streams.pairs(columns, dtypes, LENGTHS[columns]):
        assert pair.kernel().movement == "stream"
        found = pair.launched()
        pair.check(found)
        assert torch.equal(pair.launched().nan_to_num(), found.nan_to_num())
        for mutant in (torch.zeros_like(found), found.roll(1), -found):
            with pytest.raises(AssertionError):
                pair.check(mutant)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_diverge_by_nothing(dtype):
    for columns, scale in product((9000, 151936, 151937), (1.0, 0.7)):
        x = random((300, columns), DTYPES[dtype], seed=5, scale=4.0)
        found = cute_softmax.kl_div(x, x.clone(), reduction="none", scale=scale, dtype=torch.float32)
        assert (found == 0).all()


def test_mutants():
    for case in streams.cases(4099, torch.float32):
        for what, wrong in mutants(case):
            if case.sink is None and "scale" not in what:
                with pytest.raises(AssertionError):
                    case.check(wrong)
                    pytest.fail(f"{case.math} {case.prologue.name}: {what} passes")


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"label_smoothing": 0.1, "scale": 0.5}], ids=str)
@pytest.mark.parametrize("columns", [777, 50257])
def test_losses(columns, options):
    x = random((40, columns), torch.bfloat16, seed=2, scale=3.0)
    target = torch.randint(
        columns, (40,), device=x.device, generator=torch.Generator(x.device).manual_seed(3)
    )
    target[::7] = -100
    found = cute_softmax.cross_entropy(x, target, reduction="none", dtype=torch.float32, **options)
    scores = x.double() * options.get("scale", 1.0)
    cap = options.get("softcap")
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    smoothing = options.get("label_smoothing", 0.0)
    right = torch.nn.functional.cross_entropy(scores, target, reduction="none", label_smoothing=smoothing)
    assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-5)


def test_many_long_rows_are_streamed_unasked(monkeypatch):
    monkeypatch.undo()
    x = torch.empty(4096, 131072, dtype=torch.bfloat16, device="meta")
    work = launch.Work("logsumexp", (x, x[:, :1].expand_as(x)), (1,))
    assert work.plan(launch.device_facts(0)).movement == "stream" and stream.CONFIGS[1].from_bytes


def test_sums_of_slices():
    dy, y = (random((40, 20001), torch.bfloat16, seed=seed) for seed in (1, 2))
    found = torch.empty(40, 1, dtype=torch.float32, device=y.device)
    work = "softmax_backward", (dy, y, found.expand(y.shape)), (1,)
    launch.run(*work, prologue=Prologue(state="alone"))
    right = (dy.double() * y.double()).sum(-1)
    assert torch.allclose(found[:, 0].double(), right, rtol=1e-5, atol=1e-3)


def test_many_long_pairs(monkeypatch):
    monkeypatch.undo()
    x, t = (random((1200, 100_000), torch.bfloat16, seed=seed, scale=3.0) for seed in (4, 5))
    pair = streams.Pair("loss", x, t)
    assert pair.kernel().movement == "stream"
    found, right = pair.launched(), streams.Pair("loss", x[-64:], t[-64:]).expected()
    assert torch.allclose(found[-64:].double(), right, rtol=1e-6)


def test_many_long_rows():
    x = random((1200, 100_000), torch.bfloat16, seed=4, scale=3.0)
    found = cute_softmax.entropy(x, -1)
    logs = torch.log_softmax(x[:64].double(), -1)
    right = -(logs.exp() * logs).sum(-1)
    assert torch.allclose(found[:64].double(), right, rtol=2.0**-7)
